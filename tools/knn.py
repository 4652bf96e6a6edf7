"""Evaluate the features of a backbone by a weighted vote of nearest neighbours."""

import argparse

from mmengine import DictAction
from mmengine.device import get_device

from repa_mm.run.knn import knn_evaluate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of any config with a backbone')
    parser.add_argument('checkpoint', nargs='?', help='(default: random weights)')
    parser.add_argument('--k', type=int, nargs='+', default=[10, 20, 100, 200], help='neighbours')
    parser.add_argument(
        '--data', help="folder with train/CLASS/ and val/CLASS/ (default: the config's data sets)"
    )
    parser.add_argument(
        '--network', choices=['teacher', 'student'], default='teacher', help='of DINO'
    )
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--device', default=get_device())
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='key=value ...')
    return parser.parse_args()


def main() -> None:
    for k, percent in knn_evaluate(**vars(parse_args())).items():
        print(f'{k:4d} neighbours: {percent:.2f} %')


if __name__ == '__main__':
    main()
