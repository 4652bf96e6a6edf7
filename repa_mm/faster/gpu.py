"""What makes a model faster on a GPU, for inference only."""

import torch
import torch.nn as nn

from repa_mm.surgery import PARTS


def _has_custom_operators(module: nn.Module) -> bool:
    """Return True if there are operators of mmcv, which read maps as contiguous ones."""
    return any(type(m).__module__.startswith('mmcv.ops') for m in module.modules())


def channels_last_(model: nn.Module) -> list[str]:
    """Give convolutions of necks and heads this memory format, and return the parts' names."""
    found = []
    for name, part in model.named_modules():
        kind = name.rpartition('.')[2]
        readers = model if kind == 'neck' else part  # a neck's maps go to all heads
        if kind in {*PARTS, 'mask_head'} - {'backbone'} and not _has_custom_operators(readers):
            part.to(memory_format=torch.channels_last)
            found.append(name)
    return found


def channels_last_on_gpu_(model: nn.Module) -> list[str]:
    """Call :func:`channels_last_` if the model is on a GPU."""
    device = next((p.device for p in model.parameters()), torch.device('cpu'))
    return channels_last_(model) if device.type == 'cuda' else []
