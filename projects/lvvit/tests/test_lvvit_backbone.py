"""RePaLVViT passes the tests of the package's own backbones."""

import inspect

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from projects.lvvit import RePaLVViT
from tests.test_models import test_backbones
from tests.test_models.test_backbones import VIT, check_same, scattered  # noqa: F401

CFG = dict(type='RePaLVViT', stem_channels=8, **VIT)


@pytest.mark.parametrize(
    'test',
    [
        'merge_is_exact',
        'trains',
        'the_wrong_form_is_refused_whoever_loads',
        'ordinary_weights_are_refused_and_fill',
        'own_weights_in_both_forms',
        'frozen_stages_keep_their_statistics',
    ],
)
def test_as_other_backbones(test, request, monkeypatch):
    monkeypatch.setitem(test_backbones.BACKBONES, 'lvvit', (CFG, 'LVViT', False))
    check = getattr(test_backbones, f'test_{test}')
    fixtures = inspect.signature(check).parameters.keys() - {'name'}
    check('lvvit', **{name: request.getfixturevalue(name) for name in fixtures})


def test_a_frozen_stem_keeps_its_statistics():
    model = RePaLVViT(stem_channels=8, frozen_stages=1, **VIT).train()
    norms = [m for m in model.patch_embed.modules() if isinstance(m, _BatchNorm)]
    before = [m.running_var.clone() for m in norms]
    model(torch.randn(2, 3, 32, 32))
    assert len(norms) == 3
    assert all(torch.equal(m.running_var, b) for m, b in zip(norms, before))


@pytest.mark.parametrize(
    'test, fixtures',
    [
        ('backbones_agree', ('randomize',)),
        pytest.param('programs_and_compiled', ('randomize',), marks=pytest.mark.slow),
    ],
)
def test_export(test, fixtures, request, monkeypatch):
    from tests.test_export import test_export

    row = dict(test_export.VIT, stem_channels=8)
    monkeypatch.setitem(test_export.BACKBONES, 'RePaLVViT', row)
    values = map(request.getfixturevalue, fixtures)
    getattr(test_export, f'test_{test}')('RePaLVViT', *values)
