"""What models with structures load, and that they are ordinary objects."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
from mmengine.config import ConfigDict
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict
from mmpretrain.models import VisionTransformer

import repa_mm
from repa_mm.models import add_structures_
from repa_mm.reparam import CheckpointError, finish_schedules_, has_training_form

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=40)
VIT = dict(arch=ARCH, img_size=32, patch_size=8, out_type='featmap')
POOL = dict(
    arch=dict(layers=[1] * 4, embed_dims=[8] * 4, mlp_ratios=[4] * 4),
    out_indices=(0,),
    frozen_stages=-1,
)


def idle(ratio, **kwargs):
    return [dict(type='ChannelIdle', idle_ratio=ratio, **kwargs)]


def build(structures, **model):
    model = model or dict(type='mmpretrain.VisionTransformer', **VIT)
    cfg = dict(type='Restructured', model=model, structures=structures)
    return MODELS.build(copy.deepcopy(cfg))


def widths(*values, **kwargs):
    return [dict(type='Widths', widths=list(values), **kwargs)]


def heads(*values):
    return [dict(type='Widths', heads=list(values))]


SWIN = dict(type='mmdet.SwinTransformer', embed_dims=16, depths=(2,), num_heads=(2,), strides=(4,))
SWIN.update(out_indices=(0,), window_size=4)
VITS = dict(type='mmseg.VisionTransformer', img_size=32, embed_dims=16, num_layers=2, num_heads=2)
CLASSIFIER = dict(
    type='mmpretrain.ImageClassifier',
    backbone=dict(type='mmpretrain.VisionTransformer', **dict(VIT, out_type='cls_token')),
    head=dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=16),
)
# A model, its structures, those of the weights, and the site where these are of something else.
FORM, WIDTH = 'it has ', 'is .*, and not '
REFUSED = [
    ({}, idle([0.75, None]), idle(0.75), 'layers.1.ffn', FORM),
    ({}, idle([None, None]), idle(0.75), 'layers.0.ffn', FORM),
    ({}, widths(20, None), idle(0.75), 'layers.0.ffn', FORM),
    ({}, widths(20, None), [], 'layers.0.ffn', WIDTH),
    ({}, widths(20, 20), widths(20, 24), 'layers.1.ffn', WIDTH),
    ({}, widths(20, None), widths(20, 24), 'layers.1.ffn', WIDTH),  # of the original width
    ({}, heads((4, 8), None), [], 'layers.0.attn', WIDTH),
    ({}, heads((4, 4), None), heads((8, 4), None), 'layers.0.attn', WIDTH),
    (SWIN, heads((4, 4), None), [], 'stages.0.blocks.0.attn.w_msa', WIDTH),
    (SWIN, widths(20, 30), [], 'stages.0.blocks.0.ffn', WIDTH),
    (VITS, heads((4, 4), (4, 4)), heads((4, 8), (4, 4)), 'layers.0.attn', WIDTH),
    (CLASSIFIER, widths(20, 20, where='backbone'), [], 'backbone.layers.0.ffn', WIDTH),
]


@pytest.mark.parametrize('deploy', [False, True])
@pytest.mark.parametrize('model, own, others, name, found', REFUSED)
def test_weights_of_something_else_are_refused(model, own, others, name, found, deploy):
    own, weights = (build(structures, **model) for structures in (own, others))
    for each in (own, weights) if deploy else ():
        if has_training_form(each):
            each.switch_to_deploy()
    for loaded in (own, copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        for load in (load_state_dict, nn.Module.load_state_dict):
            with pytest.raises(CheckpointError, match=f"ordinary .* at '{name}'.*{found}"):
                load(loaded, weights.state_dict(), strict=False)
            load(loaded, own.state_dict(), strict=True)


def test_weights_of_forms_are_refused_in_parts_that_no_structure_is_for():
    def parts(*where):
        model = nn.ModuleDict({name: VisionTransformer(**VIT) for name in ('backbone', 'encoder')})
        return add_structures_(model, [dict(type='ChannelIdle', where=name) for name in where])

    weights = parts('backbone', 'encoder').state_dict()
    with pytest.raises(CheckpointError, match="ordinary FFN at 'backbone.layers.0.ffn'"):
        parts('encoder').load_state_dict(weights, strict=False)


def test_tables_of_other_windows_are_left_to_the_codebase():
    model, other = (build(heads((4, 4), None), **dict(SWIN, window_size=n)) for n in (4, 2))
    load_state_dict(model, other.state_dict(), strict=False)


@pytest.mark.parametrize(
    'model, change, prefix',
    [(VITS, dict(img_size=48), ''), (SWIN, dict(window_size=2), 'backbone.')],
)
def test_own_weights_of_other_sizes_are_resized_as_by_the_codebase(
    model, change, prefix, tmp_path, randomize
):
    """And found behind a prefix, which MMSegmentation's ViT ignores, or without, unlike a Swin."""
    path, resized = str(tmp_path / 'own.pth'), ('pos_embed', 'bias_table')
    weights = randomize(build(idle(0.5), **model)).state_dict()
    for key, value in weights.items():
        if key.endswith(resized):
            value.normal_()

    def loaded(cfg, start):
        # Without indices, which the codebase would not load into other windows.
        torch.save({start + k: v for k, v in weights.items() if 'index' not in k}, path)
        init_cfg = ConfigDict(type='Pretrained', checkpoint=path, prefix=start or None)
        built = MODELS.build(dict(copy.deepcopy(cfg), init_cfg=init_cfg))
        built.init_weights()
        return built.state_dict()

    model = dict(model, **change)
    stock = loaded(model, prefix)
    for start in ('', 'backbone.'):
        own = loaded(dict(type='Restructured', model=model, structures=idle(0.5)), start)
        for key, value in own.items():
            expected = stock if key.endswith((*resized, 'index')) else weights
            assert torch.equal(value, expected[key]), key


