import json

import pytest
import torch

import repa_mm
from repa_mm.benchmark.output import write_json
from repa_mm.benchmark.tables import training_text
from repa_mm.benchmark.timing import Recorder
from repa_mm.benchmark.training import (
    OPTIMIZERS,
    Step,
    benchmark_training,
    synthetic_batch,
    training_forms,
)
from repa_mm.run import load_config

PACKAGE = dict(retinanet='mmdet', mask_rcnn='mmdet', upernet='mmseg')


def config(task, prefix='repa_'):
    pytest.importorskip(PACKAGE[task])
    return repa_mm.config_path(f'demo/{task}_{prefix}swin_digits.py')


def test_forms_of_a_backbone(tmp_path):
    result = benchmark_training(
        config('retinanet'),
        config('retinanet', ''),
        size='96x96',
        batch_size=2,
        steps=5,
        warmup=0,
        quiet=True,
    )
    forms = result['forms']
    assert list(forms) == ['vanilla', 'literal', 'auto', 'folded']
    assert result['reference'] == 'vanilla' and result['count'] == 5
    for form in forms.values():
        raw = form['raw']
        for step, *parts in zip(raw['total'], raw['forward'], raw['backward'], raw['optimizer']):
            assert min(parts) > 0 and sum(parts) <= step
        # Weights, gradients and two moments of each.
        assert form['peak_mib'] > 4 * form['parameters'] * 4 / 2**20
    assert forms['folded']['saved_mib'] < 0.9 * forms['literal']['saved_mib']
    assert forms['folded']['parameters'] == forms['literal']['parameters']
    write_json(result, str(tmp_path / 'out.json'))
    assert json.loads((tmp_path / 'out.json').read_text())['forms']
    text = training_text(result)
    for word in ('vanilla', 'folded', 'saved activations', '2x3x96x96'):
        assert word in text


@pytest.mark.parametrize('task', list(PACKAGE))
def test_step_of_a_whole_model(task):
    """The paths see the same targets and change the weights alike."""
    cfg = load_config(config(task), {'model.backbone.drop_path_rate': 0.0})
    # The size that mmseg's preprocessor pads to: mmseg 1.2 cannot weight the
    # classes of labels that are padded.
    batch = synthetic_batch(cfg, (160, 160), 2)
    assert batch['inputs'][0].shape == (3, 160, 160)
    models, notes = training_forms(cfg, None, True, 'cpu', ['literal', 'folded'])
    assert not notes
    losses = []
    for model in models.values():
        before = model.backbone.stages[0].blocks[0].ffn.fc2.weight.clone()
        torch.manual_seed(0)
        step = Step(model, True, OPTIMIZERS['sgd'], None, Recorder())
        losses.append(step.forward(batch).item())
        step(batch)
        after = model.backbone.stages[0].blocks[0].ffn.fc2.weight
        assert not torch.equal(before, after)
        assert all(p.grad is None for p in model.parameters())
    # Which proposals are sampled is random, in Mask R-CNN.
    if task != 'mask_rcnn':
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_classifier():
    cfg = load_config(repa_mm.config_path('repa_swin_t_in1k.py'))
    batch = synthetic_batch(cfg, (224, 224), 2)
    model = training_forms(cfg, None, True, 'cpu', ['auto'])[0]['auto']
    loss = Step(model, True, None, None, Recorder()).forward(batch)
    assert loss.requires_grad and loss.item() > 0


def test_frozen_norms_are_mentioned():
    pytest.importorskip('mmdet')
    cfg = load_config(repa_mm.config_path('retinanet_repa_swin_t.py'))
    forms, notes = training_forms(cfg, None, False, 'cpu', ['literal'])
    assert '24 BatchNorms use running statistics' in notes[0]


@pytest.mark.parametrize(
    'prefix, options, message',
    [('', {}, 'no channel-idle FFN'), ('repa_', {'model.backbone.deploy': True}, 'deploy form')],
)
def test_models_that_are_not_trained(prefix, options, message):
    with pytest.raises(ValueError, match=message):
        benchmark_training(config('retinanet', prefix), cfg_options=options, quiet=True)
    with pytest.raises(ValueError, match='channel-idle FFNs itself'):
        benchmark_training(config('retinanet'), config('retinanet'), quiet=True)
    with pytest.raises(ValueError, match='literal fails on an input of 1x3x'):
        benchmark_training(
            repa_mm.config_path('repa_swin_t_in1k.py'), size='32x32', batch_size=1, quiet=True
        )
