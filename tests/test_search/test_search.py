"""One command makes a model faster, chooses one that keeps its promises, and goes on later."""

import copy
import json
import runpy
import shutil
import sys
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmengine.runner import Runner

import repa_mm
from repa_mm.config import load_config
from repa_mm.convert.pretrained import ModelConversion
from repa_mm.export import agreeing_onnx
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.opening import open_model, read_images
from repa_mm.reparam import CheckpointError, has_deploy_form, has_training_form
from repa_mm.search import search
from repa_mm.search.candidates import Candidate
from repa_mm.search.formats import BF16, EAGER, F32, INT8, ORT, ORT_CUDA
from repa_mm.search.judge import Annotated
from tests.conftest import random_model
from tests.test_export.rectangles import scene, train

pytest.importorskip('onnxruntime')
pytest.importorskip('mmpretrain')

CONFIG = """
default_scope = 'mmpretrain'
data_preprocessor = dict(mean=[100, 110, 120], std=[50, 60, 70], num_classes=3)
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='SwinTransformer', img_size=64, out_indices=(1,), window_size=4,
        arch=dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2]),
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=3, in_channels=32),
)
pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='CustomDataset', data_root='images', pipeline=pipeline),
)
val_dataloader = test_dataloader = train_dataloader
val_cfg = test_cfg = dict()
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1))
val_evaluator = test_evaluator = dict(type='Accuracy', topk=(1,))
visualizer = dict(type='UniversalVisualizer')
work_dir = 'work_dirs'
"""
NUM = 30


@pytest.fixture(scope='module')
def learned(tmp_path_factory):
    """A folder with images of rectangles, and a classifier that has seen others."""
    folder = tmp_path_factory.mktemp('learned')
    rng = np.random.default_rng(3)
    for i in range(36):
        image, sample = scene(rng, 'classifier')
        path = folder / 'images' / str(int(sample.gt_label)) / f'{i:02}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), image.permute(1, 2, 0).numpy())
    (folder / 'config.py').write_text(CONFIG)
    torch.manual_seed(0)
    model = random_model(load_config(str(folder / 'config.py')))
    train(model, 'classifier', 60, 3e-3)
    torch.save(dict(state_dict=model.state_dict()), folder / 'model.pth')
    return folder


def milliseconds(name, kind):
    """The time of a model in a format."""
    budget = float(name.split()[0]) / 100 if '%' in name else 1
    formats = {ORT: 0.6, F32: 0.5, BF16: 0.4, INT8: 0.3, 'PyTorch bf16': 0.5}
    return (100 if name == 'stock' else 60) * (0.2 + 0.8 * budget) * formats.get(kind, 1)


@pytest.fixture
def folder(learned, monkeypatch, tmp_path):
    """The same in an own folder. Times are those that the test gives, in float formats alone."""
    monkeypatch.chdir(tmp_path)
    for name in ('images', 'config.py', 'model.pth'):
        Path(name).symlink_to(learned / name)
    monkeypatch.setattr(search, 'installed_formats', lambda _: ([EAGER, ORT, F32], []))

    def times(calls, images, repeats, seconds, per_turn, least):
        found = {}
        assert per_turn and len(images) > 5
        for (name, kind), call in calls.items():
            assert call(images[0])
            found[name, kind] = np.full(5, milliseconds(name, kind))
        return found

    monkeypatch.setattr(search, 'measure', times)
    monkeypatch.setattr(search, 'ModelConversion', FitOnce)
    monkeypatch.setattr(search, 'agreeing_onnx', export_once)
    return tmp_path


@cache
def made(function, *key):
    """A place for what a function makes for a model, so that another test need not make it."""
    return []


def weights(model):
    return float(sum(p.double().abs().sum() for p in model.parameters()))


class FitOnce:
    """A ModelConversion whose sizes are the budget itself, which it fits once for all tests."""

    def __init__(self, model, images):
        self.model, self.images, self.key = model, images, (weights(model), len(images))

    def sizes(self, budget):
        return budget

    def fit(self, budget, **kwargs):
        found = made(FitOnce, *self.key, budget)
        if not found:
            conversion = made(ModelConversion, *self.key)
            if not conversion:
                conversion.append(ModelConversion(self.model, self.images))
            found += conversion[0].fit(conversion[0].sizes(budget), **kwargs)
        return copy.deepcopy(found[0]), found[1]


