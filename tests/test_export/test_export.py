"""Files agree with PyTorch, or are not written."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from mmengine.registry import MODELS

import repa_mm
from repa_mm.apis.features import relative_error, tensors
from repa_mm.export import (
    ExportedModel,
    Session,
    agreeing_onnx,
    agreement,
    example_shape,
    noise,
    resized,
    whole_onnx,
)
from repa_mm.export.exporter import to_onnx
from repa_mm.faster import trace_any_size_
from repa_mm.reparam import finish_schedules_

from .conftest import program_of

TOLERANCE = 1e-5
# Of which the first is traced; ViTs are made for 64x64 here, and the last stages of the Swins have
# one window at 224. (112, 448) has maps of one window in its third stage.
SWIN_SIZES = [(256, 320), (225, 470), (384, 256), (224, 224), (224, 300), (112, 448)]
SIZES = [(96, 160), (65, 90), (160, 80), (64, 96)]
VIT = dict(
    arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32),
    img_size=64,
    patch_size=16,
    out_type='featmap',
)
SWIN = dict(arch=dict(embed_dims=8, depths=[1, 1, 2, 2], num_heads=[1, 2, 2, 4]))
POOL = dict(layers=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32])
MIXER = dict(embed_dims=32, num_layers=2, tokens_mlp_dims=24, channels_mlp_dims=96)
BACKBONES = dict(
    RePaSwinTransformer=dict(SWIN, out_indices=(0, 1, 2, 3), pad_small_map=True),
    RePaVisionTransformer=dict(VIT, pre_norm=True, out_indices=[0, 1]),
    RePaPoolFormer=dict(
        arch=dict(POOL, mlp_ratios=[4] * 4, layer_scale_init_value=0.1), out_indices=(0, 2, 4, 6)
    ),
    RePaMlpMixer=dict(arch=MIXER, img_size=64, patch_size=16),
)


def deploy_form(name, randomize, **kwargs):
    kwargs = dict(copy.deepcopy(BACKBONES[name]), **kwargs)
    model = randomize(MODELS.build(dict(type=name, **kwargs)))
    return repa_mm.reparameterize(finish_schedules_(model))


def sizes_of(name):
    return SWIN_SIZES if 'Swin' in name else [(64, 64)] if 'Mixer' in name else SIZES


def shapes_of(sizes):
    """Batches of several sizes."""
    if len(sizes) == 1:
        return [(1, 3, *sizes[0])]
    return [(batch, 3, *size) for size, batch in zip(sizes, [2, 1, 3] * 2)]


def read(content):
    """A function that runs a backbone's file, or its content."""
    session = Session(content)
    return lambda image: [torch.from_numpy(x) for x in session(image.numpy()).values()]


@torch.no_grad()
def largest_error(model, exported, shapes):
    """The largest error of outputs on noise, relative to the largest output."""
    images = [torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in shapes]
    errors = [relative_error(tensors(exported(x)), tensors(model(x))) for x in images]
    return torch.tensor(errors).max()  # NaN if there is a NaN


def check_backbone(model, sizes):
    """Files that were traced at the first of the sizes agree at all."""
    axes = dict(image={0: 'batch', 2: 'height', 3: 'width'}) if len(sizes) > 1 else {}
    image = torch.randn(shapes_of(sizes)[0])
    traced = copy.deepcopy(model)
    trace_any_size_(traced)
    content = to_onnx(traced, (image,), input_names=['image'], dynamic_axes=axes)
    assert largest_error(model, read(content), shapes_of(sizes)) < TOLERANCE


@pytest.mark.parametrize('name', BACKBONES)
def test_backbones_agree(name, randomize):
    check_backbone(deploy_form(name, randomize), sizes_of(name))


NARROW = [dict(type='Widths', heads=[[4, 8]] * 6)]  # of q·k fewer dimensions than of values


@pytest.mark.parametrize(
    'options',
    [dict(pad_small_map=False), dict(fast_attention=False), dict(structures=NARROW)],
    ids=['small maps', 'stock attention', 'narrow heads'],
)
def test_swins_of_any_size(options, randomize):
    """Maps of one window are not shifted, whatever was traced; stock attention is replaced."""
    model = deploy_form('RePaSwinTransformer', randomize, **options)
    check_backbone(model, [(256, 320), (224, 224), (224, 288), (448, 224), (256, 256)])


