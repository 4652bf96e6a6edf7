"""Families of blocks: the names of a block's norms, FFN and attention.

docs/architecture.md shows how to add a family.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.backbones.beit import BEiTTransformerEncoderLayer
from mmpretrain.models.backbones.deit3 import DeiT3FFN, DeiT3TransformerEncoderLayer
from mmpretrain.models.backbones.poolformer import Mlp as ConvFFN
from mmpretrain.models.backbones.poolformer import PoolFormerBlock

from repa_mm.reparam import FFNParts, TrainingForm
from repa_mm.surgery import become_, has_stock_forward


@dataclass(frozen=True)
class Family:
    """Names of the modules in blocks that end with ``x = ffn(norm(x), identity=x)``.

    ``ffn`` is mmcv's ``FFN`` or MMPretrain's ``DeiT3FFN``. A family of other blocks is a subclass.

    Args:
        norm (str): Name of the norm before the FFN. Empty if the norm follows the FFN and stays.
        ffn (str): Name of the FFN, such as 'ffn' or 'ffns.0'.
        attn_norm (str): Name of the norm before the attention.
        attn (str): Name of the attention.
        shortcut (bool): True if the FFN adds the shortcut. Defaults to True.
        decoder (bool): True for decoder layers, which process a few hundred queries and are sites
            only on request. Defaults to False.
    """

    norm: str = ''
    ffn: str = ''
    attn_norm: str = ''
    attn: str = ''
    shortcut: bool = True
    decoder: bool = False

    #: Class that a block takes when a form replaces its norm and FFN: a subclass of the block's
    #: class whose forward pass ends with ``return self.ffn(x)``. None if the block keeps its class.
    counterpart: ClassVar[type[nn.Module] | None] = None
    #: Attributes of the block that move into the form.
    absorbed: ClassVar[tuple[str, ...]] = ()

    def ffn_modules(self, block: nn.Module) -> FFNParts:
        """Return the modules of a block's norm and FFN, or raise a ``ValueError``."""
        ffn = block.get_submodule(self.ffn)
        # By exact type: a subclass may compute something else.
        if type(ffn) not in (FFN, DeiT3FFN):
            raise ValueError(
                f'its {type(ffn).__name__} is not an FFN of two linear layers around an activation'
            )
        if ffn.num_fcs != 2:
            raise ValueError(f'its FFN has {ffn.num_fcs} linear layers, not two')
        if ffn.add_identity != self.shortcut:
            raise ValueError(
                f'its FFN has add_identity={ffn.add_identity}: the shortcut is not where other '
                'blocks of this name have it'
            )
        (fc1, act, drop), fc2, last = ffn.layers
        scale, drop_path = getattr(ffn.gamma2, 'weight', None), ffn.dropout_layer
        return FFNParts(self.norm_of(block), fc1, act, fc2, scale, drop, last, drop_path)

    def norm_of(self, block: nn.Module) -> nn.Module:
        """Return the norm before a block's FFN, ``nn.Identity()`` if the family has none."""
        if not self.norm:
            return nn.Identity()
        if not hasattr(block, self.norm):
            raise ValueError(
                f'it has no norm {self.norm!r} before its FFN, unlike blocks of this name in '
                'OpenMMLab'
            )
        return getattr(block, self.norm)

    def put_ffn(self, block: nn.Module, form: TrainingForm) -> None:
        """Replace a block's FFN, and the norm before it if the form contains one, by a form."""
        if self.norm and form.contains_norm:
            norm = getattr(block, self.norm)
            # The attribute may be a property: ``norm2`` looks up ``ln2``.
            (child,) = [name for name, module in block.named_children() if module is norm]
            if self.counterpart:
                become_(block, self.counterpart)
                for name in self.absorbed:
                    if hasattr(block, name):
                        delattr(block, name)
            setattr(block, child, nn.Identity())
        parent, _, child = self.ffn.rpartition('.')
        setattr(block.get_submodule(parent), child, form)


#: Families by the name of the block's class, since MMDetection and MMSegmentation have copies of
#: the classes, or by its full name, 'package.module.Class', which precedes the name alone. Names of
#: attributes would not suffice: post-norm blocks have the same.
FAMILIES: dict[str, Family] = {}


def register_family(names: str, family: Family) -> None:
    """Register a family of blocks, so that structures and conversions find its sites.

    Args:
        names (str): Class names of the blocks, separated by spaces, or full names such as
            'package.module.Block', where other classes have the same name. Subclasses with other
            names are not included, since they may compute something else.
        family (Family): Family of these blocks.

    Raises:
        ValueError: If a name is registered already.

    Examples:
        >>> register_family('MyBlock', Family(norm='norm2', ffn='ffn'))
    """
    for name in names.split():
        if name in FAMILIES:
            raise ValueError(f'a block of the name {name!r} is known already: rename the class')
        FAMILIES[name] = family


