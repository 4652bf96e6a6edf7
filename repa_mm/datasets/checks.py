"""Checks of images and label maps while they are loaded."""

import logging
import os
import os.path as osp
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from mmengine.dataset import Compose
from mmengine.logging import print_log

# The last bytes of a complete file.
_ENDS = dict(JPEG=b'\xff\xd9', PNG=b'IEND')
_TAIL = 4096


def check_image(path: str) -> None:
    """Check an image file by its first and last bytes.

    OpenCV decodes the beginning of a truncated JPEG without an error, and images of up to 2^30
    pixels, which a file of some kilobytes may declare. A file that Pillow does not know is left to
    what decodes it.

    Raises:
        OSError: If the file is missing or cannot be read.
        ValueError: If it is empty, truncated, or declares more pixels than Pillow allows.
    """
    from PIL import Image, UnidentifiedImageError

    if not osp.exists(path):
        raise FileNotFoundError(f'no image at {path!r}')
    if not osp.isfile(path):
        kind = 'folder' if osp.isdir(path) else 'device or pipe'
        raise OSError(f'{path!r} is a {kind}, not an image')
    size = osp.getsize(path)
    if not size:
        raise ValueError(f'the image {path!r} is empty')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with Image.open(path) as image:
                end = _ENDS.get(image.format)
                with open(path, 'rb') as file:
                    file.seek(max(size - _TAIL, 0))
                    complete = end is None or end in file.read()
                if not complete:
                    image.load()
    except UnidentifiedImageError:
        return
    except Image.DecompressionBombError as error:
        raise ValueError(
            f'the image {path!r} is refused: it declares more pixels than '
            f'{2 * Image.MAX_IMAGE_PIXELS:,}, which PIL.Image.MAX_IMAGE_PIXELS allows'
        ) from error
    except Exception as error:
        raise ValueError(f'the image {path!r} is damaged: {error}') from error


_stderr = threading.Lock()


@contextmanager
def _named_stderr(name: str) -> Iterator[None]:
    """Put a name before what C libraries print meanwhile, such as libjpeg's warnings."""
    # Where another thread does so at the moment, this one prints without a name.
    if not _stderr.acquire(blocking=False):
        yield
        return
    stderr, (reader, writer) = os.dup(2), os.pipe()
    os.set_blocking(writer, False)  # what does not fit is dropped
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        text = b' '.join(os.read(reader, 2**16).split()).decode(errors='replace')
        os.close(reader)
        os.close(stderr)
        _stderr.release()
        if text:
            print_log(f'{name}: {text}', 'current', logging.WARNING)


class CheckedPipeline(Compose):
    """A data pipeline whose errors name the file.

    Made from a data set's own by :func:`check_items`.
    """

    num_labels: int | None = None
    ignore_index = 255

    def __call__(self, data: dict) -> dict | None:
        paths = [data.get(key) for key in ('img_path', 'seg_map_path')]
        for path in paths:
            # Other paths are for another storage backend.
            if isinstance(path, str) and osp.exists(path):
                check_image(path)
        name = ' and '.join(repr(path) for path in paths if path) or 'an image'
        sized = [data.get(key) for key in ('height', 'width')]
        for step in self.transforms:
            image, labels = (data.get(key) is None for key in ('img', 'gt_seg_map'))
            try:
                with _named_stderr(name) if image else nullcontext():
                    data = step(data)
            except Exception as error:
                text = str(error)
                if not text or not isinstance(error, (AssertionError, OSError, ValueError)):
                    text = f'{type(error).__name__} {text}'
                raise ValueError(f'cannot load {name} ({type(step).__name__}: {text})') from error
            if data is None:
                return None
            if image and data.get('img') is not None and None not in sized:
                self._check_size(data['img'], sized, name)
            if labels and self.num_labels is not None and 'gt_seg_map' in data:
                self._check_labels(data, paths[1])
        if not isinstance(data, dict) or 'inputs' not in data:
            raise ValueError(
                "the data set's pipeline gives no 'inputs': its last step must be a Pack...Inputs"
            )
        return data

    def _check_size(self, image: Any, size: list, name: str) -> None:
        if list(image.shape[:2]) != size:
            raise ValueError(
                f'{name} is of {_size(image.shape)} pixels, but of {_size(size)} in its annotation '
                '(height x width): its boxes would be somewhere else'
            )

    def _check_labels(self, data: dict, path: str) -> None:
        labels, size = data['gt_seg_map'], data.get('ori_shape')
        if labels.ndim != 2:
            raise ValueError(f'the label map {path!r} has {labels.shape[-1]} channels, not one')
        if size is not None and labels.shape != tuple(size[:2]):
            raise ValueError(
                f'the label map {path!r} is of {_size(labels.shape)} pixels, '
                f'its image {data.get("img_path")!r} of {_size(size)}'
            )
        wrong = labels[(labels >= self.num_labels) & (labels != self.ignore_index)]
        if wrong.size:
            raise ValueError(
                f'the label map {path!r} has the label {int(wrong.flat[0])}, but there are '
                f'{self.num_labels} classes (after reduce_zero_label, if set)'
            )


def _size(shape: Any) -> str:
    return 'x'.join(map(str, shape[:2]))


def check_items(dataset: Any) -> None:
    """Let errors while an item of a data set is loaded name the file from now on.

    Args:
        dataset (BaseDataset): Of MMEngine's kind, wrapped or not.
    """
    for inner in leaves(dataset):
        pipeline = getattr(inner, 'pipeline', None)
        if type(pipeline) is not Compose:
            continue
        pipeline.__class__ = CheckedPipeline
        if hasattr(inner, 'reduce_zero_label'):  # MMSegmentation's
            pipeline.num_labels = len(inner.metainfo.get('classes') or ()) or None
            pipeline.ignore_index = getattr(inner, 'ignore_index', 255)


def leaves(dataset: Any) -> Iterator[Any]:
    """The data sets, or their configs, inside any wrappers."""
    get = dataset.get if isinstance(dataset, dict) else (lambda key: getattr(dataset, key, None))
    inner = next((get(key) for key in ('datasets', 'dataset') if get(key) is not None), None)
    if inner is None:
        yield dataset
        return
    for item in inner if isinstance(inner, (list, tuple)) else [inner]:
        yield from leaves(item)
