r"""Narrower heads of a pretrained DINOv2, by this package and by published methods, at equal cost.

All methods narrow queries and keys of every block to the same number of dimensions, on the same
photographs (dinov2.py says where they and the model are from), and leave the FFNs as they are::

    python -m benchmarks.heads vit_s_focus.onnx --qk-keep 0.75 0.5

Results are appended to a file with the columns of results.csv.
"""

import argparse
from unittest.mock import patch

import torch

from benchmarks import dinov2
from benchmarks.compare import append
from benchmarks.even import even_sizes
from repa_mm.convert import Conversion, parts
from repa_mm.convert.heads import HeadMoments, HeadWeights, roots, trace


class Clover(HeadMoments):
    """SVD of the weights alone (CLOVER, arXiv 2411.17426): as if tokens were white noise."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        w_q, w_k, _ = self.weights
        q2, k2 = w_q @ w_q.mT, w_k @ w_k.mT
        self.root_q, self.inverse_q = roots(q2, trace(q2), 1e-6)
        self.root_k, self.inverse_k = roots(k2, trace(k2), 1e-6)
        _, self.sizes, self.right = torch.linalg.svd(self.root_q @ self.root_k)

    def fit_projection(self, narrow: HeadWeights) -> tuple[HeadWeights, float]:
        return narrow, super().fit_projection(narrow)[1]


class Dimensions(HeadMoments):
    """The dimensions with the largest energy of queries times keys, without a rotation."""

    def fit(self, qk_dims: int, v_dims: int) -> tuple[HeadWeights, float]:
        s_q, s_k = (x @ x for x in (self.root_q, self.root_k))
        energy = s_q.diagonal(dim1=1, dim2=2) * s_k.diagonal(dim1=1, dim2=2)
        chosen = energy.argsort(1, descending=True)[:, :qk_dims]
        p = torch.eye(s_q.shape[1], dtype=s_q.dtype)[chosen].mT  # (h, d, r)
        q = self.compensated(s_q, p)
        w, b = ([*x] for x in (self.weights, self.biases))
        w[0], w[1] = p.mT @ w[0], q.mT @ w[1]
        b[0], b[1] = ((m.mT @ x[..., None])[..., 0] for m, x in ((p, b[0]), (q, b[1])))
        rows = torch.cat([x.flatten(0, 1) for x in w]), torch.cat([x.flatten() for x in b])
        return self.fit_projection(HeadWeights(*rows, *self.heads[2:]))

    def compensated(self, s_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return what the keys are multiplied with, (h, d, r)."""
        return p


class Corp(Dimensions):
    """The same dimensions; a regression makes up for the others (CORP, arXiv 2602.05243)."""

    def compensated(self, s_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return s_q @ p @ torch.linalg.inv(p.mT @ s_q @ p)


METHODS = {'ours': HeadMoments, 'CORP': Corp, 'dimensions': Dimensions, 'CLOVER': Clover}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('model', help='the ONNX file')
    parser.add_argument('--qk-keep', type=float, nargs='+', default=[0.75])
    parser.add_argument('--crops', type=int, default=8, help='of a photograph')
    parser.add_argument('--out', default='work_dirs/heads.csv')
    args = parser.parse_args()
    vit = dinov2.load(args.model)
    groups = [dinov2.stacked([name], 0, args.crops) for name in dinov2.OWN]
    tests = dinov2.tests()
    expected = {name: dinov2.features(vit, x) for name, x in tests.items()}
    for share in args.qk_keep:
        for name, method in METHODS.items():
            with patch.object(parts, 'HeadMoments', method):
                conversion = Conversion(vit, groups, ['heads'])
                found, _ = conversion.fit(even_sizes(conversion, qk=share))
            found.eval()
            metrics = {
                key: dinov2.cosine(dinov2.features(found, x), expected[key])
                for key, x in tests.items()
            }
            row = dict(what='narrower heads', model='DINOv2 ViT-S/14', form=f'{name}, {share:g}')
            append(args.out, dict(row, run='1'), metrics)


if __name__ == '__main__':
    main()
