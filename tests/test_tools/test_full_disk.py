"""A full disk: one line, and every file as it was."""

import json
import re
import resource

import pytest

from ..conftest import skip_unless_exportable
from .cases import snapshot


def file_size(limit):
    """As on a full disk: no file grows beyond some bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FULL = {
    'merge': (lambda c: c.merge(out='old'), 2**17, 'old'),
    'flops': (
        lambda c: c.flops(c / 'detector.py', '--out', c.folder / 'old'),
        0,
        'cannot write to',
    ),
    'flops, late': (lambda c: c.flops(c / 'detector.py', '--out', c.folder / 'old'), None, 'old'),
    'draw': (lambda c: c.draw(out='old.png'), 2**12, 'cannot write'),
    'predictions': (
        lambda c: c.test(
            'good.pth', 'model.test_cfg.score_thr=0.', more=['--out', c.folder / 'old.pkl']
        ),
        80000,
        'old.pkl',
    ),
    'training': (
        lambda c: c.train(
            'train_cfg.max_epochs=1',
            *c.coco(
                lambda content: (
                    content['images'].__delitem__(slice(1, None))
                    or content.update(
                        annotations=[
                            a
                            for a in content['annotations']
                            if a['image_id'] == content['images'][0]['id']
                        ]
                    )
                )
            ),
        ),
        80000,
        "cannot write '.*/work(/epoch_1.pth)?': File too large",
    ),
    **{
        f'export as {suffix}': (
            lambda c, suffix=suffix: [
                *('export', c / 'detector.py', c / 'good.pth', c.folder / f'old{suffix}'),
                *('--shape', 64, 64),
            ],
            2**17,
            f"cannot write '.*/old{suffix}': File too large",
        )
        for suffix in ('.pt', '.pt2', '.onnx')
    },
    **{
        f'pictures of a {name}': (
            lambda c, name=name, checkpoint=checkpoint: c.test(
                checkpoint, config=c / f'{name}.py', more=['--show-dir', c.work / 'show']
            ),
            2**13,
            "cannot write (to )?'.*/work.*': File too large",
        )
        for name, checkpoint in (('detector', 'good.pth'), ('segmentor', 'segmentor.pth'))
    },
    'demo data': (
        lambda c: ['make_demo_data', '--root', c.folder / 'new', '--num-train', 1, '--num-val', 1],
        2**10,
        'cannot write (the demo set )?to .*: File too large',
    ),
}


@pytest.mark.parametrize('row', FULL)
def test_full_disk(row, case, inputs, digits, monkeypatch, call):
    if row.startswith('export'):
        skip_unless_exportable(row.split()[-1])
    make, limit, message = FULL[row]
    arguments = make(case)
    for name in ('old', 'old.png', 'old.pkl'):
        (case.folder / name).write_text('old')
    before = snapshot(inputs, digits, case.folder)
    if limit is None:  # full only when the file is written

        def dump(*args, **kwargs):
            file_size(10)
            args[1].write('x' * 100)
            args[1].flush()

        monkeypatch.setattr(json, 'dump', dump)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if limit is not None:
            file_size(limit)
        status, said = call(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert status != 0
    assert len(said.splitlines()) == 1
    assert re.search(message, said), said
    assert snapshot(inputs, digits, case.folder, without=[case.work]) == before
