"""The one way in which modules of an existing model become others."""

from collections.abc import Callable

import torch.nn as nn

from repa_mm.reparam import become


def replace(model: nn.Module, choose: Callable[[nn.Module], type | nn.Module | None]) -> list[str]:
    """Replace modules of a model, in place, see :func:`~repa_mm.reparam.become`.

    Args:
        model (nn.Module): Any model.
        choose (Callable): Gets every module of the model, and returns its replacement: a class that
            computes something else with the same parameters, another module, or None for a module
            that stays.

    Returns:
        list[str]: The names of the modules that were replaced.

    Examples:
        >>> replace(model, lambda m: FastGELU if type(m) is nn.GELU else None)
    """
    replaced = []
    for name, module in list(model.named_modules()):
        other = choose(module)
        if other is not None:
            become(module, other)
            replaced.append(name)
    return replaced
