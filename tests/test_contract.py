"""A structure that repa_mm does not know goes through all of it.

The structure is an FFN whose first linear layer is the sum of two, of which one has a nonlinearity
that fades. Its form is two classes, its place in models one more; no file of the package knows it.
"""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict

from repa_mm.export.export import export
from repa_mm.models import STRUCTURES, Structure
from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    DeployForm,
    Scheduled,
    TrainingForm,
    is_reparameterized,
    reparameterize,
    reparameterize_,
)
from tests.test_engine.toy import KeepLogits, make_runner

VIT = dict(
    type='mmpretrain.VisionTransformer',
    arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=40),
    img_size=16,
    patch_size=4,
    out_type='featmap',
)


class ToyFFN(Scheduled, TrainingForm):
    """x + W2 gelu(a(u) + b(u) + lambda relu(b(u))) with u = LN(x), lambda from 1 to 0."""

    label = 'toy FFN'
    end = 0.0
    scalar = 'toy'
    unfinished = 'the nonlinearity of b has the weight'

    def __init__(self, dims, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dims, eps=1e-6)
        self.a, self.b = nn.Linear(dims, hidden), nn.Linear(dims, hidden)
        self.fc2 = nn.Linear(hidden, dims)
        self.add_lam()

    def fill(self, part):
        for own, other in ((self.norm, part.norm), (self.a, part.fc1), (self.fc2, part.fc2)):
            own.weight.copy_(other.weight)
            own.bias.copy_(other.bias)
        self.b.weight.zero_()
        self.b.bias.zero_()

    def forward(self, x, identity=None):
        u = self.norm(x)
        b = self.b(u)
        return x + self.fc2(F.gelu(self.a(u) + b + self.lam * b.relu()))

    def merge(self):
        self.check_finished()
        merged = MergedToy(*reversed(self.a.weight.shape)).to(self.a.weight)
        merged.norm.load_state_dict(self.norm.state_dict())
        merged.fc1.weight.copy_(self.a.weight.double() + self.b.weight.double())
        merged.fc1.bias.copy_(self.a.bias.double() + self.b.bias.double())
        merged.fc2.load_state_dict(self.fc2.state_dict())
        return merged


class MergedToy(DeployForm):
    label = 'toy FFN'

    def __init__(self, dims, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dims, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(dims, hidden), nn.Linear(hidden, dims)

    def inference(self, x, identity=None):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


@STRUCTURES.register_module()
class Toy(Structure):
    def form(self, site):
        parts = site.parts()
        form = ToyFFN(parts.fc1.in_features, parts.fc1.out_features)
        form.fill(parts)
        return form


@MODELS.register_module()
class AnyClassifier(BaseModel):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.head = nn.Linear(16, 2)

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(torch.stack(inputs))[0].mean((2, 3)))
        if mode == 'loss':
            return dict(loss=F.cross_entropy(logits, torch.as_tensor(labels)))
        return list(logits)


def backbone(deploy=False, **kwargs):
    structures = [dict(type='Toy')]
    return dict(
        type='Restructured', model=dict(VIT, **kwargs), structures=structures, deploy=deploy
    )


def count(model, kind):
    return sum(isinstance(m, kind) for m in model.modules())


@pytest.fixture
def pretrained(tmp_path, randomize):
    """An ordinary backbone, and the config that starts from its checkpoint."""
    ordinary = randomize(MODELS.build(copy.deepcopy(VIT)))
    ordinary.eval()
    torch.save(ordinary.state_dict(), tmp_path / 'vit.pth')
    return ordinary, dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))


