"""Narrowing the FFNs and attention heads of a pretrained model."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn

from repa_mm.convert.budget import Axis, spread
from repa_mm.convert.lockstep import Pausing, in_lockstep, watched
from repa_mm.convert.parts import PretrainedAttention, PretrainedFFN
from repa_mm.faster.attention import swap_attention_
from repa_mm.features import differences, has_channels_first, percent, run_batches
from repa_mm.models.sites import AttentionSite, Site, attention_sites, ffn_sites
from repa_mm.models.structures import share
from repa_mm.reparam import Form
from repa_mm.surgery import unwrap

# Tokens that an FFN is fitted to, drawn at random from all images.
MAX_TOKENS = 32768
Keep = float | Sequence[float | None]


@dataclass
class BlockReport:
    """The fit of one block's FFN or attention.

    Attributes:
        name (str): Name of the block, or of its attention.
        before (tuple[int, ...]): Number of hidden channels of an FFN, or numbers of dimensions of
            the queries and keys and of the values in a head, before the conversion.
        after (tuple[int, ...]): The same after the conversion.
        unexplained (float): Share of the targets' variance that the narrower part does not explain.
        ridge (float): Strength of the ridge.
        gmacs (float): 1e9 multiply-adds of the part for one image before the conversion.
        narrow_gmacs (float): 1e9 multiply-adds of the part for one image after the conversion.
        warnings (list[str]): Warnings about this fit.
        changed (bool): The part has new weights. Those before the first narrower part have not.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    unexplained: float = 0.0
    ridge: float = 0.0
    gmacs: float = 0.0
    narrow_gmacs: float = 0.0
    warnings: list[str] = field(default_factory=list)
    changed: bool = False


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
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """New sizes of the parts with new weights, by name: those that a config must have."""
        return {block.name: block.after for block in self.blocks if block.changed}

    @property
    def share(self) -> float:
        """Share of the multiply-adds of these blocks that is left."""
        return sum(b.narrow_gmacs for b in self.blocks) / sum(b.gmacs for b in self.blocks)

    @property
    def warnings(self) -> list[str]:
        """Warnings about all blocks, each with the name of its block."""
        return [f'{block.name}: {text}' for block in self.blocks for text in block.warnings]

    def __str__(self) -> str:
        rows = [('block', 'width', 'of', 'unexplained', 'ridge', 'GMACs', 'before')]
        for b in self.blocks:
            sizes = ('+'.join(map(str, x)) for x in (b.after, b.before))
            fit = *sizes, f'{b.unexplained:.4f}', f'{b.ridge:g}' if b.ridge else ''
            rows.append((b.name, *fit, f'{b.narrow_gmacs:.3f}', f'{b.gmacs:.3f}'))
        total = (sum(b.narrow_gmacs for b in self.blocks), sum(b.gmacs for b in self.blocks))
        rows.append(('all', *[''] * 4, *(f'{value:.3f}' for value in total)))
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
    keep: Keep = 0.375,
    qk_keep: Keep | str = 1.0,
    v_keep: Keep | str = 1.0,
    budget: float | None = None,
    where: str | None = None,
    forward: Callable | None = None,
    held_out: Iterable = (),
    full_size: Iterable = (),
    skip_unsupported: bool = False,
    progress: Callable[[BlockReport, int], None] | None = None,
) -> tuple[nn.Module, ConversionReport]:
    """Narrow the FFNs and the heads of a pretrained model, without labels.

    The parts are converted one after the other, in the order of the forward pass. Each FFN keeps a
    share of its hidden channels, and each head a share of its dimensions. They are fitted to the
    outputs of the pretrained block, given inputs from the blocks that are converted already, see
    :mod:`repa_mm.convert.regression` and :mod:`repa_mm.convert.heads`. The result is an ordinary
    model with narrower layers. All batches pass through the model together, see
    :mod:`repa_mm.convert.lockstep`, so the memory grows with the number of batches.

    Args:
        model (nn.Module): A backbone or a whole model, with blocks of a family in
            :data:`repa_mm.models.FAMILIES`.
        batches (Iterable): Inputs of ``forward``, such as images (B, 3, H, W). With two batches or
            more, cross-validation leaves out whole batches: put images that share something, such
            as crops of one photograph, into one batch. Put images of different sizes into different
            batches, since the parts would be fitted to padding as well.
        keep (float | Sequence): Share of the hidden channels, and so of the FFNs' multiply-adds,
            that stays, in (0, 1]: one for all blocks, or one per known block, where None leaves the
            block as it is. Defaults to 0.375, the cost of channel-idle FFNs with an idle ratio of
            0.75 where H = 4 C.
        qk_keep (float | Sequence | str): Share of each head's dimensions of queries and keys that
            stays, rounded to a multiple of 4: one for all blocks, or one per block with a known
            attention. 'auto' leaves out 0.3 % of the energy of each block's logits. Defaults to 1.
        v_keep (float | Sequence | str): The same for the values. Defaults to 1.
        budget (float, optional): Share of the multiply-adds of all parts that can be narrowed, FFNs
            and attention, that stays, in (0, 1]. It takes the place of ``keep``, ``qk_keep`` and
            ``v_keep``: channels and dimensions of all blocks compete, see
            :mod:`repa_mm.convert.budget`. FFNs keep at least 3 % of their channels, heads at least
            4 dimensions; a budget below that gives these sizes, with a warning. Blocks whose
            attention is not known narrow their FFNs alone. Defaults to None.
        where (str, optional): Name of the module whose blocks are converted, as for
            :func:`~repa_mm.models.sites.ffn_sites`. Defaults to all modules except decoder layers.
        forward (Callable, optional): Called with a model and a batch, runs the model or the part of
            it that has the blocks. Defaults to calling the model with the batch.
        held_out (Iterable): Batches to measure the change of the outputs on. Defaults to none.
        full_size (Iterable): Batches to count multiply-adds on, of the sizes at which the model
            will run, if ``batches`` are crops. Defaults to ``batches``.
        skip_unsupported (bool): Skip parts that cannot be narrowed, such as an FFN that is not two
            linear layers around an activation, instead of raising an error. Defaults to False, and
            to True with a budget.
        progress (Callable, optional): Called with the report of each part once it is fitted, and
            with the number of parts.

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
    original = unwrap(model)
    model = copy.deepcopy(original)
    model.eval()  # on its own line, since eval() of some backbones returns None
    run = partial(forward, model) if forward else model
    batches, held_out = list(batches), list(held_out)
    if not batches:
        raise ValueError('batches is empty: there is no image to fit to')
    if budget is not None:
        # All parts; spread_budget() decides on their sizes.
        heads = 'auto' if attention_sites(model, where or '') else 1.0
        keep, qk_keep, v_keep, skip_unsupported = 1.0, heads, heads, True
    plan = plan_conversion(model, keep, qk_keep, v_keep, where, skip_unsupported)
    outputs = block_outputs(plan.blocks, run, batches[0])
    for name in [name for name, site in plan.sites.items() if site.block_name not in outputs]:
        plan.skipped[name] = 'the forward pass does not reach it'
        del plan.sites[name], plan.parts[name], plan.sizes[name]
    if not plan.sites:
        names = ', '.join(map(repr, plan.skipped))
        raise ValueError(f'the forward pass reaches none of the blocks: {names}')
    expected = run_batches(run, held_out)
    max_tokens = -(-MAX_TOKENS // len(batches))
    with _checked(plan.sites, outputs):
        plan.put()
        in_lockstep(run, batches[:1], lambda *_: None, students=False)
    costs = count(run, list(full_size) or spread_out(batches))
    if budget is not None:
        plan.sizes = spread_budget(plan, run, batches, budget, max_tokens, costs)
    fit = Fit(plan.sizes, costs, max_tokens, progress)
    with _checked(plan.sites, outputs):
        in_lockstep(run, batches, fit)
    result = copy.deepcopy(original)
    for name, weights in fit.weights.items():
        plan.sites[name].of(result).set_weights(*weights)
    modes = {module: module.training for module in result.modules()}
    result.eval()
    after = partial(forward, result) if forward else result
    changes = differences(expected, run_batches(after, held_out), has_channels_first(result))
    for module, mode in modes.items():
        module.training = mode
    report = ConversionReport(fit.rows, plan.skipped, changes)
    if budget is not None and report.share > budget + 0.005:
        warnings.warn(
            f'the budget is {budget:g}, and {report.share:.3f} is the least that these blocks allow'
        )
    return result, report


#: Number of batches from which a budget is spread, where the fits see all. Half of them measure the
#: gains: with eight, their order hardly matters.
FEW = 16


def spread_out(batches: Sequence, number: int = FEW) -> list:
    """Return some of the batches, at most ``number``."""
    return list(batches[:: -(-len(batches) // number)])


def count(run: Callable, batches: Sequence) -> dict[str, float]:
    """Return the multiply-adds of each part for one image and one channel or dimension.

    Args:
        run (Callable): Runs a model with the parts on a batch.
        batches (Sequence): The batches. Multiply-adds are the mean over their images.
    """
    costs: dict[str, float] = {}
    rows: list[list[int]] = []

    def meet(part: Pausing, tokens: list) -> None:
        rows.append([len(x) for (x, *_), _ in tokens])
        costs[part.name] = sum(part.macs(x) for (x, *_), _ in tokens)

    in_lockstep(run, batches, meet, students=False)
    # Rows are images, or their windows or patches.
    num_images = sum(map(min, zip(*rows)))
    return {name: cost / num_images for name, cost in costs.items()}


def spread_budget(
    plan: 'Plan',
    run: Callable,
    batches: list,
    budget: float,
    max_tokens: int,
    costs: dict[str, float],
) -> dict[str, tuple[int, ...]]:
    """Choose the sizes of all parts, see :mod:`repa_mm.convert.budget`.

    Args:
        plan (Plan): The parts, which are in the model.
        run (Callable): Runs the model on a batch.
        batches (list): The batches to fit to.
        budget (float): Share of the multiply-adds of all blocks that stays.
        max_tokens (int): Number of tokens to draw from a batch, at most.
        costs (dict): Of :func:`count`.

    Returns:
        dict: The sizes by the name of the part.

    Raises:
        ValueError: If the budget is not in (0, 1].
    """
    if not 0 < budget <= 1:
        raise ValueError(f'budget must be a share in (0, 1], but got {budget!r}')
    axes: dict[str, list[Axis]] = {}

    def meet(part: Pausing, tokens: list) -> None:
        axes[part.name] = part.axes(part.sample(tokens, max_tokens, len(axes)))
        for axis in axes[part.name]:
            axis.cost = costs[part.name]

    in_lockstep(run, spread_out(batches), meet, students=False)
    few = spread_out(batches, FEW // 2)
    expected = run_batches(run, few)
    for name, found in axes.items():
        part = plan.parts[name]
        for axis in found:
            probe = axis.probe()
            if axis.errors[probe] <= 0:
                continue  # nothing is lost at any size
            vars(part)['original'] = axis.narrow(axis.sizes[probe])
            changes = differences(expected, run_batches(run, few))
            del vars(part)['original']
            axis.gain = sum(changes) / axis.errors[probe]
    every = [axis for found in axes.values() for axis in found]
    total = sum(axis.cost * axis.sizes[-1] for axis in every)
    multiples = [4 if len(found) > 1 else 1 for found in axes.values() for _ in found]
    sizes = iter(spread(every, budget * total, multiples))
    return {name: tuple(next(sizes) for _ in found) for name, found in axes.items()}


@dataclass
class Plan:
    """The parts of a model to narrow.

    Attributes:
        blocks (dict[str, nn.Module]): All known blocks, by name.
        sites (dict[str, Site]): The sites of the parts, by the name of the part: that of the block
            for an FFN, that of the attention for heads.
        parts (dict[str, Pausing]): The pretrained parts.
        sizes (dict[str, tuple]): Their sizes after the conversion, where None is found by the fit.
        skipped (dict[str, str]): Names of the blocks that stay as they are, with the reasons.
    """

    blocks: dict[str, nn.Module] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    parts: dict[str, Pausing] = field(default_factory=dict)
    sizes: dict[str, tuple] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def put(self) -> None:
        """Put the pretrained parts into the model."""
        for name, site in self.sites.items():
            if isinstance(site, AttentionSite):
                setattr(site.block, site.caller, self.parts[name])
            else:
                site.put(self.parts[name])


def plan_conversion(
    model: nn.Module,
    keep: Keep = 0.375,
    qk_keep: Keep | str = 1.0,
    v_keep: Keep | str = 1.0,
    where: str | None = None,
    skip_unsupported: bool = False,
) -> Plan:
    """Find the parts of a model to convert, and the reasons why others are skipped.

    Stock window attention in the model becomes the faster one, if heads are to be narrower.

    Args:
        model (nn.Module): The model.
        keep (float | Sequence): As for :func:`convert_pretrained`.
        qk_keep (float | Sequence | str): As for :func:`convert_pretrained`.
        v_keep (float | Sequence | str): As for :func:`convert_pretrained`.
        where (str, optional): As for :func:`convert_pretrained`.
        skip_unsupported (bool): Skip blocks that cannot be converted, instead of raising an error.

    Raises:
        ValueError: If a part cannot be converted and is not skipped, or if all parts are skipped.
    """
    plan = Plan()
    sites = ffn_sites(model, where)
    heads = _head_sizes(model, qk_keep, v_keep, where, plan.skipped if skip_unsupported else None)
    plan.blocks = {site.block_name: site.block for site in sites}
    inside = f' in its {where!r}' if where else ''
    if not sites:
        raise ValueError(
            f'{type(model).__name__} has no block{inside} of a family in '
            'repa_mm.models.FAMILIES: add one with repa_mm.models.register_family'
        )
    owners: dict[int, str] = {}
    for site, ratio in zip(sites, share(keep, sites, 'keep')):
        name = site.block_name
        if isinstance(site.module, Form):
            if ratio == 1 and heads:
                plan.skipped[name] = f'it has a {site.module.label}'
                continue
            raise ValueError(
                f'{name!r} has a {site.module.label} instead of an ordinary FFN: convert a model '
                'with ordinary FFNs, or its heads alone (keep=1 with qk_keep, v_keep)'
            )
        if id(site.module) in owners:
            raise ValueError(
                f'{name!r} shares its FFN with {owners[id(site.module)]!r}, but an FFN can be '
                'fitted to the inputs of one block only'
            )
        owners[id(site.module)] = name
        if ratio is None:
            plan.skipped[name] = 'keep is None for this block'
            continue
        if not 0 < ratio <= 1:
            raise ValueError(f'keep must be a share in (0, 1], but got {ratio!r}')
        try:
            part = PretrainedFFN(site)
        except ValueError as error:
            if not skip_unsupported:
                raise ValueError(
                    f'cannot narrow the FFN of {name!r}, a {type(site.block).__name__}: {error}'
                ) from error
            plan.skipped[name] = str(error)
            continue
        plan.sites[name], plan.parts[name] = site, part
        plan.sizes[name] = (max(1, round(ratio * part.sizes[0])),)
    for site, sizes in heads:
        if id(site.module) in owners:
            raise ValueError(
                f'{site.name!r} is the same attention as {owners[id(site.module)]!r}, but heads '
                'can be fitted to the inputs of one block only'
            )
        owners[id(site.module)] = site.name
        plan.sites[site.name], plan.parts[site.name] = site, PretrainedAttention(site)
        plan.sizes[site.name] = sizes
    if not plan.parts:
        name, why = next(iter(plan.skipped.items()))
        raise ValueError(f'no FFN of {type(model).__name__} can be narrowed: {name!r}: {why}')
    return plan


def _head_sizes(
    model: nn.Module,
    qk_keep: Keep | str,
    v_keep: Keep | str,
    where: str | None,
    skipped: dict | None,
) -> list[tuple[AttentionSite, tuple]]:
    """Return the attention whose heads are to be narrower, with their sizes.

    The reasons why others are not go to ``skipped``, unless it is None.
    """
    if qk_keep == v_keep == 1:
        return []
    swap_attention_(model)
    sites = attention_sites(model, where or '')
    if not sites:
        inside = f' in its {where!r}' if where else ''
        raise ValueError(f'{type(model).__name__} has no attention{inside} of a known family')
    found = []
    shares = zip(
        sites, *(share(k, sites, n) for k, n in ((qk_keep, 'qk_keep'), (v_keep, 'v_keep')))
    )
    for site, *ratios in shares:
        try:
            dims = site.heads().dims
        except ValueError as error:
            if skipped is not None:
                skipped[site.name] = str(error)
                continue
            kind = type(site.block).__name__
            raise ValueError(
                f'cannot narrow the heads of {site.name!r}, a {kind}: {error}'
            ) from error
        sizes = tuple(None if r == 'auto' else head_size(r, d) for r, d in zip(ratios, dims))
        if sizes != dims:
            found.append((site, sizes))
    return found


def head_size(ratio: float | None, dims: int) -> int:
    """Return a share of a head's dimensions, rounded to a multiple of 4.

    Raises:
        ValueError: If the share is not in (0, 1].
    """
    if ratio is None:
        return dims
    if not (isinstance(ratio, (int, float)) and 0 < ratio <= 1):
        raise ValueError(f"qk_keep and v_keep are shares in (0, 1] or 'auto', not {ratio!r}")
    return dims if ratio == 1 else min(dims, max(4, 4 * round(ratio * dims / 4)))


def block_outputs(
    blocks: dict[str, nn.Module], forward: Callable, batch
) -> dict[str, torch.Tensor]:
    """Run a forward pass and record the outputs of the blocks that it reaches.

    Returns:
        dict: By block name, the first entry (1, ...) of the output.
    """
    found: dict[str, torch.Tensor] = {}
    with watched(blocks, lambda name, y: found.update({name: y[:1].clone()})):
        forward(batch)
    return found


@contextmanager
def _checked(sites: dict[str, Site], outputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """Raise an error if the output of a block changes although an equal FFN replaced its FFN."""
    blocks = {site.block_name: site.block for site in sites.values()}

    def compare(name: str, output: torch.Tensor) -> None:
        found, known = (y.detach().double() for y in (output[:1], outputs[name]))
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


class Fit:
    """Fits the part that all passes have reached.

    Args:
        sizes (dict): Sizes after the conversion, by the name of the part.
        costs (dict): Of :func:`count`.
        max_tokens (int): Number of tokens to draw from a batch, at most.
        progress: As for :func:`convert_pretrained`.

    Attributes:
        weights (dict): The weights of the fitted parts so far, by name.
        rows (list): The reports of the parts so far.
    """

    def __init__(self, sizes, costs, max_tokens, progress) -> None:
        self.sizes, self.costs, self.max_tokens = sizes, costs, max_tokens
        self.progress = progress
        self.weights: dict[str, tuple] = {}
        self.rows: list[BlockReport] = []
        self.same_so_far = True

    def __call__(self, part: Pausing, tokens: list) -> Callable:
        """Fit a narrower part, and return the function that takes its place."""
        sizes = self.sizes[part.name]
        data = part.sample(tokens, self.max_tokens, len(self.rows))
        self.same_so_far &= sizes == part.sizes
        row, function = BlockReport(part.name, part.sizes, sizes), part.original
        if not self.same_so_far:
            narrow = part.narrow(data, sizes)
            function, row.after, self.weights[part.name] = (
                narrow.function,
                narrow.sizes,
                narrow.weights,
            )
            row.unexplained, row.ridge, row.warnings = narrow[3:]
            row.changed = True
        row.gmacs, row.narrow_gmacs = (
            self.costs[part.name] * sum(x) / 1e9 for x in (row.before, row.after)
        )
        self.rows.append(row)
        if self.progress is not None:
            self.progress(row, len(self.sizes))
        return function
