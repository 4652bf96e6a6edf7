"""Write a whole detector, segmentor or classifier as ONNX, or a backbone as ONNX, .pt2 or .pt."""

import argparse

from repa_mm.export.export import OPSET
from repa_mm.export.exported import export_checkpoint
from repa_mm.run import FORMS
from repa_mm.run.cli import clear_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='docs/deployment.md has inputs and outputs of what is written.'
    )
    parser.add_argument('config', help='config of the training form')
    parser.add_argument('checkpoint', help='checkpoint in either form')
    parser.add_argument(
        'out',
        help='file to write: .onnx; or .pt2 (torch.export) or .pt (TorchScript) for a backbone or '
        'the logits of a classifier',
    )
    parser.add_argument(
        '--backbone',
        action='store_true',
        help='only the backbone, of a classifier all up to the logits, also to .onnx',
    )
    parser.add_argument(
        '--preprocessing',
        action='store_true',
        help='of a whole model: images are of type uint8, (B, H, W, 3), as OpenCV reads them, and '
        'normalized in the graph',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('HEIGHT', 'WIDTH'),
        help='of images, 224 224 by default; with --dynamic an example, by default one that suits '
        'the model',
    )
    parser.add_argument(
        '--dynamic',
        action=argparse.BooleanOptionalAction,
        help='take any number of images of any size: the default for whole models',
    )
    parser.add_argument('--batch', type=int, default=1, help='number of images, 1 by default')
    parser.add_argument(
        '--opset', type=int, default=OPSET, help=f"version of ONNX's operators, {OPSET} by default"
    )
    parser.add_argument('--form', choices=FORMS, default='deploy')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with clear_errors():
        part, error = export_checkpoint(**vars(args))
    what = 'of the largest output'
    if part.startswith('whole'):
        what = 'of objects, of pixels, or of a score'
    print(f'wrote the {part} to {args.out}, which differs from PyTorch by {error:.1e} {what}')


if __name__ == '__main__':
    main()
