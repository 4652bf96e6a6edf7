"""BatchNorm statistics from data, without training."""

from collections.abc import Callable, Iterable

import torch
import torch.nn as nn

from .forms import TrainingForm


class _Statistics:
    """Mean and variance of all inputs of a BatchNorm, in float64."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm
        self.count = 0
        self.mean = torch.zeros(norm.num_features, dtype=torch.float64)
        self.square = torch.zeros_like(self.mean)

    def add(self, norm: nn.Module, inputs: tuple) -> None:
        """Add the input of one forward pass; a forward pre-hook of the norm."""
        x = inputs[0].detach().movedim(1, -1).flatten(0, -2)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = x.mean(0, dtype=torch.float64)
        # Two passes: the squares of a large mean would hide the variance.
        var = (x - mean.to(x)).square().mean(0, dtype=torch.float64)
        self.count += len(x)
        weight = len(x) / self.count
        self.mean.lerp_(mean.cpu(), weight)
        self.square.lerp_((var + mean**2).cpu(), weight)

    def store(self, num_batches: int) -> None:
        var = (self.square - self.mean**2).clamp(min=0)
        self.norm.running_mean.copy_(self.mean)
        # Running variances are unbiased.
        self.norm.running_var.copy_(var * self.count / max(self.count - 1, 1))
        self.norm.num_batches_tracked.fill_(num_batches)


@torch.no_grad()
def calibrate_batch_norm(
    model: nn.Module, batches: Iterable, forward: Callable | None = None
) -> int:
    """Estimate the BatchNorm statistics of all training forms from data.

    As in `PreciseBN <https://arxiv.org/abs/2105.07576>`_, the weights stay as they are. Every batch
    is normalized with its own statistics, and the statistics of all batches are averaged with equal
    weight for every token, instead of a running average that forgets. The variance is that of all
    batches taken together. The rest of the model is in eval mode. If anything fails, the statistics
    are as before.

    Args:
        model (nn.Module): With BatchNorms in training forms, such as channel-idle FFNs.
        batches (Iterable): Batches that ``forward`` takes.
        forward (Callable, optional): Runs the model on a batch. Defaults to ``model``.

    Returns:
        int: Number of batches.

    Raises:
        ValueError: If there is no BatchNorm in a training form, no batch, or if statistics are not
            finite.

    Examples:
        >>> calibrate_batch_norm(backbone, itertools.islice(images, 50))
    """
    forms = [m for m in model.modules() if isinstance(m, TrainingForm)]
    statistics = {norm: _Statistics(norm) for form in forms for norm in form.batch_norms()}
    if not statistics:
        raise ValueError(
            f'{type(model).__name__} has no channel-idle FFN or other training form with BatchNorm'
        )
    modes = {m: m.training for m in model.modules()}
    before = {norm: {k: b.clone() for k, b in norm.named_buffers()} for norm in statistics}
    hooks = [norm.register_forward_pre_hook(seen.add) for norm, seen in statistics.items()]
    num_batches = 0
    try:
        model.eval()
        for form in forms:
            # A norm with a hook is called, so that it sees its input on every training path.
            form.training = True
        for norm in statistics:
            norm.training = True
        for batch in batches:
            (forward or model)(batch)
            num_batches += 1
        if not num_batches:
            raise ValueError('there is no batch to estimate statistics from')
        for seen in statistics.values():
            if not (seen.mean + seen.square).isfinite().all():
                raise ValueError('the statistics are not finite: check the weights and the data')
            if not seen.count:
                raise ValueError('a BatchNorm was not used: the batches do not reach it')
            seen.store(num_batches)
    except BaseException:
        for norm, buffers in before.items():
            for key, value in buffers.items():
                getattr(norm, key).copy_(value)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return num_batches
