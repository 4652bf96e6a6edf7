"""A hook that schedules the lambda of a structure during training."""

import torch.nn as nn
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS

from repa_mm.reparam import Scheduled


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
