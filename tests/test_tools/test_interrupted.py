"""Ctrl-C, as a terminal sends it to all processes of a tool."""

import os
import signal
import subprocess
import sys

import pytest

from repa_mm.run.cli import clear_errors

from .cases import ROOT


@pytest.mark.parametrize('workers', [0, 1])
def test_training(case, workers):
    arguments = case.train(
        f'train_dataloader.num_workers={workers}',
        'train_cfg.max_epochs=1000',
        'default_hooks.logger.interval=1',
    )
    with subprocess.Popen(
        [sys.executable, ROOT / f'tools/{arguments[0]}.py', *map(str, arguments[1:])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'),
    ) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if 'Epoch(train)' in line:
                os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 130, ''.join(said[-30:])
    assert any('Epoch(train)' in line for line in said)
    assert 'Traceback' not in ''.join(said)


def test_while_a_library_catches_everything():
    with pytest.raises(SystemExit) as info:
        with clear_errors():
            try:
                raise KeyboardInterrupt
            except:  # noqa: E722
                raise SyntaxError('cannot format') from None
    assert info.value.code == 130
