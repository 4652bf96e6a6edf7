"""Replacing and unwrapping modules of any model. This module needs PyTorch alone."""

import copy
import functools
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType

import torch.nn as nn
from torch.utils._pytree import tree_map


def become_(module: nn.Module, other: type | nn.Module) -> None:
    """Turn a module into another module, in place.

    The module stays the same object, since others than its parent may refer to it. ``other`` is a
    class for the module's own parameters, or a module that gives its class, parameters and hooks.
    """
    if isinstance(other, nn.Module):
        module.__class__, module.__dict__ = type(other), other.__dict__
    else:
        module.__class__ = other


def replace_(model: nn.Module, choose: Callable[[nn.Module], type | nn.Module | None]) -> None:
    """Replace modules of a model in place.

    ``choose`` returns a module's replacement, see :func:`become_`, or None to keep the module.
    """
    for module in list(model.modules()):
        if (other := choose(module)) is not None:
            become_(module, other)


def hooks_of(module: nn.Module) -> dict:
    """Return the hooks of a module by their ids, of the first kind that it has."""
    # By name, since these are asked for in every forward pass.
    own = vars(module)
    return (
        own['_forward_hooks']
        or own['_forward_pre_hooks']
        or own['_backward_hooks']
        or own['_backward_pre_hooks']
    )


def has_stock_forward(module: nn.Module, *kinds: type, **children: tuple[type, ...]) -> bool:
    """Return True if a module computes what one of ``kinds`` does, by its class's own forward.

    Modules with hooks, a replaced ``forward`` or parametrized weights do not. Without ``kinds``,
    the module's class may be any. ``children`` has the kinds of the module's children that the
    caller does not call either, by name. torch.compile takes this function in methods with the
    decorator ``assume_constant_result``.
    """
    for kind in kinds or (type(module),):
        if isinstance(module, kind):
            own = vars(module)
            return (
                type(module).forward is kind.forward
                and 'forward' not in own
                and not (hooks_of(module) or 'parametrizations' in own['_modules'])
                and all(
                    has_stock_forward(getattr(module, name, None), *kinds)
                    for name, kinds in children.items()
                )
            )
    return False


def copied(model: nn.Module, memo: dict | None = None) -> nn.Module:
    """Return a deep copy of a model whose replaced methods belong to the copy, or raise.

    ``copy.deepcopy`` shares functions and weak references with the original. fairscale's
    ``checkpoint_wrapper`` replaces ``forward`` by a partial function with a weak reference to the
    module, which here refers to the copy. ``torch.compile`` replaces a method by a function, which
    here is the method again.
    """
    memo = {} if memo is None else memo
    result = copy.deepcopy(model, memo)

    def turned(value):
        is_own = isinstance(value, weakref.ref) and id(value()) in memo
        return weakref.ref(memo[id(value())]) if is_own else value

    for name, module in model.named_modules():
        own = vars(memo[id(module)]) if id(module) in memo else {}
        for key in [key for key in own if callable(getattr(type(module), key, None))]:
            method = own[key]
            if hasattr(method, '_torchdynamo_orig_callable'):
                own[key] = copy.deepcopy(method._torchdynamo_orig_callable, memo)
            elif _holds_objects(method):
                raise ValueError(
                    f'a function replaces {key}() of {name!r} ({type(module).__name__}), and would '
                    'run the original in a copy of the model: remove the replacement first '
                    f'(del module.{key})'
                )
            elif isinstance(method, functools.partial):
                args, keywords = tree_map(turned, (method.args, method.keywords))
                own[key] = functools.partial(method.func, *args, **keywords)
    return result


def _holds_objects(method: Callable) -> bool:
    """Return True if the function of a method or partial has other values than constants."""
    while isinstance(method, (functools.partial, MethodType)):
        method = method.func if isinstance(method, functools.partial) else method.__func__
    if not isinstance(method, FunctionType):
        return False
    values = [cell.cell_contents for cell in method.__closure__ or ()]
    values += method.__defaults__ or ()
    return any(not isinstance(value, (str, int, float, type, type(None))) for value in values)


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
