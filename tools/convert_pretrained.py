"""Narrow the FFNs and heads of a trained detector, segmentor or classifier.

The FFNs of the backbone and encoder keep some of their hidden channels, the heads of the backbone's
attention some of their dimensions. They are fitted to their outputs on some images, without labels.
The tool writes a checkpoint and its config.
"""

import argparse
import time

from mmengine import DictAction

from repa_mm.config import readable_errors
from repa_mm.convert.pretrained import convert_checkpoint, result_text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help="the model's config: a path, or mmdet::swin/….py")
    parser.add_argument('checkpoint', help="the model's checkpoint: a path or a URL")
    parser.add_argument('out', help='checkpoint to write, ….pth; its config becomes ….py')
    parser.add_argument(
        '--keep',
        type=float,
        nargs='+',
        default=[0.375],
        help="share of the FFNs' hidden channels that stays: one for all blocks, or one per block "
        '(default: 0.375, the cost of channel-idle FFNs with an idle ratio of 0.75 where H = 4 C)',
    )
    for name, what in (('qk', 'queries and keys'), ('v', 'values')):
        parser.add_argument(
            f'--{name}-keep',
            type=lambda x: x if x == 'auto' else float(x),
            nargs='+',
            default=[1.0],
            help=f"share of each head's dimensions of {what} that stays: one for all blocks, one "
            "per block, or 'auto' (default: 1, all)",
        )
    parser.add_argument(
        '--budget',
        type=float,
        help='share of the multiply-adds of all blocks that stays, spread over channels and heads '
        'by what they are worth; instead of the shares above',
    )
    parser.add_argument('--where', help='module to narrow: backbone or encoder (default: both)')
    parser.add_argument('--num-images', type=int, default=64, help='images to fit to (default: 64)')
    parser.add_argument('--images', help="folder of images (default: the config's training data)")
    parser.add_argument(
        '--skip-unsupported', action='store_true', help='skip blocks whose FFN cannot be narrowed'
    )
    parser.add_argument('--device', help='device of the fit (default: the GPU if there is one)')
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, help='override the config: key=value ...'
    )
    return parser.parse_args()


def main() -> None:
    args = vars(parse_args())
    for name in ('keep', 'qk_keep', 'v_keep'):
        if len(args[name]) == 1:
            (args[name],) = args[name]

    started, done = time.monotonic(), 0

    def progress(row, number) -> None:
        nonlocal done
        done += 1
        left = (time.monotonic() - started) * (number - done) / done
        what = f'{row.unexplained:.2%} of the variance is unexplained'
        print(f'{done}/{number} {row.name}: {what}, {left / 60:.1f} min left', flush=True)

    with readable_errors():
        result = convert_checkpoint(**args, progress=progress)
    print(result_text(result, args['out']))


if __name__ == '__main__':
    main()
