"""A stand-in for Co-DETR, which MMDetection has in ``projects/CO-DETR`` and does not install.

Names of classes and submodules, arguments and outputs are those of the project, as of 2024. What
they compute is put together anew from parts of MMDetection's DINO. The heads that help in training
are left out: tests of the project's model predict by its queries.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import TransformerLayerSequence
from mmcv.ops import batched_nms
from mmdet.models.dense_heads import DINOHead
from mmdet.models.detectors import DINO
from mmdet.models.detectors.base import BaseDetector
from mmdet.models.layers import (
    DeformableDetrTransformerEncoder,
    DinoTransformerDecoder,
    inverse_sigmoid,
)
from mmdet.registry import MODELS
from mmengine.model import BaseModule


class Decoder(BaseModule):
    """DINO's decoder with queries (N, B, C)."""

    def __init__(self, **kwargs):
        super().__init__()
        self.batch_first = DinoTransformerDecoder(**kwargs)
        self.num_layers = kwargs['num_layers']

    def forward(self, query, key, value, attn_masks=None, **kwargs):
        query, value = query.transpose(0, 1), value.transpose(0, 1)
        states, references = self.batch_first(query, value, self_attn_mask=attn_masks, **kwargs)
        return states.transpose(1, 2), references


@MODELS.register_module()
class CoDinoTransformer(BaseModule):
    get_valid_ratio = staticmethod(DINO.get_valid_ratio)

    def __init__(self, encoder, decoder, num_feature_levels, two_stage_num_proposals, **kwargs):
        super().__init__()
        self.encoder = TransformerLayerSequence(**encoder)
        self.decoder = Decoder(**decoder)
        dims = self.encoder.embed_dims
        self.two_stage_num_proposals = two_stage_num_proposals
        self.level_embeds = nn.Parameter(torch.zeros(num_feature_levels, dims))
        self.enc_output, self.enc_output_norm = nn.Linear(dims, dims), nn.LayerNorm(dims)
        self.query_embed = nn.Embedding(two_stage_num_proposals, dims)

    def forward(
        self,
        mlvl_feats,
        mlvl_masks,
        query_embed,
        mlvl_pos_embeds,
        dn_label_query,
        dn_bbox_query,
        attn_mask,
        reg_branches,
        cls_branches,
    ):
        shapes = torch.tensor([x.shape[2:] for x in mlvl_feats])
        starts = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
        ratios = torch.stack([self.get_valid_ratio(mask) for mask in mlvl_masks], 1)
        both = dict(spatial_shapes=shapes, level_start_index=starts, valid_ratios=ratios)
        places = [x + y[:, None, None] for x, y in zip(mlvl_pos_embeds, self.level_embeds)]
        query, place = (
            torch.cat([x.flatten(2) for x in maps], 2).permute(2, 0, 1)
            for maps in (mlvl_feats, places)
        )
        mask = torch.cat([mask.flatten(1) for mask in mlvl_masks], 1)
        points = DeformableDetrTransformerEncoder.get_encoder_reference_points(
            shapes, ratios, query.device
        )
        memory = self.encoder(
            query, None, None, place, query_key_padding_mask=mask, reference_points=points, **both
        )
        names = SimpleNamespace(
            memory_trans_fc=self.enc_output, memory_trans_norm=self.enc_output_norm
        )
        output, proposals = DINO.gen_encoder_output_proposals(
            names, memory.transpose(0, 1), mask, shapes
        )
        scores = cls_branches[-1](output)
        boxes = reg_branches[-1](output) + proposals
        index = scores.max(-1)[0].topk(self.two_stage_num_proposals, 1)[1][..., None]
        boxes = boxes.gather(1, index.expand(-1, -1, 4)).sigmoid()
        query = self.query_embed.weight[:, None].expand(-1, len(mask), -1)
        states, references = self.decoder(
            query, None, memory, attn_mask, key_padding_mask=mask, reference_points=boxes,
            reg_branches=reg_branches, **both,
        )  # fmt: skip
        return states, references, scores, boxes, memory


