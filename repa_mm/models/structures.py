"""Structures: which form, with which arguments, goes into which sites of a model.

A structure is config data, ``dict(type='ChannelIdle', idle_ratio=0.75)``. Several of them go into a
model one after the other where their sites differ: ``[dict(type='ChannelIdle'),
dict(type='ProgressiveNorms')]`` changes FFNs, and the norms that are left.
:mod:`repa_mm.models.builder` puts them into models.
"""

import copy
from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.registry import Registry
from mmpretrain.models.utils.attention import WindowMSA

from repa_mm.models.sites import (
    AttentionSite,
    FFNSite,
    MixerSite,
    NormSite,
    Site,
    attention_sites,
    ffn_sites,
    mixer_sites,
    norm_sites,
    trained,
)
from repa_mm.reparam import (
    ChannelIdleFFN,
    ExpertsFFN,
    FFNParts,
    LinearPathFFN,
    NormedAffine,
    NormedLinear,
    ParallelAttention,
    ParallelFFN,
    ProgressiveNorm,
    TrainingForm,
)
from repa_mm.reparam.numerics import is_plain
from repa_mm.reparam.parts import copy_affine

STRUCTURES = Registry('structure')


class Structure:
    """Base of the structures. A subclass says which form stands at a site.

    Attributes:
        placed (dict[str, str]): The names of the forms, by those of their sites.
    """

    def sites(self, model: nn.Module) -> Sequence[Site]:
        """Return the sites of the structure in a model. By default those of its FFNs."""
        return ffn_sites(model)

    def form(self, site: Site) -> TrainingForm | None:
        """Return a new form for a site, and change nothing; None leaves the site as it is.

        Raises:
            ValueError: If the form cannot stand for the modules there.
        """
        raise NotImplementedError

    def put_form(self, site: Site, form: TrainingForm) -> str:
        """Put a form at a site, and return its name in the model."""
        return site.put(form)

    def put(self, model: nn.Module) -> None:
        """Put the forms into a model, in place.

        Raises:
            ValueError: If the model has no site for them, or a form cannot stand at one. Nothing
                has changed then.
        """
        sites = self.sites(model)
        if not sites:
            where = f' in {self.where!r}' if getattr(self, 'where', None) else ''
            raise ValueError(
                f'{type(model).__name__} has no site for {type(self).__name__}{where}: no block of '
                'a family in repa_mm.models.sites.FAMILIES'
            )
        forms = {}
        # All of them before the first is put in: there is never half a structure.
        for site in sites:
            try:
                forms[site] = self.form(site)
            except ValueError as error:
                raise ValueError(
                    f'cannot put {type(self).__name__} at {site.name!r}, in a '
                    f'{type(site.block).__name__}: {error}'
                ) from error
        self.placed = {s.name: self.put_form(s, form) for s, form in forms.items() if form}

    def sources(self, name: str) -> list[str]:
        """Return the names of the sites in an ordinary model that fill the form of a site."""
        return [name]

    def fill(self, model: nn.Module, ordinary: nn.Module) -> None:
        """Fill the forms from an ordinary model, in place.

        Args:
            model (nn.Module): With the forms.
            ordinary (nn.Module): The model without structures, with its weights.
        """
        found = {site.name: site for site in self.sites(ordinary)}
        for name, form in self.placed.items():
            model.get_submodule(form).fill(*(found[s].parts() for s in self.sources(name)))


def share(value, sites: Sequence[Site], what: str) -> dict[str, object]:
    """What each block gets, by name: one value for all, or one for each block."""
    blocks = list(dict.fromkeys(site.block_name for site in sites))
    values = list(value) if isinstance(value, (list, tuple)) else [value] * len(blocks)
    if len(values) != len(blocks):
        raise ValueError(
            f'{what} has {len(values)} entries, but the model has {len(blocks)} blocks: give one '
            'number, or one per block'
        )
    return dict(zip(blocks, values))


