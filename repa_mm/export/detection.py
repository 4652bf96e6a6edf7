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

# The score of rows without an object.
NONE = -1.0
# More boxes than there are.
NO_LIMIT = 2**30
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
    a group and class. Raises a ValueError if ``nms`` asks for another kind of suppression:
    comparing predictions may not reveal the difference, if few boxes overlap.
    """
    asked = dict(nms or {})
    offset = asked.pop('offset', 0)
    iou_threshold = asked.pop('iou_threshold' if 'iou_threshold' in asked else 'iou_thr', None)
    if iou_threshold is None:
        asked['iou_threshold'] = None
    _check_known(nms, asked, dict(type='nms', score_threshold=0, max_num=-1))
    boxes = torch.cat([boxes[..., :2], boxes[..., 2:] + offset], -1) if offset else boxes
    args = float(iou_threshold), float(score_threshold), int(count)
    group, label, box = _NonMaxSuppression.apply(boxes, scores, *args).unbind(1)
    return torch.full_like(scores, NONE).index_put((group, label, box), scores[group, label, box])


def _check_known(nms: dict, asked: dict, known: dict) -> None:
    asked.pop('split_thr', None)  # which saves memory, and changes no result
    known = dict(known, class_agnostic=False)
    unknown = [f'{name}={value!r}' for name, value in asked.items() if known.get(name, ()) != value]
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
        factor = factors.gather(1, index[:, :, None].expand(-1, -1, factors.shape[2]))[:, 0]
        scores = scores * factor
        scores = torch.where(scores < least, torch.full_like(scores, -1.0), scores)
    return taken


def suppress_softly(
    boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, nms: dict
) -> torch.Tensor:
    """Lower the scores of boxes that overlap better boxes of their class, as mmcv's ``soft_nms``.

    Boxes (B, N, 4) have scores and labels (B, N). Scores are -1 for rows without a box, and for
    boxes that are removed. Raises a ValueError if ``nms`` asks for another kind of suppression.
    """
    asked = dict(nms)
    threshold, least = asked.pop('iou_threshold', 0.3), asked.pop('min_score', 1e-3)
    _check_known(nms, asked, dict(type='soft_nms', method='linear', sigma=0.5, offset=0))
    corners = [torch.maximum, torch.minimum]
    low, high = (f(x[:, :, None], x[:, None]) for f, x in zip(corners, boxes.split(2, 2)))
    both = (high - low).clamp(min=0).prod(3)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(2)
    overlap = both / (area[:, :, None] + area[:, None] - both)
    lowers = (overlap >= threshold) & (labels[:, :, None] == labels[:, None])
    factors = torch.where(lowers, 1 - overlap, torch.ones_like(overlap))
    row = torch.arange(scores.shape[1])
    factors = factors * (row != row[:, None]).to(factors)  # what is taken does not come again
    # Scripted, since a trace has no loops.
    return torch.jit.script(_lower)(scores, factors, float(least))


def best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` best scores of each row (B, N), or all N if fewer, and their indices."""
    return scores.topk(torch.minimum(torch.tensor(count), torch._shape_as_tensor(scores)[1]), 1)


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


