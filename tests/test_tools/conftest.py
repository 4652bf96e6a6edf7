import os
import re
import tempfile

import pytest
import torch
from mmengine.config import Config

from .cases import Case, call_tool, snapshot, write_inputs

TASKS = ('retinanet', 'mask_rcnn', 'upernet')


@pytest.fixture(scope='session')
def digits(tmp_path_factory):
    """A folder with a few scenes of digits where the demo configs look."""
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    from repa_mm.demo.dataset import write_digit_scenes

    folder = tmp_path_factory.mktemp('user')
    write_digit_scenes(str(folder / 'data/demo'), num_train=8, num_val=4, size=96)
    return folder


@pytest.fixture
def in_digits(digits, monkeypatch, tmp_path):
    monkeypatch.chdir(digits)
    return tmp_path


@pytest.fixture(scope='session')
def inputs(digits, tmp_path_factory):
    """A folder of configs, checkpoints, data sets and images, most of them malformed."""
    pytest.importorskip('mmdet')
    pytest.importorskip('mmseg')
    if not hasattr(os, 'mkfifo'):
        pytest.skip('files of Unix')
    folder = tmp_path_factory.mktemp('inputs')
    before = os.getcwd()
    os.chdir(digits)
    try:
        write_inputs(folder, digits)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def case(inputs, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(digits)
    folder = tmp_path / 'case'
    (tmp_path / 'temporary').mkdir()
    folder.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
    # Formatting a config takes most of the time of setting up a run.
    monkeypatch.setattr(Config, 'pretty_text', '# a config')
    threads = torch.get_num_threads()
    yield Case(inputs, folder, digits)
    torch.set_num_threads(threads)


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a tool in this process: its status, and what it prints last."""
    return lambda tool, *arguments: call_tool(monkeypatch, capsys, tool, *arguments)


@pytest.fixture
def refused(case, inputs, digits, call):
    """Check what a tool makes of malformed input.

    It ends with one line that names the cause and a status that is not 0, leaves every file as it
    was, and no new ones (but for a run's own logs).
    """

    def check(arguments, message):
        arguments = arguments(case)
        folders = inputs, digits, case.folder.parent
        before = snapshot(*folders)
        status, said = call(*arguments)
        assert status != 0, said
        assert len(said.splitlines()) == 1 and len(said) < 1000
        assert 'Traceback' not in said
        assert re.search(message, said), said
        # MMEngine's visualizer and logger may live on in the next tests.
        assert snapshot(*folders, without=[case.work]) == before
        assert not (inputs / 'owned').exists()

    return check
