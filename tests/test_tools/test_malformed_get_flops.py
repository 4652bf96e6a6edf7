"""Malformed input for tools/get_flops.py."""

import pytest

# Identifier: (command line, what the message says).
ROWS = {
    'no config': (lambda c: c.flops('none.py'), "no config at 'none.py'"),
    'config is a folder': (lambda c: c.flops(c.folder), 'is a folder'),
    'empty config': (lambda c: c.flops(c.config('')), 'default_scope'),
    'binary config': (lambda c: c.flops(c.config(bytes(range(256)))), 'cannot read the config'),
    'other kind of file': (lambda c: c.flops(c.config('{}', 'config.txt')), 'py/yml/yaml/json'),
    'syntax error': (
        lambda c: c.flops(c.config('model = dict(')),
        'cannot read the config.*config.py',
    ),
    'error in the config': (lambda c: c.flops(c.detector('a = 1 / 0')), 'ZeroDivisionError'),
    'exit in the config': (
        lambda c: c.flops(c.detector('import sys\nsys.exit(0)')),
        'cannot read the config.*SystemExit',
    ),
    'base missing': (lambda c: c.flops(c.config("_base_ = 'none.py'")), 'none.py'),
    'base of itself': (lambda c: c.flops(c.config("_base_ = 'config.py'")), 'inherits from itself'),
    'import missing': (
        lambda c: c.flops(c.detector("custom_imports = dict(imports=['not_installed'])")),
        'not_installed',
    ),
    'no scope': (lambda c: c.flops(c.detector('default_scope = None')), 'default_scope'),
    'other scope': (lambda c: c.flops(c.detector("default_scope = 'mmpose'")), "is 'mmpose'"),
    'scope of a list': (lambda c: c.flops(c.detector('default_scope = []')), 'default_scope'),
    'model of a number': (
        lambda c: c.flops(c / 'detector.py', '--cfg-options', 'model=3'),
        "'model'.*must be a dict",
    ),
    'unknown type': (
        lambda c: c.flops(c / 'detector.py', '--cfg-options', 'model.backbone.type=NoSuchBackbone'),
        'NoSuchBackbone',
    ),
    'unknown architecture': (
        lambda c: c.flops(c.detector('model = dict(backbone=dict(arch=dict(_delete_=True)))')),
        'arch',
    ),
    **{
        f'idle ratio {value}': (
            lambda c, value=value: c.flops(
                c / 'detector.py', '--cfg-options', f'model.backbone.idle_ratio={value}'
            ),
            message,
        )
        for value, message in (
            ('1.5', 'idle_ratio must be.* 1.5'),
            ('-1', 'idle_ratio'),
            ('nan', 'idle_ratio must be.* nan'),
            ('abc', "'abc'"),
            ('None', 'idle_ratio'),
            ('[0.5,0.5]', '2 entries'),
        )
    },
    'option with a bracket': (
        lambda c: c.flops(c / 'detector.py', '--cfg-options', 'a=[1,(2]'),
        'cannot be read|has no value',
    ),
    'option inside a number': (
        lambda c: c.flops(
            c / 'detector.py', '--cfg-options', 'model.backbone.patch_size.x=3', 'max_epochs.a=2'
        ),
        'cfg-options|max_epochs',
    ),
    'output is the config': (
        lambda c: c.flops(c / 'detector.py', '--out', c / 'detector.py'),
        'is the input',
    ),
    'output is full': (lambda c: c.flops(c / 'detector.py', '--out', '/dev/full'), 'is a device'),
    'shape of 0': (lambda c: ['get_flops', c / 'detector.py', '--shape', 0], '--shape'),
    'shape of three': (lambda c: ['get_flops', c / 'detector.py', '--shape', 3, 64, 64], '--shape'),
    'shape too large': (
        lambda c: ['get_flops', c / 'detector.py', '--shape', 10**6, 10**6],
        'GiB of memory',
    ),
}


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, refused):
    refused(*ROWS[row])


def test_the_whole_trace(case, monkeypatch, call):
    monkeypatch.setenv('REPA_MM_TRACEBACK', '1')
    with pytest.raises(FileNotFoundError, match='none.py'):
        call('get_flops', 'none.py')
