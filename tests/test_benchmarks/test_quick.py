"""Quick trainings: the batched head has RetinaNet's own losses, and a training ends in time."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip('mmdet')
from mmdet.registry import MODELS  # noqa: E402
from mmengine.registry import init_default_scope  # noqa: E402
from mmengine.structures import InstanceData  # noqa: E402

from benchmarks import quick  # noqa: E402
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


def test_deadline(monkeypatch):
    now = SimpleNamespace(monotonic=lambda: now.time, time=7.0)
    monkeypatch.setattr(quick, 'time', now)
    group, loop = dict(lr=2.0), SimpleNamespace()
    runner = SimpleNamespace(optim_wrapper=SimpleNamespace(param_groups=[group]), train_loop=loop)
    hook, rates = quick.Deadline(100, warmup=0.1), []
    hook.before_train(runner)
    for seconds in (0, 5, 10, 50, 99, 101):
        now.time = 7.0 + seconds
        hook.before_train_iter(runner, 0)
        hook.after_train_iter(runner, 0)
        rates.append(group['lr'])
        assert loop.stop_training == (seconds > 100)
    assert rates[0] == rates[-1] == 0 and 0 < rates[1] < rates[2] < 2
    assert rates[3] == pytest.approx(1) and 0 < rates[4] < 0.01
