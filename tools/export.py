"""Export a whole detector, segmentor or classifier to ONNX.

The exported model is compared with PyTorch on images, and written only if they agree. Its inputs
and outputs are in docs/deploy.md.
"""

import argparse

from repa_mm.config import load_config, readable_errors, tool_parser
from repa_mm.export import NUM_IMAGES, agreeing_onnx
from repa_mm.files import write_bytes
from repa_mm.opening import open_model, read_images


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('checkpoint', help='checkpoint in either form')
    parser.add_argument('out', help='file to write, .onnx')
    parser.add_argument(
        '--preprocessing',
        action='store_true',
        help='take images of type uint8, (B, H, W, 3), as OpenCV reads them, and normalize them in '
        'the graph',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('HEIGHT', 'WIDTH'),
        help='the size of images that the file is fixed to (default: any)',
    )
    parser.add_argument(
        '--images', help="folder of images to compare on (default: the config's test data)"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with readable_errors():
        cfg = load_config(args.config, args.cfg_options)
        images = read_images(cfg, 'test', NUM_IMAGES, args.images)
        model = open_model(cfg, args.checkpoint, merge=True)
        content, error = agreeing_onnx(model, images, args.shape, args.preprocessing)
        write_bytes(args.out, content)
    print(
        f'wrote {args.out}: {type(model).__name__}, differs from PyTorch by {error:.1e} of '
        f'objects, of pixels, or of a score on {len(images)} images'
    )


if __name__ == '__main__':
    main()
