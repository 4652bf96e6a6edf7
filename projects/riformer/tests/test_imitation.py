"""Mixers that are imitated, in real trainings."""

import copy

import pytest
import torch
import torch.nn as nn
from mmengine.hooks import Hook
from mmengine.model import BaseModel, BaseModule
from mmengine.registry import MODELS

from projects.riformer import NormedAffine
from tests.toy import make_runner

MERGE = dict(type='ReparameterizeHook')


class Mixer(nn.Module):
    def __init__(self, channels):
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
class ToyTeacher(BaseModule):
    def __init__(self, blocks=2, channels=8, init_cfg=None):
        super().__init__(init_cfg)
        mixers = [Mixer(channels) for _ in range(blocks)]
        self.layers = nn.Sequential(nn.Conv2d(3, channels, 4, stride=4), *mixers)

    def forward(self, x):
        return self.layers(x)


@MODELS.register_module()
class ToyStudent(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), Affine(), Affine())
        self.head = nn.Linear(8, 2)

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(inputs).flatten(2).mean(-1))
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits, labels))
        return list(logits)


def runner_of(work_dir, hooks):
    runner = make_runner(work_dir, hooks, model=dict(type='ToyStudent'))
    for loader in (runner._train_dataloader, runner._val_dataloader, runner._test_dataloader):
        loader['collate_fn'] = dict(type='default_collate')
    return runner


def imitation(path, **teacher):
    init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    teacher = dict(type='ToyTeacher', init_cfg=init_cfg, **teacher)
    return dict(type='ImitateMixersHook', teacher=teacher)


@pytest.fixture
def teacher(tmp_path):
    model = ToyTeacher()
    path = tmp_path / 'teacher.pth'
    torch.save(dict(state_dict={f'backbone.{k}': v for k, v in model.state_dict().items()}), path)
    return model, path


def test_imitation(teacher, tmp_path, relative_error):
    teacher, path = teacher
    runner = runner_of(tmp_path, [imitation(path), MERGE])
    student, losses = copy.deepcopy(runner.model), []
    runner.train()
    found = runner.message_hub.log_scalars['train/loss_imitation']._log_history
    # The first one is that of the equation.
    x = next(iter(runner.train_dataloader))['inputs']
    maps = teacher.layers[0](x), student.backbone[0](x)
    for taught, learnt in zip(teacher.layers[1:], student.backbone[1:]):
        inputs = taught.norm1(maps[0]), learnt.norm_reparam.norm(maps[1])
        mixed, affine = taught.token_mixer(inputs[0]), learnt.norm_reparam.affine(inputs[1])
        losses += [(affine - inputs[1] - mixed).square().mean()]
        losses += [(inputs[1] - inputs[0]).square().mean()]
        maps = taught(maps[0]), learnt(maps[1])
    assert abs(found[0] - sum(losses) / 2) < 1e-5
    assert len(found) == 4 and found[-1] < found[0]
    runner.test()
    # Nothing of it is left in the model.
    assert not any(m._forward_hooks for m in runner.model.modules())
    assert runner.model.state_dict().keys() == student.state_dict().keys()


@pytest.mark.parametrize('changes', [dict(blocks=3), dict(channels=4)])
@pytest.mark.filterwarnings('ignore:Using a target size')
def test_a_teacher_of_other_blocks_is_refused(changes, teacher, tmp_path):
    match = '3 token mixers of the teacher ran, and 2 affine' if 'blocks' in changes else 'size'
    runner = runner_of(tmp_path, [imitation(teacher[1], **changes)])
    with pytest.raises((ValueError, RuntimeError), match=match):
        runner.train()


def test_a_student_that_runs_twice_is_refused(teacher, tmp_path):
    runner = runner_of(tmp_path, [imitation(teacher[1])])
    blocks = runner.model.backbone
    blocks.register_forward_pre_hook(lambda _, args: (blocks.forward(*args), None)[1])
    with pytest.raises(ValueError, match='2 token mixers of the teacher ran, and 4 affine mixers'):
        runner.train()


def test_imitation_goes_on_after_an_interruption(teacher, tmp_path):
    class Interrupt(Hook):
        priority = 'VERY_LOW'
        done = False

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if not self.done and runner.iter == 1:
                self.done = True
                raise KeyboardInterrupt

    runner = runner_of(tmp_path, [imitation(teacher[1]), Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    runner.train_loop.run()
    assert not any(m._forward_hooks for m in runner.model.modules())
