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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.reparam.ffn.idle import ChannelIdleFFN
from repa_mm.reparam.numerics import double

_CHUNK = 4096  # tokens at a time that are in float64
_PATH_RIDGE = 0.1  # where only the order of magnitude of the errors counts
# Of the input weights of idle channels, up to which they stay: bfloat16 has three digits.
_CONDITION = 100
_NUM_PARTS = 4  # of the tokens, for cross-validation
# Strengths of the ridge, relative to the mean variance, from which cross-validation chooses.
RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 10.0, 1000.0)


class Moments:
    """Mean and covariance of rows that come in parts, summed in float64.

    Args:
        shift (torch.Tensor): A point (n, ) near the rows: products of values that lie far from
            zero would hide a small variance.

    Attributes:
        count (int): Number of rows.
    """

    def __init__(self, shift: torch.Tensor) -> None:
        self.count = 0
        self.shift = double(shift)
        self.total = torch.zeros_like(self.shift)
        self.products = self.shift.new_zeros(len(shift), len(shift))

    def add(self, rows: torch.Tensor) -> None:
        """Add rows of shape (N, n)."""
        rows = double(rows) - self.shift
        self.count += len(rows)
        self.total += rows.sum(0)
        self.products.addmm_(rows.t(), rows)

    @classmethod
    def of(cls, parts: Sequence['Moments']) -> 'Moments':
        """The moments of the rows of several parts, which have the same shift."""
        result = cls(parts[0].shift)
        for part in parts:
            result.count += part.count
            result.total += part.total
            result.products += part.products
        return result

    def mean_and_covariance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean (n, ) and the covariance (n, n) of all rows."""
        mean = self.total / self.count
        return mean + self.shift, self.products / self.count - mean[:, None] * mean


class FFNFit(NamedTuple):
    """Weights of a channel-idle FFN, with the layer scale multiplied in, and how well they fit.

    Attributes:
        active (torch.Tensor): Indices (A, ) of the active channels, increasing.
        idle (torch.Tensor): Indices (H - A, ) of the idle channels, increasing.
        active_out (torch.Tensor): Output weights V_A (C, A) of the active channels.
        idle_in (torch.Tensor): Input weights (H - A, C) of the idle channels.
        idle_bias (torch.Tensor): Their biases (H - A, ).
        idle_out (torch.Tensor): Output weights (C, H - A) of the idle channels.
        bias (torch.Tensor): Output bias (C, ) beside W u and V_A a_A.
        hidden_mean (torch.Tensor): Mean (H, ) of the hidden channels, the active ones activated.
        hidden_var (torch.Tensor): Their variance (H, ).
        ridge (float): Strength of the ridge.
        unexplained (float): Share of the variance of the targets that the fit leaves.
        unexplained_affine (float): Share that an affine function alone leaves.
        shortfall (float): Share that is left only because the idle channels do not reach W: they
            are fewer than C. 0 if the training form is exact.
    """

    active: torch.Tensor
    idle: torch.Tensor
    active_out: torch.Tensor
    idle_in: torch.Tensor
    idle_bias: torch.Tensor
    idle_out: torch.Tensor
    bias: torch.Tensor
    hidden_mean: torch.Tensor
    hidden_var: torch.Tensor
    ridge: float
    unexplained: float
    unexplained_affine: float
    shortfall: float


def split_moments(
    rows: Callable[[torch.Tensor], torch.Tensor], number: int, like: torch.Tensor
) -> list[Moments]:
    """Moments of rows in some parts, for cross-validation.

    Args:
        rows (Callable): Takes indices, and returns the rows with these indices in float64.
        number (int): How many rows there are.
        like (torch.Tensor): A tensor on the device of the rows.
    """
    result: list[Moments] = []
    for part in torch.arange(number, device=like.device).tensor_split(_NUM_PARTS):
        for first, index in enumerate(part.split(_CHUNK) if len(part) else ()):
            values = rows(index)
            if not first:
                result.append(Moments(result[0].shift if result else values.mean(0)))
            result[-1].add(values)
    return result


def ffn_moments(
    ffn: ChannelIdleFFN, normalized: torch.Tensor, changes: torch.Tensor
) -> list[Moments]:
    """Means and covariances of [u, a, t], from which :func:`fit_ffn` works.

    Args:
        ffn (ChannelIdleFFN): The pretrained FFN, as one with idle ratio 0.
        normalized (torch.Tensor): u, what its first linear layer gets, of shape (N, C), image by
            image.
        changes (torch.Tensor): t, what the fitted FFN is to add to its tokens, of shape (N, C).

    Returns:
        list: The moments of some parts of the tokens.
    """

    def rows(index: torch.Tensor) -> torch.Tensor:
        u = normalized[index]
        return torch.cat([double(v) for v in (u, ffn.act(ffn.fc1(u)), changes[index])], dim=1)

    return split_moments(rows, len(normalized), normalized)


def _ridged(gram: torch.Tensor, strength: float, scale: torch.Tensor | None = None):
    """A Gram matrix with a multiple of its mean diagonal added to the diagonal.

    ``scale`` is the mean diagonal of the matrix from which a subtraction has left ``gram``: the
    rounding errors are of its size.
    """
    mean = gram.diagonal().mean()
    amount = strength * mean + 1e-10 * (mean if scale is None else scale)
    gram = gram.clone()
    # Where nothing varies, any ridge leaves the weights at those they are drawn to.
    gram.diagonal().add_(amount if amount > 0 else 1.0)
    return gram


def _cholesky(gram: torch.Tensor) -> torch.Tensor:
    """The Cholesky factor of a positive definite matrix.

    Where tokens hardly differ, rounding errors can make a Gram matrix indefinite. The diagonal
    then grows until it is not.
    """
    factor, info = torch.linalg.cholesky_ex(gram)
    amount = 1e-15 * gram.diagonal().abs().sum() + torch.finfo(gram.dtype).tiny
    while info and amount.isfinite():
        amount = 10 * amount
        factor, info = torch.linalg.cholesky_ex(gram + torch.diag(amount.expand(len(gram))))
    return factor


def _solve(gram: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """X with X gram = right, of a positive definite matrix."""
    return torch.cholesky_solve(right.t(), _cholesky(gram)).t()


class Elimination(NamedTuple):
    """What backward elimination leaves.

    Attributes:
        kept (torch.Tensor): Indices of the kept features, increasing.
        weights (torch.Tensor): The least-squares solution (m, len(kept)) with them.
        path (list): Pairs of a number of features and the increase of the squared error down to
            it, from all features to those that are kept.
    """

    kept: torch.Tensor
    weights: torch.Tensor
    path: list[tuple[int, float]]


def eliminate(
    gram: torch.Tensor, weights: torch.Tensor, num_kept: int, step: float = 0.02
) -> Elimination:
    """Choose the features of a least-squares solution by backward elimination.

    To remove the features K, and to let the others make up for them, costs
    tr(W_K (P_KK)^-1 W_K^T) with P the inverse Gram matrix (Optimal Brain Surgeon, Hassibi and
    Stork 1993). The features whose removal alone costs least go first, some at a time. A downdate
    of P and of the weights follows each removal; its rank is the number of removed features.

    Args:
        gram (torch.Tensor): Gram matrix (n, n) of the features, ridge included.
        weights (torch.Tensor): The least-squares solution (m, n) with all features.
        num_kept (int): Number of features to keep.
        step (float): Share of the remaining features that go at a time; at least one goes.
            Defaults to 0.02.
    """
    kept = torch.arange(len(gram), device=gram.device)
    inverse = torch.cholesky_inverse(_cholesky(gram))
    path = [(len(kept), 0.0)]
    while len(kept) > num_kept:
        costs = weights.square().sum(0) / inverse.diagonal()
        number = min(max(1, int(step * len(kept))), len(kept) - num_kept)
        order = costs.argsort()
        gone, left = order[:number], order[number:].sort().values
        factor = _cholesky(inverse[gone][:, gone])
        lost = weights[:, gone]
        cost = (torch.cholesky_solve(lost.t(), factor) * lost.t()).sum()
        follow = torch.cholesky_solve(inverse[gone][:, left], factor)
        weights = weights[:, left] - lost @ follow
        inverse = inverse[left][:, left] - inverse[left][:, gone] @ follow
        kept = kept[left]
        path.append((len(kept), path[-1][1] + float(cost)))
    return Elimination(kept, weights, path)


class Channels(NamedTuple):
    """The active and the idle channels of an FFN, and what the regression is on.

    Attributes:
        active (torch.Tensor): Indices (A, ) of the active channels, increasing.
        idle (torch.Tensor): Indices of the other channels, increasing.
        features (torch.Tensor, optional): The regression is on l = features @ u and a_A; on
            l = u if None.
    """

    active: torch.Tensor
    idle: torch.Tensor
    features: torch.Tensor | None


class _Problem:
    """The regression of one FFN, from the moments of [u, a, t].

    Weights (C, n + A) belong to the n features l and the A active channels of a
    :class:`Channels`.
    """

    def __init__(self, ffn: ChannelIdleFFN, moments: Moments, ridge: float) -> None:
        self.mean, self.cov = moments.mean_and_covariance()
        cov, dims, hidden = self.cov, ffn.embed_dims, ffn.feedforward_channels
        self.u, self.a, self.t = slice(dims), slice(dims, dims + hidden), slice(dims + hidden, None)
        self.w_in, self.out = double(ffn.fc1.weight).to(cov), double(ffn.fc2.weight).to(cov)
        self.b_in = double(ffn.fc1.bias).to(cov)
        if ffn.layer_scale is not None:
            self.out = double(ffn.layer_scale).to(cov)[:, None] * self.out
        self.var_t = cov[self.t, self.t].trace()
        self.use(ridge)

    def use(self, ridge: float) -> None:
        """Set the strength of the ridge, and compute B with it.

        The ridge draws B to the best affine function of each hidden channel alone.
        """
        self.ridge = ridge
        cov_uu, cov_au = self.cov[self.u, self.u], self.cov[self.a, self.u]
        h_var = ((self.w_in @ cov_uu) * self.w_in).sum(1)
        self.slope = (self.w_in * cov_au).sum(1) / h_var.clamp(min=torch.finfo(h_var.dtype).tiny)
        self.h_var = h_var
        alone = self.slope[:, None] * self.w_in
        self.b = alone + _solve(_ridged(cov_uu, ridge), cov_au - alone @ cov_uu)

    def choose(self, num_active: int, how: str) -> Channels:
        """Choose the active channels; ``how`` is ``select`` of :func:`fit_ffn`."""
        rest = self.rest()
        if how == 'score':
            scores = rest.diagonal() * self.out.square().sum(0)
            active = scores.topk(num_active).indices.sort().values
        else:
            active = self.eliminate(num_active, rest).kept
        is_idle = torch.ones(len(self.out[0]), dtype=torch.bool, device=active.device)
        is_idle[active] = False
        idle = is_idle.nonzero().flatten()
        w_idle = self.w_in[idle]
        # Where the idle channels cannot give any W, the regression is on them instead of on u.
        return Channels(active, idle, None if len(idle) >= w_idle.shape[1] else w_idle)

    def eliminate(self, num_active: int, rest: torch.Tensor | None = None) -> Elimination:
        """Backward elimination from the regression with all channels; ``rest`` is Cov(r)."""
        cov, u, a, t, b = self.cov, self.u, self.a, self.t, self.b
        rest = self.rest() if rest is None else rest
        gram = _ridged(rest, self.ridge, cov[a, a].diagonal().mean())
        # What the pretrained FFN leaves of the targets.
        left_u, left_a = cov[t, u] - self.out @ cov[a, u], cov[t, a] - self.out @ cov[a, a]
        weights = self.out + _solve(gram, left_a - left_u @ b.t())
        return eliminate(gram, weights, num_active)

    def rest(self) -> torch.Tensor:
        """Covariance of r = a - B u."""
        cov, u, a, b = self.cov, self.u, self.a, self.b
        half = b @ cov[u, u] - cov[a, u]
        return cov[a, a] - b @ cov[u, a] + half @ b.t()

    def solve(self, channels: Channels) -> torch.Tensor:
        """The weights of the ridge regression.

        The ridge is that of the features l and r, with a = B l + r, and draws the weights to the
        affine solution.
        """
        active, idle, features = channels
        gram, with_t = self.joint(channels)
        n = len(gram) - len(active)
        if features is None:
            prior = self.out[:, idle] @ self.b[idle]
            b = self.b[active]
        else:
            prior = self.out[:, idle] * self.slope[idle]
            b = _solve(_ridged(gram[:n, :n], self.ridge), gram[n:, :n])
        prior = torch.cat([prior, self.out[:, active]], dim=1)
        cov_ll, cov_la, cov_aa = gram[:n, :n], gram[:n, n:], gram[n:, n:]
        cov_lr = cov_la - cov_ll @ b.t()
        cov_rr = cov_aa - b @ cov_la - cov_lr.t() @ b.t()
        rotated = torch.empty_like(gram)
        rotated[:n, :n] = _ridged(cov_ll, self.ridge)
        rotated[:n, n:], rotated[n:, :n] = cov_lr, cov_lr.t()
        rotated[n:, n:] = _ridged(cov_rr, self.ridge, cov_aa.diagonal().mean())
        left = with_t - prior @ gram
        left[:, n:] -= left[:, :n] @ b.t()
        change = _solve(rotated, left)
        change[:, :n] -= change[:, n:] @ b
        return prior + change

    def joint(self, channels: Channels) -> tuple[torch.Tensor, torch.Tensor]:
        """Covariances of [l, a_A] with themselves and with t."""
        cov, u, a, t = self.cov, self.u, self.a, self.t
        active, _, features = channels
        cov_ll, cov_la, cov_tl = cov[u, u], cov[u, a][:, active], cov[t, u]
        if features is not None:
            cov_ll, cov_la = features @ cov_ll @ features.t(), features @ cov_la
            cov_tl = cov_tl @ features.t()
        gram = torch.cat(
            [
                torch.cat([cov_ll, cov_la], dim=1),
                torch.cat([cov_la.t(), cov[a, a][active][:, active]], dim=1),
            ]
        )
        return gram, torch.cat([cov_tl, cov[t, a][:, active]], dim=1)

    def bias(self, weights: torch.Tensor, channels: Channels) -> torch.Tensor:
        """The bias (C, ) with which the mean of t is met."""
        linear = self.mean[self.u]
        if channels.features is not None:
            linear = channels.features @ linear
        return self.mean[self.t] - weights @ torch.cat([linear, self.mean[self.a][channels.active]])

    def residual(
        self, weights: torch.Tensor, channels: Channels, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Mean square of t that weights leave, summed over the channels.

        Without a bias, with the best one.
        """
        gram, with_t = self.joint(channels)
        left = self.var_t + ((weights @ gram - 2 * with_t) * weights).sum()
        if bias is not None:
            left = left + (self.bias(weights, channels) - bias).square().sum()
        return left

    def fit(self, channels: Channels) -> FFNFit:
        """Solve the regression, and measure what it leaves."""
        active, idle, features = channels
        weights = self.solve(channels)
        residual = best = self.residual(weights, channels)
        n = weights.shape[1] - len(active)
        idle_in, idle_bias, idle_out = self.w_in[idle], self.b_in[idle], weights[:, :n]
        if features is None:
            idle_in, idle_bias, idle_out = self.idle_layers(idle, idle_out)
        else:
            any_map = channels._replace(features=None)
            best = self.residual(self.solve(any_map), any_map)
        everything = torch.arange(self.out.shape[1], device=active.device)
        none_active = Channels(active[:0], everything, None)
        affine = self.residual(self.solve(none_active), none_active)
        hidden_mean = self.mean[self.a].clone()
        hidden_var = self.cov[self.a, self.a].diagonal().clone()
        hidden_mean[idle] = idle_in @ self.mean[self.u] + idle_bias
        hidden_var[idle] = ((idle_in @ self.cov[self.u, self.u]) * idle_in).sum(1)
        var_t = self.var_t.clamp(min=torch.finfo(self.var_t.dtype).tiny)
        return FFNFit(
            active=active,
            idle=idle,
            active_out=weights[:, n:],
            idle_in=idle_in,
            idle_bias=idle_bias,
            idle_out=idle_out,
            bias=self.bias(weights, channels),
            hidden_mean=hidden_mean,
            hidden_var=hidden_var,
            ridge=self.ridge,
            unexplained=float(residual / var_t),
            unexplained_affine=float(affine / var_t),
            shortfall=float((residual - best).clamp(min=0) / var_t),
        )

    def idle_layers(
        self, idle: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input weights, biases and output weights of idle channels whose product is W (C, C)."""
        w_idle, dims = self.w_in[idle], len(w)
        squares = w_idle.t() @ w_idle
        eigenvalues = torch.linalg.eigvalsh(squares)
        if eigenvalues[0] > _CONDITION**-2 * eigenvalues[-1]:
            # From the best slope of each channel alone, corrected to give W.
            start = self.out[:, idle] * self.slope[idle]
            idle_out = start + _solve(squares, w - start @ w_idle) @ w_idle.t()
            return w_idle, self.b_in[idle], idle_out
        # Large output weights would cancel each other, and rounding would show. W by its singular
        # vectors instead, with input weights as large as they were.
        left, values, right = torch.linalg.svd(w)
        root = values.sqrt()
        size = (w_idle.square().mean() / values.mean().clamp(min=1e-30) * dims).sqrt()
        size = size if size > 0 else 1.0
        idle_in, idle_bias, idle_out = w_idle.clone(), self.b_in[idle], w.new_zeros(dims, len(idle))
        idle_in[:dims] = size * root[:, None] * right
        idle_bias[:dims] = 0
        idle_out[:, :dims] = left * root / size
        return idle_in, idle_bias, idle_out


def _cross_validated(
    parts: Sequence[Moments],
    errors: Callable[[Moments, Moments], Iterable[torch.Tensor]],
    slack: float,
) -> float:
    """The ridge with which each part of the tokens is predicted best from the others.

    It is the weakest one whose error is at most the best, plus a share ``slack`` of that:
    cross-validation fits to fewer images than the final fit, so that strong ridges look better than
    they are.

    Args:
        parts (Sequence[Moments]): The parts.
        errors (Callable): Takes the moments of the others and of a part, and gives the mean square
            error on the part for each of :data:`RIDGES`.
        slack (float): The share.
    """
    if len(parts) < 2:
        return RIDGES[0]
    total = [0.0] * len(RIDGES)
    for part in parts:
        others = Moments.of([p for p in parts if p is not part])
        for i, error in enumerate(errors(others, part)):
            total[i] += float(error) * part.count
    limit = (1 + slack) * max(min(total), 0.0)
    return RIDGES[next((i for i, error in enumerate(total) if error <= limit), 0)]


def _choose_ridge(ffn: ChannelIdleFFN, parts: Sequence[Moments], channels: Channels) -> float:
    """The ridge for the regression of an FFN."""

    def errors(others: Moments, part: Moments) -> Iterator[torch.Tensor]:
        problem, left_out = (_Problem(ffn, m, RIDGES[0]) for m in (others, part))
        for ridge in RIDGES:
            problem.use(ridge)
            weights = problem.solve(channels)
            yield left_out.residual(weights, channels, problem.bias(weights, channels))

    # A few tokens do not tell how much weaker the ridge may be.
    unknowns = ffn.embed_dims + len(channels.active)
    are_many = sum(part.count for part in parts) >= 10 * unknowns
    return _cross_validated(parts, errors, 0.08 if are_many else 0.03)


def fit_ffn(
    ffn: ChannelIdleFFN,
    parts: Sequence[Moments],
    num_active: int,
    select: str = 'eliminate',
    ridge: float | None = None,
) -> FFNFit:
    """Choose the active channels of an FFN and fit the other weights in closed form.

    Args:
        ffn (ChannelIdleFFN): The pretrained FFN, as one with idle ratio 0.
        parts (Sequence[Moments]): The moments of parts of the FFN's tokens, from
            :func:`ffn_moments`.
        num_active (int): Number of active channels A.
        select (str): How the active channels are chosen. 'score' takes those with the largest
            variance that no affine function of u explains, times their squared output weights;
            'eliminate' eliminates the others backwards from the regression with all channels.
            Defaults to 'eliminate'.
        ridge (float, optional): Strength of the ridge, relative to the mean variance. By default
            the one of :data:`RIDGES` that predicts each part best from the others.

    Returns:
        FFNFit: The weights, in float64.

    Raises:
        ValueError: If ``select`` is something else, or the moments are not finite numbers.
    """
    if select not in ('score', 'eliminate'):
        raise ValueError(f"select must be 'score' or 'eliminate', but got {select!r}")
    moments = Moments.of(parts)
    if not (moments.total.isfinite().all() and moments.products.isfinite().all()):
        raise ValueError('its inputs or outputs are not finite numbers')
    problem = _Problem(ffn, moments, RIDGES[0] if ridge is None else ridge)
    channels = problem.choose(num_active, select)
    if ridge is None:
        chosen = _choose_ridge(ffn, parts, channels)
        if chosen != problem.ridge:
            problem.use(chosen)
            channels = problem.choose(num_active, select)
    return problem.fit(channels)


def elimination_path(ffn: ChannelIdleFFN, parts: Sequence[Moments]) -> list[tuple[int, float]]:
    """Squared error per token against the number of active channels, from H to 0.

    Args:
        ffn (ChannelIdleFFN): The pretrained FFN, as one with idle ratio 0.
        parts (Sequence[Moments]): Of its tokens, see :func:`ffn_moments`.
    """
    return _Problem(ffn, Moments.of(parts), _PATH_RIDGE).eliminate(0).path


def share_active_channels(
    paths: Sequence[list[tuple[int, float]]],
    weights: Sequence[float],
    costs: Sequence[float],
    most: Sequence[int],
    budget: float,
) -> list[int]:
    """Numbers of active channels of some FFNs, with the least error under one budget.

    Every FFN gets the number at which one more unit of cost gains the same everywhere.

    Args:
        paths (Sequence): For each FFN, pairs of a number of active channels and its error.
        weights (Sequence[float]): What the error of each counts.
        costs (Sequence[float]): What an active channel of each costs.
        most (Sequence[int]): The most active channels that each may have.
        budget (float): The sum of the costs of all active channels.
    """

    def numbers(price: float) -> list[int]:
        return [
            min(
                (pair for pair in path if pair[0] <= limit),
                key=lambda pair: weight * pair[1] + price * cost * pair[0],
            )[0]
            for path, weight, cost, limit in zip(paths, weights, costs, most)
        ]

    def total(counts: list[int]) -> float:
        return sum(count * cost for count, cost in zip(counts, costs))

    low, high = 0.0, 1.0
    while total(numbers(high)) > budget and high < 1e30:
        high *= 10
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if total(numbers(middle)) > budget else (low, middle)
    return numbers(high)


def norm_as_batch_norm(
    ffn: ChannelIdleFFN, tokens: torch.Tensor, normalized: torch.Tensor, ridge: float | None = None
) -> ChannelIdleFFN:
    """A copy of an FFN with a BatchNorm and an affine map in the place of its norm.

    The map M x + c ~ norm(x) is fitted over the tokens. The BatchNorm holds their statistics, and
    the first linear layer absorbs the map.

    Args:
        ffn (ChannelIdleFFN): The pretrained FFN, as one with idle ratio 0.
        tokens (torch.Tensor): Its inputs x, of shape (N, C), image by image.
        normalized (torch.Tensor): What its norm makes of them, of shape (N, C).
        ridge (float, optional): Strength of the ridge that draws M to its best diagonal. By
            default chosen by cross-validation.
    """
    x, u = slice(ffn.embed_dims), slice(ffn.embed_dims, None)

    def rows(index: torch.Tensor) -> torch.Tensor:
        return torch.cat([double(tokens[index]), double(normalized[index])], dim=1)

    def solve(moments: Moments, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        mean, cov = moments.mean_and_covariance()
        std = cov[x, x].diagonal().clamp(min=torch.finfo(cov.dtype).tiny).sqrt()
        cov_xx, cov_ux = cov[x, x] / (std[:, None] * std), cov[u, x] / std
        diagonal = torch.diag(cov_ux.diagonal() / cov_xx.diagonal().clamp(min=1e-12))
        matrix = (diagonal + _solve(_ridged(cov_xx, ridge), cov_ux - diagonal @ cov_xx)) / std
        return matrix, mean[u] - matrix @ mean[x]

    def errors(others: Moments, part: Moments) -> Iterator[torch.Tensor]:
        mean, cov = part.mean_and_covariance()
        for strength in RIDGES:
            matrix, shift = solve(others, strength)
            left = cov[u, u].trace() + ((matrix @ cov[x, x] - 2 * cov[u, x]) * matrix).sum()
            yield left + (mean[u] - matrix @ mean[x] - shift).square().sum()

    parts = split_moments(rows, len(tokens), tokens)
    if ridge is None:
        ridge = _cross_validated(parts, errors, 0.03)
    moments = Moments.of(parts)
    matrix, shift = solve(moments, ridge)
    mean, cov = moments.mean_and_covariance()
    dims = ffn.embed_dims
    norm = nn.BatchNorm1d(dims).to(ffn.fc1.weight).eval()
    norm.running_mean.copy_(mean[x])
    norm.running_var.copy_(cov[x, x].diagonal() * moments.count / max(moments.count - 1, 1))
    std = (double(norm.running_var).to(cov) + norm.eps).sqrt()
    new = copy.copy(ffn)
    new._modules = dict(ffn._modules)
    new.norm1 = norm
    new.fc1 = nn.Linear(dims, ffn.feedforward_channels).to(ffn.fc1.weight)
    w_in = double(ffn.fc1.weight).to(cov)
    new.fc1.weight.data.copy_(w_in @ matrix * std)
    new.fc1.bias.data.copy_(
        double(ffn.fc1.bias).to(cov) + w_in @ (matrix @ double(norm.running_mean).to(cov) + shift)
    )
    new.fc1.requires_grad_(ffn.fc1.weight.requires_grad)
    return new


def empty_ffn(ffn: ChannelIdleFFN, num_active: int, keeps_norm: bool) -> ChannelIdleFFN:
    """A channel-idle FFN with the sizes, activation and layer scale of another FFN.

    Its linear layers have random weights.

    Args:
        ffn (ChannelIdleFFN): The other FFN.
        num_active (int): Number of active channels.
        keeps_norm (bool): Whether it has the norm of ``ffn``, or new BatchNorms.
    """
    like = ffn.fc1.weight
    new = ChannelIdleFFN(
        ffn.embed_dims,
        ffn.feedforward_channels,
        idle_ratio=1 - num_active / ffn.feedforward_channels,
        act_cfg=copy.deepcopy(ffn.act),
        norm_cfg=dict(type='LN' if keeps_norm else 'BN'),
        drop_path=ffn.dropout_layer.drop_prob,
        drop_rate=ffn.drop.p,
    ).to(like)
    if keeps_norm:
        new.norm1 = copy.deepcopy(ffn.norm1)
    scale = ffn.layer_scale
    if scale is not None:
        # The scale stays, except next to zero, where the weights could not have any effect.
        floor = 1e-3 * scale.detach().abs().max()
        scale = torch.where(scale.detach().abs() < floor, floor, scale.detach())
        if not floor:
            scale = torch.ones_like(scale)
        if isinstance(ffn.layer_scale, nn.Parameter):
            new.layer_scale = nn.Parameter(scale.clone())
        else:
            del new.layer_scale
            new.register_buffer('layer_scale', scale.clone(), False)
    for param in new.parameters():
        param.requires_grad_(like.requires_grad)
    return new.train(ffn.training)


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
    new = empty_ffn(ffn, len(fit.active), ffn.keeps_norm)
    like = ffn.fc1.weight
    order = torch.cat([fit.active, fit.idle]).to(like.device)
    out = torch.cat([fit.active_out, fit.idle_out], dim=1)
    bias = fit.bias - fit.idle_out @ fit.idle_bias
    if new.layer_scale is not None:
        scale = double(new.layer_scale).to(out)
        out, bias = out / scale[:, None], bias / scale
    with torch.no_grad():
        new.fc1.weight.copy_(torch.cat([like[fit.active], fit.idle_in.to(like)]))
        new.fc1.bias.copy_(torch.cat([ffn.fc1.bias[fit.active], fit.idle_bias.to(like)]))
        new.fc2.weight.copy_(out)
        new.fc2.bias.copy_(bias)
        if not ffn.keeps_norm:
            new.norm1.load_state_dict(ffn.norm1.state_dict())
            var = fit.hidden_var[order].clamp(min=0)
            new.norm2.running_mean.copy_(fit.hidden_mean[order])
            new.norm2.running_var.copy_(var * count / max(count - 1, 1))
            new.norm2.weight.copy_((double(new.norm2.running_var).to(var) + new.norm2.eps).sqrt())
            new.norm2.bias.copy_(new.norm2.running_mean)
    return new
