"""Train an FFN's idle channels without computing them (folded training).

The idle channels of a :class:`~repa_mm.reparam.ChannelIdleFFN` are linear in x during training too,
and the batch statistics of a linear map follow from the mean and the covariance of its input. So
the (N, H - A) idle activations, the largest tensor of the block, never have to exist: outputs,
gradients and running statistics are those of eq. 3, at nearly the cost of the merged form.

The symbols are defined in :mod:`repa_mm.reparam.deploy_form`; a trailing c marks a tensor centred
over the tokens, and I the idle rows of the first linear map:

    mu = mean(x), S = xc^T xc / N, s1 = gamma1 / sqrt(diag(S) + eps),
    B = W_in,I diag(s1), var(h_I) = diag(B S B^T),
    s2,I = gamma2,I / sqrt(var(h_I) + eps), s2,A = gamma2,A / sqrt(var(a) + eps),
    L = W_out,I diag(s2,I) B                                       (C x C),
    z = xc L^T + ac V_A^T + b_out + W_out beta2,   V_A = W_out,A diag(s2,A).
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.modules.dropout import _DropoutNd

from repa_mm.surgery import has_stock_forward

from .autograd import autocast_dtype, first_order_only, is_compiling
from .deploy_form import KEPT_NORMS, DropPath, fold
from .numerics import batch_norm_affine, is_batch_norm

# Number of hidden activations, 100 MB in half precision, from which 'auto' folds on a GPU.
_MIN_ACTIVATIONS = 50_000_000
_ACTIVATION_BACKWARD = {
    nn.GELU: lambda act, grad, h: torch.ops.aten.gelu_backward(
        grad, h, approximate=act.approximate
    ),
    nn.ReLU: lambda act, grad, h: torch.ops.aten.threshold_backward(grad, h, 0),
    nn.SiLU: lambda act, grad, h: torch.ops.aten.silu_backward(grad, h),
}


def _activation_backward(act: nn.Module, grad: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    if type(act) in _ACTIVATION_BACKWARD:
        return _ACTIVATION_BACKWARD[type(act)](act, grad, h)
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        return torch.autograd.grad(act(h), h, grad)[0]


class _Branch(torch.autograd.Function):
    """Compute z = x L^T + act(x W^T + b) V^T + c, of shape (N, C).

    The backward pass needs only x and the pre-activation. Autograd would keep the activation too.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, linear, out_weight, out_bias, act):
        h = torch.addmm(bias, x, weight.t())
        z = torch.addmm(out_bias, x, linear.t())
        z.addmm_(act(h), out_weight.t())
        ctx.save_for_backward(x, h, weight, linear, out_weight)
        ctx.act = act
        return z

    @staticmethod
    @first_order_only("repa_mm.reparam.set_training_path_(model, 'literal')")
    def backward(ctx, dz):
        x, h, weight, linear, out_weight = ctx.saved_tensors
        d_linear = dz.t() @ x
        d_out_weight = dz.t() @ ctx.act(h)
        dh = _activation_backward(ctx.act, dz @ out_weight, h)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dz @ linear).addmm_(dh, weight)
        return (dx, dh.t() @ x, dh.sum(0), d_linear, d_out_weight, dz.sum(0), None)


