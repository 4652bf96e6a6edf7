"""Static int8 models for OpenVINO, by NNCF."""

import io
import logging
import os.path as osp
import re
import tempfile
from collections.abc import Sequence

import numpy as np

from repa_mm.export.session import Session
from repa_mm.files import check_output, write_bytes

#: Fewer images do not tell the range of activations.
MIN_IMAGES = 4


def products_of(layer: str, names: Sequence[str]) -> list[str]:
    """The products of a layer among the names of an exported model's operations.

    Args:
        layer (str): Its name in the model, from :func:`~repa_mm.export.sensitivity.sensitivities`.
        names (Sequence[str]): Such as '/backbone/stages.0/blocks.0/ffn/fc1/Gemm'.
    """
    owner, _, function = layer.rpartition('.')
    # What a module multiplies itself stands beside its modules.
    parts = (owner if function == 'addmm' else layer).split('.')
    # Modules in containers have the container's name: blocks.0.
    where = re.sub(r'\.(?=\d+(\.|$))', '\0', '.'.join(parts)).split('.')
    where = [part.replace('\0', '.') for part in where]
    for start in (0, -2):  # a tracer leaves out containers that it does not call
        path = '/'.join(re.escape(part) for part in where[start:])
        # A module or product that is run several times is numbered.
        pattern = re.compile(rf'(.*/)?{path}(_\d+)?/(Gemm|MatMul|Conv)(_\d+)?(/WithoutBiases)?')
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            return found
    return []


def quantize(
    content: io.BytesIO,
    images: Sequence[np.ndarray],
    out: str,
    keep_float: Sequence[str] = (),
    shape: Sequence[int] | None = None,
) -> int:
    """Write a whole model with products of 8 bits, for OpenVINO.

    Weights have a scale for each output channel and activations one for the tensor, from what they
    are on some images.

    Args:
        content (io.BytesIO): The model as ONNX, from :func:`~repa_mm.export.export.export_whole`.
        images (Sequence[np.ndarray]): Batches of images that the model takes.
        out (str): A file with the suffix '.xml'. The weights are in '.bin' beside it.
        keep_float (Sequence[str]): Names of layers to keep in float.
        shape (Sequence[int], optional): Batch size, height and width that the file is to be fixed
            to. Defaults to None: any.

    Returns:
        int: Number of products in 8 bits.

    Raises:
        ValueError: If the images are too few, or the suffix is another.
        ImportError: If OpenVINO or NNCF is not installed.
        OSError: If the file cannot be written.
    """
    if osp.splitext(out)[1] != '.xml':
        raise ValueError(f'models for OpenVINO are written as .xml, but the output is {out!r}')
    if len(images) < MIN_IMAGES:
        raise ValueError(
            f'{len(images)} image{"s" * (len(images) != 1)} to calibrate on are too few: the '
            f'ranges of activations need at least {MIN_IMAGES}, better 64'
        )
    weights = osp.splitext(out)[0] + '.bin'
    for path in (out, weights):
        check_output(path)
    nncf, openvino = import_nncf()
    metadata = Session(content).metadata
    model = openvino.Core().read_model(content.getvalue(), b'')
    names = [
        op.get_friendly_name()
        for op in model.get_ops()
        if op.get_type_name() in ('MatMul', 'Convolution', 'ConvolutionBackpropData')
    ]
    ignored = [name for layer in keep_float for name in products_of(layer, names)]
    nncf.set_log_level(logging.ERROR)
    quantized = nncf.quantize(
        model,
        nncf.Dataset(images, lambda image: {'image': image}),
        subset_size=len(images),
        model_type=nncf.ModelType.TRANSFORMER,
        ignored_scope=nncf.IgnoredScope(names=ignored),
    )
    if shape is not None:
        batch, height, width = shape
        in_graph = metadata['preprocessing'] == '1'
        image = (height, width, 3) if in_graph else (3, height, width)
        quantized.reshape([batch, *image])
    for key, value in dict(metadata, precision='int8').items():
        quantized.set_rt_info(value, ['repa_mm', key])
    with tempfile.TemporaryDirectory() as folder:
        path = osp.join(folder, 'model.xml')
        openvino.save_model(quantized, path, compress_to_fp16=False)
        # The weights first: a reader that finds the .xml finds its weights.
        for source, target in ((path[:-3] + 'bin', weights), (path, out)):
            with open(source, 'rb') as file:
                write_bytes(target, file.read())
    return sum(op.get_type_name() == 'FakeQuantize' for op in quantized.get_ops())


def import_nncf() -> tuple:
    """NNCF and OpenVINO.

    Raises:
        ImportError: If one of them is not installed.
    """
    try:
        import nncf
        import openvino
    except ImportError as error:
        raise ImportError(
            f'quantization needs OpenVINO and NNCF ({error}): pip install openvino nncf'
        ) from error
    return nncf, openvino
