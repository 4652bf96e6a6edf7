"""What experts do after every step."""

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from repa_mm.reparam import average_experts


@HOOKS.register_module()
class AverageExpertsHook(Hook):
    """Moves every expert towards the mean of the others after each step of the optimizer.

    `Experts Weights Averaging <https://arxiv.org/abs/2308.06093>`_.

    Args:
        rate (float): How far, in [0, 1]. Defaults to 1e-3.

    Raises:
        ValueError: If the rate is not in [0, 1], or the model has no experts.
    """

    # Before EMAHook (NORMAL), which averages what comes of it.
    priority = 'ABOVE_NORMAL'

    def __init__(self, rate: float = 1e-3) -> None:
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
            raise ValueError(f'the rate must be a number from 0 to 1, but got {rate!r}')
        self.rate = rate

    def before_train(self, runner) -> None:
        # A model without experts is reported before the first step.
        average_experts(runner.model, 0.0)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        # Of several batches whose gradients are gathered, the last one ends with a step.
        if runner.optim_wrapper.should_update():
            average_experts(runner.model, self.rate)
