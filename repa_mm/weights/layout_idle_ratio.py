"""The idle ratio of a checkpoint in the training form, whose shapes do not tell it."""

from collections.abc import Sequence

from repa_mm.reparam import TrainingForm, num_active_channels
from repa_mm.weights.layout_family import Family, Weights

# Distance, in standard deviations, below which the mean of a hidden channel is that of a linear
# one.
_LINEAR = 0.1


def find_active_channels(
    family: Family,
    weights: Weights,
    ffns: dict[str, TrainingForm],
    config: str | None,
    asked: Sequence[float] | None = None,
    args: dict | None = None,
) -> tuple[list[int], str]:
    """Find how many channels of each FFN are active, and say where this comes from.

    ``ffns`` are those of the model that the weights are for, built from ``config`` if there is one;
    ``asked`` and ``args`` are the idle ratios and the arguments that
    :func:`~repa_mm.weights.layout_core.to_mm` takes. A wrong number of ratios, or others than in the
    config, are a ValueError.
    """
    hidden = [ffn.feedforward_channels for ffn in ffns.values()]
    own = [ffn.num_active for ffn in ffns.values()]
    active, source = None, 'assumption'
    args = args if args and args.get('channel_idle') else {}
    ratio = args.get('idle_ratio')
    known = [weights.get(f'{name}.num_active_channels') for name in ffns]
    estimate = estimate_idle_ratio(weights, list(ffns))
    if asked:
        if len(asked) not in (1, len(ffns)):
            raise ValueError(
                f'{len(asked)} idle ratios were given: it takes one, or one for each of '
                f'{len(ffns)} FFNs'
            )
        ratios = list(asked) * (len(ffns) // len(asked))
        active, source = list(map(num_active_channels, hidden, ratios)), 'request'
    elif all(number is not None for number in known):
        active, source = list(map(int, known)), 'the checkpoint'
    elif isinstance(ratio, (int, float)) and 0 <= ratio <= 1:
        active, source = family.active_channels(ratio, hidden, args), "the checkpoint's arguments"
    elif estimate is not None:
        active = [num_active_channels(h, estimate) for h in hidden]
        source = 'the BatchNorm statistics'
    if config and active not in (None, own):
        raise ValueError(
            f'the idle ratio is {shares(active, hidden)} by {source}, and {shares(own, hidden)} in '
            'the config: set model.backbone.idle_ratio'
        )
    if active is None:
        fixed = "the authors' code" if family.only_ratio else source
        active, source = own, 'the config' if config else fixed
    return active, source


def estimate_idle_ratio(weights: Weights, ffns: Sequence[str]) -> float | None:
    """Estimate the idle ratio of a trained model from its BatchNorm statistics.

    An idle channel is linear in the output of the first BatchNorm, whose batch mean is its bias. So
    the mean that the second BatchNorm has recorded of that channel follows from the weights. A
    nonlinearity shifts the mean of an active channel.

    Args:
        weights (dict): With FFNs in the training form.
        ffns (Sequence[str]): Their names.

    Returns:
        float | None: The ratio, if there is one that fits all FFNs.
    """
    keys = ('fc1.weight', 'fc1.bias', 'norm1.bias', 'norm2.running_mean', 'norm2.running_var')
    found = []
    for name in ffns:
        if any(f'{name}.{key}' not in weights for key in keys):
            return None
        w_in, b_in, shift, mean, variance = (weights[f'{name}.{key}'].double() for key in keys)
        distance = (mean - w_in @ shift - b_in).abs() / (variance + 1e-5).sqrt()
        active = (distance > _LINEAR).nonzero().flatten().tolist()
        found.append((active[-1] + 1 if active else 0) / len(mean))
    share = max(found)
    # The last channels are all idle in every FFN, and nowhere far too many.
    return None if share > 0.95 or min(found) < 0.9 * share else 1 - share


def shares(active: Sequence[int], hidden: Sequence[int]) -> float | list[float]:
    """Return idle ratios by numbers of active channels; one number if all are equal."""
    ratios = [round(1 - a / h, 12) for a, h in zip(active, hidden)]
    # 0.9 leaves 308 of 3072 channels active, and 1 - 308 / 3072 is not 0.9.
    plain, same = round(max(ratios), 2), len(set(ratios)) == 1
    if list(active) == [num_active_channels(h, plain) for h in hidden] and not (
        same and abs(plain - ratios[0]) > 1e-3
    ):
        return plain
    return ratios[0] if same else ratios
