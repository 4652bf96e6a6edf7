"""Malformed input for tools/train.py."""

import os
import re
import subprocess
import sys

import pytest

from .cases import INF, NAN, ROOT, change_all, edit, label_map, old_file, png, replace_all


def resize_images(content):
    """Another height, and no masks, which would be of another size."""
    for image in content['images']:
        image['height'] = 95
    for annotation in content['annotations']:
        del annotation['segmentation']


# Identifier: (command line, what the message says).
ROWS = {
    'hostile objects to train from': (
        lambda c: c.train(f'load_from={c / "hostile.pth"}'),
        'hostile.pth.* objects other than tensors',
    ),
    'hostile objects to resume from': (
        lambda c: c.train() + ['--resume', c / 'hostile.pth'],
        'hostile.pth.* objects other than tensors',
    ),
    'bomb in the optimizer': (lambda c: c.train() + ['--resume', c / 'expanded2.pth'], 'refused'),
    'bad pretrained weights': (
        lambda c: c.train(
            config=c.detector(
                "model = dict(backbone=dict(init_cfg=dict(type='Pretrained', "
                f'checkpoint={c / "half.pth"!r})))'
            )
        ),
        'half.pth.* truncated',
    ),
    'NaN in pretrained weights': (
        lambda c: c.train(
            config=c.detector(
                "model = dict(backbone=dict(init_cfg=dict(type='Pretrained', "
                f"prefix='backbone.', checkpoint={c / 'nan.pth'!r})))"
            )
        ),
        'norm1.running_mean.* not finite',
    ),
    'no pretrained weights': (
        lambda c: c.train(
            config=c.detector(
                "model = dict(backbone=dict(init_cfg=dict(type='Pretrained', "
                "checkpoint='none.pth')))"
            )
        ),
        "weights at 'none.pth'",
    ),
    'foreign keys to train from': (
        lambda c: c.train(f'load_from={c / "foreign.pth"}'),
        'none of the weights',
    ),
    'NaN to train from': (lambda c: c.train(f'load_from={c / "nan.pth"}'), 'not finite'),
    'merged, to train from': (
        lambda c: c.train(f'load_from={c / "merged.pth"}'),
        'cannot be trained',
    ),
    'not one to resume from': (
        lambda c: c.train() + ['--resume', c / 'good.pth'],
        'cannot be resumed from',
    ),
    'option without a value': (lambda c: c.train('model.backbone'), 'key=value'),
    'batch of -1': (lambda c: c.train('train_dataloader.batch_size=-1'), 'batch_size'),
    'batch of words': (lambda c: c.train('train_dataloader.batch_size=many'), 'batch_size'),
    'workers without end': (
        lambda c: c.train('train_dataloader.num_workers=1000000'),
        'num_workers must be',
    ),
    'no epochs': (lambda c: c.train('train_cfg.max_epochs=0'), 'max_epochs must be at least 1'),
    'validation every 0 epochs': (lambda c: c.train('train_cfg.val_interval=0'), 'val_interval'),
    'learning rate of NaN': (lambda c: c.train('optim_wrapper.optimizer.lr=nan'), 'lr'),
    'optimizer unknown': (lambda c: c.train('optim_wrapper.optimizer.type=Sgdd'), 'Sgdd'),
    'nothing to train with': (
        lambda c: c.train(config=c.detector('train_cfg = None')),
        "no 'train_cfg'",
    ),
    'other number of classes': (
        lambda c: c.train('model.bbox_head.num_classes=3'),
        '10 classes, but bbox_head of the model has 3',
    ),
    'launcher without a job': (lambda c: c.train() + ['--launcher', 'slurm'], '--launcher slurm'),
    'auto-scaling without a base': (
        lambda c: c.train(config=c.detector('auto_scale_lr = None')) + ['--auto-scale-lr'],
        'base_batch_size',
    ),
    'no data': (
        lambda c: c.train('train_dataloader.dataset.data_root=no/where'),
        "no data set at 'no/where'",
    ),
    'no folder of images': (
        lambda c: c.train('train_dataloader.dataset.data_prefix.img=none/'),
        'no data set.*none',
    ),
    'path that is a number': (
        lambda c: c.train('train_dataloader.dataset.data_root=3'),
        'data_root.* must be a path, but is 3',
    ),
    'pipeline without an end': (
        lambda c: c.train(config=c.detector('train_dataloader = dict(dataset=dict(pipeline=[]))')),
        'Pack...Inputs',
    ),
    'annotations are a device': (
        lambda c: c.train('train_dataloader.dataset.ann_file=/dev/zero'),
        '/dev/zero',
    ),
    **{
        f'annotations: {name}': (
            lambda c, change=change: c.train(*c.coco(change)),
            f'instances_train2017.json.*{message}',
        )
        for name, change, message in (
            ('empty file', lambda content: b'', 'not an annotation file'),
            ('truncated', lambda content: b'{"images": [{"id": 1', 'not an'),
            ('binary', lambda content: bytes(range(256)), 'not an'),
            ('list', lambda content: b'[]', 'not an annotation file'),
            ('no images', lambda content: b'{"annotations": []}', 'no images'),
            ('images of words', edit('images', height='tall'), "'tall'"),
            ('no file name', edit('images', file_name=None), 'file_name'),
            ('images twice', lambda c: c['images'].append(c['images'][0]), 'two of the images'),
            ('no categories', lambda content: content.update(categories=[]), 'no categories'),
            (
                'categories twice',
                lambda c: c['categories'].append(c['categories'][0]),
                'two of the categories',
            ),
            ('NaN box', edit('annotations', bbox=[1, 2, NAN, 3]), 'nan'),
            ('infinite box', edit('annotations', bbox=[1, INF, 3, 3]), 'inf'),
            ('negative box', edit('annotations', bbox=[1, 2, -3, 3]), '-3'),
            ('box of words', edit('annotations', bbox='1234'), "'1234'"),
            ('box of strings', edit('annotations', bbox=['1', 2, 3, 4]), "'1'"),
            ('box of three', edit('annotations', bbox=[1, 2, 3]), r'\[1, 2, 3\]'),
            ('no box', lambda c: c['annotations'][0].pop('bbox'), 'None'),
            ('huge number', edit('annotations', bbox=[0, 0, 10**400, 1]), 'the box'),
            ('unknown category', edit('annotations', category_id=77), '77'),
            ('unknown image', edit('annotations', image_id='x'), "'x'"),
            ('no area', lambda c: c['annotations'][0].pop('area'), 'area'),
            ('NaN mask', edit('annotations', segmentation=[[NAN] * 6]), 'polygon'),
            (
                'mask of other size',
                edit('annotations', segmentation=dict(size=[5, 5], counts=[25])),
                'mask.*96x96',
            ),
            (
                'mask too long',
                edit('annotations', segmentation=dict(size=[96, 96], counts=[10**9])),
                'do not fill',
            ),
            ('mask of three numbers', edit('annotations', segmentation=[[1, 2, 3]]), 'polygon'),
            (
                'mask of text',
                edit('annotations', segmentation=dict(size=[96, 96], counts='0Pb`n0')),
                'do not fill',
            ),
        )
    },
    'annotations of other classes': (
        lambda c: c.train(*c.coco(edit('categories', name='cat'))),
        'other class names.* 9 of the 10',
    ),
    'categories in another order': (
        lambda c: c.train(*c.coco(lambda content: content['categories'].reverse())),
        "train2017.json.* another order.* label 0 would be 'nine'.* 'zero' in the classes",
    ),
    'two categories of one name': (
        lambda c: c.train(
            *c.coco(lambda content: content['categories'].append(dict(id=77, name='two')))
        ),
        "instances_train2017.json.* 2 categories named 'two'",
    ),
    'image of another size': (
        lambda c: c.train(*c.coco(resize_images)),
        r'\.jpg.* is of 96x96 pixels, but of 95x96 in its annotation',
    ),
    'no classes': (
        lambda c: c.train('train_dataloader.dataset.metainfo.classes=()'),
        'metainfo.classes is empty',
    ),
    'only crowds': (lambda c: c.train(*c.coco(change_all(iscrowd=1))), 'but crowds'),
    'only boxes without area': (
        lambda c: c.train(*c.coco(change_all(bbox=[0, 0, 0, 0]))),
        'boxes without area',
    ),
    'no image with annotations': (
        lambda c: c.train(*c.coco(lambda content: content.update(annotations=[]))),
        'train data set',
    ),
    **{
        f'image: {name}': (
            lambda c, file=file, tool=tool: getattr(c, tool)(
                *(['good.pth'] if tool == 'test' else []), *c.coco(None, [file])
            ),
            message,
        )
        for name, file, tool, message in (
            ('missing', None, 'train', r'cannot load .*\.jpg.*No such file'),
            ('empty', 'empty.jpg', 'test', r'\.jpg.* is empty'),
            ('text', 'text.jpg', 'train', r'cannot load .*\.jpg'),
            ('half', 'half.jpg', 'test', r'\.jpg.* truncated'),
            ('bomb', 'bomb.jpg', 'train', r'\.jpg.* refused'),
            ('pipe', 'pipe.jpg', 'test', r'\.jpg.* is a device or pipe'),
        )
    },
    **{
        f'segmentation: {name}': (
            lambda c, change=change: c.train(*c.ade(change), config=c / 'segmentor.py'),
            message,
        )
        for name, change, message in (
            ('no images', replace_all('images/training', None), 'is it empty'),
            ('no label maps', replace_all('annotations/training', None), 'cannot load .*png'),
            ('empty label maps', replace_all('annotations/training', b''), r'png.* is empty'),
            (
                'label maps of text',
                replace_all('annotations/training', b'xyz'),
                r'cannot load .*png',
            ),
            ('label maps bomb', replace_all('annotations/training', png(60000, 60000)), 'refused'),
            ('label maps of colours', label_map((96, 96, 3), 1), 'has 3 channels'),
            ('label maps of other size', label_map((48, 96), 1), 'of 48x96 pixels.* 96x96'),
            (
                'labels out of range',
                label_map((96, 96), 77),
                'the label 76, but there are 11 classes',
            ),
        )
    },
    'work dir is a file': (
        lambda c: ['train', c / 'detector.py', '--work-dir', old_file(c, 'old')],
        'cannot write to .*old',
    ),
}


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, refused):
    refused(*ROWS[row])


def test_an_image_missing_in_a_worker(case):
    """In a process of its own, with another that loads the data."""
    arguments = case.train('train_dataloader.num_workers=1', *case.coco(None, [None]))
    result = subprocess.run(
        [sys.executable, ROOT / f'tools/{arguments[0]}.py', *map(str, arguments[1:])],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'),
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert re.match(r"error: cannot load '.*\.jpg' \(LoadImage.*No such file", last), last
    assert 'Traceback' not in result.stderr + result.stdout
    # For who wants to know more.
    (log,) = case.work.glob('*/*.log')
    assert 'Traceback' in log.read_text()
