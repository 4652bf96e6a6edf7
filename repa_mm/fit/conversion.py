"""Fits channel-idle FFNs to the pretrained FFNs of a model, block by block."""

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.fit.regression import (
    channel_idle_ffn,
    elimination_path,
    empty_ffn,
    ffn_moments,
    fit_ffn,
    norm_as_batch_norm,
    share_active_channels,
)
from repa_mm.fit.walk import BlockWalk, copied, move, tensors, version
from repa_mm.models.surgery.idle import (
    PRE_NORM_BLOCKS,
    find_blocks,
    idle_ffn,
    put,
    ratio_of_each_block,
)
from repa_mm.reparam import check_state_dict, num_active_channels, unwrap
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
            shares = percent(self.differences)
            lines.append(f'on held-out images the outputs differ by {shares} of their variance')
        lines += [f'left as it is: {name}: {why}' for name, why in self.skipped.items()]
        lines += [f'warning: {text}' for text in self.warnings]
        return '\n'.join(line.rstrip() for line in lines)


class _Probe(nn.Module):
    """A pretrained FFN in the place of a block's norm and FFN, which notes its tokens.

    Attributes:
        exact (bool): Whether it computes the FFN, or returns its input.
        tokens (torch.Tensor): A copy of what it got last.
        output (torch.Tensor): A copy of what it returned last.

    Raises:
        ValueError: If the FFN of the block cannot become channel-idle.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.ffn = idle_ffn(block, 0.0, dict(type='keep'))
        self.start(exact=True)
        _check_elementwise(self.ffn.act, self.ffn.fc1.weight)

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        # Copies: the block may change its tokens in place, before or afterwards.
        self.tokens, output = x.clone(), x
        if self.exact:
            ffn = self.ffn
            z = ffn.fc2(ffn.act(ffn.fc1(ffn.norm1(x))))
            output = x + (z if ffn.layer_scale is None else z * ffn.layer_scale)
        self.output = output.clone()
        self._returned.append((output, version(output)))
        return output

    def start(self, exact: bool) -> None:
        """Before the block runs, or where nothing is needed any more."""
        self.exact = exact
        self.tokens = self.output = None
        self._returned: list[tuple[torch.Tensor, int | None]] = []

    def ends(self, output) -> bool:
        """Whether what the block has returned is what its FFN has returned.

        Raises:
            ValueError: If the block has not run its FFN just once.
        """
        if len(self._returned) != 1:
            raise ValueError(f'it runs its FFN {len(self._returned)} times, and not once')
        own, number = self._returned.pop()
        return output is own and number is not None and number == version(own)


def _check_elementwise(act: nn.Module, like: torch.Tensor) -> None:
    """Check that an activation takes each channel alone, and all in the same way."""
    hidden = torch.linspace(-3, 3, 32).to(like).reshape(4, 8)
    try:
        same = torch.allclose(act(hidden)[:, ::3], act(hidden[:, ::3]), atol=1e-3)
    except RuntimeError:
        same = False
    if not same:
        raise ValueError(
            f'its activation, a {type(act).__name__}, mixes channels, or treats them differently'
        )


@torch.inference_mode(False)
@torch.no_grad()
def convert_pretrained(
    model: nn.Module,
    batches: Iterable | Callable[[], Iterable],
    idle_ratio: float | Sequence[float | None] = 0.75,
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
    :mod:`repa_mm.fit.regression`.

    Args:
        model (nn.Module): A backbone, or a model with one, whose blocks are known, see
            ``PRE_NORM_BLOCKS``.
        batches (Iterable | Callable): What ``forward`` takes: a list, or a function that returns a
            fresh iterator over the same batches each time it is called.
        idle_ratio (float | Sequence): Share of hidden channels that skip the activation, in [0, 1]:
            one for all blocks, or one per known block, of which None leaves its block as it is.
            Defaults to 0.75.
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
            :func:`~repa_mm.fit.regression.fit_ffn`. Defaults to 'eliminate'.
        ridge (float, optional): Strength of the ridge that draws the weights to those of the
            pretrained FFN whose idle channels are replaced by affine functions, relative to the
            mean variance of the tokens. By default it is chosen for each block by
            cross-validation over the images.
        max_tokens (int): Number of tokens that the regression of a block sees, drawn at random
            from all images. Defaults to 32768.
        skip_unsupported (bool): Leave blocks as they are whose FFN cannot become channel-idle,
            instead of raising an error. Defaults to False.
        resume (dict, optional): Blocks that are fitted already, which are not fitted again. The
            dict is filled with each block once it is fitted. It holds tensors and numbers, for
            ``torch.save``, and belongs to these weights, batches and options. Give an empty one
            to start.
        progress (Callable, optional): Called with the report of each block once it is fitted.
        seed (int): Seed of the draw of the tokens. Defaults to 0.

    Returns:
        tuple: The model in its training form, which trains on and merges with
        :func:`~repa_mm.reparameterize`, and a :class:`ConversionReport`.

    Raises:
        ValueError: If there is no batch, no block is known, a block cannot be converted (one of a
            user's own class may have the name of a known one, and compute something else), or its
            activations are not finite. The message names the block, and the model stays as it was.

    Examples:
        >>> converted, report = repa_mm.convert_pretrained(backbone, images)
        >>> print(report)
        >>> deployed = repa_mm.reparameterize(converted)
    """
    for option, value, values in (
        ('norm', norm, ('keep', 'fold')),
        ('allocate', allocate, ('uniform', 'by_error')),
        ('select', select, ('eliminate', 'score')),
    ):
        if value not in values:
            raise ValueError(f'{option} must be one of {values}, but got {value!r}')
    if ridge is not None and not 0 <= ridge < math.inf:
        raise ValueError(f'ridge must be a number of at least 0, but got {ridge!r}')
    if max_tokens < 1:
        raise ValueError(f'max_tokens must be at least 1, but got {max_tokens!r}')
    for option, value in (('batches', batches), ('held_out', held_out)):
        if isinstance(value, torch.Tensor):
            raise ValueError(f'{option} must be a list of batches: give [images] for one batch')
    if allocate == 'by_error' and not isinstance(idle_ratio, (int, float)):
        raise ValueError(
            "with allocate='by_error', idle_ratio is one number, whose multiply-adds the blocks "
            f'share, but got {idle_ratio!r}'
        )
    model = unwrap(model)
    blocks = find_blocks(model)
    ratios = dict(zip(blocks, ratio_of_each_block(idle_ratio, 'constant', len(blocks))))
    for ratio in ratios.values():
        num_active_channels(1, 0.0 if ratio is None else ratio)  # checks it
    probes, skipped = make_probes(blocks, ratios, skip_unsupported)
    if not probes:
        raise ValueError(
            f'no block of {type(model).__name__} can become channel-idle: '
            + '; '.join(f'{name!r}: {why}' for name, why in list(skipped.items())[:1])
        )
    report = ConversionReport(skipped=skipped)
    blocks = {name: blocks[name] for name in probes}
    resume = {} if resume is None else resume
    settings = dict(
        idle_ratio=idle_ratio, norm=norm, allocate=allocate, select=select, ridge=ridge,
        max_tokens=max_tokens, seed=seed, blocks=list(blocks), weights=checksum(model),
    )  # fmt: skip
    known = resume.setdefault('settings', settings)
    changed = [key for key, value in settings.items() if known.get(key) != value]
    if changed:
        raise ValueError(
            f'cannot resume: {", ".join(changed)} differ from those of the interrupted '
            'conversion; give the same ones, or start anew without resuming'
        )

    forward = forward or model
    held_out = held_out if callable(held_out) else list(held_out)
    names = {block: PRE_NORM_BLOCKS[type(block).__name__][1] for block in blocks.values()}
    with _restored(model, blocks.values()) as (modes, keep):
        expected = run_batches(forward, held_out)
        walk = BlockWalk(model, blocks, batches, forward, resume.get('images'))
        for name, block in blocks.items():
            put(block, probes[name])
        walk.check()
        for probe in probes.values():
            probe.start(exact=True)
        fit = _Fit(walk, probes, norm, select, ridge, max_tokens, seed)
        if allocate == 'by_error':
            if 'ratios' not in resume:
                resume['ratios'] = fit.share(idle_ratio)
            ratios = resume['ratios']
        forms = fit.run(ratios, report, resume, progress)
        for name, block in blocks.items():
            setattr(block, names[block], forms[name].eval())
        report.differences = differences(expected, run_batches(forward, held_out))
        for name, block in blocks.items():
            forms[name].train(modes[block])
        for module, mode in modes.items():
            module.training = mode
        converted = model if inplace else copy.deepcopy(model)
        if inplace:
            keep()
    converted._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
    return converted, report


