import copy
import subprocess
import sys

import pytest
import torch
from mmengine.registry import MODELS

import repa_mm
from repa_mm.engine.complexity import count_macs, count_parameters
from repa_mm.models import RePaSwinTransformer, idle_channels
from repa_mm.models.surgery.idle import linear_idle_ratios
from repa_mm.reparam import ChannelIdleFFN, CheckpointError, MergedFFN

SMALL = dict(embed_dims=24, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8])

# Parameters (M) and GMACs at 224x224 with a 1000-class head: tables 1, 4 and 8
# of the paper, weights only.
COMPLEXITY = [
    ('tiny', 1.0, True, 13.2, 1.9),
    ('tiny', 0.75, False, 28.3, 4.4),
    ('tiny', 0.75, True, 17.5, 2.6),
    ('tiny', 0.5, True, 21.8, 3.3),
    ('tiny', 0.25, True, 26.1, 4.0),
    ('small', 1.0, True, 22.1, 3.7),
    ('small', 0.75, False, 49.7, 8.6),
    ('small', 0.75, True, 29.9, 5.1),
    ('small', 0.5, True, 37.8, 6.5),
    ('small', 0.25, True, 45.7, 7.9),
    ('base', 1.0, True, 38.8, 6.5),
    ('base', 0.75, False, 87.9, 15.2),
    ('base', 0.75, True, 52.8, 9.0),
    ('base', 0.5, True, 66.8, 11.5),
    ('base', 0.25, True, 80.8, 14.0),
]


@pytest.mark.parametrize('arch, idle_ratio, deploy, params, gmacs', COMPLEXITY)
def test_complexity_of_the_paper(arch, idle_ratio, deploy, params, gmacs):
    model = RePaSwinTransformer(arch, idle_ratio=idle_ratio, deploy=deploy)
    head = model.num_features[-1] * 1000
    total = count_parameters(model) + head + 1000
    assert total / 1e6 == pytest.approx(params, abs=0.0501)
    macs = count_macs(model, (3, 224, 224)) + head
    # To the last printed digit: the authors' profiler counts norms as well.
    assert round(macs / 1e9, 1) == pytest.approx(gmacs, abs=0.101)


@pytest.mark.parametrize(
    'kwargs',
    [
        dict(),
        dict(idle_ratio=0.5),
        dict(idle_ratio=0.0),
        dict(idle_ratio=1.0),
        dict(idle_schedule='linear'),
        dict(idle_ratio=[0.0, 1.0, 0.5, 0.75, 0.1, 0.9, 0.3, 0.6]),
        dict(ffn_norm_cfg=dict(type='LN')),
        dict(ffn_norm_cfg=dict(type='SyncBN'), drop_path_rate=0.3),
    ],
)
def test_merge_is_exact(kwargs, randomize, relative_error):
    model = randomize(
        RePaSwinTransformer(SMALL, out_indices=(0, 1, 2, 3), pad_small_map=True, **kwargs)
    )
    model.eval()
    deployed = repa_mm.reparameterize(model)
    x = torch.randn(2, 3, 65, 90)
    with torch.no_grad():
        for expected, actual in zip(model(x), deployed(x)):
            assert relative_error(actual, expected) < 1e-5

    built = RePaSwinTransformer(
        SMALL, out_indices=(0, 1, 2, 3), pad_small_map=True, deploy=True, **kwargs
    )
    built.load_state_dict(deployed.state_dict())
    with torch.no_grad():
        for expected, actual in zip(deployed(x), built(x)):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize('package', ['mmengine', 'mmpretrain', 'mmdet', 'mmseg'])
def test_builds_from_every_registry(package):
    registry = pytest.importorskip(f'{package}.registry').MODELS
    model = registry.build(dict(type='RePaSwinTransformer', arch=SMALL))
    assert isinstance(model, RePaSwinTransformer)
    assert MODELS.get('RePaSwinTransformer') is RePaSwinTransformer


