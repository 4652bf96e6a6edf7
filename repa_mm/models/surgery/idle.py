"""Putting channel-idle FFNs into the backbones of OpenMMLab."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.backbones.beit import BEiTTransformerEncoderLayer
from mmpretrain.models.backbones.deit3 import DeiT3FFN, DeiT3TransformerEncoderLayer
from mmpretrain.models.backbones.poolformer import Mlp as ConvFFN
from mmpretrain.models.backbones.poolformer import PoolFormerBlock

from repa_mm.reparam import ChannelIdleFFN, Form, check_state_dict

# Blocks that end with ``x = ffn(norm(x), identity=x)``, or that have a
# counterpart below which does, by class name (mmdet and mmseg have their own
# copies): the names of the norm and of the FFN. The attributes alone would
# not do: post-norm blocks have the same ones.
PRE_NORM_BLOCKS = {
    'BEiTTransformerEncoderLayer': ('ln2', 'ffn'),
    'ChannelBlock': ('norm2', 'ffn'),  # DaViT
    'DeiT3TransformerEncoderLayer': ('ln2', 'ffn'),
    'MixMIMBlock': ('ln2', 'ffn'),
    'MixerBlock': ('norm2', 'channel_mix'),
    'PoolFormerBlock': ('norm2', 'mlp'),
    'SpatialBlock': ('norm2', 'ffn'),  # DaViT
    'SwinBlock': ('norm2', 'ffn'),
    'T2TTransformerLayer': ('ln2', 'ffn'),
    'TransformerBlock': ('norm_ffn', 'ffn'),  # TNT
    'TransformerEncoderLayer': ('norm2', 'ffn'),  # ViT, SAM, mmseg's ViT
}


class IdleBEiTLayer(BEiTTransformerEncoderLayer):
    """A BEiT block whose FFN has the shortcut, layer scale and drop path."""

    def forward(self, x: torch.Tensor, rel_pos_bias: torch.Tensor | None) -> torch.Tensor:
        attn = self.attn(self.ln1(x), rel_pos_bias=rel_pos_bias)
        if self.gamma_1 is not None:
            attn = self.gamma_1 * attn
        return self.ffn(x + self.drop_path(attn))


class IdleDeiT3Layer(DeiT3TransformerEncoderLayer):
    """A DeiT3 block that does not normalize before its FFN.

    mmpretrain's applies ``ln1`` there too, and never ``ln2``.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(x + self.attn(self.ln1(x)))


