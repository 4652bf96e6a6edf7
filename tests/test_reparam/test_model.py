"""Whole models merge, forms inside of forms among them."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    DeployForm,
    MergedFFN,
    TrainingForm,
    check_state_dict,
    is_reparameterized,
    reparameterize,
    reparameterize_,
)
from tests.toy import distributed  # noqa: F401

X = torch.linspace(-2, 2, 2 * 5 * 8).sin().view(2, 5, 8)


def count(model, kind):
    return sum(isinstance(m, kind) for m in model.modules())


class Pair(TrainingForm):
    """Two linear layers before a BatchNorm, as in RepVGG: a form without a site."""

    label = 'pair of linear layers'

    def __init__(self, dims):
        super().__init__()
        self.a, self.b = nn.Linear(dims, dims), nn.Linear(dims, dims)
        self.norm = nn.BatchNorm1d(dims)

    def forward(self, x):
        y = self.a(x) + self.b(x)
        return self.norm(y.flatten(0, -2)).view(y.shape)

    def merge(self):
        norm = self.norm
        scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
        weight = scale[:, None] * (self.a.weight.double() + self.b.weight.double())
        bias = self.a.bias.double() + self.b.bias.double() - norm.running_mean.double()
        merged = MergedPair(nn.Linear(*weight.shape)).to(self.a.weight)
        merged.layers[0].weight.copy_(weight)
        merged.layers[0].bias.copy_(scale * bias + norm.bias.double())
        return merged


class MergedPair(DeployForm):
    """Layers, or forms, one after the other."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def inference(self, x):
        return self.layers(x)


class Twice(TrainingForm):
    """Two forms, one after the other, as one form around them."""

    label = 'two forms'

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))

    def merge(self):
        # The first is left as it is, for who walks over the model.
        return MergedPair(self.first, self.second.merge())


@pytest.mark.parametrize('inplace', [False, True])
@pytest.mark.parametrize(
    'build',
    [
        lambda: ChannelIdleFFN(8, 32),
        lambda: Twice(Pair(8), Pair(8)),
        lambda: Twice(ChannelIdleFFN(8, 32), ChannelIdleFFN(8, 32)),
        lambda: Twice(Twice(ChannelIdleFFN(8, 32), Pair(8)), Twice(Pair(8), Pair(8))),
        lambda: Twice(nn.LayerNorm(8), Pair(8)),  # the deploy form gets the norm as it is
    ],
)
def test_reparameterize(build, inplace, randomize, relative_error):
    model = nn.Sequential(nn.Linear(8, 8), randomize(build()), randomize(Pair(8)))
    original = copy.deepcopy(model).eval()
    expected = original(X).detach()
    deployed = (reparameterize_ if inplace else reparameterize)(model)
    assert (deployed is model) == inplace and not deployed.training
    assert count(deployed, DeployForm) and not count(deployed, TrainingForm)
    assert reparameterize_(deployed) is deployed
    if not inplace:
        for key, value in model.state_dict().items():
            assert torch.equal(value, original.state_dict()[key])
        for parameter in model.parameters():  # training goes on
            parameter.data.zero_()
    assert relative_error(deployed(X), expected) < 1e-5
    assert is_reparameterized(original, deployed.state_dict())
    assert not is_reparameterized(original, original.state_dict())
    with pytest.raises(CheckpointError, match='in its training form'):
        original.load_state_dict(deployed.state_dict(), strict=False)


def test_switch_to_deploy_and_the_guards_of_every_form(randomize, relative_error):
    pair = randomize(Pair(8)).eval()
    expected = pair(X)
    handle = pair.a.register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(ValueError, match=r"'a' \(Linear\) has a hook"):
        pair.merge()
    handle.remove()
    broken = copy.deepcopy(pair)
    broken.b.weight.data[0, 0] = float('nan')
    with pytest.raises(ValueError, match='b.weight has values that are not finite'):
        reparameterize(nn.Sequential(broken))
    with torch.inference_mode():
        pair.switch_to_deploy()
        pair.switch_to_deploy()  # once more changes nothing
    assert relative_error(pair(X), expected) < 1e-5
    with pytest.raises(RuntimeError, match='MergedPair is in its deploy form'):
        pair.train()(X)


def test_an_error_inside_of_a_form_is_named():
    model = nn.Sequential(Pair(8), Twice(ChannelIdleFFN(8, 32), Pair(8)))
    model[1].first.fc1.register_forward_hook(lambda module, args, y: y)
    with pytest.raises(ValueError, match=r"cannot merge '1': 'first.fc1' \(Linear\) has"):
        reparameterize_(model)
    assert count(model, Pair) == 2


def test_wrapped_and_shared_ffns(randomize, relative_error):
    ffn = randomize(ChannelIdleFFN(8, 32))
    model = nn.Sequential(ffn, nn.Linear(8, 8), ffn).eval()
    averaged, state = torch.optim.swa_utils.AveragedModel(model).eval(), torch.get_rng_state()
    for wrapped in (ffn, model, averaged, nn.DataParallel(model), torch.compile(model)):
        deployed = reparameterize(wrapped)
        assert count(deployed, MergedFFN) == 1
        assert relative_error(deployed(X), (ffn if wrapped is ffn else model)(X)) < 1e-5
    assert count(model, ChannelIdleFFN) == 1
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize('kind', [ChannelIdleFFN, nn.Sequential])
def test_checkpointed_modules(kind, randomize, relative_error):
    """PyTorch wraps them in modules that state dicts do not show."""
    model = nn.Sequential(nn.Sequential(randomize(ChannelIdleFFN(8, 32))), nn.Linear(8, 8)).eval()
    model._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
    weights, expected = copy.deepcopy(model.state_dict()), model(X)
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) is kind)
    assert any('wrapped' in name for name, _ in model.named_modules())
    model.load_state_dict(weights)
    deployed = reparameterize(model)
    assert relative_error(deployed(X), expected) < 1e-5
    assert is_reparameterized(model, deployed.state_dict())
    for wrong in (deployed.state_dict(), {'1.bias': weights['1.bias']}):
        with pytest.raises(CheckpointError, match='has a channel-idle FFN'):
            model.load_state_dict(wrong, strict=False)


@pytest.mark.skipif(not hasattr(fsdp, 'fully_shard'), reason='needs PyTorch 2.6')
def test_sharded_parameters_are_refused(distributed):  # noqa: F811
    model = nn.Sequential(ChannelIdleFFN(8, 32))
    mesh = torch.distributed.device_mesh.init_device_mesh('cpu', (1,))
    fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match='of this FSDPSequential are spread over processes'):
        reparameterize(model)
