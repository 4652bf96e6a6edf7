"""A mergeable structure that repa_mm does not know goes through all of it.

The structure is a pair of parallel linear layers before a BatchNorm, as in RepVGG. Its two classes
are all that it needs.
"""

import copy
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.model import BaseModel, BaseModule
from mmengine.registry import MODELS

import repa_mm
from repa_mm.export.export import export
from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    DeployForm,
    TrainingForm,
    calibrate_batch_norm,
    check_state_dict,
    is_reparameterized,
    reparameterize,
)
from repa_mm.run import init_model, runner_for_testing
from tests.conftest import skip_unless_exportable
from tests.test_engine.toy import KeepLogits, Transpose, make_runner

ROOT = Path(__file__).parents[1]


class Pair(TrainingForm):
    label = 'pair of linear layers'

    def __init__(self, dims):
        super().__init__()
        self.a, self.b = nn.Linear(dims, dims), nn.Linear(dims, dims)
        self.norm = nn.BatchNorm1d(dims)

    def forward(self, x):
        y = self.a(x) + self.b(x)
        return self.norm(y.flatten(0, -2)).view(y.shape)

    def merge(self):
        norm = self.norm
        scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
        weight = scale[:, None] * (self.a.weight.double() + self.b.weight.double())
        bias = self.a.bias.double() + self.b.bias.double() - norm.running_mean.double()
        merged = MergedPair(len(bias)).to(self.a.weight)
        merged.fc.weight.copy_(weight)
        merged.fc.bias.copy_(scale * bias + norm.bias.double())
        return merged


class MergedPair(DeployForm):
    label = 'pair of linear layers'

    def __init__(self, dims):
        super().__init__()
        self.fc = nn.Linear(dims, dims)

    def inference(self, x):
        return self.fc(x)


class Twice(TrainingForm):
    """Two forms, one after the other, as one form around them."""

    label = 'two forms'

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))

    def merge(self):
        # The first is left as it is, for who walks over the model.
        return MergedTwice(self.first, self.second.merge())


class MergedTwice(DeployForm):
    label = 'two forms'

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def inference(self, x):
        return self.second(self.first(x))


@MODELS.register_module()
class PairBackbone(BaseModule):
    """Three maps, each behind a convolution and a pair."""

    def __init__(self, channels=16, deploy=False):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(inputs, channels, stride, stride)
            for inputs, stride in ((3, 8), (channels, 2), (channels, 2))
        )
        self.pairs = nn.ModuleList(Pair(channels) for _ in self.convs)
        if deploy:
            reparameterize(self, inplace=True)

    def forward(self, x):
        outs = []
        for conv, pair in zip(self.convs, self.pairs):
            x = conv(x).relu()
            x = pair(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            outs.append(x)
        return tuple(outs)


@MODELS.register_module()
class PairClassifier(BaseModel):
    def __init__(self, deploy=False):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(2), Transpose(), Pair(8), Pair(8)
        )
        self.head = nn.Linear(8, 2)
        if deploy:
            reparameterize(self.backbone, inplace=True)

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(torch.stack(inputs)).mean(1))
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits, torch.as_tensor(labels)))
        return list(logits)


def count(model, kind):
    return sum(isinstance(m, kind) for m in model.modules())


def outputs(model, x):
    with torch.no_grad():
        y = model(x)
    return y if isinstance(y, tuple) else (y,)


def no_file_of_the_package_knows_it():
    return not any(
        'Pair' in path.read_text() and 'MergedPair' in path.read_text()
        for path in (ROOT / 'repa_mm').rglob('*.py')
        if path.name != 'forms.py'  # whose docstring has such an example
    )


@pytest.fixture
def config(tmp_path):
    """A RetinaNet with the backbone of this file."""
    pytest.importorskip('mmdet')
    path = tmp_path / 'pairs.py'
    path.write_text(
        f'_base_ = {repa_mm.config_path("demo/retinanet_repa_swin_digits.py")!r}\n'
        'custom_imports = dict(imports=["repa_mm", "tests.test_contract"])\n'
        'model = dict(\n'
        '    backbone=dict(_delete_=True, type="PairBackbone"),\n'
        '    neck=dict(in_channels=[16, 16, 16], out_channels=16),\n'
        '    bbox_head=dict(in_channels=16, feat_channels=16))\n'
    )
    return str(path)


@pytest.fixture
def checkpoints(config, tmp_path, randomize):
    """A checkpoint in each form."""
    model = randomize(init_model(config))
    merged = reparameterize(model, fuse_conv_bn=False)
    for name, m in (('training', model), ('deploy', merged)):
        torch.save(dict(meta={}, state_dict=m.state_dict()), tmp_path / f'{name}.pth')
    return {name: str(tmp_path / f'{name}.pth') for name in ('training', 'deploy')}


