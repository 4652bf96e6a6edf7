"""CUDA graphs, on a GPU, or on a CPU by what a graph is: operators on tensors at fixed places."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from repa_mm import config_path
from repa_mm.apis import open_model
from repa_mm.faster import cuda_graphs_, faster_on_gpu_
from repa_mm.faster.cuda_graphs import Captured
from repa_mm.io.configs import load_config
from repa_mm.reparam import ChannelIdleFFN, reparameterize, set_shortcut_
from repa_mm.surgery import copied


class Graph:
    """Runs the operators of a capture again, on the same tensors."""

    def __init__(self):
        self.operators = []

    def replay(self):
        for operator, args, kwargs, outputs in self.operators:
            for old, new in zip(outputs, tree_flatten(operator(*args, **kwargs))[0]):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Capture(TorchDispatchMode):
    def __init__(self, graph, pool, stream, capture_error_mode):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        self.graph.operators.append((operator, args, kwargs or {}, tree_flatten(found)[0]))
        return found


@pytest.fixture(params=['cpu', 'cuda'])
def device(request, monkeypatch):
    if request.param == 'cuda':
        if not torch.cuda.is_available():
            pytest.skip('needs a GPU')
        return request.param
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in dict(
        CUDAGraph=Graph, graph=Capture, Stream=lambda: stream, current_stream=lambda: stream,
        stream=lambda _: nullcontext(), graph_pool_handle=lambda: (0, 0),
        is_current_stream_capturing=lambda: False,
    ).items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Captured, 'device_type', 'cpu')
    return request.param


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5))

    def forward(self, x):
        return self.backbone(x)


@pytest.fixture
def pair(device, randomize):
    """A model, and a copy with graphs."""
    model = randomize(Model()).eval().to(device)
    return model, cuda_graphs_(copied(model))


def graphs(model):
    return len(model.backbone.forward.graphs)


@pytest.mark.parametrize('dtype', [None, torch.float16])
@pytest.mark.parametrize('config', ['demo/retinanet_repa_swin_digits', 'demo/upernet_swin_digits'])
def test_models_of_several_sizes(config, dtype, device, randomize):
    """Each size has a graph, which is taken again, and a result outlives the next batch."""
    if dtype and device == 'cpu':
        pytest.skip('a CPU has no autocast of a GPU')
    model = open_model(load_config(config_path(f'{config}.py')), merge=True)
    model = faster_on_gpu_(randomize(model).to(device))
    captured = cuda_graphs_(copied(model))
    sizes = (1, 96, 128), (1, 128, 128), (2, 96, 128), (1, 96, 128)
    batches = [torch.randn(n, 3, h, w, device=device) for n, h, w in sizes]
    with torch.no_grad(), torch.autocast('cuda', dtype or torch.half, dtype is not None):
        expected, found = ([m(x) for x in batches] for m in (model, captured))
    for x, y in zip(*(tree_flatten(values)[0] for values in (found, expected))):
        assert x.dtype == y.dtype and torch.allclose(x, y, atol=2e-2 if dtype else 1e-4)
    assert graphs(captured) == 3


@torch.no_grad()
def test_changed_weights(pair, device):
    model, captured = pair
    x = torch.randn(1, 3, 8, 8, device=device)
    first = captured(x)
    for change in (
        lambda m: m.backbone[0].weight.mul_(2),  # in place
        lambda m: setattr(m.backbone[0], 'bias', nn.Parameter(m.backbone[0].bias + 1)),
        lambda m: m.backbone[1].running_mean.add_(1),
        lambda m: m.double().float(),
    ):
        for m in pair:
            change(m)
        assert torch.allclose(captured(x), model(x), atol=1e-6) and graphs(captured) == 1
    assert not torch.allclose(captured(x), first)
    other = copied(captured)
    other.backbone[0].weight.zero_()
    assert torch.allclose(captured(x), model(x), atol=1e-6)
    assert not torch.allclose(other(x), model(x))


def test_what_is_not_captured(pair, device):
    """Gradients, training, arguments that are no tensors, and parts with hooks inside."""
    model, captured = pair
    x = torch.randn(2, 3, 8, 8, device=device)
    assert captured(x).requires_grad and not graphs(captured)
    hooked = copied(model)
    hooked.backbone[1].register_forward_hook(lambda *_: None)
    assert type(cuda_graphs_(hooked).backbone.forward) is not Captured
    with torch.no_grad():
        captured.train()
        assert (captured(x) == 0).any() and not graphs(captured)  # dropout
        captured.eval()
        captured.backbone.forward.forward = lambda x, sample: sample
        assert captured.backbone(x, sample := object()) is sample and not graphs(captured)


@torch.no_grad()
def test_the_shortcut_of_a_merged_ffn_moves(device, randomize):
    """Into W, or out of it, after a capture."""
    model = Model()
    ffn = ChannelIdleFFN(embed_dims=8, feedforward_channels=32, idle_ratio=0.75)
    model.backbone = reparameterize(randomize(ffn).eval())
    model.to(device)
    x, captured = torch.randn(1, 4, 8, device=device), cuda_graphs_(copied(model))
    for where in 'inside', 'outside', 'inside':
        set_shortcut_(captured, where)
        assert torch.allclose(captured(x), model(x), atol=1e-5) and graphs(captured) == 1


@torch.no_grad()
def test_one_model_in_two_threads(pair, device):
    model, captured = pair
    batches = [torch.randn(1, 3, 8, 8, device=device) for _ in range(200)]
    expected = [model(x) for x in batches]

    def call(x):
        with torch.no_grad():  # which is of a thread
            return captured(x)

    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(call, batches)]
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(found, expected))


@torch.no_grad()
def test_outputs_of_unknown_kinds_are_refused(pair, device):
    """Their tensors would be written to by the next call."""
    _, captured = pair
    captured.backbone.forward.forward = lambda x: SimpleNamespace(maps=x)
    with pytest.raises(TypeError, match='Sequential returns SimpleNamespace'):
        captured(torch.randn(1, 3, 8, 8, device=device))


def test_inference_mode(pair, device):
    """A graph of inference mode is taken without it, too."""
    model, captured = pair
    x = torch.randn(1, 3, 8, 8, device=device)
    for mode in torch.inference_mode, torch.no_grad:
        with mode():
            assert torch.allclose(captured(x), model(x), atol=1e-6)
    assert graphs(captured) == 1 and cuda_graphs_(captured) is captured
    assert not isinstance(captured.backbone.forward.forward, Captured)


def test_a_model_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match='on an NVIDIA GPU, not on cpu'):
        cuda_graphs_(Model())