class _NormalizedBranch(torch.autograd.Function):
    """Compute z with both norms in training mode; see the module's docstring.

    The outputs are z (x + z with ``shortcut``), and the mean and biased variance of each norm's
    input. Autograd with a checkpoint around the activation took 1.11 to 1.30 times as long on a
    CPU in float32, and kept twice the memory under autocast, which needs the tokens in float32.
    """

    @staticmethod
    def forward(ctx, x, *args):
        w_in, b_in, w_out, b_out, gamma1, beta1, gamma2, beta2 = args[:8]
        num_active, act, eps1, eps2, shortcut, dtype = args[8:]
        acc = w_in.dtype

        mean1, rest, xc = _centre(x, acc)
        mean1 = mean1 + rest
        cov = xc.t() @ xc / len(x)
        var1 = cov.diagonal()
        r1 = (var1 + eps1).rsqrt()
        w_a, b = (w_in * (gamma1 * r1)).tensor_split([num_active])
        b1 = torch.addmv(b_in, w_in, beta1)

        xc = xc.to(dtype)
        h = torch.addmm(b1[:num_active].to(dtype), xc, w_a.t().to(dtype))
        mean_a, rest, a = _centre(act(h), acc)
        b_cov = b @ cov
        var2 = torch.cat([(a * a).mean(0, dtype=acc), (b_cov * b).sum(1).clamp_min_(0)])
        r2 = (var2 + eps2).rsqrt()
        v_a, v_i = (w_out * (gamma2 * r2)).tensor_split([num_active], dim=1)
        linear = v_i @ b

        const = torch.addmv(b_out, w_out, beta2)
        if shortcut:
            linear.diagonal().add_(1)
            const = const + mean1
        z = torch.addmm(const.to(dtype), xc, linear.t().to(dtype))
        z.addmm_(a.to(dtype), v_a.t().to(dtype))

        mean2 = torch.cat([mean_a + rest, b1[num_active:]])
        found = xc, h, b_cov, r1, mean_a, rest, r2, linear
        ctx.save_for_backward(*found, w_in, w_out, gamma1, beta1, gamma2, beta2)
        ctx.num_active, ctx.act, ctx.shortcut = num_active, act, shortcut
        ctx.mark_non_differentiable(mean1, var1, mean2, var2)
        ctx.set_materialize_grads(False)
        return z, mean1, var1, mean2, var2

    @staticmethod
    @first_order_only("repa_mm.reparam.set_training_path_(model, 'literal')")
    def backward(ctx, dz, *_):
        """Compute gradients; dX is that of X, o the elementwise product, 1^T sums the tokens.

        With W' = W_in diag(s1), of which B = W'_I, the bias b1 = b_in + W_in beta1,
        h = xc W'_A^T + b1_A, ac = act(h) - mean, V = W_out diag(s2) and L = V_I B:

            dV = [dz^T ac, dL B^T], dL = dz^T xc,      ds = 1^T (dV o W_out), dgamma2 = ds o r2,
            dvar2 = -(gamma2 o r2^3 o ds) / 2          (``dvar`` is -2 dvar2, likewise ``dcov``),
            da = dz V_A + 2/N ac diag(dvar2_A), without its mean,  dh = act'(h) o da,
            dW' = [dh^T xc, V_I^T dL + 2 diag(dvar2_I) B S],       dgamma1 = 1^T (dW' o W_in) o r1,
            dS = B^T diag(dvar2_I) B - diag(s1 o r1 o dgamma1) / 2,
            dx = dz L + dh W'_A + 2/N xc dS, without its mean, except for that of the shortcut,
            dW_in = dW' diag(s1) + [1^T dh, 0]^T beta1^T, dW_out = dV diag(s2) + (1^T dz)^T beta2^T.

        The idle biases have no gradient: the second norm subtracts them again.
        """
        xc, h, b_cov, r1, mean_a, rest, r2, linear, *weights = ctx.saved_tensors
        w_in, w_out, gamma1, beta1, gamma2, beta2 = weights
        count, num_active, act = len(xc), ctx.num_active, ctx.act
        dtype, acc = xc.dtype, w_in.dtype
        s1, s2 = gamma1 * r1, gamma2 * r2
        w_a, b = (w_in * s1).tensor_split([num_active])
        v_a, v_i = (w_out * s2).tensor_split([num_active], dim=1)
        dz = dz.to(dtype)

        # Through the second product, and the norm of the active channels.
        db2 = dz.sum(0, dtype=acc)
        a = (act(h) - mean_a).sub_(rest)
        d_linear = (dz.t() @ xc).to(acc)
        dv = torch.cat([dz.t() @ a.to(dtype), d_linear @ b.t()], dim=1)
        ds2 = (dv * w_out).sum(0)
        dgamma2 = ds2 * r2
        # The gradient of the variance, times -2.
        dvar_a, dvar_i = (dgamma2 * s2 * r2).tensor_split([num_active])
        dh = dz @ v_a.to(dtype)
        dh = (dh - dh.mean(0, dtype=acc)).addcmul_(a, dvar_a / count, value=-1)
        del a
        dh = _activation_backward(act, dh.to(dtype), h)

        # Through the first product.
        db1 = dh.sum(0, dtype=acc)
        db = torch.addcmul(v_i.t() @ d_linear, b_cov, dvar_i[:, None], value=-1)
        dw = torch.cat([dh.t() @ xc, db])
        dgamma1 = (dw * w_in).sum(0) * r1

        dx = None
        if ctx.needs_input_grad[0]:
            dcov = b.t() @ (b * dvar_i[:, None])  # times -2, like the next line
            dcov.diagonal().addcmul_(dgamma1, s1 * r1)
            dcov = dcov / -count
            dx = dz @ linear.to(dtype)
            dx.addmm_(dh, w_a.to(dtype)).addmm_(xc, dcov.to(dtype))
            mean = dx.sum(0, dtype=acc)
            if ctx.shortcut:  # the shortcut is not centred
                mean = mean - db2
            dx = dx - mean / count

        dw_in = dw * s1
        dw_in[:num_active].addr_(db1, beta1)
        db_in = nn.functional.pad(db1, (0, len(w_in) - num_active))
        dw_out = torch.addr(dv * s2, db2, beta2)
        dbeta1, dbeta2 = db1 @ w_in[:num_active], db2 @ w_out
        weights = dw_in, db_in, dw_out, db2, dgamma1, dbeta1, dgamma2, dbeta2
        return dx, *weights, *[None] * 6


