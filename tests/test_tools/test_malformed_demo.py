"""Malformed input for tools/demo.py and tools/make_demo_data.py."""

import pytest

from .cases import old_file

# Identifier: (command line, what the message says).
ROWS = {
    'demo: task': (lambda c: ['demo', '--task', 'chess'], 'chess'),
    'demo: checkpoint': (lambda c: ['demo', '--checkpoint', c / 'half.pth'], 'truncated'),
    'demo: option': (lambda c: ['demo', '--cfg-options', 'a'], 'key=value'),
    'demo: work dir': (lambda c: ['demo', '--work-dir', old_file(c, 'old')], 'cannot write'),
    **{
        f'demo data: {" ".join(options)}': (
            lambda c, options=options: ['make_demo_data', '--root', c.folder / 'new', *options],
            message,
        )
        for options, message in (
            (['--num-train', '0'], 'num_train'),
            (['--size', '1'], 'size'),
            (['--size', '100000'], 'size'),
            (['--seed', '-1'], 'seed'),
            (['--num-train', '10000000', '--size', '2048'], 'no space'),
            (['--num-train', 'many'], 'many'),
        )
    },
    'demo data: other folder': (
        lambda c: ['make_demo_data', '--root', old_file(c, 'x').parent],
        'not a demo set',
    ),
    'demo data: file': (
        lambda c: ['make_demo_data', '--root', old_file(c, 'old')],
        'not a demo set',
    ),
    'demo data: under a file': (
        lambda c: ['make_demo_data', '--root', old_file(c, 'old') / 'new'],
        'cannot write|Not a directory',
    ),
}


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, refused):
    refused(*ROWS[row])
