"""Fitting channel-idle FFNs to pretrained FFNs, as a start for training.

A channel-idle FFN computes W u + V act(h)_A + b after its merge, with h = W_in u + b_in, A active
channels and a C x C matrix W of the idle ones. It is fitted as a narrower FFN is, see
:mod:`repa_mm.convert.regression`, with two differences. The regression is on [u, r], where
r = act(h) - s W_in u is what a channel's activation adds to its best linear map, of slope s. So the
ridge draws W to the pretrained FFN with linear idle channels, whichever channels are idle. And the
elimination removes entries of r alone: W makes up for a part of what a channel does.
"""

from collections.abc import Sequence

import torch

from repa_mm.convert.parts import FittedPart, PretrainedFFN
from repa_mm.convert.regression import (
    FittedFFN,
    Moments,
    Pairs,
    Problem,
    cross_validated,
    ffn_moments,
    joined,
    refine,
    with_foreign_tokens,
)
from repa_mm.models.sites import FFNSite
from repa_mm.models.structures import idle_ffn
from repa_mm.reparam import double

NORM = dict(type='keep')
# Least singular value of the idle input weights that counts, relative to the largest one.
RTOL = 1e-3


def fit_idle(
    ffn: FittedFFN, splits: Sequence[Pairs], num_active: int
) -> tuple[FittedFFN, torch.Tensor, torch.Tensor]:
    """Choose A active channels, and fit their output weights and W in closed form.

    Returns the active channels with the linear path W, in float64; their indices (A, ); and the
    slopes (H, ) of all channels.
    """
    w_in, dims, hidden = ffn.w_in, ffn.w_in.shape[1], len(ffn.w_in)
    moments = ffn_moments(ffn, splits, linear=True)
    _, cov = Moments.pooled(moments).mean_and_covariance()
    variance = ((w_in @ cov[:dims, :dims]) * w_in).sum(1)
    slopes = (cov[dims : dims + hidden, :dims] * w_in).sum(1) / variance.clamp(min=1e-300)
    slopes[variance <= 1e-12 * variance.max()] = 0
    # From [u, a, t] to [u / scale, r, t], where the scale lets one ridge suit u and r.
    varies = cov.diagonal()[: dims + hidden].clone()
    varies[dims:] -= slopes.square() * variance
    scale = (varies[:dims].mean() / varies[dims:].mean().clamp(min=1e-300)).sqrt()
    scale = scale.clamp(1e-3, 1e3)
    del cov  # as large as what follows
    for split in moments:
        split.combine_(scale, -scale * slopes[:, None] * w_in)
    linear = scale * (ffn.w_out * slopes) @ w_in
    pretrained = torch.cat([linear, ffn.w_out], dim=1)
    problem = Problem(pretrained, Moments.pooled(moments))
    (kept,) = problem.eliminate(dims + num_active, protected=dims)
    ridge = cross_validated(pretrained, moments, kept)
    weights, active = problem.solve(kept, ridge), kept[dims:] - dims
    out, b = weights[:, dims:], problem.bias(kept, weights)
    linear = weights[:, :dims] / scale - (out * slopes[active]) @ w_in[active]
    return ffn.only(active, w_out=out, linear=linear, b=b), active, slopes


def fit_training_form(
    ffn: FittedFFN, splits: Sequence[Pairs], num_active: int
) -> tuple[FittedFFN, tuple[torch.Tensor, ...]]:
    """Fit a channel-idle FFN with A active channels to a pretrained FFN.

    Idle rows of the first layer keep their pretrained weights. Idle columns of the second solve
    W_out,I W_in,I = W; of all solutions they are nearest to the pretrained ones times the slopes.

    Returns what the FFN computes after its merge, and its weights, active channels first:
    w_in (H, C), b_in (H, ), and w_out (C, H) and b_out (C, ) with the layer scale multiplied in.
    """
    more = [with_foreign_tokens(ffn, *split) for split in splits]
    fit, active, slopes = fit_idle(ffn, more, num_active)
    fit = refine(fit, *joined(more))
    idle = torch.ones_like(slopes, dtype=torch.bool).index_fill(0, active, False)
    w_idle, b_idle, out = ffn.w_in[idle], ffn.b_in[idle], (ffn.w_out * slopes)[:, idle]
    inverse = torch.linalg.pinv(w_idle.t() @ w_idle, rtol=RTOL**2, hermitian=True)
    out = out + (fit.linear - out @ w_idle) @ inverse @ w_idle.t()
    linear = out @ w_idle  # fit.linear, unless the idle rows do not span all inputs
    b = fit.b + (fit.linear - linear) @ double(joined(splits)[0].mean(0))
    w_in, b_in = torch.cat([fit.w_in, w_idle]), torch.cat([fit.b_in, b_idle])
    weights = w_in, b_in, torch.cat([fit.w_out, out], 1), b - out @ b_idle
    return fit._replace(linear=linear, b=b), weights


class IdleFFN(PretrainedFFN):
    """A pretrained FFN whose fit is the training form of a channel-idle FFN.

    Attributes:
        sizes (tuple[int, int]): The number of hidden channels, and 0.
        idle_sizes (tuple[int, int]): Its sizes after the fit: the number A of active channels, and
            the number C of rows of W.

    Raises:
        ValueError: As :class:`~repa_mm.convert.parts.PretrainedFFN`; if the FFN has a convolution;
            or if there are fewer idle channels than C, so that not every W is possible.
    """

    def __init__(self, site: FFNSite, idle_ratio: float) -> None:
        super().__init__(site)
        form = idle_ffn(site, idle_ratio, NORM)
        if form.num_idle < form.embed_dims:
            raise ValueError(
                f'{form.num_idle} of its {form.feedforward_channels} hidden channels would be '
                f'idle, and the fit needs {form.embed_dims} at least, one for each input: give a '
                'larger idle ratio'
            )
        self.idle_ratio = idle_ratio
        self.sizes, self.idle_sizes = (*self.sizes, 0), (form.num_active, form.embed_dims)

    def macs(self, x: torch.Tensor, *_) -> tuple[float, float]:
        """Return the multiply-adds of one hidden channel, and of one row of W, for tokens x."""
        return *super().macs(x), float(x.numel())

    def fit(self, splits: Sequence[Pairs], sizes: tuple[int, ...]) -> FittedPart:
        """Fit the channel-idle FFN to samples."""
        fit, weights = fit_training_form(FittedFFN.from_form(self.ffn), splits, sizes[0])

        def put(site: FFNSite) -> None:
            site.set_weights(*weights)
            site.put(idle_ffn(site, self.idle_ratio, NORM))  # filled from the site

        return FittedPart(self._with(fit), put, fit.unexplained(*joined(splits)))
