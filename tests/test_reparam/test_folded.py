"""Folded training against eq. 3: outputs, gradients, running statistics."""

import copy

import pytest
import torch
import torch.nn as nn
from mmengine.model import revert_sync_batchnorm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from repa_mm.reparam import ChannelIdleFFN, folded, set_training_path_
from repa_mm.reparam.folded import is_foldable, trains_folded
from tests import toy
from tests.toy import Adapter


def step(ffn, x, path):
    """Everything that one step of training yields."""
    ffn = set_training_path_(copy.deepcopy(ffn), path)
    assert path == 'literal' or is_foldable(ffn)
    return comparable(ffn, toy.step(ffn, x))


def comparable(ffn, found):
    # A BatchNorm takes off whatever the idle biases add, and at idle ratio 1
    # what beta1 does (all is linear): zero, but for rounding.
    found['fc1.bias'] = found['fc1.bias'][: ffn.num_active]
    if isinstance(ffn.act, nn.Identity):
        del found['fc1.bias']
    is_linear = ffn.num_active == 0 or isinstance(ffn.act, nn.Identity)
    if is_linear and ffn.norm1.training:
        found.pop('norm1.bias', None)
    return {name: value.detach().double() for name, value in found.items() if value.numel()}


def worst(actual, expected):
    assert actual.keys() == expected.keys()
    errors = {
        k: ((actual[k] - expected[k]).norm() / expected[k].norm().clamp_min(1e-30)).item()
        for k in expected
    }
    print({k: f'{e:.1e}' for k, e in errors.items()})
    return max(errors.values())


@pytest.mark.parametrize('idle_ratio', [0, 2 / 3, 1])
@pytest.mark.parametrize('norm', ['BN', 'SyncBN', 'reverted', 'LN', 'frozen', None])
@pytest.mark.parametrize('drop_path, layer_scale', [(0, 0), (0.4, 0.5)])
def test_equals_equation_3(idle_ratio, norm, drop_path, layer_scale, randomize):
    ffn = ChannelIdleFFN(
        24,
        72,
        idle_ratio,
        norm_cfg=norm and dict(type=dict(frozen='BN', reverted='SyncBN').get(norm, norm)),
        drop_path=drop_path,
        layer_scale_init_value=layer_scale,
    )
    if norm == 'reverted':  # as MMEngine leaves SyncBN on one device
        ffn = revert_sync_batchnorm(ffn)
        assert not isinstance(ffn.norm1, (nn.BatchNorm1d, nn.SyncBatchNorm))
    randomize(ffn).double().train()
    if norm == 'frozen':
        ffn.norm1.eval(), ffn.norm2.eval()
    x = torch.randn(4, 50, 24).double() * 2 + 1
    assert worst(step(ffn, x, 'folded'), step(ffn, x, 'literal')) < 1e-10


