r"""Train README's example, a RetinaNet with Swin-T on clothes of several sizes, on a GPU.

::

    python -m benchmarks.objects --clothes FOLDER --photographs FOLDER --workers 15 \
        --sizes 320 384 448 512 --val 300 --out data/clothes_sizes
    python -m benchmarks.example train OUT_DIR --seconds 170
    python -m benchmarks.example join OUT_DIR retinanet_swin_t_clothes.pth

The weights are written in float16, in parts of 15 MB. Joined, they are a checkpoint of
configs/demo/retinanet_swin_t_clothes.py.
"""

import argparse
import io
from pathlib import Path

import torch
from mmengine.config import DictAction
from mmengine.runner import Runner

import benchmarks.quick  # noqa: F401
from benchmarks.compare import METRICS, append
from repa_mm import config_path
from repa_mm.io.checkpoints import save_checkpoint
from repa_mm.io.configs import load_config

NAME, CONFIG = 'RetinaNet Swin-T, clothes', 'demo/retinanet_swin_t_clothes.py'
PART = 15 << 20  # bytes


def train(args: argparse.Namespace) -> None:
    """Train until the time is over, test, and write the weights."""
    cfg = load_config(config_path(CONFIG), args.cfg_options)
    cfg.work_dir, cfg.visualizer, cfg.param_scheduler = f'{args.folder}/log', None, []
    cfg.model.bbox_head.type = 'BatchedRetinaHead'
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=10**6, val_interval=10**6)
    cfg.train_dataloader.sampler = dict(type='InfiniteSampler')  # another pauses at each epoch
    cfg.custom_hooks = [dict(type='Deadline', seconds=args.seconds)]
    cfg.default_hooks.checkpoint, cfg.log_processor.by_epoch = None, False
    cfg.test_dataloader.update(batch_size=16, num_workers=4)
    cfg.env_cfg.resource_limit = 1 << 16  # each tensor that a worker returns is an open file
    if torch.cuda.is_available():
        cfg.optim_wrapper.update(type='AmpOptimWrapper', dtype='float16', loss_scale='dynamic')
    runner = Runner.from_cfg(cfg)
    runner.train()
    meta = dict(iterations=runner.iter, dataset_meta=runner.train_dataloader.dataset.metainfo)
    state = runner.model.state_dict().items()
    state = {name: x.half() if x.is_floating_point() else x for name, x in state}
    content = io.BytesIO()
    torch.save(dict(meta=meta, state_dict={name: x.cpu() for name, x in state.items()}), content)
    for i, start in enumerate(range(0, content.tell(), PART)):
        Path(args.folder, f'part{i}').write_bytes(content.getbuffer()[start : start + PART])
    found = runner.test()
    metrics = {name: scale * float(found[k]) for k, (name, scale) in METRICS.items() if k in found}
    row = dict(what='example', model=NAME, form=f'{runner.iter} iterations', run='1')
    append(f'{args.folder}/example.csv', row, metrics)


def join(args: argparse.Namespace) -> None:
    """Write a checkpoint in float32 from the parts."""
    parts = sorted(Path(args.folder).glob('part*'))
    loaded = torch.load(io.BytesIO(b''.join(part.read_bytes() for part in parts)))
    state = loaded['state_dict']
    state = {name: x.float() if x.is_floating_point() else x for name, x in state.items()}
    save_checkpoint(dict(loaded, state_dict=state), args.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for function in (train, join):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.add_argument('folder')
        command.set_defaults(function=function)
        if function is join:
            command.add_argument('out')
        else:
            command.add_argument('--seconds', type=float, default=170)
            command.add_argument('--cfg-options', nargs='+', action=DictAction, default={})
    args = parser.parse_args()
    args.function(args)


if __name__ == '__main__':
    main()
