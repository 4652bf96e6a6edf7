"""Window partition of feature maps, and the masks of shifted windows.

Padding, cyclic shift and window partition are one gather of tokens, and their inverse is another
gather. A shifted window needs a mask only if it wraps around the feature map, so there are four
masks (inner, right, bottom, corner) for any size. The windows are gathered in this order.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from repa_mm.reparam.autograd import is_compiling


def is_traced() -> bool:
    """Return True within torch.jit.trace, torch.compile or torch.export."""
    return torch.jit.is_tracing() or is_compiling()


class Windows(NamedTuple):
    """The window partition of a batch of feature maps, with N tokens per window.

    Attributes:
        rows (torch.Tensor): Index of the token at each place of the windows, (num_windows * N, ).
        positions (torch.Tensor): Place of each token in the windows, (B * H * W, ), the inverse
            of ``rows``.
        padded (torch.Tensor | None): True for places that are padding, (num_windows * N, 1). None
            without padding.
        groups (list): First window, last window + 1 and index of the mask, for each mask in use.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    padded: torch.Tensor | None
    groups: list[tuple[int, int, int]]


@lru_cache(maxsize=32)
def partition(
    batch: int, height: int, width: int, window: int, shift: int, device: torch.device
) -> Windows:
    """Return the window partition of a batch of feature maps, as one list of B * H * W tokens."""
    # Tensors that are cached in inference mode could not be used for training later.
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.arange(batch * height * width, device=device).view(batch, height, width)
        rows = F.pad(rows, (0, -width % window, 0, -height % window), value=-1)
        rows = torch.roll(rows, (-shift, -shift), (1, 2))
        num_h, num_w = rows.shape[1] // window, rows.shape[2] // window
        rows = rows.view(batch, num_h, window, num_w, window).transpose(2, 3)
        parts = [rows]
        if shift:
            halves = rows.tensor_split([num_h - 1], 1)
            parts = [part for half in halves for part in half.tensor_split([num_w - 1], 2)]
        parts = [part.reshape(-1, window**2) for part in parts]
        rows = torch.cat(parts).flatten()
        padded = rows < 0
        total = batch * height * width
        index = torch.arange(len(rows), device=device)
        # Padding goes to one place more. A selection of the others would make the CPU wait.
        positions = index.new_empty(total + 1)
        positions = positions.scatter_(0, rows.masked_fill(padded, total), index)[:total]
    groups, start = [], 0
    for mask, part in enumerate(parts):
        if len(part):
            groups.append((start, start + len(part), mask))
            start += len(part)
    is_padded = bool(height % window or width % window)
    return Windows(rows.clamp_(min=0), positions, padded[:, None] if is_padded else None, groups)


def traceable_partition(
    height: int, width: int, window: int, shift: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the window partition of one feature map, by arithmetic traceable for any size.

    Symbolic pads and rolls of the feature map would take minutes to compile.

    Returns:
        tuple: ``rows``, ``positions`` and ``padded`` as in :class:`Windows`, with the windows in
        the order of the feature map, and the index of the mask for each window.
    """
    h, last_h = _axis(height, window, shift, device)
    w, last_w = _axis(width, window, shift, device)
    # len() would be a constant of the traced graph.
    num_h, num_w = last_h.shape[0], last_w.shape[0]
    h, w = h[:, None, :, None], w[:, None]
    padded = ((h >= height) | (w >= width)).view(-1, 1)
    rows = times(h.clamp(max=height - 1), width) + w.clamp(max=width - 1)
    rows = buffer(rows.flatten())
    h = torch.arange(height, device=device)[:, None]
    w = torch.arange(width, device=device)
    h = _wrap(h + num_h * window - shift, num_h * window)
    w = _wrap(w + num_w * window - shift, num_w * window)
    positions = (times(h // window, num_w) + w // window) * window + h % window
    positions = buffer((positions * window + w % window).flatten())
    return rows, positions, buffer(padded), (2 * last_h[:, None] + last_w).flatten()


def _axis(size: int, window: int, shift: int, device: torch.device):
    """Return positions (n, window) of n windows along an axis, and which is the last one (n, ).

    The second tensor is 1 for the last window and 0 otherwise. Positions from ``size`` on are
    padding.
    """
    n = (size + window - 1) // window
    starts = torch.arange(n, device=device)
    positions = starts[:, None] * window + torch.arange(window, device=device) + shift
    return _wrap(positions, n * window), (starts == n - 1).long()


def times(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x * size in a form that exports to ONNX if the size is not a constant."""
    return x * x.new_full((), size)


def _wrap(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x % size for x below 2 * size, in a form that exports to ONNX."""
    return x - times((x >= size).long(), size)


def buffer(x: torch.Tensor) -> torch.Tensor:
    """Store x in compiled code, since Inductor would recompute its elements at each use."""
    if not is_compiling() or x.requires_grad and torch.is_grad_enabled():
        return x
    return x.as_strided(x.shape, x.stride())


def masks(window: int, shift: int, device: torch.device) -> torch.Tensor:
    """Return the masks (4, 1, N, N) of inner, right, bottom and corner windows."""
    # As integers, since Inductor fails to compare booleans.
    wraps = (torch.arange(window, device=device) >= window - shift).int()
    down = wraps.repeat_interleave(window)
    right = wraps.repeat(window)
    down, right = down[:, None] != down, right[:, None] != right
    inner = torch.zeros_like(right)
    return -100.0 * torch.stack([inner, right, down, down | right])[:, None]


class _Gather(torch.autograd.Function):
    """:func:`gather` with a backward pass that gathers, where autograd would scatter and add."""

    @staticmethod
    def forward(ctx, x, rows, inverse, padded, padded_inverse):
        ctx.save_for_backward(inverse, padded_inverse)
        return _select(x, rows, padded)

    @staticmethod
    def backward(ctx, grad):
        inverse, padded_inverse = ctx.saved_tensors
        return _select(grad, inverse, padded_inverse), None, None, None, None


def _select(x: torch.Tensor, rows: torch.Tensor, padded: torch.Tensor | None) -> torch.Tensor:
    x = x.index_select(-2, rows)
    if padded is None:
        return x
    # Inductor of torch 2.1 fails on selections with a condition that it can compute.
    return x * ~padded if is_traced() else x.masked_fill_(padded, 0)


def gather(
    x: torch.Tensor,
    rows: torch.Tensor,
    inverse: torch.Tensor,
    padded: torch.Tensor | None = None,
    padded_inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather rows of x (..., n, C), with zeros where ``padded`` is True.

    ``inverse`` and ``padded_inverse`` gather the result back to x, for the backward pass.
    """
    if torch.is_grad_enabled() and not torch.jit.is_tracing():
        return _Gather.apply(x, rows, inverse, padded, padded_inverse)
    return _select(x, rows, padded)
