"""One table of what makes models faster, or traceable for images of any size.

Whoever changes a model calls :func:`rewrite_`, and whoever writes a config writes what it returned.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
from mmpretrain.models import PoolFormer

from repa_mm.faster.any_size import TraceableCrossAttention, average_pool, patch_padding
from repa_mm.faster.attention import FastShiftWindowMSA, fast_class
from repa_mm.faster.cuda_graphs import Captured
from repa_mm.faster.deformable import FastDeformableAttention, MultiScaleDeformableAttention
from repa_mm.faster.fusing import fused_class_
from repa_mm.surgery import PARTS, become_, hooks_of


class Rewrite(NamedTuple):
    """A change of some modules of a model, which computes the same afterwards.

    ``put(module, name, model)`` returns the class that a module becomes, True after a change in
    place, or else None. ``config`` is the type by which a config says it: 'Restructured', of the
    model around the modules, or else the modules' own; None if no config does.
    """

    name: str
    stages: tuple[str, ...]
    put: Callable[[nn.Module, str, nn.Module], type | bool | None]
    config: str | None = None


def _uper_head(module: nn.Module, *_) -> type | None:
    if type(module).__name__ != 'UPerHead':
        return None
    from repa_mm.faster.uper_head import FastUPerHead, UPerHead  # they need MMSegmentation

    return FastUPerHead if type(module) is UPerHead and FastUPerHead.is_ordinary(module) else None


class ContiguousNorm(nn.GroupNorm):
    """GroupNorm of a PoolFormer's maps, whose deploy form is channels-last inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).contiguous()


def _norm_of_maps(module: nn.Module, name: str, model: nn.Module) -> type | None:
    is_own = isinstance(model.get_submodule(name.rpartition('.')[0]), PoolFormer)
    return ContiguousNorm if is_own and type(module) is nn.GroupNorm else None


def _reads_contiguous(model: nn.Module) -> bool:
    return any(type(m).__module__.startswith('mmcv.ops') for m in model.modules())  # RoIAlign


def _poolformer_(module: nn.Module, _, model: nn.Module) -> bool:
    if type(module) is not PoolFormer or _reads_contiguous(model):
        return False
    # The deploy form has maps of this format after the first FFN on tokens.
    model.to(memory_format=torch.channels_last)
    return True


def is_on_gpu(module: nn.Module) -> bool:
    """Return True if a module has parameters on a GPU."""
    return any(parameter.is_cuda for parameter in module.parameters())


def _channels_last_(module: nn.Module, name: str, model: nn.Module) -> bool:
    kind = name.rpartition('.')[2]
    if kind == 'backbone' or kind not in (*PARTS, 'mask_head') or not is_on_gpu(module):
        return False
    if _reads_contiguous(model if kind == 'neck' else module):  # a neck's maps go to all heads
        return False
    module.to(memory_format=torch.channels_last)
    return True


def _capture_(module: nn.Module, name: str, model: nn.Module) -> bool:
    if name not in PARTS or 'forward' in vars(module) or any(map(hooks_of, module.modules())):
        return False
    module.forward = Captured(module)
    return True


def _exactly(kind: type | None, other: type) -> Callable[..., type | None]:
    return lambda module, *_: other if type(module) is kind else None


_DEFORMABLE = _exactly(MultiScaleDeformableAttention, FastDeformableAttention)
_CROSS = _exactly(nn.MultiheadAttention, TraceableCrossAttention)
#: In the order in which they are made.
REWRITES = (
    Rewrite('window attention', ('train', 'trace'), fast_class, 'Restructured'),
    Rewrite('deformable attention', ('train', 'trace'), _DEFORMABLE, 'Restructured'),
    Rewrite('UPerHead', ('train',), _uper_head, 'FastUPerHead'),
    Rewrite('padding', ('trace',), patch_padding),
    Rewrite('cross attention', ('trace',), _CROSS),
    Rewrite('average pool', ('trace',), average_pool),
    Rewrite('maps', (), _norm_of_maps),
    Rewrite('PoolFormer', ('infer',), _poolformer_),
    Rewrite('BatchNorm', ('infer',), fused_class_),
    Rewrite('channels last', ('cuda',), _channels_last_),
    Rewrite('CUDA graphs', ('graphs',), _capture_),
)


def rewrite_(model: nn.Module, *what: str) -> list[tuple[str, Rewrite]]:
    """Make the rewrites of some stages, or some rewrites by name, in a model, in place.

    The stages are

    - 'train': our window and deformable attention and UperNet's faster head. Outputs, gradients and
      the state dict stay the same.
    - 'trace': what a traced graph for images of any size needs: attention of Swins and DETRs as
      above and of SegFormer and PVT, padding to whole patches, and adaptive pooling.
    - 'infer', of a model in eval mode: BatchNorms of ``ConvModule`` fused into convolutions, and
      the memory format of a PoolFormer.
    - 'cuda': the memory format of convolutions in necks and heads on a GPU.
    - 'graphs': CUDA graphs of the model's parts, see :func:`cuda_graphs_`.

    Returns:
        list: The name of each module that has changed, with its rewrite.
    """
    done = []
    for rewrite in REWRITES:
        if {rewrite.name, *rewrite.stages} & {*what}:
            for name, module in list(model.named_modules()):
                if other := rewrite.put(module, name, model):
                    if isinstance(other, type):
                        become_(module, other)
                    done.append((name, rewrite))
    return done


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
    model.eval()
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
    device = next(model.parameters()).device
    if device.type != Captured.device_type:
        raise ValueError(f'CUDA graphs are for a model on an NVIDIA GPU, not on {device}')
    rewrite_(model, 'graphs')
    return model
