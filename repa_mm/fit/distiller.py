"""A model with channel-idle FFNs imitates the original one, without labels."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn as nn
from mmengine.logging import MessageHub
from mmengine.registry import MODELS

from repa_mm.fit.walk import tensors
from repa_mm.models.attention import swap_attention
from repa_mm.reparam import TrainingForm, become, outermost
from repa_mm.weights import load_anywhere, load_weights


class _Distilled:
    """Mixin of the models that :func:`build_distiller` makes.

    Attributes:
        teacher (nn.Module): The original model. It is no child: checkpoints, optimizers and
            wrappers see the student alone.
        blocks (list[str]): The names of the blocks with training forms.
        block_iters (int): Number of iterations in which each block learns alone.
    """

    def loss(self, inputs: torch.Tensor, data_samples: list | None = None) -> dict:
        """How far outputs of the blocks, or the features for the heads, are from the teacher's.

        Args:
            inputs (torch.Tensor): Normalized images (B, 3, H, W).
            data_samples (list, optional): Not used.

        Returns:
            dict: ``loss_blocks`` in the first iterations, with ``features`` for the log, and
            ``loss_features`` afterwards.
        """
        if next(self.teacher.parameters()).device != inputs.device:
            self.teacher.to(inputs.device)
        by_block = MessageHub.get_current_instance().get_info('iter', 0) < self.block_iters
        names = self.blocks if by_block else []
        with torch.no_grad(), _recorded(self.teacher, names) as expected:
            target = tensors(self.teacher.extract_feat(inputs))
        with _recorded(self, names) as found:
            features = _distance(tensors(self.extract_feat(inputs)), target)
        if not by_block:
            return dict(loss_features=features)
        blocks = sum(_distance(found[name], expected[name]) for name in names) / len(names)
        return dict(loss_blocks=blocks, features=features.detach())

    def train(self, mode: bool = True):
        """Stay in eval mode: the teacher has neither dropout nor statistics of a batch."""
        super().train(False)
        # Backbones with frozen stages freeze them here.
        self.requires_grad_(False)
        for _, form in outermost(self, TrainingForm):
            form.requires_grad_(True)
        return self


@contextmanager
def _recorded(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Yield what the named modules return, by name; no gradients go from one to another."""
    outputs: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name in names:
        module = model.get_submodule(name)

        def note(module, args, output, name=name):
            outputs[name] = tensors(output)

        def detach(module, args):
            return tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in args)

        handles.append(module.register_forward_hook(note))
        handles.append(module.register_forward_pre_hook(detach))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean square difference of tensors, relative to the variance of their channels.

    Of tensors with one vector per image, relative to their mean square.
    """
    total = 0.0
    for a, b in zip(found, expected):
        a, b = a.float(), b.float()
        channels = 1 if b.ndim == 4 else b.ndim - 1
        others = [i for i in range(b.ndim) if i != channels]
        # Pooled features vary over the images of a batch only, and one image has one of them.
        varies = b.numel() > b.shape[channels] * max(len(b), 1)
        centred = b - b.mean(others, keepdim=True) if varies else b
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
    student: dict,
    teacher_checkpoint: str,
    teacher: dict | None = None,
    block_iters: int = 0,
    data_preprocessor: dict | None = None,
) -> nn.Module:
    """Build a model whose training lets its training forms imitate the original model.

    It is the student itself with another ``loss()``: its checkpoints, predictions and metrics are
    those of the student, and everything of MMEngine's Runner works with it. A config that inherits
    from that of the student trains it::

        model = dict(
            _delete_=True, type='FeatureDistiller', student={{_base_.model}},
            teacher_checkpoint='vanilla.pth', block_iters=500)
        load_from = 'idle.pth'

    For ``block_iters`` iterations each block learns to return what the teacher's block returns,
    given what it gets from the blocks before it, which do not learn from its errors. Afterwards
    all blocks learn together to give the heads the same features: the outputs of ``extract_feat``.
    Errors are squared, and relative to the variance of the channels. Weights outside of the
    training forms, BatchNorm statistics, and which channels are idle stay as they are.

    Args:
        student (dict): Config of a detector, segmentor or classifier with training forms.
        teacher_checkpoint (str): Weights of the original model: a path or a URL.
        teacher (dict, optional): Config of the original model. Defaults to the student's with the
            backbone that its ``IdleChannels`` names.
        block_iters (int): How many iterations the blocks learn each alone. Defaults to 0.
        data_preprocessor (dict, optional): That of a student whose config has none: MMEngine's
            Runner hands on the one that stands beside ``model`` in a config.

    Returns:
        nn.Module: The model.

    Raises:
        ValueError: If the student has no training form, or no teacher is known.
        CheckpointError: If the weights do not fit the teacher.
    """
    student = copy.deepcopy(student)
    if data_preprocessor is not None:
        student.setdefault('data_preprocessor', copy.deepcopy(data_preprocessor))
    # Mixed images would need labels to mix, resized ones boxes to resize.
    for part, key in (('train_cfg', 'augments'), ('data_preprocessor', 'batch_augments')):
        (student.get(part) or {}).pop(key, None)
    if teacher is None:
        inner = student.get('backbone', {}).get('backbone')
        if inner is None:
            raise ValueError(
                "FeatureDistiller needs a 'teacher', the config of the original model: the "
                "student's backbone is not of the type IdleChannels, which has one"
            )
        teacher = dict(copy.deepcopy(student), backbone=inner)
    model, original = MODELS.build(student), MODELS.build(teacher)
    names = [name for name, _ in outermost(model, TrainingForm)]
    if not names:
        raise ValueError('the student of FeatureDistiller has nothing to train: no training form')
    weights = load_anywhere(teacher_checkpoint)['state_dict']
    load_weights(original, weights, teacher_checkpoint, exact=False)
    swap_attention(original.backbone)
    original.requires_grad_(False).eval()
    become(model, _distilled_class(type(model)))
    model.__dict__['teacher'] = original
    model.blocks = list(dict.fromkeys(name.rpartition('.')[0] for name in names))
    model.block_iters = block_iters
    return model.train()
