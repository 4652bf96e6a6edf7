"""What fewer tokens cost and gain: AP, or features, against latency.

A detector, on its own images and on several of them side by side; the features of DINOv2, see
tools/dev/dinov2.py; and a plot of what either has written:

    python tools/dev/fewer_tokens.py detector CONFIG CHECKPOINT --tiles 1 4 --out detector.json
    python tools/dev/fewer_tokens.py dinov2 vit_s_focus.onnx --out dinov2.json
    python tools/dev/fewer_tokens.py plot detector.json dinov2.json --out tokens.png

All models are measured in turn, in one process.
"""

import argparse
import contextlib
import io
import json
import os.path as osp
import tempfile
import time

import cv2
import numpy as np
import torch

from repa_mm import convert_pretrained, reduce_tokens, reparameterize
from repa_mm.benchmark.inputs import DatasetInputs, shapes_of
from repa_mm.benchmark.machine import environment, machine
from repa_mm.benchmark.plots import COLOURS
from repa_mm.benchmark.timing import Clock, Recorder, measure, statistics
from repa_mm.files import replacing
from repa_mm.run import init_model, load_config
from repa_mm.run.cli import align

KEEPS = '1', '0.9', '0.8', '0.7', '0.6', '0.5'


class CpuTime(Clock):
    """The time that this process computes, on a machine that does other things, too."""

    def now(self) -> float:
        return time.process_time()


