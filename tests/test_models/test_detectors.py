"""Whole detectors and segmentors, before and after the merge."""

import pytest
import torch

import repa_mm
from repa_mm.config import build_model, load_config

# All proposals are kept, so that what is compared is not how ties are broken.
CONFIGS = [
    ('retinanet_repa_swin_t.py', {'model.test_cfg.score_thr': 0.0}),
    ('mask_rcnn_repa_swin_t.py', {'model.test_cfg.rcnn.score_thr': 0.0}),
    ('upernet_repa_swin_t.py', {}),
    ('repa_swin_t_in1k.py', {}),
]


def sample(cfg, height, width):
    if cfg.default_scope == 'mmdet':
        from mmdet.structures import DetDataSample as Sample
    elif cfg.default_scope == 'mmseg':
        from mmseg.structures import SegDataSample as Sample
    else:
        from mmpretrain.structures import DataSample as Sample
    meta = dict(
        img_shape=(height, width),
        ori_shape=(height, width),
        scale_factor=(1.0, 1.0),
        pad_shape=(height, width),
    )
    return Sample(metainfo=meta)


@pytest.mark.parametrize('name, options', CONFIGS)
def test_merge_is_exact(name, options, randomize, relative_error):
    scope = (
        'mmdet'
        if 'rcnn' in name or 'retina' in name
        else 'mmseg'
        if 'upernet' in name
        else 'mmpretrain'
    )
    pytest.importorskip(scope)
    cfg = load_config(repa_mm.config_path(name), options)
    model = build_model(cfg)
    randomize(model.backbone)
    deployed = repa_mm.reparameterize(model)
    height, width = (224, 224) if scope == 'mmpretrain' else (180, 260)
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    results, features = [], []
    for m in (model, deployed):
        data = dict(inputs=[image], data_samples=[sample(cfg, height, width)])
        if scope == 'mmpretrain':
            data['inputs'] = image[None]
        data = m.data_preprocessor(data)
        with torch.no_grad():
            features.append(m.extract_feat(data['inputs']))
            results.append(m.predict(data['inputs'], data['data_samples'])[0])
    for expected, actual in zip(*features):
        assert relative_error(actual, expected) < 1e-5

    expected, actual = results
    if scope == 'mmpretrain':
        assert relative_error(actual.pred_score, expected.pred_score) < 1e-5
    elif scope == 'mmseg':
        expected, actual = expected.seg_logits.data, actual.seg_logits.data
        assert relative_error(actual, expected) < 1e-4
        assert (actual.argmax(0) == expected.argmax(0)).float().mean() > 0.999
    else:
        expected, actual = expected.pred_instances, actual.pred_instances
        assert len(expected) == len(actual) > 10
        assert torch.allclose(actual.scores, expected.scores, atol=1e-5)
        # Equal scores may change places.
        same = (actual.bboxes - expected.bboxes).abs().amax(1) < 1e-2
        assert same.float().mean() > 0.9
        if 'masks' in expected:
            assert (actual.masks[same] == expected.masks[same]).float().mean() > 0.999
