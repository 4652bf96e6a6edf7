"""Convert a checkpoint of RePaFormer's authors, or a vanilla one.

A checkpoint of the authors' code (RePaViT), in either form, becomes one that computes the same. A
vanilla Swin, ViT, DeiT or LV-ViT, in the layout of its own repository, of timm or of OpenMMLab,
becomes a start for training. See docs/weights.md.
"""

from repa_mm.run.cli import clear_errors, tool_parser
from repa_mm.weights.layout_report import describe
from repa_mm.weights.layouts import repavit_to_mm


def parse_args() -> dict:
    parser = tool_parser(__doc__)
    parser.add_argument('src', help='checkpoint to convert')
    parser.add_argument('dst', help='file to write')
    parser.add_argument(
        '--config',
        help='config whose backbone the result is for (default: the shapes tell the backbone)',
    )
    parser.add_argument(
        '--ema',
        action='store_true',
        help="take the averaged weights ('model_ema'); the authors evaluate "
        "'model', which is the default",
    )
    parser.add_argument(
        '--idle-ratio',
        type=float,
        nargs='+',
        help='of a training form: one, or one per FFN (default: what the checkpoint tells)',
    )
    parser.add_argument(
        '--backbone-only',
        action='store_true',
        help='leave out the neck and the heads of a detector or segmentor',
    )
    return vars(parser.parse_args())


def main() -> None:
    args = parse_args()
    with clear_errors():
        done = repavit_to_mm(**args)
    print('\n'.join(describe(done)))
    print(f'wrote {args["dst"]}')


if __name__ == '__main__':
    main()
