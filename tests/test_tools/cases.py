"""Malformed input of every kind, and the command lines of all tools that get it."""

import io
import json
import os
import pickle
import runpy
import shutil
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

import repa_mm
from repa_mm.run import init_model, load_config

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


def write_inputs(folder, digits):
    """Write configs, checkpoints and images; the working directory is that of the data."""
    (folder / 'detector.py').write_text(tiny(**DETECTOR))
    (folder / 'vanilla.py').write_text(tiny(**DETECTOR, repa=False))
    (folder / 'segmentor.py').write_text(tiny(**SEGMENTOR))
    write_checkpoints(folder, folder / 'detector.py', folder / 'vanilla.py')
    segmentor = init_model(str(folder / 'segmentor.py'))
    torch.save(dict(meta={}, state_dict=segmentor.state_dict()), folder / 'segmentor.pth')
    image = next((digits / 'data/demo/coco/val2017').iterdir()).read_bytes()
    (folder / 'image.jpg').write_bytes(image)
    for name, content in dict(
        empty=b'', text=b'no image', half=image[: len(image) // 2], bomb=png(60000, 60000)
    ).items():
        (folder / f'{name}.jpg').write_bytes(content)
    os.mkfifo(folder / 'pipe.jpg')


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


def call_tool(monkeypatch, capsys, tool, *arguments):
    """Run a tool in this process; its status, and what it prints last."""
    path = str(ROOT / f'tools/{tool}.py')
    monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
    code = 0
    capsys.readouterr()  # what the test itself has printed, or a logger of an earlier one
    try:
        runpy.run_path(path, run_name='__main__')
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert 'Traceback' not in error, error
    # As the interpreter does with a text for a status.
    if isinstance(code, str):
        return 1, code
    return code or 0, (error.strip().splitlines() or [''])[-1]
