"""Share of patch embedding, token mixer and FFN in a backbone's latency.

The paper's figure 3: by default for the Swin family, vanilla and merged.
"""

from repa_mm import config_path
from repa_mm.benchmark.latency import Options
from repa_mm.benchmark.output import add_machine_options, run_tool
from repa_mm.benchmark.plots import plot_profile
from repa_mm.benchmark.profile import profile
from repa_mm.benchmark.tables import profile_text
from repa_mm.run.cli import tool_parser

SWIN = [f'{prefix}swin_{size}_in1k.py' for size in 'tsb' for prefix in ('', 'repa_')]
EXAMPLES = """examples:
  %(prog)s --plot figure3.png
  %(prog)s configs/swin_b_in1k.py configs/repa_swin_b_in1k.py \\
      --forms training deploy --size 800x1344 --num-images 10
"""


def parse_args() -> dict:
    parser = tool_parser(__doc__, EXAMPLES)
    parser.add_argument(
        'configs', nargs='*', help='of vanilla or RePa models (default: Swin-T, S and B, of both)'
    )
    parser.add_argument(
        '--forms',
        nargs='+',
        choices=('training', 'deploy'),
        default=['deploy'],
        help='of the RePa models (deploy)',
    )
    parser.add_argument('--size', dest='synthetic', metavar='HxW', default='224x224')
    parser.add_argument('--batch-size', type=int, default=1)
    parser.add_argument(
        '--num-images', type=int, default=30, help='batches to measure (%(default)s)'
    )
    parser.add_argument('--warmup', type=int, default=5, help='batches before those (%(default)s)')
    add_machine_options(parser)
    parser.add_argument('--out', metavar='FILE.json', help='everything')
    parser.add_argument('--plot', metavar='FILE.png')
    return vars(parser.parse_args())


def main() -> None:
    args = parse_args()
    out, plot, configs = (args.pop(key) for key in ('out', 'plot', 'configs'))
    arguments = dict(configs=configs or list(map(config_path, SWIN)), forms=args.pop('forms'))
    arguments['options'] = Options(**args)
    run_tool(profile, arguments, profile_text, out, plot, plot_profile, inputs=configs)


if __name__ == '__main__':
    main()
