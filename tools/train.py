"""Train a detector, segmentor or classifier."""
import argparse
import os

from repa_mm.apis import end_process, runner_for_training
from repa_mm.utils.cli import DictAction, clear_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument('--work-dir', help='folder for logs and checkpoints')
    parser.add_argument(
        '--amp', action='store_true', help='automatic mixed precision (GPU)')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='checkpoint to resume from; without one, the latest in the work '
        'dir')
    parser.add_argument(
        '--from-scratch',
        action='store_true',
        help='train without pretrained weights')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate with the total batch size')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        help='override values of the config: key=value ...')
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return args


def main() -> None:
    args = vars(parse_args())
    del args['local_rank']
    with clear_errors():
        runner = runner_for_training(**args)
    with clear_errors(logger=runner.logger):
        runner.train()
    end_process()


if __name__ == '__main__':
    main()
