"""Putting experts into transformers."""

import torch.nn as nn

from repa_mm.models.surgery.idle import parts_of
from repa_mm.reparam import ChannelIdleFFN, ExpertsFFN, ExpertsIdleFFN, TrainingForm, become


def experts_ffn(block: nn.Module, num_experts: int) -> TrainingForm:
    """Experts in place of the FFN of a block, ordinary or channel-idle.

    The experts have random weights. Only the norms and the layer scale of the FFN are kept.

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
