"""One table of what makes models faster, or traceable for images of any size.

Whoever changes a model calls :func:`rewrite_`, and whoever writes a config writes what it returned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from mmpretrain.models import PoolFormer

from repa_mm.faster.any_size import TraceableCrossAttention, average_pool, patch_padding
from repa_mm.faster.attention import FastShiftWindowMSA, fast_class
from repa_mm.faster.cuda_graphs import capture_
from repa_mm.faster.deformable import FastDeformableAttention, MultiScaleDeformableAttention
from repa_mm.faster.fusing import fuse_
from repa_mm.surgery import PARTS, replace_


@dataclass(frozen=True)
class Rewrite:
    """A change of modules of a model, which computes the same afterwards.

    ``change`` makes it in place, and returns the names of the modules. ``config`` is the type by
    which a config says it: 'Restructured', of the model around the modules, or else the modules'
    own; None if no config does.
    """

    name: str
    stages: tuple[str, ...]
    change: Callable[[nn.Module], list[str]]
    config: str | None = None


def _becomes(choose: Callable[[nn.Module], type | None]) -> Callable[[nn.Module], list[str]]:
    return partial(replace_, choose=choose)


def _instead_of(stock: type | None, kind: type) -> Callable[[nn.Module], list[str]]:
    return _becomes(lambda module: kind if type(module) is stock else None)


def _uper_head(module: nn.Module) -> type | None:
    if type(module).__name__ != 'UPerHead':
        return None
    from repa_mm.faster.uper_head import FastUPerHead, UPerHead  # they need MMSegmentation

    return FastUPerHead if type(module) is UPerHead and FastUPerHead.is_ordinary(module) else None


def _poolformer_(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if type(module) is PoolFormer]
    if names:  # the deploy form has maps of this format after the first FFN on tokens
        model.to(memory_format=torch.channels_last)
    return names


def channels_last_(model: nn.Module) -> list[str]:
    """Give convolutions of necks and heads this memory format, and return the parts' names."""
    names = []
    for name, part in model.named_modules():
        kind = name.rpartition('.')[2]
        if kind in {*PARTS, 'mask_head'} - {'backbone'}:
            readers = model if kind == 'neck' else part  # a neck's maps go to all heads
            # Operators of mmcv read maps as contiguous ones.
            if not any(type(m).__module__.startswith('mmcv.ops') for m in readers.modules()):
                part.to(memory_format=torch.channels_last)
                names.append(name)
    return names


def _on_gpu_(model: nn.Module) -> list[str]:
    device = next((p.device for p in model.parameters()), torch.device('cpu'))
    return channels_last_(model) if device.type == 'cuda' else []


_DEFORMABLE = _instead_of(MultiScaleDeformableAttention, FastDeformableAttention)
_CROSS = _instead_of(nn.MultiheadAttention, TraceableCrossAttention)
#: In the order in which they are made.
REWRITES = (
    Rewrite('window attention', ('train', 'trace'), _becomes(fast_class), 'Restructured'),
    Rewrite('deformable attention', ('train', 'trace'), _DEFORMABLE, 'Restructured'),
    Rewrite('UPerHead', ('train',), _becomes(_uper_head), 'FastUPerHead'),
    Rewrite('padding', ('trace',), _becomes(patch_padding)),
    Rewrite('cross attention', ('trace',), _CROSS),
    Rewrite('average pool', ('trace',), _becomes(average_pool)),
    Rewrite('PoolFormer', ('infer',), _poolformer_),
    Rewrite('BatchNorm', ('infer',), fuse_),
    Rewrite('channels last', ('cuda',), _on_gpu_),
    Rewrite('CUDA graphs', ('graphs',), capture_),
)


def rewrite_(model: nn.Module, *what: str) -> list[tuple[str, Rewrite]]:
    """Make the rewrites of some stages, or some rewrites by name, in a model, in place.

    The stages are

    - 'train': our window and deformable attention and UperNet's faster head. Outputs, gradients and
      the state dict stay the same.
    - 'trace': what a traced graph for images of any size needs: attention of Swins and DETRs as
      above and of SegFormer and PVT, padding to whole patches, and adaptive pooling.
    - 'infer': BatchNorms of :class:`mmcv.cnn.ConvModule` fused into convolutions, and the memory
      format of a PoolFormer. The model is in eval mode afterwards.
    - 'cuda': the memory format of convolutions in necks and heads on a GPU.

    Returns:
        list: The name of each module that has changed, with its rewrite.
    """
    chosen = [rewrite for rewrite in REWRITES if {rewrite.name, *rewrite.stages} & {*what}]
    return [(name, rewrite) for rewrite in chosen for name in rewrite.change(model)]


def fast_window_attention_(model: nn.Module) -> nn.Module:
    """Make the window attention of a Swin faster, in place, and return the model.

    Every ``ShiftWindowMSA`` of MMPretrain, MMDetection or MMSegmentation becomes a
    :class:`FastShiftWindowMSA`, and every ``PatchMerging`` a :class:`FastPatchMerging`. Outputs,
    gradients and the state dict stay the same.

    Raises:
        ValueError: If the model has no stock window attention.
    """
    rewrite_(model, 'window attention')
    if not any(isinstance(module, FastShiftWindowMSA) for module in model.modules()):
        raise ValueError(
            f'nothing to make faster: {type(model).__name__} has no window attention of a stock '
            'Swin of MMPretrain, MMDetection or MMSegmentation'
        )
    return model


def trace_any_size_(model: nn.Module) -> nn.Module:
    """Make a model traceable for images of any size, in place: the stage 'trace'."""
    rewrite_(model, 'trace')
    return model


def fuse_conv_bn_(model: nn.Module) -> nn.Module:
    """Fuse the BatchNorms of mmcv's ConvModules into their convolutions, in place.

    A ConvModule stays as it is if it has a hook, shares its convolution with another ConvModule, or
    has a convolution or norm of another kind. Modules that call the norm of a ConvModule after its
    convolution get the same result. The weights of the result do not load into a model built from
    the config. The model is in eval mode afterwards.

    Raises:
        ValueError: If weights or statistics are not finite, or the fused weights exceed the range
            of their dtype.
    """
    rewrite_(model, 'BatchNorm')
    return model


def faster_on_gpu_(model: nn.Module) -> nn.Module:
    """Prepare a detector, segmentor, classifier or backbone on a GPU for inference, in place.

    The convolutions of necks and heads get the memory format ``channels_last``, which matrix units
    need, except where operators of mmcv such as RoIAlign read the maps. Weights and the state dict
    stay the same. On another device, nothing changes. The model may be wrapped (DDP).
    """
    rewrite_(model, 'cuda')
    return model


def cuda_graphs_(model: nn.Module) -> nn.Module:
    """Let CUDA graphs run the backbone, neck and dense heads of a model, in place.

    The first batch of a size runs three times, to capture them; later ones replay them. A GPU then
    does not wait for Python to launch its kernels, which takes most of the time of one image.
    Post-processing, RoI heads, and the encoder and decoder of a DETR run as before, and so does a
    part whose ``forward`` was replaced, or that has hooks inside; later hooks do not run. For
    inference only; each size keeps memory for its inputs and outputs, so images of many sizes
    should be padded to a few. Outputs stay valid after the next batch.

    Args:
        model (nn.Module): The model in eval mode, on a GPU, after all that replaces its modules.

    Raises:
        ValueError: If the model is not on an NVIDIA GPU.
    """
    rewrite_(model, 'graphs')
    return model
