"""Data sets that are not what they should be."""

import os.path as osp
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmengine.dataset import Compose


class AnnotationError(ValueError):
    """An annotation file with something wrong in it."""


# The last bytes of a complete file.
_ENDS = dict(JPEG=b'\xff\xd9', PNG=b'IEND')
_TAIL = 4096


def check_image(path: str) -> None:
    """Check an image file by its first and last bytes.

    OpenCV decodes the beginning of a truncated JPEG without an error, and
    images of up to 2^30 pixels, which a file of some kilobytes may declare.
    A file that Pillow does not know is left to who decodes it.

    Raises:
        OSError: If the file is missing or cannot be read.
        ValueError: If it is empty, truncated, or declares more pixels than
            Pillow allows.
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
            f'{2 * Image.MAX_IMAGE_PIXELS:,}, which PIL.Image.MAX_IMAGE_PIXELS'
            ' allows'
        ) from error
    except Exception as error:
        raise ValueError(f'the image {path!r} is damaged: {error}') from error


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
        checked = False
        for step in self.transforms:
            try:
                data = step(data)
            except Exception as error:
                name = ' and '.join(repr(p) for p in paths if p)
                text = str(error)
                if not text or not isinstance(error, (AssertionError, OSError, ValueError)):
                    text = f'{type(error).__name__} {text}'
                raise ValueError(
                    f'cannot load {name or "an image"} ({type(step).__name__}: {text})'
                ) from error
            if data is None:
                return None
            if not checked and self.num_labels is not None and 'gt_seg_map' in data:
                self._check_labels(data, paths[1])
                checked = True
        if not isinstance(data, dict) or 'inputs' not in data:
            raise ValueError(
                "the data set's pipeline gives no 'inputs': its last step must be a Pack...Inputs"
            )
        return data

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
                f'the label map {path!r} has the label {int(wrong.flat[0])}, '
                f'but there are {self.num_labels} classes (after '
                'reduce_zero_label, if set)'
            )


def _size(shape: Any) -> str:
    return 'x'.join(map(str, shape[:2]))


def check_items(dataset: Any) -> None:
    """From now on, errors while loading an item of a data set name the file.

    Args:
        dataset: Of MMEngine's kind, wrapped or not.
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
    inner = get('datasets')
    if inner is None:
        inner = get('dataset')
    if inner is None:
        yield dataset
        return
    for item in inner if isinstance(inner, (list, tuple)) else [inner]:
        yield from leaves(item)


@contextmanager
def checked_annotations(annotated: bool = False) -> Iterator[None]:
    """Check annotation files in COCO's format when pycocotools reads them.

    A second reading would take as long as the first.

    Args:
        annotated (bool): Whether there must be an annotation at all.
            Defaults to False.
    """
    try:
        from pycocotools.coco import COCO
    except ImportError:  # comes with MMDetection
        yield
        return
    read, index = COCO.__init__, COCO.createIndex

    def checked_read(self, annotation_file=None):
        self.annotation_file = annotation_file
        if annotation_file is not None and not osp.isfile(annotation_file):
            # A pipe or a device would not end.
            raise AnnotationError(f'there is no file {annotation_file!r}')
        try:
            read(self, annotation_file)
        except AnnotationError:
            raise
        except (ValueError, AssertionError, RecursionError) as error:
            raise AnnotationError(
                f'{annotation_file!r} is not an annotation file: {error}'
            ) from error

    def checked_index(self):
        if self.annotation_file is not None:
            check_coco(self.dataset, self.annotation_file, annotated)
        index(self)

    COCO.__init__, COCO.createIndex = checked_read, checked_index
    try:
        yield
    finally:
        COCO.__init__, COCO.createIndex = read, index


