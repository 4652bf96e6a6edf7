import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.reparam import ChannelIdleFFN, CheckpointError, num_active_channels, set_shortcut_
from tests.toy import Adapter


def literal(ffn, x, act):
    """Eq. 3 of the paper, channel by channel, with a mask."""

    def batch_norm(bn, x):
        if isinstance(bn, nn.Identity):
            return x
        if ffn.training:
            mean, var = x.mean(0), x.var(0, unbiased=False)
        else:
            mean, var = bn.running_mean, bn.running_var
        return (x - mean) / (var + bn.eps).sqrt() * bn.weight + bn.bias

    tokens = x.reshape(-1, x.shape[-1])
    h = batch_norm(ffn.norm1, tokens) @ ffn.fc1.weight.T + ffn.fc1.bias
    is_active = torch.arange(h.shape[1]) < ffn.num_active
    a = torch.where(is_active, act(h), h)
    z = batch_norm(ffn.norm2, a) @ ffn.fc2.weight.T + ffn.fc2.bias
    if ffn.layer_scale is not None:
        z = z * ffn.layer_scale
    return x + z.view(x.shape)


@pytest.mark.parametrize('idle_ratio', [0, 0.1, 2 / 3, 1])
@pytest.mark.parametrize('norm_cfg', [dict(type='BN'), None])
@pytest.mark.parametrize('training', [True, False])
def test_training_form_is_equation_3(idle_ratio, norm_cfg, training, randomize, relative_error):
    ffn = ChannelIdleFFN(16, 64, idle_ratio, norm_cfg=norm_cfg, layer_scale_init_value=0.5).double()
    randomize(ffn).train(training)
    x = torch.randn(2, 9, 16, dtype=torch.double) * 3 + 1
    expected = literal(ffn, x, F.gelu)
    assert relative_error(ffn(x, identity=x), expected) < 1e-12


@pytest.mark.parametrize('act', ['ReLU', 'SiLU', 'Hardswish', 'PReLU'])
def test_any_elementwise_activation(act, randomize, relative_error):
    ffn = ChannelIdleFFN(8, 32, act_cfg=dict(type=act))
    randomize(ffn).eval()
    x = torch.randn(3, 7, 8)
    assert relative_error(ffn.merge()(x), ffn(x)) < 1e-5
    is_active = ffn.merge().act(torch.tensor([-1.0]))
    assert is_active.item() != -1


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16, torch.bfloat16])
def test_merge_keeps_dtype_and_rounds_once(dtype, randomize, relative_error):
    ffn = randomize(ChannelIdleFFN(16, 64)).eval()
    reference = copy.deepcopy(ffn).to(dtype).double().merge()
    merged = ffn.to(dtype).merge()
    for key, value in merged.state_dict().items():
        assert value.dtype == dtype
        assert torch.equal(value, reference.state_dict()[key].to(dtype))


def test_drop_path_drops_whole_samples():
    ffn = ChannelIdleFFN(8, 32, drop_path=0.5)
    x = torch.randn(64, 3, 8)
    branch = ffn(x) - x
    dropped = (branch == 0).flatten(1).all(1)
    assert 10 < dropped.sum() < 54
    ffn.dropout_layer.drop_prob = 0.0
    expected = (ffn(x) - x)[~dropped] / 0.5
    assert torch.allclose(branch[~dropped], expected, atol=1e-5)


def test_dropout_before_and_after_the_second_linear_layer(randomize, relative_error):
    ffn = randomize(ChannelIdleFFN(64, 256, drop_rate=0.25))
    assert not [key for key in ffn.state_dict() if 'drop' in key]
    x = torch.randn(4, 200, 64)
    u = F.batch_norm(x.view(-1, 64), None, None, ffn.norm1.weight, ffn.norm1.bias, True)
    h = ffn.fc1(u)
    a = torch.cat([F.gelu(h[:, :64]), h[:, 64:]], 1)
    v = F.batch_norm(a, None, None, ffn.norm2.weight, ffn.norm2.bias, True)
    torch.manual_seed(1)
    z = F.dropout(ffn.fc2(F.dropout(v, 0.25)), 0.25)
    torch.manual_seed(1)
    assert relative_error(ffn(x), x + z.view(x.shape)) < 1e-5
    ffn.eval()
    assert torch.equal(ffn(x), ffn(x))
    assert relative_error(ffn.merge()(x), ffn(x)) < 1e-5


