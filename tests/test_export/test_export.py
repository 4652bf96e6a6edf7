"""Deploy forms in other formats agree with PyTorch's eager mode.

docs/deployment.md has a table of what is tested here.
"""

import copy
import runpy
import sys
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

import repa_mm
from repa_mm.export.export import _Tensors, export, largest_error, read
from repa_mm.reparam import finish_schedules
from repa_mm.run import init_model

from .conftest import skip_unless_exportable
from .test_models.test_family import FAMILY

TOLERANCE = 1e-5
# Of which the first is traced; ViTs are made for 64x64 here, and the last
# stages of the Swins have one window at 224.
SIZES = dict(
    RePaSwinTransformer=[(256, 320), (225, 470), (384, 256)],
    RePaVisionTransformer=[(96, 160), (65, 90), (160, 80)],
    RePaLVViT=[(96, 160), (65, 90), (160, 80)],
    RePaPoolFormer=[(96, 160), (65, 90), (160, 80)],
    RePaMlpMixer=[(64, 64)],
)
# Of traced graphs without guards.
MORE = dict(
    RePaSwinTransformer=[(224, 224), (224, 300), (112, 448)],
    RePaVisionTransformer=[(64, 64), (64, 96)],
    RePaLVViT=[(64, 64), (64, 96)],
)
SUFFIXES = ['.pt', '.onnx', '.pt2']


# (112, 448) has maps of one window in its third stage.
SWIN = dict(embed_dims=8, depths=[1, 1, 2, 2], num_heads=[1, 2, 2, 4])


def deploy_form(name, randomize, **kwargs):
    kwargs = dict(copy.deepcopy(FAMILY[name][1]), **kwargs)
    model = MODELS.build(dict(type=name, **kwargs))
    return repa_mm.reparameterize(randomize(model))


def shapes_of(sizes):
    return [(batch, 3, *size) for size, batch in zip(sizes, [2, 1, 3] * 2)]


CASES = [(name, suffix) for name in FAMILY for suffix in SUFFIXES]
# Symbolic algebra.
CASES = [
    pytest.param(*case, marks=pytest.mark.slow)
    if case[1] == '.pt2' and case[0] not in ('RePaVisionTransformer', 'RePaMlpMixer')
    else case
    for case in CASES
]


@pytest.mark.parametrize('name, suffix', CASES)
def test_files_agree_with_eager(name, suffix, randomize, tmp_path):
    skip_unless_exportable(suffix)
    model = deploy_form(name, randomize)
    out = str(tmp_path / f'model{suffix}')
    sizes = SIZES[name]
    assert export(model, out, sizes[0], len(sizes) > 1) < TOLERANCE
    if suffix != '.pt2':
        sizes = sizes + MORE.get(name, [])
    shapes = shapes_of(sizes) if len(sizes) > 1 else [(1, 3, *sizes[0])]
    error = largest_error(model, read(out), shapes)
    print(f'{name} {suffix} {error:.1e}')
    assert error < TOLERANCE
    assert [p.name for p in tmp_path.iterdir()] == [f'model{suffix}']


VIT = dict(
    arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32),
    img_size=64,
    patch_size=16,
    out_type='featmap',
)
STRUCTURES = dict(
    ParallelVisionTransformer=dict(VIT, num_branches=2),
    ParallelSwinTransformer=dict(arch=SWIN, num_branches=(1, 1, 2, 1)),
    ProgressiveVisionTransformer=VIT,
    ProgressiveSwinTransformer=dict(arch=SWIN),
    ExpertsVisionTransformer=VIT,
    AffineRIFormer=dict(arch=dict(layers=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32])),
)


@pytest.mark.parametrize('suffix', ['.pt', '.onnx'])
@pytest.mark.parametrize('name', STRUCTURES)
def test_other_structures(name, suffix, randomize, tmp_path):
    skip_unless_exportable(suffix)
    model = finish_schedules(randomize(MODELS.build(dict(type=name, **STRUCTURES[name]))))
    out = str(tmp_path / f'model{suffix}')
    sizes = SIZES['RePaSwinTransformer' if 'Swin' in name else 'RePaVisionTransformer']
    model = repa_mm.reparameterize(model)
    assert export(model, out, sizes[0], dynamic=True) < TOLERANCE
    assert largest_error(model, read(out), shapes_of(sizes)) < TOLERANCE


@pytest.mark.parametrize('suffix', ['.pt', '.onnx'])
@pytest.mark.parametrize('pad', [False, True])
def test_maps_of_one_window_are_not_shifted(pad, suffix, randomize, tmp_path):
    """Whatever the size that was traced."""
    skip_unless_exportable(suffix)
    model = deploy_form('RePaSwinTransformer', randomize, arch=SWIN, pad_small_map=pad)
    out = str(tmp_path / f'model{suffix}')
    export(model, out, (256, 320), True)
    sizes = [(224, 224), (224, 288), (448, 224), (256, 256)]
    assert largest_error(model, read(out), shapes_of(sizes)) < TOLERANCE


