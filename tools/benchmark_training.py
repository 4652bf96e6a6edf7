"""Time and memory of a training step, by the training path.

Of a channel-idle FFN, the literal path computes every hidden channel, as the paper's equation has
it; the folded one leaves out the idle ones, and gives the same numbers. The paths and the vanilla
model take turns on every step.
"""

from repa_mm.benchmark.output import add_machine_options, run_tool
from repa_mm.benchmark.tables import training_text
from repa_mm.benchmark.training import OPTIMIZERS, benchmark_training
from repa_mm.run.cli import add_cfg_options, tool_parser

EXAMPLES = """examples:
  %(prog)s configs/repa_swin_b_in1k.py --baseline configs/swin_b_in1k.py
  %(prog)s configs/retinanet_repa_swin_b.py \\
      --baseline configs/retinanet_swin_b.py --size 800x1056 --batch-size 1 \\
      --cfg-options model.backbone.norm_eval=False
"""


def parse_args() -> dict:
    parser = tool_parser(__doc__, EXAMPLES)
    parser.add_argument('config', help='config of the RePa model')
    parser.add_argument('--baseline', metavar='CONFIG', help='of the vanilla counterpart')
    parser.add_argument(
        '--whole',
        action='store_true',
        help='the whole model, on synthetic targets, instead of its backbone',
    )
    parser.add_argument('--size', metavar='HxW', default='224x224')
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument(
        '--optimizer',
        choices=tuple(OPTIMIZERS),
        default='adamw',
        help='none for forward and backward alone (%(default)s)',
    )
    parser.add_argument(
        '--paths',
        nargs='+',
        help='training paths: of a channel-idle FFN literal, folded and auto, which chooses by '
        'shape and is what a training does (all)',
    )
    parser.add_argument('--steps', type=int, default=20, help='to measure (%(default)s)')
    parser.add_argument('--warmup', type=int, default=3, help='before those (%(default)s)')
    add_machine_options(parser, amp=True)
    add_cfg_options(parser)
    parser.add_argument('--out', metavar='FILE.json', help='everything')
    return vars(parser.parse_args())


def main() -> None:
    args = parse_args()
    inputs = args['config'], args['baseline']
    run_tool(benchmark_training, args, training_text, args.pop('out'), inputs=inputs)


if __name__ == '__main__':
    main()
