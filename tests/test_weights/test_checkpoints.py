"""Checkpoints that are hostile, and those that only look so."""

import collections
import functools
import os
import pickle
import resource
import struct
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torch.nn as nn

from repa_mm.reparam import ChannelIdleFFN, CheckpointError, MergedFFN, reparameterize
from repa_mm.weights import (
    load_anywhere,
    load_checkpoint,
    load_weights,
    match_form,
    save_checkpoint,
)

HUGE = 50 * 2**30


@pytest.fixture(params=['this version', 'before 2.6'], autouse=True)
def unpickler(request, monkeypatch):
    """What reads pickles is another class with torch before 2.6."""
    if request.param == 'before 2.6':
        monkeypatch.setattr(torch, '__version__', '2.1.2')


@pytest.fixture
def little_memory():
    """No process of a test takes four gigabytes more than it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open('/proc/self/statm') as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='files of Linux')
@pytest.mark.parametrize(
    'start',
    [
        b'\x80\x02',
        b'\x80\x02c',  # a class with an endless name
        b'\x80\x04\x95' + struct.pack('<Q', 40 * 2**30),  # a frame
        b'\x80\x02T' + struct.pack('<i', 2**31 - 1),  # a string
        b'\x80\x02X' + struct.pack('<I', 2**32 - 1),  # a string
        b'\x80\x04\x8e' + struct.pack('<Q', 40 * 2**30),  # bytes
        b'\x80\x05\x96' + struct.pack('<Q', 40 * 2**30),  # a bytearray
        b'\x80\x02c__builtin__\nbytearray\nJ\0\0\0\x40\x85R.',
    ],
)
def test_sparse_file_that_begins_like_a_pickle(start, tmp_path, little_memory):
    path = tmp_path / 'huge.pth'
    path.write_bytes(start)
    os.truncate(path, HUGE)
    read = int(open('/proc/self/io').read().split()[1])
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(str(path))
    assert int(open('/proc/self/io').read().split()[1]) - read < 2**29


def test_sparse_archive(tmp_path, little_memory):
    """One whose pickle is said to be as long as the file."""
    import zipfile

    path = tmp_path / 'huge.pth'
    with open(path, 'wb') as file, zipfile.ZipFile(file, 'w') as archive:
        archive.writestr('huge/data.pkl', b'\x80\x02')
        info = archive.infolist()[0]
        file.seek(HUGE)
        archive.start_dir = HUGE
        info.file_size = info.compress_size = HUGE - 2**20
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(str(path))


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
@pytest.mark.skipif(not hasattr(torch, 'jagged'), reason='torch 2.1 does not save them')
@pytest.mark.parametrize('layout', ['strided', 'jagged'])
def test_nested_tensors(layout, tmp_path):
    path = str(tmp_path / 'nested.pth')
    layout = getattr(torch, layout)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    torch.save(dict(a=torch.ones(1), b=nested), path)
    # What torch makes of them is a matter of its version.
    kind = 'is refused: it holds a nested|is damaged, or holds objects|holds no state dict'
    with pytest.raises(CheckpointError, match=f"'{path}' ({kind})"):
        load_checkpoint(path)


@pytest.mark.skipif(not hasattr(torch, 'float8_e4m3fn'), reason='a type of later versions')
def test_float8(tmp_path):
    path = str(tmp_path / 'float8.pth')
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    weights = dict(model.state_dict())
    weights['0.weight'] = weights['0.weight'].to(torch.float8_e4m3fn)
    try:
        torch.save(weights, path)
    except KeyError:
        pytest.skip('torch 2.1 has this type, but does not save it')
    state_dict = load_checkpoint(path)['state_dict']
    with pytest.raises(
        CheckpointError, match=f"'{path}': '0.weight' .* torch.float8_e4m3fn.* float32 first"
    ):
        load_weights(model, state_dict, path)


def test_names_in_wrappers(tmp_path):
    path = str(tmp_path / 'wrapped.pth')
    model = nn.Linear(2, 3)
    for prefix in ('module.', '_orig_mod.', 'module._orig_mod.module.'):
        torch.save(dict(state_dict={prefix + k: v for k, v in model.state_dict().items()}), path)
        copy = nn.Linear(2, 3)
        load_weights(nn.DataParallel(copy), load_checkpoint(path)['state_dict'])
        assert torch.equal(copy.weight, model.weight)


def test_old_format(tmp_path):
    """What torch wrote before 1.6, and pickles of NumPy arrays beside it."""
    path = str(tmp_path / 'old.pth')
    weights = nn.Linear(200, 300).state_dict()
    content = dict(state_dict=weights, meta=dict(epoch=3), args=dict(a=[1, 2.5, 'x']))
    torch.save(content, path, _use_new_zipfile_serialization=False)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded['state_dict']['weight'], weights['weight'])
    assert (loaded['meta'], loaded['args']) == (content['meta'], content['args'])


def test_what_torch_allows_beside_tensors(tmp_path):
    path = str(tmp_path / 'beside.pth')
    beside = dict(a={1, 2}, b=1j, c=collections.Counter('aab'), d=collections.OrderedDict(e=None))
    weights = dict(w=nn.Parameter(torch.ones(2)))
    torch.save(dict(state_dict=weights, meta=beside), path)
    assert load_checkpoint(path)['meta'] == beside


def test_an_ordinary_pickle(tmp_path):
    path = tmp_path / 'plain.pth'
    path.write_bytes(pickle.dumps(dict(a=1)))
    with pytest.raises(CheckpointError, match='plain.pth'):
        load_checkpoint(str(path))


def test_what_does_not_fit_is_named(randomize):
    model = randomize(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    good = model.state_dict()
    load_weights(model, {k: v for k, v in good.items() if 'num_batches' not in k})
    for change, message in (
        (dict(other=torch.ones(1)), "a.pth'.* another model: the model has no 'other'"),
        ({'0.weight': torch.ones(3, 3)}, "a.pth'.* another model: size mismatch for 0.weight"),
        ({'0.bias': torch.ones(3).int()}, "'0.bias' is of type torch.int32"),
        ({'1.running_var': -torch.ones(3)}, "'1.running_var' .* negative variances"),
        ({'1.running_mean': torch.full((3,), float('nan'))}, 'not finite'),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_weights(model, {**good, **change}, 'a.pth')
    with pytest.raises(CheckpointError, match="another model: it lacks '0.weight' and 1 more"):
        load_weights(model, {k: v for k, v in good.items() if k[0] != '0'})
    with pytest.raises(CheckpointError, match='none of the weights of Sequential'):
        load_weights(model, dict(a=torch.ones(1)))
    load_weights(model, {**good, 'other': torch.ones(1)}, exact=False)
    load_weights(model, {'0.weight': torch.ones(3, 2), '0.bias': torch.ones(4)}, partial=True)
    assert (model[0].weight == 1).all() and not (model[0].bias == 1).any()


def test_the_form_of_the_weights(randomize, tmp_path):
    model = randomize(nn.Sequential(ChannelIdleFFN(8, 32))).eval()
    merged = reparameterize(model)
    for source, changed in ((model, False), (merged, True)):
        target = nn.Sequential(ChannelIdleFFN(8, 32))
        assert match_form(target, source.state_dict()) == changed
        assert isinstance(target[0], MergedFFN) == changed
        assert not match_form(target, source.state_dict())
        load_weights(target, source.state_dict())
        x = torch.randn(2, 5, 8)
        assert torch.equal(target.eval()(x), source(x))
    path = str(tmp_path / 'merged.pth')
    save_checkpoint(dict(state_dict=merged.state_dict()), path)
    with pytest.raises(CheckpointError, match='merged.pth.* is reparameterized'):
        load_weights(
            nn.Sequential(model[0], nn.Identity()), load_checkpoint(path)['state_dict'], path
        )


@pytest.fixture
def url(tmp_path, monkeypatch):
    """The address of a folder, and what was downloaded goes to another."""
    (tmp_path / 'web').mkdir()
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    handler = functools.partial(QuietHandler, directory=str(tmp_path / 'web'))
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), 'w')


def test_a_file_from_the_web_is_read_as_safely_as_others(url, tmp_path):
    torch.save(dict(state_dict={'module.a': torch.ones(2)}), tmp_path / 'web' / 'good.pth')
    weights = load_anywhere(f'{url}/good.pth')['state_dict']
    assert weights.keys() == {'a'} and weights['a'].tolist() == [1, 1]
    hostile = dict(state_dict={'a': torch.ones(2)}, meta=Hostile(tmp_path / 'written'))
    torch.save(hostile, tmp_path / 'web' / 'bad.pth')
    with pytest.raises(CheckpointError, match='open'):
        load_anywhere(f'{url}/bad.pth')
    assert not (tmp_path / 'written').exists()


def test_an_address_that_nobody_knows():
    with pytest.raises(FileNotFoundError, match="'gopher://x/y.pth'"):
        load_anywhere('gopher://x/y.pth')
