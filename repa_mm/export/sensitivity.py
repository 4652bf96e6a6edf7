"""Which layers of a model lose most when they compute in 8 bits."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

LEVELS = 255


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """X on a grid of 8 bits, from its smallest to its largest value and zero."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = ((high - low) / LEVELS).clamp(min=1e-12)
    return ((x - low) / scale).round() * scale + low


def round_weights(weight: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Weights on a symmetric grid of 8 bits, one for each channel along an axis."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    scale = (weight.abs().amax(others, keepdim=True) / (LEVELS // 2)).clamp(min=1e-12)
    return (weight / scale).round() * scale


class _Rounding(TorchFunctionMode):
    """Rounds the operands of products with weights, of one layer or of all.

    A layer is a product with weights: a module, or the part of one (``addmm`` of a merged FFN).
    """

    def __init__(self, path: list, chosen: str | None) -> None:
        super().__init__()
        self.path, self.chosen, self.seen = path, chosen, {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = self.path[-1] if self.path else ''
        if func in (F.linear, torch.conv2d, F.conv2d):
            self.seen[name] = True
            if name == self.chosen:
                args = (round_activations(args[0]), round_weights(args[1]), *args[2:])
        elif func is torch.addmm:
            name = f'{name}.addmm'.lstrip('.')
            self.seen[name] = True
            if name == self.chosen:
                args = (args[0], round_activations(args[1]), round_weights(args[2], 1), *args[3:])
        return func(*args, **kwargs)


@contextmanager
def _tracked(model: nn.Module):
    """The names of the modules that are being run, outermost first."""
    path, handles = [], []

    def leave(*_) -> None:  # what a hook returns would replace the output
        path.pop()

    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: path.append(name)),
            module.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield path
    finally:
        for handle in handles:
            handle.remove()


def _share(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The squared error of an output, relative to the variance of its channels.

    The mean of a channel is not counted, since biases alone make it: a detector's scores lie about
    that of the background.
    """
    axes = (0, *range(2, expected.ndim)) if expected.ndim > 2 else (-1,)
    variation = (expected - expected.mean(axes, keepdim=True)).square().sum()
    return ((actual - expected).square().sum() / variation.clamp(min=1e-30)).item()


@torch.no_grad()
def sensitivities(
    model: nn.Module,
    outputs: Callable[[nn.Module, torch.Tensor], Sequence[torch.Tensor]],
    images: Iterable[torch.Tensor],
    progress: Callable | None = None,
) -> dict[str, float]:
    """What 8 bits in one layer alone cost, for every layer.

    The operands of the layer are rounded: its input to a grid of 8 bits for the whole tensor, its
    weights to one for each output channel.

    Args:
        model (nn.Module): The model, in eval mode.
        outputs (Callable): From the model and images to the outputs that count.
        images (Iterable[torch.Tensor]): Batches that the model takes.
        progress (Callable, optional): Called with 'sensitivity', the number of layers that are
            done, and their number.

    Returns:
        dict: By the name of each layer the squared error of an output, relative to the variance of
        its channels, on average over the outputs; from the largest to the smallest.
    """
    images = list(images)
    with _tracked(model) as path:
        probe = _Rounding(path, None)
        with probe:
            expected = [outputs(model, image) for image in images]
        errors = {}
        for done, name in enumerate(probe.seen, 1):
            with _Rounding(path, name):
                actual = [outputs(model, image) for image in images]
            shares = [_share(x, y) for a, b in zip(actual, expected) for x, y in zip(a, b)]
            errors[name] = sum(shares) / len(shares)
            if progress:
                progress('sensitivity', done, len(probe.seen))
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
