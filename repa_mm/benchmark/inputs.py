"""What the measured models look at: data sets, noise, and their shapes."""

import copy
import math
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, FUNCTIONS, TRANSFORMS

from repa_mm.datasets.checks import check_items
from repa_mm.datasets.coco import AnnotationError, checked_annotations
from repa_mm.run import check_data, dataset_config

# Noise is as good as more noise.
NUM_NOISE = 4
# The largest share of this machine's memory for noise: what a model makes of it is larger.
MEMORY_SHARE = 1 / 8


def parse_size(text: str) -> tuple[int, int]:
    """Height and width from '800x1344'; a ValueError if the text is no size."""
    match = re.fullmatch(r'(\d+)[x,](\d+)', text.strip().lower())
    if not match or min(map(int, match.groups())) < 1:
        raise ValueError(f'{text!r} is no size: write HEIGHTxWIDTH, as 800x1344')
    return int(match[1]), int(match[2])


def check_memory(size: tuple[int, int], batch_size: int = 1) -> None:
    """Check that noise, as float32, leaves memory for a model; a ValueError if not."""
    if not hasattr(os, 'sysconf'):  # Windows
        return
    needed = NUM_NOISE * batch_size * 3 * math.prod(size) * 4
    total = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if needed > MEMORY_SHARE * total:
        raise ValueError(
            f'{NUM_NOISE} batches of {batch_size} images of {size[0]}x{size[1]} would take '
            f'{needed / 2**30:.1f} of the {total / 2**30:.1f} GiB of memory that this machine has, '
            'and leave too little for the model'
        )


class DatasetInputs:
    """Batches of a config's test set, through its test pipeline.

    A data set that is not there is a FileNotFoundError, an empty or unreadable one a ValueError.
    """

    real = True

    def __init__(self, cfg: Config, batch_size: int = 1) -> None:
        self.batch_size = batch_size
        instead = 'measure with noise: --synthetic 800x1344'
        try:
            check_data(cfg, 'test')
            with checked_annotations():
                self.dataset = DATASETS.build(cfg.test_dataloader.dataset)
        except FileNotFoundError as error:
            raise FileNotFoundError(f'{error}; or {instead}') from error
        except AnnotationError:
            raise
        except Exception as error:
            raise ValueError(
                f'cannot read the test data set ({type(error).__name__}: {error}); to {instead}'
            ) from error
        if len(self.dataset) < batch_size:
            raise ValueError(
                f'the test data set has {len(self.dataset)} images, fewer than a batch of '
                f'{batch_size}'
            )
        check_items(self.dataset)
        self._collate = _collate(cfg)

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def __call__(self, index: int) -> Any:
        first = index % len(self) * self.batch_size
        return self._collate([self.dataset[first + i] for i in range(self.batch_size)])

    def describe(self) -> str:
        return f'{type(self.dataset).__name__}, test pipeline, batches of {self.batch_size}'


class _Noise:
    """A few batches, over and over again."""

    real = False

    def __init__(self, size: tuple[int, int], batch_size: int, make: Callable[[], Any]) -> None:
        check_memory(size, batch_size)
        self.size, self.batch_size = size, batch_size
        self._batches = [make() for _ in range(NUM_NOISE)]

    def __call__(self, index: int) -> Any:
        return self._batches[index % NUM_NOISE]

    def describe(self) -> str:
        return f'noise, {self.batch_size}x3x{self.size[0]}x{self.size[1]}'


class NoiseInputs(_Noise):
    """Batches of noise (height and width ``size``), packed as by a config's test pipeline."""

    def __init__(self, cfg: Config, size: tuple[int, int], batch_size: int = 1) -> None:
        pipeline = dataset_config(cfg, 'test').pipeline
        steps = [s for s in pipeline if str(s['type']).rpartition('.')[2].startswith('Pack')]
        if not steps:
            raise ValueError('the test pipeline has no step Pack...Inputs to make an input with')
        pack, collate = TRANSFORMS.build(steps[-1]), _collate(cfg)
        generator = np.random.default_rng(0)
        meta = dict(img_path='noise', seg_map_path=None, scale=size[::-1], scale_factor=(1.0, 1.0))
        meta.update(dict.fromkeys(('ori_shape', 'img_shape', 'pad_shape'), size))
        meta.update(flip=False, flip_direction=None, reduce_zero_label=False, keep_ratio=True)

        def make() -> Any:
            noise = generator.integers(0, 256, (batch_size, *size, 3), np.uint8)
            return collate([pack(dict(meta, img=img, img_id=i)) for i, img in enumerate(noise)])

        super().__init__(size, batch_size, make)


class TensorInputs(_Noise):
    """Normalized noise for a backbone alone, (N, C, H, W) on a device."""

    def __init__(
        self,
        size: tuple[int, int],
        batch_size: int = 1,
        device='cpu',
        channels_last: bool = False,
        channels: int = 3,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        layout = torch.channels_last if channels_last else torch.contiguous_format

        def make() -> torch.Tensor:
            batch = torch.randn(batch_size, channels, *size, generator=generator)
            return batch.to(device, memory_format=layout)

        super().__init__(size, batch_size, make)


def _collate(cfg: Config) -> Callable:
    kwargs = copy.deepcopy(dict(cfg.test_dataloader.get('collate_fn', dict(type='pseudo_collate'))))
    function = kwargs.pop('type')
    if isinstance(function, str):
        function = FUNCTIONS.get(function)
    return lambda samples: function(samples, **kwargs)


def shapes_of(batch: Any) -> list[int]:
    """Shape (N, 3, H, W) of a batch; H and W are those of the largest image."""
    images = batch['inputs'] if isinstance(batch, dict) else batch
    shapes = [tuple(image.shape) for image in images]
    return [len(shapes), *map(max, zip(*shapes))]
