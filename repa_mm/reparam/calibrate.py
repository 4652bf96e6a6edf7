"""BatchNorm statistics from data, without training."""

from collections.abc import Callable, Iterable

import torch
import torch.nn as nn

from .ffn import ChannelIdleFFN


class _Statistics:
    """Mean and variance of everything that a BatchNorm has seen."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm
        self.count = 0
        self.mean = torch.zeros(norm.num_features, dtype=torch.float64)
        self.square = torch.zeros_like(self.mean)

    def add(self, count: int) -> None:
        """Add the batch of ``count`` elements that is in the running ones."""
        mean = self.norm.running_mean.cpu().double()
        # Running variances are unbiased.
        var = self.norm.running_var.cpu().double() * (count - 1) / count
        self.count += count
        weight = count / self.count
        self.mean.lerp_(mean, weight)
        self.square.lerp_(var + mean**2, weight)

    def store(self, num_batches: int) -> None:
        var = (self.square - self.mean**2).clamp(min=0)
        self.norm.running_mean.copy_(self.mean)
        self.norm.running_var.copy_(var * self.count / max(self.count - 1, 1))
        self.norm.num_batches_tracked.fill_(num_batches)


@torch.no_grad()
def calibrate_batch_norm(
    model: nn.Module, batches: Iterable, forward: Callable | None = None
) -> int:
    """Estimate the BatchNorm statistics of all channel-idle FFNs from data.

    Like `PreciseBN <https://arxiv.org/abs/2105.07576>`_: the weights stay,
    every batch is normalized with its own statistics, and those of all batches
    are averaged with equal weight for every token, instead of a running
    average that forgets. The variance is that of all batches taken together.
    The rest of the model is in eval mode. If anything fails, the statistics
    are as before.

    Args:
        model (nn.Module): With channel-idle FFNs in their training form.
        batches (Iterable): What ``forward`` takes.
        forward (Callable, optional): Runs the model on a batch. Defaults to
            ``model``.

    Returns:
        int: Number of batches.

    Raises:
        ValueError: If there is no BatchNorm in a channel-idle FFN, no batch,
            or if statistics are not finite.

    Examples:
        >>> calibrate_batch_norm(backbone, itertools.islice(images, 50))
    """
    ffns = [m for m in model.modules() if isinstance(m, ChannelIdleFFN)]
    norms = {
        ffn: [m for m in (ffn.norm1, ffn.norm2) if getattr(m, 'running_mean', None) is not None]
        for ffn in ffns
    }
    if not any(norms.values()):
        raise ValueError(
            f'{type(model).__name__} has no channel-idle FFN with BatchNorm in its training form'
        )
    modes = {m: m.training for m in model.modules()}
    momenta = {n: n.momentum for group in norms.values() for n in group}
    before = {n: {k: b.clone() for k, b in n.named_buffers()} for n in momenta}
    statistics = {n: _Statistics(n) for n in momenta}

    def collect(ffn, inputs, output):
        for norm in norms[ffn]:
            statistics[norm].add(inputs[0].numel() // ffn.embed_dims)

    hooks = [ffn.register_forward_hook(collect) for ffn in ffns]
    num_batches = 0
    try:
        model.eval()
        for ffn in ffns:
            ffn.training = True
        for norm in momenta:
            norm.training = True
            # Running statistics are those of the last batch.
            norm.momentum = 1.0
            norm.reset_running_stats()
        for batch in batches:
            (forward or model)(batch)
            num_batches += 1
        if not num_batches:
            raise ValueError('there is no batch to estimate statistics from')
        for norm, seen in statistics.items():
            if not (seen.mean + seen.square).isfinite().all():
                raise ValueError('the statistics are not finite: the weights or the data are not')
            seen.store(num_batches)
    except BaseException:
        for norm, buffers in before.items():
            for key, value in buffers.items():
                getattr(norm, key).copy_(value)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return num_batches