@STRUCTURES.register_module()
class ChannelIdle(Structure):
    """Channel-idle FFNs, see :class:`~repa_mm.reparam.ChannelIdleFFN`.

    Args:
        idle_ratio (float | Sequence): Share of hidden channels that skip the activation, in [0, 1]:
            one for all, or one per block, of which None leaves its block as it is. Defaults to
            0.75.
        norm_cfg (dict): Norm of the FFNs: 'BN' or 'SyncBN', which merge, 'LN', or 'keep' for the
            norm that each block has: a LayerNorm, and a GroupNorm in a PoolFormer. FFNs without a
            norm before them, as those of a DETR, get none. Defaults to ``dict(type='BN')``.
        where (str, optional): The module of the model that the blocks are in, as for
            :func:`~repa_mm.models.sites.ffn_sites`: 'backbone', 'encoder', 'decoder'. Defaults to
            the whole model without decoder layers.
    """

    ffn: type[TrainingForm] = ChannelIdleFFN

    def __init__(
        self,
        idle_ratio: float | Sequence[float | None] = 0.75,
        norm_cfg: dict | None = dict(type='BN'),
        where: str | None = None,
    ) -> None:
        self.idle_ratio, self.norm_cfg, self.where = idle_ratio, norm_cfg, where

    def sites(self, model: nn.Module) -> list[FFNSite]:
        return ffn_sites(model, self.where)

    def put(self, model: nn.Module) -> None:
        self.ratios = share(self.idle_ratio, self.sites(model), 'idle_ratio')
        super().put(model)

    def form(self, site: FFNSite) -> TrainingForm | None:
        ratio = self.ratios[site.block_name]
        return None if ratio is None else idle_ffn(site, ratio, self.norm_cfg, self.ffn)


@STRUCTURES.register_module()
class LinearPath(ChannelIdle):
    """FFNs that train what :class:`ChannelIdle` deploys, to compare it with.

    See :class:`~repa_mm.reparam.LinearPathFFN`.

    Args:
        idle_ratio (float | Sequence): As for :class:`ChannelIdle`. Defaults to 0.75.
        norm_cfg (dict, optional): Norm of the FFNs, 'BN' or 'SyncBN'; None for FFNs without norms.
            Defaults to ``dict(type='BN')``.
        where (str, optional): As for :class:`ChannelIdle`.
    """

    ffn = LinearPathFFN


def idle_ffn(
    site: FFNSite,
    idle_ratio: float = 0.75,
    norm_cfg: dict | None = dict(type='BN'),
    form: type[TrainingForm] = ChannelIdleFFN,
) -> TrainingForm:
    """Build a channel-idle FFN, or one of its kind, with the weights of a site's norm and FFN.

    Args:
        site (FFNSite): The site, with ordinary modules.
        idle_ratio (float): Share of hidden channels that skip the activation. Defaults to 0.75.
        norm_cfg (dict, optional): As for the structure; None for no norm.
        form (type): The class of the FFN. Defaults to :class:`~repa_mm.reparam.ChannelIdleFFN`.

    Raises:
        ValueError: As :meth:`FFNSite.parts`; if the idle ratio is not in [0, 1]; or if the norm
            cannot be kept.
    """
    parts = site.parts()
    norm_cfg = norm_cfg if site.family.norm else None
    norm, kind = parts.norm, (norm_cfg or {}).get('type')
    if kind == 'keep':
        if not is_plain(norm, nn.LayerNorm, nn.GroupNorm):
            raise ValueError(
                f'its norm is a {type(norm).__name__}, and not a LayerNorm or GroupNorm that can '
                'be kept'
            )
        kind = 'LN' if isinstance(norm, nn.LayerNorm) else 'TokenGN'
    own = {}
    if kind == 'LN' and isinstance(norm, nn.LayerNorm):
        own = dict(eps=norm.eps)
    if kind == 'TokenGN' and isinstance(norm, nn.GroupNorm):
        own = dict(eps=norm.eps, num_groups=norm.num_groups)
    hidden, channels = parts.fc1.weight.shape[:2]
    ffn = form(
        channels,
        hidden,
        idle_ratio,
        act_cfg=copy.deepcopy(parts.act),
        norm_cfg=norm_cfg and {**own, **norm_cfg, 'type': kind},
        drop_path=parts.drop_path,
        drop_rate=parts.drop,
        shortcut=site.family.shortcut,
    )
    if isinstance(parts.scale, nn.Parameter):
        ffn.layer_scale = nn.Parameter(parts.scale.detach().clone(), parts.scale.requires_grad)
    elif parts.scale is not None:
        del ffn.layer_scale
        ffn.register_buffer('layer_scale', parts.scale.clone(), False)
    ffn.to(parts.fc1.weight).fill(parts)
    _freeze(ffn, parts)
    return ffn.train(site.block.training)