def test_import_leaves_mmdet_and_mmseg_alone():
    code = (
        'import sys, repa_mm; from mmengine.registry import MODELS; '
        'print([m for m in ("mmdet", "mmseg") if m in sys.modules], '
        '"RePaSwinTransformer" in MODELS)'
    )
    result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert result.stdout.strip() == '[] True', result.stderr


@pytest.mark.parametrize('package', ['mmdet', 'mmseg'])
def test_imported_after_the_modules_of_others(package):
    """Those stay what they were, and ours are there."""
    pytest.importorskip(f'{package}.registry')
    code = (
        f'from {package}.utils import register_all_modules; register_all_modules()\n'
        f'from {package}.registry import MODELS\n'
        'before = MODELS.get("SwinTransformer")\n'
        'import repa_mm, repa_mm.models, repa_mm.engine\n'
        'assert MODELS.get("SwinTransformer") is before\n'
        f'assert before.__module__ == "{package}.models.backbones.swin"\n'
        'arch = dict(embed_dims=8, depths=[1] * 4, num_heads=[1] * 4)\n'
        'print(type(MODELS.build(dict(type="RePaSwinTransformer", arch=arch))).__module__)\n'
    )
    result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ['repa_mm.models.swin'], result.stderr


def test_switch_to_deploy_under_foreign_walks(randomize, relative_error):
    """mmyolo's hook calls it on everything while walking over the model."""
    model = randomize(RePaSwinTransformer(SMALL, pad_small_map=True)).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)[0]
        for layer in model.modules():
            if hasattr(layer, 'switch_to_deploy'):
                layer.switch_to_deploy()
        assert sum(isinstance(m, MergedFFN) for m in model.modules()) == 8
        assert relative_error(model(x)[0], expected) < 1e-5


@pytest.mark.parametrize('package', ['mmdet', 'mmseg'])
def test_idle_channels_in_other_swins(package, randomize, relative_error):
    """MMDetection and MMSegmentation have Swin implementations of their own."""
    pytest.importorskip(f'{package}.models')
    backbones = sys.modules[f'{package}.models.backbones']
    model = backbones.SwinTransformer(embed_dims=24, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8))
    fc1 = model.stages[0].blocks[0].ffn.layers[0][0].weight.clone()
    assert idle_channels(model, 0.5) is model
    assert torch.equal(model.stages[0].blocks[0].ffn.fc1.weight, fc1)
    randomize(model).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for expected, actual in zip(model(x), repa_mm.reparameterize(model)(x)):
            assert relative_error(actual, expected) < 1e-5


def test_train_returns_self_and_norm_eval_freezes_statistics():
    model = RePaSwinTransformer(SMALL, norm_eval=True, frozen_stages=1)
    assert model.train() is model and model.eval() is model
    model.train()
    ffns = [m for m in model.modules() if isinstance(m, ChannelIdleFFN)]
    assert not any(f.norm1.training or f.norm2.training for f in ffns)
    assert not ffns[0].training and ffns[-1].training
    assert not ffns[0].fc1.weight.requires_grad
    assert ffns[-1].norm1.weight.requires_grad


@pytest.mark.parametrize('with_cp', [False, True])
def test_every_parameter_gets_a_gradient(with_cp):
    model = RePaSwinTransformer(SMALL, with_cp=with_cp, pad_small_map=True)
    model.train()
    model(torch.randn(2, 3, 64, 64, requires_grad=True))[0].square().mean().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0
        for n, p in model.named_parameters()
        if 'qkv.bias' not in n
    )


