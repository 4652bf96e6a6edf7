"""Sites: where in a model a form can stand, and the ordinary modules that stand there.

:data:`FAMILIES` is the one table of block families. A site is made from it, gives the ordinary
modules at its place (:meth:`Site.parts`), and takes a form in their place (:meth:`Site.put`).

How to add a kind of block:

1. An entry in :data:`FAMILIES`: the names of its norms, FFN and attention.
2. If it has a norm before its FFN, and its forward pass does not end with ``x = ffn(norm(x),
   identity=x)``, a subclass that ends with ``return self.ffn(x)``, and an entry in
   :data:`COUNTERPARTS`.
3. If its FFN is not mmcv's ``FFN``, a case in :meth:`FFNSite.parts`.
4. A row in ``tests/test_models/test_sites.py`` and in ``docs/structures.md``.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn as nn
from mmcv.cnn import Linear
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.backbones.beit import BEiTTransformerEncoderLayer
from mmpretrain.models.backbones.deit3 import DeiT3FFN, DeiT3TransformerEncoderLayer
from mmpretrain.models.backbones.poolformer import Mlp as ConvFFN
from mmpretrain.models.backbones.poolformer import PoolFormerBlock
from mmpretrain.models.utils.attention import MultiheadAttention, WindowMSA

from repa_mm.models.attention import swap_attention
from repa_mm.reparam import (
    AttentionParts,
    FFNParts,
    Form,
    MixerParts,
    NormParts,
    TrainingForm,
    become,
)
from repa_mm.reparam.numerics import double, is_plain


class Family(NamedTuple):
    """Names of the parts of a block.

    ``norm`` is the norm before the FFN ``ffn``, ``attn_norm`` that before the attention ``attn``,
    ``mixer_norm`` that before the affine map ``mixer`` in the place of a token mixer. Where the
    norm comes after the FFN, ``norm`` is empty: it stays as it is. ``shortcut`` says whether the
    FFN contains the shortcut. Successive blocks repeat after ``period``: Swin shifts the windows of
    every second one. ``decoder`` marks decoder layers, which work on some hundred queries: they are
    sites on request only.
    """

    norm: str = ''
    ffn: str = ''
    attn_norm: str = ''
    attn: str = ''
    mixer_norm: str = ''
    mixer: str = ''
    period: int = 1
    shortcut: bool = True
    decoder: bool = False


_ENCODER, _DECODER = Family(ffn='ffn'), Family(ffn='ffn', decoder=True)

# By the name of the block's class: MMDetection and MMSegmentation have classes of their own. The
# attributes alone would not do, since post-norm blocks have them, too.
FAMILIES = {
    'BEiTTransformerEncoderLayer': Family('ln2', 'ffn'),
    'ChannelBlock': Family('norm2', 'ffn'),  # DaViT
    # The norm before its two linear layers stays.
    'ConvNeXtBlock': Family(ffn='pointwise_conv1', shortcut=False),
    'DeiT3TransformerEncoderLayer': Family('ln2', 'ffn'),
    'MixMIMBlock': Family('ln2', 'ffn'),
    'MixerBlock': Family('norm2', 'channel_mix'),
    'PoolFormerBlock': Family('norm2', 'mlp'),
    'RIFormerBlock': Family(mixer_norm='norm1', mixer='token_mixer.affine'),
    'SpatialBlock': Family('norm2', 'ffn'),  # DaViT
    'SwinBlockV2': Family(ffn='ffn', shortcut=False),
    'SwinBlock': Family('norm2', 'ffn', 'norm1', 'attn.w_msa', period=2),
    'T2TTransformerLayer': Family('ln2', 'ffn'),
    'TransformerBlock': Family('norm_ffn', 'ffn'),  # TNT
    # ViT, SAM, MMSegmentation's ViT
    'TransformerEncoderLayer': Family('norm2', 'ffn', 'norm1', 'attn'),
    # DETR and its kin, and the pixel decoders of MaskFormer and Mask2Former
    'DetrTransformerEncoderLayer': _ENCODER,
    'DeformableDetrTransformerEncoderLayer': _ENCODER,
    'DetrTransformerDecoderLayer': _DECODER,
    'ConditionalDetrTransformerDecoderLayer': _DECODER,
    'DABDetrTransformerDecoderLayer': _DECODER,
    'DeformableDetrTransformerDecoderLayer': _DECODER,
    'GroundingDinoTransformerDecoderLayer': _DECODER,
    'Mask2FormerTransformerDecoderLayer': _DECODER,
}


class IdleBEiTLayer(BEiTTransformerEncoderLayer):
    """A BEiT block whose FFN contains the shortcut, the layer scale and the drop path."""

    def forward(self, x: torch.Tensor, rel_pos_bias: torch.Tensor | None) -> torch.Tensor:
        attn = self.attn(self.ln1(x), rel_pos_bias=rel_pos_bias)
        if self.gamma_1 is not None:
            attn = self.gamma_1 * attn
        return self.ffn(x + self.drop_path(attn))


class IdleDeiT3Layer(DeiT3TransformerEncoderLayer):
    """A DeiT3 block that does not normalize before its FFN.

    mmpretrain's block applies ``ln1`` there, too, and never ``ln2``.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(x + self.attn(self.ln1(x)))