@pytest.mark.parametrize(
    'act, norm',
    [
        (dict(type='ReLU', inplace=True), {}),
        (nn.Sequential(nn.ReLU(inplace=True)), {}),
        (dict(type='SiLU'), {}),
        (dict(type='GELU', approximate='tanh'), {}),
        (dict(type='Hardswish'), {}),
        (dict(type='Identity'), {}),
        (dict(type='GELU'), dict(affine=False)),
        (dict(type='GELU'), dict(momentum=None)),
        (dict(type='GELU'), dict(momentum=0.3, eps=1e-2)),
        (dict(type='GELU'), dict(track_running_stats=False)),
        (dict(type='GELU'), dict(requires_grad=False)),
    ],
)
def test_activations_and_options_of_norms(act, norm, randomize):
    ffn = ChannelIdleFFN(16, 64, act_cfg=act, norm_cfg=dict(type='BN', **norm))
    randomize(ffn).double().train()
    ffn.fc1.weight.requires_grad_('requires_grad' not in norm)
    x = torch.randn(2, 40, 16).double()
    assert worst(step(ffn, x, 'folded'), step(ffn, x, 'literal')) < 1e-10


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize('path', ['folded', 'literal'])
def test_no_gradient(path):
    ffn = set_training_path_(ChannelIdleFFN(16, 64), path)
    x = torch.randn(2, 40, 16, requires_grad=True)
    (_Stop.apply(ffn(x)).sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(p.grad is None or not p.grad.any() for p in ffn.parameters())


@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpointing(reentrant, randomize):
    """Outputs and gradients stay; statistics count a batch twice, as those of torch's norms do."""
    ffn = randomize(ChannelIdleFFN(16, 64, drop_path=0.5)).double().train()
    x = torch.randn(4, 40, 16).double()
    expected = step(ffn, x, 'folded')
    model = set_training_path_(copy.deepcopy(ffn), 'folded')
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = checkpoint(model, x, use_reentrant=reentrant)
    found, buffers = comparable(model, toy.results(model, y, x)), dict(ffn.named_buffers())
    stay = [{k: v for k, v in each.items() if k not in buffers} for each in (found, expected)]
    assert worst(*stay) < 1e-12


@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize('norm', ['BN', 'LN', 'frozen'])
def test_mixed_precision(dtype, tolerance, norm, randomize):
    """Errors of the size of eq. 3's own, and statistics in float32."""
    if dtype == torch.float16 and torch.__version__ < '2.2':
        pytest.skip('no float16 under autocast on a CPU')
    ffn = ChannelIdleFFN(64, 256, norm_cfg=dict(type='BN' if norm == 'frozen' else norm))
    randomize(ffn).train()
    if norm == 'frozen':
        ffn.norm1.eval(), ffn.norm2.eval()
    x = torch.randn(4, 200, 64) * 2 + 1
    exact = step(copy.deepcopy(ffn).double(), x.double(), 'literal')
    with torch.autocast('cpu', dtype=dtype):
        folded, literal = (step(ffn, x, path) for path in ('folded', 'literal'))
    assert worst(folded, exact) < max(tolerance, 1.5 * worst(literal, exact))
    if norm == 'BN':
        for name in ('norm1.running_mean', 'norm1.running_var', 'norm2.running_var'):
            assert (folded[name] - exact[name]).norm() < (1e-4 * exact[name].norm())
    # A model in half precision.
    x, ffn = x.to(dtype), ffn.to(dtype)
    exact = step(copy.deepcopy(ffn).double(), x.double(), 'literal')
    folded, literal = (step(ffn, x, path) for path in ('folded', 'literal'))
    assert worst(folded, exact) < max(tolerance, 1.5 * worst(literal, exact))


@pytest.mark.skipif(torch.__version__ < '2.2', reason='autograd functions compile since then')
def test_compiles_in_one_graph(randomize):
    ffn = randomize(ChannelIdleFFN(16, 64)).train()
    model = set_training_path_(copy.deepcopy(ffn), 'folded')
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend='aot_eager')
    for num_tokens in (40, 50):
        x = torch.randn(2, num_tokens, 16)
        expected = step(ffn, x, 'folded')
        model.load_state_dict(ffn.state_dict())
        model.zero_grad()
        x.requires_grad_()
        found = comparable(model, toy.results(model, compiled(x), x))
        assert worst(found, expected) < 1e-5


