"""Deploy forms in other formats."""

import io
import os.path as osp
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn as nn

from repa_mm.export.session import Session
from repa_mm.export.whole import WholeModel
from repa_mm.files import check_output, write_bytes

# RoiAlign knows half pixels from 16 on; the last is that of torch's exporter.
OPSETS = range(16, 21)
OPSET = 17
# Largest acceptable share of objects or pixels that differ, or difference of a score.
TOLERANCES = dict(detection=0.02, segmentation=1e-3, classification=1e-4)
FORMATS = {'.onnx': 'ONNX', '.pt2': 'a program of torch.export', '.pt': 'TorchScript, traced'}


class _Tensors(nn.Module):
    """A model whose output is a flat tuple of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Exporters put the mode of the outermost module back.
        self.training = model.training

    def forward(self, image: torch.Tensor):
        out = self.model(image)
        return out if torch.is_tensor(out) else tuple(out)


def _to_onnx(model: nn.Module, inputs: tuple, file: io.BytesIO, **kwargs) -> None:
    # The exporter that does not need onnxscript, and takes a second.
    if 'dynamo' in torch.onnx.export.__code__.co_varnames:
        kwargs['dynamo'] = False
    torch.onnx.export(model, inputs, file, **kwargs)


def _write_onnx(model: nn.Module, image: torch.Tensor, dynamic: bool, file: io.BytesIO) -> None:
    axes = {0: 'batch', 2: 'height', 3: 'width'} if dynamic else {}
    names = dict(input_names=['image'], dynamic_axes=dict(image=axes))
    _to_onnx(model, (image,), file, opset_version=OPSET, **names)


def _write_program(model: nn.Module, image: torch.Tensor, dynamic: bool, file: io.BytesIO) -> None:
    if not hasattr(torch.export, 'Dim') or not hasattr(torch.export.Dim, 'AUTO'):
        raise ImportError(f'.pt2 files need torch 2.6 or later, this is {torch.__version__}')
    auto = torch.export.Dim.AUTO
    axes = {0: auto, 2: auto, 3: auto} if dynamic else {}
    program = torch.export.export(model, (image,), dynamic_shapes=(axes,), strict=False)
    torch.export.save(program, file)


def _write_script(model: nn.Module, image: torch.Tensor, dynamic: bool, file: io.BytesIO) -> None:
    torch.jit.save(torch.jit.trace(model, image, check_trace=False), file)


_WRITERS = {'.onnx': _write_onnx, '.pt2': _write_program, '.pt': _write_script}


def read(
    file: str | io.BytesIO, suffix: str | None = None
) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    """A function of an exported file: from images to a list of tensors.

    Args:
        file (str | io.BytesIO): The file, or its content.
        suffix (str, optional): Its format, one of ``FORMATS``. Defaults to that of its name.
    """
    suffix = suffix or osp.splitext(file)[1]
    if suffix == '.onnx':
        import onnxruntime

        content = file if isinstance(file, str) else file.getvalue()
        session = onnxruntime.InferenceSession(content, providers=['CPUExecutionProvider'])
        name = session.get_inputs()[0].name
        return lambda image: [
            torch.from_numpy(array) for array in session.run(None, {name: image.numpy()})
        ]
    model = torch.export.load(file).module() if suffix == '.pt2' else torch.jit.load(file)

    @torch.no_grad()
    def run(image):
        out = model(image)
        return [out] if torch.is_tensor(out) else list(out)

    return run


def _largest(errors: Sequence[float]) -> float:
    """The largest number; NaN if one is, which Python's max() would lose."""
    return torch.tensor(errors).max().item()


@torch.no_grad()
def largest_error(model: nn.Module, exported: Callable, shapes: Sequence[tuple[int, ...]]) -> float:
    """The largest error of outputs, relative to the largest output, on random images."""
    model = _Tensors(model)
    errors: list[float] = []
    for shape in shapes:
        image = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        expected = model(image)
        if torch.is_tensor(expected):
            expected = [expected]
        for a, b in zip(exported(image), expected, strict=True):
            if a.shape != b.shape:
                return float('inf')
            errors.append(((a - b).abs().max() / b.abs().max()).item())
    return _largest(errors)


