"""Experts that are averaged, in real trainings."""

import copy

import pytest
import torch
import torch.nn as nn
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import MODELS

from projects.expert_averaging import ExpertLinear, ExpertsFFN
from repa_mm.reparam import has_training_form, reparameterize
from tests.toy import Transpose, distributed, make_runner  # noqa: F401

MERGE = dict(type='ReparameterizeHook')


@MODELS.register_module()
class ToyExperts(BaseModel):
    def __init__(self, num_ffns=2):
        super().__init__()
        ffns = [ExpertsFFN(8, 16, 3) for _ in range(num_ffns)]
        stem = nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(2), Transpose()
        self.backbone = nn.Sequential(*stem, *ffns)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(torch.stack(inputs)).mean(1))
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits, torch.as_tensor(labels)))
        return list(logits)


class Spreads(Hook):
    """Notes how far experts are from each other after each iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        layers = [m for m in runner.model.modules() if isinstance(m, ExpertLinear)]
        weights = [torch.stack([expert.weight for expert in m.experts]) for m in layers]
        self.seen.append(max(float((w - w[0]).abs().max()) for w in weights))


def runner_of(work_dir, hooks, num_ffns=2, **kwargs):
    return make_runner(work_dir, hooks, dict(type='ToyExperts', num_ffns=num_ffns), **kwargs)


@pytest.mark.parametrize('accumulative_counts', [1, 2])
def test_experts_are_averaged_and_merge(tmp_path, accumulative_counts):
    spreads = Spreads()
    hooks = [MERGE, dict(type='AverageExpertsHook', rate=2 / 3), spreads]
    optim_wrapper = dict(
        optimizer=dict(type='SGD', lr=0.1), accumulative_counts=accumulative_counts
    )
    runner = runner_of(tmp_path, hooks, optim_wrapper=optim_wrapper)
    runner.train()
    # Of three experts, each is the mean after a move by 2 / 3: after every step of the optimizer,
    # and not before the first one.
    assert [spread < 1e-6 for spread in spreads.seen] == [accumulative_counts == 1, *[True] * 3]
    runner.test()
    assert not has_training_form(reparameterize(runner.model))


def test_frozen_experts_stay(tmp_path):
    runner = runner_of(tmp_path, [dict(type='AverageExpertsHook', rate=0.5)])
    frozen, trained = runner.model.backbone[3:]
    frozen.requires_grad_(False)
    before = [copy.deepcopy(m.state_dict()) for m in (frozen, trained)]
    runner.train()
    assert all(torch.equal(value, before[0][key]) for key, value in frozen.state_dict().items())
    key = 'fc1.experts.0.weight'
    assert not torch.equal(trained.state_dict()[key], before[1][key])


def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(ValueError, match='no experts'):
        runner_of(tmp_path, [dict(type='AverageExpertsHook')], num_ffns=0).train()


def test_distributed_training_with_averaged_weights(distributed, tmp_path):  # noqa: F811
    spreads = Spreads()
    hooks = [MERGE, dict(type='AverageExpertsHook', rate=2 / 3), spreads, dict(type='EMAHook')]
    runner = runner_of(tmp_path, hooks, **distributed)
    runner.train()
    assert spreads.seen and max(spreads.seen) < 1e-6
    runner.test_loop.run()  # merges
