from pathlib import Path

import pytest

from demo.dataset import write_digit_scenes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='session')
def digits(tmp_path_factory):
    """A folder with a few scenes of digits where the demo configs look."""
    folder = tmp_path_factory.mktemp('user')
    write_digit_scenes(str(folder / 'data/demo'), num_train=8, num_val=4, size=96)
    return folder


@pytest.fixture
def in_digits(digits, monkeypatch, tmp_path):
    monkeypatch.chdir(digits)
    return tmp_path


@pytest.fixture
def call(run_tool):
    """Run a tool in this process: its status, and why it failed."""

    def call(tool, *arguments):
        try:
            run_tool(tool, *arguments)
        except Exception as error:
            return 1, str(error)
        except SystemExit as error:
            return error.code or 0, str(error)
        return 0, ''

    return call
