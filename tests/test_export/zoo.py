"""Very small models of all families that docs/models.md lists, whose objects differ."""

import re
from ast import literal_eval
from pathlib import Path

import torch

from repa_mm.export import noise, resized
from repa_mm.io.configs import load_config
from tests.conftest import _randomize, random_model

from .conftest import write_config

RESNET = dict(depth=18, base_channels=8, stem_channels=8, init_cfg=None)
SWIN = dict(type='mmdet.SwinTransformer', embed_dims=8, depths=[1] * 4, num_heads=[1, 1, 2, 2])
CHANNELS = [8, 16, 32, 64]

# Families with configs of the demo or of `repa_swin_t`, see `conftest.write_config`.
TASKS = {
    'RetinaNet': 'retinanet',
    'Mask R-CNN': 'mask_rcnn',
    'UperNet': 'upernet',
    'Classifiers': 'classifier',
}
DETRS = {
    'DETR': 'detr/detr_r50_8xb2-150e_coco.py',
    'Conditional DETR': 'conditional_detr/conditional-detr_r50_8xb2-50e_coco.py',
    'DAB-DETR': 'dab_detr/dab-detr_r50_8xb2-50e_coco.py',
    'Deformable DETR': 'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'DINO': 'dino/dino-4scale_r50_8xb2-12e_coco.py',
}
MASK_MODELS = {
    'Mask2Former': 'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py',
    'Mask2Former of MMSegmentation': 'mmseg::mask2former/mask2former_r50_8xb2-160k_'
    'ade20k-512x512.py',
}
FPN = dict(in_channels=CHANNELS, out_channels=32)
DENSE = dict(num_classes=5, in_channels=32, feat_channels=32, stacked_convs=1)
RPN = dict(in_channels=32, feat_channels=32)
ROI = dict(in_channels=32, fc_out_channels=16, num_classes=5)
STAGES = dict.fromkeys('012', ROI)
EXTRACTOR = dict(out_channels=32)
TWO_STAGE = dict(neck=FPN, rpn_head=RPN, test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=60)))
GROUPS = dict(norm_cfg=dict(num_groups=4))
# The others: an installed config, and what makes the model very small.
OTHERS = {
    'Faster R-CNN': (
        'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
        dict(TWO_STAGE, roi_head=dict(bbox_roi_extractor=EXTRACTOR, bbox_head=ROI)),
    ),
    'Cascade R-CNN': (
        'mmdet::cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py',
        dict(TWO_STAGE, roi_head=dict(bbox_roi_extractor=EXTRACTOR, bbox_head=STAGES)),
    ),
    'Cascade Mask R-CNN': (
        'mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py',
        dict(
            TWO_STAGE,
            roi_head=dict(
                bbox_roi_extractor=EXTRACTOR,
                # Boxes of each class are refined by those of the best class.
                bbox_head={k: dict(v, reg_class_agnostic=False) for k, v in STAGES.items()},
                mask_roi_extractor=EXTRACTOR,
                mask_head=dict(in_channels=32, conv_out_channels=16, num_classes=5),
            ),
        ),
    ),
    'ATSS': ('mmdet::atss/atss_r50_fpn_1x_coco.py', dict(neck=FPN, bbox_head=DENSE)),
    'FCOS': ('mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py', dict(neck=FPN, bbox_head=DENSE)),
    'GFL': ('mmdet::gfl/gfl_r50_fpn_1x_coco.py', dict(neck=FPN, bbox_head=DENSE)),
    'RTMDet': (
        'mmdet::rtmdet/rtmdet_l_swin_b_4xb32-100e_coco.py',
        dict(
            neck=dict(GROUPS, in_channels=CHANNELS[1:], out_channels=32, num_csp_blocks=1),
            bbox_head=dict(GROUPS, **DENSE),
        ),
    ),
    'DDQ': (
        'mmdet::ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py',
        dict(
            neck=dict(in_channels=CHANNELS[1:]),
            num_queries=25,
            encoder=dict(num_layers=1),
            decoder=dict(num_layers=2),
            bbox_head=dict(num_classes=5),
            test_cfg=dict(max_per_img=20),
        ),
    ),
    'SegFormer': (
        'mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py',
        dict(
            backbone=dict(embed_dims=8, num_layers=[1] * 4, num_heads=[1, 1, 2, 2]),
            decode_head=dict(in_channels=[8, 8, 16, 16], channels=16, num_classes=5),
        ),
    ),
    'Segmenter': (
        'mmseg::segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py',
        dict(
            backbone=dict(img_size=(64, 64), embed_dims=32, num_layers=2, num_heads=2),
            decode_head=dict(
                in_channels=32, channels=32, embed_dims=32, num_layers=1, num_heads=2, num_classes=5
            ),
            test_cfg=dict(crop_size=(96, 96), stride=(64, 64)),
        ),
    ),
}


def _table():
    """Rows of the docs: what is said of channels, heads, channel idle, export and int8."""
    text = (Path(__file__).parents[2] / 'docs' / 'models.md').read_text()
    _, text = re.split(r'\n\| family \|.*\n\| --- .*\n', text)
    rows = text[: text.index('\n\n')].splitlines()
    cells = ([x.strip() for x in row[1:-1].split('|')] for row in rows)
    return {name: row[1:] for row in cells for name in row[0].split(', ')}


TABLE = _table()
CHANNELS_, HEADS_, IDLE, EXPORT, INT8 = range(5)


