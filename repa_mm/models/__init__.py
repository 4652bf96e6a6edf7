"""Registered backbones, and structures that replace parts of a model."""

from repa_mm.models.builder import WithStructures, add_structures_, build_with_structures
from repa_mm.models.channel_idle import (
    RePaBackbone,
    RePaMlpMixer,
    RePaPoolFormer,
    RePaSwinTransformer,
    RePaVisionTransformer,
)
from repa_mm.models.families import FAMILIES, Family, MLPs, register_family
from repa_mm.models.sites import (
    AttentionSite,
    FFNSite,
    Site,
    attention_sites,
    ffn_sites,
    known_blocks,
)
from repa_mm.models.structures import STRUCTURES, ChannelIdle, Structure, per_block

__all__ = [
    'AttentionSite', 'ChannelIdle', 'FAMILIES', 'FFNSite', 'Family', 'MLPs', 'RePaBackbone',
    'RePaMlpMixer', 'RePaPoolFormer', 'RePaSwinTransformer', 'RePaVisionTransformer', 'STRUCTURES',
    'Site', 'Structure', 'WithStructures', 'add_structures_', 'attention_sites',
    'build_with_structures', 'ffn_sites', 'known_blocks', 'per_block', 'register_family',
]  # fmt: skip
