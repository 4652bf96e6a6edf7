"""The whole demonstration on a handful of scenes, and what happens when a step fails."""

import json
import os
import os.path as osp
import sys

import pytest

from repa_mm.demo.run import main

REPOSITORY = osp.abspath(osp.join(osp.dirname(__file__), '..', '..'))


def fake_tools(folder, broken, status):
    """A folder of tools that only print their name, one of which fails."""
    tools = folder / 'tools'
    tools.mkdir()
    for name in ('make_demo_data', 'train', 'test'):
        (tools / f'{name}.py').write_text(
            f'print("this is {name}")\n' + (f'import os, sys; {status}\n' if name == broken else '')
        )
    return str(tools)


@pytest.mark.parametrize(
    'broken, status, code',
    [
        ('make_demo_data', 'sys.exit(3)', 3),
        ('train', 'raise ValueError("boom")', 1),
        pytest.param(
            'train',
            'os.kill(os.getpid(), 9)',
            137,
            marks=pytest.mark.skipif(sys.platform == 'win32', reason='signals'),
        ),
    ],
)
def test_failing_step_stops_the_demo(tmp_path, monkeypatch, capfd, broken, status, code):
    monkeypatch.chdir(tmp_path)
    assert main(fake_tools(tmp_path, broken, status), ['--work-dir', 'out']) == code
    out, err = capfd.readouterr()
    assert f'$ python {osp.join("tools", broken)}.py' in out
    assert f'failed with exit status {code}' in err
    assert f'{osp.join("tools", broken)}.py' in err
    assert 'this is test' not in out


def linked_tools(folder, monkeypatch):
    """A folder of the real tools, but for the one that makes the data set."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setenv(
        'PYTHONPATH', os.pathsep.join([REPOSITORY, *filter(None, [os.environ.get('PYTHONPATH')])])
    )
    tools = folder / 'tools'
    tools.mkdir()
    os.symlink(osp.join(REPOSITORY, 'configs'), folder / 'configs')
    for name in ('train', 'test', 'convert_pretrained'):
        os.symlink(osp.join(REPOSITORY, 'tools', f'{name}.py'), tools / f'{name}.py')
    (tools / 'make_demo_data.py').write_text('')
    return str(tools)


@pytest.mark.parametrize(
    'task, codebase', [('retinanet', 'mmdet'), ('mask_rcnn', 'mmdet'), ('upernet', 'mmseg')]
)
def test_whole_job(tmp_path, monkeypatch, capfd, task, codebase):
    """The real tools and configs, but eight scenes; only the first task trains."""
    pytest.importorskip(codebase)
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    from repa_mm.demo.dataset import write_digit_scenes

    monkeypatch.chdir(tmp_path)
    tools = linked_tools(tmp_path, monkeypatch)
    write_digit_scenes('data/demo', num_train=8, num_val=4)

    arguments = ['--task', task, '--work-dir', 'out']
    if task == 'retinanet':
        arguments += [
            '--cfg-options',
            'train_cfg.max_epochs=1',
            'train_dataloader.batch_size=4',
            'train_cfg.val_interval=2',
        ]
    else:
        import torch

        from repa_mm.run import init_model

        model = init_model(f'configs/demo/{task}_repa_swin_digits.py')
        torch.save(dict(state_dict=model.state_dict(), meta={}), 'random.pth')
        arguments += ['--checkpoint', 'random.pth']
    assert main(tools, arguments) == 0

    out = capfd.readouterr().out
    assert out.count('\n$ python ') == (4 if task == 'retinanet' else 3)
    assert 'Total time: ' in out and 'nan' not in out[out.index('=== comparison') :]
    with open(osp.join('out', 'summary.json')) as f:
        summary = json.load(f)
    assert summary['task'] == task
    assert summary['training']['parameters'] > 1.2 * summary['deploy']['parameters']
    assert summary['training']['backbone_macs'] > 1.2 * summary['deploy']['backbone_macs']
    assert summary['training']['metrics'].keys() == summary['deploy']['metrics'].keys()
    assert summary['latency_scenes'] == summary['difference']['images'] == 4
    picture = 'segmentation.png' if task == 'upernet' else 'detections.png'
    assert osp.getsize(osp.join('out', picture)) > 10000
    left = [name for name in os.listdir('out') if name.startswith('.') or name.endswith('.tmp')]
    assert not left


def test_conversion(tmp_path, monkeypatch, capfd):
    """A given vanilla model is converted, fine-tuned, and compared on four scenes."""
    pytest.importorskip('mmdet')
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    import torch

    from repa_mm.demo.dataset import write_digit_scenes
    from repa_mm.run import init_model

    monkeypatch.chdir(tmp_path)
    tools = linked_tools(tmp_path, monkeypatch)
    write_digit_scenes('data/demo', num_train=8, num_val=4)
    model = init_model('configs/demo/retinanet_swin_digits.py')
    torch.save(dict(state_dict=model.state_dict(), meta={}), 'vanilla.pth')
    arguments = ['--task', 'convert', '--work-dir', 'out', '--vanilla', 'vanilla.pth']
    assert main(tools, [*arguments, '--cfg-options', 'train_dataloader.batch_size=4']) == 0
    out = capfd.readouterr().out
    assert out.count('\n$ python ') == 6
    with open(osp.join('out', 'summary.json')) as f:
        models = json.load(f)['models']
    assert list(models) == ['vanilla', 'converted', 'fine-tuned']
    sizes = [row['backbone_macs'] for row in models.values()]
    assert sizes[0] > 1.2 * sizes[1] == 1.2 * sizes[2]
    assert osp.getsize(osp.join('out', 'detections.png')) > 10000
    with pytest.raises(SystemExit):
        main(tools, ['--task', 'retinanet', '--vanilla', 'vanilla.pth'])
