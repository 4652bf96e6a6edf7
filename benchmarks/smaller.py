r"""What everyone tries first, beside narrower blocks: smaller images, and a smaller model.

Small detectors and segmentors are trained as their configs say: the original; RetinaNet also at
several sizes of images; and models with fewer channels, which have about the multiply-adds that
budgets of 0.6, 0.4 and 0.25 leave of the blocks. The first two are tested on smaller images and
after conversions, too. After the scenes are written, once for each core::

    OMP_NUM_THREADS=1 python -m benchmarks.smaller train OUT_DIR

It begins with what is worth most; several such commands share the work. On the CPU of interest,
with the configs in OUT_DIR, random weights, and as many objects in each image::

    python -m benchmarks.smaller time OUT_DIR --cpu NAME

Results are appended to files with the columns of results.csv.
"""

import argparse
import copy
import gc
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config, DictAction
from mmengine.evaluator import Evaluator
from mmengine.runner import Runner

from benchmarks.compare import append, percent
from repa_mm import config_path
from repa_mm.apis import open_model, read_images
from repa_mm.convert import Conversion
from repa_mm.convert.changed_config import converted_config
from repa_mm.export import ExportedModel, agreeing_onnx
from repa_mm.faster import rewrite_
from repa_mm.io.configs import load_config
from repa_mm.measure.complexity import count
from repa_mm.measure.timing import measure

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
MODELS = {
    'RetinaNet, clothes': 'retinanet_swin_clothes',
    'RetinaNet, digits': 'retinanet_swin_digits',
    'UperNet, digits': 'upernet_swin_digits',
    'Mask R-CNN, digits': 'mask_rcnn_swin_digits',
}
RETINANETS = [*MODELS][:2]
ORIGINAL, SEVERAL, NARROW = 'original', 'several sizes', 'budget'
SIDE, SIDES = 160, (152, 144, 128, 112, 96)
RANGE = 96, 176  # of sides in a training at several sizes
# Channels of a Swin's first stage, which has 48: 0.58, 0.41 and 0.27 of the blocks' multiply-adds.
WIDTHS = 36, 30, 24
BUDGETS = 0.4, 0.6, 0.25
BATCHES = 16  # of images to fit to
BOTH = 0.4, 144, 128  # narrow blocks and smaller images
OBJECTS = 20  # found in each image while costs are measured: a mask head runs for each
Task = tuple[str, str, int]


def tasks(models: list[str]) -> Iterator[Task]:
    """Yield model, form and seed of each training, in the order of their worth."""
    first = [(model, seed) for seed in range(3) for model in models if model in RETINANETS]
    later = [(model, seed) for model in models if model not in RETINANETS for seed in range(3)]
    for model, seed in first + later:
        yield model, ORIGINAL, seed
        yield from ((model, f'width {width}', seed) for width in WIDTHS)
        if model in RETINANETS:
            yield model, SEVERAL, seed


def config_of(model: str, form: str, side: int = SIDE, options: dict | None = None) -> Config:
    """Return the config of a model, which tests on images of a side."""
    cfg = load_config(config_path(f'demo/{MODELS[model]}.py'))
    cfg.visualizer = None
    if 'width' in form:
        width = int(form.split()[-1])
        cfg.model.backbone.arch.embed_dims = width
        dims = [width, 2 * width, 4 * width, 8 * width]
        if model == 'UperNet, digits':
            cfg.model.decode_head.in_channels, cfg.model.auxiliary_head.in_channels = dims, dims[2]
        else:
            cfg.model.neck.in_channels = dims[-len(cfg.model.neck.in_channels) :]
    if model != 'UperNet, digits':
        cfg.model.data_preprocessor.pad_size_divisor = 1  # else 144 pixels become 160
    for step in cfg.test_dataloader.dataset.pipeline:
        if step.type == 'Resize':
            step.scale = side, side
    cfg.merge_from_dict(options or {})
    return cfg


def test(cfg: Config, model: nn.Module) -> dict[str, float]:
    """Return the metrics of a model on the validation scenes."""
    loader = Runner.build_dataloader(dict(cfg.test_dataloader, batch_size=25))
    evaluator = Evaluator(cfg.test_evaluator)
    evaluator.dataset_meta = loader.dataset.metainfo
    model.eval()
    with torch.no_grad():
        for data in loader:
            evaluator.process(model.test_step(data), data)
    return percent(evaluator.evaluate(len(loader.dataset)))


def stem_of(folder: str, model: str, form: str) -> str:
    (Path(folder) / 'models').mkdir(parents=True, exist_ok=True)
    return f'{folder}/models/' + f'{model}-{form}'.replace(', ', '_').replace(' ', '_')