def call(monkeypatch, tool, *arguments):
    monkeypatch.setattr(sys, 'argv', [tool, *map(str, arguments)])
    runpy.run_path(str(ROOT / f'tools/{tool}.py'), run_name='__main__')


@pytest.mark.parametrize('inplace', [False, True])
def test_merges_in_a_backbone_and_in_a_detector(inplace, config, randomize, relative_error):
    assert no_file_of_the_package_knows_it()
    x = torch.randn(2, 3, 64, 96)
    for model in (PairBackbone(), init_model(config)):
        model = randomize(model).eval()
        backbone = getattr(model, 'backbone', model)
        expected = outputs(backbone, x)
        deployed = reparameterize(model, inplace=inplace)
        assert (deployed is model) == inplace
        assert count(deployed, MergedPair) == 3 and not count(deployed, Pair)
        assert count(model, Pair) == 3 * (not inplace)
        for a, b in zip(outputs(getattr(deployed, 'backbone', deployed), x), expected):
            assert relative_error(a, b) < 1e-5


def test_switch_to_deploy_and_the_guards_of_every_form(randomize, relative_error):
    pair = randomize(Pair(8)).eval()
    x = torch.randn(2, 5, 8)
    expected = pair(x)
    pair.a.register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(ValueError, match=r"'a' \(Linear\) has a forward hook"):
        pair.merge()
    pair.a._forward_hooks.clear()
    pair.b.weight.data[0, 0] = float('nan')
    with pytest.raises(ValueError, match='b.weight has 1 value.*not finite'):
        reparameterize(nn.Sequential(pair))
    pair = randomize(Pair(8)).eval()
    expected = pair(x)
    with torch.inference_mode():
        pair.switch_to_deploy()
    assert relative_error(pair(x), expected) < 1e-5
    with pytest.raises(RuntimeError, match='MergedPair is in its deploy form'):
        pair.train()(x)


@pytest.mark.parametrize('ema', [False, True])
def test_tested_through_the_hook(ema, tmp_path, relative_error):
    hooks = [dict(type='ReparameterizeHook')]
    if ema:
        hooks.append(dict(type='EMAHook', momentum=0.3))
    runner = make_runner(tmp_path, hooks, model=dict(type='PairClassifier'))
    runner.train()
    model, before = runner.model, copy.deepcopy(runner.model.state_dict())
    tested = copy.deepcopy(model)
    if ema:  # what is tested is the average
        (hook,) = [h for h in runner.hooks if type(h).__name__ == 'EMAHook']
        for own, average in zip(tested.parameters(), hook.ema_model.module.parameters()):
            own.data.copy_(average)
        assert not torch.equal(tested.head.weight, model.head.weight)
    tested.eval()
    with torch.no_grad():
        expected = torch.cat(
            [torch.stack(tested.test_step(batch)) for batch in runner.test_dataloader]
        )
    seen = []
    hook = MergedPair.forward

    def forward(self, x):
        seen.append(self)
        return hook(self, x)

    MergedPair.forward = forward
    try:
        runner.test_loop.run()  # runner.test() would begin the average anew
    finally:
        MergedPair.forward = hook
    assert seen  # the deploy form was what was tested
    assert relative_error(KeepLogits.logits, expected) < 1e-5
    assert runner.model is model
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_wrong_form_is_refused_on_loading(config, checkpoints, tmp_path):
    training = init_model(config)
    deployed = init_model(config, form='deploy')
    weights = {name: torch.load(path)['state_dict'] for name, path in checkpoints.items()}
    for model in (training, deployed):
        assert is_reparameterized(model, weights['deploy'])
        assert not is_reparameterized(model, weights['training'])
    check_state_dict(training, weights['training'])
    check_state_dict(deployed, weights['deploy'])
    merged = r'reparameterized \(merged pair of linear layers at .backbone.pairs.0'
    with pytest.raises(CheckpointError, match=merged):
        check_state_dict(training, weights['deploy'])
    with pytest.raises(CheckpointError, match='in the training form .*backbone.pairs.0'):
        check_state_dict(deployed, weights['training'])
    deeper = {
        **weights['training'],
        **{k.replace('pairs.2', 'pairs.7'): v for k, v in weights['training'].items()},
    }
    with pytest.raises(CheckpointError, match='has backbone.pairs.7 and the model 3 of these'):
        check_state_dict(training, deeper)
    with pytest.raises(CheckpointError, match='reparameterized'):
        init_model(config, checkpoints['deploy'])
    assert count(init_model(config, checkpoints['deploy'], form='deploy'), MergedPair) == 3