class IdlePoolFormerBlock(PoolFormerBlock):
    """A PoolFormer block whose FFN works on tokens.

    After the first block the feature map is in the channels-last memory
    format, where tokens are a view of it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.token_mixer(self.norm1(x))
        x = x + self.drop_path(self.layer_scale_1[:, None, None] * mixed)
        return self.mlp(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


_COUNTERPARTS = {
    BEiTTransformerEncoderLayer: IdleBEiTLayer,
    DeiT3TransformerEncoderLayer: IdleDeiT3Layer,
    PoolFormerBlock: IdlePoolFormerBlock,
}


def linear_idle_ratios(idle_ratio: float, num_blocks: int) -> list[float]:
    """Idle ratios that grow linearly with depth around a mean; the last is 0.

    The ``--heuristic linear`` of the paper's released code.

    Args:
        idle_ratio (float): The mean ratio, at least about 0.5.
        num_blocks (int): Number of FFNs, at least 2.
    """
    step = (2 - 2 * idle_ratio) / (num_blocks - 1)
    return [2 * idle_ratio - 1 + step * i for i in range(1, num_blocks)] + [0.0]


def _ratio_of_each_block(idle_ratio, schedule: str, num_blocks: int):
    if schedule not in ('constant', 'linear'):
        raise ValueError(f"idle_schedule must be 'constant' or 'linear', but got {schedule!r}")
    if isinstance(idle_ratio, Sequence) and not isinstance(idle_ratio, str):
        if schedule != 'constant':
            raise ValueError(
                f'a list of idle ratios leaves nothing for idle_schedule={schedule!r} to do'
            )
        if len(idle_ratio) != num_blocks:
            raise ValueError(
                f'idle_ratio has {len(idle_ratio)} entries, but the model has '
                f'{num_blocks} blocks: give one number, or one per block'
            )
        return list(idle_ratio)
    if schedule == 'linear':
        if not isinstance(idle_ratio, (int, float)):
            raise ValueError(f'idle_ratio must be a number, got {idle_ratio!r}')
        return linear_idle_ratios(idle_ratio, num_blocks)
    return [idle_ratio] * num_blocks


class _Parts(NamedTuple):
    """What an ordinary FFN is made of, in the order of its forward pass."""

    fc1: nn.Module
    act: nn.Module
    dropout: float
    fc2: nn.Module
    scale: torch.Tensor | None
    drop_path: nn.Module


def _parts_of(block: nn.Module, ffn: nn.Module) -> _Parts:
    """The parts of a block's FFN.

    Raises:
        ValueError: If it is not two linear layers around an activation, with a
            shortcut.
    """
    if isinstance(ffn, ConvFFN):
        return _Parts(ffn.fc1, ffn.act, ffn.drop.p, ffn.fc2, block.layer_scale_2, block.drop_path)
    # By exact type: what derives from them may compute something else.
    if type(ffn) not in (FFN, DeiT3FFN):
        raise ValueError(
            f'its {type(ffn).__name__} is not an FFN of two linear layers around an activation'
        )
    if ffn.num_fcs != 2:
        raise ValueError(f'its FFN has {ffn.num_fcs} linear layers, not two')
    fc1, act, dropout = ffn.layers[0]
    if type(block) is BEiTTransformerEncoderLayer:
        scale, drop_path = block.gamma_2, block.drop_path
        shortcut = not ffn.add_identity
    else:
        scale = getattr(ffn.gamma2, 'weight', None)
        drop_path, shortcut = ffn.dropout_layer, ffn.add_identity
    if not shortcut:
        raise ValueError('the shortcut of its FFN is not where such blocks have it')
    return _Parts(fc1, act, dropout.p, ffn.layers[1], scale, drop_path)


def _idle_ffn(block: nn.Module, idle_ratio: float, norm_cfg: dict) -> ChannelIdleFFN:
    """The channel-idle FFN that takes the place of a block's norm and FFN."""
    norm_name, ffn_name = PRE_NORM_BLOCKS[type(block).__name__]
    if not hasattr(block, norm_name):
        raise ValueError(
            f'it has no norm {norm_name!r} before its FFN, as blocks of this name in OpenMMLab have'
        )
    ffn = getattr(block, ffn_name)
    fc1, act, dropout, fc2, scale, drop_path = _parts_of(block, ffn)
    norm = getattr(block, norm_name)
    if type(block) is DeiT3TransformerEncoderLayer:
        norm = block.ln1  # which mmpretrain applies before the FFN, too
    if norm_cfg.get('type') == 'LN' and isinstance(norm, nn.LayerNorm):
        norm_cfg = dict(eps=norm.eps, **norm_cfg) if 'eps' not in norm_cfg else norm_cfg
    idle_ffn = ChannelIdleFFN(
        fc1.weight.shape[1],
        fc1.weight.shape[0],
        idle_ratio=idle_ratio,
        act_cfg=act,
        norm_cfg=norm_cfg,
        drop_path=getattr(drop_path, 'drop_prob', None) or 0.0,
        drop_rate=dropout,
    )
    with torch.no_grad():
        for new, old in ((idle_ffn.fc1, fc1), (idle_ffn.fc2, fc2)):
            new.weight.copy_(old.weight.flatten(1))
            new.bias.copy_(old.bias)
        # Scale and shift mean the same in each kind of norm.
        new = idle_ffn.norm1
        for key in ('weight', 'bias'):
            trained = getattr(norm, key, None)
            if trained is not None and getattr(new, key, None) is not None:
                getattr(new, key).copy_(trained)
    if isinstance(scale, nn.Parameter):
        idle_ffn.layer_scale = nn.Parameter(scale.detach().clone())
    elif scale is not None:
        del idle_ffn.layer_scale
        idle_ffn.register_buffer('layer_scale', scale.clone(), False)
    if not fc1.weight.requires_grad:  # a frozen stage
        idle_ffn.requires_grad_(False)
    return idle_ffn.to(fc1.weight).train(ffn.training)


