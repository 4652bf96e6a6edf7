"""Swin's window attention and patch merging without needless copies.

The modules have the parameters and outputs of the stock modules of MMPretrain, MMDetection and
MMSegmentation:

- On GPUs, attention is one Triton kernel each way, see :mod:`.kernels`.
- For inference on CPUs, tokens are gathered into windows once, in the order of the windows' masks,
  see :mod:`.windows`. The windows are processed in chunks that fit the caches.
- In graphs, and for training on CPUs, attention is a few of PyTorch's operators.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import PatchMerging
from mmpretrain.models.utils.attention import ShiftWindowMSA

from repa_mm.faster.windows import (
    Geometry,
    gather,
    is_traced,
    masks,
    materialize,
    partition,
    symbolic_mul,
    traceable_partition,
)
from repa_mm.reparam import DeployForm, TrainingForm
from repa_mm.reparam.autograd import autocast_dtype, is_compiling
from repa_mm.surgery import has_stock_forward, replaced_methods

# Where the stock modules are defined.
_ATTENTION = (
    'mmpretrain.models.utils.attention',
    'mmdet.models.backbones.swin',
    'mmseg.models.backbones.swin',
)
MERGING = (
    'mmcv.cnn.bricks.transformer',
    'mmdet.models.layers.transformer.utils',
    'mmseg.models.utils.embed',
)
# Tokens per chunk: few enough to fit the caches, and enough for efficient matrix products.
_CHUNK = 2048


def split_heads(
    qkv: torch.Tensor, num_heads: int, v_dims: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv (n, N, h (2 r + s)) of h heads into q, k (n, h, N, r) and v (n, h, N, s)."""
    dims = (qkv.shape[2] - v_dims) // 2
    parts = qkv.split([dims, dims, v_dims], 2)
    return tuple(part.unflatten(2, (num_heads, -1)).transpose(1, 2) for part in parts)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute ``scaled_dot_product_attention`` of q, k (n, heads, N, r) and v (n, heads, N, s)."""
    # Padded with zeros, since unequal widths fall to a slow kernel on CPUs.
    width = max(q.shape[3], v.shape[3])
    padded = [F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v)]
    x = F.scaled_dot_product_attention(*padded, attn_mask=bias, dropout_p=dropout, scale=scale)
    return x[..., : v.shape[3]]


# The kernels are an operator for torch.compile, which PyTorch 2.6 has.
_HAS_OPERATORS = hasattr(torch.library, 'triton_op')
# Dimensions of a head that the Triton kernel can take.
_WIDEST_HEADS = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 32}


@torch.compiler.assume_constant_result
def has_kernels(device: torch.device) -> bool:
    """Return True if the Triton kernels run on a device: on NVIDIA's GPUs from Ampere on."""
    return device.type == 'cuda' and _runs_kernels(device)


@cache
def _runs_kernels(device: torch.device) -> bool:
    if not _HAS_OPERATORS or not torch.version.cuda:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from repa_mm.faster.kernels import window_attention

        x, index = torch.ones(1, 4, 48, device=device), torch.ones(4, 4, device=device).long()
        window_attention(x, x[0, 0], x[0, :, :1], index, 2, 2, 2, 0, 16, 1.0)
    except ImportError:
        return False
    except Exception as error:  # Triton needs a C compiler and Python's headers
        reason = f'{type(error).__name__}: {error}'
        warnings.warn(f'slower attention, since Triton does not work here: {reason}')
        return False
    return True


def is_stock(module: nn.Module, name: str, where: Sequence[str]) -> bool:
    """Return True if a module's class is one of a stock package, by its name."""
    # By name, since codebases have copies of the classes; subclasses may compute something else.
    return type(module).__name__ == name and type(module).__module__ in where


