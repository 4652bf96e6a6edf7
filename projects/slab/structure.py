"""The structure ``ProgressiveNorms``, and its sites: the LayerNorms of blocks."""

import torch.nn as nn
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.utils.attention import MultiheadAttention, WindowMSA

from projects.slab.attention import NormedShiftWindowMSA
from projects.slab.norms import NormedLinear, NormParts, ProgressiveNorm
from repa_mm.faster import FastShiftWindowMSA, rewrite_
from repa_mm.models import STRUCTURES, Site, Structure, known_blocks
from repa_mm.reparam import TrainingForm
from repa_mm.surgery import become_


class NormSite(Site):
    """A LayerNorm of a block of a ViT or Swin, and the linear layer that it merges into, if any.

    Attributes:
        linear (str): The name of that linear layer in the block; '' if there is none.
    """

    @property
    def linear(self) -> str:
        """The name of the linear layer that alone reads the norm's output, '' for none."""
        block, family = self.block, self.family
        if self.module is getattr(block, family.attn_norm):
            attention = block.get_submodule(family.attn)
            is_plain_vit = type(attention) is MultiheadAttention and not attention.v_shortcut
            return f'{family.attn}.qkv' if is_plain_vit or type(attention) is WindowMSA else ''
        ffn = getattr(block, family.ffn)
        return f'{family.ffn}.layers.0.0' if type(ffn) is FFN and ffn.num_fcs == 2 else ''

    def parts(self) -> NormParts:
        return NormParts(
            self.module, self.block.get_submodule(self.linear) if self.linear else None
        )

    def put(self, form: TrainingForm) -> str:
        """Put a progressive norm, alone or with its linear layer, there; return its name."""
        self.adapt(form, [p for part in filter(None, self.parts()) for p in part.parameters()])
        path = self.linear or self.path
        if self.linear:
            # A map is padded behind the norm, which the other window attentions cannot do.
            rewrite_(self.block, 'window attention')
            for module in self.block.modules():
                if type(module) is FastShiftWindowMSA:
                    become_(module, NormedShiftWindowMSA)
            setattr(self.block, self.path, nn.Identity())
        parent, _, child = path.rpartition('.')
        setattr(self.block.get_submodule(parent), child, form)
        return f'{self.block_name}.{path}'


def norm_sites(model: nn.Module) -> list[NormSite]:
    """Return the sites of LayerNorms in the blocks of a ViT or Swin."""
    return [
        NormSite(f'{name}{child}', block, child, family)
        for name, block, family in known_blocks(model)
        if family.attn
        for child, norm in block.named_children()
        if type(norm) is nn.LayerNorm
    ]


@STRUCTURES.register_module()
class ProgressiveNorms(Structure):
    """Progressive norms in the place of LayerNorms, see :mod:`projects.slab.norms`.

    A norm before an attention or an ordinary FFN merges into its first linear layer, any other one
    into an affine map.

    Args:
        norm_cfg (dict): The norm that merges, 'BN' or 'SyncBN'. Defaults to ``dict(type='BN')``.
    """

    def __init__(self, norm_cfg: dict = dict(type='BN')) -> None:
        self.norm_cfg = norm_cfg

    def sites(self, model: nn.Module) -> list[NormSite]:
        return norm_sites(model)

    def form(self, site: NormSite) -> TrainingForm:
        norm, linear = parts = site.parts()
        form = ProgressiveNorm(len(norm.weight), self.norm_cfg, norm.eps)
        if linear is not None:
            has_bias = linear.bias is not None
            new = nn.Linear(linear.in_features, linear.out_features, bias=has_bias)
            form = NormedLinear(form, new)
        form.to(norm.weight).fill(parts)
        return form
