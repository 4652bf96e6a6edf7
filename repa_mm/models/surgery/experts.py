"""Putting experts into transformers."""

import torch
import torch.nn as nn

from repa_mm.models.surgery.idle import parts_of
from repa_mm.reparam import ChannelIdleFFN, ExpertsFFN, ExpertsIdleFFN, TrainingForm, become

_KEYS = 'weight', 'bias'


def experts_ffn(block: nn.Module, num_experts: int) -> TrainingForm:
    """Experts in place of the FFN of a block, ordinary or channel-idle.

    The experts have random weights, see :func:`fill_experts` for others. Only the norms and the
    layer scale of the FFN are kept.

    Args:
        block (nn.Module): The block, one of those that
            :func:`~repa_mm.models.surgery.idle.find_blocks` finds.
        num_experts (int): Number of experts.

    Raises:
        ValueError: If the FFN is of another kind, or the number of experts is below 1.
    """
    ffn = block.ffn
    if type(ffn) is ChannelIdleFFN:
        become(ffn, ExpertsIdleFFN)
        ffn.add_experts(num_experts)
        return ffn
    parts = parts_of(block)
    experts = ExpertsFFN(
        ffn.embed_dims,
        ffn.feedforward_channels,
        num_experts,
        parts.act,
        drop_rate=parts.drop,
        drop_path=parts.drop_path,
    )
    if parts.scale is not None:
        experts.layer_scale = nn.Parameter(parts.scale.detach().clone())
    return experts.to(parts.fc1.weight).train(ffn.training)


def fill_experts(state_dict: dict, start: str, form: nn.Module) -> None:
    """Give every expert of an FFN the weights of an FFN without experts, in place.

    Args:
        state_dict (dict): Of a ViT of mmpretrain, or of a ``RePaVisionTransformer`` if the experts
            are channel-idle. Weights of experts, and those in a deploy form, stay as they are.
        start (str): What the names of the FFN's weights begin with.
        form (nn.Module): The experts.
    """
    if isinstance(form, ExpertsFFN):
        layers = dict(fc1='layers.0.0', fc2='layers.1')
    elif isinstance(form, ExpertsIdleFFN) and any(f'{start}norm1.' in key for key in state_dict):
        layers = dict(fc1='fc1', fc2='fc2')
    else:
        return
    if not all(f'{start}{name}.{key}' in state_dict for name in layers.values() for key in _KEYS):
        return
    weights = {
        f'{layer}.{key}': state_dict.pop(f'{start}{name}.{key}')
        for layer, name in layers.items()
        for key in _KEYS
    }
    if isinstance(form, ExpertsFFN):
        scale = state_dict.pop(f'{start}gamma2.weight', torch.ones_like(weights['fc2.bias']))
        if form.layer_scale is None:
            weights['fc2.weight'] = scale[:, None] * weights['fc2.weight']
            weights['fc2.bias'] = scale * weights['fc2.bias']
        else:
            state_dict[f'{start}layer_scale'] = scale
    for name, value in weights.items():
        layer, key = name.split('.')
        for e in range(len(form.fc1.experts)):
            state_dict[f'{start}{layer}.experts.{e}.{key}'] = value.clone()
