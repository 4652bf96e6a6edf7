"""Training beside a teacher: what is computed, and that nothing else sees the teacher."""

import copy
import pickle
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.fileio import load as load_file
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import METRICS, MODELS, DefaultScope, init_default_scope
from torch.utils.data import Dataset

from repa_mm.apis import open_model
from repa_mm.apis.imitation import Imitates, Teacher, _distance
from repa_mm.io.configs import load_config
from repa_mm.io.paths import config_path
from repa_mm.models.builder import derived
from tests.conftest import _randomize
from tests.test_configs import batch_of
from tests.test_export.conftest import write_config
from tests.test_models.test_builder import CLASSIFIER, idle
from tests.toy import Spy, distributed, make_runner  # noqa: F401

ROOT = Path(__file__).parents[2]
# Sizes of images, and what is written behind the small configs: no random paths, and small images.
TASKS = {
    'retinanet': (64, ''),
    'upernet': (64, "model['data_preprocessor'] = dict(size=(64, 64))\n"),
    'classifier': (224, "model['data_preprocessor'] = dict(num_classes=7)\n"),
}
SEMI = dict(type='SoftTeacher', semi_train_cfg={})
LINE = """
_base_ = {base!r}
model = dict(type='Imitation', model={{{{_base_.model}}}}, {more}
             teacher=dict(config={config!r}, checkpoint={checkpoint!r}), weight=0.5)
"""


@pytest.fixture(scope='module')
def configs(tmp_path_factory):
    """A function: the plain config of a task, and the one that imitates, by one line."""
    folder = tmp_path_factory.mktemp('configs')

    @cache
    def read(task, more):
        own, config = (write_config(task, folder, repa) for repa in (True, False))
        with open(own, 'a') as file:
            file.write(f"model['backbone']['drop_path_rate'] = 0.0\n{TASKS[task][1]}")
        path, checkpoint = folder / 'imitation.py', str(folder / f'{task}.pth')
        torch.save(_randomize(open_model(config)).state_dict(), checkpoint)
        path.write_text(LINE.format(base=own, more=more, config=config, checkpoint=checkpoint))
        return load_config(own), load_config(str(path))

    def get(task, more='_delete_=True,'):
        plain, cfg = copy.deepcopy(read(task, more))
        init_default_scope(cfg.default_scope)
        return plain, cfg

    return get


class Images(Dataset):
    metainfo = dict(classes=())

    def __init__(self, cfg, size):
        batch = batch_of(cfg, size)
        values = zip(batch['inputs'], batch['data_samples'])
        self.items = [dict(inputs=image, data_samples=sample) for image, sample in values]

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return copy.deepcopy(self.items[index])


@METRICS.register_module()
class Count(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.extend(data_samples)

    def compute_metrics(self, results):
        return dict(count=len(results))


class Losses(Hook):
    """Keeps the imitation's loss of each step."""

    def __init__(self):
        self.found = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.found.append(outputs['loss_imitation'].item())


def runner_of(config, task, folder, hooks, epochs=6, **options):
    data = dict(
        batch_size=2,
        dataset=Images(config, TASKS[task][0]),
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='pseudo_collate'),
    )
    options.update({f'{split}_dataloader': data for split in ('train', 'val', 'test')})
    options.update({f'{split}_evaluator': dict(type='Count') for split in ('val', 'test')})
    options['train_cfg'] = dict(by_epoch=True, max_epochs=epochs, val_interval=epochs)
    options['optim_wrapper'] = dict(optimizer=dict(type='AdamW', lr=1e-3))
    options['default_scope'] = config.default_scope
    return make_runner(folder, hooks, config.model, **options)


def data_of(model, cfg, task):
    return model.data_preprocessor(batch_of(cfg, TASKS[task][0]), True)


def step(model, data):
    """The losses of a training step, and their sum."""
    torch.manual_seed(0)
    losses = model.train()(**data, mode='loss')
    return losses, model.parse_losses(losses)[0]


