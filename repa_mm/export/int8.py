"""Whole models with layers in int8, for OpenVINO, by NNCF."""

import copy
import logging
import os
import os.path as osp
from collections.abc import Callable, Sequence

import torch.nn as nn

from repa_mm.export.comparison import agreement
from repa_mm.export.exporter import agreeing_onnx, resized
from repa_mm.export.runtime_model import ExportedModel
from repa_mm.files import replacing
from repa_mm.reparam import set_shortcut_

#: Smallest acceptable :func:`~repa_mm.export.agreement`.
TOLERANCE = 0.98
#: What is tried in turn: strengths of SmoothQuant (NNCF's default, then with the inputs of
#: convolutions), and whether all that follows the backbone stays in float.
ATTEMPTS = (
    (dict(matmul=0.95), False),
    (dict(matmul=0.95, convolution=0.95), False),
    (dict(matmul=0.95, convolution=0.95), True),
)


def quantize(
    model: nn.Module,
    out: str,
    calibration: Sequence[dict],
    held_out: Sequence[dict],
    tolerance: float = TOLERANCE,
    preprocessing: bool = False,
) -> dict:
    """Write a whole model with layers in int8, if the file finds what the model finds.

    Weights have a scale for each output channel and activations one for the tensor, after
    SmoothQuant (arXiv 2211.10438) has moved large input channels of a product into its weights: in
    matrix products, and in convolutions if the file does not agree otherwise. If it still does not,
    the parts after the backbone (neck and heads) stay in float. Merged FFNs keep their shortcut
    outside of the matrix: a 1 on its diagonal takes most of the range of 8 bits.

    Args:
        model (nn.Module): A detector, segmentor or classifier in eval mode, on any device.
        out (str): The file to write, '.xml', with its weights beside it in '.bin'.
        calibration (Sequence[dict]): Batches of one image, for the ranges of activations.
        held_out (Sequence[dict]): Batches of one image, to compare the file with the model.
        tolerance (float): Smallest acceptable agreement, see
            :func:`~repa_mm.export.agreement`. Defaults to :data:`TOLERANCE`.
        preprocessing (bool): Normalize images in the graph. Defaults to False.

    Returns:
        dict: ``agreement``, ``layers`` (see :func:`layers_in_int8`) and ``backbone_only``, whether
        neck and heads had to stay in float.

    Raises:
        ValueError: If the file does not agree with the model, if the model in ONNX and float does
            not, or if there is nothing to compare.
    """
    if osp.splitext(out)[1] != '.xml':
        raise ValueError(f'int8 is written for OpenVINO, to a file .xml, not {out!r}')
    model = set_shortcut_(copy.deepcopy(model).cpu(), 'outside')
    content, _ = agreeing_onnx(model, calibration[:3], preprocessing=preprocessing)
    # Predictions in the size that the model sees: the file cannot resize a segmentor's scores.
    held_out = [resized([data], [data['inputs'][0].shape[1:]]) for data in held_out]

    def feed(data: dict) -> dict:
        if preprocessing:
            return {'image': data['inputs'][0].permute(1, 2, 0)[None].numpy()}
        return {'image': model.data_preprocessor(data, False)['inputs'].numpy()}

    for strengths, backbone_only in ATTEMPTS:
        quantized = _quantized(content, calibration, feed, strengths, backbone_only)
        # In float32, so that the figure does not depend on what else this processor rounds.
        exported = ExportedModel(quantized, model.data_preprocessor, 'f32')
        found = agreement(model, exported, held_out)
        if found >= tolerance:
            break
    else:
        raise ValueError(
            f'in int8 the model has an agreement of {found:.4f} with PyTorch, less than '
            f'{tolerance}: nothing is written. Calibrate on more images, or test a file of '
            'lower agreement (--tolerance)'
        )
    _write(quantized, out)
    layers = layers_in_int8(quantized)
    return dict(agreement=found, layers=layers, backbone_only=backbone_only)


def _quantized(
    content: bytes,
    calibration: Sequence[dict],
    feed: Callable[[dict], dict],
    strengths: dict[str, float],
    backbone_only: bool,
):
    """Return an OpenVINO model in int8, made of the content of an ONNX file."""
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    return nncf.quantize(
        openvino.Core().read_model(content, b''),
        nncf.Dataset(calibration, feed),
        subset_size=len(calibration),
        model_type=nncf.ModelType.TRANSFORMER,
        ignored_scope=nncf.IgnoredScope(patterns=['^(?!.*/backbone/).*'] if backbone_only else []),
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(**strengths)
        ),
    )


def _write(model, out: str) -> None:
    """Write an OpenVINO model to a file .xml, and its weights beside it."""
    import openvino

    with replacing(out) as temporary:
        openvino.save_model(model, temporary, compress_to_fp16=False)
        # The weights first: a reader that finds the .xml finds its weights.
        weights = (f'{osp.splitext(path)[0]}.bin' for path in (temporary, osp.realpath(out)))
        os.replace(*weights)


def layers_in_int8(model) -> dict[str, bool]:
    """Return the layers with weights in an OpenVINO model: by name, whether in int8.

    Products of two activations, such as those of queries and keys, are not among them.
    """

    def stored(node) -> set[str] | None:
        """The types that a constant is stored in; None if the node depends on the image."""
        if node.get_type_name() == 'Constant':
            return {node.get_element_type().get_type_name()}
        if node.get_type_name() not in ('Convert', 'Subtract', 'Multiply', 'Reshape', 'Transpose'):
            return None
        types = [stored(x.get_node()) for x in node.input_values()]
        return None if None in types else set().union(*types)

    found = {}
    for op in model.get_ops():
        if op.get_type_name() in ('MatMul', 'Convolution', 'GroupConvolution'):
            types = [stored(x.get_node()) for x in op.input_values()]
            if any(types):
                found[op.get_friendly_name()] = any({'i8', 'u8'} & t for t in types if t)
    return found
