"""Take the backbone out of a checkpoint of DINO, for other models to start from.

The checkpoint is ours or of DINO's authors. One of theirs is translated; a vanilla ViT of it
becomes a start for the training of a RePa-ViT. See docs/self_supervised.md.
"""

import argparse

from repa_mm.run.cli import clear_errors
from repa_mm.weights.layout_dino import NETWORKS, dino_to_mm
from repa_mm.weights.layout_report import describe


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('src', help='checkpoint to convert')
    parser.add_argument('dst', help='file to write')
    parser.add_argument('--network', choices=NETWORKS, default='teacher')
    parser.add_argument(
        '--config',
        help='config whose backbone the result is for (default: the shapes tell the backbone)',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with clear_errors():
        done = dino_to_mm(**vars(args))
    if done:
        print('\n'.join(describe(done)))
    print(f'wrote {args.dst}, the backbone of the {args.network}')


if __name__ == '__main__':
    main()
