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

from repa_mm.reparam import (
    DeployForm,
    DropPath,
    FFNParts,
    TrainingForm,
    build_activation,
    check_dropouts,
    copy_matrix_,
    double,
    rounded,
    weight_and_bias,
)


class _Order:
    """The random order of an FFN's tokens: its first linear layer shuffles, its last one undoes."""

    indices: torch.Tensor


class ExpertLinear(nn.Linear):
    """The linear layers of E experts; in eval mode it is their mean.

    In training mode, the first N / E of tokens (N, in) go to the first expert, and so on.

    Args:
        in_features (int): Number of inputs.
        out_features (int): Number of outputs.
        num_experts (int): Number of experts E.
        shuffles (_Order, optional): Shuffle the tokens before, and note the order here.
        restores (_Order, optional): Bring the tokens back from this order afterwards.

    Raises:
        ValueError: If the number of experts is not an integer of at least 1.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int,
        shuffles: _Order | None = None,
        restores: _Order | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if num_experts < 1:
            raise ValueError(f'an FFN has 1 expert or more, but got num_experts={num_experts!r}')
        self.in_features, self.out_features = in_features, out_features
        self.shuffles, self.restores = shuffles, restores
        self.experts = nn.ModuleList(
            nn.Linear(in_features, out_features) for _ in range(num_experts)
        )

    @property
    def weight(self) -> torch.Tensor:
        return torch.stack([expert.weight for expert in self.experts]).mean(0)

    @property
    def bias(self) -> torch.Tensor:
        return torch.stack([expert.bias for expert in self.experts]).mean(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs (N, out) for tokens (N, in)."""
        if not self.training:
            return nn.functional.linear(x, self.weight, self.bias)
        if self.shuffles:
            self.shuffles.indices = torch.randperm(len(x), device=x.device)
            x = x[self.shuffles.indices]
        parts = x.tensor_split(len(self.experts))
        x = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        return x[self.restores.indices.argsort()] if self.restores else x

    def fill(self, *layers: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Give every expert the weight and bias of a layer: of its own, or of the same one."""
        for e, expert in enumerate(self.experts):
            copy_matrix_(expert, *layers[e % len(layers)])

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean weight and bias in float64.

        Raises:
            ValueError: If an expert is not the layer that it was built as.
        """
        weights, biases = zip(*(weight_and_bias(expert, 'an expert') for expert in self.experts))
        return torch.stack(weights).mean(0), torch.stack(biases).mean(0)

    @torch.no_grad()
    def share(self, rate: float) -> None:
        """Move every expert towards the mean of the others."""
        n = len(self.experts)
        for name in ('weight', 'bias') if n > 1 else ():
            tensors = [getattr(expert, name) for expert in self.experts]
            total = torch.stack(tensors).sum(0)
            for tensor in tensors:
                tensor.lerp_((total - tensor) / (n - 1), rate)


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

    contains_norm = False
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
        self.act, order = build_activation(act_cfg), _Order()
        sizes = embed_dims, feedforward_channels
        self.fc1 = ExpertLinear(*sizes, num_experts, shuffles=order)
        self.fc2 = ExpertLinear(*reversed(sizes), num_experts, restores=order)
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
        h = self.fc1(x.reshape(-1, self.embed_dims))
        z = self.fc2(self.drop(self.act(h))).view(x.shape)
        z = self.drop(z)
        if self.layer_scale is not None:
            z = z * self.layer_scale
        return (x if identity is None else identity) + self.dropout_layer(z)

    def fill(self, *ffns: FFNParts) -> None:
        """Give every expert the weights of an ordinary FFN: of its own, or all of the same one.

        A layer scale that this FFN does not have, or one of each expert, goes into the weights.
        """
        self.fc1.fill(*(weight_and_bias(part.fc1) for part in ffns))
        if self.layer_scale is not None:
            scale = ffns[0].scale if len(ffns) == 1 else None
            self.layer_scale.copy_(torch.ones_like(self.layer_scale) if scale is None else scale)
        outs = []
        for part in ffns:
            weight, bias = weight_and_bias(part.fc2)
            if part.scale is not None and (self.layer_scale is None or len(ffns) > 1):
                weight, bias = double(part.scale)[:, None] * weight, double(part.scale) * bias
            outs.append((weight, bias))
        self.fc2.fill(*outs)

    def merge(self) -> 'MergedExperts':
        """Compute the ordinary FFN with the mean weights, in float64.

        Raises:
            ValueError: As :meth:`TrainingForm.merge`.
        """
        check_dropouts(self)
        with torch.device('meta'):
            merged = MergedExperts(
                self.embed_dims, self.feedforward_channels, copy.deepcopy(self.act)
            )
        like = self.fc1.experts[0].weight
        w_in, b_in = self.fc1.weight_and_bias()
        weight, bias = self.fc2.weight_and_bias()
        if self.layer_scale is not None:
            scale = double(self.layer_scale)
            weight, bias = scale[:, None] * weight, scale * bias
        (into, _), out = merged.layers
        into.weight, into.bias = rounded(w_in, like), rounded(b_in, like)
        out.weight, out.bias = rounded(weight, like), rounded(bias, like)
        return merged


class MergedExperts(DeployForm):
    """An FFN with the names of mmcv's: the mean of the experts.

    Args:
        embed_dims (int): Number of channels C.
        feedforward_channels (int): Hidden width H.
        act (nn.Module): The activation.
    """

    label = 'FFN of experts'

    def __init__(self, embed_dims: int, feedforward_channels: int, act: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(embed_dims, feedforward_channels), act),
            nn.Linear(feedforward_channels, embed_dims),
        )

    def inference(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`ExpertsFFN.forward`."""
        return (x if identity is None else identity) + self.layers(x)


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
    if not 0 <= rate <= 1:
        raise ValueError(f'the rate must be a number from 0 to 1, but got {rate!r}')
    found = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    if not found:
        raise ValueError(f'{type(model).__name__} has no experts to average')
    for module in found:
        if any(p.requires_grad for p in module.parameters()):
            module.share(rate)
    return model
