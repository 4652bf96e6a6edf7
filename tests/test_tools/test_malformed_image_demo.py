"""Malformed input for tools/image_demo.py."""

import pytest

from .cases import thin_image

# Identifier: (command line, what the message says).
ROWS = {
    'hostile objects beside the weights': (
        lambda c: c.draw(checkpoint='hostile.pth'),
        'hostile.pth.* objects other than tensors',
    ),
    'empty file': (lambda c: c.draw(checkpoint='empty.pth'), 'is empty'),
    'hostile pickle': (lambda c: c.draw(checkpoint='hostile_pickle.pth'), 'hostile_pickle.pth'),
    'other classes to draw': (
        lambda c: c.draw(checkpoint='classes.pth'),
        'another model.*retina_cls',
    ),
    **{
        f'drawn: {name}': (lambda c, name=name: c.draw(f'{name}.jpg'), message)
        for name, message in (
            ('none', 'no image'),
            ('empty', 'is empty'),
            ('text', 'not an image'),
            ('half', 'truncated'),
            ('bomb', 'refused'),
            ('pipe', 'device or pipe'),
        )
    },
    'drawn: folder': (lambda c: c.draw('.'), 'is a folder'),
    'drawn: size': (
        lambda c: [
            'image_demo',
            thin_image(c),
            c / 'detector.py',
            c / 'good.pth',
            '--out',
            c.folder / 'out.png',
        ],
        'fails on .*thin.png.* 1x3000',
    ),
    'drawn: device': (
        lambda c: c.draw('image.jpg', 'good.pth', 'out.png', '--device', 'cuda:99'),
        'cuda:99',
    ),
    'drawn: threshold': (
        lambda c: c.draw('image.jpg', 'good.pth', 'out.png', '--score-thr', 'nan'),
        'nan',
    ),
    'drawn: nothing to draw with': (
        lambda c: [
            'image_demo',
            c / 'image.jpg',
            c.detector('visualizer = None'),
            c / 'good.pth',
            '--out',
            c.folder / 'out.png',
        ],
        "no 'visualizer'",
    ),
    'output is the image': (
        lambda c: [
            'image_demo',
            c / 'image.jpg',
            c / 'detector.py',
            c / 'good.pth',
            '--out',
            c / 'image.jpg',
        ],
        'is the input',
    ),
    'output is no picture': (lambda c: c.draw(out='out.xyz'), 'out.xyz'),
}


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, refused):
    refused(*ROWS[row])
