"""Draw what the class token of a vision transformer attends to in its last block."""

import argparse

from repa_mm.benchmark.machine import check_device
from repa_mm.runtime import FORMS, init_any_model
from repa_mm.runtime.attention import draw_attention
from repa_mm.runtime.cli import clear_errors
from repa_mm.runtime.knn import NETWORKS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('image', help='path of the image')
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--out', default='attention.png')
    parser.add_argument('--form', choices=FORMS, default='deploy')
    parser.add_argument('--network', choices=NETWORKS, default='teacher', help='of DINO')
    parser.add_argument('--size', type=int, default=480, help='side in pixels (%(default)s)')
    parser.add_argument('--device', default='cpu', help='cpu, cuda:0, ...')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with clear_errors():
        check_device(args.device)
        model = init_any_model(args.config, args.checkpoint, args.form, args.device)
        draw_attention(model, args.image, args.out, args.size, args.network)
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
