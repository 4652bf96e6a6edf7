"""DINO against its equations, and through the real Runner."""

import copy
import math
from contextlib import nullcontext
from unittest.mock import MagicMock, patch  # noqa: F401, for TWO_PROCESSES, too

import pytest
import torch
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

from projects.dino import ClassTokens, DINOHook
from repa_mm import reparameterize
from repa_mm.reparam import set_training_path_  # noqa: F401, for TWO_PROCESSES
from tests.toy import run_in_two_processes

pytest.importorskip('lightly')

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=64)
MODEL = dict(
    type='DINO',
    data_preprocessor=dict(type='mmpretrain.SelfSupDataPreprocessor', mean=[127] * 3, std=[60] * 3),
    backbone=dict(
        type='RePaVisionTransformer',
        arch=ARCH,
        img_size=32,
        patch_size=8,
        out_type='cls_token',
        drop_path_rate=0.1,
    ),
    neck=dict(
        type='DINOProjection',
        in_channels=16,
        hidden_channels=32,
        bottleneck_channels=8,
        out_channels=24,
        norm_last_layer=False,
    ),
    head=dict(type='DINOHead', out_channels=24, warmup_epochs=3),
)


def build(**changes):
    torch.manual_seed(0)
    model = MODELS.build(copy.deepcopy({**MODEL, **changes}))
    model.init_weights()
    model.head.epoch = 0  # what DINOHook sets
    return model


def crops_of(batch=4, sizes=(32, 32, 16, 16, 16), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 3, size, size, generator=generator) for size in sizes]


def literal_loss(student, teacher, center, student_temperature, teacher_temperature):
    """Algorithm 1 of the paper, for any number of crops."""
    total, terms = 0.0, 0
    for i, t in enumerate(teacher):
        target = F.softmax((t - center) / teacher_temperature, dim=1)
        for j, s in enumerate(student):
            if i != j:
                total += -(target * F.log_softmax(s / student_temperature, dim=1)).sum(1).mean()
                terms += 1
    return total / terms


@pytest.mark.parametrize('num_global', [1, 2])
def test_loss_and_center_are_those_of_the_paper(num_global):
    """Over epochs: what a step leaves of the center is what the next one subtracts."""
    head = MODELS.build(MODEL['head'])
    generator = torch.Generator().manual_seed(1)
    center = torch.zeros(1, 24)
    for epoch, temperature in ((0, 0.04), (1, 0.055), (1, 0.055), (2, 0.07), (9, 0.07)):
        student = [3 * torch.randn(4, 24, generator=generator) for _ in range(5)]
        teacher = [3 * torch.randn(4, 24, generator=generator) + 1 for _ in range(num_global)]
        head.epoch = epoch
        loss = head.loss(student, teacher)['loss']
        expected = literal_loss(student, teacher, center, 0.1, temperature)
        torch.testing.assert_close(loss, expected)
        center = 0.9 * center + 0.1 * torch.cat(teacher).mean(0, keepdim=True)
        torch.testing.assert_close(head.loss_module.center[0], center)


def test_loss_is_not_computed_in_half_precision():
    """Autocast would take the products over all prototypes for those of a layer."""
    logits = torch.randn(7, 4, 24).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        head = MODELS.build(MODEL['head'])
        head.epoch = 0
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype is torch.bfloat16):
            student, teacher = logits.to(dtype).split([5, 2])
            found.append([head.loss(list(student), list(teacher))['loss'], head.loss_module.center])
    for literal, autocast in zip(*found):
        assert torch.equal(literal, autocast)


def test_training_without_the_hook_is_refused():
    """Its teacher would never move."""
    model = build()
    model.head.epoch = None
    with pytest.raises(ValueError, match="add dict.type='DINOHook'. to custom_hooks"):
        model.loss(crops_of())


