"""A converted model imitates the original one, without labels."""

import copy

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner

import repa_mm
from repa_mm.convert.distillation import distill_checkpoint, distillation_config
from repa_mm.models.sites import ffn_sites
from repa_mm.reparam import CheckpointError

ARCH = dict(embed_dims=16, depths=[1, 2], num_heads=[1, 2])
BACKBONE = dict(type='SwinTransformer', arch=ARCH, out_indices=(0, 1), pad_small_map=True)
VANILLA = dict(type='ImageClassifier', backbone=BACKBONE)


class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return dict(inputs=self.images[index])


@pytest.fixture
def models(tmp_path, randomize):
    """The config and the weights of a student, and the checkpoint of the teacher."""
    pytest.importorskip('mmpretrain.models')
    init_default_scope('mmpretrain')
    teacher = randomize(MODELS.build(VANILLA)).eval()
    torch.save(teacher.state_dict(), tmp_path / 'vanilla.pth')
    images = [torch.randn(4, 3, 64, 64) for _ in range(2)]
    structure = dict(type='Widths', widths=[8, 16, 16])
    student = dict(
        type='ImageClassifier',
        backbone=dict(type='Restructured', model=BACKBONE, structures=[structure]),
    )
    backbone, _ = repa_mm.convert_pretrained(teacher.backbone, images, keep=0.125)
    weights = {f'backbone.{k}': v for k, v in backbone.state_dict().items()}
    for key, value in weights.items():  # worse than the fit
        if key.endswith('ffn.layers.1.weight'):
            value += 0.5 * value.std() * torch.randn_like(value)
    torch.save(dict(state_dict=weights, meta=dict(epoch=3)), tmp_path / 'idle.pth')
    return student, weights, str(tmp_path / 'vanilla.pth')


def distiller(models):
    student, weights, vanilla = models
    model = MODELS.build(
        dict(type='FeatureDistiller', student=student, teacher_checkpoint=vanilla, teacher=VANILLA)
    )
    model.load_state_dict(weights)
    return model


def test_the_student_alone_is_in_the_checkpoint_and_trained(models):
    model = distiller(models)
    assert model.state_dict().keys() == models[1].keys()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all('.ffn.' in name for name in trained)
    ffns = [site.module for site in ffn_sites(model)]
    assert sum(len(list(ffn.parameters())) for ffn in ffns) == len(trained)
    assert not any(m.training for m in model.train().modules())
    assert not any(p.requires_grad for p in model.teacher.parameters())
    copy.deepcopy(model)


def test_the_loss_is_the_share_of_the_variance(models):
    model = distiller(models)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        pairs = list(zip(model.extract_feat(x), model.teacher.extract_feat(x)))
    share = sum(
        float((a - b).square().mean() / (b - b.mean((0, 2, 3), keepdim=True)).square().mean())
        for a, b in pairs
    )
    (loss,) = model(x, None, mode='loss').values()
    assert loss.item() == pytest.approx(share / len(pairs), rel=1e-4)
    loss.backward()
    blocks = [b for stage in model.backbone.stages for b in stage.blocks]
    assert all(b.ffn.layers[1].weight.grad.abs().max() > 0 for b in blocks)
    with torch.autocast('cpu', torch.bfloat16):
        assert model(x, None, mode='loss')['loss_features'].dtype == torch.float32


def settings(models, work_dir, iters, lr=5e-3, **changes):
    """A config without data, and the arguments of a Runner that it gives."""
    student, _, vanilla = models
    given = Config(dict(model=student, default_scope='mmpretrain', **changes))
    cfg = distillation_config(given, VANILLA, vanilla, iters)
    cfg.optim_wrapper.optimizer.lr = lr
    loader = dict(batch_size=4, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
                  dataset=Images())  # fmt: skip
    return dict(
        cfg, train_dataloader=loader, work_dir=str(work_dir),
        load_from=str(work_dir.parent / 'idle.pth'), experiment_name=f'{work_dir.name}{iters}',
    )  # fmt: skip


def runner(models, *args, hooks=(), **changes):
    options = settings(models, *args, **changes)
    options.pop('find_unused_parameters')
    options['custom_hooks'] = hooks
    return Runner(**options)


