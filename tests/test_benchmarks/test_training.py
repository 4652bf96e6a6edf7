import pytest
import torch

import repa_mm
from benchmarks import training
from benchmarks.training import loss, step, synthetic_batch, training_variants
from repa_mm.io.configs import load_config


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn', 'upernet', 'classifier'])
def test_training_paths_have_one_loss(task):
    if task == 'classifier':
        options = {'model.backbone.drop_path_rate': 0.0, 'model.train_cfg': None}
        cfg = load_config(repa_mm.config_path('repa_deit_t_in1k.py'), options)
    else:
        path = repa_mm.config_path(f'demo/{task}_repa_swin_digits.py')
        cfg = load_config(path, {'model.backbone.drop_path_rate': 0.0})
    models, losses = list(training_variants(cfg).values()), []
    # The size that mmseg's preprocessor pads to.
    batch = synthetic_batch(models[0], (224, 224) if task == 'classifier' else (160, 160), 2)
    for model in models:
        torch.manual_seed(0)
        data = model.data_preprocessor(batch, True)
        losses.append(loss(model, data).item())
        step(model)(data)
        assert model.training and all(p.grad is None for p in model.parameters())
    assert len(losses) == (2 if training.DEVICE == 'cpu' else 3)
    if task != 'mask_rcnn':  # which samples proposals at random
        assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-3)
