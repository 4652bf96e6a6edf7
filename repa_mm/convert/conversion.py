"""Narrowing the FFNs and attention heads of a pretrained model."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn

from repa_mm.convert.budget import Axis, spread
from repa_mm.convert.lockstep import Pausing, in_lockstep, watched
from repa_mm.convert.parts import PretrainedAttention, PretrainedFFN
from repa_mm.faster.attention import swap_attention_
from repa_mm.features import differences, has_channels_first, percent, run_batches
from repa_mm.models.sites import AttentionSite, FFNSite, Site, attention_sites, ffn_sites
from repa_mm.reparam import Form
from repa_mm.surgery import unwrap

#: Parts of a block that can be narrowed.
PARTS = 'ffn', 'heads'
# Tokens that a part is fitted to, drawn at random from all images.
MAX_TOKENS = 32768
#: Number of batches from which a budget is spread, where the fits see all. Half of them measure the
#: gains: with eight, their order hardly matters.
FEW = 16
Sizes = dict[str, tuple[int, ...]]


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
    def sizes(self) -> Sizes:
        """New sizes of the parts with new weights, by name: those that a config must have."""
        return {block.name: block.after for block in self.blocks if block.changed}

    @property
    def fraction(self) -> float:
        """Fraction of the multiply-adds of these blocks that is left."""
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


def convert_pretrained(
    model: nn.Module,
    batches: Iterable,
    budget: float = 0.5,
    parts: Sequence[str] = PARTS,
    **options,
) -> tuple[nn.Module, ConversionReport]:
    """Narrow the FFNs and the heads of a pretrained model, without labels (structured pruning).

    The channels of all FFNs and the dimensions of all heads compete for one budget, see
    :mod:`repa_mm.convert.budget`. FFNs keep at least 3 % of their channels, heads at least 4
    dimensions. Parts that cannot be narrowed stay as they are; the report names them.

    Args:
        model (nn.Module): A backbone or a whole model, with blocks of a family in
            :data:`repa_mm.models.FAMILIES`.
        batches (Iterable): As for :func:`convert`.
        budget (float): Share of the multiply-adds of all parts that stays, in (0, 1]. If it is less
            than the least sizes take, the model gets these sizes, with a warning. Defaults to 0.5.
        parts (Sequence[str]): What is narrowed: 'ffn', 'heads' or both. Defaults to both.
        **options: Further arguments of :func:`convert`: ``where``, ``forward``, ``held_out``,
            ``full_size`` and ``progress``.

    Returns:
        tuple: The converted copy of the model, and a :class:`ConversionReport`.

    Raises:
        ValueError: As :func:`convert`, or if the budget is not in (0, 1].

    Examples:
        >>> narrow, report = repa_mm.convert_pretrained(backbone, images, budget=0.5)
        >>> print(report)
    """
    choose = partial(spread_budget, budget=budget)
    result, report = convert(model, batches, choose, parts, **options)
    if report.fraction > budget + 0.005:
        warnings.warn(
            f'the budget is {budget:g}, and {report.fraction:.3f} is the least that these blocks '
            'allow'
        )
    return result, report


@torch.inference_mode(False)
@torch.no_grad()
def convert(
    model: nn.Module,
    batches: Iterable,
    choose: Callable[['Plan'], Sizes],
    parts: Sequence[str] = PARTS,
    *,
    where: str | None = None,
    forward: Callable | None = None,
    held_out: Iterable = (),
    full_size: Iterable = (),
    progress: Callable[[BlockReport, int], None] | None = None,
    ffn: Callable[[FFNSite], PretrainedFFN] = PretrainedFFN,
) -> tuple[nn.Module, ConversionReport]:
    """Narrow parts of a pretrained model to chosen sizes.

    The parts are converted one after the other, in the order of the forward pass. They are fitted
    to the outputs of the pretrained block, given inputs from the blocks that are converted already,
    see :mod:`repa_mm.convert.regression` and :mod:`repa_mm.convert.heads`. The result is an
    ordinary model with narrower layers. All batches pass through the model together, see
    :mod:`repa_mm.convert.lockstep`, so the memory grows with the number of batches.

    Args:
        model (nn.Module): A backbone or a whole model.
        batches (Iterable): Inputs of ``forward``, such as images (B, 3, H, W). With two batches or
            more, cross-validation leaves out whole batches: put images that share something, such
            as crops of one photograph, into one batch. Put images of different sizes into different
            batches, since the parts would be fitted to padding as well.
        choose (Callable): Returns the new sizes of the parts of a :class:`Plan`, by name.
        parts (Sequence[str]): As for :func:`convert_pretrained`.
        where (str, optional): Name of the module whose blocks are converted, as for
            :func:`~repa_mm.models.sites.ffn_sites`. Defaults to all modules except decoder layers.
        forward (Callable, optional): Called with a model and a batch, runs the model or the part of
            it that has the blocks. Defaults to calling the model with the batch.
        held_out (Iterable): Batches to measure the change of the outputs on. Defaults to none.
        full_size (Iterable): Batches to count multiply-adds on, of the sizes at which the model
            will run, if ``batches`` are crops. Defaults to ``batches``.
        progress (Callable, optional): Called with the report of each part once it is fitted, and
            with the number of parts.
        ffn (Callable): Returns the pretrained FFN of a site, which knows how to fit another one.
            Defaults to :class:`~repa_mm.convert.parts.PretrainedFFN`.

    Returns:
        tuple: The converted copy of the model, and a :class:`ConversionReport`.

    Raises:
        ValueError: If there is no batch or no known block, no part can be narrowed, a block does
            not compute what its family says, or activations are not finite. The message names the
            block.
    """
    original = unwrap(model)
    batches, held_out = list(batches), list(held_out)
    if not batches:
        raise ValueError('batches is empty: there is no image to fit to')
    plan = plan_conversion(copy.deepcopy(original), parts, where, ffn)
    plan.model.eval()  # on its own line, since eval() of some backbones returns None
    plan.run = partial(forward, plan.model) if forward else plan.model
    plan.batches = batches
    outputs = block_outputs(plan.blocks, plan.run, batches[0])
    plan.leave([name for name, site in plan.sites.items() if site.block_name not in outputs])
    expected = run_batches(plan.run, held_out)
    plan.put()
    with checked(plan.blocks, outputs, EQUAL):
        in_lockstep(plan.run, batches[:1], lambda *_: None, students=False)
    check_sums(plan, outputs)
    plan.costs = count(plan.run, list(full_size) or spread_out(batches))
    fit = Fit(choose(plan), plan.costs, plan.max_tokens, progress)
    with checked(plan.blocks, outputs, EQUAL):
        in_lockstep(plan.run, batches, fit)
    result = copy.deepcopy(original)
    for name, weights in fit.weights.items():
        plan.parts[name].put(plan.sites[name].in_copy(result), weights)
    modes = {module: module.training for module in result.modules()}
    result.eval()
    after = partial(forward, result) if forward else result
    changes = differences(expected, run_batches(after, held_out), has_channels_first(result))
    for module, mode in modes.items():
        module.training = mode
    return result, ConversionReport(fit.rows, plan.skipped, changes)


@dataclass
class Plan:
    """The parts of a model to narrow.

    Attributes:
        model (nn.Module): The model, which has the pretrained parts once they are :meth:`put`.
        blocks (dict[str, nn.Module]): The blocks of all parts, by name.
        sites (dict[str, Site]): The sites of the parts, by the name of the part: that of the block
            for an FFN, that of the attention for heads.
        parts (dict[str, Pausing]): The pretrained parts.
        skipped (dict[str, str]): Names of the parts that stay as they are, with the reasons.
        run (Callable): Runs the model on a batch.
        batches (list): The batches to fit to.
        costs (dict[str, float]): Of :func:`count`.
    """

    model: nn.Module
    blocks: dict[str, nn.Module] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    parts: dict[str, Pausing] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    run: Callable | None = None
    batches: list = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        """Number of tokens to draw from a batch, at most."""
        return -(-MAX_TOKENS // len(self.batches))

    def leave(self, names: Sequence[str]) -> None:
        """Leave parts that a forward pass does not reach as they are."""
        for name in names:
            self.skipped[name] = 'the forward pass does not reach it'
            del self.sites[name], self.parts[name]
        if not self.parts:
            known = ', '.join(map(repr, self.skipped))
            raise ValueError(f'the forward pass reaches none of the blocks: {known}')

    def put(self) -> None:
        """Put the pretrained parts into the model."""
        for name, site in self.sites.items():
            if isinstance(site, AttentionSite):
                setattr(site.block, site.caller, self.parts[name])
            else:
                site.put(self.parts[name])


def plan_conversion(
    model: nn.Module,
    parts: Sequence[str] = PARTS,
    where: str | None = None,
    ffn: Callable[[FFNSite], PretrainedFFN] = PretrainedFFN,
) -> Plan:
    """Find the parts of a model to narrow, and the reasons why others stay as they are.

    Stock window attention in the model becomes the faster one, if heads are to be narrower.

    Args:
        model (nn.Module): The model.
        parts (Sequence[str]): As for :func:`convert_pretrained`.
        where (str, optional): As for :func:`convert`.
        ffn (Callable): As for :func:`convert`.

    Raises:
        ValueError: If no part can be narrowed, or ``parts`` has an unknown name.
    """
    parts = [parts] if isinstance(parts, str) else parts
    if not parts or set(parts) - set(PARTS):
        raise ValueError(f"parts must be 'ffn', 'heads' or both, but got {parts!r}")
    plan, found = Plan(model), []
    if 'heads' in parts:
        swap_attention_(model)
        sites = attention_sites(model, where or '')
        found += [(site.name, site, PretrainedAttention) for site in sites]
    if 'ffn' in parts:
        sites = ffn_sites(model, where)
        found += [(site.block_name, site, ffn) for site in sites]
    if not found:
        inside = f' in its {where!r}' if where else ''
        raise ValueError(
            f'{type(model).__name__} has no block{inside} of a family with {" or ".join(parts)} in '
            'repa_mm.models.FAMILIES: add one with repa_mm.models.register_family'
        )
    plan.blocks = {site.block_name: site.block for _, site, _ in found}
    uses = Counter(site.module for _, site, _ in found)
    for name, site, kind in found:
        try:
            if isinstance(site.module, Form):
                raise ValueError(f'it has a {site.module.label} instead of an ordinary one')
            if uses[site.module] > 1:
                raise ValueError('blocks share it, and a fit is to the inputs of one block')
            plan.parts[name], plan.sites[name] = kind(site), site
        except ValueError as error:
            plan.skipped[name] = str(error)
    if not plan.parts:
        name, why = next(iter(plan.skipped.items()))
        raise ValueError(f'nothing of {type(model).__name__} can be narrowed: {name!r}: {why}')
    return plan


def spread_budget(plan: Plan, budget: float) -> Sizes:
    """Choose the sizes of all parts, see :mod:`repa_mm.convert.budget`.

    Args:
        plan (Plan): The parts, which are in the model.
        budget (float): Share of the multiply-adds of all parts that stays.

    Raises:
        ValueError: If the budget is not in (0, 1].
    """
    if not 0 < budget <= 1:
        raise ValueError(f'budget must be a share in (0, 1], but got {budget!r}')
    axes: dict[str, list[Axis]] = {}

    def meet(part: Pausing, tokens: list) -> None:
        axes[part.name] = part.axes(part.sample(tokens, plan.max_tokens, len(axes)))
        for axis in axes[part.name]:
            axis.cost = plan.costs[part.name]

    in_lockstep(plan.run, spread_out(plan.batches), meet, students=False)
    few = spread_out(plan.batches, FEW // 2)
    expected = run_batches(plan.run, few)
    for name, found in axes.items():
        for axis in found:
            probe = axis.probe()
            if axis.errors[probe] <= 0:
                continue  # nothing is lost at any size
            with plan.parts[name].replaced(axis.fitted(axis.sizes[probe])):
                changes = differences(expected, run_batches(plan.run, few))
            axis.gain = sum(changes) / axis.errors[probe]
    every = [axis for found in axes.values() for axis in found]
    total = sum(axis.cost * axis.sizes[-1] for axis in every)
    multiples = [4 if len(found) > 1 else 1 for found in axes.values() for _ in found]
    sizes = iter(spread(every, budget * total, multiples))
    return {name: tuple(next(sizes) for _ in found) for name, found in axes.items()}


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


def block_outputs(blocks: dict[str, nn.Module], run: Callable, batch) -> dict[str, torch.Tensor]:
    """Run a forward pass and record the outputs of the blocks that it reaches.

    Returns:
        dict: By block name, the first entry (1, ...) of the output.
    """
    found: dict[str, torch.Tensor] = {}
    with watched(blocks, lambda name, y: found.update({name: y[:1].clone()})):
        run(batch)
    return found


EQUAL = (
    'its FFN as the OpenMMLab block of this name does: its output changes by {:.1%} when an equal '
    'FFN takes its place. The forward pass may also be random, or depend on state that other '
    'images have left in the model. Rename its class, or give another module in where'
)
SUM = (
    'the sum of its FFN and of the input of its FFN alone, as its family says (shortcut={}): its '
    'output changes by {:.1%} although the sum stays the same. Register a family that says what '
    'the block computes'
)


@contextmanager
def checked(
    blocks: dict[str, nn.Module], outputs: dict[str, torch.Tensor], message: str
) -> Iterator[None]:
    """Raise an error if the output of a block is not the given one.

    Args:
        blocks (dict): The blocks, by name.
        outputs (dict): Of :func:`block_outputs`.
        message (str): How the block does not use its FFN, with a place for the change.
    """

    def compare(name: str, output: torch.Tensor) -> None:
        found, known = (y.detach().double() for y in (output[:1], outputs[name]))
        change = float((found - known).norm() / known.norm().clamp(min=1e-300))
        if change > (0.05 if output.element_size() < 4 else 1e-3):
            kind = type(blocks[name]).__name__
            raise ValueError(f'{name!r}, a {kind}, does not use {message.format(change)}')

    with watched(blocks, compare):
        yield


def check_sums(plan: Plan, outputs: dict[str, torch.Tensor]) -> None:
    """Check that blocks use the sum of shortcut and FFN alone, if the targets of fits assume it.

    The target of an FFN makes up for what its input has lost, see :meth:`PretrainedFFN.target`: so
    a block must not use the input otherwise, nor scale what the FFN returns. In a second pass the
    inputs of all blocks are others, and each FFN returns what leads to the sum of the first pass.

    Args:
        plan (Plan): The parts, which are in the model.
        outputs (dict): Of :func:`block_outputs`, for the first batch.

    Raises:
        ValueError: If the output of a block is another one then; names the block.
    """
    parts = [p for p in plan.parts.values() if isinstance(p, PretrainedFFN) and p.is_residual]
    sums: dict[str, torch.Tensor] = {}

    def note(part: PretrainedFFN, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        y = part.original(x, *args, **kwargs)
        # A copy: what follows the block may change tensors in place.
        sums[part.name] = y.clone() if part.ffn.shortcut else x + y
        return y

    def same_sum(part: PretrainedFFN, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return part.whole(x, sums[part.name] - x)

    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part.replaced(partial(note, part)))
        plan.run(plan.batches[0])
    with ExitStack() as stack:
        for part in parts:
            block = plan.blocks[part.name]
            handle = block.register_forward_pre_hook(_disturbed, with_kwargs=True)
            stack.callback(handle.remove)
            message = SUM.replace('{}', str(part.ffn.shortcut), 1)
            stack.enter_context(checked({part.name: block}, outputs, message))
            stack.enter_context(part.replaced(partial(same_sum, part)))
        plan.run(plan.batches[0])


def _disturbed(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Change the first tensor that a block is called with: its tokens."""
    values = [*args, *kwargs.values()]
    for i, x in enumerate(values):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            values[i] = x + x.flip(-1)
            break
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :]))


