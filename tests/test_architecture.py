"""Imports point down, only a structure's own files name it, and the examples of the docs work."""

import ast
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

import repa_mm
from repa_mm import reparam

PACKAGE = Path(repa_mm.__file__).resolve().parent
SOURCES = sorted(path for path in PACKAGE.rglob('*.py') if '.mim' not in path.parts)

DOCS = PACKAGE.parent / 'docs' / 'architecture.md'
# Modules that every package may import, and those that collect the packages for users.
BOTTOM = {'version', 'files', 'paths', 'registry', 'compat'}
TOP = {'__init__', 'apis'}

# They export channel-idle FFNs, or put them into backbones.
NAME_CHANNEL_IDLE = ('__init__.py', 'reparam/__init__.py', 'reparam/ffn/', 'models/surgery/')

pytestmark = pytest.mark.skipif(not DOCS.is_file(), reason='needs the repository')


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def room_of(path):
    """The package or module right below `repa_mm` that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix('').parts[0]


def imports_of(path, nodes=None):
    """Absolute names of the modules (or their members) that a file imports."""
    parts = ('repa_mm', *path.relative_to(PACKAGE).parts[:-1])
    for node in nodes or ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = '.'.join(parts[: len(parts) + 1 - node.level]) if node.level else ''
            start = '.'.join(filter(None, (start, node.module)))
            yield from (f'{start}.{alias.name}' for alias in node.names)


@pytest.fixture(scope='module')
def below():
    """For every package those that its arrows in the docs lead to, directly or not."""
    arrows = re.findall(r'^ *(\w+) --> (\w+)$', DOCS.read_text(), re.M)

    def reach(package, path=()):
        assert package not in path, f'the arrows of {package} lead back to it'
        ends = {end for start, end in arrows if start == package}
        return ends.union(*(reach(end, (*path, package)) for end in ends))

    return {package: reach(package) for arrow in arrows for package in arrow}


def test_the_picture_has_all_packages(below):
    packages = {path.name for path in PACKAGE.iterdir() if (path / '__init__.py').is_file()}
    assert packages == below.keys() - {'tools'}


@pytest.mark.parametrize('path', SOURCES, ids=name_of)
def test_imports_point_down(path, below):
    room = room_of(path)
    for name in imports_of(path):
        package, _, rest = name.partition('.')
        other = rest.partition('.')[0]
        if package == 'repa_mm' and other != room and other not in BOTTOM and room not in TOP:
            assert other in below.get(room, ()), f'{room} imports {name}'


@pytest.mark.parametrize('path', (PACKAGE / 'reparam').rglob('*.py'), ids=name_of)
def test_the_method_needs_pytorch_only(path):
    tree = ast.parse(path.read_text())
    names = {name.split('.')[0] for name in imports_of(path, ast.walk(tree))}
    if path.name == 'convbn.py':  # folds mmcv's own modules, where there is mmcv
        assert 'mmcv' not in {name.split('.')[0] for name in imports_of(path, tree.body)}
        names.discard('mmcv')
    assert names <= {'torch', 'repa_mm', *sys.stdlib_module_names}
    others = {name.split('.')[1] for name in imports_of(path) if name.startswith('repa_mm.')}
    assert others <= {'reparam'}


def code_of(path):
    """Names and strings in the code of a file, but for docstrings, imports and base classes."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    for node in nodes:
        if id(node) not in skipped:
            text = getattr(node, 'id', getattr(node, 'attr', getattr(node, 'value', None)))
            if isinstance(text, str):
                yield text


@pytest.mark.parametrize('path', SOURCES, ids=name_of)
def test_forms_are_asked_and_not_named(path):
    if name_of(path).startswith(NAME_CHANNEL_IDLE):
        return
    for text in code_of(path):
        for word in ('ChannelIdleFFN', 'MergedFFN', '.fc1.weight'):
            assert word not in text, f'{name_of(path)} names {word}: ask the form'


def examples(heading):
    """The code blocks below a heading of docs/architecture.md."""
    section = DOCS.read_text().partition(f'## {heading}')[2].partition('\n## ')[0]
    found = re.findall(r'^ *```python\n(.*?)^ *```', section, re.M | re.S)
    return [textwrap.dedent(block) for block in found]


def test_the_example_of_a_structure(monkeypatch):
    structure, place, test = examples('How to add a mergeable structure')
    module = ModuleType('repa_mm.reparam.branches')
    module.__package__ = 'repa_mm.reparam'
    exec(structure, module.__dict__)
    monkeypatch.setattr(reparam, 'LinearBranches', module.LinearBranches, raising=False)
    names = dict(LinearBranches=module.LinearBranches, repa_mm=repa_mm, torch=torch)
    exec(test, names)
    names['test_branches_merge_exactly']()
    exec(place.replace('@MODELS.register_module()', ''), names)
    kwargs = dict(
        arch=dict(embed_dims=8, depths=[1, 1], num_heads=[1, 2]),
        out_indices=(0, 1),
        pad_small_map=True,
    )
    model = names['BranchedSwin'](**kwargs)
    model.eval()
    loaded = names['BranchedSwin'](**kwargs, deploy=True)
    loaded.load_state_dict(repa_mm.reparameterize(model).state_dict())
    assert reparam.has_deploy_form(loaded) and not reparam.has_training_form(loaded)
    x = torch.randn(1, 3, 32, 32)
    for ours, theirs in zip(loaded(x), model(x)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(reparam.CheckpointError, match='merged branched linear layer'):
        reparam.check_state_dict(model, loaded.state_dict())


def test_the_example_of_a_backbone():
    backbone, family = examples('How to add a backbone')
    names = dict(VIT=dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=96))
    exec(backbone.replace('@MODELS.register_module()', ''), names)
    exec(family, names)
    _, kwargs, shape, features, _ = names['FAMILY']['RePaDeiT3']
    kwargs['out_indices'] = [0, 1]
    model = names['RePaDeiT3'](**kwargs)
    assert [tuple(x.shape) for x in model(torch.randn(shape))] == features
    model.switch_to_deploy()
    assert reparam.has_deploy_form(model)