def _statistics(norm: nn.Module) -> str | None:
    """Return the source of a norm's statistics, 'batch', 'running' or 'sample', else None."""
    if has_stock_forward(norm, nn.Identity, *KEPT_NORMS):
        return 'sample'
    if not is_batch_norm(norm):
        return None
    return 'batch' if norm.training or norm.running_mean is None else 'running'


def _is_shared(norm: nn.Module) -> bool:
    """Return True if several processes share a norm's batch statistics."""
    is_synchronized = isinstance(norm, nn.SyncBatchNorm) and norm.training
    if not is_synchronized or not dist.is_available() or not dist.is_initialized():
        return False
    return dist.get_world_size(norm.process_group) > 1


def is_foldable(ffn: nn.Module) -> bool:
    """Return True if folded training computes what the layers of an FFN in training mode do."""
    statistics = {_statistics(ffn.norm1), _statistics(ffn.norm2)}
    return (
        len(statistics) == 1
        and None not in statistics
        and not _is_shared(ffn.norm1)
        # A subclass or a hook may compute something that folding does not know.
        and has_stock_forward(ffn.act)
        and all(has_stock_forward(layer, nn.Linear) for layer in (ffn.fc1, ffn.fc2))
        and not (ffn.fc1.bias is None or ffn.fc2.bias is None)
        and has_stock_forward(ffn.dropout_layer, DropPath)
        and has_stock_forward(ffn.drop, nn.Dropout)
        and ffn.drop.p == 0
        # The backward pass computes the activation again.
        and next(ffn.act.parameters(), None) is None
        and not any(isinstance(m, (nn.RReLU, _DropoutNd)) for m in ffn.act.modules())
    )


def is_worth(ffn: nn.Module, num_tokens: int) -> bool:
    """Return True if folded training of a foldable FFN takes less than the literal equation.

    It does if it has fewer multiply-adds, except in half precision on a GPU. There a step waits for
    kernels to be launched, of which the literal equation has a third as many: folding is worth it
    if the hidden channels of so many tokens would be most of the memory.
    """
    # Autograd inside a backward pass cannot be compiled.
    if is_compiling() and type(ffn.act) not in _ACTIVATION_BACKWARD:
        return False
    weight = ffn.fc1.weight
    dtype = autocast_dtype(weight.device.type) or weight.dtype
    if weight.is_cuda and dtype in (torch.float16, torch.bfloat16):
        return num_tokens * ffn.feedforward_channels >= _MIN_ACTIVATIONS
    # Multiply-adds of forward and backward, divided by C.
    products = 3 + 2 * (_statistics(ffn.norm1) == 'batch')
    of_tokens = products * ffn.embed_dims + 6 * ffn.num_active
    of_weights = products * ffn.num_idle * ffn.embed_dims
    literal = 6 * num_tokens * ffn.feedforward_channels
    return num_tokens * of_tokens + of_weights < literal


def trains_folded(ffn: nn.Module, num_tokens: int) -> bool:
    """Return True if an FFN in training mode computes so many tokens by folded training."""
    path = ffn.training_path
    if path == 'literal' or not is_foldable(ffn):
        return False
    if num_tokens < 2 and _statistics(ffn.norm1) == 'batch':
        return False  # a single token has no variance, and BatchNorm itself reports that well
    return path == 'folded' or is_worth(ffn, num_tokens)


