"""Queries of autograd, autocast and compiler state, and a guard for backward passes."""

import functools
from collections.abc import Callable

import torch

if hasattr(torch.compiler, 'is_compiling'):
    is_compiling = torch.compiler.is_compiling
else:  # PyTorch 2.1 and 2.2
    from torch._dynamo import is_compiling  # noqa: F401


def first_order_only(instead: str) -> Callable:
    """Decorate the backward pass of an ``autograd.Function`` that has no second derivative.

    The backward pass runs without autocast, and raises with ``create_graph=True``: autograd would
    differentiate it as if its saved tensors did not depend on the inputs. ``instead`` names the
    alternative with second derivatives.
    """

    def decorate(backward):
        @functools.wraps(backward)
        def wrapped(ctx, grad, *args):
            if torch.is_grad_enabled():
                raise RuntimeError(
                    'the fast path has no second derivatives (create_graph=True), as it does not '
                    f'compute the literal equation: use {instead}'
                )
            if grad is None:  # nothing depends on the output, and ctx does not materialize zeros
                return (None,) * len(ctx.needs_input_grad)
            with torch.autocast(grad.device.type, enabled=False):
                return backward(ctx, grad, *args)

        return wrapped

    return decorate


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast, None outside autocast."""
    if hasattr(torch, 'get_autocast_dtype'):  # PyTorch 2.4
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
    elif device_type == 'cpu':
        if torch.is_autocast_cpu_enabled():
            return torch.get_autocast_cpu_dtype()
    elif torch.is_autocast_enabled():
        return torch.get_autocast_gpu_dtype()
    return None
