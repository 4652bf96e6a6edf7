r"""Measure on an NVIDIA GPU what docs/benchmarks.md says of one.

Latency of whole models and of a backbone, also with CUDA graphs, training steps, what of the
post-processing could be in a graph, and `tools/speed_up.py` on the demo's scenes and for a
RetinaNet with Swin-B::

    python -m benchmarks.on_a_gpu --out work_dirs/on_a_gpu.csv

Each part is a process with a limit, ten minutes for all, in which its models run in turn with
stock. A part that fails or takes too long is named, and the others go on. Except in the search,
weights are random and images noise. Rows are appended to a file with the columns of results.csv.
``--device cpu --small`` takes the same way with small models.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger

from benchmarks.compare import append
from benchmarks.even import even_config
from benchmarks.training import peak_memory, step, synthetic_batch, training_variants
from demo.dataset import PHOTOGRAPHS, load_photograph, write_digit_scenes
from demo.run import DATA, train
from repa_mm import config_path, speed_up
from repa_mm.apis import open_model
from repa_mm.faster import cuda_graphs_, faster_on_gpu_
from repa_mm.faster.cuda_graphs import Captured
from repa_mm.io.configs import load_config
from repa_mm.measure.timing import measure, show_machine
from repa_mm.measure.variants import (
    DEPLOY,
    MODEL,
    STOCK,
    autocasting,
    calls_on,
    noise_of_size,
    variants,
)
from repa_mm.surgery import copied

NAME = 'benchmarks.on_a_gpu'
DETECTOR, SMALL_IMAGE = (800, 1344), (160, 160)
# Names in results.csv, configs, and those of small models.
CONFIGS = {
    'RetinaNet Swin-B': ('retinanet_{}swin_b', 'demo/retinanet_{}swin_digits'),
    'Mask R-CNN Swin-B': ('mask_rcnn_{}swin_b', 'demo/mask_rcnn_{}swin_digits'),
    'UperNet Swin-B': ('upernet_{}swin_b', 'demo/upernet_{}swin_digits'),
    'Swin-B backbone': ('{}swin_b_in1k', '{}swin_t_in1k'),
}
# Shares of FFNs and of heads that stay.
NARROW = {'FFNs 0.2, heads a quarter': (0.2, 0.25, 0.25), 'a quarter of each block': (0.25,) * 3}
GRAPHS = 'CUDA graphs'
DEMO = 'demo/retinanet_swin_digits'
SHORT = {'train_cfg.max_epochs': 1, 'param_scheduler.1.end': 1}
TINY = SHORT | {
    'model.backbone.arch.depths': [1, 1, 1, 1], 'model.backbone.arch.embed_dims': 24,
    'model.neck.in_channels': [48, 96, 192], 'model.test_cfg.score_thr': 0.0,
    'train_dataloader.batch_size': 4,
}  # fmt: skip


def configs(args: argparse.Namespace, name: str) -> tuple[Config, Config]:
    """Return the config of a RePa model, and that of its stock counterpart."""
    path = CONFIGS[name][args.small]
    repa, stock = (load_config(config_path(path.format(kind))) for kind in ('repa_', ''))
    return repa, stock


def dtype(args: argparse.Namespace) -> str | None:
    """Return the type of autocast."""
    return None if args.amp == 'float32' else args.amp


def write(
    args: argparse.Namespace, what: str, model: str, of: str, unit: str, values: dict
) -> None:
    """Append a row for each form of a model."""
    cpu = 'CPU' if args.device == 'cpu' else torch.cuda.get_device_name(args.device)
    row = dict(what=what, model=model, run=args.run, cpu=cpu, unit=unit)
    for form, value in values.items():
        append(args.out, dict(row, form=form, command=f'python -m {NAME}'), {of: float(value)})


@torch.no_grad()
def latency(
    args: argparse.Namespace,
    name: str,
    batch_size: int,
    shape: tuple[int, int] = DETECTOR,
    part: str = 'model',
    forms: Sequence[str] = (),
    graphs: bool = False,
) -> None:
    """Time a model beside stock, and stock with our parts.

    Args:
        args (argparse.Namespace): The options.
        name (str): A key of :data:`CONFIGS`.
        batch_size (int): Number of images.
        shape (tuple): Their height and width.
        part (str): 'model' or 'backbone'.
        forms (Sequence[str]): What else to time: keys of :data:`NARROW`.
        graphs (bool): Time all of them with CUDA graphs, too.
    """
    if args.small:
        shape, batch_size = (shape if part == 'backbone' else SMALL_IMAGE), 1
    cfg, stock = configs(args, name)
    models = variants(cfg, None, stock)
    models |= {form: variants(even_config(stock, *NARROW[form]))[MODEL] for form in forms}
    for form, model in models.items():
        model.to(args.device)
        if form != STOCK:
            faster_on_gpu_(model)
    if graphs:
        models |= {f'{form}, {GRAPHS}': cuda_graphs_(copied(m)) for form, m in models.items()}
    calls, batch = calls_on(models, part, noise_of_size(models[STOCK], shape, batch_size))
    calls = {form: autocasting(call, dtype(args), args.device) for form, call in calls.items()}
    times = measure(calls, batch, args.repeats)
    title = f'{name}, {batch_size}×{shape[0]}×{shape[1]}'
    values = {form: np.median(found) for form, found in times.items()}
    what = 'GPU latency' + (f' with {GRAPHS}' * graphs or ' of a narrow model' * bool(forms))
    write(args, what, title, args.amp, 'ms', values)


class Select(nn.Module):
    """What a RetinaNet's post-processing does before it decodes boxes, with fixed sizes.

    The host selects scores above a threshold first, and so waits for their number on each level.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.classes, self.topk = head.cls_out_channels, head.test_cfg.nms_pre

    def forward(self, scores: Sequence[torch.Tensor], boxes: Sequence[torch.Tensor]) -> list:
        found = []
        for level, deltas in zip(scores, boxes):
            level = level[0].permute(1, 2, 0).reshape(-1).sigmoid()
            best, index = level.topk(min(self.topk, len(level)))
            rows = deltas[0].permute(1, 2, 0).reshape(-1, 4)[index // self.classes]
            found.append((best, index % self.classes, rows))
        return found


@torch.no_grad()
def selection(args: argparse.Namespace, name: str) -> None:
    """Time the post-processing of one image, its first half, and that with fixed sizes."""
    model = variants(configs(args, name)[0])[DEPLOY].to(args.device)
    data = noise_of_size(model, SMALL_IMAGE if args.small else DETECTOR, 1)
    data, head = model.data_preprocessor(data), model.bbox_head
    maps = head(model.extract_feat(data['inputs']))
    select, metas = Select(head).eval(), [data['data_samples'][0].metainfo]
    host = partial(head.predict_by_feat, batch_img_metas=metas)
    calls = {
        'all': lambda maps: host(*maps),
        'before suppression': lambda maps: host(*maps, with_nms=False),
        'selection, fixed sizes': lambda maps: select(*maps),
    }
    if args.device != 'cpu':
        captured = Captured(select)
        calls[f'selection, fixed sizes, {GRAPHS}'] = lambda maps: captured(*maps)
    times = measure(calls, maps, args.repeats)
    values = {form: np.median(found) for form, found in times.items()}
    write(args, 'GPU post-processing', name, 'float32', 'ms', values)


def training(args: argparse.Namespace, name: str, batch_size: int = 2) -> None:
    """Time training steps by each training path beside stock, with their memory."""
    shape = SMALL_IMAGE if args.small else DETECTOR
    models = training_variants(*configs(args, name), ('literal', 'folded', 'auto'))
    models = {form: model.to(args.device) for form, model in models.items()}
    batch = models[STOCK].data_preprocessor(synthetic_batch(models[STOCK], shape, batch_size), True)
    steps = {form: step(model, dtype(args), args.device) for form, model in models.items()}
    times = measure(steps, batch, args.repeats)
    what, title = 'GPU training step', f'{name}, {batch_size}×{shape[0]}×{shape[1]}'
    values = {form: np.median(values) for form, values in times.items()}
    write(args, what, title, f'time, {args.amp}', 'ms', values)
    if args.device != 'cpu':
        memory = {form: peak_memory(call, batch) for form, call in steps.items()}
        write(args, what, title, f'peak memory, {args.amp}', 'GiB', memory)


def search(args: argparse.Namespace, name: str) -> None:
    """Search on the device for a detector that was trained for an epoch, or has random weights.

    The small one is of the demo's scenes, on which it is trained and tested.
    """
    few = dict(budgets=[0.4], fit_images=2, num_images=2, repeats=3) if args.small else {}
    folder, options = f'{Path(args.out).with_suffix("")}/{name}', None
    if name == DEMO:
        options, sizes = (TINY, (8, 4)) if args.small else (SHORT, (1200, 200))
        write_digit_scenes(DATA, *sizes)
        config = config_path(DEMO)
        checkpoint = train(load_config(config, options), f'{folder}/training')
        few = few or dict(max_loss=0.5)
    else:  # photographs to fit to
        images, config = f'{folder}/images', config_path(CONFIGS[name][args.small].format(''))
        write_photographs(images, SMALL_IMAGE if args.small else DETECTOR)
        checkpoint = f'{folder}/random.pth'
        torch.save(open_model(load_config(config)).state_dict(), checkpoint)
        few = dict(few, num_images=0, images=images)
    begin = time.monotonic()
    rows = speed_up(
        config, checkpoint, f'{folder}/search', cfg_options=options, device=args.device, **few
    )
    write(args, 'GPU search', name, 'all', 's', {'': time.monotonic() - begin})
    for of, key, unit in (('time', 'ms', 'ms'), ('speedup', 'speedup', ''), ('AP', 'metric', '')):
        found = {row.name: getattr(row, key) for row in rows}
        found = {form: value for form, value in found.items() if value is not None}
        write(args, 'GPU search', name, of, unit, found)


def write_photographs(folder: str, shape: tuple[int, int], number: int = 96) -> None:
    """Write parts of the demo's photographs, of one size."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    images = [load_photograph(package, file) for package, file, _ in PHOTOGRAPHS]
    for i in range(number):
        image = images[i % len(images)]
        height, width = (int(size * rng.uniform(0.3, 1)) for size in image.shape[:2])
        part = cv2.resize(image[-height:, -width:], shape[::-1])
        cv2.imwrite(f'{folder}/{i}.jpg', part)


graphs_of = partial(latency, forms=['a quarter of each block'], graphs=True)
# With the most seconds that each may take of ten minutes.
PARTS: dict[str, tuple[Callable, int]] = {
    'retinanet': (partial(latency, name='RetinaNet Swin-B', batch_size=8), 75),
    'mask_rcnn': (partial(latency, name='Mask R-CNN Swin-B', batch_size=8), 75),
    'upernet': (partial(latency, name='UperNet Swin-B', batch_size=8, shape=(512, 512)), 75),
    'backbone': (
        partial(latency, name='Swin-B backbone', batch_size=64, shape=(224, 224), part='backbone'),
        75,
    ),
    'one_image': (partial(latency, name='RetinaNet Swin-B', batch_size=1), 75),
    'narrow': (
        partial(
            latency, name='RetinaNet Swin-B', batch_size=8, forms=['FFNs 0.2, heads a quarter']
        ),
        75,
    ),
    'train_retinanet': (partial(training, name='RetinaNet Swin-B'), 75),
    'train_mask_rcnn': (partial(training, name='Mask R-CNN Swin-B'), 75),
    'graphs_1': (partial(graphs_of, name='RetinaNet Swin-B', batch_size=1), 90),
    'graphs_8': (partial(graphs_of, name='RetinaNet Swin-B', batch_size=8), 90),
    'graphs_mask_rcnn': (partial(graphs_of, name='Mask R-CNN Swin-B', batch_size=1), 90),
    'graphs_upernet': (
        partial(graphs_of, name='UperNet Swin-B', batch_size=1, shape=(512, 512)),
        90,
    ),
    'selection': (partial(selection, name='RetinaNet Swin-B'), 75),
    'search': (partial(search, name=DEMO), 300),
    'search_swin_b': (partial(search, name='RetinaNet Swin-B'), 900),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=[*PARTS], help='all')
    parser.add_argument('--out', default='work_dirs/on_a_gpu.csv', help='%(default)s')
    parser.add_argument('--run', default='1', help='number of the run, in the rows')
    parser.add_argument('--device', default='cuda', help='%(default)s')
    parser.add_argument('--amp', default='float16', choices=('float16', 'bfloat16', 'float32'))
    parser.add_argument('--repeats', type=int, default=10, help='number of turns (%(default)s)')
    parser.add_argument('--minutes', type=float, default=10, help='for all parts (%(default)s)')
    parser.add_argument('--small', action='store_true', help='small models and images')
    args = parser.parse_args()
    if len(args.parts) == 1:
        MMLogger.get_current_instance().setLevel('WARNING')
        return PARTS[args.parts[0]][0](args)
    show_machine()
    stop = time.monotonic() + 60 * args.minutes
    for part in args.parts:
        # The last --parts counts.
        command = [sys.executable, '-m', NAME, *sys.argv[1:], '--parts', part]
        begin, (_, limit) = time.monotonic(), PARTS[part]
        try:
            limit = min(limit * args.minutes / 10, stop - begin)
            subprocess.run(command, check=True, timeout=limit)
            how = 'ran'
        except subprocess.SubprocessError as error:
            how = f'is left out ({type(error).__name__})'
        print(f'{part} {how} after {time.monotonic() - begin:.0f} s', flush=True)


if __name__ == '__main__':
    main()
