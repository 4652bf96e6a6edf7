"""Files are written whole or not at all."""

import os
from pathlib import Path

import pytest

from repa_mm.io.files import replacing


def test_a_file_is_whole_or_as_it_was(tmp_path):
    out, link = tmp_path / 'new' / 'out.txt', tmp_path / 'link.txt'
    for text in ('first', 'second'):
        with replacing(str(out)) as temporary:
            assert temporary.endswith('.txt')  # by which writers choose a format
            Path(temporary).write_text(text)
    with pytest.raises(KeyboardInterrupt):
        with replacing(str(out)) as temporary:
            Path(temporary).write_text('half')
            raise KeyboardInterrupt
    assert out.read_text() == 'second'
    link.symlink_to(out)
    with replacing(str(link)) as temporary:
        Path(temporary).write_text('third')
    assert link.is_symlink() and out.read_text() == 'third'
    assert os.listdir(out.parent) == ['out.txt']
