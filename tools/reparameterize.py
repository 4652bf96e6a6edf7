"""Reparameterize a checkpoint, and write the result only if both forms agree."""

import argparse

from repa_mm.apis.merge_checkpoint import reparameterize_checkpoint
from repa_mm.io.command_line import readable_errors, tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('checkpoint', help='checkpoint in the training form')
    parser.add_argument('out', help='file to write')
    parser.add_argument(
        '--tolerance', type=float, default=1e-4, help='relative, of the features (%(default)s)'
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with readable_errors():
        result = reparameterize_checkpoint(**vars(args))
    before, after = (count / 1e6 for count in result['parameters'])
    print(f'largest difference of the features: {result["error"]:.1e} of the largest feature')
    print(f'parameters: {before:.2f} M -> {after:.2f} M')
    print(f'wrote {args.out}; load it with deploy=True')


if __name__ == '__main__':
    main()
