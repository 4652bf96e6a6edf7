"""Structures: the forms to put into the sites of a model, and their arguments.

A model can have several structures if their sites differ. :mod:`repa_mm.models.builder` puts
structures into models.
"""

from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.registry import Registry

from repa_mm.models.sites import AttentionSite, FFNSite, Site, attention_sites, ffn_sites, trained
from repa_mm.reparam import ChannelIdleFFN, CheckpointError, FFNParts, Form, TrainingForm
from repa_mm.surgery import copied, has_stock_forward

STRUCTURES = Registry('structure')


class Structure:
    """Base class of structures. A structure holds config data, and no reference to a model.

    A subclass implements :meth:`form`, and :meth:`sites` if its forms replace other modules than
    FFNs. ``where`` is as for :class:`ChannelIdle`.
    """

    where: str | None = None

    def sites(self, model: nn.Module) -> Sequence[Site]:
        """Return the sites of the structure in a model, by default its FFNs."""
        return ffn_sites(model, self.where)

    def options(self, sites: Sequence[Site]) -> list[dict]:
        """Return the keyword arguments of :meth:`form` for each site, by default none."""
        return [{}] * len(sites)

    def form(self, site: Site, **options) -> TrainingForm | None:
        """Build the form for a site, or return None to leave the site ordinary.

        Raises:
            ValueError: If the form cannot replace the modules of the site.
        """
        raise NotImplementedError

    def put_(self, model: nn.Module) -> dict[str, str]:
        """Put the forms into a model, in place, and return their names by those of their sites.

        Raises:
            ValueError: If the model has no site for the structure, or a form does not suit a site.
                The model is then unchanged.
        """
        sites = self.sites(model)
        if not sites:
            where = f' in {self.where!r}' if self.where else ''
            raise ValueError(
                f'{type(model).__name__} has no site for {type(self).__name__}{where}: no block of '
                'a family in repa_mm.models.FAMILIES'
            )
        forms = []
        # Build all forms first, so that an error leaves no half of a structure in the model.
        for site, options in zip(sites, self.options(sites)):
            try:
                there = next((m for m in site.module.modules() if isinstance(m, Form)), None)
                if there is not None:
                    raise ValueError(f'there is a {there.label} already')
                form = self.form(site, **options)
                if form is not None:
                    site.check(form)
                forms.append(form)
            except ValueError as error:
                raise ValueError(
                    f'cannot put {type(self).__name__} at {site.name!r}, in a '
                    f'{type(site.block).__name__}: {error}'
                ) from error
        return {site.name: site.put(form) for site, form in zip(sites, forms) if form}

    def sources(self, model: nn.Module, name: str) -> list[str]:
        """Return the names of the sites in an ordinary model whose weights fill a site's form."""
        return [name]

    def fill_(self, model: nn.Module, placed: dict[str, str], ordinary: nn.Module) -> None:
        """Fill the forms that :meth:`put_` has placed from a model without structures, in place."""
        found = {site.name: site for site in self.sites(ordinary)}
        for name, form in placed.items():
            parts = (found[source].parts() for source in self.sources(model, name))
            model.get_submodule(form).fill(*parts)


def per_block(value, sites: Sequence[Site], what: str) -> list:
    """Return the value for each site, from one value for all blocks or one per block."""
    blocks = list(dict.fromkeys(site.block_name for site in sites))
    values = list(value) if isinstance(value, (list, tuple)) else [value] * len(blocks)
    if len(values) != len(blocks):
        raise ValueError(
            f'{what} has {len(values)} entries, but the model has {len(blocks)} blocks: give one '
            'number, or one per block'
        )
    by_block = dict(zip(blocks, values))
    return [by_block[site.block_name] for site in sites]


@STRUCTURES.register_module()
class ChannelIdle(Structure):
    """Channel-idle FFNs, see :class:`~repa_mm.reparam.ChannelIdleFFN`.

    Args:
        idle_ratio (float | Sequence): Share of hidden channels that skip the activation, in [0, 1],
            one for all blocks or one per block. None leaves a block ordinary. Defaults to 0.75.
        norm_cfg (dict): Norm of the FFNs: 'BN' or 'SyncBN', which merge, 'LN', or 'keep' for the
            block's own norm (a LayerNorm, or a GroupNorm in a PoolFormer). An FFN without a norm
            before it, as in a DETR, gets none. Defaults to ``dict(type='BN')``.
        where (str, optional): Module of the model that contains the blocks, see
            :func:`~repa_mm.models.sites.ffn_sites`: 'backbone', 'encoder' or 'decoder'. Defaults to
            the whole model without decoder layers.

    Attributes:
        ffn (type): Class of the FFNs. A structure with a subclass of
            :class:`~repa_mm.reparam.ChannelIdleFFN` derives from this class and sets ``ffn``.
    """

    ffn: type[ChannelIdleFFN] = ChannelIdleFFN

    def __init__(
        self,
        idle_ratio: float | Sequence[float | None] = 0.75,
        norm_cfg: dict | None = dict(type='BN'),
        where: str | None = None,
    ) -> None:
        self.idle_ratio, self.norm_cfg, self.where = idle_ratio, norm_cfg, where

    def options(self, sites: Sequence[FFNSite]) -> list[dict]:
        return [dict(idle_ratio=ratio) for ratio in per_block(self.idle_ratio, sites, 'idle_ratio')]

    def form(self, site: FFNSite, idle_ratio: float | None) -> TrainingForm | None:
        if idle_ratio is None:
            return None
        return idle_ffn(site, idle_ratio, self.norm_cfg, self.ffn)