def full_name(kind: type) -> str:
    """Return the name of a class with its module."""
    return f'{kind.__module__}.{kind.__qualname__}'


class BEiTBlock(BEiTTransformerEncoderLayer):
    """A BEiT block whose FFN contains the shortcut, the layer scale and the drop path."""

    def forward(self, x: torch.Tensor, rel_pos_bias: torch.Tensor | None) -> torch.Tensor:
        attn = self.attn(self.ln1(x), rel_pos_bias=rel_pos_bias)
        if self.gamma_1 is not None:
            attn = self.gamma_1 * attn
        return self.ffn(x + self.drop_path(attn))


@dataclass(frozen=True)
class BEiT(Family):
    """BEiT's blocks, which contain the layer scale, drop path and shortcut of their FFN."""

    counterpart = BEiTBlock
    absorbed = ('gamma_2',)

    def ffn_modules(self, block: nn.Module) -> FFNParts:
        if type(block) is not BEiTTransformerEncoderLayer:  # MMSegmentation's, which is refused
            return super().ffn_modules(block)
        modules = Family.ffn_modules(replace(self, shortcut=False), block)
        return modules._replace(scale=block.gamma_2, drop_path=block.drop_path)


class DeiT3Block(DeiT3TransformerEncoderLayer):
    """A DeiT3 block that does not normalize before its FFN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(x + self.attn(self.ln1(x)))


@dataclass(frozen=True)
class DeiT3(Family):
    """DeiT III's blocks, which apply ``ln1`` also before the FFN, and never ``ln2``."""

    counterpart = DeiT3Block

    def ffn_modules(self, block: nn.Module) -> FFNParts:
        return super().ffn_modules(block)._replace(norm=block.ln1)


class PoolFormerTokenBlock(PoolFormerBlock):
    """A PoolFormer block whose FFN works on tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.token_mixer(self.norm1(x))
        x = x + self.drop_path(self.layer_scale_1[:, None, None] * mixed)
        # The result has the channels-last memory format: the next block's tokens are a view.
        return self.mlp(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class PoolFormer(Family):
    """PoolFormer's blocks, whose FFNs are 1 x 1 convolutions of feature maps (B, C, H, W)."""

    counterpart = PoolFormerTokenBlock
    absorbed = ('layer_scale_2',)

    def ffn_modules(self, block: nn.Module) -> FFNParts:
        ffn = block.get_submodule(self.ffn)
        if type(ffn) is not ConvFFN:
            raise ValueError(f"its {type(ffn).__name__} is not a PoolFormer's FFN")
        scale, drop_path = block.layer_scale_2, block.drop_path
        return FFNParts(
            self.norm_of(block), ffn.fc1, ffn.act, ffn.fc2, scale, ffn.drop, ffn.drop, drop_path
        )


@dataclass(frozen=True)
class ConvNeXt(Family):
    """ConvNeXt's blocks, which call the two linear layers of their FFN themselves.

    Norm, layer scale and drop path stay in the block.
    """

    def ffn_modules(self, block: nn.Module) -> FFNParts:
        if block.grn is not None or not block.linear_pw_conv:
            raise ValueError('it has a GRN, which mixes hidden channels, or no linear layers')
        return FFNParts(
            self.norm_of(block), block.pointwise_conv1, block.act, block.pointwise_conv2
        )

    def put_ffn(self, block: nn.Module, form: TrainingForm) -> None:
        block.act = block.pointwise_conv2 = nn.Identity()
        block.pointwise_conv1 = form


@dataclass(frozen=True)
class MMCVLayers(Family):
    """Encoder layers of mmcv, with the norm after the FFN, as in Co-DETR."""

    def ffn_modules(self, block: nn.Module) -> FFNParts:
        order = tuple(block.operation_order)
        if order != ('self_attn', 'norm', 'ffn', 'norm'):
            raise ValueError(f'its operations {order} are not those of an encoder layer')
        return super().ffn_modules(block)


@dataclass(frozen=True)
class MixFFNs(Family):
    """SegFormer's and PVT v2's blocks, with a depthwise convolution inside of the FFN."""

    def ffn_modules(self, block: nn.Module) -> FFNParts:
        ffn = block.get_submodule(self.ffn)
        layers = list(getattr(ffn, 'layers', ()))
        conv = layers[1] if type(ffn).__name__ == 'MixFFN' and len(layers) == 6 else None
        if not (isinstance(conv, nn.Conv2d) and conv.groups == conv.out_channels):
            raise ValueError(
                f'its {type(ffn).__name__} is not two linear layers around a depthwise convolution '
                'and an activation'
            )
        fc1, _, act, drop, fc2, last = layers
        modules = FFNParts(self.norm_of(block), fc1, act, fc2, None, drop, last)
        return modules._replace(drop_path=ffn.dropout_layer, conv=conv)


