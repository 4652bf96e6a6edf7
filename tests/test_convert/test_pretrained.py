"""A trained model becomes one with narrower FFNs, by the tool and its files."""

import copy
import sys
from pathlib import Path
from runpy import run_path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import MODELS

import repa_mm
from repa_mm.apis import open_model, read_images
from repa_mm.convert import Conversion
from repa_mm.convert.pretrained import convert_checkpoint, split_images
from repa_mm.io.checkpoints import load_checkpoint
from repa_mm.io.configs import load_config
from repa_mm.io.layouts import translate_file
from repa_mm.models.sites import ffn_sites
from repa_mm.reparam import CheckpointError, TrainingForm, has_deploy_form, outermost
from tests.conftest import random_model
from tests.test_configs import batch_of
from tests.test_export.conftest import write_config
from tests.test_io import test_layouts as authors
from tests.toy import make_runner

CLASSIFIER = """
default_scope = 'mmpretrain'
data_preprocessor = dict(mean=[100, 110, 120], std=[50, 60, 70], to_rgb=True, num_classes=2)
custom_imports = dict(imports='json')
resume = True
work_dir = 'work_dirs/mine'
arch = dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2])
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='SwinTransformer', img_size=64, arch=arch, out_indices=(1,),
        init_cfg=dict(type='Pretrained', checkpoint='none.pth'),
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=2, in_channels=32),
)
pipeline = [
    dict(type='LoadImageFromFile'), dict(type='Resize', scale=(64, 64)), dict(type='PackInputs')
]
test_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='CustomDataset', data_root='images', pipeline=pipeline, with_label=False),
)
test_cfg = dict()
test_evaluator = dict(type='Accuracy')
train_dataloader = dict(test_dataloader)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-3, betas=(0.8, 0.9)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with nine images of noise and a classifier's config and checkpoint, to work in."""
    monkeypatch.chdir(tmp_path)
    Path('images').mkdir()
    for i in range(9):
        noise = np.random.default_rng(i).integers(0, 256, (6, 8, 3), np.uint8)
        cv2.imwrite(f'images/{i}.png', cv2.resize(noise, (128, 96)))
    Path('classifier.py').write_text(CLASSIFIER)
    save('classifier.py', 'classifier.pth')
    return tmp_path


def save(config, checkpoint):
    """A checkpoint of a model of which nothing is at its defaults."""
    model = MODELS.build(load_config(config).model)
    state = model.state_dict()
    for key, value in state.items():
        if value.is_floating_point():
            value.nan_to_num_(0).add_(0.05 * torch.rand_like(value))
        if 'ffn' in key and value.ndim == 2:
            value.mul_(8)  # far from linear
    state['data_preprocessor.mean'] = torch.ones(3, 1, 1)  # of older versions
    torch.save(dict(state_dict=state, meta=dict(epoch=3)), checkpoint)
    return checkpoint


def original():
    model = random_model(load_config('classifier.py'))
    state = torch.load('classifier.pth')['state_dict']
    del state['data_preprocessor.mean']
    model.load_state_dict(state)
    return model


def converted(**kwargs):
    """Narrow the FFNs of the classifier."""
    kwargs = dict(num_images=3, device='cpu', parts=['ffn']) | kwargs
    return convert_checkpoint('classifier.py', 'classifier.pth', 'out/narrow.pth', **kwargs)


def test_the_files_that_are_written(folder):
    found = converted()
    cfg = load_config(found['config'])
    assert cfg.custom_imports.imports == ['json', 'repa_mm'] and not cfg.resume
    assert cfg.optim_wrapper.optimizer.betas == (0.8, 0.9) and 'custom_hooks' not in cfg
    # A training begins with the converted weights, wherever it runs, and keeps the original ones.
    assert cfg.load_from == str(folder / 'out' / 'narrow.pth') and 'work_dir' not in cfg
    assert 'none.pth' not in cfg.pretty_text
    loaded = torch.load('out/narrow.pth', weights_only=True)
    assert loaded['meta']['epoch'] == 3 and loaded['meta']['repa_mm_version']
    own = torch.load('classifier.pth')['state_dict']
    for key, value in loaded['state_dict'].items():
        assert key.startswith('backbone.') or torch.equal(value, own[key])
    model = open_model(cfg, 'out/narrow.pth')
    assert model.data_preprocessor.mean.flatten()[0] == 100
    widths = [len(site.parts().fc1.bias) for site in ffn_sites(model)]
    assert widths == [block.after[0] for block in found['report'].blocks]
    assert widths[0] < 64 and widths[1] < 128
    # MMEngine's inferencers build this one if they get the weights alone.
    alone = MODELS.build(Config.fromstring(loaded['meta']['cfg'], '.py').model)
    alone.load_state_dict(loaded['state_dict'])
    # The difference is that of the image that was not fitted to, of four.
    _, (held_out,) = split_images(read_images(load_config('classifier.py'), 'train', 4))
    image = model.data_preprocessor(held_out, False)['inputs']
    with torch.no_grad():
        (a,), (b,) = model.extract_feat(image), original().extract_feat(image)
    share = (a - b).square().sum() / b.square().sum()  # of one vector
    assert found['report'].differences[0] == pytest.approx(share.item(), rel=1e-3)
    again = converted()  # replaces its own files
    assert str(again['report']) == str(found['report'])
    Path('alone').mkdir()
    cv2.imwrite('alone/image.png', held_out['inputs'][0].permute(1, 2, 0).numpy())
    assert converted(images='alone')['held_out'] == 0


