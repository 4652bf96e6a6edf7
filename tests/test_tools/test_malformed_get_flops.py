"""Malformed input for tools/get_flops.py."""

import os

import pytest


def pipe(case):
    path = case.folder / 'pipe.py'
    os.mkfifo(path)
    return str(path)


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
    'base is a pipe': (
        lambda c: c.flops(c.config(f"_base_ = ['../none.py', {pipe(c)!r}]")),
        'pipe.py.* is not a file',
    ),
    'base of a base is a pipe': (
        lambda c: c.flops(
            c.config(f'_base_ = {c.config(f"_base_ = {pipe(c)!r}", "middle.py")!r}', 'top.py')
        ),
        'pipe.py.* is not a file',
    ),
    **{
        f'JSON of {depth} levels': (
            lambda c, depth=depth: c.flops(
                c.config(
                    f'{{"_base_": "{c / "detector.py"}", "a": {"[" * depth}0{"]" * depth}}}',
                    'deep.json',
                )
            ),
            'deep.json.* nested too deeply',
        )
        for depth in (60, 300, 3000)
    },
    'installed config that is none': (
        lambda c: c.flops('mmdet::swin/mask-rcnn_swin-t.py'),
        r'mmdet has no config .*swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py',
    ),
    'config of a package that is not installed': (
        lambda c: c.flops('mmpose::a/b.py'),
        "'mmpose' is not installed",
    ),
    **{
        f'config with {text}': (lambda c, text=text: c.flops(c.detector(text)), message)
        for text, message in (
            ('custom_hooks = 7', "'custom_hooks' must be a list, but is 7"),
            ('custom_hooks = [7]', r"'custom_hooks\[0\]' must be a dict, but is 7"),
            ('default_hooks = dict(timer=7)', "'default_hooks.timer' must be a dict, but is 7"),
            ('default_hooks = dict(a=dict(b=1))', "'default_hooks.a' has no 'type'.*'b': 1"),
            ('model = dict(backbone=None)', "'model.backbone' must be a dict, but is None"),
            ('model = dict(backbone=dict(_delete_=True))', "'model.backbone' has no 'type'"),
            ('visualizer = 7', "'visualizer' must be a dict, but is 7"),
            ('val_evaluator = 7', r"'val_evaluator\[0\]' must be a dict, but is 7"),
            (
                'train_dataloader = dict(dataset=dict(pipeline=[dict(scale=2)]))',
                r"'train_dataloader.dataset.pipeline\[0\]' has no 'type'.*'scale': 2",
            ),
            (
                'test_dataloader = dict(dataset=dict(pipeline=7))',
                "'test_dataloader.dataset.pipeline' must be a list, but is 7",
            ),
            ("model = {'': 77}", 'empty key.* 77'),
            ("globals()[''] = 77", 'empty key.* 77'),
        )
    },
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