def test_own_weights_of_the_same_size_are_not_resized(tmp_path, randomize):
    """Also where the grid is not square, while its area is that of a square one."""
    model = dict(VITS, img_size=(32, 128))
    own, path = build(idle(0.5), **model), str(tmp_path / 'own.pth')
    nn.init.normal_(own.pos_embed)
    torch.save(own.state_dict(), path)
    loaded = build(idle(0.5), **model, init_cfg=ConfigDict(type='Pretrained', checkpoint=path))
    loaded.init_weights()
    assert torch.equal(loaded.pos_embed, own.pos_embed)


@pytest.mark.parametrize('prefix', [None, 'backbone.'])
@pytest.mark.parametrize('start', ['', 'backbone.'])
@pytest.mark.parametrize(
    'change, message',
    [
        ({'pos_embed': None}, 'lacks pos_embed'),
        ({'layers.1.attn.qkv.bias': None}, 'lacks layers.1.attn.qkv.bias'),
        ({'ln1.weight': None, 'ln1.bias': None}, 'lacks ln1.weight, ln1.bias'),
        ({'gate.weight': torch.ones(1)}, 'has gate.weight'),
        ({'ln2.weight': torch.ones(16), 'head.fc.bias': torch.ones(5)}, None),
        ({'mask_token': torch.ones(16), 'layers.0.attn_mask': torch.ones(4)}, None),
    ],
)
def test_own_weights_must_fit(change, message, start, prefix, tmp_path, randomize):
    """In files of a backbone or of a model, with any prefix, as those of other layouts."""
    source, model, path = build(idle(0.5)), build(idle(0.5)), str(tmp_path / 'own.pth')
    weights = {**randomize(source).state_dict(), **change}
    weights = {f'{start}{k}': v for k, v in weights.items() if v is not None}
    torch.save(dict(state_dict={**weights, **({'neck.weight': 0} if start else {})}), path)
    model.init_cfg = dict(type='Pretrained', checkpoint=path, prefix=prefix)
    if message:
        with pytest.raises(CheckpointError, match=f'own.pth is of another model: it {message}'):
            model.init_weights()
        return
    model.init_weights()
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_own_weights_of_a_whole_model_may_have_another_head(tmp_path, randomize):
    weights, path = randomize(build(idle(0.5), **CLASSIFIER)).state_dict(), str(tmp_path / 'm.pth')
    weights.update({'head.fc.weight': torch.ones(5, 16), 'teacher.ln1.bias': torch.ones(1)})
    for lost in (None, 'backbone.ln1.bias'):
        torch.save({key: value for key, value in weights.items() if key != lost}, path)
        model = build(idle(0.5), **CLASSIFIER)
        model.init_cfg = dict(type='Pretrained', checkpoint=path)
        if lost:
            with pytest.raises(CheckpointError, match=f'm.pth is of another .* lacks {lost}'):
                model.init_weights()
            continue
        model.init_weights()
        for key, value in model.state_dict().items():
            assert key == 'head.fc.weight' or torch.equal(value, weights[key]), key


