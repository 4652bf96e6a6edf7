"""Whole models with products of 8 bits, for OpenVINO, by NNCF."""

import copy
import logging
import os
import os.path as osp
import tempfile
from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.structures import BaseDataElement
from scipy.optimize import linear_sum_assignment
from torchvision.ops import box_iou

from repa_mm.config import load_config
from repa_mm.export.export import agreeing_onnx, example_shape, images_of, model_to_export, resized
from repa_mm.export.exported import ExportedModel
from repa_mm.reparam import set_shortcut

# Smallest acceptable agreement, see :func:`agreement`.
TOLERANCES = dict(detection=0.95, instances=0.95, segmentation=0.95, classification=0.95)
# Intersection over union of two objects that are the same one.
OVERLAP = 0.75


def quantize_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    num_images: int = 64,
    images: str | None = None,
    preprocessing: bool = False,
    shape: Sequence[int] | None = None,
    batch: int = 1,
) -> dict:
    """Write a whole model with products of 8 bits.

    The file is run beside PyTorch on half as many images as it is calibrated on, and on none of
    these.

    Args:
        config (str): Path of the config.
        checkpoint (str): Path of a checkpoint, of floats, in either form.
        out (str): The file to write, '.xml'; its weights are in '.bin'.
        num_images (int): Number of images to calibrate on. Defaults to 64.
        images (str, optional): A folder of images; every third of them is compared on. Defaults to
            the config's training data to calibrate on, and its test data to compare on.
        preprocessing (bool): Normalize images in the graph. Defaults to False.
        shape (Sequence[int], optional): Height and width that the file is to be fixed to, whatever
            the size of the images to calibrate on. Defaults to None: any.
        batch (int): Number of images that the file is fixed to, if there is a shape. Defaults to 1.

    Returns:
        dict: See :func:`quantize`.

    Raises:
        ValueError: As :func:`quantize`.
    """
    cfg = load_config(config)
    calibration, held_out = calibration_images(cfg, num_images, images)
    model = model_to_export(cfg, checkpoint)
    return quantize(model, out, calibration, held_out, preprocessing, shape, batch)


