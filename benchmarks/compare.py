r"""Cheaper FFNs for a trained model, by this package and by published methods, at equal cost.

All methods get the same images, run block after block in the same order, and keep the same share of
the FFNs' multiply-adds. What is fitted, and to what, is each method's own, see methods.py.

A pretrained DINOv2 (dinov2.py says where it is from), photographs near to those of the calibration
(other crops of them), and foreign ones::

    python -m benchmarks.compare dinov2 vit_s_focus.onnx --keep 0.5 0.375 0.2

The method 'ours, channel idle' is for a --keep of 0.125 to 0.875.

A trained detector or segmentor, by the metrics of its own config::

    python -m benchmarks.compare model configs/demo/retinanet_swin_digits.py epoch_3.pth \
        --name 'RetinaNet, digits'

Results are appended to a file with the columns of results.csv.
"""

import argparse
import csv
import datetime
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.runner import Runner

import repa_mm
from benchmarks import dinov2
from benchmarks.even import even_sizes
from benchmarks.methods import METHODS, Weights, shared_widths, statistics
from benchmarks.tables import COLUMNS, Row
from repa_mm import convert_pretrained
from repa_mm.apis import open_model, read_images
from repa_mm.convert import Conversion
from repa_mm.convert.lockstep import in_lockstep
from repa_mm.convert.pretrained import split_images
from repa_mm.io.configs import load_config
from repa_mm.measure.timing import measure

COSTS = [0.9, 0.75, 0.5, 0.375, 0.25, 0.15]
IMAGES = 64  # that a detector or segmentor is fitted to
# Metrics of configs: their names in results.csv, and what makes them percent.
METRICS = {'coco/bbox_mAP': ('box AP', 100), 'coco/segm_mAP': ('mask AP', 100), 'mIoU': ('mIoU', 1)}


def percent(found: dict) -> dict[str, float]:
    """The metrics of a test, by their names in results.csv."""
    known = {
        name: scale * float(found[key]) for key, (name, scale) in METRICS.items() if key in found
    }
    return known or {'box AP': 0.0}  # of a detector that finds nothing


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
    conversion = Conversion(model, batches, ['ffn'], forward=forward)
    widths = {name: width for name, (width,) in even_sizes(conversion, keep).items()}

    def sample(part, tokens: list) -> list[torch.Tensor]:
        return [torch.cat(columns) for columns in zip(*part.sample(tokens, conversion.max_tokens))]

    if name == 'VBP':  # ranks the channels of all FFNs together, on the original model
        scores, costs = [], []
        for part, tokens in in_lockstep(conversion.run, batches, students=False):
            u, _ = sample(part, tokens)
            moments = statistics(Weights(*part.ffn.fold(), part.ffn.act), u).moments
            scores.append(moments.mean_and_covariance()[1].diagonal())
            costs.append(sum(inputs[0].numel() for inputs, _ in tokens))
        budget = sum(cost * width for cost, width in zip(costs, widths.values()))
        widths = dict(zip(widths, shared_widths(scores, costs, budget)))
    ends = {}
    with ExitStack() as fitted:
        for part, tokens in in_lockstep(conversion.run, batches):
            weights = Weights(*part.ffn.fold(), part.ffn.act)
            found = METHODS[name](weights, *sample(part, tokens), widths[part.name])
            ends[part.name] = Fitted(part.ffn.norm1, part.ffn.act, found)
            fitted.enter_context(part.replaced(ends[part.name]))
    for block, part in conversion.parts.items():
        setattr(part.site.block, part.site.path, ends[block])
    return conversion.model


@torch.no_grad()
def converted(
    model: nn.Module, batches: list, forward: Callable, args: argparse.Namespace
) -> Iterator[tuple[str, nn.Module]]:
    """Each method's model at each cost, and its name in the results."""
    for keep in args.keep:
        for name in args.methods:
            cost = keep
            if name == 'linear map':
                if keep != min(args.keep):
                    continue
                cost = 0.125  # C^2 of 8 C^2, whatever is asked for
            if name == 'ours':
                conversion = Conversion(model, batches, ['ffn'], forward=forward)
                found, _ = conversion.fit(even_sizes(conversion, ffn=keep))
            elif name == 'ours, channel idle':  # where C of 4 C channels are one path of C / 2
                idle = dict(idle_ratio=1.125 - keep, forward=forward)
                found, _ = convert_pretrained(model, batches, **idle)
            else:
                found = compressed(model, batches, forward, name, keep)
            found.eval()
            yield f'{name}, {cost:g}', found
    for budget in args.budgets:
        found, _ = convert_pretrained(model, batches, budget=budget, forward=forward)
        found.eval()
        yield f'budget, {budget:g}', found


