"""Convert a checkpoint of a RePa backbone for the code of RePaFormer's authors.

The checkpoint is of a classifier, in the training or the deploy form; of a detector or segmentor,
--backbone-only converts the backbone. See docs/weights.md.
"""

from repa_mm.run.cli import clear_errors, tool_parser
from repa_mm.weights.layout_report import describe
from repa_mm.weights.layouts import mm_to_repavit


def parse_args() -> dict:
    parser = tool_parser(__doc__)
    parser.add_argument('src', help='checkpoint to convert')
    parser.add_argument('dst', help='file to write')
    parser.add_argument(
        '--config', help="the checkpoint's config (default: the shapes tell the backbone)"
    )
    parser.add_argument(
        '--img-size',
        type=int,
        default=224,
        help='image size of the Swin that will load it, whose masks depend on it (default: 224)',
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
        done = mm_to_repavit(**args)
    print('\n'.join(describe(done)))
    print(f"wrote {args['dst']}, with the weights under 'model'")


if __name__ == '__main__':
    main()
