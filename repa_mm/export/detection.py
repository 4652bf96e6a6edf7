"""Detectors in operations that ONNX has, from features to boxes and masks.

MMDetection's post-processing treats one image after another, and returns as many rows as there are
objects, which a traced graph cannot do. Here all images are processed at once, in tensors with a
fixed number of rows. Rows without an object have the score -1 internally, and the label -1 in the
outputs. The modules are for tracing only, since boxes are suppressed by ONNX's operator.
"""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.ops import roi_align

Tensors = tuple[torch.Tensor, ...]
# The score of rows without an object.
NONE = -1.0
# More boxes than there are.
NO_LIMIT = 2**30
# Options of a suppression whose value is free. `split_thr` saves memory, and changes no result.
ANY_VALUE = 'iou_threshold', 'iou_thr', 'min_score', 'split_thr'
# Methods by which a dense head predicts.
DENSE = 'predict', 'predict_by_feat', '_predict_by_feat_single', '_bbox_post_process'


def require(module: nn.Module, kinds: Sequence[type], methods: Sequence[str]) -> None:
    """Refuse a module by its name that is of none of these classes, or has other ``methods``."""
    own = type(module)
    for kind in kinds:
        changed = [m for m in methods if getattr(own, m, None) is not getattr(kind, m, None)]
        if issubclass(own, kind) and not changed:
            return
    known = ' or '.join(kind.__name__ for kind in kinds)
    raise ValueError(
        f'the export does not know how a {own.__name__} predicts: it knows {known}'
        + f' with {", ".join(methods)} of this class' * bool(methods)
    )


class _NonMaxSuppression(torch.autograd.Function):
    """ONNX's NonMaxSuppression, for tracing.

    Takes boxes (G, N, 4) in G groups and scores (G, C, N) for C classes, and returns indices (M, 3)
    of group, class and box.
    """

    @staticmethod
    def forward(ctx, boxes, scores, iou_threshold, score_threshold, count):
        return torch.zeros(1, 3, dtype=torch.long)  # for the tracer

    @staticmethod
    def symbolic(g, boxes, scores, iou_threshold, score_threshold, count):
        options = [
            torch.tensor([count], dtype=torch.long),
            torch.tensor([iou_threshold], dtype=torch.float),
            torch.tensor([score_threshold], dtype=torch.float),
        ]
        options = [g.op('Constant', value_t=option) for option in options]
        return g.op('NonMaxSuppression', boxes, scores, *options)


def suppress(
    boxes: torch.Tensor, scores: torch.Tensor, nms: dict, score_threshold: float, count: int
) -> torch.Tensor:
    """Suppress boxes that overlap better boxes, as mmcv's ``batched_nms`` within group and class.

    Boxes (G, N, 4) in G groups have scores (G, C, N) for C classes. Scores of boxes that are
    removed, by ``nms`` or up to the threshold, are returned as -1. At most ``count`` boxes stay in
    a group and class. Raises a ValueError if ``nms`` asks for another kind of suppression.
    """
    _check_known(nms, dict(type='nms', score_threshold=0, max_num=-1, offset=0))
    iou_threshold = nms.get('iou_threshold', nms.get('iou_thr'))
    args = float(iou_threshold), float(score_threshold), int(count)
    group, label, box = _NonMaxSuppression.apply(boxes, scores, *args).unbind(1)
    return torch.full_like(scores, NONE).index_put((group, label, box), scores[group, label, box])


def suppress_by_label(
    boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, num_labels: int, *args
) -> torch.Tensor:
    """As :func:`suppress` with ``args``, for boxes with one of the labels each (B, N)."""
    others = labels[:, None] != torch.arange(num_labels)[:, None]
    return suppress(boxes, scores[:, None].masked_fill(others, NONE), *args).amax(1)


def _check_known(nms: dict | None, known: dict) -> None:
    """Refuse a suppression whose options differ from the known ones.

    A comparison of predictions may not reveal the difference, if few boxes overlap. An offset of 1
    is a pixel of the image before its resizing, for most heads.
    """
    nms, known = nms or dict(iou_threshold=None), dict(known, class_agnostic=False)
    unknown = [
        f'{name}={value!r}'
        for name, value in nms.items()
        if value is None or known.get(name, value if name in ANY_VALUE else ()) != value
    ]
    if unknown:
        raise ValueError(
            f'the export has no suppression of boxes with {", ".join(unknown)}: change nms={nms} '
            "in the model's test_cfg"
        )


