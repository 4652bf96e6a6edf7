"""Fits channel-idle FFNs to the pretrained FFNs of a model, block by block."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.models.surgery.idle import (
    PRE_NORM_BLOCKS,
    _ratio_of_each_block,
    find_blocks,
    idle_ffn,
    put,
)
from repa_mm.reparam import check_state_dict, num_active_channels, unwrap
from repa_mm.reparam.ffn.fit import (
    channel_idle_ffn,
    elimination_path,
    ffn_moments,
    fit_ffn,
    norm_as_batch_norm,
    share_active_channels,
)
from repa_mm.reparam.numerics import double


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
        gmacs (float): 1e9 multiply-adds of the FFN for one image, before.
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
        head = (
            'block', 'idle', 'affine alone', 'unexplained', 'ridge', 'training form', 'GMACs',
            'merged',
        )  # fmt: skip
        rows = [
            (
                block.name,
                f'{block.idle_ratio:.3f}',
                f'{block.unexplained_affine:.4f}',
                f'{block.unexplained:.4f}',
                f'{block.ridge:g}',
                'exact' if block.shortfall < 1e-6 else f'misses {block.shortfall:.4f}',
                f'{block.gmacs:.3f}',
                f'{block.merged_gmacs:.3f}',
            )
            for block in self.blocks
        ]
        total = sum(block.gmacs for block in self.blocks)
        merged = sum(block.merged_gmacs for block in self.blocks)
        rows.append(('all FFNs', '', '', '', '', '', f'{total:.3f}', f'{merged:.3f}'))
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = ['  '.join(cell.ljust(w) for cell, w in zip(row, widths)) for row in (head, *rows)]
        if self.differences:
            shares = ', '.join(f'{share:.2%}' for share in self.differences)
            lines.append(f'held out: the outputs differ by {shares} of their variance')
        lines += [f'left as it is: {name}: {why}' for name, why in self.skipped.items()]
        lines += [f'warning: {text}' for text in self.warnings]
        return '\n'.join(line.rstrip() for line in lines)


class _Reached(Exception):
    """A forward pass has come to the block whose inputs are wanted."""


class _Probe(nn.Module):
    """A pretrained FFN in the place of a block's norm and FFN, which notes its tokens.

    Attributes:
        exact (bool): Whether it computes the FFN, or returns its input.
        tokens (torch.Tensor): What it got last.
        output (torch.Tensor): What it returned last.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.ffn = idle_ffn(block, 0.0, dict(type='keep'))
        self.exact = True
        self.tokens = self.output = None

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        self.tokens = self.output = x
        if self.exact:
            ffn = self.ffn
            z = ffn.fc2(ffn.act(ffn.fc1(ffn.norm1(x))))
            self.output = x + (z if ffn.layer_scale is None else z * ffn.layer_scale)
        return self.output


