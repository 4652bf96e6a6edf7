"""The content of ONNX files, for models that agree with PyTorch."""

import copy
import io
import os.path as osp
import tempfile
import warnings
from collections.abc import Sequence

import cv2
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.config import Config

from repa_mm.export.comparison import agreement
from repa_mm.export.runtime_model import ExportedModel
from repa_mm.export.session import Session
from repa_mm.export.whole import WholeModel, whole_model
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.faster.tracing import trace_any_size_
from repa_mm.features import relative_error
from repa_mm.opening import read_images
from repa_mm.surgery import copied

OPSET = 17
# Largest share of differing objects or pixels, or difference of a score, to accept.
TOLERANCES = dict(
    detection=0.02, instances=0.02, panoptic=5e-3, segmentation=1e-3, classification=1e-4
)
# Largest error of a backbone's features to accept, relative to the largest feature.
TOLERANCE = 1e-4
NUM_IMAGES = 3


def example_shape(model: nn.Module) -> tuple[int, int]:
    """Return the height and width of an example to trace a model with, for images of any size.

    The size differs from the model's own, so that position embeddings are resized. The last stage
    of a Swin gets a whole window at least, as MMPretrain's refuses smaller maps.
    """
    side = 224
    for module in model.modules():
        if isinstance(module, FastShiftWindowMSA):
            side = max(side, 32 * module.window_size)
    made_for = getattr(getattr(model, 'backbone', None), 'img_size', None)
    if isinstance(made_for, (list, tuple)):
        side = max(side, *made_for)
    return side + 32, side + 64


def noise(cfg: Config) -> list[dict]:
    """Return smooth random images after a config's test pipeline, as batches of one image."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(NUM_IMAGES):
            coarse = generator.integers(0, 256, (9, 12, 3), np.uint8)
            cv2.imwrite(osp.join(folder, f'{i}.png'), cv2.resize(coarse, (640, 480)))
        return read_images(cfg, 'test', NUM_IMAGES, folder)


def agreeing_onnx(
    model: nn.Module,
    images: Sequence[dict] | None,
    shape: Sequence[int] | None = None,
    dynamic: bool = True,
    batch: int = 1,
    preprocessing: bool = False,
) -> tuple[bytes, float]:
    """Return the content of an ONNX file of a whole model, from images to predictions.

    Predictions of the file are compared with ``model.test_step``. For detectors, boxes below the
    score threshold are compared, too, in a second file without it: in a few images, trained
    detectors find few objects. Metadata in the file describes its inputs and outputs, see
    :class:`~repa_mm.export.Session`.

    Args:
        model (nn.Module): A detector, segmentor or classifier in eval mode, on any device.
        images (Sequence[dict], optional): Batches of one image, as from a data loader, on which to
            compare. None: noise through the pipeline of ``model.cfg``, in which a trained detector
            finds no objects. The metadata call such a file 'unchecked'.
        shape (Sequence[int], optional): Height and width of images, or of the example if
            ``dynamic``. Defaults to an example that suits the model; if not ``dynamic``, to the
            windows of a model that slides, or to 224 by 224.
        dynamic (bool): Accept other sizes and numbers of images. Some are compared, too. Defaults
            to True.
        batch (int): Number of images, or of the example if ``dynamic``. Defaults to 1.
        preprocessing (bool): Take uint8 images (B, H, W, C) as OpenCV reads them, and normalize
            them in the graph. Defaults to False, which takes normalized images (B, C, H, W).

    Returns:
        tuple: The content, and the largest difference from PyTorch in a batch: 1 minus the exact
        :func:`~repa_mm.export.agreement`.

    Raises:
        ValueError: If the file would not agree with the model.
    """
    noted = dict(unchecked='1') if images is None else {}
    images = noise(model.cfg) if images is None else images
    models = [model, *_without_threshold(model)]
    wholes = [whole_model(m, preprocessing) for m in models]
    task, slides = wholes[0].task, wholes[0].slides
    fixed = model.test_cfg.crop_size if slides else (224, 224)
    height, width = shape = tuple(shape or (example_shape(model) if dynamic else fixed))
    tinted = [_tinted(data) for data in images] if preprocessing else images
    if dynamic:
        batch = max(batch, 2)  # tracing fixes a dimension of size 1
        larger, other = (height + 64, width + 32), (width + 65, height)
        mixed = [shape, larger if task == 'detection' else shape]
        batches = [images[0], *(resized(tinted, s) for s in (mixed, [larger], [other] * 3))]
    else:
        scale = 1.5 if slides else 1  # several windows
        batches = [resized(tinted, [(round(scale * height), round(scale * width))] * batch)]
    example = batch, len(images[0]['inputs'][0]), height, width
    contents = [whole_onnx(whole, example, dynamic, noted) for whole in wholes]
    *limited, last = (_differences(*pair, batches) for pair in zip(models, contents))
    # NaN where no box is above the threshold, for either.
    differences = torch.cat([*(x.nan_to_num() for x in limited), last])
    error = differences.max().item()  # NaN if there is a NaN
    _check(error, TOLERANCES[task])
    return contents[0], error


def _differences(model: nn.Module, content: bytes, batches: Sequence[dict]) -> torch.Tensor:
    """Return the difference of an ONNX file's content from PyTorch on each batch."""
    exported = ExportedModel(content, model.data_preprocessor)
    return torch.tensor([1 - agreement(model, exported, [data], exact=True) for data in batches])


