"""Malformed input for tools/reparameterize.py."""

import pytest

from .cases import old_file

# Identifier: (command line, what the message says).
ROWS = {
    'hostile objects beside the weights': (
        lambda c: c.merge('hostile.pth'),
        'hostile.pth.* objects other than tensors',
    ),
    'folder': (lambda c: c.merge('folder.pth'), 'folder.pth.* is a folder'),
    'device': (lambda c: c.merge('/dev/zero'), '/dev/zero.* is a device'),
    'text': (lambda c: c.merge('text.pth'), 'text.pth.* is no checkpoint'),
    'noise, as a pickle': (lambda c: c.merge('pickle_noise.pth'), 'pickle_noise.pth'),
    'half': (lambda c: c.merge('half.pth'), 'half.pth.* is truncated'),
    'damaged inside': (lambda c: c.merge('broken.pth'), 'broken.pth'),
    'lying directory': (lambda c: c.merge('lying.pth'), 'lying.pth.* refused'),
    'bomb of views': (lambda c: c.merge('expanded.pth'), r'refused.* \(1048576, 1048576\)'),
    'pickle that takes memory': (lambda c: c.merge('bytes.pth'), 'bytearray'),
    'TorchScript': (lambda c: c.merge('script.pth'), 'TorchScript'),
    'a list': (lambda c: c.merge('list.pth'), 'holds a list'),
    'a tensor': (lambda c: c.merge('tensor.pth'), 'holds a Tensor'),
    'no weights': (lambda c: c.merge('nothing.pth'), 'no state dict'),
    'infinite weights': (lambda c: c.merge('inf.pth'), 'retina_cls.bias.* not finite'),
    'negative variance': (lambda c: c.merge('variance.pth'), 'norm1.running_var.* negative'),
    'complex weights': (lambda c: c.merge('complex.pth'), 'fc1.weight.* torch.complex64'),
    'sparse weights': (lambda c: c.merge('sparse.pth'), 'sparse.pth'),
    'merged, to merge': (
        lambda c: c.merge('merged.pth'),
        'reparameterized already|is reparameterized',
    ),
    'output is the input': (
        lambda c: ['reparameterize', c / 'detector.py', c / 'good.pth', c / 'good.pth'],
        'is the input',
    ),
    'output is a folder': (lambda c: c.merge(out='.'), 'is a folder'),
    'output is a device': (lambda c: c.merge(out='/dev/null'), 'is a device'),
    'output under a file': (lambda c: c.merge(out=old_file(c, 'old') / 'out.pth'), 'cannot write'),
    'tolerance of NaN': (lambda c: c.merge('good.pth', 'out.pth', '--tolerance', 'nan'), 'nan'),
}


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, refused):
    refused(*ROWS[row])