def export_once(model, *args):
    found = made(agreeing_onnx, weights(model), str(model))
    if not found:
        found += agreeing_onnx(model, *args)
    return found


def run(out='out', config='config.py', **kwargs):
    kwargs = dict(num_images=NUM, fit_images=3, device='cpu') | kwargs
    return repa_mm.speed_up(config, 'model.pth', out, **kwargs)


def chosen_of(rows):
    (found,) = (row for row in rows if row['chosen'])
    return found


def files(folder):
    return {p: p.read_bytes() for p in Path(folder).rglob('*') if p.is_file()}


class Given(search.Search):
    """A search among models that are not there: budget and format decide on losses and times."""

    def __init__(self, out_dir, formats=(EAGER, ORT, F32), loss=lambda c, k: 0.0, least=0.0):
        self.record = search.Record(str(out_dir), 'a')
        self.record.content.update(config='c', timed='one image', images='data', device='cpu')
        self.judge = SimpleNamespace(mark='b', num_images=NUM, images=lambda number: [None])
        self.out_dir, self.folder, self.num_images, self.repeats = str(out_dir), 'models', NUM, 5
        self.steps, self.notes, self.to_fit, self.checkpoint = 0, [], [0], 'model.pth'
        self.opened, self.divisor, self.formats, self.loss = {}, None, [*formats], loss
        self.stock, self.base = (Candidate(name, 'c.py', '') for name in ('stock', 'faster parts'))
        self.candidates = {c.name: c for c in (self.stock, self.base)}
        self.fits, self.exports, self.written, self.slower = [], [], [], 1
        self.conversion = SimpleNamespace(sizes=lambda budget: budget, fit=self.narrow)
        self.least = least
        for budget in self.record.content['fits'].values():
            self._add_narrow(budget)

    def narrow(self, budget):
        self.fits.append(budget)
        return None, SimpleNamespace(fraction=max(budget, self.least))

    def model(self, candidate):
        return Identity()

    def _export(self, candidate, kind):
        self.exports.append((candidate.name, kind))
        return dict(path=f'{candidate.name}.{kind}')

    def _open(self, candidate, kind, path):
        return Identity()

    def _test(self, candidate, kind):
        loss = self.loss(candidate, kind)
        known = candidate.budget == 1 and kind != INT8
        interval = [-loss, -loss] if known else [-loss - 1, 1 - loss]
        return dict(metric=90 - loss, difference=-loss, interval=interval, tested_in=kind)

    def time(self, models, repeats, what, least=3):
        models = {(self.stock.name, EAGER): None, **models}
        return {
            key: np.full(5, milliseconds(*key) * (1 if 'stock' in key else self.slower))
            for key in models
        }

    def _write_chosen(self, row):
        self.written.append(row['candidate'])

    def _report(self, rows, chosen):
        pass


class Identity(torch.nn.Identity):
    test_step = torch.nn.Identity.forward


@pytest.fixture
def saved(monkeypatch):
    """The paths of the models that a search saves."""
    found = []
    monkeypatch.setattr(search, 'save_model', lambda model, original, path: found.append(path))
    return found


def test_a_floor_is_met_by_the_whole_interval(tmp_path, saved):
    """By losses that the budget decides on: 2 points at 40 %, and ± 1."""
    given = Given(tmp_path, loss=lambda candidate, _: 2 * (1 - candidate.budget) / 0.6)
    # 1.5 points are lost at 55 %: bisection tries 40, 70, 55 and 47 %.
    assert chosen_of(given.run(2.5, None, ()))['candidate'] == '55 %'
    assert [*given.record.content['fits']] == ['40 %', '70 %', '55 %', '48 %']
    assert any('too few to tell whether these lose more than 2.5' in x for x in given.notes)
    assert any('48 % (OpenVINO f32)' in x for x in given.notes)
    given.notes.clear()
    assert chosen_of(given.run(0.5, None, ()))['candidate'] == 'faster parts'
    assert given.written == ['55 %', 'faster parts'] and len(saved) == len({*saved})


