"""Files agree with PyTorch, or are not written."""

import copy
import math

import pytest
import torch
from mmengine.registry import MODELS
from mmengine.structures import InstanceData

import repa_mm
from repa_mm.config import load_config
from repa_mm.export.export import (
    _Tensors,
    agreeing_onnx,
    disagreement,
    export,
    export_checkpoint,
    largest_error,
    lost_objects,
    model_to_export,
    noise,
    read,
    to_onnx,
)
from repa_mm.export.session import Session
from repa_mm.reparam import finish_schedules_

pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')

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


@pytest.mark.parametrize('name', BACKBONES)
def test_backbones_agree(name, randomize, tmp_path):
    model, sizes = deploy_form(name, randomize), sizes_of(name)
    out = tmp_path / 'model.onnx'
    assert export(model, str(out), sizes[0], len(sizes) > 1) < TOLERANCE
    assert largest_error(_Tensors(model), read(str(out)), shapes_of(sizes)) < TOLERANCE
    assert list(tmp_path.iterdir()) == [out]


NARROW = [dict(type='Widths', heads=[[4, 8]] * 6)]  # of q·k fewer dimensions than of values


@pytest.mark.parametrize(
    'options',
    [dict(pad_small_map=False), dict(fast_attention=False), dict(structures=NARROW)],
    ids=['small maps', 'stock attention', 'narrow heads'],
)
def test_swins_of_any_size(options, randomize, tmp_path):
    """Maps of one window are not shifted, whatever was traced; stock attention is replaced."""
    model = deploy_form('RePaSwinTransformer', randomize, **options)
    out = str(tmp_path / 'model.onnx')
    assert export(model, out, (256, 320), True) < TOLERANCE
    shapes = shapes_of([(224, 224), (224, 288), (448, 224), (256, 256)])
    assert largest_error(_Tensors(model), read(out), shapes) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize('name', BACKBONES)
def test_programs_and_compiled(name, randomize):
    """What PyTorch itself makes of deploy forms: torch.export, and torch.compile's default."""
    model, sizes = deploy_form(name, randomize), sizes_of(name)[:3]
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True if len(sizes) > 1 else None)
    assert largest_error(_Tensors(model), _Tensors(compiled), shapes_of(sizes)) < TOLERANCE
    if not hasattr(getattr(torch.export, 'Dim', None), 'AUTO'):
        pytest.skip('torch.export of dynamic sizes came with torch 2.6')
    auto = torch.export.Dim.AUTO
    axes = {0: auto, 2: auto, 3: auto} if len(sizes) > 1 else {}
    image = torch.randn(shapes_of(sizes)[0])
    program = torch.export.export(model, (image,), dynamic_shapes=(axes,), strict=False)
    program = _Tensors(program.module())
    assert largest_error(_Tensors(model), program, shapes_of(sizes)) < TOLERANCE


def test_the_exporter_of_tensors():
    class Double(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    content = to_onnx(Double(), (torch.ones(2, 3),), input_names=['image'])
    assert torch.equal(read(content)(torch.ones(2, 3))[0], 2 * torch.ones(2, 3))


class Drifting(torch.nn.Module):
    """Another model than was traced, from some call on."""

    def __init__(self, layer, calls):
        super().__init__()
        self.layer, self.calls, self.bias = layer, calls, None

    def forward(self, x):
        self.calls -= 1
        return self.layer(x) + 0.1 * (self.calls < 0)


def test_backbones_that_differ_are_not_written(randomize, tmp_path):
    model = deploy_form('RePaPoolFormer', randomize)
    model.patch_embed = Drifting(model.patch_embed, 1)
    out = tmp_path / 'model.onnx'
    out.write_text('old')
    with pytest.raises(ValueError, match='differs from PyTorch by .*nothing is written'):
        export(model, str(out), (64, 64))
    assert out.read_text() == 'old' and list(tmp_path.iterdir()) == [out]


# What the exporter does not know predicts something else: MMDetection's own post-processing tells.
UNKNOWN = [
    # Pixels of the image before its resizing.
    ('retinanet', {'model.test_cfg.min_bbox_size': 20}),
    ('mask_rcnn', {'model.roi_head.bbox_roi_extractor.roi_layer.pool_mode': 'max'}),
    ('mask_rcnn', {'model.test_cfg.rcnn.mask_thr_binary': -1}),
    ('upernet', {'model.data_preprocessor.test_cfg.size': (600, 600)}),
    (
        'classifier',
        {
            'model.head': dict(
                _delete_=True, type='MultiLabelLinearClsHead', num_classes=7, in_channels=192
            )
        },
    ),
]


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in UNKNOWN[1:3]]