def export(
    model: nn.Module,
    out: str,
    shape: Sequence[int] = (224, 224),
    dynamic: bool = False,
    batch: int = 1,
    tolerance: float = 1e-4,
) -> float:
    """Write a backbone or classifier in another format, and check the file.

    What it computes there is compared with what the model computes, on random images; with
    ``dynamic`` also on images of other sizes.

    Args:
        model (nn.Module): In eval mode and usually in its deploy form, on the CPU. It takes
            normalized images (B, 3, H, W) and returns a tensor or a tuple of tensors.
        out (str): A file with the suffix '.onnx', '.pt2' (``torch.export``) or '.pt'
            (TorchScript). It is written only if it agrees.
        shape (Sequence[int]): Height and width of images. Defaults to (224, 224).
        dynamic (bool): Take images of other sizes, and other numbers of them. Then ``shape`` is an
            example: not the size that the model is made for (position embeddings would not be
            resized), and for a Swin more than one window in the last stage (above 224). Defaults
            to False.
        batch (int): Number of images, of the example if ``dynamic``. Defaults to 1.
        tolerance (float): Largest acceptable error, relative to the largest output. Defaults to
            1e-4.

    Returns:
        float: The largest error.

    Raises:
        ValueError: If the suffix is unknown, the model cannot be exported so, or the file does not
            agree with the model.
        ImportError: If a package or PyTorch is too old or missing.
        OSError: If the file cannot be written.
    """
    suffix = osp.splitext(out)[1]
    if suffix not in FORMATS:
        kinds = ', '.join(f'{k} ({v})' for k, v in FORMATS.items())
        raise ValueError(f'the suffix of {out!r} is none of {kinds}')
    check_output(out)
    height, width = shape
    if dynamic:  # what is 1 in the example stays 1
        batch = max(batch, 2)
    shapes = [(batch, 3, height, width)]
    if dynamic:
        shapes += [(1, 3, height + 64, width + 32), (3, 3, width + 65, height)]
    # In memory: on a full disk, torch's own writers end the process.
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        _WRITERS[suffix](_Tensors(model), torch.randn(shapes[0]), dynamic, file)
    file.seek(0)
    error = _checked_error(model, read(file, suffix), shapes, suffix, tolerance)
    write_bytes(out, file.getbuffer())
    return error


def _checked_error(
    model: nn.Module, exported: Callable, shapes: Sequence, suffix: str, tolerance: float
) -> float:
    try:
        error = largest_error(model, exported, shapes)
    except Exception as failure:  # each format has its own
        made_for, example = getattr(model, 'img_size', None), tuple(shapes[0][2:])
        hint = ''
        if isinstance(made_for, (tuple, list)) and tuple(made_for) == example:
            hint = (
                f', since it was traced with {example[0]}x{example[1]}, the size that it is made '
                'for, at which position embeddings are not resized (give another example)'
            )
        raise ValueError(
            f'the model as {FORMATS[suffix]} does not take images of other sizes{hint}: '
            f'{str(failure)[:200]}'
        ) from failure
    if not error <= tolerance:
        raise ValueError(
            f'the model as {FORMATS[suffix]} differs by {error:.1e}, more than {tolerance:.0e}: '
            'nothing is written'
        )
    return error


def export_whole(
    model: WholeModel,
    out: str,
    shape: Sequence[int],
    dynamic: bool = True,
    batch: int = 1,
    opset: int = OPSET,
) -> float:
    """Write a whole model as ONNX, and check the file.

    What it predicts there, on random images, is compared with what the model predicts; with
    ``dynamic`` also on images of other sizes. The file holds what a program has to know about it
    as metadata, see :class:`~repa_mm.export.session.Session`.

    Args:
        model (WholeModel): From :func:`~repa_mm.export.whole.whole_model`, on the CPU.
        out (str): A file with the suffix '.onnx'. It is written only if it agrees.
        shape (Sequence[int]): Height and width of images, an example if ``dynamic``.
        dynamic (bool): Take images of other sizes, and other numbers of them. Defaults to True.
        batch (int): Number of images, of the example if ``dynamic``. Defaults to 1.
        opset (int): Version of ONNX's operators. Defaults to 17.

    Returns:
        float: The largest share of objects (pixels of label maps; for classifiers, difference of a
        score) that differ.

    Raises:
        ValueError: If the suffix or the opset is not supported, the model cannot be exported so,
            or the file does not agree with the model.
        ImportError: If a package is missing.
        OSError: If the file cannot be written.
    """
    if osp.splitext(out)[1] != '.onnx':
        raise ValueError(f'whole models are written as .onnx, but the output is {out!r}')
    if opset not in OPSETS:
        raise ValueError(
            f'opset {opset} is not supported: choose one from {OPSETS[0]} to {OPSETS[-1]}'
        )
    check_output(out)
    shapes = [(batch, *shape)]
    if dynamic:
        # What is 1 in the example stays 1.
        height, width = shape
        shapes = [(max(batch, 2), *shape), (1, height + 64, width + 32), (3, width + 65, height)]
    import_onnx()
    file = whole_onnx(model, shapes[0], dynamic, opset)
    error = _checked_disagreement(model, file, shapes)
    write_bytes(out, file.getbuffer())
    return error


