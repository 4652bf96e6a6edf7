"""Pictures of predictions on validation scenes."""

from collections.abc import Sequence

import cv2
import numpy as np
from mmengine.structures import BaseDataElement

from repa_mm.demo.dataset import DIGITS

# One colour (BGR) a digit, bright enough for dark text on it and for dark photographs.
COLOURS = [
    (80, 220, 255), (90, 160, 255), (120, 120, 255), (220, 130, 255), (255, 130, 200),
    (255, 170, 110), (255, 225, 90), (190, 240, 90), (90, 235, 130), (120, 245, 210),
]  # fmt: skip
WHITE, INK, PAPER = (255, 255, 255), (30, 30, 30), (245, 245, 245)
GAP = 8
FONT = cv2.FONT_HERSHEY_SIMPLEX
SCORE_THR = 0.5  # detections below it are left out


def draw(samples: Sequence[BaseDataElement], title: str, path: str) -> None:
    """Write a picture of predictions, beside or over what is true.

    Args:
        samples (Sequence[BaseDataElement]): Scenes as detectors or segmentors of the demo's configs
            return them, with ``gt_instances`` and ``pred_instances`` or ``gt_sem_seg`` and
            ``pred_sem_seg``, and as NumPy arrays.
        title (str): Line above the scenes.
        path (str): The picture to write.
    """
    if 'pred_sem_seg' in samples[0]:
        tiles = [_segmentation_tile(sample, 260) for sample in samples]
        page = _page(tiles, 2, title, dict(zip(DIGITS, COLOURS)))
    else:
        tiles = [_detection_tile(sample, 400) for sample in samples]
        text = f'prediction, class and score (at least {SCORE_THR:g})'
        page = _page(tiles, 4, title, {text: COLOURS[0], 'ground truth': WHITE})
    cv2.imwrite(path, page)


def _detection_tile(sample: BaseDataElement, tile: int) -> np.ndarray:
    """A scene with predicted boxes (and masks), and the true boxes in thin white."""
    image, scale = _read(sample.img_path, tile)
    predicted = sample.pred_instances
    scores = predicted.scores
    # The most certain ones come last, so that they lie on top.
    keep = [i for i in scores.argsort(kind='stable') if scores[i] >= SCORE_THR]
    colours = [COLOURS[predicted.labels[i]] for i in keep]
    boxes = [predicted.bboxes[i].astype(float) * scale for i in keep]
    true_boxes = [box.astype(float) * scale for box in sample.gt_instances.bboxes]
    if 'masks' in predicted:
        for i, colour in zip(keep, colours):
            _draw_mask(image, predicted.masks[i], colour)
    # The dark edge keeps the box of a missed digit visible on a bright background.
    for box in true_boxes:
        _rectangle(image, box, INK, 3)
    for box, colour in zip(boxes, colours):
        _rectangle(image, box, colour, 3)
    for box in true_boxes:
        _rectangle(image, box, WHITE, 1)
    # Names come last, so that no box runs through one.
    for i, box, colour in zip(keep, boxes, colours):
        _label(image, f'{DIGITS[predicted.labels[i]]} {scores[i]:.2f}', box, colour)
    return image


def _segmentation_tile(sample: BaseDataElement, tile: int) -> np.ndarray:
    """A scene, its true labels and its predicted labels, side by side."""
    parts = {
        'scene': _read(sample.img_path, tile)[0],
        'ground truth': _colour_labels(sample.gt_sem_seg.data[0], tile),
        'prediction': _colour_labels(sample.pred_sem_seg.data[0], tile),
    }
    return np.hstack([_captioned(part, name) for name, part in parts.items()])


def _read(path: str, tile: int) -> tuple[np.ndarray, float]:
    """A square image at ``tile`` pixels, and the factor by which it grew."""
    image = cv2.imread(path)
    scale = tile / max(image.shape[:2])
    return cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC), scale


def _rectangle(image: np.ndarray, box: np.ndarray, colour: tuple, thickness: int) -> None:
    x1, y1, x2, y2 = (int(round(v)) for v in box)
    cv2.rectangle(image, (x1, y1), (x2 - 1, y2 - 1), colour, thickness)


def _label(image: np.ndarray, text: str, box: np.ndarray, colour: tuple) -> None:
    """Text on a coloured strip above a box, or inside it at the upper edge of the image."""
    (width, height), base = cv2.getTextSize(text, FONT, 0.5, 1)
    x = int(np.clip(round(box[0]) - 1, 0, image.shape[1] - width - 6))
    y = int(round(box[1])) - height - base - 3
    if y < 0:
        y = max(int(round(box[1])), 0)
    cv2.rectangle(image, (x, y), (x + width + 5, y + height + base + 2), colour, -1)
    cv2.putText(image, text, (x + 3, y + height + 2), FONT, 0.5, INK, 1, cv2.LINE_AA)


def _draw_mask(image: np.ndarray, mask: np.ndarray, colour: tuple) -> None:
    mask = mask.astype(np.float32)
    inside = cv2.resize(mask, image.shape[1::-1], interpolation=cv2.INTER_LINEAR) >= 0.5
    image[inside] = (0.4 * image[inside] + 0.6 * np.array(colour)).astype(np.uint8)
    outline, _ = cv2.findContours(inside.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    cv2.drawContours(image, outline, -1, INK, 1)


def _colour_labels(labels: np.ndarray, tile: int) -> np.ndarray:
    image = np.array([(60, 60, 60), *COLOURS], np.uint8)[labels]
    return cv2.resize(image, (tile, tile), interpolation=cv2.INTER_NEAREST)


def _captioned(image: np.ndarray, caption: str) -> np.ndarray:
    image = cv2.copyMakeBorder(image, 0, 26, 0, 3, cv2.BORDER_CONSTANT, value=PAPER)
    cv2.putText(image, caption, (2, image.shape[0] - 9), FONT, 0.5, INK, 1, cv2.LINE_AA)
    return image


def _page(tiles: list[np.ndarray], columns: int, title: str, legend: dict) -> np.ndarray:
    """Tiles of one size in a grid under a title and a legend of texts and their colours."""
    height, width = tiles[0].shape[:2]
    rows = -(-len(tiles) // columns)
    head = 76
    shape = head + rows * (height + GAP), columns * (width + GAP) + GAP, 3
    page = np.full(shape, PAPER, np.uint8)
    cv2.putText(page, title, (GAP, 30), FONT, 0.75, INK, 2, cv2.LINE_AA)
    x = GAP
    for text, colour in legend.items():
        cv2.rectangle(page, (x, 46), (x + 22, 64), colour, -1)
        cv2.rectangle(page, (x, 46), (x + 22, 64), INK, 1)
        cv2.putText(page, text, (x + 30, 61), FONT, 0.55, INK, 1, cv2.LINE_AA)
        x += 54 + cv2.getTextSize(text, FONT, 0.55, 1)[0][0]
    for i, tile in enumerate(tiles):
        y = head + i // columns * (height + GAP)
        x = GAP + i % columns * (width + GAP)
        page[y : y + height, x : x + width] = tile
    return page
