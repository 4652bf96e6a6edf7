"""Models to choose from, the formats that they run in, and their time."""

import copy
import os
import os.path as osp
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import torch.nn as nn
from mmengine.config import Config

from repa_mm import opening
from repa_mm.complexity import input_channels
from repa_mm.config import load_config
from repa_mm.convert.budget import even_sizes
from repa_mm.convert.conversion import plan_conversion
from repa_mm.convert.pretrained import restructured, widths_structure, with_import
from repa_mm.export.export import example_shape, whole_onnx
from repa_mm.export.runtime_model import ExportedModel
from repa_mm.export.whole import whole_model
from repa_mm.faster import swap_faster_attention_
from repa_mm.models import STRUCTURES
from repa_mm.variants import build

EAGER, ORT, F32, BF16, INT8 = (
    'PyTorch', 'ONNX Runtime', 'OpenVINO f32', 'OpenVINO bf16', 'OpenVINO int8'
)  # fmt: skip
#: Formats that compute the same within the tolerances of the export.
FLOATS = EAGER, ORT, F32
PRECISIONS = {F32: 'f32', BF16: 'bf16'}


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


def megabytes(model: nn.Module | None, file: str | None) -> float:
    """Return the size of a file with its weights, or of a model's parameters and buffers."""
    if file is None:
        tensors = model.state_dict().values()
        return sum(x.numel() * x.element_size() for x in tensors if torch.is_tensor(x)) / 1e6
    weights = f'{osp.splitext(file)[0]}.bin'
    return sum(os.path.getsize(f) / 1e6 for f in {file, weights} if osp.exists(f))


def with_faster_parts(cfg: Config, stock: nn.Module) -> Config:
    """Return the config of a model with our attention and UperNet's faster head.

    Args:
        cfg (Config): Config of the original model. Without such parts, the same is returned.
        stock (nn.Module): The original model.
    """
    ours = copy.deepcopy(stock)
    swap_faster_attention_(ours)
    pairs = zip(stock.named_modules(), ours.modules())
    changed = [name for (name, module), other in pairs if type(module) is not type(other)]
    model = copy.deepcopy(cfg.model)
    if changed and all(name.startswith('backbone.') for name in changed):
        model.backbone = restructured(model.backbone)
    elif changed:
        model = restructured(model)
    if type(getattr(stock, 'decode_head', None)).__name__ == 'UPerHead':
        from repa_mm.faster.uper_head import is_ordinary

        if is_ordinary(stock.decode_head):
            owner = model if 'decode_head' in model else model.model  # of a Restructured segmentor
            owner.decode_head.type = 'FastUPerHead'
    if model == cfg.model:
        return cfg
    cfg = copy.deepcopy(cfg)
    cfg.model = model
    return with_import(cfg)


def open_model(candidate: Candidate, kind: str, file: str | None, preprocessor) -> nn.Module:
    """Return a candidate in a format, as a model with ``test_step``."""
    if kind == EAGER:
        return build(load_config(candidate.config), candidate.checkpoint)
    return ExportedModel(file, preprocessor, PRECISIONS.get(kind))


def random_narrow(base: Candidate, budget: float, kind: str, preprocessor: nn.Module) -> nn.Module:
    """Return a narrower model with random weights, since latency depends on the widths alone.

    Each block keeps the same share. A fit spreads the same budget unevenly, so that its latency
    may be another: it is measured after the fit.

    Args:
        base (Candidate): The candidate to narrow.
        budget (float): Share of the multiply-adds of its blocks that is left.
        kind (str): A format of floats.
        preprocessor (nn.Module): Of the original model.
    """
    model = opening.open_model(base.config, base.checkpoint, merge=True)
    sizes = even_sizes(plan_conversion(model), budget, budget, budget)
    STRUCTURES.build(widths_structure(model, sizes)).put_(model)
    if kind == EAGER:
        return model
    content = whole_onnx(whole_model(model), (2, input_channels(model), *example_shape(model)))
    return ExportedModel(content, preprocessor, PRECISIONS.get(kind))
