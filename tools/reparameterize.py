"""Write the merged checkpoint of a trained model, and check it."""

import argparse

from repa_mm.run import reparameterize_checkpoint
from repa_mm.run.cli import clear_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of the training form')
    parser.add_argument('checkpoint', help='checkpoint to merge')
    parser.add_argument('out', help='file to write')
    parser.add_argument(
        '--tolerance',
        type=float,
        default=1e-4,
        help='largest relative difference of features to accept',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with clear_errors():
        result = reparameterize_checkpoint(**vars(args))
    print(f'largest difference of features: {result["error"]:.1e} of the largest feature')
    for name, scale, unit in (
        ('parameters', 1e6, 'M'),
        ('macs', 1e9, 'G (backbone, {}x{})'.format(*result['size'])),
        ('bytes', 2**20, 'MiB'),
    ):
        before, after = (value / scale for value in result[name])
        print(f'{name:>10}: {before:8.2f} -> {after:8.2f} {unit}')
    print(f'wrote {args.out}; load it with deploy=True')


if __name__ == '__main__':
    main()
