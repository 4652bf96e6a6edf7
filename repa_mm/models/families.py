"""Families of blocks: where the norm, the FFN and the attention of a block are.

:data:`FAMILIES` is the one table of block families, by the names of the blocks' classes, and
:func:`register_family` adds a user's own to it::

    from repa_mm.models import Family, register_family

    register_family('MyBlock', Family(norm='norm2', ffn='ffn'))

suits a block whose forward pass ends with ``x = ffn(norm2(x), identity=x)``, where ``ffn`` is
mmcv's ``FFN``. Other blocks need a subclass of :class:`Family`: its :meth:`~Family.ffn_modules`
returns the modules of another kind of FFN, and its ``counterpart`` is the block that calls a form.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.backbones.beit import BEiTTransformerEncoderLayer
from mmpretrain.models.backbones.deit3 import DeiT3FFN, DeiT3TransformerEncoderLayer
from mmpretrain.models.backbones.poolformer import Mlp as ConvFFN
from mmpretrain.models.backbones.poolformer import PoolFormerBlock

from repa_mm.reparam import TrainingForm, become


class FFNModules(NamedTuple):
    """The modules of a norm and the FFN behind it, x + scale * fc2(act(fc1(norm(x)))).

    ``scale`` (C, ) is the layer scale, None if there is none. ``drop`` is the dropout of the hidden
    channels, ``last`` that of the output, ``drop_path`` the stochastic depth.
    """

    norm: nn.Module
    fc1: nn.Module
    act: nn.Module
    fc2: nn.Module
    scale: torch.Tensor | None = None
    drop: nn.Module | None = None
    last: nn.Module | None = None
    drop_path: nn.Module | None = None


@dataclass(frozen=True)
class Family:
    """Blocks of one kind, by the names of their parts.

    Args:
        norm (str): The norm before the FFN. Empty where the norm comes after the FFN, and stays.
        ffn (str): The FFN.
        attn_norm (str): The norm before the attention.
        attn (str): The attention.
        shortcut (bool): Whether the FFN contains the shortcut. Defaults to True.
        decoder (bool): Whether these are decoder layers, which work on a few hundred queries: they
            are sites on request only. Defaults to False.
    """

    norm: str = ''
    ffn: str = ''
    attn_norm: str = ''
    attn: str = ''
    shortcut: bool = True
    decoder: bool = False

    #: Subclass of the block that ends with ``return self.ffn(x)``, which a block becomes when a
    #: form takes the place of its norm and FFN. None if the block itself does.
    counterpart: ClassVar[type[nn.Module] | None] = None
    #: Attributes of the block that are in the form afterwards.
    absorbed: ClassVar[tuple[str, ...]] = ()

    def ffn_modules(self, block: nn.Module) -> FFNModules:
        """Return the modules of a block's norm and FFN.

        Raises:
            ValueError: If the FFN is of another kind.
        """
        return FFNModules(self.norm_of(block), *_mmcv_ffn(getattr(block, self.ffn), self.shortcut))

    def norm_of(self, block: nn.Module) -> nn.Module:
        """Return the norm that a block computes before its FFN, ``nn.Identity()`` for none.

        Raises:
            ValueError: If the block has no such norm.
        """
        if not self.norm:
            return nn.Identity()
        if not hasattr(block, self.norm):
            raise ValueError(
                f'it has no norm {self.norm!r} before its FFN, as blocks of this name in '
                'OpenMMLab have'
            )
        return getattr(block, self.norm)

    def calls_with_norm(self, block: nn.Module) -> bool:
        """Return whether a block calls its FFN as ``ffn(norm(x), identity=x)``."""
        is_usual = self.norm and self.counterpart is None
        return bool(is_usual) and isinstance(getattr(block, self.ffn), FFN)

    def put_ffn(self, block: nn.Module, form: TrainingForm) -> None:
        """Put a form in the place of a block's FFN, and of the norm before the FFN.

        The norm stays if ``form.contains_norm`` is False, where :meth:`calls_with_norm` is True.
        """
        if self.norm and getattr(form, 'contains_norm', True):
            norm = getattr(block, self.norm)
            # The attribute may be a property: ``norm2`` looks up ``ln2``.
            (child,) = [name for name, module in block.named_children() if module is norm]
            if self.counterpart:
                become(block, self.counterpart)
                for name in self.absorbed:
                    if hasattr(block, name):
                        delattr(block, name)
            setattr(block, child, nn.Identity())
        setattr(block, self.ffn, form)


#: The known families, by the name of the block's class. MMDetection and MMSegmentation have classes
#: of their own. The names of attributes alone would not do, since post-norm blocks have them, too.
FAMILIES: dict[str, Family] = {}


def register_family(names: str, family: Family) -> None:
    """Make a family of blocks known: all structures and conversions then find its sites.

    Args:
        names (str): The names of the classes, with blanks between them. Classes that derive from
            these under other names may compute something else, and are not known.
        family (Family): Their family.

    Raises:
        ValueError: If a name is known already.

    Examples:
        >>> register_family('MyBlock', Family(norm='norm2', ffn='ffn'))
    """
    for name in names.split():
        if name in FAMILIES:
            raise ValueError(f'a block of the name {name!r} is known already: rename the class')
        FAMILIES[name] = family


def _mmcv_ffn(ffn: nn.Module, add_identity: bool) -> tuple:
    """Modules of mmcv's ``FFN``, or MMPretrain's ``DeiT3FFN``, from fc1 on."""
    # By exact type: a subclass may compute something else.
    if type(ffn) not in (FFN, DeiT3FFN):
        raise ValueError(
            f'its {type(ffn).__name__} is not an FFN of two linear layers around an activation'
        )
    if ffn.num_fcs != 2:
        raise ValueError(f'its FFN has {ffn.num_fcs} linear layers, not two')
    if ffn.add_identity != add_identity:
        raise ValueError(
            f'its FFN has add_identity={ffn.add_identity}, so that the shortcut is not where such '
            'blocks have it'
        )
    (fc1, act, drop), fc2, last = ffn.layers
    return fc1, act, fc2, getattr(ffn.gamma2, 'weight', None), drop, last, ffn.dropout_layer


class BEiTBlock(BEiTTransformerEncoderLayer):
    """A BEiT block whose FFN contains the shortcut, the layer scale and the drop path."""

    def forward(self, x: torch.Tensor, rel_pos_bias: torch.Tensor | None) -> torch.Tensor:
        attn = self.attn(self.ln1(x), rel_pos_bias=rel_pos_bias)
        if self.gamma_1 is not None:
            attn = self.gamma_1 * attn
        return self.ffn(x + self.drop_path(attn))


@dataclass(frozen=True)
class BEiT(Family):
    """BEiT's blocks: layer scale, drop path and shortcut are in the block.

    MMSegmentation's BEiT, whose block has the same name and another forward pass, is refused.
    """

    counterpart = BEiTBlock
    absorbed = ('gamma_2',)

    def ffn_modules(self, block: nn.Module) -> FFNModules:
        if type(block) is not BEiTTransformerEncoderLayer:
            return super().ffn_modules(block)
        found = _mmcv_ffn(getattr(block, self.ffn), add_identity=False)
        modules = FFNModules(self.norm_of(block), *found)
        return modules._replace(scale=block.gamma_2, drop_path=block.drop_path)


class DeiT3Block(DeiT3TransformerEncoderLayer):
    """A DeiT3 block that does not normalize before its FFN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(x + self.attn(self.ln1(x)))


