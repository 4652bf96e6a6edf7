"""The formats that a model can run in, on a CPU or a GPU."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.structures import BaseDataElement

from repa_mm.faster import cuda_graphs_


@dataclass(frozen=True)
class Format:
    """A way to run a model.

    Attributes:
        file (str): Suffix of the file that it runs, '.onnx' or '_int8.xml', or '' for PyTorch.
        runtime (str, optional): What runs the file, see :class:`~repa_mm.export.Session`.
        dtype (str, optional): The type of PyTorch's autocast.
        captured (bool): CUDA graphs run the backbone, neck and heads.
        is_float32 (bool): It computes in float32, so that one test holds for all such formats.
        padded (bool): Images are padded to a few sizes, see :class:`Padded`.
    """

    file: str = ''
    runtime: str | None = None
    dtype: str | None = None
    captured: bool = False
    is_float32: bool = False
    padded: bool = False


EAGER, GRAPHS = 'PyTorch', 'PyTorch f16, CUDA graphs'
ORT, F32, BF16, INT8 = 'ONNX Runtime', 'OpenVINO f32', 'OpenVINO bf16', 'OpenVINO int8'
FORMATS = {
    EAGER: Format(is_float32=True),
    'PyTorch f16': Format(dtype='float16'),
    'PyTorch bf16': Format(dtype='bfloat16'),
    GRAPHS: Format(dtype='float16', captured=True),
    ORT: Format('.onnx', is_float32=True),
    F32: Format('.onnx', 'f32', is_float32=True),
    BF16: Format('.onnx', 'bf16'),
    INT8: Format('_int8.xml'),
}
for kind in GRAPHS, F32, BF16, INT8:
    FORMATS[f'{kind}, padded'] = replace(FORMATS[kind], is_float32=False, padded=True)
#: Packages that the formats with a file need.
PACKAGES = {
    ORT: ('onnx', 'onnxruntime'),
    F32: ('onnx', 'onnxruntime', 'openvino'),
    BF16: ('onnx', 'onnxruntime', 'openvino'),
    INT8: ('onnx', 'onnxruntime', 'openvino', 'nncf'),
}
#: Number of sizes to pad images to, and the value of added pixels.
MOST_SIZES, PIXEL = 4, 114


def installed_formats(device: str) -> tuple[list[str], list[str]]:
    """Return the formats that run on a device, and lines that say why others do not."""
    if torch.device(device).type == 'cuda':
        return [kind for kind, form in FORMATS.items() if not form.file and not form.padded], []
    found, reasons = [EAGER], []
    for kind, packages in PACKAGES.items():
        missing = [name for name in packages if not find_spec(name)]
        if missing:
            reasons.append(f'{kind} is left out: {missing[0]} is not installed')
        elif kind == BF16 and not _has_bf16():
            reasons.append(f'{kind} is left out: this processor does not have it')
        else:
            found.append(kind)
    return found, reasons


def _has_bf16() -> bool:
    import openvino

    return 'BF16' in openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES')


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


class Padded(nn.Module):
    """A detector that is given padded images, as by a step ``Pad`` of the test pipeline.

    OpenVINO compiles, and CUDA graphs are captured, for each size that they have not seen.

    Args:
        model (nn.Module): The model.
        divisor (int): Height and width become multiples of it.
    """

    def __init__(self, model: nn.Module, divisor: int) -> None:
        super().__init__()
        self.model, self.divisor = model, divisor

    def test_step(self, data: dict) -> list:
        """Predict a batch from a data loader."""
        inputs = []
        for image, sample in zip(data['inputs'], data['data_samples']):
            below, right = (-size % self.divisor for size in image.shape[1:])
            inputs.append(F.pad(image, (0, right, 0, below), value=PIXEL))
            shape = tuple(inputs[-1].shape[1:])
            sample.set_metainfo(dict(img_shape=shape, pad_shape=shape))
        return self.model.test_step(dict(data, inputs=inputs))


def divisor_for(sizes: Collection[tuple[int, int]]) -> int | None:
    """Return the least divisor that leaves a few sizes of padded images, or None if few are there.

    Args:
        sizes (Collection): Heights and widths of images.
    """
    if len(sizes) <= MOST_SIZES:
        return None
    divisors = range(32, max(map(max, sizes)) + 32, 32)
    return next(d for d in divisors if len({(-h // d, -w // d) for h, w in sizes}) <= MOST_SIZES)
