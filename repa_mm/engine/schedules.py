"""What takes the lambda of a structure from where training begins to where it merges."""

import math

from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS

from repa_mm.reparam import JoinedLinear, ProgressiveIdleFFN, ProgressiveNorm, Scheduled, set_lam

_CURVES = {
    'linear': lambda progress, _: progress,
    'cosine': lambda progress, _: (1 - math.cos(math.pi * progress)) / 2,
    'step': lambda progress, num_steps: math.floor(progress * num_steps) / num_steps,
}


class ScheduleHook(Hook):
    """Base of the hooks that take a lambda to its end during the first part of a training.

    Lambda is a function of the iteration alone, so that a resumed training goes on where it was,
    and a buffer of the model, so that checkpoints keep it. It is set before each iteration, once,
    however often the model runs in it. Averaged models (EMA) get it too, rather than its average.

    Args:
        warmup (int | float): Number of iterations in which lambda goes from its beginning to its
            end; a number between 0 and 1 is a share of the training's iterations. Every batch is
            an iteration, those whose gradients are accumulated, too.
        begin (int): Iteration with which it starts to go. Defaults to 0.
        curve (str): How it goes, 'linear', 'cosine' or 'step'. Defaults to 'linear'.
        num_steps (int): Number of equal steps of 'step'. Defaults to 10.

    Attributes:
        kind (type): The modules whose lambda it sets.
        what (str): What messages call them.

    Raises:
        ValueError: If an argument is of no meaning, or the model has nothing of the kind.
    """

    # After EMAHook (NORMAL), which copies or averages buffers, and before CheckpointHook.
    priority = 'LOW'
    kind: type[Scheduled]
    what: str

    def __init__(
        self, warmup: int | float, begin: int = 0, curve: str = 'linear', num_steps: int = 10
    ) -> None:
        is_share = isinstance(warmup, float) and 0 < warmup < 1
        for name, value, least in (
            ('warmup', 0 if is_share else warmup, 0),
            ('begin', begin, 0),
            ('num_steps', num_steps, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f'{name} of {type(self).__name__} must be an integer of at least {least}, but '
                    f'got {value!r}'
                )
        if curve not in _CURVES:
            raise ValueError(
                f'curve of {type(self).__name__} must be one of {sorted(_CURVES)}, but got '
                f'{curve!r}'
            )
        self.warmup, self.begin, self.curve, self.num_steps = warmup, begin, curve, num_steps

    def lam_at(self, iteration: int) -> float:
        """Lambda during an iteration, counted from 0."""
        done = iteration - self.begin
        progress = float(done >= self.warmup)
        if 0 < done < self.warmup:
            progress = _CURVES[self.curve](done / self.warmup, self.num_steps)
        return progress if self.kind.end == 1 else 1 - progress

    def before_train(self, runner) -> None:
        if isinstance(self.warmup, float):
            self.warmup = round(self.warmup * runner.max_iters)
        self._set(runner.model, runner.iter)
        last = self.lam_at(runner.max_iters - 1)
        if last != self.kind.end:
            runner.logger.warning(
                f'{type(self).__name__}: lambda goes to {self.kind.end:g} in the {self.warmup} '
                f'iterations from {self.begin} on, and the training has {runner.max_iters}: it '
                f'ends with lambda = {last:g}, where the model does not merge'
            )

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        self._set(runner.model, runner.iter)
        runner.message_hub.update_scalar(f'train/{self.kind.scalar}', self.lam_at(runner.iter))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):
                self._set(hook.ema_model, runner.iter)

    def _set(self, model, iteration: int) -> None:
        set_lam(model, self.lam_at(iteration), self.kind, self.what)


@HOOKS.register_module()
class JoinBranchesHook(ScheduleHook):
    """Joins parallel branches during the first part of a training.

    Lambda goes from 0 to 1. Then training goes on with joined branches, at the cost of ordinary
    layers: the adjustment phase of the `paper <https://arxiv.org/abs/2511.19718>`_, which found
    10,000 iterations of joining and a linear lambda best (its figures 2 and 3).

    Args:
        warmup (int): Number of iterations in which the branches are joined; 0 for branches that
            are joined from the start. Defaults to 10000.
        begin (int): Iteration with which joining starts. Defaults to 0.
        curve (str): How lambda goes, 'linear', 'cosine' or 'step'. Defaults to 'linear'.
        num_steps (int): Number of equal steps of 'step'. Defaults to 10.

    Examples:
        >>> custom_hooks = [
        >>>     dict(type='JoinBranchesHook', warmup=10000),
        >>>     dict(type='ReparameterizeHook'),
        >>> ]
    """

    kind = JoinedLinear
    what = 'parallel branches to join'

    def __init__(self, warmup: int = 10000, **kwargs) -> None:
        super().__init__(warmup, **kwargs)


@HOOKS.register_module()
class DecayLayerNormsHook(ScheduleHook):
    """Lets the LayerNorms of progressive norms fade during the first part of a training.

    Lambda goes from 1 to 0. The default is that of `SLAB <https://arxiv.org/abs/2405.11582>`_ for
    300 epochs on ImageNet. The authors' code counts every forward pass of every norm; this hook
    counts iterations.

    Args:
        warmup (int): Number of iterations in which the LayerNorms fade. Defaults to 300000.
        **kwargs: ``begin``, ``curve`` and ``num_steps`` of :class:`ScheduleHook`.
    """

    kind = ProgressiveNorm
    what = 'progressive norms'

    def __init__(self, warmup: int = 300000, **kwargs) -> None:
        super().__init__(warmup, **kwargs)


@HOOKS.register_module()
class DecayActivationsHook(ScheduleHook):
    """Lets the activations of idle channels fade during the first part of a training.

    Lambda goes from 1 to 0.

    Args:
        warmup (int): Number of iterations in which the activations fade.
        **kwargs: ``begin``, ``curve`` and ``num_steps`` of :class:`ScheduleHook`.
    """

    kind = ProgressiveIdleFFN
    what = 'progressive channel-idle FFNs'
