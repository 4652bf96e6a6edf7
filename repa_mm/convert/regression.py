"""Fitting narrower FFNs to pretrained FFNs.

A pretrained FFN computes f(u) = V a + b with a = act(W_in u + b_in), where u are normalized tokens
and V is W_out with the layer scale multiplied in. A narrower FFN keeps some channels K of a, and
computes V' a_K + b'. Backward elimination chooses K. A ridge regression that shrinks V' towards V_K
gives V' and b'. The ridge also bounds what the fit may add to V_K where a hardly varies: weights of
1e6 would hold on the given tokens alone. Both steps need only the mean and the covariance of [a, t]
over the tokens of some images, where t is the output to imitate. Some steps of gradient descent
then adjust all weights, including the input weights of the kept channels.

There is no linear path W u beside the channels, as in a channel-idle FFN: fitted without training,
it was worth less on foreign images than the C / 2 channels of the same cost.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.reparam import ChannelIdleFFN, double, weight_and_bias

_CHUNK = 4096  # tokens in float64 at a time
_BLOCK = 512  # rows of a symmetric product at a time
# Strengths of the ridge, relative to the mean variance of a channel. The first strength is used to
# choose the channels. Cross-validation over all of them sets the strength for the weights.
RIDGES = (0.1, 0.01, 0.03, 0.3, 1.0, 3.0, 100.0)
# Relative to the mean square error of the given weights divided by their squared norm. As a row of
# weights changes by e / (2 sqrt(ridge)) at most, with e the root mean square of its error, this
# bounds changes to about three times the norm of the weights.
MIN_RIDGE = 0.03
STEPS = 50  # of gradient descent
EVERY_CHANNEL = slice(None)

#: Normalized tokens u (N, C), or patches, and target outputs t (N, C) without shortcut.
Pairs = tuple[torch.Tensor, torch.Tensor]


def joined(splits: Sequence[Pairs]) -> Pairs:
    """Return the tokens of all splits of the images, and their targets."""
    return tuple(torch.cat(columns) for columns in zip(*splits))


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Moments:
    """Mean and covariance of rows that are added in parts, summed in float64.

    Args:
        shift (torch.Tensor): A point (n, ) near the rows, which is subtracted: products of values
            far from zero would hide a small variance.
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
        for start in range(0, len(self.shift), _BLOCK):  # half of them, as they are symmetric
            end = start + _BLOCK
            half = self.products[start:end, start:].addmm_(rows[:, start:end].t(), rows[:, start:])
            self.products[end:, start:end] = half[:, _BLOCK:].t()

    @classmethod
    def pooled(cls, splits: Sequence['Moments']) -> 'Moments':
        """Return the moments of all rows of several splits with the same shift."""
        result = cls(splits[0].shift)
        for split in splits:
            result.count += split.count
            result.total += split.total
            result.products += split.products
        return result

    def combine_(self, scale: torch.Tensor, weight: torch.Tensor) -> None:
        """Divide the first k entries u of all rows, and add weight (m, k) u to the next m."""
        (m, k), self.shift = weight.shape, self.shift.clone()  # other moments have it, too
        for x in (self.shift, self.total, self.products, self.products.t()):
            x[:k] /= scale
            x[k : k + m] += weight @ x[:k]

    def mean_and_covariance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean (n, ) and the covariance (n, n) of all rows."""
        mean = self.total / self.count
        return mean + self.shift, self.products / self.count - mean[:, None] * mean


class FittedFFN(NamedTuple):
    """An FFN of A channels, z = act(u W_in^T + b_in) W_out^T + b + u W^T.

    With a depthwise convolution before the activation, the tokens are patches: the k^2 neighbours
    of a token, each with a 1 appended, which is 0 in the padding. Convolution and input weights are
    one linear layer of such a patch. The layer scale is multiplied into W_out and b.
    """

    w_in: torch.Tensor  # (A, C)
    b_in: torch.Tensor  # (A, )
    w_out: torch.Tensor  # (C, A)
    b: torch.Tensor  # (C, )
    act: nn.Module
    conv: torch.Tensor | None = None  # filters (A, k^2)
    b_conv: torch.Tensor | None = None  # (A, )
    linear: torch.Tensor | None = None  # W (C, C), a linear path beside the channels

    @classmethod
    def from_form(cls, ffn: ChannelIdleFFN, conv: nn.Conv2d | None = None) -> 'FittedFFN':
        """Return a pretrained FFN of idle ratio 0, with its convolution, in float64."""
        folded = ffn.fold()
        weights = double(ffn.fc1.weight), double(ffn.fc1.bias), folded.w_out, folded.b
        return cls(*weights, ffn.act, *(weight_and_bias(conv) if conv is not None else ()))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name."""
        return {name: w for name, w in self._asdict().items() if isinstance(w, torch.Tensor)}

    def features(self, u: torch.Tensor) -> torch.Tensor:
        """Compute the activated channels (..., A) of normalized tokens (..., C) or patches.

        They are float32 at least: half precision would round away how little some channels vary.
        """
        u = at_least_float32(u)
        w, b = self.w_in, self.b_in
        if self.conv is not None:
            w = (torch.cat([w, b[:, None]], 1)[:, :, None] * self.conv[:, None]).flatten(1)
            b = self.b_conv
        return self.act(F.linear(u, w.to(u), b.to(u)))

    def __call__(self, u: torch.Tensor) -> torch.Tensor:
        """Compute z for normalized tokens (..., C) or patches (..., (C + 1) k^2)."""
        a = self.features(u)
        z = F.linear(a, self.w_out.to(a), self.b.to(a))
        if self.linear is not None:
            z = z + F.linear(u.to(a), self.linear.to(a))
        return z.to(u)

    def only(self, kept: torch.Tensor, **changes) -> 'FittedFFN':
        """Return a copy that has some of the channels, and other values as given."""
        rows = {name: w[kept] for name, w in self.weights.items() if name not in ('w_out', 'b')}
        return self._replace(w_out=self.w_out[:, kept], **rows)._replace(**changes)

    def unexplained(self, u: torch.Tensor, t: torch.Tensor) -> float:
        """Return the share of the variance of targets t (N, C) that z of tokens u leaves."""
        pairs = zip(u.split(_CHUNK), t.split(_CHUNK))
        left = sum(float((self(a) - b).square().sum()) for a, b in pairs)
        total = float((t - t.mean(0)).square().sum())
        return left / total if total else 0.0


