"""Measure the latency of a model, in turn with a baseline and exported files, in one process.

A RePa model is reparameterized first. With --baseline, the stock model runs as it is and with our
attention and heads, so that the table shows how much of the gain is due to these parts. Images are
noise of one size, or with --dataset those of the config's test data. Without checkpoints, weights
are random.
"""

import argparse

import torch
from mmengine.logging import MMLogger

from repa_mm.apis import read_images
from repa_mm.apis.features import check_same
from repa_mm.export import ExportedModel
from repa_mm.faster import cuda_graphs_, faster_on_gpu_
from repa_mm.io.command_line import readable_errors, tool_parser
from repa_mm.io.configs import load_config
from repa_mm.measure.latency import latency_rows
from repa_mm.measure.timing import measure, show, show_machine
from repa_mm.measure.variants import (
    OURS,
    STOCK,
    autocasting,
    calls_on,
    compile_,
    noise_of_size,
    variants,
)
from repa_mm.surgery import copied

EXAMPLES = """examples:
  %(prog)s configs/retinanet_repa_swin_b.py --baseline configs/retinanet_swin_b.py
  %(prog)s configs/repa_swin_b_in1k.py --baseline configs/swin_b_in1k.py \\
      --part backbone --input-shape 224 224 --batch-size 8
  %(prog)s configs/upernet_repa_swin_b.py --baseline configs/upernet_swin_b.py --amp float16
  %(prog)s configs/mask_rcnn_repa_swin_t.py CHECKPOINT \\
      --baseline configs/mask_rcnn_swin_t.py --baseline-checkpoint CHECKPOINT --dataset 100
  %(prog)s narrow.py narrow.pth --exported narrow.onnx narrow_int8.xml narrow.onnx:bf16
"""


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__, epilog=EXAMPLES)
    parser.add_argument('checkpoint', nargs='?', help='checkpoint of the model, in either form')
    parser.add_argument('--baseline', metavar='CONFIG', help='config of the stock model')
    parser.add_argument('--baseline-checkpoint', metavar='FILE', help='its checkpoint')
    parser.add_argument(
        '--part', choices=('model', 'backbone'), default='model',
        help='the whole model or its backbone (%(default)s)',
    )  # fmt: skip
    parser.add_argument(
        '--exported', nargs='+', default=[], metavar='FILE[:TYPE]', help='also run .onnx with ONNX '
        'Runtime, .xml with OpenVINO, either with OpenVINO in :f32 or :bf16',
    )  # fmt: skip
    parser.add_argument(
        '--dataset', type=int, nargs='?', const=50, metavar='N', help='run N images (50) spread '
        'over the test data, each once and at its own size',
    )  # fmt: skip
    parser.add_argument('--images', help='with --dataset: a folder of images instead')
    parser.add_argument(
        '--input-shape', type=int, nargs=2, default=[800, 1344], metavar=('HEIGHT', 'WIDTH'),
        help='size of the images (800 1344)',
    )  # fmt: skip
    parser.add_argument('--batch-size', type=int, default=1, help='images at a time (%(default)s)')
    parser.add_argument('--repeats', type=int, default=10, help='number of turns (%(default)s)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--amp', choices=('float16', 'bfloat16'), help='type of autocast')
    parser.add_argument('--compile', action='store_true', help='also with torch.compile')
    parser.add_argument('--cuda-graphs', action='store_true', help='also with CUDA graphs')
    args = parser.parse_args()
    if args.dataset and (args.part == 'backbone' or args.batch_size != 1):
        parser.error('--dataset runs whole models on one image at a time')
    if args.images and not args.dataset:
        parser.error('--images is a folder for --dataset: give both')
    if args.baseline_checkpoint and not args.baseline:
        parser.error('--baseline-checkpoint is for the model of --baseline: give both')
    if args.exported and args.part == 'backbone':
        parser.error('--exported runs whole models: leave out --part backbone')
    return args


@torch.no_grad()
def main() -> None:
    args = parse_args()
    if torch.device(args.device).type == 'cuda':
        torch.cuda.set_device(args.device)  # which is waited for when models are timed
    show_machine()
    MMLogger.get_current_instance().setLevel('WARNING')  # hides where weights come from
    with readable_errors():
        cfg = load_config(args.config, args.cfg_options)
        baseline = load_config(args.baseline) if args.baseline else None
        models = variants(cfg, args.checkpoint, baseline, args.baseline_checkpoint)
        *_, own = models.values()  # of the config, which files are of
        if args.dataset:
            batches = read_images(cfg, 'test', args.dataset, args.images)
            repeats, on = len(batches), f'{len(batches)} images of {args.images or "the test data"}'
        else:
            batches = [noise_of_size(own, args.input_shape, args.batch_size)]
            repeats, sizes = args.repeats, (args.batch_size, *batches[0]['inputs'][0].shape)
            on = f'{args.part}, {"x".join(map(str, sizes))}'
        if OURS in models:
            image = {key: values[:1] for key, values in batches[0].items()}
            check_same(models[OURS], models[STOCK], image, OURS)
        for name, model in models.items():
            model.to(args.device)
            if name != STOCK:
                faster_on_gpu_(model)
        ways = {'compiled': compile_} if args.compile else {}
        ways |= {'CUDA graphs': cuda_graphs_} if args.cuda_graphs else {}
        models |= {f'{n}, {way}': ways[way](copied(m)) for way in ways for n, m in models.items()}
        calls, batches[0] = calls_on(models, args.part, batches[0])
        calls = {name: autocasting(call, args.amp, args.device) for name, call in calls.items()}
        for name in args.exported:
            file, _, precision = name.partition(':')
            calls[name] = ExportedModel(file, own.data_preprocessor, precision or None).test_step
        objects = {name: [] for name in calls}

        def note(name: str, found) -> None:
            samples = found if isinstance(found, list) else []  # a backbone has none
            objects[name] += [len(x.pred_instances) for x in samples if 'pred_instances' in x]

        times = measure(calls, batches, repeats, per_turn=True, note=note)
    rows = latency_rows(times, args.batch_size, bool(args.dataset), objects)
    turns = f'medians of {repeats} turns [95 %]' if repeats > 1 else 'one turn'
    title = f'{args.config}, {on}, {args.amp or "float32"}, {turns}'
    show(title, [*rows[0]], [[*row.values()] for row in rows])
    if any(row.get('objects') == 'next to none' for row in rows):
        print('A detector that finds next to nothing skips suppression and masks: give checkpoints')


if __name__ == '__main__':
    main()
