"""The hook in real tests: what it tests, and what it leaves behind."""

import copy
import os
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
from mmengine.hooks import EMAHook
from mmengine.model import BaseModel
from mmpretrain.engine import EMAHook as BothHook

from repa_mm.hooks import ReparameterizeHook
from repa_mm.reparam import CheckpointError, reparameterize, set_training_path_
from tests.toy import KeepLogits, Spy, ToyClassifier, distributed, make_runner  # noqa: F401

HOOK = dict(type='ReparameterizeHook')


@contextmanager
def unchanged(runner):
    """The runner's model and the averaged one are the same afterwards."""
    models = [runner.model, *(hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook))]
    states = [copy.deepcopy(model.state_dict()) for model in models]
    yield
    assert runner.model is models[0]
    for model, state in zip(models, states):
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def logits_of(model, runner):
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        return torch.cat([torch.stack(model.test_step(batch)) for batch in runner.test_dataloader])


def averaged_model(runner):
    """What EMAHook tests: averaged parameters, and by default the buffers of the source."""
    ema = next(h for h in runner.hooks if isinstance(h, EMAHook))
    averaged = copy.deepcopy(ema.ema_model.module)
    if not ema.ema_model.update_buffers:
        for own, source in zip(averaged.buffers(), runner.model.buffers()):
            own.copy_(source)
    return averaged


# What one hook is for, or two: a config may inherit one, and have another.
PAIRS = [
    *(('test', []), ('val', []), (('val', 'test'), [])),
    *(('test', 'test'), ('test', 'val'), ('val', 'test'), ('val', ['val', 'test'])),
]


@pytest.mark.parametrize('first, second', PAIRS)
def test_train_test_resume_training(first, second, tmp_path, relative_error):
    spy, messages = Spy(), []
    # The best checkpoint is saved in the middle of validation.
    hooks = dict(checkpoint=dict(type='CheckpointHook', save_best='mean', rule='greater'))
    if second:
        hooks['reparameterize'] = dict(HOOK, when=second)
    runner = make_runner(tmp_path, [dict(HOOK, when=first), spy], default_hooks=hooks)
    runner.logger.info = messages.append
    runner.train()
    model = runner.model
    expected, before = logits_of(model, runner), model.head.weight.clone()
    with unchanged(runner):
        runner.test()
    assert relative_error(KeepLogits.logits, expected) < 1e-5
    runner.train_loop._max_epochs = 3
    runner.train_loop.run()
    assert not torch.equal(before, model.head.weight)
    forms = {name: {form for at, form in spy.forms if at == name} for name, _ in spy.forms}
    assert forms['train'] == forms['save'] == {'training'}
    (best,) = [f for f in os.listdir(tmp_path) if f.startswith('best')]
    ToyClassifier().load_state_dict(torch.load(tmp_path / best, weights_only=False)['state_dict'])
    when = {loop: loop in first or loop in second for loop in ('val', 'test')}
    for loop, merges in when.items():
        assert forms[loop] == {'deploy' if merges else 'training'}
    count = sum(p.numel() for p in reparameterize(model).parameters()) / 1e6
    texts = [m for m in messages if 'Reparameterized' in m]
    assert len(texts) == when['test'] + 3 * when['val']
    for text in texts:
        assert '2 channel-idle FFNs: 0.0 M -> ' in text
        assert text.endswith(f'{count:.1f} M parameters')


@pytest.mark.parametrize('update_buffers', [False, True])
def test_with_ema(update_buffers, tmp_path, relative_error):
    ema = dict(type='EMAHook', momentum=0.5, update_buffers=update_buffers)
    hook = dict(HOOK, when=('val', 'test'))
    runner = make_runner(tmp_path, [hook, ema, Spy()])
    runner.train()
    expected = logits_of(averaged_model(runner), runner)
    with unchanged(runner):
        runner.test_loop.run()  # runner.test() would start EMA anew
    assert relative_error(KeepLogits.logits, expected) < 1e-5
    assert relative_error(logits_of(runner.model, runner), KeepLogits.logits) > 1e-3


def test_with_ema_in_a_distributed_training(distributed, tmp_path, relative_error):  # noqa: F811
    ema, spy = dict(type='EMAHook', momentum=0.5), Spy()
    runner = make_runner(tmp_path, [HOOK, ema, spy], **distributed)
    runner.train()
    assert type(runner.model).__name__ == 'MMDistributedDataParallel'
    expected = logits_of(averaged_model(runner), runner)
    with unchanged(runner):
        runner.test_loop.run()
    assert relative_error(KeepLogits.logits, expected) < 1e-5
    assert {form for at, form in spy.forms if at == 'test'} == {'deploy'}


