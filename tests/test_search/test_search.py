"""One command makes a model faster, chooses one that keeps its promises, and goes on later."""

import copy
import json
import re
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import onnx
import openvino
import pytest
import torch
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement, InstanceData

import repa_mm
from repa_mm.apis import open_model, read_images
from repa_mm.convert.pretrained import save_model
from repa_mm.export import ExportedModel, Session, runner_for_exported
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.io.configs import load_config
from repa_mm.reparam import CheckpointError, has_deploy_form, has_training_form
from repa_mm.search import workbench
from repa_mm.search.formats import EAGER, F32, GRAPHS, INT8, ORT
from repa_mm.search.judge import Annotated
from repa_mm.search.search import copy_with_precision
from tests.conftest import random_model
from tests.test_export.rectangles import scene, train

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


MADE = {}  # so that another test need not make it


def once(function, model, images):
    weights = float(sum(p.double().abs().sum() for p in model.parameters()))
    key = function.__name__, str(model), weights, len(images)
    if key not in MADE:
        MADE[key] = function(model, images)
    return MADE[key]


@pytest.fixture
def folder(learned, monkeypatch, tmp_path):
    """The same in an own folder. Each candidate is faster than those before, OpenVINO fastest."""
    monkeypatch.chdir(tmp_path)
    for name in ('images', 'config.py', 'model.pth'):
        Path(name).symlink_to(learned / name)
    formats(monkeypatch, EAGER, ORT, F32)
    monkeypatch.setattr('gc.collect', lambda: 0)  # slow in a process of many tests
    rows = []

    def times(calls, images, repeats, seconds, settle, per_turn):
        assert per_turn and all(call(copy.deepcopy(images[0])) for call in calls.values())
        candidate, slower = divmod(len(rows), len(workbench.installed_formats('cpu')[0]))
        rows.append(calls)
        found = np.full(5, 60 * 0.95**candidate + slower)
        return {name: np.full(5, 100.0) if name == '0' else found for name in calls}

    monkeypatch.setattr(workbench, 'measure', times)
    for name in ('conversion_of', 'agreeing_onnx'):
        monkeypatch.setattr(workbench, name, partial(once, getattr(workbench, name)))
    return tmp_path


def formats(monkeypatch, *kinds):
    monkeypatch.setattr(workbench, 'installed_formats', lambda *_: ([*kinds], []))


def run(out='out', config='config.py', checkpoint='model.pth', **kwargs):
    kwargs = dict(num_images=NUM, fit_images=3, device='cpu', budgets=[]) | kwargs
    return repa_mm.speed_up(config, checkpoint, out, **kwargs)


def chosen_of(rows):
    (found,) = (row for row in rows if row.chosen)
    return found


def files(folder):
    return {p: p.read_bytes() for p in Path(folder).rglob('*') if p.is_file()}


def stored(out='out'):
    return json.loads(Path(out, 'results.json').read_text())


def no_more(monkeypatch):
    """Whatever is fitted, exported or tested from now on is an error."""
    for name in ('conversion_of', 'agreeing_onnx'):
        monkeypatch.setattr(workbench, name, None)
    monkeypatch.setattr(Annotated, '__call__', None)


def test_the_table(folder, capsys):
    rows = run(budgets=[0.5], batch_size=4)
    assert [(row.candidate, row.format) for row in rows] == [
        ('stock', EAGER),
        *[(name, kind) for name in ('exact parts', '50 %') for kind in (EAGER, ORT, F32)],
    ]
    stock = rows[0]
    assert 40 < stock.metric < 100 and stock.difference == 0 and stock.speedup == 1
    assert rows[3].speedup == pytest.approx(100 / rows[3].ms) and rows[3].ms_p95 == 60
    assert {row.tested_in for row in rows[1:]} == {F32}  # the others point to it
    assert rows[6].mb < rows[3].mb and not any(row.chosen for row in rows)
    assert all(Path(x).is_file() for row in rows[1:] for x in (row.config, row.checkpoint))
    assert not Path('out/model.py').exists()
    out = capsys.readouterr().out
    for text in (
        'searching on cpu',
        'at most 13 steps\n1/13 test stock, PyTorch: ',
        '4 images in tu',
    ):
        assert text in out
    assert re.search(r'\n8/13 fit 50 % of the blocks: \d+ s(, about \d+ s left)?\n', out)
    (head,) = re.findall(r'^candidate .*', out, re.M)
    assert head.split()[:4] == ['candidate', 'format', 'ms', 'stock'] and len(head) <= 100
    page, text = (Path(f'out/report.{x}').read_text() for x in ('html', 'md'))
    for found in page, text:
        assert stored()['environment']['CPU'] in found and '≈' in found and '95th perc' in found
    assert len(re.findall(r'^\| [^|]+\|', text, re.M)) == len(rows) + 1
    assert page.count('data:image/jpeg') == 8 and '<svg' in page and 'src="http' not in page


