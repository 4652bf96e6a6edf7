"""Narrow the FFNs and heads of a trained detector, segmentor or classifier.

The FFNs of the backbone and encoder keep some of their hidden channels, the heads of the backbone's
attention some of their dimensions. They are fitted to their outputs on some images, without labels.
The tool writes a checkpoint and its config.
"""

import argparse
import itertools

from repa_mm.convert.conversion import PARTS
from repa_mm.convert.pretrained import convert_checkpoint
from repa_mm.io.command_line import readable_errors, tool_parser
from repa_mm.measure.timing import duration


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('checkpoint', help="the model's checkpoint: a path or a URL")
    parser.add_argument('out', help='checkpoint to write, ….pth; its config becomes ….py')
    parser.add_argument('--budget', type=float, help='share of multiply-adds that stays (0.5)')
    parser.add_argument('--parts', choices=PARTS, nargs='+', help='narrowed parts (default: all)')
    parser.add_argument(
        '--idle-ratio', type=float, help='instead of a budget: make FFNs channel-idle; the share '
        'of channels that skip the activation, such as 0.75',
    )  # fmt: skip
    parser.add_argument('--where', help='module to narrow: backbone or encoder (default: both)')
    parser.add_argument(
        '--num-images', type=int, default=64,
        help='images to fit to (64), and one more for every eight to test on',
    )  # fmt: skip
    parser.add_argument('--images', help="folder of images (default: the config's training data)")
    parser.add_argument('--device', help='device of the fit (default: the GPU if there is one)')
    return parser.parse_args()


def main() -> None:
    args, steps = vars(parse_args()), itertools.count(1)

    def progress(part, number: int, seconds: float) -> None:
        what = f'{part.unexplained:.2%} of the variance is unexplained'
        left = f'about {duration(seconds)} left'
        print(f'{next(steps)}/{number} {part.name}: {what}, {left}', flush=True)

    with readable_errors():
        result = convert_checkpoint(**args, progress=progress)
    print(result['report'])
    print(f'fitted on {result["images"]} images, {result["held_out"]} held out')
    print(f'wrote {args["out"]} and {result["config"]}')


if __name__ == '__main__':
    main()
