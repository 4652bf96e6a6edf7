"""Malformed input for tools/calibrate_bn.py and tools/export.py."""

import pytest

from .cases import old_file


def calibrate(case, *more, checkpoint='good.pth'):
    return ['calibrate_bn', case / 'detector.py', case / checkpoint, case.folder / 'o.pth', *more]


def export(case, *more, checkpoint='good.pth', out='o.pt'):
    return ['export', case / 'detector.py', case / checkpoint, case.folder / out, *more]


# Identifier: (command line, what the message says).
ROWS = {
    'calibrate: option without a value': (
        lambda c: calibrate(c, '--cfg-options', 'foo'),
        "'foo' is not of the form key=value",
    ),
    'calibrate: merged': (lambda c: calibrate(c, checkpoint='merged.pth'), 'no BatchNorm left'),
    'calibrate: other architecture': (
        lambda c: calibrate(c, checkpoint='arch.pth'),
        'arch.pth.* differ in architecture',
    ),
    'calibrate: foreign': (
        lambda c: calibrate(c, checkpoint='foreign.pth'),
        'foreign.pth.* no weight of a backbone',
    ),
    'calibrate: no batch': (lambda c: calibrate(c, '--num-batches', 0), '0 batches are none'),
    'export: half': (lambda c: export(c, checkpoint='half.pth'), 'half.pth.* truncated'),
    'export: format': (lambda c: export(c, out='o.tflite'), "the suffix of '.*o.tflite'"),
    'export: folder': (lambda c: export(c, out='.'), 'folder|the suffix'),
    'export: under a file': (lambda c: export(c, out=old_file(c, 'x') / 'o.pt'), 'cannot write'),
}


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, refused):
    refused(*ROWS[row])
