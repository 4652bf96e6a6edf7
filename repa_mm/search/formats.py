"""The formats that a model can run in, on a CPU or a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn as nn
from mmengine.structures import BaseDataElement

from repa_mm.faster import cuda_graphs_


@dataclass(frozen=True)
class Format:
    """A way to run a model."""

    file: str = ''  # suffix of the file that it runs, '.onnx' or '_int8.xml', or '' for PyTorch
    packages: str = ''  # that the file needs
    runtime: str | None = None  # what runs the file, see :class:`~repa_mm.export.Session`
    dtype: str | None = None  # of PyTorch's autocast
    captured: bool = False  # CUDA graphs run the backbone, neck and heads


EAGER, GRAPHS = 'PyTorch', 'PyTorch f16, CUDA graphs'
ORT, F32, BF16, INT8 = 'ONNX Runtime', 'OpenVINO f32', 'OpenVINO bf16', 'OpenVINO int8'
FORMATS = {
    EAGER: Format(),
    'PyTorch f16': Format(dtype='float16'),
    'PyTorch bf16': Format(dtype='bfloat16'),
    GRAPHS: Format(dtype='float16', captured=True),
    ORT: Format('.onnx', 'onnx onnxruntime'),
    F32: Format('.onnx', 'onnx onnxruntime openvino', 'f32'),
    BF16: Format('.onnx', 'onnx onnxruntime openvino', 'bf16'),
    INT8: Format('_int8.xml', 'onnx onnxruntime openvino nncf'),
}
#: They are to compute the same; what does shares one test.
FLOAT32 = EAGER, ORT, F32


def matching(texts: Sequence[str]) -> list[str]:
    """Return the formats whose names have any of the texts in them; without a text, all.

    Raises:
        ValueError: If no name has a text in it.
    """
    texts = [texts] if isinstance(texts, str) else texts
    named = {text: [kind for kind in FORMATS if text.lower() in kind.lower()] for text in texts}
    for text, kinds in named.items():
        if not kinds:
            raise ValueError(f'no format has {text!r} in its name: {", ".join(FORMATS)}')
    return [kind for kind in FORMATS if not texts or any(kind in x for x in named.values())]


def installed_formats(device: str, texts: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return the :func:`matching` formats that a device runs, and why others are left out."""
    kinds, found, reasons = matching(texts), [], []
    if torch.device(device).type == 'cuda':
        return [kind for kind in kinds if not FORMATS[kind].file], []
    for kind in kinds:
        missing = [name for name in FORMATS[kind].packages.split() if not find_spec(name)]
        if missing:
            reasons.append(f'{kind} is left out: {missing[0]} is not installed')
        elif kind == BF16 and not _has_bf16():
            reasons.append(f'{kind} is left out: this processor does not have it')
        elif kind == EAGER or FORMATS[kind].file:
            found.append(kind)
    return found, reasons


def _has_bf16() -> bool:
    import openvino

    return 'BF16' in openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES')


def precision_of(kind: str) -> str:
    """Return the type, 'f32' or 'bf16', in which floats are computed in a format with a file."""
    if FORMATS[kind].file == '.onnx':
        return FORMATS[kind].runtime or 'f32'
    return 'bf16' if _has_bf16() else 'f32'  # as OpenVINO chooses


def in_format_(model: nn.Module, form: Format) -> nn.Module:
    """Return a model in a format of PyTorch, with ``test_step``."""
    if form.captured:
        cuda_graphs_(model)
    return InPrecision(model, form.dtype) if form.dtype else model


class InPrecision(nn.Module):
    """A model whose tests run under autocast, as MMEngine's ``TestLoop(fp16=True)``."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        super().__init__()
        self.model, self.dtype = model, getattr(torch, dtype)
        self.device = next(model.parameters()).device.type

    def test_step(self, data: dict) -> list:
        """Predict a batch from a data loader."""
        with torch.autocast(self.device, self.dtype):
            samples = self.model.test_step(data)
        for sample in samples:
            _to_float_(sample)
        return samples


def _to_float_(element: BaseDataElement) -> None:
    """Give results the type that metrics take: NumPy has no bfloat16."""
    for name, value in element.items():
        if isinstance(value, BaseDataElement):
            _to_float_(value)
        elif torch.is_tensor(value) and value.dtype in (torch.float16, torch.bfloat16):
            setattr(element, name, value.float())
