"""RIFormer in its training form: a PoolFormer without token mixers."""

from mmengine.registry import MODELS
from mmpretrain.models import RIFormer
from mmpretrain.models.backbones.riformer import RIFormerBlock
from torch import nn

from repa_mm.models.base import ReparamBackbone, adapt_output_norms
from repa_mm.reparam import NormedAffine, has_deploy_form


@MODELS.register_module()
class AffineRIFormer(ReparamBackbone, RIFormer):
    """RIFormer with affine maps in place of token mixers, which merge into the norms.

    `RIFormer <https://arxiv.org/abs/2304.05659>`_: see :mod:`repa_mm.reparam.mixer`. Merged, it
    has, name by name, the weights of mmpretrain's ``RIFormer`` with ``deploy=True``. The weights of
    mmpretrain's training form load, and so do those of a PoolFormer, which has no affine maps.

    Args:
        *args, **kwargs: Those of mmpretrain's ``RIFormer``.
        deploy (bool): Build the deploy form, for a reparameterized checkpoint. Defaults to False.

    Raises:
        ValueError: If the norms are no GroupNorms.
    """

    def __init__(self, *args, deploy: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._mixers = []
        for name, block in self.named_modules():
            if type(block) is not RIFormerBlock:
                continue
            norm = block.norm1
            if type(norm) is not nn.GroupNorm:
                raise ValueError(
                    f'the norm of {name!r} is a {type(norm).__name__}, and not a GroupNorm'
                )
            form = NormedAffine(norm.num_channels, norm.num_groups, norm.eps)
            form.norm, form.affine = norm, block.token_mixer.affine
            del block.norm1, block.token_mixer
            # Under the name of the norm that both become.
            block.norm_reparam = form
            self._mixers.append(name)
        self._finish(deploy)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        adapt_output_norms(self, state_dict, prefix, f'norm{len(self.network) - 1}')
        own = {} if has_deploy_form(self) else self.state_dict()
        for name in self._mixers if own else ():
            form = f'{name}.norm_reparam.'
            if f'{prefix}{name}.norm1.weight' not in state_dict:
                continue
            for key in ('weight', 'bias'):
                affine = f'{form}affine.{key}'
                state_dict[f'{prefix}{form}norm.{key}'] = state_dict.pop(
                    f'{prefix}{name}.norm1.{key}'
                )
                # A PoolFormer has none.
                state_dict[f'{prefix}{affine}'] = state_dict.pop(
                    f'{prefix}{name}.token_mixer.affine.{key}', own[affine].clone()
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