@pytest.mark.parametrize('suffix', ['.pt', '.onnx'])
def test_stock_attention_is_of_one_size(suffix, randomize, tmp_path):
    skip_unless_exportable(suffix)
    model = deploy_form('RePaSwinTransformer', randomize, fast_attention=False)
    out = tmp_path / f'model{suffix}'
    assert export(model, str(out), (96, 160)) < TOLERANCE
    before = out.read_bytes()
    with pytest.raises(ValueError, match='does not take images|differs by'):
        export(model, str(out), (96, 160), dynamic=True)
    assert out.read_bytes() == before


@pytest.mark.slow
def test_stock_attention_as_a_program(randomize, tmp_path):
    skip_unless_exportable('.pt2')
    model = deploy_form('RePaSwinTransformer', randomize, fast_attention=False)
    assert export(model, str(tmp_path / 'model.pt2'), (96, 160)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize('name', FAMILY)
@pytest.mark.skipif(
    not hasattr(getattr(getattr(torch, 'export', None), 'Dim', None), 'AUTO'),
    reason='this exporter of ONNX came with torch 2.5',
)
def test_onnx_from_a_program(name, randomize, tmp_path):
    """torch.onnx.export as it is called by default since torch 2.9."""
    pytest.importorskip('onnxscript')
    model = deploy_form(name, randomize)
    sizes = SIZES[name]
    auto = torch.export.Dim.AUTO
    axes = {0: auto, **({2: auto, 3: auto} if len(sizes) > 1 else {})}
    out = str(tmp_path / 'model.onnx')
    torch.onnx.export(
        _Tensors(model), (torch.randn(2, 3, *sizes[0]),), out, dynamo=True, dynamic_shapes=(axes,)
    )
    shapes = shapes_of(sizes + MORE.get(name, []))
    assert largest_error(model, read(out), shapes) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, kwargs',
    [*((name, {}) for name in FAMILY), ('RePaSwinTransformer', dict(fast_attention=False))],
)
def test_compiled(name, kwargs, randomize):
    """By torch's default backend, which generates code."""
    torch._dynamo.reset()
    model = deploy_form(name, randomize, **kwargs)
    # Stock attention compiles anew for every size.
    dynamic = True if len(SIZES[name]) > 1 and not kwargs else None
    compiled = torch.compile(model, dynamic=dynamic)
    with torch.no_grad():
        error = largest_error(model, compiled, shapes_of(SIZES[name]))
    print(f'{name} {kwargs} compiled {error:.1e}')
    assert error < TOLERANCE


def test_classifiers(randomize, tmp_path):
    from mmpretrain.registry import MODELS

    model = MODELS.build(
        dict(
            type='ImageClassifier',
            _scope_='mmpretrain',
            backbone=dict(
                type='RePaPoolFormer',
                **{k: v for k, v in FAMILY['RePaPoolFormer'][1].items() if k != 'out_indices'},
            ),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=5, in_channels=32),
        )
    )
    model = repa_mm.reparameterize(randomize(model))
    out = str(tmp_path / 'classifier.pt')
    assert export(model, out, (64, 96), dynamic=True) < TOLERANCE
    assert read(out)(torch.randn(3, 3, 96, 96))[0].shape == (3, 5)


def test_bad_requests(randomize, tmp_path):
    model = deploy_form('RePaPoolFormer', randomize)
    out = tmp_path / 'model.pt'
    out.write_text('old')
    with pytest.raises(ValueError, match=r"'model.pth' is none of .onnx"):
        export(model, 'model.pth')
    with pytest.raises(ValueError, match='differs by .*nothing is written'):
        export(model, str(out), (64, 64), tolerance=-1)
    # Position embeddings are not resized in what is traced at their own size.
    model = deploy_form('RePaVisionTransformer', randomize)
    with pytest.raises(ValueError, match='of other sizes, since it was traced with 64x64'):
        export(model, str(out), (64, 64), dynamic=True)
    with pytest.raises(OSError, match='cannot write'):
        export(model, '/proc/none/model.pt')
    assert out.read_text() == 'old'
    assert list(tmp_path.iterdir()) == [out]


def test_tool(tmp_path, monkeypatch, capsys):
    tool = Path(__file__).parents[1] / 'tools' / 'export.py'
    config = repa_mm.config_path('demo/retinanet_repa_swin_digits.py')
    checkpoint, out = tmp_path / 'model.pth', tmp_path / 'model.pt'
    model = init_model(config)
    torch.save(model.state_dict(), checkpoint)

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['', config, str(checkpoint), *args])
        runpy.run_path(str(tool), run_name='__main__')

    run(str(out), '--shape', '256', '320', '--dynamic')
    assert 'wrote the backbone' in capsys.readouterr().out
    deployed = repa_mm.reparameterize(model).backbone
    assert largest_error(deployed, read(str(out)), [(1, 3, 288, 352)]) < TOLERANCE
    with pytest.raises(SystemExit, match="error: the suffix of 'model.tflite'"):
        run('model.tflite')
