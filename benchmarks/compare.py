"""Cheaper FFNs for a trained model, by this package and by published methods, at equal cost.

All methods get the same images, run block after block in the same order, and keep the same share of
the FFNs' multiply-adds. What is fitted, and to what, is each method's own, see methods.py.

A pretrained DINOv2 (dinov2.py says where it is from), photographs near to those of the calibration
(other crops of them), and foreign ones::

    python tools/dev/compare.py dinov2 vit_s_focus.onnx --keep 0.9 0.75 0.5 0.375 0.25 0.15

A trained detector or segmentor, by the metrics of its own config::

    python tools/dev/compare.py model configs/demo/retinanet_swin_digits.py epoch_5.pth

Results are appended to a file in JSON lines. ``draw`` makes a table and one picture of such files,
in which models of several seeds are averaged::

    python tools/dev/compare.py draw docs/convert.jsonl --out docs/convert.png
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import dinov2
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from methods import METHODS, Weights, shared_widths
from methods import statistics as statistics_of

from repa_mm import convert_pretrained
from repa_mm.benchmark.tables import show
from repa_mm.benchmark.timing import measure
from repa_mm.fit.conversion import MAX_TOKENS, find_ffns, sample_tokens
from repa_mm.fit.lockstep import in_lockstep
from repa_mm.fit.pretrained import calibration_images
from repa_mm.models.sites import ffn_sites

COSTS = [0.9, 0.75, 0.5, 0.375, 0.25, 0.15]
METRICS = ('near', 'foreign', 'more foreign', 'coco/bbox_mAP', 'coco/segm_mAP', 'mIoU')


class Fitted(nn.Module):
    """A block's end with the weights of a method, x + w u + act(u W_in^T + b_in) W_out^T + b."""

    def __init__(self, norm: nn.Module, act: nn.Module, weights: tuple) -> None:
        super().__init__()
        self.norm, self.act = norm, act
        self.weights = [weight.to(next(norm.parameters())) for weight in weights]

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        w, b, w_in, b_in, w_out = self.weights
        u = self.norm(x)
        y = x + b
        if w.any():
            y = y + F.linear(u, w)
        return y + F.linear(self.act(F.linear(u, w_in, b_in)), w_out) if len(b_in) else y


