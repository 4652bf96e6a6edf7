"""Draw what a model predicts on an image."""

import argparse

from repa_mm.benchmark.machine import check_device
from repa_mm.run import FORMS, draw_predictions, init_model
from repa_mm.run.cli import clear_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('image', help='path of the image')
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--out', default='prediction.png')
    parser.add_argument('--form', choices=FORMS, default='deploy')
    parser.add_argument('--device', default='cpu', help='cpu, cuda:0, ...')
    parser.add_argument('--score-thr', type=float, default=0.3, help='lowest score to draw')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with clear_errors():
        check_device(args.device)
        model = init_model(args.config, args.checkpoint, args.form, args.device)
        draw_predictions(model, args.image, args.out, args.score_thr)
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
