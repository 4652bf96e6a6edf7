"""Experts that are averaged, norms that fade, mixers that are imitated, in real trainings."""

import copy
import re

import pytest
import torch
import torch.nn as nn
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import MODELS

from repa_mm.engine import AverageExpertsHook
from repa_mm.reparam import (
    CheckpointError,
    ExpertLinear,
    ExpertsFFN,
    ExpertsIdleFFN,
    NormedAffine,
    NormedLinear,
    ProgressiveIdleFFN,
    ProgressiveNorm,
    Scheduled,
    finish_schedules,
    has_training_form,
    reparameterize,
)

from .toy import KeepLogits, Transpose, make_runner, run_in_two_processes


class _Toy(BaseModel):
    def loss(self, inputs, labels):
        logits = self.head(self.backbone(inputs).flatten(2).mean(-1))
        return dict(loss=nn.functional.cross_entropy(logits, torch.as_tensor(labels)))

    def forward(self, inputs, labels, mode='tensor'):
        inputs = torch.stack(inputs)
        if mode == 'loss':
            return self.loss(inputs, labels)
        return list(self.head(self.backbone(inputs).flatten(2).mean(-1)))


@MODELS.register_module()
class ToyStructures(_Toy):
    """Two norms and an activation that fade, and experts if asked for."""

    def __init__(self, experts=True):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4),
            nn.Flatten(2),
            Transpose(),
            ProgressiveNorm(8),
            NormedLinear(ProgressiveNorm(8), nn.Linear(8, 8)),
            ExpertsFFN(8, 16, 3) if experts else nn.Identity(),
            ExpertsIdleFFN(8, 16, 3) if experts else nn.Identity(),
            ProgressiveIdleFFN(8, 16),
            Transpose(),
        )
        self.head = nn.Linear(8, 2)

    def loss(self, inputs, labels):
        # Twice: lambda follows the iterations, and not the forward passes.
        first, second = (super(ToyStructures, self).loss(inputs, labels) for _ in range(2))
        return dict(loss=first['loss'] + second['loss'])


class Mixer(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.norm1, self.token_mixer = nn.GroupNorm(1, channels), nn.AvgPool2d(3, 1, 1)

    def forward(self, x):
        return x + self.token_mixer(self.norm1(x))


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_reparam = NormedAffine(8)

    def forward(self, x):
        return x + self.norm_reparam(x)


@MODELS.register_module()
class ToyTeacher(nn.Sequential):
    def __init__(self, blocks=2, channels=8):
        super().__init__(
            nn.Conv2d(3, channels, 4, stride=4), *[Mixer(channels) for _ in range(blocks)]
        )


@MODELS.register_module()
class ToyStudent(_Toy):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), Affine(), Affine())
        self.head = nn.Linear(8, 2)


class Values(Hook):
    """Notes every lambda, and how far experts are from each other, after each iteration."""

    priority = 'LOWEST'

    def __init__(self, stop_after=None):
        self.lams, self.spreads, self.stop_after = [], [], stop_after

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        modules = list(runner.model.modules())
        self.lams.append([round(float(m.lam), 4) for m in modules if isinstance(m, Scheduled)])
        layers = [m for m in modules if isinstance(m, ExpertLinear)]
        if layers:
            weights = [torch.stack([expert.weight for expert in m.experts]) for m in layers]
            self.spreads.append(max(float((w - w[0]).abs().max()) for w in weights))

    def after_train_epoch(self, runner):
        if self.stop_after == runner.epoch + 1:
            raise KeyboardInterrupt


# 2 iterations an epoch.
NORMS = dict(type='DecayLayerNormsHook', warmup=2)
ACTIVATIONS = dict(type='DecayActivationsHook', warmup=3)
MERGE = dict(type='ReparameterizeHook')
LAMS = [[1, 1, 1], [0.5, 0.5, 0.6667], [0, 0, 0.3333], [0, 0, 0]]


def runner_of(work_dir, hooks, experts=True, epochs=2, **kwargs):
    train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=epochs)
    model = dict(type='ToyStructures', experts=experts)
    kwargs.update(train_cfg=train_cfg, randomness=dict(seed=0))
    return make_runner(work_dir, hooks, model=model, **kwargs)


