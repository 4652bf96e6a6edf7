"""Evaluate the features of a backbone by a weighted vote of nearest neighbours."""

import argparse
from functools import partial

import torch

from repa_mm.benchmark.machine import check_device
from repa_mm.run import FORMS
from repa_mm.run.cli import DictAction, clear_errors, show_progress
from repa_mm.run.knn import NETWORKS, knn_evaluate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of any config with a backbone')
    parser.add_argument('checkpoint', nargs='?', help='(default: random weights)')
    parser.add_argument(
        '--form',
        choices=(*FORMS, 'pixels'),
        default='deploy',
        help='what is evaluated; pixels: the images themselves, as a yardstick (%(default)s)',
    )
    parser.add_argument('--k', type=int, nargs='+', default=[10, 20, 100, 200], help='neighbours')
    parser.add_argument('--temperature', type=float, default=0.07)
    parser.add_argument(
        '--data', help="folder with train/CLASS/ and val/CLASS/ (default: the config's data sets)"
    )
    parser.add_argument('--network', choices=NETWORKS, default='teacher', help='of DINO')
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='key=value ...')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with clear_errors():
        check_device(args.device)
        accuracy = knn_evaluate(**vars(args), progress=partial(show_progress, unit='images'))
    for k, percent in accuracy.items():
        print(f'{k:4d} neighbours: {percent:.2f} %')


if __name__ == '__main__':
    main()