def test_the_files_of_a_channel_idle_model(folder):
    found = converted(idle_ratio=0.75, parts=None)
    cfg = load_config(found['config'])
    assert cfg.default_hooks.reparameterize.type == 'ReparameterizeHook'
    assert cfg.custom_imports.imports == ['json', 'repa_mm']
    assert cfg.load_from == str(folder / 'out' / 'narrow.pth')
    model = open_model(cfg, 'out/narrow.pth')
    assert len(list(outermost(model, TrainingForm))) == 2 and not has_deploy_form(model)
    # A training may also start from its init_cfg.
    init_cfg = dict(type='Pretrained', checkpoint='out/narrow.pth')
    started = MODELS.build({**cfg.model, 'init_cfg': init_cfg})
    started.init_weights()
    for key, value in started.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.fixture(scope='module')
def fitted(tmp_path_factory):
    """The file of a classifier whose channel-idle FFNs are fitted, and its backbone."""
    folder = tmp_path_factory.mktemp('fitted')
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)
        cv2.imwrite(str(folder / f'{i}.png'), noise)
    config, out = write_config('classifier', folder, repa=False), str(folder / 'fitted.pth')
    checkpoint = str(save(config, folder / 'ordinary.pth'))
    kwargs = dict(num_images=1, images=str(folder), device='cpu', idle_ratio=0.75)
    result = convert_checkpoint(config, checkpoint, out, **kwargs)
    return out, open_model(load_config(result['config']), out).backbone


KEEP, START = dict(type='keep'), dict(type='Pretrained', prefix='backbone.')
# The rate of the second stage is half of the others' in the backbone.
KEYS = dict(custom_keys={'backbone': dict(lr_mult=0.5), 'backbone.stages.1': dict(lr_mult=0.25)})
DECAY = dict(layer_decay_rate=0.5)
OWN_SWIN = dict(
    type='SwinTransformer',
    embed_dims=24,
    depths=(1, 1, 1, 1),
    num_heads=(1, 2, 2, 2),
    out_indices=(1, 2, 3),
    frozen_stages=1,
)
STARTS = dict(
    mmdet=('retinanet', KEYS, 0.25),
    mmdet_swin=('retinanet', KEYS, 0.25),
    mmseg=('upernet', KEYS, 0.25),
    mmpretrain=('classifier', DECAY, 0.125),
)


