"""What a training with DINO does around its steps."""

import math

import torch.nn as nn
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop

from repa_mm.surgery import innermost


@HOOKS.register_module()
class DINOHook(Hook):
    """Let the teacher of :class:`~projects.dino.DINO` follow the student.

    `DINO <https://arxiv.org/abs/2104.14294>`_, appendix A and C. Everything is a function of the
    iteration, so that a resumed training goes on as it would have. A training that is not resumed
    begins with the student as its own teacher, whatever weights the student starts from.

    Args:
        momentum (float): Share of itself that the teacher keeps in the first step. It rises to 1
            with a cosine over the training. Defaults to 0.996.
        clip (float, optional): Largest norm of the gradient of a single parameter. (MMEngine's
            ``clip_grad`` bounds that of all parameters together.) Defaults to 3.
        freeze_last_layer (int): Number of epochs at the beginning in which the last layer of the
            projection stays as it is. Defaults to 1.

    Raises:
        ValueError: Before the training, if it has no epochs.
    """

    def __init__(
        self, momentum: float = 0.996, clip: float | None = 3.0, freeze_last_layer: int = 1
    ) -> None:
        self.momentum, self.clip, self.freeze_last_layer = momentum, clip, freeze_last_layer

    def momentum_at(self, iteration: int, max_iters: int) -> float:
        """Return the share that the teacher keeps after an iteration, counted from 0."""
        # A training that was resumed within an epoch repeats that epoch, and has more iterations.
        progress = min(iteration / max_iters, 1)
        return 1 - (1 - self.momentum) * (1 + math.cos(math.pi * progress)) / 2

    def before_train(self, runner) -> None:
        if isinstance(runner.train_loop, IterBasedTrainLoop):
            raise ValueError(
                'DINO trains by epochs, of which the temperature of its teacher and its frozen '
                'last layer are functions: set train_cfg.by_epoch=True and train_cfg.max_epochs'
            )
        model = innermost(runner.model)
        if runner.iter == 0:
            model.start_teacher()

        def prepare(optimizer, *_) -> None:
            if runner.epoch < self.freeze_last_layer:
                for parameter in model.neck.last_layer.parameters():
                    parameter.grad = None
            if self.clip is not None:
                # Under mixed precision, gradients are unscaled here, but those of a fused
                # optimizer.
                scale = getattr(optimizer, 'grad_scale', None)
                clip = self.clip if scale is None else self.clip * float(scale)
                for group in optimizer.param_groups:
                    for parameter in group['params']:
                        nn.utils.clip_grad_norm_([parameter], clip)

        self._handle = runner.optim_wrapper.optimizer.register_step_pre_hook(prepare)

    def before_train_epoch(self, runner) -> None:
        innermost(runner.model).head.epoch = runner.epoch

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.optim_wrapper.should_update():
            momentum = self.momentum_at(runner.iter, runner.max_iters)
            innermost(runner.model).update_teacher(momentum)

    def after_train(self, runner) -> None:
        self._handle.remove()