@MODELS.register_module()
class CoDINOHead(DINOHead):
    def __init__(self, num_query, transformer, positional_encoding, dn_cfg=None, **kwargs):
        num_layers = transformer['decoder']['num_layers']
        super().__init__(
            num_pred_layer=num_layers + 1, share_pred_layer=False, as_two_stage=True, **kwargs
        )
        self.transformer = MODELS.build(dict(transformer, two_stage_num_proposals=num_query))
        self.positional_encoding = MODELS.build(positional_encoding)

    def forward(self, mlvl_feats, img_metas):
        whole = torch.ones(len(img_metas), *img_metas[0]['batch_input_shape'])
        for mask, meta in zip(whole, img_metas):
            mask[: meta['img_shape'][0], : meta['img_shape'][1]] = 0
        masks = [nn.functional.interpolate(whole[None], x.shape[2:])[0].bool() for x in mlvl_feats]
        places = [self.positional_encoding(mask) for mask in masks]
        states, references, scores, boxes, memory = self.transformer(
            mlvl_feats, masks, None, places, None, None, None, self.reg_branches, self.cls_branches
        )
        classes, coords = [], []
        for state, start, to_classes, to_boxes in zip(
            states.transpose(1, 2), references, self.cls_branches, self.reg_branches
        ):
            classes.append(to_classes(state))
            coords.append((to_boxes(state) + inverse_sigmoid(start, eps=1e-3)).sigmoid())
        sizes = [x.shape[2:] for x in mlvl_feats]
        maps = memory.permute(1, 2, 0).split([h * w for h, w in sizes], 2)
        maps = [x.unflatten(2, tuple(size)) for x, size in zip(maps, sizes)]
        return torch.stack(classes), torch.stack(coords), scores, boxes, maps

    def predict(self, feats, batch_data_samples, rescale=True):
        metas = [sample.metainfo for sample in batch_data_samples]
        results, nms = [], self.test_cfg.get('nms')
        for found in zip(*(x[-1] for x in self(feats, metas)[:2]), metas):
            result = self._predict_by_feat_single(*found, rescale)
            if nms:
                kept, index = batched_nms(result.bboxes, result.scores, result.labels, nms)
                result = result[index]
                result.scores = kept[:, 4]
            results.append(result)
        return results


@MODELS.register_module()
class CoDETR(BaseDetector):
    eval_module = 'detr'

    def __init__(self, backbone, neck, query_head, test_cfg, train_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.backbone, self.neck = MODELS.build(backbone), MODELS.build(neck)
        self.query_head = MODELS.build(dict(query_head, test_cfg=test_cfg[0]))
        self.roi_head, self.bbox_head = nn.ModuleList(), nn.ModuleList()

    def extract_feat(self, batch_inputs):
        return self.neck(self.backbone(batch_inputs))

    def predict(self, batch_inputs, batch_data_samples, rescale=True):
        found = self.query_head.predict(
            self.extract_feat(batch_inputs), batch_data_samples, rescale
        )
        return self.add_pred_to_datasample(batch_data_samples, found)

    def _forward(self, *args):
        raise NotImplementedError

    loss = _forward


def co_detr(backbone, channels, nms, levels=3):
    """The config of a small Co-DETR, with the names of the project's configs."""
    heads = dict(embed_dims=256, num_heads=8, dropout=0.0)
    cross = dict(embed_dims=256, num_levels=levels, dropout=0.0)
    ffn = dict(embed_dims=256, feedforward_channels=48, ffn_drop=0.0)
    layer = dict(
        type='BaseTransformerLayer',
        attn_cfgs=dict(cross, type='MultiScaleDeformableAttention'),
        ffn_cfgs=dict(ffn, type='FFN'),
        operation_order=('self_attn', 'norm', 'ffn', 'norm'),
    )
    decoder = dict(
        num_layers=2,
        layer_cfg=dict(self_attn_cfg=heads, cross_attn_cfg=cross, ffn_cfg=ffn),
        post_norm_cfg=None,
        return_intermediate=True,
    )
    transformer = dict(type='CoDinoTransformer', num_feature_levels=levels, decoder=decoder)
    transformer.update(encoder=dict(transformerlayers=layer, num_layers=2))
    places = dict(type='SinePositionalEncoding', num_feats=128, temperature=20, normalize=True)
    norm = dict(type='GN', num_groups=32)
    neck = dict(type='ChannelMapper', in_channels=channels, kernel_size=1, out_channels=256)
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
    return dict(
        type='CoDETR',
        data_preprocessor=dict(type='DetDataPreprocessor', mean=mean, std=std, bgr_to_rgb=True),
        backbone=backbone,
        neck=dict(neck, act_cfg=None, norm_cfg=norm, num_outs=levels),
        query_head=dict(
            type='CoDINOHead',
            num_query=25,
            num_classes=5,
            loss_cls=dict(type='QualityFocalLoss', use_sigmoid=True),
            transformer=transformer,
            positional_encoding=places,
        ),
        test_cfg=[dict(max_per_img=20, nms=nms)],
    )