@pytest.mark.parametrize('ready', ['training', 'deploy'])
def test_the_runner_refuses_the_wrong_form(ready, tmp_path):
    """Of a model that was built in the other one."""
    model = PairClassifier()
    other = reparameterize(model) if ready == 'training' else model
    path = tmp_path / 'other.pth'
    torch.save(dict(meta={}, state_dict=other.state_dict()), path)
    runner = make_runner(
        tmp_path / 'work',
        [dict(type='ReparameterizeHook')],
        model=dict(type='PairClassifier', deploy=ready == 'deploy'),
        load_from=str(path),
    )
    message = 'is reparameterized' if ready == 'training' else 'in the training form'
    with pytest.raises(CheckpointError, match=message):
        (runner.train if ready == 'training' else runner.test)()


def test_both_forms_of_a_checkpoint_are_tested(config, checkpoints, tmp_path, monkeypatch):
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    from repa_mm.demo.dataset import write_digit_scenes

    write_digit_scenes(str(tmp_path / 'data/demo'), num_train=1, num_val=2, size=64)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Config, 'pretty_text', '# a config')
    for form in ('training', 'deploy'):
        runner = runner_for_testing(config, checkpoints[form], str(tmp_path / f'work_{form}'))
        assert 'coco/bbox_mAP' in runner.test()


def test_calibrates(randomize, relative_error):
    model = randomize(PairBackbone())
    batches = [torch.randn(n, 3, 64, 64) * n for n in (2, 3)]
    reference = copy.deepcopy(model)
    reference.eval()
    pair = reference.pairs[0]
    pair.train()
    seen = []
    pair.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    for batch in batches:
        reference(batch)
    assert calibrate_batch_norm(model, batches) == 2
    seen = torch.cat(seen)
    assert relative_error(model.pairs[0].norm.running_mean, seen.mean(0)) < 1e-5
    assert relative_error(model.pairs[0].norm.running_var, seen.var(0)) < 1e-5


def test_written_by_the_tool(config, checkpoints, tmp_path, monkeypatch):
    out = tmp_path / 'merged.pth'
    call(monkeypatch, 'reparameterize', config, checkpoints['training'], out)
    written = torch.load(out)['state_dict']
    expected = torch.load(checkpoints['deploy'])['state_dict']
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(written[key], value, atol=1e-6), key


def test_counted_by_the_tool(config, tmp_path, monkeypatch):
    out = tmp_path / 'counted.json'
    call(monkeypatch, 'get_flops', config, '--part', 'backbone', '--shape', 64, 64, '--out', out)
    forms = json.loads(out.read_text())['forms']
    tokens, pair = 64 + 16 + 4, 16 * 16
    found = {name: form['macs'][''] for name, form in forms.items()}
    training, deploy = found['training'], found['deploy']
    assert training - deploy == tokens * pair
    assert forms['training']['parameters'][''] - forms['deploy']['parameters'][''] == 3 * (
        pair + 16 + 2 * 16
    )


@pytest.mark.parametrize('suffix', ['.pt', '.pt2', '.onnx'])
def test_exported(suffix, tmp_path, randomize):
    skip_unless_exportable(suffix)
    model = reparameterize(randomize(PairBackbone()))
    path = tmp_path / f'pairs{suffix}'
    assert export(model, str(path), (64, 96)) < 1e-5
    assert path.is_file()


@pytest.mark.parametrize('inplace', [False, True])
@pytest.mark.parametrize(
    'build',
    [
        lambda: Twice(Pair(8), Pair(8)),
        lambda: Twice(ChannelIdleFFN(8, 32), ChannelIdleFFN(8, 32)),
        lambda: Twice(Twice(ChannelIdleFFN(8, 32), Pair(8)), Twice(Pair(8), Pair(8))),
    ],
)
def test_forms_inside_of_forms(build, inplace, randomize, relative_error):
    model = nn.Sequential(randomize(build()), randomize(Pair(8))).eval()
    x = torch.randn(2, 5, 8)
    expected = outputs(model, x)[0]
    original = copy.deepcopy(model)
    deployed = reparameterize(model, inplace=inplace)
    assert not count(deployed, TrainingForm)
    assert relative_error(outputs(deployed, x)[0], expected) < 1e-5
    if not inplace:
        assert count(model, TrainingForm) == count(original, TrainingForm)
        for key, value in original.state_dict().items():
            assert torch.equal(model.state_dict()[key], value)
    # And their weights are told apart.
    assert is_reparameterized(original, deployed.state_dict())
    assert not is_reparameterized(original, original.state_dict())
    with pytest.raises(CheckpointError, match='is reparameterized'):
        check_state_dict(original, deployed.state_dict())


def test_an_error_inside_of_a_form_is_named(randomize):
    model = nn.Sequential(Pair(8), Twice(ChannelIdleFFN(8, 32), Pair(8)))
    model[1].first.fc1.register_forward_hook(lambda module, args, y: y)
    with pytest.raises(ValueError, match=r"cannot merge '1': 'first.fc1' \(Linear\) has"):
        reparameterize(model, inplace=True)
    assert count(model, Pair) == 2
