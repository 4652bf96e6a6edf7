"""DETR-like models in operations that ONNX has, from features to boxes and masks.

MMDetection fills padding masks image by image, and skips them in export. Here padding masks are
computed from the sizes of the images. Other values that MMDetection computes in Python would be
constants for one image size in the graph.

A detector, its encoder or its transformer calls these methods itself. So the classes whose names
begin with an underscore have other methods of the same names, and :func:`_override_` puts such a
class before the own class of a module, which may be any subclass of MMDetection's.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.export.detection import (
    NONE,
    Tensors,
    best,
    best_labels,
    finish,
    require,
    suppress_by_label,
    suppress_softly,
    take,
)
from repa_mm.surgery import become_


def padding_mask(
    feature: torch.Tensor, image_shape: torch.Tensor, size: torch.Tensor
) -> torch.Tensor:
    """Return a mask (B, h, w), True for cells of a feature map whose nearest pixel is padding.

    ``image_shape`` (2, ) is the height and width of the padded images, ``size`` (B, 2) without.
    """
    # In floats, as F.interpolate computes nearest pixels.
    scale = image_shape.float() / torch._shape_as_tensor(feature)[2:].float()
    rows, columns = (torch.arange(n).float() for n in feature.shape[2:])
    below = (rows * scale[0]).floor() >= size[:, :1]
    right = (columns * scale[1]).floor() >= size[:, 1:]
    return below[:, :, None] | right[:, None]


def centres(shape: torch.Tensor) -> torch.Tensor:
    """Return the centres (x, y) of all cells of a feature map of shape (h, w), as (h * w, 2)."""
    height, width = shape
    y, x = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    return torch.stack([x.repeat(height), y[:, None].expand(-1, width).flatten()], 1)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


class _Padded:
    """Mixin for a DETR that takes the sizes of :func:`padding_mask` for ``batch_data_samples``."""

    def pre_transformer(self, features, sizes):
        mask = padding_mask(features[-1], *sizes)
        position = _tokens(self.positional_encoding(mask))
        mask = mask.flatten(1)
        encoder = dict(feat=_tokens(features[-1]), feat_mask=mask, feat_pos=position)
        return encoder, dict(memory_mask=mask, memory_pos=position)


class _PaddedLevels:
    """As :class:`_Padded`, for a Deformable DETR."""

    def pre_transformer(self, features, sizes):
        masks = [padding_mask(x, *sizes) for x in features]
        position = [
            _tokens(self.positional_encoding(mask)) + level
            for mask, level in zip(masks, self.level_embed)
        ]
        both = dict(
            spatial_shapes=torch.stack([torch._shape_as_tensor(x)[2:] for x in features]),
            level_start_index=None,
            valid_ratios=torch.stack([self.get_valid_ratio(mask) for mask in masks], 1),
        )
        mask = torch.cat([mask.flatten(1) for mask in masks], 1)
        feat, position = torch.cat([_tokens(x) for x in features], 1), torch.cat(position, 1)
        encoder = dict(feat=feat, feat_mask=mask, feat_pos=position, **both)
        return encoder, dict(memory_mask=mask, **both)

    def gen_encoder_output_proposals(self, memory, memory_mask, spatial_shapes):
        proposals, start = [], 0
        for level, shape in enumerate(spatial_shapes):
            stop = start + shape[0] * shape[1]
            inside = ~memory_mask[:, start:stop].unflatten(1, (shape[0], shape[1]))
            valid = torch.stack([inside[:, 0].sum(1), inside[:, :, 0].sum(1)], 1)
            centre = centres(shape) / valid[:, None].float()
            proposals.append(torch.cat([centre, torch.full_like(centre, 0.05 * 2**level)], 2))
            start = stop
        proposals = torch.cat(proposals, 1)
        is_inside = ((proposals > 0.01) & (proposals < 0.99)).all(2, True)
        is_inside = is_inside & ~memory_mask[..., None]
        proposals = torch.log(proposals / (1 - proposals)).masked_fill(~is_inside, torch.inf)
        memory = self.memory_trans_fc(memory.masked_fill(~is_inside, 0.0))
        return self.memory_trans_norm(memory), proposals


class _AnySizeEncoder:
    """Mixin for a Deformable DETR's encoder: ONNX's linspace fails for maps with one row."""

    @staticmethod
    def get_encoder_reference_points(spatial_shapes, valid_ratios, device):
        points = [
            centres(shape) / (valid_ratios[:, level, None] * shape.flip(0).float())
            for level, shape in enumerate(spatial_shapes)
        ]
        return torch.cat(points, 1)[:, :, None] * valid_ratios[:, None]


class _PaddedCoTransformer(_PaddedLevels, _AnySizeEncoder):
    """Mixin for the transformer in a Co-DETR's head, whose tokens are (N, B, C).

    Its ``forward`` returns the queries after each layer (layers, N, B, C), and the reference points
    (layers + 1, B, N, 4), where the first ones are those before the first layer.
    """

    # The names that a Deformable DETR has for them.
    level_embed = property(lambda self: self.level_embeds)
    memory_trans_fc = property(lambda self: self.enc_output)
    memory_trans_norm = property(lambda self: self.enc_output_norm)

    def forward(self, features, sizes, cls_branches, reg_branches):
        encoder, decoder = self.pre_transformer(features, sizes)
        mask = decoder.pop('memory_mask')
        shapes, ratios = decoder['spatial_shapes'], decoder['valid_ratios']
        memory = self.encoder(
            query=encoder['feat'].transpose(0, 1),
            key=None,
            value=None,
            query_pos=encoder['feat_pos'].transpose(0, 1),
            query_key_padding_mask=mask,
            reference_points=self.get_encoder_reference_points(shapes, ratios, None),
            **decoder,
        )
        output, proposals = self.gen_encoder_output_proposals(memory.transpose(0, 1), mask, shapes)
        last = self.decoder.num_layers
        boxes = reg_branches[last](output) + proposals
        index = cls_branches[last](output).amax(-1).topk(self.two_stage_num_proposals, 1)[1]
        query = self.query_embed.weight[:, None].expand(-1, mask.shape[0], -1)
        return self.decoder(
            query=query,
            key=None,
            value=memory,
            key_padding_mask=mask,
            reference_points=take(boxes, index).sigmoid(),
            reg_branches=reg_branches,
            **decoder,
        )


def _override_(module: nn.Module, mixin: type) -> None:
    """Let a module, of a copy of the model, have the methods of a mixin instead of its own."""
    become_(module, type(type(module).__name__, (mixin, type(module)), {}))


class Queries(nn.Module):
    """Predict boxes from features, as a ``DetectionTransformer`` does."""

    outputs = ('boxes', 'scores', 'labels')

    def __init__(self, detector: nn.Module) -> None:
        from mmdet.models.dense_heads import DeformableDETRHead, DETRHead

        super().__init__()
        methods = 'predict_by_feat', '_predict_by_feat_single'
        require(detector.bbox_head, [DETRHead, DeformableDETRHead], methods)
        has_levels = hasattr(detector, 'gen_encoder_output_proposals')
        _override_(detector, _PaddedLevels if has_levels else _Padded)
        if has_levels:
            _override_(detector.encoder, _AnySizeEncoder)
        self.detector, self.head = detector, detector.bbox_head

    def decode(self, features, sizes):
        """Return class logits (B, N, classes) and boxes (B, N, 4) of the last layer's queries."""
        inputs = self.detector.forward_transformer(features, sizes)
        return (x[-1] for x in self.head(**inputs))

    def forward(self, features, image_shape, size):
        """Return boxes (B, N, 4), scores (B, N) and labels (B, N)."""
        scores, boxes = self.decode(features, (image_shape, size))
        count = self.head.test_cfg.get('max_per_img', boxes.shape[1])
        if self.head.loss_cls.use_sigmoid:
            scores, query, labels = best_labels(scores.sigmoid(), self.head.num_classes, count)
        else:
            scores, labels = scores.softmax(-1)[..., :-1].max(-1)
            scores, query = best(scores, count)
            labels = take(labels, query)
        boxes = take(boxes, query)
        centre, side = boxes.split(2, 2)
        size = size.flip(1)[:, None].to(boxes)
        corners = [torch.minimum((centre + s * side) * size, size) for s in (-0.5, 0.5)]
        return torch.cat(corners, 2).clamp(min=0), scores, labels


