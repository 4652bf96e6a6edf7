"""The parts of a block that are made narrower: its FFN, and the heads of its attention."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.apis.images import evenly
from repa_mm.convert.budget import FRACTIONS, Axis
from repa_mm.convert.heads import HeadMoments, HeadWeights, Tokens, sample_images, sample_windows
from repa_mm.convert.lockstep import Pausing
from repa_mm.convert.regression import (
    FittedFFN,
    Pairs,
    at_least_float32,
    ffn_moments,
    fit_ffn,
    joined,
    refine,
    widths_of,
    with_foreign_tokens,
)
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.models.sites import AttentionSite, FFNSite, Site, set_heads_
from repa_mm.models.structures import idle_ffn
from repa_mm.reparam import ChannelIdleFFN, weight_and_bias

_NUM_SPLITS = 4  # of the images, for cross-validation


class FittedPart(NamedTuple):
    """A narrower part, and what :class:`~repa_mm.convert.conversion_report.BlockReport` says of it.

    ``function`` computes what the part computes, from the same arguments. ``put`` puts the part
    into its site in another copy of the model.
    """

    function: Callable
    put: Callable[[Site], object]
    unexplained: float
    constant_heads: int = 0


class PretrainedFFN(Pausing):
    """A pretrained FFN that replaces the norm and FFN of a block.

    Attributes:
        ffn (ChannelIdleFFN): Norm, FFN and shortcut. A channel-idle FFN with idle ratio 0 computes
            the same as an ordinary FFN, and sites can fill it from any block.
        conv (nn.Conv2d | None): The depthwise convolution before the activation.
        compensates (bool): The fit makes up for what the input has lost.
        sizes (tuple[int]): The number of hidden channels.

    Raises:
        ValueError: If the FFN is of another kind.
    """

    contains_norm = True

    def __init__(self, site: FFNSite) -> None:
        super().__init__(site.block_name)
        self.site, modules = site, site.modules()
        self.ffn: ChannelIdleFFN = idle_ffn(site, 0.0, dict(type='keep'), parts=modules)
        self.conv = copy.deepcopy(modules.conv)
        # The input is where the shortcut starts, in the block if not in the FFN.
        self.compensates = self.ffn.shortcut or bool(site.family.norm)
        self.sizes = (self.ffn.feedforward_channels,)

    def put(self, site: FFNSite) -> None:
        """Take the place of the norm and FFN of a site."""
        site.put(self)

    def original(self, x: torch.Tensor, *hw_shape, identity=None) -> torch.Tensor:
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

    def macs(self, x: torch.Tensor, *_) -> tuple[float]:
        """Return the multiply-adds of one hidden channel for tokens x."""
        taps = 0 if self.conv is None else self.conv.weight[0].numel()
        return (float(x.shape[:-1].numel() * (2 * x.shape[-1] + taps)),)

    def sample(self, tokens: list, max_tokens: int, seed: int = 0) -> list[Pairs]:
        """Draw at most ``max_tokens`` random tokens of every batch.

        ``tokens`` are from :func:`~repa_mm.convert.lockstep.in_lockstep`. Returns, for each split
        of the batches, the :meth:`inputs` (N, C) of the drawn tokens, and the targets (N, C) of the
        FFN without shortcut.
        """
        generator = torch.Generator().manual_seed(seed)
        drawn = []
        per_token = isinstance(self.ffn.norm1, (nn.LayerNorm, nn.Identity)) and self.conv is None
        for (x, *hw_shape), (teacher, *_) in tokens:
            number = x.shape[:-1].numel()
            chosen = torch.randperm(number, generator=generator)[:max_tokens].to(x.device)
            if per_token:  # then only the chosen ones are computed
                x, teacher = (v.flatten(0, -2)[chosen] for v in (x, teacher))
                chosen = slice(None)
            values = self.inputs(x, *hw_shape), x, teacher, self.original(teacher, *hw_shape)
            u, x, teacher, y = (v.flatten(0, -2)[chosen] for v in values)
            check_activations(self.name, x, teacher, u, y)
            t = y
            if self.compensates:
                t = y.double() - x.double() + (0 if self.ffn.shortcut else teacher.double())
            drawn.append((u, t.to(at_least_float32(y).dtype)))
        ends = [*evenly(_NUM_SPLITS, range(len(drawn))), len(drawn)]
        return [joined(drawn[start:end]) for start, end in zip(ends, ends[1:])]

    def fit(self, splits: Sequence[Pairs], sizes: tuple[int, ...]) -> FittedPart:
        """Fit a narrower FFN to samples, see :mod:`repa_mm.convert.regression`."""
        ffn, (width,) = FittedFFN.from_form(self.ffn, self.conv), sizes
        more = [with_foreign_tokens(ffn, *split) for split in splits]
        fit = refine(fit_ffn(ffn, ffn_moments(ffn, more), width), *joined(more))
        weights, unexplained = fit.weights.values(), fit.unexplained(*joined(splits))
        return FittedPart(self._with(fit), lambda site: site.set_weights(*weights), unexplained)

    def axes(self, splits: Sequence[Pairs]) -> list[tuple[Axis, Callable]]:
        """Return the axes of a budget, and for each what computes the part at its probe."""
        number = self.sizes[0]
        widths = sorted({max(1, round(fraction * number)) for fraction in FRACTIONS})
        ffn = FittedFFN.from_form(self.ffn, self.conv)
        more = [with_foreign_tokens(ffn, *split) for split in splits]
        fits = widths_of(ffn, ffn_moments(ffn, more), widths[::-1])[::-1]
        axis = Axis(widths, [error for _, error in fits])
        return [(axis, self._with(fits[axis.probe()][0]))]

    def _with(self, fit: FittedFFN) -> Callable:
        return lambda x, *args, identity=None: self.whole(x, fit(self.inputs(x, *args)))


class PretrainedAttention(Pausing):
    """The pretrained attention of a block, in whose place it is.

    Window attention must be a ``FastShiftWindowMSA``.

    Attributes:
        attention (nn.Module): The attention that the block calls.
        sizes (tuple[int, int]): The dimensions of queries and keys, and of values, in a head.

    Raises:
        ValueError: If the attention is of another kind.
    """

    compensates = False

    def __init__(self, site: AttentionSite) -> None:
        super().__init__(site.name)
        self.site, self.attention, self.heads = site, site.attention, site.parts()
        self.sizes = self.heads.dims

    def put(self, site: AttentionSite) -> None:
        """Take the place of the attention of a site."""
        setattr(site.block, site.caller, self)

    def original(self, *args, **kwargs) -> torch.Tensor:
        return self.attention(*args, **kwargs)

    def macs(self, x: torch.Tensor, *hw_shape) -> tuple[float, float]:
        """Return the multiply-adds of one dimension of all heads for tokens x, on each axis."""
        number = seen = x.shape[1]
        if isinstance(self.attention, FastShiftWindowMSA):
            side = self.attention.window_size
            seen = side**2
            number = seen * math.prod(-(-size // side) for size in hw_shape[0])  # with padding
        return 2 * (float(len(x) * number * self.heads.num_heads * (2 * x.shape[-1] + seen)),)

    def sample(self, tokens: list, max_tokens: int, seed: int = 0) -> list[Tokens]:
        """Draw random windows or queries from all batches, as :meth:`PretrainedFFN.sample`."""
        generator = torch.Generator().manual_seed(seed)
        for (x, *_), (teacher, *_) in tokens:
            check_activations(self.name, x, teacher)
        is_windows = isinstance(self.attention, FastShiftWindowMSA)
        draw = sample_windows if is_windows else sample_images
        return [draw(self.attention, max_tokens, generator, *inputs) for inputs, _ in tokens]

    def fit(self, drawn: Sequence[Tokens], sizes: tuple[int, ...]) -> FittedPart:
        """Fit narrower heads to samples, see :mod:`repa_mm.convert.heads`."""
        moments = self._moments(drawn)
        weights, unexplained = moments.fit(*sizes)
        function, constant = self._with(weights), moments.constant
        return FittedPart(function, lambda site: site.set_weights(*weights), unexplained, constant)

    def axes(self, drawn: Sequence[Tokens]) -> list[tuple[Axis, Callable]]:
        """Return the dimensions of q·k and of values as axes, as :meth:`PretrainedFFN.axes`."""
        moments, found = self._moments(drawn), []
        for i, energy in enumerate((moments.qk, moments.v)):
            sizes = [*range(4, len(energy), 4), len(energy)]
            left = (1 - energy.cumsum(0)).clamp(min=0)  # rounding may go below
            axis = Axis(sizes, [float(left[size - 1]) for size in sizes], multiple=4)
            probe = [*self.sizes]
            probe[i] = sizes[axis.probe()]
            found.append((axis, self._with(moments.fit(*probe)[0])))
        return found

    def _moments(self, drawn: Sequence[Tokens]) -> HeadMoments:
        heads = self.heads
        weights = HeadWeights(*weight_and_bias(heads.qkv), *weight_and_bias(heads.proj))
        return HeadMoments(weights, heads.num_heads, heads.factor, drawn, heads.scale)

    def _with(self, weights: HeadWeights) -> Callable:
        """Return a copy of the attention with other weights."""
        return set_heads_(copy.deepcopy(self.attention), *weights)


def check_activations(name: str, *values: torch.Tensor) -> None:
    """Raise a ``ValueError`` if the activations of a part are not finite."""
    if not all(x.isfinite().all() for x in values):
        raise ValueError(
            f'the activations of {name!r} are not finite: check the weights and the images'
        )
