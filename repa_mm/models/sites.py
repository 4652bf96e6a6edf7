"""Sites: the places in a model where a form can replace ordinary modules.

:meth:`Site.parts` returns the ordinary modules of a site, and :meth:`Site.put` replaces them by a
form. :mod:`repa_mm.models.families` defines which blocks have sites.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn as nn
from mmcv.cnn import Conv2d, Linear
from mmcv.cnn.bricks.transformer import FFN
from mmcv.cnn.bricks.transformer import MultiheadAttention as MMCVAttention
from mmpretrain.models.utils.attention import MultiheadAttention

from repa_mm.faster.attention import FastShiftWindowMSA, fast_class, is_window_attention
from repa_mm.faster.narrow_attention import (
    NarrowMultiheadAttention,
    NarrowSelfAttention,
    NarrowTimmAttention,
    input_layer,
)
from repa_mm.models.families import FAMILIES, Family, full_name
from repa_mm.reparam import AttentionParts, FFNParts, TrainingForm, double
from repa_mm.surgery import become_, has_stock_forward


def trained(layer: nn.Module, name: str) -> bool:
    """Return True if a parameter of a layer trains; a missing parameter counts as the weight."""
    parameter = getattr(layer, name, None)
    return (layer.weight if parameter is None else parameter).requires_grad


class Site:
    """A place in a model where a form can replace ordinary modules.

    ``name`` is the name of the site's module in the model, ``path`` its name in the ``block``.
    """

    def __init__(
        self, name: str, block: nn.Module, path: str, family: Family | None = None
    ) -> None:
        self.name, self.block, self.path, self.family = name, block, path, family

    @property
    def module(self) -> nn.Module:
        """The module at the site, a form or an ordinary module."""
        return self.block.get_submodule(self.path)

    @property
    def block_name(self) -> str:
        """The name of the block in the model."""
        return self.name[: -len(self.path) - 1]

    def at(self, block: nn.Module) -> 'Site':
        """Return the same site in a copy of the block."""
        return type(self)(self.name, block, self.path, self.family)

    def parts(self) -> NamedTuple:
        """Return the ordinary modules of the site, for :meth:`~repa_mm.reparam.TrainingForm.fill`.

        Raises:
            ValueError: If the site has a form, or a module may compute something else.
        """
        raise NotImplementedError

    def check(self, form: TrainingForm) -> None:
        """Raise a ``ValueError`` if a form does not suit the site, before the model is changed."""

    def put(self, form: TrainingForm) -> str:
        """Put a form into the site, and return the form's name in the model."""
        self.adapt(form, self.module.parameters())
        parent, _, child = self.path.rpartition('.')
        setattr(self.block.get_submodule(parent), child, form)
        return self.name

    def adapt(self, form: TrainingForm, ordinary: Iterable[nn.Parameter]) -> None:
        """Give a form the dtype, device, mode and frozen state of the ordinary modules."""
        form.to(next(self.module.parameters())).train(self.block.training)
        if not any(p.requires_grad for p in ordinary):
            form.requires_grad_(False)


def _check_stock(module: nn.Module, what: str, *kinds: type) -> None:
    if not has_stock_forward(module, *kinds):
        raise ValueError(
            f'{what}, a {type(module).__name__}, has a forward() of its own or hooks, '
            'and would lose them: merge adapters into their layers, and remove hooks first'
        )


