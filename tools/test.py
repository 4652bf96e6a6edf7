"""Test a checkpoint, in its deploy form or its training form."""

import argparse

from repa_mm.files import naming_full_disk
from repa_mm.run import FORMS, end_process, runner_for_testing
from repa_mm.run.cli import clear_errors, parse_runner_args


def parse_args() -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--work-dir', help='folder for the metrics')
    parser.add_argument(
        '--form',
        choices=FORMS,
        help='test the reparameterized model (deploy) or not (training); by '
        "default, what the config's hooks say: deploy in RePa configs",
    )
    parser.add_argument(
        '--out', help='.pkl file for the predictions (segmentation: or a folder for label maps)'
    )
    parser.add_argument('--show-dir', help='folder for painted images')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    return parse_runner_args(parser)


def main() -> None:
    args = parse_args()
    with clear_errors():
        runner = runner_for_testing(**args)
    with clear_errors(logger=runner.logger), naming_full_disk(runner.work_dir):
        runner.test()
    end_process()


if __name__ == '__main__':
    main()
