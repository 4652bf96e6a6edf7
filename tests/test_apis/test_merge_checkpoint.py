"""Merged checkpoints."""

import pytest
import torch

from repa_mm.apis import merge_checkpoint, open_model
from repa_mm.apis.merge_checkpoint import reparameterize_checkpoint
from repa_mm.io.configs import load_config
from repa_mm.io.paths import config_path
from repa_mm.reparam import CheckpointError, has_deploy_form, has_training_form, reparameterize
from tests.conftest import random_model
from tests.test_export.zoo import detr_config
from tests.test_io.test_configs import CONFIG

WHOLE = """
_base_ = {!r}
custom_imports = dict(imports=['repa_mm'], allow_failed_imports=False)
model = dict(_delete_=True, {}={{{{_base_.model}}}}, {})
"""
ENCODER = "type='Restructured', structures=[dict(type='ChannelIdle', where='encoder')]"
TEACHER = "type='SemiBaseDetector', semi_train_cfg=dict(freeze_teacher=True)"
TEACHER += ", semi_test_cfg=dict(predict_on='teacher')"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def checkpoint(config, tmp_path, randomize):
    model = randomize(random_model(load_config(config)))
    path = str(tmp_path / 'model.pth')
    torch.save(dict(meta=dict(epoch=3), state_dict=model.state_dict(), optimizer={}), path)
    return path


def test_a_merged_checkpoint(config, checkpoint, tmp_path, relative_error):
    out = str(tmp_path / 'merged.pth')
    result = reparameterize_checkpoint(config, checkpoint, out)
    assert result['error'] < 1e-5 and result['parameters'][1] < result['parameters'][0]
    saved = torch.load(out, weights_only=True)
    assert set(saved) == {'meta', 'state_dict'} and saved['meta']['epoch'] == 3
    models = [open_model(load_config(config), path) for path in (checkpoint, out)]
    assert [has_deploy_form(m) for m in models] == [False, True]
    with torch.no_grad():
        expected, found = (m(torch.ones(1, 3, 64, 64)) for m in models)
    assert relative_error(found, expected) < 1e-5
    with pytest.raises(CheckpointError, match='is reparameterized already'):
        reparameterize_checkpoint(config, out, str(tmp_path / 'twice.pth'))


@pytest.mark.parametrize('name, value', [('in_channels', 1), ('window_size', 12)])
def test_other_images(name, value, config, tmp_path, randomize):
    """Of one channel, and for windows that are larger than the last map of 224 pixels."""
    options, path = {f'model.backbone.{name}': value}, str(tmp_path / 'model.pth')
    torch.save(randomize(random_model(load_config(config, options))).state_dict(), path)
    out = str(tmp_path / 'merged.pth')
    assert reparameterize_checkpoint(config, path, out, cfg_options=options)['error'] < 1e-5


def test_a_wrong_merge_is_not_written(config, checkpoint, tmp_path):
    out = tmp_path / 'merged.pth'
    with pytest.raises(CheckpointError, match='changes the features by more than'):
        reparameterize_checkpoint(config, checkpoint, str(out), tolerance=1e-12)
    assert not out.exists()


def test_what_an_encoder_returns_is_compared(tmp_path, randomize):
    config, checkpoint = tmp_path / 'detr.py', str(tmp_path / 'detr.pth')
    config.write_text(WHOLE.format(config_path('demo/dino_detr_swin_digits.py'), 'model', ENCODER))
    model = randomize(random_model(load_config(str(config))))
    torch.save(dict(state_dict=model.state_dict()), checkpoint)
    out = str(tmp_path / 'merged.pth')
    assert 0 < reparameterize_checkpoint(str(config), checkpoint, out)['error'] < 1e-4
    merged = open_model(load_config(str(config)), out)
    assert [has_deploy_form(m) for m in (merged.encoder, merged.backbone)] == [True, False]


def test_what_a_decoder_returns_is_compared(tmp_path, randomize):
    config, checkpoint = str(tmp_path / 'detr.py'), str(tmp_path / 'detr.pth')
    cfg = detr_config('DETR')
    idle = dict(type='ChannelIdle', where='decoder')
    cfg.model = dict(type='Restructured', model=cfg.model, structures=[idle])
    cfg.dump(config)
    torch.save(
        dict(state_dict=randomize(random_model(load_config(config))).state_dict()), checkpoint
    )
    assert (
        0 < reparameterize_checkpoint(config, checkpoint, str(tmp_path / 'o.pth'))['error'] < 1e-4
    )


def test_both_networks_of_a_semi_supervised_detector_are_compared(tmp_path, randomize, monkeypatch):
    config, checkpoint = str(tmp_path / 'semi.py'), str(tmp_path / 'semi.pth')
    base = config_path('demo/retinanet_repa_swin_digits.py')
    (tmp_path / 'semi.py').write_text(WHOLE.format(base, 'detector', TEACHER))
    model = random_model(load_config(config))
    randomize(model.student)
    randomize(model.teacher, 1)
    torch.save(dict(state_dict=model.state_dict()), checkpoint)
    out = str(tmp_path / 'merged.pth')
    assert 0 < reparameterize_checkpoint(config, checkpoint, out)['error'] < 1e-4
    assert not has_training_form(open_model(load_config(config), out))

    def spoiled(model):
        merged = reparameterize(model)
        next(merged.student.parameters()).data.mul_(1.1)
        return merged

    monkeypatch.setattr(merge_checkpoint, 'reparameterize', spoiled)
    with pytest.raises(CheckpointError, match='changes the features by more than'):
        reparameterize_checkpoint(config, checkpoint, out)
