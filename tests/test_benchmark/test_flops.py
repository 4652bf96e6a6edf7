import pytest

import repa_mm
from repa_mm.benchmark.flops import complexity
from repa_mm.benchmark.tables import complexity_text

PACKAGE = dict(retinanet='mmdet', mask_rcnn='mmdet', upernet='mmseg')


def test_classifier_as_in_the_paper():
    result = complexity(repa_mm.config_path('repa_swin_t_in1k.py'))
    training, deploy = (result['forms'][k] for k in ('training', 'deploy'))
    assert training['parameters'][''] / 1e6 == pytest.approx(28.3, abs=0.05)
    assert deploy['parameters'][''] / 1e6 == pytest.approx(17.5, abs=0.05)
    assert deploy['macs'][''] / 1e9 == pytest.approx(2.6, abs=0.05)
    # The head: 768 channels to 1000 classes.
    assert deploy['macs']['head'] == 768 * 1000
    assert deploy['macs'][''] == deploy['macs']['backbone'] + 768 * 1000
    assert '17.48' in complexity_text(result)


@pytest.mark.parametrize('task', list(PACKAGE))
def test_whole_models_and_their_parts(task):
    pytest.importorskip(PACKAGE[task])
    paths = [repa_mm.config_path(f'demo/{task}_{p}swin_digits.py') for p in ('repa_', '')]
    # Padded to a multiple of 32, or to the size in the config.
    whole = complexity(paths[0], paths[1], shape=(60, 90))
    part = complexity(paths[0], paths[1], 'backbone', whole['input'][1:])
    assert list(whole['forms']) == ['vanilla', 'training', 'deploy']
    for name, form in whole['forms'].items():
        children = {k: v for k, v in form['macs'].items() if k}
        assert sum(children.values()) == form['macs']['']
        assert children['backbone'] == part['forms'][name]['macs']['']
        assert form['parameters']['backbone'] == part['forms'][name]['parameters']['']
        head = 'decode_head' if task == 'upernet' else 'neck'
        assert children[head] > 0
    training, deploy = (whole['forms'][k]['macs']['backbone'] for k in ('training', 'deploy'))
    assert deploy < 0.75 * training
    assert 'GMACs' in complexity_text(whole)


@pytest.mark.parametrize('shape', [(0, 3), (1, 2, 3)])
def test_bad_shapes(shape):
    with pytest.raises(ValueError, match='--shape'):
        complexity(repa_mm.config_path('repa_swin_t_in1k.py'), shape=shape)


def test_image_size_of_backbones_that_take_only_one():
    from mmpretrain.models import MlpMixer, VisionTransformer

    from repa_mm.engine.complexity import image_size

    arch = dict(embed_dims=16, num_layers=1, tokens_mlp_dims=8, channels_mlp_dims=64)
    assert image_size(MlpMixer(arch, img_size=96)) == (96, 96)
    arch = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=64)
    assert image_size(VisionTransformer(arch, img_size=96)) == (224, 224)