@pytest.mark.parametrize(
    'structures, prefix, message',
    [
        (widths(20, None), 'neck.', 'file.pth has no weights behind the prefix'),
        (widths(20, None) + idle([None, 0.75]), None, 'ordinary ones are wider'),
        (heads((4, 4), None) + idle(0.75), None, 'ordinary ones are wider'),
    ],
)
def test_ordinary_weights_that_do_not_fit_are_refused(structures, prefix, message, tmp_path):
    torch.save(build([]).state_dict(), tmp_path / 'file.pth')
    model = build(structures)
    model.init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'file.pth'), prefix=prefix)
    with pytest.raises(CheckpointError, match=message):
        model.init_weights()


def test_blocks_of_the_same_name_may_have_other_parts():
    others = nn.TransformerEncoderLayer(16, 2, 32)
    model = nn.ModuleDict(dict(backbone=VisionTransformer(**VIT), others=others))
    add_structures_(model, idle(0.75))
    model.load_state_dict(model.state_dict())


def test_other_weights_may_lack_and_have_what_torch_lets_them():
    """Loading that is not strict stays what it is where nothing is a form's."""
    model = build(idle([0.75, None]))
    weights = build(idle([0.75, None])).state_dict()
    del weights['layers.1.ffn.layers.1.bias'], weights['cls_token']
    weights['head.weight'] = torch.ones(1)
    found = model.load_state_dict(weights, strict=False)
    assert found.missing_keys == ['cls_token', 'layers.1.ffn.layers.1.bias']
    assert found.unexpected_keys == ['head.weight']
    name = 'layers.1.ffn.layers.1.weight'
    assert torch.equal(model.get_parameter(name), weights[name])


MODELS_TO_SAVE = dict(
    restructured=lambda: build(idle([0.5, None])),
    poolformer=lambda: build(idle(0.75), type='mmpretrain.PoolFormer', **POOL),
    whole=lambda: build(idle(0.75), **CLASSIFIER),
    named=lambda: MODELS.build(dict(type='RePaVisionTransformer', **VIT)),
    in_place=lambda: add_structures_(VisionTransformer(**VIT), idle(0.75)),
)
LOAD = """
import sys, torch
models, x, expected = torch.load(sys.argv[1], weights_only=False)
for name, model in models.items():
    torch.testing.assert_close(model(x)[0], expected[name], rtol=0, atol=0, msg=name)
print(list(models))
"""


def test_models_are_saved_whole_and_loaded_in_another_process(randomize, tmp_path):
    x, models = torch.randn(2, 3, 32, 32), {}
    for name, make in MODELS_TO_SAVE.items():
        models[name] = finish_schedules_(randomize(make()))
        models[name].eval()
        models[f'{name}, merged'] = repa_mm.reparameterize(models[name])
    with torch.no_grad():
        expected = {name: model(x)[0] for name, model in models.items()}
    path = tmp_path / 'models.pth'
    torch.save([models, x, expected], path)
    command = [sys.executable, '-c', LOAD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-3000:]
    assert done.stdout.endswith(f'{list(models)}\n')


def test_a_subclass_of_a_model_with_structures_is_copied_as_such():
    model = build(idle(0.75))
    model.__class__ = type('Own', (type(model),), {})
    assert type(copy.deepcopy(model)) is type(model)


@pytest.mark.parametrize('protocol', [0, pickle.HIGHEST_PROTOCOL])
def test_a_pickled_model_is_of_the_same_class_and_goes_on(protocol, randomize, relative_error):
    model = randomize(MODELS_TO_SAVE['restructured']())
    for other in (pickle.loads(pickle.dumps(model, protocol)), copy.deepcopy(model)):
        assert type(other) is type(model)
        x = torch.randn(2, 3, 32, 32)
        other.train()(x)[0].sum().backward()
        assert all(p.grad is not None for p in other.parameters())
        assert all(p.grad is None for p in model.parameters())
        other.eval()
        expected = finish_schedules_(other)(x)[0]
        other.switch_to_deploy()
        assert relative_error(other(x)[0], expected) < 1e-5
    assert has_training_form(model)
    # What it was built from is there as well.
    assert [*other.build_ordinary().state_dict()] == [*VisionTransformer(**VIT).state_dict()]