class IdlePoolFormerBlock(PoolFormerBlock):
    """A PoolFormer block whose FFN works on tokens.

    After the first block the feature map is in the channels-last memory format, where tokens are a
    view of it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.token_mixer(self.norm1(x))
        x = x + self.drop_path(self.layer_scale_1[:, None, None] * mixed)
        return self.mlp(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


# What a block becomes when a form takes the place of its norm and FFN.
COUNTERPARTS = {
    BEiTTransformerEncoderLayer: IdleBEiTLayer,
    DeiT3TransformerEncoderLayer: IdleDeiT3Layer,
    PoolFormerBlock: IdlePoolFormerBlock,
}


def trained(layer: nn.Module, name: str) -> bool:
    """Return whether a parameter of a layer trains; one that is not there is as its weight."""
    parameter = getattr(layer, name, None)
    return (layer.weight if parameter is None else parameter).requires_grad


class Site:
    """A place in a model where a form can stand.

    Args:
        name (str): The name of the module there, in the model.
        block (nn.Module): The block that the module is in.
        path (str): The name of the module in the block.
        family (Family): The names of the block's parts.
    """

    def __init__(self, name: str, block: nn.Module, path: str, family: Family) -> None:
        self.name, self.block, self.path, self.family = name, block, path, family

    @property
    def module(self) -> nn.Module:
        """What stands there now, a form or the ordinary module."""
        return self.block.get_submodule(self.path)

    @property
    def block_name(self) -> str:
        """The name of the block in the model."""
        return self.name[: -len(self.path) - 1]

    def parts(self) -> NamedTuple:
        """Return the ordinary modules of the site, for :meth:`~repa_mm.reparam.TrainingForm.fill`.

        Raises:
            ValueError: If a form stands there, if a module is not of a known kind, or if hooks or
                replaced layers make it compute something else.
        """
        raise NotImplementedError

    def _check_ordinary(self) -> None:
        for form in (m for m in self.module.modules() if isinstance(m, Form)):
            raise ValueError(f'there is a {form.label} already')

    def put(self, form: TrainingForm) -> str:
        """Put a form there, and return its name in the model."""
        self._adapt(form, self.module.parameters())
        parent, _, child = self.path.rpartition('.')
        setattr(self.block.get_submodule(parent), child, form)
        return self.name

    def _adapt(self, form: TrainingForm, ordinary: Iterable[nn.Parameter]) -> None:
        """Give a form dtype, device and mode of the ordinary modules; freeze it if they are."""
        form.to(next(self.module.parameters())).train(self.block.training)
        if not any(p.requires_grad for p in ordinary):
            form.requires_grad_(False)

    def required(self) -> set[str]:
        """Return names in the block of the weights that a checkpoint must have to fill a form."""
        parts = self.parts()
        ids = {id(p) for part in parts if isinstance(part, nn.Module) for p in part.parameters()}
        ids.update(id(part) for part in parts if isinstance(part, nn.Parameter))
        return {name for name, p in self.block.named_parameters() if id(p) in ids}


class FFNSite(Site):
    """The FFN of a block, with the norm before it, if there is one."""

    @property
    def norm(self) -> nn.Module:
        """The norm before the FFN."""
        return getattr(self.block, self.family.norm) if self.family.norm else nn.Identity()

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the FFN."""
        if self.path == 'pointwise_conv1':
            return [self.module, self.block.pointwise_conv2]
        return [self.module]

    def parts(self) -> FFNParts:
        block, ffn = self.block, self.module
        self._check_ordinary()
        if self.family.norm and not hasattr(block, self.family.norm):
            raise ValueError(
                f'it has no norm {self.family.norm!r} before its FFN, as blocks of this name in '
                'OpenMMLab have'
            )
        norm = block.ln1 if type(block) is DeiT3TransformerEncoderLayer else self.norm
        # By exact type: a subclass may compute something else.
        if type(ffn) is ConvFFN:
            fc1, act, drop, fc2 = ffn.fc1, ffn.act, ffn.drop, ffn.fc2
            scale, drop_path, dropouts = block.layer_scale_2, block.drop_path, (drop,)
        elif self.path == 'pointwise_conv1':
            if block.grn is not None or not block.linear_pw_conv:
                raise ValueError('it has a GRN, which mixes hidden channels, or no linear layers')
            # Layer scale and drop path stay in the block.
            fc1, act, fc2 = ffn, block.act, block.pointwise_conv2
            drop, dropouts, scale, drop_path = None, (), None, nn.Identity()
        elif type(ffn) not in (FFN, DeiT3FFN):
            raise ValueError(
                f'its {type(ffn).__name__} is not an FFN of two linear layers around an activation'
            )
        elif ffn.num_fcs != 2:
            raise ValueError(f'its FFN has {ffn.num_fcs} linear layers, not two')
        else:
            (fc1, act, drop), fc2, last = ffn.layers
            dropouts = drop, last
            if type(block) is BEiTTransformerEncoderLayer:
                scale, drop_path, shortcut = block.gamma_2, block.drop_path, not ffn.add_identity
            else:
                scale, drop_path = getattr(ffn.gamma2, 'weight', None), ffn.dropout_layer
                shortcut = ffn.add_identity
            if shortcut != self.family.shortcut:
                raise ValueError(
                    f'its FFN has add_identity={ffn.add_identity}, so that the shortcut is not '
                    'where such blocks have it'
                )
        if 'forward' in ffn.__dict__ or ffn._forward_hooks or ffn._forward_pre_hooks:
            raise ValueError(
                'its FFN has a forward hook or a replaced forward(), which would be lost: remove '
                'it first'
            )
        for layer in dropouts:
            if not is_plain(layer, nn.Dropout, nn.Identity):
                raise ValueError(
                    f'a dropout of its FFN is a {type(layer).__name__}, or has forward hooks'
                )
        for layer in (fc1, fc2):
            if not is_plain(layer, Linear, nn.Linear, nn.Conv2d):
                raise ValueError(
                    f'a linear layer of its FFN is a {type(layer).__name__}, or has forward hooks: '
                    'merge adapters into the layer, and remove hooks first'
                )
        rate = getattr(drop_path, 'drop_prob', None)
        if rate is None and not isinstance(drop_path, nn.Identity):
            raise ValueError(
                f'its FFN ends with a {type(drop_path).__name__}, and not with a DropPath'
            )
        return FFNParts(norm, fc1, act, fc2, scale, getattr(drop, 'p', 0.0), rate or 0.0)

    def check_call(self) -> None:
        """Check that the block calls its FFN as ``ffn(norm(x), identity=x)``.

        Raises:
            ValueError: If the block calls its FFN in another way.
        """
        kind = type(self.block)
        if kind in COUNTERPARTS or not (self.family.norm and isinstance(self.module, FFN)):
            raise ValueError(f'a {kind.__name__} does not call its FFN as ffn(norm(x), identity=x)')

    def put(self, form: TrainingForm, norm: bool = True) -> str:
        """Put a form there.

        Args:
            form (TrainingForm): A module that takes tokens (B, L, C) or (B, H, W, C) and returns
                them with its own output added. Most blocks call it with the tokens before the norm
                as ``identity``, too, as they call mmcv's ``FFN``.
            norm (bool): Whether the form takes the place of the norm, too, and gets tokens that are
                not normalized. Defaults to True.

        Raises:
            ValueError: If ``norm`` is False, as :meth:`check_call`.
        """
        if not norm:
            self.check_call()
        block, modules = self.block, [*self.modules, *([self.norm] if norm else [])]
        ordinary = [p for module in modules for p in module.parameters()]
        self._adapt(form, [*ordinary, *block.parameters(recurse=False)])  # with layer scales
        if self.path == 'pointwise_conv1':
            block.act = block.pointwise_conv2 = nn.Identity()
        elif norm and self.family.norm:
            # ``norm2`` may be a property that looks up ``ln2``.
            (child,) = [name for name, m in block.named_children() if m is self.norm]
            if type(block) in COUNTERPARTS:
                become(block, COUNTERPARTS[type(block)])
                for name in ('gamma_2', 'layer_scale_2'):  # in the form from now on
                    if hasattr(block, name):
                        delattr(block, name)
            setattr(block, child, nn.Identity())
        setattr(block, self.path, form)
        return self.name

    @torch.no_grad()
    def set_weights(
        self, w_in: torch.Tensor, b_in: torch.Tensor, w_out: torch.Tensor, b_out: torch.Tensor
    ) -> None:
        """Give the ordinary FFN other weights, of another hidden width A, in place.

        Args:
            w_in (torch.Tensor): Input weights (A, C).
            b_in (torch.Tensor): Their biases (A, ).
            w_out (torch.Tensor): Output weights (C, A), with the layer scale multiplied in.
            b_out (torch.Tensor): Output bias (C, ), with the layer scale multiplied in.
        """
        parts = self.parts()
        if parts.scale is not None:
            scale = double(parts.scale)
            # Next to zero the weights could not have any effect.
            floor = 1e-3 * scale.abs().max()
            scale = torch.where(scale.abs() < floor, floor, scale) if floor else scale + 1
            parts.scale.copy_(scale)
            w_out, b_out = w_out / scale.to(w_out)[:, None], b_out / scale.to(b_out)
        for layer, weight, bias in ((parts.fc1, w_in, b_in), (parts.fc2, w_out, b_out)):
            weight = weight.reshape(*weight.shape, *layer.weight.shape[2:])
            for name, value in (('weight', weight), ('bias', bias)):
                trains = trained(layer, name)
                setattr(layer, name, nn.Parameter(value.to(layer.weight), trains))
            sizes = ('out', len(bias)), ('in', weight.shape[1])
            for name, size in sizes:
                kind = 'features' if isinstance(layer, nn.Linear) else 'channels'
                setattr(layer, f'{name}_{kind}', size)
        if hasattr(self.module, 'feedforward_channels'):
            self.module.feedforward_channels = len(b_in)