def error(model, models):
    model.eval()
    x = Images().images
    with torch.no_grad():
        pairs = zip(model.extract_feat(x), distiller(models).teacher.extract_feat(x))
        return sum(float((a - b).square().mean() / b.var()) for a, b in pairs)


def test_under_a_runner(models, tmp_path):
    start = error(distiller(models), models)
    run = runner(models, tmp_path / 'run', 40, hooks=[EMAHook(momentum=0.5)])
    run.train()
    assert error(run.model, models) < 0.6 * start
    saved = torch.load(tmp_path / 'run' / 'iter_40.pth', weights_only=False)
    # What is saved is a checkpoint of the student, with EMA's averages as its weights.
    model = MODELS.build(models[0])
    model.load_state_dict(saved['state_dict'])
    assert error(model, models) < 0.6 * start


def test_nothing_but_the_ffns_changes(models, tmp_path):
    """Nor do statistics and what a backbone freezes."""
    student, weights, _ = models
    student['backbone']['model'] = dict(BACKBONE, frozen_stages=0, with_cp=True)
    # MMPretrain's configs have the preprocessor beside the model, and the Runner hands it on.
    augments = [dict(type='Mixup', alpha=0.5)]
    given = dict(mean=[100.0], std=[50.0], batch_augments=dict(augments=augments))
    run = runner(models, tmp_path / 'run', 4, data_preprocessor=given)
    preprocessor = run.model.data_preprocessor
    assert preprocessor.mean.item() == 100 and preprocessor.batch_augments is None
    run.train()
    changed = {
        key for key, value in run.model.state_dict().items() if not torch.equal(value, weights[key])
    }
    assert changed and all('.ffn.' in key for key in changed)
    assert any('stages.0' in key for key in changed)


def test_the_teacher_needs_all_its_weights(models, tmp_path):
    weights = torch.load(models[2])
    del weights['backbone.stages.0.blocks.0.norm1.weight']
    torch.save(weights, models[2])
    with pytest.raises(CheckpointError, match='another model: it lacks .*norm1.weight'):
        distiller(models)


def test_what_diverges_is_not_kept(models, tmp_path, monkeypatch):
    student, _, vanilla = models
    Config(dict(model=student, default_scope='mmpretrain')).dump(tmp_path / 'idle.py')
    before = (tmp_path / 'idle.pth').read_bytes()

    def build(cfg):
        assert cfg.load_from == str(tmp_path / 'idle.pth')
        options = settings(models, tmp_path / 'run', 4, lr=1e20)
        options.pop('find_unused_parameters')
        options['param_scheduler'] = None
        return Runner(**options)

    monkeypatch.setattr(Runner, 'from_cfg', build)
    with pytest.raises(CheckpointError, match='distillation has failed.*not finite'):
        files = (str(tmp_path / name) for name in ('idle.py', 'idle.pth'))
        distill_checkpoint(*files, VANILLA, vanilla, 4)
    assert (tmp_path / 'idle.pth').read_bytes() == before


def test_a_whole_model_with_structures(tmp_path):
    pytest.importorskip('mmpretrain.models')
    init_default_scope('mmpretrain')
    arch = dict(depths=[1, 1, 1, 1], channels=[8, 8, 16, 16])
    augments = dict(
        mean=[0.0], std=[1.0], batch_augments=dict(augments=dict(type='Mixup', alpha=1.0))
    )
    teacher = dict(type='ImageClassifier', backbone=dict(type='ConvNeXt', arch=arch))
    teacher['data_preprocessor'] = augments
    torch.save(MODELS.build(teacher).state_dict(), tmp_path / 'vanilla.pth')
    structures = [dict(type='Widths', widths=[8, 8, 8, None])]
    student = dict(type='Restructured', model=teacher, structures=structures)
    model = MODELS.build(
        dict(
            type='FeatureDistiller',
            student=student,
            teacher_checkpoint=str(tmp_path / 'vanilla.pth'),
            teacher=teacher,
        )
    )
    assert model.data_preprocessor.batch_augments is None
    model(torch.randn(2, 3, 64, 64), None, mode='loss')['loss_features'].backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    layers = [f'.0.pointwise_conv{i}.{kind}' for i in (1, 2) for kind in ('weight', 'bias')]
    assert trained == {f'backbone.stages.{i}{name}' for i in range(4) for name in layers}