def test_the_example_of_a_stock_swin_has_whole_windows():
    arch = dict(embed_dims=8, depths=[1] * 4, num_heads=[1] * 4)
    model = MODELS.build(dict(type='mmpretrain.SwinTransformer', arch=arch, window_size=12))
    assert example_shape(model) == (12 * 32 + 32, 12 * 32 + 64)


@pytest.mark.slow
@pytest.mark.parametrize('name', BACKBONES)
def test_compiled(name, randomize):
    model, sizes = deploy_form(name, randomize), sizes_of(name)[:3]
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True if len(sizes) > 1 else None)
    assert largest_error(model, compiled, shapes_of(sizes)) < TOLERANCE


class Drifting(torch.nn.Module):
    """Another model than was traced, from some call on."""

    def __init__(self, layer, calls):
        super().__init__()
        self.layer, self.calls, self.bias = layer, calls, None

    def forward(self, x):
        self.calls -= 1
        return self.layer(x) + 0.1 * (self.calls < 0)


def backbone_program():
    program = program_of('backbone')
    if 'dynamo' not in torch.onnx.export.__code__.co_varnames:  # before PyTorch 2.5
        program = program.replace(', dynamo=False', '')
    return program


def test_backbones_as_the_docs_export_them(built, tmp_path, monkeypatch):
    config, checkpoint, model = built('retinanet')
    monkeypatch.chdir(tmp_path)
    exec(backbone_program().replace('CONFIG', config).replace('CHECKPOINT', checkpoint), {})
    model = repa_mm.reparameterize(model.backbone)
    assert largest_error(model, read('backbone.onnx'), shapes_of(SWIN_SIZES)) < TOLERANCE


def test_a_wrong_file_of_a_backbone_is_not_written(tmp_path, monkeypatch, randomize):
    arch = dict(SWIN['arch'], extra_norm_every_n_blocks=0)
    swin = dict(type='mmpretrain.SwinTransformerV2', arch=arch, window_size=8, pad_small_map=True)
    model = SimpleNamespace(backbone=randomize(MODELS.build(swin)))
    model.backbone.eval()
    monkeypatch.setattr('repa_mm.apis.open_model', lambda *args, **kwargs: model)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match='not close'):
        exec(backbone_program(), {})
    assert not (tmp_path / 'backbone.onnx').exists()


def test_what_the_exporter_does_not_know_is_refused(plain):
    """MMDetection's own post-processing tells."""
    model = plain('mask_rcnn', **{'roi_head.bbox_roi_extractor.roi_layer.pool_mode': 'max'})
    with pytest.raises(ValueError, match='differs from PyTorch by .*nothing is written'):
        agreeing_onnx(model, noise(model.cfg), (128, 160))


def test_a_segmentor_that_pads_images_to_a_size(plain):
    model = plain('upernet', **{'data_preprocessor.test_cfg': dict(size=(200, 180))})
    assert agreeing_onnx(model, noise(model.cfg), (128, 160))[1] <= 1e-3


def test_images_of_floats(plain):
    """Normalized in the pipeline: they are no bytes."""
    model = plain('retinanet', **{'test_cfg.score_thr': 0.0})
    model.data_preprocessor = MODELS.build(
        dict(type='mmdet.DetDataPreprocessor', pad_size_divisor=32)
    )
    images = noise(model.cfg)
    for data in images:
        data['inputs'][0] = (data['inputs'][0].float() - 120) / 60
    small = resized(images, [(96, 96)])['inputs'][0]
    assert small.dtype == torch.float32 and small.min() < 0 and small.frac().any()
    content, error = agreeing_onnx(model, images, (64, 96), False)
    assert error <= 0.02
    assert Session(content).metadata['mean'] == '[0.0]'


@pytest.mark.parametrize(
    'task, key, swap',
    [('retinanet', 'pred_instances', 'bgr_to_rgb'), ('classifier', 'pred_score', 'to_rgb')],
)
def test_images_of_one_channel(task, key, swap, plain):
    gray = {'mean': [116.0], 'std': [57.0], swap: False}
    model = plain(task, **{'backbone.in_channels': 1, 'data_preprocessor': gray})
    images = [dict(data, inputs=[data['inputs'][0][:1]]) for data in noise(model.cfg)]
    content, error = agreeing_onnx(model, images, (64, 96))
    assert error <= 0.02
    data = resized(images, [(64, 96)])
    with torch.no_grad():
        expected = model.test_step(copy.deepcopy(data))[0]
    found = ExportedModel(content, model.data_preprocessor).test_step(data)[0]
    assert len(found.get(key)) == len(expected.get(key)) > 5


