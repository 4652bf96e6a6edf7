"""Checkpoints of the code of DINO's authors."""

from projects.dino import dino_to_mm
from tests.test_io.test_layouts import check_tool


def test_dino_to_mm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, second = ('teacher', 'student'), ['--network', 'student']
    check_tool(dino_to_mm.__file__, names, 'backbone.', second, monkeypatch)