@pytest.mark.parametrize('task', TASKS)
def test_trains_as_any_model(task, configs, tmp_path):
    """Averaged, tested merged, saved and resumed; the plain config opens the checkpoint."""
    plain, cfg = configs(task)
    hooks = [dict(type='ReparameterizeHook'), dict(type='EMAHook', momentum=0.5), Spy(), Losses()]
    runner = runner_of(cfg, task, tmp_path / 'a', hooks)
    runner.train()
    losses = hooks[-1].found
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]
    model, ordinary = runner.model, MODELS.build(plain.model)
    assert isinstance(model, type(ordinary)) and type(model) is derived(Imitates, type(ordinary))
    for name in ('state_dict', 'parameters', 'modules', 'buffers'):
        assert len(list(getattr(model, name)())) == len(list(getattr(ordinary, name)())), name
    groups = runner.optim_wrapper.optimizer.param_groups
    assert {id(p) for g in groups for p in g['params']} == {id(p) for p in model.parameters()}
    averaged = next(h for h in runner.hooks if isinstance(h, EMAHook)).ema_model.module
    assert model.imitated.opened and not averaged.imitated.opened
    runner.test_loop.run()
    assert ('test', 'deploy') in hooks[2].forms and ('train', 'deploy') not in hooks[2].forms

    path = str(tmp_path / 'a' / 'epoch_6.pth')
    checkpoint = torch.load(path, weights_only=False)
    for name in ('state_dict', 'ema_state_dict'):
        keys = {key.removeprefix('module.') for key in checkpoint[name]} - {'steps'}
        assert keys == ordinary.state_dict().keys()
    assert type(open_model(plain, path)) is type(ordinary)
    again = runner_of(cfg, task, tmp_path / 'b', hooks, 7, load_from=path, resume=True)
    again.train()
    assert len(losses) == 7 and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize('task', TASKS)
def test_gradients_are_those_of_the_literal_loss(task, configs, relative_error):
    """In float32, and under autocast; with checkpoints in the backbone, too."""
    plain, cfg = configs(task)
    for each in (plain.model, cfg.model.model):
        each.backbone.with_cp = task == 'retinanet'
    model, ordinary = MODELS.build(cfg.model), MODELS.build(plain.model)
    ordinary.load_state_dict(model.state_dict())
    teacher = open_model(**cfg.model.teacher)
    data = data_of(ordinary, plain, task)
    own = []
    ordinary.backbone.register_forward_hook(lambda module, args, maps: own.extend(maps))
    for is_half, tolerance in ((False, 1e-5), (True, 0.02)):  # our attention rounds otherwise
        own.clear()
        for each in (model, ordinary):
            each.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=is_half):
            losses, total = step(model, data)
            others, expected = step(ordinary, data)
            with torch.no_grad():
                given = teacher.backbone(data['inputs'])
        assert own[0].dtype == given[0].dtype and losses['loss_imitation'].dtype == torch.float32
        terms = []
        for a, b in zip(own, given, strict=True):
            a, b = (x.float().movedim(1, -1).flatten(0, -2) for x in (a, b))
            terms.append((a - b).square().mean() / b.var(0, unbiased=False).mean())
        expected = expected + 0.5 * sum(terms) / len(terms)
        assert losses.keys() == others.keys() | {'loss_imitation'}
        assert relative_error(total.detach(), expected.detach()) < tolerance
        total.backward(), expected.backward()
        found, wanted = (
            torch.cat([p.grad.flatten() for p in each.backbone.parameters() if p.grad is not None])
            for each in (model, ordinary)
        )
        assert (found - wanted).norm() < tolerance * wanted.norm()


def test_in_a_distributed_training(configs, distributed, tmp_path):  # noqa: F811
    plain, cfg = configs('classifier')
    losses = Losses()
    runner = runner_of(cfg, 'classifier', tmp_path, [losses], **distributed)
    runner.train()
    assert type(runner.model).__name__ == 'MMDistributedDataParallel'
    assert losses.found[-1] < losses.found[0]
    saved = torch.load(tmp_path / 'epoch_6.pth', weights_only=False)['state_dict']
    assert saved.keys() == MODELS.build(plain.model).state_dict().keys()


def test_copies_are_of_the_same_class_without_the_teacher(configs, tmp_path):
    _, cfg = configs('retinanet')
    model = MODELS.build(cfg.model)
    scope = DefaultScope.get_current_instance().scope_name
    data, numbers = data_of(model, cfg, 'retinanet'), []
    for _ in range(2):
        step(model, data)
        numbers.append(torch.rand(1))
    assert numbers[0] == numbers[1]  # none is drawn where the teacher is opened
    assert DefaultScope.get_current_instance().scope_name == scope
    torch.save(model, tmp_path / 'model.pth')
    copies = [pickle.loads(pickle.dumps(model, protocol)) for protocol in (0, 4)]
    copies += [copy.deepcopy(model), torch.load(tmp_path / 'model.pth', weights_only=False)]
    assert model.imitated.opened and len(pickle.dumps(model.imitated)) < 1000
    expected = step(model, data)[1]
    for other in copies:
        assert type(other) is type(model) and not other.imitated.opened
        torch.testing.assert_close(step(other, data)[1], expected)