def _put(idle_ffn: ChannelIdleFFN, block: nn.Module) -> None:
    norm_name, ffn_name = PRE_NORM_BLOCKS[type(block).__name__]
    # ``norm2`` may be a property that looks up ``ln2``.
    norm = getattr(block, norm_name)
    (norm_name,) = [name for name, m in block.named_children() if m is norm]
    if type(block) in _COUNTERPARTS:
        block.__class__ = _COUNTERPARTS[type(block)]
        for name in ('gamma_2', 'layer_scale_2'):  # in the FFN from now on
            if hasattr(block, name):
                delattr(block, name)
    # The channel-idle FFN normalizes by itself.
    setattr(block, norm_name, nn.Identity())
    setattr(block, ffn_name, idle_ffn)


def _find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks whose FFN becomes channel-idle, by name.

    Raises:
        ValueError: If there is none; names a block that is not known.
    """
    blocks, others = {}, []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, Form):
            raise ValueError(f'{type(model).__name__} is channel-idle already, see {name!r}')
        names = PRE_NORM_BLOCKS.get(kind)
        if names and hasattr(module, names[1]):
            blocks[name] = module
        elif any(child in ('ffn', 'mlp') for child, _ in module.named_children()):
            others.append(f'{name!r}, a {kind},')
    if not blocks:
        found = f'{others[0]} is none' if others else 'it has none'
        raise ValueError(
            f'{type(model).__name__} has no block whose FFN could become '
            'channel-idle. Known are the pre-norm blocks '
            f'{", ".join(sorted(PRE_NORM_BLOCKS))}; {found} of these'
        )
    return blocks


def idle_channels(
    model: nn.Module,
    idle_ratio: float | Sequence[float] = 0.75,
    idle_schedule: str = 'constant',
    norm_cfg: dict = dict(type='BN'),
) -> nn.Module:
    """Put channel-idle FFNs into a backbone, in place.

    In every pre-norm block, the norm before the FFN and the FFN become one
    :class:`~repa_mm.reparam.ChannelIdleFFN`. The linear layers keep their
    weights; the BatchNorms are new.

    Args:
        model (nn.Module): A backbone (or a model with one) whose blocks are
            known, see ``PRE_NORM_BLOCKS``.
        idle_ratio (float | Sequence[float]): Share of hidden channels that
            skip the activation, in [0, 1]: one for all, or one per block.
            Defaults to 0.75.
        idle_schedule (str): 'constant', or 'linear' for ratios that grow with
            depth, see :func:`linear_idle_ratios`. Defaults to 'constant'.
        norm_cfg (dict): Norm of the FFNs: 'BN', 'SyncBN' or 'LN'.
            Defaults to ``dict(type='BN')``.

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If no block is known, an FFN is not of the kind that can
            be channel-idle, or an idle ratio is not in [0, 1].
    """
    blocks = _find_blocks(model)
    ratios = _ratio_of_each_block(idle_ratio, idle_schedule, len(blocks))
    ffns = []
    # All of them before the first is put in: never half a conversion.
    for (name, block), ratio in zip(blocks.items(), ratios):
        try:
            ffns.append(_idle_ffn(block, ratio, norm_cfg))
        except ValueError as error:
            raise ValueError(
                f'cannot make the FFN of {name!r}, a {type(block).__name__}, channel-idle: {error}'
            ) from error
    for ffn, block in zip(ffns, blocks.values()):
        _put(ffn, block)
    # MMEngine loads non-strictly, with only a warning for what is missing; a
    # backbone without the weights of its FFNs is never what was wanted.
    model._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
    return model
