"""Malformed input for tools/test.py."""

import json

import pytest

from .cases import old_file


def reversed_ground_truth(case):
    """An option: compare with another file than the one that names the images."""
    path = case.digits / 'data/demo/coco/annotations/instances_val2017.json'
    content = json.loads(path.read_text())
    content['categories'].reverse()
    changed = case.folder / 'reversed.json'
    changed.write_text(json.dumps(content))
    return f'test_evaluator.ann_file={changed}'


# Identifier: (command line, what the message says).
ROWS = {
    'hostile objects beside the weights': (
        lambda c: c.test('hostile.pth'),
        'hostile.pth.* objects other than tensors',
    ),
    'missing': (lambda c: c.test('none.pth'), 'no checkpoint at .*none.pth'),
    'pipe': (lambda c: c.test('pipe.pth'), 'pipe.pth.* is a device or pipe'),
    'noise': (lambda c: c.test('noise.pth'), 'noise.pth.* is no checkpoint'),
    'half, old format': (lambda c: c.test('legacy.pth'), 'legacy.pth'),
    'zip bomb': (lambda c: c.test('bomb.pth'), 'bomb.pth.* refused.* become 268,435,4'),
    'storage larger than the file': (
        lambda c: c.test('storage.pth'),
        'storage.pth.* not a readable',
    ),
    'keys that are numbers': (lambda c: c.test('numbers.pth'), 'no state dict'),
    'NumPy arrays': (lambda c: c.test('arrays.pth'), 'no state dict'),
    'foreign keys': (lambda c: c.test('foreign.pth'), 'none of the weights'),
    'other architecture': (lambda c: c.test('arch.pth'), 'differ in architecture'),
    'other idle ratio': (lambda c: c.test('ratio.pth'), 'idle ratio'),
    'other classes': (lambda c: c.test('classes.pth'), 'another model.*retina_cls'),
    'vanilla': (lambda c: c.test('vanilla.pth'), 'vanilla'),
    'a weight missing': (lambda c: c.test('lacking.pth'), 'lacks .*retina_cls.bias'),
    'a weight of other shape': (lambda c: c.test('transposed.pth'), 'retina_cls.bias'),
    'NaN statistics': (lambda c: c.test('nan.pth'), 'norm1.running_mean.* not finite'),
    'integer weights': (lambda c: c.test('integers.pth'), 'fc1.weight.* torch.int32'),
    'option without a name': (lambda c: c.test('good.pth', '=3'), 'key=value'),
    'no annotations': (
        lambda c: c.test('good.pth', 'test_dataloader.dataset.ann_file=none.json'),
        'none.json',
    ),
    'annotations to compare with are a device': (
        lambda c: c.test('good.pth', 'test_evaluator.ann_file=/dev/zero'),
        "no file '/dev/zero'",
    ),
    'no annotation in the validation set': (
        lambda c: c.test('good.pth', *c.coco(lambda content: content.update(annotations=[]))),
        'test data set.*no annotations',
    ),
    'categories in another order': (
        lambda c: c.test('good.pth', *c.coco(lambda content: content['categories'].reverse())),
        "cannot use the test data set: .*val2017.json.* another order.* 'nine'.* 'zero'",
    ),
    'categories to compare with in another order': (
        lambda c: c.test('good.pth', reversed_ground_truth(c)),
        "test_evaluator.ann_file: .*reversed.json.* another order.* 'nine'.* 'zero'",
    ),
    'predictions into a folder': (
        lambda c: c.test(more=['--out', (c.folder / 'x.pkl').mkdir() or c.folder / 'x.pkl']),
        'is a folder',
    ),
    'predictions of another kind': (lambda c: c.test(more=['--out', c.folder / 'x.csv']), 'pkl'),
    'pictures into a file': (
        lambda c: c.test(more=['--show-dir', old_file(c, 'old')]),
        'cannot write to .*old',
    ),
}


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, refused):
    refused(*ROWS[row])
