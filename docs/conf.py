"""The site: the pages of this repository as they are, a tutorial, and the API from docstrings.

``make docs`` builds it, from the root of the repository, so that links between the pages of
``docs/`` and of ``projects/`` work as they do there.
"""

import os
import re

from repa_mm.version import __version__

project, author = 'RePa-MM', 'The RePa-MM authors'
copyright = author  # noqa: A001
version = release = __version__
root_doc = 'README'
include_patterns = [
    'README*.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'benchmarks/README.md', 'docs/*',
    'projects/README.md', 'projects/*/README.md',
]  # fmt: skip
# Folders that are not searched.
exclude_patterns = ['.*', 'build', 'data', 'work_dirs', 'repa_mm', 'tests', 'configs']
extensions = [
    'myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode',
    'sphinxcontrib.mermaid',
]  # fmt: skip
# Pages by their place at the left. README has no list of its own.
CONTENTS = {
    'Guides': [
        'docs/install', 'docs/coco', 'docs/train', 'docs/speed_up', 'docs/tutorial', 'docs/convert',
        'docs/deploy', 'docs/structures', 'docs/alternatives',
    ],
    'Reference': [
        'docs/models', 'docs/api', 'docs/architecture', 'docs/reliability', 'docs/benchmarks',
        'docs/conversions', 'benchmarks/README', 'CHANGELOG', 'CONTRIBUTING',
    ],
    'Projects': ['projects/README'],
    '中文': ['README_zh-CN'],
}  # fmt: skip

# Read the Docs has no time to compile MMCV's operators, which the tutorial needs: it shows the
# cells without their outputs.
nb_execution_mode = 'off' if os.environ.get('READTHEDOCS') else 'force'
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 900

myst_heading_anchors = 4
myst_fence_as_directive = ['mermaid']
autodoc_member_order = 'bysource'
autodoc_typehints = 'none'  # they are in the signatures and in the docstrings
napoleon_numpy_docstring = False

html_theme = 'furo'
html_title = f'RePa-MM {version}'
html_extra_path = ['_extra']


def prepare(app, docname: str, source: list[str]) -> None:
    """Take the badges off README, and add the list of pages; list the projects, too."""
    if docname.startswith('README'):
        source[0] = re.sub(r'^\[!\[.*\n', '', source[0], flags=re.M)
    if docname == root_doc:
        for caption, pages in CONTENTS.items():
            lines = ['', '```{toctree}', ':hidden:', f':caption: {caption}', '', *pages, '```', '']
            source[0] += '\n'.join(lines)
    if docname == 'projects/README':
        source[0] += '\n```{toctree}\n:hidden:\n:glob:\n\n*/README\n```\n'


def clean(app, what, name, obj, options, lines: list[str]) -> None:
    """Take the stars off arguments, which reStructuredText reads as emphasis."""
    lines[:] = [line.replace('*args, **kwargs:', 'args, kwargs:') for line in lines]


def setup(app) -> None:
    """Register the functions above."""
    app.connect('source-read', prepare)
    app.connect('autodoc-process-docstring', clean, priority=400)  # before Napoleon
