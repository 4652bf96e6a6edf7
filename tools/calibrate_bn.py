"""Estimate the BatchNorm statistics of a backbone's FFNs from data.

The weights stay. This serves checkpoints that were converted from vanilla ones, or whose data is
of another kind than what they were trained on. See docs/weights.md.
"""

from repa_mm.run import calibrate_checkpoint
from repa_mm.run.cli import add_cfg_options, clear_errors, tool_parser


def parse_args() -> dict:
    parser = tool_parser(__doc__)
    parser.add_argument('config', help='config of the training form')
    parser.add_argument('checkpoint', help='checkpoint with the weights of its backbone')
    parser.add_argument('out', help='file to write')
    parser.add_argument(
        '--split',
        choices=['train', 'val', 'test'],
        default='train',
        help="whose data and pipeline (default: 'train')",
    )
    parser.add_argument(
        '--num-batches', type=int, default=50, help='of the data loader of the config (default: 50)'
    )
    parser.add_argument('--device', help='default: a GPU, if there is one')
    add_cfg_options(parser)
    return vars(parser.parse_args())


def main() -> None:
    args = parse_args()
    with clear_errors():
        done = calibrate_checkpoint(**args)
    print(
        f'estimated the statistics of {done["ffns"]} FFNs from '
        f'{done["images"]} images in {done["batches"]} batches'
    )
    print(f'wrote {args["out"]}')


if __name__ == '__main__':
    main()
