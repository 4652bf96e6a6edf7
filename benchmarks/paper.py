"""The paper's tables 2 and 3: models beside their stock counterparts.

For each model a row is printed: parameters and multiply-adds of one image for the stock model, the
training form and the deploy form; latency for the stock model and the deploy form. The stock
counterpart has the same arguments and no structure. Weights are random, images are noise::

    python -m benchmarks.paper                                                            # table 2
    python -m benchmarks.paper projects/slab/configs/progressive_{deit,swin}_b_in1k.py    # table 3
"""

import argparse
import csv
import gc
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger

from repa_mm.apis import open_model
from repa_mm.faster import fuse_conv_bn_, rewrite_
from repa_mm.io.configs import load_config
from repa_mm.io.paths import config_path
from repa_mm.measure.complexity import count
from repa_mm.measure.timing import change, measure, show, show_machine
from repa_mm.measure.variants import DEPLOY, OURS, STOCK
from repa_mm.reparam import reparameterize_
from repa_mm.surgery import copied

COLUMNS = 'model', 'parameters, M', 'GMACs', 'ms', 'against stock', 'by the merge'


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
def measure_pair(cfg: Config, images: torch.Tensor, repeats: int) -> list[str]:
    """Measure a model, without post-processing, and its stock counterpart in turn.

    Args:
        cfg (Config): Of the model, with a backbone as for :func:`counterpart_`.
        images (torch.Tensor): (B, 3, H, W), on the device to measure.
        repeats (int): Number of turns.

    Returns:
        list: A row of :data:`COLUMNS`.
    """
    gc.collect()  # the models of another pair
    model = open_model(cfg).to(images.device)
    training = count(model, images[:1])
    deployed = fuse_conv_bn_(reparameterize_(model))
    stock = counterpart_(open_model(cfg)).to(images.device)
    ours = copied(stock)
    models = {STOCK: stock} | ({OURS: ours} if rewrite_(ours, 'train', 'infer') else {})
    counts = count(models[STOCK], images[:1]), training, count(deployed, images[:1])
    times = measure({**models, DEPLOY: deployed}, images, repeats)
    return [
        Path(cfg.filename).stem,
        ' / '.join(f'{parameters / 1e6:.2f}' for parameters, _ in counts),
        ' / '.join(f'{macs / 1e9:.2f}' for _, macs in counts),
        ' / '.join(f'{np.median(times[form]):.1f}' for form in (STOCK, DEPLOY)),
        change(times[DEPLOY], times[STOCK]),
        change(times[DEPLOY], times.get(OURS, times[STOCK])),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = dict.fromkeys(row['config'] for row in paper_rows())
    parser.add_argument(
        'configs', nargs='*', default=[config_path(name) for name in own], help="the paper's 15"
    )
    parser.add_argument('--input-shape', type=int, nargs=2, default=[224, 224], help='224 224')
    parser.add_argument('--batch-size', type=int, default=1, help='%(default)s')
    parser.add_argument('--repeats', type=int, default=10, help='number of turns (%(default)s)')
    args = parser.parse_args()
    show_machine()
    MMLogger.get_current_instance().setLevel('WARNING')
    images = torch.randn(args.batch_size, 3, *args.input_shape)
    images = images.cuda() if torch.cuda.is_available() else images
    rows = [measure_pair(load_config(config), images, args.repeats) for config in args.configs]
    size = 'x'.join(map(str, images.shape))
    title = f'stock / training form / deploy form, {size}, medians of {args.repeats} turns [95 %]'
    show(title, COLUMNS, rows)


if __name__ == '__main__':
    main()