def test_what_is_slower_is_never_chosen(tmp_path, saved, capsys):
    given = Given(tmp_path, [EAGER])
    given.slower = 10
    assert not any(row['chosen'] for row in given.run(90, None, ())) and not given.written
    assert 'Nothing loses at most 90 points: nothing is chosen' in capsys.readouterr().out


def test_int8_is_tested_in_what_floats_keep(tmp_path, saved):
    def loss(candidate, kind):
        return 100 * (1 - candidate.budget) + 15 * (kind == INT8)

    given = Given(tmp_path, [INT8, BF16, F32], loss)
    given._search_floor(50)
    assert [*given.candidates][2:] == ['40 %', '70 %', '55 %', '48 %']
    tested = [name.split(' on ')[0] for name in given.record.content['tests']]
    assert [name for name in tested if INT8 in name] == [
        f'{name} in {INT8}' for name in ('faster parts', '55 %', '70 %')
    ]
    assert not any('float32' in name for name in tested)


def test_a_latency_is_met_by_the_second_fit(tmp_path, saved):
    given = Given(tmp_path)
    # Stock takes 100, OpenVINO 30 (0.2 + 0.8 budget): 0.15 is met below 37.5 %.
    row = chosen_of(given.run(None, 0.15, ()))
    assert row['format'] == F32 and row['ms'] <= 15 and 0.3 < row['budget'] <= 0.375
    # The second is on the line through the first and all widths.
    assert given.fits == [0.4, row['budget']]
    assert chosen_of(given.run(None, 0.4, ()))['candidate'] == 'faster parts'
    assert len(given.fits) == 2


def test_budgets_below_the_least_are_one_candidate(tmp_path, saved):
    """A candidate is named by what is left of it, not by what was asked for."""
    given = Given(tmp_path / 'a', least=0.08)
    rows = given.run(None, None, [0.02, 0.01])
    assert {row['candidate'] for row in rows} == {'stock', 'faster parts', '8 %'}
    assert {row['budget'] for row in rows if '%' in row['candidate']} == {0.08}
    given.fit(0.08)
    # It stays what was exported and tested, whichever budget comes first.
    other = Given(tmp_path / 'b', least=0.08)
    for budget in (0.08, 0.02):
        assert other.fit(budget).checkpoint == 'models/8.pth'
    assert saved == ['models/8.pth'] * 2


def test_a_failing_fit_is_tried_again(tmp_path, saved, monkeypatch):
    given, fit = Given(tmp_path, [EAGER]), Given.narrow

    def fails(self, budget):
        if budget < 0.4:
            raise np.linalg.LinAlgError('of this budget')
        return fit(self, budget)

    monkeypatch.setattr(given.conversion, 'fit', partial(fails, given))
    names = [row['candidate'] for row in given.run(None, None, [0.3, 0.5])]
    assert names == ['stock', 'faster parts', '50 %']
    assert '30 % of the blocks is left out: of this budget' in given.notes
    rows = Given(tmp_path, [EAGER]).run(None, None, [0.3, 0.004])  # rounds to 0
    assert [row['candidate'] for row in rows[2:]] == ['50 %', '30 %', '1 %']


@pytest.mark.parametrize('error, tries', [(ValueError, 1), (RuntimeError, 2), (MemoryError, 2)])
def test_only_a_refused_file_is_not_tried_again(tmp_path, monkeypatch, error, tries):
    calls = []

    def fail(*args):
        calls.append(args)
        raise error('an unknown operator')

    monkeypatch.setattr(search, 'agreeing_onnx', fail)
    monkeypatch.setattr(Given, '_export', search.Search._export)
    for _ in range(2):
        given = Given(tmp_path)
        assert given.open(given.base, ORT) is given.open(given.base, F32) is None
        (note,) = given.notes
        assert 'faster parts in onnx is left out: ' in note and 'an unknown operator' in note
        assert given.open(given.base, EAGER)
    assert len(calls) == tries


