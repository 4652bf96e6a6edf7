"""BatchNorm statistics from data."""

import copy

import pytest
import torch
import torch.nn as nn

from repa_mm.reparam import ChannelIdleFFN, calibrate_batch_norm, set_training_path


@pytest.fixture
def model(randomize):
    return randomize(
        nn.Sequential(
            nn.BatchNorm1d(6),
            nn.Dropout(0.5),
            ChannelIdleFFN(8, 32),
            ChannelIdleFFN(8, 24, idle_ratio=1.0),
        )
    )


def batches():
    """Of different sizes and places."""
    return [torch.randn(n, 6, 8) * (i + 1) + i for i, n in enumerate((3, 9, 4))]


@pytest.mark.parametrize('path', ['literal', 'auto'])
def test_statistics_of_all_tokens(model, path, relative_error):
    # What the norms see when every batch is normalized by itself.
    reference = copy.deepcopy(set_training_path(model, 'literal')).double()
    for ffn in reference[2:]:
        ffn.train()
    reference[:2].eval()
    norms = [m for ffn in reference[2:] for m in (ffn.norm1, ffn.norm2)]
    seen = {norm: [] for norm in norms}
    for norm in norms:
        norm.register_forward_pre_hook(lambda m, inputs: seen[m].append(inputs[0].detach()))
    torch.manual_seed(1)
    for x in batches():
        reference(x.double())

    set_training_path(model, path).train()
    model[3].eval()
    modes = [m.training for m in model.modules()]
    others = {
        k: v.clone()
        for k, v in model.state_dict().items()
        if '.norm' not in k or k.endswith(('weight', 'bias'))
    }
    momenta = [n.momentum for n in (model[2].norm1, model[3].norm2)]
    torch.manual_seed(1)
    assert calibrate_batch_norm(model, batches()) == 3
    own = [m for ffn in model[2:] for m in (ffn.norm1, ffn.norm2)]
    for norm, like in zip(own, norms):
        x = torch.cat(seen[like])
        assert relative_error(norm.running_mean, x.mean(0)) < 1e-5
        assert relative_error(norm.running_var, x.var(0)) < 1e-5
        assert norm.num_batches_tracked == 3
    for key, value in others.items():
        assert torch.equal(model.state_dict()[key], value), key
    assert [m.training for m in model.modules()] == modes
    assert momenta == [n.momentum for n in (model[2].norm1, model[3].norm2)]


@pytest.mark.parametrize(
    'data, message',
    [([], 'no batch'), ([torch.ones(2, 6, 8), torch.full((2, 6, 8), float('nan'))], 'not finite')],
)
def test_a_failure_changes_nothing(model, data, message):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        calibrate_batch_norm(model, data)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not model[2]._forward_hooks and model[2].norm1.momentum == 0.1


def test_nothing_to_calibrate():
    for model in (
        nn.Linear(2, 2),
        ChannelIdleFFN(8, 32, norm_cfg=dict(type='LN')),
        ChannelIdleFFN(8, 32).merge(),
    ):
        with pytest.raises(ValueError, match='no channel-idle FFN'):
            calibrate_batch_norm(model, [torch.ones(1, 2, 8)])