def _lower(scores: torch.Tensor, factors: torch.Tensor, least: float) -> torch.Tensor:
    """Take the best score of each row (B, N) in turn, and lower the others by its ``factors``."""
    taken = torch.full_like(scores, -1.0)
    columns = torch.arange(scores.shape[1])
    for _ in range(scores.shape[1]):
        score, index = scores.max(1, keepdim=True)
        taken = torch.where(columns == index, torch.maximum(taken, score), taken)
        scores = scores * factors.gather(1, index[:, :, None].expand_as(factors[:, :1]))[:, 0]
        scores = scores.masked_fill(scores < least, -1.0)
    return taken


def suppress_softly(
    boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, nms: dict
) -> torch.Tensor:
    """Lower the scores of boxes that overlap better boxes of their class, as mmcv's ``soft_nms``.

    Boxes (B, N, 4) have scores and labels (B, N). Scores are -1 for rows without a box, and for
    boxes that are removed. Raises a ValueError if ``nms`` asks for another kind of suppression.
    """
    _check_known(nms, dict(type='soft_nms', method='linear', sigma=0.5, offset=0))
    low, high = boxes.split(2, 2)
    area = (high - low).prod(2)
    low = torch.maximum(low[:, :, None], low[:, None])
    high = torch.minimum(high[:, :, None], high[:, None])
    both = (high - low).clamp(min=0).prod(3)
    overlap = both / (area[:, :, None] + area[:, None] - both)
    lowers = overlap >= nms.get('iou_threshold', nms.get('iou_thr', 0.3))
    lowers = lowers & (labels[:, :, None] == labels[:, None])
    factors = torch.where(lowers, 1 - overlap, torch.ones_like(overlap))
    row = torch.arange(scores.shape[1])
    factors = factors.masked_fill(row == row[:, None], 0)  # what is taken does not come again
    # Scripted, since a trace has no loops.
    return torch.jit.script(_lower)(scores, factors, float(nms.get('min_score', 1e-3)))


def best(scores: torch.Tensor, count: int) -> Tensors:
    """Return the ``count`` best scores of each row (B, N), or all N if fewer, and their indices."""
    return scores.topk(torch.minimum(torch.tensor(count), torch._shape_as_tensor(scores)[1]), 1)


def best_labels(scores: torch.Tensor, num_labels: int, count: int) -> Tensors:
    """Return the ``count`` best of scores (B, N, num_labels), and their rows and labels."""
    scores, index = best(scores.flatten(1), count)
    row = index // num_labels
    return scores, row, index - row * num_labels


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows (B, k, …) of x (B, N, …) by their indices (B, k)."""
    index = index[(..., *[None] * (x.ndim - 2))]
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def decode(
    coder: nn.Module, boxes: torch.Tensor, deltas: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Decode a head's predictions (B, N, C * 4) for C classes to boxes (B, N, C, 4).

    They start at boxes (B, N, 4) or points (B, N, 2), and are clipped to :func:`limits_of` images.
    """
    # Without max_shape, since in a graph the coder would clip by a function of MMDetection 2.
    decoded = coder.decode(boxes, deltas).reshape(*deltas.shape[:2], -1, 4)
    return torch.minimum(decoded.clamp(min=0), limits) if coder.clip_border else decoded


def topk_boxes(head: nn.Module, cfg: dict, features: Tensors, limits: torch.Tensor) -> Tensors:
    """Return the best boxes of all levels: (B, N, 4), scores and classes (B, N), and levels (N, ).

    The head predicts as ``BaseDenseHead`` does, with a centerness or another factor of the scores
    (ATSS, FCOS) or without, or is a ``GFLHead``. Scores up to the ``score_thr``, before they are
    multiplied by a factor, become 0. Without ``nms_pre`` all boxes are returned.
    """
    maps = head(features)
    sizes = [scores.shape[-2:] for scores in maps[0]]
    priors = head.prior_generator.grid_priors(sizes, device='cpu')
    nms_pre = cfg.get('nms_pre', -1)
    is_gfl = hasattr(head, 'integral')  # which predicts a distribution of each distance
    found = []
    for level, (anchors, scores, deltas, *factors) in enumerate(zip(priors, *maps)):
        scores = _rows(scores, head.cls_out_channels)
        if not head.use_sigmoid_cls:
            scores = scores.softmax(-1)[..., :-1]
        count = nms_pre if nms_pre >= 0 else NO_LIMIT
        scores, anchor, labels = best_labels(scores, head.num_classes, count)
        if head.use_sigmoid_cls:  # after the selection, since a sigmoid keeps the order
            scores = scores.sigmoid()
        if cfg.get('score_thr'):
            scores = scores.masked_fill(scores <= cfg['score_thr'], 0)
        if nms_pre < 0:  # MMDetection takes the boxes before the last one, scores[:-1]
            scores = scores.masked_fill(F.pad(scores[:, 1:], (0, 1)) <= 0, 0)
        for factor in factors:
            scores = scores * _rows(factor, 1)[..., 0].sigmoid().gather(1, anchor)
        deltas = take(_rows(deltas, 4 * (head.reg_max + 1) if is_gfl else 4), anchor)
        anchors = anchors[anchor]
        if is_gfl:
            deltas = head.integral(deltas).reshape(*anchor.shape, 4)
            deltas = deltas * head.prior_generator.strides[level][0]
            anchors = head.anchor_center(anchors)
        boxes = decode(head.bbox_coder, anchors, deltas, limits)[:, :, 0]
        if cfg.get('min_bbox_size', -1) >= 0:
            is_large = (boxes[..., 2:] - boxes[..., :2] > cfg['min_bbox_size']).all(-1)
            scores = scores.masked_fill(~is_large, NONE)
        found.append((boxes, scores, labels, torch.full_like(labels[:1], level)))
    boxes, scores, labels, levels = (torch.cat(x, 1) for x in zip(*found))
    return boxes, scores, labels, levels[0]