def topk_boxes(
    head: nn.Module, cfg: dict, features: tuple[torch.Tensor, ...], limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the best boxes of all levels: (B, N, 4), scores and classes (B, N), and levels (N, ).

    The head predicts as ``BaseDenseHead`` does, with a centerness or another factor of the scores
    (ATSS, FCOS) or without, or is a ``GFLHead``. Scores up to the ``score_thr``, before they are
    multiplied by a factor, become 0. Without ``nms_pre`` all boxes are returned.
    """
    maps = head(features)
    sizes = [scores.shape[-2:] for scores in maps[0]]
    priors = head.prior_generator.grid_priors(sizes, device='cpu')
    found = []
    # A GFLHead predicts a distribution of each distance.
    width = 4 * (head.reg_max + 1) if hasattr(head, 'integral') else 4
    for level, (anchors, scores, deltas, *factors) in enumerate(zip(priors, *maps)):
        batch = scores.shape[0]
        scores = scores.permute(0, 2, 3, 1).reshape(batch, -1, head.cls_out_channels)
        if not head.use_sigmoid_cls:
            scores = scores.softmax(-1)[..., :-1]
        num_classes = head.cls_out_channels - (not head.use_sigmoid_cls)
        nms_pre = cfg.get('nms_pre', -1)
        scores, index = best(scores.flatten(1), nms_pre if nms_pre >= 0 else NO_LIMIT)
        if head.use_sigmoid_cls:  # after the selection, since a sigmoid keeps the order
            scores = scores.sigmoid()
        anchor = index if num_classes == 1 else index // num_classes
        if cfg.get('score_thr'):
            scores = scores * (scores > cfg['score_thr']).to(scores)
        if nms_pre < 0:  # MMDetection takes the boxes before the last one, scores[:-1]
            scores = scores * (F.pad(scores[:, 1:], (0, 1)) > 0).to(scores)
        for factor in factors:
            factor = factor.permute(0, 2, 3, 1).reshape(batch, -1).sigmoid()
            scores = scores * factor.gather(1, anchor)
        deltas = take(deltas.permute(0, 2, 3, 1).reshape(batch, -1, width), anchor)
        anchors = anchors[anchor]
        if width > 4:
            deltas = head.integral(deltas).reshape(batch, -1, 4)
            deltas = deltas * head.prior_generator.strides[level][0]
            anchors = head.anchor_center(anchors)
        boxes = decode(head.bbox_coder, anchors, deltas, limits)[:, :, 0]
        found.append(
            (boxes, scores, index - anchor * num_classes, torch.full_like(index[0], level))
        )
    boxes, scores, labels, levels = zip(*found)
    scores = torch.cat(scores, 1)
    boxes = torch.cat(boxes, 1)
    if cfg.get('min_bbox_size', -1) >= 0:
        is_large = (boxes[..., 2:] - boxes[..., :2] > cfg['min_bbox_size']).all(-1)
        scores = torch.where(is_large, scores, torch.full_like(scores, NONE))
    return boxes, scores, torch.cat(labels, 1), torch.cat(levels)


def one_hot_scores(scores: torch.Tensor, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Expand scores (B, N) of boxes with one class each to (B, C, N), -1 for other classes."""
    classes = torch.arange(num_classes)[:, None]
    scores = scores[:, None]
    return torch.where(labels[:, None] == classes, scores, torch.full_like(scores, NONE))


def pool(
    extractor: nn.Module, features: tuple[torch.Tensor, ...], rois: torch.Tensor
) -> torch.Tensor:
    """Pool the features of regions (n, 5) to (n, C, h, w), as a ``SingleRoIExtractor`` does."""
    features = features[: extractor.num_inputs]
    levels = extractor.map_roi_levels(rois, len(features))
    layers = extractor.roi_layers
    out = rois.new_zeros(rois.shape[0], extractor.out_channels, *layers[0].output_size)
    for level, (x, layer) in enumerate(zip(features, layers)):
        index = (levels == level).nonzero()[:, 0]
        how = layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned
        out = out.index_put((index,), roi_align(x, rois[index], *how))
    return out


def to_rois(boxes: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Concatenate the indices of images (n, ) and boxes (n, 4) to regions (n, 5)."""
    return torch.cat([image[:, None].to(boxes), boxes], 1)


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

    def forward(self, features, image_shape, size):
        limits = limits_of(size, features[0])
        boxes, scores, labels, _ = topk_boxes(self.head, self.cfg, features, limits)
        classes = self.head.cls_out_channels - (not self.head.use_sigmoid_cls)
        count = self.cfg['max_per_img']
        by_class = one_hot_scores(scores, labels, classes)
        scores = suppress(boxes, by_class, self.cfg['nms'], 0, count)
        scores, index = best(scores.amax(1), count)
        return finish(take(boxes, index), scores, take(labels, index))


def _stages(module: nn.Module) -> Sequence[nn.Module]:
    """Return the modules of all stages: a cascade has a list of them, other detectors have one."""
    return module if isinstance(module, nn.ModuleList) else [module]


def _check_roi_head(roi: nn.Module) -> None:
    """Refuse a RoI head that predicts in a way that the export does not know, by its name."""
    from mmcv.ops import RoIAlign
    from mmdet.models.losses import CrossEntropyLoss
    from mmdet.models.roi_heads import BBoxHead, CascadeRoIHead, FCNMaskHead, StandardRoIHead
    from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor

    methods = 'predict', 'predict_bbox', 'predict_mask', '_bbox_forward', '_mask_forward'
    require(roi, [StandardRoIHead, CascadeRoIHead], methods)
    if roi.with_shared_head:
        name = type(roi.shared_head).__name__
        raise ValueError(f'the export does not know a shared_head, here a {name}')
    parts = [(BBoxHead, roi.bbox_head, roi.bbox_roi_extractor)]
    if roi.with_mask:
        parts.append((FCNMaskHead, roi.mask_head, roi.mask_roi_extractor))
    for kind, heads, extractors in parts:
        for head, extractor in zip(_stages(heads), _stages(extractors)):
            require(head, [kind], ['predict_by_feat', '_predict_by_feat_single'])
            require(extractor, [SingleRoIExtractor], ['forward', 'map_roi_levels'])
            layer = extractor.roi_layers[0]
            require(layer, [RoIAlign], ['forward'])
            if layer.pool_mode != 'avg':
                raise ValueError(f'the export does not know a RoIAlign of {layer.pool_mode!r} mode')
            if getattr(head, 'custom_activation', False):
                require(head.loss_cls, [CrossEntropyLoss], ())


class TwoStage(nn.Module):
    """Predict boxes and masks from features, as a ``TwoStageDetector`` or a cascade does.

    Masks are probabilities (B, N, height, width) within the boxes.
    """

    def __init__(self, detector: nn.Module) -> None:
        from mmdet.models.dense_heads import RPNHead

        super().__init__()
        require(detector.rpn_head, [RPNHead], DENSE)
        _check_roi_head(detector.roi_head)
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
        by_level = one_hot_scores(scores, levels[None], len(features))
        scores = suppress(boxes, by_level, self.rpn_cfg['nms'], NONE / 2, count)
        scores, index = best(scores.amax(1), count)
        is_proposal = scores > NONE / 2
        return take(boxes, index) * is_proposal[..., None].to(boxes), is_proposal

    def _detect(self, features, proposals, is_proposal, limits):
        heads, logits = _stages(self.roi.bbox_head), []
        batch, num, classes = proposals.shape[0], proposals.shape[1], heads[-1].num_classes
        image = torch.arange(batch)[:, None].expand(-1, num)
        for head, extractor in zip(heads, _stages(self.roi.bbox_roi_extractor)):
            rois = to_rois(proposals.flatten(0, 1), image.flatten())
            found, deltas = head(pool(extractor, features, rois))
            logits.append(found)
            boxes = decode(head.bbox_coder, proposals, deltas.reshape(batch, num, -1), limits)
            if head is not heads[-1]:  # the next stage starts at the boxes of the best class
                label = found[:, :-1].argmax(1).reshape(batch, num, 1, 1).expand(-1, -1, -1, 4)
                proposals = boxes if head.reg_class_agnostic else boxes.gather(2, label)
                proposals = proposals[:, :, 0]
        scores = torch.stack(logits).mean(0).softmax(-1)[:, :-1].reshape(batch, num, classes)
        scores = torch.where(is_proposal[..., None], scores, torch.full_like(scores, NONE))
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
        rois = to_rois(boxes[image, row], image)
        heads = _stages(self.roi.mask_head)
        stages = zip(heads, _stages(self.roi.mask_roi_extractor))
        masks = [head(pool(extractor, features, rois)).sigmoid() for head, extractor in stages]
        masks = torch.stack(masks).mean(0)
        if not heads[-1].class_agnostic:
            index = labels[image, row].clamp(min=0)[:, None, None, None]
            index = index.expand(-1, 1, masks.shape[2], masks.shape[3])
            masks = masks.gather(1, index)
        masks = masks[:, 0] * is_object[image, row][:, None, None].to(masks)
        return masks.new_zeros(*scores.shape, *masks.shape[1:]).index_put((image, row), masks)


def finish(
    boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Set the box and score of rows without an object (score -1) to 0, and the label to -1."""
    is_object = scores > NONE / 2
    return (
        boxes * is_object[..., None].to(boxes),
        scores * is_object.to(scores),
        torch.where(is_object, labels, torch.full_like(labels, -1)),
    )
