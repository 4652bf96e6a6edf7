"""Write the demo data set: handwritten digits on photographs, in COCO's and ADE20K's layout."""

import argparse
import time

from repa_mm.demo.dataset import write_digit_scenes
from repa_mm.run.cli import clear_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument('--root', default='data/demo', help='folder of the set')
    parser.add_argument('--num-train', type=int, default=1200, help='number of training scenes')
    parser.add_argument('--num-val', type=int, default=200, help='number of validation scenes')
    parser.add_argument('--size', type=int, default=160, help='width and height of a scene')
    parser.add_argument('--seed', type=int, default=0, help='seed of the random numbers')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start = time.perf_counter()
    with clear_errors():
        written = write_digit_scenes(**vars(args))
    if written:
        print(
            f'Wrote {args.num_train} training and {args.num_val} validation scenes to '
            f'{args.root} in {time.perf_counter() - start:.1f} s.'
        )
    else:
        print(f'{args.root} already has these scenes.')


if __name__ == '__main__':
    main()
