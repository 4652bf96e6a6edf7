"""Whole models in ONNX and OpenVINO files: the export, int8, and the comparison with PyTorch."""

from repa_mm.export.comparison import agreement, dice, in_common
from repa_mm.export.exporter import (
    NUM_IMAGES,
    agreeing_onnx,
    example_shape,
    noise,
    onnx_backbone,
    resized,
    whole_onnx,
)
from repa_mm.export.int8 import TOLERANCE, quantize
from repa_mm.export.runtime_model import ExportedModel, runner_for_exported
from repa_mm.export.session import Session
from repa_mm.export.whole import whole_model

__all__ = [
    'NUM_IMAGES', 'TOLERANCE', 'ExportedModel', 'Session', 'agreeing_onnx', 'agreement', 'dice',
    'example_shape', 'in_common', 'noise', 'onnx_backbone', 'quantize', 'resized',
    'runner_for_exported', 'whole_model', 'whole_onnx',
]  # fmt: skip
