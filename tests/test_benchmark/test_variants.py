import numpy as np
import pytest
import torch

import repa_mm
from repa_mm.benchmark.training import Step
from repa_mm.benchmark.variants import (
    build,
    exported,
    noise,
    synthetic_batch,
    training_variants,
    variants,
)
from repa_mm.reparam import has_deploy_form, has_training_form
from repa_mm.run import load_config

PACKAGE = dict(retinanet='mmdet', mask_rcnn='mmdet', upernet='mmseg')


def config(task, prefix='repa_', **options):
    pytest.importorskip(PACKAGE[task])
    return load_config(repa_mm.config_path(f'demo/{task}_{prefix}swin_digits.py'), options)


@pytest.mark.parametrize('task', PACKAGE)
@torch.no_grad()
def test_variants(task):
    models = variants(config(task), baseline=config(task, ''))
    assert list(models) == ['vanilla', 'vanilla, our attention', 'deploy']
    vanilla, ours, deploy = models.values()
    assert has_deploy_form(deploy) and not has_training_form(deploy)
    assert not any(model.training for model in models.values())
    data = vanilla.data_preprocessor(synthetic_batch(vanilla.cfg, (160, 160), 1))
    for a, b in zip(*(model.backbone(data['inputs']) for model in (ours, vanilla))):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    for model in models.values():
        (found,) = model(**data, mode='predict')
        # With random scores it would be an object at every anchor.
        assert task != 'retinanet' or len(found.pred_instances) < 100


def test_a_model_without_window_attention_is_its_own_vanilla():
    cfg = load_config(repa_mm.config_path('repa_deit_t_in1k.py'))
    assert list(variants(cfg)) == ['deploy']
    assert list(variants(cfg, baseline=cfg)) == ['vanilla', 'deploy']


@pytest.mark.filterwarnings('ignore:.*norm_eval=True freezes')
def test_pretrained_weights_are_not_looked_for():
    pytest.importorskip('mmdet')
    cfg = load_config(repa_mm.config_path('retinanet_repa_swin_t.py'))
    assert cfg.model.backbone.init_cfg.type == 'Pretrained'
    build(cfg)


@pytest.mark.parametrize('task', [*PACKAGE, 'classifier'])
def test_training_paths_have_one_loss(task):
    if task == 'classifier':
        options = {'model.backbone.drop_path_rate': 0.0, 'model.train_cfg': None}
        cfg = load_config(repa_mm.config_path('repa_deit_t_in1k.py'), options)
    else:
        cfg = config(task, **{'model.backbone.drop_path_rate': 0.0})
    # The size that mmseg's preprocessor pads to.
    batch = synthetic_batch(cfg, (224, 224) if task == 'classifier' else (160, 160), 2)
    losses = []
    for model in training_variants(cfg).values():
        torch.manual_seed(0)
        step = Step(model, True)
        data = model.data_preprocessor(batch, True)
        losses.append(step.loss(data).item())
        step(data)
        assert model.training and all(p.grad is None for p in model.parameters())
    assert len(losses) == 2
    if task != 'mask_rcnn':  # which samples proposals at random
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize('suffix', ['', ':f32'])
@pytest.mark.parametrize('pixels', [False, True])
def test_exported_files(suffix, pixels, tmp_path):
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('openvino' if suffix else 'onnxruntime')
    kind, shape = (
        (onnx.TensorProto.UINT8, (2, 8, 9, 3)) if pixels else (onnx.TensorProto.FLOAT, (2, 3, 8, 9))
    )
    values = [onnx.helper.make_tensor_value_info(name, kind, shape) for name in 'xy']
    node = onnx.helper.make_node('Identity', ['x'], ['y'])
    graph = onnx.helper.make_graph([node], 'graph', values[:1], values[1:])
    opset = [onnx.helper.make_opsetid('', 17)]
    path = str(tmp_path / 'model.onnx')
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    found = exported(path + suffix, (8, 9), 2)(None)[0]
    assert found.shape == shape
    if not pixels:
        assert np.allclose(found, noise((8, 9), 2))
