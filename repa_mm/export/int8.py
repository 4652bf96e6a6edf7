"""Whole models with layers in int8, for OpenVINO, by NNCF."""

import logging
import os.path as osp
from collections.abc import Sequence

import torch.nn as nn

from repa_mm.export.comparison import agreement
from repa_mm.export.exporter import NUM_IMAGES, agreeing_onnx
from repa_mm.export.runtime_model import ExportedModel
from repa_mm.export.session import openvino_model
from repa_mm.io.files import replacing
from repa_mm.reparam import set_shortcut_
from repa_mm.surgery import copied

#: Smallest acceptable :func:`~repa_mm.export.agreement`.
MIN_AGREEMENT = 0.98
#: What is tried in turn: strengths of SmoothQuant (NNCF's default, then with the inputs of
#: convolutions), and names of layers that stay in float: in the end all that follow the backbone.
ATTEMPTS = (
    (dict(matmul=0.95), []),
    (dict(matmul=0.95, convolution=0.95), []),
    (dict(matmul=0.95, convolution=0.95), ['^(?!.*/backbone/).*']),
)


def quantize(
    model: nn.Module,
    out: str,
    calibration: Sequence[dict],
    held_out: Sequence[dict],
    tolerance: float = MIN_AGREEMENT,
    least: float | None = None,
) -> dict:
    """Write a whole model with layers in int8, if the file finds what the model finds.

    Weights have a scale for each output channel, activations one for the tensor. SmoothQuant (arXiv
    2211.10438) first moves large input channels into the weights. If the file does not agree
    otherwise, neck and heads stay in float. Merged FFNs keep their shortcut outside the matrix: a 1
    on its diagonal takes most of the range of 8 bits.

    Args:
        model (nn.Module): A detector, segmentor or classifier in eval mode, on any device.
        out (str): The file for OpenVINO to write, '.xml'; its weights are in '.bin' beside it.
        calibration (Sequence[dict]): Batches of one image, for the ranges of activations.
        held_out (Sequence[dict]): Batches of one image, to compare the file with the model.
        tolerance (float): Smallest acceptable :func:`~repa_mm.export.agreement`. Defaults to 0.98.
        least (float, optional): If no attempt is acceptable, the first one of this agreement is
            written. Defaults to ``tolerance``.

    Returns:
        dict: ``agreement``, ``layers`` (by name, whether in int8) and ``backbone_only``, True if
        neck and heads had to stay in float.

    Raises:
        ValueError: If the file does not agree with the model, nor does the model in ONNX and float,
            if there is nothing to compare, or if ``out`` is no '.xml'.
    """
    import nncf
    import openvino

    if osp.splitext(out)[1] != '.xml':
        raise ValueError(f'files in int8 are for OpenVINO: name an .xml instead of {out!r}')

    def feed(data: dict) -> dict:
        return {'image': model.data_preprocessor(data, False)['inputs'].numpy()}

    model = set_shortcut_(copied(model).cpu(), 'outside')
    content, _ = agreeing_onnx(model, calibration[:NUM_IMAGES])
    nncf.set_log_level(logging.ERROR)
    attempts = []
    for strengths, in_float in ATTEMPTS:
        quantized = nncf.quantize(
            openvino.Core().read_model(content, b''),
            nncf.Dataset(calibration, feed),
            subset_size=len(calibration),
            model_type=nncf.ModelType.TRANSFORMER,
            ignored_scope=nncf.IgnoredScope(patterns=in_float),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(**strengths)
            ),
        )
        quantized.set_rt_info('int8', ['framework', 'precision'])
        # In float32, so that the figure does not depend on what else this processor rounds.
        exported = ExportedModel(quantized, model.data_preprocessor, 'f32')
        found = agreement(model, exported, held_out)
        attempts.append((found, quantized, bool(in_float)))
        if found >= tolerance:
            attempts = attempts[-1:]
            break
    least = tolerance if least is None else least
    accepted = [attempt for attempt in attempts if attempt[0] >= least]
    if not accepted:
        raise ValueError(
            f'in int8 the model has an agreement of {found:.4f} with PyTorch, less than '
            f'{least}: nothing is written. Calibrate on more images, or test a file of '
            'lower agreement (--tolerance)'
        )
    found, quantized, backbone_only = accepted[0]
    weights = osp.splitext(osp.realpath(out))[0] + '.bin'
    # The weights come first: a reader that finds the .xml finds them.
    with replacing(out) as temporary, replacing(weights):
        openvino.save_model(quantized, temporary, compress_to_fp16=False)
    layers = layers_in_int8(quantized)
    return dict(agreement=found, layers=layers, backbone_only=backbone_only)


def layers_in_int8(file) -> dict[str, bool]:
    """Return the layers with weights, without products of two activations: by name, if in int8."""

    def stored(node) -> set[str] | None:
        """The types that a constant is stored in; None if the node depends on the image."""
        if node.get_type_name() == 'Constant':
            return {node.get_element_type().get_type_name()}
        if node.get_type_name() not in ('Convert', 'Subtract', 'Multiply', 'Reshape', 'Transpose'):
            return None
        types = [stored(x.get_node()) for x in node.input_values()]
        return None if None in types else set().union(*types)

    found = {}
    for op in openvino_model(file).get_ops():
        if op.get_type_name() in ('MatMul', 'Convolution', 'GroupConvolution'):
            types = [stored(x.get_node()) for x in op.input_values()]
            if any(types):
                found[op.get_friendly_name()] = any({'i8', 'u8'} & t for t in types if t)
    return found
