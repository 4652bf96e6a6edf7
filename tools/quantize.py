"""Write a whole detector, segmentor or classifier with products of 8 bits, for OpenVINO.

The ranges of activations are those on some images: of the config's training data, or of a folder.
The tool prints what 8 bits in one layer alone cost, and keeps the layers that cost most in float.
"""

import argparse
from functools import partial

from repa_mm.run.cli import align, clear_errors, show_progress


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config of the training form')
    parser.add_argument('checkpoint', help='checkpoint in either form')
    parser.add_argument('out', help='file to write: .xml, with its weights in .bin')
    parser.add_argument('--num-images', type=int, default=64, help='to calibrate on (default: 64)')
    parser.add_argument('--images', help="folder of images (default: the config's training data)")
    parser.add_argument(
        '--shortcut',
        choices=('outside', 'inside'),
        default='outside',
        help='where merged FFNs add their shortcut (default: outside)',
    )
    parser.add_argument(
        '--max-error',
        type=float,
        default=2e-3,
        metavar='SHARE',
        help='keep layers in float, those that cost most first, until the errors of the others add '
        'up to this share of the outputs (default: 2e-3)',
    )
    parser.add_argument(
        '--preprocessing',
        action='store_true',
        help='images are of type uint8, (B, H, W, 3), as OpenCV reads them',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('HEIGHT', 'WIDTH'),
        help='the size of images that the file is fixed to, which is faster (default: any)',
    )
    parser.add_argument('--batch', type=int, default=1, help='of a fixed shape (default: 1)')
    parser.add_argument(
        '--rows', type=int, default=20, help='rows of the table to print (default: 20)'
    )
    return parser.parse_args()


def main() -> None:
    args = vars(parse_args())
    rows = args.pop('rows')
    with clear_errors():
        from repa_mm.export.quantization import quantize_checkpoint

        result = quantize_checkpoint(**args, progress=partial(show_progress, unit='layers'))
    table = [('layer', 'error', 'computes in')]
    for name, error in list(result['errors'].items())[:rows]:
        table.append((name, f'{error:.1e}', 'float' if name in result['kept'] else 'int8'))
    print('\n'.join(align(table)))
    print(
        f'wrote {args["out"]}: calibrated on {result["images"]} images, {len(result["kept"])} of '
        f'{len(result["errors"])} layers in float'
    )


if __name__ == '__main__':
    main()
