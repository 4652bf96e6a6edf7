"""Links of the pages lead somewhere, and the Chinese README says what README says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ('*.md', 'docs/*.md', 'benchmarks/*.md', 'projects/**/*.md')
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r'\]\(([^()\s]+)\)')
CODE = re.compile(r'^```.*?^```$', re.M | re.S)


def anchors(path):
    """The headings of a page, as GitHub makes anchors of them."""
    text = CODE.sub('', path.read_text(encoding='utf-8'))
    heads = re.findall(r'^#+ (.*)$', text, re.M)
    return {re.sub(r'[^\w\- ]', '', head.lower()).replace(' ', '-') for head in heads}


def is_there(page, link):
    """Whether a link of a page leads to a file, and to a heading of it."""
    if re.match(r'https?://|\.\./\.\./actions/', link):  # not ours, or GitHub's own
        return True
    name, _, anchor = link.partition('#')
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize('page', PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    links = LINK.findall(CODE.sub('', page.read_text(encoding='utf-8')))
    assert [link for link in links if not is_there(page, link)] == []


def parts(name):
    """What a README and its translation have in common."""
    text = (ROOT / name).read_text(encoding='utf-8')
    rows = [line for line in text.splitlines() if line.startswith('|')]
    links = LINK.findall(CODE.sub('', text))
    return {
        'code': CODE.findall(text),
        'figures in tables': [re.findall(r'[\d.×−±]*\d', row) for row in rows],
        'links': sorted(link for link in links if not link.startswith('README')),
        'heads': len(re.findall('^#+ ', text, re.M)),
    }


def test_the_chinese_readme_has_the_same_code_figures_and_links():
    assert parts('README_zh-CN.md') == parts('README.md')
    for page, other in (('README.md', 'README_zh-CN.md'), ('README_zh-CN.md', 'README.md')):
        assert f']({other})' in (ROOT / page).read_text(encoding='utf-8')


def test_readme_is_short():
    assert len((ROOT / 'README.md').read_text(encoding='utf-8').split()) <= 650
