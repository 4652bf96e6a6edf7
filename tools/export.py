"""Export a whole detector, segmentor or classifier to ONNX.

The exported model is compared with PyTorch on images, and written only if they agree. Its inputs
and outputs are in docs/deploy.md.
"""

import argparse

from repa_mm.apis import open_model, read_images
from repa_mm.export import NUM_IMAGES, Session, agreeing_onnx
from repa_mm.export.exporter import MAX_ERROR
from repa_mm.io.command_line import readable_errors, tool_parser
from repa_mm.io.configs import load_config
from repa_mm.io.files import write_bytes


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('checkpoint', help='checkpoint in either form')
    parser.add_argument('out', help='file to write, .onnx')
    parser.add_argument(
        '--shape', type=int, nargs=2, metavar=('HEIGHT', 'WIDTH'), help='size of the example, or '
        'with --no-dynamic of the images (224 224)',
    )  # fmt: skip
    parser.add_argument(
        '--dynamic', action=argparse.BooleanOptionalAction, default=True,
        help='accept images of any size and number (default), or not',
    )  # fmt: skip
    parser.add_argument('--batch', type=int, default=1, help='number of images (default: 1)')
    parser.add_argument('--images', help='folder to compare on (default: the test data)')
    parser.add_argument('--unchecked', action='store_true', help='compare on noise, and note it')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with readable_errors():
        if not args.out.endswith('.onnx'):
            raise ValueError(f'{args.out!r} must end with .onnx')
        cfg = load_config(args.config, args.cfg_options)
        images = None if args.unchecked else read_images(cfg, 'test', NUM_IMAGES, args.images)
        model = open_model(cfg, args.checkpoint, merge=True)
        content, error = agreeing_onnx(model, images, args.shape, args.dynamic, args.batch)
        write_bytes(args.out, content)
    on = 'noise' if args.unchecked else f'{len(images)} images'
    share = MAX_ERROR[Session(content).metadata['task']][1]
    share = share.replace('the', f'{error.of}')  # objects or pixels
    difference = f'{error:.1e} {share}, on {on}'
    print(f'wrote {args.out}: {type(model).__name__}, differs from PyTorch by {difference}')


if __name__ == '__main__':
    main()
