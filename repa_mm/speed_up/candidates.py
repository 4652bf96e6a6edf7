"""Models to choose from, the formats that they run in, and their time."""

import os
import os.path as osp
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config

from repa_mm.config import load_config
from repa_mm.convert.conversion import plan_conversion
from repa_mm.convert.pretrained import widths_structure
from repa_mm.export.export import example_shape, export_checkpoint, model_to_export, whole_onnx
from repa_mm.export.exported import ExportedModel
from repa_mm.export.int8 import quantize_checkpoint
from repa_mm.export.whole import whole_model
from repa_mm.models import STRUCTURES, attention_sites
from repa_mm.reparam import Form, outermost
from repa_mm.timing import measure
from repa_mm.variants import STOCK, build, with_our_parts

EAGER, ORT, F32, BF16, INT8 = (
    'PyTorch', 'ONNX Runtime', 'OpenVINO f32', 'OpenVINO bf16', 'OpenVINO int8'
)  # fmt: skip
#: Formats that compute the same within the tolerances of the export.
FLOATS = EAGER, ORT, F32
PRECISIONS = {F32: 'f32', BF16: 'bf16'}
#: Seconds after which a timing begins no more turns.
MOST_SECONDS = 240


@dataclass
class Candidate:
    """A model to choose from.

    Attributes:
        name (str): Its name in the table.
        config (str): Path of its config.
        checkpoint (str): Path of its checkpoint.
        budget (float): Share of the multiply-adds of its blocks that is left.
        blocks (list[dict]): The fitted parts, each with ``name``, ``before`` and ``after``.
    """

    name: str
    config: str
    checkpoint: str
    budget: float = 1.0
    blocks: list[dict] = field(default_factory=list)


def installed_formats() -> tuple[list[str], list[str]]:
    """Return the formats that run on this machine, and lines that say why others do not."""
    formats, reasons = [EAGER], []
    if not (find_spec('onnx') and find_spec('onnxruntime')):
        return formats, ['files are left out: onnx or onnxruntime is not installed']
    formats.append(ORT)
    if not find_spec('openvino'):
        return formats, ['OpenVINO and int8 are left out: openvino is not installed']
    import openvino

    formats.append(F32)
    if 'BF16' in openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES'):
        formats.append(BF16)
    else:
        reasons.append('bf16 is left out: this processor does not have it')
    if find_spec('nncf'):
        formats.append(INT8)
    else:
        reasons.append('int8 is left out: nncf is not installed')
    return formats, reasons


def write_file(
    candidate: Candidate, kind: str, stem: str, images: str | None, fit_images: int
) -> str:
    """Write the file of a candidate for a format, and return its path.

    Args:
        candidate (Candidate): The candidate.
        kind (str): The format. All except int8 share one file.
        stem (str): Path of the file without its suffix.
        images (str, optional): A folder of images to compare and calibrate on.
        fit_images (int): Number of images to calibrate int8 on.

    Raises:
        ValueError: If the file does not agree with PyTorch.
    """
    if kind == INT8:
        out = f'{stem}_int8.xml'
        arguments = candidate.config, candidate.checkpoint, out
        quantize_checkpoint(*arguments, num_images=fit_images, images=images)
    else:
        out = f'{stem}.onnx'
        export_checkpoint(candidate.config, candidate.checkpoint, out, images=images)
    return out


def megabytes(model: nn.Module | None, file: str | None) -> float:
    """Return the size of a file with its weights, or of a model's parameters and buffers."""
    if file is None:
        tensors = model.state_dict().values()
        return sum(x.numel() * x.element_size() for x in tensors if torch.is_tensor(x)) / 1e6
    weights = f'{osp.splitext(file)[0]}.bin'
    return sum(os.path.getsize(f) / 1e6 for f in {file, weights} if osp.exists(f))


def with_parts(model: nn.Module) -> nn.Module:
    """Return a model with all of the faster parts that there are."""
    return list(with_our_parts(model).values())[-1]


def open_model(candidate: Candidate, kind: str, file: str | None, preprocessor) -> nn.Module:
    """Return a candidate in a format, as a model with ``test_step``."""
    if kind == EAGER:
        model = build(load_config(candidate.config), candidate.checkpoint)
        return model if candidate.name == STOCK else with_parts(model)
    return ExportedModel(file, preprocessor, PRECISIONS.get(kind))


class Proxies:
    """Narrower models with random weights, since the latency depends on the widths alone.

    Each block keeps the same share. A fit spreads the same budget unevenly, so that its latency
    may be another: it is measured after the fit.

    Args:
        cfg (Config): Config of the candidate to narrow.
        checkpoint (str): Its checkpoint.
        preprocessor (nn.Module): Of the original model.
    """

    def __init__(self, cfg: Config, checkpoint: str, preprocessor: nn.Module) -> None:
        self.cfg, self.checkpoint, self.preprocessor = cfg, checkpoint, preprocessor

    def __call__(self, budget: float, kind: str) -> nn.Module:
        """Return a model of a budget in a format of floats."""
        model = model_to_export(self.cfg, self.checkpoint)
        keep = 1.0 if any(outermost(model, Form)) else budget
        model = with_parts(model) if kind == EAGER else model
        heads = budget if attention_sites(model) else 1.0
        plan = plan_conversion(model, keep, heads, heads)
        STRUCTURES.build(widths_structure(model, plan.sizes)).put_(model)
        if kind == EAGER:
            return model
        content = whole_onnx(whole_model(model), (2, *example_shape(model)))
        return ExportedModel(content, self.preprocessor, PRECISIONS.get(kind))


@torch.no_grad()
def time_models(models: dict[str, nn.Module], data: dict, repeats: int) -> dict[str, np.ndarray]:
    """Time models in turn, from an image after the pipeline to the predictions.

    Args:
        models (dict): Models with ``test_step``, by name.
        data (dict): A batch of one image from a data loader.
        repeats (int): Number of turns; fewer, if they take longer than :data:`MOST_SECONDS`.

    Returns:
        dict: Times in milliseconds, one for each turn, by name.
    """
    calls: dict[str, Callable] = {name: model.test_step for name, model in models.items()}
    return measure(calls, data, repeats, MOST_SECONDS)


def fastest(times: dict[str, np.ndarray], names: Sequence[str]) -> list[str]:
    """Return names in ascending order of their median time."""
    return sorted(names, key=lambda name: float(np.median(times[name])))
