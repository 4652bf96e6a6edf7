"""Merging in float64, and checks of what is merged."""

import itertools

import torch
import torch.nn as nn


def double(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to float64, on the CPU where the device has none (MPS)."""
    if tensor.device.type == 'mps':
        tensor = tensor.cpu()
    return tensor.detach().double()


def any_of(mask: torch.Tensor) -> bool:
    """Return whether an element is true. On the meta device no element is."""
    return not mask.is_meta and bool(mask.any())


def rounded(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """Round a float64 tensor to a parameter of another one's dtype and device.

    Raises:
        ValueError: If a value exceeds the range of that dtype.
    """
    # A copy: training is not to change the deploy form.
    result = value.to(like, copy=True)
    if any_of(~result.isfinite()):
        raise ValueError(
            f'the merged weights, up to {value.abs().max():.1e}, exceed the range of {like.dtype}: '
            'merge the model in another dtype'
        )
    return nn.Parameter(result)


def batch_norm_affine(norm: nn.Module, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the affine map s x + t that a BatchNorm is in eval mode.

    Args:
        norm (nn.Module): A BatchNorm, or a module that leaves its input as it is.
        like (torch.Tensor): A float64 matrix of shape (out, in) that the norm's output meets.

    Returns:
        tuple: s and t, float64 vectors of shape (in, ).

    Raises:
        ValueError: If the BatchNorm has no running statistics, or a variance is 0 with eps = 0.
    """
    s = like.new_ones(like.shape[1])
    t = torch.zeros_like(s)
    # By attribute, since mmcv's SyncBatchNorm does not derive from torch's.
    if not hasattr(norm, 'running_mean'):
        return s, t
    if norm.running_mean is None:
        raise ValueError(
            'a BatchNorm without running statistics (track_running_stats=False) cannot be merged'
        )
    s = (double(norm.running_var) + norm.eps).rsqrt()
    if any_of(s.isinf()):
        raise ValueError('a BatchNorm with eps=0 and channels of variance 0 cannot be merged')
    if norm.affine:
        s, t = s * double(norm.weight), double(norm.bias)
    return s, t - s * double(norm.running_mean)


def is_plain(module: nn.Module, *kinds: type) -> bool:
    """Return whether a module runs the unmodified forward of one of these classes, unhooked."""
    kind = next((kind for kind in kinds if isinstance(module, kind)), None)
    return (
        kind is not None
        and type(module).forward is kind.forward
        and 'forward' not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def exact(layer: nn.Module, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias of a linear layer in float64; a bias that is not there is 0.

    Args:
        layer (nn.Module): The layer.
        what (str): What messages call it.

    Raises:
        ValueError: If something else is in its place.
    """
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise ValueError(
            f'{what} is a {type(layer).__name__}, and not an nn.Linear: an adapter is to be merged '
            'into the layer first'
        )
    weight = double(layer.weight)
    return weight, weight.new_zeros(len(weight)) if layer.bias is None else double(layer.bias)


def check_dropouts(form: nn.Module) -> None:
    """Check the modules that a merge leaves out, ``drop`` and ``dropout_layer`` of a form.

    Raises:
        ValueError: If one of them is no dropout.
    """
    for name in ('drop', 'dropout_layer'):
        module = getattr(form, name)
        # By name: mmcv and timm have a DropPath each.
        if type(module).__name__ not in ('Dropout', 'DropPath', 'Identity'):
            raise ValueError(
                f'its {name} is a {type(module).__name__}, and not a dropout, which the merge '
                'leaves out'
            )


def is_batch_norm(norm: nn.Module) -> bool:
    """Return whether a module computes what torch's BatchNorms compute in eval mode."""
    # mmcv's SyncBatchNorm derives from nn.Module alone.
    return type(norm).__module__.startswith('mmcv.ops.sync_bn') or type(norm).forward in (
        nn.BatchNorm1d.forward,
        nn.SyncBatchNorm.forward,
    )


def _count(tensor: torch.Tensor, wrong: torch.Tensor, what: str) -> str:
    n = int(wrong.sum())
    return (
        f'has {n} value{"s" * (n > 1)} (of {tensor.numel()}) that {"are" if n > 1 else "is"} {what}'
    )


def check_finite(module: nn.Module) -> None:
    """Check the parameters and the BatchNorm statistics of a module.

    Args:
        module (nn.Module): Any module or model.

    Raises:
        ValueError: Naming the first one of a dtype that cannot be computed with, or with values
            that are infinite, not a number, or a variance below 0.
    """
    tensors = itertools.chain(
        module.named_parameters(),
        (
            item
            for item in module.named_buffers()
            if item[0].endswith(('running_mean', 'running_var', 'layer_scale'))
        ),
    )
    found = []
    for name, tensor in tensors:
        if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits < 16:
            raise ValueError(
                f'{name} is of type {tensor.dtype}, in which torch does not compute: merge the '
                'model in float32, bfloat16 or float16, and cast it afterwards'
            )
        infinite = ~tensor.isfinite()
        if any_of(infinite):
            found.append(f'{name} {_count(tensor, infinite, "not finite")}')
        elif name.endswith('running_var') and any_of(tensor < 0):
            found.append(f'{name} {_count(tensor, tensor < 0, "negative")}')
    if found:
        more = f' (and {len(found) - 1} more like it)' * (len(found) > 1)
        raise ValueError(found[0] + more)
