import pytest
import torch
import torch.nn as nn

from repa_mm.benchmark.training import Step, VanillaFFN, measure_ffn


def test_step_of_a_backbone():
    model = nn.Linear(4, 4)
    seen = []
    model.weight.register_hook(seen.append)
    step = Step(model, whole=False)
    step(torch.ones(2, 4))
    assert len(seen) == 1 and seen[0].abs().sum() > 0
    assert model.weight.grad is None


@pytest.mark.parametrize('encoder', [False, True])
def test_ffn(encoder):
    inference, training = measure_ffn(64, 16, repeats=2, encoder=encoder)
    assert list(inference) == ['vanilla', 'deploy']
    assert set(training) == {'vanilla', 'literal', 'folded', 'auto'}
    assert all(len(times) == 2 for times in (*inference.values(), *training.values()))
    ffn, x = VanillaFFN(4, 16), torch.randn(3, 4)
    norm, fc1, act, fc2 = ffn.layers
    torch.testing.assert_close(ffn(x), x + fc2(act(fc1(norm(x)))))