class AttentionSite(Site):
    """The norm and the attention of a block of a ViT or Swin."""

    @property
    def norm(self) -> nn.Module:
        """The norm before the attention."""
        return getattr(self.block, self.family.attn_norm)

    def parts(self) -> AttentionParts:
        attention = self.module
        self._check_ordinary()
        if type(attention) is not WindowMSA and not (
            type(attention) is MultiheadAttention and not attention.v_shortcut
        ):
            raise ValueError(f'its {type(attention).__name__} is not an attention that is known')
        return AttentionParts(
            self.norm,
            attention.qkv,
            attention.proj,
            getattr(getattr(attention, 'gamma1', None), 'weight', None),
            getattr(attention, 'relative_position_bias_table', None),
        )


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
        self._adapt(form, [p for part in filter(None, self.parts()) for p in part.parameters()])
        path = self.linear or self.path
        if self.linear:
            # A map is padded behind the norm, which the stock window attention cannot do.
            swap_attention(self.block)
            setattr(self.block, self.path, nn.Identity())
        parent, _, child = path.rpartition('.')
        setattr(self.block.get_submodule(parent), child, form)
        return f'{self.block_name}.{path}'


class MixerSite(Site):
    """The norm of a RIFormer block, and the affine map in the place of its token mixer."""

    def parts(self) -> MixerParts:
        return MixerParts(
            getattr(self.block, self.family.mixer_norm), self.block.get_submodule(self.family.mixer)
        )

    def put(self, form: TrainingForm) -> str:
        """Put the form under the name of the norm that both become, and return the form's name."""
        self._adapt(form, [p for part in self.parts() for p in part.parameters()])
        name = self.block_name
        delattr(self.block, self.family.mixer_norm)
        delattr(self.block, self.family.mixer.partition('.')[0])
        self.block.norm_reparam = form
        return f'{name}.norm_reparam'

    def required(self) -> set[str]:
        """Those of the norm: a PoolFormer has no affine maps."""
        return {f'{self.family.mixer_norm}.{key}' for key in ('weight', 'bias')}


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family]]:
    for name, block in model.named_modules():
        kind = type(block)
        if kind.__module__.startswith('repa_mm.'):  # what a stock block has become
            kind = kind.__mro__[1]
        if kind.__name__ in FAMILIES:
            yield f'{name}.' if name else '', block, FAMILIES[kind.__name__]