def tile(cfg, tiles: int, folder: str) -> None:
    """Let a config's test set be its images in squares of ``tiles`` x ``tiles``, at their size."""
    dataset = cfg.test_dataloader.dataset
    with open(osp.join(dataset.data_root, dataset.ann_file), encoding='utf-8') as file:
        content = json.load(file)
    boxes: dict[int, list] = {}
    for annotation in content['annotations']:
        boxes.setdefault(annotation['image_id'], []).append(annotation)
    images, annotations = [], []
    for first in range(0, len(content['images']) - tiles**2 + 1, tiles**2):
        rows, number = [], len(images) + 1
        for i, scene in enumerate(content['images'][first : first + tiles**2]):
            path = osp.join(dataset.data_root, dataset.data_prefix.img, scene['file_name'])
            picture = cv2.imread(path)
            height, width = picture.shape[:2]
            rows.append(picture)
            for annotation in boxes.get(scene['id'], []):
                x, y, w, h = annotation['bbox']
                box = [x + i % tiles * width, y + i // tiles * height, w, h]
                values = dict(id=len(annotations) + 1, image_id=number, bbox=box, segmentation=[])
                annotations.append({**annotation, **values})
        rows = [np.hstack(rows[i : i + tiles]) for i in range(0, len(rows), tiles)]
        name, size = f'{number}.png', dict(height=tiles * height, width=tiles * width)
        cv2.imwrite(osp.join(folder, name), np.vstack(rows))
        images.append(dict(id=number, file_name=name, **size))
    ann_file = osp.join(folder, 'annotations.json')
    with open(ann_file, 'w', encoding='utf-8') as file:
        json.dump({**content, 'images': images, 'annotations': annotations}, file)
    dataset.update(data_root=folder, ann_file=ann_file, data_prefix=dict(img=folder))
    cfg.test_evaluator.ann_file = ann_file
    for step in dataset.pipeline:
        if step.type == 'Resize':
            step.scale = (tiles * width, tiles * height)


@torch.no_grad()
def average_precision(model, inputs, evaluator_cfg) -> float:
    from mmengine.evaluator import Evaluator

    with contextlib.redirect_stdout(io.StringIO()):
        evaluator = Evaluator(evaluator_cfg)
        evaluator.dataset_meta = inputs.dataset.metainfo
        for i in range(len(inputs)):
            batch = inputs(i)
            evaluator.process(model.test_step(batch), batch)
        return evaluator.evaluate(len(inputs))['coco/bbox_mAP']


def reduced(model, keeps) -> dict:
    """The model with several shares: one number, or one for each stage, as '0.6,0.6,0.4,0.4'."""
    shares = [[float(share) for share in keep.split(',')] for keep in keeps]
    shares = [share if len(share) > 1 else share[0] for share in shares]
    return {keep: reduce_tokens(model, share) for keep, share in zip(keeps, shares)}


def detector(args) -> dict:
    cfg = load_config(args.config)
    full = reparameterize(init_model(cfg, args.checkpoint, None), inplace=True)
    models = reduced(full, args.keep)
    recorder = Recorder(CpuTime() if args.cpu_time else Clock())
    for model in models.values():
        model.backbone.forward = recorder.section('backbone')(model.backbone.forward)
    curves = []
    for tiles in args.tiles:
        with tempfile.TemporaryDirectory() as folder:
            here = load_config(args.config)
            if tiles > 1:
                tile(here, tiles, folder)
            inputs = DatasetInputs(here)
            scores = [average_precision(m, inputs, here.test_evaluator) for m in models.values()]
            number = min(args.num_images, len(inputs))
            calls = {name: model.test_step for name, model in models.items()}
            with torch.no_grad():
                times = measure(calls, inputs, number, 2, recorder)
            size = 'x'.join(map(str, shapes_of(inputs(0))[-2:]))
        rows = []
        for (name, form), score in zip(statistics(times.raw, args.keep[0]).items(), scores):
            latency, ratio = form['latency']['median'], form['ratio']
            ratio = [ratio['ratio'], ratio['low'], ratio['high']]
            backbone = form['parts']['backbone']['median']
            row = dict(keep=name, quality=score, ms=latency, ratio=ratio, backbone=backbone)
            rows.append(row)
        curves.append(dict(name=f'RetinaNet, {size}', rows=rows, count=len(times)))
    return dict(quality='box AP', curves=curves)


def dinov2(args) -> dict:
    from dinov2 import FOREIGN, PHOTOGRAPHS, cosine, features, load, stacked

    vit, _ = load(args.onnx)
    own = [name for name in PHOTOGRAPHS if name not in FOREIGN]
    # Quick rather than good: what is compared is the model with itself.
    batches, quick = list(stacked(own, 0, 2).split(7)), dict(select='score', max_tokens=8192)
    converted, _ = convert_pretrained(vit, batches, args.idle_ratio, 'keep', ridge=1e-3, **quick)
    full = reparameterize(converted)
    models = reduced(full, args.keep)
    curves, images = [], stacked(FOREIGN, 20, 8)
    for size in args.size:
        scaled = torch.nn.functional.interpolate(images, size=(size, size), mode='bicubic')
        expected = features(full, scaled)
        scores = [cosine(features(m, scaled), expected) for m in models.values()]
        with torch.no_grad():
            ones = scaled.split(1)
            recorder = Recorder(CpuTime() if args.cpu_time else Clock())
            times = measure(
                models, lambda i, ones=ones: ones[i % len(ones)], args.num_images, 3, recorder
            )
        rows = [
            dict(
                keep=name,
                quality=score,
                ms=found['latency']['median'],
                ratio=[found['ratio'][key] for key in ('ratio', 'low', 'high')],
            )
            for (name, found), score in zip(statistics(times.raw, args.keep[0]).items(), scores)
        ]
        curves.append(dict(name=f'DINOv2 ViT-S, {size}x{size}', rows=rows, count=len(times)))
    return dict(quality='cosine of patches to the full model', curves=curves)


def show(result: dict) -> None:
    for curve in result['curves']:
        table = [
            (
                'keep',
                result['quality'],
                f'{result["time"]} (ms)',
                'change',
                '[95 %]',
                'backbone (ms)',
            )
        ]
        for row in curve['rows']:
            change = [f'{100 * (value - 1):+.1f} %' for value in row['ratio'] if value is not None]
            table.append(
                (
                    row['keep'],
                    f'{row["quality"]:.4f}',
                    f'{row["ms"]:.2f}',
                    change[0],
                    ' to '.join(change[1:]),
                    f'{row["backbone"]:.2f}' if 'backbone' in row else '',
                )
            )
        print(f'\n{curve["name"]}, {curve["count"]} images, {result["machine"]}')
        print('\n'.join(align(table)), flush=True)


def plot(args) -> None:
    from matplotlib.figure import Figure

    results = []
    for path in args.results:
        with open(path, encoding='utf-8') as file:
            results.append(json.load(file))
    figure = Figure(figsize=(5 * len(results), 3.6), layout='constrained')
    for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results):
        for curve, colour in zip(result['curves'], COLOURS[1:]):
            points = [(100 * (row['ratio'][0] - 1), row['quality']) for row in curve['rows']]
            # The line is that of one share for all stages.
            line = [p for p, row in zip(points, curve['rows']) if ',' not in row['keep']]
            axes.plot(*zip(*points), 'o', color=colour, label=curve['name'])
            axes.plot(*zip(*line), color=colour)
            for row, point in zip(curve['rows'], points):
                style = dict(textcoords='offset points', fontsize='x-small')
                axes.annotate(row['keep'], point, (4, 4), **style)
        axes.axvline(-15, color='grey', linewidth=0.5, linestyle=':')
        axes.set_xlabel(f'change of the {result["time"]} (%), with keep at each point')
        axes.set_ylabel(result['quality'])
        axes.spines[['top', 'right']].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(results[0]['machine'], fontsize='small')
    with replacing(args.out) as temporary:
        figure.savefig(temporary, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest='command', required=True)
    one = commands.add_parser('detector')
    one.add_argument('config', help='of a detector with COCO metrics')
    one.add_argument('checkpoint', help='in either form')
    one.add_argument('--tiles', type=int, nargs='+', default=[1], help='images side by side')
    two = commands.add_parser('dinov2')
    two.add_argument('onnx', help='vit_s_focus.onnx')
    two.add_argument('--idle-ratio', type=float, default=0.75)
    two.add_argument('--size', type=int, nargs='+', default=[224])
    for command in (one, two):
        command.add_argument('--keep', nargs='+', default=KEEPS)
        command.add_argument('--num-images', type=int, default=60, help='to measure latency with')
        command.add_argument('--threads', type=int)
        command.add_argument('--cpu-time', action='store_true', help='of one thread, not latency')
    three = commands.add_parser('plot')
    three.add_argument('results', nargs='+', help='what the others have written')
    for command in (one, two, three):
        command.add_argument('--out', required=command is three)
    args = parser.parse_args()
    if args.command == 'plot':
        return plot(args)
    if args.threads or args.cpu_time:
        torch.set_num_threads(args.threads or 1)
    args.keep = list(dict.fromkeys(['1', *args.keep]))
    result = detector(args) if args.command == 'detector' else dinov2(args)
    result['machine'] = machine(environment('cpu'))
    result['time'] = 'CPU time' if args.cpu_time else 'latency'
    show(result)
    if args.out:
        with replacing(args.out) as path, open(path, 'w', encoding='utf-8') as file:
            json.dump(result, file)


if __name__ == '__main__':
    main()
