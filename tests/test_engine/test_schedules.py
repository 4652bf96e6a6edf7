"""Lambda by iterations, in real trainings: stopped and resumed, averaged, distributed."""

import copy
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import MODELS

from repa_mm.engine import JoinBranchesHook
from repa_mm.reparam import (
    JoinedLinear,
    OrdinaryFFN,
    ParallelAttention,
    ParallelFFN,
    finish_schedules,
    join_branches,
    reparameterize,
)

from .toy import KeepLogits, Transpose, make_runner, run_in_two_processes

# 2 iterations an epoch.
JOIN = dict(type='JoinBranchesHook', warmup=4)
MERGE = dict(type='ReparameterizeHook')


@MODELS.register_module()
class ToyParallel(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4),
            nn.Flatten(2),
            Transpose(),
            nn.LayerNorm(8),
            ParallelAttention(8, 2, 2),
            nn.LayerNorm(8),
            ParallelFFN(8, 16, 3),
        )
        self.head = nn.Linear(8, 2)

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(torch.stack(inputs)).mean(1))
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits, torch.as_tensor(labels)))
        return list(logits)


class Lambdas(Hook):
    """Notes lambda in every iteration."""

    priority = 'LOWEST'

    def __init__(self, stop_after=None):
        self.seen, self.stop_after = [], stop_after

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        lams = {float(m.lam) for m in runner.model.modules() if isinstance(m, JoinedLinear)}
        assert len(lams) == 1
        self.seen.append(round(lams.pop(), 6))

    def after_train_epoch(self, runner):
        if self.stop_after == runner.epoch + 1:
            raise KeyboardInterrupt


def runner_of(work_dir, hooks, epochs=4, **kwargs):
    train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=epochs)
    kwargs.update(train_cfg=train_cfg, randomness=dict(seed=0))
    return make_runner(work_dir, hooks, model=dict(type='ToyParallel'), **kwargs)


@pytest.mark.parametrize(
    'options, expected',
    [
        ({}, [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]),
        (dict(begin=2), [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]),
        (dict(curve='cosine'), [0, 0.146447, 0.5, 0.853553, 1, 1, 1, 1]),
        (dict(curve='step', num_steps=2), [0, 0, 0.5, 0.5, 1, 1, 1, 1]),
        (dict(warmup=0.5), [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]),
        (dict(warmup=0), [1] * 8),
        (dict(warmup=0, begin=3), [0, 0, 0, 1, 1, 1, 1, 1]),
    ],
)
def test_lambda_by_iterations(tmp_path, options, expected):
    lambdas = Lambdas()
    runner = runner_of(tmp_path, [dict(JOIN, **options), MERGE, lambdas])
    runner.train()
    assert lambdas.seen == expected
    scalars = runner.message_hub.log_scalars['train/joined']._log_history
    assert [round(x, 6) for x in scalars] == expected
    runner.test()
    assert any(isinstance(m, OrdinaryFFN) for m in reparameterize(runner.model).modules())


def test_stopped_and_resumed(tmp_path):
    whole = runner_of(tmp_path / 'whole', [JOIN, Lambdas()])
    whole.train()
    first = runner_of(tmp_path / 'part', [JOIN, Lambdas(stop_after=1)])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    path = tmp_path / 'part' / 'epoch_1.pth'
    saved = torch.load(path, weights_only=False)['state_dict']
    assert saved['backbone.4.qkv.lam'] == 0.25
    lambdas = Lambdas()
    second = runner_of(tmp_path / 'part', [JOIN, lambdas], load_from=str(path), resume=True)
    second.train()
    assert lambdas.seen == [0.5, 0.75, 1, 1, 1, 1]
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[key]), key


@pytest.mark.parametrize('update_buffers', [False, True])
def test_averaged_models_have_the_same_lambda(tmp_path, update_buffers, relative_error):
    ema = dict(type='EMAHook', momentum=0.3, update_buffers=update_buffers)
    runner = runner_of(tmp_path, [MERGE, JOIN, ema, Lambdas()])
    runner.train()
    (hook,) = [h for h in runner.hooks if isinstance(h, EMAHook)]
    averaged = copy.deepcopy(hook.ema_model.module).eval()
    runner.test_loop.run()
    with torch.no_grad():
        expected = torch.cat(
            [torch.stack(averaged.test_step(batch)) for batch in runner.test_dataloader]
        )
    assert relative_error(KeepLogits.logits, expected) < 1e-5
    # What is deployed from the file is the average, too.
    state = torch.load(tmp_path / 'epoch_4.pth', weights_only=False)
    model = ToyParallel()
    model.load_state_dict(state['state_dict'])
    assert model.backbone[4].qkv.lam == 1
    assert relative_error(model.head.weight, averaged.head.weight) == 0
    resumed = runner_of(
        tmp_path, [JOIN, ema], epochs=5, load_from=str(tmp_path / 'epoch_4.pth'), resume=True
    )
    resumed.train()
    (hook,) = [h for h in resumed.hooks if isinstance(h, EMAHook)]
    assert hook.ema_model.module.backbone[4].qkv.lam == 1
    assert resumed.iter == 10