@pytest.mark.parametrize(
    'hidden, ratio, expected',
    [(1152, 2 / 3, 384), (512, 0.75, 128), (10, 0.75, 3), (7, 0, 7), (7, 1, 0), (480, 0.9, 48)],
)
def test_number_of_active_channels(hidden, ratio, expected):
    assert num_active_channels(hidden, ratio) == expected


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="norm_cfg type .* got 'GN'"):
        ChannelIdleFFN(8, 32, norm_cfg=dict(type='GN'))
    ffn = ChannelIdleFFN(8, 32)
    with pytest.raises(ValueError, match=r'\(\.\.\., 8\).*\(1, 2, 9\)'):
        ffn(torch.randn(1, 2, 9))
    x = torch.randn(1, 2, 8)
    with pytest.raises(ValueError, match='identity must be x itself'):
        ffn(x, identity=x + 1)
    ffn = ChannelIdleFFN(8, 32, norm_cfg=dict(type='BN', track_running_stats=False))
    with pytest.raises(ValueError, match='running statistics'):
        ffn.merge()


def test_weights_of_another_idle_ratio():
    """Their shapes are the same."""
    ffn = nn.Sequential(ChannelIdleFFN(12, 36))
    others = nn.Sequential(ChannelIdleFFN(12, 36, idle_ratio=1 / 3)).state_dict()
    with pytest.raises(CheckpointError, match="active at '0'.*idle_ratio=0.333") as error:
        ffn.load_state_dict(others)
    ratio = float(str(error.value).partition('idle_ratio=')[2].partition(' ')[0])
    nn.Sequential(ChannelIdleFFN(12, 36, ratio)).load_state_dict(others)
    # Of other software, they do not say which it is.
    del others['0.num_active_channels']
    ffn.load_state_dict(others)
    assert ffn[0].num_active_channels == ffn[0].num_active
    assert torch.equal(ffn.state_dict()['0.norm1.weight'], others['0.norm1.weight'])


def test_a_kept_norm_needs_its_bias():
    merged = ChannelIdleFFN(8, 32, norm_cfg=dict(type='LN')).eval().merge()
    weights = merged.state_dict()
    del weights['norm.bias']
    with pytest.raises(CheckpointError, match='BatchNorms in the checkpoint'):
        merged.load_state_dict(weights, strict=False)


@pytest.mark.parametrize('idle_ratio', [0, 0.5, 0.75, 1])
def test_shortcut_outside(idle_ratio, randomize, relative_error):
    ffn = randomize(ChannelIdleFFN(16, 64, idle_ratio)).eval()
    x = torch.randn(2, 9, 16)
    inside, outside = ffn.merge(), ffn.merge()
    set_shortcut_(outside, 'outside')
    assert relative_error(outside(x), ffn(x)) < 1e-5
    # State dicts are the same, and go from one to the other.
    state_dict = inside.state_dict()
    for key, value in outside.state_dict().items():
        assert torch.allclose(value, state_dict[key], atol=1e-6)
    loaded = copy.deepcopy(outside)
    for p in loaded.parameters():
        nn.init.zeros_(p)
    loaded.load_state_dict(state_dict)
    assert relative_error(loaded(x), ffn(x)) < 1e-5
    assert torch.equal(state_dict['fc1.weight'], inside.fc1.weight)
    set_shortcut_(outside, 'inside')
    assert relative_error(outside(x), ffn(x)) < 1e-5
    with pytest.raises(ValueError, match="'out'"):
        set_shortcut_(outside, 'out')


@pytest.mark.parametrize('shortcut', ['inside', 'outside'])
def test_what_takes_the_place_of_a_layer_is_called(shortcut, randomize, relative_error):
    """Hooks, such as those that count operations, and adapters."""
    ffn = set_shortcut_(randomize(ChannelIdleFFN(16, 64)).eval().merge(), shortcut)
    x, calls = torch.randn(2, 9, 16), []
    expected, plain = ffn(x), copy.deepcopy(ffn)
    for layer in (ffn.fc1, ffn.fc2):
        layer.register_forward_hook(lambda layer, args, y: calls.append(layer) or 1 * y)
    assert relative_error(ffn(x), expected) < 1e-5
    assert [*map(id, calls)] == [id(ffn.fc1), id(ffn.fc2)]
    other = copy.deepcopy(plain)
    plain.fc2.weight.data *= 2
    other.fc2.__class__ = Adapter
    for compute in (other, torch.compile(other, backend='eager')):
        assert relative_error(compute(x), plain(x)) < 1e-5


def test_shortcut_outside_keeps_the_digits_of_small_weights(randomize):
    ffn = randomize(ChannelIdleFFN(64, 256)).eval()
    with torch.no_grad():
        ffn.fc2.weight.mul_(1e-3)
        ffn.fc2.bias.mul_(1e-3)
    x = torch.randn(2, 50, 64).bfloat16()
    branch = ffn.double()(x.double()) - x.double()
    errors = []
    for where in ('inside', 'outside'):
        merged = ffn.float().merge()
        set_shortcut_(merged, where)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            y = merged(x.float())
        errors.append((y.double() - x.double() - branch).abs().max())
    assert errors[1] < 0.05 * errors[0]