#: Norms that a form can keep: the class in blocks, and what a form's norm takes over from it.
_KEPT = dict(LN=(nn.LayerNorm, ('eps',)), TokenGN=(nn.GroupNorm, ('eps', 'num_groups')))


def idle_ffn(
    site: FFNSite,
    idle_ratio: float = 0.75,
    norm_cfg: dict | None = dict(type='BN'),
    form: type[ChannelIdleFFN] = ChannelIdleFFN,
    parts: FFNParts | None = None,
) -> ChannelIdleFFN:
    """Build a channel-idle FFN of class ``form`` with the weights of a site's norm and FFN.

    ``norm_cfg`` is as for :class:`ChannelIdle`; None means no norm. ``parts`` are the norm and FFN
    to take the weights from, by default the site's.
    """
    parts = parts or site.parts()
    norm_cfg = norm_cfg if site.family.norm else None
    norm, kind = parts.norm, (norm_cfg or {}).get('type')
    if kind == 'keep':
        kind = next((kind for kind, row in _KEPT.items() if has_stock_forward(norm, row[0])), None)
        if kind is None:
            raise ValueError(
                f'its norm is a {type(norm).__name__}, and not a LayerNorm or GroupNorm that can '
                'be kept'
            )
    stock, names = _KEPT.get(kind, ((), ()))
    own = {name: getattr(norm, name) for name in names if isinstance(norm, stock)}
    hidden, channels = parts.fc1.weight.shape[:2]
    ffn = form(
        channels,
        hidden,
        idle_ratio,
        act_cfg=copied(parts.act),
        norm_cfg=norm_cfg and {**own, **norm_cfg, 'type': kind},
        drop_path=parts.drop_path_rate,
        drop_rate=parts.drop_rate,
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


def _freeze(ffn: ChannelIdleFFN, parts: FFNParts) -> None:
    """Freeze parameters that the ordinary FFN freezes, and new ones if both linear layers are."""
    for own, other in ((ffn.fc1, parts.fc1), (ffn.fc2, parts.fc2), (ffn.norm1, parts.norm)):
        for name, parameter in own.named_parameters():
            if getattr(other, 'weight', None) is not None and not trained(other, name):
                parameter.requires_grad_(False)
    if not (parts.fc1.weight.requires_grad or parts.fc2.weight.requires_grad):
        for name, module in ffn.named_children():
            if name not in ('norm1', 'fc1', 'act', 'fc2'):
                module.requires_grad_(False)


@STRUCTURES.register_module()
class Widths(Structure):
    """Ordinary FFNs and heads with other widths, as a conversion leaves them, without a form.

    Args:
        widths (Sequence[int | None], optional): Hidden width of each block's FFN. None leaves a
            block unchanged. Defaults to no change.
        where (str, optional): As for :class:`ChannelIdle`.
        heads (Sequence[Sequence[int] | None], optional): For each block with a known attention, the
            dimensions of queries and keys and of values in a head. Defaults to no change.
    """

    def __init__(
        self,
        widths: Sequence[int | None] | None = None,
        where: str | None = None,
        heads: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        self.widths, self.where, self.heads = widths, where, heads

    def put_(self, model: nn.Module) -> dict[str, str]:
        changes = []
        for what, sites, shapes in (
            ('widths', self.sites(model), self._ffn),
            ('heads', attention_sites(model, self.where or ''), self._heads),
        ):
            for site, sizes in zip(sites, per_block(getattr(self, what), sites, what)):
                if sizes is not None:
                    changes.append((site, shapes(site, sizes)))
        # Only now, since all sites must be known ones before the first one is changed.
        for site, shapes in changes:
            like = next(site.module.parameters())
            site.set_weights(*(0.02 * torch.randn(shape).to(like) for shape in shapes))
        return {}

    def fill_(self, *args) -> None:
        # The narrower parts would keep random weights.
        raise CheckpointError('init_cfg must name weights of this model: ordinary ones are wider')

    @staticmethod
    def _ffn(site: FFNSite, width: int) -> tuple:
        modules = site.modules()
        dims, shapes = modules.fc1.weight.shape[1], ()
        if modules.conv is not None:
            shapes = (width, modules.conv.weight[0].numel()), (width,)
        return (width, dims), (width,), (dims, width), (dims,), *shapes

    @staticmethod
    def _heads(site: AttentionSite, sizes: Sequence[int]) -> tuple:
        parts = site.parts()
        dims, (keys, values) = parts.qkv.in_features, (parts.num_heads * size for size in sizes)
        rows = 2 * keys + values
        return (rows, dims), (rows,), (dims, values), (dims,)
