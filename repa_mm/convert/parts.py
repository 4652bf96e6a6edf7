"""The parts of a block that are made narrower: its FFN, and the heads of its attention."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.convert.budget import FRACTIONS, Axis
from repa_mm.convert.heads import HeadMoments, HeadWeights, Tokens, sample_images, sample_windows
from repa_mm.convert.lockstep import Pausing
from repa_mm.convert.regression import (
    FittedFFN,
    ffn_moments,
    fit_ffn,
    refine,
    widths_of,
    with_foreign_tokens,
)
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.models.sites import AttentionSite, FFNSite
from repa_mm.models.structures import idle_ffn
from repa_mm.reparam import ChannelIdleFFN

_NUM_PARTS = 4  # parts of the images for cross-validation


class FittedPart(NamedTuple):
    """A narrower part.

    Attributes:
        function (Callable): Computes what the part computes, from the same arguments.
        weights (tuple): Arguments of the site's ``set_weights``.
        unexplained (float): Share of the targets' variance that the part does not explain.
        ridge (float): Strength of the ridge.
        warnings (list[str]): Warnings about the fit.
    """

    function: Callable
    weights: tuple
    unexplained: float
    ridge: float
    warnings: list[str]


class PretrainedFFN(Pausing):
    """A pretrained FFN that replaces the norm and FFN of a block.

    Args:
        site (FFNSite): The site.

    Attributes:
        ffn (ChannelIdleFFN): Norm, FFN and shortcut. A channel-idle FFN with idle ratio 0 computes
            the same as an ordinary FFN, and sites can fill it from any block.
        conv (nn.Conv2d | None): The depthwise convolution before the activation.

    Raises:
        ValueError: If the FFN is of another kind, or its activation mixes channels, or treats them
            differently.
    """

    contains_norm = True

    def __init__(self, site: FFNSite) -> None:
        super().__init__(site.block_name)
        parts = site.modules()
        self.ffn: ChannelIdleFFN = idle_ffn(site, 0.0, dict(type='keep'), parts=parts)
        self.conv = copy.deepcopy(parts.conv)
        # Then the input is where the shortcut starts, in the block if not in the FFN.
        self.is_residual = self.ffn.shortcut or bool(site.family.norm)
        self.sizes = (self.ffn.feedforward_channels,)
        hidden = torch.linspace(-3, 3, 32).to(self.ffn.fc1.weight).reshape(4, 8)
        act = self.ffn.act
        try:
            same = torch.allclose(act(hidden)[:, ::3], act(hidden[:, ::3]), atol=1e-3)
        except RuntimeError:
            same = False
        if not same:
            raise ValueError(
                f'its activation, a {type(act).__name__}, mixes channels, or treats them '
                'differently'
            )

    def original(self, x: torch.Tensor, *hw_shape, identity=None) -> torch.Tensor:
        """Compute the pretrained norm, FFN and shortcut for tokens (..., C)."""
        hidden = self.ffn.fc1(self.ffn.norm1(x))
        if self.conv is not None:
            maps = hidden.transpose(1, 2).unflatten(2, hw_shape[0])
            hidden = self.conv(maps).flatten(2).transpose(1, 2)
        z = self.ffn.fc2(self.ffn.act(hidden))
        return self.whole(x, z if self.ffn.layer_scale is None else z * self.ffn.layer_scale)

    def inputs(self, x: torch.Tensor, *hw_shape) -> torch.Tensor:
        """Return normalized tokens (..., C), or their patches if there is a convolution."""
        u = self.ffn.norm1(x)
        if self.conv is None:
            return u
        u = torch.cat([u, u.new_ones(*u.shape[:2], 1)], 2).transpose(1, 2)
        window = self.conv.kernel_size, self.conv.dilation, self.conv.padding, self.conv.stride
        return nn.functional.unfold(u.unflatten(2, hw_shape[0]), *window).transpose(1, 2)

    def whole(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the output for tokens x, given the FFN's output z without shortcut."""
        return x + z if self.ffn.shortcut else z

    def target(self, x: torch.Tensor, teacher: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return what the FFN should add to tokens x, in float32 at least.

        Args:
            x (torch.Tensor): Tokens of the student.
            teacher (torch.Tensor): Tokens of the teacher.
            y (torch.Tensor): :meth:`original` of the teacher's tokens.
        """
        z = y
        if self.is_residual:
            z = y.double() - x.double() + (0 if self.ffn.shortcut else teacher.double())
        return z.to(torch.promote_types(y.dtype, torch.float32))

    def macs(self, x: torch.Tensor) -> float:
        """Return the multiply-adds of one hidden channel for tokens x."""
        taps = 0 if self.conv is None else self.conv.weight[0].numel()
        return float(x.shape[:-1].numel() * (2 * x.shape[-1] + taps))

    def sample(
        self, tokens: list, max_tokens: int, seed: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Draw random tokens from all batches.

        Args:
            tokens (list): The arguments of the site in the student and in the teacher, for each
                batch, from :func:`~repa_mm.convert.lockstep.in_lockstep`.
            max_tokens (int): Number of tokens to draw from a batch, at most.
            seed (int): Seed of the random numbers. Defaults to 0.

        Returns:
            list: For each part of the batches the :meth:`inputs` (N, C) of tokens, and the targets
            (N, C) of the FFN without shortcut.

        Raises:
            ValueError: If tokens are not finite.
        """
        generator = torch.Generator().manual_seed(seed)
        drawn = []
        per_token = isinstance(self.ffn.norm1, (nn.LayerNorm, nn.Identity)) and self.conv is None
        for (x, *hw_shape), (teacher, *_) in tokens:
            _check_finite(self.name, x, teacher)
            number = x.shape[:-1].numel()
            chosen = torch.randperm(number, generator=generator)[:max_tokens].to(x.device)
            if per_token:  # then only the chosen ones are computed
                x, teacher = (v.flatten(0, -2)[chosen] for v in (x, teacher))
                chosen = slice(None)
            values = self.inputs(x, *hw_shape), x, teacher, self.original(teacher, *hw_shape)
            u, x, teacher, y = (v.flatten(0, -2)[chosen] for v in values)
            _check_finite(self.name, u, y)
            drawn.append((u, self.target(x, teacher, y)))
        number = min(_NUM_PARTS, len(drawn))
        ends = [i * len(drawn) // number for i in range(number + 1)]
        return [
            tuple(torch.cat(columns) for columns in zip(*drawn[start:end]))
            for start, end in zip(ends, ends[1:])
        ]

    def fit(self, parts: Sequence, sizes: tuple[int, ...]) -> FittedPart:
        """Fit a narrower FFN to samples, see :mod:`repa_mm.convert.regression`."""
        ffn, (width,) = FittedFFN.from_form(self.ffn, self.conv), sizes
        more = [with_foreign_tokens(ffn, *part) for part in parts]
        fit = fit_ffn(ffn, ffn_moments(ffn, more), width)
        fit = refine(fit, *(torch.cat(columns) for columns in zip(*more)))
        u, t = (torch.cat(columns) for columns in zip(*parts))
        fit, warnings = fit.measured(u, t), token_warnings(parts, width)
        weights = tuple(fit.weights.values())
        return FittedPart(self._with(fit), weights, fit.unexplained, fit.ridge, warnings)

    def axes(self, parts: Sequence) -> list[Axis]:
        """Return the hidden channels as an axis of a budget, from samples."""
        number = self.sizes[0]
        widths = sorted({max(1, round(fraction * number)) for fraction in FRACTIONS}, reverse=True)
        ffn = FittedFFN.from_form(self.ffn, self.conv)
        more = [with_foreign_tokens(ffn, *part) for part in parts]
        found = widths_of(ffn, ffn_moments(ffn, more), widths)
        fits = dict(zip(widths, found))
        widths = widths[::-1]
        return [
            Axis(widths, [fits[w][1] for w in widths], lambda width: self._with(fits[width][0]))
        ]

    def _with(self, fit: FittedFFN) -> Callable:
        return lambda x, *args, identity=None: self.whole(x, fit(self.inputs(x, *args)))


def token_warnings(parts: Sequence, number: int) -> list[str]:
    """Return warnings about a fit of a number of channels to samples."""
    u, warnings = torch.cat([u for u, _ in parts]), []
    if len(u) <= number:
        warnings.append(f'{len(u)} tokens for {number} channels: give more images')
    if not u.var(0).any():
        warnings.append('all tokens are the same: give other images')
    return warnings


class PretrainedAttention(Pausing):
    """The pretrained attention of a block, in whose place it is.

    It has the attention under the name that the block has for it, so that a copy of it can stand
    for the block where narrower heads are made.

    Args:
        site (AttentionSite): The site. Window attention must be a ``FastShiftWindowMSA``.

    Raises:
        ValueError: If the attention is of another kind.
    """

    def __init__(self, site: AttentionSite) -> None:
        super().__init__(site.name)
        self.heads, self.path, self.family, self.caller = (
            site.heads(), site.path, site.family, site.caller
        )  # fmt: skip
        setattr(self, site.caller, getattr(site.block, site.caller))
        self.sizes = self.heads.dims

    @property
    def attention(self) -> nn.Module:
        """The pretrained attention."""
        return getattr(self, self.caller)

    def original(self, *args, **kwargs) -> torch.Tensor:
        return self.attention(*args, **kwargs)

    def macs(self, x: torch.Tensor) -> float:
        """Return the multiply-adds of one dimension of all heads for tokens x."""
        seen = x.shape[1]
        if isinstance(self.attention, FastShiftWindowMSA):
            seen = self.attention.window_size**2
        return float(x.shape[:-1].numel() * self.heads.num_heads * (2 * x.shape[-1] + seen))

    def sample(self, tokens: list, max_tokens: int, seed: int = 0) -> list[Tokens]:
        """Draw random windows or queries from all batches, as :meth:`PretrainedFFN.sample`."""
        generator = torch.Generator().manual_seed(seed)
        is_windows = isinstance(self.attention, FastShiftWindowMSA)
        draw = sample_windows if is_windows else sample_images
        for (x, *_), (teacher, *_) in tokens:
            _check_finite(self.name, x, teacher)
        return [draw(self.attention, max_tokens, generator, *inputs) for inputs, _ in tokens]

    def fit(self, drawn: Sequence[Tokens], sizes: tuple[int, ...]) -> FittedPart:
        """Fit narrower heads to samples, see :mod:`repa_mm.convert.heads`."""
        moments = self._moments(drawn)
        weights, unexplained = moments.fit(*sizes)
        return FittedPart(self._with(weights), weights, unexplained, 0.0, moments.warnings)

    def axes(self, drawn: Sequence[Tokens]) -> list[Axis]:
        """Return the dimensions of q·k and of values as axes of a budget, from samples."""
        moments, (qk_dims, v_dims) = self._moments(drawn), self.sizes

        def axis(energy: torch.Tensor, weights: Callable) -> Axis:
            sizes = [*range(4, len(energy), 4), len(energy)]
            # Not negative, by rounding, at the last one.
            left = (1 - energy.cumsum(0)).clamp(min=0)
            errors = [float(left[size - 1]) for size in sizes]
            return Axis(sizes, errors, lambda size: self._with(weights(size)[0]))

        return [
            axis(moments.qk, lambda size: moments.fit(size, v_dims)),
            axis(moments.v, lambda size: moments.fit(qk_dims, size)),
        ]

    def _moments(self, drawn: Sequence[Tokens]) -> HeadMoments:
        heads = self.heads
        weights = HeadWeights.from_layers(heads.qkv, heads.proj)
        return HeadMoments(weights, heads.num_heads, heads.factor, drawn, heads.scale)

    def _with(self, weights: HeadWeights) -> Callable:
        """Return what a copy of the attention with other weights computes."""
        site = AttentionSite(self.name, copy.deepcopy(self), self.path, self.family)
        site.set_weights(*weights)
        return getattr(site.block, self.caller).__call__


def _check_finite(name: str, *values: torch.Tensor) -> None:
    if not all(x.isfinite().all() for x in values):
        raise ValueError(
            f'the activations of {name!r} are not finite: check the weights and the images'
        )