def test_every_precision_is_tested_in_itself(tmp_path, monkeypatch):
    """Formats of a GPU, on a CPU; what does not run is left out, and says why."""
    given = Given(tmp_path, [EAGER, 'PyTorch bf16', ORT_CUDA])
    monkeypatch.setattr(given, '_open', lambda _, kind, path: 1 / (kind != ORT_CUDA) and Identity())
    rows = given.run(None, None, ())
    assert [(r['candidate'], r['format'], r['tested_in']) for r in rows] == [
        (name, kind, kind) for name in ('stock', 'faster parts') for kind in given.formats[:2]
    ]
    assert any('parts in ONNX Runtime CUDA is left out: ZeroDivision' in x for x in given.notes)
    assert not any('not quiet' in note for note in given.notes)


def test_a_test_is_of_one_padding(tmp_path):
    kind, given = f'{F32}, padded', Given(tmp_path)
    given._test = lambda *_: dict(metric=given.divisor)
    for given.divisor in (64, 96, 64):
        assert given.test(given.base, kind)['metric'] == given.divisor
    assert len(given.record.content['tests']) == 2


def test_times_of_a_busy_machine_are_named(tmp_path):
    given = Given(tmp_path, [EAGER])
    times = np.array([[100.0] * 8, [30, 31, 90, 30, 95, 91, 30, 92]])
    given.time = lambda models, *_: dict(zip(models, times))
    rows = given.run(None, None, ())
    assert len(rows) == 2
    (note,) = given.notes
    assert "was not quiet: a row's times vary by 61% of stock's" in note


def test_an_interrupted_run_goes_on(tmp_path, saved):
    given = Given(tmp_path)

    def interrupted(budget):
        if len(given.fits) == 1:
            raise KeyboardInterrupt
        return Given.narrow(given, budget)

    given.conversion.fit = interrupted
    with pytest.raises(KeyboardInterrupt):
        given.run(None, None, [0.5, 0.3])
    rows = (given := Given(tmp_path)).run(None, None, [0.5, 0.3])
    assert given.fits == [0.3] and len(given.exports) == 3 and len(rows) == 10
    again = Given(tmp_path)
    again._test = None
    assert again.run(None, None, [0.5, 0.3]) == rows and not again.fits and not again.exports


def test_the_table(folder, monkeypatch, capsys):
    rows = run(budgets=[0.5], batch_size=4)
    assert [(row['candidate'], row['format']) for row in rows] == [
        ('stock', EAGER),
        *[('faster parts', kind) for kind in (EAGER, ORT, F32)],
        *[('50 %', kind) for kind in (EAGER, ORT, F32)],
    ]
    stock = rows[0]
    assert 40 < stock['metric'] < 100 and stock['difference'] == 0
    assert [row['speedup'] for row in rows[1:4]] == pytest.approx([100 / 60, 100 / 36, 100 / 30])
    # The fastest format of floats is tested, and the others point to it.
    assert {row['tested_in'] for row in rows[1:]} == {F32}
    assert rows[6]['mb'] < rows[3]['mb'] and not any(row['chosen'] for row in rows)
    kept = json.loads(Path('out/results.json').read_text())
    assert kept['rows'] == rows
    assert not Path('out/model.py').exists()
    out = capsys.readouterr().out
    assert 'searching on cpu' in out and '4 images in turn' in out
    assert '≈' in out and 'bootstrap' in out and 'fit 50 % of the blocks to 3 images' in out
    page = Path('out/report.html').read_text()
    assert page.count('data:image/jpeg') == 8 and '<svg' in page and 'src="http' not in page
    # A second call finds everything but the times.
    monkeypatch.setattr(search, 'agreeing_onnx', None)
    monkeypatch.setattr(search.Annotated, '__call__', None)
    monkeypatch.setattr(search, 'write_report', lambda *_: None)
    assert run(budgets=[0.5], batch_size=4) == rows


