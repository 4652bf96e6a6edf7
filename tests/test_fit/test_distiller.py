"""A converted model imitates the original one, without labels."""

import copy

import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner

import repa_mm
from repa_mm.engine import RelativeAdamW
from repa_mm.fit.distillation import distillation_settings
from repa_mm.reparam import ChannelIdleFFN

ARCH = dict(embed_dims=16, depths=[1, 2], num_heads=[1, 2])
BACKBONE = dict(type='SwinTransformer', arch=ARCH, out_indices=(0, 1), pad_small_map=True)
VANILLA = dict(type='ImageClassifier', backbone=BACKBONE)


@pytest.fixture
def models(tmp_path, randomize):
    """The config and the checkpoint of a student, and the checkpoint of the teacher."""
    init_default_scope('mmpretrain')
    teacher = randomize(MODELS.build(VANILLA)).eval()
    torch.save(teacher.state_dict(), tmp_path / 'vanilla.pth')
    images = [torch.randn(4, 3, 64, 64) for _ in range(2)]
    backbone, _ = repa_mm.convert_pretrained(teacher.backbone, images, 0.9)
    student = dict(
        type='ImageClassifier',
        backbone=dict(
            type='IdleChannels', backbone=BACKBONE, idle_ratio=0.9, norm_cfg=dict(type='keep')
        ),
    )
    weights = {f'backbone.{k}': v for k, v in backbone.state_dict().items()}
    for key, value in weights.items():  # worse than the fit
        if key.endswith('fc2.weight'):
            value += 0.5 * value.std() * torch.randn_like(value)
    torch.save(dict(state_dict=weights, meta={}), tmp_path / 'idle.pth')
    return student, weights, str(tmp_path / 'idle.pth'), str(tmp_path / 'vanilla.pth')


def distiller(models, **kwargs):
    student, weights, _, vanilla = models
    model = MODELS.build(
        dict(type='FeatureDistiller', student=student, teacher_checkpoint=vanilla, **kwargs)
    )
    model.load_state_dict(weights)
    return model


def at_iteration(number):
    MessageHub.get_current_instance().update_info('iter', number)


def test_the_student_alone_is_in_the_checkpoint_and_trained(models):
    model = distiller(models)
    assert model.state_dict().keys() == models[1].keys()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all('.ffn.' in name for name in trained)
    forms = [m for m in model.modules() if isinstance(m, ChannelIdleFFN)]
    assert sum(len(list(form.parameters())) for form in forms) == len(trained)
    assert not any(m.training for m in model.train().modules())
    assert not any(p.requires_grad for p in model.teacher.parameters())
    copy.deepcopy(model)


def test_first_block_by_block_then_together(models):
    model = distiller(models, block_iters=2)
    x = torch.randn(2, 3, 64, 64)
    blocks = [b for stage in model.backbone.stages for b in stage.blocks]
    with torch.no_grad():
        expected = model.teacher.extract_feat(x)
        found = model.extract_feat(x)
    share = sum(
        float((a - b).square().mean() / (b - b.mean((0, 2, 3), keepdim=True)).square().mean())
        for a, b in zip(found, expected)
    ) / len(found)
    for iteration, key, log in ((1, 'loss_blocks', {'features'}), (2, 'loss_features', set())):
        at_iteration(iteration)
        losses = model(x, None, mode='loss')
        assert set(losses) == {key} | log
        features = losses['features' if iteration == 1 else key]
        assert features.item() == pytest.approx(share, rel=1e-4)
        model.zero_grad()
        losses[key].backward()
        for block in blocks:
            assert block.ffn.fc2.weight.grad.abs().max() > 0
    # Alone, a block learns nothing from the errors of later ones.
    at_iteration(0)
    model.zero_grad()
    before = [b.ffn.fc1.weight.grad for b in blocks]
    assert before == [None] * len(blocks)
    last = blocks[-1].register_forward_hook(lambda m, args, out: out + 5)
    model(x, None, mode='loss')['loss_blocks'].backward()
    last.remove()
    wrong = blocks[0].ffn.fc1.weight.grad.clone()
    model.zero_grad()
    model(x, None, mode='loss')['loss_blocks'].backward()
    assert torch.equal(wrong, blocks[0].ffn.fc1.weight.grad)
    with torch.autocast('cpu', torch.bfloat16):
        assert model(x, None, mode='loss')['loss_blocks'].dtype == torch.float32


class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return dict(inputs=self.images[index])


