"""Experts: FFNs in several copies, each trained on a part of the tokens, and averaged.

`Experts Weights Averaging <https://arxiv.org/abs/2308.06093>`_ gives an FFN E experts. In training
every token goes to one expert, at random and in equal parts. After each step every expert moves
towards the mean of the others by a rate beta,

    W_e <- (1 - beta) W_e + beta / (E - 1) sum_{j != e} W_j,

which leaves the mean of all as it is. The mean is what is evaluated and deployed.
"""

import copy

import torch
import torch.nn as nn

from .autograd import kept_statistics
from .depth import OrdinaryFFN
from .ffn import ChannelIdleFFN, DropPath, FoldedFFN
from .ffn.layers import build_activation, check_input
from .forms import TrainingForm
from .numerics import check_dropouts, check_linear, double, in_double, rounded


class ExpertLinear(nn.Linear):
    """The linear layers of E experts; as an ``nn.Linear`` it is their mean.

    Args:
        in_features (int): Number of inputs.
        out_features (int): Number of outputs.
        num_experts (int): Number of experts E.

    Raises:
        ValueError: If the number of experts is not an integer of at least 1.
    """

    def __init__(self, in_features: int, out_features: int, num_experts: int) -> None:
        nn.Module.__init__(self)
        if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
            raise ValueError(f'an FFN has 1 expert or more, but got num_experts={num_experts!r}')
        self.in_features, self.out_features = in_features, out_features
        self.experts = nn.ModuleList(
            nn.Linear(in_features, out_features) for _ in range(num_experts)
        )

    @property
    def weight(self) -> torch.Tensor:
        return torch.stack([expert.weight for expert in self.experts]).mean(0)

    @property
    def bias(self) -> torch.Tensor:
        return torch.stack([expert.bias for expert in self.experts]).mean(0)

    def each(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens (N, C), the first N / E by the first expert, and so on."""
        parts = x.tensor_split(len(self.experts))
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts)])

    @torch.no_grad()
    def share(self, rate: float) -> None:
        """Move every expert towards the mean of the others."""
        n = len(self.experts)
        for name in ('weight', 'bias') if n > 1 else ():
            tensors = [getattr(expert, name) for expert in self.experts]
            total = torch.stack(tensors).sum(0)
            for tensor in tensors:
                tensor.lerp_((total - tensor) / (n - 1), rate)

    def check_mergeable(self) -> None:
        """Check that the experts are the layers that they were built as.

        Raises:
            ValueError: If not.
        """
        for expert in self.experts:
            check_linear(expert, 'an expert')


class ExpertsFFN(TrainingForm):
    """An FFN of E experts, which merges into one ordinary FFN.

    Args:
        embed_dims (int): Number of channels C.
        feedforward_channels (int): Hidden width H of each expert.
        num_experts (int): Number of experts E. Defaults to 4.
        act_cfg (dict | nn.Module): An elementwise activation. Defaults to ``dict(type='GELU')``.
        drop_rate (float): Dropout rate of hidden channels and output. Defaults to 0.
        drop_path (float): Stochastic depth rate. Defaults to 0.
        layer_scale_init_value (float): Initial value of the layer scale; 0 for none. Defaults to 0.

    Raises:
        ValueError: If the number of experts is below 1, or the activation is unknown.
    """

    label = 'FFN of experts'

    def __init__(
        self,
        embed_dims: int,
        feedforward_channels: int,
        num_experts: int = 4,
        act_cfg: dict | nn.Module = dict(type='GELU'),
        drop_rate: float = 0.0,
        drop_path: float = 0.0,
        layer_scale_init_value: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_dims, self.feedforward_channels = embed_dims, feedforward_channels
        self.fc1 = ExpertLinear(embed_dims, feedforward_channels, num_experts)
        self.act = build_activation(act_cfg)
        self.fc2 = ExpertLinear(feedforward_channels, embed_dims, num_experts)
        self.layer_scale = (
            nn.Parameter(torch.full((embed_dims,), float(layer_scale_init_value)))
            if layer_scale_init_value
            else None
        )
        self.drop = nn.Dropout(drop_rate)
        self.dropout_layer = DropPath(drop_path)

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """The shortcut plus the FFN: of one expert a token in training, else of their mean.

        Args:
            x (torch.Tensor): Normalized tokens of shape (B, L, C).
            identity (torch.Tensor, optional): The shortcut. Defaults to None, x.

        Returns:
            torch.Tensor: Of the shape of x.
        """
        if self.fc1.training:
            tokens, back = _shuffled(x.reshape(-1, self.embed_dims))
            z = self.fc2.each(self.drop(self.act(self.fc1.each(tokens))))[back].view(x.shape)
        else:
            z = self.fc2(self.act(self.fc1(x)))
        z = self.drop(z)
        if self.layer_scale is not None:
            z = z * self.layer_scale
        return (x if identity is None else identity) + self.dropout_layer(z)

    def merge(self) -> OrdinaryFFN:
        """The ordinary FFN with the mean weights, computed in float64.

        Raises:
            ValueError: As :meth:`TrainingForm.merge`.
        """
        self.fc1.check_mergeable()
        self.fc2.check_mergeable()
        check_dropouts(self)
        with torch.device('meta'):
            merged = OrdinaryFFN(
                self.embed_dims, self.feedforward_channels, copy.deepcopy(self.act)
            )
        merged.label = self.label
        exact, like = in_double(self), self.fc1.experts[0].weight
        weight, bias = exact.fc2.weight, exact.fc2.bias
        if self.layer_scale is not None:
            scale = double(self.layer_scale)
            weight, bias = scale[:, None] * weight, scale * bias
        (into, _), out = merged.layers
        into.weight, into.bias = rounded(exact.fc1.weight, like), rounded(exact.fc1.bias, like)
        out.weight, out.bias = rounded(weight, like), rounded(bias, like)
        return merged


class ExpertsIdleFFN(ChannelIdleFFN):
    """A channel-idle FFN whose linear layers have E experts, behind common norms.

    Args:
        embed_dims (int): Number of channels C.
        feedforward_channels (int): Hidden width H of each expert.
        num_experts (int): Number of experts E. Defaults to 4.
        *args, **kwargs: Other arguments of :class:`ChannelIdleFFN`.

    Raises:
        ValueError: If the number of experts is below 1, and as there.
    """

    def __init__(
        self, embed_dims: int, feedforward_channels: int, num_experts: int = 4, *args, **kwargs
    ) -> None:
        super().__init__(embed_dims, feedforward_channels, *args, **kwargs)
        self.add_experts(num_experts)

    def add_experts(self, num_experts: int) -> None:
        """Give both linear layers experts: what a channel-idle FFN lacks of this one."""
        dims, hidden = self.embed_dims, self.feedforward_channels
        like, training = self.fc1.weight, self.training
        self.fc1 = ExpertLinear(dims, hidden, num_experts).to(like).train(training)
        self.fc2 = ExpertLinear(hidden, dims, num_experts).to(like).train(training)

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`ChannelIdleFFN.forward`, by one expert a token in training."""
        # Not this module's own mode: statistics are calibrated for the mean.
        if not self.fc1.training:
            return super().forward(x, identity)
        check_input(self, x, identity)
        with kept_statistics(self.norm1, self.norm2):
            u = self.norm1(x if self.keeps_norm else x.reshape(-1, self.embed_dims))
            u, back = _shuffled(u.reshape(-1, self.embed_dims))
            active, idle = self.fc1.each(u).tensor_split([self.num_active], dim=1)
            a = self.drop(self.norm2(torch.cat([self.act(active), idle], dim=1)))
            z = self.drop(self.fc2.each(a))[back].view(x.shape)
        if self.layer_scale is not None:
            z = z * self.layer_scale
        return x + self.dropout_layer(z)

    def fold(self) -> FoldedFFN:
        """As :meth:`ChannelIdleFFN.fold`, of the mean weights."""
        self.fc1.check_mergeable()
        self.fc2.check_mergeable()
        return super(ExpertsIdleFFN, in_double(self)).fold()

    def merge(self):
        """As :meth:`ChannelIdleFFN.merge`, of the mean weights."""
        return super().merge()


def _shuffled(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in random order, and the indices that put them back."""
    order = torch.randperm(len(tokens), device=tokens.device)
    return tokens[order], order.argsort()


def average_experts(model: nn.Module, rate: float) -> nn.Module:
    """Move every expert of a model that is not frozen towards the mean of the others, in place.

    Args:
        model (nn.Module): A model with experts.
        rate (float): How far, beta in [0, 1].

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If the rate is not a number in [0, 1], or the model has no experts.
    """
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise ValueError(f'the rate must be a number from 0 to 1, but got {rate!r}')
    found = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    if not found:
        raise ValueError(f'{type(model).__name__} has no experts to average')
    for module in found:
        if any(p.requires_grad for p in module.parameters()):
            module.share(rate)
    return model
