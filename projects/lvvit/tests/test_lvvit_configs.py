"""The configs of LV-ViTs: they train, merge, and say what the papers say."""

from pathlib import Path

import pytest
import torch

from tests import test_configs
from tests.test_configs import check_imagenet_training, load, train_on_images

S, M = (str(Path(__file__).parents[1] / 'configs' / f'repa_lvvit_{size}_in1k.py') for size in 'sm')


def test_model_trains_a_step_and_merges(relative_error):
    test_configs.test_model_trains_a_step_and_merges(S, relative_error)


@pytest.mark.parametrize('config', [S, M])
def test_imagenet_training_is_that_of_table_7(config):
    cfg = load(config)
    assert cfg.model.backbone.idle_ratio == 2 / 3
    check_imagenet_training(cfg, (1e-3, 1e-5, 0.05, 0.10), 8, 1024, 'DefaultSampler')


@pytest.mark.parametrize('maps', [True, False])
def test_imagenet_training_runs(maps, tmp_path):
    cfg = load(S)
    for i in range(8 * maps):
        scores = torch.zeros(5, 6, 6) + torch.tensor([9.0, 1, 0, 0, 0]).view(5, 1, 1)
        classes = torch.tensor([i % 2, 1 - i % 2, 2, 3, 4]).view(5, 1, 1).expand(5, 6, 6)
        path = tmp_path / 'maps' / f'n0000000{i % 2}' / f'n0000000{i % 2}_{i}.pt'
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.stack([scores, classes]).half(), path)
    cfg.model.backbone.arch = dict(
        embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=48
    )
    cfg.model.head.in_channels = 16
    load_labels = cfg.train_dataloader.dataset.pipeline[1]
    load_labels.label_root = str(tmp_path / 'maps') if maps else None
    train_on_images(cfg, tmp_path)