def _freeze(ffn: TrainingForm, parts: FFNParts) -> None:
    """Freeze what is frozen in the ordinary FFN, and what is new if both linear layers are."""
    for own, other in ((ffn.fc1, parts.fc1), (ffn.fc2, parts.fc2), (ffn.norm1, parts.norm)):
        for name, parameter in own.named_parameters():
            if getattr(other, 'weight', None) is not None and not trained(other, name):
                parameter.requires_grad_(False)
    if not (parts.fc1.weight.requires_grad or parts.fc2.weight.requires_grad):
        for name in ('norm2', 'linear'):
            getattr(ffn, name, nn.Identity()).requires_grad_(False)


@STRUCTURES.register_module()
class Widths(Structure):
    """Ordinary FFNs of other hidden widths, as a conversion leaves them. There is no form.

    Args:
        widths (Sequence[int | None]): Hidden width of each block; None leaves its block as it is.
        where (str, optional): As for :class:`ChannelIdle`.
    """

    def __init__(self, widths: Sequence[int | None], where: str | None = None) -> None:
        self.widths, self.where, self.placed = widths, where, {}

    def sites(self, model: nn.Module) -> list[FFNSite]:
        return ffn_sites(model, self.where)

    def put(self, model: nn.Module) -> None:
        sites = self.sites(model)
        widths = zip(sites, share(self.widths, sites, 'widths').values())
        changed = [(site, width, site.parts()) for site, width in widths if width is not None]
        for site, width, parts in changed:
            dims, like = parts.fc1.weight.shape[1], parts.fc1.weight
            shapes = (width, dims), (width,), (dims, width), (dims,)
            weights = [0.02 * torch.randn(shape).to(like) for shape in shapes]
            if parts.scale is not None:  # by which set_weights divides
                weights[2:] = [(w.t() * parts.scale.detach()).t() for w in weights[2:]]
            site.set_weights(*weights)


