"""What makes a model faster on a GPU, for inference only."""

import torch
import torch.nn as nn


def _has_custom_operators(module: nn.Module) -> bool:
    """Return True if there are operators of mmcv, which read maps as contiguous ones."""
    return any(type(m).__module__.startswith('mmcv.ops') for m in module.modules())


def _channels_last_(model: nn.Module) -> None:
    for owner in model.modules():
        for name in ('neck', 'bbox_head', 'rpn_head', 'mask_head', 'decode_head'):
            part = getattr(owner, name, None)
            readers = model if name == 'neck' else part  # a neck's maps go to all heads
            if isinstance(part, nn.Module) and not _has_custom_operators(readers):
                part.to(memory_format=torch.channels_last)


def faster_on_gpu_(model: nn.Module) -> nn.Module:
    """Prepare a detector, segmentor, classifier or backbone on a GPU for inference, in place.

    The convolutions of necks and heads get the memory format ``channels_last``, which matrix units
    need, except where operators of mmcv such as RoIAlign read the maps. Weights and the state dict
    stay the same. On another device, nothing changes. The model may be wrapped (DDP).
    """
    device = next((p.device for p in model.parameters()), torch.device('cpu'))
    if device.type == 'cuda':
        _channels_last_(model)
    return model