class CoQueries(Queries):
    """As a ``CoDETR`` with a ``CoDINOHead`` of MMDetection's ``projects/CO-DETR``."""

    def __init__(self, detector: nn.Module) -> None:
        nn.Module.__init__(self)
        self.head = head = detector.query_head
        head.transformer.positional_encoding = head.positional_encoding
        _override_(head.transformer, _PaddedCoTransformer)

    def decode(self, features, sizes):
        from mmdet.models.layers import inverse_sigmoid

        head, branches = self.head, (self.head.cls_branches, self.head.reg_branches)
        queries, references = head.transformer(features, sizes, *branches)
        last, query = head.transformer.decoder.num_layers - 1, queries[-1].transpose(0, 1)
        logits, boxes = (branch[last](query) for branch in branches)
        return logits, (boxes + inverse_sigmoid(references[-2], eps=1e-3)).sigmoid()

    def forward(self, features, image_shape, size):
        boxes, scores, labels = super().forward(features, image_shape, size)
        nms, threshold = self.head.test_cfg.get('nms'), self.head.test_cfg.get('score_thr', 0)
        scores = scores.masked_fill(scores <= threshold, NONE)
        if nms and nms.get('type') == 'soft_nms':
            scores = suppress_softly(boxes, scores, labels, nms)
        elif nms:
            known = self.head.num_classes, nms, 0, scores.shape[1]
            scores = suppress_by_label(boxes, scores, labels, *known)
        scores, order = scores.sort(1, descending=True)
        return finish(take(boxes, order), scores, take(labels, order))