@pytest.mark.parametrize('name', STARTS)
def test_a_training_starts_from_a_fitted_file(name, fitted, tmp_path, recwarn, relative_error):
    """In a Runner, with a frozen stage, ``norm_eval`` and rates that depend on the layer."""
    (path, expected), (task, paramwise, rate) = fitted, STARTS[name]
    cfg = load_config(write_config(task, tmp_path))
    cfg.model.backbone.update(ffn_norm_cfg=KEEP, frozen_stages=0, window_size=7)
    if name == 'mmdet_swin':
        idle = dict(type='ChannelIdle', norm_cfg=KEEP)
        cfg.model.backbone = dict(type='Restructured', model=OWN_SWIN, structures=[idle])
    cfg.model.backbone.update(norm_eval=True, init_cfg=dict(START, checkpoint=path))
    cfg.model.update(train_cfg=cfg.model.get('train_cfg') if task != 'classifier' else None)
    if task == 'upernet':
        cfg.model.data_preprocessor.size = (64, 64)
    samples = batch_of(cfg, 224 if task == 'classifier' else 64)
    optimizer = dict(type='SGD', lr=1.0, weight_decay=0.1)
    optimizer = dict(optimizer=optimizer, paramwise_cfg=paramwise)
    if paramwise is DECAY:
        optimizer.update(constructor='LearningRateDecayOptimWrapperConstructor')
    started = []

    class Start(Hook):
        def before_train(self, runner):
            started.append(copy.deepcopy(runner.model.backbone).eval())

    loops = ('dataloader', 'cfg', 'evaluator')
    unused = [f'{split}_{what}' for split in ('val', 'test') for what in loops]
    runner = make_runner(
        tmp_path / 'work',
        [Start()],
        cfg.model,
        default_scope=cfg.default_scope,
        train_dataloader=dict(
            batch_size=2,
            dataset=[dict(inputs=x, data_samples=y) for x, y in zip(*samples.values())],
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate'),
        ),
        train_cfg=dict(by_epoch=False, max_iters=1),
        optim_wrapper=optimizer,
        default_hooks=dict(checkpoint=None),
        **dict.fromkeys(unused),
    )
    runner.train()
    (start,), x = started, torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert relative_error(start(x)[-1], expected(x)[-1]) < 1e-5
    backbone, rates = runner.model.backbone, {}
    for group in runner.optim_wrapper.param_groups:
        rates.update((id(p), group['lr']) for p in group['params'] if p.requires_grad)
    for key, value in backbone.named_parameters():
        is_frozen = key.startswith(('patch_embed', 'stages.0.', 'norm0.'))
        assert torch.equal(value, start.get_parameter(key)) == is_frozen, key
        assert (id(value) in rates) != is_frozen
        if key.startswith('stages.1.blocks'):
            assert rates[id(value)] == rate
        elif key.startswith('stages.3.blocks'):
            assert rates[id(value)] == 0.5
    forms = [form for _, form in outermost(backbone, TrainingForm)]
    assert [form.training for form in forms] == [False, True, True, True]
    assert backbone.norm_eval and not any('never estimated' in str(w.message) for w in recwarn)


@pytest.mark.parametrize('tool', ['convert_pretrained', 'repavit_to_mm'])
def test_readmes_config_starts_from_the_files_of_the_tools(tool, fitted, tmp_path, relative_error):
    """In both forms, with the prefix 'backbone.' or without, in the config and in the file."""
    readme = (Path(__file__).parents[2] / 'README.md').read_text()
    exec(readme.split('```python\n')[1].split('```')[0], lines := {})
    swin = dict(lines['model']['backbone'])
    del swin['_delete_'], swin['init_cfg']
    if tool == 'repavit_to_mm':
        weights, x, expected = authors.made('swin', 'training')
        torch.save(dict(model=weights), tmp_path / 'authors.pth')
        swin.update(arch=authors.SWIN, window_size=2)
        path = str(tmp_path / 'translated.pth')
        classifier = dict(swin, out_indices=(3,))  # whose other outputs have no norms
        translate_file(str(tmp_path / 'authors.pth'), path, classifier, 'model')
    else:
        path, backbone = fitted
        arch = dict(embed_dims=24, depths=[1] * 4, num_heads=[1, 2, 2, 2])
        swin.update(arch=arch, ffn_norm_cfg=KEEP)
        weights = {'head.weight': torch.eye(192), 'head.bias': torch.zeros(192)}
        x = torch.randn(1, 3, 224, 224)
        with torch.no_grad():
            expected = backbone(x)[-1].mean((2, 3))
    model = MODELS.build(dict(swin, init_cfg=dict(START, checkpoint=path)))
    model.init_weights()
    merged = {f'backbone.{k}': v for k, v in repa_mm.reparameterize(model).state_dict().items()}
    for deploy, state in ((False, load_checkpoint(path)['state_dict']), (True, merged)):
        bare = {key.removeprefix('backbone.'): value for key, value in state.items()}
        for given in (state, bare):
            torch.save(dict(state_dict=given), tmp_path / 'weights.pth')
            for prefix in (None, 'backbone.'):
                cfg = dict(swin, deploy=deploy)
                found = authors.logits(cfg, tmp_path / 'weights.pth', weights, x, prefix)
                assert relative_error(found, expected) < 1e-4


def test_a_channel_idle_config_is_built_before_the_fit(folder, monkeypatch):
    broken = Config(dict(model=dict(type='UnknownModel')))
    monkeypatch.setattr(Conversion, '_config', lambda *args: broken)
    with pytest.raises(KeyError, match='UnknownModel'):
        converted(idle_ratio=0.75, parts=None, progress=pytest.fail)


