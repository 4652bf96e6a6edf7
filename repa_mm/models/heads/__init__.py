"""Registered heads."""

import torch.nn as nn
from mmengine.registry import MODELS

from repa_mm.models.heads.token_label import TokenLabelHead

__all__ = ['TokenLabelHead', 'build_fast_uper_head']


@MODELS.register_module(name='FastUPerHead')
def build_fast_uper_head(**kwargs) -> nn.Module:
    """Build a :class:`~repa_mm.models.heads.uper_head.FastUPerHead`, which needs MMSegmentation."""
    from repa_mm.models.heads.uper_head import FastUPerHead

    return FastUPerHead(**kwargs)