def test_a_folder_that_moves_keeps_its_own_files(folder, monkeypatch):
    """Under its old name there are another model's."""
    formats(monkeypatch, EAGER, ORT)
    rows = run('old', budgets=[0.5])
    shutil.move('old', 'new')
    loaded = torch.load('model.pth', weights_only=True)
    torch.save(dict(state_dict={k: v + 0.01 for k, v in loaded['state_dict'].items()}), 'b.pth')
    run('old', checkpoint='b.pth')
    with monkeypatch.context() as patch:
        no_more(patch)
        again = run('new', budgets=[0.5], max_loss=50)
    assert [(r.name, r.metric, r.interval, r.tested_in) for r in again] == [
        (r.name, r.metric, r.interval, r.tested_in) for r in rows
    ]
    row = chosen_of(again)
    assert row.candidate == '50 %' and row.file == 'new/candidates/50.onnx'
    assert stored('new')['rows'][4]['file'] == 'candidates/50.onnx'
    assert onnx.load('new/model.onnx').graph == onnx.load(row.file).graph


def test_the_chosen_model_keeps_its_promise(folder, monkeypatch, capsys):
    text = CONFIG + "val_dataloader['dataset']['indices'] = list(range(35, 4, -1))\n"
    Path('some.py').write_text(text)
    row = chosen_of(run(config='some.py', max_loss=60, budgets=[0.4]))
    assert row.format == F32 and row.interval[0] >= -60 and row.budget == 0.4
    said = capsys.readouterr().out
    for line in (
        f'Chosen: 40 %, OpenVINO f32, {row.speedup:.2f} × as fast, {row.difference:+.2f} top-1 [',
        'test it: python tools/test_exported.py out/tested.py out/model.onnx --precision f32\n',
        'time it: python tools/benchmark.py out/tested.py out/model.pth --dataset --device cpu '
        '--baseline out/candidates/stock.py --baseline-checkpoint model.pth --exported '
        'out/model.onnx:f32\n',
        "openvino.compile_model('out/model.onnx', 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})\n",
    ):
        assert line in said
    assert Session('out/model.onnx').metadata['INFERENCE_PRECISION_HINT'] == 'f32'
    shutil.move('out', out := 'was moved')
    cfg, weights = load_config(f'{out}/tested.py'), str(Path(out, 'model.pth').resolve())
    assert cfg.load_from == load_config(f'{out}/model.py').load_from == weights
    runner = runner_for_exported(cfg, f'{out}/model.onnx', 'work', 'f32')
    assert runner.test()['accuracy/top1'] == pytest.approx(row.metric)
    cfg.work_dir = 'work2'
    eager = Runner.from_cfg(cfg).test()['accuracy/top1']
    assert eager == pytest.approx(row.metric)  # the same labels, as nothing is near a tie
    # Another choice takes its place. Without a runtime, it has no file.
    before = Path(out, 'model.pth').read_bytes()
    formats(monkeypatch, EAGER)
    row = chosen_of(run(out, config='some.py', latency=0.7, budgets=[0.4]))
    assert row.candidate == 'exact parts' and row.format == EAGER
    assert Path(out, 'model.pth').read_bytes() != before
    assert sorted(p.name for p in Path(out).glob('model.*')) == ['model.pth', 'model.py']
    model = open_model(load_config(f'{out}/model.py'), f'{out}/model.pth')
    assert any(isinstance(module, FastShiftWindowMSA) for module in model.modules())


