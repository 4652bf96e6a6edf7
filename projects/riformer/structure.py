"""Affine maps in models: their sites, the structure, and a backbone of that name."""

import torch.nn as nn
from mmengine.registry import MODELS
from mmpretrain.models import RIFormer

from projects.riformer.mixer import MixerParts, NormedAffine
from repa_mm.models import STRUCTURES, Site, Structure, WithStructures


class MixerSite(Site):
    """The norm of a RIFormer block, and the affine map in the place of its token mixer."""

    def parts(self) -> MixerParts:
        return MixerParts(self.block.norm1, self.block.token_mixer.affine)

    def put(self, form: NormedAffine) -> str:
        """Put the form under the name of the norm that both become, and return the form's name."""
        self.adapt(form, [p for part in self.parts() for p in part.parameters()])
        name = self.block_name
        del self.block.norm1, self.block.token_mixer
        self.block.norm_reparam = form
        return f'{name}.norm_reparam'


@STRUCTURES.register_module()
class AffineMixers(Structure):
    """Affine maps in the place of token mixers, see :class:`NormedAffine`."""

    def sites(self, model: nn.Module) -> list[MixerSite]:
        return [
            MixerSite(f'{name}.norm1', block, 'norm1')
            for name, block in model.named_modules()
            if type(block).__name__ == 'RIFormerBlock' and hasattr(block, 'norm1')
        ]

    def form(self, site: MixerSite) -> NormedAffine:
        parts = site.parts()
        norm = parts.norm
        if type(norm) is not nn.GroupNorm:
            raise ValueError(f'its norm is a {type(norm).__name__}, and not a GroupNorm')
        form = NormedAffine(norm.num_channels, norm.num_groups, norm.eps)
        form.fill(parts)
        return form


@MODELS.register_module()
class AffineRIFormer(WithStructures, RIFormer):
    """RIFormer with affine maps in place of token mixers, which merge into the norms.

    `RIFormer <https://arxiv.org/abs/2304.05659>`_. Merged, it has, name by name, the weights of
    mmpretrain's ``RIFormer`` with ``deploy=True``. The weights of mmpretrain's training form, and
    those of a PoolFormer, which has no affine maps, fill it.

    Args:
        *args, **kwargs: Those of mmpretrain's ``RIFormer``, and of
            :class:`~repa_mm.models.WithStructures`.

    Raises:
        ValueError: If the norms are no GroupNorms.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, structures=[dict(type='AffineMixers')], **kwargs)
