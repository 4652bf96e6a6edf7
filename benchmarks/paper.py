"""The paper's tables 2, 3 and 4 and its figure 3: models beside their stock counterparts.

For each model and idle ratio a row is printed: parameters and multiply-adds of one image for the
stock model, the training form and the deploy form; latency, and the share of the FFNs in it, for
the stock model and the deploy form. The stock counterpart has the same arguments and no structure.
Weights are random, images are noise::

    python -m benchmarks.paper                                                            # table 2
    python -m benchmarks.paper projects/slab/configs/progressive_{deit,swin}_b_in1k.py    # table 3
    python -m benchmarks.paper configs/repa_{deit,swin}_b_in1k.py --idle-ratios 0.25 0.5 0.75 1
"""

import argparse
import csv
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger

from benchmarks.shares import ffn_modules, measure_shares
from repa_mm.apis import open_model
from repa_mm.benchmark.complexity import count
from repa_mm.benchmark.timing import change, measure, show, show_machine
from repa_mm.benchmark.variants import OURS, STOCK, with_our_parts
from repa_mm.faster import fuse_conv_bn_
from repa_mm.io.configs import load_config
from repa_mm.io.paths import config_path
from repa_mm.reparam import reparameterize_

PART = 'FFNs'  # whose share is measured
COLUMNS = (
    *('model', 'idle ratio', 'parameters, M', 'GMACs', 'ms', 'against stock', 'by the merge'),
    'FFNs, %',
)


def paper_rows() -> list[dict[str, str]]:
    """Return parameters (M) and GMACs of the paper's tables 1, 2, 4 and 8, with our configs."""
    with open(Path(__file__).with_name('paper_tables.csv')) as file:
        return list(csv.DictReader(file))


def counterpart_(model: nn.Module) -> nn.Module:
    """Put the backbone whose weights would fill a model's forms into the model, in place.

    Args:
        model (nn.Module): Its backbone is a :class:`~repa_mm.models.WithStructures`.

    Returns:
        nn.Module: The same model, in eval mode. The weights of the backbone are random.
    """
    model.backbone = model.backbone.build_ordinary()
    gc.collect()  # references of mmpretrain's backbones go in circles
    model.eval()
    return model


@torch.no_grad()
def measure_pairs(
    cfg: Config, idle_ratios: Sequence[float], images: torch.Tensor, repeats: int
) -> list[list[str]]:
    """Measure a model, without post-processing, and its stock counterpart in turn.

    Args:
        cfg (Config): Of the model, with a backbone as for :func:`counterpart_`.
        idle_ratios (Sequence[float]): To measure the model with. Empty: the config's own.
        images (torch.Tensor): (B, 3, H, W), on the device to measure.
        repeats (int): Number of turns.

    Returns:
        list: For each idle ratio a row of :data:`COLUMNS`.
    """
    gc.collect()  # the models of another pair
    deployed, sizes = {}, {}
    for ratio in idle_ratios or [cfg.model.backbone.get('idle_ratio')]:
        if idle_ratios:
            cfg.model.backbone.idle_ratio = ratio
        model = open_model(cfg).to(images.device)
        name = '' if ratio is None else f'{ratio:.3g}'
        training = count(model, images[:1])
        deployed[name] = fuse_conv_bn_(reparameterize_(model))
        sizes[name] = training, count(model, images[:1])
    models = with_our_parts(counterpart_(open_model(cfg)).to(images.device))
    stock = count(models[STOCK], images[:1])
    models.update(deployed)
    times = measure(models, images, repeats)
    ours = times.get(OURS, times[STOCK])
    models.pop(OURS, None)
    parts = {name: {PART: ffn_modules(model)} for name, model in models.items()}
    whole, spent = measure_shares(models, parts, images, repeats)
    rows = []
    for name, forms in sizes.items():
        pair, counts = (STOCK, name), (stock, *forms)
        rows.append(
            [
                Path(cfg.filename).stem,
                name,
                ' / '.join(f'{parameters / 1e6:.2f}' for parameters, _ in counts),
                ' / '.join(f'{macs / 1e9:.2f}' for _, macs in counts),
                ' / '.join(f'{np.median(times[one]):.1f}' for one in pair),
                change(times[name], times[STOCK]),
                change(times[name], ours),
                ' / '.join(f'{100 * np.median(spent[one][PART] / whole[one]):.1f}' for one in pair),
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = dict.fromkeys(row['config'] for row in paper_rows())
    parser.add_argument(
        'configs', nargs='*', default=[config_path(name) for name in own], help="the paper's 15"
    )
    parser.add_argument('--idle-ratios', type=float, nargs='+', default=[], help="the config's own")
    parser.add_argument('--input-shape', type=int, nargs=2, default=[224, 224], help='224 224')
    parser.add_argument('--batch-size', type=int, default=1, help='%(default)s')
    parser.add_argument('--repeats', type=int, default=10, help='number of turns (%(default)s)')
    args = parser.parse_args()
    show_machine()
    MMLogger.get_current_instance().setLevel('WARNING')
    images = torch.randn(args.batch_size, 3, *args.input_shape)
    images = images.cuda() if torch.cuda.is_available() else images
    rows = []
    for config in args.configs:
        rows += measure_pairs(load_config(config), args.idle_ratios, images, args.repeats)
    size = 'x'.join(map(str, images.shape))
    title = f'stock / training form / deploy form, {size}, medians of {args.repeats} turns [95 %]'
    show(title, COLUMNS, rows)


if __name__ == '__main__':
    main()
