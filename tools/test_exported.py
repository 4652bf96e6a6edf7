"""Test an exported model on the test data of its config."""

import argparse

from repa_mm.export import runner_for_exported
from repa_mm.io.command_line import readable_errors, tool_parser
from repa_mm.io.configs import load_config


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('file', help='.onnx (for ONNX Runtime) or .xml (for OpenVINO), on the CPU')
    parser.add_argument('--work-dir', help='folder for the metrics')
    parser.add_argument('--precision', choices=('f32', 'bf16'), help='of OpenVINO, for either file')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with readable_errors():
        cfg = load_config(args.config, args.cfg_options)
        runner_for_exported(cfg, args.file, args.work_dir, args.precision).test()


if __name__ == '__main__':
    main()
