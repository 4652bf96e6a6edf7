"""Replacing and unwrapping modules of any model. This module needs PyTorch alone."""

from collections.abc import Callable

import torch.nn as nn


def become_(module: nn.Module, other: type | nn.Module) -> None:
    """Turn a module into another module, in place.

    The module stays the same object, since others than its parent may refer to it.

    Args:
        module (nn.Module): The module.
        other (type | nn.Module): A class for the module's own parameters, or a module that gives
            its class, parameters, buffers and hooks.
    """
    if isinstance(other, nn.Module):
        module.__class__, module.__dict__ = type(other), other.__dict__
    else:
        module.__class__ = other


def replace_(model: nn.Module, choose: Callable[[nn.Module], type | nn.Module | None]) -> list[str]:
    """Replace modules of a model in place, with :func:`become_`.

    Args:
        model (nn.Module): Any model.
        choose (Callable): Called with each module of the model, returns its replacement: a class
            that computes with the module's parameters, another module, or None to keep the module.

    Returns:
        list[str]: Names of the replaced modules.

    Examples:
        >>> replace_(model, lambda m: FastGELU if type(m) is nn.GELU else None)
    """
    replaced = []
    for name, module in list(model.named_modules()):
        other = choose(module)
        if other is not None:
            become_(module, other)
            replaced.append(name)
    return replaced


def is_plain(module: nn.Module, *kinds: type) -> bool:
    """Return True if a module runs the unmodified forward of one of ``kinds``, without hooks."""
    kind = next((kind for kind in kinds if isinstance(module, kind)), None)
    return (
        kind is not None
        and type(module).forward is kind.forward
        and 'forward' not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DataParallel, DistributedDataParallel or torch.compile.

    Raises:
        ValueError: If the model's parameters are sharded (FSDP).
    """
    while True:
        if type(model).__name__.endswith('FullyShardedDataParallel'):
            raise ValueError(
                'the parameters of a FullyShardedDataParallel model are spread over processes: '
                'gather them into an ordinary model first'
            )
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, '_orig_mod'):
            model = model._orig_mod
        else:
            return model


def innermost(model: nn.Module) -> nn.Module:
    """Return the detector, segmentor or classifier inside any wrappers (DDP, TTA, EMA)."""
    model = unwrap(model)
    while isinstance(getattr(model, 'module', None), nn.Module):
        model = unwrap(model.module)
    return model
