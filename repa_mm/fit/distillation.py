"""Distillation of a converted checkpoint, under MMEngine's Runner."""

import os.path as osp
from collections.abc import Sequence

from mmengine.config import Config
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.files import replacing
from repa_mm.reparam import CheckpointError, innermost
from repa_mm.run.config import dataset_config, load_config, plain
from repa_mm.run.runners import runner_for_training
from repa_mm.weights import check_values, is_remote, load_checkpoint, save_checkpoint

# Parts of a config that inherit nothing.
_REPLACED = (
    'optim_wrapper', 'train_cfg', 'train_dataloader', 'log_processor', 'logger', 'checkpoint',
)  # fmt: skip


def distillation_settings(iters: int, lr: float = 1e-4) -> dict:
    """The parts of a config that a distillation changes, whatever the model and the data.

    Args:
        iters (int): Number of iterations.
        lr (float): Largest step, as a share of the size of each parameter. Defaults to 1e-4.

    Raises:
        ValueError: If there are fewer than two iterations.
    """
    if iters < 2:
        raise ValueError(f'a distillation needs at least 2 iterations, got {iters}')
    warm_up = max(1, iters // 20)
    return dict(
        optim_wrapper=dict(
            type='OptimWrapper',
            # Distillations are short: the usual 0.999 would average over more steps than they have.
            optimizer=dict(type='RelativeAdamW', lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        ),
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=warm_up),
            dict(type='CosineAnnealingLR', by_epoch=False, begin=warm_up, end=iters, eta_min=0.0),
        ],
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=iters),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=max(1, min(50, iters // 10))),
            checkpoint=dict(
                type='CheckpointHook', interval=max(1, iters // 5), by_epoch=False, max_keep_ckpts=2
            ),
        ),
        custom_hooks=[],
        log_processor=dict(type='LogProcessor', window_size=max(1, iters // 10), by_epoch=False),
    )


def write_distillation(
    config: str,
    teacher_checkpoint: str,
    iters: int,
    images: str | None = None,
    leave_out: Sequence[str] = (),
) -> str:
    """Write the config of a distillation beside that of a converted model.

    Args:
        config (str): The config of the converted model, '….py'. The other one is
            '…_distill.py', and inherits from it.
        teacher_checkpoint (str): The checkpoint of the original model.
        iters (int): Number of iterations. All blocks learn together: the fit has done what
            each can learn alone.
        images (str, optional): A folder of images. Defaults to the config's training data.
        leave_out (Sequence[str]): Images of the folder that are for something else, see
            :class:`~repa_mm.datasets.folder.ImageFolder`.

    Returns:
        str: The path of the file.
    """
    if not is_remote(teacher_checkpoint):
        teacher_checkpoint = osp.realpath(teacher_checkpoint)
    cfg, more = load_config(config), distillation_settings(iters)
    if (cfg.get('randomness') or {}).get('seed') is None:
        more['randomness'] = dict(seed=0)
    # There need not be labels.
    more.update(dict.fromkeys(('val_cfg', 'val_dataloader', 'val_evaluator')))
    more['find_unused_parameters'] = True
    # The learning rate is a share of the parameters, whatever the number of GPUs.
    more['auto_scale_lr'] = None
    path = f'{osp.splitext(config)[0]}_distill.py'
    more['work_dir'] = osp.splitext(osp.abspath(path))[0]
    if images is not None:
        more['train_dataloader'] = dict(
            batch_size=1,  # images of any size
            num_workers=(cfg.get('train_dataloader') or {}).get('num_workers', 0),
            sampler=dict(type='InfiniteSampler', shuffle=True),
            dataset=dict(
                type='ImageFolder',
                data_root=osp.abspath(images),
                pipeline=plain(dataset_config(cfg, 'test').pipeline),
                leave_out=list(leave_out),
            ),
        )
    # Nothing of what the base has in these places. MMEngine removes '_delete_' only from parts
    # that the base has.
    hooks = cfg.get('default_hooks') or {}
    for base, own in ((cfg, more), (hooks, more['default_hooks'])):
        for key in own:
            if key in base and key in _REPLACED:
                own[key]['_delete_'] = True
    name = osp.basename(config)
    with replacing(path) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(
            f'# The distillation of {name}: python tools/train.py {osp.basename(path)}\n'
            f'_base_ = {name!r}\n\n'
            'model = dict(\n'
            '    _delete_=True,\n'
            "    type='FeatureDistiller',\n"
            '    student={{_base_.model}},\n'
            f'    teacher_checkpoint={teacher_checkpoint!r},\n'
            ')\n'
            f'{Config(more).pretty_text}'
        )
    return path


def distill_checkpoint(config: str, checkpoint: str, work_dir: str | None = None) -> None:
    """Run a distillation, and replace the checkpoint that it starts from.

    Args:
        config (str): From :func:`write_distillation`.
        checkpoint (str): The converted checkpoint.
        work_dir (str, optional): Folder for logs and checkpoints. Defaults to that of the config.

    Raises:
        CheckpointError: If weights have become infinite or NaN; the checkpoint stays as it was.
    """
    runner = runner_for_training(config, work_dir, cfg_options=dict(load_from=checkpoint))
    runner.train()
    meta = load_checkpoint(checkpoint).get('meta', {})
    weights = weights_to_cpu(innermost(runner.model).state_dict())
    try:
        check_values(weights)
    except CheckpointError as error:
        raise CheckpointError(
            f'the distillation has failed, and {checkpoint!r} is as it was without it: {error}'
        ) from error
    save_checkpoint(dict(meta=meta, state_dict=weights), checkpoint)
