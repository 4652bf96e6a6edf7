"""Images to fit, calibrate and compare on: those of a config or of a folder, and crops."""

import io
import os.path as osp
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dataset import BaseDataset, pseudo_collate
from mmengine.registry import DATASETS
from mmpretrain.models.utils.attention import ShiftWindowMSA
from torch.utils.data import Dataset

from repa_mm.io.configs import dataset_config

#: Images are cropped to this height and width, since the memory grows with their pixels. A fit
#: draws a few hundred tokens of each image.
MAX_SIZE = 416

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


class ImageFolder(BaseDataset):
    """The images of a folder and its subfolders, sorted by path, without their annotations."""

    def load_data_list(self) -> list[dict]:
        files = (str(p) for p in Path(self.data_root).rglob('*') if p.suffix.lower() in SUFFIXES)
        infos = [dict(img_path=p, img_id=i, seg_fields=[]) for i, p in enumerate(sorted(files))]
        if not infos:
            suffixes = ', '.join(SUFFIXES)
            raise FileNotFoundError(f'no image in the folder {self.data_root!r} ({suffixes})')
        return infos


def evenly(number: int, items: Sequence) -> list:
    """Return ``number`` of the items, from all over them, or all if there are fewer.

    The first items would be no sample: a folder of classes begins with one class.
    """
    number = min(number, len(items))
    return [items[i * len(items) // number] for i in range(number)]


def cropped(data: dict, size: int = MAX_SIZE) -> dict:
    """Crop the image of a batch of one at random to at most ``size`` in height and width."""
    (image,), (sample,) = data['inputs'], data['data_samples']
    generator = torch.Generator().manual_seed(int(image.sum()))
    for dim in (1, 2):
        start = int(torch.randint(max(image.shape[dim] - size, 0) + 1, (), generator=generator))
        image = image.narrow(dim, start, min(size, image.shape[dim]))
    sample = sample.clone()
    sample.set_metainfo(dict(img_shape=tuple(image.shape[1:])))
    return dict(data, inputs=[image], data_samples=[sample])


def build_images(cfg: Config, split: str, folder: str | None = None) -> Dataset:
    """Build a data set of a config's or a folder's images, also of those without objects.

    The images go through the test pipeline. See :func:`read_images` for the arguments.
    """
    pipeline = dataset_config(cfg, 'test').pipeline
    if folder:
        pipeline = [step for step in pipeline if 'Annotations' not in step['type']]
        source = dict(type=ImageFolder, data_root=osp.abspath(folder), test_mode=True)
    else:
        source = dict(dataset_config(cfg, split))
        source.pop('filter_cfg', None)
    source['pipeline'] = pipeline
    try:
        with redirect_stdout(io.StringIO()):  # COCO prints
            return DATASETS.build(source)
    except FileNotFoundError as error:
        if folder:
            raise
        raise FileNotFoundError(
            f"the config's {split} data are not there ({error}): run where its paths lead to them, "
            'change the config, or give a folder of images (--images)'
        ) from error


def read_images(cfg: Config, split: str, number: int, folder: str | None = None) -> list[dict]:
    """Read a number of images of a split, 'train', 'val' or 'test', through the test pipeline.

    They are taken evenly; with a ``folder``, from there instead. Returns batches of one image, as
    from a data loader: ``inputs`` and ``data_samples``.

    Raises:
        FileNotFoundError: If the data are not there.
    """
    dataset = build_images(cfg, split, folder)
    return [pseudo_collate([dataset[i]]) for i in evenly(number, range(len(dataset)))]


def input_channels(model: nn.Module) -> int:
    """Return the number of channels of a model's images: those of its first convolution."""
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)


def input_size(model: nn.Module) -> tuple[int, int]:
    """Return the height and width in pixels that a model is made for, or else that it accepts.

    The last stage of a Swin gets a whole window, as MMPretrain's refuses smaller maps.
    """
    windows = [32 * m.window_size for m in model.modules() if isinstance(m, ShiftWindowMSA)]
    made_for = (m.img_size for m in model.modules() if getattr(m, 'img_size', None))
    size = next(made_for, max([224, *windows]))
    return (size, size) if isinstance(size, int) else tuple(size)
