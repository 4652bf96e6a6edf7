import copy
import os
import socket
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from mmengine.hooks import EMAHook

from repa_mm.engine import ReparameterizeHook
from repa_mm.reparam import CheckpointError, MergedFFN, reparameterize

from .toy import KeepLogits, Spy, ToyClassifier, make_runner

HOOK = dict(type='ReparameterizeHook')


def snapshot(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def assert_same(state, model):
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


def logits_of(model, runner):
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        return torch.cat([torch.stack(model.test_step(batch)) for batch in runner.test_dataloader])


def test_train_test_resume_training(tmp_path, relative_error):
    spy = Spy()
    runner = make_runner(tmp_path, [HOOK, spy])
    runner.train()
    model, state = runner.model, snapshot(runner.model)
    expected = logits_of(model, runner)
    optimizer = copy.deepcopy(runner.optim_wrapper.state_dict())

    runner.test()
    assert runner.model is model
    assert_same(state, model)
    assert relative_error(KeepLogits.logits, expected) < 1e-5
    assert runner.optim_wrapper.state_dict()['param_groups'] == optimizer['param_groups']

    runner.train_loop._max_epochs = 3
    runner.train_loop.run()
    assert not torch.equal(state['head.weight'], model.head.weight)
    assert {form for when, form in spy.forms if when == 'test'} == {'deploy'}
    assert {form for when, form in spy.forms if when != 'test'} == {'training'}


@pytest.mark.parametrize('when', ['test', 'val', ('val', 'test')])
def test_when(tmp_path, when):
    spy = Spy()
    runner = make_runner(tmp_path, [dict(HOOK, when=when), spy])
    runner.train()
    runner.test()
    forms = dict(spy.forms)
    assert forms['train'] == 'training'
    assert forms['val'] == ('deploy' if 'val' in when else 'training')
    assert forms['test'] == ('deploy' if 'test' in when else 'training')


def test_best_checkpoint_is_of_the_training_form(tmp_path):
    """CheckpointHook may save in the middle of validation."""
    spy = Spy()
    runner = make_runner(
        tmp_path,
        [dict(HOOK, when=['val', 'test']), spy],
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', interval=1, save_best='mean', rule='greater')
        ),
    )
    runner.train()
    assert ('save', 'training') in spy.forms
    assert ('save', 'deploy') not in spy.forms
    best = [f for f in os.listdir(tmp_path) if f.startswith('best')]
    model = ToyClassifier()
    model.load_state_dict(torch.load(tmp_path / best[0], weights_only=False)['state_dict'])


@pytest.mark.parametrize(
    'hooks',
    [
        [HOOK, dict(type='EMAHook', momentum=0.5)],
        [dict(type='EMAHook', momentum=0.5), HOOK],
        [dict(type='EMAHook', momentum=0.5, update_buffers=True), HOOK],
    ],
)
def test_with_ema(tmp_path, hooks, relative_error):
    runner = make_runner(tmp_path, [*hooks, Spy()])
    runner.train()
    ema = next(h for h in runner.hooks if isinstance(h, EMAHook))
    averaged = copy.deepcopy(ema.ema_model.module)
    if not ema.ema_model.update_buffers:
        for own, source in zip(averaged.buffers(), runner.model.buffers()):
            own.copy_(source)
    source_state, ema_state = snapshot(runner.model), snapshot(ema.ema_model)
    # runner.test() would start EMA anew: only its epoch is run.
    runner.test_loop.run()
    assert relative_error(KeepLogits.logits, logits_of(averaged, runner)) < 1e-5
    assert relative_error(logits_of(runner.model, runner), KeepLogits.logits) > 1e-3
    assert_same(source_state, runner.model)
    assert_same(ema_state, ema.ema_model)


@pytest.mark.parametrize('loop', ['test', 'val'])
def test_with_mmpretrains_ema_that_evaluates_both(loop, tmp_path):
    """What it calls origin are the weights that are not averaged, not the merged average."""
    from mmpretrain.engine import EMAHook as BothHook

    hooks = [BothHook(momentum=0.3, evaluate_on_origin=True), dict(HOOK, when=('val', 'test'))]
    runner = make_runner(tmp_path, hooks)
    runner.train()
    ema = next(h for h in runner.hooks if isinstance(h, EMAHook))
    averaged = copy.deepcopy(ema.ema_model.module)
    for own, source in zip(averaged.buffers(), runner.model.buffers()):
        own.copy_(source)
    means = [logits_of(model, runner).mean().item() for model in (averaged, runner.model)]
    assert abs(means[0] - means[1]) > 1e-3
    metrics = getattr(runner, f'{loop}_loop').run()
    origin = runner.message_hub.get_scalar(f'{loop}/mean_origin').current()
    assert [metrics['mean'], origin] == pytest.approx(means, abs=1e-5)


def test_wrong_order_is_refused(tmp_path):
    for hooks, other in (
        [[dict(HOOK, priority='HIGH'), dict(type='EMAHook')], 'EMAHook'],
        [[dict(HOOK, priority='LOWEST')], 'CheckpointHook'],
    ):
        with pytest.raises(ValueError, match=f'wrong side of {other}'):
            make_runner(tmp_path, hooks).test()


