"""Time and memory of a training step, by the training path.

Of a channel-idle FFN, the literal path computes every hidden channel, as the paper's equation has
it; the folded one leaves out the idle ones, and gives the same numbers. The paths and the vanilla
model take turns on every step.
"""

import argparse

import torch

from repa_mm.benchmark.machine import AMP_DTYPES
from repa_mm.benchmark.output import run_tool
from repa_mm.benchmark.tables import training_text
from repa_mm.benchmark.training import OPTIMIZERS, benchmark_training
from repa_mm.runtime.cli import DictAction

EXAMPLES = """examples:
  %(prog)s configs/repa_swin_b_in1k.py --baseline configs/swin_b_in1k.py
  %(prog)s configs/retinanet_repa_swin_b.py \\
      --baseline configs/retinanet_swin_b.py --size 800x1056 --batch-size 1 \\
      --cfg-options model.backbone.norm_eval=False
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config of the RePa model')
    parser.add_argument('--baseline', metavar='CONFIG', help='of the vanilla counterpart')
    parser.add_argument(
        '--whole',
        action='store_true',
        help='the whole model, on synthetic targets, instead of its backbone',
    )
    parser.add_argument('--size', metavar='HxW', default='224x224')
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument(
        '--optimizer',
        choices=tuple(OPTIMIZERS),
        default='adamw',
        help='none for forward and backward alone (%(default)s)',
    )
    parser.add_argument(
        '--paths',
        nargs='+',
        help='training paths: of a channel-idle FFN literal, folded and auto, which chooses by '
        'shape and is what a training does (all)',
    )
    parser.add_argument('--steps', type=int, default=20, help='to measure (%(default)s)')
    parser.add_argument('--warmup', type=int, default=3, help='before those (%(default)s)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--threads', type=int, help='threads of the CPU')
    parser.add_argument('--amp', choices=tuple(AMP_DTYPES))
    parser.add_argument(
        '--tf32', action='store_true', help='let float32 products use TF32 (off by default)'
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        help='override values of the RePa config: key=value ...',
    )
    parser.add_argument('--out', metavar='FILE.json', help='everything')
    return parser.parse_args()


def main() -> None:
    args = vars(parse_args())
    inputs = args['config'], args['baseline']
    run_tool(benchmark_training, args, training_text, args.pop('out'), inputs=inputs)


if __name__ == '__main__':
    main()
