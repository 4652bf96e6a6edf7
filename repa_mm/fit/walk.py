"""Runs the blocks of a model one by one, each on all batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn


class _Reached(Exception):
    """A forward pass has come to the block whose inputs are wanted."""


def leaves(value: Any) -> list:
    """What nested tuples, lists and dicts hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def map_leaves(function: Callable, value: Any) -> Any:
    """Nested tuples, lists and dicts with a function applied to what they hold."""
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)
    return function(value)


def move(value: Any, device: torch.device | str) -> Any:
    """Nested tuples, lists and dicts with their tensors on a device."""
    return map_leaves(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, value)


def copied(value: Any) -> Any:
    """Nested tuples, lists and dicts with copies of their tensors."""
    return map_leaves(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, value)


def _same(call: Any, other: Any) -> bool:
    """Whether two calls have the same tensors, up to rounding errors."""
    pairs = list(zip(tensors(call), tensors(other)))
    # Whoever runs the blocks tells of values that are not finite.
    return len(tensors(call)) == len(tensors(other)) and all(
        a.shape == b.shape
        and not float((a.double() - b.double()).norm()) > 1e-3 * float(b.double().norm())
        for a, b in pairs
    )


def _sum(value: torch.Tensor) -> float:
    """The magnitudes in a tensor, those of later images with more weight."""
    rows = value.detach().double().abs().reshape(len(value), -1).sum(1) if value.ndim else value
    return float((rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum())


def version(tensor: torch.Tensor) -> int | None:
    """Changes when a tensor is changed in place; None of those that do not tell."""
    return None if tensor.is_inference() else tensor._version


class _Trace(NamedTuple):
    """What the blocks of a model do with one batch.

    Attributes:
        batch (Any): The batch.
        links (dict): By the name of each block, in the order of the forward pass, its entry of
            ``BlockWalk.links``.
        calls (dict): What each block gets that has no links.
        outputs (dict): What each block returns.
    """

    batch: Any
    links: dict[str, list | None]
    calls: dict[str, tuple]
    outputs: dict[str, Any]


class BlockWalk:
    """The blocks of a model in the order of its forward pass, and what each of them gets.

    What a block gets is its *call*, a pair of positional and keyword arguments, for every batch.
    Where one block follows directly on another, the call follows from the call and the output of
    the block before. Where something else lies between them (the downsampling between the stages
    of a Swin), the model's own forward pass is run up to the block. The blocks before it are not
    computed then: the last of them returns what it is known to return. So do all of them if that
    changes anything, as in a TNT, whose inner blocks go on beside the outer ones; else they return
    zeros, which takes less memory.

    All this is found out with two batches, of different sizes if there are such.

    Args:
        model (nn.Module): The model.
        blocks (dict): Its blocks by name.
        batches (Iterable | Callable): As for
            :func:`~repa_mm.fit.conversion.convert_pretrained`.
        forward (Callable): Runs the model on a batch.
        sums (list, optional): ``sums`` of an earlier walk, whose batches these have to be.

    Attributes:
        blocks (list): Pairs of a name and a block, in the order of the forward pass.
        links (list): For each block, where the leaves of its call come from: pairs of 'inputs' or
            'outputs' of the block before and a position in it; None if something else lies
            between.
        replays (bool): Whether all blocks before return what they are known to return, where the
            model's own forward pass is run.
        sums (list): For every batch a number that tells what the first block gets.
        rows_per_image (dict): How long the first dimension of what a block returns is for one
            image, by its name: 1, but for the inner blocks of a TNT, which get patches.
        shapes (list): For each block that has been run, its outputs for every batch, as tensors
            without values. Whoever runs a block appends them.

    Raises:
        ValueError: If there is no batch; if a block is not reached, or reached twice; or if what a
            block gets depends on more than the batch and what the blocks before it return.
    """

    def __init__(self, model: nn.Module, blocks: dict, batches, forward: Callable, sums=None):
        self.model, self.forward = model, forward
        if not callable(batches) and iter(batches) is batches:
            raise ValueError(
                'batches is an iterator, which runs once: give a list, or a function that returns '
                'a fresh iterator'
            )
        self.batches = batches if callable(batches) else lambda: batches
        self.device = next(model.parameters()).device
        self.sums = list(sums or ())
        self._complete = bool(sums)
        self.shapes: list[list] = []
        traces = [self._trace(blocks, batch) for batch in self._samples()]
        links = traces[0].links
        for name in blocks:
            if name not in links:
                raise ValueError(f'the forward pass does not reach {name!r}')
        for trace in traces[1:]:
            if list(trace.links) != list(links):
                raise ValueError('the blocks run in another order, or not all, in some batches')
        self.blocks = [(name, blocks[name]) for name in links]
        self.links = [
            link if all(trace.links[name] == link for trace in traces) else None
            for name, link in links.items()
        ]
        rows = {name: len(tensors(output)[0]) for name, output in traces[0].outputs.items()}
        self.rows_per_image = {name: number // min(rows.values()) for name, number in rows.items()}
        # Where batches differ in what lies between blocks, nothing is known of others.
        self.replays = any(trace.links != links for trace in traces)
        # After all traces: a state that a batch leaves behind must not make a difference.
        for trace in traces:
            self._check_calls(trace)
        # What each block returns for the first image of a batch.
        self._known = [
            (trace.batch, {name: tensors(o)[0][:1].clone() for name, o in trace.outputs.items()})
            for trace in traces
        ]

    def _samples(self) -> list:
        """The first batch, and the next one of another size, or else the second one."""
        result: list = []
        for batch in self.batches():
            shapes = [v.shape for v in tensors(batch)]
            if not result:
                first = shapes
            if len(result) < 2:
                result.append(batch)
            if shapes != first:
                result[1] = batch
                break
        if not result:
            raise ValueError('there is no image to fit to: batches is empty')
        return result

    def _trace(self, blocks: dict, batch: Any) -> _Trace:
        """Run a batch, to find the order of the blocks and what lies between them."""
        trace = _Trace(batch, {}, {}, {})
        # Of the block that ran last: the leaves of its call and output, and the versions of the
        # tensors among them. A tensor that was changed in place since then is another one.
        last: dict = {}

        def source(leaf: Any, position: int) -> tuple[str, int] | None:
            if not isinstance(leaf, torch.Tensor):
                inputs = last['inputs']
                same = position < len(inputs) and not isinstance(inputs[position], torch.Tensor)
                return ('inputs', position) if same and inputs[position] == leaf else None
            number = version(leaf)
            for kind in ('outputs', 'inputs'):
                for i, other in enumerate(last[kind]):
                    if other is leaf and number is not None:
                        return (kind, i) if number == last['versions'][id(leaf)] else None
            return None

        def before(name: str, args: tuple, kwargs: dict) -> None:
            if name in trace.links:
                raise ValueError(
                    f'{name!r} runs more than once in a forward pass: give a forward that runs '
                    'the backbone once'
                )
            call = leaves((args, kwargs))
            links = [source(leaf, i) for i, leaf in enumerate(call)] if last else [None]
            is_linked = last and len(call) == len(last['inputs']) and None not in links
            trace.links[name] = links if is_linked else None
            if not is_linked:
                trace.calls[name] = copied((args, kwargs))

        def after(name: str, args: tuple, kwargs: dict, output: Any) -> None:
            trace.outputs[name] = copied(output)
            last.update(inputs=leaves((args, kwargs)), outputs=leaves(output))
            last['versions'] = {id(v): version(v) for v in tensors([*last.values()])}

        handles = []
        for name, block in blocks.items():
            handles += [
                block.register_forward_pre_hook(
                    lambda m, a, k, name=name: before(name, a, k), with_kwargs=True
                ),
                block.register_forward_hook(
                    lambda m, a, k, o, name=name: after(name, a, k, o), with_kwargs=True
                ),
            ]
        try:
            self.forward(batch)
        finally:
            for handle in handles:
                handle.remove()
        return trace

    def _check_calls(self, trace: _Trace) -> None:
        """Check what the blocks get when the model's own forward pass is run up to them."""
        outputs = [trace.outputs[name] for name, _ in self.blocks]
        shapes = [move(output, 'meta') for output in outputs]
        for index, (name, _) in enumerate(self.blocks):
            if index == 0 or name not in trace.calls:
                continue
            while True:
                known = outputs[:index]
                if not self.replays:
                    known[:-1] = [None] * (index - 1)
                call = self._call(trace.batch, known, shapes)
                if _same(call, trace.calls[name]):
                    break
                if self.replays:
                    raise ValueError(
                        f'what {name!r} gets depends on more than the batch and what the blocks '
                        'before it return, such as a state that they leave: it cannot be fitted'
                    )
                self.replays = True

    def check(self) -> None:
        """Check that every block still returns what it returned when the walk was made.

        Raises:
            ValueError: If one does not; names it.
        """
        for batch, expected in self._known:

            def compare(name: str, block: nn.Module, output: Any, expected=expected) -> None:
                found, known = tensors(output)[0][:1].double(), expected[name].double()
                change = float((found - known).norm() / known.norm().clamp(min=1e-300))
                if change > (0.05 if tensors(output)[0].element_size() < 4 else 1e-3):
                    raise ValueError(
                        f'{name!r}, a {type(block).__name__}, does not end with x + ffn(norm(x)), '
                        'as the blocks of this name in OpenMMLab do, or the forward pass is '
                        f'random: its output would change by {change:.1%}. Give None for it in '
                        'idle_ratio, or another name to its class'
                    )

            handles = [
                block.register_forward_hook(lambda m, a, o, name=name: compare(name, m, o))
                for name, block in self.blocks
            ]
            try:
                self.forward(batch)
            finally:
                for handle in handles:
                    handle.remove()
        self._known = []

    def _call(self, batch: Any, known: list, shapes: list) -> Any:
        """What a block gets for a batch, by the model's forward pass.

        Args:
            batch (Any): The batch.
            known (list): What the blocks before it return; None for those that return zeros.
            shapes (list): What the blocks return, without values.
        """
        found: list = []

        def stop(*args, **kwargs):
            found.append((args, kwargs))
            raise _Reached

        def run(i: int) -> Callable:
            if known[i] is None:
                return lambda *args, **kwargs: map_leaves(self._zeros, shapes[i])
            # A copy: what follows may change it in place.
            return lambda *args, **kwargs: copied(move(known[i], self.device))

        with self._replaced([*map(run, range(len(known))), stop]):
            try:
                self.forward(batch)
            except _Reached:
                pass
        if not found:
            name, _ = self.blocks[len(known)]
            raise ValueError(f'the forward pass of one of the batches does not reach {name!r}')
        return found[0]

    def calls(self, history: Sequence[list | None]) -> list:
        """What a block gets, by the model's forward pass.

        Args:
            history (Sequence): What the blocks before it return, for every batch; None for those
                that :meth:`remember` has forgotten.

        Returns:
            list: The call of each batch, on the CPU.

        Raises:
            ValueError: If the batches are others than before.
        """
        found: list = []
        expected = len(history[-1]) if history else None
        with self._checked():
            for number, batch in enumerate(self.batches()):
                if expected is not None and number >= expected:
                    raise ValueError('batches gives more data the second time than the first')
                self._number = number
                known = [outputs and outputs[number] for outputs in history]
                shapes = [shapes[number] for shapes in self.shapes[: len(history)]]
                found.append(move(self._call(batch, known, shapes), 'cpu'))
        if len(found) < (len(self.sums) if expected is None else expected):
            raise ValueError(
                'batches gives less data the second time than the first: give a list, or a '
                'function that returns a fresh iterator'
            )
        self._complete = True
        return found

    def remember(self, history: Sequence[list | None], outputs: list) -> list:
        """A history with one block more, without what is not needed any more."""
        return [*(history if self.replays else [None] * len(history)), outputs]

    def next_calls(self, calls: list, history: Sequence[list | None]) -> list:
        """What a block gets, from the calls of the block before it and a history."""
        links = self.links[len(history)]
        if links is None:
            return self.calls(history)
        result = []
        for call, output in zip(calls, history[-1]):
            sources = dict(inputs=leaves(call), outputs=leaves(output))
            values = iter([sources[kind][i] for kind, i in links])
            result.append(map_leaves(lambda _, values=values: next(values), call))
        return result

    @contextmanager
    def _replaced(self, functions: list[Callable]) -> Iterator[None]:
        """Let functions stand for the forward passes of the first blocks."""
        blocks = [block for _, block in self.blocks[: len(functions)]]
        try:
            for block, function in zip(blocks, functions):
                block.forward = function
            yield
        finally:
            for block in blocks:
                block.__dict__.pop('forward', None)

    def _zeros(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value, device=self.device)
        return value

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Check that the first block gets for each batch what it got before."""
        _, block = self.blocks[0]

        def check(module: nn.Module, args: tuple, kwargs: dict) -> None:
            total = sum(_sum(v) for v in tensors((args, kwargs)))
            if self._number == len(self.sums) and not self._complete:
                self.sums.append(total)
            elif self._number >= len(self.sums) or not (
                abs(total - self.sums[self._number]) <= 1e-4 * abs(total)
            ):
                raise ValueError(
                    'batches gives other data the second time, or other data than the conversion '
                    'that is resumed had: it has to give the same batches every time, without '
                    'augmentation (with the tool: the same --images and --num-images)'
                )

        handle = block.register_forward_pre_hook(check, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
