"""Structures that a scheduled number, lambda, brings to a mergeable state during training.

Lambda is a buffer, which checkpoints keep and averaged models (EMA) copy. Lambda moves from one end
of [0, 1] to the other; :class:`repa_mm.engine.ScheduleHook` sets it.
"""

import torch
import torch.nn as nn


class Scheduled(nn.Module):
    """Base class of modules with a lambda, which merge exactly once lambda has reached its end.

    Attributes:
        scalar (str): Name of lambda in logs.
        end (float): The lambda at which the module merges, 0 or 1. Training begins at the other.
        lam (torch.Tensor): Lambda, a buffer of one number.
        is_finished (bool): Whether lambda has reached its end, as of the last :meth:`set_lam`,
            ``train`` or loaded state dict. Reading ``is_finished`` costs nothing; reading ``lam``
            would make the CPU wait for a GPU in every forward pass.
    """

    scalar = 'lambda'
    end = 1.0
    # Subject of the message about a lambda that has not reached its end.
    unfinished = 'the schedule is at'

    def add_lam(self) -> None:
        """Register lambda at the start of its schedule."""
        self.register_buffer('lam', torch.tensor(1 - self.end))
        self.is_finished = False

    def set_lam(self, lam: float, back: bool = True) -> None:
        """Set lambda.

        Args:
            lam (float): Lambda in [0, 1].
            back (bool): Whether lambda may move away from its end. Defaults to True.

        Raises:
            ValueError: If lambda is not a number in [0, 1].
        """
        if not 0 <= lam <= 1:
            raise ValueError(f'lambda must be a number from 0 to 1, but got {lam!r}')
        if back:
            self.lam.fill_(lam)
            self.is_finished = lam == self.end
        else:  # do not read lambda: the CPU would wait for a GPU
            self.lam.clamp_(**{'min' if self.end == 1 else 'max': lam})
            self.is_finished = self.is_finished or lam == self.end

    def check_finished(self) -> None:
        """Check that lambda has reached its end.

        Raises:
            ValueError: If it has not; the message has lambda's value.
        """
        # Tensors on the meta device have no values.
        if not self.lam.is_meta and self.lam != self.end:
            lam = float(self.lam)
            # An average of lambdas (EMA) may be so close to the end that `:g` would print the end.
            text = f'{lam:g}' if float(f'{lam:g}') != self.end else repr(lam)
            raise ValueError(
                f'{self.unfinished} lambda = {text}, and what they compute merges '
                f'exactly at lambda = {self.end:g} only: train on until the schedule has ended'
            )

    def train(self, mode: bool = True):
        # Averaged models (EMA) copy and swap buffers.
        self.is_finished = not self.lam.is_meta and bool(self.lam == self.end)
        return super().train(mode)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.is_finished = not self.lam.is_meta and bool(self.lam == self.end)


def set_lam_(model: nn.Module, lam: float, kind: type[Scheduled] = Scheduled) -> nn.Module:
    """Set the lambda of every scheduled module of a model, in place.

    Args:
        model (nn.Module): The model, changed in place.
        lam (float): Lambda in [0, 1].
        kind (type): Class of the modules to change. Defaults to every scheduled module.

    Returns:
        nn.Module: ``model``.

    Raises:
        ValueError: If lambda is not a number in [0, 1], or the model has no such module.
    """
    found = [module for module in model.modules() if isinstance(module, kind)]
    if not found:
        raise ValueError(f'{type(model).__name__} has no {kind.__name__}')
    for module in found:
        module.set_lam(lam)
    return model


def finish_schedules_(model: nn.Module) -> nn.Module:
    """Set every lambda of a model to its end, in place, so that the model merges.

    Use it for a model that gets its weights afterwards or is only timed. It changes the output of a
    model whose schedule has not ended.

    Args:
        model (nn.Module): The model, changed in place.

    Returns:
        nn.Module: ``model``.
    """
    for module in model.modules():
        if isinstance(module, Scheduled):
            module.set_lam(module.end)
    return model


def schedules_have_ended(model: nn.Module) -> bool:
    """Return True if every lambda of a model is at its end, so that the model merges."""
    return all(m.lam == m.end for m in model.modules() if isinstance(m, Scheduled))
