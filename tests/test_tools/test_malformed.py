"""Malformed input of every kind, through the command lines of all tools.

Each ends with one line that names the cause and a status that is not zero,
leaves every file as it was, and no new ones (but for a run's own logs).
"""

import io
import json
import os
import pickle
import re
import resource
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config

import repa_mm
from repa_mm.runtime import init_model, load_config

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
pytestmark = pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='files of Unix')
ROOT = Path(__file__).parents[2]
NAN, INF = float('nan'), float('inf')

TINY = """
_base_ = {base!r}
model = dict(
    backbone=dict(arch=dict(embed_dims=24, depths=[1, 1, 1, 1],
                            num_heads=[1, 2, 2, 2])),
    {heads})
train_dataloader = dict(batch_size=1, num_workers=0)
{more}
"""
DETECTOR = dict(
    base='demo/{}retinanet{}_swin_digits.py',
    more='',
    heads='neck=dict(in_channels=[48, 96, 192], out_channels=32), '
    'bbox_head=dict(in_channels=32, feat_channels=32)',
)
SEGMENTOR = dict(
    base='demo/{}upernet{}_swin_digits.py',
    more='train_cfg = dict(max_iters=1, val_interval=1)',
    heads='decode_head=dict(in_channels=[24, 48, 96, 192], channels=16), '
    'auxiliary_head=dict(in_channels=96, channels=16)',
)


def tiny(base, heads, more, repa=True):
    """The text of a config of a very small model."""
    base = base.format('', '_repa' if repa else '')
    return TINY.format(base=repa_mm.config_path(base), heads=heads, more=more)


class Hostile:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


