"""Put what others do beside the model that `tools/speed_up.py` chose.

In one process, and on the images that the command tested on:

- The model with exact parts, in its fastest format, runs on smaller images.

- Torch-Pruning (https://github.com/VainF/Torch-Pruning, ``pip install torch-pruning``) removes
  hidden channels of FFNs by its own importance criteria, without training. The pruned models get
  our exact parts and our export, so that the table compares what is removed.
- NNCF puts the stock model into 8 bits, with its defaults, and with those for transformers.

::

    python tools/speed_up.py CONFIG CHECKPOINT OUT_DIR --max-loss 0.5
    python -m benchmarks.rivals OUT_DIR

The table is also written to OUT_DIR/rivals.json, for the picture of `benchmarks/report.py`.
"""

import argparse
import copy
import json
import os.path as osp
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.apis import open_model, read_images
from repa_mm.apis.images import input_channels
from repa_mm.convert.changed_config import converted_config
from repa_mm.export import ExportedModel, example_shape, whole_model, whole_onnx
from repa_mm.faster import rewrite_
from repa_mm.io.configs import load_config
from repa_mm.io.files import write_text
from repa_mm.measure.timing import compare, measure, show
from repa_mm.measure.variants import STOCK
from repa_mm.models import ffn_sites
from repa_mm.search.formats import EAGER, FORMATS, INT8, in_format_
from repa_mm.search.judge import Annotated
from repa_mm.search.steps import quiet
from repa_mm.search.workbench import export

#: Criteria that need neither labels nor gradients.
CRITERIA = {'magnitude': 'GroupMagnitude', 'LAMP': 'LAMP'}
RATIOS = 0.5, 0.75, 0.95  # of channels to remove
SHARES = 0.9, 0.8, 0.7  # of the height and width of images
COLUMNS = 'model', 'format', 'ms', '× stock [95 %]', 'metric', 'difference [95 %]'


class Candidate(NamedTuple):
    """A model that is compared."""

    name: str
    config: str
    checkpoint: str


