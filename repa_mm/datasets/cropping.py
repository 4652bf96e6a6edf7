"""Crops of large images, to fit and to calibrate on."""

import torch

#: Images are cropped to this height and width, since the memory grows with their pixels. A fit
#: draws a few hundred tokens of each image.
MAX_SIZE = 416


def cropped(data: dict, size: int) -> dict:
    """Crop the image of a batch of one at random, if it is larger.

    Args:
        data (dict): From a data loader, with one image (3, H, W).
        size (int): Largest height and width.
    """
    (image,), (sample,) = data['inputs'], data['data_samples']
    generator = torch.Generator().manual_seed(int(image.sum()))
    for dim in (1, 2):
        start = int(torch.randint(max(image.shape[dim] - size, 0) + 1, (), generator=generator))
        image = image.narrow(dim, start, min(size, image.shape[dim]))
    sample = sample.clone()
    sample.set_metainfo(dict(img_shape=tuple(image.shape[1:])))
    return dict(data, inputs=[image], data_samples=[sample])
