import copy

import pytest
import torch
import torch.nn as nn

from repa_mm.faster import fuse_conv_bn_
from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    MergedFFN,
    check_state_dict,
    is_reparameterized,
    reparameterize,
    reparameterize_,
)


def make_model(num_blocks=3):
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), ChannelIdleFFN(8, 32)) for _ in range(num_blocks)]
    )


def count(model, kind):
    return sum(isinstance(m, kind) for m in model.modules())


@pytest.mark.parametrize('inplace', [False, True])
def test_reparameterize(inplace, randomize, relative_error):
    model = randomize(make_model()).eval()
    x = torch.randn(2, 5, 8)
    expected = model(x)
    before = copy.deepcopy(model.state_dict())
    deployed = (reparameterize_ if inplace else reparameterize)(model)
    assert (deployed is model) == inplace
    assert count(deployed, MergedFFN) == 3
    assert count(deployed, ChannelIdleFFN) == 0
    assert relative_error(deployed(x), expected) < 1e-5
    if not inplace:
        assert count(model, ChannelIdleFFN) == 3
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])
        # A copy shares nothing: training the original does not change it.
        shared = {p.data_ptr() for p in model.parameters()}
        assert not shared & {p.data_ptr() for p in deployed.parameters()}


def test_twice_is_harmless(randomize, relative_error):
    model = randomize(make_model())
    once = reparameterize(model)
    twice = reparameterize(once)
    assert twice.state_dict().keys() == once.state_dict().keys()
    assert reparameterize_(once) is once


def test_result_is_for_inference():
    assert not reparameterize(make_model().train()).training


def test_ffn_alone_and_shared_ffns(randomize, relative_error):
    ffn = randomize(ChannelIdleFFN(8, 32)).eval()
    x = torch.randn(1, 3, 8)
    assert relative_error(reparameterize(ffn)(x), ffn(x)) < 1e-5
    shared = nn.Sequential(ffn, ffn)
    deployed = reparameterize(shared)
    assert deployed[0] is deployed[1]
    assert relative_error(deployed(x), shared(x)) < 1e-5


def test_wrapped_models(randomize, relative_error):
    model = randomize(make_model()).eval()
    x = torch.randn(2, 5, 8)
    averaged = torch.optim.swa_utils.AveragedModel(model).eval()
    for wrapped in (averaged, nn.DataParallel(model), torch.compile(model)):
        deployed = reparameterize(wrapped)
        assert count(deployed, MergedFFN) == 3
        assert relative_error(deployed(x), model(x)) < 1e-5
    assert count(model, ChannelIdleFFN) == 3


def test_nothing_to_merge():
    with pytest.raises(ValueError, match='Linear has no channel-idle FFN'):
        reparameterize(nn.Linear(2, 2))


def test_state_dict_checks():
    model, deployed = make_model(), reparameterize(make_model())
    assert not is_reparameterized(model, model.state_dict())
    assert is_reparameterized(model, deployed.state_dict())
    with pytest.raises(CheckpointError, match="in its training form at '0.1'"):
        model.load_state_dict(deployed.state_dict(), strict=False)
    with pytest.raises(CheckpointError, match="at '2.1', and the checkpoint has nothing there"):
        check_state_dict(model, make_model(2).state_dict())


class Head(nn.Module):
    """ConvModules as necks and heads have them."""

    def __init__(self, share_convs=False):
        super().__init__()
        from mmcv.cnn import ConvModule

        self.ffn = ChannelIdleFFN(8, 32)
        layers = [
            ConvModule(8, 8, 3, padding=1, norm_cfg=dict(type='BN')),
            ConvModule(8, 8, 3, padding=1, norm_cfg=dict(type='SyncBN')),
            ConvModule(8, 8, 3, padding=1, norm_cfg=dict(type='BN'), order=('norm', 'conv', 'act')),
            ConvModule(8, 8, 3, padding=1, norm_cfg=dict(type='GN', num_groups=2)),
        ]
        if share_convs:  # as in mmdet's RetinaSepBNHead
            layers[1].conv = layers[0].conv
        self.convs = nn.Sequential(*layers)

    def forward(self, x):
        x = self.ffn(x.flatten(2).transpose(1, 2)).transpose(1, 2).view_as(x)
        return self.convs(x)


@pytest.mark.parametrize('share_convs, folded', [(False, 2), (True, 0)])
def test_folds_conv_bn(share_convs, folded, randomize, relative_error):
    model = randomize(Head(share_convs)).eval()
    x = torch.randn(2, 8, 6, 6)
    expected = model(x)
    keys = set(model.state_dict())
    plain = reparameterize(model)
    deployed = fuse_conv_bn_(copy.deepcopy(plain))
    assert relative_error(deployed(x), expected) < 1e-5
    assert relative_error(model(x), expected) == 0
    norms = [m.norm for m in deployed.convs]
    assert sum(isinstance(m, nn.Identity) for m in norms) == folded
    # What is written to a file loads into a model with deploy=True.
    assert relative_error(plain(x), expected) < 1e-5
    convs = {k for k in keys if k.startswith('convs')}
    assert convs == {k for k in plain.state_dict() if k.startswith('convs')}
    if folded:
        assert relative_error(reparameterize(deployed)(x), expected) < 1e-5
