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

    y = x W^T + b + act(x W_in^T + b_in) W_out^T in two matrix products: W_in (A, C) and W (C, C)
    are stacked in ``fc1``, and the second product, with W_out (C, A) in ``fc2``, accumulates onto
    the linear half of the first.

    Args:
        embed_dims (int): Number of channels C.
        num_active (int): Number of activated channels A.
        act_cfg (dict | nn.Module): The activation.
        norm (nn.LayerNorm | nn.GroupNorm, optional): A norm that could not be merged. The shortcut
            then starts before the norm and is added at run time.
        idle (bool): Whether there are idle channels, merged into W. Without (idle ratio 0) W is the
            shortcut alone and is not multiplied by. Defaults to True.
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
        # Whether a shortcut is added at run time. Otherwise it is in W.
        self.shortcut = shortcut and (norm is not None or not idle)
        self._movable = shortcut and not self.shortcut
        self.norm = nn.Identity() if norm is None else norm
        self.fc1 = nn.Linear(embed_dims, num_active + idle * embed_dims)
        self.act = build_activation(act_cfg)
        # With idle channels the output bias is in fc1, beside W.
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
        """Return the form that has folded weights, rounded once.

        Args:
            folded (FoldedFFN): In float64, without the shortcut.
            act (nn.Module): The activation, of which the form gets a copy.
            like (torch.Tensor): Of the form's device and dtype.
            norm (nn.Module, optional): As for the class; the form gets a copy.
            idle (bool): As for the class.
            shortcut (bool): As for the class.

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

        Inside, it costs nothing. Outside, W keeps all its digits in half precision (bfloat16
        resolves 2^-8 next to the 1 on the diagonal), and under autocast the sum is one of float32.
        Call it before a cast. State dicts always have it inside,
        but for the parameters themselves that ``state_dict(keep_vars=True)`` returns.

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
        # Tracers ask for the parameter itself (keep_vars=True), and are to find it.
        if self._movable and self.shortcut and state_dict[key] is not self.fc1.weight:
            state_dict[key] = self._with_identity(state_dict[key], 1)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        key = f'{prefix}fc1.weight'
        if self._movable and self.shortcut and key in state_dict:
            state_dict[key] = self._with_identity(state_dict[key], -1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def inference(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`ChannelIdleFFN.forward`, x of shape (B, L, C)."""
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
        model (nn.Module): Any model.
        where (str): 'inside' or 'outside'.

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If ``where`` is something else.
    """
    for module in model.modules():
        if isinstance(module, MergedFFN):
            module.set_shortcut(where)
    return model
