"""Window partition of feature maps, and the masks of shifted windows.

Padding, cyclic shift and window partition are one gather of tokens, and their inverse is another
gather. A shifted window needs a mask only if it wraps around the feature map, so there are four
masks (inner, right, bottom, corner) for any size. The windows are gathered in this order.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from repa_mm.reparam.autograd import is_compiling


def is_traced() -> bool:
    """Return True within torch.jit.trace, torch.compile or torch.export."""
    return torch.jit.is_tracing() or is_compiling()


class Geometry(NamedTuple):
    """Windows on a feature map. In traces, height, width and shift may be tensors."""

    height: int
    width: int
    window: int  # side of a window
    shift: int


class Windows(NamedTuple):
    """The window partition of a batch of feature maps, with N tokens per window.

    ``rows`` (num_windows * N, ) has the index of the token at each place of the windows, and
    ``positions`` (B * H * W, ), its inverse, the place of each token. ``padded`` (num_windows * N,
    1) is True for padding, None without padding. ``groups`` has first window, last window + 1 and
    index of the mask, for each mask in use.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    padded: torch.Tensor | None
    groups: list[tuple[int, int, int]]


@lru_cache(maxsize=32)
def partition(geometry: Geometry, batch: int, device: torch.device) -> Windows:
    """Return the window partition of a batch of feature maps, as one list of B * H * W tokens."""
    # Tensors that are cached in inference mode could not be used for training later.
    with torch.inference_mode(False), torch.no_grad():
        height, width, window, shift = geometry
        rows, positions, padded, mask = traceable_partition(geometry, device)
        mask = (mask if shift else torch.zeros_like(mask)).repeat(batch)
        order, size = mask.argsort(stable=True), window**2
        images = torch.arange(batch, device=device)[:, None]
        rows = (rows + images * height * width).view(-1, size)[order].flatten()
        positions = (positions + images * len(padded)).flatten()
        positions = order.argsort()[positions // size] * size + positions % size
        is_padded = bool(height % window or width % window)
        padded = padded.view(-1, size).repeat(batch, 1)[order].view(-1, 1) if is_padded else None
        counts = torch.bincount(mask, minlength=4).tolist()
    stops = accumulate(counts)
    groups = [(j - n, j, i) for i, (n, j) in enumerate(zip(counts, stops)) if n]
    return Windows(rows, positions, padded, groups)


def traceable_partition(
    geometry: Geometry, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``rows``, ``positions`` and ``padded`` of one map, and each window's mask index.

    The arithmetic is traceable for any size. Symbolic pads and rolls would take minutes to compile.
    The windows are in the order of the feature map.
    """
    height, width, window, shift = geometry
    h, last_h = _axis(height, window, shift, device)
    w, last_w = _axis(width, window, shift, device)
    # len() would be a constant of the traced graph.
    num_h, num_w = last_h.shape[0], last_w.shape[0]
    h, w = h[:, None, :, None], w[:, None]
    padded = ((h >= height) | (w >= width)).view(-1, 1)
    rows = symbolic_mul(h.clamp(max=height - 1), width) + w.clamp(max=width - 1)
    rows = materialize(rows.flatten())
    h = torch.arange(height, device=device)[:, None]
    w = torch.arange(width, device=device)
    h = _wrap(h + num_h * window - shift, num_h * window)
    w = _wrap(w + num_w * window - shift, num_w * window)
    positions = (symbolic_mul(h // window, num_w) + w // window) * window + h % window
    positions = materialize((positions * window + w % window).flatten())
    return rows, positions, materialize(padded), (2 * last_h[:, None] + last_w).flatten()


def _axis(size: int, window: int, shift: int, device: torch.device):
    """Return positions (n, window) of n windows along an axis, and 1 for the last window, else 0.

    Positions from ``size`` on are padding.
    """
    n = (size + window - 1) // window
    starts = torch.arange(n, device=device)
    positions = starts[:, None] * window + torch.arange(window, device=device) + shift
    return _wrap(positions, n * window), (starts == n - 1).long()


def symbolic_mul(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x * size in a form that exports to ONNX if the size is not a constant."""
    return x * x.new_full((), size)


def _wrap(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x % size for x below 2 * size, in a form that exports to ONNX."""
    return x - symbolic_mul((x >= size).long(), size)


def materialize(x: torch.Tensor) -> torch.Tensor:
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


def gather(x: torch.Tensor, rows: torch.Tensor, padded: torch.Tensor | None) -> torch.Tensor:
    """Gather rows of x (..., n, C), with zeros where ``padded`` is True."""
    x = x.index_select(-2, rows)
    # Inductor of torch 2.1 fails on selections with a condition that it can compute.
    return x if padded is None else x * ~padded
