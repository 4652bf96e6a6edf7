"""Translate the backbone in a checkpoint of the code of DINO's authors, for a config here.

The backbone is a ViT (config vit_s_dino.py, for example) or a RePa-ViT of RePaFormer's authors.
Checkpoints that were trained here need no translation.
"""

import argparse

from mmengine import DictAction

from repa_mm.io.configs import load_config
from repa_mm.io.layouts import translate_file


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config with the backbone that the result is for')
    parser.add_argument('src', help='checkpoint to translate')
    parser.add_argument('dst', help='file to write')
    parser.add_argument('--network', choices=['teacher', 'student'], default='teacher')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='changes of the config')
    args = parser.parse_args()
    cfg = load_config(args.config, args.cfg_options)
    translate_file(args.src, args.dst, cfg.model.backbone, args.network)
    print(f'wrote {args.dst}, the backbone of the {args.network}')


if __name__ == '__main__':
    main()
