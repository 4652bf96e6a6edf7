"""Parameters and multiply-adds of a model, in its training and deploy form."""

from repa_mm.benchmark.flops import complexity
from repa_mm.benchmark.output import run_tool
from repa_mm.benchmark.paper import paper_table, paper_table_text
from repa_mm.benchmark.tables import complexity_text
from repa_mm.run.cli import add_cfg_options, clear_errors, tool_parser

EXAMPLES = """examples:
  %(prog)s configs/repa_swin_b_in1k.py
  %(prog)s configs/retinanet_repa_swin_b.py --shape 800 1344 \\
      --baseline configs/retinanet_swin_b.py
  %(prog)s configs/mask_rcnn_repa_swin_b.py --part backbone --shape 800 1344
  %(prog)s --paper-table
"""


def parse_args() -> dict:
    parser = tool_parser(__doc__, EXAMPLES)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('config', nargs='?', help='path of the config')
    what.add_argument(
        '--paper-table',
        action='store_true',
        help="every row of the paper's complexity tables beside ours",
    )
    parser.add_argument('--baseline', metavar='CONFIG', help='of the vanilla counterpart')
    parser.add_argument('--part', choices=('model', 'backbone'), default='model')
    parser.add_argument(
        '--shape',
        type=int,
        nargs='+',
        default=[224, 224],
        metavar=('HEIGHT', 'WIDTH'),
        help='of the image (224 224)',
    )
    add_cfg_options(parser)
    parser.add_argument('--out', metavar='FILE.json')
    return vars(parser.parse_args())


def main() -> None:
    args = parse_args()
    out = args.pop('out')
    if args.pop('paper_table'):
        with clear_errors():
            print(paper_table_text(paper_table()))
        return
    run_tool(complexity, args, complexity_text, out, inputs=[args['config'], args['baseline']])


if __name__ == '__main__':
    main()