def is_window_attention(w_msa: nn.Module) -> bool:
    """Return True if a module computes what a stock ``WindowMSA`` with its weights does.

    Deploy forms with all of the children of a ``WindowMSA`` do, too.
    """
    return (
        (isinstance(w_msa, DeployForm) or is_stock(w_msa, 'WindowMSA', _ATTENTION))
        and has_stock_forward(w_msa, softmax=(nn.Softmax,), attn_drop=(nn.Dropout,))
        and w_msa.softmax.dim == -1
        and hasattr(w_msa.proj, 'in_features')  # adapters have none
    )


class FastShiftWindowMSA(ShiftWindowMSA):
    """A ``ShiftWindowMSA`` with the same outputs in less time and memory.

    Arguments, parameters and the state dict are those of ``ShiftWindowMSA``. The weights decide the
    widths of the heads. A training form may take the place of ``w_msa``.
    """

    # The modules of MMDetection and MMSegmentation lack this argument, and always pad.
    pad_small_map = True

    def forward(self, query: torch.Tensor, hw_shape: Sequence[int]) -> torch.Tensor:
        """Compute attention of tokens (B, H * W, C), with H and W in ``hw_shape``, in windows."""
        # The parent calls all that was put there: forms, hooks, and modules of other kinds.
        if isinstance(self.w_msa, TrainingForm) or not self._is_ordinary():
            return super().forward(query, hw_shape)
        x = self._choose(query)(query, self.geometry(query, hw_shape))
        return self.drop(self.w_msa.proj_drop(x))

    def geometry(self, query: torch.Tensor, hw_shape: Sequence[int]) -> Geometry:
        """Return the windows of a map. The shift may depend on a graph's input."""
        height, width = hw_shape
        # As the parent.
        assert query.shape[1] == height * width, f"{query.shape[1]} tokens don't match {hw_shape}"
        assert self.pad_small_map or min(height, width) >= self.window_size, (
            f'{hw_shape} is smaller than the window size {self.window_size}: set '
            'pad_small_map=True, or decrease window_size'
        )
        window, shift = self.window_size, self.shift_size
        if shift and not self.pad_small_map:
            # A map of one window is not shifted, which a graph decides when it runs.
            if torch.is_tensor(height):
                shift = shift * (torch.minimum(height, width) > window)
            elif min(height, width) <= window:
                shift = 0
        return Geometry(height, width, window, shift)

    def qkv(self, windows: torch.Tensor, padded: torch.Tensor | None) -> torch.Tensor:
        """Compute queries, keys and values (n, N, 3 C) of windows (n, N, C).

        Subclasses may override this method. ``padded`` (P, 1) is True for padding tokens, and
        repeats for every P tokens of the windows.
        """
        return self.w_msa.qkv(windows)

    def _choose(self, query: torch.Tensor) -> Callable[..., torch.Tensor]:
        """Return the forward pass that is fastest here, see docs/benchmarks.md."""
        is_graph = type(query) is not torch.Tensor or torch.jit.is_tracing()
        # Compiled code takes operators that it can differentiate, or that it computes faster.
        is_compiled, has_gradients = is_compiling(), torch.is_grad_enabled()
        is_dropping = self.w_msa.attn_drop.training and self.w_msa.attn_drop.p
        if is_graph or is_dropping or is_compiled and has_gradients:
            return self._forward_plain
        if _HAS_OPERATORS and has_kernels(query.device) and self._fits_kernel(query):
            return self._forward_kernel
        # A graph for images of any size cannot have a number of chunks that depends on the image.
        if query.device.type == 'cpu' and len(query) and not is_compiled and not has_gradients:
            return self._forward_chunks
        return self._forward_plain

    def _fits_kernel(self, query: torch.Tensor) -> bool:
        """Return True if scores and tokens of a window fit into registers and shared memory."""
        w_msa = self.w_msa
        if self.window_size > 8 or not self._has_linear_qkv():
            return False
        values = w_msa.proj.in_features
        width = max(w_msa.qkv.out_features - values, 2 * values) // 2 // w_msa.num_heads
        dtype = autocast_dtype(query.device.type) or query.dtype
        return width <= _WIDEST_HEADS.get(dtype, 0)

    @torch.compiler.assume_constant_result
    def _is_ordinary(self) -> bool:
        """Return True if the paths here compute what the parent does, or have own queries."""
        has_own = type(self).qkv is not FastShiftWindowMSA.qkv
        return has_own or not replaced_methods(self) and is_window_attention(self.w_msa)

    @torch.compiler.assume_constant_result
    def _has_linear_qkv(self) -> bool:
        """Return True if queries, keys and values are those of a linear layer, also of padding."""
        is_linear = has_stock_forward(self.w_msa.qkv, nn.Linear)
        return is_linear and type(self).qkv is FastShiftWindowMSA.qkv

    def _forward_kernel(self, query, geometry):
        from repa_mm.faster.kernels import window_attention

        w_msa = self.w_msa
        qkv, bias = w_msa.qkv(query), w_msa.qkv.bias
        if bias is None:
            bias = qkv.new_zeros(qkv.shape[-1])
        table, index = w_msa.relative_position_bias_table, w_msa.relative_position_index
        how = *geometry, w_msa.proj.in_features, w_msa.scale
        return w_msa.proj(window_attention(qkv, bias, table, index, *how))

    def _forward_chunks(self, query, geometry):
        w_msa, num_tokens, channels = self.w_msa, geometry.window**2, query.shape[-1]
        rows, positions, padded, groups = partition(geometry, len(query), query.device)
        x, bias, parts = query.reshape(-1, channels), self.bias(geometry.shift, query.dtype), []
        size = max(_CHUNK // num_tokens, 1)
        for first, last, mask in groups:
            for start in range(first, last, size):
                chunk = slice(start * num_tokens, min(start + size, last) * num_tokens)
                is_padded = None if padded is None else padded[chunk]
                windows = gather(x, rows[chunk], is_padded).view(-1, num_tokens, channels)
                qkv = self.qkv(windows, is_padded)
                q, k, v = split_heads(qkv, w_msa.num_heads, w_msa.proj.in_features)
                heads = attend(q, k, v, w_msa.scale, bias[mask, None].to(q.dtype))
                parts.append(w_msa.proj(heads.transpose(1, 2).flatten(2)).flatten(0, 1))
        return torch.cat(parts).index_select(0, positions).view(query.shape)

    def _forward_plain(self, query, geometry):
        w_msa, window, shift = self.w_msa, geometry.window, geometry.shift
        (batch, _, channels), heads = query.shape, w_msa.num_heads
        rows, positions, padded, mask = traceable_partition(geometry, query.device)
        q, k, v = self._heads(gather(query, rows, padded).view(-1, window**2, channels), padded)
        # In four dimensions, which OpenVINO fuses into one operation. The mask is apart from the
        # bias, since a sum of both would be computed for each window and head.
        scores = q @ k.transpose(2, 3) + materialize(self.bias(0, q.dtype).contiguous())
        is_known = isinstance(shift, int)
        if not is_known:
            mask = symbolic_mul(mask, shift // self.shift_size)
        if not is_known or shift:
            of_windows = masks(window, self.shift_size, query.device)[mask.repeat(batch)]
            scores = scores + materialize(of_windows.to(q.dtype))
        x = w_msa.attn_drop(scores.softmax(-1)) @ v
        # One gather undoes the windows and puts the heads side by side.
        positions, head = positions[:, None], torch.arange(heads, device=x.device)
        rows = (positions // window**2 * heads + head) * window**2 + positions % window**2
        x = x.reshape(batch, padded.shape[0] * heads, v.shape[-1]).index_select(1, rows.flatten())
        return w_msa.proj(x.view(query.shape[:2] + (w_msa.proj.in_features,)))

    def _heads(self, x, padded):
        """Compute queries times the scale, keys and values (n, heads, N, width) of windows."""
        w_msa, layer, values = self.w_msa, self.w_msa.qkv, self.w_msa.proj.in_features
        if not is_traced() or not self._has_linear_qkv():
            q, k, v = split_heads(self.qkv(x, padded), w_msa.num_heads, values)
            return q * w_msa.scale, k, v
        # Three products, since runtimes would copy parts of one. In files, slices and the scale
        # become constants.
        queries = (layer.out_features - values) // 2
        sizes, scales, parts = [queries, queries, values], [w_msa.scale, 1, 1], []
        biases = [None] * 3 if layer.bias is None else layer.bias.split(sizes)
        for weight, bias, scale in zip(layer.weight.split(sizes), biases, scales):
            part = F.linear(x, weight * scale, None if bias is None else bias * scale)
            part = part.view(*x.shape[:2], w_msa.num_heads, len(weight) // w_msa.num_heads)
            parts.append(part.transpose(1, 2))
        return parts

    def bias(self, shift: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of relative position bias and mask for each kind of window.

        The kinds are inner, right, bottom and corner windows, (4, heads, N, N), or one without a
        shift.
        """
        table = self.w_msa.relative_position_bias_table
        bias = F.embedding(self.w_msa.relative_position_index, table).permute(2, 0, 1)[None]
        if shift:
            bias = bias + masks(self.window_size, shift, table.device).to(table.dtype)
        return bias.to(dtype)


class FastPatchMerging(PatchMerging):
    """mmcv's ``PatchMerging`` for patches that do not overlap.

    One permuted copy replaces ``nn.Unfold``, which needs a copy before and a copy after it.
    """

    def forward(self, x: torch.Tensor, input_size: Sequence[int]):
        """Return the merged tokens of (B, H * W, C), and height and width of their map."""
        batch, _, channels = x.shape
        height, width = input_size
        kernel_h, kernel_w = self.sampler.kernel_size
        x = x.view(batch, height, width, channels)
        out_h = (height + kernel_h - 1) // kernel_h
        out_w = (width + kernel_w - 1) // kernel_w
        if not self.is_ordinary():  # there are hooks, say
            x = self.sampler(_padding(self)(x.permute(0, 3, 1, 2))).transpose(1, 2)
        else:
            pad_h, pad_w = out_h * kernel_h - height, out_w * kernel_w - width
            # A traced graph always pads, to accept odd and even sizes.
            if is_traced() or pad_h or pad_w:
                is_centred = _padding(self).padding == 'same'
                top, left = (pad_h // 2, pad_w // 2) if is_centred else (0, 0)
                x = F.pad(x, (0, 0, left, pad_w - left, top, pad_h - top))
            x = x.view(batch, out_h, kernel_h, out_w, kernel_w, channels)
            # In Unfold's order, where the position in the patch changes fastest.
            x = x.permute(0, 1, 3, 5, 2, 4).reshape(batch, out_h * out_w, -1)
        if self.norm is not None:
            x = self.norm(x)
        return self.reduction(x), (out_h, out_w)

    @torch.compiler.assume_constant_result
    def is_ordinary(self) -> bool:
        """Return True if patches do not overlap, and stock modules pad and gather them."""
        padding, sampler = _padding(self), self.sampler
        return (
            type(padding).__name__ in ('AdaptivePadding', 'PatchPadding')
            and has_stock_forward(padding)
            and has_stock_forward(sampler, nn.Unfold)
            and sampler.kernel_size == sampler.stride
            and sampler.dilation == (1, 1)
        )


def _padding(merging: nn.Module) -> nn.Module | None:
    return getattr(merging, 'adaptive_padding', None) or getattr(merging, 'adap_padding', None)


def fast_class(module: nn.Module, *_) -> type | None:
    """Return the fast class of a stock module, or None."""
    if is_stock(module, 'ShiftWindowMSA', _ATTENTION):
        is_ordinary = not replaced_methods(module) and is_window_attention(module.w_msa)
        return FastShiftWindowMSA if is_ordinary else None
    is_merging = is_stock(module, 'PatchMerging', MERGING) and FastPatchMerging.is_ordinary(module)
    return FastPatchMerging if is_merging else None