def test_the_chosen_model_keeps_its_promise(folder, monkeypatch):
    from repa_mm.export import runner_for_exported

    monkeypatch.setattr(search, 'STEPS', 1)
    row = chosen_of(run(max_loss=60))
    assert row['format'] == F32 and row['interval'][0] >= -60 and row['budget'] < 1
    runner = runner_for_exported(load_config('out/tested.py'), 'out/model.onnx', 'work', 'f32')
    assert runner.test()['accuracy/top1'] == row['metric']
    cfg = load_config('out/tested.py')
    cfg.work_dir, cfg.load_from = 'work2', 'out/model.pth'
    eager = Runner.from_cfg(cfg).test()['accuracy/top1']
    assert eager == row['metric']  # the same labels, as nothing is near a tie
    # Another choice takes its place. Without a runtime, it has no file.
    before = Path('out/model.pth').read_bytes()
    monkeypatch.setattr(search, 'installed_formats', lambda _: ([EAGER], []))
    row = chosen_of(run(latency=0.7))
    assert row['candidate'] == 'faster parts' and row['format'] == EAGER
    assert Path('out/model.pth').read_bytes() != before
    assert sorted(p.name for p in Path('out').glob('model.*')) == ['model.pth', 'model.py']
    model = open_model(load_config('out/model.py'), 'out/model.pth')
    assert any(isinstance(module, FastShiftWindowMSA) for module in model.modules())


LAZY = CONFIG.replace("default_scope = 'mmpretrain'\n", """
from mmpretrain.datasets import CustomDataset
from mmpretrain.evaluation import Accuracy
from mmpretrain.models import ImageClassifier, LinearClsHead, SwinTransformer
""")  # fmt: skip
for name in ('CustomDataset', 'Accuracy', 'ImageClassifier', 'LinearClsHead', 'SwinTransformer'):
    LAZY = LAZY.replace(f"'{name}'", name)
GRAY = CONFIG.replace('[100, 110, 120]', '[110]').replace('[50, 60, 70]', '[60]')
GRAY = GRAY.replace("type='SwinTransformer',", "type='SwinTransformer', in_channels=1,")
GRAY = GRAY.replace("'LoadImageFromFile'", "'LoadImageFromFile', color_type='grayscale'")


MULTI = CONFIG.replace("'LinearClsHead'", "'MultiLabelLinearClsHead'")


@pytest.mark.parametrize('text', [LAZY, GRAY, MULTI], ids=['lazy', 'gray', 'several labels'])
def test_other_configs(folder, text):
    """Of the pure Python style, of another number of channels, and of any number of labels."""
    Path('other.py').write_text(text)
    cfg = load_config('other.py')
    torch.save(dict(state_dict=random_model(cfg).state_dict()), 'other.pth')
    options = dict(images='images', num_images=NUM, fit_images=3, budgets=[], device='cpu')
    rows = repa_mm.speed_up('other.py', 'other.pth', 'out', **options)
    kinds = [(row['candidate'], row['format']) for row in rows]
    assert kinds[:4] == [('stock', EAGER), *(('faster parts', k) for k in (EAGER, ORT, F32))]
    assert [row['metric'] for row in rows] == [100] * len(rows)
    assert open_model(load_config('out/candidates/faster.py'), 'other.pth')


