"""Triton kernels for GPUs: Swin's window attention.

The (shifted, padded) window attention is one kernel each way. Queries, keys and values come from
one linear layer on all tokens, in the order of the feature map. A program attends within one head
of one window after another: it finds the tokens of a window by arithmetic, gives padding what the
linear layer makes of a zero, adds the relative position bias, and -100 between regions of a shifted
map that were not neighbours. So there is no gather, roll, partition or mask.

N is the number of tokens per window, r the width of a head's queries and keys, s that of its
values.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from repa_mm.reparam.autograd import first_order_only, is_compiling

# Fastest of those measured on an H100.
_PROGRAMS = 1056


@triton.jit
def _tokens(window, height, width, num_h, num_w, shift, n, WS: tl.constexpr):
    """Find the tokens of a window: rows in the batch of maps, inside the map or not, regions."""
    r, c = n // WS, n % WS
    i, j = (window // num_w) % num_h, window % num_w
    y = (i * WS + r + shift) % (num_h * WS)
    x = (j * WS + c + shift) % (num_w * WS)
    inside = (n < WS * WS) & (y < height) & (x < width)
    row = ((window // (num_w * num_h)).to(tl.int64) * height + y) * width + x
    down = (i == num_h - 1) & (r >= WS - shift)
    right = (j == num_w - 1) & (c >= WS - shift)
    return row, inside, 2 * down.to(tl.int32) + right.to(tl.int32)


@triton.jit
def _load(x, bias, row, inside, n, at, offset, D: tl.constexpr, B: tl.constexpr, WS: tl.constexpr):
    """Load D channels of a window's tokens; padding has those of the bias."""
    d = offset + tl.arange(0, B)[None, :]
    own = tl.arange(0, B)[None, :] < D
    value = tl.load(x + row[:, None] * at + d, mask=inside[:, None] & own, other=0.0)
    padding = ((n < WS * WS) & ~inside)[:, None]
    return value + tl.load(bias + d, mask=padding & own, other=0.0).to(value.dtype)


@triton.jit
def _position_bias(table, index, head, heads, n, WS: tl.constexpr):
    """Gather the relative position bias of a head, -inf for keys beyond N."""
    N: tl.constexpr = WS * WS
    known = (n[:, None] < N) & (n[None, :] < N)
    entry = tl.load(index + n[:, None] * N + n[None, :], mask=known, other=0)
    bias = tl.load(table + entry * heads + head, mask=known, other=0.0).to(tl.float32)
    return tl.where(n[None, :] < N, bias, float('-inf'))