def make_probes(
    blocks: dict, ratios: dict, skip_unsupported: bool
) -> tuple[dict[str, _Probe], dict[str, str]]:
    """A probe for every block that is to be converted, and why the others are not.

    Args:
        blocks (dict): The known blocks by name, see
            :func:`~repa_mm.models.surgery.idle.find_blocks`.
        ratios (dict): The idle ratio of each, None for those to leave out.
        skip_unsupported (bool): Whether others that cannot be converted are left out.

    Raises:
        ValueError: If a block cannot be converted and is not to be left out.
    """
    probes, skipped = {}, {}
    for name, block in blocks.items():
        if ratios[name] is None:
            skipped[name] = 'idle_ratio leaves it out'
            continue
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
            skipped[name] = str(error)
    return probes, skipped


def checksum(model: nn.Module) -> int:
    """What tells the weights of a model from others."""
    result = 0
    # Modules may have other states than tensors.
    for value in filter(torch.is_tensor, model.state_dict().values()):
        flat = value.detach().cpu().contiguous().reshape(-1)
        result = zlib.crc32(flat.view(torch.uint8).numpy(), result)
    return result


@contextmanager
def _restored(
    model: nn.Module, blocks: Iterable[nn.Module]
) -> Iterator[tuple[dict[nn.Module, bool], Callable]]:
    """Put a model in eval mode for a while, and give its blocks back what they were.

    Yields:
        tuple: The modes that all modules had before, and a function that lets the blocks stay as
        they have become.
    """
    modes = {module: module.training for module in model.modules()}
    before = {
        block: (
            block.__class__,
            {k: (v, copy.copy(v) if isinstance(v, dict) else None) for k, v in vars(block).items()},
        )
        for block in blocks
    }
    try:
        model.eval()
        yield modes, before.clear
    finally:
        for block, (kind, attributes) in before.items():
            block.__class__ = kind
            # The dicts of parameters, children, hooks themselves stay: handles refer to them.
            block.__dict__.clear()
            for key, (value, content) in attributes.items():
                if isinstance(value, dict):
                    value.clear()
                    value.update(content)
                block.__dict__[key] = value
        for module, mode in modes.items():
            module.training = mode


