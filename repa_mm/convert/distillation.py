"""Training a converted model to imitate the original model, without labels."""

import copy
import os.path as osp
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.runner import Runner
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.checkpoints import load_checkpoint, load_original, save_checkpoint
from repa_mm.config import image_config, load_config
from repa_mm.faster.tracing import swap_faster_attention_
from repa_mm.features import channels_last, has_channels_first, head_inputs, tensors
from repa_mm.files import replacing
from repa_mm.models.sites import ffn_sites
from repa_mm.reparam import CheckpointError, become_


class _Distilled:
    """Mixin for the models of :func:`build_distiller`.

    Attributes:
        teacher (nn.Module): The original model. It is not registered as a child, so that
            checkpoints, optimizers and wrappers have the student alone.
        channels_first (bool): Whether the student's tokens are (B, C, N).
    """

    def loss(self, inputs: torch.Tensor, data_samples: list | None = None) -> dict:
        """Compute the difference from the teacher's inputs of the heads, as ``loss_features``.

        Args:
            inputs (torch.Tensor): Normalized images (B, 3, H, W).
            data_samples (list, optional): Samples with the sizes of the images, for models that
                mask padding.
        """
        data = dict(inputs=inputs, data_samples=data_samples)
        if next(self.teacher.parameters()).device != inputs.device:
            self.teacher.to(inputs.device)
        with torch.no_grad():
            target = tensors(head_inputs(self.teacher, data))
        found = tensors(head_inputs(self, data))
        return dict(loss_features=_distance(found, target, self.channels_first))

    def train(self, mode: bool = True):
        """Stay in eval mode, as the teacher does: without dropout and batch statistics."""
        super().train(False)
        # After it, since backbones freeze their frozen stages in train().
        self.requires_grad_(False)
        for site in ffn_sites(self):
            parts = site.parts()
            for part in (parts.fc1, parts.fc2, parts.scale):
                if isinstance(part, (nn.Module, nn.Parameter)):
                    part.requires_grad_(True)
        return self


def _distance(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], channels_first: bool
) -> torch.Tensor:
    """Compute the mean square difference of features, relative to the variance of their channels.

    For features with one vector per image, it is relative to their mean square.
    """
    total = 0.0
    for a, b in zip(found, expected):
        a, b = (channels_last(v, channels_first).float() for v in (a, b))
        # A batch of one image has one pooled feature vector, which has no variance.
        varies = b.numel() > b.shape[-1] * max(len(b), 1)
        centred = b - b.mean(tuple(range(b.ndim - 1)), keepdim=True) if varies else b
        total = total + (a - b).square().mean() / centred.square().mean().clamp(min=1e-12)
    return total / len(found)


@cache
def _distilled_class(kind: type) -> type:
    return type(
        f'Distilled{kind.__name__}',
        (_Distilled, kind),
        dict(__doc__=kind.__doc__, __module__=__name__),
    )


@MODELS.register_module(name='FeatureDistiller')
def build_distiller(
    student: dict, teacher_checkpoint: str, teacher: dict, data_preprocessor: dict | None = None
) -> nn.Module:
    """Build a converted model that learns to imitate the original model.

    It is the student itself with another ``loss()``. Its checkpoints, predictions and metrics are
    the student's, and all features of MMEngine's Runner work. A config that inherits from the
    student's trains it::

        model = dict(
            _delete_=True, type='FeatureDistiller', student={{_base_.model}},
            teacher_checkpoint='original.pth', teacher=dict(type=..., ...))
        load_from = 'narrow.pth'

    The loss is the mean square difference of the heads' inputs, see
    :func:`~repa_mm.features.head_inputs`, relative to the variance of their channels. Only the FFNs
    of the backbone and encoder are trained.

    Args:
        student (dict): Config of the converted detector, segmentor or classifier.
        teacher_checkpoint (str): Weights of the original model: a path or a URL.
        teacher (dict): Config of the original model.
        data_preprocessor (dict, optional): Data preprocessor of a student whose config has none.
            MMEngine's Runner passes the ``data_preprocessor`` beside ``model`` in a config.

    Returns:
        nn.Module: The student.

    Raises:
        CheckpointError: If the weights do not fit the teacher.
    """
    student = copy.deepcopy(student)
    if data_preprocessor is not None:
        student.setdefault('data_preprocessor', copy.deepcopy(data_preprocessor))
    # Batch augmentations mix labels or resize boxes, which do not exist here.
    for cfg in (student, student.get('model') or {}):
        for part, key in (('train_cfg', 'augments'), ('data_preprocessor', 'batch_augments')):
            (cfg.get(part) or {}).pop(key, None)
    model = MODELS.build(copy.deepcopy(student))
    teacher = MODELS.build(copy.deepcopy(teacher))
    load_original(teacher, load_checkpoint(teacher_checkpoint)['state_dict'], teacher_checkpoint)
    swap_faster_attention_(teacher)
    teacher.requires_grad_(False).eval()
    become_(model, _distilled_class(type(model)))
    model.__dict__['teacher'] = teacher
    model.channels_first = has_channels_first(model)
    return model.train()


