"""RIFormer: no token mixers, and affine maps in their place while a model trains."""

from projects.riformer.hook import ImitateMixersHook
from projects.riformer.mixer import MergedNorm, MixerParts, NormedAffine
from projects.riformer.structure import AffineMixers, AffineRIFormer

__all__ = [
    'AffineMixers', 'AffineRIFormer', 'ImitateMixersHook', 'MergedNorm', 'MixerParts',
    'NormedAffine',
]  # fmt: skip
