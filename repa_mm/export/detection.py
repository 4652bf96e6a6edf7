"""Detectors in operations that ONNX has, from features to boxes and masks.

MMDetection's own post-processing treats one image after another, and its results have as many rows
as there are objects, which a traced graph cannot follow. Here all images are treated at a time, in
tensors of fixed numbers of rows: rows without an object have the score -1 inside, and in the
outputs the label -1.
"""

import math

import torch
import torch.nn as nn
from torchvision.ops import nms, roi_align

# The score of rows without an object.
NONE = -1.0
_MAX_RATIO = abs(math.log(16 / 1000))  # of DeltaXYWHBBoxCoder.decode


class _NonMaxSuppression(torch.autograd.Function):
    """ONNX's NonMaxSuppression.

    Boxes (G, N, 4) in G groups and scores (G, C, N) of C classes, to indices (M, 3) of group, class
    and box.
    """

    @staticmethod
    def forward(ctx, boxes, scores, iou_threshold, score_threshold, count):
        found = [torch.zeros(0, 3, dtype=torch.long, device=boxes.device)]
        valid = scores > score_threshold
        for group, label in valid.any(2).nonzero().tolist():
            index = valid[group, label].nonzero()[:, 0]
            keep = nms(boxes[group, index], scores[group, label, index], iou_threshold)[:count]
            index = index[keep]
            place = index.new_tensor([group, label]).expand(len(index), 2)
            found.append(torch.cat([place, index[:, None]], 1))
        return torch.cat(found)

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
    boxes: torch.Tensor,
    scores: torch.Tensor,
    iou_threshold: float,
    score_threshold: float,
    count: int,
) -> torch.Tensor:
    """Greedy non-maximum suppression, in every group and class for itself.

    Args:
        boxes (torch.Tensor): (G, N, 4) in G groups.
        scores (torch.Tensor): (G, C, N) of C classes.
        iou_threshold (float): A box is removed if its overlap with a better one is larger.
        score_threshold (float): A box stays only if its score is larger.
        count (int): Number of boxes that stay in a group and class at most.

    Returns:
        torch.Tensor: The scores (G, C, N), -1 where the box is removed.
    """
    args = float(iou_threshold), float(score_threshold), int(count)
    group, label, box = _NonMaxSuppression.apply(boxes, scores, *args).unbind(1)
    return torch.full_like(scores, NONE).index_put((group, label, box), scores[group, label, box])


def best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best scores of each row of (B, N), or all if there are fewer, and where."""
    if torch.jit.is_tracing():  # known when the graph runs
        count = torch.minimum(torch.tensor(count), torch._shape_as_tensor(scores)[1])
    else:
        count = min(count, scores.shape[1])
    return scores.topk(count, 1)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows (B, k, 4) of x (B, N, 4)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def decode(
    coder: nn.Module, boxes: torch.Tensor, deltas: torch.Tensor, size: torch.Tensor
) -> torch.Tensor:
    """What ``DeltaXYWHBBoxCoder.decode`` computes.

    Args:
        coder: The coder.
        boxes (torch.Tensor): Anchors or proposals (..., 4).
        deltas (torch.Tensor): What the head predicts for them (..., 4).
        size (torch.Tensor): Width, height, width, height of each image, (..., 4), to clip to.
    """
    deltas = deltas * deltas.new_tensor(coder.stds) + deltas.new_tensor(coder.means)
    extent = boxes[..., 2:] - boxes[..., :2]
    shift, scale = extent * deltas[..., :2], deltas[..., 2:]
    if coder.add_ctr_clamp:
        shift = shift.clamp(-coder.ctr_clamp, coder.ctr_clamp)
        scale = scale.clamp(max=_MAX_RATIO)
    else:
        scale = scale.clamp(-_MAX_RATIO, _MAX_RATIO)
    center = (boxes[..., :2] + boxes[..., 2:]) * 0.5 + shift
    half = extent * scale.exp() * 0.5
    decoded = torch.cat([center - half, center + half], -1)
    return torch.minimum(decoded.clamp(min=0), size) if coder.clip_border else decoded


def candidates(
    head: nn.Module, cfg: dict, features: tuple[torch.Tensor, ...], size: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best anchors of every level.

    Args:
        head (nn.Module): An ``AnchorHead``.
        cfg (dict): Its ``test_cfg``, with ``nms_pre``.
        features (tuple): Maps of all levels.
        size (torch.Tensor): (B, 1, 4), as for :func:`decode`.

    Returns:
        tuple: Boxes (B, N, 4), scores (B, N), classes (B, N) and levels (N, ).
    """
    maps = head(features)
    priors = head.prior_generator.grid_priors(
        [scores.shape[-2:] for scores in maps[0]], device=size.device
    )
    found = []
    for level, (scores, deltas, anchors) in enumerate(zip(*maps, priors)):
        batch = scores.shape[0]
        scores = scores.permute(0, 2, 3, 1).reshape(batch, -1, head.cls_out_channels)
        if not head.use_sigmoid_cls:
            scores = scores.softmax(-1)[..., :-1]
        num_classes = head.cls_out_channels - (not head.use_sigmoid_cls)
        scores, index = best(scores.flatten(1), cfg['nms_pre'])
        if head.use_sigmoid_cls:  # of a few, as it does not change the order
            scores = scores.sigmoid()
        anchor = index if num_classes == 1 else index // num_classes
        deltas = _take(deltas.permute(0, 2, 3, 1).reshape(batch, -1, 4), anchor)
        boxes = decode(head.bbox_coder, anchors[anchor], deltas, size)
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
    """Scores (B, N) of boxes of one class each as (B, C, N), -1 for the other classes."""
    classes = torch.arange(num_classes, device=scores.device)[:, None]
    scores = scores[:, None]
    return torch.where(labels[:, None] == classes, scores, torch.full_like(scores, NONE))


