"""Measure the latency of a model, in turn with a baseline and exported files, in one process.

A RePa model is reparameterized first. With --baseline, the stock model runs as it is and with our
attention and heads, so that the table shows how much of the gain is due to these parts. Images are
noise of one size, or with --dataset those of the config's test data. Without a checkpoint, weights
are random.
"""

import argparse

import torch

from repa_mm.benchmark.latency import show_latency
from repa_mm.config import readable_errors, tool_parser

EXAMPLES = """examples:
  %(prog)s configs/retinanet_repa_swin_b.py --baseline configs/retinanet_swin_b.py
  %(prog)s configs/repa_swin_b_in1k.py --baseline configs/swin_b_in1k.py \\
      --part backbone --input-shape 224 224 --batch-size 8
  %(prog)s configs/upernet_repa_swin_b.py --baseline configs/upernet_swin_b.py --amp float16
  %(prog)s configs/mask_rcnn_repa_swin_t.py CHECKPOINT --baseline configs/mask_rcnn_swin_t.py \\
      --dataset 100
  %(prog)s narrow.py narrow.pth --exported narrow.onnx narrow_int8.xml narrow.onnx:bf16
"""


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__, epilog=EXAMPLES)
    parser.add_argument('checkpoint', nargs='?', help='checkpoint of the model, in either form')
    parser.add_argument(
        '--baseline', metavar='CONFIG', help='config of the stock model, with random weights'
    )
    parser.add_argument(
        '--part',
        choices=('predict', 'backbone'),
        default='predict',
        help='the whole model with post-processing, or its backbone (%(default)s)',
    )
    parser.add_argument(
        '--exported',
        nargs='+',
        default=[],
        metavar='FILE[:TYPE]',
        help='also run exported files: .onnx with ONNX Runtime, .xml with OpenVINO; with :f32 or '
        ':bf16, OpenVINO runs either file in this type',
    )
    parser.add_argument(
        '--dataset',
        type=int,
        nargs='?',
        const=50,
        metavar='N',
        help="run N images (%(const)s) spread over the config's test data, each once and at its "
        'own size, with preprocessing and post-processing',
    )
    parser.add_argument('--images', help='with --dataset: a folder of images instead')
    parser.add_argument(
        '--input-shape',
        type=int,
        nargs=2,
        default=[800, 1344],
        metavar=('HEIGHT', 'WIDTH'),
        help='size of the images (800 1344)',
    )
    parser.add_argument('--batch-size', type=int, default=1)
    parser.add_argument('--repeats', type=int, default=10, help='number of turns (%(default)s)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument(
        '--amp',
        choices=('float16', 'bfloat16'),
        help='run PyTorch under autocast to this type, as a test with `test_cfg.fp16=True` does',
    )
    parser.add_argument(
        '--compile', action='store_true', help='also run each model with torch.compile'
    )
    args = parser.parse_args()
    if args.dataset and (args.part != 'predict' or args.batch_size != 1):
        parser.error('--dataset runs whole models on one image at a time')
    if args.images and not args.dataset:
        parser.error('--images is a folder for --dataset: give both')
    return args


def main() -> None:
    args = parse_args()
    with readable_errors():
        show_latency(**vars(args))


if __name__ == '__main__':
    main()