@dataclass(frozen=True)
class MLPs(Family):
    """Blocks that compute x + drop_path(scale * mlp(norm(x))), where ``mlp`` has fc1, act and fc2.

    Shortcut and drop path stay in the block, so that it needs no other class for a form. Blocks of
    timm and of ViTDet are of this family. ``scale`` names the layer scale, a parameter or a module
    with a parameter ``gamma``, if there is one.
    """

    shortcut: bool = False
    scale: str = ''

    def ffn_modules(self, block: nn.Module) -> FFNParts:
        mlp = block.get_submodule(self.ffn)
        others = dict(mlp.named_children())
        fc1, act, fc2 = layers = [others.pop(name, None) for name in ('fc1', 'act', 'fc2')]
        if None in layers or len(fc1.weight) != fc2.weight.shape[1]:
            raise ValueError(
                f'its {type(mlp).__name__} is not two linear layers around an activation'
            )
        for layer in others.values():
            if not has_stock_forward(layer, nn.Dropout, nn.Identity):
                raise ValueError(f'its {type(mlp).__name__} has a {type(layer).__name__}, too')
        # One module may be both, after the activation and after fc2.
        drops = [layer for layer in others.values() if isinstance(layer, nn.Dropout)] or [None]
        scale = getattr(block, self.scale, None) if self.scale else None
        scale = getattr(scale, 'gamma', None) if isinstance(scale, nn.Module) else scale
        norm = _plain_norm(self.norm_of(block))
        return FFNParts(norm, fc1, act, fc2, scale, drops[0], drops[-1])

    def put_ffn(self, block: nn.Module, form: TrainingForm) -> None:
        if self.norm:
            setattr(block, self.norm, nn.Identity())
        if self.scale:
            is_module = isinstance(getattr(block, self.scale), nn.Module)
            setattr(block, self.scale, nn.Identity() if is_module else None)
        setattr(block, self.ffn, form)


def _plain_norm(norm: nn.Module) -> nn.Module:
    """Return timm's LayerNorm as an ``nn.LayerNorm`` of the same parameters, others as they are."""
    if full_name(type(norm)) != 'timm.layers.norm.LayerNorm':
        return norm
    plain = nn.LayerNorm(norm.normalized_shape, norm.eps, device='meta')
    plain.weight, plain.bias = norm.weight, norm.bias
    return plain


# ViT, SAM and MMSegmentation's ViT.
register_family('TransformerEncoderLayer', Family('norm2', 'ffn', 'norm1', 'attn'))
register_family('SwinBlock', Family('norm2', 'ffn', 'norm1', 'attn.w_msa'))
register_family('SwinBlockV2', Family(ffn='ffn', shortcut=False))
register_family('ChannelBlock SpatialBlock', Family(norm='norm2', ffn='ffn'))  # DaViT
register_family('MixMIMBlock T2TTransformerLayer', Family(norm='ln2', ffn='ffn'))
register_family('TransformerBlock', Family(norm='norm_ffn', ffn='ffn'))  # TNT
register_family('MixerBlock', Family(norm='norm2', ffn='channel_mix'))
register_family('BEiTTransformerEncoderLayer BEiTBlock', BEiT(norm='ln2', ffn='ffn'))
register_family('DeiT3TransformerEncoderLayer DeiT3Block', DeiT3(norm='ln2', ffn='ffn'))
register_family('PoolFormerBlock PoolFormerTokenBlock', PoolFormer(norm='norm2', ffn='mlp'))
register_family('ConvNeXtBlock', ConvNeXt(ffn='pointwise_conv1', shortcut=False))
register_family(
    'mmseg.models.backbones.mit.TransformerEncoderLayer mmdet.models.backbones.pvt.PVTEncoderLayer',
    MixFFNs('norm2', 'ffn', 'norm1', 'attn'),
)
# In timm also DeiT III and DINOv2; EVA and DINOv3.
register_family(
    'timm.models.vision_transformer.Block', MLPs('norm2', 'mlp', 'norm1', 'attn', scale='ls2')
)
register_family('timm.models.eva.EvaBlock', MLPs('norm2', 'mlp', 'norm1', 'attn', scale='gamma_2'))
register_family('projects.ViTDet.vitdet.vit.Block', MLPs('norm2', 'mlp'))
# DETRs, and the pixel decoders of MaskFormer and Mask2Former.
register_family(
    'DetrTransformerEncoderLayer DeformableDetrTransformerEncoderLayer', Family(ffn='ffn')
)
register_family('mmcv.cnn.bricks.transformer.BaseTransformerLayer', MMCVLayers(ffn='ffns.0'))
register_family(
    'DetrTransformerDecoderLayer ConditionalDetrTransformerDecoderLayer '
    'DABDetrTransformerDecoderLayer DeformableDetrTransformerDecoderLayer '
    'GroundingDinoTransformerDecoderLayer Mask2FormerTransformerDecoderLayer',
    Family(ffn='ffn', decoder=True),
)
