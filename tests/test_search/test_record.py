"""What is known counts, unless a file is not what was written."""

from importlib import metadata
from pathlib import Path

import pytest
import torch

from repa_mm.search.record import Record, environment

HERE = environment('cpu')
FILES = {'fit a': ['a.pth', 'a.py'], 'write a in onnx': ['a.onnx']}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / 'out'
    folder.mkdir()
    record = Record(str(folder), 'print', HERE)
    for name, files in FILES.items():
        for file in files:
            (folder / file).write_text(file)
        record.find(name, lambda: dict(files=record.hashes(files)))  # noqa: B023
    record.find('test a', lambda: dict(metric=1))
    return folder


@pytest.mark.parametrize('name', ['a.py', 'a.onnx'])
@pytest.mark.parametrize('change', [Path.unlink, lambda path: path.write_text('of another model')])
def test_nothing_is_known_if_a_file_is_not_what_was_written(folder, name, change):
    change(folder / name)
    assert Record(str(folder), 'print', HERE).content['known'] == {}


@pytest.mark.parametrize('changed', ['CPU', 'Python', 'torch', 'GPU'])
def test_nothing_is_known_in_another_environment(folder, changed, capsys):
    assert len(Record(str(folder), 'print', dict(HERE)).content['known']) == 3
    assert not capsys.readouterr().out
    record = Record(str(folder), 'print', {**HERE, changed: 'another'})
    assert record.content['known'] == {} and record.content['environment'][changed] == 'another'
    text = f'{changed} another instead of {HERE.get(changed)}'
    assert capsys.readouterr().out == f'starting anew in {folder}: {text}\n'


def test_the_environment():
    threads = torch.get_num_threads()
    assert f'{threads} threads' in HERE['CPU'] and HERE['torch'] == metadata.version('torch')
    names = ' '.join(HERE)
    for name in 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'onnxruntime', 'openvino':
        assert name in names


def test_the_folder_of_something_else_is_refused(folder):
    with pytest.raises(ValueError, match='has the results of another model'):
        Record(str(folder), 'other', HERE)
    (folder / 'results.json').unlink()
    (folder / 'model.pth').write_text('mine')
    with pytest.raises(ValueError, match='model.pth of something else'):
        Record(str(folder), 'print', HERE)