def test_a_repaformer_is_compared_with_its_merged_form(folder, monkeypatch):
    """Nobody deploys the training form."""
    monkeypatch.setattr(search, 'installed_formats', lambda _: ([EAGER], []))
    text = CONFIG.replace("'SwinTransformer'", "'RePaSwinTransformer'")
    Path('repa.py').write_text(f"custom_imports = dict(imports=['repa_mm'])\n{text}")
    model = random_model(load_config('repa.py'))
    torch.save(dict(state_dict=model.state_dict()), 'repa.pth')
    rows = repa_mm.speed_up('repa.py', 'repa.pth', 'out', num_images=0, budgets=[], device='cpu')
    assert [row['candidate'] for row in rows] == ['merged']
    found = open_model(load_config(rows[0]['config']), rows[0]['checkpoint'])
    assert has_training_form(model) and not has_training_form(found) and has_deploy_form(found)
    data = found.data_preprocessor(read_images(found.cfg, 'test', 2)[0], False)
    with torch.no_grad():
        outputs = [m(data['inputs']) for m in (found, model)]
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('what', ['labels', 'images'])
def test_other_data_are_tested_anew(folder, what):
    shutil.copytree(folder / 'images', 'own')
    images = sorted(Path('own').rglob('*.png'))
    lines = [f'{path.relative_to("own")} {path.parent.name}\n' for path in images]
    Path('labels.txt').write_text(''.join(lines))
    text = CONFIG.replace("data_root='images'", "data_prefix='own', ann_file='labels.txt'")
    Path('own.py').write_text(text)

    def metric(**kwargs):
        given = dict(num_images=NUM, fit_images=3) | kwargs
        found = search.Search('own.py', 'model.pth', 'out', **given)
        return found.test(found.stock, EAGER)['metric']

    before = metric()
    if what == 'labels':
        Path('labels.txt').write_text(''.join(f'{x[:-2]}{(int(x[-2]) + 1) % 3}\n' for x in lines))
        assert metric() < before - 20
        Path('labels.txt').write_text(''.join(lines))
        search.Annotated.__call__, call = None, search.Annotated.__call__
        try:
            assert metric() == before
            with pytest.raises(TypeError):
                metric(num_images=12)
        finally:
            search.Annotated.__call__ = call
    else:  # names and sizes: what was fitted belongs to other images
        kept = files('out')
        images[0].write_bytes(images[1].read_bytes())
        for other in (dict(), dict(fit_images=4), dict(images='images')):
            with pytest.raises(ValueError, match='of other data or of other options'):
                metric(**other)
        assert files('out') == kept


def test_a_target_that_nothing_meets(folder, monkeypatch, capsys):
    monkeypatch.setattr(search, 'installed_formats', lambda _: ([EAGER], []))
    monkeypatch.setattr(search, 'STEPS', 1)
    monkeypatch.setattr(sys, 'argv', ['speed_up.py', 'config.py', 'model.pth', 'out'])
    sys.argv += ['--latency', '0.01', '--num-images', '12', '--fit-images', '3']
    with pytest.raises(SystemExit) as error:
        tool = Path(repa_mm.__file__).parents[1] / 'tools' / 'speed_up.py'
        runpy.run_path(str(tool), run_name='__main__')
    assert error.value.code == 1
    out = capsys.readouterr().out
    assert "Nothing takes at most 1% of stock's time: nothing is chosen" in out
    assert not list(Path('out').glob('model.*'))
    assert not any(r['chosen'] for r in json.loads(Path('out/results.json').read_text())['rows'])


def test_images_without_annotations(folder):
    rows = run(images='images', budgets=[])
    assert rows[0]['metric'] == 100 and rows[3]['metric'] == pytest.approx(100, abs=0.01)
    assert 'what the original finds' in Path('out/report.html').read_text()
    # What is tested is not fitted to.
    found = search.Search('config.py', 'model.pth', 'out2', 'images', fit_images=24)
    tested = found.judge.indices
    assert len(tested) == 12 and len(found.to_fit) == 24 and not {*tested} & {*found.to_fit}
    with pytest.raises(ValueError, match='needs 30 images to test on, and there are 12'):
        run('out3', images='images', max_loss=1)
    assert not Path('out3/results.json').exists()


def test_a_large_model_has_few_turns_of_one_image_and_gives_memory_back(folder, monkeypatch):
    monkeypatch.setattr(search, 'installed_formats', lambda _: ([EAGER, ORT, INT8], []))
    for seconds, is_large in ((20, False), (0, True)):
        monkeypatch.setattr(search, 'LARGE', seconds)
        found = search.Search('config.py', 'model.pth', 'out', 'images')
        assert found.open(found.base, ORT).session.keep_memory is not is_large
        assert (INT8 in found.formats) is not is_large
        assert len(found.timed) == (1 if is_large else 12)
        assert any('int8 is left out' in note for note in found.notes) is is_large


