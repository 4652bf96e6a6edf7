"""Deploy forms in other formats."""

import io
import os.path as osp
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn

from repa_mm.files import check_output, write_bytes

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


def _write_onnx(model: nn.Module, image: torch.Tensor, dynamic: bool, file: io.BytesIO) -> None:
    axes = {0: 'batch', 2: 'height', 3: 'width'} if dynamic else {}
    kwargs = {}
    # The exporter that does not need onnxscript, and takes a second.
    if 'dynamo' in torch.onnx.export.__code__.co_varnames:
        kwargs = dict(dynamo=False)
    torch.onnx.export(
        model,
        image,
        file,
        opset_version=17,
        input_names=['image'],
        dynamic_axes=dict(image=axes),
        **kwargs,
    )


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
        for a, b in zip(exported(image), expected):
            if a.shape != b.shape:
                return float('inf')
            errors.append(((a - b).abs().max() / b.abs().max()).item())
    return max(errors)


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
        raise ValueError(
            f'the model as {FORMATS[suffix]} does not take images of other sizes: '
            f'{str(failure)[:200]}'
        ) from failure
    if not error <= tolerance:
        raise ValueError(
            f'the model as {FORMATS[suffix]} differs by {error:.1e}, more than {tolerance:.0e}: '
            'nothing is written'
        )
    return error
