"""Narrowing the FFNs and attention heads of a pretrained model."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS

from repa_mm.apis.features import (
    check_same,
    differences,
    head_inputs,
    relative_error,
    run_batches,
    tensors,
)
from repa_mm.apis.images import evenly
from repa_mm.apis.models import deploy_
from repa_mm.convert.budget import Axis, allocate
from repa_mm.convert.changed_config import converted_config
from repa_mm.convert.check import check_block, tolerance
from repa_mm.convert.conversion_report import BlockReport, Clock, ConversionReport, Sizes
from repa_mm.convert.lockstep import Pausing, in_lockstep
from repa_mm.convert.parts import FittedPart, PretrainedAttention, PretrainedFFN
from repa_mm.convert.training_form import IdleFFN
from repa_mm.faster import rewrite_
from repa_mm.models.sites import FFNSite, attention_sites, ffn_sites
from repa_mm.reparam import Form, check_state_dict, has_deploy_form
from repa_mm.surgery import copied, unwrap

#: Parts of a model that can be narrowed.
PARTS = 'ffn', 'heads'
# Tokens that a part is fitted to, drawn at random from all images.
MAX_TOKENS = 32768
#: Numbers of batches for the errors of a budget (fits see all batches) and for the gains: with one
#: or eight for the gains, the outputs of a narrow RetinaNet changed by the same, within 4 %.
AXES_BATCHES, GAIN_BATCHES = 16, 4


def convert_pretrained(
    model: nn.Module,
    batches: Iterable,
    budget: float | None = None,
    parts: Sequence[str] | None = None,
    held_out: Iterable = (),
    progress: Callable[[BlockReport, int, float], None] | None = None,
    **options,
) -> tuple[nn.Module, ConversionReport]:
    """Narrow the FFNs and the heads of a pretrained model, without labels (structured pruning).

    The channels of all FFNs and the dimensions of all heads compete for one budget, see
    :mod:`repa_mm.convert.budget`. FFNs keep at least 3 % of their channels, heads at least 4
    dimensions. Parts that cannot be narrowed stay as they are; the report names them.

    With an ``idle_ratio``, the FFNs become channel-idle instead. The result is a training form that
    computes nearly what the model computes, and that trains and merges as any other. Either is a
    copy, and comes with a :class:`ConversionReport`.

    Args:
        model (nn.Module): A backbone or a whole model, with blocks of a family in
            :data:`repa_mm.models.FAMILIES`.
        batches (Iterable): As for :class:`~repa_mm.convert.Conversion`.
        budget (float, optional): Share of the multiply-adds of all parts that stays, in (0, 1]. If
            it is less than the least sizes take, the model gets these sizes, with a warning.
            Defaults to 0.5.
        parts (Sequence[str], optional): What is narrowed: 'ffn', 'heads', or both. Defaults to
            both.
        held_out (Iterable): Batches to measure the change of the outputs on. Defaults to none.
        progress (Callable, optional): Called with the report of each part once it is fitted, the
            number of parts, and about how many seconds are left.
        **options: ``idle_ratio`` and others of :class:`~repa_mm.convert.Conversion`.

    Raises:
        ValueError: As :class:`~repa_mm.convert.Conversion`, or if the budget is not in (0, 1].

    Examples:
        >>> narrow, report = repa_mm.convert_pretrained(backbone, images, budget=0.5)
        >>> print(report)
    """
    conversion = Conversion(model, batches, parts, **options)
    return conversion.fit(conversion.sizes(budget), held_out, progress)


class Conversion:
    """Fits narrower parts to those of a pretrained model, for one budget or for several.

    The parts are converted in the order of the forward pass. Each is fitted to the outputs of the
    pretrained one, given inputs from the parts that are converted already, see
    :mod:`repa_mm.convert.regression` and :mod:`repa_mm.convert.heads`. The result is an ordinary
    model with narrower layers. All batches pass through the model together, see
    :mod:`repa_mm.convert.lockstep`, so the memory grows with the number of batches.

    A model with its config in ``cfg``, such as one of :func:`~repa_mm.apis.open_model`, becomes
    one with the config of the converted model there, and with exact parts.

    Args:
        model (nn.Module): A backbone or a whole model, which stays as it is.
        batches (Iterable): Inputs of ``forward``, such as images (B, 3, H, W). With two batches or
            more, cross-validation leaves out whole batches: put images that share something, such
            as crops of one photograph, into one batch. Put images of different sizes into different
            batches, since the parts would be fitted to padding as well.
        parts (Sequence[str], optional): As for :func:`convert_pretrained`. Defaults to all, or to
            FFNs with an ``idle_ratio``.
        idle_ratio (float, optional): Instead of narrower parts, fit channel-idle FFNs: the share of
            hidden channels that skip the activation, at least as many as an FFN has inputs. FFNs
            keep the norms of their blocks. Those with fewer channels, or with a convolution inside,
            stay as they are. The report counts the multiply-adds of merged FFNs.
        where (str, optional): Name of the module whose blocks are converted, as for
            :func:`~repa_mm.models.sites.ffn_sites`. Defaults to all modules except decoder layers.
        forward (Callable, optional): Called with a model and a batch, runs the model or the part of
            it that has the blocks. Defaults to calling the model with the batch, or, for a batch of
            a model's data preprocessor, to :func:`~repa_mm.apis.features.head_inputs`.
        full_size (Iterable): Batches to count multiply-adds on, of the sizes at which the model
            will run, if ``batches`` are crops. Defaults to ``batches``.

    Attributes:
        parts (dict[str, Pausing]): The pretrained parts, by the name of the block for an FFN, by
            that of the attention for heads.
        skipped (dict[str, str]): Names of the parts that stay as they are, with the reasons.
        costs (dict[str, tuple[float, ...]]): Multiply-adds of one unit of each size of each part,
            for one image.

    Raises:
        ValueError: If there is no batch or no known block, no part can be narrowed, a block does
            not compute what its family says, or there are ``parts`` and an ``idle_ratio``. The
            message names the block.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        batches: Iterable,
        parts: Sequence[str] | None = None,
        *,
        idle_ratio: float | None = None,
        where: str | None = None,
        forward: Callable | None = None,
        full_size: Iterable = (),
    ) -> None:
        if parts is not None and idle_ratio is not None:
            raise ValueError('idle_ratio applies to all FFNs: leave parts out')
        self.original, self.batches = unwrap(model), list(batches)
        if not self.batches:
            raise ValueError('batches is empty: there is no image to fit to')
        self.forward, self.where, self.idle_ratio = forward or _run, where, idle_ratio
        weights = {id(x): x for x in (*self.original.parameters(), *self.original.buffers())}
        stock, self.model = copied(self.original, weights), copied(self.original)
        self._rewritten = rewrite_(self.model, 'train')
        for model in (stock, self.model):
            model.eval()  # on its own line, since eval() of some backbones returns None
        self.parts, self.skipped = find_parts(self.model, parts, where, idle_ratio)
        # Tokens to draw from a batch, at most.
        self.max_tokens = -(-MAX_TOKENS // len(self.batches))
        self.outputs = self._first_pass()
        if tolerance(self.outputs[0]) < 0.01:  # in half precision, rounding is as large
            check_same(self.model, stock, self.batches[0], 'a faster model', forward=self.forward)
        for part in self.parts.values():
            part.put(part.site)
        self.costs = self._count(list(full_size) or evenly(AXES_BATCHES, self.batches))

    def run(self, batch):
        """Run the copy of the model on a batch."""
        return self.forward(self.model, batch)

    def sizes(self, budget: float | None = None) -> Sizes:
        """Choose the sizes of all parts, see :mod:`repa_mm.convert.budget`.

        ``budget`` is as for :func:`convert_pretrained`; an idle ratio leaves no choice.

        Raises:
            ValueError: If the budget is not in (0, 1], or there is an idle ratio, too.
        """
        if self.idle_ratio is not None:
            if budget is not None:
                raise ValueError('idle_ratio sets all sizes: leave budget out')
            return {name: part.idle_sizes for name, part in self.parts.items()}
        budget = 0.5 if budget is None else budget
        if not 0 < budget <= 1:
            raise ValueError(f'budget must be a share in (0, 1], but got {budget!r}')
        every = [axis for axes in self.axes.values() for axis in axes]
        total = sum(axis.cost * axis.sizes[-1] for axis in every)
        found = allocate(every, budget * total)
        left = sum(axis.cost * size for axis, size in zip(every, found)) / total
        if left > budget + 0.005:
            warnings.warn(
                f'the least sizes take {left:.3f} of the multiply-adds, the budget is {budget:g}'
            )
        sizes = iter(found)
        return {name: tuple(next(sizes) for _ in axes) for name, axes in self.axes.items()}

    @cached_property
    @torch.inference_mode(False)
    @torch.no_grad()
    def axes(self) -> dict[str, list[Axis]]:
        """The axes of each part with their errors, costs and gains, for any budget."""
        few, axes = evenly(GAIN_BATCHES, self.batches), {}
        expected = run_batches(self.run, few)
        for part, tokens in self._meetings(evenly(AXES_BATCHES, self.batches), students=False):
            found = part.axes(part.sample(tokens, self.max_tokens, len(axes)))
            axes[part.name] = [axis for axis, _ in found]
            for (axis, function), axis.cost in zip(found, self.costs[part.name]):
                error = axis.errors[axis.probe()]
                with part.replaced(function):
                    changes = differences(expected, run_batches(self.run, few))
                axis.gain = sum(changes) / error if error > 0 else 0.0  # nothing is ever lost
        return axes

    @torch.inference_mode(False)
    @torch.no_grad()
    def fit(
        self,
        sizes: Sizes,
        held_out: Iterable = (),
        progress: Callable[[BlockReport, int, float], None] | None = None,
    ) -> tuple[nn.Module, ConversionReport]:
        """Fit all parts to sizes, by name; :func:`convert_pretrained` explains the rest.

        Raises:
            ValueError: If activations are not finite, a forward pass depends on others, or the
                result does not compute what was fitted.
        """
        cfg = self._config(sizes)
        if cfg is not None:
            MODELS.build(cfg.model)  # an error should show before the long fit
        report, fits, clock = ConversionReport(skipped=dict(self.skipped)), {}, Clock(self.parts)
        for row, fit in self._fits(sizes, clock):
            report.blocks.append(row)
            if fit is not None:
                fits[row.name] = fit
            if progress is not None:
                progress(row, len(self.parts), clock.left(row.name))
        result = copied(self.original)
        if cfg is not None:
            rewrite_(result, 'train')
            result.cfg = self._config(report.sizes)
        for name, fit in fits.items():
            site = self.parts[name].site
            fit.put(site.at(result.get_submodule(site.block_name)))
        if any(isinstance(module, Form) for module in result.modules()):
            result._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
        held_out, tested = list(held_out), copied(result)
        tested.eval()
        self._check_fitted(tested)
        after = run_batches(partial(self.forward, tested), held_out)
        report.differences = differences(run_batches(self.run, held_out), after)
        return result, report

    def _fits(self, sizes: Sizes, clock: Clock) -> Iterator[tuple[BlockReport, FittedPart | None]]:
        """Fit one part after the other, each given those before."""
        with ExitStack() as fitted:
            for i, (part, tokens) in enumerate(self._meetings(self.batches)):
                clock.start()
                row = BlockReport(part.name, part.sizes, sizes[part.name], self.costs[part.name])
                fit = None
                if row.after != row.before:
                    fit = part.fit(part.sample(tokens, self.max_tokens, i), row.after)
                    row.unexplained = fit.unexplained
                    row.constant_heads = fit.constant_heads
                    fitted.enter_context(part.replaced(fit.function))
                yield row, fit

    def _check_fitted(self, model: nn.Module) -> None:
        """Check that a converted model computes what its first batch computed during the fit."""
        (found,) = run_batches(partial(self.forward, model), self.batches[:1])
        change, most = relative_error(found, *self._student), tolerance(self.outputs[0])
        if most < 0.01 and not change <= most:  # in half precision, rounding is as large
            raise ValueError(
                'the converted model does not compute what was fitted: its outputs on the first '
                f'batch differ by {change:.1%}'
            )

    def _config(self, sizes: Sizes) -> Config | None:
        """Return the config of the model with these sizes, or None if the original has none."""
        cfg = copy.deepcopy(getattr(self.original, 'cfg', None))
        if not isinstance(cfg, Config):
            return None
        if has_deploy_form(self.original):
            deploy_(cfg.model)
        how = self.where, self.idle_ratio, self._rewritten
        return converted_config(cfg, self.original, sizes, *how)

    def _meetings(self, batches: Sequence, students: bool = True) -> Generator:
        """Yield as :func:`in_lockstep`, and check that the passes do not disturb each other.

        Raises:
            ValueError: If the outputs of the first batch are not those that it has alone.
        """
        found, *self._student = map(tensors, (yield from in_lockstep(self.run, batches, students)))
        if batches[0] is self.batches[0] and found:
            change = relative_error((x.cpu() for x in found), self.outputs)
            if not change <= tolerance(found[0]):
                raise ValueError(
                    f'the outputs of the first batch change by {change:.1%} if other batches run '
                    'at the same time: the forward pass is random, or leaves something in the '
                    'model that another block uses. Give another module in where'
                )

    def _count(self, batches: Sequence) -> dict[str, tuple[float, ...]]:
        """Return ``costs``, the mean over the images of the batches."""
        # By the batches, since the rows of a block may be windows, patches or tokens.
        num_images = sum(len(next(iter(tensors(batch)), [batch])) for batch in batches)
        costs = {}
        for part, tokens in self._meetings(batches, students=False):
            every = zip(*(part.macs(*x) for x, _ in tokens))
            costs[part.name] = tuple(sum(macs) / num_images for macs in every)
        return costs

    def _first_pass(self) -> list[torch.Tensor]:
        """Return the outputs of the first batch; check the blocks it reaches, skip the others."""
        blocks: dict[nn.Module, list[Pausing]] = {}
        for part in self.parts.values():
            blocks.setdefault(part.site.block, []).append(part)
        reached = set()

        def check(block: nn.Module, args: tuple, kwargs: dict) -> None:
            if block in blocks and block not in reached:  # not a copy of a block
                reached.add(block)
                check_block(block, blocks[block], args, kwargs)

        hooks = [block.register_forward_pre_hook(check, with_kwargs=True) for block in blocks]
        (outputs,) = run_batches(self.run, self.batches[:1])
        for hook in hooks:
            hook.remove()
        if not outputs:
            raise ValueError(
                'forward returns no tensor of floats, and the parts are compared by the change of '
                'these: let it return features instead of results'
            )
        for name, part in list(self.parts.items()):
            if part.site.block not in reached:
                self.skipped[name] = 'the forward pass does not reach it'
                del self.parts[name]
        if not self.parts:
            name, why = next(iter(self.skipped.items()))
            kind = type(self.original).__name__
            raise ValueError(f'nothing of {kind} can be narrowed: {name!r}: {why}')
        return outputs


def find_parts(
    model: nn.Module,
    parts: Sequence[str] | None = None,
    where: str | None = None,
    idle_ratio: float | None = None,
) -> tuple[dict[str, Pausing], dict[str, str]]:
    """Return the parts of a model to narrow, and the reasons why others stay, by name."""
    if parts is None:
        parts = PARTS if idle_ratio is None else ['ffn']
    parts = [parts] if isinstance(parts, str) else parts
    if not parts or set(parts) - set(PARTS):
        raise ValueError(f'parts must be some of {", ".join(map(repr, PARTS))}, but got {parts!r}')
    sites = attention_sites(model, where or '') if 'heads' in parts else []
    sites += ffn_sites(model, where) if 'ffn' in parts else []
    if not sites:
        inside = f' in its {where!r}' if where else ''
        raise ValueError(
            f'{type(model).__name__} has no block{inside} of a family with {" or ".join(parts)} in '
            'repa_mm.models.FAMILIES: add one with repa_mm.models.register_family'
        )
    ffn = PretrainedFFN if idle_ratio is None else partial(IdleFFN, idle_ratio=idle_ratio)
    layers = {site: [m for m in site.module.modules() if [*m.parameters(False)]] for site in sites}
    uses = Counter(layer for site in sites for layer in layers[site])
    pretrained, skipped = {}, {}
    for site in sites:
        is_ffn = isinstance(site, FFNSite)
        name, kind = (site.block_name, ffn) if is_ffn else (site.name, PretrainedAttention)
        if isinstance(site.module, Form):
            skipped[name] = f'it has a {site.module.label} instead of an ordinary one'
        elif any(uses[layer] > 1 for layer in layers[site]):
            skipped[name] = 'several blocks share it; only a module with one caller can be fitted'
        else:
            try:
                pretrained[name] = kind(site)
            except ValueError as error:
                skipped[name] = str(error)
    return pretrained, skipped


def _run(model: nn.Module, batch):
    """Run a model on a batch, up to the heads if the batch is from a data preprocessor."""
    is_preprocessed = isinstance(batch, dict) and hasattr(model, 'extract_feat')
    return head_inputs(model, batch) if is_preprocessed else model(batch)
