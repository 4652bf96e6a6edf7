"""What else makes a pretrained FFN cheaper without training, to compare with at equal cost.

Each method returns an FFN with fewer hidden channels, or an affine map alone::

    method(ffn, u, out, width, seed) -> FoldedFFN

- ffn: the pretrained f(u) = act(u W_in^T + b_in) W_out^T + b, as a :class:`PretrainedFFN`.
- u: the normalized tokens (N, C) that the FFN gets, image by image.
- out: what it is to add to its tokens, (N, C).
- width: the number of hidden channels that stay.
- seed: of what is drawn. No method draws anything yet.

The result is in float64, and its w is zero where a method has no linear path. All but the linear
map imitate f(u), and not ``out``. Where u stems from the partly compressed model, a block adapts to
those before it, as in CORP, SnapViT, and GRAIL for language models. VBP, TOAST, ReplaceMe, and
GRAIL for vision models measure the original model, where out = f(u).

The facts come from the code of the authors, unless a docstring says otherwise. Below, a = act(h),
and j is a hidden channel.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.reparam.ffn import FoldedFFN

CHUNK = 4096  # tokens at a time that are in float64
# Strengths of a ridge, relative to the mean variance, from which held-out images choose.
RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)


class PretrainedFFN(NamedTuple):
    """The attributes of a FoldedFFN, with w = 0 and the layer scale in w_out and b, and ``act``."""

    w: torch.Tensor
    b: torch.Tensor
    w_in: torch.Tensor
    b_in: torch.Tensor
    w_out: torch.Tensor
    act: nn.Module


class Statistics(NamedTuple):
    """Count of tokens, and sums of a (H, ), of a a^T (H, H), and of abs(a) > 1 % of its RMS."""

    count: int
    total: torch.Tensor
    products: torch.Tensor
    nonzero: torch.Tensor

    @property
    def second(self) -> torch.Tensor:
        return self.products / self.count

    @property
    def mean_and_covariance(self) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.total / self.count
        return mean, self.second - mean[:, None] * mean


def double(ffn) -> PretrainedFFN:
    return PretrainedFFN(*(getattr(ffn, n).detach().double() for n in FoldedFFN._fields), ffn.act)


def statistics(ffn, u: torch.Tensor) -> Statistics:
    total, products, nonzero = 0, 0, 0
    for chunk in u.split(CHUNK):
        a = ffn.act(torch.addmm(ffn.b_in, chunk.double(), ffn.w_in.t()))
        total, products = total + a.sum(0), products + a.t() @ a
        nonzero = nonzero + (a.abs() > 0.01 * a.square().mean().sqrt()).sum(0)
    return Statistics(len(u), total, products, nonzero)


def chosen(score: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the channels that stay, those with the largest score, and of the others."""
    stay = torch.zeros_like(score, dtype=torch.bool)
    stay[score.topk(width).indices] = True
    return stay.nonzero()[:, 0], (~stay).nonzero()[:, 0]


def predictor(gram: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor, ridge) -> torch.Tensor:
    """B (rows, kept) that predicts channels from those kept: G_rk (G_kk + ridge I)^-1."""
    ridged = gram[kept][:, kept]
    ridged.diagonal().add_(ridge)
    return torch.cholesky_solve(gram[kept][:, rows], torch.linalg.cholesky(ridged)).t()


def subset(ffn, kept: torch.Tensor, w_out: torch.Tensor, b: torch.Tensor) -> FoldedFFN:
    return FoldedFFN(torch.zeros_like(ffn.w), b, ffn.w_in[kept], ffn.b_in[kept], w_out)


def regressed(ffn, stats: Statistics, kept, gone, ridge) -> FoldedFFN:
    """The channels that go as affine functions of those kept, put into w_out and b."""
    mean, covariance = stats.mean_and_covariance
    lost, slopes = ffn.w_out[:, gone], predictor(covariance, gone, kept, ridge)
    shift = lost @ (mean[gone] - slopes @ mean[kept])
    return subset(ffn, kept, ffn.w_out[:, kept] + lost @ slopes, ffn.b + shift)


def weight_norms(ffn) -> torch.Tensor:
    return ffn.w_in.norm(dim=1) * ffn.w_out.norm(dim=0)