@pytest.mark.parametrize('loop', ['test', 'val'])
def test_with_mmpretrains_ema_that_evaluates_both(loop, tmp_path):
    """What it calls origin are the weights that are not averaged, not the merged average."""
    hook = dict(HOOK, when=('val', 'test'))
    hooks = [BothHook(momentum=0.3, evaluate_on_origin=True), hook]
    runner = make_runner(tmp_path, hooks)
    runner.train()
    models = averaged_model(runner), runner.model
    means = [logits_of(model, runner).mean().item() for model in models]
    assert abs(means[0] - means[1]) > 1e-3
    metrics = getattr(runner, f'{loop}_loop').run()
    origin = runner.message_hub.get_scalar(f'{loop}/mean_origin').current()
    assert [metrics['mean'], origin] == pytest.approx(means, abs=1e-5)


class Pair(BaseModel):
    """Two networks, as in a semi-supervised detector. The student is tested last."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = ToyClassifier(), ToyClassifier()
        self.semi_test_cfg = dict(predict_on='student')

    def forward(self, *args, **kwargs):
        return getattr(self, self.semi_test_cfg['predict_on'])(*args, **kwargs)


def test_both_networks_of_a_semi_supervised_detector(tmp_path, relative_error):
    hook, loop = dict(HOOK, when='val'), dict(type='mmdet.TeacherStudentValLoop')
    runner = make_runner(tmp_path, [hook], Pair(), val_cfg=loop)
    with unchanged(runner):
        runner.val()
    assert relative_error(KeepLogits.logits, logits_of(runner.model, runner)) < 1e-5


EMA = [dict(type='EMAHook')]


@pytest.mark.parametrize(
    'deploy, prefix, ema',
    [(False, '', []), (True, '', []), (False, '', EMA), (True, '', EMA), (False, 'module.', [])],
)
def test_merged_checkpoint(deploy, prefix, ema, tmp_path, randomize, relative_error):
    """Is tested as it is, and also by a config of the training form, and from a wrapped model."""
    model = randomize(ToyClassifier())
    weights = {f'{prefix}{k}': v for k, v in reparameterize(model).state_dict().items()}
    path = str(tmp_path / 'merged.pth')
    torch.save(dict(state_dict=OrderedDict(weights)), path)
    cfg = dict(type='ToyClassifier', deploy=deploy)
    runner = make_runner(tmp_path, [HOOK, *ema], load_from=path, model=cfg)
    for _ in range(2):
        runner.test()
        assert relative_error(KeepLogits.logits, logits_of(model, runner)) < 1e-5
    trained = make_runner(tmp_path, [HOOK, *ema], load_from=path)
    with pytest.raises(CheckpointError, match='cannot be trained'):
        trained.train()


def test_interrupted_test_does_not_cost_the_training_form(tmp_path):
    runner = make_runner(tmp_path, [HOOK])
    head, step = runner.model.head, runner.model.head.forward
    with unchanged(runner):
        head.forward = lambda x: 1 / 0
        with pytest.raises(ZeroDivisionError):
            runner.test()
        head.forward = step
        runner.test()


@pytest.mark.filterwarnings('ignore')  # of checkpointing, about the images
def test_activation_checkpointing(tmp_path, relative_error):
    """MMEngine replaces forward() by a function that calls the original's."""
    runner = make_runner(
        tmp_path, [HOOK, spy := Spy()], cfg=dict(activation_checkpointing='backbone')
    )
    runner.train()
    assert 'forward' in vars(runner.model.backbone)
    with unchanged(runner):
        runner.test()
    assert ('test', 'deploy') in spy.forms
    assert relative_error(KeepLogits.logits, logits_of(runner.model, runner)) < 1e-5


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="'train'"):
        ReparameterizeHook(when='train')
    runner = make_runner(tmp_path, [HOOK])
    runner.model.backbone = torch.nn.Sequential(*runner.model.backbone[:3])
    with pytest.raises(ValueError, match='nothing to reparameterize'):
        runner.test()


@pytest.mark.parametrize('path', ['literal', 'folded'])
def test_precise_statistics(path, tmp_path, relative_error):
    """MMPretrain's hook estimates the statistics in our forms: docs/train.md tells of it."""
    hook = dict(type='mmpretrain.PreciseBNHook', num_samples=8, priority='ABOVE_NORMAL')
    runner = make_runner(
        tmp_path,
        [hook],
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.0)),
    )
    set_training_path_(runner.model, path)
    runner.train()
    ffn = runner.model.backbone[3].train()
    set_training_path_(ffn, 'literal')
    seen = {ffn.norm1: [], ffn.norm2: []}
    for norm in seen:
        norm.register_forward_hook(lambda norm, args, _: seen[norm].append(args[0].detach()))
    found = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in seen]
    for batch in runner.train_dataloader:
        runner.model(**runner.model.data_preprocessor(batch))
    for (mean, var), batches in zip(found, seen.values()):
        assert relative_error(mean, torch.stack([x.mean(0) for x in batches]).mean(0)) < 1e-5
        assert relative_error(var, torch.stack([x.var(0) for x in batches]).mean(0)) < 1e-5
