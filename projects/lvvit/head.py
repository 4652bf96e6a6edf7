"""The head of LV-ViT, which learns a label for every patch (token labels)."""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.registry import MODELS
from mmpretrain.models.heads import ClsHead
from mmpretrain.structures import DataSample
from torchvision.ops import roi_align


def token_targets(
    label_maps: Sequence[torch.Tensor],
    boxes: Sequence[torch.Tensor],
    flips: Sequence[bool],
    num_classes: int,
    hw: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the targets of image crops out of the label maps of the whole images.

    Args:
        label_maps (Sequence[torch.Tensor]): One map for each image, all of shape (2, K, H, W): the
            K highest scores at every place, and their classes.
        boxes (Sequence[torch.Tensor]): The crop of each image, (4, ): left, top, right and bottom
            as shares of the image's width and height.
        flips (Sequence[bool]): Whether each crop was flipped left to right.
        num_classes (int): Number of classes.
        hw (tuple): Height and width of the grid of tokens.

    Returns:
        tuple: Probabilities of the classes for each crop, (B, num_classes), and for each patch of
        it, (B, height * width, num_classes).
    """
    maps = torch.stack(tuple(label_maps))
    scores, classes = maps[:, 0].float(), maps[:, 1].long()
    dense = scores.new_zeros(len(maps), num_classes, *maps.shape[3:]).scatter_(1, classes, scores)
    size = boxes[0].new_tensor([maps.shape[4], maps.shape[3]] * 2)
    rois = [(box * size)[None].to(dense) for box in boxes]
    whole = roi_align(dense, rois, 1, aligned=True).flatten(1)
    patches = roi_align(dense, rois, hw, aligned=True)
    flips = torch.as_tensor(flips, device=dense.device).view(-1, 1, 1, 1)
    patches = torch.where(flips, patches.flip(3), patches)
    return whole.softmax(1), patches.flatten(2).transpose(1, 2).softmax(2)


@MODELS.register_module()
class TokenLabelHead(ClsHead):
    """The head of `LV-ViT <https://arxiv.org/abs/2104.10858>`_: it classifies all tokens.

    It takes the tokens of an :class:`~projects.lvvit.LVViT` with ``out_type='token_label'``.
    The score of a class is that of the class token plus half of the highest among the patches.

    Patches learn from label maps, where the data samples have ``token_labels`` and ``crop_box``
    (:class:`~projects.lvvit.LoadTokenLabels` adds them). Without label maps, every
    patch learns the label of its image.

    Args:
        num_classes (int): Number of classes.
        in_channels (int): Number of channels of the tokens.
        cls_weight (float): Weight of the class token's loss. Defaults to 1.
        dense_weight (float): Weight of the patches' loss. Defaults to 1.
        label_smooth_val (float): Defaults to 0.1.
        topk (int | tuple): Accuracies to compute. Defaults to 1.
        init_cfg (dict, optional): Defaults to a normal distribution with a standard deviation of
            0.02, truncated.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        cls_weight: float = 1.0,
        dense_weight: float = 1.0,
        label_smooth_val: float = 0.1,
        topk=(1,),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
    ):
        super().__init__(topk=topk, init_cfg=init_cfg)
        self.num_classes = num_classes
        self.in_channels = in_channels
        self.cls_weight = cls_weight
        self.dense_weight = dense_weight
        self.label_smooth_val = label_smooth_val
        self.fc = nn.Linear(in_channels, num_classes)
        self.aux_fc = nn.Linear(in_channels, num_classes)

    def pre_logits(self, feats: tuple) -> torch.Tensor:
        """Take the tokens of the last stage, (B, 1 + L, C)."""
        return feats[-1][0]

    def forward(self, feats: tuple) -> torch.Tensor:
        tokens = self.pre_logits(feats)
        patches = self.aux_fc(tokens[:, 1:]).amax(1)
        return self.fc(tokens[:, 0]) + 0.5 * patches

    def _targets(self, data_samples: list[DataSample], hw: tuple[int, int]):
        """Smoothed targets of the class tokens, (B, K), and of the patches, (B, L or 1, K)."""
        if 'token_labels' in data_samples[0]:
            whole, patches = token_targets(
                [s.token_labels for s in data_samples],
                [s.crop_box for s in data_samples],
                [bool(s.get('flip', False)) for s in data_samples],
                self.num_classes,
                hw,
            )
        elif 'gt_score' in data_samples[0]:
            whole = torch.stack([s.gt_score for s in data_samples])
            patches = whole[:, None]
        else:
            labels = torch.cat([s.gt_label for s in data_samples])
            whole = F.one_hot(labels, self.num_classes).float()
            patches = whole[:, None]
        smooth = self.label_smooth_val
        return ((1 - smooth) * target + smooth / self.num_classes for target in (whole, patches))

    def loss(
        self, feats: tuple, data_samples: list[DataSample], **kwargs
    ) -> dict[str, torch.Tensor]:
        """Compute the cross entropies of the class tokens and of the patches.

        Args:
            feats (tuple): Its last item holds the tokens (B, 1 + L, C), the grid (height, width),
                and the share of an image's own tokens that its class token has seen.
            data_samples (List[DataSample]): With ``token_labels``, ``gt_score`` or ``gt_label``.
            **kwargs: Not used; heads of MMPretrain take such arguments.
        """
        tokens, hw, share = feats[-1]
        whole, patches = self._targets(data_samples, hw)
        whole = share * whole + (1 - share) * whole.flip(0)
        scores = self.fc(tokens[:, 0]).float().log_softmax(1)
        dense = self.aux_fc(tokens[:, 1:]).float().log_softmax(2)
        return dict(
            loss_cls=-self.cls_weight * (whole * scores).sum(1).mean(),
            loss_dense=-self.dense_weight * (patches * dense).sum(2).mean(),
        )
