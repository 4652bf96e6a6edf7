"""convert_pretrained in backbones of the three packages."""

import pytest
import torch

import repa_mm
from repa_mm.reparam import ChannelIdleFFN
from tests.test_models.test_idle_channels import CONVERTIBLE, build, outputs


def images(n=3, size=64):
    return [torch.randn(8, 3, size, size) for _ in range(n)]


def pretrained(case, randomize):
    package, name, kwargs, number = CONVERTIBLE[case]
    model = randomize(build(package, name, kwargs))
    model.eval()  # on a line of its own: of some backbones it returns None
    return model, number


def forward_of(model):
    return lambda x: outputs(model, x)


@pytest.mark.parametrize('case', CONVERTIBLE)
@pytest.mark.parametrize('norm', ['keep', 'fold'])
def test_every_block(case, norm, randomize, relative_error):
    model, number = pretrained(case, randomize)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = outputs(model, x)
    if norm == 'keep':
        converted, report = repa_mm.convert_pretrained(
            model, images(), 0.0, norm, forward=forward_of(model)
        )
        with torch.no_grad():
            for a, b in zip(outputs(converted, x), expected):
                assert relative_error(a, b) < 1e-6
    converted, report = repa_mm.convert_pretrained(
        model, images(), 0.5, norm, forward=forward_of(model)
    )
    assert len(report.blocks) == number
    ffns = [m for m in converted.modules() if isinstance(m, ChannelIdleFFN)]
    assert [ffn.num_idle * 2 for ffn in ffns] == [ffn.feedforward_channels for ffn in ffns]
    with torch.no_grad():
        for a, b in zip(outputs(model, x), expected):  # the original is as it was
            assert torch.equal(a, b)
        converted.double()
        result = outputs(converted, x.double())
        for a, b in zip(outputs(repa_mm.reparameterize(converted), x.double()), result):
            assert relative_error(a, b) < 1e-10
