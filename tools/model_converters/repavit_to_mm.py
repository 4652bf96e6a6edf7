"""Translate a checkpoint of the RePaFormer authors' code to a config of this package.

The checkpoint may have the training form or the deploy form. The result computes the same. See
docs/train.md.
"""

import argparse

from repa_mm.io.command_line import readable_errors, tool_parser
from repa_mm.io.configs import load_config
from repa_mm.io.layouts import translate_file


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('src', help='checkpoint to translate')
    parser.add_argument('dst', help='file to write')
    parser.add_argument('--ema', action='store_true', help='take the EMA weights')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    keys = ('model_ema', 'state_dict_ema') if args.ema else ('model', 'state_dict')
    with readable_errors():
        cfg = load_config(args.config, args.cfg_options)
        translate_file(args.src, args.dst, cfg.model.backbone, *keys)
    print(f'wrote {args.dst}')


if __name__ == '__main__':
    main()