def test_a_whole_model_with_structures():
    """It refers to itself, by the hooks that check what it loads."""
    inner = dict(type='Restructured', model=CLASSIFIER, structures=idle(0.5))
    teacher = dict(config='plain.py', checkpoint='plain.pth')
    model = MODELS.build(dict(type='Imitation', model=inner, teacher=teacher))
    assert type(model).__name__ == 'ImitatingRestructuredImageClassifier'
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) and vars(other.imitated) == vars(model.imitated)
        other.load_state_dict(MODELS.build(inner).state_dict())


def test_each_call_of_the_backbone_counts(configs):
    _, cfg = configs('retinanet')
    model = MODELS.build(cfg.model).eval()
    data, kind = data_of(model, cfg, 'retinanet'), type(model).made_of[1]

    class Twice(kind):
        def loss(self, inputs, samples):
            self.backbone(inputs.flip(3) + 1)
            return super().loss(inputs, samples)

    class Never(kind):
        def loss(self, inputs, samples):
            return {}

    def loss(parent, images):
        model.__class__ = derived(Imitates, parent)
        return model.loss(images, data['data_samples'])['loss_imitation']

    with torch.no_grad():
        first, second = (loss(kind, x) for x in (data['inputs'], data['inputs'].flip(3) + 1))
        torch.testing.assert_close(loss(Twice, data['inputs']), (first + second) / 2)
    assert abs(first - second) > 1e-3 * first
    with pytest.raises(ValueError, match='loss of an .*Never does not call its backbone'):
        loss(Never, data['inputs'])


def test_a_teacher_that_does_not_fit_is_refused(configs, tmp_path):
    _, cfg = configs('retinanet')
    model = MODELS.build(cfg.model)
    data = data_of(model, cfg, 'retinanet')
    files = cfg.model.teacher.config, cfg.model.teacher.checkpoint
    arch = dict(embed_dims=48, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2])
    semi = dict(SEMI, detector=load_config(files[0]).model, _delete_=True)
    necks = {'model.neck.in_channels': [48, 96], 'model.neck.num_outs': 2}
    cases = {
        r'shapes \[\(2, 96, .*model \[\(2, 48, ': {
            'model.backbone.arch': arch, 'model.neck.in_channels': [96, 192, 384]
        },
        'only be compared': {'model.backbone.out_indices': (1, 2), **necks},
        r"images: .*'mean': \[0.0, .*and that of the model .*123": {
            'model.data_preprocessor.mean': [0.0, 0.0, 0.0]
        },
        "'flips_channels': False": {'model.data_preprocessor.bgr_to_rgb': False},
        'the teacher, a SoftTeacher, has no backbone': {'model': semi},
    }  # fmt: skip
    for i, (message, options) in enumerate(cases.items()):
        other = load_config(files[0], options)
        paths = [str(tmp_path / f'{i}{end}') for end in ('.py', '.pth')]
        other.dump(paths[0])
        torch.save(open_model(other).state_dict(), paths[1])
        model.imitated = Teacher(*paths)
        with pytest.raises(ValueError, match=message):
            step(model, data)
        assert not model.backbone._forward_hooks
    for pair in (('not_there.py', files[1]), (files[0], 'not_there.pth')):
        model.imitated = Teacher(*pair)
        with pytest.raises(ValueError, match='the teacher is missing: .*not_there'):
            step(model, data)
    for key in ('config', 'checkpoint'):
        teacher = dict(cfg.model.teacher, **{key: None})
        with pytest.raises(ValueError, match=f"needs a 'config' and a 'checkpoint'.*{key}': None"):
            MODELS.build(dict(cfg.model, teacher=teacher))


def test_a_model_that_cannot_imitate_is_refused(configs):
    _, cfg = configs('retinanet')
    for model in (dict(type='ToyClassifier'), dict(SEMI, detector=cfg.model.model)):
        with pytest.raises(ValueError, match=f'a {model["type"]} cannot imitate'):
            MODELS.build(dict(cfg.model, model=model))


