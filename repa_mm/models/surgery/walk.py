"""Runs the blocks of a model one by one, each on all batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


class BlockWalk:
    """The blocks of a model in the order of its forward pass, and what each of them gets.

    What a block gets is its *call*, a pair of positional and keyword arguments, for every batch.
    Where one block follows directly on another, the call follows from the call and the output of
    the block before. Where something else lies between them (the downsampling between the stages
    of a Swin), the model's own forward pass is run up to the block. The blocks before it are not
    computed then: they return zeros, and the last of them what it is known to return.

    Args:
        model (nn.Module): The model.
        blocks (dict): Its blocks by name.
        batches (Iterable | Callable): As for
            :func:`~repa_mm.models.surgery.pretrained.convert_pretrained`.
        forward (Callable): Runs the model on a batch.
        sums (list, optional): ``sums`` of an earlier walk, whose batches these have to be.

    Attributes:
        blocks (list): Pairs of a name and a block, in the order of the forward pass.
        links (list): For each block, where the leaves of its call come from: pairs of 'inputs' or
            'outputs' of the block before and a position in it; None if something else lies
            between.
        sums (list): For every batch the sum of the magnitudes of what the first block gets.
        rows_per_image (dict): How long the first dimension of what a block returns is for one
            image, by its name: 1, but for the inner blocks of a TNT, which get patches.
        shapes (list): For each block that has been run, its outputs for every batch, as tensors
            without values. Whoever runs a block appends them.

    Raises:
        ValueError: If there is no batch, or a block is not reached, or reached twice.
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
        self.blocks: list[tuple[str, nn.Module]] = []
        self.links: list[list | None] = []
        self.shapes: list[list] = []
        # The first batch, and what each block returns for the first image of it.
        self.rows_per_image: dict[str, int] = {}
        self._first: tuple[Any, dict[str, torch.Tensor]] = (None, {})
        self._trace(blocks)

    def _trace(self, blocks: dict) -> None:
        """Run the first batch, to find the order of the blocks and what lies between them."""
        none = object()
        batch = next(iter(self.batches()), none)
        if batch is none:
            raise ValueError('there is no image to fit to: batches is empty')
        self._first = batch, {}
        # Of the block that ran last: the leaves of its call and output, and the versions of the
        # tensors among them. A tensor that was changed in place since then is another one.
        last: dict = {}

        def source(leaf: Any, position: int) -> tuple[str, int] | None:
            if not isinstance(leaf, torch.Tensor):
                inputs = last['inputs']
                same = position < len(inputs) and not isinstance(inputs[position], torch.Tensor)
                return ('inputs', position) if same and inputs[position] == leaf else None
            for kind in ('outputs', 'inputs'):
                for i, other in enumerate(last[kind]):
                    if other is leaf and leaf._version == last['versions'][id(leaf)]:
                        return kind, i
            return None

        def before(name: str, block: nn.Module, args: tuple, kwargs: dict) -> None:
            if any(name == other for other, _ in self.blocks):
                raise ValueError(
                    f'{name!r} runs more than once in a forward pass: give a forward that runs '
                    'the backbone once'
                )
            call = leaves((args, kwargs))
            links = [source(leaf, i) for i, leaf in enumerate(call)] if last else [None]
            is_linked = last and len(call) == len(last['inputs']) and None not in links
            self.links.append(links if is_linked else None)
            self.blocks.append((name, block))

        def after(name: str, args: tuple, kwargs: dict, output: Any) -> None:
            first = tensors(output)[0]
            self.rows_per_image[name] = len(first)
            self._first[1][name] = first[:1].clone()
            last.update(inputs=leaves((args, kwargs)), outputs=leaves(output))
            last['versions'] = {id(v): v._version for v in tensors([*last.values()])}

        handles = []
        for name, block in blocks.items():
            handles += [
                block.register_forward_pre_hook(
                    lambda m, a, k, name=name: before(name, m, a, k), with_kwargs=True
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
        number = min(self.rows_per_image.values(), default=1)
        self.rows_per_image = {key: rows // number for key, rows in self.rows_per_image.items()}
        reached = dict(self.blocks)
        missing = [name for name in blocks if name not in reached]
        if missing:
            raise ValueError(f'the forward pass does not reach {missing[0]!r}')

    def check(self) -> None:
        """Check that every block still returns what it returned when the walk was made.

        Raises:
            ValueError: If one does not; names it.
        """
        batch, expected = self._first

        def compare(name: str, block: nn.Module, output: Any) -> None:
            found, known = tensors(output)[0][:1].double(), expected[name].double()
            change = float((found - known).norm() / known.norm().clamp(min=1e-300))
            if change > (0.05 if tensors(output)[0].element_size() < 4 else 1e-3):
                raise ValueError(
                    f'{name!r}, a {type(block).__name__}, does not end with x + ffn(norm(x)), as '
                    f'the blocks of this name in OpenMMLab do: its output would change by '
                    f'{change:.1%}. Give None for it in idle_ratio, or another name to its class'
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
        self._first = (None, {})

    def calls(self, index: int, outputs: list | None = None) -> list:
        """What a block gets, by the model's forward pass.

        Args:
            index (int): Number of the block.
            outputs (list, optional): What the block before it returns, for every batch. Not for
                the first block.

        Returns:
            list: The call of each batch, on the CPU.

        Raises:
            ValueError: If the batches are others than before.
        """
        found: list = []

        def stop(*args, **kwargs):
            if index == 0:
                self._check_same(len(found), (args, kwargs))
            found.append(move((args, kwargs), 'cpu'))
            raise _Reached

        def known(i: int) -> Callable:
            def run(*args, **kwargs):
                if i == 0:
                    self._check_same(len(found), (args, kwargs))
                if i == index - 1:
                    return move(outputs[len(found)], self.device)
                return map_leaves(self._zeros, self.shapes[i][len(found)])

            return run

        functions = [*map(known, range(index)), stop]
        with self._replaced(functions):
            for number, batch in enumerate(self.batches()):
                if outputs is not None and number >= len(outputs):
                    raise ValueError('batches gives more data the second time than the first')
                try:
                    self.forward(batch)
                except _Reached:
                    pass
        if len(found) < len(self.sums if outputs is None else outputs):
            raise ValueError(
                'batches gives less data the second time than the first: give a list, or a '
                'function that returns a fresh iterator'
            )
        self._complete = True
        return found

    def next_calls(self, index: int, calls: list, outputs: list) -> list:
        """What the block after one gets, from the calls and outputs of that one."""
        links = self.links[index + 1]
        if links is None:
            return self.calls(index + 1, outputs)
        result = []
        for call, output in zip(calls, outputs):
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

    def _check_same(self, number: int, call: Any) -> None:
        """Check that the first block gets for a batch what it got before."""
        total = float(sum(v.double().abs().sum() for v in tensors(call)))
        if number == len(self.sums) and not self._complete:
            self.sums.append(total)
        elif number >= len(self.sums) or not abs(total - self.sums[number]) <= 1e-4 * abs(total):
            raise ValueError(
                'batches gives other data the second time, or other data than the conversion that '
                'is resumed had: it has to give the same batches every time, without augmentation '
                '(with the tool: the same --images and --num-images)'
            )
