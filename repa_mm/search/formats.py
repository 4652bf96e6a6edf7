"""The formats that a model can run in, on a CPU or a GPU."""

import copy
import os
import os.path as osp
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.structures import BaseDataElement

from repa_mm.benchmark.variants import compile_
from repa_mm.faster import faster_on_gpu_


@dataclass(frozen=True)
class Format:
    """A way to run a model.

    Attributes:
        file (str): The file that it runs, 'onnx' or 'int8', or '' for PyTorch.
        runtime (str, optional): What runs the file, see :class:`~repa_mm.export.session.Session`.
        dtype (str, optional): The type of PyTorch's autocast.
        compiled (bool): ``torch.compile`` runs the backbone, neck and heads.
        exact (bool): It computes in float32, so that one test holds for all such formats.
        padded (bool): Images are padded to a few sizes, see :class:`Padded`.
    """

    file: str = ''
    runtime: str | None = None
    dtype: str | None = None
    compiled: bool = False
    exact: bool = False
    padded: bool = False


EAGER, ORT, F32, BF16, INT8 = (
    'PyTorch', 'ONNX Runtime', 'OpenVINO f32', 'OpenVINO bf16', 'OpenVINO int8'
)  # fmt: skip
ORT_CUDA, TENSORRT = 'ONNX Runtime CUDA', 'TensorRT f16'
FORMATS = {
    EAGER: Format(exact=True),
    'PyTorch f16': Format(dtype='float16'),
    'PyTorch bf16': Format(dtype='bfloat16'),
    'PyTorch, compiled': Format(compiled=True, exact=True),
    'PyTorch f16, compiled': Format(dtype='float16', compiled=True),
    'PyTorch bf16, compiled': Format(dtype='bfloat16', compiled=True),
    ORT: Format('onnx', exact=True),
    F32: Format('onnx', 'f32', exact=True),
    BF16: Format('onnx', 'bf16'),
    INT8: Format('int8'),
    ORT_CUDA: Format('onnx', 'cuda'),
    TENSORRT: Format('onnx', 'tensorrt'),
    **{f'{F32}, padded': Format('onnx', 'f32', padded=True)},
    **{f'{BF16}, padded': Format('onnx', 'bf16', padded=True)},
    **{f'{INT8}, padded': Format('int8', padded=True)},
}
#: Number of sizes to pad images to, and the value of added pixels.
MOST_SIZES, PIXEL = 4, 114


def installed_formats(device: str) -> tuple[list[str], list[str]]:
    """Return the formats that run on a device, and lines that say why others do not."""
    has_onnx = find_spec('onnx') and find_spec('onnxruntime')
    no_onnx = ['files are left out: onnx or onnxruntime is not installed'] * (not has_onnx)
    if torch.device(device).type == 'cuda':
        found = [name for name, form in FORMATS.items() if not form.file]
        if has_onnx:
            import onnxruntime

            providers = onnxruntime.get_available_providers()
            for name, provider in ((ORT_CUDA, 'CUDA'), (TENSORRT, 'Tensorrt')):
                found += [name] * (f'{provider}ExecutionProvider' in providers)
        return found, no_onnx
    found, reasons = [EAGER], no_onnx
    if not has_onnx:
        return found, reasons
    found.append(ORT)
    if not find_spec('openvino'):
        return found, ['OpenVINO and int8 are left out: openvino is not installed']
    import openvino

    found.append(F32)
    if 'BF16' in openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES'):
        found.append(BF16)
    else:
        reasons.append('bf16 is left out: this processor does not have it')
    if find_spec('nncf'):
        found.append(INT8)
    else:
        reasons.append('int8 is left out: nncf is not installed')
    return found, reasons


class InPrecision(nn.Module):
    """A model whose tests run under autocast, as MMEngine's ``TestLoop(fp16=True)``.

    Args:
        model (nn.Module): The model.
        dtype (str): 'float16' or 'bfloat16'.
    """

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
    """A detector's file that is given padded images, as by a step ``Pad`` of the test pipeline.

    OpenVINO compiles for each size of an image that it has not seen.

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


def in_format(model: nn.Module, form: Format, as_it_is: bool = False) -> nn.Module:
    """Return a model in a format of PyTorch, with ``test_step``.

    Args:
        model (nn.Module): The model, on its device. It is not changed.
        form (Format): The format.
        as_it_is (bool): Do not prepare the model for the GPU by :func:`faster_on_gpu_`.
    """
    if form.compiled or (next(model.parameters()).is_cuda and not as_it_is):
        model = copy.deepcopy(model)
        if not as_it_is:
            faster_on_gpu_(model)
        if form.compiled:
            compile_(model)
    return InPrecision(model, form.dtype) if form.dtype else model


def megabytes(model: nn.Module, file: str | None) -> float:
    """Return the size of a file with its weights, or of a model's parameters and buffers."""
    if file is None:
        tensors = model.state_dict().values()
        return sum(x.numel() * x.element_size() for x in tensors if torch.is_tensor(x)) / 1e6
    weights = f'{osp.splitext(file)[0]}.bin'
    return sum(os.path.getsize(f) / 1e6 for f in {file, weights} if osp.exists(f))