@pytest.mark.parametrize('ema', [False, True])
def test_trained_filled_scheduled_merged_tested(ema, pretrained, tmp_path, relative_error):
    ordinary, init_cfg = pretrained
    hooks = [dict(type='ScheduleHook', warmup=2), dict(type='ReparameterizeHook')]
    hooks += [dict(type='EMAHook', momentum=0.3)] * ema
    cfg = dict(type='AnyClassifier', backbone=backbone(init_cfg=init_cfg))
    runner = make_runner(tmp_path, hooks, model=cfg)
    # Filled from the ordinary weights, it begins as what they are of.
    model = runner.model
    runner._init_model_weights()
    model.eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert relative_error(model.backbone(x)[0], ordinary(x)[0]) < 1e-6
        with pytest.raises(ValueError, match='lambda = 1'):
            reparameterize(model)

    runner.train()
    assert all(m.lam == 0 for m in model.modules() if isinstance(m, ToyFFN))
    assert model.backbone.layers[0].ffn.b.weight.abs().max() > 0  # it has learned
    before, tested = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
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
    forms = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, y: forms.append(type(module))
    )
    runner.test_loop.run()  # runner.test() would begin the average anew
    handle.remove()
    assert MergedToy in forms and ToyFFN not in forms
    assert relative_error(KeepLogits.logits, expected) < 1e-5
    assert runner.model is model
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_wrong_form_is_refused(tmp_path, pretrained):
    training, ordinary = MODELS.build(backbone()), pretrained[0]
    deployed = MODELS.build(backbone(deploy=True))
    assert count(deployed, MergedToy) == 2
    assert is_reparameterized(training, deployed.state_dict())
    assert not is_reparameterized(training, training.state_dict())
    for model, other, form in (
        (training, deployed, 'training'),
        (training, ordinary, 'training'),
        (deployed, training, 'deploy'),
    ):
        with pytest.raises(CheckpointError, match=f"toy FFN in its {form} form at 'layers.0.ffn'"):
            load_state_dict(model, other.state_dict(), strict=False)
    # A merged checkpoint is tested with a config of the training form, and is not trained on.
    cfg = dict(type='AnyClassifier', backbone=backbone(deploy=True))
    torch.save(dict(state_dict=MODELS.build(cfg).state_dict()), tmp_path / 'merged.pth')
    for method in ('test', 'train'):
        runner = make_runner(
            tmp_path / method,
            [dict(type='ReparameterizeHook')],
            model=dict(type='AnyClassifier', backbone=backbone()),
            load_from=str(tmp_path / 'merged.pth'),
        )
        if method == 'test':
            runner.test()
            assert count(runner.model, MergedToy) == 2
        else:
            with pytest.raises(CheckpointError, match='cannot be trained'):
                runner.train()


def test_exported(tmp_path, randomize):
    pytest.importorskip('onnxruntime')
    model = randomize(MODELS.build(backbone(deploy=True)))
    path = tmp_path / 'toy.onnx'
    assert export(model, str(path), (16, 32)) < 1e-5
    assert path.is_file()


class Pair(TrainingForm):
    """Two linear layers before a BatchNorm, as in RepVGG: a form without a site."""

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


def test_switch_to_deploy_and_the_guards_of_every_form(randomize, relative_error):
    pair = randomize(Pair(8)).eval()
    x = torch.randn(2, 5, 8)
    expected = pair(x)
    handle = pair.a.register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(ValueError, match=r"'a' \(Linear\) has a forward hook"):
        pair.merge()
    handle.remove()
    broken = copy.deepcopy(pair)
    broken.b.weight.data[0, 0] = float('nan')
    with pytest.raises(ValueError, match='b.weight has 1 value.*not finite'):
        reparameterize(nn.Sequential(broken))
    with torch.inference_mode():
        pair.switch_to_deploy()
    assert relative_error(pair(x), expected) < 1e-5
    with pytest.raises(RuntimeError, match='MergedPair is in its deploy form'):
        pair.train()(x)


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
    expected = model(x).detach()
    original = copy.deepcopy(model)
    deployed = (reparameterize_ if inplace else reparameterize)(model)
    assert not count(deployed, TrainingForm)
    assert relative_error(deployed(x), expected) < 1e-5
    assert is_reparameterized(original, deployed.state_dict())
    assert not is_reparameterized(original, original.state_dict())
    with pytest.raises(CheckpointError, match='in its training form'):
        original.load_state_dict(deployed.state_dict(), strict=False)


def test_an_error_inside_of_a_form_is_named():
    model = nn.Sequential(Pair(8), Twice(ChannelIdleFFN(8, 32), Pair(8)))
    model[1].first.fc1.register_forward_hook(lambda module, args, y: y)
    with pytest.raises(ValueError, match=r"cannot merge '1': 'first.fc1' \(Linear\) has"):
        reparameterize_(model)
    assert count(model, Pair) == 2