def write_checkpoints(folder, detector, vanilla):
    """Checkpoints of every bad kind; good.pth is the only good one."""

    def save(name, weights, **others):
        torch.save(dict(dict(meta={}, state_dict=weights), **others), folder / f'{name}.pth')

    def changed(key, change):
        return {**good, key: change(good[key].clone())}

    model = init_model(str(detector))
    good = model.state_dict()
    save('good', good)
    save('merged', repa_mm.reparameterize(model).state_dict())
    save('vanilla', init_model(str(vanilla)).state_dict())
    for name, options in dict(
        ratio={'model.backbone.idle_ratio': 0.5},
        arch={'model.backbone.arch.depths': [1, 2, 1, 1]},
        classes={'model.bbox_head.num_classes': 3},
    ).items():
        other = init_model(load_config(str(detector), options))
        if name == 'ratio':  # the training form has the same weights
            other = repa_mm.reparameterize(other)
        save(name, other.state_dict())
    norm = 'backbone.stages.0.blocks.0.ffn.norm1'
    linear = 'backbone.stages.0.blocks.0.ffn.fc1.weight'
    head = 'bbox_head.retina_cls.bias'
    save('nan', changed(f'{norm}.running_mean', lambda v: v * NAN))
    save('inf', changed(head, lambda v: v + INF))
    save('variance', changed(f'{norm}.running_var', lambda v: -v))
    save('integers', changed(linear, lambda v: v.int()))
    save('complex', changed(linear, lambda v: v + 1j))
    save('transposed', changed(head, lambda v: v[None]))
    save('sparse', changed(linear, lambda v: v.to_sparse()))
    save('lacking', {k: v for k, v in good.items() if k != head})
    save('foreign', {f'other.{k}': v for k, v in good.items()})
    save('numbers', {1: torch.zeros(1)})
    save('arrays', {k: v.numpy() for k, v in good.items()})
    save('expanded', changed(head, lambda v: v[:1].expand(2**20, 2**20)))
    save('expanded2', good, optimizer=dict(state=[torch.zeros(1).expand(2**20, 2**20)]))
    save('hostile', good, message_hub=Hostile(folder / 'owned'))
    (folder / 'hostile_pickle.pth').write_bytes(pickle.dumps(Hostile(folder / 'owned')))
    torch.save(list(good), folder / 'list.pth')
    torch.save(next(iter(good.values())), folder / 'tensor.pth')
    torch.save({}, folder / 'nothing.pth')
    torch.save(dict(state_dict=good), folder / 'legacy.pth', _use_new_zipfile_serialization=False)
    legacy = (folder / 'legacy.pth').read_bytes()
    (folder / 'legacy.pth').write_bytes(legacy[:-1000])
    whole = (folder / 'good.pth').read_bytes()
    (folder / 'half.pth').write_bytes(whole[: len(whole) // 2])
    (folder / 'empty.pth').write_bytes(b'')
    (folder / 'text.pth').write_text('not a checkpoint')
    (folder / 'noise.pth').write_bytes(np.random.default_rng(0).bytes(10000))
    (folder / 'pickle_noise.pth').write_bytes(b'\x80\x02' + np.random.default_rng(0).bytes(10000))
    (folder / 'zip_noise.pth').write_bytes(b'PK\3\4' + np.random.default_rng(0).bytes(10000))
    broken = bytearray(whole)
    start = whole.index(b'data.pkl') + 100
    broken[start : start + 400] = b'\xff' * 400
    (folder / 'broken.pth').write_bytes(broken)
    with zipfile.ZipFile(folder / 'bomb.pth', 'w', zipfile.ZIP_DEFLATED) as z:
        z.writestr('bomb/data.pkl', bytes(2**28))
        z.writestr('bomb/version', '3')
    # What the directory says is 100 GiB long.
    small = io.BytesIO()
    torch.save({'a': torch.zeros(8)}, small)
    lying = small.getvalue()
    at = lying.index(b'PK\1\2')
    (folder / 'lying.pth').write_bytes(
        lying[: at + 20] + struct.pack('<II', 2**32 - 2, 2**32 - 2) + lying[at + 28 :]
    )
    # Storages and pickles that ask for more than there is.
    whole = small.getvalue()
    (folder / 'storage.pth').write_bytes(
        rezipped(whole, lambda data: data.replace(b'K\x08', b'J\0\0\0\x40'))
    )
    (folder / 'bytes.pth').write_bytes(
        rezipped(whole, lambda data: b'\x80\x02c__builtin__\nbytearray\nJ\0\0\0\x40\x85R.')
    )
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(folder / 'script.pth'))
    (folder / 'folder.pth').mkdir()
    os.mkfifo(folder / 'pipe.pth')


def rezipped(archive, change):
    """An archive of torch's with another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, 'w') as new:
        for record in old.infolist():
            data = old.read(record)
            if record.filename.endswith('data.pkl'):
                assert change(data) != data
                data = change(data)
            new.writestr(record.filename, data)
    return out.getvalue()


def png(width, height):
    """A PNG of few bytes that declares a size."""

    def chunk(kind, data):
        return (
            struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
        )

    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    return (
        b'\x89PNG\r\n\x1a\n'
        + chunk(b'IHDR', header)
        + chunk(b'IDAT', zlib.compress(bytes(100)))
        + chunk(b'IEND', b'')
    )


@pytest.fixture(scope='session')
def inputs(digits, tmp_path_factory):
    """A folder of configs, checkpoints, data sets and images."""
    folder = tmp_path_factory.mktemp('inputs')
    (folder / 'detector.py').write_text(tiny(**DETECTOR))
    (folder / 'vanilla.py').write_text(tiny(**DETECTOR, repa=False))
    (folder / 'segmentor.py').write_text(tiny(**SEGMENTOR))
    before = os.getcwd()
    os.chdir(digits)
    try:
        write_checkpoints(folder, folder / 'detector.py', folder / 'vanilla.py')
        torch.save(
            dict(meta={}, state_dict=init_model(str(folder / 'segmentor.py')).state_dict()),
            folder / 'segmentor.pth',
        )
    finally:
        os.chdir(before)
    image = next((digits / 'data/demo/coco/val2017').iterdir()).read_bytes()
    (folder / 'image.jpg').write_bytes(image)
    for name, content in dict(
        empty=b'', text=b'no image', half=image[: len(image) // 2], bomb=png(60000, 60000)
    ).items():
        (folder / f'{name}.jpg').write_bytes(content)
    os.mkfifo(folder / 'pipe.jpg')
    return folder


class Case:
    """What a row of the table may use to make its input."""

    def __init__(self, inputs, folder, digits):
        self.inputs, self.folder, self.digits = inputs, folder, digits
        self.work = folder / 'work'

    def __truediv__(self, name):
        return str(self.inputs / name)

    def config(self, text, name='config.py'):
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def detector(self, more):
        """A config on the detector's with some lines more."""
        return self.config(f'_base_ = {self / "detector.py"!r}\n{more}')

    def coco(self, change, files=()):
        """Options for a copy of a data set with changed annotations.

        ``change`` gets the content of the JSON file, and may return another
        text; ``files`` replace the first image.
        """
        root = self.folder / 'coco'
        shutil.copytree(self.digits / 'data/demo/coco', root)
        for split in ('train', 'val'):
            path = root / f'annotations/instances_{split}2017.json'
            content = json.loads(path.read_text())
            text = change(content) if change else None
            path.write_bytes(text if isinstance(text, bytes) else json.dumps(content).encode())
            for file in files:
                for image in (root / f'{split}2017').iterdir():
                    image.unlink()
                    if file:
                        os.link(self / file, image)
        return [
            f'{split}_dataloader.dataset.data_root={root}/' for split in ('train', 'val', 'test')
        ] + [
            f'{split}_evaluator.ann_file={root}/annotations/instances_val2017.json'
            for split in ('val', 'test')
        ]

    def ade(self, change):
        """The same for segmentation; ``change`` gets the folder."""
        root = self.folder / 'ade'
        shutil.copytree(self.digits / 'data/demo/ade', root)
        change(root)
        return [
            f'{split}_dataloader.dataset.data_root={root}' for split in ('train', 'val', 'test')
        ]

    def train(self, *options, config=None):
        return [
            'train',
            config or self / 'detector.py',
            '--work-dir',
            self.work,
            *(options and ('--cfg-options', *options)),
        ]

    def test(self, checkpoint='good.pth', *options, config=None, more=()):
        return [
            'test',
            config or self / 'detector.py',
            self / checkpoint,
            '--work-dir',
            self.work,
            *(options and ('--cfg-options', *options)),
            *more,
        ]

    def merge(self, checkpoint='good.pth', out='out.pth', *more):
        return ['reparameterize', self / 'detector.py', self / checkpoint, self.folder / out, *more]

    def draw(self, image='image.jpg', checkpoint='good.pth', out='out.png', *more):
        return [
            'image_demo',
            self / image,
            self / 'detector.py',
            self / checkpoint,
            '--out',
            self.folder / out,
            *more,
        ]

    def benchmark(self, *more, checkpoint=None):
        return [
            'benchmark',
            self / 'detector.py',
            *([self / checkpoint] if checkpoint else []),
            '--num-images',
            1,
            '--warmup',
            0,
            *more,
        ]

    def flops(self, config, *more):
        return ['get_flops', config, '--shape', 64, '--part', 'backbone', *more]


def edit(part, **values):
    """A change of the first entry of a part of an annotation file."""
    return lambda content: content[part][0].update(values)


def replace_all(folder, content):
    """A change of all files in a folder of a data set."""

    def change(root):
        for path in (root / folder).iterdir():
            path.unlink()
            if content is not None:
                path.write_bytes(content)

    return change


def label_map(size, value):
    def change(root):
        from PIL import Image

        for path in (root / 'annotations').glob('*/*'):
            Image.fromarray(np.full(size, value, np.uint8)).save(path)

    return change


def thin_image(case):
    import mmcv

    path = str(case.folder / 'thin.png')
    mmcv.imwrite(np.zeros((1, 3000, 3), np.uint8), path)
    return path


def change_all(**values):
    return lambda content: [entry.update(values) for entry in content['annotations']] and None


def old_file(case, name):
    path = case.folder / name
    path.write_text('old')
    return path


# Identifier: (command line, what the message says).
ROWS = {
    # Checkpoints.
    'missing': (lambda c: c.test('none.pth'), 'no checkpoint at .*none.pth'),
    'folder': (lambda c: c.merge('folder.pth'), 'folder.pth.* is a folder'),
    'pipe': (lambda c: c.test('pipe.pth'), 'pipe.pth.* is a device or pipe'),
    'device': (lambda c: c.merge('/dev/zero'), '/dev/zero.* is a device'),
    'empty file': (lambda c: c.draw(checkpoint='empty.pth'), 'is empty'),
    'text': (lambda c: c.merge('text.pth'), 'text.pth.* is no checkpoint'),
    'noise': (lambda c: c.test('noise.pth'), 'noise.pth.* is no checkpoint'),
    'noise, as a pickle': (lambda c: c.merge('pickle_noise.pth'), 'pickle_noise.pth'),
    'noise, as a zip': (
        lambda c: c.benchmark(checkpoint='zip_noise.pth'),
        'zip_noise.pth.* truncated',
    ),
    'half': (lambda c: c.merge('half.pth'), 'half.pth.* is truncated'),
    'half, old format': (lambda c: c.test('legacy.pth'), 'legacy.pth'),
    'damaged inside': (lambda c: c.merge('broken.pth'), 'broken.pth'),
    'zip bomb': (lambda c: c.test('bomb.pth'), 'bomb.pth.* refused.* become 268,435,4'),
    'lying directory': (lambda c: c.merge('lying.pth'), 'lying.pth.* refused'),
    'bomb of views': (lambda c: c.merge('expanded.pth'), r'refused.* \(1048576, 1048576\)'),
    'bomb in the optimizer': (lambda c: c.train() + ['--resume', c / 'expanded2.pth'], 'refused'),
    'storage larger than the file': (
        lambda c: c.test('storage.pth'),
        'storage.pth.* not a readable',
    ),
    'pickle that takes memory': (lambda c: c.merge('bytes.pth'), 'bytearray'),
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
    'TorchScript': (lambda c: c.merge('script.pth'), 'TorchScript'),
    'hostile pickle': (lambda c: c.draw(checkpoint='hostile_pickle.pth'), 'hostile_pickle.pth'),
    'a list': (lambda c: c.merge('list.pth'), 'holds a list'),
    'a tensor': (lambda c: c.merge('tensor.pth'), 'holds a Tensor'),
    'no weights': (lambda c: c.merge('nothing.pth'), 'no state dict'),
    'keys that are numbers': (lambda c: c.test('numbers.pth'), 'no state dict'),
    'NumPy arrays': (lambda c: c.test('arrays.pth'), 'no state dict'),
    'foreign keys': (lambda c: c.test('foreign.pth'), 'none of the weights'),
    'foreign keys to train from': (
        lambda c: c.train(f'load_from={c / "foreign.pth"}'),
        'none of the weights',
    ),
    'other architecture': (lambda c: c.test('arch.pth'), 'differ in architecture'),
    'other idle ratio': (lambda c: c.test('ratio.pth'), 'idle ratio'),
    'other classes': (lambda c: c.test('classes.pth'), 'another model.*retina_cls'),
    'other classes to draw': (
        lambda c: c.draw(checkpoint='classes.pth'),
        'another model.*retina_cls',
    ),
    'vanilla': (lambda c: c.test('vanilla.pth'), 'vanilla'),
    'a weight missing': (lambda c: c.test('lacking.pth'), 'lacks .*retina_cls.bias'),
    'a weight of other shape': (lambda c: c.test('transposed.pth'), 'retina_cls.bias'),
    'NaN statistics': (lambda c: c.test('nan.pth'), 'norm1.running_mean.* not finite'),
    'infinite weights': (lambda c: c.merge('inf.pth'), 'retina_cls.bias.* not finite'),
    'NaN to train from': (lambda c: c.train(f'load_from={c / "nan.pth"}'), 'not finite'),
    'negative variance': (lambda c: c.merge('variance.pth'), 'norm1.running_var.* negative'),
    'integer weights': (lambda c: c.test('integers.pth'), 'fc1.weight.* torch.int32'),
    'complex weights': (lambda c: c.merge('complex.pth'), 'fc1.weight.* torch.complex64'),
    'sparse weights': (lambda c: c.merge('sparse.pth'), 'sparse.pth'),
    'merged, to train from': (
        lambda c: c.train(f'load_from={c / "merged.pth"}'),
        'cannot be trained',
    ),
    'merged, to merge': (
        lambda c: c.merge('merged.pth'),
        'reparameterized already|is reparameterized',
    ),
    'not one to resume from': (
        lambda c: c.train() + ['--resume', c / 'good.pth'],
        'cannot be resumed from',
    ),
    'baseline that is none': (
        lambda c: c.benchmark(
            '--synthetic',
            '64x64',
            '--baseline',
            c / 'vanilla.py',
            '--baseline-checkpoint',
            c / 'good.pth',
        ),
        'good.pth',
    ),
    # Configs.
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
    'option without a value': (lambda c: c.train('model.backbone'), 'key=value'),
    'option without a name': (lambda c: c.test('good.pth', '=3'), 'key=value'),
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
    # Data sets for detection.
    'no data': (
        lambda c: c.train('train_dataloader.dataset.data_root=no/where'),
        "no data set at 'no/where'",
    ),
    'no folder of images': (
        lambda c: c.train('train_dataloader.dataset.data_prefix.img=none/'),
        'no data set.*none',
    ),
    'no annotations': (
        lambda c: c.test('good.pth', 'test_dataloader.dataset.ann_file=none.json'),
        'none.json',
    ),
    'annotations to compare with are a device': (
        lambda c: c.test('good.pth', 'test_evaluator.ann_file=/dev/zero'),
        "no file '/dev/zero'",
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
                edit('annotations', segmentation=dict(size=[96, 96], counts='01')),
                'do not fill',
            ),
        )
    },
    'annotations of other classes': (
        lambda c: c.train(*c.coco(edit('categories', name='cat'))),
        'other class names.* 9 of the 10',
    ),
    'no classes': (
        lambda c: c.train('train_dataloader.dataset.metainfo.classes=()'),
        'metainfo.classes is empty',
    ),
    'no annotation in the validation set': (
        lambda c: c.test('good.pth', *c.coco(lambda content: content.update(annotations=[]))),
        'test data set.*no annotations',
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
    'image missing, to measure with': (
        lambda c: c.benchmark('--cfg-options', *c.coco(None, [None])),
        'cannot load',
    ),
    # Data sets for segmentation.
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
    # What is drawn.
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
    # Outputs.
    'output is the input': (
        lambda c: ['reparameterize', c / 'detector.py', c / 'good.pth', c / 'good.pth'],
        'is the input',
    ),
    'output is the config': (
        lambda c: c.flops(c / 'detector.py', '--out', c / 'detector.py'),
        'is the input',
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
    'output is a folder': (lambda c: c.merge(out='.'), 'is a folder'),
    'output is no picture': (lambda c: c.draw(out='out.xyz'), 'out.xyz'),
    'output is a device': (lambda c: c.merge(out='/dev/null'), 'is a device'),
    'output is full': (lambda c: c.flops(c / 'detector.py', '--out', '/dev/full'), 'is a device'),
    'output under a file': (lambda c: c.merge(out=old_file(c, 'old') / 'out.pth'), 'cannot write'),
    'predictions into a folder': (
        lambda c: c.test(more=['--out', (c.folder / 'x.pkl').mkdir() or c.folder / 'x.pkl']),
        'is a folder',
    ),
    'predictions of another kind': (lambda c: c.test(more=['--out', c.folder / 'x.csv']), 'pkl'),
    'work dir is a file': (
        lambda c: ['train', c / 'detector.py', '--work-dir', old_file(c, 'old')],
        'cannot write to .*old',
    ),
    'pictures into a file': (
        lambda c: c.test(more=['--show-dir', old_file(c, 'old')]),
        'cannot write to .*old',
    ),
    'read-only': (
        lambda c: c.benchmark('--synthetic', '64x64', '--out', '/proc/none/out.json'),
        "cannot write to '/proc/none'",
    ),
    'tolerance of NaN': (lambda c: c.merge('good.pth', 'out.pth', '--tolerance', 'nan'), 'nan'),
    # What is measured.
    **{
        f'size {size}': (lambda c, size=size: c.benchmark('--synthetic', size), message)
        for size, message in (
            ('0x0', "'0x0' is no size"),
            ('abc', "'abc' is no size"),
            ('-1', 'no size|expected one argument'),
            ('64', 'no size'),
            ('1000000x1000000', 'GiB of memory'),
        )
    },
    **{
        f'sweep {sweep!r}': (
            lambda c, sweep=sweep: c.benchmark('--synthetic', '64x64', '--sweep', sweep),
            '--sweep',
        )
        for sweep in ('', 'batch=', 'batch=0', 'batch=²', 'weight=3', 'idle-ratio=nan')
    },
    **{
        f'measuring with {" ".join(options)}': (
            lambda c, options=options: c.benchmark('--synthetic', '64x64', *options),
            message,
        )
        for options, message in (
            (['--threads', '0'], '--threads must be'),
            (['--threads', '1000000'], '--threads must be'),
            (['--amp', 'fp8'], 'fp8'),
            (['--device', 'abc'], "'abc'"),
            (['--device', 'meta'], 'meta'),
            (['--device', 'cuda:99'], 'cuda:99'),
            (['--batch-size', '0'], '--batch-size'),
            (['--batch-size', '1000000'], 'GiB of memory'),
            (['--num-images', '-5'], '--num-images'),
            (['--warmup', '-5'], '--warmup'),
            (['--plot', 'out.xyz'], 'out.xyz'),
        )
    },
    'baseline of another task': (
        lambda c: c.benchmark('--synthetic', '64x64', '--baseline', c / 'segmentor.py'),
        'mmseg',
    ),
    'baseline is a RePa model': (
        lambda c: c.benchmark('--synthetic', '64x64', '--baseline', c / 'detector.py'),
        'baseline',
    ),
    'vanilla, to train': (
        lambda c: ['benchmark_training', c / 'vanilla.py', '--size', '64x64'],
        'no channel-idle FFN',
    ),
    'size to train': (
        lambda c: ['benchmark_training', c / 'detector.py', '--size', '1x'],
        'no size',
    ),
    'batch to train': (
        lambda c: ['benchmark_training', c / 'detector.py', '--batch-size', '99999999'],
        'GiB of memory',
    ),
    'size to profile': (
        lambda c: ['profile_latency', c / 'detector.py', '--size', 'big'],
        'no size',
    ),
    'nothing to profile': (lambda c: ['profile_latency', c / 'none.py'], 'none.py'),
    'shape of 0': (lambda c: ['get_flops', c / 'detector.py', '--shape', 0], '--shape'),
    'shape of three': (lambda c: ['get_flops', c / 'detector.py', '--shape', 3, 64, 64], '--shape'),
    'shape too large': (
        lambda c: ['get_flops', c / 'detector.py', '--shape', 10**6, 10**6],
        'GiB of memory',
    ),
    # The demonstration.
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


def snapshot(*folders, without=()):
    """What is in folders: a file that is written anew has another number."""
    found = {}
    for folder in folders:
        for path in sorted(Path(folder).rglob('*')):
            status = path.lstat()
            found[str(path)] = (
                status.st_mode,
                (None if path.is_dir() else (status.st_ino, status.st_size, status.st_mtime_ns)),
            )
    return {
        path: what for path, what in found.items() if not path.startswith(tuple(map(str, without)))
    }


def call(monkeypatch, capsys, tool, *arguments):
    """Run a tool in this process; its status, and what it prints last."""
    path = str(ROOT / f'tools/{tool}.py')
    monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
    code = 0
    try:
        runpy.run_path(path, run_name='__main__')
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert 'Traceback' not in error
    # As the interpreter does with a text for a status.
    if isinstance(code, str):
        return 1, code
    return code or 0, (error.strip().splitlines() or [''])[-1]


@pytest.fixture
def case(inputs, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(digits)
    folder = tmp_path / 'case'
    (tmp_path / 'temporary').mkdir()
    folder.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
    # Formatting a config takes most of the time of setting up a run.
    monkeypatch.setattr(Config, 'pretty_text', '# a config')
    threads = torch.get_num_threads()
    yield Case(inputs, folder, digits)
    torch.set_num_threads(threads)


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, case, inputs, digits, monkeypatch, capsys):
    make, message = ROWS[row]
    arguments = make(case)
    folders = inputs, digits, case.folder.parent
    before = snapshot(*folders)
    status, said = call(monkeypatch, capsys, *arguments)
    assert status != 0, said
    assert len(said.splitlines()) == 1 and len(said) < 1000
    assert 'Traceback' not in said
    assert re.search(message, said), said
    # MMEngine's visualizer and logger may live on in the next tests.
    assert snapshot(*folders, without=[case.work]) == before
    assert not (inputs / 'owned').exists()


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
        'File too large',
    ),
    'demo data': (
        lambda c: ['make_demo_data', '--root', c.folder / 'new', '--num-train', 1, '--num-val', 1],
        2**10,
        'cannot write|requested',
    ),
}