def test_the_tool(folder, monkeypatch, capsys):
    main = run_path(str(Path(__file__).parents[2] / 'tools' / 'convert_pretrained.py'))['main']
    command = ['tool', 'classifier.py', 'classifier.pth', 'narrow.pth', '--images', 'images']
    command += ['--num-images', '1', '--cfg-options', 'optim_wrapper.optimizer.lr=5']
    command += ['--device', 'cpu', '--budget', '1', '--parts', 'ffn']
    monkeypatch.setattr(sys, 'argv', [*command, '--idle-ratio', '0.75'])
    with pytest.raises(SystemExit, match='leave parts out'):
        main()
    monkeypatch.setattr(sys, 'argv', command)
    main()
    said = capsys.readouterr().out
    assert '2/2 backbone.stages.1.blocks.0: ' in said and 'about 0 s left' in said
    assert 'fitted on 1 images, 1 held out' in said and 'wrote narrow.pth and narrow.py' in said
    # With all channels it is the same model.
    cfg = load_config('narrow.py')
    assert cfg.optim_wrapper.optimizer.lr == 5
    found, image = open_model(cfg, 'narrow.pth'), torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        for a, b in zip(found.extract_feat(image), original().extract_feat(image)):
            assert torch.allclose(a, b, atol=1e-4 * float(b.abs().max()))


def test_images_are_held_out_from_all_over_them():
    assert split_images(range(9)) == ([*range(4), *range(5, 9)], [4])
    assert split_images(range(72))[1] == [4, 13, 22, 31, 40, 49, 58, 67]


def test_what_is_refused_leaves_nothing(folder):
    other = torch.load('classifier.pth')
    del other['state_dict']['head.fc.bias']
    torch.save(other, 'other.pth')
    Path('deeper.py').write_text(CLASSIFIER.replace('depths=[1, 1]', 'depths=[1, 2]'))
    save('deeper.py', 'deeper.pth')
    Path('broken.py').write_text(CLASSIFIER + "custom_hooks = [dict(type=float('inf'))]\n")
    before = {path.name: path.stat().st_mtime_ns for path in folder.rglob('*')}
    for config, checkpoint, out, error in (
        ('classifier.py', 'other.pth', 'idle.pth', CheckpointError),
        ('classifier.py', 'deeper.pth', 'idle.pth', CheckpointError),
        ('classifier.py', 'classifier.pth', 'classifier.pth', ValueError),
        ('classifier.py', 'other.pth', 'classifier.pt', ValueError),  # would replace the config
        ('classifier.py', 'classifier.pth', 'idle.py', ValueError),
        ('broken.py', 'classifier.pth', 'idle.pth', Exception),  # before the fit
    ):
        with pytest.raises(error):
            convert_checkpoint(config, checkpoint, out, progress=pytest.fail, device='cpu')
    assert {path.name: path.stat().st_mtime_ns for path in folder.rglob('*')} == before


LORA = """
base = dict(type='Pretrained', checkpoint='classifier.pth', prefix='backbone.')
model['backbone'] = dict(
    type='LoRAModel', module=dict(model['backbone'], init_cfg=base), alpha=4, rank=4,
    targets=[dict(type='qkv')],
)
"""


def test_a_file_that_would_open_as_another_model_is_not_written(folder):
    """The state dict of a LoRA model hides all other weights."""
    Path('lora.py').write_text(CLASSIFIER + LORA)
    save('lora.py', 'lora.pth')
    kwargs = dict(num_images=3, device='cpu', parts=['ffn'])
    with pytest.raises(ValueError, match='out/narrow.pth computes .* differs first'):
        convert_checkpoint('lora.py', 'lora.pth', 'out/narrow.pth', **kwargs)
    assert not list(Path('out').iterdir())


def test_heads_of_a_merged_repaformer(folder, randomize):
    """From a checkpoint in either form; the config says that the result is merged."""
    config = write_config('classifier', folder)
    cfg = load_config(config)
    model = randomize(random_model(cfg))
    torch.save(dict(state_dict=model.state_dict()), 'training.pth')
    deployed = repa_mm.reparameterize(model)
    torch.save(dict(state_dict=deployed.state_dict()), 'deploy.pth')
    kwargs = dict(num_images=2, images='images', device='cpu')
    with pytest.raises(ValueError, match='nothing .* can be narrowed.*it has a channel-idle FFN'):
        convert_checkpoint(config, 'deploy.pth', 'out/heads.pth', parts=['ffn'], **kwargs)
    result = convert_checkpoint(config, 'training.pth', 'out/heads.pth', budget=0.5, **kwargs)
    rows = result['report'].blocks
    assert rows and all(row.name.endswith('.attn.w_msa') for row in rows)
    assert 0.3 < result['report'].fraction <= 0.5
    narrow = open_model(load_config(result['config']), 'out/heads.pth').eval()
    assert has_deploy_form(narrow) and not list(outermost(narrow, TrainingForm))
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        found, expected = (model.backbone(x)[-1] for model in (narrow, deployed.eval()))
    assert 0 < (found - expected).square().mean() < 0.3 * expected.var()