@STRUCTURES.register_module()
class Branches(Structure):
    """Parallel branches of attention and FFN, see :mod:`repa_mm.reparam.depth`.

    Pretrained layers are laid side by side: those that follow each other, and in a Swin, whose
    windows alternate between two grids, those of one grid.

    Args:
        num_branches (int | Sequence[int]): Number of branches B: one for all blocks, or one for
            each. Blocks of one branch stay ordinary. Defaults to 2.
    """

    def __init__(self, num_branches: int | Sequence[int] = 2) -> None:
        self.num_branches = num_branches

    def sites(self, model: nn.Module) -> list[Site]:
        return [*attention_sites(model), *(s for s in ffn_sites(model) if s.family.attn)]

    def put(self, model: nn.Module) -> None:
        sites = self.sites(model)
        self.branches = share(self.num_branches, sites, 'num_branches')
        self.periods = {site.block_name: site.family.period for site in sites}
        super().put(model)

    def form(self, site: Site) -> TrainingForm | None:
        number = self.branches[site.block_name]
        if number == 1:
            return None
        if isinstance(site, AttentionSite):
            return parallel_attention(site, number)
        return _ordinary_ffns(ParallelFFN, site, number)

    def put_form(self, site: Site, form: TrainingForm) -> str:
        return site.put(form, norm=False) if isinstance(site, FFNSite) else site.put(form)

    def sources(self, name: str) -> list[str]:
        block = next(b for b in self.branches if name.startswith(f'{b}.'))
        start, _, index = block.rpartition('.')
        n, period, k = self.branches[block], self.periods[block], int(index)
        first = period * n * (k // period) + k % period
        if any(b.rpartition('.')[0] == start and m != n for b, m in self.branches.items()):
            raise ValueError(
                f'ordinary layers fill branches of as many in each block of {start!r}, but not of '
                f'{list(self.branches.values())}'
            )
        return [f'{start}.{first + period * b}{name[len(block) :]}' for b in range(n)]

    def fill(self, model: nn.Module, ordinary: nn.Module) -> None:
        super().fill(model, ordinary)
        for site in self.sites(model):
            if site.name in self.placed:
                # Scales and shifts are in the matrices of the branches.
                copy_affine(getattr(site.norm, 'ln', site.norm))


def parallel_attention(site: AttentionSite, num_branches: int) -> ParallelAttention:
    """Branches in place of the attention at a site, with random weights."""
    parts, attention = site.parts(), site.module
    if type(attention) is WindowMSA:  # around windows, ShiftWindowMSA drops paths
        own = dict(window_size=attention.window_size, qk_scale=attention.scale)
        own.update(attn_drop=attention.attn_drop.p)
    else:
        drop_path = getattr(attention.out_drop, 'drop_prob', 0.0)
        own = dict(attn_drop=attention.attn_drop, drop_path=drop_path)
    own.update(qkv_bias=attention.qkv.bias is not None, proj_drop=attention.proj_drop.p)
    form = ParallelAttention(attention.embed_dims, attention.num_heads, num_branches, **own)
    return _with_scale(form, parts.scale)


def _ordinary_ffns(kind: type, site: FFNSite, number: int) -> TrainingForm:
    """Branches or experts of the ordinary FFN at a site, with random weights."""
    parts = site.parts()
    site.check_call()
    sizes, act = (parts.fc1.in_features, parts.fc1.out_features), copy.deepcopy(parts.act)
    form = kind(*sizes, number, act, drop_rate=parts.drop, drop_path=parts.drop_path)
    return _with_scale(form, parts.scale)


def _with_scale(form: TrainingForm, scale: torch.Tensor | None) -> TrainingForm:
    if scale is not None:
        form.layer_scale = nn.Parameter(scale.detach().clone())
    return form


@STRUCTURES.register_module()
class Experts(Structure):
    """FFNs of experts, see :mod:`repa_mm.reparam.experts`. They begin with random weights.

    Args:
        num_experts (int): Number of experts E of each FFN. Defaults to 4.
    """

    def __init__(self, num_experts: int = 4) -> None:
        self.num_experts = num_experts

    def sites(self, model: nn.Module) -> list[FFNSite]:
        return [site for site in ffn_sites(model) if site.family.norm]

    def form(self, site: FFNSite) -> TrainingForm:
        return _ordinary_ffns(ExpertsFFN, site, self.num_experts)

    def put_form(self, site: FFNSite, form: TrainingForm) -> str:
        return site.put(form, norm=False)


@STRUCTURES.register_module()
class ProgressiveNorms(Structure):
    """Progressive norms in the place of LayerNorms, see :mod:`repa_mm.reparam.norms`.

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
        form.fill(parts)
        return form


@STRUCTURES.register_module()
class AffineMixers(Structure):
    """Affine maps in the place of token mixers, see :mod:`repa_mm.reparam.mixer`."""

    def sites(self, model: nn.Module) -> list[MixerSite]:
        return mixer_sites(model)

    def form(self, site: MixerSite) -> NormedAffine:
        parts = site.parts()
        norm = parts.norm
        if type(norm) is not nn.GroupNorm:
            raise ValueError(f'its norm is a {type(norm).__name__}, and not a GroupNorm')
        form = NormedAffine(norm.num_channels, norm.num_groups, norm.eps)
        form.fill(parts)
        return form