def _leaves(value) -> list:
    """What nested tuples, lists and dicts hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _map(function: Callable, value):
    """Nested tuples, lists and dicts with a function applied to what they hold."""
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_map(function, item) for item in value]
        return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)
    return function(value)


def _move(value, device):
    return _map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, value)


class _Model:
    """A model whose blocks can be run one by one.

    The forward pass of the model is run for its first block and where something else than a block
    lies between two blocks. The blocks before are not computed then: they return zeros, or what
    they are known to return.
    """

    def __init__(self, model: nn.Module, blocks: dict, batches, forward: Callable) -> None:
        self.model, self.forward = model, forward
        if not callable(batches) and iter(batches) is batches:
            raise ValueError(
                'batches is an iterator, which runs once: give a list, or a function that returns '
                'a fresh iterator'
            )
        self.batches = batches if callable(batches) else lambda: batches
        self.device = next(model.parameters()).device
        self.blocks: list[tuple[str, nn.Module]] = []
        # How the inputs of each block follow from the inputs and outputs of the one before.
        self.links: list[list | None] = []
        # Of each block and batch: what it returns, as tensors without values.
        self.shapes: list[list] = []
        self.first: list[float] = []
        self._trace(blocks)

    def _trace(self, blocks: dict) -> None:
        """Find the order of the blocks and what lies between them."""
        none = object()
        batch = next(iter(self.batches()), none)
        if batch is none:
            raise ValueError('there is no image to fit to: batches is empty')
        last: dict = {}
        seen = []

        def before(name, block, args, kwargs):
            if name in seen:
                raise ValueError(
                    f'{name!r} runs more than once in a forward pass: give a forward that runs '
                    'the backbone once'
                )
            inputs, links = _leaves((args, kwargs)), []
            for i, leaf in enumerate(inputs):
                link = None
                if isinstance(leaf, torch.Tensor):
                    for kind in ('outputs', 'inputs'):
                        for j, other in enumerate(last.get(kind, ())):
                            same = other is leaf and leaf._version == last['versions'][id(leaf)]
                            link = link or ((kind, j) if same else None)
                elif last and i < len(last['inputs']) and leaf == last['inputs'][i]:
                    link = ('inputs', i)
                links.append(link)
            is_linked = last and len(inputs) == len(last['inputs']) and None not in links
            self.links.append(links if is_linked else None)
            self.blocks.append((name, block))
            seen.append(name)

        def after(args, kwargs, output):
            last['inputs'], last['outputs'] = _leaves((args, kwargs)), _leaves(output)
            tensors = (v for v in last['inputs'] + last['outputs'] if isinstance(v, torch.Tensor))
            last['versions'] = {id(v): v._version for v in tensors}

        handles = []
        for name, block in blocks.items():
            handles += [
                block.register_forward_pre_hook(
                    lambda m, a, k, name=name, block=block: before(name, block, a, k),
                    with_kwargs=True,
                ),
                block.register_forward_hook(lambda m, a, k, o: after(a, k, o), with_kwargs=True),
            ]
        try:
            self.forward(batch)
        finally:
            for handle in handles:
                handle.remove()
        missing = [name for name in blocks if name not in seen]
        if missing:
            raise ValueError(f'the forward pass does not reach {missing[0]!r}')

    def inputs(self, index: int, outputs: list | None = None) -> list:
        """The inputs of a block for every batch, by the model's forward pass.

        Args:
            index (int): Number of the block.
            outputs (list, optional): What the block before it returns, for every batch.
        """
        calls = []
        current = 0

        def stub(i):
            def run(*args, **kwargs):
                if i == 0:
                    self._check_same(current, args, kwargs)
                if i == index - 1:
                    return _move(outputs[current], self.device)
                return _map(
                    lambda v: (
                        torch.zeros_like(v, device=self.device)
                        if isinstance(v, torch.Tensor)
                        else v
                    ),
                    self.shapes[i][current],
                )

            return run

        def stop(*args, **kwargs):
            if index == 0:
                self._check_same(current, args, kwargs)
            calls.append(_move((args, kwargs), 'cpu'))
            raise _Reached

        for i, (_, block) in enumerate(self.blocks[: index + 1]):
            block.forward = stop if i == index else stub(i)
        try:
            for current, batch in enumerate(self.batches()):
                if outputs is not None and current >= len(outputs):
                    raise ValueError('batches gives more data the second time than the first')
                try:
                    self.forward(batch)
                except _Reached:
                    pass
        finally:
            for _, block in self.blocks[: index + 1]:
                del block.forward
        if outputs is not None and len(calls) < len(outputs):
            raise ValueError(
                'batches gives less data the second time than the first: give a list, or a '
                'function that returns a fresh iterator'
            )
        return calls

    def _check_same(self, current: int, args, kwargs) -> None:
        tensors = [v for v in _leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        total = float(sum(v.double().abs().sum() for v in tensors))
        if current == len(self.first):
            self.first.append(total)
        elif not abs(total - self.first[current]) <= 1e-4 * abs(total):
            raise ValueError(
                'batches gives other data the second time: it has to return the same batches '
                'every time, without random augmentation'
            )

    def next_inputs(self, index: int, calls: list, outputs: list) -> list:
        """The inputs of the block after one, from its own inputs and outputs."""
        links = self.links[index + 1]
        if links is None:
            return self.inputs(index + 1, outputs)
        result = []
        for call, output in zip(calls, outputs):
            sources = dict(inputs=_leaves(call), outputs=_leaves(output))
            leaves = iter([sources[kind][j] for kind, j in links])
            result.append(_map(lambda _, leaves=leaves: next(leaves), call))
        return result


@torch.no_grad()
def convert_pretrained(
    model: nn.Module,
    batches: Iterable | Callable[[], Iterable],
    idle_ratio: float | Sequence[float] = 0.75,
    norm: str = 'keep',
    forward: Callable | None = None,
    inplace: bool = False,
    *,
    allocate: str = 'uniform',
    held_out: Iterable | Callable[[], Iterable] = (),
    select: str = 'eliminate',
    ridge: float | None = None,
    max_tokens: int = 32768,
    skip_unsupported: bool = False,
    resume: dict | None = None,
    progress: Callable[[BlockReport], None] | None = None,
    seed: int = 0,
) -> tuple[nn.Module, ConversionReport]:
    """Fit channel-idle FFNs to the pretrained FFNs of a model, without training or labels.

    One block after the other, in the order of the forward pass, the norm and the FFN become a
    :class:`~repa_mm.reparam.ChannelIdleFFN` that imitates what the block returned before, given
    what the blocks before it return now. Which channels stay active and all weights of the deploy
    form follow from a regression over the tokens of some images, see
    :mod:`repa_mm.reparam.ffn.fit`.

    Args:
        model (nn.Module): A backbone, or a model with one, whose blocks are known, see
            ``PRE_NORM_BLOCKS``.
        batches (Iterable | Callable): What ``forward`` takes: a list, or a function that returns a
            fresh iterator over the same batches each time it is called.
        idle_ratio (float | Sequence[float]): Share of hidden channels that skip the activation, in
            [0, 1]: one for all blocks, or one per block. Defaults to 0.75.
        norm (str): 'keep' leaves the LayerNorms and GroupNorms before the FFNs as they are. 'fold'
            makes them BatchNorms, and everything merges. Defaults to 'keep'.
        forward (Callable, optional): Runs ``model`` on a batch, or the part of it that holds the
            blocks. Defaults to ``model``.
        inplace (bool): Convert the model itself instead of a copy. Defaults to False.
        allocate (str): 'uniform' gives all blocks the same idle ratio. 'by_error' gives more
            active channels to the blocks that gain more by them, at the multiply-adds of the
            uniform ratio. Defaults to 'uniform'.
        held_out (Iterable | Callable): Batches to measure the difference on, as ``batches``.
            Defaults to none.
        select (str): How the active channels are chosen, 'eliminate' or 'score', see
            :func:`~repa_mm.reparam.ffn.fit.fit_ffn`. Defaults to 'eliminate'.
        ridge (float, optional): Strength of the ridge that draws the weights to those of the
            pretrained FFN whose idle channels are replaced by affine functions, relative to the
            mean variance of the tokens. By default it is chosen for each block by
            cross-validation over the images.
        max_tokens (int): Number of tokens that the regression of a block sees, drawn at random
            from all images. Defaults to 32768.
        skip_unsupported (bool): Leave blocks as they are whose FFN cannot become channel-idle,
            instead of raising an error. Defaults to False.
        resume (dict, optional): Blocks that are fitted already, which are not fitted again. The
            dict is filled with each block once it is fitted; what it holds can be saved by
            ``torch.save``, and belongs to these weights, batches and options. Give an empty one
            to start.
        progress (Callable, optional): Called with the report of each block once it is fitted.
        seed (int): Seed of the draw of the tokens. Defaults to 0.

    Returns:
        tuple: The model in its training form, which trains on and merges with
        :func:`~repa_mm.reparameterize`, and a :class:`ConversionReport`.

    Raises:
        ValueError: If there is no batch, no block is known, a block cannot be converted, or its
            activations are not finite. The message names the block, and the model stays as it was.

    Examples:
        >>> converted, report = repa_mm.convert_pretrained(backbone, images)
        >>> print(report)
        >>> deployed = repa_mm.reparameterize(converted)
    """
    if norm not in ('keep', 'fold'):
        raise ValueError(f"norm must be 'keep' or 'fold', but got {norm!r}")
    if allocate not in ('uniform', 'by_error'):
        raise ValueError(f"allocate must be 'uniform' or 'by_error', but got {allocate!r}")
    if allocate == 'by_error' and not isinstance(idle_ratio, (int, float)):
        raise ValueError("with allocate='by_error', idle_ratio is one number: the mean")
    model = unwrap(model)
    report = ConversionReport()
    probes = {}
    blocks = find_blocks(model)
    for name, block in blocks.items():
        try:
            if 'forward' in block.__dict__ or block._forward_hooks or block._forward_pre_hooks:
                raise ValueError(
                    'it has a forward hook or a replaced forward(), which the fit does not know: '
                    'remove it first'
                )
            probes[name] = _Probe(block)
        except ValueError as error:
            if not skip_unsupported:
                raise ValueError(
                    f'cannot make the FFN of {name!r}, a {type(block).__name__}, channel-idle: '
                    f'{error}'
                ) from error
            report.skipped[name] = str(error)
    if not probes:
        raise ValueError(f'no block of {type(model).__name__} can become channel-idle')
    blocks = {name: blocks[name] for name in probes}
    ratios = dict(zip(blocks, _ratio_of_each_block(idle_ratio, 'constant', len(blocks))))
    for ratio in ratios.values():
        num_active_channels(1, ratio)  # checks it
    resume = {} if resume is None else resume
    settings = dict(idle_ratio=idle_ratio, norm=norm, allocate=allocate, blocks=list(blocks))
    if resume.setdefault('settings', settings) != settings:
        raise ValueError('resume holds blocks that were fitted with other settings')

    forward = forward or model
    held_out = held_out if callable(held_out) else list(held_out)
    modes = {module: module.training for module in model.modules()}
    before = {block: (block.__class__, _shallow(block.__dict__)) for block in blocks.values()}
    names = {block: PRE_NORM_BLOCKS[type(block).__name__][1] for block in blocks.values()}
    done = False
    try:
        model.eval()
        expected = _outputs(forward, held_out)
        for name, block in blocks.items():
            put(block, probes[name])
        walk = _Model(model, blocks, batches, forward)
        fit = _Fit(walk, probes, norm, select, ridge, max_tokens, seed)
        if allocate == 'by_error':
            if 'ratios' not in resume:
                resume['ratios'] = fit.share(idle_ratio)
            ratios = resume['ratios']
        forms = fit.run(ratios, report, resume, progress)
        for name, block in blocks.items():
            setattr(block, names[block], forms[name].eval())
        report.differences = _differences(expected, _outputs(forward, held_out))
        for name, block in blocks.items():
            forms[name].train(modes[block])
        for module, mode in modes.items():
            module.training = mode
        converted = model if inplace else copy.deepcopy(model)
        done = True
    finally:
        if not (done and inplace):
            for block, (kind, attributes) in before.items():
                block.__class__ = kind
                # The dicts themselves stay: handles of hooks refer to them.
                block.__dict__.clear()
                for key, (value, content) in attributes.items():
                    if isinstance(value, dict):
                        value.clear()
                        value.update(content)
                    block.__dict__[key] = value
        for module, mode in modes.items():
            module.training = mode
    converted._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
    return converted, report


def _outputs(forward: Callable, batches) -> list[list[torch.Tensor]]:
    """For every batch, the floating-point tensors that ``forward`` returns."""
    result = []
    for batch in batches() if callable(batches) else batches:
        tensors = (v for v in _leaves(forward(batch)) if isinstance(v, torch.Tensor))
        result.append([v.cpu() for v in tensors if v.is_floating_point()])
    return result


def _differences(before: list, after: list) -> list[float]:
    """Of each output, the mean square of its change relative to its variance."""
    result = []
    for a, b in zip(zip(*before), zip(*after)):
        change = sum(float((x - y).double().square().sum()) for x, y in zip(a, b))
        whole = torch.cat([x.flatten().double() for x in a])
        result.append(change / max(float((whole - whole.mean()).square().sum()), 1e-300))
    return result


def _shallow(attributes: dict) -> dict:
    """A module's attributes, with its parameters, buffers and children in dicts of their own."""
    return {k: (v, copy.copy(v) if isinstance(v, dict) else None) for k, v in attributes.items()}