def test_fits_of_several_budgets(folder, monkeypatch):
    """A candidate is named by what is left of it, and a fit that fails is tried again."""
    formats(monkeypatch, EAGER)
    error, fitted = [], []

    def fit(budget, progress):
        if error:
            raise error[0]
        fitted.append(budget)
        model = open_model('config.py', 'model.pth')
        return model, SimpleNamespace(fraction=max(budget, 0.18))

    conversion = SimpleNamespace(sizes=lambda budget=0.5: budget, fit=fit)
    monkeypatch.setattr(workbench, 'conversion_of', lambda *_: conversion)

    def narrow(*budgets):
        rows = run(budgets=budgets, num_images=0)
        return [(row.candidate, row.budget) for row in rows[2:]]

    assert narrow(0.02, 0.3, 0.01) == [('30 %', 0.3), ('18 %', 0.18)]
    assert stored()['rows'][0]['metric'] is stored()['rows'][0]['tested_in'] is None
    error.append(np.linalg.LinAlgError('of this budget'))
    assert narrow(0.3, 0.2) == [('30 %', 0.3)]
    assert "20 % of the blocks is left out: LinAlgError('of this budget')" in stored()['notes']
    error[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        narrow(0.3, 0.2)
    assert not stored()['rows']  # those of the call before had other budgets
    error.clear()
    assert narrow(0.3, 0.2) == [('30 %', 0.3), ('20 %', 0.2)]
    assert fitted == [0.3, 0.02, 0.01, 0.2]
    formats(monkeypatch, EAGER, ORT)
    for least in (0.02, 0.01):  # two fits of one name have a file each
        assert [row.format for row in run(budgets=[least], num_images=0)[3:]] == [EAGER, ORT]


def test_a_file_that_fails_is_tried_again_by_the_next_call(folder, monkeypatch):
    calls = []

    def fail(*args):
        calls.append(args)
        raise RuntimeError('an unknown operator')

    monkeypatch.setattr(workbench, 'agreeing_onnx', fail)
    for _ in range(2):
        assert [row.format for row in run(num_images=0)] == [EAGER, EAGER]
        (note,) = stored()['notes']
        assert 'exact parts in onnx is left out: ' in note and 'an unknown operator' in note
    assert len(calls) == 2  # ONNX Runtime and OpenVINO share a file


def test_every_precision_is_tested_in_itself(folder, monkeypatch):
    """A format that does not run is left out, and says why. What cannot be chosen is not tested."""
    formats(monkeypatch, EAGER, 'PyTorch bf16', GRAPHS)
    assert [row.tested_in for row in run(max_loss=50)] == [EAGER, None, 'PyTorch bf16']
    assert [(r.candidate, r.format, r.tested_in) for r in run()] == [
        ('stock', EAGER, EAGER),
        *(('exact parts', kind, kind) for kind in (EAGER, 'PyTorch bf16')),
    ]
    note = f'exact parts in {GRAPHS} is left out: ValueError'  # on a CPU
    assert any(note in text for text in stored()['notes'])


def test_a_format_shares_a_test_only_if_it_finds_the_same(folder, monkeypatch):
    """OpenVINO gives the scores to other labels here."""

    def exported(file, preprocessor, runtime):
        model = ExportedModel(file, preprocessor, runtime)
        step = model.test_step
        if runtime:
            model.test_step = lambda data: [
                x.set_pred_score(x.pred_score.roll(1)) for x in step(data)
            ]
        return model

    monkeypatch.setattr(workbench, 'ExportedModel', exported)
    for _ in range(2):
        stock, *rows = run()
        assert [row.tested_in for row in rows] == [ORT, ORT, F32]
        assert [row.metric == stock.metric for row in rows] == [True, True, False]
        assert [row.interval == [0, 0] for row in rows] == [True, True, False]
        no_more(monkeypatch)


def test_nothing_that_is_found_is_not_the_same():
    none, one = (
        BaseDataElement(
            pred_instances=InstanceData(
                bboxes=torch.ones(n, 4), scores=torch.ones(n), labels=torch.ones(n)
            )
        )
        for n in (0, 1)
    )
    assert (
        workbench.same(one, one)
        and not workbench.same(none, none)
        and not workbench.same(none, one)
    )


def test_int8_is_accepted_on_images_that_are_neither_calibrated_on_nor_tested(folder, monkeypatch):
    formats(monkeypatch, EAGER, INT8)
    given = []

    def quantize(model, path, *found, least):
        given.extend(found)
        assert least == 0.9  # the metric decides

    monkeypatch.setattr(workbench, 'quantize', quantize)
    run(images='images', num_images=12, fit_images=9)
    calibrated, held_out = ({x['data_samples'][0].img_path for x in part} for part in given)
    tested = {str(path) for path in sorted(Path('images').absolute().rglob('*.png'))[::3]}
    assert len(calibrated) == 6 and len(held_out) == 3
    assert not calibrated & held_out and not (calibrated | held_out) & tested


def test_faster_parts_that_compute_something_else_are_refused(folder):
    """A file of LoRA has not the weights that its config reads by `init_cfg`."""
    cfg = load_config('config.py')
    init = dict(type='Pretrained', checkpoint='model.pth', prefix='backbone.')
    cfg.model.backbone = dict(
        type='LoRAModel', module=dict(cfg.model.backbone, init_cfg=init), alpha=4, rank=4,
        targets=[dict(type='.*ffn.layers.1')],
    )  # fmt: skip
    Path('lora.py').write_text(cfg.pretty_text)
    torch.save(dict(state_dict=random_model(load_config('lora.py')).state_dict()), 'lora.pth')
    with pytest.raises(ValueError, match=r'exact parts \(out/candidates/exact.py\)'):
        run(config='lora.py', checkpoint='lora.pth', images='images', num_images=0)


def test_the_chosen_model_is_opened_again(folder, monkeypatch):
    formats(monkeypatch, EAGER)

    def save(model, *args):
        other = copy.deepcopy(model)
        torch.nn.init.normal_(other.head.fc.weight)
        save_model(other, *args)

    monkeypatch.setattr('repa_mm.search.search.save_model', save)
    with pytest.raises(ValueError, match='out/model.py'):
        run(latency=0.99, num_images=0)


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
GRAY = GRAY.replace("visualizer = dict(type='UniversalVisualizer')\n", '')
MULTI = CONFIG.replace("'LinearClsHead'", "'MultiLabelLinearClsHead'")
REPA = f"{CONFIG.replace('SwinTr', 'RePaSwinTr')}custom_imports = dict(imports=['repa_mm'])\n"


@pytest.mark.parametrize(
    'text', [LAZY, GRAY, MULTI, REPA], ids=['lazy', 'gray', 'several labels', 'RePaFormer']
)
def test_other_configs(folder, monkeypatch, text):
    """Of the pure Python style, of other channels (and without a visualizer), and others."""
    formats(monkeypatch, EAGER, ORT)
    Path('other.py').write_text(text)
    model = random_model(load_config('other.py'))
    torch.save(dict(state_dict=model.state_dict()), 'other.pth')
    rows = run(config='other.py', checkpoint='other.pth', images='images')
    kinds = [(row.candidate, row.format) for row in rows]
    if text == REPA:  # nobody deploys the training form
        assert kinds == [('merged', EAGER), ('merged', ORT)]
        found = open_model(load_config(rows[0].config), rows[0].checkpoint)
        assert has_training_form(model) and not has_training_form(found) and has_deploy_form(found)
        data = found.data_preprocessor(read_images(found.cfg, 'test', 2)[0], False)
        with torch.no_grad():
            outputs = [m(data['inputs']) for m in (found, model)]
        torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
    else:
        assert kinds == [('stock', EAGER), ('exact parts', EAGER), ('exact parts', ORT)]
        assert open_model(load_config('out/candidates/exact.py'), 'other.pth')
    assert [row.metric for row in rows] == [100] * len(rows)


@pytest.mark.parametrize('what', ['labels', 'images'])
def test_other_data_are_tested_anew(folder, monkeypatch, what):
    formats(monkeypatch, EAGER)
    shutil.copytree(folder / 'images', 'own')
    images = sorted(Path('own').rglob('*.png'))
    lines = [f'{path.relative_to("own")} {path.parent.name}\n' for path in images]
    Path('labels.txt').write_text(''.join(lines))
    text = CONFIG.replace("data_root='images'", "data_prefix='own', ann_file='labels.txt'")
    Path('own.py').write_text(text)

    def metric(**kwargs):
        return run(config='own.py', **kwargs)[0].metric

    before = metric()
    if what == 'labels':
        Path('labels.txt').write_text(''.join(f'{x[:-2]}{(int(x[-2]) + 1) % 3}\n' for x in lines))
        assert metric() < before - 20
        Path('labels.txt').write_text(''.join(lines))
        no_more(monkeypatch)
        assert metric() == before
        with pytest.raises(TypeError):
            metric(num_images=12)
    else:  # names and sizes: what was fitted belongs to other images
        kept = files('out')
        images[0].write_bytes(images[1].read_bytes())
        for other in (dict(), dict(fit_images=4), dict(images='images')):
            with pytest.raises(ValueError, match='of other data or of other options'):
                metric(**other)
        assert files('out') == kept


def test_an_int8_file_says_what_it_was_tested_in(tmp_path):
    x = openvino.opset13.parameter([1, 3])
    model = openvino.Model([openvino.opset13.relu(x)], [x])
    model.set_rt_info('classification', ['framework', 'task'])
    openvino.save_model(model, tmp_path / 'a.xml')
    copy_with_precision(str(tmp_path / 'a.xml'), str(tmp_path / 'b.xml'), 'bf16')
    assert (tmp_path / 'b.bin').exists()
    expected = dict(task='classification', INFERENCE_PRECISION_HINT='bf16')
    assert Session(str(tmp_path / 'b.xml')).metadata == expected


def test_a_target_that_nothing_meets(folder, monkeypatch, capsys):
    formats(monkeypatch, EAGER)
    monkeypatch.setattr(sys, 'argv', ['speed_up.py', 'config.py', 'model.pth', 'out', '--budgets'])
    sys.argv += ['--latency', '0.01', '--num-images', '12', '--fit-images', '3']
    with pytest.raises(SystemExit) as error:
        tool = Path(repa_mm.__file__).parents[1] / 'tools' / 'speed_up.py'
        runpy.run_path(str(tool), run_name='__main__')
    assert error.value.code == 1
    out = capsys.readouterr().out
    assert "Nothing takes at most 1% of stock's time: nothing is chosen" in out
    assert not list(Path('out').glob('model.*'))
    assert not any(row['chosen'] for row in stored()['rows'])


def test_images_without_annotations(folder, monkeypatch):
    formats(monkeypatch, EAGER, F32)
    rows = run(images='images', num_images=100, fit_images=24)
    assert rows[0].metric == 100 and rows[2].metric == pytest.approx(100, abs=0.01)
    assert 'what the original finds' in Path('out/report.html').read_text()
    assert stored()['images'].startswith('12 images of /')  # a third; the others are fitted to
    with pytest.raises(ValueError, match='needs 30 images to test on, not 12'):
        run('out3', images='images', max_loss=1)
    assert not Path('out3/results.json').exists()


@pytest.mark.parametrize('seconds, is_large', [(20, False), (0, True)])
def test_a_large_model_has_few_turns_of_one_image(folder, monkeypatch, seconds, is_large):
    """Rows that a busy minute made fast are timed again, two at a time."""
    formats(monkeypatch, EAGER, ORT, F32, INT8)
    monkeypatch.setattr(workbench, 'SLOW_SECONDS', seconds)
    monkeypatch.setattr(workbench, 'quantize', lambda *_: 1 / 0)
    timed, together = [], []

    def measure(calls, images, *_, **__):
        timed.append(images)
        if len(timed) <= 3:  # each row for the first time
            return {'0': np.full(5, 100.0), '1': np.array([25, 25, 25, 20, 125.0])}
        assert all(call(copy.deepcopy(images[0])) for call in calls.values())
        together.append(len(calls))
        return {name: np.full(5, 100.0 - 50 * bool(int(name)) - int(name)) for name in calls}

    monkeypatch.setattr(workbench, 'measure', measure)
    rows = run(images='images', num_images=0, latency=0.9)
    assert {len(images) for images in timed} == {1 if is_large else 12}
    assert together == [3, 3]  # of three rivals
    assert sorted(row.ms for row in rows[1:]) == [48, 49, 49]
    assert chosen_of(rows).ms_p95 == min(row.ms for row in rows)
    notes = [note for note in stored()['notes'] if 'int8 is left out: an image takes' in note]
    assert len(notes) == is_large


def test_errors_leave_the_folder_as_it_was(folder, monkeypatch):
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
        (dict(max_loss=1, num_images=0), 'needs 30 images'), (dict(formats=['trt']), 'no format'),
        (dict(formats=['graphs']), "no format to try on 'cpu'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            run(**wrong)
    assert not Path('out').exists()
    formats(monkeypatch, EAGER)
    with pytest.raises(ValueError, match='has 86.67 accuracy/top1 .* max_loss=90 lets .* lose'):
        run('foul', max_loss=90)  # as of a model that finds nothing
    run()
    before = files('out')
    Path('another.py').write_text(CONFIG.replace('window_size=4', 'window_size=8'))
    with pytest.raises(ValueError, match='results of another model'):
        repa_mm.speed_up('another.py', 'model.pth', 'out')
    assert files('out') == before
