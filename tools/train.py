"""Train a detector, segmentor or classifier."""

import argparse

from repa_mm.files import naming_full_disk
from repa_mm.run import end_process, runner_for_training
from repa_mm.run.cli import clear_errors, parse_runner_args


def parse_args() -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument('--work-dir', help='folder for logs and checkpoints')
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision (GPU)')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='checkpoint to resume from; without one, the latest in the work dir',
    )
    parser.add_argument(
        '--from-scratch', action='store_true', help='train without pretrained weights'
    )
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate with the total batch size',
    )
    return parse_runner_args(parser)


def main() -> None:
    args = parse_args()
    with clear_errors():
        runner = runner_for_training(**args)
    with clear_errors(logger=runner.logger), naming_full_disk(runner.work_dir):
        runner.train()
    end_process()


if __name__ == '__main__':
    main()
