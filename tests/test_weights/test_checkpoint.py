"""Reading checkpoints, fitting them to models, and writing them."""

import argparse

import numpy as np
import pytest
import torch
import torch.nn as nn
from mmengine.logging import MessageHub
from mmengine.utils import digit_version

from repa_mm.reparam import ChannelIdleFFN, CheckpointError, MergedFFN, reparameterize
from repa_mm.weights import (
    load_checkpoint,
    load_original,
    load_weights,
    match_form,
    save_checkpoint,
)

torch_reads_safely = pytest.mark.skipif(
    digit_version(torch.__version__) < digit_version('2.6'), reason='MMEngine reads the files'
)


@torch_reads_safely
@pytest.mark.parametrize('numpy', [b'numpy.core.', b'numpy._core.'])
def test_what_mmengine_and_the_authors_save(numpy, tmp_path):
    hub = MessageHub.get_instance('test_what_is_saved')
    hub.update_scalar('loss', 2.5)
    hub.update_info('iter', 3)
    content = dict(
        state_dict=dict(a=torch.ones(2)),
        message_hub=hub.state_dict(),
        args=argparse.Namespace(idle_ratio=0.75, numbers=[np.float32(2), np.int64(3)]),
        meta=dict(lr=np.float64(0.1), dataset_meta=dict(palette=np.ones((2, 3), 'i8'))),
    )
    path = tmp_path / 'checkpoint.pth'
    # Without compression, the names of modules can be those of another NumPy.
    torch.save(content, path, _use_new_zipfile_serialization=False)
    other = {b'numpy.core.': b'numpy._core.', b'numpy._core.': b'numpy.core.'}[numpy]
    path.write_bytes(path.read_bytes().replace(other, numpy))
    loaded = load_checkpoint(str(path))
    assert loaded['message_hub']['log_scalars']['loss'].current() == 2.5
    assert loaded['args'] == content['args'] and loaded['meta']['lr'] == 0.1
    assert loaded['meta']['dataset_meta']['palette'].tolist() == [[1] * 3] * 2
    torch.save(content['state_dict'], path)
    assert load_checkpoint(str(path))['state_dict']['a'].tolist() == [1, 1]


class Hostile:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@torch_reads_safely
def test_code_in_a_file_is_not_run(tmp_path):
    path, written = str(tmp_path / 'hostile.pth'), tmp_path / 'written'
    for hostile in (Hostile(open, str(written), 'w'), Hostile(getattr, np.ndarray, 'sort')):
        torch.save(dict(state_dict=dict(a=torch.ones(2)), meta=hostile), path)
        with pytest.raises(Exception, match='open|an attribute of'):
            load_checkpoint(path)
    assert not written.exists()


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(other=torch.ones(1)), 'a.pth is of another model: it has other'),
        ({'0.fc1.weight': None}, 'a.pth: .*fc1.weight'),
        ({'1.weight': None}, 'a.pth is of another model: it lacks 1.weight'),
        ({'1.weight': torch.ones(3, 3)}, 'a.pth: .*size mismatch for 1.weight'),
        ({'1.num_batches_tracked': None, '0.num_active_channels': None}, None),
    ],
)
def test_what_does_not_fit_is_named(change, message, randomize):
    model = randomize(nn.Sequential(ChannelIdleFFN(8, 32), nn.BatchNorm1d(5)))
    weights = {k: v for k, v in {**model.state_dict(), **change}.items() if v is not None}
    if message is None:
        return load_weights(model, weights, 'a.pth')
    with pytest.raises(CheckpointError, match=f'(?s){message}'):
        load_weights(model, weights, 'a.pth')


def test_the_form_of_the_weights(randomize, tmp_path):
    model = randomize(nn.Sequential(ChannelIdleFFN(8, 32))).eval()
    merged = reparameterize(model)
    x, path = torch.randn(2, 5, 8), str(tmp_path / 'weights.pth')
    for source, changed in ((model, False), (merged, True)):
        target = nn.Sequential(ChannelIdleFFN(8, 32))
        assert match_form(target, source.state_dict()) == changed
        assert isinstance(target[0], MergedFFN) == changed
        assert not match_form(target, source.state_dict())
        # Files are loaded into the form that they are in, into wrapped models, too.
        save_checkpoint(dict(state_dict=source.state_dict()), path)
        target = nn.Sequential(ChannelIdleFFN(8, 32))
        load_weights(nn.DataParallel(target), load_checkpoint(path)['state_dict'])
        assert torch.equal(target.eval()(x), source(x))
    other = nn.Sequential(ChannelIdleFFN(8, 32, idle_ratio=0.5))
    for source in (model, merged):
        with pytest.raises(CheckpointError, match='idle.ratio'):
            load_weights(other, source.state_dict())


def test_an_unfinished_file_is_not_left(tmp_path):
    path = tmp_path / 'a.pth'
    save_checkpoint(dict(state_dict=dict(a=torch.ones(2))), str(path))
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        save_checkpoint(dict(a=torch.ones(2), b=lambda: None), str(path))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ['a.pth']


def test_more_layers_than_the_model_has_are_refused():
    VisionTransformer = pytest.importorskip('mmpretrain.models').VisionTransformer
    arch = dict(embed_dims=8, num_heads=1, feedforward_channels=16)
    three, two = (VisionTransformer(dict(arch, num_layers=n), img_size=32) for n in (3, 2))
    weights = three.state_dict()
    # Weights of something else beside them do not matter.
    others = {'teacher.layers.0.ln1.weight': torch.ones(8), 'ln3.weight': torch.ones(8)}
    load_original(three, dict(weights, **others), 'vit.pth')
    with pytest.raises(CheckpointError, match='vit.pth is of another model: it has layers.2.'):
        load_original(two, weights, 'vit.pth')
    scaled = VisionTransformer(dict(arch, num_layers=2), img_size=32, layer_scale_init_value=0.1)
    with pytest.raises(CheckpointError, match='it has layers.0.attn.gamma1.weight'):
        load_original(two, scaled.state_dict(), 'vit.pth')


def test_tables_that_a_swin_v2_computes_may_be_missing(randomize):
    models = pytest.importorskip('mmpretrain.models')
    arch = dict(embed_dims=8, depths=[1], num_heads=[1], extra_norm_every_n_blocks=0)
    model = randomize(models.SwinTransformerV2(arch, img_size=32, window_size=4, out_indices=(0,)))
    other = models.SwinTransformerV2(arch, img_size=32, window_size=4, out_indices=(0,))
    weights = model.state_dict()
    for load in (load_weights, load_original):
        load(other, dict(weights), 'swin.pth')
        for name, value in other.named_parameters():
            assert torch.equal(value, weights[name])
        name = next(key for key in weights if 'ffn' in key)
        lacking = {key: value for key, value in weights.items() if key != name}
        with pytest.raises(CheckpointError, match=f'swin.pth is of another model: it lacks {name}'):
            load(other, lacking, 'swin.pth')