def test_forward_is_crop_by_crop(relative_error):
    """With frozen statistics, crops do not depend on each other, so each can be run alone."""
    model = build()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.running_var.uniform_(0.5, 2)
            module.running_mean.uniform_(-1, 1)
    model.eval()
    crops = crops_of()
    seen = {}
    model.head.loss = lambda student, teacher: seen.update(student=student, teacher=teacher) or {}
    model.loss(crops)
    for crop, found in zip(crops, seen['student']):
        assert relative_error(found, model.neck(model.backbone(crop))) < 1e-5
    for crop, found in zip(crops, seen['teacher']):
        assert relative_error(found, model.teacher(crop)) < 1e-5


@pytest.mark.parametrize('sizes', [(32, 32, 16, 16, 16), (32, 32, 32, 16)])
def test_global_crops_alone_count_for_running_statistics(sizes):
    model = build().train()
    alone = copy.deepcopy(model)
    crops = crops_of(sizes=sizes)
    torch.manual_seed(3)
    model.loss(crops)
    torch.manual_seed(3)
    alone.backbone(torch.cat(crops[:2]))
    names = [n for n, _ in model.backbone.named_buffers() if 'running' in n]
    assert names
    for name in names:
        torch.testing.assert_close(model.backbone.get_buffer(name), alone.backbone.get_buffer(name))
    assert {m.momentum for m in model.modules() if isinstance(m, _BatchNorm)} == {0.1}


def test_teacher_has_its_own_statistics_and_no_drop_path():
    model = build().train()
    before = copy.deepcopy(model)
    model.loss(crops_of())
    names = [n for n, _ in model.teacher.named_buffers() if 'running_mean' in n]
    assert names
    for name in names:
        own = model.teacher.get_buffer(name)
        assert not torch.equal(own, before.teacher.get_buffer(name))
        assert not torch.equal(own, model.get_buffer(name))
    rates = {m.drop_prob for m in model.teacher.modules() if hasattr(m, 'drop_prob')}
    assert rates == {0.0}
    rates = {m.drop_prob for m in model.backbone.modules() if hasattr(m, 'drop_prob')}
    assert max(rates) > 0


def test_model_is_copied_and_merged_after_a_step():
    model = build().train()
    model.loss(crops_of())['loss'].backward()
    model.zero_grad()
    copied = copy.deepcopy(model).eval()
    merged = reparameterize(copied)
    x = crops_of()[0]
    with torch.no_grad():
        torch.testing.assert_close(merged(x)[0], copied(x)[0], rtol=1e-4, atol=1e-5)


def test_weight_norm_of_the_last_layer():
    neck = MODELS.build(MODEL['neck'])
    length = neck.last_layer.parametrizations.weight.original0
    direction = neck.last_layer.parametrizations.weight.original1
    assert length.requires_grad and (length == 1).all()
    torch.testing.assert_close(neck.last_layer.weight, F.normalize(direction, dim=1))
    fixed = MODELS.build({**MODEL['neck'], 'norm_last_layer': True})
    assert not fixed.last_layer.parametrizations.weight.original0.requires_grad


def test_class_tokens_are_joined():
    x = [torch.randn(2, 4) * 3 + 1, torch.randn(2, 4)]
    (found,) = ClassTokens()(x)
    torch.testing.assert_close(found[:, :4], F.layer_norm(x[0], (4,)))
    torch.testing.assert_close(found[:, 4:], x[1])
    tokens = torch.randn(2, 5, 4)
    (found,) = ClassTokens(patch_mean=True)([tokens])
    torch.testing.assert_close(found, torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1))


