"""Fits channel-idle FFNs to pretrained FFNs in closed form.

A pretrained FFN computes f(x) = V a + b with a = act(h), h = W_in u + b_in and u = LN(x). V is
W_out with the layer scale multiplied in. The deploy form of a channel-idle FFN computes
W u + V_A a_A + b, which is linear in W, V_A and b once the active channels A are chosen. Both the
choice and the weights follow from the mean and the covariance of [u, a, t] over the tokens of some
images, where t is the output to imitate.

Every activated channel is split into what an affine function of u explains and the rest,
a = B u + r. An FFN whose idle channels are replaced by their affine functions, with W = V_I B_I,
is the *affine solution*. The ridge of the regression draws the weights towards the affine
solution, and not to zero.
"""

import copy
from typing import NamedTuple

import torch
import torch.nn as nn

from ..numerics import double
from .idle import ChannelIdleFFN

_CHUNK = 4096  # tokens at a time that are in float64


class Moments:
    """Mean and covariance of rows that come in parts, summed in float64.

    Attributes:
        count (int): Number of rows.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, *columns: torch.Tensor) -> None:
        """Add rows.

        Args:
            columns (torch.Tensor): Matrices of shape (N, n_i), which side by side are the rows.
        """
        rows = torch.cat([double(part) for part in columns], dim=1)
        if not self.count:
            # Products of values that lie far from zero would hide a small variance.
            self._shift = rows.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._products = rows.new_zeros(rows.shape[1], rows.shape[1])
        rows -= self._shift
        self.count += len(rows)
        self._sum += rows.sum(0)
        self._products.addmm_(rows.t(), rows)

    def mean_and_covariance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean (n, ) and the covariance (n, n) of all rows."""
        mean = self._sum / self.count
        return mean + self._shift, self._products / self.count - mean[:, None] * mean


class FFNFit(NamedTuple):
    """Weights of a channel-idle FFN, with the layer scale multiplied in, and how well they fit.

    Attributes:
        active (torch.Tensor): Indices (A, ) of the active channels, increasing.
        idle (torch.Tensor): Indices (H - A, ) of the idle channels, increasing.
        active_out (torch.Tensor): Output weights V_A (C, A) of the active channels.
        idle_out (torch.Tensor): Output weights (C, H - A) of the idle channels.
        bias (torch.Tensor): Output bias (C, ) beside W u and V_A a_A.
        hidden_mean (torch.Tensor): Mean (H, ) of the hidden channels, the active ones activated.
        hidden_var (torch.Tensor): Their variance (H, ).
        unexplained (float): Share of the variance of the targets that the fit leaves.
        unexplained_affine (float): Share that an affine function alone leaves.
        shortfall (float): Share that is left only because the idle channels do not reach W: they
            are fewer than C. 0 if the training form is exact.
    """

    active: torch.Tensor
    idle: torch.Tensor
    active_out: torch.Tensor
    idle_out: torch.Tensor
    bias: torch.Tensor
    hidden_mean: torch.Tensor
    hidden_var: torch.Tensor
    unexplained: float
    unexplained_affine: float
    shortfall: float


def ffn_moments(ffn: ChannelIdleFFN, tokens: torch.Tensor, targets: torch.Tensor) -> Moments:
    """Mean and covariance of [u, a, t], from which :func:`fit_ffn` works.

    Args:
        ffn (ChannelIdleFFN): The pretrained FFN, as one with idle ratio 0.
        tokens (torch.Tensor): Its inputs x, of shape (N, C).
        targets (torch.Tensor): The outputs to imitate, shortcut included, of shape (N, C).
    """
    moments = Moments()
    for x, y in zip(tokens.split(_CHUNK), targets.split(_CHUNK)):
        u = ffn.norm1(x)
        moments.add(u, ffn.act(ffn.fc1(u)), double(y) - double(x))
    return moments


def _ridged(gram: torch.Tensor, strength: float, scale: torch.Tensor | None = None):
    """A Gram matrix with a multiple of its mean diagonal added to the diagonal.

    ``scale`` is the mean diagonal of the matrix that ``gram`` is what is left of, whose rounding
    errors may be larger than what is left.
    """
    mean = gram.diagonal().mean()
    amount = strength * mean + 1e-10 * (mean if scale is None else scale)
    gram = gram.clone()
    # Where nothing varies, any ridge leaves the weights at those they are drawn to.
    gram.diagonal().add_(amount if amount > 0 else 1.0)
    return gram


