"""Wrong input is named, and costs nobody a file."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import repa_mm
from repa_mm.reparam import CheckpointError
from repa_mm.run import (
    draw_predictions,
    init_model,
    load_config,
    reparameterize_checkpoint,
    runner_for_testing,
    runner_for_training,
)

pytest.importorskip('mmdet')
RETINANET = repa_mm.config_path('demo/retinanet_repa_swin_digits.py')
VANILLA = repa_mm.config_path('demo/retinanet_swin_digits.py')
MASK_RCNN = repa_mm.config_path('demo/mask_rcnn_repa_swin_digits.py')


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    """A folder of checkpoints, good and bad."""
    folder = tmp_path_factory.mktemp('checkpoints')

    def save(name, model):
        torch.save(dict(meta={}, state_dict=model.state_dict()), folder / f'{name}.pth')

    model = init_model(RETINANET)
    save('good', model)
    save('merged', repa_mm.reparameterize(model))
    save('vanilla', init_model(VANILLA))
    options = {'model.backbone.arch.depths': [2, 2, 2, 2]}
    save('shallow', init_model(load_config(RETINANET, options)))
    save('resnet', torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7)))
    good = (folder / 'good.pth').read_bytes()
    (folder / 'truncated.pth').write_bytes(good[: len(good) // 2])
    (folder / 'empty.pth').write_bytes(b'')
    (folder / 'text.pth').write_text('not a checkpoint')
    torch.save([1, 2], folder / 'list.pth')
    torch.save(dict(state_dict={}), folder / 'nothing.pth')
    nan = init_model(RETINANET)
    nan.backbone.stages[0].blocks[0].ffn.norm1.running_mean[0] = float('nan')
    save('nan', nan)
    with open(folder / 'hostile.pth', 'wb') as file:
        pickle.dump(Hostile(folder / 'owned'), file)
    torch.save(
        dict(state_dict=model.state_dict(), extra=Hostile(folder / 'owned')),
        folder / 'hostile2.pth',
    )
    return folder


class Hostile:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


BAD_CHECKPOINTS = [
    ('missing', FileNotFoundError, 'no checkpoint at .*missing.pth'),
    ('truncated', CheckpointError, 'truncated'),
    ('empty', CheckpointError, 'empty.pth'),
    ('text', CheckpointError, 'text.pth'),
    ('list', CheckpointError, 'holds a list'),
    ('nothing', CheckpointError, 'no state dict'),
    ('hostile', CheckpointError, 'hostile.pth'),
]


@pytest.mark.parametrize('name, kind, message', BAD_CHECKPOINTS)
def test_unreadable_checkpoints(name, kind, message, checkpoints, in_digits):
    path = str(checkpoints / f'{name}.pth')
    for use in (
        lambda: runner_for_testing(RETINANET, path, str(in_digits)),
        lambda: runner_for_training(RETINANET, str(in_digits), resume=path),
        lambda: init_model(RETINANET, path),
        lambda: reparameterize_checkpoint(RETINANET, path, str(in_digits / 'out.pth')),
    ):
        with pytest.raises(kind, match=message):
            use()
    assert not (in_digits / 'out.pth').exists()
    assert not (checkpoints / 'owned').exists()


def test_hostile_extras_are_not_run(checkpoints, in_digits):
    path = str(checkpoints / 'hostile2.pth')
    with pytest.raises(CheckpointError, match='hostile2.pth.* hostile .*open'):
        init_model(RETINANET, path)
    assert not (checkpoints / 'owned').exists()


@pytest.mark.parametrize(
    'name, message',
    [
        ('vanilla', 'vanilla'),
        ('shallow', 'another architecture'),
        ('resnet', 'none of the weights'),
    ],
)
def test_checkpoints_of_other_models(name, message, checkpoints, in_digits):
    runner = runner_for_testing(RETINANET, str(checkpoints / f'{name}.pth'), str(in_digits))
    with pytest.raises(CheckpointError, match=message):
        runner.test()
    with pytest.raises(CheckpointError):
        init_model(RETINANET, str(checkpoints / f'{name}.pth'))


def test_forms_that_do_not_fit(checkpoints, in_digits):
    good, merged = (str(checkpoints / f'{n}.pth') for n in ('good', 'merged'))
    deploy = {'model.backbone.deploy': True}
    with pytest.raises(CheckpointError, match='training form.*deploy=True'):
        runner_for_testing(RETINANET, good, str(in_digits), cfg_options=deploy).test()
    with pytest.raises(CheckpointError, match='cannot be trained'):
        runner_for_training(RETINANET, str(in_digits), cfg_options=dict(load_from=merged)).train()
    with pytest.raises(ValueError, match='deploy form.*cannot be trained'):
        runner_for_training(RETINANET, str(in_digits), cfg_options=deploy).train()
    with pytest.raises(CheckpointError, match='is reparameterized'):
        runner_for_testing(RETINANET, merged, str(in_digits), form='training').test()
    with pytest.raises(CheckpointError, match='is reparameterized'):
        reparameterize_checkpoint(RETINANET, merged, str(in_digits / 'o.pth'))
    with pytest.raises(ValueError, match='nothing to reparameterize'):
        reparameterize_checkpoint(
            VANILLA, str(checkpoints / 'vanilla.pth'), str(in_digits / 'o.pth')
        )
    assert not os.path.exists(in_digits / 'o.pth')


def test_pictures_lie_where_a_relative_path_says(checkpoints, in_digits):
    """MMDetection would write into a folder of the run."""
    folder = in_digits / 'pictures'
    good, work_dir = str(checkpoints / 'good.pth'), str(in_digits / 'work')
    runner_for_testing(RETINANET, good, work_dir, show_dir=os.path.relpath(folder)).test()
    assert len(list(folder.iterdir())) == 4
    assert not list((in_digits / 'work').rglob('*.png'))


@pytest.mark.parametrize('name', ['good', 'merged', 'resnet'])
def test_a_test_reads_and_loads_its_checkpoint_once(name, checkpoints, in_digits, monkeypatch):
    read, loaded, load = [], [], torch.load
    monkeypatch.setattr(
        torch, 'load', lambda f, *args, **kw: read.append(f) or load(f, *args, **kw)
    )
    path = str(checkpoints / f'{name}.pth')
    runner = runner_for_testing(RETINANET, path, str(in_digits))
    runner.model._register_load_state_dict_pre_hook(lambda *args: loaded.append(args))
    if name == 'resnet':
        with pytest.raises(CheckpointError, match='none of the weights'):
            runner.test()
        assert not loaded
    else:
        runner.test()
        assert len(loaded) == 1
    assert read == [path]


def test_reparameterize_keeps_its_input(checkpoints, tmp_path):
    good = checkpoints / 'good.pth'
    before = good.read_bytes()
    link = tmp_path / 'link.pth'
    link.symlink_to(good)
    for out in (good, link, checkpoints / '../checkpoints0/good.pth'):
        if os.path.realpath(out) == os.path.realpath(good):
            with pytest.raises(ValueError, match='is the input'):
                reparameterize_checkpoint(RETINANET, str(good), str(out))
    with pytest.raises(IsADirectoryError, match='folder'):
        reparameterize_checkpoint(RETINANET, str(good), str(tmp_path))
    with pytest.raises(OSError, match='cannot write'):
        reparameterize_checkpoint(RETINANET, str(good), '/proc/none/out.pth')
    with pytest.raises(CheckpointError, match='not finite'):
        reparameterize_checkpoint(
            RETINANET, str(checkpoints / 'nan.pth'), str(tmp_path / 'out.pth')
        )
    assert good.read_bytes() == before
    assert os.listdir(tmp_path) == ['link.pth']


def test_killed_while_writing(checkpoints, tmp_path):
    """A signal while a checkpoint is written leaves the old file and nothing else."""
    out = tmp_path / 'out.pth'
    out.write_text('old')
    code = (
        'import sys, time, torch\n'
        'import os\n'
        'from repa_mm.run.cli import clear_errors\n'
        'from repa_mm.weights import save_checkpoint\n'
        'def slow(file):\n'
        '    print("writing", flush=True)\n'
        '    time.sleep(60)\n'
        'os.fsync = slow\n'
        'with clear_errors():\n'
        '    save_checkpoint({}, sys.argv[1])\n'
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, '-c', code, str(out)],
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=root),
        text=True,
    )
    assert process.stdout.readline() == 'writing\n'
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0
    assert out.read_text() == 'old'
    assert os.listdir(tmp_path) == ['out.pth']


@pytest.mark.parametrize(
    'text, message',
    [
        ('model = dict(', 'cannot read the config'),
        ('model = dict()\ntest_dataloader = dict()', 'default_scope'),
        ("default_scope = 'mmpose'\nmodel = dict()\ntest_dataloader = dict()", "is 'mmpose'"),
        ("default_scope = 'mmdet'", "no 'model'"),
        ("_base_ = 'not_there.py'", 'not_there.py'),
    ],
)
def test_bad_configs(text, message, tmp_path):
    config = tmp_path / 'config.py'
    config.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(str(config))


@pytest.mark.parametrize(
    'options, message',
    [
        ({'model.backbone.idle_ratio': 1.5}, 'idle_ratio must be a number'),
        ({'model.backbone.idle_ratio': 'much'}, 'idle_ratio must be a number'),
        ({'model.backbone.idle_ratio': [0.5, 0.5]}, '2 entries'),
        ({'model.backbone.arch': 'gigantic'}, 'gigantic'),
    ],
)
def test_bad_models(options, message, in_digits):
    with pytest.raises(Exception, match=message):
        runner_for_training(RETINANET, str(in_digits), cfg_options=options)


def test_bad_data(in_digits, tmp_path):
    good = repa_mm.config_path('demo/upernet_repa_swin_digits.py')
    with pytest.raises(FileNotFoundError, match="no data set at 'no/where'"):
        runner_for_training(
            RETINANET,
            str(in_digits),
            cfg_options={'train_dataloader.dataset.data_root': 'no/where'},
        )
    with pytest.raises(FileNotFoundError, match='none.json'):
        runner_for_training(
            RETINANET,
            str(in_digits),
            cfg_options={'train_dataloader.dataset.ann_file': 'none.json'},
        )
    empty = tmp_path / 'empty.json'
    empty.write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(ValueError, match='train data set.*empty.json'):
        runner_for_training(
            RETINANET, str(in_digits), cfg_options={'train_dataloader.dataset.ann_file': str(empty)}
        )
    pytest.importorskip('mmseg')
    (tmp_path / 'images').mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match='data set'):
        runner_for_training(
            good, str(in_digits), cfg_options={'train_dataloader.dataset.data_root': str(tmp_path)}
        )


def test_an_annotation_with_the_id_0(checkpoints, in_digits):
    """Predictions without an error have an AP of 1, and one line tells of the id."""
    content = json.loads(Path('data/demo/coco/annotations/instances_val2017.json').read_text())
    image = content['images'][0]['id']
    content['images'] = content['images'][:1]
    annotations = [a for a in content['annotations'] if a['image_id'] == image]
    for number, annotation in enumerate(annotations):
        annotation['id'] = number
    content['annotations'] = annotations
    file = in_digits / 'from_0.json'
    file.write_text(json.dumps(content))
    options = {'test_dataloader.dataset.ann_file': str(file), 'test_evaluator.ann_file': str(file)}
    good = str(checkpoints / 'good.pth')
    runner = runner_for_testing(RETINANET, good, str(in_digits), cfg_options=options)
    (metric,) = runner.test_loop.evaluator.metrics
    boxes = torch.tensor([a['bbox'] for a in annotations]).float()
    boxes[:, 2:] += boxes[:, :2]
    instances = dict(
        bboxes=boxes,
        scores=torch.ones(len(boxes)),
        labels=torch.tensor([a['category_id'] - 1 for a in annotations]),
    )
    metric.process({}, [dict(img_id=image, ori_shape=(96, 96), pred_instances=instances)])
    assert metric.evaluate(1)['coco/bbox_mAP'] == 1
    (log,) = in_digits.glob('*/*.log')
    (line,) = [line for line in log.read_text().splitlines() if 'annotation 0' in line]
    assert f'{str(file)!r} counts as {len(annotations)} here' in line


def test_unwritable_outputs(checkpoints, in_digits):
    good = str(checkpoints / 'good.pth')
    for use in (
        lambda: runner_for_training(RETINANET, '/proc/none'),
        lambda: runner_for_testing(RETINANET, good, '/proc/none'),
        lambda: runner_for_testing(RETINANET, good, str(in_digits), out='/proc/none/out.pkl'),
    ):
        with pytest.raises(OSError, match="cannot write to '/proc/none'"):
            use()
    with pytest.raises(ValueError, match='pkl'):
        runner_for_testing(RETINANET, good, str(in_digits), out='out.csv')


def test_bad_options(checkpoints, in_digits):
    with pytest.raises(ValueError, match="--tta needs 'tta_model'"):
        runner_for_testing(RETINANET, str(checkpoints / 'good.pth'), str(in_digits), tta=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match='needs a GPU'):
            runner_for_training(RETINANET, str(in_digits), amp=True)
    with pytest.raises(ValueError, match='form must be'):
        init_model(RETINANET, form='merged')


def test_bad_images(checkpoints, tmp_path):
    model = init_model(RETINANET, str(checkpoints / 'good.pth'))
    out = str(tmp_path / 'out.png')
    with pytest.raises(FileNotFoundError, match='none.jpg'):
        draw_predictions(model, 'none.jpg', out)
    with pytest.raises(ValueError, match='not an image'):
        draw_predictions(model, __file__, out)
    assert not os.path.exists(out)


def test_missing_pretrained_weights_and_from_scratch(in_digits):
    config = repa_mm.config_path('retinanet_repa_swin_t.py')
    annotations = 'data/demo/coco/'
    options = {f'{s}_dataloader.dataset.data_root': annotations for s in ('train', 'val')}
    with pytest.raises(ValueError, match='other class names'):
        runner_for_training(config, str(in_digits), from_scratch=True, cfg_options=options)
    for split in ('train', 'val'):
        options[f'{split}_dataloader.dataset.metainfo.classes'] = ('zero', 'one')
    options['model.bbox_head.num_classes'] = 2
    options['val_evaluator.ann_file'] = annotations + 'annotations/instances_val2017.json'
    with pytest.raises(FileNotFoundError, match='from-scratch'):
        runner_for_training(config, str(in_digits), cfg_options=options)
    runner = runner_for_training(config, str(in_digits), from_scratch=True, cfg_options=options)
    assert runner.model.backbone.init_cfg is None
    assert not runner.model.backbone.norm_eval
    assert len(runner.train_loop.dataloader.dataset) > 0