def test_tested_images_are_no_single_class(folder):
    """Of a folder for each class, the first images are of the first class."""
    judge = Annotated(load_config('config.py'), 12, 'subset.json')
    labels = [judge.dataset.get_data_info(i)['gt_label'] for i in judge.indices]
    all_labels = [judge.dataset.get_data_info(i)['gt_label'] for i in range(36)]
    assert len(labels) == 12
    assert np.abs(3 * np.bincount(labels) - np.bincount(all_labels)).max() <= 3
    labels = [int(data['data_samples'][0].gt_label) for data in judge.images(6)]
    assert len({*labels}) == 3
    assert judge.config['test_dataloader'].dataset.indices == judge.indices


WRAPPERS = dict(
    ConcatDataset=lambda one, other: dict(type='ConcatDataset', datasets=[one, other]),
    RepeatDataset=lambda one, _: dict(type='RepeatDataset', times=2, dataset=one),
    ClassBalancedDataset=lambda one, _: dict(
        type='ClassBalancedDataset', oversample_thr=0.1, dataset=one
    ),
)


@pytest.mark.parametrize('kind', WRAPPERS)
def test_the_first_of_several_data_sets_is_tested(folder, kind):
    cfg = load_config('config.py')
    one = cfg.val_dataloader.dataset
    cfg.val_dataloader.dataset = WRAPPERS[kind](one, dict(one, data_root='nowhere'))
    if kind == 'ConcatDataset':
        cfg.val_evaluator = dict(
            type='mmdet.MultiDatasetsEvaluator', metrics=[cfg.val_evaluator, dict(type='Broken')],
            dataset_prefixes=['a', 'b'],
        )  # fmt: skip
        if not find_spec('mmdet'):
            pytest.skip('MMDetection is not installed')
    cfg.test_dataloader.dataset.data_root = 'nowhere'
    judge = Annotated(cfg, NUM, 'subset.json')
    assert judge.note == f'tested on the first data set of a {kind}'
    value = judge(open_model(load_config('config.py'), 'model.pth')).value
    cfg.update(judge.config, work_dir='work', load_from='model.pth')
    assert 40 < value == Runner.from_cfg(cfg).test()['accuracy/top1']


def test_errors_leave_the_folder_as_it_was(folder):
    torch.save(dict(state_dict=dict(a=torch.ones(1))), 'other.pth')
    with pytest.raises(CheckpointError, match='other.pth is of another model'):
        repa_mm.speed_up('config.py', 'other.pth', 'out')
    nowhere = CONFIG + "val_dataloader['dataset']['data_root'] = 'nowhere'\n"
    Path('no_data.py').write_text(nowhere)
    with pytest.raises(FileNotFoundError, match='train data are not there.*--images'):
        repa_mm.speed_up('no_data.py', 'model.pth', 'out')
    Path('no_test.py').write_text(CONFIG.replace("dict(type='Accuracy', topk=(1,))", 'None'))
    with pytest.raises(ValueError, match='no validation data with an evaluator.*--images'):
        repa_mm.speed_up('no_test.py', 'model.pth', 'out')
    for wrong, text in (
        (dict(latency=40), r'in \(0, 1\), not 40'), (dict(latency=0), 'not 0'),
        (dict(max_loss=-1), 'not -1'), (dict(budgets=[60]), r'not \[60\]'),
        (dict(repeats=1), 'repeats must be at least 3'),
        (dict(max_loss=1, num_images=0), 'at least 30'),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            run(**wrong)
    assert not Path('out').exists()
    run(budgets=[])
    before = files('out')
    Path('another.py').write_text(CONFIG.replace('window_size=4', 'window_size=8'))
    with pytest.raises(ValueError, match='results of another model'):
        repa_mm.speed_up('another.py', 'model.pth', 'out')
    assert files('out') == before
    Path('mine').mkdir()
    Path('mine/model.pth').write_text('mine')
    with pytest.raises(ValueError, match='model.pth of something else'):
        run('mine')
    assert files('mine') == {Path('mine/model.pth'): b'mine'}
