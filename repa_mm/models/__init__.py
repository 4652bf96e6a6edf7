"""The registered backbones, and the structures that are put into models."""

from repa_mm.models.builder import Restructured, add_structures_, restructure
from repa_mm.models.channel_idle import (
    RePaBackbone,
    RePaMlpMixer,
    RePaPoolFormer,
    RePaSwinTransformer,
    RePaVisionTransformer,
    build_fast_swin,
)
from repa_mm.models.families import FAMILIES, Family, FFNModules, register_family
from repa_mm.models.restructured import (
    ParallelMAEViT,
    ParallelSwinTransformer,
    ParallelVisionTransformer,
    ProgressiveSwinTransformer,
    ProgressiveVisionTransformer,
)
from repa_mm.models.sites import FFNSite, Site, ffn_sites
from repa_mm.models.structures import STRUCTURES, ChannelIdle, Structure

__all__ = [
    'ChannelIdle', 'FAMILIES', 'FFNModules', 'FFNSite', 'Family', 'ParallelMAEViT',
    'ParallelSwinTransformer', 'ParallelVisionTransformer', 'ProgressiveSwinTransformer',
    'ProgressiveVisionTransformer', 'RePaBackbone', 'RePaMlpMixer', 'RePaPoolFormer',
    'RePaSwinTransformer', 'RePaVisionTransformer', 'Restructured', 'STRUCTURES', 'Site',
    'Structure', 'add_structures_', 'build_fast_swin', 'ffn_sites', 'register_family',
    'restructure',
]  # fmt: skip
