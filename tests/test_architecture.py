"""Imports point down, only a structure's own files name it, and the example of the docs works."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

import repa_mm
from repa_mm import reparam

PACKAGE = Path(repa_mm.__file__).resolve().parent
SOURCES = sorted(path for path in PACKAGE.rglob('*.py') if '.mim' not in path.parts)
DOCS = PACKAGE.parent / 'docs' / 'architecture.md'
# What every package may import.
BOTTOM = {'version'}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def room_of(path):
    """The package or module right below `repa_mm` that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix('').parts[0]


def imports_of(path, root=PACKAGE.parent):
    """Absolute names of the modules (or their members) that a file imports."""
    parts = path.relative_to(root).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = '.'.join(parts[: len(parts) + 1 - node.level]) if node.level else ''
            start = '.'.join(filter(None, (start, node.module)))
            yield from (f'{start}.{alias.name}' for alias in node.names)


def arrows_of():
    """The pairs of packages with an arrow in the docs."""
    lines = re.findall(r'^ *(\w+) --> (.*)$', DOCS.read_text(), re.M)
    return [(package, other) for package, others in lines for other in others.split(' & ')]


@pytest.fixture(scope='module')
def below():
    """For every package those that its arrows in the docs lead to, directly or not."""
    arrows = arrows_of()

    def reach(package, path=()):
        assert package not in path, f'the arrows of {package} lead back to it'
        ends = {end for start, end in arrows if start == package}
        return ends.union(*(reach(end, (*path, package)) for end in ends))

    return {package: reach(package) for arrow in arrows for package in arrow}


def test_the_picture_has_all_packages(below):
    rooms = {room_of(path) for path in SOURCES}
    assert rooms == (below.keys() - {'tools'}) | BOTTOM | {'__init__'}


def test_no_public_name_hides_a_package():
    for room in {room_of(path) for path in SOURCES} - {'__init__'}:
        module = import_module(f'repa_mm.{room}')  # before the name is looked up
        assert getattr(repa_mm, room) is module


@pytest.mark.parametrize('path', SOURCES, ids=name_of)
def test_imports_point_down(path, below):
    room = room_of(path)
    for name in imports_of(path):
        package, _, rest = name.partition('.')
        other = rest.partition('.')[0]
        if package == 'repa_mm' and room != '__init__' and other not in BOTTOM | {room}:
            assert other in below.get(room, ()), f'{room} imports {name}'


def test_arrows_are_imports():
    imports = {
        (room_of(path), name.split('.')[1])
        for path in SOURCES
        for name in imports_of(path)
        if name.startswith('repa_mm.')
    }
    assert {arrow for arrow in arrows_of() if arrow[0] != 'tools'} <= imports


OF_TORCH = PACKAGE / 'surgery.py', *sorted((PACKAGE / 'reparam').rglob('*.py'))


@pytest.mark.parametrize('path', OF_TORCH, ids=name_of)
def test_the_method_needs_pytorch_only(path):
    names = list(imports_of(path))
    assert {n.split('.')[0] for n in names} <= {'torch', 'repa_mm', *sys.stdlib_module_names}
    assert {n.split('.')[1] for n in names if n.startswith('repa_mm.')} <= {'reparam', 'surgery'}


def test_the_example_of_a_structure():
    blocks = re.findall(r'^<!-- \w+ -->\n```python\n(.*?)^```', DOCS.read_text(), re.M | re.S)
    names = dict(repa_mm=repa_mm, torch=torch)
    for block in blocks:
        exec(block, names)
    names['test_branches_merge_exactly']()
    assert 115 < sum(width for block in names['report'].blocks for width in block.after) <= 128
    x, blocks = torch.randn(3, 20, 32), names['blocks'].eval()
    with torch.no_grad():  # of a user's own family
        merged = repa_mm.reparameterize(blocks)
        torch.testing.assert_close(merged(x), blocks(x), rtol=1e-4, atol=1e-5)
    assert sum(isinstance(m, reparam.MergedFFN) for m in merged.modules()) == 2
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
    vit = dict(type='mmpretrain.VisionTransformer', arch=arch, img_size=32)
    cfg = dict(type='Restructured', model=vit, structures=[dict(type='LinearFFNs')])
    model = MODELS.build(cfg).eval()
    merged = repa_mm.reparameterize(model).state_dict()
    loaded = MODELS.build(dict(cfg, deploy=True))
    loaded.load_state_dict(merged)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(reparam.CheckpointError, match='branched linear layer'):
        model.load_state_dict(merged, strict=False)