@pytest.mark.parametrize('task, options', [UNKNOWN[0], *SLOW, *UNKNOWN[3:]])
def test_what_predicts_otherwise_is_refused(task, options, exported):
    config, checkpoint, *_ = exported(task)
    cfg = load_config(config, options)
    model = model_to_export(cfg, checkpoint)
    shape = (256, 288) if task == 'classifier' else (128, 160)
    with pytest.raises(ValueError, match='differs from PyTorch by .*nothing is written'):
        agreeing_onnx(model, noise(cfg), shape)


def test_trained_detectors_are_compared_too(exported):
    """Even if no box is above the threshold of the scores; the file has the threshold."""
    config, checkpoint, *_ = exported('mask_rcnn')
    cfg = load_config(config)
    model = model_to_export(cfg, checkpoint)
    model.roi_head.test_cfg.score_thr = 0.999
    images = noise(cfg)
    content, error = agreeing_onnx(model, images, (128, 160))
    assert error <= 0.02
    found = Session(content)(torch.zeros(2, 3, 96, 130).numpy())
    assert (found['labels'] == -1).all() and not found['boxes'].any() and not found['masks'].any()
    head = model.roi_head.bbox_head
    head.fc_reg = Drifting(head.fc_reg, 1)  # in the copy that is traced, and in the other
    with pytest.raises(ValueError, match='differs from PyTorch by'):
        agreeing_onnx(model, images, (128, 160))


def objects(**changes):
    values = dict(
        bboxes=torch.tensor([[0.0, 0.0, 9.0, 9.0], [5.0, 5.0, 20.0, 20.0]]),
        scores=torch.tensor([0.9, 0.5]),
        labels=torch.tensor([1, 2]),
        masks=torch.arange(800).reshape(2, 20, 20) % 3 == 0,
    )
    return InstanceData(**dict(values, **changes))


def test_objects_without_counterparts_are_counted():
    same = objects()
    assert lost_objects(same, same) == 0
    assert lost_objects(same, same[:1]) == 1 and lost_objects(same[:1], same) == 0
    masks = same.masks.clone()
    masks[1, :5] = False
    for changes in (
        dict(bboxes=same.bboxes + torch.tensor([[0.0], [1.0]])),
        dict(scores=same.scores + torch.tensor([0.0, 0.1])),
        dict(labels=same.labels + torch.tensor([0, 1])),
        dict(masks=masks),
        dict(scores=torch.tensor([torch.nan, 0.5])),
    ):
        assert lost_objects(same, objects(**changes)) == 1


def test_without_objects_there_is_no_share_of_them():
    class Empty:
        def test_step(self, data):
            return [DetDataSample(pred_instances=objects()[:0])]

    from mmdet.structures import DetDataSample

    assert math.isnan(disagreement(Empty(), Empty(), {}))


def test_backbones_are_an_option(exported, tmp_path, run_tool, capsys):
    config, checkpoint, *_ = exported('retinanet')
    out = str(tmp_path / 'model.onnx')
    run_tool('export.py', config, checkpoint, out, '--backbone', '--shape', '256', '320')
    assert 'backbone, compared on noise' in capsys.readouterr().out
    assert [x.shape[2:] for x in read(out)(torch.zeros(1, 3, 256, 320))][0] == (32, 40)
    run_tool('export.py', config, checkpoint, out, '--no-dynamic', '--shape', '96', '160')
    assert 'RetinaNet, compared on' in capsys.readouterr().out
    session = Session(out)
    assert session(torch.zeros(1, 3, 96, 160).numpy())['boxes'].shape[0] == 1
    with pytest.raises(Exception, match='invalid dimensions'):
        session(torch.zeros(1, 3, 128, 160).numpy())


def test_compared_on_the_configs_own_images(exported, tmp_path, monkeypatch):
    from .test_exported import write_scenes

    monkeypatch.chdir(write_scenes(tmp_path))
    config, checkpoint, *_ = exported('retinanet')
    what, error = export_checkpoint(config, checkpoint, str(tmp_path / 'model.onnx'))
    assert what == 'RetinaNet, compared on images' and error <= 0.02
