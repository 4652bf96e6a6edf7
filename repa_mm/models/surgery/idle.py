"""Training forms in the place of the FFNs of a backbone of OpenMMLab.

A pre-norm block ends with ``x = ffn(norm(x), identity=x)``. A training form takes the place of norm
and FFN together: ``x = form(x, identity=x)``. :func:`idle_channels` does so in all blocks of a
model. Its steps are functions of their own::

    for name, block in find_blocks(model).items():
        parts = parts_of(block)  # norm, fc1, act, ...
        put(block, idle_ffn(block, idle_ratio=0.75))

How to add a kind of block:

1. An entry in :data:`PRE_NORM_BLOCKS`: the names of its norm and of its FFN.
2. If its forward pass ends otherwise, a subclass that ends with ``return self.ffn(x)``, and an
   entry in :data:`COUNTERPARTS`.
3. If its FFN is not mmcv's ``FFN``, a case in :func:`parts_of`.
4. A row in ``tests/test_models/test_idle_channels.py`` and in ``docs/backbones.md``.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from mmcv.cnn import Linear
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.backbones.beit import BEiTTransformerEncoderLayer
from mmpretrain.models.backbones.deit3 import DeiT3FFN, DeiT3TransformerEncoderLayer
from mmpretrain.models.backbones.poolformer import Mlp as ConvFFN
from mmpretrain.models.backbones.poolformer import PoolFormerBlock

from repa_mm.reparam import ChannelIdleFFN, Form, become, check_state_dict
from repa_mm.reparam.numerics import is_plain

# The names of the norm and of the FFN of a block, by the name of its class: MMDetection and
# MMSegmentation have classes of their own. The attributes alone would not do, since post-norm
# blocks have them, too.
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
    'TransformerEncoderLayer': ('norm2', 'ffn'),  # ViT, SAM, MMSegmentation's ViT
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


# What a block of a class becomes when its FFN is replaced.
COUNTERPARTS = {
    BEiTTransformerEncoderLayer: IdleBEiTLayer,
    DeiT3TransformerEncoderLayer: IdleDeiT3Layer,
    PoolFormerBlock: IdlePoolFormerBlock,
}


class Parts(NamedTuple):
    """A block's norm and FFN, in the order of their forward pass.

    ``drop`` and ``drop_path`` are rates. ``scale`` (C, ) is the layer scale, a parameter or a
    constant; None if there is none.
    """

    norm: nn.Module
    fc1: nn.Module
    act: nn.Module
    drop: float
    fc2: nn.Module
    scale: torch.Tensor | None
    drop_path: float


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model whose norm and FFN can be replaced, by name.

    Args:
        model (nn.Module): A backbone, or a model with one.

    Raises:
        ValueError: If there is no such block, or if the model has training or deploy forms already.
    """
    blocks, others = {}, []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, Form):
            model_name = type(model).__name__
            raise ValueError(f'{model_name} has a {module.label} already, see {name!r}')
        names = PRE_NORM_BLOCKS.get(kind)
        if names and hasattr(module, names[1]):
            blocks[name] = module
        elif any(child in ('ffn', 'mlp') for child, _ in module.named_children()):
            others.append(f'{name!r}, a {kind},')
    if not blocks:
        found = f'{others[0]} is none' if others else 'it has none'
        raise ValueError(
            f'{type(model).__name__} has no block whose norm and FFN could be replaced. Known are '
            f'the pre-norm blocks {", ".join(sorted(PRE_NORM_BLOCKS))}; {found} of these'
        )
    return blocks


