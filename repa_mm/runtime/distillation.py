"""Distillation of a converted checkpoint, under MMEngine's Runner."""

import os.path as osp

from mmengine.config import Config
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.checkpoints import is_remote, load_checkpoint, save_checkpoint
from repa_mm.files import replacing
from repa_mm.reparam import innermost
from repa_mm.runtime.config import dataset_config, load_config, plain
from repa_mm.runtime.runners import runner_for_training


def distillation_settings(iters: int, lr: float = 1e-3) -> dict:
    """The parts of a config that a distillation changes, whatever the model and the data.

    Args:
        iters (int): Number of iterations.
        lr (float): Largest step, as a share of the size of each parameter. Defaults to 1e-3.

    Raises:
        ValueError: If there are fewer than two iterations.
    """
    if iters < 2:
        raise ValueError(f'a distillation needs at least 2 iterations, got {iters}')
    warm_up = max(1, iters // 20)
    return dict(
        optim_wrapper=dict(
            type='OptimWrapper', optimizer=dict(type='RelativeAdamW', lr=lr, weight_decay=0.0)
        ),
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=warm_up),
            dict(type='CosineAnnealingLR', by_epoch=False, begin=warm_up, end=iters, eta_min=0.0),
        ],
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=iters),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=max(1, min(50, iters // 10))),
            checkpoint=dict(
                type='SafeCheckpointHook',
                interval=max(1, iters // 5),
                by_epoch=False,
                max_keep_ckpts=1,
            ),
        ),
        custom_hooks=[],
        log_processor=dict(type='LogProcessor', window_size=max(1, iters // 10), by_epoch=False),
    )


def write_distillation(
    config: str, teacher_checkpoint: str, iters: int, images: str | None = None
) -> str:
    """Write the config of a distillation beside that of a converted model.

    Args:
        config (str): The config of the converted model, '….py'. The other one is
            '…_distill.py', and inherits from it.
        teacher_checkpoint (str): The checkpoint of the original model.
        iters (int): Number of iterations: each block learns alone in the first half of them.
        images (str, optional): A folder of images. Defaults to the config's training data.

    Returns:
        str: The path of the file.
    """
    if not is_remote(teacher_checkpoint):
        teacher_checkpoint = osp.realpath(teacher_checkpoint)
    more = distillation_settings(iters)
    replaced = [more[key] for key in ('optim_wrapper', 'train_cfg', 'log_processor')]
    # There need not be labels.
    more.update(dict.fromkeys(('val_cfg', 'val_dataloader', 'val_evaluator')))
    more['find_unused_parameters'] = True
    if images is not None:
        cfg = load_config(config)
        more['train_dataloader'] = dict(
            batch_size=1,  # images of any size
            num_workers=(cfg.get('train_dataloader') or {}).get('num_workers', 0),
            sampler=dict(type='InfiniteSampler', shuffle=True),
            dataset=dict(
                type='ImageFolder',
                data_root=osp.abspath(images),
                pipeline=plain(dataset_config(cfg, 'test').pipeline),
            ),
        )
        replaced.append(more['train_dataloader'])
    # Nothing of what the base has in these places.
    for part in (*replaced, *more['default_hooks'].values()):
        part['_delete_'] = True
    name = osp.basename(config)
    path = f'{osp.splitext(config)[0]}_distill.py'
    with replacing(path) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(
            f'# The distillation of {name}: python tools/train.py {osp.basename(path)}\n'
            f'_base_ = {name!r}\n\n'
            'model = dict(\n'
            '    _delete_=True,\n'
            "    type='FeatureDistiller',\n"
            '    student={{_base_.model}},\n'
            f'    teacher_checkpoint={teacher_checkpoint!r},\n'
            f'    block_iters={iters // 2},\n'
            ')\n'
            f'{Config(more).pretty_text}'
        )
    return path


def distill_checkpoint(config: str, checkpoint: str, work_dir: str | None = None) -> None:
    """Run a distillation, and replace the checkpoint that it starts from.

    Args:
        config (str): From :func:`write_distillation`.
        checkpoint (str): The converted checkpoint.
        work_dir (str, optional): Folder for logs and checkpoints. Defaults to that of the config
            without its suffix.
    """
    runner = runner_for_training(
        config, work_dir or osp.splitext(config)[0], cfg_options=dict(load_from=checkpoint)
    )
    runner.train()
    meta = load_checkpoint(checkpoint).get('meta', {})
    weights = weights_to_cpu(innermost(runner.model).state_dict())
    save_checkpoint(dict(meta=meta, state_dict=weights), checkpoint)
