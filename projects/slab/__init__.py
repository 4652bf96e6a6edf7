"""SLAB: LayerNorms that become BatchNorms in training, and merge into the layers behind them."""

from projects.slab.attention import NormedShiftWindowMSA
from projects.slab.backbones import ProgressiveSwinTransformer, ProgressiveVisionTransformer
from projects.slab.norms import AffineMap, MergedLinear, NormedLinear, ProgressiveNorm, RepBN
from projects.slab.structure import ProgressiveNorms

__all__ = [
    'AffineMap', 'MergedLinear', 'NormedLinear', 'NormedShiftWindowMSA', 'ProgressiveNorm',
    'ProgressiveNorms', 'ProgressiveSwinTransformer', 'ProgressiveVisionTransformer', 'RepBN',
]  # fmt: skip