def detr_config(family, **options):
    deformable = family in ('DINO', 'Deformable DETR')
    # Fixed in MMDetection, that of DINO in 3.3.
    dims = 256 if family in ('DINO', 'Conditional DETR') else 32
    attention = dict(embed_dims=dims, num_heads=4)
    cross = dict(attention, num_points=2) if deformable else attention
    layer = dict(self_attn_cfg=attention, ffn_cfg=dict(embed_dims=dims, feedforward_channels=48))
    sizes = dict(
        backbone=RESNET,
        neck=dict(in_channels=CHANNELS[1:] if deformable else CHANNELS[3:], out_channels=dims),
        num_queries=25,
        positional_encoding=dict(num_feats=dims // 2),
        encoder=dict(num_layers=2, layer_cfg=layer),
        decoder=dict(num_layers=2, layer_cfg=dict(layer, cross_attn_cfg=cross)),
        bbox_head=dict(num_classes=5, embed_dims=dims),
        test_cfg=dict(max_per_img=20),
    )
    cfg = load_config(f'mmdet::{DETRS[family]}', dict(model=sizes))
    cfg.merge_from_dict(dict(model=options))
    return cfg


def mask_config(family):
    """Of a Mask2Former for panoptic maps and instances, or for label maps."""
    attention = dict(embed_dims=32, num_heads=4)
    ffn = dict(ffn_cfg=dict(embed_dims=32, feedforward_channels=48))
    encoder = dict(
        encoder=dict(num_layers=2, layer_cfg=dict(ffn, self_attn_cfg=attention)),
        positional_encoding=dict(num_feats=16),
    )
    head = dict(
        in_channels=CHANNELS,
        feat_channels=32,
        out_channels=32,
        num_queries=15,
        positional_encoding=dict(num_feats=16),
        pixel_decoder=dict(encoder, norm_cfg=dict(num_groups=4)),
        transformer_decoder=dict(
            num_layers=3, layer_cfg=dict(ffn, self_attn_cfg=attention, cross_attn_cfg=attention)
        ),
        loss_cls=dict(class_weight=[1.0] * 6),
    )
    if MASK_MODELS[family].startswith('mmseg'):
        backbone = dict(RESNET, norm_cfg=dict(type='BN'))
        options = dict(backbone=backbone, decode_head=dict(head, num_classes=5))
        return load_config(MASK_MODELS[family], dict(model=options))
    classes = dict(num_things_classes=3, num_stuff_classes=2)
    options = dict(
        backbone=RESNET,
        panoptic_head=dict(head, **classes),
        panoptic_fusion_head=classes,
        # Some queries, and most of their masks, are kept.
        test_cfg=dict(max_per_image=20, instance_on=True, object_mask_thr=0.2, iou_thr=0.1),
        data_preprocessor=dict(pad_size_divisor=96),
    )
    return load_config(MASK_MODELS[family], dict(model=options))


def small_config(family, folder):
    """With a transformer for a backbone."""
    if family in TASKS:
        return load_config(write_config(TASKS[family], folder, repa=False))
    if family in OTHERS:
        path, options = OTHERS[family]
        cfg = load_config(path)
        cfg.merge_from_dict(dict(model=options))
    else:
        cfg = detr_config(family) if family in DETRS else mask_config(family)
    # An option that the docs name.
    for key, value in re.findall(r'`([\w.]+)=([^`]+)`', TABLE[family][EXPORT]):
        cfg.merge_from_dict({f'model.{key}': literal_eval(value)})
    cfg.model.pop('pretrained', None)
    cfg.model.pop('init_cfg', None)
    if family not in ('SegFormer', 'Segmenter'):
        cfg.model.backbone = dict(SWIN, out_indices=cfg.model.backbone.out_indices)
    return cfg


def small_images(cfg):
    return [resized([data], [(160, 200)]) for data in noise(cfg)]


def small_model(cfg):
    model = spread(_randomize(random_model(cfg)))
    head = getattr(model, 'panoptic_head', None) or getattr(model, 'decode_head', None)
    if hasattr(head, 'mask_embed'):
        _tell_queries_apart(model, head)
    return model


def spread(model):
    """Weights that tell queries, levels, points and classes apart, as training does."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not name.startswith('backbone') and parameter.ndim > 1:
            is_code = any(part in name for part in ('query_embed', 'query_feat', 'level_'))
            is_code = is_code or name.endswith('cls_emb')
            scale = 1 if is_code else parameter[0].numel() ** -0.5
            parameter.data.normal_(0, scale, generator=generator)
        elif name.startswith('memory_trans') and name.endswith('bias'):
            parameter.data.zero_()  # so that what is no proposal is not among the best
    return model


@torch.no_grad()
def _tell_queries_apart(model, head):
    """Of a Mask2Former with random weights, whose queries are nearly the same otherwise."""
    data = model.data_preprocessor(resized(small_images(model.cfg), [(128, 160)]), False)
    for layer in (head.cls_embed, head.mask_embed[-1], head.pixel_decoder.mask_feature):
        found = []
        hook = layer.register_forward_hook(lambda *args, found=found: found.append(args[2]))
        model(**data, mode='predict')
        hook.remove()
        out = found[-1].movedim(1, -1) if layer.weight.ndim == 4 else found[-1]
        out = out[-1] if layer.weight.ndim < out.ndim - 1 else out  # of all decoder layers
        std, mean = torch.std_mean(out.flatten(0, -2), 0)
        layer.weight /= std.view(-1, *[1] * (layer.weight.ndim - 1))
        layer.bias.copy_((layer.bias - mean) / std)
