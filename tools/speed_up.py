"""Make a trained model faster on this machine, and measure what it costs.

The tool prints a table of candidates and formats with times and metrics, and writes it as
report.html and report.md. With a target, it writes the chosen model, too. It keeps what it fits and
measures in OUT_DIR, so that a second run with another target continues from there.
"""

import argparse
import sys

from repa_mm import speed_up
from repa_mm.io.command_line import readable_errors, tool_parser

EXAMPLES = """examples:
  %(prog)s CONFIG CHECKPOINT OUT_DIR                  the table
  %(prog)s CONFIG CHECKPOINT OUT_DIR --max-loss 0.5   the fastest that loses at most 0.5 points
  %(prog)s CONFIG CHECKPOINT OUT_DIR --latency 0.4    40 %% of the time, with the least loss
"""


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__, epilog=EXAMPLES)
    parser.add_argument('checkpoint', help="the model's checkpoint: a path or a URL")
    parser.add_argument('out_dir', help='folder for the results')
    parser.add_argument(
        '--max-loss', type=float, metavar='POINTS', help='largest loss of the metric'
    )
    parser.add_argument(
        '--latency', type=float, metavar='RATIO', help="largest fraction of the original's time"
    )
    parser.add_argument(
        '--images', metavar='FOLDER', help='without annotations: tests agreement with the original'
    )
    parser.add_argument('--num-images', type=int, default=100, help='to test on (100); 0: no test')
    parser.add_argument(
        '--budgets', type=float, nargs='*', default=[0.85, 0.6, 0.4, 0.25],
        help="fractions of the blocks' multiply-adds to try (0.85 0.6 0.4 0.25)",
    )  # fmt: skip
    parser.add_argument(
        '--formats', nargs='+', default=[], metavar='NAME',
        help="parts of the names of the formats to try, such as OpenVINO or f32 (all)",
    )  # fmt: skip
    parser.add_argument('--fit-images', type=int, default=64, help='images to fit to (64)')
    parser.add_argument('--repeats', type=int, default=20, help='turns of timing (20)')
    parser.add_argument('--device', help='cpu, or a GPU such as cuda (default: a GPU if present)')
    parser.add_argument('--batch-size', type=int, default=1, help='images to time together (1)')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with readable_errors():
        rows = speed_up(**vars(args))
    has_target = args.max_loss is not None or args.latency is not None
    sys.exit(has_target and not any(row.chosen for row in rows))


if __name__ == '__main__':
    main()
