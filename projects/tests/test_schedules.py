"""Lambda by iterations, in real trainings: stopped and resumed, averaged, validated."""

import copy

import pytest
import torch
import torch.nn as nn
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import MODELS

from projects.schedules import Scheduled, set_lam_
from repa_mm.reparam import DeployForm, TrainingForm, reparameterize, weight_and_bias
from tests.shared import form_tests
from tests.test_reparam.test_forms import C, make  # noqa: F401
from tests.toy import KeepLogits, Transpose, distributed, make_runner  # noqa: F401

# 2 iterations an epoch.
SCHEDULE = dict(type='ScheduleHook', warmup=4)
MERGE = dict(type='ReparameterizeHook')


class Fading(Scheduled, TrainingForm):
    """A structure that the package does not know: a nonlinearity that fades out."""

    label, scalar, end = 'fading layer', 'fading', 0.0

    def __init__(self, dims):
        super().__init__()
        self.fc = nn.Linear(dims, dims)
        self.add_lam()

    def forward(self, x):
        y = self.fc(x)
        return y if self.is_finished else y + (self.lam - self.end).abs() * y.sin()

    def merge(self):
        self.check_finished()
        weight, bias = weight_and_bias(self.fc, 'its layer')
        merged = Faded(len(bias)).to(self.fc.weight)
        merged.layer.weight.copy_(weight)
        merged.layer.bias.copy_(bias)
        return merged


class Rising(Fading):
    """The same, with a lambda that rises."""

    scalar, end = 'rising', 1.0


class Faded(DeployForm):
    label = 'fading layer'

    def __init__(self, dims):
        super().__init__()
        self.layer = nn.Linear(dims, dims)

    def inference(self, x):
        return self.layer(x)


class Waning(Fading):
    scalar = 'waning'


rows, as_others, merges = form_tests(
    dict(fading=(lambda: Fading(C), Faded)), 'merging_before_the_schedule_has_ended_is_refused'
)


@MODELS.register_module()
class ToyScheduled(BaseModel):
    """Two forms that merge at 1, and, if asked for, two that merge at 0."""

    def __init__(self, fades=False):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4),
            nn.Flatten(2),
            Transpose(),
            Waning(8) if fades else nn.LayerNorm(8),
            Rising(8),
            Fading(8) if fades else nn.LayerNorm(8),
            Rising(8),
        )
        self.head = nn.Linear(8, 2)

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(torch.stack(inputs)).mean(1))
        if mode == 'loss':
            # Again: lambda follows the iterations, and not the forward passes.
            logits = logits + self.head(self.backbone(torch.stack(inputs)).mean(1))
            return dict(loss=nn.functional.cross_entropy(logits, torch.as_tensor(labels)))
        return list(logits)


class Lambdas(Hook):
    """Notes every lambda in every iteration, by its name."""

    priority = 'LOWEST'

    def __init__(self, stop_after=None):
        self.seen, self.stop_after = {}, stop_after

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        lams = {}
        for module in runner.model.modules():
            if isinstance(module, Scheduled):
                lams.setdefault(module.scalar, set()).add(round(float(module.lam), 6))
                assert module.is_finished == (module.lam == module.end)
        for scalar, (lam,) in lams.items():
            self.seen.setdefault(scalar, []).append(lam)

    def after_train_epoch(self, runner):
        if self.stop_after == runner.epoch + 1:
            raise KeyboardInterrupt


def runner_of(work_dir, hooks, epochs=4, model={}, **kwargs):
    train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=epochs)
    kwargs.setdefault('train_cfg', train_cfg)
    return make_runner(work_dir, hooks, model=dict(type='ToyScheduled', **model), **kwargs)


def predict(model, runner):
    with torch.no_grad():
        return torch.cat([torch.stack(model.test_step(b)) for b in runner.test_dataloader])


def warnings_of(runner):
    messages = []
    runner.logger.warning = messages.append
    runner.train()
    return [m for m in messages if 'ScheduleHook' in m]


@pytest.mark.parametrize(
    'options, expected',
    [
        (dict(warmup=0.5), [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]),
        (dict(warmup=7), [0, *(round(i / 7, 6) for i in range(1, 7)), 1]),
        (dict(warmup=0), [1] * 8),
    ],
)
def test_lambda_by_iterations(tmp_path, options, expected):
    lambdas = Lambdas()
    runner = runner_of(tmp_path, [dict(SCHEDULE, **options), MERGE, lambdas])
    assert not warnings_of(runner)
    assert lambdas.seen == dict(rising=expected)
    scalars = runner.message_hub.log_scalars['train/rising']._log_history
    assert [round(x, 6) for x in scalars] == expected
    runner.test()


FADING = [1, 0.75, 0.5, 0.25, 0, 0, 0, 0]
RISING = [1 - lam for lam in FADING]


def test_several_structures(tmp_path, relative_error):
    """They merge at 1 and at 0."""
    lambdas, model = Lambdas(), dict(fades=True)
    runner = runner_of(tmp_path, [SCHEDULE, MERGE, lambdas], model=model)
    runner.train()
    assert lambdas.seen == dict(rising=RISING, fading=FADING, waning=FADING)
    runner.test()
    model = copy.deepcopy(runner.model).eval()
    assert relative_error(KeepLogits.logits, predict(model, runner)) < 1e-5
    assert isinstance(reparameterize(model).backbone[5], Faded)


