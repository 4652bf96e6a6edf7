"""Narrows the FFNs of a pretrained model."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn
from mmpretrain.models.backbones.mlp_mixer import MixerBlock

from repa_mm.fit.lockstep import PretrainedFFN, in_lockstep, watched
from repa_mm.fit.regression import (
    NarrowFFN,
    elimination_path,
    ffn_moments,
    fit_ffn,
    refine,
    share_channels,
)
from repa_mm.models.sites import FFNSite, ffn_sites
from repa_mm.models.structures import idle_ffn
from repa_mm.reparam import Form, unwrap
from repa_mm.reparam.numerics import double

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
        gmacs (float): 1e9 multiply-adds of the FFN for one image, before. Known, as the next one,
            when all blocks are fitted.
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
        total = (sum(costs) for costs in zip(*((b.narrow_gmacs, b.gmacs) for b in self.blocks)))
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
    forward: Callable | None = None,
    allocate: str = 'uniform',
    held_out: Iterable = (),
    ridge: float | None = None,
    skip_unsupported: bool = False,
    progress: Callable[[BlockReport], None] | None = None,
    seed: int = 0,
) -> tuple[nn.Module, ConversionReport]:
    """Narrow the FFNs of a pretrained model, without labels.

    One block after the other, in the order of the forward pass, an FFN keeps a share of its hidden
    channels, and is fitted to what the pretrained block returns, given what the blocks before
    return now, see :mod:`repa_mm.fit.regression`. The result is an ordinary model with narrower
    FFNs. All batches go through the model together, see :mod:`repa_mm.fit.lockstep`, so that the
    memory grows with their number.

    Args:
        model (nn.Module): A backbone, or a model with one, whose blocks are known, see
            :func:`~repa_mm.models.idle_channels`.
        batches (Iterable): What ``forward`` takes, such as images (B, 3, H, W). Cross-validation
            leaves out whole batches: images that share something, as crops of one photograph do,
            belong into one batch.
        keep (float | Sequence): Share of hidden channels, and so of the multiply-adds of the FFNs,
            that stays, in (0, 1]: one for all blocks, or one per known block, of which None leaves
            its block as it is. Defaults to 0.375, the cost of channel-idle FFNs with an idle ratio
            of 0.75 where H = 4 C.
        forward (Callable, optional): Called with a model and a batch, runs the model, or the part
            of it that holds the blocks. Defaults to calling the model with the batch.
        allocate (str): 'uniform' keeps the same share in all blocks. 'by_error' keeps more of the
            blocks that lose more without, at the multiply-adds of the one share. Defaults to
            'uniform'.
        held_out (Iterable): Batches to measure the difference on. Defaults to none.
        ridge (float, optional): Strength of the ridge that draws the output weights to the
            pretrained ones, relative to the mean variance of a channel. By default
            cross-validation chooses it for each block.
        skip_unsupported (bool): Leave blocks as they are whose FFN is not two linear layers around
            an activation, instead of raising an error. Defaults to False.
        progress (Callable, optional): Called with the report of each block once it is fitted.
        seed (int): Seed of the draws of tokens. Defaults to 0.

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
    if allocate not in ('uniform', 'by_error'):
        raise ValueError(f"allocate must be 'uniform' or 'by_error', but got {allocate!r}")
    result = copy.deepcopy(unwrap(model))
    model = copy.deepcopy(result)
    model.eval()  # on a line of its own: of some backbones it returns None
    run, after = (partial(forward, m) if forward else m for m in (model, result))
    batches, held_out = list(batches), list(held_out)
    if not batches:
        raise ValueError('there is no image to fit to: batches is empty')
    ffns, widths, skipped = find_ffns(model, keep, skip_unsupported)
    sites = {site.block_name: site for site in ffn_sites(model) if site.block_name in ffns}
    fit = Fit(widths, ridge, -(-MAX_TOKENS // len(batches)), seed, progress)
    expected = run_batches(run, held_out)
    with _checked(sites, run, batches[0]):
        for name, site in sites.items():
            site.put(ffns[name])
        reached: list[str] = []
        in_lockstep(run, batches[:1], lambda s, _: reached.append(s.name), students=False)
        for name in sites:
            if name not in reached:
                raise ValueError(f'the forward pass does not reach the FFN of {name!r}')
        if allocate == 'by_error':
            fit.share(run, batches)
        in_lockstep(run, batches, fit)
    for site in ffn_sites(result):
        if site.block_name in fit.fits:
            site.set_weights(*fit.fits[site.block_name][:4])
    modes = {module: module.training for module in result.modules()}
    result.eval()
    changes = differences(expected, run_batches(after, held_out), has_channels_first(result))
    for module, mode in modes.items():
        module.training = mode
    return result, ConversionReport(fit.finished_rows(), skipped, changes)


def find_ffns(
    model: nn.Module, keep: float | Sequence[float | None], skip_unsupported: bool
) -> tuple[dict[str, PretrainedFFN], dict[str, int], dict[str, str]]:
    """Return the FFN of every block of a model that is to be converted, and why the others are not.

    Args:
        model (nn.Module): The model.
        keep (float | Sequence): As for :func:`convert_pretrained`.
        skip_unsupported (bool): Whether blocks that cannot be converted are left out.

    Returns:
        tuple: The FFNs by the names of their blocks; how many channels of each stay; why the other
        blocks have none.

    Raises:
        ValueError: If a block cannot be converted and is not to be left out, or if none is left.
    """
    sites, ffns, widths, skipped = ffn_sites(model), {}, {}, {}
    given = keep if isinstance(keep, Sequence) else [keep] * len(sites)
    if not sites or len(given) != len(sites):
        raise ValueError(
            f'{type(model).__name__} has {len(sites)} blocks of a family in '
            f'repa_mm.models.sites.FAMILIES, and keep is for {len(given)}'
        )
    for site, share in zip(sites, given):
        name = site.block_name
        if isinstance(site.module, Form):
            raise ValueError(f'{name!r} has a {site.module.label}, and no ordinary FFN')
        if share is None:
            skipped[name] = 'keep leaves it out'
            continue
        if not 0 < share <= 1:
            raise ValueError(f'keep must be a share in (0, 1], but got {share!r}')
        try:
            ffns[name] = PretrainedFFN(name, idle_ffn(site, 0.0, dict(type='keep')))
        except ValueError as error:
            if not skip_unsupported:
                raise ValueError(
                    f'cannot narrow the FFN of {name!r}, a {type(site.block).__name__}: {error}'
                ) from error
            skipped[name] = str(error)
            continue
        widths[name] = max(1, round(share * ffns[name].ffn.feedforward_channels))
    if not ffns:
        name, why = next(iter(skipped.items()))
        raise ValueError(f'no FFN of {type(model).__name__} can be narrowed: {name!r}: {why}')
    return ffns, widths, skipped


@contextmanager
def _checked(sites: dict[str, FFNSite], forward: Callable, batch) -> Iterator[None]:
    """Check that each block returns what it returned before its FFN was taken out."""
    expected: dict[str, torch.Tensor] = {}
    blocks = {name: site.block for name, site in sites.items()}
    with watched(blocks, lambda name, output: expected.update({name: output.clone()})):
        forward(batch)

    def compare(name: str, output: torch.Tensor) -> None:
        found, known = output.double(), expected[name].double()
        change = float((found - known).norm() / known.norm().clamp(min=1e-300))
        if change > (0.05 if output.element_size() < 4 else 1e-3):
            raise ValueError(
                f'{name!r}, a {type(blocks[name]).__name__}, does not end with x + ffn(norm(x)), '
                'as the blocks of this name in OpenMMLab do, or the forward pass is random, or '
                f'depends on what other images have left behind: its output changes by {change:.1%}'
                '. Give None for it in keep, or another name to its class'
            )

    with watched(blocks, compare):
        yield


class Fit:
    """Fits the FFN at which all passes have met.

    Args:
        widths (dict): The number of channels that stay, by the name of the block.
        max_tokens (int): Number of tokens of a batch that count.
        ridge, seed, progress: As for :func:`convert_pretrained`.

    Attributes:
        fits (dict): What is fitted so far, by the name of the block.
        rows (list): Their reports.
    """

    def __init__(self, widths, ridge, max_tokens, seed, progress) -> None:
        self.widths, self.ridge, self.max_tokens = dict(widths), ridge, max_tokens
        self.seed, self.progress = seed, progress
        self.restart()

    def restart(self) -> None:
        self.fits: dict[str, NarrowFFN] = {}
        self.rows: list[BlockReport] = []
        self.num_tokens: dict[str, int] = {}
        self.num_rows: dict[str, int] = {}
        self.same_so_far = True

    def sample(
        self, site: PretrainedFFN, tokens: list
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Draw tokens of all batches.

        Returns:
            list: For each part of the batches the tokens normalized, what the fitted FFN is to add
            to them, and what the block is to return, each of shape (N, C).
        """
        generator = torch.Generator().manual_seed(self.seed + len(self.num_tokens))
        drawn = []
        for x, y in tokens:
            if not (x.isfinite().all() and y.isfinite().all()):
                raise ValueError(
                    f'the activations of {site.name!r} are not finite: check its weights and the '
                    'images'
                )
            u, x, y = (v.flatten(0, -2) for v in (site.ffn.norm1(x), x, y))
            chosen = torch.randperm(len(x), generator=generator)[: self.max_tokens].to(x.device)
            drawn.append((u[chosen], double(y[chosen]) - double(x[chosen]), y[chosen]))
        self.num_tokens[site.name] = sum(x.shape[:-1].numel() for x, _ in tokens)
        self.num_rows[site.name] = sum(len(x) for x, _ in tokens)
        number = min(_NUM_PARTS, len(drawn))
        ends = [i * len(drawn) // number for i in range(number + 1)]
        return [
            tuple(torch.cat(columns) for columns in zip(*drawn[start:end]))
            for start, end in zip(ends, ends[1:])
        ]

    def tokens_per_image(self, name: str) -> float:
        # The first dimension of an inner block of a TNT counts patches, and not images.
        return self.num_tokens[name] / min(self.num_rows.values())

    def share(self, forward: Callable, batches: list) -> None:
        """Set the widths with the least error at the same multiply-adds."""
        paths, weights, dims = [], [], []

        def measure(site: PretrainedFFN, tokens: list) -> None:
            parts = self.sample(site, tokens)
            paths.append(elimination_path(site.ffn, ffn_moments(site.ffn, [p[:2] for p in parts])))
            # Relative to the variance of the tokens: the next norm divides by their deviation.
            returned = torch.cat([y for _, _, y in parts]).double()
            weights.append(1 / max(float(returned.var(0).sum()), 1e-300))
            dims.append(site.ffn.embed_dims)

        in_lockstep(forward, batches, measure, students=False)
        names = list(self.num_tokens)
        costs = [self.tokens_per_image(n) * c for n, c in zip(names, dims)]
        budget = sum(cost * self.widths[n] for cost, n in zip(costs, names))
        self.widths = dict(zip(names, share_channels(paths, weights, costs, budget)))
        self.restart()

    def __call__(self, site: PretrainedFFN, tokens: list) -> Callable:
        """Fit an FFN, and return what computes the block's end with the narrower one."""
        ffn, width, parts = site.ffn, self.widths[site.name], self.sample(site, tokens)
        row = BlockReport(site.name, ffn.feedforward_channels, width)
        row.num_tokens = sum(len(u) for u, _, _ in parts)
        row.gmacs, row.narrow_gmacs = (
            2 * ffn.embed_dims * h / 1e9 for h in (ffn.feedforward_channels, width)
        )
        self.rows.append(row)
        self.same_so_far &= width == ffn.feedforward_channels
        if not self.same_so_far:
            u, t, y = (torch.cat(columns) for columns in zip(*parts))
            fit = fit_ffn(ffn, ffn_moments(ffn, [p[:2] for p in parts]), width, self.ridge)
            fit = refine(fit, u, t, seed=self.seed)
            row.unexplained, row.ridge = fit.unexplained, fit.ridge
            if row.num_tokens <= width:
                row.warnings.append(
                    f'{row.num_tokens} tokens for {width} channels: give more images'
                )
            if not y.var(0).any():
                row.warnings.append('all tokens are the same: give other images')
            self.fits[site.name] = fit
        if self.progress is not None:
            self.progress(row)
        return site.original if self.same_so_far else lambda x: x + fit(ffn.norm1(x))

    def finished_rows(self) -> list[BlockReport]:
        """Return the reports, with multiply-adds for one image instead of one token."""
        for row in self.rows:
            row.gmacs *= self.tokens_per_image(row.name)
            row.narrow_gmacs *= self.tokens_per_image(row.name)
        return self.rows


def run_batches(forward: Callable, batches: Iterable) -> list[list[torch.Tensor]]:
    """Return the floating-point tensors that ``forward`` returns, for every batch."""
    return [[v.cpu() for v in tensors(forward(batch))] for batch in batches]


def tensors(value) -> list[torch.Tensor]:
    """Return the floating-point tensors in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) and value.is_floating_point() else []


def percent(values: Iterable[float]) -> str:
    """Format shares in percent, with two digits each."""
    return ', '.join(f'{100 * value:.{2 if value < 1 else 3}g} %' for value in values)


def has_channels_first(model: nn.Module) -> bool:
    """Return whether the tokens that a backbone returns are (B, C, N), as those of an MLP-Mixer."""
    return any(isinstance(module, MixerBlock) for module in model.modules())


def channels_last(features: torch.Tensor, channels_first: bool) -> torch.Tensor:
    """Move the channels of maps (B, C, H, W), tokens or vectors to the last dimension."""
    moves = features.ndim == 4 or features.ndim == 3 and channels_first
    return features.movedim(1, -1) if moves else features


def differences(before: list, after: list, channels_first: bool = False) -> list[float]:
    """Return the mean square change of each output, relative to the variance of its channels.

    A single vector has no variance, and its change is relative to its mean square.

    Args:
        before (list): For each batch, the outputs of the original model.
        after (list): For each batch, the outputs of the converted model.
        channels_first (bool): Whether tokens are (B, C, N). Defaults to False.
    """

    def rows(x: torch.Tensor) -> torch.Tensor:
        x = channels_last(x, channels_first)
        return x.reshape(-1, x.shape[-1] if x.ndim else 1).double()

    result = []
    for pairs in zip(*(zip(a, b) for a, b in zip(before, after))):
        change = sum(float((rows(a) - rows(b)).square().sum()) for a, b in pairs)
        count = sum(len(rows(a)) for a, _ in pairs)
        mean = sum(rows(a).sum(0) for a, _ in pairs) / count
        variance = sum(float((rows(a) - mean).square().sum()) for a, _ in pairs)
        variance = variance or sum(float(rows(a).square().sum()) for a, _ in pairs)
        result.append(change / max(variance, 1e-300))
    return result
