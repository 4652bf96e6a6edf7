"""Replacing modules of a model."""

from collections.abc import Callable

import torch.nn as nn

from repa_mm.reparam import become_


def replace_(model: nn.Module, choose: Callable[[nn.Module], type | nn.Module | None]) -> list[str]:
    """Replace modules of a model in place, with :func:`~repa_mm.reparam.become_`.

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
