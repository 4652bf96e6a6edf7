"""Narrowing the FFNs of a pretrained model."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn

from repa_mm.convert.lockstep import PretrainedFFN, in_lockstep, watched
from repa_mm.convert.regression import NarrowFFN, ffn_moments, fit_ffn, refine, with_foreign_tokens
from repa_mm.features import differences, has_channels_first, percent, run_batches
from repa_mm.models.sites import FFNSite, ffn_sites
from repa_mm.models.structures import idle_ffn, share
from repa_mm.reparam import Form, unwrap

# Tokens that an FFN is fitted to, drawn at random from all images.
MAX_TOKENS = 32768
_NUM_PARTS = 4  # parts of the images for cross-validation


@dataclass
class BlockReport:
    """The fit of one block's FFN.

    Attributes:
        name (str): Name of the block.
        hidden (int): Number of hidden channels before the conversion.
        width (int): Number of hidden channels after the conversion.
        unexplained (float): Share of the targets' variance that the narrower FFN does not explain.
        ridge (float): Strength of the ridge.
        gmacs (float): 1e9 multiply-adds of the FFN for one image before the conversion.
        narrow_gmacs (float): 1e9 multiply-adds of the FFN for one image after the conversion.
        num_tokens (int): Number of tokens that the FFN was fitted to.
        warnings (list[str]): Warnings about this fit.
    """

    name: str
    hidden: int
    width: int
    unexplained: float = 0.0
    ridge: float = 0.0
    gmacs: float = 0.0
    narrow_gmacs: float = 0.0
    num_tokens: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass
class ConversionReport:
    """The report of :func:`convert_pretrained`, which prints as a table.

    Attributes:
        blocks (list[BlockReport]): The converted blocks, in the order of the forward pass.
        skipped (dict[str, str]): Names of the blocks that stay as they are, with the reasons.
        differences (list[float]): For each tensor that ``forward`` returns, its mean square change
            on the held-out batches, relative to its variance.
    """

    blocks: list[BlockReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    differences: list[float] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """Warnings about all blocks, each with the name of its block."""
        return [f'{block.name}: {text}' for block in self.blocks for text in block.warnings]

    def __str__(self) -> str:
        rows = [('block', 'channels', 'of', 'unexplained', 'ridge', 'GMACs', 'before')]
        for b in self.blocks:
            fit = f'{b.width}', f'{b.hidden}', f'{b.unexplained:.4f}', f'{b.ridge:g}'
            rows.append((b.name, *fit, f'{b.narrow_gmacs:.3f}', f'{b.gmacs:.3f}'))
        total = (sum(b.narrow_gmacs for b in self.blocks), sum(b.gmacs for b in self.blocks))
        rows.append(('all FFNs', *[''] * 4, *(f'{value:.3f}' for value in total)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ['  '.join(cell.ljust(w) for cell, w in zip(row, widths)) for row in rows]
        if self.differences:
            shares = percent(self.differences)
            lines.append(f'on held-out images the outputs differ by {shares} of their variance')
        lines += [f'not converted: {name}: {why}' for name, why in self.skipped.items()]
        lines += [f'warning: {text}' for text in self.warnings]
        return '\n'.join(line.rstrip() for line in lines)


@torch.inference_mode(False)
@torch.no_grad()
def convert_pretrained(
    model: nn.Module,
    batches: Iterable,
    *,
    keep: float | Sequence[float | None] = 0.375,
    where: str | None = None,
    forward: Callable | None = None,
    held_out: Iterable = (),
    skip_unsupported: bool = False,
    progress: Callable[[BlockReport], None] | None = None,
) -> tuple[nn.Module, ConversionReport]:
    """Narrow the FFNs of a pretrained model, without labels.

    The FFNs are converted one after the other, in the order of the forward pass. Each FFN keeps a
    share of its hidden channels and is fitted to the outputs of the pretrained block, given inputs
    from the blocks that are converted already, see :mod:`repa_mm.convert.regression`. The result is
    an ordinary model with narrower FFNs. All batches pass through the model together, see
    :mod:`repa_mm.convert.lockstep`, so the memory grows with the number of batches.

    Args:
        model (nn.Module): A backbone or a whole model, with blocks of a family in
            :data:`repa_mm.models.FAMILIES`.
        batches (Iterable): Inputs of ``forward``, such as images (B, 3, H, W). With two batches or
            more, cross-validation leaves out whole batches: put images that share something, such
            as crops of one photograph, into one batch. Put images of different sizes into different
            batches, since the FFNs would be fitted to padding as well.
        keep (float | Sequence): Share of the hidden channels, and so of the FFNs' multiply-adds,
            that stays, in (0, 1]: one for all blocks, or one per known block, where None leaves the
            block as it is. Defaults to 0.375, the cost of channel-idle FFNs with an idle ratio of
            0.75 where H = 4 C.
        where (str, optional): Name of the module whose blocks are converted, as for
            :func:`~repa_mm.models.sites.ffn_sites`. Defaults to all modules except decoder layers.
        forward (Callable, optional): Called with a model and a batch, runs the model or the part of
            it that has the blocks. Defaults to calling the model with the batch.
        held_out (Iterable): Batches to measure the change of the outputs on. Defaults to none.
        skip_unsupported (bool): Skip blocks whose FFN is not two linear layers around an
            activation, instead of raising an error. Defaults to False.
        progress (Callable, optional): Called with the report of each block once it is fitted.

    Returns:
        tuple: The converted copy of the model, and a :class:`ConversionReport`.

    Raises:
        ValueError: If there is no batch or no known block, a block cannot be converted, or its
            activations are not finite. The message names the block. A class of a user's own that
            has the name of a known block and computes something else is refused, too.

    Examples:
        >>> narrow, report = repa_mm.convert_pretrained(backbone, images)
        >>> print(report)
    """
    result = copy.deepcopy(unwrap(model))
    model = copy.deepcopy(result)
    model.eval()  # on its own line, since eval() of some backbones returns None
    run, after = (partial(forward, m) if forward else m for m in (model, result))
    batches, held_out = list(batches), list(held_out)
    if not batches:
        raise ValueError('batches is empty: there is no image to fit to')
    all_sites, ffns, widths, skipped = find_ffns(model, keep, where, skip_unsupported)
    sites = {site.block_name: site for site in all_sites if site.block_name in ffns}
    outputs = block_outputs(all_sites, run, batches[0])
    for name in [name for name in sites if name not in outputs]:
        skipped[name] = 'the forward pass does not reach it'
        del sites[name]
    if not sites:
        raise ValueError(
            f'the forward pass reaches none of the blocks: {", ".join(map(repr, ffns))}'
        )
    num_images = min(rows for rows, _ in outputs.values())
    fit = Fit(widths, num_images, -(-MAX_TOKENS // len(batches)), progress)
    expected = run_batches(run, held_out)
    with _checked(sites, outputs):
        for name, site in sites.items():
            site.put(ffns[name])
        in_lockstep(run, batches[:1], lambda *_: None, students=False)
        in_lockstep(run, batches, fit)
    for name, narrow in fit.fits.items():
        sites[name].of(result).set_weights(*narrow[:4])
    modes = {module: module.training for module in result.modules()}
    result.eval()
    changes = differences(expected, run_batches(after, held_out), has_channels_first(result))
    for module, mode in modes.items():
        module.training = mode
    return result, ConversionReport(fit.rows, skipped, changes)


def find_ffns(
    model: nn.Module,
    keep: float | Sequence[float | None],
    where: str | None,
    skip_unsupported: bool,
) -> tuple[list[FFNSite], dict[str, PretrainedFFN], dict[str, int], dict[str, str]]:
    """Find the FFNs of a model to convert, and the reasons why other FFNs are skipped.

    Args:
        model (nn.Module): The model.
        keep (float | Sequence): As for :func:`convert_pretrained`.
        where (str, optional): As for :func:`convert_pretrained`.
        skip_unsupported (bool): Skip blocks that cannot be converted, instead of raising an error.

    Returns:
        tuple: The sites of all known blocks; and by block name, the FFNs to convert, the numbers of
        hidden channels that stay, and the reasons why other blocks are skipped.

    Raises:
        ValueError: If a block cannot be converted and is not skipped, or if all blocks are skipped.
    """
    sites, ffns, widths, skipped = ffn_sites(model, where), {}, {}, {}
    owners: dict[int, str] = {}
    if not sites:
        inside = f' in its {where!r}' if where else ''
        raise ValueError(
            f'{type(model).__name__} has no block{inside} of a family in '
            'repa_mm.models.FAMILIES: add one with repa_mm.models.register_family'
        )
    for site, ratio in zip(sites, share(keep, sites, 'keep')):
        name = site.block_name
        if isinstance(site.module, Form):
            raise ValueError(
                f'{name!r} has a {site.module.label} instead of an ordinary FFN: convert a model '
                'with ordinary FFNs'
            )
        if id(site.module) in owners:
            raise ValueError(
                f'{name!r} shares its FFN with {owners[id(site.module)]!r}, but an FFN can be '
                'fitted to the inputs of one block only'
            )
        owners[id(site.module)] = name
        if ratio is None:
            skipped[name] = 'keep is None for this block'
            continue
        if not 0 < ratio <= 1:
            raise ValueError(f'keep must be a share in (0, 1], but got {ratio!r}')
        try:
            ffns[name] = PretrainedFFN(name, idle_ffn(site, 0.0, dict(type='keep')))
        except ValueError as error:
            if not skip_unsupported:
                raise ValueError(
                    f'cannot narrow the FFN of {name!r}, a {type(site.block).__name__}: {error}'
                ) from error
            skipped[name] = str(error)
            continue
        widths[name] = max(1, round(ratio * ffns[name].ffn.feedforward_channels))
    if not ffns:
        name, why = next(iter(skipped.items()))
        raise ValueError(f'no FFN of {type(model).__name__} can be narrowed: {name!r}: {why}')
    return sites, ffns, widths, skipped


def block_outputs(
    sites: Sequence[FFNSite], forward: Callable, batch
) -> dict[str, tuple[int, torch.Tensor]]:
    """Run a forward pass and record the outputs of the blocks that it reaches.

    Returns:
        dict: By block name, the size of the output's first dimension, which counts images, windows
        or patches, and the first entry (1, ...) of the output.
    """
    found: dict[str, tuple[int, torch.Tensor]] = {}
    blocks = {site.block_name: site.block for site in sites}
    with watched(blocks, lambda name, y: found.update({name: (len(y), y[:1].clone())})):
        forward(batch)
    return found


@contextmanager
def _checked(sites: dict[str, FFNSite], outputs: dict[str, tuple]) -> Iterator[None]:
    """Raise an error if the output of a block changes although an equal FFN replaced its FFN."""
    blocks = {name: site.block for name, site in sites.items()}

    def compare(name: str, output: torch.Tensor) -> None:
        found, known = (y.detach().double() for y in (output[:1], outputs[name][1]))
        change = float((found - known).norm() / known.norm().clamp(min=1e-300))
        if change > (0.05 if output.element_size() < 4 else 1e-3):
            raise ValueError(
                f'{name!r}, a {type(blocks[name]).__name__}, does not use its FFN as the OpenMMLab '
                f'block of this name does: its output changes by {change:.1%} when an equal FFN '
                'takes its place. The forward pass may also be random, or depend on state that '
                'other images have left in the model. Give None for this block in keep, or rename '
                'its class'
            )

    with watched(blocks, compare):
        yield


def sample_tokens(
    site: PretrainedFFN, tokens: list, max_tokens: int, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw random tokens from all batches.

    Args:
        site (PretrainedFFN): The FFN that all passes have reached.
        tokens (list): The inputs of the site and its target outputs for each batch, both (..., C).
        max_tokens (int): Number of tokens to draw from a batch, at most.
        seed (int): Seed of the random numbers. Defaults to 0.

    Returns:
        list: For each part of the batches the normalized tokens, and the target outputs of the FFN
        without shortcut, both (N, C).

    Raises:
        ValueError: If tokens are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for x, y in tokens:
        if not (x.isfinite().all() and y.isfinite().all()):
            raise ValueError(
                f'the activations of {site.name!r} are not finite: check the weights and the images'
            )
        u, x, y = (v.flatten(0, -2) for v in (site.ffn.norm1(x), x, y))
        chosen = torch.randperm(len(x), generator=generator)[:max_tokens].to(x.device)
        drawn.append((u[chosen], site.part(x[chosen], y[chosen])))
    number = min(_NUM_PARTS, len(drawn))
    ends = [i * len(drawn) // number for i in range(number + 1)]
    return [
        tuple(torch.cat(columns) for columns in zip(*drawn[start:end]))
        for start, end in zip(ends, ends[1:])
    ]


class Fit:
    """Fits the FFN that all passes have reached.

    Args:
        widths (dict): Number of hidden channels that stay, by block name.
        num_images (int): Number of images in the first batch.
        max_tokens (int): Number of tokens to draw from a batch, at most.
        progress: As for :func:`convert_pretrained`.

    Attributes:
        fits (dict): The fitted FFNs so far, by block name.
        rows (list): The reports of the blocks so far.
    """

    def __init__(self, widths, num_images, max_tokens, progress) -> None:
        self.widths, self.num_images, self.max_tokens = widths, num_images, max_tokens
        self.progress = progress
        self.fits: dict[str, NarrowFFN] = {}
        self.rows: list[BlockReport] = []
        self.same_so_far = True

    def __call__(self, site: PretrainedFFN, tokens: list) -> Callable:
        """Fit a narrower FFN, and return the function that takes the place of the site."""
        ffn, width = site.ffn, self.widths[site.name]
        parts = sample_tokens(site, tokens, self.max_tokens, len(self.rows))
        row = BlockReport(site.name, ffn.feedforward_channels, width)
        row.num_tokens = sum(len(u) for u, _ in parts)
        number = tokens[0][0].shape[:-1].numel() / self.num_images
        row.gmacs, row.narrow_gmacs = (
            number * 2 * ffn.embed_dims * h / 1e9 for h in (ffn.feedforward_channels, width)
        )
        self.rows.append(row)
        self.same_so_far &= width == ffn.feedforward_channels
        if not self.same_so_far:
            more = [with_foreign_tokens(ffn, *part) for part in parts]
            fit = fit_ffn(ffn, ffn_moments(ffn, more), width)
            fit = refine(fit, *(torch.cat(columns) for columns in zip(*more)))
            u, t = (torch.cat(columns) for columns in zip(*parts))
            fit = fit.measured(u, t)
            row.unexplained, row.ridge = fit.unexplained, fit.ridge
            if row.num_tokens <= width:
                row.warnings.append(
                    f'{row.num_tokens} tokens for {width} channels: give more images'
                )
            if not u.var(0).any():
                row.warnings.append('all tokens are the same: give other images')
            self.fits[site.name] = fit
        if self.progress is not None:
            self.progress(row)
        if self.same_so_far:
            return site.original
        return lambda x: site.whole(x, fit(ffn.norm1(x)))
