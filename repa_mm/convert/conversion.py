"""Narrowing the FFNs and attention heads of a pretrained model."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import torch
import torch.nn as nn

from repa_mm.convert.budget import Axis, spread
from repa_mm.convert.check import check_block, tolerance
from repa_mm.convert.conversion_report import BlockReport, ConversionReport, Sizes
from repa_mm.convert.lockstep import Pausing, in_lockstep
from repa_mm.convert.maps import PretrainedMaps
from repa_mm.convert.parts import PretrainedAttention, PretrainedFFN
from repa_mm.convert.training_form import IdleFFN
from repa_mm.faster.attention import swap_attention_
from repa_mm.features import differences, relative_error, run_batches, tensors
from repa_mm.models.sites import attention_sites, ffn_sites, maps_sites
from repa_mm.reparam import Form, check_state_dict
from repa_mm.surgery import copied, unwrap

# Parts of a model that can be narrowed, and what takes their places.
KINDS = dict(ffn=PretrainedFFN, heads=PretrainedAttention, convs=PretrainedMaps)
PARTS = tuple(KINDS)
#: Those that are if nothing is said.
DEFAULT_PARTS = PARTS[:2]
# Tokens that a part is fitted to, drawn at random from all images.
MAX_TOKENS = 32768
#: Number of batches from which a budget is spread, where the fits see all, and of those on which
#: gains are measured: with one or with eight, a narrow RetinaNet changed by the same to 4 %.
FEW, FOR_GAINS = 16, 4


def convert_pretrained(
    model: nn.Module,
    batches: Iterable,
    budget: float = 0.5,
    parts: Sequence[str] = DEFAULT_PARTS,
    held_out: Iterable = (),
    progress: Callable[[BlockReport, int], None] | None = None,
    *,
    where: str | None = None,
    forward: Callable | None = None,
    full_size: Iterable = (),
) -> tuple[nn.Module, ConversionReport]:
    """Narrow the FFNs and the heads of a pretrained model, without labels (structured pruning).

    The channels of all FFNs and the dimensions of all heads compete for one budget, see
    :mod:`repa_mm.convert.budget`. FFNs keep at least 3 % of their channels, heads at least 4
    dimensions. Parts that cannot be narrowed stay as they are; the report names them.

    Args:
        model (nn.Module): A backbone or a whole model, with blocks of a family in
            :data:`repa_mm.models.FAMILIES`.
        batches (Iterable): As for :class:`~repa_mm.convert.Conversion`.
        budget (float): Share of the multiply-adds of all parts that stays, in (0, 1]. If it is less
            than the least sizes take, the model gets these sizes, with a warning. Defaults to 0.5.
        parts (Sequence[str]): What is narrowed: 'ffn', 'heads', and 'convs', the maps of an
            UperNet's head, see :mod:`repa_mm.convert.maps`. For these, ``forward`` must run the
            head. Defaults to FFNs and heads.
        held_out (Iterable): Batches to measure the change of the outputs on. Defaults to none.
        progress (Callable, optional): Called with the report of each part once it is fitted, and
            with the number of parts.
        where (str, optional): As for :class:`~repa_mm.convert.Conversion`.
        forward (Callable, optional): As for :class:`~repa_mm.convert.Conversion`.
        full_size (Iterable): As for :class:`~repa_mm.convert.Conversion`.

    Returns:
        tuple: The converted copy of the model, and a :class:`ConversionReport`.

    Raises:
        ValueError: As :class:`~repa_mm.convert.Conversion`, or if the budget is not in
            (0, 1].

    Examples:
        >>> narrow, report = repa_mm.convert_pretrained(backbone, images, budget=0.5)
        >>> print(report)
    """
    conversion = Conversion(
        model, batches, parts, where=where, forward=forward, full_size=full_size
    )
    return conversion.fit(conversion.sizes(budget), held_out, progress)


def fit_channel_idle(
    model: nn.Module,
    batches: Iterable,
    idle_ratio: float = 0.75,
    held_out: Iterable = (),
    progress: Callable[[BlockReport, int], None] | None = None,
    *,
    where: str | None = None,
    forward: Callable | None = None,
) -> tuple[nn.Module, ConversionReport]:
    """Make the FFNs of a pretrained model channel-idle, fitted to what they computed.

    The result is a training form that computes nearly what the model computes, and that trains and
    merges as any other. FFNs keep the norms of their blocks.

    Args:
        model (nn.Module): As for :func:`~repa_mm.convert_pretrained`.
        batches (Iterable): As for :class:`~repa_mm.convert.Conversion`.
        idle_ratio (float): Share of hidden channels that skip the activation. Defaults to 0.75.
        held_out (Iterable): As for :func:`~repa_mm.convert_pretrained`.
        progress (Callable, optional): As for :func:`~repa_mm.convert_pretrained`.
        where (str, optional): As for :func:`~repa_mm.convert_pretrained`.
        forward (Callable, optional): As for :func:`~repa_mm.convert_pretrained`.

    Returns:
        tuple: The copy of the model with :class:`~repa_mm.reparam.ChannelIdleFFN`, and the report.

    Raises:
        ValueError: As :class:`~repa_mm.convert.Conversion`.
    """
    conversion = IdleConversion(model, batches, idle_ratio, where=where, forward=forward)
    return conversion.fit(conversion.sizes(), held_out, progress)


class Conversion:
    """Fits narrower parts to those of a pretrained model, of one budget or of several.

    The parts are converted one after the other, in the order of the forward pass. They are fitted
    to the outputs of the pretrained block, given inputs from the blocks that are converted already,
    see :mod:`repa_mm.convert.regression` and :mod:`repa_mm.convert.heads`. The result is an
    ordinary model with narrower layers. All batches pass through the model together, see
    :mod:`repa_mm.convert.lockstep`, so the memory grows with the number of batches.

    Args:
        model (nn.Module): A backbone or a whole model, which stays as it is.
        batches (Iterable): Inputs of ``forward``, such as images (B, 3, H, W). With two batches or
            more, cross-validation leaves out whole batches: put images that share something, such
            as crops of one photograph, into one batch. Put images of different sizes into different
            batches, since the parts would be fitted to padding as well.
        parts (Sequence[str]): As for :func:`convert_pretrained`.
        where (str, optional): Name of the module whose blocks are converted, as for
            :func:`~repa_mm.models.sites.ffn_sites`. Defaults to all modules except decoder layers.
        forward (Callable, optional): Called with a model and a batch, runs the model or the part of
            it that has the blocks. Defaults to calling the model with the batch.
        full_size (Iterable): Batches to count multiply-adds on, of the sizes at which the model
            will run, if ``batches`` are crops. Defaults to ``batches``.

    Attributes:
        model (nn.Module): A copy of the model, which computes with the parts.
        parts (dict[str, Pausing]): The pretrained parts, by the name of the block for an FFN, by
            that of the attention for heads.
        skipped (dict[str, str]): Names of the parts that stay as they are, with the reasons.
        costs (dict[str, tuple[float, ...]]): Multiply-adds of one channel or dimension of each
            part, for one image, for each of its sizes.

    Raises:
        ValueError: If there is no batch or no known block, no part can be narrowed, or a block does
            not compute what its family says. The message names the block.
    """

    kinds: dict[str, Callable] = KINDS

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        batches: Iterable,
        parts: Sequence[str] = DEFAULT_PARTS,
        *,
        where: str | None = None,
        forward: Callable | None = None,
        full_size: Iterable = (),
    ) -> None:
        self.original, self.batches = unwrap(model), list(batches)
        if not self.batches:
            raise ValueError('batches is empty: there is no image to fit to')
        self.forward = forward or (lambda model, batch: model(batch))
        self.model = copied(self.original)
        self.model.eval()  # on its own line, since eval() of some backbones returns None
        self.parts, self.skipped = find_parts(self.model, parts, where, self.kinds)
        self.outputs = self._first_pass()
        for part in self.parts.values():
            part.put(part.site)
        self.costs = self._count(list(full_size) or spread_out(self.batches))

    def run(self, batch):
        """Run the copy of the model on a batch."""
        return self.forward(self.model, batch)

    @property
    def max_tokens(self) -> int:
        """Number of tokens to draw from a batch, at most."""
        return -(-MAX_TOKENS // len(self.batches))

    def sizes(self, budget: float = 1.0) -> Sizes:
        """Choose the sizes of all parts, see :mod:`repa_mm.convert.budget`.

        Args:
            budget (float): Share of the multiply-adds of all parts that stays. Defaults to 1.

        Raises:
            ValueError: If the budget is not in (0, 1].
        """
        if not 0 < budget <= 1:
            raise ValueError(f'budget must be a share in (0, 1], but got {budget!r}')
        every = [axis for axes in self.axes.values() for axis in axes]
        total = sum(axis.cost * axis.sizes[-1] for axis in every)
        found = spread(every, budget * total)
        left = sum(axis.cost * size for axis, size in zip(every, found)) / total
        if left > budget + 0.005:
            warnings.warn(
                f'the budget is {budget:g}, and {left:.3f} is the least that these blocks allow'
            )
        sizes = iter(found)
        return {name: tuple(next(sizes) for _ in axes) for name, axes in self.axes.items()}

    @cached_property
    @torch.inference_mode(False)
    @torch.no_grad()
    def axes(self) -> dict[str, list[Axis]]:
        """The axes of each part with their errors, costs and gains, for any budget."""
        few, axes = spread_out(self.batches, FOR_GAINS), {}
        expected = run_batches(self.run, few)

        def meet(part: Pausing, tokens: list) -> None:
            found = part.axes(part.sample(tokens, self.max_tokens, len(axes)))
            axes[part.name] = [axis for axis, _ in found]
            for (axis, function), axis.cost in zip(found, self.costs[part.name]):
                error = axis.errors[axis.probe()]
                with part.replaced(function):
                    changes = differences(expected, run_batches(self.run, few))
                axis.gain = sum(changes) / error if error > 0 else 0.0  # nothing is ever lost

        self._in_lockstep(spread_out(self.batches), meet, students=False)
        return axes

    @torch.inference_mode(False)
    @torch.no_grad()
    def fit(
        self,
        sizes: Sizes,
        held_out: Iterable = (),
        progress: Callable[[BlockReport, int], None] | None = None,
    ) -> tuple[nn.Module, ConversionReport]:
        """Fit all parts to sizes.

        Args:
            sizes (dict): New sizes of all parts, by name.
            held_out (Iterable): As for :func:`convert_pretrained`.
            progress (Callable, optional): As for :func:`convert_pretrained`.

        Returns:
            tuple: The converted copy of the model, and a :class:`ConversionReport`.

        Raises:
            ValueError: If activations are not finite, or a forward pass depends on others.
        """
        report, fits = ConversionReport(skipped=dict(self.skipped)), {}

        def meet(part: Pausing, tokens: list) -> Callable:
            row = BlockReport(part.name, part.sizes, sizes[part.name], self.costs[part.name])
            function = part.original
            # Up to the first narrower part there is nothing to make up for.
            row.changed = row.after != row.before or bool(fits)
            if row.changed:
                data = part.sample(tokens, self.max_tokens, len(report.blocks))
                fit = fits[part.name] = part.fit(data, row.after)
                function, row.unexplained = fit.function, fit.unexplained
                row.constant_heads = fit.constant_heads
            report.blocks.append(row)
            if progress is not None:
                progress(row, len(self.parts))
            return function

        self._in_lockstep(self.batches, meet)
        result = copied(self.original)
        for name, fit in fits.items():
            site = self.parts[name].site
            fit.put(site.at(result.get_submodule(site.block_name)))
        if any(isinstance(module, Form) for module in result.modules()):
            result._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
        held_out = list(held_out)
        modes = {module: module.training for module in result.modules()}
        result.eval()
        after = run_batches(partial(self.forward, result), held_out)
        report.differences = differences(run_batches(self.run, held_out), after)
        for module, mode in modes.items():
            module.training = mode
        return result, report

    def _in_lockstep(self, batches: Sequence, meet: Callable, students: bool = True) -> None:
        """Call :func:`in_lockstep`, and check that the passes do not disturb each other.

        Raises:
            ValueError: If the outputs of the first batch are not those that it has alone.
        """
        found = tensors(in_lockstep(self.run, batches, meet, students))
        if batches[0] is self.batches[0] and found:
            change = relative_error((x.cpu() for x in found), self.outputs)
            if change > tolerance(found[0]):
                raise ValueError(
                    f'the outputs of the first batch change by {change:.1%} if other batches run '
                    'at the same time: the forward pass is random, or leaves something in the '
                    'model that another block uses. Give another module in where'
                )

    def _count(self, batches: Sequence) -> dict[str, tuple[float, ...]]:
        """Return the multiply-adds of each part for one image and one channel of each of its sizes.

        Args:
            batches (Sequence): The batches. Multiply-adds are the mean over their images.
        """
        costs: dict[str, list[float]] = {}
        rows: list[list[int]] = []

        def meet(part: Pausing, tokens: list) -> None:
            rows.append([len(x) for (x, *_), _ in tokens])
            costs[part.name] = [sum(macs) for macs in zip(*(part.macs(*x) for x, _ in tokens))]

        self._in_lockstep(batches, meet, students=False)
        # Rows are images, or their windows or patches.
        num_images = sum(map(min, zip(*rows)))
        return {name: tuple(c / num_images for c in values) for name, values in costs.items()}

    def _first_pass(self) -> list[torch.Tensor]:
        """Run the first batch, check the blocks that it reaches, and leave the parts of others.

        Returns:
            list[torch.Tensor]: The outputs.
        """
        blocks: dict[nn.Module, list[Pausing]] = {}
        reached, hooks = set(), []
        for part in self.parts.values():
            if part.site.family:
                blocks.setdefault(part.site.block, []).append(part)
                continue
            # Segmentors call a head's forward() itself, which runs no hooks of the head.
            mark = partial(lambda block, *_: reached.add(block), part.site.block)
            hooks.append(part.site.module.register_forward_pre_hook(mark))

        def check(block: nn.Module, args: tuple, kwargs: dict) -> None:
            if block in blocks and block not in reached:  # not a copy of a block
                reached.add(block)
                check_block(block, blocks[block], args, kwargs)

        hooks += [block.register_forward_pre_hook(check, with_kwargs=True) for block in blocks]
        (outputs,) = run_batches(self.run, self.batches[:1])
        for hook in hooks:
            hook.remove()
        if not outputs:
            raise ValueError(
                'forward returns no tensor of floats, by whose change the parts would be compared: '
                'let it return features, and not results'
            )
        left = [name for name, part in self.parts.items() if part.site.block not in reached]
        self.skipped |= dict.fromkeys(left, 'the forward pass does not reach it')
        for name in left:
            del self.parts[name]
        if not self.parts:
            known = ', '.join(map(repr, self.skipped))
            raise ValueError(f'the forward pass reaches none of the blocks: {known}')
        return outputs


class IdleConversion(Conversion):
    """Fits channel-idle FFNs to those of a pretrained model, see :func:`fit_channel_idle`.

    The idle ratio says their sizes, so that there is no budget. Heads stay as they are.
    """

    def __init__(self, model: nn.Module, batches: Iterable, idle_ratio: float, **options) -> None:
        self.idle_ratio = idle_ratio
        self.kinds = dict(ffn=partial(IdleFFN, idle_ratio=idle_ratio))
        super().__init__(model, batches, ['ffn'], **options)

    def sizes(self) -> Sizes:
        """Return the sizes of all parts."""
        return {name: part.idle_sizes for name, part in self.parts.items()}


def find_parts(
    model: nn.Module,
    parts: Sequence[str] = DEFAULT_PARTS,
    where: str | None = None,
    kinds: dict[str, Callable] = KINDS,
) -> tuple[dict[str, Pausing], dict[str, str]]:
    """Find the parts of a model to narrow, and the reasons why others stay as they are.

    Stock window attention in the model becomes the faster one, if heads are to be narrower.

    Args:
        model (nn.Module): The model.
        parts (Sequence[str]): As for :func:`convert_pretrained`.
        where (str, optional): As for :class:`Conversion`.
        kinds (dict[str, Callable]): What takes the place of each part.

    Returns:
        tuple: The parts, and the reasons, by name.

    Raises:
        ValueError: If no part can be narrowed, or ``parts`` has an unknown name.
    """
    parts = [parts] if isinstance(parts, str) else parts
    if not parts or set(parts) - set(PARTS):
        raise ValueError(f'parts must be some of {", ".join(map(repr, PARTS))}, but got {parts!r}')
    found = []
    if 'heads' in parts:
        swap_attention_(model)
        sites = attention_sites(model, where or '')
        found += [(site.name, site, kinds['heads']) for site in sites]
    if 'ffn' in parts:
        found += [(site.block_name, site, kinds['ffn']) for site in ffn_sites(model, where)]
    if 'convs' in parts:
        found += [(site.name, site, kinds['convs']) for site in maps_sites(model, where or '')]
    if not found:
        inside = f' in its {where!r}' if where else ''
        raise ValueError(
            f'{type(model).__name__} has no block{inside} of a family with {" or ".join(parts)} in '
            'repa_mm.models.FAMILIES: add one with repa_mm.models.register_family'
        )
    uses = Counter(site.module for _, site, _ in found)
    pretrained, skipped = {}, {}
    for name, site, kind in found:
        try:
            if isinstance(site.module, Form):
                raise ValueError(f'it has a {site.module.label} instead of an ordinary one')
            if uses[site.module] > 1:
                raise ValueError('blocks share it, and a fit is to the inputs of one block')
            pretrained[name] = kind(site)
        except ValueError as error:
            skipped[name] = str(error)
    if not pretrained:
        name, why = next(iter(skipped.items()))
        raise ValueError(f'nothing of {type(model).__name__} can be narrowed: {name!r}: {why}')
    return pretrained, skipped


def spread_out(batches: Sequence, number: int = FEW) -> list:
    """Return some of the batches, the first included, at most ``number``."""
    return list(batches[:: -(-len(batches) // number)])