def pool(
    extractor: nn.Module, features: tuple[torch.Tensor, ...], rois: torch.Tensor
) -> torch.Tensor:
    """What a ``SingleRoIExtractor`` computes.

    Args:
        extractor (nn.Module): The extractor.
        features (tuple): Maps of all levels.
        rois (torch.Tensor): (n, 5), number of the image and box.

    Returns:
        torch.Tensor: (n, C, height, width).
    """
    features = features[: extractor.num_inputs]
    levels = extractor.map_roi_levels(rois, len(features))
    layers = extractor.roi_layers
    shape = rois.shape[0], extractor.out_channels, *layers[0].output_size
    out = rois.new_zeros(shape)
    for level, (x, layer) in enumerate(zip(features, layers)):
        index = (levels == level).nonzero()[:, 0]
        pooled = roi_align(
            x,
            rois[index],
            layer.output_size,
            layer.spatial_scale,
            layer.sampling_ratio,
            layer.aligned,
        )
        out = out.index_put((index,), pooled)
    return out


def to_rois(boxes: torch.Tensor) -> torch.Tensor:
    """Boxes (B, N, 4) as (B * N, 5) with the number of the image."""
    image = torch.arange(boxes.shape[0], device=boxes.device).to(boxes)
    image = image[:, None, None].expand(-1, boxes.shape[1], 1)
    return torch.cat([image, boxes], 2).flatten(0, 1)


class SingleStage(nn.Module):
    """From features to boxes, as a ``SingleStageDetector`` with an ``AnchorHead`` predicts them."""

    outputs = ('boxes', 'scores', 'labels')

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.head, self.cfg = detector.bbox_head, detector.bbox_head.test_cfg
        check_anchor_head(self.head, 'bbox_head', 'BaseDenseHead', self.cfg)
        if self.cfg.get('min_bbox_size', -1) > 0:
            raise ValueError(
                'test_cfg.min_bbox_size above 0 is not supported: it counts pixels of the image '
                'before its resizing'
            )

    def forward(self, features, size):
        boxes, scores, labels, _ = candidates(self.head, self.cfg, features, size)
        classes = self.head.cls_out_channels - (not self.head.use_sigmoid_cls)
        count = self.cfg['max_per_img']
        scores = suppress(
            boxes,
            one_hot_scores(scores, labels, classes),
            self.cfg['nms']['iou_threshold'],
            self.cfg.get('score_thr', 0),
            count,
        )
        scores, index = best(scores.amax(1), count)
        return _finish(_take(boxes, index), scores, labels.gather(1, index))