def test_linear_schedule_of_the_released_code():
    ratios = linear_idle_ratios(0.75, 12)
    assert ratios[0] == pytest.approx(0.5 + 0.5 / 11)
    assert ratios[10] == pytest.approx(1)
    assert ratios[11] == 0
    assert all(0 <= r <= 1 for r in linear_idle_ratios(0.5, 8))


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(idle_ratio=1.5), 'idle_ratio must be a number .* 1.5'),
        (dict(idle_ratio='a lot'), "'a lot'"),
        (dict(idle_ratio=[0.5] * 7), '7 entries, but the model has 8 blocks'),
        (dict(idle_ratio=[0.5] * 7 + [2]), 'got 2'),
        (dict(idle_schedule='cosine'), "'cosine'"),
        (dict(idle_ratio=[0.5] * 8, idle_schedule='linear'), 'leaves nothing'),
        (dict(idle_ratio=0.2, idle_schedule='linear'), 'at least about 0.5'),
        (dict(ffn_norm_cfg=dict(type='GN')), "'GN'"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RePaSwinTransformer(SMALL, **kwargs)


def test_unknown_arch():
    with pytest.raises(Exception, match='huge'):
        RePaSwinTransformer('huge')


def test_idle_channels_needs_known_blocks():
    with pytest.raises(ValueError, match='Linear has no block'):
        idle_channels(torch.nn.Linear(2, 2))


def test_weights_for_windows_of_another_size(randomize):
    """Position tables are resized, head by head; everything else is as it was."""
    small = randomize(RePaSwinTransformer(SMALL, window_size=4)).eval()
    for name, table in small.named_parameters():
        if name.endswith('relative_position_bias_table'):
            # Of head h: h + 1 for each step down, and -1 for each to the right.
            y, x = (
                c.reshape(-1, 1)
                for c in torch.meshgrid(torch.arange(7.0), torch.arange(7.0), indexing='ij')
            )
            table.data = y * torch.arange(1.0, table.shape[1] + 1) - x
    weights = copy.deepcopy(small.state_dict())
    large = RePaSwinTransformer(SMALL, window_size=7, pad_small_map=True)
    large.load_state_dict(weights)
    for name, value in large.state_dict().items():
        if name.endswith('relative_position_bias_table'):
            table = value.view(13, 13, -1)[3:-3, 3:-3]  # inside
            steps = torch.arange(1.0, table.shape[-1] + 1) * 7 / 13
            assert torch.allclose(table.diff(dim=0), steps.expand(6, 7, -1), rtol=0.2)
            assert torch.allclose(table.diff(dim=1), torch.tensor(-7 / 13), rtol=0.2)
            assert torch.allclose(table[3, 3], 3 * steps * 13 / 7 - 3, atol=1e-4)
        elif not name.endswith('relative_position_index'):
            assert torch.equal(value, small.state_dict()[name])
    # And it runs.
    large.eval()(torch.rand(1, 3, 64, 96))


def test_checkpoints_of_the_wrong_kind_are_refused_even_non_strictly():
    from mmengine.runner.checkpoint import load_state_dict
    from mmpretrain.models import SwinTransformer

    training = RePaSwinTransformer(SMALL)
    deployed = repa_mm.reparameterize(training)
    vanilla = SwinTransformer(SMALL)
    deeper = RePaSwinTransformer(dict(SMALL, depths=[2, 2, 4, 2]))
    for model, source, message in [
        (training, deployed, 'is reparameterized'),
        (deployed, training, 'in the training form'),
        (training, vanilla, 'vanilla'),
        (deployed, vanilla, 'vanilla'),
        (training, deeper, 'differ in architecture'),
        (deeper, training, 'another architecture'),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load_state_dict(model, source.state_dict(), strict=False)
        # The check travels with copies.
        with pytest.raises(CheckpointError, match=message):
            copy.deepcopy(model).load_state_dict(source.state_dict())


def test_missing_pretrained_weights():
    model = RePaSwinTransformer(
        SMALL, init_cfg=dict(type='Pretrained', checkpoint='none/there.pth')
    )
    with pytest.raises(FileNotFoundError, match='there.pth.*from-scratch'):
        model.init_weights()


def test_frozen_statistics_without_pretraining_are_warned_about():
    with pytest.warns(UserWarning, match='norm_eval=False'):
        RePaSwinTransformer(SMALL, norm_eval=True).init_weights()
