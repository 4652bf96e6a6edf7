"""Quick trainings: the batched head has RetinaNet's own losses."""

import copy

import pytest
import torch

pytest.importorskip('mmdet')
from mmdet.registry import MODELS  # noqa: E402
from mmengine.registry import init_default_scope  # noqa: E402
from mmengine.structures import InstanceData  # noqa: E402

import benchmarks.quick  # noqa: E402, F401
from repa_mm import config_path  # noqa: E402
from repa_mm.io.configs import load_config  # noqa: E402


def objects(count):
    corners = torch.rand(count, 2) * 100
    boxes = torch.cat([corners, corners + 20 + torch.rand(count, 2) * 40], 1)
    boxes[1:2] = boxes[:1]  # two objects at one place
    return InstanceData(bboxes=boxes, labels=torch.randint(10, (count,)))


def test_batched_head_has_the_losses_of_the_stock_one():
    torch.manual_seed(0)
    model = load_config(config_path('demo/retinanet_swin_clothes.py')).model
    init_default_scope('mmdet')
    cfg = dict(model.bbox_head, train_cfg=model.train_cfg, test_cfg=model.test_cfg)
    stock = MODELS.build(copy.deepcopy(cfg))
    batched = MODELS.build(dict(cfg, type='BatchedRetinaHead'))
    batched.load_state_dict(stock.state_dict())
    features = [torch.randn(4, 128, side, side) for side in (20, 10, 5)]
    given = [objects(3), objects(0), objects(6), objects(1)], [dict(img_shape=(160, 160))] * 4
    for meta in given[1]:
        meta['pad_shape'] = meta['img_shape']
    expected, found = (h.loss_by_feat(*h(features), *given) for h in (stock, batched))
    assert sum(expected['loss_bbox']) > 1
    torch.testing.assert_close(found, expected)
