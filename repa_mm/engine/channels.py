"""Whether the parts of a model fit together."""

import torch.nn as nn

from repa_mm.reparam import innermost


def check_channels(model: nn.Module) -> None:
    """Check that the neck, or else the decode heads, take what the backbone puts out.

    Only what tells its channels as Swin, FPN and UPerHead do is checked: others have errors of
    their own.

    Args:
        model (nn.Module): A detector or segmentor, wrapped or not.

    Raises:
        ValueError: If the channels are others; names both.
    """
    model = innermost(model)
    backbone = getattr(model, 'backbone', None)
    features, stages = (getattr(backbone, key, None) for key in ('num_features', 'out_indices'))
    if not isinstance(features, (list, tuple)) or not isinstance(stages, (list, tuple)):
        return
    outputs = [features[stage] for stage in stages]
    with_neck = getattr(model, 'neck', None) is not None
    for name in ['neck'] if with_neck else ['decode_head', 'auxiliary_head']:
        part = getattr(model, name, None)
        expected = getattr(part, 'in_channels', None)
        if isinstance(expected, int) and isinstance(getattr(part, 'in_index', None), int):
            expected, chosen = [expected], [part.in_index]
        elif isinstance(expected, (list, tuple)):
            chosen = getattr(part, 'in_index', range(len(outputs)))
        else:
            continue
        fits = all(-len(outputs) <= i < len(outputs) for i in chosen)
        if not fits or [outputs[i] for i in chosen] != list(expected):
            raise ValueError(
                f'the {type(backbone).__name__} puts out {outputs} channels (out_indices='
                f'{tuple(stages)}), but the {type(part).__name__} takes {list(expected)}: change '
                f'model.{name}.in_channels, or the size or out_indices of model.backbone'
            )
