import pytest
import torch

import repa_mm
from repa_mm.io.configs import load_config
from repa_mm.measure.variants import autocasting, noise_of_size, variants
from repa_mm.reparam import has_deploy_form, has_training_form


def config(task, prefix='repa_', **options):
    return load_config(repa_mm.config_path(f'demo/{task}_{prefix}swin_digits.py'), options)


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn', 'upernet'])
@torch.no_grad()
def test_variants(task):
    models = variants(config(task), baseline=config(task, ''))
    assert list(models) == ['stock', 'stock with our parts', 'deploy form']
    stock, ours, deploy = models.values()
    assert has_deploy_form(deploy) and not has_training_form(deploy)
    assert not any(model.training for model in models.values())
    data = stock.data_preprocessor(noise_of_size(stock, (160, 160), 1))
    for a, b in zip(*(model.backbone(data['inputs']) for model in (ours, stock))):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    for model in models.values():
        (found,) = model(**data, mode='predict')
        # With random scores it would be an object at every anchor.
        assert task != 'retinanet' or len(found.pred_instances) < 100


def test_a_model_without_window_attention_has_no_faster_counterpart():
    cfg = load_config(repa_mm.config_path('repa_deit_t_in1k.py'))
    assert list(variants(cfg)) == ['deploy form']
    assert list(variants(cfg, baseline=cfg)) == ['stock', 'deploy form']


def test_calls_under_autocast():
    linear, x = torch.nn.Linear(2, 3), torch.randn(4, 2)
    assert autocasting(linear, None, 'cpu') is linear
    call = autocasting(linear, 'bfloat16', 'cpu')
    dtypes = [f(x).dtype for f in (call, call, linear)]  # it is entered again, and left
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