KILLED = """
import os, signal, sys
from tests.test_engine.test_schedules import *

class Kill(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 5:
            os.kill(os.getpid(), signal.SIGKILL)

by_iterations(sys.argv[1], [Kill()]).train()
"""


def by_iterations(work_dir, hooks=(), **kwargs):
    """A training by iterations, whose lambda is on its way from the 1st to the 7th."""
    hooks = [dict(JOIN, warmup=6), dict(type='EMAHook', momentum=0.3), *hooks]
    return make_runner(
        work_dir,
        hooks,
        model=dict(type='ToyParallel'),
        train_cfg=dict(by_epoch=False, max_iters=8, val_interval=8),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=2, by_epoch=False)),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.01)),
        randomness=dict(seed=0),
        **kwargs,
    )


def test_killed_and_resumed(tmp_path):
    whole = by_iterations(tmp_path / 'whole')
    whole.train()
    result = subprocess.run(
        [sys.executable, '-c', KILLED, tmp_path / 'part'],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]), OMP_NUM_THREADS='1'),
    )
    assert result.returncode == -signal.SIGKILL, result.stderr[-3000:]
    assert (tmp_path / 'part' / 'iter_4.pth').is_file()
    lambdas = Lambdas()
    resumed = by_iterations(tmp_path / 'part', [lambdas], resume=True)
    resumed.train()
    assert lambdas.seen == [round(4 / 6, 6), round(5 / 6, 6), 1, 1]
    averages = [[h for h in r.hooks if isinstance(h, EMAHook)][0] for r in (whole, resumed)]
    for one, other in ((whole.model, resumed.model), (h.ema_model for h in averages)):
        for key, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key


def warnings_of(runner):
    messages = []
    runner.logger.warning = messages.append
    runner.train()
    return [m for m in messages if 'lambda' in m]


@pytest.mark.parametrize(
    'first, expected', [(1, [1] * 8), (0.6, [0.6, 0.6, 0.6, 0.75, 1, 1, 1, 1])]
)
def test_lambda_does_not_go_back(first, expected, tmp_path):
    """A model whose branches are joined is not taken apart by its fine-tuning."""
    path = tmp_path / 'joined.pth'
    torch.save(dict(state_dict=join_branches(ToyParallel(), first).state_dict()), path)
    lambdas = Lambdas()
    runner = runner_of(tmp_path, [JOIN, MERGE, lambdas], load_from=str(path))
    (message,) = warnings_of(runner)
    assert f'begins with have lambda = {first}, further than the schedule at iteration 0' in message
    assert lambdas.seen == expected
    runner.test()


def test_joined_branches_of_another_part_stay(tmp_path):
    """Those of a teacher, say."""
    seen = []

    class Note(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            attention, ffn = runner.model.backbone[4].qkv, runner.model.backbone[6].fc1
            assert attention.is_finished and ffn.is_finished == (ffn.lam == 1)
            seen.append((float(attention.lam), float(ffn.lam)))

    runner = runner_of(tmp_path, [JOIN, Note()])
    join_branches(runner.model.backbone[4], 1)
    runner.train()
    assert seen == [(1, lam) for lam in (0, 0.25, 0.5, 0.75, 1, 1, 1, 1)]


def test_two_hooks_for_one_lambda_are_refused(tmp_path):
    with pytest.raises(ValueError, match='two hooks set the lambda of parallel branches'):
        runner_of(tmp_path, [JOIN, dict(JOIN, warmup=8)]).train()


def test_frozen_branches_are_reported(tmp_path):
    runner = runner_of(tmp_path, [JOIN])
    runner.model.backbone[4].requires_grad_(False)
    (message,) = warnings_of(runner)
    assert '1 of the 2 modules with a lambda are frozen' in message


def test_validated_in_the_middle_of_a_schedule(tmp_path):
    """In the training form, which is all that there is, and merged afterwards."""
    forms = []

    class Note(Hook):
        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            forms.append(type(runner.model.backbone[6]))

    train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=1)
    runner = make_runner(
        tmp_path,
        [JOIN, dict(MERGE, when=('val', 'test')), Note()],
        model=dict(type='ToyParallel'),
        train_cfg=train_cfg,
    )
    runner.train()
    # 2 batches an epoch, of which the third is the first that ends with joined branches.
    assert forms == [ParallelFFN] * 4 + [OrdinaryFFN] * 4
    assert isinstance(runner.model.backbone[6], ParallelFFN)


