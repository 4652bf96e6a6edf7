"""Transforms that load the label maps of images, and note which part of an image a crop shows."""

import os.path as osp

import torch
from mmcv.transforms import BaseTransform
from mmcv.transforms.utils import cache_random_params
from mmengine.registry import TRANSFORMS
from mmpretrain.datasets.transforms import RandomResizedCrop


@TRANSFORMS.register_module()
class LoadTokenLabels(BaseTransform):
    """Load the label map of an image.

    The layout is that of the `token labeling project
    <https://github.com/zihangJiang/TokenLabeling>`_: for an image
    ``.../n01440764/n01440764_18.JPEG`` the file ``label_root/n01440764/n01440764_18.pt`` holds one
    tensor of shape (2, 5, H, W), the five highest scores at every place and their classes.

    Required keys: img_path. Added keys: token_labels.

    Args:
        label_root (str, optional): The folder. None (default) leaves the images without label maps:
            their patches learn the label of the image.
    """

    def __init__(self, label_root: str | None = None) -> None:
        self.label_root = label_root

    def transform(self, results: dict) -> dict:
        """Add the map."""
        if self.label_root is None:
            return results
        folder, image = osp.split(results['img_path'])
        path = osp.join(self.label_root, osp.basename(folder), image.split('.')[0] + '.pt')
        results['token_labels'] = torch.load(path, weights_only=True)
        return results

    def __repr__(self) -> str:
        return f'{type(self).__name__}(label_root={self.label_root!r})'


@TRANSFORMS.register_module()
class RandomResizedCropWithBox(RandomResizedCrop):
    """MMPretrain's ``RandomResizedCrop`` that notes where it has cropped.

    Added keys: crop_box, a (4, ) tensor of left, top, right and bottom as shares of the image's
    width and height.
    """

    def transform(self, results: dict) -> dict:
        height, width = results['img'].shape[:2]
        with cache_random_params(self):
            top, left, h, w = self.rand_crop_params(results['img'])
            results = super().transform(results)
        results['crop_box'] = torch.tensor(
            [left / width, top / height, (left + w) / width, (top + h) / height]
        )
        return results
