"""Replacing and unwrapping modules of any model. This module needs PyTorch alone."""

import copy
import functools
import operator
import weakref
from types import CellType, FunctionType, MethodType
from typing import Any

import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_map

#: The parts of a detector, segmentor or classifier that compute tensors from tensors.
PARTS = 'backbone', 'neck', 'bbox_head', 'rpn_head', 'decode_head', 'head'


def become_(module: nn.Module, other: type | nn.Module) -> None:
    """Turn a module into another module, in place.

    The module stays the same object, since others than its parent may refer to it. ``other`` is a
    class for the module's own parameters, or a module that gives its class, parameters and hooks.
    """
    if isinstance(other, nn.Module):
        module.__class__, module.__dict__ = type(other), other.__dict__
    else:
        module.__class__ = other


def hooks_of(module: nn.Module) -> dict:
    """Return a module's forward hooks, or else its pre-hooks or backward hooks, by their ids."""
    own = vars(module)
    forward = own['_forward_hooks'] or own['_forward_pre_hooks']
    return forward or own['_backward_hooks'] or own['_backward_pre_hooks']


def replaced_methods(module: nn.Module) -> list[str]:
    """Return the names of a module's methods that were replaced in this module alone."""
    return [name for name in vars(module) if callable(getattr(type(module), name, None))]


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
                and not replaced_methods(module)
                and not (hooks_of(module) or 'parametrizations' in own['_modules'])
                and all(
                    has_stock_forward(getattr(module, name, None), *of_child)
                    for name, of_child in children.items()
                )
            )
    return False


def copied(model: nn.Module, memo: dict | None = None) -> nn.Module:
    """Return a deep copy of a model whose replaced methods belong to the copy.

    ``copy.deepcopy`` shares functions and weak references with the original. Here, a function that
    replaces a method refers to the copy, wherever its closure or its arguments refer to the
    original: MMEngine's ``activation_checkpointing`` and fairscale's ``checkpoint_wrapper``, say.
    What a function finds in global variables stays shared.
    """
    memo = {} if memo is None else memo
    result = copy.deepcopy(model, memo)
    for module in model.modules():
        own = vars(memo[id(module)]) if id(module) in memo else {}
        for key in own.keys() & {*replaced_methods(module)}:
            own[key] = _rebound(vars(module)[key], memo)
    return result


def _rebound(value: Any, memo: dict) -> Any:
    """Return a deep copy of a value, including functions and weak references inside it."""
    value = getattr(value, '_torchdynamo_orig_callable', value)
    turned = functools.partial(tree_map, functools.partial(_rebound, memo=memo))
    if isinstance(value, weakref.ref):
        return weakref.ref(memo[id(value())]) if id(value()) in memo else value
    if isinstance(value, functools.partial):
        return functools.partial(*turned([value.func, *value.args]), **turned(value.keywords))
    if isinstance(value, MethodType):
        return MethodType(*turned([value.__func__, value.__self__]))
    if not isinstance(value, FunctionType):
        try:
            return copy.deepcopy(value, memo)
        except TypeError:  # a module or a lock, say
            return value
    if id(value) not in memo:
        cells = [CellType() for _ in value.__closure__ or ()]
        other = FunctionType(value.__code__, value.__globals__, closure=tuple(cells))
        memo[id(value)] = other  # first, since a function may refer to itself
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        old = held, value.__defaults__, value.__kwdefaults__, vars(value)
        new = turned(old)
        if all(map(operator.is_, tree_flatten(old)[0], tree_flatten(new)[0])):
            memo[id(value)] = value  # which pickle finds by its name
        for cell, content in zip(cells, new[0]):
            cell.cell_contents = content
        other.__defaults__, other.__kwdefaults__, other.__dict__ = new[1:]
    return memo[id(value)]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DataParallel, DistributedDataParallel or torch.compile.

    Raises:
        ValueError: If the model's parameters are sharded (FSDP).
    """
    while True:
        is_sharded = any(type(parameter).__name__ == 'DTensor' for parameter in model.parameters())
        if is_sharded or type(model).__name__.endswith('FullyShardedDataParallel'):
            raise ValueError(
                f'the parameters of this {type(model).__name__} are spread over processes (FSDP): '
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