def compressed(
    model: nn.Module, batches: list, forward: Callable, name: str, keep: float
) -> nn.Module:
    """A copy of a model with FFNs of a published method."""
    model = copy.deepcopy(model)
    model.eval()
    ffns, widths, _ = find_ffns(model, keep, None, False)
    sites = {site.block_name: site for site in ffn_sites(model)}
    number, run = -(-MAX_TOKENS // len(batches)), partial(forward, model)
    for block, site in sites.items():
        site.put(ffns[block])

    def sample(site, tokens: list) -> list[torch.Tensor]:
        return [torch.cat(columns) for columns in zip(*sample_tokens(site, tokens, number))]

    if name == 'VBP':  # ranks the channels of all FFNs together, on the original model
        scores, costs = [], []

        def score(site, tokens: list) -> None:
            u, _ = sample(site, tokens)
            moments = statistics_of(Weights(*site.ffn.fold(), site.ffn.act), u).moments
            scores.append(moments.mean_and_covariance()[1].diagonal())
            costs.append(sum(x.numel() for x, _ in tokens))

        in_lockstep(run, batches, score, students=False)
        budget = sum(cost * width for cost, width in zip(costs, widths.values()))
        widths = dict(zip(widths, shared_widths(scores, costs, budget)))
    ends = {}

    def meet(site, tokens: list) -> Callable:
        weights = Weights(*site.ffn.fold(), site.ffn.act)
        found = METHODS[name](weights, *sample(site, tokens), widths[site.name])
        ends[site.name] = Fitted(site.ffn.norm1, site.ffn.act, found)
        return ends[site.name]

    in_lockstep(run, batches, meet)
    for block, site in sites.items():
        site.put(ends[block])
    return model


@torch.no_grad()
def converted(
    model: nn.Module, batches: list, forward: Callable, args: argparse.Namespace
) -> Iterator[tuple[dict, nn.Module]]:
    """Each method's model at each cost, and what to write of it."""
    for keep in args.keep:
        for name in args.methods:
            if name == 'linear map' and keep != min(args.keep):
                continue  # it has one cost, C^2
            start = time.perf_counter()
            if name == 'ours':
                found, _ = convert_pretrained(model, batches, keep=keep, forward=forward)
            else:
                found = compressed(model, batches, forward, name, keep)
            found.eval()
            cost = keep if name != 'linear map' else 0.125  # C^2 of 8 C^2
            row = dict(method=name, keep=cost, seconds=round(time.perf_counter() - start))
            yield row, found


def write(args: argparse.Namespace, row: dict, metrics: dict) -> None:
    row = {**row, 'data': args.name, 'seed': args.seed, **metrics}
    print(json.dumps(row), flush=True)
    with open(args.out, 'a', encoding='utf-8') as file:
        file.write(json.dumps(row) + '\n')


def on_dinov2(args: argparse.Namespace) -> None:
    """Cosine of patches to the original's features, k-NN and linear probe of digits."""
    vit = dinov2.load(args.model)
    own = [name for name in dinov2.PHOTOGRAPHS if name not in args.foreign]
    more = dinov2.photographs(args.photographs)
    split = len(more) if args.calibrate_on_all else 0
    groups = [dinov2.stacked([name], 0, args.crops) for name in own]
    groups += [dinov2.stacked([name], 0, 2) for name in more[:split]]
    # Crops of one photograph are one batch: they share too much for cross-validation.
    tests = {'near': dinov2.stacked(own, 20, 2), 'foreign': dinov2.stacked(args.foreign, 20, 8)}
    if len(more) > split:
        tests['more foreign'] = dinov2.stacked(more[split:], 4, 1)
    digits = [dinov2.digits(0, 300), dinov2.digits(300, 300)]
    labels = [target for _, target in digits]
    expected = {name: dinov2.features(vit, x) for name, x in tests.items()}
    image = tests['near'][:1]

    def evaluate(model: nn.Module) -> dict:
        metrics = {
            name: dinov2.cosine(dinov2.features(model, x), expected[name])
            for name, x in tests.items()
        }
        features = [dinov2.features(model, images) for images, _ in digits]
        metrics['linear probe'] = dinov2.classify(*features, labels)
        metrics['k-NN'] = dinov2.neighbours(*features, labels)
        with torch.no_grad():
            times = measure({'original': vit, 'found': model}, image, 10)
        metrics['latency'] = float(np.median(times['found']) / np.median(times['original']))
        return metrics

    write(args, dict(method='original', keep=1.0, seconds=0), evaluate(vit))
    for row, model in converted(vit, groups, lambda m, x: m(x), args):
        write(args, row, evaluate(model))


def on_model(args: argparse.Namespace) -> None:
    """The metrics of a model's own config."""
    from mmengine.dataset import pseudo_collate
    from mmengine.runner import Runner

    from repa_mm.run import build_model, load_config

    cfg = load_config(args.model)
    cfg.work_dir, cfg.load_from = f'work_dirs/compare/{args.name}', None
    cfg.visualizer = None
    model = build_model(cfg, args.checkpoint)
    dataset, chosen, _ = calibration_images(cfg, args.images)
    batches = [
        model.data_preprocessor(pseudo_collate([dataset[i]]), False)['inputs'] for i in chosen
    ]
    runner = Runner.from_cfg(cfg)
    runner.model.load_state_dict(model.state_dict())

    def evaluate(backbone: nn.Module) -> dict:
        runner.model.backbone = backbone
        return {key: float(value) for key, value in runner.test().items() if key in METRICS}

    write(args, dict(method='original', keep=1.0, seconds=0), evaluate(model.backbone))
    for row, backbone in converted(model.backbone, batches, lambda m, x: m(x), args):
        write(args, row, evaluate(backbone))


def draw(args: argparse.Namespace) -> None:
    """Print what each method loses, and draw it over the share of multiply-adds, by data set."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for path in args.files for line in Path(path).read_text().splitlines()]
    panels = list(
        dict.fromkeys((row['data'], key) for row in rows for key in row if key in METRICS)
    )
    methods = list(dict.fromkeys(row['method'] for row in rows if row['method'] != 'original'))
    width = min(4, len(panels))
    height = -(-len(panels) // width)
    size = 4 * width, 3.6 * height
    figure, axes = plt.subplots(height, width, figsize=size, squeeze=False)
    for axis, (data, key) in zip(axes.flat, panels):
        here = [row for row in rows if row['data'] == data and key in row]
        best = {row['seed']: row[key] for row in here if row['method'] == 'original'}
        top, table = statistics.fmean(best.values()), []
        for number, method in enumerate(methods):
            lost: dict[float, dict] = {}  # by seed: of several runs of one, the last counts
            for row in here:
                if row['method'] == method:
                    lost.setdefault(row['keep'], {})[row['seed']] = row[key] - best[row['seed']]
            for keep, values in ((keep, [*seeds.values()]) for keep, seeds in lost.items()):
                deviation = f' ± {statistics.stdev(values):.3f}' if len(values) > 1 else ''
                table.append([method, f'{keep:g}', f'{statistics.fmean(values):+.3f}{deviation}'])
            points = [
                (keep, top + statistics.fmean(v.values())) for keep, v in sorted(lost.items())
            ]
            style = 'o-' if method == 'ours' else '.--'
            axis.plot(*zip(*points), style, label=method, color=f'C{number}') if points else None
        values = ', '.join(f'{value:.3f}' for value in best.values())
        show(f'{data}, {key}: {values}', ('method', 'keep', 'minus the original'), table)
        axis.axhline(top, color='grey', linewidth=0.8)
        axis.set(title=f'{data}: {key}', xlabel="share of the FFNs' multiply-adds")
        axis.set_ylim(0.7 * top, 1.02 * top)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.out, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, function in (('dinov2', on_dinov2), ('model', on_model)):
        command = commands.add_parser(name)
        command.add_argument('model', help='the ONNX file, or the config of a model')
        command.add_argument('--keep', type=float, nargs='+', default=COSTS)
        command.add_argument('--methods', nargs='+', default=['ours', *METHODS])
        command.add_argument('--name', default=name, help='of the data, in the results')
        command.add_argument('--seed', type=int, default=0, help='of the model, in the results')
        command.add_argument('--out', default='results.jsonl')
        command.set_defaults(function=function)
        if name == 'model':
            command.add_argument('checkpoint')
            command.add_argument('--images', type=int, default=64)
        else:
            command.add_argument('--foreign', nargs='+', default=dinov2.FOREIGN)
            command.add_argument('--photographs', help='a folder with more of them')
            command.add_argument('--calibrate-on-all', action='store_true')
            command.add_argument('--crops', type=int, default=15, help='of a photograph')
    command = commands.add_parser('draw')
    command.add_argument('files', nargs='+')
    command.add_argument('--out', required=True)
    command.set_defaults(function=draw)
    args = parser.parse_args()
    args.function(args)


if __name__ == '__main__':
    main()
