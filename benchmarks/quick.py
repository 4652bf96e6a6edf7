"""A head for quick trainings on a GPU, which images of a batch one by one hold up.

Importing this module registers it.
"""

import torch
from mmdet.models import RetinaHead
from mmdet.registry import MODELS
from torch.nn.utils.rnn import pad_sequence


@MODELS.register_module()
class BatchedRetinaHead(RetinaHead):
    """RetinaNet's head with the targets of all images of a batch computed at once.

    They are those of RetinaNet's own assigner, for images of one size without padding.
    """

    def get_anchors(self, featmap_sizes, batch_img_metas, device='cuda'):
        """Return the anchors, and no flags: all are valid."""
        anchors = self.prior_generator.grid_priors(featmap_sizes, device=device)
        return [anchors] * len(batch_img_metas), None

    @torch.no_grad()
    def get_targets(self, anchor_list, valid_flag_list, batch_gt_instances, *args, **kwargs):
        """Return labels, their weights, box deltas and their weights by level, and their number."""
        levels, anchors = [len(level) for level in anchor_list[0]], torch.cat(anchor_list[0])
        boxes = pad_sequence([gt.bboxes for gt in batch_gt_instances], True)  # (B, G, 4)
        none = self.num_classes
        labels = pad_sequence([gt.labels for gt in batch_gt_instances], True, none)
        number = len(boxes)
        overlaps = self.assigner.iou_calculator(boxes, anchors.expand(number, -1, -1))
        overlaps = overlaps.masked_fill((labels == none)[..., None], -1)  # (B, G, A)
        best, found = overlaps.max(1)
        positive, negative = best >= self.assigner.pos_iou_thr, best < self.assigner.neg_iou_thr
        # Each object takes the anchors nearest to it, the last object first.
        nearest = (overlaps == overlaps.amax(2, keepdim=True)) & (labels != none)[..., None]
        order = torch.arange(1, 1 + boxes.shape[1], device=boxes.device)[:, None]
        last = (nearest * order).amax(1)
        found = torch.where(last > 0, last - 1, found)
        positive |= last > 0
        matched = boxes.gather(1, found[..., None].expand(-1, -1, 4))
        deltas = self.bbox_coder.encode(anchors.repeat(number, 1), matched.flatten(0, 1))
        inside = positive[..., None].expand_as(matched)
        targets = (
            torch.where(positive, labels.gather(1, found), none),
            (positive | negative).float(),
            torch.where(inside, deltas.view_as(matched), 0.0),
            inside.float(),
        )
        return *(x.split(levels, 1) for x in targets), positive.sum(1).clamp(min=1).sum()