def runner(models, work_dir, iters, **changes):
    student, _, checkpoint, vanilla = models
    settings = distillation_settings(iters, lr=5e-3)
    settings['default_hooks']['checkpoint']['interval'] = 10
    model = dict(type='FeatureDistiller', student=student, teacher_checkpoint=vanilla,
                 block_iters=iters // 2)  # fmt: skip
    loader = dict(batch_size=4, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
                  dataset=Images())  # fmt: skip
    return Runner(
        model=model, work_dir=str(work_dir), train_dataloader=loader,
        default_scope='mmpretrain', experiment_name=f'{work_dir.name}{iters}{len(changes)}',
        randomness=dict(seed=0), **dict(settings, load_from=checkpoint) | changes,
    )  # fmt: skip


def error(model, models):
    model.eval()
    x = Images().images
    with torch.no_grad():
        pairs = zip(model.extract_feat(x), distiller(models).teacher.extract_feat(x))
        return sum(float((a - b).square().mean() / b.var()) for a, b in pairs)


def test_under_a_runner(models, tmp_path):
    from mmengine.hooks import EMAHook

    start = error(distiller(models), models)

    run = runner(models, tmp_path / 'run', 60, custom_hooks=[EMAHook(momentum=0.5)])
    run.train()
    end = error(run.model, models)
    assert end < 0.5 * start
    saved = torch.load(tmp_path / 'run' / 'iter_60.pth', weights_only=False)
    # What is saved is a checkpoint of the student, with EMA's averages as its weights.
    model = MODELS.build(models[0])
    model.load_state_dict(saved['state_dict'])
    assert error(model, models) < 0.5 * start
    resumed = runner(models, tmp_path / 'run', 60, custom_hooks=[EMAHook(momentum=0.5)],
                     resume=True, load_from=str(tmp_path / 'run' / 'iter_60.pth'))  # fmt: skip
    resumed.train()
    assert resumed.iter == 60


def test_resumed_in_the_middle_it_ends_the_same(models, tmp_path):
    from mmengine.hooks import Hook

    class Stop(Hook):
        def after_train_iter(self, runner, *args, **kwargs):
            if runner.iter == 12:
                raise KeyboardInterrupt

    whole = runner(models, tmp_path / 'whole', 20)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        runner(models, tmp_path / 'part', 20, custom_hooks=[Stop()]).train()
    path = str(tmp_path / 'part' / 'iter_10.pth')
    resumed = runner(models, tmp_path / 'part', 20, resume=True, load_from=path)
    resumed.train()
    expected = whole.model.state_dict()
    for key, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_nothing_but_the_forms_changes(models, tmp_path):
    """Nor do statistics and what a backbone freezes."""
    student, weights, *_ = models
    student['backbone']['backbone'] = dict(BACKBONE, frozen_stages=0, with_cp=True)
    run = runner(models, tmp_path / 'run', 4)
    run.train()
    changed = {
        key for key, value in run.model.state_dict().items() if not torch.equal(value, weights[key])
    }
    assert changed and all('.ffn.fc' in key or '.ffn.norm' in key for key in changed)
    assert any('stages.0' in key for key in changed)


def test_the_data_preprocessor_beside_the_model(models, tmp_path):
    """MMPretrain's configs have it there, and the Runner hands it on."""
    augments = [dict(type='Mixup', alpha=0.5)]
    given = dict(mean=[100.0], std=[50.0], batch_augments=dict(augments=augments))
    run = runner(models, tmp_path / 'run', 4, data_preprocessor=given)
    preprocessor = run.model.data_preprocessor
    assert preprocessor.mean.item() == 100 and preprocessor.batch_augments is None
    run.train()
    assert given['batch_augments']


def test_what_cannot_be_distilled(models):
    student, _, _, vanilla = models
    config = dict(type='FeatureDistiller', teacher_checkpoint=vanilla)
    with pytest.raises(ValueError, match="needs a 'teacher'"):
        MODELS.build(dict(config, student=VANILLA))
    with pytest.raises(ValueError, match='nothing to train'):
        MODELS.build(dict(config, student=VANILLA, teacher=VANILLA))
    with pytest.raises(ValueError, match='at least 2 iterations'):
        distillation_settings(1)


def test_steps_are_relative():
    large, small = (torch.nn.Parameter(scale * torch.ones(3)) for scale in (100.0, 1e-3))
    zero = torch.nn.Parameter(torch.zeros(3))
    optimizer = RelativeAdamW([large, small, zero], lr=0.01, weight_decay=0.0)
    (large.sum() + small.sum() - zero.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(large.data, torch.full((3,), 99.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(small.data, torch.full((3,), 0.99e-3), rtol=1e-4, atol=0)
    torch.testing.assert_close(zero.data, torch.full((3,), 1e-6), rtol=1e-4, atol=0)