@pytest.mark.parametrize('accumulative_counts', [1, 2])
def test_structures_train_and_merge(tmp_path, accumulative_counts):
    values = Values()
    hooks = [NORMS, ACTIVATIONS, MERGE, dict(type='AverageExpertsHook', rate=2 / 3), values]
    optimizer = dict(type='SGD', lr=0.1)
    runner = runner_of(
        tmp_path,
        hooks,
        optim_wrapper=dict(optimizer=optimizer, accumulative_counts=accumulative_counts),
    )
    runner.train()
    assert values.lams == LAMS
    # Of three experts, each is the mean after a move by 2 / 3: after every step of the optimizer,
    # and not before the first one.
    assert [spread < 1e-6 for spread in values.spreads] == [accumulative_counts == 1, *[True] * 3]
    for scalar in ('layer_norm', 'activation'):
        assert runner.message_hub.log_scalars[f'train/{scalar}'].current() == 0
    runner.test()
    assert not has_training_form(reparameterize(runner.model))


def test_experts_come_apart_between_averages(tmp_path):
    values = Values()
    runner = runner_of(tmp_path, [dict(type='AverageExpertsHook', rate=0.0), values])
    runner.train()
    assert all(spread > 1e-3 for spread in values.spreads)


def test_stopped_and_resumed(tmp_path):
    hooks = [NORMS, ACTIVATIONS]
    whole = runner_of(tmp_path / 'whole', hooks, experts=False)
    whole.train()
    stopped = runner_of(tmp_path / 'part', [*hooks, Values(stop_after=1)], experts=False)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    values = Values()
    resumed = runner_of(
        tmp_path / 'part',
        [*hooks, values],
        experts=False,
        load_from=str(tmp_path / 'part' / 'epoch_1.pth'),
        resume=True,
    )
    resumed.train()
    assert values.lams == LAMS[2:]
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[key]), key


def test_averaged_models_merge(tmp_path, relative_error):
    ema = dict(type='EMAHook', momentum=0.3, update_buffers=True)
    runner = runner_of(tmp_path, [NORMS, ACTIVATIONS, dict(type='AverageExpertsHook'), MERGE, ema])
    runner.train()
    (hook,) = [h for h in runner.hooks if isinstance(h, EMAHook)]
    averaged = copy.deepcopy(hook.ema_model.module).eval()
    assert all(m.lam == 0 for m in averaged.modules() if isinstance(m, Scheduled))
    runner.test_loop.run()
    with torch.no_grad():
        expected = torch.cat(
            [torch.stack(averaged.test_step(batch)) for batch in runner.test_dataloader]
        )
    assert relative_error(KeepLogits.logits, expected) < 1e-5


def test_too_long_a_schedule_is_reported(tmp_path):
    runner = runner_of(tmp_path, [dict(NORMS, warmup=8), dict(ACTIVATIONS, warmup=2), MERGE])
    messages = []
    runner.logger.warning = messages.append
    runner.train()
    (message,) = [m for m in messages if 'lambda' in m]
    assert re.match(
        r'DecayLayerNormsHook: .* in the 8 iterations from 0 on, and the training has 4: '
        r'.*lambda = 0\.625',
        message,
    )
    with pytest.raises(ValueError, match='the LayerNorms have the weight lambda = 0.625'):
        runner.test()


def test_autocast(relative_error):
    images = [torch.randn(3, 16, 16) for _ in range(4)]
    for finished in (False, True):
        model = ToyStructures().train()
        if finished:
            finish_schedules(model)
        with torch.autocast('cpu', torch.bfloat16):
            model(images, [0, 1, 0, 1], mode='loss')['loss'].backward()
        for key, p in model.named_parameters():
            assert p.grad.dtype == torch.float32 and p.grad.isfinite().all(), key
    deployed = reparameterize(model.eval())
    with torch.no_grad():
        expected = torch.stack(model(images, None))
        with torch.autocast('cpu', torch.bfloat16):
            assert relative_error(torch.stack(deployed(images, None)), expected) < 5e-2


DISTRIBUTED = """
import sys, torch
from tests.test_engine.test_structure_hooks import *
from mmengine.dist import all_gather_object, get_rank
from repa_mm.run import end_process
torch.distributed.init_process_group('gloo')
values = Values()
hooks = [NORMS, ACTIVATIONS, dict(type='AverageExpertsHook', rate=0.5), MERGE, values,
         dict(type='EMAHook', momentum=0.3)]
runner = runner_of(sys.argv[1], hooks, launcher='pytorch', epochs=4,
                   cfg=dict(model_wrapper_cfg=dict(device_ids=None)))
runner.train()
assert values.lams == LAMS, values.lams
states = all_gather_object({k: v.detach() for k, v in runner.model.named_parameters()})
assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
runner.test_loop.run()
print(f'rank {get_rank()} done')
end_process()
"""


