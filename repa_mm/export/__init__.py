"""Whole models in ONNX and OpenVINO files: the export, int8, and the comparison with PyTorch."""

from repa_mm.export.comparison import agreement, agreement_of, num_found, overlap
from repa_mm.export.exporter import (
    NUM_IMAGES,
    agreeing_onnx,
    example_shape,
    noise,
    resized,
    whole_onnx,
)
from repa_mm.export.int8 import MIN_AGREEMENT, quantize
from repa_mm.export.runtime_model import ExportedModel, runner_for_exported
from repa_mm.export.session import Session, openvino_model
from repa_mm.export.whole import whole_model

__all__ = [
    'MIN_AGREEMENT', 'NUM_IMAGES', 'ExportedModel', 'Session', 'agreeing_onnx', 'agreement',
    'agreement_of', 'example_shape', 'noise', 'num_found', 'openvino_model', 'overlap', 'quantize',
    'resized', 'runner_for_exported', 'whole_model', 'whole_onnx',
]  # fmt: skip