def import_onnx() -> None:
    """Check that ONNX and ONNX Runtime are there.

    Raises:
        ImportError: If not.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'the export needs ONNX and ONNX Runtime ({error}): pip install onnx onnxruntime'
        ) from error


def _checked_disagreement(model: WholeModel, file: io.BytesIO, shapes: Sequence) -> float:
    threshold = None
    if model.task == 'detection':
        # Trained detectors find nothing in random images: every box counts.
        threshold, file = model.predict.cfg.get('score_thr'), _without_threshold(file)
        model.predict.cfg['score_thr'] = 0.0
    try:
        session = Session(file)
        errors = [disagreement(model, session, model.example(*size)) for size in shapes]
    except ValueError as error:
        raise ValueError(f'the exported model does not take other images: {error}') from error
    finally:
        if threshold is not None:
            model.predict.cfg['score_thr'] = threshold
    error, tolerance = _largest(errors), TOLERANCES[model.task]
    if not error <= tolerance:
        raise ValueError(
            f'the exported model differs from PyTorch by {error:.1e}, more than {tolerance:.0e}: '
            'nothing is written'
        )
    return error


def _without_threshold(file: io.BytesIO) -> io.BytesIO:
    """The model with 0 for every positive threshold of the scores."""
    import onnx

    proto = onnx.load_from_string(file.getvalue())
    names = {n.input[4] for n in proto.graph.node if n.op_type == 'NonMaxSuppression'}
    constants = [(t.name, t) for t in proto.graph.initializer]
    constants += [
        (n.output[0], n.attribute[0].t) for n in proto.graph.node if n.op_type == 'Constant'
    ]
    for name, tensor in constants:
        if name in names:
            value = np.minimum(onnx.numpy_helper.to_array(tensor), 0)
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    return io.BytesIO(proto.SerializeToString())


def whole_onnx(model: WholeModel, shape: Sequence[int], dynamic: bool, opset: int) -> io.BytesIO:
    """The content of an ONNX file."""
    import onnx

    inputs, names = [model.example(*shape)], ['image']
    batch, (height, width) = 'batch', (1, 2) if model.preprocessing.in_graph else (2, 3)
    axes = dict(image={0: batch, height: 'height', width: 'width'}) if dynamic else {}
    if dynamic:
        axes.update((name, {0: batch}) for name in model.outputs)
    if model.option:
        name, value = model.option
        inputs.append(torch.tensor(value))
        names.append(name)
        if model.task == 'detection':  # one size for all images, or one each
            axes[name] = {0: 'sizes'}
    # In memory: on a full disk, torch's own writers end the process.
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        _to_onnx(
            model,
            tuple(inputs),
            file,
            opset_version=opset,
            input_names=names,
            output_names=list(model.outputs),
            dynamic_axes=axes,
        )
    proto = onnx.load_from_string(file.getvalue())
    if model.option:  # an input with an initial value can be left out
        value = np.array(model.option[1], np.int64)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, model.option[0]))
    onnx.helper.set_model_props(proto, model.metadata())
    return io.BytesIO(proto.SerializeToString())


@torch.no_grad()
def disagreement(model: WholeModel, session: Session, image: torch.Tensor) -> float:
    """How much an exported model differs from the model on images.

    Args:
        model (WholeModel): The model.
        session (Session): The exported model.
        image (torch.Tensor): Images, as the model takes them.

    Returns:
        float: For detectors, the share of objects without a counterpart: of the same label, with a
        score that differs by less than 1e-3, sides that differ by less than 0.1 pixels and a mask
        that differs by less than 0.01 on average; NaN if there is no object. For
        segmentors, the share of pixels. For classifiers, the largest difference of a score.
    """
    option = (torch.tensor(model.option[1]),) if model.option else ()
    expected = model(image, *option)
    if torch.is_tensor(expected):
        expected = (expected,)
    found = session(image.numpy())
    actual = [torch.from_numpy(np.asarray(found[name])) for name in model.outputs]
    if any(a.shape != b.shape for a, b in zip(actual, expected, strict=True)):
        return float('inf')
    if model.task == 'classification':
        return (actual[0] - expected[0]).abs().max().item()
    if model.task == 'segmentation':
        return (actual[0] != expected[0]).float().mean().item()
    if not (expected[2] >= 0).any():
        return float('nan')  # nothing is compared
    return max(lost_objects(actual, expected), lost_objects(expected, actual))


def lost_objects(found: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The share of objects without a counterpart among others, see :func:`disagreement`.

    Args:
        found (Sequence[torch.Tensor]): Boxes (B, N, 4), scores (B, N), labels (B, N) and perhaps
            masks (B, N, h, w).
        others (Sequence[torch.Tensor]): Likewise.
    """
    boxes, scores, labels = found[:3]
    is_object = labels >= 0
    fits = (boxes[:, :, None] - others[0][:, None]).abs().amax(-1) < 0.1
    fits &= (scores[:, :, None] - others[1][:, None]).abs() < 1e-3
    fits &= labels[:, :, None] == others[2][:, None]
    if len(found) > 3:
        for i, (masks, other) in enumerate(zip(found[3], others[3], strict=True)):
            fits[i] &= (
                torch.cdist(masks.flatten(1), other.flatten(1), p=1) < 0.01 * masks[0].numel()
            )
    lost = is_object & ~fits.any(2)
    return (lost.sum() / is_object.sum().clamp(min=1)).item()