def test_what_is_changed_beside_the_model_is_refused(configs):
    """Where a config inherits without `_delete_`, both places have the model's arguments."""
    _, cfg = configs('upernet', more='')
    assert cfg.model.decode_head == cfg.model.model.decode_head
    MODELS.build(cfg.model)
    cfg.model.decode_head.num_classes = 3
    with pytest.raises(ValueError, match='model.decode_head and model.model.decode_head differ'):
        MODELS.build(cfg.model)
    # What a Runner adds to a model that has its own.
    cfg = configs('upernet')[1]
    model = MODELS.build(dict(cfg.model, data_preprocessor=dict(type='SegDataPreProcessor')))
    assert model.data_preprocessor.size == (64, 64)


def test_distances():
    """Of maps, tokens and vectors, where channels hardly vary, and in half precision."""
    for shape, places in (((2, 6, 5, 5), (0, 2, 3)), ((2, 25, 6), (0, 1)), ((8, 6), 0)):
        own, given = torch.randn(2, *shape)
        given = given + 100 * (torch.arange(given.numel()).view(shape) == 7)
        expected = (own - given).square().mean() / given.var(places, unbiased=False).mean()
        torch.testing.assert_close(_distance(own, given), expected)
        torch.testing.assert_close(_distance(own.half(), given.half()), expected, rtol=1e-3, atol=0)
    given[:, 0] = 7  # a constant channel
    assert 0 < _distance(own, given) < 10
    for given in (torch.randn(1, 6), torch.full((2, 6, 4, 4), 3.0), torch.zeros(2, 1, 6)):
        own = (0.9 * given).requires_grad_()
        found = _distance(own, given)
        assert found.item() == pytest.approx(0.01 if given.any() else 0, rel=1e-3)
        found.backward()
        assert own.grad.isfinite().all()


@pytest.mark.parametrize('out_type', ['cls_token', 'raw', 'avg_featmap'])
def test_backbones_without_maps(out_type, tmp_path):
    """A single vector, or tokens."""
    cfg = copy.deepcopy(CLASSIFIER)
    cfg['backbone'].update(out_type=out_type)
    files = [str(tmp_path / f'plain{end}') for end in ('.py', '.pth')]
    Path(files[0]).write_text(f"model = {cfg!r}\ndefault_scope = 'mmpretrain'\n")
    teacher = open_model(files[0])
    torch.save(teacher.state_dict(), files[1])
    cfg = dict(type='Restructured', model=cfg, structures=idle(0.5))
    names = dict(zip(('config', 'checkpoint'), files))
    model = MODELS.build(dict(type='Imitation', model=cfg, teacher=names))
    images = torch.randn(1, 3, 32, 32)
    (given,) = model.imitated.maps(model, images)
    torch.testing.assert_close(given, teacher.backbone(images)[0])
    assert not given.requires_grad
    assert 0 < _distance(model.backbone(images)[0], given) < 100


@pytest.mark.parametrize('task', ['upernet', 'mask_rcnn'])
def test_the_lines_of_the_docs_for_coco_and_ade20k(task, tmp_path, quick_init):
    """With weights in the layout of the model zoo's file, which its metafile lists."""
    page = (ROOT / 'docs' / 'coco.md').read_text()
    text = next(t for t in re.findall(r'```python\n(.*?)```', page, re.S) if task in t)
    (tmp_path / 'user.py').write_text(text.replace("'configs/", f"'{ROOT}/configs/"))
    cfg = load_config(str(tmp_path / 'user.py'))
    teacher = cfg.model.teacher
    (folder,) = {Path(config_path(teacher.config)).parent}
    (metafile,) = folder.glob('metafile.y*ml')
    models = load_file(metafile)['Models']
    (listed,) = [m for m in models if m['Name'] == Path(teacher.config).stem]
    assert Path(listed['Weights']).name == Path(teacher.checkpoint).name
    zoo = MODELS.build(load_config(teacher.config).model)
    teacher.checkpoint = str(tmp_path / 'zoo.pth')
    torch.save(dict(state_dict=zoo.state_dict()), teacher.checkpoint)
    model = MODELS.build(cfg.model)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        given, own = model.imitated.maps(model, images), model.backbone(images)
    assert [x.shape for x in given] == [x.shape for x in own]
