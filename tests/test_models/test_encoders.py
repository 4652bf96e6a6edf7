"""FFNs behind which a norm comes, in encoders and pixel decoders of whole models."""

import copy

import pytest
import torch
from mmcv.cnn.bricks.transformer import TransformerLayerSequence
from mmdet.structures import DetDataSample
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from mmseg.structures import SegDataSample

import repa_mm
from repa_mm.apis.features import head_inputs, tensors
from repa_mm.convert.changed_config import converted_config
from repa_mm.io.configs import load_config
from repa_mm.models.sites import ffn_sites
from repa_mm.reparam import ChannelIdleFFN, MergedFFN
from repa_mm.surgery import copied
from tests.co_detr import co_detr
from tests.test_convert.even import narrowed
from tests.test_export.zoo import DETRS
from tests.test_models.test_sites import idle
from tests.test_surgery import as_fairscale_does

IDLE = dict(type='Restructured', structures=[dict(type='ChannelIdle')])

# An installed config; its decoder is `transformer_decoder` if it predicts masks.
CASES = {
    **DETRS,
    'DDQ': 'ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py',
    'MaskFormer': 'maskformer/maskformer_r50_ms-16xb1-75e_coco.py',
    'Mask2Former': 'mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
}
SWIN = dict(type='mmdet.SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1))
SWIN.update(num_heads=(1, 1, 2, 2), out_indices=(1, 2, 3))


def model_config(case):
    if case == 'Co-DETR':  # a stand-in
        init_default_scope('mmdet')
        backbone = dict(type='ResNet', depth=18, out_indices=(1, 2, 3))
        return ConfigDict(co_detr(backbone, [128, 256, 512], None))
    cfg = load_config(f'mmdet::{CASES[case]}')
    model = cfg.model
    model.backbone.update(depth=18, init_cfg=None)
    channels = [64, 128, 256, 512]
    head = model.get('panoptic_head')
    if head:
        head.in_channels = channels
        parts = head.pixel_decoder.encoder, head.transformer_decoder
    else:
        model.neck.in_channels = [channels[i] for i in model.backbone.out_indices]
        model.num_queries = 30
        parts = model.encoder, model.decoder
    for part in parts:
        part.num_layers = 2
        part.layer_cfg.ffn_cfg.feedforward_channels = 128
    model.pop('init_cfg', None)
    return model


def build(case, randomize):
    model = randomize(MODELS.build(copy.deepcopy(model_config(case))))
    if hasattr(model, 'level_embed'):  # which is uninitialized memory
        torch.nn.init.normal_(model.level_embed)
    model.eval()
    return model


def data(model, *sizes):
    """Images of several sizes, padded to one batch."""
    images, samples = [], []
    for height, width in sizes or [(96, 128), (80, 100)]:
        images.append(torch.randint(0, 256, (3, height, width), dtype=torch.uint8))
        meta = dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1, 1))
        samples.append(DetDataSample(metainfo=meta))
    return model.data_preprocessor(dict(inputs=images, data_samples=samples), False)


def outputs(model, batch):
    """What the decoder and the heads make of images, too, where MMDetection computes in float64."""
    found = tensors(head_inputs(model, batch))
    if type(model).__name__ in ('ConditionalDETR', 'DABDETR', 'DDQDETR'):
        return found
    return [*found, *tensors(model(**copy.deepcopy(batch), mode='tensor'))]


