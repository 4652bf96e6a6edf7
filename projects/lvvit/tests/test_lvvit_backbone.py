"""RePaLVViT passes the tests of the package's own backbones."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from projects.lvvit import RePaLVViT
from tests.shared import backbone_tests, export_test
from tests.test_models.test_backbones import VIT, check_same, scattered  # noqa: F401

CFG = dict(type='RePaLVViT', stem_channels=8, **VIT)
rows, test_as_other_backbones = backbone_tests(
    dict(lvvit=(CFG, 'LVViT', False)),
    'ordinary_weights_are_refused_and_fill',
    'frozen_stages_keep_their_statistics',
)
test_export = export_test(lambda module: dict(RePaLVViT=dict(module.VIT, stem_channels=8)))


def test_a_frozen_stem_keeps_its_statistics():
    model = RePaLVViT(stem_channels=8, frozen_stages=1, **VIT).train()
    norms = [m for m in model.patch_embed.modules() if isinstance(m, _BatchNorm)]
    before = [m.running_var.clone() for m in norms]
    model(torch.randn(2, 3, 32, 32))
    assert len(norms) == 3
    assert all(torch.equal(m.running_var, b) for m, b in zip(norms, before))
