"""Fits channel-idle FFNs to the pretrained FFNs of a model."""

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
    channel_idle_ffn,
    elimination_path,
    ffn_moments,
    fit_ffn,
    norm_as_batch_norm,
    share_active_channels,
)
from repa_mm.models.sites import FFNSite, ffn_sites
from repa_mm.models.structures import idle_ffn
from repa_mm.reparam import ChannelIdleFFN, Form, check_state_dict, num_active_channels, unwrap
from repa_mm.reparam.numerics import double

# Number of tokens that the regression of a block sees, drawn at random from all images.
MAX_TOKENS = 32768


@dataclass
class BlockReport:
    """How well the FFN of one block could be fitted.

    Attributes:
        name (str): The block.
        idle_ratio (float): Its share of idle channels.
        unexplained_affine (float): Share of the variance of the targets that an affine function
            alone leaves.
        unexplained (float): Share that the channel-idle FFN leaves.
        shortfall (float): Share that is left only because the training form has fewer idle
            channels than the linear path needs; 0 if that form is exact.
        ridge (float): Strength of the ridge.
        gmacs (float): 1e9 multiply-adds of the FFN for one image, before. Known, as the next one,
            when all blocks are fitted.
        merged_gmacs (float): The same after the merge.
        num_tokens (int): Number of tokens that the fit saw.
        warnings (list[str]): What to know about this fit.
    """

    name: str
    idle_ratio: float
    unexplained_affine: float = 0.0
    unexplained: float = 0.0
    shortfall: float = 0.0
    ridge: float = 0.0
    gmacs: float = 0.0
    merged_gmacs: float = 0.0
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
        head = 'block', 'idle', 'affine alone', 'unexplained', 'ridge', 'training form', 'GMACs'
        rows = [(*head, 'merged')]
        for b in self.blocks:
            form = 'exact' if b.shortfall < 1e-6 else f'misses {b.shortfall:.4f}'
            shares = f'{b.unexplained_affine:.4f}', f'{b.unexplained:.4f}', f'{b.ridge:g}', form
            costs = f'{b.gmacs:.3f}', f'{b.merged_gmacs:.3f}'
            rows.append((b.name, f'{b.idle_ratio:.3f}', *shares, *costs))
        total = (sum(costs) for costs in zip(*((b.gmacs, b.merged_gmacs) for b in self.blocks)))
        rows.append(('all FFNs', *[''] * 5, *(f'{value:.3f}' for value in total)))
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
    idle_ratio: float | Sequence[float | None] = 0.75,
    norm: str = 'keep',
    *,
    forward: Callable | None = None,
    allocate: str = 'uniform',
    held_out: Iterable = (),
    ridge: float | None = None,
    skip_unsupported: bool = False,
    progress: Callable[[BlockReport], None] | None = None,
    seed: int = 0,
) -> tuple[nn.Module, ConversionReport]:
    """Fit channel-idle FFNs to the pretrained FFNs of a model, without training or labels.

    One block after the other, in the order of the forward pass, the norm and the FFN become a
    :class:`~repa_mm.reparam.ChannelIdleFFN` that imitates what they returned before, given what
    the blocks before return now. Which channels stay active and all weights of the deploy form
    follow from a regression over the tokens of some images, see :mod:`repa_mm.fit.regression`. All
    batches go through the model together, see :mod:`repa_mm.fit.lockstep`, so that the memory
    grows with their number.

    Args:
        model (nn.Module): A backbone, or a model with one, whose blocks are known, see
            :func:`~repa_mm.models.idle_channels`.
        batches (Iterable): What ``forward`` takes, such as images (B, 3, H, W).
        idle_ratio (float | Sequence): Share of hidden channels that skip the activation, in [0, 1]:
            one for all blocks, or one per known block, of which None leaves its block as it is.
            Defaults to 0.75.
        norm (str): 'keep' leaves the LayerNorms and GroupNorms before the FFNs as they are. 'fold'
            makes them BatchNorms, and everything merges. Defaults to 'keep'.
        forward (Callable, optional): Called with a model and a batch, runs the model, or the part
            of it that holds the blocks. Defaults to calling the model with the batch.
        allocate (str): 'uniform' gives all blocks the same idle ratio. 'by_error' gives more
            active channels to the blocks that gain more by them, at the multiply-adds of the
            uniform ratio. Defaults to 'uniform'.
        held_out (Iterable): Batches to measure the difference on. Defaults to none.
        ridge (float, optional): Strength of the ridge that draws the weights to those of the
            pretrained FFN whose idle channels are replaced by affine functions, relative to the
            mean variance of the tokens. By default it is chosen for each block by
            cross-validation over the images.
        skip_unsupported (bool): Leave blocks as they are whose FFN cannot become channel-idle,
            instead of raising an error. Defaults to False.
        progress (Callable, optional): Called with the report of each block once it is fitted.
        seed (int): Seed of the draw of the tokens. Defaults to 0.

    Returns:
        tuple: A copy of the model in its training form, which trains on and merges with
        :func:`~repa_mm.reparameterize`, and a :class:`ConversionReport`.

    Raises:
        ValueError: If there is no batch, no block is known, a block cannot be converted (one of a
            user's own class may have the name of a known one, and compute something else), or its
            activations are not finite. The message names the block.

    Examples:
        >>> converted, report = repa_mm.convert_pretrained(backbone, images)
        >>> print(report)
        >>> deployed = repa_mm.reparameterize(converted)
    """
    for option, value, values in (
        ('norm', norm, ('keep', 'fold')),
        ('allocate', allocate, ('uniform', 'by_error')),
    ):
        if value not in values:
            raise ValueError(f'{option} must be one of {values}, but got {value!r}')
    model = copy.deepcopy(unwrap(model))
    forward = partial(forward, model) if forward else model
    batches, held_out = list(batches), list(held_out)
    if not batches:
        raise ValueError('there is no image to fit to: batches is empty')
    ratios, ffns, skipped = find_ffns(model, idle_ratio, skip_unsupported)
    sites = {site.block_name: site for site in ffn_sites(model) if site.block_name in ffns}
    fit = _Fit(ratios, norm, ridge, -(-MAX_TOKENS // len(batches)), seed, progress)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    expected = run_batches(forward, held_out)
    with _checked(sites, forward, batches[0]):
        for name, site in sites.items():
            site.put(ffns[name])
        reached: list[str] = []
        in_lockstep(forward, batches[:1], lambda s, _: reached.append(s.name), students=False)
        for name in sites:
            if name not in reached:
                raise ValueError(f'the forward pass does not reach the FFN of {name!r}')
        if allocate == 'by_error':
            fit.share(forward, batches, idle_ratio)
        in_lockstep(forward, batches, fit)
    for name, site in sites.items():
        site.put(fit.forms[name])
    after = run_batches(forward, held_out)
    for name, site in sites.items():
        fit.forms[name].train(modes[site.block])
    for module, mode in modes.items():
        module.training = mode
    model._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
    changes = differences(expected, after, has_channels_first(model))
    return model, ConversionReport(fit.finished_rows(), skipped, changes)


def find_ffns(
    model: nn.Module, idle_ratio: float | Sequence[float | None], skip_unsupported: bool
) -> tuple[dict[str, float | None], dict[str, PretrainedFFN], dict[str, str]]:
    """Return the FFN of every block of a model that is to be converted, and why the others are not.

    Args:
        model (nn.Module): The model.
        idle_ratio (float | Sequence): As for :func:`convert_pretrained`.
        skip_unsupported (bool): Whether blocks that cannot be converted are left out.

    Returns:
        tuple: The idle ratio of each known block; the FFNs; why the other blocks have none.

    Raises:
        ValueError: If a block cannot be converted and is not to be left out, or if none is left.
    """
    sites, ffns, skipped = ffn_sites(model), {}, {}
    given = idle_ratio if isinstance(idle_ratio, Sequence) else [idle_ratio] * len(sites)
    if not sites or len(given) != len(sites):
        raise ValueError(
            f'{type(model).__name__} has {len(sites)} blocks of a family in '
            f'repa_mm.models.sites.FAMILIES, and idle_ratio is for {len(given)}'
        )
    ratios = {site.block_name: ratio for site, ratio in zip(sites, given)}
    for site in sites:
        name, ratio = site.block_name, ratios[site.block_name]
        if isinstance(site.module, Form):
            raise ValueError(f'{name!r} has a {site.module.label} already')
        if ratio is None:
            skipped[name] = 'idle_ratio leaves it out'
            continue
        num_active_channels(1, ratio)  # checks it
        try:
            ffns[name] = PretrainedFFN(name, idle_ffn(site, 0.0, dict(type='keep')))
        except ValueError as error:
            if not skip_unsupported:
                raise ValueError(
                    f'cannot make the FFN of {name!r}, a {type(site.block).__name__}, '
                    f'channel-idle: {error}'
                ) from error
            skipped[name] = str(error)
    if not ffns:
        name, why = next(iter(skipped.items()))
        raise ValueError(
            f'no block of {type(model).__name__} can become channel-idle: {name!r}: {why}'
        )
    return ratios, ffns, skipped


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
                '. Give None for it in idle_ratio, or another name to its class'
            )

    with watched(blocks, compare):
        yield


class _Fit:
    """Fits the FFN at which all passes have met.

    Args:
        ratios (dict): The idle ratio of each block by its name.
        max_tokens (int): Number of tokens of a batch that count.
        norm, ridge, seed, progress: As for :func:`convert_pretrained`.

    Attributes:
        forms (dict): The training forms of the blocks that are fitted.
        rows (list): Their reports.
    """

    def __init__(self, ratios, norm, ridge, max_tokens, seed, progress) -> None:
        self.ratios, self.norm, self.ridge = dict(ratios), norm, ridge
        self.max_tokens, self.seed, self.progress = max_tokens, seed, progress
        self.restart()

    def restart(self) -> None:
        self.forms: dict[str, ChannelIdleFFN] = {}
        self.rows: list[BlockReport] = []
        self.num_tokens: dict[str, int] = {}
        self.num_rows: dict[str, int] = {}
        self.same_so_far = True

    def sample(self, site: PretrainedFFN, tokens: list) -> list[torch.Tensor]:
        """Draw tokens of all batches.

        Returns:
            list: The tokens, what the original FFN returned for them, and the tokens normalized,
            each of shape (N, C).
        """
        generator = torch.Generator().manual_seed(self.seed + len(self.num_tokens))
        parts = []
        for x, y in tokens:
            if not (x.isfinite().all() and y.isfinite().all()):
                raise ValueError(
                    f'the activations of {site.name!r} are not finite: check its weights and the '
                    'images'
                )
            columns = [v.flatten(0, -2) for v in (x, y, site.ffn.norm1(x))]
            chosen = torch.randperm(len(columns[0]), generator=generator)
            # In the order of the images, by which the tokens are split for cross-validation.
            chosen = chosen[: self.max_tokens].sort().values.to(x.device)
            parts.append([v[chosen] for v in columns])
        self.num_tokens[site.name] = sum(x.shape[:-1].numel() for x, _ in tokens)
        self.num_rows[site.name] = sum(len(x) for x, _ in tokens)
        return [torch.cat(columns) for columns in zip(*parts)]

    def tokens_per_image(self, name: str) -> float:
        # The first dimension of an inner block of a TNT counts patches, and not images.
        return self.num_tokens[name] / min(self.num_rows.values())

    def share(self, forward: Callable, batches: list, idle_ratio: float) -> None:
        """Set the idle ratios with the least error at the multiply-adds of a uniform one."""
        ffns, paths, weights, most = [], [], [], []

        def measure(site: PretrainedFFN, tokens: list) -> None:
            ffn = site.ffn
            x, y, normalized = self.sample(site, tokens)
            paths.append(elimination_path(ffn, ffn_moments(ffn, normalized, double(y) - double(x))))
            # Relative to the variance of the tokens: the next norm divides by their deviation.
            weights.append(1 / max(float(y.double().var(0).sum()), 1e-300))
            hidden = ffn.feedforward_channels
            # More would leave fewer idle channels than the linear path needs.
            exact = hidden - ffn.embed_dims if hidden > ffn.embed_dims else hidden
            most.append(max(num_active_channels(hidden, idle_ratio), exact))
            ffns.append(ffn)

        in_lockstep(forward, batches, measure, students=False)
        names = list(self.num_tokens)
        costs = [self.tokens_per_image(n) * ffn.embed_dims for n, ffn in zip(names, ffns)]
        budget = sum(
            cost * num_active_channels(ffn.feedforward_channels, idle_ratio)
            for cost, ffn in zip(costs, ffns)
        )
        counts = share_active_channels(paths, weights, costs, most, budget)
        for name, ffn, count in zip(names, ffns, counts):
            self.ratios[name] = 1 - count / ffn.feedforward_channels
        self.restart()

    def __call__(self, site: PretrainedFFN, tokens: list) -> Callable:
        """Fit an FFN, and return what computes its deploy form."""
        row = BlockReport(site.name, self.ratios[site.name])
        form = self.form(site.ffn, *self.sample(site, tokens), row)
        merged = form.merge().eval()
        self.forms[site.name] = form
        self.rows.append(row)
        row.gmacs = 2 * form.embed_dims * form.feedforward_channels / 1e9
        linears = (m for m in merged.modules() if isinstance(m, nn.Linear))
        row.merged_gmacs = sum(m.weight.numel() for m in linears) / 1e9
        if self.progress is not None:
            self.progress(row)
        self.same_so_far &= form.num_idle == 0 and form.keeps_norm
        # Without the rounding errors of a merge that changes nothing.
        return site.original if self.same_so_far else merged

    def form(
        self,
        ffn: ChannelIdleFFN,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        normalized: torch.Tensor,
        row: BlockReport,
    ) -> ChannelIdleFFN:
        """Build the training form for the place of an FFN; its figures go into the report."""
        num_active = num_active_channels(ffn.feedforward_channels, row.idle_ratio)
        row.num_tokens = len(tokens)
        if self.norm == 'keep' and num_active == ffn.feedforward_channels:
            return copy.deepcopy(ffn)
        if self.norm == 'fold':
            ffn = norm_as_batch_norm(ffn, tokens, normalized, self.ridge)
            normalized = ffn.norm1(tokens)
        parts = ffn_moments(ffn, normalized, double(targets) - double(tokens))
        fit = fit_ffn(ffn, parts, num_active, ridge=self.ridge)
        row.unexplained, row.unexplained_affine = fit.unexplained, fit.unexplained_affine
        row.shortfall, row.ridge = fit.shortfall, fit.ridge
        unknowns = ffn.embed_dims + num_active + 1
        if len(tokens) < unknowns:
            row.warnings.append(
                f'{len(tokens)} tokens for {unknowns} unknowns per channel: give more images'
            )
        if not targets.var(0).any():
            row.warnings.append('all tokens are the same: give other images')
        return channel_idle_ffn(ffn, fit, len(tokens))

    def finished_rows(self) -> list[BlockReport]:
        """Return the reports, with multiply-adds for one image instead of one token."""
        for row in self.rows:
            row.gmacs *= self.tokens_per_image(row.name)
            row.merged_gmacs *= self.tokens_per_image(row.name)
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