def _rows(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Turn maps (B, A * C, H, W) of A anchors a cell into rows (B, N, C) for C channels."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, channels)


def pool(
    extractor: nn.Module, features: Tensors, boxes: torch.Tensor, image: torch.Tensor
) -> torch.Tensor:
    """Pool boxes (n, 4) of images (n, ) to (n, C, h, w), as a ``SingleRoIExtractor`` does."""
    features = features[: extractor.num_inputs]
    rois = torch.cat([image[:, None].to(boxes), boxes], 1)
    levels = extractor.map_roi_levels(rois, len(features))
    layers = extractor.roi_layers
    out = boxes.new_zeros(boxes.shape[0], extractor.out_channels, *layers[0].output_size)
    for level, (x, layer) in enumerate(zip(features, layers)):
        index = (levels == level).nonzero()[:, 0]
        how = layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned
        out = out.index_put((index,), roi_align(x, rois[index], *how))
    return out


def limits_of(size: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return limits (B, 1, 1, 4) of x, y, x and y from the heights and widths of images (B, 2)."""
    return size.flip(1).repeat(1, 2)[:, None, None].to(like)


class SingleStage(nn.Module):
    """Predict boxes from features, as a ``SingleStageDetector`` does, see :func:`topk_boxes`."""

    outputs = ('boxes', 'scores', 'labels')

    def __init__(self, detector: nn.Module) -> None:
        from mmdet.models.dense_heads import GFLHead
        from mmdet.models.dense_heads.base_dense_head import BaseDenseHead

        super().__init__()
        self.head, self.cfg = detector.bbox_head, detector.bbox_head.test_cfg
        require(self.head, [BaseDenseHead, GFLHead], DENSE)
        if self.cfg.get('min_bbox_size', -1) > 0:
            raise ValueError(
                'the export does not know min_bbox_size in pixels of images before their resizing: '
                "set it to 0 in the model's test_cfg"
            )

    def forward(self, features, image_shape, size):
        limits = limits_of(size, features[0])
        boxes, scores, labels, _ = topk_boxes(self.head, self.cfg, features, limits)
        count = self.cfg['max_per_img']
        known = self.head.num_classes, self.cfg['nms'], 0, count
        scores, index = best(suppress_by_label(boxes, scores, labels, *known), count)
        return finish(take(boxes, index), scores, take(labels, index))


def _stages(module: nn.Module) -> Sequence[nn.Module]:
    """Return the modules of all stages: a cascade has a list of them, other detectors have one."""
    return module if isinstance(module, nn.ModuleList) else [module]


class TwoStage(nn.Module):
    """Predict boxes and masks from features, as a ``TwoStageDetector`` or a cascade does.

    Masks are probabilities (B, N, height, width) within the boxes.
    """

    def __init__(self, detector: nn.Module) -> None:
        from mmdet.models.dense_heads import RPNHead
        from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead

        super().__init__()
        require(detector.rpn_head, [RPNHead], DENSE)
        methods = 'predict', 'predict_bbox', 'predict_mask', '_bbox_forward', '_mask_forward'
        require(detector.roi_head, [StandardRoIHead, CascadeRoIHead], methods)
        if detector.roi_head.with_shared_head:
            name = type(detector.roi_head.shared_head).__name__
            raise ValueError(f'the export does not know a shared_head, here a {name}')
        self.rpn, self.rpn_cfg = detector.rpn_head, dict(detector.rpn_head.test_cfg)
        self.rpn_cfg.pop('score_thr', None)  # which RPNHead ignores
        if self.rpn_cfg.get('nms_pre', -1) <= 0:  # all of them, unlike other heads
            self.rpn_cfg['nms_pre'] = NO_LIMIT
        self.roi, self.cfg = detector.roi_head, detector.roi_head.test_cfg
        self.outputs = ('boxes', 'scores', 'labels', *['masks'] * self.roi.with_mask)

    def forward(self, features, image_shape, size):
        limits = limits_of(size, features[0])
        proposals, is_proposal = self._proposals(features, limits)
        boxes, scores, labels = self._detect(features, proposals, is_proposal, limits)
        results = finish(boxes, scores, labels)
        if self.roi.with_mask:
            results = (*results, self._masks(features, boxes, scores, labels))
        return results

    def _proposals(self, features, limits):
        boxes, scores, _, levels = topk_boxes(self.rpn, self.rpn_cfg, features, limits)
        count = self.rpn_cfg['max_per_img']
        known = len(features), self.rpn_cfg['nms'], NONE / 2, count
        scores, index = best(suppress_by_label(boxes, scores, levels[None], *known), count)
        is_proposal = scores > NONE / 2
        return take(boxes, index).masked_fill(~is_proposal[..., None], 0), is_proposal

    def _detect(self, features, proposals, is_proposal, limits):
        heads, logits = _stages(self.roi.bbox_head), []
        batch, num, classes = proposals.shape[0], proposals.shape[1], heads[-1].num_classes
        image = torch.arange(batch)[:, None].expand(-1, num)
        for head, extractor in zip(heads, _stages(self.roi.bbox_roi_extractor)):
            pooled = pool(extractor, features, proposals.flatten(0, 1), image.flatten())
            found, deltas = head(pooled)
            logits.append(found)
            boxes = decode(head.bbox_coder, proposals, deltas.reshape(batch, num, -1), limits)
            if head is not heads[-1]:  # the next stage starts at the boxes of the best class
                label = found[:, :-1].argmax(1).reshape(batch, num, 1, 1).expand(-1, -1, -1, 4)
                proposals = boxes if head.reg_class_agnostic else boxes.gather(2, label)
                proposals = proposals[:, :, 0]
        scores = torch.stack(logits).mean(0).softmax(-1)[:, :-1].reshape(batch, num, classes)
        scores = scores.masked_fill(~is_proposal[..., None], NONE)
        boxes = boxes.transpose(1, 2)
        # Each class has its own boxes, so each image and class is a group.
        boxes = boxes.expand(-1, classes, -1, -1).reshape(batch * classes, num, 4)
        # Otherwise OpenVINO does not know the size of the last axis.
        boxes = torch.stack([boxes[..., i] for i in range(4)], -1)
        count = self.cfg['max_per_img']
        scores = scores.transpose(1, 2).reshape(batch * classes, 1, num)
        scores = suppress(boxes, scores, self.cfg['nms'], self.cfg['score_thr'], count)
        scores, index = best(scores.reshape(batch, classes * num), count)
        boxes = take(boxes.reshape(batch, classes * num, 4), index)
        return boxes, scores, index // num

    def _masks(self, features, boxes, scores, labels):
        # Only objects and the first row, since runtimes differ in how they treat empty tensors.
        is_object = scores > NONE / 2
        first = torch.arange(scores.shape[1])[None] == 0
        image, row = (is_object | first).nonzero().unbind(1)
        heads = _stages(self.roi.mask_head)
        stages = zip(heads, _stages(self.roi.mask_roi_extractor))
        args = features, boxes[image, row], image
        masks = [head(pool(extractor, *args)).sigmoid() for head, extractor in stages]
        masks = torch.stack(masks).mean(0)
        if not heads[-1].class_agnostic:
            masks = take(masks, labels[image, row].clamp(min=0)[:, None])
        masks = masks[:, 0].masked_fill(~is_object[image, row][:, None, None], 0)
        return masks.new_zeros(*scores.shape, *masks.shape[1:]).index_put((image, row), masks)


def finish(boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> Tensors:
    """Set the box and score of rows without an object (score -1) to 0, and the label to -1."""
    is_none = scores <= NONE / 2
    boxes = boxes.masked_fill(is_none[..., None], 0)
    return boxes, scores.masked_fill(is_none, 0), labels.masked_fill(is_none, -1)