class Crops(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return dict(inputs=[c[0] * 50 + 100 for c in crops_of(1, seed=index)], data_samples=index)


def make_runner(work_dir, epochs=2, hook=None, accumulate=1, hooks=(), **kwargs):
    """A training of 4 iterations an epoch, whose weight decay rises over 4 epochs."""
    torch.manual_seed(0)
    decay = dict(type='CosineAnnealingParamScheduler', param_name='weight_decay')
    return Runner(
        build(),
        str(work_dir),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        train_dataloader=dict(
            batch_size=4,
            sampler=dict(type='DefaultSampler', shuffle=True),
            collate_fn=dict(type='default_collate'),
            dataset=Crops(),
        ),
        optim_wrapper=dict(
            optimizer=dict(type='AdamW', lr=1e-2, weight_decay=0.04),
            accumulative_counts=accumulate,
            paramwise_cfg=dict(bias_decay_mult=0.0),
        ),
        param_scheduler=[dict(decay, eta_min_ratio=10.0, end=4)],
        custom_hooks=[dict(type='DINOHook', momentum=0.9, **(hook or {})), *hooks],
        randomness=dict(seed=0),
        default_scope='mmpretrain',
        experiment_name=f'dino_{work_dir.name}_{id(work_dir)}',
        **kwargs,
    )


class Notes(Hook):
    """Notes what each iteration was done with, and may end the training after an epoch."""

    priority = 'LOWEST'

    def __init__(self, stop_after=None):
        self.seen, self.momenta, self.stop_after = [], [], stop_after

    def before_train(self, runner):
        update, name = runner.model.update_teacher, 'layers.0.attn.qkv.weight'

        def spy(momentum):
            before = runner.model.teacher.backbone.get_parameter(name).clone()
            update(momentum)
            self.momenta.append(momentum)
            student = runner.model.backbone.get_parameter(name)
            torch.testing.assert_close(
                runner.model.teacher.backbone.get_parameter(name),
                momentum * before + (1 - momentum) * student,
            )

        runner.model.update_teacher = spy

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        groups = runner.optim_wrapper.optimizer.param_groups
        settings = sorted({(group['lr'], round(group['weight_decay'], 6)) for group in groups})
        momentum = self.momenta[-1] if self.momenta else None
        epoch, loss = runner.model.head.epoch, float(outputs['loss'].detach())
        self.seen.append((runner.iter, epoch, momentum, settings, loss))

    def after_train_epoch(self, runner):
        if runner.epoch + 1 == self.stop_after:
            raise KeyboardInterrupt


@pytest.mark.parametrize('accumulate, steps', [(1, range(8)), (2, (1, 3, 5, 7))])
def test_schedules_of_a_training(accumulate, steps, tmp_path):
    notes = Notes()
    make_runner(tmp_path, accumulate=accumulate, hooks=[notes]).train()
    momenta = [1 - 0.1 * (1 + math.cos(math.pi * i / 8)) / 2 for i in steps]
    assert notes.momenta == pytest.approx(momenta)
    assert [epoch for _, epoch, *_ in notes.seen] == [0] * 4 + [1] * 4
    risen = 0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi / 4)) / 2
    assert [decay for _, decay in notes.seen[-1][3]] == [0, round(risen, 6)]


def test_last_layer_is_frozen_first_and_gradients_are_clipped(tmp_path):
    last = 'neck.last_layer.parametrizations.weight.original1'
    seen = []

    class Look(Hook):
        priority = 'LOWEST'

        def before_train(self, runner):
            start = runner.model.get_parameter(last).clone()

            def look(*_):
                norms = [p.grad.norm() for p in runner.model.parameters() if p.grad is not None]
                assert norms and max(norms) <= 1.001e-3
                seen.append((runner.epoch, torch.equal(runner.model.get_parameter(last), start)))

            runner.optim_wrapper.optimizer.register_step_post_hook(look)

    make_runner(tmp_path, hook=dict(clip=1e-3, freeze_last_layer=1), hooks=[Look()]).train()
    assert [same for epoch, same in seen if epoch == 0] == [True] * 4
    assert not any(same for epoch, same in seen if epoch == 1)


