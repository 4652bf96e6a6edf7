"""Write a whole detector, segmentor or classifier with products of 8 bits, for OpenVINO.

The ranges of activations are those on some images: of the config's training data, or of a folder.
The layers that cost most stay in float; the tool prints them and what 8 bits in each of them cost.
"""

import argparse

from repa_mm.export.int8 import MAX_ERROR, quantize_checkpoint


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
        '--max-error',
        type=float,
        default=MAX_ERROR,
        metavar='SHARE',
        help='keep layers in float, those that cost most first, until the errors of the others add '
        f'up to this share of the outputs (default: {MAX_ERROR})',
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
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    errors, kept = quantize_checkpoint(**vars(args))
    for name in kept:
        print(f'{errors[name]:.1e}  {name}')
    print(f'wrote {args.out}: {len(kept)} of {len(errors)} layers stay in float')


if __name__ == '__main__':
    main()
