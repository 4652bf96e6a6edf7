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
    It never goes back: where the weights that a training begins with, or those of a teacher in the
    model, have come further than the schedule, it waits until the schedule has come as far.

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
        name, kind = type(self).__name__, self.kind
        if sum(isinstance(hook, ScheduleHook) and hook.kind is kind for hook in runner.hooks) > 1:
            raise ValueError(f'two hooks set the lambda of {self.what}: leave one {name}')
        if isinstance(self.warmup, float):
            self.warmup = round(self.warmup * runner.max_iters)
        lams = {m: float(m.lam) for m in runner.model.modules() if isinstance(m, kind)}
        self._first = (min if kind.end == 1 else max)(lams.values(), default=1 - kind.end)
        self._set(runner.model, runner.iter)
        planned = self.lam_at(runner.iter)
        if abs(self._lam(runner.iter) - planned) > 1e-6:
            runner.logger.warning(
                f'{name}: the weights that the training begins with have lambda = '
                f'{self._first:g}, further than the schedule at iteration {runner.iter} '
                f'({planned:g}): it does not go back'
            )
        last = self._lam(runner.max_iters - 1)
        if last != kind.end:
            runner.logger.warning(
                f'{name}: lambda goes to {kind.end:g} in the {self.warmup} '
                f'iterations from {self.begin} on, and the training has {runner.max_iters}: it '
                f'ends with lambda = {last:g}, where the model does not merge'
            )
        frozen = sum(
            lam != kind.end and not any(p.requires_grad for p in module.parameters())
            for module, lam in lams.items()
        )
        if frozen:
            runner.logger.warning(
                f'{name}: {frozen} of the {len(lams)} modules with a lambda are frozen. Lambda '
                'changes what they compute, and they do not train to make up for it: train them, '
                'too, or begin with weights whose schedule has ended'
            )

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        self._set(runner.model, runner.iter)
        runner.message_hub.update_scalar(f'train/{self.kind.scalar}', self._lam(runner.iter))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):
                self._set(hook.ema_model, runner.iter)

    def _lam(self, iteration: int) -> float:
        """Lambda during an iteration, never before that of the first weights."""
        lams = self.lam_at(iteration), self._first
        return max(lams) if self.kind.end == 1 else min(lams)

    def _set(self, model, iteration: int) -> None:
        set_lam(model, self.lam_at(iteration), self.kind, self.what, back=False)


@HOOKS.register_module()
class JoinBranchesHook(ScheduleHook):
    """Joins parallel branches during the first part of a training.

    Lambda goes from 0 to 1. Then training goes on with joined branches, at the cost of ordinary
    layers: the adjustment phase of the `paper <https://arxiv.org/abs/2511.19718>`_, which found
    10,000 iterations of joining and a linear lambda best (its figures 2 and 3).

    Args:
        warmup (int | float): Number of iterations, or share of them, in which the branches are
            joined; 0 for branches that are joined from the start. Defaults to 10000.
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

    def __init__(self, warmup: int | float = 10000, **kwargs) -> None:
        super().__init__(warmup, **kwargs)


@HOOKS.register_module()
class DecayLayerNormsHook(ScheduleHook):
    """Lets the LayerNorms of progressive norms fade during the first part of a training.

    Lambda goes from 1 to 0. The default is that of `SLAB <https://arxiv.org/abs/2405.11582>`_ for
    300 epochs on ImageNet. The authors' code counts every forward pass of every norm; this hook
    counts iterations.

    Args:
        warmup (int | float): Number of iterations, or share of them, in which the LayerNorms fade.
            Defaults to 300000.
        **kwargs: ``begin``, ``curve`` and ``num_steps`` of :class:`ScheduleHook`.
    """

    kind = ProgressiveNorm
    what = 'progressive norms'

    def __init__(self, warmup: int | float = 300000, **kwargs) -> None:
        super().__init__(warmup, **kwargs)


@HOOKS.register_module()
class DecayActivationsHook(ScheduleHook):
    """Lets the activations of idle channels fade during the first part of a training.

    Lambda goes from 1 to 0.

    Args:
        warmup (int | float): Number of iterations, or share of them, in which the activations fade.
        **kwargs: ``begin``, ``curve`` and ``num_steps`` of :class:`ScheduleHook`.
    """

    kind = ProgressiveIdleFFN
    what = 'progressive channel-idle FFNs'
