"""Fitting attention heads with fewer dimensions to pretrained ones, in closed form.

The softmax does not change when a constant is added to a row of logits. So the keys may be centred
over the tokens that a query sees, and what is left of the logits is bilinear: with the second
moments S_q of queries and S_k of centred keys, the best logits of rank r in mean square are those
of the SVD of S_q^(1/2) S_k^(1/2). A head adds W_h o_h to the output, where o_h is the weighted sum
of its values: the SVD of W_h cov(o_h)^(1/2) gives the r dimensions of the values that matter most.
Both SVDs put an oblique projection of rank r between two factors of the attention. Its own SVD is
the basis: values are an orthonormal one, and queries and keys share the rest evenly, so that
weights stay as large as they were. A ridge regression of the whole attention's output on what
remains then fits the projection, drawn to the solution of the SVD.

Relatives: CLOVER (arXiv 2411.17426) without data, Eigen Attention (arXiv 2408.05646), and the
attention half of CORP (arXiv 2602.05243).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.convert.regression import EVERY_CHANNEL, Moments, Problem, at_least_float32
from repa_mm.faster.attention import FastShiftWindowMSA, split_heads
from repa_mm.faster.windows import masks, partition
from repa_mm.reparam import double

#: Strength of the ridge of the projection, relative to the mean variance of a feature.
RIDGE = 0.03
#: Share of its size by which the output of a nearly constant head varies, at most.
MAX_VARIATION = 0.01


class Tokens(NamedTuple):
    """Some tokens that attention was called with, in n windows or images.

    ``visible`` has, for each key, a 1 for the keys that are seen together with it, and 0 for the
    others. Without it, a query sees all keys. ``valid`` is False for padding.
    """

    queries: torch.Tensor  # (n, M, C), whose outputs count
    keys: torch.Tensor  # (n, N, C)
    bias: torch.Tensor | None = None  # of the logits, (n, heads, M, N)
    visible: torch.Tensor | None = None  # (n, N, N)
    valid: torch.Tensor | None = None  # (n, M)


def sample_windows(
    attention: FastShiftWindowMSA,
    number: int,
    generator: torch.Generator,
    x: torch.Tensor,
    hw_shape: Sequence[int],
) -> Tokens:
    """Draw windows with about ``number`` tokens from the inputs of window attention."""
    _, _, window, shift = geometry = attention.geometry(x, hw_shape)
    rows, _, padded, groups = partition(geometry, len(x), x.device)
    kinds = torch.cat([torch.full((stop - start,), mask) for start, stop, mask in groups])
    chosen = torch.randperm(len(kinds), generator=generator)[: -(-number // window**2)]
    kinds = kinds[chosen].to(x.device)
    tokens = x.flatten(0, 1)[rows.view(-1, window**2)[chosen]]
    valid = tokens.new_ones(tokens.shape[:2], dtype=torch.bool)
    if padded is not None:
        valid = ~padded.view(-1, window**2)[chosen]
        tokens = tokens * valid[..., None]
    together = valid[:, None].expand(-1, window**2, -1)
    if shift:
        together = together & (masks(window, shift, x.device)[kinds, 0] == 0)
    bias = attention.bias(shift, x.dtype)[kinds]
    return Tokens(tokens, tokens, bias, together.to(x), valid)


def sample_images(
    attention: nn.Module, number: int, generator: torch.Generator, x: torch.Tensor
) -> Tokens:
    """Draw about ``number`` queries from the inputs (B, N, C) of attention among all tokens."""
    chosen = torch.randperm(x.shape[1], generator=generator)[: -(-number // len(x))]
    return Tokens(x[:, chosen.to(x.device)], x)


class HeadWeights(NamedTuple):
    """Weights of attention with h heads, of r dimensions for q·k and s dimensions for values."""

    w_qkv: torch.Tensor  # (h (2 r + s), C), the rows of all queries first, then keys, values
    b_qkv: torch.Tensor  # (h (2 r + s), )
    w_out: torch.Tensor  # (C, h s), the projection
    b_out: torch.Tensor  # (C, )

    def split(self, num_heads: int) -> tuple[list, list]:
        """Return weights (h, r, C) and biases (h, r) of queries, keys and values."""
        values = self.w_out.shape[1]
        sizes = [(len(self.b_qkv) - values) // 2] * 2 + [values]
        return tuple(
            [x.unflatten(0, (num_heads, -1)) for x in both.split(sizes)]
            for both in (self.w_qkv, self.b_qkv)
        )

    def outputs(self, tokens: Tokens, num_heads: int, factor: float) -> list[torch.Tensor]:
        """Return queries, centred keys, outputs of the heads, and the means that keys lack.

        They are (h, n, r), (h, n, r), (h, n, s) and (h, n, r), in float32 at least.
        """
        keys = at_least_float32(tokens.keys)
        weights, values = (self.w_qkv.to(keys), self.b_qkv.to(keys)), self.w_out.shape[1]
        q, k, v = split_heads(nn.functional.linear(keys, *weights), num_heads, values)
        if tokens.queries is not tokens.keys:
            queries = nn.functional.linear(at_least_float32(tokens.queries), *weights)
            q = split_heads(queries, num_heads, values)[0]
        logits = factor * q @ k.transpose(2, 3)
        if tokens.bias is not None:
            logits = logits + tokens.bias
        o = logits.softmax(-1) @ v
        if tokens.visible is None:
            means = k.mean(2, keepdim=True).expand_as(k)
        else:
            count = tokens.visible.sum(-1, keepdim=True).clamp(min=1)
            means = (tokens.visible / count)[:, None].to(k) @ k
        found = [x.transpose(0, 1) for x in (q, k - means, o, means)]  # heads first
        if tokens.valid is None:
            return [x.flatten(1, 2) for x in found]
        return [x[:, tokens.valid] for x in found]


class HeadMoments:
    """What the fit of one attention's heads needs of some tokens.

    ``factor`` multiplies the logits, ``scale`` is the layer scale (C, ) behind the projection.

    Attributes:
        qk (torch.Tensor): Share of the logits' energy for each dimension of a head, summed over
            heads, (d, ), decreasing: that of the last d - r is what r dimensions leave out.
        v (torch.Tensor): The same of the attention's output for the dimensions of values.
        constant (int): Number of heads whose output is nearly constant.
    """

    def __init__(
        self,
        heads: HeadWeights,
        num_heads: int,
        factor: float,
        drawn: Sequence[Tokens],
        scale: torch.Tensor | None = None,
    ) -> None:
        self.heads, self.num_heads, self.factor, self.drawn = heads, num_heads, factor, drawn
        self.weights, self.biases = heads.split(num_heads)
        out = heads.w_out if scale is None else double(scale)[:, None] * heads.w_out
        self.out = out.unflatten(1, (num_heads, -1)).transpose(0, 1)  # (h, C, d)
        q2 = k2 = o2 = o1 = means2 = count = 0
        for tokens in drawn:
            q, k, o, means = (double(x) for x in heads.outputs(tokens, num_heads, factor))
            q2, k2, o2 = q2 + q.mT @ q, k2 + k.mT @ k, o2 + o.mT @ o
            means2 = means2 + (means - self.biases[1][:, None]).square().sum((1, 2))
            o1, count = o1 + o.sum(1), count + o.shape[1]
        mean = o1 / count
        cov = o2 / count - mean[:, :, None] * mean[:, None]
        energy_q, energy_o = (trace(x) / count for x in (q2, o2))
        energy_k = (trace(k2) + means2) / count
        noise = max(torch.finfo(tokens.keys.dtype).eps, 1e-6)
        self.root_q, self.inverse_q = roots(q2 / count, energy_q, noise)
        self.root_k, self.inverse_k = roots(k2 / count, energy_k, noise)
        self.root_o, self.inverse_o = roots(cov, energy_o, noise)
        self.constant = int((trace(cov) <= MAX_VARIATION**2 * energy_o).sum())
        _, self.sizes, self.right = torch.linalg.svd(self.root_q @ self.root_k)
        _, of_values, self.directions = torch.linalg.svd(self.out @ self.root_o, False)
        energies = (x.square().sum(0) for x in (self.sizes, of_values))
        self.qk, self.v = (x / x.sum().clamp(min=1e-300) for x in energies)

    def fit(self, qk_dims: int, v_dims: int) -> tuple[HeadWeights, float]:
        """Fit heads of ``qk_dims`` dimensions for q·k and ``v_dims`` for values.

        Returns the weights, and the share of the variance of the attention's output that they do
        not explain on the tokens.
        """
        w, b = [list(x) for x in (self.weights, self.biases)]
        if qk_dims < w[0].shape[1]:
            p, size, q = oblique(self.root_k, self.right[:, :qk_dims], self.inverse_k)
            p, q = p * size.sqrt(), q * size.sqrt()
            w[0], w[1] = p.mT @ w[0], q.mT @ w[1]
            b[0], b[1] = (p.mT @ b[0][..., None])[..., 0], b[0].new_zeros(len(b[0]), qk_dims)
        out = self.heads.w_out
        if v_dims < self.out.shape[-1]:
            back, size, into = oblique(self.root_o, self.directions[:, :v_dims], self.inverse_o)
            w[2], b[2] = into.mT @ w[2], (into.mT @ b[2][..., None])[..., 0]
            heads = out.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
            out = (heads @ (back * size)).transpose(0, 1).flatten(1)
        rows = torch.cat([x.flatten(0, 1) for x in w]), torch.cat([x.flatten() for x in b])
        return self.fit_projection(HeadWeights(*rows, out, self.heads.b_out))

    def fit_projection(self, narrow: HeadWeights) -> tuple[HeadWeights, float]:
        """Fit the projection to the output of the pretrained heads, drawn to the given one."""
        moments = Moments(narrow.w_out.new_zeros(sum(narrow.w_out.shape)))
        for tokens in self.drawn:
            found, target = (
                double(x.outputs(tokens, self.num_heads, self.factor)[2].transpose(0, 1).flatten(1))
                for x in (narrow, self.heads)
            )
            moments.add(torch.cat([found, target @ self.heads.w_out.t()], 1))
        problem = Problem(narrow.w_out, moments)
        out = problem.solve(EVERY_CHANNEL, RIDGE)
        bias = self.heads.b_out + problem.bias(EVERY_CHANNEL, out)
        fitted = narrow._replace(w_out=out, b_out=bias)
        left = problem.residual(EVERY_CHANNEL, out) / problem.var_t.clamp(min=1e-300)
        return fitted, float(left)


def trace(matrices: torch.Tensor) -> torch.Tensor:
    """Return the traces (h, ) of matrices (h, d, d)."""
    return matrices.diagonal(dim1=1, dim2=2).sum(1)


def roots(
    matrices: torch.Tensor, energy: torch.Tensor, noise: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return square roots of second moments (h, d, d) of centred features, and the inverse roots.

    ``energy`` (h, ) is the mean squared norm of the features with their mean, and ``noise`` the
    rounding error of a feature, relative to its size. Directions that vary less count as if they
    varied by that much, so that no rounding noise is scaled up.
    """
    floor = noise**2 * energy / matrices.shape[-1]
    floor = torch.where(floor > 0, floor, 1.0)  # all features are zero
    values, vectors = torch.linalg.eigh(matrices)
    root = (values.clamp(min=0) + floor[:, None]).sqrt()[:, None]
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def oblique(
    root: torch.Tensor, directions: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decompose the projection onto whitened directions (h, r, d) into orthonormal bases.

    Returns bases U (h, d, r), sizes s (h, 1, r) and bases V (h, d, r): the projection is
    U diag(s) V^T. The sizes are inverse cosines between both bases, so 1 at least.
    """
    left, size, right = torch.linalg.svd(root @ directions.mT @ directions @ inverse)
    rank = directions.shape[1]
    return left[..., :rank], size[:, None, :rank], right[:, :rank].mT
