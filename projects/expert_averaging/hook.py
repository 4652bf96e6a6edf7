"""The averaging, after each step of a training."""

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from projects.expert_averaging.experts import average_experts


@HOOKS.register_module()
class AverageExpertsHook(Hook):
    """Moves every expert towards the mean of the others after each step of the optimizer.

    `Experts Weights Averaging <https://arxiv.org/abs/2308.06093>`_.

    Args:
        rate (float): How far, in [0, 1]. Defaults to 1e-3.

    Raises:
        ValueError: In training, if the rate is not in [0, 1] or the model has no experts.
    """

    # Before EMAHook (NORMAL), which averages what comes of it.
    priority = 'ABOVE_NORMAL'

    def __init__(self, rate: float = 1e-3) -> None:
        self.rate = rate

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        # Of several batches whose gradients are gathered, the last one ends with a step.
        if runner.optim_wrapper.should_update():
            average_experts(runner.model, self.rate)
