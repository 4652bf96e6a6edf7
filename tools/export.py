"""Export a whole detector, segmentor or classifier, or a backbone, to ONNX.

The exported model is compared with PyTorch, and written only if they agree. Its inputs and outputs
are in docs/deploy.md.
"""

import argparse

from mmengine.config import DictAction

from repa_mm.config import readable_errors
from repa_mm.export.export import export_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help="the model's config: a path, or mmdet::swin/….py")
    parser.add_argument('checkpoint', help='checkpoint in either form')
    parser.add_argument('out', help='file to write, .onnx')
    parser.add_argument(
        '--backbone',
        action='store_true',
        help='export the backbone only; for classifiers, up to the logits',
    )
    parser.add_argument(
        '--preprocessing',
        action='store_true',
        help='take images of type uint8, (B, H, W, 3), as OpenCV reads them, and normalize them in '
        'the graph (whole models only)',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('HEIGHT', 'WIDTH'),
        help='size of the images (default: 224 224); with --dynamic, size of the example (default: '
        'a size that suits the model)',
    )
    parser.add_argument(
        '--dynamic',
        action=argparse.BooleanOptionalAction,
        help='take any number of images of any size (default for whole models)',
    )
    parser.add_argument('--batch', type=int, default=1, help='number of images (default: 1)')
    parser.add_argument(
        '--images', help="folder of images to compare on (default: the config's test data)"
    )
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, help='override the config: key=value ...'
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with readable_errors():
        what, error = export_checkpoint(**vars(args))
    unit = 'the largest feature' if args.backbone else 'objects, of pixels, or of a score'
    print(f'wrote {args.out}: {what}, differs from PyTorch by {error:.1e} of {unit}')


if __name__ == '__main__':
    main()
