import sys

import numpy as np
import pytest
import torch

import repa_mm
from repa_mm.benchmark.variants import (
    autocasting,
    exported_on_noise,
    latency_rows,
    noise,
    synthetic_batch,
    variants,
)
from repa_mm.config import load_config
from repa_mm.opening import open_model
from repa_mm.reparam import has_deploy_form, has_training_form

PACKAGE = dict(retinanet='mmdet', mask_rcnn='mmdet', upernet='mmseg')


def config(task, prefix='repa_', **options):
    pytest.importorskip(PACKAGE[task])
    return load_config(repa_mm.config_path(f'demo/{task}_{prefix}swin_digits.py'), options)


@pytest.mark.parametrize('task', PACKAGE)
@torch.no_grad()
def test_variants(task):
    models = variants(config(task), baseline=config(task, ''))
    assert list(models) == ['stock', 'stock with our parts', 'deploy form']
    stock, ours, deploy = models.values()
    assert has_deploy_form(deploy) and not has_training_form(deploy)
    assert not any(model.training for model in models.values())
    data = stock.data_preprocessor(synthetic_batch(stock, (160, 160), 1))
    for a, b in zip(*(model.backbone(data['inputs']) for model in (ours, stock))):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    for model in models.values():
        (found,) = model(**data, mode='predict')
        # With random scores it would be an object at every anchor.
        assert task != 'retinanet' or len(found.pred_instances) < 100


def test_a_merged_checkpoint_is_timed_as_one_in_the_training_form(tmp_path, randomize):
    cfg = config('upernet')
    path = str(tmp_path / 'merged.pth')
    torch.save(repa_mm.reparameterize(randomize(open_model(cfg))).state_dict(), path)
    (model,), (other,) = variants(cfg).values(), variants(cfg, path).values()
    assert [type(m) for m in model.modules()] == [type(m) for m in other.modules()]


def test_a_model_without_window_attention_has_no_faster_counterpart():
    cfg = load_config(repa_mm.config_path('repa_deit_t_in1k.py'))
    assert list(variants(cfg)) == ['deploy form']
    assert list(variants(cfg, baseline=cfg)) == ['stock', 'deploy form']


@pytest.mark.parametrize('suffix', ['', ':f32'])
@pytest.mark.parametrize('pixels', [False, True])
def test_exported_files(suffix, pixels, tmp_path, monkeypatch):
    onnx = pytest.importorskip('onnx')
    # The other runtime cannot be imported.
    monkeypatch.setitem(sys.modules, 'onnxruntime' if suffix else 'openvino', None)
    kind, shape = (
        (onnx.TensorProto.UINT8, (2, 8, 9, 3)) if pixels else (onnx.TensorProto.FLOAT, (2, 3, 8, 9))
    )
    names = 'image', 'y'
    values = [onnx.helper.make_tensor_value_info(name, kind, shape) for name in names]
    node = onnx.helper.make_node('Identity', names[:1], names[1:])
    graph = onnx.helper.make_graph([node], 'graph', values[:1], values[1:])
    opset = [onnx.helper.make_opsetid('', 17)]
    path = str(tmp_path / 'model.onnx')
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    if pixels:
        onnx.helper.set_model_props(model, dict(preprocessing='1', outputs='y'))
    onnx.save(model, path)
    (found,) = exported_on_noise(path + suffix, (8, 9), 2)(None).values()
    assert found.shape == shape
    if not pixels:
        assert np.allclose(found, noise((8, 9), 2))


def test_rows():
    times = {
        'stock': np.full(3, 100.0),
        'stock with our parts': np.full(3, 80.0),
        'deploy form': np.full(3, 60.0),
    }
    rows = latency_rows(times, batch_size=2)
    assert rows[0] == ['stock', '100.0', '20.00', '', '']
    assert rows[2][3:] == ['-40.0 % [-40.0, -40.0]', '-25.0 % [-25.0, -25.0]']
    assert latency_rows({'deploy form': times['deploy form']}, 1)[0][3:] == ['', '']


def test_calls_under_autocast():
    linear = torch.nn.Linear(2, 3)
    x = torch.randn(4, 2)
    assert autocasting(linear, None, 'cpu') is linear
    call = autocasting(linear, 'bfloat16', 'cpu')
    for _ in range(2):  # a context can be entered again
        y = call(x)
        assert y.dtype == torch.bfloat16 and linear.weight.dtype == torch.float32
    after = linear(x)
    assert after.dtype == torch.float32  # the context is left
    assert torch.allclose(y.float(), after, atol=0.05)
