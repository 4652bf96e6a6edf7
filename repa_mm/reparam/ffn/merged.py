"""The deploy form of a channel-idle FFN."""

import copy

import torch
import torch.nn as nn

from ..forms import DeployForm
from ..numerics import rounded
from .layers import build_activation, check_input
from .weights import FoldedFFN, stack


class MergedFFN(DeployForm):
    """Deploy form of a :class:`ChannelIdleFFN` (paper eq. 7).

    It computes y = x W^T + b + act(x W_in^T + b_in) W_out^T in two matrix products. W_in (A, C) and
    W (C, C) are stacked in ``fc1``. The second product, with W_out (C, A) in ``fc2``, accumulates
    onto the linear half of the first.

    Args:
        embed_dims (int): Number of channels C.
        num_active (int): Number of activated channels A.
        act_cfg (dict | nn.Module): The activation.
        norm (nn.LayerNorm | nn.GroupNorm, optional): A norm that could not be merged. The shortcut
            then starts before the norm, and is added at run time.
        idle (bool): Whether there are idle channels, merged into W. Without idle channels (idle
            ratio 0), W is only the shortcut, and its product is left out. Defaults to True.
        shortcut (bool): Whether there is a shortcut. Defaults to True.
    """

    label = 'channel-idle FFN'

    def __init__(
        self,
        embed_dims: int,
        num_active: int,
        act_cfg: dict | nn.Module = dict(type='GELU'),
        norm: nn.Module | None = None,
        idle: bool = True,
        shortcut: bool = True,
    ) -> None:
        super().__init__()
        self.embed_dims = embed_dims
        self.num_active = num_active
        self.idle = idle
        # True if the shortcut is added at run time, and not in W.
        self.shortcut = shortcut and (norm is not None or not idle)
        self._movable = shortcut and not self.shortcut
        self.norm = nn.Identity() if norm is None else norm
        self.fc1 = nn.Linear(embed_dims, num_active + idle * embed_dims)
        self.act = build_activation(act_cfg)
        # With idle channels, the output bias is in fc1, next to W.
        self.fc2 = nn.Linear(num_active, embed_dims, bias=not idle) if num_active else None
        self._register_state_dict_hook(self._save_inside)

    @classmethod
    def of(
        cls,
        folded: FoldedFFN,
        act: nn.Module,
        like: torch.Tensor,
        norm: nn.Module | None = None,
        idle: bool = True,
        shortcut: bool = True,
    ) -> 'MergedFFN':
        """Build the deploy form from folded weights, rounded once.

        Args:
            folded (FoldedFFN): The weights in float64, without the shortcut.
            act (nn.Module): The activation, which is copied.
            like (torch.Tensor): A tensor with the deploy form's device and dtype.
            norm (nn.Module, optional): See the class; the norm is copied.
            idle (bool): See the class.
            shortcut (bool): See the class.

        Raises:
            ValueError: If the weights exceed the range of the dtype.
        """
        with torch.device('meta'):
            width, active = len(folded.w), len(folded.b_in)
            merged = cls(width, active, copy.deepcopy(act), copy.deepcopy(norm), idle, shortcut)
        if shortcut and norm is None:
            folded.w.diagonal().add_(1)
        for key, value in stack(folded, idle).items():
            layer, name = key.split('.')
            setattr(getattr(merged, layer), name, rounded(value, like))
        return merged

    @torch.no_grad()
    def set_shortcut(self, where: str) -> None:
        """Put the shortcut into W, or take it out and add it at run time.

        A shortcut inside W costs nothing. With the shortcut outside, W keeps all its digits in half
        precision (bfloat16 resolves 2^-8 next to the 1 on the diagonal), and autocast adds the
        shortcut in float32. Call this method before a cast. State dicts always have the shortcut
        inside W, except with ``state_dict(keep_vars=True)``, which returns the parameters as they
        are.

        Args:
            where (str): 'inside' or 'outside'.

        Raises:
            ValueError: If ``where`` is something else.
        """
        if where not in ('inside', 'outside'):
            raise ValueError(f"the shortcut is 'inside' or 'outside', but got {where!r}")
        if self._movable and self.shortcut != (where == 'outside'):
            self.shortcut = not self.shortcut
            self.fc1.weight.copy_(self._with_identity(self.fc1.weight, -1 if self.shortcut else 1))

    def _with_identity(self, weight: torch.Tensor, times: int) -> torch.Tensor:
        weight = weight.detach().clone()
        weight[self.num_active :].diagonal().add_(times)
        return weight

    @staticmethod
    def _save_inside(self, state_dict, prefix, local_metadata) -> None:
        key = f'{prefix}fc1.weight'
        # Tracers look for the parameter itself (keep_vars=True).
        if self._movable and self.shortcut and state_dict[key] is not self.fc1.weight:
            state_dict[key] = self._with_identity(state_dict[key], 1)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        key = f'{prefix}fc1.weight'
        if self._movable and self.shortcut and key in state_dict:
            state_dict[key] = self._with_identity(state_dict[key], -1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def inference(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """Compute :meth:`ChannelIdleFFN.forward` for x of shape (B, L, C)."""
        check_input(self, x, identity)
        h = self.fc1(self.norm(x).reshape(-1, self.embed_dims))
        if not self.idle:
            y = self.fc2(self.act(h))
        elif self.fc2 is None:
            y = h
        else:
            y = torch.addmm(
                h[:, self.num_active :], self.act(h[:, : self.num_active]), self.fc2.weight.t()
            )
        y = y.view(x.shape)
        return x + y if self.shortcut else y

    def extra_repr(self) -> str:
        return f'num_active={self.num_active}, idle={self.idle}, shortcut={self.shortcut}'


def set_shortcut_(model: nn.Module, where: str) -> nn.Module:
    """Call :meth:`MergedFFN.set_shortcut` for every FFN of a model.

    Args:
        model (nn.Module): The model, changed in place.
        where (str): 'inside' or 'outside'.

    Returns:
        nn.Module: ``model``.

    Raises:
        ValueError: If ``where`` is something else.
    """
    for module in model.modules():
        if isinstance(module, MergedFFN):
            module.set_shortcut(where)
    return model