def ffn_sites(model: nn.Module, where: str | None = None) -> list[FFNSite]:
    """Return the sites of a model's FFNs, with forms or ordinary modules there.

    Args:
        model (nn.Module): A backbone or a whole model.
        where (str, optional): The module of the model whose sites are meant, or the end of its
            name: 'backbone', 'encoder' (that of a pixel decoder, too), 'decoder'; '' is the whole
            model. Defaults to the whole model without decoder layers, which work on some hundred
            queries.
    """
    inside = f'.{where}.' if where else ''
    return [
        FFNSite(f'{name}{family.ffn}', block, family.ffn, family)
        for name, block, family in _blocks(model)
        if family.ffn and hasattr(block, family.ffn)
        if (not family.decoder if where is None else inside in f'.{name}')
    ]


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Return the sites of a model's attentions, with forms or ordinary modules there."""
    return [
        AttentionSite(f'{name}{family.attn}', block, family.attn, family)
        for name, block, family in _blocks(model)
        if family.attn and hasattr(block, family.attn.partition('.')[0])
    ]


def norm_sites(model: nn.Module) -> list[NormSite]:
    """Return the sites of LayerNorms in the blocks of a ViT or Swin."""
    return [
        NormSite(f'{name}{child}', block, child, family)
        for name, block, family in _blocks(model)
        if family.attn
        for child, norm in block.named_children()
        if type(norm) is nn.LayerNorm
    ]


def mixer_sites(model: nn.Module) -> list[MixerSite]:
    """Return the sites of affine maps in the place of token mixers."""
    return [
        MixerSite(f'{name}{family.mixer_norm}', block, family.mixer_norm, family)
        for name, block, family in _blocks(model)
        if family.mixer and hasattr(block, family.mixer_norm)
    ]
