"""The feature maps of an UperNet's head, of which its last convolution takes fewer channels.

That convolution has most of a head's multiplications. It takes the maps of all levels, resized to
the largest. The channels to keep are chosen by the regression of what each tap computes on the
channels of all levels at the same place, see :mod:`repa_mm.convert.regression`: its matrices are
small, since all taps take the same channels. A second regression, of the convolution's outputs on
whole neighbourhoods of the channels that are kept, gives the weights. The convolutions of each
level compute these channels alone.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from repa_mm.convert.budget import FRACTIONS, Axis
from repa_mm.convert.lockstep import Pausing
from repa_mm.convert.parts import FittedPart, check_finite, in_parts
from repa_mm.convert.regression import (
    ALL,
    RIDGES,
    Moments,
    Problem,
    at_least_float32,
    cross_validated,
    eliminate,
)
from repa_mm.models.sites import MapsSite
from repa_mm.reparam import double


class Places(NamedTuple):
    """Places of a batch, at the size of the largest map.

    Attributes:
        channels (torch.Tensor): The n channels of the student and those of the teacher, (N, 2 n).
        patches (torch.Tensor): Neighbourhoods of the student's channels, (N, n, k^2).
        targets (torch.Tensor): What the convolution computes in the teacher, (N, C').
    """

    channels: torch.Tensor
    patches: torch.Tensor
    targets: torch.Tensor


def patches_of(x: torch.Tensor, chosen: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
    """Return the neighbourhoods (N, n, k^2) of places of maps, as a convolution sees them.

    Args:
        x (torch.Tensor): Maps (B, n, H, W).
        chosen (torch.Tensor): Indices (N, ) of the places among B H W.
        kernel (Sequence[int]): Height and width of the convolution's kernel, odd.
    """
    height, width = x.shape[2:]
    image, place = chosen // (height * width), chosen % (height * width)
    rows, columns = place // width, place % width
    x = F.pad(x, [k // 2 for k in reversed(kernel) for _ in range(2)])
    taps = [x[image, :, rows + i, columns + j] for i in range(kernel[0]) for j in range(kernel[1])]
    return torch.stack(taps, 2)


def moments_of_parts(drawn: Sequence[Places], rows: Callable) -> list[Moments]:
    """Return the moments of the ``rows`` of places, in parts for cross-validation."""
    result: list[Moments] = []
    for part in in_parts(drawn):
        values = [double(rows(one)) for one in part]
        result.append(Moments(result[0].shift if result else torch.cat(values).mean(0)))
        for value in values:
            result[-1].add(value)
    return result


class PretrainedMaps(Pausing):
    """The last convolution of an UperNet's head, in whose place it is.

    Args:
        site (MapsSite): The site. The head must be a ``FastUPerHead``.

    Attributes:
        sizes (tuple[int]): The number of channels of each level, except for the smallest map, which
            costs little.

    Raises:
        ValueError: If the head is of another kind.
    """

    is_residual = False

    def __init__(self, site: MapsSite) -> None:
        super().__init__(site.name)
        self.site, self.module = site, site.checked()
        self.sizes = site.channels
        self.scale = site.scale

    def put(self, site: MapsSite) -> None:
        """Take the place of the convolution of a site."""
        setattr(site.block, site.path, self)

    def forward(self, maps: Sequence[torch.Tensor], align_corners: bool) -> torch.Tensor:
        return super().forward(*maps, align_corners=align_corners)

    def original(self, *maps: torch.Tensor, align_corners: bool) -> torch.Tensor:
        return self.module(maps, align_corners)

    def macs(self, *maps: torch.Tensor) -> tuple[float, ...]:
        """Return the multiply-adds of one channel of each level, in both convolutions."""
        before, conv = self.site.block.fpn_convs, self.module.conv
        return tuple(
            float(x[:, 0].numel() * (one.conv.weight[0].numel() + conv.weight[:, 0].numel()))
            for x, one in zip(maps, before)
        )

    def sample(self, tokens: list, max_tokens: int, seed: int = 0) -> list[Places]:
        """Draw random places of the largest map, as :meth:`PretrainedFFN.sample`."""
        generator, drawn = torch.Generator().manual_seed(seed), []
        kernel, flat = self._scaled_kernel(), lambda x: x.movedim(1, -1).flatten(0, 2)
        for both in tokens:
            check_finite(self.name, *both[0], *both[1])
            student, teacher = (self._resized(maps) for maps in both)
            number = student[:, 0].numel()
            chosen = torch.randperm(number, generator=generator)[:max_tokens].to(student.device)
            channels = torch.cat([flat(x)[chosen] for x in (student, teacher)], 1)
            patches = patches_of(student, chosen, kernel.shape[2:])
            out = F.conv2d(teacher, kernel.to(teacher), padding=self.module.conv.padding)
            # Few rows instead of the maps, which would take gigabytes.
            drawn.append(Places(channels, patches, flat(out)[chosen]))
        return drawn

    def _resized(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all maps in the size of the first one, concatenated, (B, n, H, W)."""
        how = dict(mode='bilinear', align_corners=self.site.block.align_corners)
        maps = [at_least_float32(x) for x in maps]
        size = maps[0].shape[2:]
        return torch.cat([maps[0], *(F.interpolate(x, size, **how) for x in maps[1:])], 1)

    def fit(self, drawn: Sequence[Places], sizes: tuple[int, ...]) -> FittedPart:
        """Choose channels of each level, and fit the convolution of those.

        The weights are drawn to those of the regression by which the channels were chosen.
        """
        out, basis, parts = self._outputs(drawn)
        problem = Problem(out, Moments.pooled(parts))
        kept = torch.arange(out.shape[1], device=out.device)
        for level, size in enumerate(sizes):
            (kept,) = self._eliminate(problem, kept, level, [size])
        weight, _ = self._taps(problem, kept, basis)
        shape = weight.shape
        parts = moments_of_parts(
            drawn, lambda one: torch.cat([one.patches[:, kept].flatten(1), one.targets], dim=1)
        )
        ridge = cross_validated(weight.flatten(1), parts, ALL)
        problem = Problem(weight.flatten(1), Moments.pooled(parts))
        weights = problem.solve(ALL, ridge)
        bias, unexplained = problem.bias(ALL, weights), problem.unexplained(ALL, weights)
        return self._fitted(kept, weights.view(shape), bias, unexplained)

    def axes(self, drawn: Sequence[Places]) -> list[tuple[Axis, Callable]]:
        """Return the channels of each level as an axis, as :meth:`PretrainedFFN.axes`."""
        out, basis, parts = self._outputs(drawn)
        problem, found = Problem(out, Moments.pooled(parts)), []
        every = torch.arange(out.shape[1], device=out.device)
        for level, number in enumerate(self.sizes):
            sizes = sorted({max(1, round(fraction * number)) for fraction in FRACTIONS})
            kept = self._eliminate(problem, every, level, sizes[::-1], step=0.06)[::-1]
            errors = [float(problem.residual(k, problem.solve(k, RIDGES[0]))) for k in kept]
            axis = Axis(sizes, [max(0.0, error) for error in errors])
            probed = kept[axis.probe()]
            fit = self._fitted(probed, *self._taps(problem, probed, basis), 0.0)
            found.append((axis, fit.function))
        return found

    def _scaled_kernel(self) -> torch.Tensor:
        """Return the weights (C', n, k, k), with the BatchNorm's scale multiplied in."""
        return double(self.module.conv.weight) * self.scale[:, None, None, None]

    def _outputs(self, drawn: Sequence[Places]) -> tuple[torch.Tensor, torch.Tensor, list[Moments]]:
        """Return what the taps compute, in an orthonormal basis of all taps' outputs.

        The basis makes C' k^2 outputs no more than n, with the same errors.

        Returns:
            tuple: Weights (r, n) of the n channels, the basis (C' k^2, r), and the moments of the
            student's channels and of the teacher's outputs in it.
        """
        basis, out = torch.linalg.qr(self._scaled_kernel().permute(0, 2, 3, 1).flatten(0, 2))
        mapping = torch.block_diag(torch.eye(out.shape[1]).to(out), out)
        parts = moments_of_parts(drawn, lambda one: one.channels)
        return out, basis, [part.mapped(mapping) for part in parts]

    def _taps(
        self, problem: Problem, kept: torch.Tensor, basis: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernel (C', K, k, k) and the bias (C', ) for some channels.

        The bias is that inside the map, where all taps see a place.
        """
        k = self.module.conv.weight.shape[2:]
        weights = problem.solve(kept, RIDGES[0])
        bias = (basis @ problem.bias(kept, weights)).unflatten(0, (-1, k.numel())).sum(1)
        return (basis @ weights).unflatten(0, (-1, *k)).permute(0, 3, 1, 2), bias

    def _levels(self) -> torch.Tensor:
        """Return the level of each channel."""
        number = self.module.conv.in_channels
        channels = (*self.sizes, number - sum(self.sizes))
        return torch.repeat_interleave(torch.tensor(channels)).to(self.scale.device)

    def _eliminate(
        self, problem: Problem, kept: torch.Tensor, level: int, sizes: Sequence[int], **options
    ) -> list[torch.Tensor]:
        """Return the channels that are left if a level keeps a number, for each of ``sizes``."""
        own = self._levels()[kept] == level
        order, others = torch.cat([kept[~own], kept[own]]), int((~own).sum())
        gram, weights = problem.ridged(RIDGES[0], order), problem.solve(order, RIDGES[0])
        numbers = [others + size for size in sizes]
        found = eliminate(gram, weights, numbers, protected=others, **options)
        return [order[left].sort().values for left in found]

    def _fitted(
        self, kept: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, unexplained: float
    ) -> FittedPart:
        """Return the narrower part.

        Args:
            kept (torch.Tensor): Indices (K, ) of the channels among those of all levels.
            weight (torch.Tensor): Kernel (C', K, k, k), with the BatchNorm's scale multiplied in.
            bias (torch.Tensor): What is added (C', ), with the scale multiplied in.
            unexplained (float): As in :class:`FittedPart`.
        """
        # Per level, counted from the level's first channel.
        levels = self._levels()
        starts = [int((levels < i).sum()) for i in range(len(self.sizes) + 1)]
        channels = [kept[levels[kept] == i] - start for i, start in enumerate(starts)]
        fitted = copy.deepcopy(self.site.block)  # in which this part stands
        setattr(fitted, self.site.path, copy.deepcopy(self.module))
        site = self.site.at(fitted)
        site.set_weights(channels, weight, bias)

        def function(*maps: torch.Tensor, align_corners: bool) -> torch.Tensor:
            return site.module([x[:, c] for x, c in zip(maps, channels)], align_corners)

        return FittedPart(
            function, lambda site: site.set_weights(channels, weight, bias), unexplained
        )
