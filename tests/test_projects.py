"""Projects use the package's public names alone, and the package knows none of them."""

from importlib import import_module

import pytest

from tests.test_architecture import PACKAGE, SOURCES, imports_of

ROOT = PACKAGE.parent
PROJECTS = sorted(path.parent for path in ROOT.glob('projects/*/__init__.py'))
PROJECTS = [path for path in PROJECTS if path.name != 'tests']


def is_allowed(name, path):
    """Whether a file of a project, 'projects/dino/hook.py', may import a name."""
    first, *rest = name.split('.')
    if first == 'repa_mm' and rest:
        *parts, name = rest
        if len(parts) > 1 and parts[0] != 'io':  # which exports nothing: its modules do
            return False
        module = import_module('.'.join((first, *parts)))
        if hasattr(module, '__path__'):  # a package says what it exports, a module's names do
            return name in module.__all__
        return not name.startswith('_')
    of_all = first == 'projects' and rest[:1] in ([path.parts[1]], ['schedules'])
    return {'projects': of_all, 'tests': 'tests' in path.parts[1:3]}.get(first, True)


def forbidden_imports(root):
    for path in root.glob('projects/*/**/*.py'):
        for name in imports_of(path, root):
            if not is_allowed(name, path.relative_to(root)):
                yield f'{path.relative_to(root)} imports {name}'


def test_projects_import_public_names():
    assert not list(forbidden_imports(ROOT))


def test_the_package_imports_no_project():
    for path in [*SOURCES, *ROOT.glob('tools/**/*.py')]:
        assert not [name for name in imports_of(path) if name.startswith('projects')], path


@pytest.mark.parametrize('project', PROJECTS, ids=lambda path: path.name)
def test_every_project_has_a_page_and_a_line_in_the_table(project):
    assert (project / 'README.md').is_file()
    assert (
        f'[{project.name}]({project.name}/README.md)' in (ROOT / 'projects/README.md').read_text()
    )
