"""The structure ``Branches``: which sites have branches, and which layers fill them."""

import copy
from collections.abc import Sequence

import torch
import torch.nn as nn
from mmpretrain.models.utils.attention import MultiheadAttention, WindowMSA

from projects.depth_reparameterization.branches import ParallelAttention, ParallelFFN
from repa_mm.models import (
    STRUCTURES,
    AttentionSite,
    FFNSite,
    Site,
    Structure,
    attention_sites,
    ffn_sites,
    per_block,
)
from repa_mm.reparam import TrainingForm


@STRUCTURES.register_module()
class Branches(Structure):
    """Parallel branches of attention and FFN.

    See :mod:`projects.depth_reparameterization.branches`. Pretrained layers are laid side by side:
    those that follow each other, and in a Swin, whose windows alternate between two grids, those of
    one grid.

    Args:
        num_branches (int | Sequence[int]): Number of branches B: one for all blocks, or one for
            each. Blocks of one branch stay ordinary. Defaults to 2.
    """

    def __init__(self, num_branches: int | Sequence[int] = 2) -> None:
        self.num_branches = num_branches

    def sites(self, model: nn.Module) -> list[Site]:
        return [*attention_sites(model), *(s for s in ffn_sites(model) if s.family.attn)]

    def options(self, sites: Sequence[Site]) -> list[dict]:
        return [
            dict(number=number) for number in per_block(self.num_branches, sites, 'num_branches')
        ]

    def form(self, site: Site, number: int) -> TrainingForm | None:
        if number == 1:
            return None
        if isinstance(site, AttentionSite):
            return parallel_attention(site, number)
        return parallel_ffn(site, number)

    def sources(self, model: nn.Module, name: str) -> list[str]:
        sites = self.sites(model)
        branches = per_block(self.num_branches, sites, 'num_branches')
        branches = {site.block_name: n for site, n in zip(sites, branches)}
        site = next(site for site in sites if site.name == name)
        block = site.block_name
        start, _, index = block.rpartition('.')
        # A Swin shifts the windows of every second block.
        period = 2 if site.family.attn.endswith('w_msa') else 1
        n, k = branches[block], int(index)
        first = period * n * (k // period) + k % period
        if any(b.rpartition('.')[0] == start and m != n for b, m in branches.items()):
            raise ValueError(
                f'ordinary layers fill branches of as many in each block of {start!r}, but not of '
                f'{list(branches.values())}'
            )
        return [f'{start}.{first + period * b}{name[len(block) :]}' for b in range(n)]

    def fill_(self, model: nn.Module, placed: dict[str, str], ordinary: nn.Module) -> None:
        super().fill_(model, placed, ordinary)
        for site in self.sites(model):
            if site.name in placed:
                # Scales and shifts are in the matrices of the branches.
                for norm in site.norm.modules():  # a form, perhaps, with a LayerNorm in it
                    if isinstance(norm, nn.LayerNorm):
                        norm.reset_parameters()


def parallel_attention(site: AttentionSite, num_branches: int) -> ParallelAttention:
    """Branches in place of the attention at a site, with random weights."""
    parts, attention = site.parts(), site.module
    if type(attention) is WindowMSA:  # around windows, ShiftWindowMSA drops paths
        own = dict(window_size=attention.window_size, qk_scale=attention.scale)
        own.update(attn_drop=attention.attn_drop.p)
    elif type(attention) is not MultiheadAttention:
        raise ValueError(f'its {type(attention).__name__} is not an attention of MMPretrain')
    else:
        drop_path = getattr(attention.out_drop, 'drop_prob', 0.0)
        own = dict(attn_drop=attention.attn_drop, drop_path=drop_path)
    own.update(qkv_bias=attention.qkv.bias is not None, proj_drop=attention.proj_drop.p)
    form = ParallelAttention(attention.embed_dims, attention.num_heads, num_branches, **own)
    return _with_scale(form, parts.scale)


def parallel_ffn(site: FFNSite, num_branches: int) -> ParallelFFN:
    """Branches in place of the ordinary FFN at a site, with random weights."""
    parts = site.parts()
    sizes, act = (parts.fc1.in_features, parts.fc1.out_features), copy.deepcopy(parts.act)
    form = ParallelFFN(
        *sizes, num_branches, act, drop_rate=parts.drop_rate, drop_path=parts.drop_path_rate
    )
    return _with_scale(form, parts.scale)


def _with_scale(form: TrainingForm, scale: torch.Tensor | None) -> TrainingForm:
    if scale is not None:
        form.layer_scale = nn.Parameter(scale.detach().clone())
    return form
