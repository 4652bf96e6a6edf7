"""Test an exported whole model on the data set of a config."""

import argparse

from repa_mm.export.exported import runner_for_exported
from repa_mm.files import naming_full_disk
from repa_mm.run.cli import clear_errors, parse_runner_args


def parse_args() -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config that was exported')
    parser.add_argument(
        'file', help='the model: .onnx (ONNX Runtime) or .xml (OpenVINO), on the CPU'
    )
    parser.add_argument('--work-dir', help='folder for the metrics')
    parser.add_argument(
        '--precision',
        choices=('f32', 'bf16'),
        help="what OpenVINO computes in; by default OpenVINO's choice",
    )
    return parse_runner_args(parser)


def main() -> None:
    args = parse_args()
    with clear_errors():
        runner = runner_for_exported(**args)
    with clear_errors(logger=runner.logger), naming_full_disk(runner.work_dir):
        runner.test()


if __name__ == '__main__':
    main()
