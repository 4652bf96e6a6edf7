import pytest
import torch

import repa_mm
from repa_mm.benchmark.latency import Options
from repa_mm.benchmark.plots import plot_profile
from repa_mm.benchmark.profile import profile, timed_layers, timed_modules
from repa_mm.benchmark.tables import profile_text
from repa_mm.benchmark.timing import Recorder
from repa_mm.run import init_model

REPA = repa_mm.config_path('demo/retinanet_repa_swin_digits.py')
VANILLA = repa_mm.config_path('demo/retinanet_swin_digits.py')
pytest.importorskip('mmdet')


def test_shares_sum_to_the_whole(tmp_path):
    result = profile(
        [VANILLA, REPA],
        Options(synthetic='64x64', num_images=4, warmup=1),
        forms=('training', 'deploy'),
        quiet=True,
    )
    assert list(result['models']) == [
        'retinanet_swin_digits',
        'retinanet_repa_swin_digits, training',
        'retinanet_repa_swin_digits, deploy',
    ]
    for model in result['models'].values():
        assert set(model['layers']) == {'patch embedding', 'token mixer', 'FFN', 'rest'}
        assert sum(model['share'].values()) == pytest.approx(1)
        assert sum(v['mean'] for v in model['layers'].values()) == pytest.approx(
            model['with_timers']['mean']
        )
        assert len(model['raw']['total']['total']) == 4
    text = profile_text(result)
    assert 'share of FFN' in text and 'cost of timers' in text
    plot_profile(result, str(tmp_path / 'plot.png'))
    assert (tmp_path / 'plot.png').stat().st_size > 5000


@pytest.mark.parametrize('path', [VANILLA, REPA])
def test_layers_of_every_block(path):
    """Ten blocks: attention with its norm, and FFN with its norm."""
    backbone = init_model(path).backbone
    names = {id(m): n.rpartition('.')[2] for n, m in backbone.named_modules()}
    found = [(layer, names[id(module)]) for layer, module in timed_modules(backbone)]
    assert found.count(('patch embedding', 'patch_embed')) == 1
    for pair in (
        ('token mixer', 'attn'),
        ('token mixer', 'norm1'),
        ('FFN', 'ffn'),
        ('FFN', 'norm2'),
    ):
        assert found.count(pair) == 10
    assert len(found) == 41


def test_timers_change_nothing():
    backbone = init_model(REPA).backbone
    x = torch.randn(1, 3, 64, 64)
    recorder = Recorder()
    with torch.no_grad():
        expected = backbone(x)
        with timed_layers(backbone, recorder):
            actual, _, parts = recorder.run(backbone, x)
    assert all(map(torch.equal, actual, expected))
    assert set(parts) == {'patch embedding', 'token mixer', 'FFN', 'rest'}
    assert not any('forward' in m.__dict__ for m in backbone.modules())


def test_models_without_blocks():
    with pytest.raises(ValueError, match='Sequential has no blocks'):
        timed_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))