@pytest.mark.parametrize('row', FULL)
def test_full_disk(row, case, inputs, digits, monkeypatch, capsys):
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
        status, said = call(monkeypatch, capsys, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert status != 0
    assert len(said.splitlines()) == 1
    assert re.search(message, said), said
    assert snapshot(inputs, digits, case.folder, without=[case.work]) == before


def test_hostile_checkpoints_run_nothing(case, inputs, monkeypatch, capsys):
    """Whether what is around the weights is refused or left out."""
    for arguments in (
        case.test('hostile.pth'),
        case.merge('hostile.pth'),
        case.train(f'load_from={case / "hostile.pth"}', 'train_cfg.max_epochs=0'),
        case.train() + ['--resume', case / 'hostile.pth'],
    ):
        status, said = call(monkeypatch, capsys, *arguments)
        assert status == 0 or re.search('hostile.pth|max_epochs|epoch', said)
        assert not (inputs / 'owned').exists()


def test_paths_with_spaces_and_letters(inputs, digits, tmp_path, monkeypatch, capsys):
    """The whole way, in a folder whose name is not ASCII."""
    folder = tmp_path / 'ein schöner Ordner 数据 %s {0} [1]'
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Config, 'pretty_text', '# a config')
    case = Case(inputs, folder, digits)
    options = case.coco(None)
    config = case.config(
        tiny(**DETECTOR) + 'train_cfg = dict(max_epochs=1, val_interval=1)\n'
        'model["test_cfg"] = dict(score_thr=0.)\n',
        'ä b.py',
    )
    checkpoint = 'work dir ü/epoch_1.pth'
    image = folder / 'coco/bild 1 ß.jpg'
    shutil.copy(inputs / 'image.jpg', image)
    for arguments, written in (
        (['train', config, '--work-dir', 'work dir ü', '--cfg-options', *options], checkpoint),
        (
            [
                'test',
                config,
                checkpoint,
                '--work-dir',
                'x y',
                '--out',
                'ö ö.pkl',
                '--cfg-options',
                *options,
            ],
            'ö ö.pkl',
        ),
        (['reparameterize', config, checkpoint, 'é è.pth'], 'é è.pth'),
        (['image_demo', image, config, 'é è.pth', '--out', 'ñ.png'], 'ñ.png'),
        (
            [
                'benchmark',
                config,
                checkpoint,
                '--synthetic',
                '64x64',
                '--num-images',
                1,
                '--warmup',
                0,
                '--out',
                'ł.json',
                '--plot',
                'ł.png',
            ],
            'ł.png',
        ),
        (['make_demo_data', '--root', 'ż ż', '--num-train', 1, '--num-val', 1], 'ż ż/dataset.json'),
    ):
        status, said = call(monkeypatch, capsys, *arguments)
        assert status == 0, said
        assert (folder / written).is_file()


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


def test_the_whole_trace(case, monkeypatch, capsys):
    monkeypatch.setenv('REPA_MM_TRACEBACK', '1')
    with pytest.raises(FileNotFoundError, match='none.py'):
        call(monkeypatch, capsys, 'get_flops', 'none.py')