@pytest.mark.parametrize('case', CASES)
def test_the_merged_model_computes_what_was_trained(case, randomize, relative_error):
    model = build(case, randomize)
    decoder = 'transformer_decoder' if 'Former' in case else 'decoder'
    assert len(ffn_sites(model)) == len(ffn_sites(model, 'encoder')) == 2
    assert len(ffn_sites(model, decoder)) == 2
    idle(model, 0.875)
    idle(model, [0.5, None], where=decoder)
    ffns = [m for m in model.modules() if isinstance(m, ChannelIdleFFN)]
    assert len(ffns) == 3 and not any(ffn.batch_norms() for ffn in ffns)
    batch = data(model)
    with torch.no_grad():
        expected = tensors(head_inputs(model, batch))
        merged = repa_mm.reparameterize(model)
        forms = [m for m in merged.modules() if isinstance(m, MergedFFN)]
        assert [form.num_active for form in forms] == [ffn.num_active for ffn in ffns]
        assert not any(form.shortcut for form in forms)  # it is in the matrix
        for a, b in zip(tensors(head_inputs(merged, batch)), expected):
            assert relative_error(a, b) < 1e-5
        model.double(), merged.double()
        batch['inputs'] = batch['inputs'].double()
        merged = repa_mm.reparameterize(model)
        for a, b in zip(outputs(merged, batch), outputs(model, batch)):
            assert relative_error(a, b) < 1e-9


@pytest.mark.parametrize('case', ['DETR', 'DINO'])
def test_what_is_padded_is_no_input_of_a_head(case, randomize):
    model = build(case, randomize)
    batch = data(model, (128, 128), (64, 128))
    with torch.no_grad():
        memory = head_inputs(model, batch)
        alone = head_inputs(model, {key: values[:1] for key, values in batch.items()})
    padded = (memory == 0).all(-1)
    assert padded[1].float().mean() == pytest.approx(0.5, abs=0.05) and not padded[0].any()
    torch.testing.assert_close(memory[:1], alone, rtol=1e-3, atol=1e-3)


def test_a_segmentor(randomize, relative_error):
    name = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'
    model = load_config(name).model
    model.backbone = dict(type='mmdet.ResNet', depth=18)
    model.decode_head.in_channels = [64, 128, 256, 512]
    model.pretrained = None
    model = randomize(MODELS.build(model))
    model.eval()
    sample = SegDataSample(metainfo=dict(img_shape=(96, 128)))
    batch = dict(inputs=torch.randn(2, 3, 96, 128), data_samples=[sample] * 2)
    idle(model)
    with torch.no_grad():
        merged = repa_mm.reparameterize(model)
        assert sum(isinstance(m, MergedFFN) for m in merged.modules()) == 6
        pairs = zip(tensors(head_inputs(merged, batch)), tensors(head_inputs(model, batch)))
        assert all(relative_error(a, b) < 1e-5 for a, b in pairs)


@pytest.mark.parametrize('case', ['DETR', 'DINO', 'Co-DETR', 'Mask2Former'])
def test_a_conversion_and_its_config(case, randomize):
    model = build(case, randomize)
    batches = [data(model), data(model, (128, 96))]
    narrow, report = narrowed(model, batches, 0.25, forward=head_inputs, held_out=[data(model)])
    assert len(report.blocks) == 2 and all(share < 0.1 for share in report.differences)
    widths = [len(site.parts().fc1.bias) for site in ffn_sites(narrow)]
    cfg = Config(dict(model=model_config(case)))
    given = {block.name: block.after for block in report.blocks}
    found = converted_config(cfg, model, given).model
    assert found.type == 'Restructured'
    built = MODELS.build(found)
    built.load_state_dict(narrow.state_dict())
    assert [len(site.parts().fc1.bias) for site in ffn_sites(built)] == widths
    name = report.blocks[1].name
    found = converted_config(cfg, model, {name: (7,)}).model
    for expected in ([4 * widths[0], 7], [4 * widths[0], 5]):
        built = MODELS.build(found)
        assert [len(site.parts().fc1.bias) for site in ffn_sites(built)] == expected
        # Converted once more, it has one structure more.
        cfg = Config(dict(model=found))
        found = converted_config(cfg, built, {name: (5,)}).model


