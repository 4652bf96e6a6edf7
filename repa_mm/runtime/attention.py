"""Pictures of what a vision transformer attends to."""

import os.path as osp

import cv2
import mmcv
import numpy as np
import torch
import torch.nn as nn

from repa_mm.datasets.checks import check_image
from repa_mm.files import check_output, write_bytes
from repa_mm.runtime.knn import backbone_of

GAP = 8


def class_attention(backbone: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Attention of the class token to the patches, in the last block.

    Args:
        backbone (nn.Module): MMPretrain's ``VisionTransformer``, or a RePa one in either form.
        images (torch.Tensor): (N, 3, H, W), normalized.

    Returns:
        torch.Tensor: (N, number of heads, H / patch size, W / patch size). Each head sums to at
        most 1: the rest is attention to the class token itself.

    Raises:
        ValueError: If the backbone has no class token, or no layers with such attention.
    """
    layers = getattr(backbone, 'layers', None)
    attention = getattr(layers[-1], 'attn', None) if layers else None
    if getattr(backbone, 'cls_token', None) is None or not hasattr(attention, 'qkv'):
        raise ValueError(
            f'a {type(backbone).__name__} has no class token whose attention could be drawn: '
            'vision transformers have one'
        )
    sizes, taken = [], []
    handles = [
        backbone.patch_embed.register_forward_hook(lambda *args: sizes.append(args[-1][1])),
        attention.qkv.register_forward_hook(lambda *args: taken.append(args[-1])),
    ]
    try:
        with torch.no_grad():
            backbone(images)
    finally:
        for handle in handles:
            handle.remove()
    if not taken:
        raise ValueError(
            f'a {type(attention).__name__} does not compute queries and keys with its layer qkv: '
            'the deploy form of parallel branches does'
        )
    (h, w), qkv = sizes[0], taken[0]
    heads = attention.num_heads
    query, key, _ = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scale = getattr(attention, 'scale', None) or query.shape[-1] ** -0.5
    scores = scale * query[:, :, :1] @ key.transpose(-1, -2)
    return scores.softmax(-1)[:, :, 0, -h * w :].unflatten(-1, (h, w))


def draw_attention(
    model: nn.Module, image: str, out: str, size: int = 480, network: str = 'teacher'
) -> np.ndarray:
    """Draw the attention of the class token, one tile for each head, beside the image.

    Args:
        model (nn.Module): From :func:`~repa_mm.runtime.init_model`.
        image (str): Path of the image.
        out (str): Picture to write.
        size (int): Side of the square that the image is resized to, in pixels. Defaults to 480.
        network (str): 'teacher' or 'student', of a model that has both. Defaults to 'teacher'.

    Returns:
        np.ndarray: The picture, BGR.

    Raises:
        FileNotFoundError, ValueError: If the image, the model or the output cannot be used.
    """
    check_output(out, image)
    if not cv2.haveImageWriter(f'picture{osp.splitext(out)[1]}'):
        raise ValueError(f'{out!r} is not the name of a picture, such as attention.png')
    check_image(image)
    pixels = mmcv.imread(image)
    if pixels is None:
        raise ValueError(f'{image!r} is not an image that can be read')
    backbone = backbone_of(model, network)
    patch = getattr(backbone, 'patch_embed', None)
    stride = patch.projection.stride[0] if hasattr(patch, 'projection') else 1
    if size < stride:
        raise ValueError(f'the size must be at least that of a patch, {stride}, but is {size}')
    size -= size % stride
    pixels = mmcv.imresize(pixels, (size, size), interpolation='bicubic')
    batch = dict(inputs=torch.from_numpy(pixels).permute(2, 0, 1)[None], data_samples=None)
    images = model.data_preprocessor(batch)['inputs']
    maps = class_attention(backbone, images.to(next(model.parameters()).device))[0].cpu().numpy()
    tiles = [pixels]
    for each in maps:
        grey = (255 * each / each.max()).astype(np.uint8)
        grey = cv2.resize(grey, (size, size), interpolation=cv2.INTER_NEAREST)
        tiles.append(cv2.applyColorMap(grey, cv2.COLORMAP_VIRIDIS))
    gap = np.full((size, GAP, 3), 255, np.uint8)
    picture = np.hstack([part for tile in tiles for part in (tile, gap)][:-1])
    write_bytes(out, cv2.imencode(osp.splitext(out)[1], picture)[1].tobytes())
    return picture
