"""What else makes a pretrained FFN cheaper without training, to compare with at equal cost.

Each method returns an FFN with fewer hidden channels, or an affine map alone::

    method(ffn, u, out, width) -> FoldedFFN

- ffn: the pretrained f(u) = act(u W_in^T + b_in) W_out^T + b, as :class:`Weights`.
- u: the normalized tokens (N, C) that the FFN gets, image by image.
- out: what it is to add to its tokens, (N, C).
- width: the number of hidden channels that stay.

The result is in float64, and its w is zero where a method has no linear path. All but the linear
map imitate f(u), and not ``out``. Where u stems from the partly compressed model, a block adapts to
those before it, as in CORP, and GRAIL for language models. VBP, TOAST, ReplaceMe, and
GRAIL for vision models measure the original model, where out = f(u).

The facts come from the code of the authors, unless a docstring says otherwise. Below, a = act(h),
and j is a hidden channel.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.convert.regression import Moments
from repa_mm.reparam import FoldedFFN

CHUNK = 4096  # tokens at a time that are in float64


class Weights(NamedTuple):
    """A FoldedFFN in float64 with w = 0, and its activation."""

    w: torch.Tensor
    b: torch.Tensor
    w_in: torch.Tensor
    b_in: torch.Tensor
    w_out: torch.Tensor
    act: nn.Module


class Statistics(NamedTuple):
    """Moments of a (H, ), and the number of tokens with abs(a) > 1 % of its RMS."""

    moments: Moments
    nonzero: torch.Tensor

    @property
    def second(self) -> torch.Tensor:
        return self.moments.products / self.moments.count


def statistics(ffn: Weights, u: torch.Tensor) -> Statistics:
    moments, nonzero = Moments(torch.zeros_like(ffn.b_in)), 0
    for chunk in u.split(CHUNK):
        a = ffn.act(torch.addmm(ffn.b_in, chunk.double(), ffn.w_in.t()))
        moments.add(a)
        nonzero = nonzero + (a.abs() > 0.01 * a.square().mean().sqrt()).sum(0)
    return Statistics(moments, nonzero)


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
    mean, covariance = stats.moments.mean_and_covariance()
    lost, slopes = ffn.w_out[:, gone], predictor(covariance, gone, kept, ridge)
    shift = lost @ (mean[gone] - slopes @ mean[kept])
    return subset(ffn, kept, ffn.w_out[:, kept] + lost @ slopes, ffn.b + shift)


def weight_norms(ffn) -> torch.Tensor:
    return ffn.w_in.norm(dim=1) * ffn.w_out.norm(dim=0)


def magnitude(ffn, u, out, width) -> FoldedFFN:
    """Keep the channels with the largest |w_in,j| |w_out,j|, and compensate nothing.

    The product is that of CORP's code. GRAIL's has |w_in,j| alone.
    """
    kept, _ = chosen(weight_norms(ffn), width)
    return subset(ffn, kept, ffn.w_out[:, kept], ffn.b)


def vbp(ffn, u, out, width) -> FoldedFFN:
    """VBP, arXiv 2507.12988: keep the largest variance; the mean of the others goes into b.

    The variance is that of a, and no weight enters it. The paper ranks the channels of all FFNs
    together: :func:`shared_widths` gives such widths. From the abstract and from detailed summaries
    by others, which agree; the authors' code was not at hand.
    """
    mean, covariance = statistics(ffn, u).moments.mean_and_covariance()
    kept, gone = chosen(covariance.diagonal(), width)
    return subset(ffn, kept, ffn.w_out[:, kept], ffn.b + ffn.w_out[:, gone] @ mean[gone])


def shared_widths(
    scores: Sequence[torch.Tensor], costs: Sequence[float], budget: float
) -> list[int]:
    """Widths of FFNs that the scores of their channels, ranked together, lead to.

    The best channels stay as long as the budget lasts, and one of each FFN in any case.

    Args:
        scores (Sequence[torch.Tensor]): Those of each FFN's channels, (H, ).
        costs (Sequence[float]): What a channel of each costs.
        budget (float): What all together may cost.
    """
    ranked = sorted(
        (-value, n)
        for n, score in enumerate(scores)
        for value in score.sort(descending=True)[0][1:].tolist()
    )
    widths, left = [1] * len(scores), budget - sum(costs)
    for _, n in ranked:
        left -= costs[n]
        if left < 0:
            break
        widths[n] += 1
    return widths


def corp(ffn, u, out, width) -> FoldedFFN:
    """CORP, arXiv 2602.05243: the others become affine functions of the channels that are kept.

    Kept is the largest E[a^2] |w_in,j| |w_out,j| times the share of tokens with abs(a) above 1 % of
    the RMS, the 'ensemble' of the code; its default leaves the weights out. The ridge is the oracle
    approximating shrinkage of the covariance of those kept, times their mean variance, and at least
    1e-3. Code: BOX-LEO/CORP.
    """
    stats = statistics(ffn, u)
    score = stats.second.diagonal() * stats.nonzero * weight_norms(ffn)
    kept, gone = chosen(score, width)
    covariance = stats.moments.mean_and_covariance()[1][kept][:, kept]
    trace, squares = covariance.trace(), covariance.square().sum()
    shrinkage = ((1 - 2 / width) * squares + trace**2) / (
        (stats.moments.count + 1 - 2 / width) * (squares - trace**2 / width)
    )
    ridge = (shrinkage.clamp(max=1) * trace / width).clamp(min=1e-3)
    return regressed(ffn, stats, kept, gone, ridge)


def wanda(ffn, stats: Statistics) -> torch.Tensor:
    """Wanda's score as in GRAIL's code for vision models: sqrt(E[a^2]) times sum |w_out,j|."""
    return stats.second.diagonal().sqrt() * ffn.w_out.abs().sum(0)


def grail(ffn, u, out, width) -> FoldedFFN:
    """GRAIL, arXiv 2602.23795: W_out B for those kept, B = G_:k (G_kk + ridge I)^-1, G = E[a a^T].

    The ridge is 1e-3 of the mean of diag(G_kk), and draws to zero. G is not centred, and b stays.
    If all channels stay, so do their weights. Of the code's scores
    this is :func:`wanda`; its other ones did worse on a DINOv2. Code: TWWinde/GRAIL_Compensation.
    """
    stats = statistics(ffn, u)
    kept, gone = chosen(wanda(ffn, stats), width)
    if not len(gone):
        return subset(ffn, kept, ffn.w_out, ffn.b)
    ridge = 1e-3 * stats.second.diagonal()[kept].mean()
    every = torch.arange(len(ffn.w_in), device=kept.device)
    return subset(ffn, kept, ffn.w_out @ predictor(stats.second, every, kept, ridge), ffn.b)


def linear_map(ffn, u, out, width) -> FoldedFFN:
    """One affine map instead of the FFN, by least squares to ``out``, whatever the width.

    TOAST, arXiv 2410.04941, and ReplaceMe, arXiv 2505.02819, so replace whole blocks, by a linear
    map without an offset, fitted to the tokens of the original model without a ridge (0 is the
    default of ReplaceMe's). Here it replaces an FFN after its norm, and the offset makes it
    stronger. Codes: icannistraci/toast, mts-ai/ReplaceMe.
    """
    dims = u.shape[1]
    moments = Moments(torch.zeros(2 * dims, device=u.device))
    for rows in zip(u.split(CHUNK), out.split(CHUNK)):
        moments.add(torch.cat([part.double() for part in rows], dim=1))
    mean, covariance = moments.mean_and_covariance()
    # A LayerNorm leaves one direction without variance.
    inverse = torch.linalg.pinv(covariance[:dims, :dims], rtol=1e-12, hermitian=True)
    w = covariance[dims:, :dims] @ inverse
    return FoldedFFN(w, mean[dims:] - w @ mean[:dims], ffn.w_in[:0], ffn.b_in[:0], ffn.w_out[:, :0])


METHODS: dict[str, Callable[..., FoldedFFN]] = {
    'magnitude': magnitude,
    'VBP': vbp,
    'CORP, weighted': corp,
    'GRAIL, Wanda': grail,
    'linear map': linear_map,
}
