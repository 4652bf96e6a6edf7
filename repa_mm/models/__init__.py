"""Registered backbones, and structures that replace parts of a model."""

from repa_mm.models.builder import Restructured, add_structures_, restructure
from repa_mm.models.channel_idle import (
    RePaBackbone,
    RePaMlpMixer,
    RePaPoolFormer,
    RePaSwinTransformer,
    RePaVisionTransformer,
    build_fast_swin,
)
from repa_mm.models.families import FAMILIES, Family, FFNModules, MLPs, register_family
from repa_mm.models.sites import (
    AttentionSite,
    FFNSite,
    Site,
    attention_sites,
    ffn_sites,
    known_blocks,
)
from repa_mm.models.structures import STRUCTURES, ChannelIdle, Structure, share

__all__ = [
    'AttentionSite', 'ChannelIdle', 'FAMILIES', 'FFNModules', 'FFNSite', 'Family', 'MLPs',
    'RePaBackbone', 'RePaMlpMixer', 'RePaPoolFormer', 'RePaSwinTransformer',
    'RePaVisionTransformer', 'Restructured', 'STRUCTURES', 'Site', 'Structure', 'add_structures_',
    'attention_sites', 'build_fast_swin', 'ffn_sites', 'known_blocks', 'register_family',
    'restructure', 'share',
]  # fmt: skip