def run_batches(forward: Callable, batches) -> list[list[torch.Tensor]]:
    """For every batch, the floating-point tensors that ``forward`` returns."""
    return [
        [v.cpu() for v in tensors(forward(batch)) if v.is_floating_point()]
        for batch in (batches() if callable(batches) else batches)
    ]


def percent(values: Iterable[float]) -> str:
    """Shares with two digits each."""
    return ', '.join(f'{100 * value:.{2 if value < 1 else 3}g} %' for value in values)


def differences(before: list, after: list) -> list[float]:
    """Of each output, the mean square of its change relative to the variance of its channels.

    A single vector has none, and its change is relative to its mean square.
    """

    def rows(x: torch.Tensor) -> torch.Tensor:
        x = x.movedim(1, -1) if x.ndim == 4 else x
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


class _Fit:
    """The fits of all blocks, in the order of the forward pass.

    Two sets of calls go from block to block: those of the original model (the *teacher*), and
    those of the model whose earlier blocks are fitted (the *student*). They are one list up to the
    first block that changes.

    Args:
        walk (BlockWalk): The blocks, with probes in them.
        probes (dict): The probe of each block.
        norm, select, ridge, max_tokens, seed: As for :func:`convert_pretrained`.
    """

    def __init__(self, walk, probes, norm, select, ridge, max_tokens, seed) -> None:
        self.walk, self.probes, self.norm = walk, probes, norm
        self.select, self.ridge = select, ridge
        self.max_tokens, self.seed = max_tokens, seed

    def share(self, idle_ratio: float) -> dict[str, float]:
        """The idle ratios with the least error at the multiply-adds of a uniform one."""
        walk, history = self.walk, []
        calls = walk.calls(history)
        paths, weights, costs, most, budget = [], [], [], [], 0.0
        for index, (name, _) in enumerate(walk.blocks):
            ffn = self.probes[name].ffn
            part = self.run_block(index, calls, calls)
            tokens, targets, normalized = part.sample
            parts = ffn_moments(ffn, normalized, double(targets) - double(tokens))
            paths.append(elimination_path(ffn, parts))
            # Relative to the variance of the tokens: the next norm divides by their deviation.
            weights.append(1 / max(float(targets.double().var(0).sum()), 1e-300))
            costs.append(part.tokens_per_image * ffn.embed_dims)
            hidden = ffn.feedforward_channels
            uniform = num_active_channels(hidden, idle_ratio)
            # More would leave fewer idle channels than the linear path needs.
            exact = hidden - ffn.embed_dims if hidden > ffn.embed_dims else hidden
            most.append(max(uniform, exact))
            budget += costs[-1] * uniform
            if index + 1 < len(walk.blocks):
                history = walk.remember(history, part.outputs)
                calls = walk.next_calls(calls, history)
        counts = share_active_channels(paths, weights, costs, most, budget)
        walk.shapes.clear()
        return {
            name: 1 - count / self.probes[name].ffn.feedforward_channels
            for (name, _), count in zip(walk.blocks, counts)
        }

    def run(self, ratios, report, resume, progress) -> dict[str, nn.Module]:
        """Fit all blocks; each gets what the fitted ones before it return."""
        walk, forms = self.walk, {}
        past = past_now = []
        teacher = student = walk.calls(past)
        resume['images'] = walk.sums
        for index, (name, block) in enumerate(walk.blocks):
            part = self.run_block(index, teacher, student)
            probe = self.probes[name]
            if name in resume:
                row, form = BlockReport(**resume[name][0]), self.restore(probe, *resume[name])
            else:
                row = BlockReport(name, ratios[name])
                form = self.fit(probe, part.sample, row)
            merged = form.merge().eval()
            if name not in resume:
                per_image = part.tokens_per_image / 1e9
                row.gmacs = 2 * form.embed_dims * form.feedforward_channels * per_image
                row.merged_gmacs = per_image * sum(
                    m.weight.numel() for m in merged.modules() if isinstance(m, nn.Linear)
                )
                weights = {key: value.clone() for key, value in form.state_dict().items()}
                resume[name] = dataclasses.asdict(row), weights
            forms[name] = form
            report.blocks.append(row)
            if progress is not None:
                progress(row)
            if index + 1 == len(walk.blocks):
                break
            if student is teacher and form.num_idle == 0 and form.keeps_norm:
                past = past_now = walk.remember(past, part.outputs)
                teacher = student = walk.next_calls(teacher, past)
                continue
            results = self.outputs_with(block, merged, part.known, student, probe)
            past_now = walk.remember(past_now, results)
            student = walk.next_calls(student, past_now)
            past = walk.remember(past, part.outputs)
            teacher = walk.next_calls(teacher, past)
        return forms

    def run_block(self, index: int, teacher: list, student: list) -> _Part:
        """Run one block on what it got in the original model, and on what it gets now."""
        name, block = self.walk.blocks[index]
        probe, device = self.probes[name], self.walk.device
        generator = torch.Generator().manual_seed(self.seed + index)
        part = _Part([], [], [], 0.0)
        shapes = []
        count = images = 0
        for n, call in enumerate(teacher):
            args, kwargs = copied(move(call, device))
            probe.start(exact=True)
            output = block(*args, **kwargs)
            part.outputs.append(move(output, 'cpu'))
            shapes.append(move(output, 'meta'))
            try:
                ends_with_ffn = probe.ends(output)
            except ValueError as error:
                raise ValueError(f'cannot fit the FFN of {name!r}: {error}') from error
            x, y = probe.tokens, probe.output
            if student is not teacher:
                args, kwargs = copied(move(student[n], device))
                probe.start(exact=False)
                ends_with_ffn = probe.ends(block(*args, **kwargs))
                x = probe.tokens
            if not (x.isfinite().all() and y.isfinite().all()):
                raise ValueError(
                    f'the activations of {name!r} are not finite: its weights or the images are not'
                )
            images += len(x) / self.walk.rows_per_image[name]
            count += x.shape[:-1].numel()
            columns = [v.flatten(0, -2) for v in (x, y, probe.ffn.norm1(x))]
            chosen = torch.randperm(len(columns[0]), generator=generator)
            # In the order of the images, by which the tokens are split for cross-validation.
            chosen = chosen[: -(-self.max_tokens // len(teacher))].sort().values.to(x.device)
            part.sample.append([v[chosen] for v in columns])
            # Where the block goes on after its FFN, it is run again.
            part.known.append(move(x, 'cpu') if ends_with_ffn else None)
        probe.start(exact=True)
        self.walk.shapes.append(shapes)
        sample = [torch.cat(columns) for columns in zip(*part.sample)]
        return part._replace(sample=sample, tokens_per_image=count / images)

    def fit(self, probe: _Probe, sample: list[torch.Tensor], row: BlockReport) -> nn.Module:
        """The training form that takes the place of a probe; its figures go into the report."""
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
        if not targets.var(0).any():
            row.warnings.append('all tokens are the same: give other images')
        return channel_idle_ffn(ffn, fit, len(tokens))

    def restore(self, probe: _Probe, row: dict, weights: dict) -> nn.Module:
        """The training form that was fitted earlier."""
        ffn = probe.ffn
        num_active = num_active_channels(ffn.feedforward_channels, row['idle_ratio'])
        if self.norm == 'keep' and num_active == ffn.feedforward_channels:
            return copy.deepcopy(ffn)
        form = empty_ffn(ffn, num_active, self.norm == 'keep')
        form.load_state_dict(weights)
        return form

    def outputs_with(self, block, form, known: list, calls: list, probe: _Probe) -> list:
        """What a block returns with a form in the place of its probe, for every batch."""
        device = self.walk.device
        ffn_name = next(key for key, child in block.named_children() if child is probe)
        results = []
        setattr(block, ffn_name, form)
        for x, call in zip(known, calls):
            if x is not None:
                results.append(form(x.to(device)).cpu())
            else:
                args, kwargs = copied(move(call, device))
                results.append(move(block(*args, **kwargs), 'cpu'))
        setattr(block, ffn_name, probe)
        return results