def bilinear(x: torch.Tensor, size: Sequence[int], align_corners: bool = False) -> torch.Tensor:
    """Resize maps (B, C, H, W) to a height and width."""
    return F.interpolate(x, size, mode='bilinear', align_corners=align_corners)


def class_logits(head: nn.Module, features: Tensors, image: torch.Tensor) -> torch.Tensor:
    """Return class scores (B, classes, H, W) of a ``Mask2FormerHead``, which ignores padding."""
    classes, masks = (x[-1] for x in head(features, None))
    masks = bilinear(masks, image.shape[2:]).sigmoid()
    return torch.einsum('bqc,bqhw->bchw', classes.softmax(-1)[..., :-1], masks)


class Masks(nn.Module):
    """Predict masks from features, as a ``Mask2Former`` with a ``MaskFormerFusionHead`` does.

    Outputs are boxes (B, N, 4), scores (B, N), labels (B, N) and masks (B, N, height, width) of
    instances if the model's ``test_cfg.instance_on`` is True, and panoptic maps (B, height, width)
    if its ``test_cfg.panoptic_on`` is. Boxes enclose the masks, whose size is ``size`` (2, ).
    """

    def __init__(self, detector: nn.Module) -> None:
        from mmdet.models.dense_heads import Mask2FormerHead
        from mmdet.models.seg_heads import MaskFormerFusionHead

        super().__init__()
        require(getattr(detector, 'panoptic_head', detector), [Mask2FormerHead], ['predict'])
        require(detector.panoptic_fusion_head, [MaskFormerFusionHead], ['predict'])
        self.head, self.fusion = detector.panoptic_head, detector.panoptic_fusion_head
        self.cfg = self.fusion.test_cfg
        self.outputs = ()
        if self.cfg.get('instance_on', False):
            self.outputs = 'boxes', 'scores', 'labels', 'masks'
        if self.cfg.get('panoptic_on', True):
            self.outputs = (*self.outputs, 'panoptic')

    def forward(self, features: Tensors, resize: Callable):
        """``resize`` brings masks (B, N, h, w) to the height and width of the outputs."""
        classes, masks = (x[-1] for x in self.head(features, None))
        classes, found = classes.softmax(-1), ()
        if 'masks' in self.outputs:
            found = self._instances(classes, masks, resize)
        if 'panoptic' in self.outputs:
            found = (*found, self._panoptic(classes, resize(masks).sigmoid()))
        return found

    def _instances(self, classes, masks, resize):
        count = self.cfg.get('max_per_image', 100)
        scores, query, labels = best_labels(classes[..., :-1], self.fusion.num_classes, count)
        masks = resize(take(masks, query))
        inside = (masks > 0).to(masks)
        scores = scores * (masks.sigmoid() * inside).sum((2, 3)) / (inside.sum((2, 3)) + 1e-6)
        scores = scores.masked_fill(labels >= self.fusion.num_things_classes, NONE)
        scores, order = scores.sort(1, descending=True)
        labels, inside = take(labels, order), take(inside, order)
        across, down = _extent(inside.amax(2)), _extent(inside.amax(3))
        boxes = torch.stack([across[0], down[0], across[1], down[1]], 2)
        return *finish(boxes, scores, labels), inside > 0

    def _panoptic(self, classes, masks):
        """Return maps from the probabilities of classes (B, N, C + 1) and masks (B, N, H, W)."""
        from mmdet.evaluation import INSTANCE_OFFSET

        scores, labels = classes.max(-1)
        nothing = self.fusion.num_classes
        known = (labels < nothing) & (scores > self.cfg.get('object_mask_thr', 0.8))
        # Each pixel is of the best query, whose mask is dropped if others cover most of it.
        weighted = scores[..., None, None] * masks
        query = weighted.masked_fill(~known[..., None, None], NONE).argmax(1)
        is_query = query[:, None] == torch.arange(masks.shape[1])[:, None, None]
        left, whole = (x.to(masks).sum((2, 3)) for x in (is_query, masks >= 0.5))
        known = known & (left > 0) & (whole > 0)
        known = known & (left >= whole * self.cfg.get('iou_thr', 0.8))
        is_thing = (known & (labels < self.fusion.num_things_classes)).long()
        segments = labels + is_thing.cumsum(1) * is_thing * INSTANCE_OFFSET
        segments = segments.masked_fill(~known, nothing)
        maps = segments.gather(1, query.flatten(1)).reshape(query.shape)
        if self.cfg.get('filter_low_score', False):
            maps = maps.masked_fill(masks.gather(1, query[:, None])[:, 0] < 0.5, nothing)
        return maps.int()


def _extent(inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first index and the last index + 1 of the ones in each row, 0 and 0 if none."""
    steps = torch.arange(1, inside.shape[2] + 1).to(inside)
    last = (inside * steps).amax(2)
    first = steps[-1] + 1 - (inside * steps.flip(0)).amax(2)
    return (first - 1) * (last > 0).to(inside), last