def append(path: str, row: Row, metrics: dict[str, float]) -> None:
    """Append a row for each metric to a file with the columns of results.csv.

    Args:
        path (str): Of the file.
        row (dict): What the rows share. 'what' precedes the names of the metrics.
        metrics (dict): Values by their names.
    """
    known = dict(
        command=' '.join([f'python -m benchmarks.{Path(sys.argv[0]).stem}', *sys.argv[1:]]),
        version=repa_mm.__version__,
        date=f'{datetime.date.today():%Y-%m}',
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'a', encoding='utf-8', newline='') as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator='\n')
        if not out.tell():
            writer.writeheader()
        for name, value in metrics.items():
            what = f'{row["what"]}: {name}'
            print(f'{row["model"]}, {row["form"]}, {row["run"]}: {name} {value:.4g}', flush=True)
            writer.writerow({**known, **row, 'what': what, 'value': f'{value:.4g}'})


def write(args: argparse.Namespace, form: str, metrics: dict[str, float]) -> None:
    row = dict(what='after a conversion', model=args.name, form=form, run=f'seed {args.seed}')
    append(args.out, row, metrics)


def on_dinov2(args: argparse.Namespace) -> None:
    """Cosine of patches to the original's features, k-NN and linear probe of digits."""
    vit = dinov2.load(args.model)
    more = dinov2.photographs(args.photographs)
    # Crops of one photograph are one batch: they share too much for cross-validation.
    groups = [dinov2.stacked([name], 0, args.crops) for name in dinov2.OWN]
    tests = dinov2.tests()
    if more:
        tests[f'cosine, {len(more)} others'] = dinov2.stacked(more, 4, 1)
    digits = [dinov2.digits(0, 300), dinov2.digits(300, 300)]
    labels = [target for _, target in digits]
    expected = {name: dinov2.features(vit, x) for name, x in tests.items()}
    image = next(iter(tests.values()))[:1]

    def evaluate(model: nn.Module) -> dict[str, float]:
        metrics = {
            name: dinov2.cosine(dinov2.features(model, x), expected[name])
            for name, x in tests.items()
        }
        features = [dinov2.features(model, images) for images, _ in digits]
        metrics['linear probe of digits'] = dinov2.classify(*features, labels)
        metrics['k-NN of digits'] = dinov2.neighbours(*features, labels)
        with torch.no_grad():
            times = measure({'original': vit, 'found': model}, image, 10)
        metrics['latency'] = float(np.median(times['found']) / np.median(times['original']))
        return metrics

    write(args, 'original', evaluate(vit))
    for form, model in converted(vit, groups, lambda m, x: m(x), args):
        write(args, form, evaluate(model))


def on_model(args: argparse.Namespace) -> None:
    """The metrics of a model's own config."""
    cfg = load_config(args.model)
    cfg.work_dir, cfg.load_from = 'work_dirs/compare', None
    cfg.visualizer = None
    model = open_model(cfg, args.checkpoint)
    images, _ = split_images(read_images(cfg, 'train', IMAGES + IMAGES // 8))
    batches = [model.data_preprocessor(data, False)['inputs'] for data in images]
    runner = Runner.from_cfg(cfg)
    runner.model.load_state_dict(model.state_dict())

    def evaluate(backbone: nn.Module) -> dict[str, float]:
        runner.model.backbone = backbone
        return percent(runner.test())

    write(args, 'original', evaluate(model.backbone))
    for form, backbone in converted(model.backbone, batches, lambda m, x: m(x), args):
        write(args, form, evaluate(backbone))


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
        command.add_argument('--budgets', type=float, nargs='*', default=[], help='of all blocks')
        command.add_argument('--seed', type=int, default=0, help='of the model, in the results')
        command.add_argument('--out', default='work_dirs/compare.csv')
        command.set_defaults(function=function)
        if name == 'model':
            command.add_argument('checkpoint')
            command.add_argument('--name', required=True, help='of the model, in the results')
        else:
            command.add_argument('--photographs', help='a folder with more of them')
            command.add_argument('--crops', type=int, default=15, help='of a photograph')
            command.set_defaults(name='DINOv2 ViT-S/14')
    args = parser.parse_args()
    args.function(args)


if __name__ == '__main__':
    main()