def test_two_processes(tmp_path):
    run_in_two_processes(DISTRIBUTED, tmp_path)


def test_imitation(tmp_path):
    teacher = ToyTeacher()
    path = str(tmp_path / 'teacher.pth')
    torch.save(dict(state_dict={f'backbone.{k}': v for k, v in teacher.state_dict().items()}), path)
    hook = dict(type='ImitateMixersHook', teacher=dict(type='ToyTeacher'), checkpoint=path)
    runner = make_runner(tmp_path, [hook, MERGE], model=dict(type='ToyStudent'))
    runner.train()
    losses = runner.message_hub.log_scalars['train/loss_imitation']._log_history
    assert len(losses) == 4 and losses[-1] < losses[0]
    runner.test()
    # Nothing of it is left in the model.
    assert 'loss' not in vars(runner.model)
    assert not any(m._forward_hooks for m in runner.model.modules())
    assert len(list(runner.model.parameters())) == len(list(ToyStudent().parameters()))

    def refused(error, match, **changes):
        runner = make_runner(tmp_path, [dict(hook, **changes)], model=dict(type='ToyStudent'))
        with pytest.raises(error, match=match):
            runner.train()

    refused(CheckpointError, 'is not of the teacher', teacher=dict(type='ToyTeacher', blocks=3))
    torch.save(ToyTeacher(3).state_dict(), tmp_path / 'three.pth')
    refused(
        ValueError,
        'teacher has 3 token mixers, and the model 2',
        teacher=dict(type='ToyTeacher', blocks=3),
        checkpoint=str(tmp_path / 'three.pth'),
    )
    # Of the blocks of a deeper teacher it would be the first ones.
    refused(
        CheckpointError,
        'is not of the teacher: it has .*of a deeper model',
        checkpoint=str(tmp_path / 'three.pth'),
    )
    torch.save(ToyTeacher(2, 4).state_dict(), tmp_path / 'narrow.pth')
    refused(
        ValueError,
        'the teacher has other blocks',
        teacher=dict(type='ToyTeacher', channels=4),
        checkpoint=str(tmp_path / 'narrow.pth'),
    )


def test_imitation_goes_on_after_an_interruption(tmp_path):
    path = str(tmp_path / 'teacher.pth')
    torch.save(ToyTeacher().state_dict(), path)

    class Interrupt(Hook):
        priority = 'VERY_LOW'
        done = False

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if not self.done and runner.iter == 1:
                self.done = True
                raise KeyboardInterrupt

    hook = dict(type='ImitateMixersHook', teacher=dict(type='ToyTeacher'), checkpoint=path)
    runner = make_runner(tmp_path, [hook, Interrupt()], model=dict(type='ToyStudent'))
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    runner.train_loop.run()
    assert 'loss' not in vars(runner.model)


def test_a_student_that_runs_twice_is_refused(tmp_path):
    path = str(tmp_path / 'teacher.pth')
    torch.save(ToyTeacher().state_dict(), path)
    hook = dict(type='ImitateMixersHook', teacher=dict(type='ToyTeacher'), checkpoint=path)
    runner = make_runner(tmp_path, [hook], model=dict(type='ToyStudent'))

    def twice(module, args):
        module.forward(*args)

    runner.model.backbone.register_forward_pre_hook(twice)
    with pytest.raises(ValueError, match='2 token mixers of the teacher ran, and 4 affine ones'):
        runner.train()


def test_frozen_experts_stay(tmp_path):
    runner = runner_of(tmp_path, [dict(type='AverageExpertsHook', rate=0.5)])
    frozen, trained = runner.model.backbone[5], runner.model.backbone[6]
    frozen.requires_grad_(False)
    before = [copy.deepcopy(m.state_dict()) for m in (frozen, trained)]
    runner.train()
    assert all(torch.equal(value, before[0][key]) for key, value in frozen.state_dict().items())
    key = 'fc1.experts.0.weight'
    assert not torch.equal(trained.state_dict()[key], before[1][key])


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match='rate must be'):
        AverageExpertsHook(1.5)
    for hook, message in (
        (dict(type='AverageExpertsHook'), 'no experts'),
        (dict(type='DecayLayerNormsHook'), 'no progressive norms'),
        (dict(type='DecayActivationsHook', warmup=1), 'no progressive channel-idle'),
        (dict(type='ImitateMixersHook', teacher={}, checkpoint=''), 'no affine mixers'),
    ):
        with pytest.raises(ValueError, match=message):
            make_runner(tmp_path, [hook]).train()