def test_a_backbone_and_an_encoder_of_two_ratios(randomize):
    cfg = model_config('Deformable DETR')
    cfg.backbone, cfg.neck.in_channels = SWIN, [16, 32, 64]
    structures = [
        dict(type='ChannelIdle', where='backbone', idle_ratio=0.75),
        dict(type='ChannelIdle', where='encoder', idle_ratio=[0.5, 0.875]),
    ]
    model = MODELS.build(dict(type='Restructured', model=cfg, structures=structures))
    ffns = [site.module for site in ffn_sites(model)]
    shares = [ffn.num_idle / ffn.feedforward_channels for ffn in ffns]
    assert shares == pytest.approx([0.75] * 4 + [0.5, 0.875], abs=1e-3)
    batch = data(model)
    model.train()
    sum(loss.square().mean() for loss in tensors(head_inputs(model, batch))).backward()
    assert all(p.grad is not None for ffn in ffns for p in ffn.parameters())
    with pytest.raises(ValueError, match="no site for ChannelIdle in 'neck'"):
        idle(model, where='neck')


def test_ordinary_weights_of_a_whole_model_fill_the_forms(randomize, tmp_path):
    """MMDetection's DINO writes into the config that it is built from."""
    ordinary = build('DINO', randomize)
    path = str(tmp_path / 'dino.pth')
    torch.save(dict(state_dict=ordinary.state_dict()), path)
    structures = [dict(type='ChannelIdle', where='encoder', idle_ratio=0)]
    cfg = dict(type='Restructured', model=model_config('DINO'), structures=structures)
    model = MODELS.build(dict(cfg, init_cfg=dict(type='Pretrained', checkpoint=path)))
    model.init_weights()
    model.eval()
    batch = data(ordinary)
    with torch.no_grad():
        torch.testing.assert_close(outputs(model, batch), outputs(ordinary, batch))


def test_forms_of_a_backbone_inside_of_another_structure(randomize, tmp_path):
    """They are filled with the weights that the backbone's own config names."""
    path = str(tmp_path / 'swin.pth')
    weights = randomize(MODELS.build(dict(IDLE, model=SWIN))).state_dict()
    torch.save(dict(state_dict=weights), path)
    cfg = model_config('DINO')
    init_cfg = dict(type='Pretrained', checkpoint=path)
    cfg.backbone = dict(IDLE, model=SWIN, init_cfg=init_cfg)
    cfg.neck.in_channels = [16, 32, 64]
    structures = [dict(type='ChannelIdle', where='encoder')]
    model = MODELS.build(dict(type='Restructured', model=cfg, structures=structures))
    model.init_weights()
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, weights[name]), name


def mmcv_encoder(order=('self_attn', 'norm', 'ffn', 'norm')):
    """As of Co-DETR: tokens (N, B, C), and layers of mmcv."""
    attention = dict(type='MultiheadAttention', embed_dims=16, num_heads=2)
    ffn = dict(type='FFN', feedforward_channels=64, ffn_drop=0.0)
    layer = dict(type='BaseTransformerLayer', attn_cfgs=attention, ffn_cfgs=ffn)
    layer.update(operation_order=order)
    return TransformerLayerSequence(layer, num_layers=2)


def encode(model, x):
    return model(x, None, None)


@torch.no_grad()
def test_layers_of_mmcv(randomize, relative_error):
    model, x = randomize(mmcv_encoder()).eval(), torch.randn(30, 2, 16)
    as_fairscale_does(model.layers[1])  # for checkpointing, as Co-DETR's configs have it
    merged = repa_mm.reparameterize(idle(copied(model), 0.5))
    assert sum(isinstance(m, MergedFFN) for m in merged.modules()) == 2
    same = repa_mm.reparameterize(idle(copied(model), 0.0))
    assert relative_error(encode(same, x), encode(model, x)) < 1e-5
    batches = [torch.randn(60, 2, 16) for _ in range(3)]
    fitted, report = repa_mm.convert_pretrained(
        model, batches, idle_ratio=0.75, forward=encode, held_out=[x]
    )
    assert report.differences[0] < 0.1
    assert relative_error(encode(repa_mm.reparameterize(fitted), x), encode(fitted, x)) < 1e-5
    with pytest.raises(ValueError, match='not those of an encoder layer'):
        idle(mmcv_encoder(('norm', 'self_attn', 'norm', 'ffn')))
