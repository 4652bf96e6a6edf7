import copy

import pytest
import torch
import torch.nn as nn

from repa_mm.reparam import ChannelIdleFFN, MergedFFN, reparameterize, reparameterize_


def make_model(num_blocks=3):
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), ChannelIdleFFN(8, 32)) for _ in range(num_blocks)]
    )


def count(model, kind):
    return sum(isinstance(m, kind) for m in model.modules())


@pytest.mark.parametrize('inplace', [False, True])
def test_reparameterize(inplace, randomize, relative_error):
    model = randomize(make_model())
    x = torch.randn(2, 5, 8)
    expected = copy.deepcopy(model).eval()(x)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    deployed = (reparameterize_ if inplace else reparameterize)(model)
    assert (deployed is model) == inplace and not deployed.training
    assert count(deployed, MergedFFN) == 3
    assert count(deployed, ChannelIdleFFN) == 0
    assert relative_error(deployed(x), expected) < 1e-5
    assert torch.equal(state, torch.get_rng_state())
    assert reparameterize_(deployed) is deployed
    if not inplace:
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])
        # A copy shares nothing: training the original does not change it.
        shared = {p.data_ptr() for p in model.parameters()}
        assert not shared & {p.data_ptr() for p in deployed.parameters()}


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