def test_too_long_a_schedule_is_reported(tmp_path):
    for warmup, end in ((8, '0.875'), (16, '0.4375')):
        runner = runner_of(tmp_path, [dict(JOIN, warmup=warmup), MERGE])
        messages = []
        runner.logger.warning = messages.append
        runner.train()
        (message,) = [m for m in messages if 'JoinBranchesHook' in m]
        assert re.search(
            rf'in the {warmup} iterations from 0 on, and the training has 8: .*lambda = {end}',
            message,
        )
        with pytest.raises(ValueError, match=f'lambda = {end}'):
            runner.test()
    runner = runner_of(tmp_path, [dict(JOIN, warmup=7), MERGE])
    messages = []
    runner.logger.warning = messages.append
    runner.train()
    runner.test()
    assert not [m for m in messages if 'JoinBranchesHook' in m]


def test_merged_checkpoints_are_tested(tmp_path, relative_error):
    """By a config of the training form, whose lambda is at its beginning."""
    model = join_branches(ToyParallel(), 1).eval()
    path = str(tmp_path / 'merged.pth')
    torch.save(dict(state_dict=reparameterize(model).state_dict()), path)
    for hooks in ([JOIN, MERGE], [JOIN, MERGE, dict(type='EMAHook')]):
        runner = runner_of(tmp_path, hooks, load_from=path)
        runner.test()
        with torch.no_grad():
            expected = torch.cat(
                [torch.stack(model.test_step(batch)) for batch in runner.test_dataloader]
            )
        assert relative_error(KeepLogits.logits, expected) < 1e-5


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(warmup=-1), 'warmup of JoinBranchesHook .* at least 0'),
        (dict(warmup=1.5), 'warmup .* integer'),
        (dict(begin=-1), 'begin'),
        (dict(num_steps=0), 'num_steps .* at least 1'),
        (dict(curve='square'), "one of .*'cosine', 'linear', 'step'.* but got 'square'"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        JoinBranchesHook(**options)


def test_a_model_without_branches_is_refused(tmp_path):
    runner = make_runner(tmp_path, [JOIN])
    with pytest.raises(ValueError, match='ToyClassifier has no parallel branches'):
        runner.train()


def test_autocast(relative_error):
    """What AMP does to training and merged forms, on any device."""
    model = finish_schedules(ToyParallel()).eval()
    deployed = reparameterize(model)
    images = [torch.randn(3, 16, 16) for _ in range(4)]
    with torch.no_grad():
        expected = torch.stack(model(images, None))
        with torch.autocast('cpu', torch.bfloat16):
            for lam in (1, 0.5):
                join_branches(model, lam)
                logits = torch.stack(model(images, None))
                assert logits.isfinite().all()
                assert lam < 1 or relative_error(logits, expected) < 3e-2
            assert relative_error(torch.stack(deployed(images, None)), expected) < 3e-2
    join_branches(model.train(), 0.5)
    with torch.autocast('cpu', torch.bfloat16):
        model(images, [0, 1, 0, 1], mode='loss')['loss'].backward()
    for key, p in model.named_parameters():
        assert p.grad.dtype == torch.float32 and p.grad.isfinite().all(), key


DISTRIBUTED = """
import sys, torch
from tests.test_engine.test_schedules import *
from mmengine.dist import all_gather_object, get_rank
from repa_mm.run import end_process
torch.distributed.init_process_group('gloo')
lambdas = Lambdas()
broadcast = sys.argv[2] == 'True'
runner = runner_of(sys.argv[1], [JOIN, MERGE, lambdas, dict(type='EMAHook', momentum=0.3)],
                   launcher='pytorch', cfg=dict(model_wrapper_cfg=dict(
                       device_ids=None, broadcast_buffers=broadcast)), epochs=6)
runner.train()
assert lambdas.seen == [0, 0.25, 0.5, 0.75, 1, 1], lambdas.seen
states = all_gather_object({k: v.cpu() for k, v in runner.model.state_dict().items()})
assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
runner.test_loop.run()
print(f'rank {get_rank()} done')
end_process()
"""


@pytest.mark.parametrize('broadcast_buffers', [False, True])
def test_two_processes(tmp_path, broadcast_buffers):
    run_in_two_processes(DISTRIBUTED, tmp_path, broadcast_buffers)