def check_coco(content: dict, path: str, annotated: bool = False) -> None:
    """Check the content of an annotation file in COCO's format.

    Args:
        content (dict): What the JSON file holds.
        path (str): Its name, for messages.
        annotated (bool): Whether there must be an annotation at all.
            Defaults to False.

    Raises:
        AnnotationError: If it lacks images or categories, or an entry of it
            is incomplete, refers to none, or has a box or a mask that is none.
            Boxes without area and polygons of two points are fine, OpenMMLab
            ignores them.
    """

    def fail(problem: str) -> None:
        raise AnnotationError(f'{path!r}: {problem}')

    ids = {}
    for part, keys in (('images', ('file_name', 'height', 'width')), ('categories', ('name',))):
        entries = content.get(part)
        if not isinstance(entries, list) or not entries:
            fail(f'there are no {part}')
        found = ids[part] = {}
        for entry in entries:
            if not isinstance(entry, dict) or not _is_id(entry.get('id')):
                fail(f'one of the {part} is {_short(entry)}, without an id')
            if entry['id'] in found:
                fail(f'two of the {part} have the id {entry["id"]}')
            found[entry['id']] = entry
            for key in keys:
                value = entry.get(key)
                if not (
                    value and isinstance(value, str)
                    if key in ('file_name', 'name')
                    else _is_number(value) and value > 0
                ):
                    fail(f'{key!r} of the entry {entry["id"]} of {part} is {_short(value)}')
    images, categories = ids['images'], ids['categories']
    annotations = content.get('annotations', [])
    if not isinstance(annotations, list):
        fail(f'its annotations are {_short(annotations)}, not a list')
    usable = False
    for entry in annotations:
        if not isinstance(entry, dict) or not _is_id(entry.get('id')):
            fail(f'one of the annotations is {_short(entry)}, without an id')
        problem = _problem(entry, images, categories)
        if problem:
            fail(f'the annotation {entry["id"]} has {problem}')
        usable = usable or (
            not entry.get('iscrowd') and entry['bbox'][2] > 0 and entry['bbox'][3] > 0
        )
    if annotated and not usable:
        fail('there are no annotations' + ' but crowds and boxes without area' * bool(annotations))


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f'{text[:80]} ...'


def _problem(entry: dict, images: dict, categories: dict) -> str | None:
    """What is wrong with an annotation."""
    for key, known in (('image_id', images), ('category_id', categories)):
        value = entry.get(key)
        if not _is_id(value) or value not in known:
            return f'the {key} {_short(value)}, which is none'
    box = entry.get('bbox')
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not _are_numbers(box)
        or box[2] < 0
        or box[3] < 0
    ):
        return f'the box {_short(box)}: it takes four finite numbers, x, y, width and height'
    if not _is_number(entry.get('area')):
        return f'the area {_short(entry.get("area"))}'
    mask = entry.get('segmentation')
    if not mask:
        return None
    if isinstance(mask, list):
        for polygon in mask:
            if not isinstance(polygon, list) or not _are_numbers(polygon) or len(polygon) % 2:
                return f'the polygon {_short(polygon)}: it takes pairs of finite coordinates'
        return None
    image = images[entry['image_id']]
    if not isinstance(mask, dict) or mask.get('size') != [image['height'], image['width']]:
        return (
            f"the mask {_short(mask)}, which is not of its image's size, "
            f'{image["height"]}x{image["width"]}'
        )
    # pycocotools takes what is not covered from memory at random.
    counts = mask.get('counts')
    runs = _decompress(counts) if isinstance(counts, str) else counts
    if (
        not isinstance(runs, list)
        or not all(isinstance(run, int) and run >= 0 for run in runs)
        or sum(runs) != image['height'] * image['width']
    ):
        return f'a mask whose runs, {_short(counts)}, do not fill its image'
    return None


def _decompress(text: str) -> list | None:
    """The runs of a mask in COCO's compressed form; None if it is none.

    Five bits a character, and one that says whether more follow; from the
    third on, the difference to the last but one.
    """
    runs: list = []
    run = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            return None
        run |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            run |= -1 << shift
        runs.append(run + (runs[-2] if len(runs) > 2 else 0))
        run = shift = 0
    return None if shift else runs


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
    )  # False for NaN


def _are_numbers(values: list) -> bool:
    """Whether all are finite, in one addition: there are millions."""
    try:
        return _is_number(sum(values))
    except (OverflowError, TypeError):
        return False