def with_foreign_tokens(ffn: FittedFFN, u: torch.Tensor, t: torch.Tensor) -> Pairs:
    """Add half as many synthetic tokens, so that a fit also holds on images unlike the given ones.

    A synthetic token is a token plus a share of the difference of two other tokens,
    u' = u_i + r (u_j - u_k), r from 0 to 1/2. Its target follows from the pretrained FFN f,
    t' = t_i + f(u') - f(u_i). The given tokens come first.
    """
    u = at_least_float32(u)
    generator = torch.Generator().manual_seed(0)
    number = len(u) // 2
    i = torch.randperm(len(u), generator=generator)[:number].to(u.device)
    j, k = torch.randint(len(u), (2, number), generator=generator).to(u.device)
    r = 0.5 * torch.rand(number, 1, generator=generator).to(u)
    moved = u[i] + r * (u[j] - u[k])
    pairs = zip(moved.split(_CHUNK), u[i].split(_CHUNK), t[i].split(_CHUNK))
    targets = [c + ffn(a) - ffn(b) for a, b, c in pairs]
    return torch.cat([u, moved]), torch.cat([t, *targets])


def ffn_moments(ffn: FittedFFN, splits: Sequence[Pairs], linear: bool = False) -> list[Moments]:
    """Return the moments of [a, t] for each split of the images; those of [u, a, t] if ``linear``.

    ``ffn`` is the pretrained FFN, whose channels are a.
    """
    result: list[Moments] = []
    for u, t in splits:
        for first, (some, targets) in enumerate(zip(u.split(_CHUNK), t.split(_CHUNK))):
            rows = [double(ffn.features(some)), double(targets)]
            rows = torch.cat([double(some), *rows] if linear else rows, dim=1)
            if not first:
                result.append(Moments(result[0].shift if result else rows.mean(0)))
            result[-1].add(rows)
    return result