@dataclass(frozen=True)
class DeiT3(Family):
    """DeiT III's blocks, which apply ``ln1`` before the FFN, too, and never ``ln2``."""

    counterpart = DeiT3Block

    def ffn_modules(self, block: nn.Module) -> FFNModules:
        return super().ffn_modules(block)._replace(norm=block.ln1)


class PoolFormerTokenBlock(PoolFormerBlock):
    """A PoolFormer block whose FFN works on tokens.

    After the first block the feature map is in the channels-last memory format, where tokens are a
    view of it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.token_mixer(self.norm1(x))
        x = x + self.drop_path(self.layer_scale_1[:, None, None] * mixed)
        return self.mlp(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class PoolFormer(Family):
    """PoolFormer's blocks, whose FFNs are 1 x 1 convolutions on maps (B, C, H, W)."""

    counterpart = PoolFormerTokenBlock
    absorbed = ('layer_scale_2',)

    def ffn_modules(self, block: nn.Module) -> FFNModules:
        ffn = getattr(block, self.ffn)
        if type(ffn) is not ConvFFN:
            raise ValueError(f"its {type(ffn).__name__} is not a PoolFormer's FFN")
        scale, drop_path = block.layer_scale_2, block.drop_path
        return FFNModules(
            self.norm_of(block), ffn.fc1, ffn.act, ffn.fc2, scale, ffn.drop, None, drop_path
        )


@dataclass(frozen=True)
class ConvNeXt(Family):
    """ConvNeXt's blocks, which call the two linear layers of their FFN themselves.

    Norm, layer scale and drop path stay in the block.
    """

    def ffn_modules(self, block: nn.Module) -> FFNModules:
        if block.grn is not None or not block.linear_pw_conv:
            raise ValueError('it has a GRN, which mixes hidden channels, or no linear layers')
        return FFNModules(
            self.norm_of(block), block.pointwise_conv1, block.act, block.pointwise_conv2
        )

    def put_ffn(self, block: nn.Module, form: TrainingForm) -> None:
        block.act = block.pointwise_conv2 = nn.Identity()
        block.pointwise_conv1 = form


_PRE_NORM = Family(norm='norm2', ffn='ffn')
_LN2 = Family(norm='ln2', ffn='ffn')
# ViT, SAM, MMSegmentation's ViT.
register_family('TransformerEncoderLayer', Family('norm2', 'ffn', 'norm1', 'attn'))
register_family('SwinBlock', Family('norm2', 'ffn', 'norm1', 'attn.w_msa'))
register_family('SwinBlockV2', Family(ffn='ffn', shortcut=False))
register_family('ChannelBlock SpatialBlock', _PRE_NORM)  # DaViT
register_family('MixMIMBlock T2TTransformerLayer', _LN2)
register_family('TransformerBlock', Family(norm='norm_ffn', ffn='ffn'))  # TNT
register_family('MixerBlock', Family(norm='norm2', ffn='channel_mix'))
register_family('BEiTTransformerEncoderLayer BEiTBlock', BEiT(norm='ln2', ffn='ffn'))
register_family('DeiT3TransformerEncoderLayer DeiT3Block', DeiT3(norm='ln2', ffn='ffn'))
register_family('PoolFormerBlock PoolFormerTokenBlock', PoolFormer(norm='norm2', ffn='mlp'))
register_family('ConvNeXtBlock', ConvNeXt(ffn='pointwise_conv1', shortcut=False))
# DETR and its kin, and the pixel decoders of MaskFormer and Mask2Former.
register_family(
    'DetrTransformerEncoderLayer DeformableDetrTransformerEncoderLayer', Family(ffn='ffn')
)
register_family(
    'DetrTransformerDecoderLayer ConditionalDetrTransformerDecoderLayer '
    'DABDetrTransformerDecoderLayer DeformableDetrTransformerDecoderLayer '
    'GroundingDinoTransformerDecoderLayer Mask2FormerTransformerDecoderLayer',
    Family(ffn='ffn', decoder=True),
)