class _Fit:
    """The fits of all blocks, in the order of the forward pass."""

    def __init__(self, walk, probes, norm, select, ridge, max_tokens, seed) -> None:
        self.walk, self.probes, self.norm = walk, probes, norm
        self.select, self.ridge = select, ridge
        self.max_tokens, self.seed = max_tokens, seed

    def share(self, idle_ratio: float) -> dict[str, float]:
        """The idle ratios with the least error at the multiply-adds of a uniform one."""
        walk, calls = self.walk, self.walk.inputs(0)
        paths, weights, costs, most, budget = [], [], [], [], 0.0
        for index, (name, _) in enumerate(walk.blocks):
            ffn = self.probes[name].ffn
            part = self.run_block(index, calls, calls)
            tokens, targets, normalized = part.sample
            parts = ffn_moments(ffn, normalized, double(targets) - double(tokens))
            paths.append(elimination_path(ffn, parts))
            # The next norm divides by the deviation of the tokens.
            weights.append(1 / max(float(targets.double().var(0).sum()), 1e-300))
            costs.append(part.tokens_per_image * ffn.embed_dims)
            hidden = ffn.feedforward_channels
            # More would leave fewer idle channels than the linear path needs.
            most.append(hidden - ffn.embed_dims if hidden > ffn.embed_dims else hidden)
            budget += costs[-1] * num_active_channels(hidden, idle_ratio)
            if index + 1 < len(walk.blocks):
                calls = walk.next_inputs(index, calls, part.outputs)
        counts = share_active_channels(paths, weights, costs, most, budget)
        walk.shapes.clear()
        return {
            name: 1 - count / self.probes[name].ffn.feedforward_channels
            for (name, _), count in zip(walk.blocks, counts)
        }

    def run(self, ratios, report, resume, progress) -> dict[str, nn.Module]:
        """Fit all blocks; each gets what the fitted ones before it return."""
        walk, forms = self.walk, {}
        teacher = student = walk.inputs(0)
        for index, (name, block) in enumerate(walk.blocks):
            part = self.run_block(index, teacher, student)
            if name in resume:
                row, form = BlockReport(**resume[name][0]), copy.deepcopy(resume[name][1])
            else:
                row = BlockReport(name, ratios[name])
                form = self.fit(self.probes[name], part.sample, row)
            merged = form.merge().eval()
            if name not in resume:
                per_image = part.tokens_per_image / 1e9
                row.gmacs = 2 * form.embed_dims * form.feedforward_channels * per_image
                row.merged_gmacs = per_image * sum(
                    m.weight.numel() for m in merged.modules() if isinstance(m, nn.Linear)
                )
                resume[name] = dataclasses.asdict(row), copy.deepcopy(form)
            forms[name] = form
            report.blocks.append(row)
            if progress is not None:
                progress(row)
            if index + 1 == len(walk.blocks):
                break
            if student is teacher and form.num_idle == 0 and form.keeps_norm:
                teacher = student = walk.next_inputs(index, teacher, part.outputs)
                continue
            results = self.outputs_with(block, merged, part.known, student, self.probes[name])
            student = walk.next_inputs(index, student, results)
            teacher = walk.next_inputs(index, teacher, part.outputs)
        return forms

    def run_block(self, index: int, teacher: list, student: list) -> '_Part':
        """Run one block on what it got in the original model, and on what it gets now."""
        name, block = self.walk.blocks[index]
        probe, device = self.probes[name], self.walk.device
        generator = torch.Generator().manual_seed(self.seed + index)
        part = _Part([], [], [], 0.0)
        shapes = []
        count = images = 0
        for n, call in enumerate(teacher):
            args, kwargs = _move(call, device)
            probe.exact = True
            output = block(*args, **kwargs)
            x, y = probe.tokens, probe.output
            part.outputs.append(_move(output, 'cpu'))
            shapes.append(_move(output, 'meta'))
            ends_with_ffn = output is y
            if student is not teacher:
                args, kwargs = _move(student[n], device)
                probe.exact = False
                ends_with_ffn = block(*args, **kwargs) is probe.output
                x = probe.tokens
            if not (x.isfinite().all() and y.isfinite().all()):
                raise ValueError(
                    f'the activations of {name!r} are not finite: its weights or the images are not'
                )
            images += len(x)
            count += x.shape[:-1].numel()
            columns = [v.flatten(0, -2) for v in (x, y, probe.ffn.norm1(x))]
            chosen = torch.randperm(len(columns[0]), generator=generator)
            chosen = chosen[: -(-self.max_tokens // len(teacher))].to(x.device)
            part.sample.append([v[chosen] for v in columns])
            # Where the block goes on after its FFN, it is run again.
            part.known.append(_move(x, 'cpu') if ends_with_ffn else None)
        probe.tokens = probe.output = None
        self.walk.shapes.append(shapes)
        sample = [torch.cat(columns) for columns in zip(*part.sample)]
        return part._replace(sample=sample, tokens_per_image=count / images)

    def fit(self, probe: _Probe, sample: list[torch.Tensor], row: BlockReport) -> nn.Module:
        """The training form that takes the place of a probe."""
        tokens, targets, normalized = sample
        ffn = probe.ffn
        num_active = num_active_channels(ffn.feedforward_channels, row.idle_ratio)
        row.num_tokens = len(tokens)
        if self.norm == 'keep' and num_active == ffn.feedforward_channels:
            return copy.deepcopy(ffn)
        if self.norm == 'fold':
            ffn = norm_as_batch_norm(ffn, tokens, normalized, self.ridge)
            normalized = ffn.norm1(tokens)
        parts = ffn_moments(ffn, normalized, double(targets) - double(tokens))
        fit = fit_ffn(ffn, parts, num_active, self.select, self.ridge)
        row.unexplained, row.unexplained_affine = fit.unexplained, fit.unexplained_affine
        row.shortfall, row.ridge = fit.shortfall, fit.ridge
        unknowns = ffn.embed_dims + num_active + 1
        if len(tokens) < unknowns:
            row.warnings.append(
                f'{len(tokens)} tokens for {unknowns} unknowns per channel: give more images'
            )
        return channel_idle_ffn(ffn, fit, len(tokens))

    def outputs_with(self, block, form, known: list, calls: list, probe: _Probe) -> list:
        """What a block returns with a form in the place of its probe."""
        device = self.walk.device
        ffn_name = next(key for key, child in block.named_children() if child is probe)
        results = []
        setattr(block, ffn_name, form)
        for x, call in zip(known, calls):
            if x is not None:
                results.append(form(x.to(device)).cpu())
            else:
                args, kwargs = _move(call, device)
                results.append(_move(block(*args, **kwargs), 'cpu'))
        setattr(block, ffn_name, probe)
        return results


class _Part(NamedTuple):
    """What a block has got and returned, for all batches.

    Attributes:
        sample (list): Some tokens of the model as it is now, what the original returned for them,
            and the tokens normalized, each of shape (N, C).
        outputs (list): What the original block returned, for every batch.
        known (list): The tokens in front of its FFN now, for every batch; None if the block does
            not end with its FFN.
        tokens_per_image (float): How many tokens an image has.
    """

    sample: list
    outputs: list
    known: list
    tokens_per_image: float