class Problem:
    """The regression of outputs t on channels a, from the moments of [a, t].

    ``out`` (C, n) are the weights of all channels that the fit is drawn to. Below, ``kept`` are the
    indices of channels, and ``weights`` are the output weights of these.
    """

    def __init__(self, out: torch.Tensor, moments: Moments) -> None:
        mean, cov = moments.mean_and_covariance()
        hidden = out.shape[1]
        self.mean_a, self.mean_t = mean[:hidden], mean[hidden:]
        self.gram, self.with_t = cov[:hidden, :hidden], cov[hidden:, :hidden]
        self.var_t = cov[hidden:, hidden:].trace()
        self.out = out
        # Of the ridge: if no channel varies by more, the given weights stay nearly as they are.
        bound = MIN_RIDGE * self.residual(EVERY_CHANNEL, out).clamp(min=0)
        bound = bound / out.square().sum().clamp(min=1e-200)
        # The rounding of a mean is no variance.
        self.least = bound + 1e-12 * self.mean_a.square().mean()

    def ridged(self, ridge: float, kept: torch.Tensor | slice) -> torch.Tensor:
        """Return the Gram matrix of channels, with a multiple of its mean on the diagonal."""
        gram = self.gram[kept][:, kept].clone()
        amount = ridge * gram.diagonal().mean() + self.least
        # If no channel varies, any ridge keeps the pretrained weights.
        gram.diagonal().add_(amount if amount > 0 else 1.0)
        return gram

    def solve(self, kept: torch.Tensor | slice, ridge: float) -> torch.Tensor:
        """Solve for the output weights of the kept channels, shrunk towards the pretrained ones."""
        out, factor = self.out[:, kept], torch.linalg.cholesky(self.ridged(ridge, kept))
        right = self.with_t[:, kept] - out @ self.gram[kept][:, kept]
        return out + torch.cholesky_solve(right.t(), factor).t()

    def bias(self, kept: torch.Tensor | slice, weights: torch.Tensor) -> torch.Tensor:
        """Return the best bias."""
        return self.mean_t - weights @ self.mean_a[kept]

    def residual(
        self, kept: torch.Tensor | slice, weights: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean square error per token, with the best bias if none is given."""
        gram, with_t = self.gram[kept][:, kept], self.with_t[:, kept]
        left = self.var_t + ((weights @ gram - 2 * with_t) * weights).sum()
        if bias is not None:
            left = left + (self.bias(kept, weights) - bias).square().sum()
        return left

    def eliminate(
        self, *numbers: int, step: float = 0.02, protected: int = 0
    ) -> list[torch.Tensor]:
        """Choose channels by backward elimination.

        Removing the channels K and refitting the others costs tr(W_K (P_KK)^-1 W_K^T), where P is
        the inverse Gram matrix (Optimal Brain Surgeon, Hassibi and Stork 1993). The channels whose
        removal alone costs least go first, several at a time. After each removal, P and the weights
        are downdated; the rank of the downdate is the number of removed channels.

        At a time, a share ``step`` of the remaining channels is removed, at least one. The first
        ``protected`` channels always stay. Returns, for each of the decreasing ``numbers`` of
        channels to keep, the kept channels in increasing order.
        """
        gram, weights = self.ridged(RIDGES[0], EVERY_CHANNEL), self.solve(EVERY_CHANNEL, RIDGES[0])
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        always, kept = torch.arange(len(gram), device=gram.device).tensor_split([protected])
        weights, inverse, found = weights[:, protected:], inverse[protected:, protected:], []
        for num_kept in numbers:
            while protected + len(kept) > num_kept:
                costs = weights.square().sum(0) / inverse.diagonal()
                number = min(max(1, int(step * len(kept))), protected + len(kept) - num_kept)
                order = costs.argsort()
                gone, left = order[:number], order[number:].sort().values
                factor = torch.linalg.cholesky(inverse[gone][:, gone])
                follow = torch.cholesky_solve(inverse[gone][:, left], factor)
                weights = weights[:, left] - weights[:, gone] @ follow
                inverse = inverse[left][:, left] - inverse[left][:, gone] @ follow
                kept = kept[left]
            found.append(torch.cat([always, kept]))
        return found

    def fit(self, ffn: FittedFFN, kept: torch.Tensor, ridge: float) -> FittedFFN:
        """Return an FFN with the kept channels alone."""
        out = self.solve(kept, ridge)
        return ffn.only(kept, w_out=out, b=self.bias(kept, out))


def cross_validated(out: torch.Tensor, splits: Sequence[Moments], kept: torch.Tensor) -> float:
    """Return the ridge with the least error on each split of the images if fitted to the others."""
    if len(splits) < 2:
        return RIDGES[0]
    total = dict.fromkeys(RIDGES, 0.0)
    for split in splits:
        others = Problem(out, Moments.pooled([p for p in splits if p is not split]))
        left_out = Problem(out, split)
        for ridge in RIDGES:
            weights = others.solve(kept, ridge)
            error = left_out.residual(kept, weights, others.bias(kept, weights))
            total[ridge] += float(error) * split.count
    return min(total, key=total.get)


def fit_ffn(ffn: FittedFFN, splits: Sequence[Moments], width: int) -> FittedFFN:
    """Choose channels, and fit their output weights in closed form; the result is in float64."""
    problem = Problem(ffn.w_out, Moments.pooled(splits))
    (kept,) = problem.eliminate(width)
    return problem.fit(ffn, kept, cross_validated(ffn.w_out, splits, kept))


def widths_of(
    ffn: FittedFFN, splits: Sequence[Moments], widths: Sequence[int]
) -> list[tuple[FittedFFN, float]]:
    """Fit narrower FFNs of several widths, decreasing, from one elimination in coarse steps.

    The second of each pair is the mean square error per token.
    """
    problem = Problem(ffn.w_out, Moments.pooled(splits))
    every = problem.eliminate(*widths, step=0.06)
    fits = [problem.fit(ffn, kept, RIDGES[0]) for kept in every]
    return [(fit, float(problem.residual(kept, fit.w_out))) for kept, fit in zip(every, fits)]


def refine(fit: FittedFFN, u: torch.Tensor, t: torch.Tensor) -> FittedFFN:
    """Train all weights of a fitted FFN with Adam on random tokens, if that leaves less of t.

    The result is in float64.
    """
    u, t = u.float(), t.float()
    variance = t.var(0).sum()
    if not variance > 0:  # all tokens are the same
        return fit
    # Weights are scaled to size 1 for a common learning rate: small layer scales make small rows.
    squares = {
        name: w.square().mean(1 if name in ('w_out', 'linear') else None, keepdim=True)
        for name, w in fit.weights.items()
    }
    sizes = {name: x.sqrt().clamp(min=1e-30).float() for name, x in squares.items()}
    weights = {name: (w.float() / sizes[name]).requires_grad_() for name, w in fit.weights.items()}

    def scaled() -> FittedFFN:
        return fit._replace(**{name: w * sizes[name] for name, w in weights.items()})

    optimizer = torch.optim.Adam(weights.values(), lr=1e-2, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, (k + 1) / 10) * (1 + math.cos(math.pi * k / STEPS)) / 2
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        index = torch.randint(len(u), (2048,), generator=generator).to(u.device)
        with torch.enable_grad():
            loss = (scaled()(u[index]) - t[index]).square().sum(1).mean() / variance
        optimizer.zero_grad()
        loss.backward(inputs=list(weights.values()))
        optimizer.step()
        schedule.step()
    found = fit._replace(**{name: double(w) for name, w in scaled().weights.items()})
    # Adam's steps have a size of their own, which leads away from a fit with hardly an error.
    return min(fit, found, key=lambda one: one.unexplained(u, t))