class Fit:
    """Fits the part that all passes have reached.

    Args:
        sizes (dict): Sizes after the conversion, by the name of the part.
        costs (dict): Of :func:`count`.
        max_tokens (int): Number of tokens to draw from a batch, at most.
        progress: As for :func:`convert`.

    Attributes:
        weights (dict): The weights of the fitted parts so far, by name.
        rows (list): The reports of the parts so far.
    """

    def __init__(self, sizes, costs, max_tokens, progress) -> None:
        self.sizes, self.costs, self.max_tokens = sizes, costs, max_tokens
        self.progress = progress
        self.weights: dict[str, tuple] = {}
        self.rows: list[BlockReport] = []

    def __call__(self, part: Pausing, tokens: list) -> Callable:
        """Fit a narrower part, and return the function that takes its place."""
        sizes = self.sizes[part.name]
        data = part.sample(tokens, self.max_tokens, len(self.rows))
        row, function = BlockReport(part.name, part.sizes, sizes), part.original
        # Up to the first narrower part there is nothing to make up for.
        row.changed = sizes != part.sizes or any(row.changed for row in self.rows)
        if row.changed:
            fitted = part.fit(data, sizes)
            function, self.weights[part.name] = fitted.function, fitted.weights
            row.unexplained, row.ridge, row.warnings = fitted[2:]
        row.gmacs, row.narrow_gmacs = (
            self.costs[part.name] * sum(x) / 1e9 for x in (row.before, row.after)
        )
        self.rows.append(row)
        if self.progress is not None:
            self.progress(row, len(self.sizes))
        return function