def calibration_images(
    cfg: Config, number: int, folder: str | None = None
) -> tuple[list[dict], list[dict]]:
    """Return images to calibrate on and half as many others, as batches of one image."""
    half = -(-number // 2)
    if not folder:
        return images_of(cfg, 'train', number), images_of(cfg, 'test', half)
    found = images_of(cfg, 'train', number + half, folder)
    if len(found) < 2:
        raise ValueError(f'{folder} needs two images: one to calibrate on, and one to compare on')
    return [data for i, data in enumerate(found) if i % 3], found[::3]


def quantize(
    model: nn.Module,
    out: str,
    calibration: Sequence[dict],
    held_out: Sequence[dict],
    preprocessing: bool = False,
    shape: Sequence[int] | None = None,
    batch: int = 1,
) -> dict:
    """Write a whole model with products of 8 bits, if it finds what the model finds.

    Weights have a scale for each output channel and activations one for the tensor, after
    SmoothQuant (https://arxiv.org/abs/2211.10438). Merged FFNs have their shortcut outside of their
    matrices, since a 1 on the diagonal of a matrix takes most of the range of its 8 bits.

    Args:
        model (nn.Module): From :func:`~repa_mm.export.export.model_to_export`.
        out (str): The file to write, '.xml'; its weights are in '.bin'.
        calibration (Sequence[dict]): Batches of one image, for the ranges of activations.
        held_out (Sequence[dict]): Batches of one image, to compare on.
        preprocessing (bool): Normalize images in the graph. Defaults to False.
        shape (Sequence[int], optional): As for :func:`quantize_checkpoint`.
        batch (int): As for :func:`quantize_checkpoint`.

    Returns:
        dict: ``agreement`` (see :func:`agreement`), ``tolerance``, ``images`` that were compared,
        and ``products`` (see :func:`products`).

    Raises:
        ValueError: If the model as ONNX, in float, does not agree with PyTorch, if the file
            with 8 bits does not, or if there is nothing to compare.
    """
    import nncf
    import openvino

    def feed(data: dict) -> dict:
        if preprocessing:
            return {'image': data['inputs'][0].permute(1, 2, 0)[None].byte().numpy()}
        return {'image': model.data_preprocessor(data, False)['inputs'].numpy()}

    model = set_shortcut(model, 'outside')
    shown = calibration[:3]
    content, _ = agreeing_onnx(model, shown, example_shape(model), True, 1, preprocessing)
    graph = openvino.Core().read_model(content, b'')
    nncf.set_log_level(logging.ERROR)
    quantized = nncf.quantize(
        graph,
        nncf.Dataset(calibration, feed),
        subset_size=len(calibration),
        model_type=nncf.ModelType.TRANSFORMER,
    )
    quantized.set_rt_info('int8', ['framework', 'precision'])
    if shape is not None:
        held_out = [resized([data], [shape]) for data in held_out]
    folder, name = osp.split(osp.abspath(out))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        file = osp.join(temporary, name)

        def save(number: int) -> None:
            if shape is not None:
                quantized.reshape([number, *shape, 3] if preprocessing else [number, 3, *shape])
            openvino.save_model(quantized, file, compress_to_fp16=False)

        save(1)
        # What the 8 bits cost, whatever else this processor would round.
        exported = ExportedModel(file, model.data_preprocessor, 'f32')
        found = agreement(model, exported, held_out)
        tolerance = TOLERANCES[exported.session.metadata['task']]
        if not found >= tolerance:
            raise ValueError(
                f'in 8 bits the model has an agreement of {found:.3f} with PyTorch on '
                f'{len(held_out)} images, less than {tolerance}: nothing is written'
            )
        if batch > 1:
            save(batch)
        result = dict(
            agreement=found, tolerance=tolerance, images=len(held_out), products=products(file)
        )
        # The weights first: a reader that finds the .xml finds its weights.
        for name in sorted(os.listdir(temporary)):
            os.replace(osp.join(temporary, name), osp.join(folder, name))
    return result


def products(file: str) -> dict[str, bool]:
    """Return the products with weights of a file for OpenVINO, and whether these have 8 bits.

    Products among activations, as of queries and keys, have no weights.

    Args:
        file (str): The file, '.xml'.

    Returns:
        dict: By the names of the operations.
    """
    import openvino

    def stored(node: openvino.Node) -> set[str] | None:
        """The types that a constant is stored in; None if it depends on the image."""
        if node.get_type_name() == 'Constant':
            return {node.get_element_type().get_type_name()}
        if node.get_type_name() not in ('Convert', 'Subtract', 'Multiply', 'Reshape', 'Transpose'):
            return None
        types = [stored(x.get_node()) for x in node.input_values()]
        return None if None in types else set().union(*types)

    found = {}
    for op in openvino.Core().read_model(file).get_ops():
        if op.get_type_name() in ('MatMul', 'Convolution', 'GroupConvolution'):
            types = [stored(x.get_node()) for x in op.input_values()]
            weights = [x for x in types if x is not None]
            if weights:
                found[op.get_friendly_name()] = bool({'i8', 'u8'} & set().union(*weights))
    return found


@torch.no_grad()
def agreement(model: nn.Module, exported: ExportedModel, batches: Sequence[dict]) -> float:
    """Measure how far an exported model finds what the model finds.

    The measure is the Dice coefficient 2 Σ a b / (Σ a² + Σ b²) of two sets of scores, a and b, over
    all images: of objects, of the classes of each image, or, where there are labels alone, 1 for
    the label of each pixel, which makes it the share of pixels with the same label. Objects are
    paired one to one, if they have the same label and an intersection over union (of masks, if
    there are any) of at least 0.75; what has no counterpart counts with a score of 0 there. So
    objects count with the squares of their scores.

    Args:
        model (nn.Module): The model.
        exported (ExportedModel): The exported model.
        batches (Sequence[dict]): From a data loader.

    Returns:
        float: From 0, nothing in common, to 1, the same.

    Raises:
        ValueError: If both find less than one object with a score of 1.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for data in batches:
        outputs = (m.test_step(copy.deepcopy(data)) for m in (exported, model))
        for pair in zip(*outputs, strict=True):
            sums += torch.stack([torch.as_tensor(x).double() for x in _in_common(*pair)])
    common, *squares = sums.tolist()
    if sum(squares) < 2:
        raise ValueError(
            f'the model finds nothing in the {len(batches)} images that are to be compared: give '
            'images of what it is for, or more of them'
        )
    return 2 * common / sum(squares)


def _in_common(found: BaseDataElement, expected: BaseDataElement) -> tuple:
    """The sums of products, of squares and of squares of the scores of one image."""
    if 'pred_sem_seg' in expected:
        a, b = found.pred_sem_seg.data, expected.pred_sem_seg.data
        return (a == b).sum(), a.numel(), b.numel()
    if 'pred_score' in expected:
        a, b = found.pred_score, expected.pred_score
        return (a * b).sum(), a.square().sum(), b.square().sum()
    a, b = found.pred_instances, expected.pred_instances
    overlaps = box_iou(a.bboxes, b.bboxes)
    if 'masks' in b:
        x, y = a.masks.flatten(1).float(), b.masks.flatten(1).float()
        inside = x @ y.T
        overlaps = inside / (x.sum(1)[:, None] + y.sum(1) - inside).clamp(min=1)
    pairs = (overlaps >= OVERLAP) & (a.labels[:, None] == b.labels)
    pairs = pairs * a.scores[:, None] * b.scores
    common = pairs[linear_sum_assignment(pairs.numpy(), maximize=True)].sum()
    return common, a.scores.square().sum(), b.scores.square().sum()