@pytest.mark.parametrize('prefix', ['', 'module.'])
def test_merged_checkpoint(prefix, tmp_path, randomize, relative_error, monkeypatch):
    """Is tested as it is, and also by a config of the training form."""
    model = randomize(ToyClassifier())
    path = str(tmp_path / 'merged.pth')
    weights = {prefix + k: v for k, v in reparameterize(model).state_dict().items()}
    torch.save(dict(state_dict=OrderedDict(weights)), path)
    read, load = [], torch.load
    monkeypatch.setattr(
        torch, 'load', lambda f, *args, **kw: read.append(f) or load(f, *args, **kw)
    )
    for hooks in ([HOOK], [HOOK, dict(type='EMAHook')]):
        for deploy in (False, True):
            runner = make_runner(
                tmp_path, hooks, load_from=path, model=dict(type='ToyClassifier', deploy=deploy)
            )
            runner.test()
            runner.test()
            assert relative_error(KeepLogits.logits, logits_of(model, runner)) < 1e-5
            assert len(read) == 1
            read.clear()


def test_writes_the_merged_checkpoint(tmp_path, randomize):
    out = str(tmp_path / 'new' / 'merged.pth')
    runner = make_runner(tmp_path, [dict(HOOK, out=out)])
    randomize(runner.model)
    runner.test()
    checkpoint = torch.load(out, weights_only=True)
    assert checkpoint['meta']['dataset_meta']['classes'] == ('dark', 'light')
    expected = reparameterize(runner.model)
    assert_same(checkpoint['state_dict'], expected)
    assert os.listdir(tmp_path / 'new') == ['merged.pth']


def test_logs_what_was_merged(tmp_path, caplog):
    runner = make_runner(tmp_path, [HOOK], log_level='INFO')
    messages = []
    runner.logger.info = messages.append
    runner.test()
    text = next(m for m in messages if 'Reparameterized' in m)
    assert 'Reparameterized 2 channel-idle FFNs' in text and text.count('GMACs') == 2


def test_interrupted_test_does_not_cost_the_training_form(tmp_path):
    runner = make_runner(tmp_path, [HOOK])
    model, state = runner.model, snapshot(runner.model)
    run_iter = runner.test_loop.run_iter
    runner.test_loop.run_iter = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner.test()
    runner.test_loop.run_iter = run_iter
    runner.test()
    assert runner.model is model
    assert_same(state, model)


def test_training_a_merged_model_is_refused(tmp_path):
    runner = make_runner(tmp_path, [HOOK], model=dict(type='ToyClassifier', deploy=True))
    with pytest.raises(ValueError, match='deploy form.*cannot be trained'):
        runner.train()


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="'train'"):
        ReparameterizeHook(when='train')
    runner = make_runner(tmp_path, [HOOK])
    with pytest.raises(CheckpointError, match='none of the weights'):
        runner.call_hook(
            'after_load_checkpoint', checkpoint=dict(state_dict={'conv1.weight': torch.zeros(1)})
        )
    runner.model.backbone = torch.nn.Sequential(*runner.model.backbone[:3])
    with pytest.raises(ValueError, match='nothing to reparameterize'):
        runner.test()


DISTRIBUTED = """
import sys, torch
from tests.test_engine.toy import *
from tests.conftest import _randomize
from mmengine.dist import get_rank
from mmengine.hooks import EMAHook
from repa_mm.run import end_process
torch.distributed.init_process_group('gloo')
hooks = [dict(type='ReparameterizeHook'), dict(type='EMAHook', momentum=0.5)]
spy = Spy()
runner = make_runner(sys.argv[1], [*hooks, spy], launcher='pytorch',
                     cfg=dict(model_wrapper_cfg=dict(
                         device_ids=None, broadcast_buffers=False)))
runner.train()
model = runner.model
state = {k: v.clone() for k, v in model.state_dict().items()}
assert type(model).__name__ == 'MMDistributedDataParallel'
runner.test_loop.run()
assert runner.model is model
assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
assert ('test', 'deploy') in spy.forms and ('test', 'training') not in spy.forms
print(f'rank {get_rank()} done')
end_process()
"""


def test_two_processes_with_ema(tmp_path):
    script = tmp_path / 'run.py'
    script.write_text(DISTRIBUTED)
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    result = subprocess.run(
        [
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--nproc_per_node=2',
            f'--master_port={port}',
            str(script),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ, PYTHONPATH=root, OMP_NUM_THREADS='1'),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert 'rank 0 done' in result.stdout and 'rank 1 done' in result.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_amp(tmp_path):
    runner = make_runner(
        tmp_path,
        [HOOK],
        optim_wrapper=dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        test_cfg=dict(fp16=True),
    )
    runner.train()
    runner.test()
    assert torch.isfinite(KeepLogits.logits).all()


def test_autocast_bf16(randomize, relative_error):
    """What AMP does to both forms, on any device."""
    model = randomize(ToyClassifier()).eval()
    deployed = reparameterize(model)
    assert any(isinstance(m, MergedFFN) for m in deployed.modules())
    images = [torch.randn(3, 16, 16) for _ in range(4)]
    with torch.no_grad():
        expected = torch.stack(model(images, None))
        with torch.autocast('cpu', torch.bfloat16):
            for m in (model, deployed):
                logits = torch.stack(m(images, None))
                assert relative_error(logits, expected) < 3e-2
