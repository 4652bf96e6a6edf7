import torch
import torch.nn as nn

from repa_mm.benchmark.memory import SavedTensors, peak_bytes, weight_bytes

MIB = 2**20


def test_peak_of_a_known_chain():
    x = torch.rand(512, 512)  # 1 MiB

    def call(x):
        a = x + 1
        b = a * 2
        del a
        c = b.exp()
        d = c + b  # b, c, d
        return d.sum()

    result, peak = peak_bytes(call, x)
    assert torch.is_tensor(result)
    assert 3 * MIB <= peak < 3.1 * MIB


def test_weights():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    assert weight_bytes(model) == 4 * (4 * 8 + 8 + 8 * 4) + 8


def test_saved_tensors_count_once_and_without_weights():
    linear = nn.Linear(256, 256)
    x = torch.rand(1024, 256, requires_grad=True)
    with SavedTensors(linear) as saved:
        y = linear(x)  # keeps x
        z = y * y  # keeps y, twice
        z.view(-1).exp().sum().backward()  # keeps its result
    assert saved.bytes == 3 * x.numel() * 4
    assert x.grad is not None