def folded_forward(ffn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute :meth:`ChannelIdleFFN.forward_literal` of tokens (B, L, C) by folded training."""
    dtype = autocast_dtype(x.device.type) or x.dtype
    # Statistics and weights are computed in float32 or wider, products with the tokens in the dtype
    # of autocast.
    acc = torch.promote_types(dtype, torch.float32)
    # The matrix products can include the shortcut without drop path and in full precision only.
    shortcut = ffn.shortcut and not ffn.keeps_norm and dtype == x.dtype == acc
    shortcut = shortcut and ffn.dropout_layer.drop_prob == 0.0
    tokens = (ffn.norm1(x) if ffn.keeps_norm else x).reshape(-1, ffn.embed_dims)
    with torch.autocast(x.device.type, enabled=False):
        w_out, b_out = ffn.fc2.weight.to(acc), ffn.fc2.bias.to(acc)
        if ffn.layer_scale is not None:
            g = ffn.layer_scale.to(acc)
            w_out, b_out = g[:, None] * w_out, g * b_out
        weights = (ffn.fc1.weight.to(acc), ffn.fc1.bias.to(acc), w_out, b_out)
        if _statistics(ffn.norm1) == 'batch':
            affine = *_affine(ffn.norm1, weights[0]), *_affine(ffn.norm2, w_out)
            settings = ffn.num_active, ffn.act, ffn.norm1.eps, ffn.norm2.eps, shortcut, dtype
            z, mean1, var1, mean2, var2 = _NormalizedBranch.apply(
                tokens, *weights, *affine, *settings
            )
            _track(ffn.norm1, mean1, var1, len(tokens))
            _track(ffn.norm2, mean2, var2, len(tokens))
        else:
            w, b, w_in, b_in, w_out = fold(
                *weights,
                ffn.num_active,
                batch_norm_affine(ffn.norm1, weights[0]),
                batch_norm_affine(ffn.norm2, w_out),
            )
            if shortcut:
                w = w + torch.eye(len(w), dtype=w.dtype, device=w.device)
            w_in, b_in, w, w_out, b = (t.to(dtype) for t in (w_in, b_in, w, w_out, b))
            z = _Branch.apply(tokens.to(dtype), w_in, b_in, w, w_out, b, ffn.act)
    z = z.view(x.shape)
    if not shortcut:
        z = ffn.dropout_layer(z)
    return x + z if ffn.shortcut and not shortcut else z


def _affine(norm: nn.Module, like: torch.Tensor):
    """Return gamma and beta of a BatchNorm, which has one channel per column of ``like``."""
    if norm.affine:
        return norm.weight.to(like), norm.bias.to(like)
    return like.new_ones(like.shape[1]), like.new_zeros(like.shape[1])


@torch.no_grad()
def _track(norm: nn.Module, mean: torch.Tensor, var: torch.Tensor, count: int) -> None:
    """Update the running statistics like ``nn.BatchNorm1d``."""
    if not (norm.training and norm.track_running_stats):
        return
    norm.num_batches_tracked.add_(1)
    momentum = norm.momentum
    if momentum is None:
        momentum = 1 / float(norm.num_batches_tracked)
    var = var * (count / (count - 1))
    norm.running_mean.lerp_(mean.to(norm.running_mean), momentum)
    norm.running_var.lerp_(var.to(norm.running_var), momentum)


def _centre(x: torch.Tensor, acc: torch.dtype):
    """Return the column means of x in two parts, and x minus both parts, all in ``acc``.

    The second part is the rounding error of the first, which matters where a mean is large compared
    with the standard deviation.
    """
    mean = x.mean(0, dtype=acc)
    xc = x - mean
    rest = xc.mean(0, dtype=acc)
    return mean, rest, xc.sub_(rest)


def set_training_path_(model: nn.Module, path: str) -> nn.Module:
    """Choose how the channel-idle FFNs of a model compute in training mode, in place.

    The path is 'literal' (eq. 3 of the paper), 'folded' (without the idle channels, where
    :func:`is_foldable`), or 'auto', see :func:`is_worth`: the path with fewer multiply-adds, but in
    half precision on a GPU 'folded' for large maps alone. docs/benchmarks.md has times and memory.
    In float16, gradients of 'folded' need smaller loss scales where tokens are large;
    ``AmpOptimWrapper`` finds them.

    Raises:
        ValueError: If ``path`` is something else.
    """
    if path not in ('auto', 'literal', 'folded'):
        raise ValueError(f"the path must be 'auto', 'literal' or 'folded', but is {path!r}")
    for module in model.modules():
        if hasattr(module, 'training_path'):
            module.training_path = path
    return model