class FFNSite(Site):
    """The FFN of a block, and the norm before the FFN if there is one."""

    @property
    def norm(self) -> nn.Module:
        """The norm before the FFN."""
        return self.family.norm_of(self.block)

    def modules(self) -> FFNParts:
        """Return the norm and the modules of the ordinary FFN, also those with a convolution."""
        modules = self.family.ffn_modules(self.block)
        _check_stock(self.module, 'its FFN')
        for layer in filter(None, (modules.drop, modules.last)):
            _check_stock(layer, 'a dropout of its FFN', nn.Dropout, nn.Identity)
        for layer in filter(None, (modules.fc1, modules.conv, modules.fc2)):
            _check_stock(layer, 'a layer of its FFN', Linear, nn.Linear, Conv2d, nn.Conv2d)
        drop_path = modules.drop_path or nn.Identity()
        if not (isinstance(drop_path, nn.Identity) or hasattr(drop_path, 'drop_prob')):
            raise ValueError(
                f'its FFN ends with a {type(drop_path).__name__}, and not with a DropPath'
            )
        return modules

    def parts(self) -> FFNParts:
        parts = self.modules()
        if parts.conv is not None:
            raise ValueError(
                f'its {type(self.module).__name__} has a depthwise convolution between the linear '
                'layers, so these do not merge into one matrix'
            )
        return parts

    def check(self, form: TrainingForm) -> None:
        if not self.family.shortcut and form.shortcut:
            raise ValueError(
                f'a {type(form).__name__} adds the shortcut, and a {type(self.block).__name__} '
                'adds it, too'
            )
        calls_with_norm = self.family.norm and not self.family.counterpart
        if not (form.contains_norm or calls_with_norm and isinstance(self.module, FFN)):
            raise ValueError(
                f'a {type(self.block).__name__} does not call its FFN as ffn(norm(x), identity=x)'
            )

    def put(self, form: TrainingForm) -> str:
        """Put a form into the site, and return the form's name in the model.

        The form takes tokens (B, L, C) or (B, H, W, C), normalized if ``form.contains_norm`` is
        False, and returns the tokens plus its output. Most blocks also pass the tokens before the
        norm as ``identity``, as to mmcv's ``FFN``.
        """
        modules = self.family.ffn_modules(self.block)
        layers = [modules.fc1, modules.fc2, *([modules.norm] if form.contains_norm else [])]
        ordinary = [p for layer in layers for p in layer.parameters()]
        self.adapt(form, ordinary if modules.scale is None else [*ordinary, modules.scale])
        self.family.put_ffn(self.block, form)
        return self.name

    @torch.no_grad()
    def set_weights(
        self,
        w_in: torch.Tensor,
        b_in: torch.Tensor,
        w_out: torch.Tensor,
        b_out: torch.Tensor,
        conv: torch.Tensor | None = None,
        b_conv: torch.Tensor | None = None,
    ) -> None:
        """Give the ordinary FFN weights of hidden width A, in place.

        They are (A, C), (A, ), (C, A) and (C, ), with the layer scale multiplied into the output's,
        and filters (A, k^2) and biases (A, ) of a depthwise convolution.
        """
        parts = self.modules()
        if parts.scale is not None:
            scale = raised(parts.scale, parts.fc2.weight, w_out)
            parts.scale.copy_(scale)
            w_out, b_out = w_out / scale.to(w_out)[:, None], b_out / scale.to(b_out)
        _set_matrix_(parts.fc1, w_in, b_in)
        _set_matrix_(parts.fc2, w_out, b_out)
        if parts.conv is not None:
            parts.conv.groups = len(conv)
            _set_matrix_(parts.conv, conv, b_conv)
        if hasattr(self.module, 'feedforward_channels'):
            self.module.feedforward_channels = len(b_in)