def distillation_config(
    cfg: Config,
    teacher: dict,
    teacher_checkpoint: str,
    iters: int,
    images: str | None = None,
    leave_out: Sequence[str] = (),
) -> Config:
    """Return the config of a distillation.

    Args:
        cfg (Config): Config of the converted model.
        teacher (dict): Config of the original model.
        teacher_checkpoint (str): Checkpoint of the original model.
        iters (int): Number of iterations.
        images (str, optional): A folder of images. Defaults to the config's training data.
        leave_out (Sequence[str]): Images of the folder to leave out, see
            :class:`~repa_mm.datasets.folder.ImageFolder`.
    """
    cfg, warm_up = copy.deepcopy(cfg), max(1, iters // 20)
    cfg.model = dict(
        type='FeatureDistiller',
        student=cfg.model,
        teacher_checkpoint=teacher_checkpoint,
        teacher=teacher,
    )
    cfg.optim_wrapper = dict(
        type='OptimWrapper',
        # The usual 0.999 would average over more steps than a short distillation has. The learning
        # rate is relative to the size of each parameter.
        optimizer=dict(type='RelativeAdamW', lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0),
    )
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=warm_up),
        dict(type='CosineAnnealingLR', by_epoch=False, begin=warm_up, end=iters, eta_min=0.0),
    ]
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=iters)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.custom_hooks = []
    interval = max(1, iters // 5)
    cfg.default_hooks = dict(
        cfg.get('default_hooks') or {},
        logger=dict(type='LoggerHook', interval=max(1, min(50, iters // 10))),
        checkpoint=dict(type='CheckpointHook', interval=interval, by_epoch=False, max_keep_ckpts=2),
    )
    cfg.log_processor = dict(type='LogProcessor', window_size=max(1, iters // 10), by_epoch=False)
    cfg.find_unused_parameters = True
    if cfg.get('randomness') is None:
        cfg.randomness = dict(seed=0)
    if images is not None:
        dataset = image_config(cfg, 'train', images, leave_out=list(leave_out))
        cfg.train_dataloader = dict(
            batch_size=1,  # images of any size
            num_workers=(cfg.get('train_dataloader') or {}).get('num_workers', 0),
            sampler=dict(type='InfiniteSampler', shuffle=True),
            dataset=dataset,
        )
    return cfg


def distill_checkpoint(
    config: str, checkpoint: str, teacher: dict, teacher_checkpoint: str, iters: int, **data
) -> None:
    """Run a distillation, and replace the checkpoint that it starts from.

    The config of the distillation is written beside the model's config, as '…_distill.py'.

    Args:
        config (str): Config of the converted model, '….py'.
        checkpoint (str): The converted checkpoint.
        teacher (dict): Config of the original model.
        teacher_checkpoint (str): Checkpoint of the original model.
        iters (int): Number of iterations.
        **data: ``images`` and ``leave_out`` of :func:`distillation_config`.

    Raises:
        CheckpointError: If weights became infinite or NaN. The checkpoint then stays as it was.
    """
    if '://' not in teacher_checkpoint:
        teacher_checkpoint = osp.abspath(teacher_checkpoint)
    cfg = load_config(config)
    cfg = distillation_config(cfg, teacher, teacher_checkpoint, iters, **data)
    stem = f'{osp.splitext(osp.abspath(config))[0]}_distill'
    cfg.work_dir, cfg.load_from = stem, osp.abspath(checkpoint)
    with replacing(f'{stem}.py') as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(f'# Distillation of {osp.basename(config)}.\n{cfg.pretty_text}')
    weights = weights_to_cpu(Runner.from_cfg(cfg).train().state_dict())
    for name, value in weights.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(
                f'the distillation has failed: {name!r} has values that are not finite. '
                f'{checkpoint!r} stays as it was before'
            )
    save_checkpoint(dict(load_checkpoint(checkpoint), state_dict=weights), checkpoint)