def test_stopped_and_resumed(tmp_path):
    """Bit for bit, and so are the averages."""
    hooks = [SCHEDULE, dict(type='EMAHook', momentum=0.3)]
    optimizer = dict(optimizer=dict(type='AdamW', lr=0.01))
    options = dict(model=dict(fades=True), optim_wrapper=optimizer)
    whole = runner_of(tmp_path / 'whole', hooks, **options)
    whole.train()
    first = runner_of(tmp_path / 'part', [*hooks, Lambdas(stop_after=1)], **options)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    path = str(tmp_path / 'part' / 'epoch_1.pth')
    lambdas = Lambdas()
    resumed = runner_of(
        tmp_path / 'part', [*hooks, lambdas], load_from=path, resume=True, **options
    )
    assert not warnings_of(resumed)
    assert lambdas.seen['rising'] == [0.5, 0.75, 1, 1, 1, 1]
    averages = [next(h for h in r.hooks if isinstance(h, EMAHook)) for r in (whole, resumed)]
    for one, other in ((whole.model, resumed.model), (h.ema_model for h in averages)):
        for key, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key


@pytest.mark.parametrize('update_buffers', [False, True])
def test_averaged_models_have_the_same_lambda(tmp_path, update_buffers, relative_error):
    ema = dict(type='EMAHook', momentum=0.3, update_buffers=update_buffers)
    runner = runner_of(tmp_path, [MERGE, SCHEDULE, ema], model=dict(fades=True))
    runner.train()
    hook = next(h for h in runner.hooks if isinstance(h, EMAHook))
    averaged = copy.deepcopy(hook.ema_model.module).eval()
    assert all(m.lam == m.end for m in averaged.modules() if isinstance(m, Scheduled))
    runner.test_loop.run()
    assert relative_error(KeepLogits.logits, predict(averaged, runner)) < 1e-5
    # What is deployed from the file is the average, too.
    model = ToyScheduled(fades=True)
    model.load_state_dict(torch.load(tmp_path / 'epoch_4.pth', weights_only=False)['state_dict'])
    assert model.backbone[4].lam == 1
    assert relative_error(model.head.weight, averaged.head.weight) == 0


def test_distributed_training(distributed, tmp_path):  # noqa: F811
    lambdas, model = Lambdas(), dict(fades=True)
    hooks = [SCHEDULE, MERGE, lambdas, dict(type='EMAHook', momentum=0.3)]
    runner = runner_of(tmp_path, hooks, model=model, **distributed)
    runner.train()
    assert lambdas.seen == dict(rising=RISING, fading=FADING, waning=FADING)
    runner.test_loop.run()  # merges


@pytest.mark.parametrize(
    'first, expected', [(1, [1] * 8), (0.6, [0.6, 0.6, 0.6, 0.75, 1, 1, 1, 1])]
)
def test_lambda_does_not_go_back(first, expected, tmp_path):
    """Fine-tuning does not undo a schedule that has ended."""
    path = tmp_path / 'ended.pth'
    torch.save(dict(state_dict=set_lam_(ToyScheduled(), first).state_dict()), path)
    lambdas = Lambdas()
    runner = runner_of(tmp_path, [SCHEDULE, MERGE, lambdas], load_from=str(path))
    (message,) = warnings_of(runner)
    assert f'have come further ({first:g} of the way) than iteration 0' in message
    assert lambdas.seen == dict(rising=expected)
    runner.test()


def test_what_has_ended_in_another_part_stays(tmp_path):
    """Those of a teacher, say."""
    seen = []

    class Note(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append(tuple(float(runner.model.backbone[i].lam) for i in (4, 6)))

    runner = runner_of(tmp_path, [SCHEDULE, Note()])
    set_lam_(runner.model.backbone[4], 1)
    assert not warnings_of(runner)
    assert seen == [(1, lam) for lam in (0, 0.25, 0.5, 0.75, 1, 1, 1, 1)]


def test_validated_in_the_middle_of_a_schedule(tmp_path):
    """In the training form, which is all that there is, and merged afterwards."""
    forms = []

    class Note(Hook):
        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            forms.append(type(runner.model.backbone[6]))

    train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=1)
    hooks = [SCHEDULE, dict(MERGE, when=('val', 'test')), Note()]
    runner = runner_of(tmp_path, hooks, train_cfg=train_cfg)
    runner.train()
    # 2 batches an epoch, of which the third is the first that ends with lambda = 1.
    assert forms == [Rising] * 4 + [Faded] * 4
    assert isinstance(runner.model.backbone[6], Rising)


@pytest.mark.parametrize('warmup, end', [(8, '0.875'), (16, '0.4375')])
def test_too_long_a_schedule_is_reported(warmup, end, tmp_path):
    runner = runner_of(tmp_path, [dict(SCHEDULE, warmup=warmup), MERGE])
    (message,) = warnings_of(runner)
    assert f'takes {warmup} iterations, and the training has 8' in message
    assert f'ends at {end} of the way' in message
    with pytest.raises(ValueError, match=f'lambda = {end}'):
        runner.test()


@pytest.mark.parametrize('ema', [[], [dict(type='EMAHook')]])
def test_merged_checkpoints_are_tested(ema, tmp_path, relative_error):
    """By a config of the training form, whose lambda is at its beginning."""
    model = set_lam_(ToyScheduled(), 1).eval()
    path = str(tmp_path / 'merged.pth')
    torch.save(dict(state_dict=reparameterize(model).state_dict()), path)
    runner = runner_of(tmp_path, [SCHEDULE, MERGE, *ema], load_from=path)
    runner.test()
    assert relative_error(KeepLogits.logits, predict(model, runner)) < 1e-5


def test_a_model_without_a_schedule_is_refused(tmp_path):
    with pytest.raises(ValueError, match='ToyClassifier has no lambda to schedule'):
        make_runner(tmp_path, [SCHEDULE]).train()