def test_resumed_training_is_the_same(tmp_path):
    """Bit for bit: student, teacher, center, optimizer, and what every schedule says."""

    def run(name, stop_after=None, **kwargs):
        notes = Notes(stop_after)
        runner = make_runner(tmp_path / name, 3, hooks=[notes], **kwargs)
        for module in runner.model.modules():
            if hasattr(module, 'drop_prob'):
                module.drop_prob = 0.0
        with pytest.raises(KeyboardInterrupt) if stop_after else nullcontext():
            runner.train()
        return notes.seen, str(tmp_path / name)

    expected, whole = run('whole')
    first, path = run('killed', stop_after=2)
    second, again = run('again', load_from=f'{path}/epoch_2.pth', resume=True)
    assert len(expected) == 12 and len(first) == 8 and first + second == expected
    a, b = (torch.load(f'{p}/epoch_3.pth', weights_only=False) for p in (whole, again))
    assert a['state_dict'].keys() == b['state_dict'].keys()
    for name, value in a['state_dict'].items():
        assert torch.equal(value, b['state_dict'][name]), name
    assert a['state_dict']['head.loss_module.center'].any()
    states = [ckpt['optimizer']['state'] for ckpt in (a, b)]
    for index, state in states[0].items():
        assert all(torch.equal(state[key], states[1][index][key]) for key in state), index


TWO_PROCESSES = """
from projects.dino.tests.test_dino import *


def step(norm, crops):
    # Gradients, and buffers (the center, statistics of student and teacher) after two steps.
    backbone = dict(MODEL['backbone'], ffn_norm_cfg=dict(type=norm), drop_path_rate=0.0)
    model = build(backbone=backbone).train()
    model.start_teacher()
    set_training_path_(model, 'folded')
    for seed in range(2):
        model.zero_grad()
        model.loss([crop.roll(seed, -1) for crop in crops])['loss'].backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return grads, dict(model.named_buffers())


grads, buffers = step('SyncBN', [c.chunk(2)[rank] for c in crops_of(8)])
for grad in grads.values():
    torch.distributed.all_reduce(grad)
torch.distributed.barrier()
with patch('torch.distributed.is_initialized', return_value=False):  # lightly averages centers
    expected = step('BN', crops_of(8))
assert buffers['head.loss_module.center'].any()
assert [n for n in buffers if 'running_mean' in n]
for key, grad in grads.items():
    torch.testing.assert_close(grad / 2, expected[0][key], rtol=1e-3, atol=1e-6)
for key, buffer in buffers.items():
    torch.testing.assert_close(buffer, expected[1][key], rtol=1e-4, atol=1e-6)
"""


@pytest.mark.slow
def test_two_processes_are_one_with_their_batches_together(tmp_path):
    """Synchronized norms, by hand, since DistributedDataParallel takes them on GPUs only."""
    run_in_two_processes(TWO_PROCESSES, tmp_path)


def test_iterations_without_epochs_are_refused(tmp_path):
    """The last layer would stay frozen for good."""
    runner = make_runner(tmp_path)
    runner._train_loop = dict(by_epoch=False, max_iters=4)
    with pytest.raises(ValueError, match='DINO trains by epochs'):
        runner.train()


@pytest.mark.parametrize('fused', [False, True])
def test_scaled_gradients_are_clipped_unscaled(fused):
    """As AmpOptimWrapper steps: the scaler unscales, or leaves it to a fused optimizer."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.0, betas=(0.0, 0.0), fused=fused)
    runner = MagicMock(iter=1, epoch=1)
    runner.model, runner.optim_wrapper.optimizer = build(), optimizer
    DINOHook(clip=3.0).before_train(runner)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10)
    scaler.scale((weight * torch.tensor([30.0, 40.0, 0.0, 0.0])).sum()).backward()
    scaler.step(optimizer)
    # What Adam has remembered of the gradient, its norm of 50 clipped to 3.
    torch.testing.assert_close(
        optimizer.state[weight]['exp_avg'], torch.tensor([1.8, 2.4, 0.0, 0.0])
    )