@pytest.mark.parametrize('head', [dict(thr=0.5), dict(topk=2)])
@torch.no_grad()
def test_classifiers_with_several_labels(head, plain):
    head = dict(head, type='MultiLabelLinearClsHead', num_classes=7, in_channels=64, _delete_=True)
    model = plain('classifier', head=head)
    images = noise(model.cfg)
    if 'thr' in head:  # between the scores of two images
        scores = [model.test_step(copy.deepcopy(data))[0].pred_score for data in images]
        low, high = torch.stack(scores).aminmax(dim=0)
        model.head.thr = float(((low + high) / 2)[(high - low).argmax()])
    content, error = agreeing_onnx(model, images, (64, 96))
    assert error <= 1e-4
    exported = ExportedModel(content, model.data_preprocessor)
    assert agreement(model, exported, images) > 0.999
    model.head.thr = 2.0  # the file has its own
    assert agreement(model, exported, images) < 0.9


def test_thresholds_are_compared_and_what_is_below_them(plain, monkeypatch):
    """A trained detector finds few objects: of a copy without a threshold all are compared."""
    model = plain('retinanet', **{'test_cfg.score_thr': 0.999})
    head, images = model.bbox_head, noise(model.cfg)[:1]
    content, error = agreeing_onnx(model, images, (64, 96), False)
    assert error <= 0.02
    found = Session(content)(torch.zeros(1, 3, 64, 96).numpy())
    assert (found['labels'] == -1).all() and not found['boxes'].any()

    def another_threshold(whole, *args):
        whole.predict.cfg['score_thr'] = 0.97
        return whole_onnx(whole, *args)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match='differs from PyTorch by'):
        patch.setattr('repa_mm.export.exporter.whole_onnx', another_threshold)
        agreeing_onnx(model, images, (64, 96), False)
    levels = len(head.prior_generator.strides)
    head.retina_reg = Drifting(head.retina_reg, levels)  # in the copy that is traced, and the other
    with pytest.raises(ValueError, match='differs from PyTorch by'):
        agreeing_onnx(model, images, (64, 96))


def test_images_of_one_colour(plain, monkeypatch):
    """Have equal scores, so that rounding chooses among boxes: a right file is written."""
    torch.manual_seed(1)
    model = plain('retinanet', **{'bbox_head.num_classes': 3, 'bbox_head.stacked_convs': 1})
    images = noise(model.cfg)
    for data, value in zip(images, (0, 255, 100)):
        data['inputs'][0].fill_(value)
    assert agreeing_onnx(model, images, (512, 512), False, 3)[1] <= 0.02

    def another_threshold(whole, *args):
        whole.predict.cfg['nms']['iou_threshold'] = 0.2
        return whole_onnx(whole, *args)

    monkeypatch.setattr('repa_mm.export.exporter.whole_onnx', another_threshold)
    with pytest.raises(ValueError, match='differs from PyTorch by'):
        agreeing_onnx(model, images, (512, 512), False, 3)


def test_compared_on_the_configs_own_images_or_not_written(
    plain, tmp_path, monkeypatch, run_tool, capsys
):
    from .test_runtime_model import write_scenes

    monkeypatch.chdir(tmp_path)
    model, config, checkpoint, out = plain('upernet'), 'config.py', 'model.pth', 'model.onnx'
    model.cfg.dump(config)
    torch.save(model.state_dict(), checkpoint)
    with pytest.raises(SystemExit, match='data are not there .*folder of images'):
        run_tool('export', config, checkpoint, out)
    assert not (tmp_path / out).exists()
    with pytest.raises(SystemExit, match="'model.txt' must end with .onnx"):
        run_tool('export', config, checkpoint, 'model.txt', '--unchecked')
    size = '--no-dynamic', '--shape', 64, 96
    run_tool('export', config, checkpoint, out, *size, '--unchecked')
    assert re.search(r' of \d{4,} pixels, on noise', capsys.readouterr().out)
    assert Session(out).metadata['unchecked'] == '1'
    write_scenes(tmp_path)
    run_tool('export', config, checkpoint, out, *size)
    out_text = capsys.readouterr().out
    assert 'EncoderDecoder, differs from PyTorch by ' in out_text and ' pixels, on 3' in out_text
    session = Session(out)
    assert 'unchecked' not in session.metadata
    with pytest.raises(Exception, match='invalid dimensions'):
        session(torch.zeros(1, 3, 128, 96).numpy())
