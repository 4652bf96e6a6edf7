"""Parameters and multiply-adds."""

import copy
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_CONVS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED_CONVS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, without buffers."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Multiply-adds of linear and convolution layers for one image.

    The attention products and the norms are left out, as in the paper's tables.

    Args:
        model (nn.Module): A backbone or another model that takes a tensor.
        input_shape (tuple): Shape of one image, (channels, height, width).
    """
    return macs_by_part(model, input_shape)['']


def macs_by_part(
    model: nn.Module, input_shape: tuple[int, ...], data_samples: list | None = None
) -> dict[str, int]:
    """As :func:`count_macs`, for a model and each of its children.

    Args:
        model (nn.Module): A model that takes a tensor; with ``data_samples`` a detector, segmentor
            or classifier.
        input_shape (tuple): Shape of one image, (channels, height, width).
        data_samples (list, optional): What a detector needs to know about that image, such as
            ``img_shape``.

    Returns:
        dict: Multiply-adds by the child's name; those of the whole model are under the empty name.
    """
    macs = run_counted(model, input_shape, data_samples).macs
    return {name: macs[name] for name in ('', *(name for name, _ in model.named_children()))}


def run_counted(
    model: nn.Module,
    input_shape: tuple[int, ...],
    data_samples: list | None = None,
    counter: 'OperationCounter | None' = None,
) -> 'OperationCounter':
    """Run a model in eval mode on an empty image, and count what it does.

    The model stays as it is; its device may be 'meta'. The arguments are those of
    :func:`macs_by_part`.

    Returns:
        OperationCounter: ``counter``, or a new one.
    """
    counter = counter or OperationCounter()
    model = copy.deepcopy(model)
    # On a line of its own: the eval() of some backbones returns None.
    model.eval()
    param = next(model.parameters())
    x = torch.zeros(1, *input_shape, device=param.device, dtype=param.dtype)
    counter.watch(model)
    with torch.no_grad(), counter:
        if data_samples is None:
            model(x)
        else:
            model(x, data_samples, mode='tensor')
    return counter


class OperationCounter(TorchFunctionMode):
    """Counts the multiply-adds of weights while models run under it.

    A module can name other functions of torch that multiply by its weights in an attribute
    ``weight_operators``, such as ``('bmm',)``.

    Attributes:
        macs (Counter): Multiply-adds of all operations under the empty name, and those in a child
            of a watched model under the child's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.macs: Counter[str] = Counter()
        self._inside: list[tuple[str, nn.Module]] = []

    def watch(self, model: nn.Module) -> None:
        """Attribute operations to the children of a model, by hooks that stay."""
        # All modules, since MMSegmentation calls the forward() of some, past their hooks.
        for name, module in model.named_modules():
            entry = name.partition('.')[0], module
            module.register_forward_pre_hook(lambda *_, entry=entry: self._inside.append(entry))
            module.register_forward_hook(lambda *_: (self._inside.pop(), None)[1])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, module = self._inside[-1] if self._inside else ('', None)
        operators = getattr(module, 'weight_operators', ())
        macs = self._macs(func, (*args, *kwargs.values()), out, operators)
        if macs:
            for part in {'', name}:
                self.macs[part] += macs
        self.count(func, args, kwargs, out)
        return out

    def count(self, func, args: tuple, kwargs: dict, out) -> None:
        """Count more of an operation, in a subclass."""

    @staticmethod
    def _macs(func, args: tuple, out, operators: tuple) -> int:
        if func is F.linear or func in _CONVS:
            return out.numel() * args[1][0].numel()
        if func in _TRANSPOSED_CONVS:
            return args[0].numel() * args[1][0].numel()
        if func in (torch.addmm, torch.Tensor.addmm):
            return out.numel() * args[1].shape[1]
        if func in (torch.mm, torch.Tensor.mm) or getattr(func, '__name__', '') in operators:
            return out.numel() * args[0].shape[-1]
        return 0


def image_channels(backbone: nn.Module) -> int:
    """Number of channels of the images that a backbone takes: those of its first convolution."""
    return next((m.in_channels for m in backbone.modules() if isinstance(m, nn.Conv2d)), 3)


@torch.no_grad()
def image_size(backbone: nn.Module, other: tuple[int, int] | None = None) -> tuple[int, int]:
    """Height and width of the image that a backbone is looked at with.

    Args:
        backbone (nn.Module): In eval mode.
        other (tuple, optional): A size that it takes. Not all backbones have an ``img_size``.

    Returns:
        tuple: 224x224. If the backbone takes only images of the size that it was built for, as a
        Mixer does, that size.
    """
    sizes = [(224, 224)]
    built_for = getattr(backbone, 'img_size', None) or other
    if built_for is not None:
        sizes.append(
            tuple(built_for) if isinstance(built_for, (tuple, list)) else (built_for, built_for)
        )
    if len(set(sizes)) > 1:
        try:
            count_macs(backbone, (image_channels(backbone), 224, 224))
        except Exception:  # backbones have assertions and errors of all kinds for it
            return sizes[1]
    return 224, 224
