"""Putting channel-idle FFNs into backbones built of mmcv's ``FFN``."""
from typing import List, Sequence, Union

import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import FFN

from ..reparam import ChannelIdleFFN, check_state_dict

# Blocks that end with ``x = ffn(norm(x), identity=x)``, by class name (mmdet
# and mmseg have their own copies): the names of the norm and of the FFN. The
# attributes alone would not do: post-norm blocks have the same ones.
PRE_NORM_BLOCKS = {
    'SwinBlock': ('norm2', 'ffn'),
}


def linear_idle_ratios(idle_ratio: float, num_blocks: int) -> List[float]:
    """Idle ratios that grow linearly with depth around a mean; the last is 0.

    The ``--heuristic linear`` of the paper's released code.

    Args:
        idle_ratio (float): The mean ratio, at least about 0.5.
        num_blocks (int): Number of FFNs, at least 2.
    """
    step = (2 - 2 * idle_ratio) / (num_blocks - 1)
    return [2 * idle_ratio - 1 + step * i for i in range(1, num_blocks)] + [0.]


def _ratio_of_each_block(idle_ratio, schedule: str, num_blocks: int):
    if schedule not in ('constant', 'linear'):
        raise ValueError("idle_schedule must be 'constant' or 'linear', but "
                         f'got {schedule!r}')
    if isinstance(idle_ratio, Sequence) and not isinstance(idle_ratio, str):
        if schedule != 'constant':
            raise ValueError('a list of idle ratios leaves nothing for '
                             f'idle_schedule={schedule!r} to do')
        if len(idle_ratio) != num_blocks:
            raise ValueError(
                f'idle_ratio has {len(idle_ratio)} entries, but the model has '
                f'{num_blocks} blocks: give one number, or one per block')
        return list(idle_ratio)
    if schedule == 'linear':
        if not isinstance(idle_ratio, (int, float)):
            raise ValueError(f'idle_ratio must be a number, got {idle_ratio!r}')
        return linear_idle_ratios(idle_ratio, num_blocks)
    return [idle_ratio] * num_blocks


def _replace_ffn(block: nn.Module, idle_ratio: float, norm_cfg: dict) -> None:
    norm_name, ffn_name = PRE_NORM_BLOCKS[type(block).__name__]
    ffn = getattr(block, ffn_name)
    fc1, act, drop = ffn.layers[0]
    fc2 = ffn.layers[1]
    if ffn.num_fcs != 2 or drop.p or not ffn.add_identity:
        raise ValueError('only an FFN of two linear layers with a shortcut and'
                         f' without dropout can be channel-idle: {ffn}')
    idle_ffn = ChannelIdleFFN(
        ffn.embed_dims,
        ffn.feedforward_channels,
        idle_ratio=idle_ratio,
        act_cfg=act,
        norm_cfg=norm_cfg,
        drop_path=getattr(ffn.dropout_layer, 'drop_prob', None) or 0.)
    with torch.no_grad():
        for new, old in ((idle_ffn.fc1, fc1), (idle_ffn.fc2, fc2)):
            new.weight.copy_(old.weight)
            new.bias.copy_(old.bias)
        if not isinstance(ffn.gamma2, nn.Identity):
            idle_ffn.layer_scale = nn.Parameter(ffn.gamma2.scale.clone())
    idle_ffn.to(fc1.weight.device).train(ffn.training)
    # The channel-idle FFN normalizes by itself.
    setattr(block, norm_name, nn.Identity())
    setattr(block, ffn_name, idle_ffn)


def idle_channels(model: nn.Module,
                  idle_ratio: Union[float, Sequence[float]] = 0.75,
                  idle_schedule: str = 'constant',
                  norm_cfg: dict = dict(type='BN')) -> nn.Module:
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
        ValueError: If no block is known, or an idle ratio is not in [0, 1].
    """
    blocks = [
        m for m in model.modules() if type(m).__name__ in PRE_NORM_BLOCKS
        and isinstance(getattr(m, PRE_NORM_BLOCKS[type(m).__name__][1]), FFN)
    ]
    if not blocks:
        raise ValueError(
            f'{type(model).__name__} has no block whose FFN could become '
            f'channel-idle; known are {sorted(PRE_NORM_BLOCKS)}')
    ratios = _ratio_of_each_block(idle_ratio, idle_schedule, len(blocks))
    for block, ratio in zip(blocks, ratios):
        _replace_ffn(block, ratio, norm_cfg)
    # MMEngine loads non-strictly, with only a warning for what is missing; a
    # backbone without the weights of its FFNs is never what was wanted.
    model._register_load_state_dict_pre_hook(
        check_state_dict, with_module=True)
    return model