@triton.jit
def _probabilities(q, k, scale, bias, region, PRECISION: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias
    scores += tl.where(region[:, None] != region[None, :], -100.0, 0.0)
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


_SIZES = ['windows', 'height', 'width', 'num_h', 'num_w', 'shift', 'heads']


# Sizes of maps are not specialized: every image of a data set would compile the kernel again.
@triton.jit(do_not_specialize=_SIZES)
def _forward(
    qkv, bias, table, index, out, windows, height, width, num_h, num_w, shift, heads, scale,
    DQ: tl.constexpr, DV: tl.constexpr, BQ: tl.constexpr, BV: tl.constexpr, WS: tl.constexpr,
    NP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    n = tl.arange(0, NP)
    position_bias = _position_bias(table, index, head, heads, n, WS)
    at = heads * (2 * DQ + DV)
    dv = tl.arange(0, BV)[None, :]
    for window in range(tl.program_id(0), windows, tl.num_programs(0)):
        row, inside, region = _tokens(window, height, width, num_h, num_w, shift, n, WS)
        q = _load(qkv, bias, row, inside, n, at, head * DQ, DQ, BQ, WS)
        k = _load(qkv, bias, row, inside, n, at, (heads + head) * DQ, DQ, BQ, WS)
        v = _load(qkv, bias, row, inside, n, at, 2 * heads * DQ + head * DV, DV, BV, WS)
        p = _probabilities(q, k, scale, position_bias, region, PRECISION)
        o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        to = out + row[:, None] * (heads * DV) + head * DV + dv
        tl.store(to, o.to(out.dtype.element_ty), mask=inside[:, None] & (dv < DV))


@triton.jit(do_not_specialize=_SIZES)
def _backward(
    qkv, bias, table, index, grad, grad_qkv, grad_bias, grad_scores,
    windows, height, width, num_h, num_w, shift, heads, scale,
    DQ: tl.constexpr, DV: tl.constexpr, BQ: tl.constexpr, BV: tl.constexpr, WS: tl.constexpr,
    NP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, NP)
    position_bias = _position_bias(table, index, head, heads, n, WS)
    at = heads * (2 * DQ + DV)
    to_q, to_k, to_v = head * DQ, (heads + head) * DQ, 2 * heads * DQ + head * DV
    dq, dv = tl.arange(0, BQ), tl.arange(0, BV)
    sum_scores = tl.zeros((NP, NP), tl.float32)
    sum_k, sum_v = tl.zeros((BQ,), tl.float32), tl.zeros((BV,), tl.float32)
    for window in range(first, windows, tl.num_programs(0)):
        row, inside, region = _tokens(window, height, width, num_h, num_w, shift, n, WS)
        q = _load(qkv, bias, row, inside, n, at, to_q, DQ, BQ, WS)
        k = _load(qkv, bias, row, inside, n, at, to_k, DQ, BQ, WS)
        v = _load(qkv, bias, row, inside, n, at, to_v, DV, BV, WS)
        own = inside[:, None] & (dv[None, :] < DV)
        from_o = grad + row[:, None] * (heads * DV) + head * DV + dv[None, :]
        do = tl.load(from_o, mask=own, other=0.0).to(v.dtype)
        p = _probabilities(q, k, scale, position_bias, region, PRECISION)
        grad_v = tl.dot(tl.trans(p.to(v.dtype)), do, input_precision=PRECISION)
        grad_p = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (grad_p - tl.sum(p * grad_p, 1)[:, None])
        sum_scores += ds
        ds = (ds * scale).to(q.dtype)
        grad_q = tl.dot(ds, k, input_precision=PRECISION)
        grad_k = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
        padding = ((n < WS * WS) & ~inside)[:, None]
        sum_k += tl.sum(tl.where(padding, grad_k, 0.0), 0)
        sum_v += tl.sum(tl.where(padding, grad_v, 0.0), 0)
        to = grad_qkv + row[:, None] * at
        kind = grad_qkv.dtype.element_ty
        of_qk = inside[:, None] & (dq[None, :] < DQ)
        tl.store(to + to_q + dq[None, :], grad_q.to(kind), mask=of_qk)
        tl.store(to + to_k + dq[None, :], grad_k.to(kind), mask=of_qk)
        tl.store(to + to_v + dv[None, :], grad_v.to(kind), mask=own)
    of_keys = grad_scores + (first * heads + head) * NP * NP + n[:, None] * NP + n[None, :]
    tl.store(of_keys, sum_scores)
    # Sums of each program, since atomic additions would be in another order each time.
    tl.store(grad_bias + first * at + to_k + dq, sum_k, mask=dq < DQ)
    tl.store(grad_bias + first * at + to_v + dv, sum_v, mask=dv < DV)


@lru_cache(maxsize=256)
def _launch(shape, dtype, tf32, heads, height, width, window, shift, v_dims, scale):
    """Return the grid, the sizes and the constants of a launch."""
    dims = (shape[-1] - v_dims) // 2 // heads, v_dims // heads
    num_h, num_w = -(-height // window), -(-width // window)
    windows = shape[0] * num_h * num_w
    programs = -(-_PROGRAMS // heads)
    constants = dict(
        DQ=dims[0], DV=dims[1], BQ=_padded(dims[0]), BV=_padded(dims[1]), WS=window,
        NP=_padded(window**2), num_warps=4,
        PRECISION='ieee' if dtype == torch.float32 and not tf32 else 'tf32',
    )  # fmt: skip
    sizes = windows, height, width, num_h, num_w, shift, heads, scale
    return (min(windows, programs), heads), sizes, constants


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _launch_for(qkv, table, how):
    tf32 = torch.backends.cuda.matmul.allow_tf32
    launch = _launch.__wrapped__ if is_compiling() else _launch  # with symbols for sizes
    return launch(qkv.shape, qkv.dtype, tf32, table.shape[1], *how)


def _attend(qkv, bias, table, index, *how, wrap=lambda kernel: kernel):
    out = qkv.new_empty(*qkv.shape[:2], how[4])
    grid, sizes, constants = _launch_for(qkv, table, how)
    # The windows after the next one are loaded early where that fits into the shared memory.
    fits = qkv.dtype != torch.float32 and max(constants['BQ'], constants['BV']) <= 64
    stages = 3 if fits else 1
    wrap(_forward)[grid](qkv, bias, table, index, out, *sizes, **constants, num_stages=stages)
    return out


class _WindowAttention(torch.autograd.Function):
    """Attention that keeps only its inputs for the backward pass."""

    @staticmethod
    def forward(ctx, qkv, bias, table, index, *how):
        ctx.save_for_backward(qkv, bias, table, index)
        ctx.how = how
        return _attend(qkv, bias, table, index, *how)

    @staticmethod
    @first_order_only(
        'RePaSwinTransformer(fast_attention=False), or a Swin without fast_window_attention_()'
    )
    def backward(ctx, grad):
        qkv, bias, table, index = ctx.saved_tensors
        grid, sizes, constants = _launch_for(qkv, table, ctx.how)
        programs, heads = grid
        size = constants['NP']
        grad_qkv = torch.empty_like(qkv)
        grad_bias = qkv.new_zeros(programs, len(bias), dtype=torch.float32)
        grad_scores = qkv.new_empty(programs, heads, size, size, dtype=torch.float32)
        _backward[grid](
            qkv, bias, table, index, grad.contiguous(), grad_qkv, grad_bias, grad_scores, *sizes,
            **constants, num_stages=1,
        )  # fmt: skip
        num_tokens = len(index)
        grad_scores = grad_scores.sum(0)[:, :num_tokens, :num_tokens].flatten(1)
        grad_table = torch.zeros_like(table, dtype=torch.float32)
        grad_table.index_add_(0, index.flatten(), grad_scores.t())
        return grad_qkv, grad_bias.sum(0).to(bias), grad_table.to(table), *[None] * 7


@torch.library.triton_op('repa_mm::window_attention', mutates_args=())
def _operator(
    qkv: torch.Tensor, bias: torch.Tensor, table: torch.Tensor, index: torch.Tensor,
    height: int, width: int, window: int, shift: int, v_dims: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    how = height, width, window, shift, v_dims, scale
    return _attend(qkv, bias, table, index, *how, wrap=torch.library.wrap_triton)


def window_attention(
    qkv: torch.Tensor, bias: torch.Tensor, table: torch.Tensor, index: torch.Tensor, *how
) -> torch.Tensor:
    """Return the outputs (B, H W, h s) of attention with h heads in (shifted) windows of N tokens.

    ``qkv`` (B, H W, h (2 r + s)) are queries, keys and values, contiguous, and ``bias`` the bias of
    the linear layer that computed them, which padding has. ``table`` ((2 window - 1)^2, h) has the
    relative position biases, and ``index`` (N, N) their rows. ``how`` are height and width of the
    maps, the window's side, the shift, h s, and the scale of the logits.
    """
    if is_compiling():
        return _operator(qkv, bias, table, index, *how)
    # Without the cost of an operator's dispatch, which is that of a small kernel.
    with torch.cuda.device_of(qkv):  # where Triton launches
        if torch.is_grad_enabled():
            return _WindowAttention.apply(qkv, bias, table, index, *how)
        return _attend(qkv, bias, table, index, *how)