class TwoStage(nn.Module):
    """From features to boxes and masks, as a ``TwoStageDetector`` predicts them.

    Masks are probabilities (B, N, height, width) inside of the boxes.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.rpn, self.rpn_cfg = detector.rpn_head, detector.rpn_head.test_cfg
        self.roi, self.cfg = detector.roi_head, detector.roi_head.test_cfg
        check_anchor_head(self.rpn, 'rpn_head', 'RPNHead', self.rpn_cfg)
        check_roi_head(self.roi, self.cfg)
        self.outputs = ('boxes', 'scores', 'labels', *['masks'] * self.roi.with_mask)

    def forward(self, features, size):
        proposals, is_proposal = self._proposals(features, size)
        boxes, scores, labels = self._detect(features, proposals, is_proposal, size)
        results = _finish(boxes, scores, labels)
        if self.roi.with_mask:
            results = (*results, self._masks(features, boxes, scores, labels))
        return results

    def _proposals(self, features, size):
        boxes, scores, _, levels = candidates(self.rpn, self.rpn_cfg, features, size)
        count = self.rpn_cfg['max_per_img']
        by_level = one_hot_scores(scores, levels[None], len(features))
        iou_threshold = self.rpn_cfg['nms']['iou_threshold']
        scores, index = best(
            suppress(boxes, by_level, iou_threshold, NONE / 2, count).amax(1), count
        )
        is_proposal = scores > NONE / 2
        return _take(boxes, index) * is_proposal[..., None].to(boxes), is_proposal

    def _detect(self, features, proposals, is_proposal, size):
        head = self.roi.bbox_head
        batch, num, classes = proposals.shape[0], proposals.shape[1], head.num_classes
        rois = to_rois(proposals)
        scores, deltas = head(pool(self.roi.bbox_roi_extractor, features, rois))
        scores = scores.softmax(-1)[:, :-1].reshape(batch, num, classes)
        scores = torch.where(is_proposal[..., None], scores, torch.full_like(scores, NONE))
        scores = scores.transpose(1, 2)
        deltas = deltas.reshape(batch, num, -1, 4).transpose(1, 2)
        boxes = decode(head.bbox_coder, proposals[:, None], deltas, size[:, None])
        # Every class has boxes of its own: a group of the suppression.
        boxes = boxes.expand(-1, classes, -1, -1).reshape(batch * classes, num, 4)
        # OpenVINO does not know the size of the last axis otherwise.
        boxes = torch.stack([boxes[..., i] for i in range(4)], -1)
        count = self.cfg['max_per_img']
        scores = suppress(
            boxes,
            scores.reshape(batch * classes, 1, num),
            self.cfg['nms']['iou_threshold'],
            self.cfg['score_thr'],
            count,
        )
        scores, index = best(scores.reshape(batch, classes * num), count)
        boxes = _take(boxes.reshape(batch, classes * num, 4), index)
        return boxes, scores, index // num

    def _masks(self, features, boxes, scores, labels):
        head = self.roi.mask_head
        # The masks of objects only, and of one more, as runtimes differ in what they make of none.
        is_object = scores > NONE / 2
        first = torch.arange(scores.shape[1], device=scores.device)[None] == 0
        image, row = (is_object | first).nonzero().unbind(1)
        masks = head(pool(self.roi.mask_roi_extractor, features, _rois_at(boxes, image, row)))
        if not head.class_agnostic:
            index = labels[image, row].clamp(min=0)[:, None, None, None]
            index = index.expand(-1, 1, masks.shape[2], masks.shape[3])
            masks = masks.gather(1, index)
        masks = masks.sigmoid()[:, 0] * is_object[image, row][:, None, None].to(masks)
        shape = scores.shape[0], scores.shape[1], masks.shape[1], masks.shape[2]
        return masks.new_zeros(shape).index_put((image, row), masks)


def _rois_at(boxes: torch.Tensor, image: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return torch.cat([image[:, None].to(boxes), boxes[image, row]], 1)


def _finish(boxes, scores, labels):
    """Rows without an object: box and score 0, label -1."""
    is_object = scores > NONE / 2
    return (
        boxes * is_object[..., None].to(boxes),
        scores * is_object.to(scores),
        torch.where(is_object, labels, torch.full_like(labels, -1)),
    )


def is_own(module: nn.Module, method: str, *names: str) -> bool:
    """Whether a method is that of one of the classes with these names."""
    for cls in type(module).__mro__:
        if method in cls.__dict__:
            return cls.__name__ in names
    return False


def check_nms(cfg: dict, where: str) -> None:
    """Check what a ``test_cfg`` asks of the non-maximum suppression.

    Raises:
        ValueError: Naming what is not supported.
    """
    nms_cfg = cfg.get('nms') or {}
    kind = nms_cfg.get('type', 'nms')
    if kind != 'nms':
        raise ValueError(f"{where}.nms.type {kind!r} is not supported: only 'nms' is")
    # split_thr only bounds the memory.
    unknown = set(nms_cfg) - {'type', 'iou_threshold', 'split_thr'}
    if nms_cfg.get('class_agnostic') is False:
        unknown -= {'class_agnostic'}
    if unknown or 'iou_threshold' not in nms_cfg:
        raise ValueError(
            f'{where}.nms is not supported: it must have iou_threshold and no '
            f'{", ".join(sorted(unknown)) or "other key"}, but is {dict(nms_cfg)}'
        )
    if not cfg.get('max_per_img', -1) > 0:
        raise ValueError(f'{where}.max_per_img must be positive, but is {cfg.get("max_per_img")}')


def check_anchor_head(head: nn.Module, where: str, base: str, cfg: dict) -> None:
    """Check that a head predicts as :func:`candidates` does.

    Raises:
        ValueError: Naming what is not supported.
    """
    kind = type(head).__name__
    kinds = {cls.__name__ for cls in type(head).__mro__}
    # A forward() of its own puts out more than scores and boxes.
    own = [(name, ('BaseDenseHead', 'AnchorHead')) for name in ('forward', 'predict_by_feat')]
    own += [(name, (base,)) for name in ('_predict_by_feat_single', '_bbox_post_process')]
    if 'AnchorHead' not in kinds or not all(is_own(head, name, *names) for name, names in own):
        raise ValueError(
            f'{where} of type {kind} is not supported: only heads with anchors that predict as '
            f'{"RetinaHead" if base == "BaseDenseHead" else base} does are'
        )
    for part, expected in (
        (head.bbox_coder, 'DeltaXYWHBBoxCoder'),
        (head.prior_generator, 'AnchorGenerator'),
    ):
        if type(part).__name__ != expected:
            raise ValueError(
                f'{where} with a {type(part).__name__} is not supported: only {expected} is'
            )
    if getattr(head.loss_cls, 'custom_cls_channels', False):
        raise ValueError(f'{where} with {type(head.loss_cls).__name__} is not supported')
    if not cfg.get('nms_pre', -1) > 0:
        raise ValueError(f'test_cfg.nms_pre of {where} must be positive')
    check_nms(cfg, f'test_cfg of {where}')


def check_roi_head(roi: nn.Module, cfg: dict) -> None:
    """Check that an RoI head predicts as :class:`TwoStage` does.

    Raises:
        ValueError: Naming what is not supported.
    """
    if type(roi).__name__ != 'StandardRoIHead':
        raise ValueError(
            f'roi_head of type {type(roi).__name__} is not supported: only StandardRoIHead is'
        )
    if roi.with_shared_head:
        raise ValueError('roi_head with a shared_head is not supported')
    head = roi.bbox_head
    own = all(is_own(head, n, 'BBoxHead') for n in ('predict_by_feat', '_predict_by_feat_single'))
    if not own or not head.with_reg or not head.with_cls or head.custom_cls_channels:
        raise ValueError(
            f'roi_head.bbox_head of type {type(head).__name__} with '
            f'{type(head.loss_cls).__name__} is not supported'
        )
    if type(head.bbox_coder).__name__ != 'DeltaXYWHBBoxCoder':
        raise ValueError(
            f'roi_head.bbox_head with a {type(head.bbox_coder).__name__} is not supported'
        )
    check_nms(cfg, 'test_cfg.rcnn')
    extractors = [roi.bbox_roi_extractor]
    if roi.with_mask:
        extractors.append(roi.mask_roi_extractor)
        mask = roi.mask_head
        if type(mask).__name__ != 'FCNMaskHead':
            raise ValueError(f'roi_head.mask_head of type {type(mask).__name__} is not supported')
    for extractor in extractors:
        if type(extractor).__name__ != 'SingleRoIExtractor':
            raise ValueError(f'a roi_extractor of type {type(extractor).__name__} is not supported')
        layer = extractor.roi_layers[0]
        if type(layer).__name__ != 'RoIAlign' or layer.pool_mode != 'avg':
            raise ValueError(f'the roi_layer {layer} is not supported: only RoIAlign by average is')
