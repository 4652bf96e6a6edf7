"""Checks of annotation files in COCO's format."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class AnnotationError(ValueError):
    """An annotation file with something wrong in it."""


@contextmanager
def checked_annotations(annotated: bool = False) -> Iterator[None]:
    """Check what MMDetection's data sets read in COCO's format, while they are built.

    MMDetection drops the content of the file afterwards, and a second reading would take as long
    as the first.

    Args:
        annotated (bool): Whether there must be an annotation at all. Defaults to False.
    """
    try:
        from mmdet.datasets import CocoDataset
    except ImportError:
        yield
        return
    api = CocoDataset.COCOAPI

    class CheckedCOCO(api):
        def __init__(self, annotation_file: str | None = None) -> None:
            self.path = annotation_file
            try:
                super().__init__(annotation_file)
            except AnnotationError:
                raise
            except (ValueError, AssertionError, RecursionError) as error:
                problem = f'{self.path!r} is not an annotation file: {error}'
                raise AnnotationError(problem) from error

        def createIndex(self) -> None:
            check_coco(self.dataset, self.path, annotated)
            super().createIndex()

        def get_cat_ids(self, cat_names: Sequence[str] = (), *args, **kwargs) -> list:
            ids = super().get_cat_ids(cat_names, *args, **kwargs)
            check_categories([self.cats[i]['name'] for i in ids], cat_names, self.path)
            return ids

    CocoDataset.COCOAPI = CheckedCOCO
    try:
        yield
    finally:
        CocoDataset.COCOAPI = api


def check_categories(found: Sequence[str], classes: Sequence[str], path: str) -> None:
    """Check that the categories of a file are numbered like the classes.

    MMDetection numbers the labels in the order of the file, whatever the order of the classes.

    Args:
        found (Sequence[str]): The names of the categories of the file that are classes, in the
            order of the file.
        classes (Sequence[str]): ``metainfo.classes`` of the data set.
        path (str): The name of the file, for messages.

    Raises:
        AnnotationError: If one is missing, there twice, or in another place.
    """
    classes = [classes] if isinstance(classes, str) else list(classes)
    if len(set(found)) < len(classes):
        missing = next(name for name in classes if name not in found)
        raise AnnotationError(
            f'other class names than metainfo.classes: {len(set(found))} of the {len(classes)} '
            f'are in {path!r}, {missing!r} is not'
        )
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice:
        raise AnnotationError(
            f'{path!r} has {found.count(twice)} categories named {twice!r}: give their annotations '
            'one category'
        )
    for label, (own, name) in enumerate(zip(found, classes)):
        if own != name:
            raise AnnotationError(
                f'the categories of {path!r} stand in another order than metainfo.classes, and '
                f'MMDetection numbers labels in the order of the file: label {label} would be '
                f'{own!r} in the file, but {name!r} in the classes. Sort the categories of the '
                'file like the classes, or metainfo.classes like the file'
            )


def check_coco(content: dict, path: str, annotated: bool = False) -> None:
    """Check the content of an annotation file in COCO's format.

    Args:
        content (dict): What the JSON file holds.
        path (str): The name of the file, for messages.
        annotated (bool): Whether there must be an annotation at all. Defaults to False.

    Raises:
        AnnotationError: If the file lacks images or categories, or an entry is incomplete, refers
            to nothing, or has a malformed box or mask. Boxes without area and polygons of two
            points are fine, OpenMMLab ignores them.
    """

    def fail(problem: str) -> None:
        raise AnnotationError(f'{path!r}: {problem}')

    texts = ('file_name', 'name')
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
                is_text = value and isinstance(value, str)
                if not (is_text if key in texts else _is_number(value) and value > 0):
                    fail(f'{key!r} of the entry {entry["id"]} of {part} is {_short(value)}')
    annotations = content.get('annotations', [])
    if not isinstance(annotations, list):
        fail(f'its annotations are {_short(annotations)}, not a list')
    usable = False
    for entry in annotations:
        if not isinstance(entry, dict) or not _is_id(entry.get('id')):
            fail(f'one of the annotations is {_short(entry)}, without an id')
        problem = _problem(entry, ids['images'], ids['categories'])
        if problem:
            fail(f'the annotation {entry["id"]} has {problem}')
        usable = usable or not entry.get('iscrowd') and min(entry['bbox'][2:]) > 0
    if annotated and not usable:
        fail('there are no annotations' + ' but crowds and boxes without area' * bool(annotations))


def renumber_annotation_0(coco: Any) -> int | None:
    """Give an annotation with the id 0 another one, in memory; return that, or None.

    While pycocotools compares detections with annotations, 0 stands for "no annotation".

    Args:
        coco (pycocotools.coco.COCO): What an annotation file was read to.
    """
    entry = coco.anns.pop(0, None)
    if entry is None:
        return None
    entry['id'] = 1 + max((i for i in coco.anns if isinstance(i, int)), default=0)
    coco.anns[entry['id']] = entry
    return entry['id']


def _problem(entry: dict, images: dict, categories: dict) -> str | None:
    """What is wrong with an annotation."""
    for key, known in (('image_id', images), ('category_id', categories)):
        value = entry.get(key)
        if not _is_id(value) or value not in known:
            return f'the {key} {_short(value)}, which is none'
    box = entry.get('bbox')
    if not isinstance(box, list) or len(box) != 4 or not _are_numbers(box) or min(box[2:]) < 0:
        return f'the box {_short(box)}: it takes four finite numbers, x, y, width and height'
    if not _is_number(entry.get('area')):
        return f'the area {_short(entry.get("area"))}'
    mask = entry.get('segmentation')
    if isinstance(mask, list):
        for polygon in mask:
            if not isinstance(polygon, list) or not _are_numbers(polygon) or len(polygon) % 2:
                return f'the polygon {_short(polygon)}: it takes pairs of finite coordinates'
    elif mask:
        size = [images[entry['image_id']][key] for key in ('height', 'width')]
        if not isinstance(mask, dict) or mask.get('size') != size:
            return f"the mask {_short(mask)}, which is not of its image's size, {size[0]}x{size[1]}"
        if not _fills(mask, size[0] * size[1]):
            return f'a mask whose runs, {_short(mask.get("counts"))}, do not fill its image'
    return None


def _fills(mask: dict, num_pixels: int) -> bool:
    """Whether the runs of a mask are those of its image, as far as pycocotools can tell."""
    runs = mask.get('counts')
    if isinstance(runs, list):
        return all(isinstance(run, int) and run >= 0 for run in runs) and sum(runs) == num_pixels
    from pycocotools import mask as mask_utils

    return isinstance(runs, str) and mask_utils.area(mask) <= num_pixels


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # The comparison is False for NaN.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12


def _are_numbers(values: list) -> bool:
    """Whether all are finite, in one addition: there are millions."""
    try:
        return _is_number(sum(values))
    except (OverflowError, TypeError):
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f'{text[:80]} ...'