def magnitude(ffn, u, out, width, seed) -> FoldedFFN:
    """Keep the channels with the largest |w_in,j| |w_out,j|, and compensate nothing.

    The product is that of CORP's code. GRAIL's has |w_in,j| alone.
    """
    ffn = double(ffn)
    kept, _ = chosen(weight_norms(ffn), width)
    return subset(ffn, kept, ffn.w_out[:, kept], ffn.b)


def vbp(ffn, u, out, width, seed) -> FoldedFFN:
    """VBP, arXiv 2507.12988: keep the largest variance; the mean of the others goes into b.

    The variance is that of a, and no weight enters it. The paper ranks the channels of all FFNs
    together: :func:`shared_widths` gives such widths. From the abstract and from detailed summaries
    by others, which agree; the authors' code was not at hand.
    """
    ffn = double(ffn)
    mean, covariance = statistics(ffn, u).mean_and_covariance
    kept, gone = chosen(covariance.diagonal(), width)
    return subset(ffn, kept, ffn.w_out[:, kept], ffn.b + ffn.w_out[:, gone] @ mean[gone])


def shared_widths(scores: Sequence[torch.Tensor], total: int, least: int = 1) -> list[int]:
    """Widths of equally wide FFNs that their scores, ranked together, lead to.

    Every FFN keeps ``least`` channels, and all together ``total``.
    """
    rows = torch.stack(list(scores)).sort(dim=1, descending=True).values
    rows[:, :least] = torch.inf
    return (rows.flatten().topk(total).indices // rows.shape[1]).bincount().tolist()


def corp(ffn, u, out, width, seed, weighted: bool = False) -> FoldedFFN:
    """CORP, arXiv 2602.05243: the others become affine functions of the channels that are kept.

    Kept is the largest E[a^2] times the share of tokens with abs(a) above 1 % of the RMS, the
    default of the code; ``weighted`` multiplies by |w_in,j| |w_out,j|, as its 'ensemble' does. The
    ridge is the oracle approximating shrinkage of the covariance of those kept, times their mean
    variance, and at least 1e-3. Code: BOX-LEO/CORP.
    """
    ffn = double(ffn)
    stats = statistics(ffn, u)
    score = stats.second.diagonal() * stats.nonzero
    kept, gone = chosen(score * weight_norms(ffn) if weighted else score, width)
    covariance = stats.mean_and_covariance[1][kept][:, kept]
    trace, squares = covariance.trace(), covariance.square().sum()
    shrinkage = ((1 - 2 / width) * squares + trace**2) / (
        (stats.count + 1 - 2 / width) * (squares - trace**2 / width)
    )
    ridge = (shrinkage.clamp(max=1) * trace / width).clamp(min=1e-3)
    return regressed(ffn, stats, kept, gone, ridge)


def wanda(ffn, stats: Statistics) -> torch.Tensor:
    """Wanda's score as in GRAIL's code for vision models: sqrt(E[a^2]) times sum |w_out,j|."""
    return stats.second.diagonal().sqrt() * ffn.w_out.abs().sum(0)


def row_norms(ffn, stats: Statistics) -> torch.Tensor:
    return ffn.w_in.norm(dim=1)


def grail(ffn, u, out, width, seed, score: Callable = wanda) -> FoldedFFN:
    """GRAIL, arXiv 2602.23795: W_out B for those kept, B = G_:k (G_kk + ridge I)^-1, G = E[a a^T].

    The ridge is 1e-3 of the mean of diag(G_kk), and draws to zero. G is not centred, and b stays.
    If all channels stay, so do their weights. The code has the scores :func:`wanda` and
    :func:`row_norms`, and folding instead of pruning: several times their error on a DINOv2, and
    left out. Code: TWWinde/GRAIL_Compensation.
    """
    ffn = double(ffn)
    stats = statistics(ffn, u)
    kept, gone = chosen(score(ffn, stats), width)
    if not len(gone):
        return subset(ffn, kept, ffn.w_out, ffn.b)
    ridge = 1e-3 * stats.second.diagonal()[kept].mean()
    every = torch.arange(len(ffn.w_in), device=kept.device)
    return subset(ffn, kept, ffn.w_out @ predictor(stats.second, every, kept, ridge), ffn.b)


def snapvit_local(ffn, u, out, width, seed) -> FoldedFFN:
    """What the tokens of an FFN alone can give of SnapViT, arXiv 2510.17700.

    Its score is the square of the gradient of DINO's loss for w_in,j, times a weight of the block
    from an evolutionary search. Both need the whole model. A loss whose curvature at the FFN's
    output is the identity gives |w_out,j|^2 E[act'(h_j)^2 |u|^2]. Its correction is SparseGPT's:
    G = E[a a^T] with a ridge of 1 % of the mean of diag(G), which draws W_out to what it was; b
    stays. SparseGPT goes channel by channel and changes only later ones; the joint solution here
    has a smaller error. Code: WalterSimoncini/SnapViT.
    """
    ffn, score = double(ffn), 0
    for chunk in u.double().split(CHUNK):
        with torch.enable_grad():
            h = torch.addmm(ffn.b_in, chunk, ffn.w_in.t()).requires_grad_()
            (slope,) = torch.autograd.grad(ffn.act(h).sum(), h)
        score = score + chunk.square().sum(1) @ slope.square() * ffn.w_out.square().sum(0)
    second = statistics(ffn, u).second
    kept, gone = chosen(score, width)
    change = predictor(second, gone, kept, 0.01 * second.diagonal().mean())
    return subset(ffn, kept, ffn.w_out[:, kept] + ffn.w_out[:, gone] @ change, ffn.b)


def ridge_held_out(ffn, u, out, width, seed) -> FoldedFFN:
    """CORP's regression on the channels that :func:`wanda` keeps, with a tuned ridge.

    No paper has this. It shows what the fixed ridges of CORP and GRAIL cost. Of :data:`RIDGES` it
    takes the one whose error on the last quarter of the images is least after a fit to the others.
    """
    ffn = double(ffn)
    first, last = (statistics(ffn, part) for part in u.tensor_split([3 * len(u) // 4]))
    mean, covariance = last.mean_and_covariance
    both = Statistics(*(x + y for x, y in zip(first, last)))
    kept, gone = chosen(wanda(ffn, both), width)
    variance = both.mean_and_covariance[1].diagonal()[kept].mean()

    def error(ridge: float) -> float:
        fitted = regressed(ffn, first, kept, gone, ridge * variance)
        change = ffn.w_out.clone()
        change[:, kept] -= fitted.w_out
        shift = change @ mean + ffn.b - fitted.b
        return float(((change @ covariance) * change).sum() + shift.square().sum())

    return regressed(ffn, both, kept, gone, min(RIDGES, key=error) * variance)


def linear_map(ffn, u, out, width, seed) -> FoldedFFN:
    """One affine map instead of the FFN, by least squares to ``out``, whatever the width.

    TOAST, arXiv 2410.04941, and ReplaceMe, arXiv 2505.02819, so replace whole blocks, by a linear
    map without an offset, fitted to the tokens of the original model without a ridge (0 is the
    default of ReplaceMe's). Here it replaces an FFN after its norm, and the offset makes it
    stronger. Codes: icannistraci/toast, mts-ai/ReplaceMe.
    """
    ffn, dims, total, products = double(ffn), u.shape[1], 0, 0
    for rows in zip(u.split(CHUNK), out.split(CHUNK)):
        row = torch.cat([part.double() for part in rows], dim=1)
        total, products = total + row.sum(0), products + row.t() @ row
    mean, covariance = Statistics(len(u), total, products, total).mean_and_covariance
    # A LayerNorm leaves one direction without variance.
    inverse = torch.linalg.pinv(covariance[:dims, :dims], rtol=1e-12, hermitian=True)
    w = covariance[dims:, :dims] @ inverse
    return FoldedFFN(w, mean[dims:] - w @ mean[:dims], ffn.w_in[:0], ffn.b_in[:0], ffn.w_out[:, :0])


METHODS: dict[str, Callable[..., FoldedFFN]] = {
    'magnitude': magnitude,
    'VBP': vbp,
    'CORP': corp,
    'CORP, weighted': partial(corp, weighted=True),
    'GRAIL, magnitude': partial(grail, score=row_norms),
    'GRAIL, Wanda': grail,
    'SnapViT, local': snapvit_local,
    'ridge, held out': ridge_held_out,
    'linear map': linear_map,
}
