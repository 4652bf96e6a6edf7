"""Pictures of predictions on validation scenes."""

from collections.abc import Sequence

import cv2
import numpy as np

from repa_mm.demo.dataset import DIGITS

# One colour (BGR) a digit, bright enough for dark text on it and for dark photographs.
COLOURS = [
    (80, 220, 255), (90, 160, 255), (120, 120, 255), (220, 130, 255), (255, 130, 200),
    (255, 170, 110), (255, 225, 90), (190, 240, 90), (90, 235, 130), (120, 245, 210),
]  # fmt: skip
WHITE, INK, PAPER = (255, 255, 255), (30, 30, 30), (245, 245, 245)
GAP = 8
FONT = cv2.FONT_HERSHEY_SIMPLEX


def draw_detections(
    predictions: Sequence[dict],
    ground_truth: dict[int, list[tuple[Sequence[float], int]]],
    title: str,
    score_thr: float = 0.5,
    columns: int = 4,
    tile: int = 400,
) -> np.ndarray:
    """A grid of scenes with predicted boxes (and masks), and the true boxes in thin white.

    Args:
        predictions (Sequence[dict]): As :func:`repa_mm.demo.report.compare_detections` takes them,
            with ``img_path``.
        ground_truth (dict[int, list[tuple]]): For each image id, boxes (x1, y1, x2, y2 in pixels)
            and their labels.
        title (str): Line above the grid.
        score_thr (float): Predictions below this score are left out. Defaults to 0.5.
        columns (int): Scenes in a row. Defaults to 4.
        tile (int): Width and height of a scene in the picture, in pixels. Defaults to 400.

    Returns:
        np.ndarray: BGR image, uint8 of (height, width, 3).
    """
    tiles = []
    for prediction in predictions:
        image, scale = _read(prediction['img_path'], tile)
        instances = prediction['pred_instances']
        scores = np.asarray(instances['scores'])
        # The most certain ones come last, so that they lie on top.
        keep = [i for i in scores.argsort(kind='stable') if scores[i] >= score_thr]
        labels = [int(instances['labels'][i]) for i in keep]
        boxes = [np.asarray(instances['bboxes'][i], float) * scale for i in keep]
        true_boxes = [np.asarray(b, float) * scale for b, _ in ground_truth[prediction['img_id']]]
        if 'masks' in instances:
            for i, label in zip(keep, labels):
                _draw_mask(image, instances['masks'][i], COLOURS[label])
        # The dark edge keeps the box of a missed digit visible on a bright background.
        for box in true_boxes:
            _rectangle(image, box, INK, 3)
        for box, label in zip(boxes, labels):
            _rectangle(image, box, COLOURS[label], 3)
        for box in true_boxes:
            _rectangle(image, box, WHITE, 1)
        # Names come last, so that no box runs through one.
        for i, box, label in zip(keep, boxes, labels):
            _label(image, f'{DIGITS[label]} {scores[i]:.2f}', box, COLOURS[label])
        tiles.append(image)
    prediction = f'prediction, class and score (at least {score_thr:g})'
    return _page(tiles, columns, title, {prediction: COLOURS[0], 'ground truth': WHITE})


def draw_segmentations(
    predictions: Sequence[dict], title: str, columns: int = 2, tile: int = 260
) -> np.ndarray:
    """Scenes, each as the image, its true labels and its predicted labels side by side.

    Args:
        predictions (Sequence[dict]): As :func:`repa_mm.demo.report.compare_segmentations` takes
            them, with ``seg_map_path``, the label map on disk (0 unlabelled, 1 background, 2 to 11
            digits).
        title (str): Line above the grid.
        columns (int): Scenes in a row. Defaults to 2.
        tile (int): Width and height of each of the three parts, in pixels. Defaults to 260.

    Returns:
        np.ndarray: BGR image, uint8 of (height, width, 3).
    """
    tiles = []
    for prediction in predictions:
        image, _ = _read(prediction['img_path'], tile)
        file = np.fromfile(prediction['seg_map_path'], np.uint8)
        truth = cv2.imdecode(file, cv2.IMREAD_UNCHANGED).astype(int) - 1
        predicted = np.asarray(prediction['pred_sem_seg']['data'])[0].astype(int)
        parts = {
            'scene': image,
            'ground truth': _colour_labels(truth, tile),
            'prediction': _colour_labels(predicted, tile),
        }
        tiles.append(np.hstack([_captioned(part, name) for name, part in parts.items()]))
    return _page(tiles, columns, title, dict(zip(DIGITS, COLOURS)))


def _read(path: str, tile: int) -> tuple[np.ndarray, float]:
    """A square image at ``tile`` pixels, and the factor by which it grew."""
    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
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


def _draw_mask(image: np.ndarray, rle: dict, colour: tuple) -> None:
    from pycocotools import mask as mask_utils

    mask = mask_utils.decode(rle).astype(np.float32)
    inside = cv2.resize(mask, image.shape[1::-1], interpolation=cv2.INTER_LINEAR) >= 0.5
    image[inside] = (0.4 * image[inside] + 0.6 * np.array(colour)).astype(np.uint8)
    outline, _ = cv2.findContours(inside.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    cv2.drawContours(image, outline, -1, INK, 1)


def _colour_labels(labels: np.ndarray, tile: int) -> np.ndarray:
    palette = np.array([(60, 60, 60), *COLOURS], np.uint8)
    image = np.zeros((*labels.shape, 3), np.uint8)
    known = (labels >= 0) & (labels < len(palette))
    image[known] = palette[labels[known]]
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