def _solve(gram: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """X with X gram = right, of a positive definite matrix."""
    return torch.cholesky_solve(right.t(), torch.linalg.cholesky(gram)).t()


def eliminate(
    gram: torch.Tensor, weights: torch.Tensor, num_kept: int, step: float = 0.02
) -> torch.Tensor:
    """Choose the features of a least-squares solution by backward elimination.

    To remove the features K, and to let the others make up for them, costs
    tr(W_K (P_KK)^-1 W_K^T) with P the inverse Gram matrix (Optimal Brain Surgeon, Hassibi and
    Stork 1993). The features that are cheapest one by one go first, some at a time; weights and P
    follow by a downdate of their number.

    Args:
        gram (torch.Tensor): Gram matrix (n, n) of the features, ridge included.
        weights (torch.Tensor): The least-squares solution (m, n) with all features.
        num_kept (int): Number of features to keep.
        step (float): Share of the remaining features that go at a time; at least one goes.
            Defaults to 0.02.

    Returns:
        tuple: Indices of the kept features, increasing, and the solution (m, num_kept) with them.
    """
    kept = torch.arange(len(gram), device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    while len(kept) > num_kept:
        costs = weights.square().sum(0) / inverse.diagonal()
        number = min(max(1, int(step * len(kept))), len(kept) - num_kept)
        order = costs.argsort()
        gone, left = order[:number], order[number:].sort().values
        factor = torch.linalg.cholesky(inverse[gone][:, gone])
        follow = torch.cholesky_solve(inverse[gone][:, left], factor)
        weights = weights[:, left] - weights[:, gone] @ follow
        inverse = inverse[left][:, left] - inverse[left][:, gone] @ follow
        kept = kept[left]
    return kept, weights


class _Regression:
    """Regression of targets on features [l, a] from their covariances."""

    def __init__(self, cov_ll, cov_la, cov_aa, cov_tl, cov_ta, var_t, ridge: float) -> None:
        self.gram = torch.cat(
            [torch.cat([cov_ll, cov_la], dim=1), torch.cat([cov_la.t(), cov_aa], dim=1)]
        )
        self.with_t = torch.cat([cov_tl, cov_ta], dim=1)
        self.var_t, self.ridge, self.n = var_t, ridge, len(cov_ll)

    def solve(self, prior: torch.Tensor) -> torch.Tensor:
        """Weights (C, n) that a ridge draws towards others.

        The ridge is that of the features l and r, where a = B l + r: what the weights do in the
        directions of l costs little there and much in those of r.
        """
        n, gram = self.n, self.gram
        basis = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        basis[n:, :n] = -_solve(_ridged(gram[:n, :n], self.ridge), gram[n:, :n])
        rotated = basis @ gram @ basis.t()
        for part in (slice(n), slice(n, None)):
            scale = gram[part, part].diagonal().mean()
            rotated[part, part] = _ridged(rotated[part, part], self.ridge, scale)
        left = (self.with_t - prior @ gram) @ basis.t()
        return prior + _solve(rotated, left) @ basis

    def residual(self, weights: torch.Tensor) -> torch.Tensor:
        """Variance of the targets that weights leave, summed over the channels."""
        return self.var_t + ((weights @ self.gram - 2 * self.with_t) * weights).sum()


def fit_ffn(
    ffn: ChannelIdleFFN,
    moments: Moments,
    num_active: int,
    select: str = 'eliminate',
    ridge: float = 1e-4,
) -> FFNFit:
    """Choose the active channels of an FFN and fit the other weights in closed form.

    Args:
        ffn (ChannelIdleFFN): The pretrained FFN, as one with idle ratio 0.
        moments (Moments): Of its tokens, see :func:`ffn_moments`.
        num_active (int): Number of active channels A.
        select (str): How the active channels are chosen. 'score' takes those with the largest
            variance that no affine function of u explains, times their squared output weights;
            'eliminate' eliminates the others backwards from the regression with all channels.
            Defaults to 'eliminate'.
        ridge (float): Strength of the ridge, relative to the mean variance. Defaults to 1e-4.

    Returns:
        FFNFit: The weights, in float64.

    Raises:
        ValueError: If ``select`` is something else, or the moments are not finite numbers.
    """
    if select not in ('score', 'eliminate'):
        raise ValueError(f"select must be 'score' or 'eliminate', but got {select!r}")
    mean, cov = moments.mean_and_covariance()
    if not (mean.isfinite().all() and cov.isfinite().all()):
        raise ValueError('its inputs or outputs are not finite numbers')
    dims, hidden = ffn.embed_dims, ffn.feedforward_channels
    u, a, t = slice(dims), slice(dims, dims + hidden), slice(dims + hidden, None)
    w_in, b_in, out = (double(p).to(cov) for p in (ffn.fc1.weight, ffn.fc1.bias, ffn.fc2.weight))
    if ffn.layer_scale is not None:
        out = double(ffn.layer_scale).to(cov)[:, None] * out
    tiny = torch.finfo(cov.dtype).tiny
    var_t = cov[t, t].trace()

    ridged = _ridged(cov[u, u], ridge)
    slopes = _solve(ridged, cov[a, u])
    rest = cov[a, a] - slopes @ cov[u, a]
    if select == 'score':
        scores = rest.diagonal() * out.square().sum(0)
        active = scores.topk(num_active).indices.sort().values
    else:
        gram = _ridged(rest, ridge, cov[a, a].diagonal().mean())
        # What the pretrained FFN leaves of the targets, and an affine function of u does, too.
        left = (cov[t, a] - out @ cov[a, a]) - (cov[t, u] - out @ cov[a, u]) @ slopes.t()
        active, _ = eliminate(gram, out + _solve(gram, left), num_active)
    is_idle = torch.ones(hidden, dtype=torch.bool, device=cov.device)
    is_idle[active] = False
    idle = is_idle.nonzero().flatten()

    cov_aa, cov_ta = cov[a, a][active][:, active], cov[t, a][:, active]
    joint = _Regression(cov[u, u], cov[u, a][:, active], cov_aa, cov[t, u], cov_ta, var_t, ridge)
    weights = joint.solve(torch.cat([out[:, idle] @ slopes[idle], out[:, active]], dim=1))
    best = residual = joint.residual(weights)
    w, active_out = weights[:, :dims], weights[:, dims:]

    # The idle channels start from act(h_j) ~ slope h_j + offset, and are corrected to give W.
    w_idle = w_in[idle]
    h_var = ((w_idle @ cov[u, u]) * w_idle).sum(1)
    slope = (w_idle * cov[a, u][idle]).sum(1) / h_var.clamp(min=tiny)
    idle_out = out[:, idle] * slope
    idle_out = idle_out + (w - idle_out @ w_idle) @ torch.linalg.pinv(w_idle)
    missing = w - idle_out @ w_idle
    if ((missing @ cov[u, u]) * missing).sum() > 1e-12 * var_t:
        # Too few idle channels for any W: the regression is on those instead of on u.
        limited = _Regression(
            w_idle @ cov[u, u] @ w_idle.t(),
            w_idle @ cov[u, a][:, active],
            cov_aa,
            cov[t, u] @ w_idle.t(),
            cov_ta,
            var_t,
            ridge,
        )
        weights = limited.solve(torch.cat([out[:, idle] * slope, out[:, active]], dim=1))
        residual = limited.residual(weights)
        idle_out, active_out = weights[:, : len(idle)], weights[:, len(idle) :]

    affine = _solve(ridged, cov[t, u])
    affine_residual = var_t + ((affine @ cov[u, u] - 2 * cov[t, u]) * affine).sum()
    hidden_mean, hidden_var = mean[a].clone(), cov[a, a].diagonal().clone()
    hidden_mean[idle], hidden_var[idle] = w_idle @ mean[u] + b_in[idle], h_var
    return FFNFit(
        active=active,
        idle=idle,
        active_out=active_out,
        idle_out=idle_out,
        bias=mean[t] - idle_out @ (w_idle @ mean[u]) - active_out @ mean[a][active],
        hidden_mean=hidden_mean,
        hidden_var=hidden_var,
        unexplained=float(residual / var_t.clamp(min=tiny)),
        unexplained_affine=float(affine_residual / var_t.clamp(min=tiny)),
        shortfall=float((residual - best).clamp(min=0) / var_t.clamp(min=tiny)),
    )


def norm_as_batch_norm(
    ffn: ChannelIdleFFN, tokens: torch.Tensor, normalized: torch.Tensor, ridge: float = 1e-4
) -> ChannelIdleFFN:
    """A copy of an FFN whose norm is a BatchNorm, and the affine map closest to the norm.

    The map LN(x) ~ M x + c is fitted over the tokens. The BatchNorm holds their statistics, and
    the first linear layer absorbs M and c.

    Args:
        ffn (ChannelIdleFFN): The pretrained FFN, as one with idle ratio 0.
        tokens (torch.Tensor): Its inputs x, of shape (N, C).
        normalized (torch.Tensor): What the norm makes of them, of shape (N, C).
        ridge (float): Strength of the ridge that draws M to its best diagonal. Defaults to 1e-4.
    """
    moments = Moments()
    for x, u in zip(tokens.split(_CHUNK), normalized.split(_CHUNK)):
        moments.add(x, u)
    mean, cov = moments.mean_and_covariance()
    dims = ffn.embed_dims
    x, u = slice(dims), slice(dims, None)
    norm = nn.BatchNorm1d(dims)
    var = cov[x, x].diagonal()
    std = (var + norm.eps).sqrt()
    # In the BatchNorm's output, whose covariance this is.
    cov_xx, cov_ux = cov[x, x] / (std[:, None] * std), cov[u, x] / std
    diagonal = torch.diag(cov_ux.diagonal() / cov_xx.diagonal().clamp(min=norm.eps))
    change = _solve(_ridged(cov_xx, ridge), cov_ux - diagonal @ cov_xx)
    matrix = diagonal + change
    new = copy.copy(ffn)
    new._modules = dict(ffn._modules)
    new.norm1 = norm.to(ffn.fc1.weight).eval()
    new.norm1.running_mean.copy_(mean[x])
    new.norm1.running_var.copy_(var * moments.count / max(moments.count - 1, 1))
    new.fc1 = nn.Linear(dims, ffn.feedforward_channels).to(ffn.fc1.weight)
    w_in = double(ffn.fc1.weight).to(cov)
    new.fc1.weight.data.copy_(w_in @ matrix)
    new.fc1.bias.data.copy_(double(ffn.fc1.bias).to(cov) + w_in @ mean[u])
    return new


def channel_idle_ffn(ffn: ChannelIdleFFN, fit: FFNFit, count: int) -> ChannelIdleFFN:
    """The training form that computes what a fit says.

    Args:
        ffn (ChannelIdleFFN): The FFN that was fitted, as one with idle ratio 0.
        fit (FFNFit): From :func:`fit_ffn`.
        count (int): Number of tokens behind the fit.

    Returns:
        ChannelIdleFFN: With the active channels first, and with the norm of ``ffn``. If that is a
        BatchNorm, the second one has the hidden channels' statistics and is the identity.
    """
    keeps_norm = not isinstance(ffn.norm1, nn.BatchNorm1d)
    like = ffn.fc1.weight
    order = torch.cat([fit.active, fit.idle]).to(like.device)
    new = ChannelIdleFFN(
        ffn.embed_dims,
        ffn.feedforward_channels,
        idle_ratio=len(fit.idle) / ffn.feedforward_channels,
        act_cfg=copy.deepcopy(ffn.act),
        norm_cfg=dict(type='LN' if keeps_norm else 'BN'),
        drop_path=ffn.dropout_layer.drop_prob,
        drop_rate=ffn.drop.p,
    ).to(like)
    new.norm1 = copy.deepcopy(ffn.norm1)
    out = torch.cat([fit.active_out, fit.idle_out], dim=1)
    bias = fit.bias - fit.idle_out @ double(ffn.fc1.bias).to(out)[fit.idle]
    scale = ffn.layer_scale
    if scale is not None:
        # The scale stays; where it is next to nothing, the weights could not have any effect.
        floor = 1e-3 * scale.detach().abs().max()
        scale = torch.where(scale.detach().abs() < floor, floor, scale.detach())
        if not floor:
            scale = torch.ones_like(scale)
        if isinstance(ffn.layer_scale, nn.Parameter):
            new.layer_scale = nn.Parameter(scale.clone())
        else:
            del new.layer_scale
            new.register_buffer('layer_scale', scale.clone(), False)
        out, bias = out / double(scale).to(out)[:, None], bias / double(scale).to(out)
    with torch.no_grad():
        new.fc1.weight.copy_(like[order])
        new.fc1.bias.copy_(ffn.fc1.bias[order])
        new.fc2.weight.copy_(out)
        new.fc2.bias.copy_(bias)
        if not keeps_norm:
            var = fit.hidden_var[order].clamp(min=0)
            new.norm2.running_mean.copy_(fit.hidden_mean[order])
            new.norm2.running_var.copy_(var * count / max(count - 1, 1))
            new.norm2.weight.copy_((double(new.norm2.running_var).to(var) + new.norm2.eps).sqrt())
            new.norm2.bias.copy_(new.norm2.running_mean)
    for param in new.parameters():
        param.requires_grad_(like.requires_grad)
    return new.train(ffn.training)