def resized(images: Sequence[dict], sizes: Sequence[tuple[int, int]]) -> dict:
    """Return a batch of images, resized to ``sizes`` (height, width), as from a data loader."""
    inputs, samples = [], []
    for i, size in enumerate(sizes):
        data = images[i % len(images)]
        image = data['inputs'][0]
        pixels = F.interpolate(image[None].float(), tuple(size), mode='bilinear')
        inputs.append(pixels[0].to(image.dtype))
        samples.append(copy.deepcopy(data['data_samples'][0]))
        samples[-1].set_metainfo(
            dict(
                dict.fromkeys(('img_shape', 'pad_shape', 'ori_shape'), tuple(size)),
                scale_factor=(1.0, 1.0),
            )
        )
    return dict(inputs=inputs, data_samples=samples)


def _tinted(data: dict) -> dict:
    """Return a batch of one image in colour, since gray ones do not tell swapped channels."""
    (image,) = data['inputs']
    if (image == image[:1]).all():
        tint = torch.linspace(1, 0.5, len(image))[:, None, None]
        image = (image * tint).to(image.dtype)
    return dict(data, inputs=[image])


def whole_onnx(
    model: WholeModel, shape: Sequence[int], dynamic: bool = True, metadata: dict | None = None
) -> bytes:
    """Return the content of an ONNX file.

    Args:
        model (WholeModel): From :func:`~repa_mm.export.whole_model`.
        shape (Sequence[int]): Number of images, channels, height and width.
        dynamic (bool): Accept other sizes and numbers of images. Defaults to True.
        metadata (dict, optional): Metadata of the file beside the model's, as strings.
    """
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
        if model.task == 'detection':  # one size for all images, or one size each
            axes[name] = {0: 'sizes'}
    content = to_onnx(
        model, tuple(inputs), input_names=names, output_names=list(model.outputs), dynamic_axes=axes
    )
    proto = onnx.load_from_string(content)
    if model.option:  # an input with an initial value can be left out
        value = np.array(model.option[1], np.int64)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, model.option[0]))
    onnx.helper.set_model_props(proto, model.metadata() | (metadata or {}))
    return proto.SerializeToString()


def to_onnx(model: nn.Module, inputs: tuple, **kwargs) -> bytes:
    """Return the content of an ONNX file, from PyTorch's tracing exporter."""
    # The tracing exporter needs no onnxscript, and takes a second.
    if 'dynamo' in torch.onnx.export.__code__.co_varnames:
        kwargs['dynamo'] = False
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        torch.onnx.export(model, inputs, file, opset_version=OPSET, **kwargs)
    return file.getvalue()


def _without_threshold(model: nn.Module) -> list[nn.Module]:
    """Return a copy of a detector without its score threshold, if it has one."""
    for name in ('roi_head', 'bbox_head'):
        cfg = getattr(getattr(model, name, None), 'test_cfg', None) or {}
        if cfg.get('score_thr'):
            model = copied(model)
            getattr(model, name).test_cfg['score_thr'] = 0.0
            return [model]
    return []


def _check(error: float, tolerance: float) -> None:
    if not error <= tolerance:
        raise ValueError(
            f'the exported model differs from PyTorch by {error:.1e}, more than {tolerance:.0e}: '
            'nothing is written'
        )


class _Tensors(nn.Module):
    """A model whose output is a flat tuple of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Exporters restore the mode of the outermost module.
        self.training = model.training

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.model(image)
        return (out,) if torch.is_tensor(out) else tuple(out)


@torch.no_grad()
def onnx_backbone(
    model: nn.Module, images: torch.Tensor, dynamic: bool = False
) -> tuple[bytes, float]:
    """Return the content of an ONNX file of a backbone, or of a classifier up to the logits.

    Outputs of the file are compared with the model's on the images, and if ``dynamic`` also on
    other numbers and sizes of images.

    Args:
        model (nn.Module): A model in eval mode on the CPU, usually in its deploy form, that maps
            normalized images to a tensor or a tuple of tensors.
        images (torch.Tensor): Normalized images (B, C, H, W).
        dynamic (bool): Accept other sizes and numbers of images. The size of the images must then
            differ from the model's own, so that position embeddings are resized, and give a Swin
            more than one window in the last stage (above 224). Defaults to False.

    Returns:
        tuple: The content, and the largest error, relative to the largest output.

    Raises:
        ValueError: If the file would not agree with the model.
    """
    model = _Tensors(copied(model))
    trace_any_size_(model)
    batches, axes = [images], {}
    if dynamic:
        height, width = images.shape[2:]
        larger, other = (height + 64, width + 32), (width + 65, height)
        twice = torch.cat([images, images])  # tracing fixes a dimension of size 1
        more = torch.cat([twice, images])
        batches = [twice, F.interpolate(images[:1], larger), F.interpolate(more, other)]
        axes = {0: 'batch', 2: 'height', 3: 'width'}
    names = dict(input_names=['image'], dynamic_axes=dict(image=axes))
    content = to_onnx(model, (batches[0],), **names)
    session = Session(content)
    errors = []
    for batch in batches:
        found = [torch.from_numpy(x) for x in session(batch.numpy()).values()]
        errors.append(relative_error(found, model(batch)))
    error = torch.tensor(errors).max().item()  # NaN if there is a NaN
    _check(error, TOLERANCE)
    return content, error
