"""Narrows the FFNs of a pretrained model."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn

from repa_mm.fit.lockstep import PretrainedFFN, in_lockstep, watched
from repa_mm.fit.regression import NarrowFFN, ffn_moments, fit_ffn, refine, with_foreign_tokens
from repa_mm.models.sites import FFNSite, ffn_sites
from repa_mm.models.structures import idle_ffn, share
from repa_mm.models.tokens import ReducedSwinBlock, ReducedViTLayer
from repa_mm.reparam import Form, unwrap
from repa_mm.run.features import differences, has_channels_first, percent, run_batches

# Number of tokens that the regression of a block sees, drawn at random from all images.
MAX_TOKENS = 32768
_NUM_PARTS = 4  # of the images, for cross-validation


@dataclass
class BlockReport:
    """How well the FFN of one block could be fitted.

    Attributes:
        name (str): The block.
        hidden (int): Its number of hidden channels before.
        width (int): The number of those that stay.
        unexplained (float): Share of the variance of the targets that the narrower FFN leaves.
        ridge (float): Strength of the ridge.
        gmacs (float): 1e9 multiply-adds of the FFN for one image, before.
        narrow_gmacs (float): The same after the conversion.
        num_tokens (int): Number of tokens that the fit saw.
        warnings (list[str]): What to know about this fit.
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
    """What :func:`convert_pretrained` has done, as a table if printed.

    Attributes:
        blocks (list[BlockReport]): The converted blocks, in order of the forward pass.
        skipped (dict[str, str]): The blocks that stay as they are, and why.
        differences (list[float]): For each tensor that ``forward`` returns, the share of its
            variance that the conversion changes, on the batches that were held out.
    """

    blocks: list[BlockReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    differences: list[float] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """The warnings of all blocks, with their names."""
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
        lines += [f'left as it is: {name}: {why}' for name, why in self.skipped.items()]
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

    One block after the other, in the order of the forward pass, an FFN keeps a share of its hidden
    channels, and is fitted to what the pretrained block returns, given what the blocks before
    return now, see :mod:`repa_mm.fit.regression`. The result is an ordinary model with narrower
    FFNs. All batches go through the model together, see :mod:`repa_mm.fit.lockstep`, so that the
    memory grows with their number.

    Args:
        model (nn.Module): A backbone or a whole model, whose blocks are known, see
            :func:`~repa_mm.models.idle_channels`.
        batches (Iterable): What ``forward`` takes, such as images (B, 3, H, W). Of two batches or
            more, cross-validation leaves out whole ones: images that share something, as crops of
            one photograph do, belong into one batch, images of other sizes into other batches, as
            what is padded would be fitted to.
        keep (float | Sequence): Share of hidden channels, and so of the multiply-adds of the FFNs,
            that stays, in (0, 1]: one for all blocks, or one per known block, of which None leaves
            its block as it is. Defaults to 0.375, the cost of channel-idle FFNs with an idle ratio
            of 0.75 where H = 4 C.
        where (str, optional): The module of the model whose blocks are converted, as for
            :func:`~repa_mm.models.sites.ffn_sites`. Defaults to all but decoder layers.
        forward (Callable, optional): Called with a model and a batch, runs the model, or the part
            of it that holds the blocks. Defaults to calling the model with the batch.
        held_out (Iterable): Batches to measure the difference on. Defaults to none.
        skip_unsupported (bool): Leave blocks as they are whose FFN is not two linear layers around
            an activation, instead of raising an error. Defaults to False.
        progress (Callable, optional): Called with the report of each block once it is fitted.

    Returns:
        tuple: A copy of the model, and a :class:`ConversionReport`.

    Raises:
        ValueError: If there is no batch, no block is known, a block cannot be converted (one of a
            user's own class may have the name of a known one, and compute something else), or its
            activations are not finite. The message names the block.

    Examples:
        >>> narrow, report = repa_mm.convert_pretrained(backbone, images)
        >>> print(report)
    """
    result = copy.deepcopy(unwrap(model))
    model = copy.deepcopy(result)
    model.eval()  # on a line of its own: of some backbones it returns None
    run, after = (partial(forward, m) if forward else m for m in (model, result))
    batches, held_out = list(batches), list(held_out)
    if not batches:
        raise ValueError('there is no image to fit to: batches is empty')
    ffns, widths, skipped = find_ffns(model, keep, where, skip_unsupported)
    sites = {site.block_name: site for site in ffn_sites(model, where) if site.block_name in ffns}
    outputs = block_outputs(model, where, run, batches[0])
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
    for site in ffn_sites(result, where):
        if site.block_name in fit.fits:
            site.set_weights(*fit.fits[site.block_name][:4])
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
) -> tuple[dict[str, PretrainedFFN], dict[str, int], dict[str, str]]:
    """Return the FFN of every block of a model that is to be converted, and why the others are not.

    Args:
        model (nn.Module): The model.
        keep (float | Sequence): As for :func:`convert_pretrained`.
        where (str, optional): As for :func:`convert_pretrained`.
        skip_unsupported (bool): Whether blocks that cannot be converted are left out.

    Returns:
        tuple: The FFNs by the names of their blocks; how many channels of each stay; why the other
        blocks have none.

    Raises:
        ValueError: If a block cannot be converted and is not to be left out, or if none is left.
    """
    sites, ffns, widths, skipped = ffn_sites(model, where), {}, {}, {}
    owners: dict[int, str] = {}
    if not sites:
        inside = f' in its {where!r}' if where else ''
        raise ValueError(
            f'{type(model).__name__} has no block{inside} of a family in '
            'repa_mm.models.sites.FAMILIES'
        )
    for site, ratio in zip(sites, share(keep, sites, 'keep').values()):
        name = site.block_name
        if isinstance(site.module, Form):
            raise ValueError(f'{name!r} has a {site.module.label}, and no ordinary FFN')
        if id(site.module) in owners:
            raise ValueError(f'{name!r} shares its FFN with {owners[id(site.module)]!r}')
        owners[id(site.module)] = name
        if isinstance(site.block, (ReducedSwinBlock, ReducedViTLayer)) and site.block.keep != 1:
            raise ValueError(
                f'{name!r} computes a share of its tokens only, and not the same ones in the '
                'original and in the converted model: convert with keep_tokens=1, and reduce '
                'tokens afterwards'
            )
        if ratio is None:
            skipped[name] = 'keep leaves it out'
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
    return ffns, widths, skipped


def block_outputs(
    model: nn.Module, where: str | None, forward: Callable, batch
) -> dict[str, tuple[int, torch.Tensor]]:
    """The outputs of all known blocks that the forward pass reaches, by name.

    Returns:
        dict: The first dimension of what a block returns, which counts images, windows or patches,
        and its first entry.
    """
    found: dict[str, tuple[int, torch.Tensor]] = {}
    blocks = {site.block_name: site.block for site in ffn_sites(model, where)}
    with watched(blocks, lambda name, y: found.update({name: (len(y), y[:1].clone())})):
        forward(batch)
    return found


@contextmanager
def _checked(sites: dict[str, FFNSite], outputs: dict[str, tuple]) -> Iterator[None]:
    """Check that each block returns what it returned before its FFN was taken out."""
    blocks = {name: site.block for name, site in sites.items()}

    def compare(name: str, output: torch.Tensor) -> None:
        found, known = (y.detach().double() for y in (output[:1], outputs[name][1]))
        change = float((found - known).norm() / known.norm().clamp(min=1e-300))
        if change > (0.05 if output.element_size() < 4 else 1e-3):
            raise ValueError(
                f'{name!r}, a {type(blocks[name]).__name__}, does not use its FFN as the blocks of '
                'this name in OpenMMLab do, or the forward pass is random, or '
                f'depends on what other images have left behind: its output changes by {change:.1%}'
                '. Give None for it in keep, or another name to its class'
            )

    with watched(blocks, compare):
        yield


def sample_tokens(
    site: PretrainedFFN, tokens: list, max_tokens: int, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw tokens of all batches.

    Args:
        site (PretrainedFFN): The FFN at which all passes have met.
        tokens (list): For each batch what the FFN gets, and what it is to return, (..., C).
        max_tokens (int): Number of tokens of a batch.
        seed (int): Of the draw. Defaults to 0.

    Returns:
        list: For each part of the batches the tokens normalized, and what the fitted FFN is to make
        of them without the shortcut, each of shape (N, C).

    Raises:
        ValueError: If the tokens are not finite numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for x, y in tokens:
        if not (x.isfinite().all() and y.isfinite().all()):
            raise ValueError(
                f'the activations of {site.name!r} are not finite: check its weights and the images'
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
    """Fits the FFN at which all passes have met.

    Args:
        widths (dict): The number of channels that stay, by the name of the block.
        num_images (int): Number of images in the first batch.
        max_tokens (int): Number of tokens of a batch that count.
        progress: As for :func:`convert_pretrained`.

    Attributes:
        fits (dict): What is fitted so far, by the name of the block.
        rows (list): Their reports.
    """

    def __init__(self, widths, num_images, max_tokens, progress) -> None:
        self.widths, self.num_images, self.max_tokens = widths, num_images, max_tokens
        self.progress = progress
        self.fits: dict[str, NarrowFFN] = {}
        self.rows: list[BlockReport] = []
        self.same_so_far = True

    def __call__(self, site: PretrainedFFN, tokens: list) -> Callable:
        """Fit an FFN, and return what computes the block's end with the narrower one."""
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