def run(args: argparse.Namespace, model: str, form: str, seed: int) -> None:
    """Train a model, and test it."""
    cfg = config_of(model, form, options=args.cfg_options)
    cfg.work_dir, cfg.experiment_name = f'{args.folder}/log', f'{model}, {form}, {seed}'
    cfg.randomness.seed, cfg.train_cfg.val_begin, cfg.default_hooks.checkpoint = seed, 10**9, None
    cfg.default_hooks.logger.interval = 10**9
    cfg.train_dataloader.update(num_workers=1, persistent_workers=True)
    training = copy.deepcopy(cfg)
    if form == SEVERAL:
        resize = dict(type='BatchSyncRandomResize', random_size_range=RANGE, size_divisor=16)
        training.model.data_preprocessor.batch_augments = [dict(resize, interval=1)]
    runner = Runner.from_cfg(training)
    runner.train()
    trained, options = runner.model, args.cfg_options

    def write(tested: nn.Module, name: str, side: int) -> None:
        metrics = test(config_of(model, form, side, options), tested)
        row = dict(what='smaller', model=model, form=f'{name}, {side}', run=f'seed {seed}')
        append(f'{args.folder}/smaller.csv', row, metrics)

    write(trained, form, SIDE)
    if 'width' in form:
        return
    for side in SIDES:
        write(trained, form, side)
    opened = open_model(cfg)
    opened.load_state_dict(trained.state_dict())
    opened.to(DEVICE)
    images = read_images(cfg, 'train', args.images)
    # In batches, whose kernels keep a GPU busier.
    groups = [images[i::BATCHES] for i in range(min(BATCHES, len(images)))]
    groups = [{key: [data[key][0] for data in group] for key in group[0]} for group in groups]
    batches = [opened.data_preprocessor(group, False) for group in (*groups, images[0])]
    conversion = Conversion(opened, batches[:-1], full_size=batches[-1:])
    prefix = '' if form == ORIGINAL else f'{form} and '
    for budget in BUDGETS:
        narrow, _ = conversion.fit(conversion.sizes(budget))
        name = prefix + f'{NARROW} {budget}'
        for side in (SIDE, *BOTH[1:]) if budget == BOTH[0] else (SIDE,):
            write(narrow, name, side)
        if seed == 0:
            Path(f'{stem_of(args.folder, model, name)}.py').write_text(narrow.cfg.pretty_text)


def train(args: argparse.Namespace) -> None:
    """Run what nobody has begun."""
    for model, form, seed in tasks(args.models):
        claim = Path(stem_of(args.folder, model, f'{form}-{seed}.claim'))
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            continue
        begin = time.monotonic()
        try:
            run(args, model, form, seed)
            how = 'ran'
        except Exception:  # the others are worth having
            traceback.print_exc()
            how = 'FAILED'
        gc.collect()  # the loaders' processes
        seconds = time.monotonic() - begin
        print(f'{model}, {form}, seed {seed} {how} after {seconds:.0f} s', flush=True)


def with_objects_(model: nn.Module) -> None:
    """Let a detector find OBJECTS in every image, whatever its weights and the size, in place."""
    for name in ('roi_head', 'bbox_head'):
        if cfg := getattr(getattr(model, name, None), 'test_cfg', None):
            cfg.update(score_thr=0.0, nms_pre=5 * OBJECTS, max_per_img=OBJECTS)


@torch.no_grad()
def measured(args: argparse.Namespace) -> None:
    """Count the multiply-adds of whole models, and time them in turn."""
    torch.set_num_threads(args.threads)
    forms = [ORIGINAL, *(f'width {w}' for w in WIDTHS), *(f'{NARROW} {b}' for b in BUDGETS)]
    sides = {ORIGINAL: [SIDE, *SIDES], f'{NARROW} {BOTH[0]}': [SIDE, *BOTH[1:]]}
    for model in args.models:
        calls = {}
        for form in forms:
            stem = stem_of(args.folder, model, form)
            cfg = load_config(f'{stem}.py') if NARROW in form else config_of(model, form)
            opened = open_model(cfg)
            # All have the exact parts of narrow ones.
            cfg = converted_config(cfg, opened, rewritten=rewrite_(opened, 'train'))
            opened = open_model(cfg)
            with_objects_(opened)
            content, _ = agreeing_onnx(opened, read_images(cfg, 'val', 8))
            Path(f'{stem}.onnx').write_bytes(content)
            exported = ExportedModel(f'{stem}.onnx', opened.data_preprocessor, 'f32')
            for side in sides.get(form, [SIDE]):
                (data,) = read_images(config_of(model, ORIGINAL, side), 'val', 1)
                batch = opened.data_preprocessor(copy.deepcopy(data), False)
                macs = count(opened, dict(batch, mode='predict'))[1]
                row = dict(what='smaller', model=model, form=f'{form}, {side}', run='seed 0')
                append(args.out, dict(row, unit='GMACs'), {'multiply-adds': macs / 1e9})
                for way, run in (('PyTorch', opened), ('OpenVINO f32', exported)):
                    calls[row['form'], way] = partial(call, run, data)
        for (form, way), values in measure(calls, None, args.repeats).items():
            row = dict(what='smaller', model=model, form=form, cpu=args.cpu, run='seed 0')
            append(args.out, dict(row, unit='ms'), {f'time, {way}': float(np.median(values))})


def call(model: nn.Module, data: dict, _: None) -> None:
    """Predict one image."""
    model.test_step(copy.deepcopy(data))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser('train')
    command.add_argument('folder')
    command.add_argument('--models', nargs='+', choices=MODELS, default=[*MODELS])
    command.add_argument('--images', type=int, default=64, help='to fit to (%(default)s)')
    command.add_argument('--cfg-options', nargs='+', action=DictAction, default={})
    command.set_defaults(function=train)
    command = commands.add_parser('time')
    command.add_argument('folder')
    command.add_argument('--models', nargs='+', choices=MODELS, default=[*MODELS])
    command.add_argument('--cpu', required=True, help='in plain words')
    command.add_argument('--threads', type=int, default=2)
    command.add_argument('--repeats', type=int, default=15, help='number of turns (%(default)s)')
    command.add_argument('--out', default='work_dirs/smaller_times.csv')
    command.set_defaults(function=measured)
    args = parser.parse_args()
    args.function(args)


if __name__ == '__main__':
    main()