def prune(config: str, checkpoint: str, stem: str, ratio: float, criterion: str) -> Candidate:
    """Remove a fraction of the hidden channels of a backbone's FFNs by Torch-Pruning.

    Args:
        config (str): Config of the stock model.
        checkpoint (str): Its checkpoint.
        stem (str): Path of the config and checkpoint to write, without their suffixes.
        ratio (float): Fraction of the channels that goes, ranked over all FFNs.
        criterion (str): A key of :data:`CRITERIA`.
    """
    import torch_pruning

    cfg = load_config(config)
    model = open_model(cfg, checkpoint)
    original = copy.deepcopy(model)
    first = [site.parts().fc1 for site in ffn_sites(model, 'backbone')]
    others = (m for m in model.backbone.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    pruner = torch_pruning.pruner.BasePruner(
        model.backbone,
        torch.zeros(1, 3, *example_shape(model)),
        getattr(torch_pruning.importance, f'{CRITERIA[criterion]}Importance')(p=2),
        pruning_ratio=ratio,
        max_pruning_ratio=0.95,
        global_pruning=True,
        ignored_layers=[m for m in others if all(m is not fc1 for fc1 in first)],
        round_to=4,
    )
    pruner.step()
    sizes = {
        site.block_name: (site.parts().fc1.out_features,) for site in ffn_sites(model, 'backbone')
    }
    done = rewrite_(copy.deepcopy(original), 'train')
    text = converted_config(cfg, original, sizes, rewritten=done).pretty_text
    with open(f'{stem}.py', 'w', encoding='utf-8') as file:
        file.write(text)
    torch.save(dict(meta={}, state_dict=model.state_dict()), f'{stem}.pth')
    return Candidate(f'Torch-Pruning, {criterion}', f'{stem}.py', f'{stem}.pth')


class Given:
    """A run of `tools/speed_up.py` whose chosen model is compared.

    Args:
        out_dir (str): Its folder.
        repeats (int): Number of turns of timing.

    Raises:
        ValueError: If the run did not test on annotated images.
    """

    def __init__(self, out_dir: str, repeats: int) -> None:
        self.out_dir = out_dir
        with open(osp.join(out_dir, 'results.json'), encoding='utf-8') as file:
            self.results = json.load(file)
        if self.results['metric'] in ('', 'agreement'):
            raise ValueError(f'{out_dir} has no metric of annotated images to compare in')
        self.row = next(row for row in self.results['rows'] if row['chosen'])
        self.kind, self.folder = self.row['format'], osp.join(out_dir, 'candidates')
        self.stock = Candidate(STOCK, osp.join(self.folder, 'stock.py'), self.results['checkpoint'])
        chosen = osp.join(out_dir, 'model')
        self.chosen = Candidate(self.row['candidate'], f'{chosen}.py', f'{chosen}.pth')
        self.cfg = load_config(self.stock.config)  # which has the options of the run
        num_images = int(self.results['images'].split()[0])
        subset = osp.join(out_dir, f'{num_images}_images.json')
        with quiet():
            self.judge = Annotated(self.cfg, num_images, subset)
        self.timed, self.repeats = self.judge.images(repeats), repeats
        self.preprocessor = self.open(self.stock, EAGER).data_preprocessor

    def open(self, candidate: Candidate, kind: str) -> nn.Module:
        """Return a model in a format. Its file is written if it is not there."""
        form, model = FORMATS[kind], open_model(candidate.config, candidate.checkpoint)
        if not form.file:
            return in_format_(model, form)
        suffix = form.file.replace('_int8', '') if candidate is self.chosen else form.file
        path = osp.splitext(candidate.config)[0] + suffix
        if not osp.exists(path):
            with quiet():
                export(model, path, lambda: read_images(self.cfg, 'train', 64), self.judge)
        return ExportedModel(path, self.preprocessor, form.runtime)

    def time(self, models: dict, repeats: int) -> dict:
        """Return the times of models in turn."""
        calls = {key: model.test_step for key, model in models.items()}
        with quiet(), torch.no_grad():
            return measure(calls, self.timed, repeats, per_turn=True)


def plain_int8(given: Given, **options) -> nn.Module:
    """Return the stock model in 8 bits, as ``nncf.quantize`` does it with ``options``."""
    import nncf
    import openvino

    model = open_model(given.stock.config, given.stock.checkpoint)
    file = osp.join(given.folder, f'plain_int8_{len(options)}.xml')
    if osp.exists(file):
        return ExportedModel(file, model.data_preprocessor)

    def feed(data: dict) -> dict:
        return {'image': model.data_preprocessor(data, False)['inputs'].numpy()}

    content = whole_onnx(whole_model(model), (2, input_channels(model), *example_shape(model)))
    data = nncf.Dataset(read_images(given.cfg, 'train', 64), feed)
    quantized = nncf.quantize(openvino.Core().read_model(content, b''), data, **options)
    openvino.save_model(quantized, file, compress_to_fp16=False)
    return ExportedModel(file, model.data_preprocessor)


class Smaller(nn.Module):
    """A detector that sees smaller images.

    Args:
        model (nn.Module): What predicts.
        share (float): Of an image's height and width, rounded to what needs no padding.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__()
        self.model, self.share = model, share
        self.divisor = model.data_preprocessor.pad_size_divisor

    def test_step(self, data: dict) -> list:
        images, samples = [], copy.deepcopy(data['data_samples'])
        for image, sample in zip(data['inputs'], samples):
            sides = torch.tensor(image.shape[1:])
            size = ((self.share * sides / self.divisor).round() * self.divisor).long()
            small = F.interpolate(image[None], size.tolist(), mode='bilinear', antialias=True)
            images.append(small[0])
            scale = (size / sides).flip(0).tolist()  # of width and height
            scale = tuple(np.multiply(scale, sample.scale_factor))
            sample.set_metainfo(dict(img_shape=tuple(size.tolist()), scale_factor=scale))
        return self.model.test_step(dict(inputs=images, data_samples=samples))


def models(given: Given) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the name, format and model of each row."""
    yield STOCK, EAGER, given.open(given.stock, EAGER)
    yield f'ours: {given.chosen.name}', given.kind, given.open(given.chosen, given.kind)
    wide = [row for row in given.results['rows'][1:] if row['budget'] == 1]
    wide = max(wide, key=lambda row: row['speedup'])
    config = osp.join(given.out_dir, wide['config'])
    model = given.open(given.stock._replace(config=config), wide['format'])
    for share in SHARES:
        name = f'smaller images: {100 * share:.0f} % of their sides'
        yield name, wide['format'], Smaller(model, share)
    for ratio, criterion in product(RATIOS, CRITERIA) if find_spec('torch_pruning') else ():
        stem = osp.join(given.folder, f'pruned_{criterion}_{100 * ratio:.0f}')
        candidate = prune(given.stock.config, given.stock.checkpoint, stem, ratio, criterion)
        name = f'Torch-Pruning: {100 - 100 * ratio:.0f} % of channels, by {criterion}'
        yield name, given.kind, given.open(candidate, given.kind)
    if find_spec('nncf'):
        from nncf import ModelType

        yield 'NNCF: defaults', INT8, plain_int8(given)
        options = dict(model_type=ModelType.TRANSFORMER)
        yield 'NNCF: for transformers', INT8, plain_int8(given, **options)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('out_dir', help='folder of tools/speed_up.py with a chosen model')
    parser.add_argument('--repeats', type=int, default=20, help='turns of timing')
    args = parser.parse_args()
    given = Given(args.out_dir, args.repeats)
    found = {(n, k): m for n, k, m in models(given)}
    rows, others, tests, stock = [], [], {}, None
    for key, model in found.items():
        with quiet():
            score = given.judge(model)
            stock = stock or score  # the first
            tests[key] = score.value, *given.judge.difference(score, stock)
    times = given.time(found, args.repeats)
    for (name, kind), (value, change, low, high) in tests.items():
        ratio, least, most = compare(times[STOCK, EAGER], times[name, kind])
        ms = float(np.median(times[name, kind]))
        row = dict(candidate=name, format=kind, speedup=ratio, metric=value, interval=[low, high])
        others.append(row)
        rows.append(
            [name, kind, f'{ms:.1f}', f'{ratio:.2f} [{least:.2f}, {most:.2f}]', f'{value:.2f}',
             f'{change:+.2f} [{low:+.2f}, {high:+.2f}]']
        )  # fmt: skip
    show(
        f'{given.results["config"]}, {given.judge.num_images} images, {given.judge.name}',
        COLUMNS,
        rows,
    )
    write_text(osp.join(args.out_dir, 'rivals.json'), json.dumps(others, indent=1))


if __name__ == '__main__':
    main()