# folded: x and the active channels, as many as there are channels. literal: x, the norm's output,
# the active channels before the activation, the second norm's input and its output.
@pytest.mark.parametrize('path, maps', [('folded', 2), ('literal', 1 + 1 + 1 + 4 + 4)])
def test_keeps_no_more_than_it_needs(path, maps):
    num_tokens, num_channels = 4096, 32
    ffn = set_training_path_(ChannelIdleFFN(num_channels, 128), path)
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    x = torch.randn(1, num_tokens, num_channels, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ffn(x)
    of_tokens = [n for n, _ in kept.values() if n > num_tokens * 4]
    assert sum(of_tokens) == maps * num_tokens * num_channels * 4


@pytest.mark.parametrize('norm', ['BN', 'LN', 'frozen'])
def test_second_derivatives_are_refused_folded_and_right_literally(norm, randomize):
    ffn = ChannelIdleFFN(4, 12, norm_cfg=dict(type='BN' if norm == 'frozen' else norm))
    randomize(ffn).double().train()
    if norm == 'frozen':
        ffn.norm1.eval(), ffn.norm2.eval()
    x = torch.randn(1, 9, 4, dtype=torch.double, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"set_training_path_\(model, 'literal'\)"):
        loss = set_training_path_(ffn, 'folded')(x).square().sum()
        torch.autograd.grad(loss, x, create_graph=True)
    set_training_path_(ffn, 'literal')
    assert torch.autograd.gradgradcheck(lambda x: ffn(x).tanh(), x)
    # First derivatives are right after that, too.
    folded, literal = (step(ffn, x.detach(), path) for path in ('folded', 'literal'))
    assert worst(folded, literal) < 1e-10


@pytest.mark.parametrize(
    'change',
    [
        lambda ffn: setattr(ffn.fc1, '__class__', Adapter),
        lambda ffn: setattr(ffn.fc2, 'bias', None),
        lambda ffn: nn.utils.parametrizations.weight_norm(ffn.fc1),
        lambda ffn: prune.random_unstructured(ffn.fc1, 'weight', 0.5),
        lambda ffn: ffn.act.register_forward_hook(lambda module, args, y: 2 * y),
        lambda ffn: ffn.norm2.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
        lambda ffn: ffn.norm1.eval(),
        lambda ffn: setattr(ffn, 'dropout_layer', nn.Identity()),
        lambda ffn: setattr(ffn.drop, 'p', 0.1),
        lambda ffn: setattr(ffn, 'act', nn.PReLU()),
        # Folded training would draw other numbers in its backward pass.
        lambda ffn: setattr(ffn, 'act', nn.RReLU()),
    ],
)
@pytest.mark.filterwarnings('ignore')
def test_only_what_is_known_is_folded(change):
    ffn = set_training_path_(ChannelIdleFFN(16, 64).train(), 'folded')
    assert trains_folded(ffn, 200)
    change(ffn)
    assert not trains_folded(ffn, 200)
    assert ffn(torch.randn(2, 100, 16)).isfinite().all()


def test_choice_of_the_path(monkeypatch):
    ffn = ChannelIdleFFN(64, 256).train()
    assert trains_folded(ffn, 8192) and not trains_folded(ffn, 50)
    assert trains_folded(ffn.bfloat16(), 8192)
    assert not trains_folded(ChannelIdleFFN(64, 256, idle_ratio=0).train(), 8192)
    with pytest.raises(ValueError, match="'fold'"):
        set_training_path_(ffn, 'fold')
    synchronized = ChannelIdleFFN(64, 256, norm_cfg=dict(type='SyncBN')).train()
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    for size in (1, 2):
        monkeypatch.setattr(torch.distributed, 'get_world_size', lambda group, size=size: size)
        assert trains_folded(synchronized, 8192) == (size == 1)


@pytest.mark.skipif(torch.__version__ < '2.2', reason='fake tensors on a GPU need one')
@pytest.mark.parametrize('autocast', [None, torch.float16, torch.bfloat16])
def test_choice_of_the_path_on_a_gpu(autocast, monkeypatch):
    monkeypatch.setattr(folded, 'autocast_dtype', dict(cuda=autocast).get)
    with FakeTensorMode(), torch.device('cuda'):
        assert trains_folded(ChannelIdleFFN(64, 256).train(), 8192) == (not autocast)
        # In half precision: two images of 800 x 1344 in the first two stages of a Swin-B.
        for width, num_tokens, is_folded in (128, 134400, True), (256, 33600, False):
            ffn = ChannelIdleFFN(width, 4 * width).train()
            ffn.fc1.weight = nn.Parameter(ffn.fc1.weight.bfloat16())
            assert trains_folded(ffn, num_tokens) == is_folded
        assert trains_folded(set_training_path_(ffn, 'folded'), num_tokens)
