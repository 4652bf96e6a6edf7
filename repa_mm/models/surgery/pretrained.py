"""Fits channel-idle FFNs to the pretrained FFNs of a model, block by block."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

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
from repa_mm.reparam.ffn.fit import channel_idle_ffn, ffn_moments, fit_ffn, norm_as_batch_norm
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
    """

    blocks: list[BlockReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

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
        batch = next(iter(self.batches()), None)
        if batch is None:
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
    select: str = 'eliminate',
    ridge: float | None = None,
    max_tokens: int = 32768,
    skip_unsupported: bool = False,
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
    _ratio_of_each_block(idle_ratio, 'constant', len(blocks))

    ratios = _ratio_of_each_block(idle_ratio, 'constant', len(blocks))
    for ratio in ratios:
        num_active_channels(1, ratio)  # checks it
    modes = {module: module.training for module in model.modules()}
    before = {block: (block.__class__, _shallow(block.__dict__)) for block in blocks.values()}
    names = {block: PRE_NORM_BLOCKS[type(block).__name__][1] for block in blocks.values()}
    done = False
    try:
        for name, block in blocks.items():
            put(block, probes[name])
        model.eval()
        walk = _Model(model, blocks, batches, forward or model)
        forms = _fit_blocks(
            walk, probes, dict(zip(blocks, ratios)), norm, select, ridge, max_tokens, seed, report,
            progress,
        )  # fmt: skip
        for name, block in blocks.items():
            setattr(block, names[block], forms[name].train(modes[block]))
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


def _shallow(attributes: dict) -> dict:
    """A module's attributes, with its parameters, buffers and children in dicts of their own."""
    return {k: (v, copy.copy(v) if isinstance(v, dict) else None) for k, v in attributes.items()}


def _fit_blocks(
    walk, probes, ratios, norm, select, ridge, max_tokens, seed, report, progress
) -> dict[str, nn.Module]:
    """Fit all blocks in order; each gets what the fitted ones before it return."""
    generator = torch.Generator().manual_seed(seed)
    forms = {}
    teacher = walk.inputs(0)
    student = teacher
    for index, (name, block) in enumerate(walk.blocks):
        probe = probes[name]
        row = BlockReport(name, ratios[name])
        sample, known, outputs, shapes = [], [], [], []
        count = images = 0
        for n, call in enumerate(teacher):
            args, kwargs = _move(call, walk.device)
            probe.exact = True
            output = block(*args, **kwargs)
            x, y = probe.tokens, probe.output
            outputs.append(_move(output, 'cpu'))
            shapes.append(_move(output, 'meta'))
            ends_with_ffn = output is y
            if student is not teacher:
                args, kwargs = _move(student[n], walk.device)
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
            chosen = chosen[: -(-max_tokens // len(teacher))].to(x.device)
            sample.append([v[chosen] for v in columns])
            known.append(_move(probe.tokens, 'cpu') if ends_with_ffn else None)
        walk.shapes.append(shapes)
        form = _fit_block(probe, [torch.cat(v) for v in zip(*sample)], norm, select, ridge, row)
        forms[name] = form
        per_image = count / images / 1e9
        dims, hidden = form.embed_dims, form.feedforward_channels
        row.gmacs = 2 * dims * hidden * per_image
        merged = form.merge().eval()
        row.merged_gmacs = per_image * sum(
            m.weight.numel() for m in merged.modules() if isinstance(m, nn.Linear)
        )
        report.blocks.append(row)
        if progress is not None:
            progress(row)
        if index + 1 == len(walk.blocks):
            break
        if student is teacher and form.num_idle == 0 and norm == 'keep':
            teacher = student = walk.next_inputs(index, teacher, outputs)
            continue
        results = []
        for n, x in enumerate(known):
            if x is not None:
                results.append(merged(x.to(walk.device)).cpu())
                continue
            args, kwargs = _move(student[n], walk.device)
            ffn_name = next(key for key, m in block.named_children() if m is probe)
            setattr(block, ffn_name, merged)
            results.append(_move(block(*args, **kwargs), 'cpu'))
            setattr(block, ffn_name, probe)
        student = walk.next_inputs(index, student, results)
        teacher = walk.next_inputs(index, teacher, outputs)
    return forms


def _fit_block(probe, sample, norm, select, ridge, row) -> nn.Module:
    """The training form that takes the place of a probe."""
    tokens, targets, normalized = sample
    ffn = probe.ffn
    num_active = num_active_channels(ffn.feedforward_channels, row.idle_ratio)
    row.num_tokens = len(tokens)
    if norm == 'keep' and num_active == ffn.feedforward_channels:
        return copy.deepcopy(ffn)
    if norm == 'fold':
        ffn = norm_as_batch_norm(ffn, tokens, normalized, ridge)
        normalized = ffn.norm1(tokens)
    moments = ffn_moments(ffn, normalized, double(targets) - double(tokens))
    fit = fit_ffn(ffn, moments, num_active, select, ridge)
    row.unexplained, row.unexplained_affine = fit.unexplained, fit.unexplained_affine
    row.shortfall, row.ridge = fit.shortfall, fit.ridge
    unknowns = ffn.embed_dims + num_active + 1
    if len(tokens) < unknowns:
        row.warnings.append(
            f'{len(tokens)} tokens for {unknowns} unknowns per channel: give more images'
        )
    return channel_idle_ffn(ffn, fit, len(tokens))