def parts_of(block: nn.Module) -> Parts:
    """What the norm and the FFN of a block are made of.

    Args:
        block (nn.Module): One of those that :func:`find_blocks` finds.

    Raises:
        ValueError: If its FFN is not two linear layers around an activation, with a shortcut; or if
            hooks or replaced layers make it compute something else.
    """
    norm_name, ffn_name = PRE_NORM_BLOCKS[type(block).__name__]
    if not hasattr(block, norm_name):
        raise ValueError(
            f'it has no norm {norm_name!r} before its FFN, as blocks of this name in OpenMMLab have'
        )
    norm, ffn = getattr(block, norm_name), getattr(block, ffn_name)
    if type(block) is DeiT3TransformerEncoderLayer:
        norm = block.ln1
    # By exact type: a subclass may compute something else.
    if type(ffn) is ConvFFN:
        fc1, act, drop, fc2 = ffn.fc1, ffn.act, ffn.drop, ffn.fc2
        scale, drop_path, dropouts = block.layer_scale_2, block.drop_path, (drop,)
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
        if not shortcut:
            raise ValueError(
                f'its FFN has add_identity={ffn.add_identity}, so that the shortcut is not where '
                'such blocks have it'
            )
    if 'forward' in ffn.__dict__ or ffn._forward_hooks or ffn._forward_pre_hooks:
        raise ValueError(
            'its FFN has a forward hook or a replaced forward(), which would be lost: remove it '
            'first'
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
        raise ValueError(f'its FFN ends with a {type(drop_path).__name__}, and not with a DropPath')
    return Parts(norm, fc1, act, getattr(drop, 'p', 0.0), fc2, scale, rate or 0.0)


def idle_ffn(
    block: nn.Module, idle_ratio: float = 0.75, norm_cfg: dict = dict(type='BN')
) -> ChannelIdleFFN:
    """A channel-idle FFN with the weights of a block's norm and FFN, for :func:`put`.

    Args:
        block (nn.Module): One of those that :func:`find_blocks` finds.
        idle_ratio (float): Share of hidden channels that skip the activation. Defaults to 0.75.
        norm_cfg (dict): As for :func:`idle_channels`.

    Raises:
        ValueError: As :func:`parts_of`; if the idle ratio is not in [0, 1]; or if the norm cannot
            be kept.
    """
    parts = parts_of(block)
    norm, fc1, fc2 = parts.norm, parts.fc1, parts.fc2
    if norm_cfg.get('type') == 'keep':
        if not is_plain(norm, nn.LayerNorm, nn.GroupNorm):
            raise ValueError(
                f'its norm is a {type(norm).__name__}, and not a LayerNorm or GroupNorm that can '
                'be kept'
            )
        norm_cfg = dict(norm_cfg, type='LN' if isinstance(norm, nn.LayerNorm) else 'TokenGN')
    if norm_cfg.get('type') == 'LN' and isinstance(norm, nn.LayerNorm):
        norm_cfg = dict(dict(eps=norm.eps), **norm_cfg)
    if norm_cfg.get('type') == 'TokenGN' and isinstance(norm, nn.GroupNorm):
        norm_cfg = dict(dict(eps=norm.eps, num_groups=norm.num_groups), **norm_cfg)
    hidden, channels = fc1.weight.shape[:2]
    drops = dict(drop_path=parts.drop_path, drop_rate=parts.drop)
    ffn = ChannelIdleFFN(
        channels, hidden, idle_ratio, act_cfg=copy.deepcopy(parts.act), norm_cfg=norm_cfg, **drops
    )
    with torch.no_grad():
        for new, old in ((ffn.fc1, fc1), (ffn.fc2, fc2)):
            new.weight.copy_(old.weight.flatten(1))
            new.bias.copy_(torch.zeros_like(new.bias) if old.bias is None else old.bias)
        # Scale and shift mean the same in each kind of norm.
        for key in ('weight', 'bias'):
            trained, new = getattr(norm, key, None), getattr(ffn.norm1, key, None)
            if trained is not None and new is not None:
                new.copy_(trained)
    if isinstance(parts.scale, nn.Parameter):
        ffn.layer_scale = nn.Parameter(parts.scale.detach().clone())
    elif parts.scale is not None:
        del ffn.layer_scale
        ffn.register_buffer('layer_scale', parts.scale.clone(), False)
    if not fc1.weight.requires_grad:  # a frozen stage
        ffn.requires_grad_(False)
    return ffn.to(fc1.weight).train(block.training)


def put(block: nn.Module, form: nn.Module) -> None:
    """Put a training form in the place of a block's norm and FFN.

    Args:
        block (nn.Module): One of those that :func:`find_blocks` finds.
        form (nn.Module): A module that takes the tokens (B, L, C) or (B, H, W, C) before the norm,
            and returns them with its own output added. Most blocks call it with the tokens as
            ``identity``, too, as they call mmcv's ``FFN``.
    """
    norm_name, ffn_name = PRE_NORM_BLOCKS[type(block).__name__]
    # ``norm2`` may be a property that looks up ``ln2``.
    norm = getattr(block, norm_name)
    (norm_name,) = [name for name, m in block.named_children() if m is norm]
    if type(block) in COUNTERPARTS:
        become(block, COUNTERPARTS[type(block)])
        for name in ('gamma_2', 'layer_scale_2'):  # in the form from now on
            if hasattr(block, name):
                delattr(block, name)
    # The form normalizes by itself.
    setattr(block, norm_name, nn.Identity())
    setattr(block, ffn_name, form)


def linear_idle_ratios(idle_ratio: float, num_blocks: int) -> list[float]:
    """Idle ratios that grow linearly with depth around a mean; the last is 0.

    The ``--heuristic linear`` of the paper's released code.

    Args:
        idle_ratio (float): The mean ratio, at least about 0.5.
        num_blocks (int): Number of FFNs, at least 2.

    Raises:
        ValueError: If there are fewer blocks, or the first ratio would be below 0.
    """
    if num_blocks < 2 or 2 * idle_ratio - 1 + (2 - 2 * idle_ratio) / (num_blocks - 1) < 0:
        raise ValueError(
            "idle_schedule='linear' needs at least 2 blocks, and an idle_ratio of at least about "
            f'0.5, or the first block has less than 0: got {num_blocks} blocks and {idle_ratio}'
        )
    step = (2 - 2 * idle_ratio) / (num_blocks - 1)
    return [2 * idle_ratio - 1 + step * i for i in range(1, num_blocks)] + [0.0]


def ratio_of_each_block(
    idle_ratio: float | Sequence[float | None], schedule: str, num_blocks: int
) -> list[float | None]:
    """The idle ratio of each block, as ``idle_ratio`` and ``idle_schedule`` say.

    Args:
        idle_ratio (float | Sequence): One for all blocks, or one per block.
        schedule (str): 'constant' or 'linear', see :func:`idle_channels`.
        num_blocks (int): Number of blocks.

    Raises:
        ValueError: If there are not as many ratios as blocks, or the schedule is unknown.
    """
    if schedule not in ('constant', 'linear'):
        raise ValueError(f"idle_schedule must be 'constant' or 'linear', but got {schedule!r}")
    linear = schedule == 'linear'
    if not isinstance(idle_ratio, Sequence) or isinstance(idle_ratio, str):
        if idle_ratio is None or linear and not isinstance(idle_ratio, (int, float)):
            raise ValueError(f'idle_ratio must be a number, got {idle_ratio!r}')
        return linear_idle_ratios(idle_ratio, num_blocks) if linear else [idle_ratio] * num_blocks
    if linear:
        raise ValueError("a list of idle ratios leaves nothing for idle_schedule='linear' to do")
    if len(idle_ratio) != num_blocks:
        raise ValueError(
            f'idle_ratio has {len(idle_ratio)} entries, but the model has {num_blocks} blocks: '
            'give one number, or one per block'
        )
    return list(idle_ratio)


def idle_channels(
    model: nn.Module,
    idle_ratio: float | Sequence[float | None] = 0.75,
    idle_schedule: str = 'constant',
    norm_cfg: dict = dict(type='BN'),
) -> nn.Module:
    """Put channel-idle FFNs into a backbone, in place.

    In every pre-norm block, the norm before the FFN and the FFN become one
    :class:`~repa_mm.reparam.ChannelIdleFFN`. The linear layers, the layer scale and the affine
    parameters of the norm keep their values; the statistics of BatchNorms are new. With the norm
    kept and ``idle_ratio=0`` the model computes what it did before.

    The result is a start for training. ``tools/convert_pretrained.py`` converts the checkpoint of a
    whole trained detector, segmentor or classifier.

    Args:
        model (nn.Module): A backbone (or a model with one) whose blocks are known, see
            :data:`PRE_NORM_BLOCKS`.
        idle_ratio (float | Sequence): Share of hidden channels that skip the activation, in [0, 1]:
            one for all, or one per block, of which None leaves its block as it is. Defaults to
            0.75.
        idle_schedule (str): 'constant', or 'linear' for ratios that grow with depth, see
            :func:`linear_idle_ratios`. Defaults to 'constant'.
        norm_cfg (dict): Norm of the FFNs: 'BN' or 'SyncBN', which merge, 'LN', or 'keep' for the
            norm that each block has: a LayerNorm, and a GroupNorm in a PoolFormer. Defaults to
            ``dict(type='BN')``.

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If no block is known, an FFN is not of the kind that can be channel-idle, or an
            idle ratio is not in [0, 1].
    """
    blocks = find_blocks(model)
    ratios = ratio_of_each_block(idle_ratio, idle_schedule, len(blocks))
    ffns = {}
    # All of them before the first is put in: never half a conversion.
    for (name, block), ratio in zip(blocks.items(), ratios):
        if ratio is None:
            continue
        try:
            ffns[block] = idle_ffn(block, ratio, norm_cfg)
        except ValueError as error:
            raise ValueError(
                f'cannot make the FFN of {name!r}, a {type(block).__name__}, channel-idle: {error}'
            ) from error
    for block, ffn in ffns.items():
        put(block, ffn)
    # MMEngine loads non-strictly, with only a warning for what is missing; a backbone without the
    # weights of its FFNs is never what was wanted.
    model._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
    return model
