"""RePa-Swin."""

import math

import torch.nn.functional as F
from mmengine.registry import MODELS
from mmpretrain.models import SwinTransformer

from repa_mm.models.attention import swap_attention
from repa_mm.models.base import RePaBackbone, adapt_output_norms


class SwinStateDicts:
    """Mixin before ``SwinTransformer`` that reads the state dicts of other Swin Transformers."""

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # The parent translates state dicts of earlier versions (the last norm had no number,
        # attention masks were saved), but not in subclasses.
        last = f'{prefix}norm{self.num_layers - 1}.'
        for key in list(state_dict):
            if key.startswith(f'{prefix}norm.'):
                state_dict[last + key.rpartition('.')[2]] = state_dict.pop(key)
            elif key.startswith(prefix) and key.endswith('.attn_mask'):
                del state_dict[key]
        adapt_output_norms(self, state_dict, prefix, last[len(prefix) : -1])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _prepare_relative_position_bias_table(self, state_dict, prefix, *args, **kwargs):
        """Resize the tables of windows of another size, bicubically.

        Swin's own code resizes tables so. The parent's method needs a function that SciPy no longer
        has.
        """
        for name, own in self.named_parameters():
            key = f'{prefix}{name}'
            if not (name.endswith('.relative_position_bias_table') and key in state_dict):
                continue
            table = state_dict[key]
            side, own_side = math.isqrt(len(table)), math.isqrt(len(own))
            if len(table) == len(own) or table.shape[1:] != own.shape[1:] or side**2 != len(table):
                continue
            maps = table.float().t().reshape(1, -1, side, side)
            resized = F.interpolate(maps, (own_side, own_side), mode='bicubic')
            state_dict[key] = resized.flatten(2)[0].t().to(table)
            index = name.replace('_bias_table', '_index')
            state_dict[f'{prefix}{index}'] = self.get_buffer(index)


@MODELS.register_module()
class FastSwinTransformer(SwinStateDicts, SwinTransformer):
    """mmpretrain's Swin Transformer with a faster window attention.

    The vanilla backbone to compare :class:`RePaSwinTransformer` with. Its arguments, outputs and
    state dict are those of mmpretrain's ``SwinTransformer``.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        swap_attention(self)

    def train(self, mode: bool = True):
        # mmpretrain's backbones return None.
        super().train(mode)
        return self


@MODELS.register_module()
class RePaSwinTransformer(RePaBackbone, SwinStateDicts, SwinTransformer):
    """Swin Transformer with channel-idle FFNs.

    `RePaFormer <https://arxiv.org/abs/2505.21847>`_ applied to `Swin
    <https://arxiv.org/abs/2103.14030>`_.

    Args:
        *args, **kwargs: Those of mmpretrain's ``SwinTransformer``, and ``idle_ratio``,
            ``idle_schedule``, ``ffn_norm_cfg`` and ``deploy`` of :class:`RePaBackbone`.
        fast_attention (bool): Use the window attention of
            :func:`~repa_mm.models.fast_window_attention`, which computes the same faster. Defaults
            to True.

    Examples:
        >>> model = RePaSwinTransformer('base', out_indices=(0, 1, 2, 3))
        >>> features = model(torch.rand(1, 3, 224, 224))
        >>> deployed = repa_mm.reparameterize(model)
    """

    def __init__(self, *args, fast_attention: bool = True, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if fast_attention:
            swap_attention(self)
