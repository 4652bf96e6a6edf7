"""Estimate the BatchNorm statistics of a backbone's training forms from data; the weights stay."""

import argparse

from mmengine import DictAction
from mmengine.device import get_device

from repa_mm.merging import calibrate_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of the training form')
    parser.add_argument('checkpoint', help='checkpoint with the weights of its backbone')
    parser.add_argument('out', help='file to write')
    parser.add_argument(
        '--split',
        choices=['train', 'val', 'test'],
        default='train',
        help='whose data and pipeline (default: %(default)s)',
    )
    parser.add_argument(
        '--num-batches',
        type=int,
        default=50,
        help="of the config's data loader (default: %(default)s)",
    )
    parser.add_argument('--device', default=get_device())
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='key=value ...')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    done = calibrate_checkpoint(**vars(args))
    print(
        f'estimated the statistics of {done["forms"]} training forms from '
        f'{done["images"]} images in {done["batches"]} batches'
    )
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