def raised(scale: torch.Tensor, known: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a layer scale (C, ) in float64 that a new weight (C, m) can be divided by.

    Small scales are raised, so that no weight exceeds three times the largest of ``known`` (C, n).
    """
    scale = double(scale)
    floor = double(weight).abs().amax(1) / (3 * double(known).abs().max().clamp(min=1e-30))
    floor = floor.clamp(min=1e-3 * float(scale.abs().max()))
    scale = torch.where(scale.abs() < floor, floor, scale)
    return torch.where(scale == 0, 1.0, scale)


def _set_matrix_(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Give a linear layer a weight (out, in), or a depthwise convolution (out, k^2), and a bias."""
    weight = weight.reshape(len(weight), -1, *layer.weight.shape[2:])
    for name, value in (('weight', weight), ('bias', bias)):
        trains = trained(layer, name)
        setattr(layer, name, nn.Parameter(value.to(layer.weight), trains))
    kind = 'features' if isinstance(layer, nn.Linear) else 'channels'
    setattr(layer, f'out_{kind}', len(bias))
    setattr(layer, f'in_{kind}', weight.shape[1] * getattr(layer, 'groups', 1))


def _read(heads: nn.Module) -> tuple:
    """Return the fields of :class:`~repa_mm.reparam.AttentionParts` after the norm."""
    scale = getattr(getattr(heads, 'gamma1', None), 'weight', None)
    table = getattr(heads, 'relative_position_bias_table', None)
    factor = getattr(heads, 'scale', None) or heads.head_dims**-0.5
    return heads.qkv, heads.proj, scale, table, heads.num_heads, factor


def _read_mmcv(heads: MMCVAttention) -> tuple:
    inner = heads.attn
    qkv, factor = input_layer(inner), inner.head_dim**-0.5
    return qkv, inner.out_proj, None, None, heads.num_heads, factor


#: By the full name of an attention's class: how its heads are read, and what it becomes with heads
#: of other widths: a class for its own layers, or a function that returns a module for its place.
_ATTENTIONS = {
    full_name(MMCVAttention): (_read_mmcv, lambda attention: NarrowSelfAttention(attention)),
    full_name(MultiheadAttention): (_read, NarrowMultiheadAttention),
    'timm.layers.attention.Attention': (_read, NarrowTimmAttention),
}
_OURS = FastShiftWindowMSA, NarrowSelfAttention, NarrowMultiheadAttention, NarrowTimmAttention
_ATTENTIONS.update((full_name(kind), (_read, kind)) for kind in _OURS)


def _heads(attention: nn.Module) -> nn.Module:
    """Return the module with the heads: in window attention, the one inside that of the shift."""
    return getattr(attention, 'w_msa', attention)


def _known(attention: nn.Module) -> tuple[Callable, type | Callable]:
    """Return the entry of an attention, or raise a ``ValueError`` if it may compute another one."""
    heads, kind = _heads(attention), fast_class(attention) or type(attention)
    is_known = type(heads).__name__ == 'WindowMSA' and is_window_attention(heads)
    if full_name(kind) not in _ATTENTIONS or (heads is not attention and not is_known):
        raise ValueError(f'its {type(heads).__name__} is not an attention whose heads are known')
    for name in ('v_shortcut', 'q_norm', 'k_norm', 'norm', 'gate'):
        part = getattr(attention, name, None)
        if part and not isinstance(part, nn.Identity):
            raise ValueError(f'its attention has a {name}, unlike that of a ViT')
    # The narrower modules read these, and do not call them.
    for name, kinds in dict(attn_drop=(nn.Dropout,), attn=(nn.MultiheadAttention,)).items():
        if isinstance(part := getattr(attention, name, None), nn.Module):
            _check_stock(part, f'the {name} of its attention', *kinds)
    if kind is MMCVAttention:
        inner = attention.attn
        has_own_keys = inner.in_proj_weight is None or inner.bias_k is not None
        if has_own_keys or inner.add_zero_attn or not attention.batch_first:
            raise ValueError('it is no self-attention: keys and values are not of its tokens')
    return _ATTENTIONS[full_name(kind)]


class AttentionSite(Site):
    """The norm and the attention of a block of a ViT or Swin."""

    @property
    def norm(self) -> nn.Module:
        """The norm before the attention."""
        return getattr(self.block, self.family.attn_norm)

    def parts(self) -> AttentionParts:
        for module in (self.attention, self.module):
            _check_stock(module, 'its attention')
        read, _ = _known(self.attention)
        parts = AttentionParts(self.norm, *read(_heads(self.attention)))
        for layer in (parts.qkv, parts.proj):
            _check_stock(layer, 'a layer of its attention', Linear, nn.Linear)
        return parts

    @property
    def caller(self) -> str:
        """The name in the block of the module that the block calls: a Swin's has the shift."""
        return self.path.partition('.')[0]

    @property
    def attention(self) -> nn.Module:
        """The module that the block calls."""
        return getattr(self.block, self.caller)

    def set_weights(self, *weights: torch.Tensor) -> None:
        """Replace the weights of the attention by those of :func:`set_heads_`, in place."""
        set_heads_(self.attention, *weights)


@torch.no_grad()
def set_heads_(
    attention: nn.Module,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    w_out: torch.Tensor,
    b_out: torch.Tensor,
) -> nn.Module:
    """Give an attention the weights of heads of other widths, in place, and return the attention.

    The weights are (h (2 r + s), C) and (C, h s), the biases (h (2 r + s), ) and (C, ), of queries,
    keys and values, and of the projection.
    """
    _, narrower = _known(attention)
    become_(attention, narrower if isinstance(narrower, type) else narrower(attention))
    heads = _heads(attention)
    _set_matrix_(heads.qkv, w_qkv, b_qkv)
    _set_matrix_(heads.proj, w_out, b_out)
    return attention


def known_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family]]:
    """Yield the name prefix, block and family of each block of a known family in a model."""
    for name, block in model.named_modules():
        kind = type(block)
        if family := FAMILIES.get(full_name(kind)) or FAMILIES.get(kind.__name__):
            yield f'{name}.' if name else '', block, family


def ffn_sites(model: nn.Module, where: str | None = None) -> list[FFNSite]:
    """Return the sites of a model's FFNs, whether they have forms or ordinary modules.

    ``where`` is a module's name or the end of its name: 'backbone', 'encoder' (also the encoder of
    a pixel decoder) or 'decoder'; '' for the whole model. None means the whole model without
    decoder layers, which process a few hundred queries.
    """
    return _sites(model, where, FFNSite, 'ffn')


def attention_sites(model: nn.Module, where: str | None = None) -> list[AttentionSite]:
    """Return the sites of a model's attention, as :func:`ffn_sites`."""
    return _sites(model, where, AttentionSite, 'attn')


def _sites(model: nn.Module, where: str | None, kind: type[Site], attribute: str) -> list[Site]:
    inside = f'.{where}.' if where else ''
    return [
        kind(f'{name}{path}', block, path, family)
        for name, block, family in known_blocks(model)
        if (path := getattr(family, attribute)) in dict(block.named_modules(remove_duplicate=False))
        if path  # '' is the block itself
        if (not family.decoder if where is None else inside in f'.{name}')
    ]
