"""Structures with a lambda that moves during training, and the hook that moves it."""

import torch
import torch.nn as nn
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS


class Scheduled(nn.Module):
    """Base class of modules with a lambda, which merge exactly once lambda has reached its end.

    Lambda is a buffer, which checkpoints keep and averaged models (EMA) copy. Lambda moves from one
    end of [0, 1] to the other; :class:`ScheduleHook` sets it.

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

    def finish_schedule(self) -> None:
        self.set_lam(self.end)

    def schedule_has_ended(self) -> bool:
        return bool(self.lam == self.end)

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


@HOOKS.register_module()
class ScheduleHook(Hook):
    """Move the lambda of scheduled modules to its end in the first part of training.

    Lambda depends only on the iteration, so that a resumed run continues where it stopped. Lambda
    is a buffer of the model, so that checkpoints keep it. The hook sets lambda once before each
    iteration, however often the model runs in the iteration. Averaged models (EMA) get the current
    lambda, not an average. Lambda never goes back: if the initial weights, or the weights of a
    teacher in the model, are further along than the schedule, lambda stays until the schedule has
    caught up.

    Args:
        warmup (int | float): Number of iterations in which lambda moves from its start to its end;
            a number below 1 is a fraction of all iterations. Every batch is an iteration, also
            with gradient accumulation. With 0, lambda is at its end from the start.

    Raises:
        ValueError: Before training, if the model has no such module.

    Examples:
        >>> custom_hooks = [dict(type='ScheduleHook', warmup=10000)]
    """

    # After EMAHook (NORMAL), which copies or averages buffers, and before CheckpointHook.
    priority = 'LOW'

    def __init__(self, warmup: int | float) -> None:
        self.warmup = warmup

    def before_train(self, runner) -> None:
        modules = _scheduled(runner.model)
        if not modules:
            raise ValueError(f'{type(runner.model).__name__} has no lambda to schedule')
        if self.warmup < 1:
            self.warmup = round(self.warmup * runner.max_iters)
        first = min(1 - abs(m.end - float(m.lam)) for m in modules)
        text = (
            f'ScheduleHook: lambda takes {self.warmup} iterations, and the training has '
            f'{runner.max_iters}'
        )
        if first > self._progress(runner.iter) + 1e-6:
            runner.logger.warning(
                f'{text}. The weights that the training begins with have come further ({first:g} '
                f'of the way) than iteration {runner.iter} of the schedule: lambda does not go back'
            )
        last = max(first, self._progress(runner.max_iters - 1))
        if last < 1:
            runner.logger.warning(
                f'{text}: it ends at {last:g} of the way, where the model does not merge'
            )

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        modules = self._set(runner.model, runner.iter)
        # Reading lambda does not stall a GPU here: the last iteration's loss has been read already.
        for scalar, lam in {m.scalar: m.lam for m in modules}.items():
            runner.message_hub.update_scalar(f'train/{scalar}', lam)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):
                self._set(hook.ema_model, runner.iter)

    def _progress(self, iteration: int) -> float:
        """Return the fraction of the schedule that is done at an iteration, counted from 0."""
        return iteration / self.warmup if iteration < self.warmup else 1.0

    def _set(self, model: nn.Module, iteration: int) -> list[Scheduled]:
        progress, modules = self._progress(iteration), _scheduled(model)
        for module in modules:
            module.set_lam(progress if module.end == 1 else 1 - progress, back=False)
        return modules


def _scheduled(model: nn.Module) -> list[Scheduled]:
    return [module for module in model.modules() if isinstance(module, Scheduled)]
