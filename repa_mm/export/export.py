"""Export models to ONNX. Files are written only if they agree with PyTorch."""

import copy
import io
import math
import os.path as osp
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence

import cv2
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS
from mmengine.structures import InstanceData

from repa_mm.config import build_images, build_model, dataset_config, load_config
from repa_mm.export.exported import ExportedModel
from repa_mm.export.session import Session
from repa_mm.export.whole import WholeModel, whole_model
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.faster.tracing import trace_any_size_
from repa_mm.features import relative_error
from repa_mm.files import replacing
from repa_mm.reparam import outermost, reparameterize_

OPSET = 17
# Largest share of differing objects or pixels, or largest difference of a score, to accept.
TOLERANCES = dict(
    detection=0.02, instances=0.02, panoptic=5e-3, segmentation=1e-3, classification=1e-4
)
# Largest error of a backbone's features to accept, relative to the largest feature.
TOLERANCE = 1e-4
NUM_IMAGES = 3


def export_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    shape: Sequence[int] | None = None,
    dynamic: bool | None = None,
    batch: int = 1,
    backbone: bool = False,
    preprocessing: bool = False,
    images: str | None = None,
    cfg_options: dict | None = None,
) -> tuple[str, float]:
    """Export the deploy form of a model, or a model with nothing to merge, to ONNX.

    Args:
        config (str): The model's config: a path, or the name of an installed config.
        checkpoint (str): Path of a checkpoint in either form.
        out (str): The file to write.
        shape (Sequence[int], optional): Height and width of images. Defaults to an example that
            suits the model if ``dynamic``, else to the windows of a model that slides, or to 224 by
            224.
        dynamic (bool, optional): Accept any number of images of any size. Defaults to True for
            whole models and to False for backbones.
        batch (int): Number of images. Defaults to 1.
        backbone (bool): Export only the backbone, or a classifier up to the logits. Defaults to
            False.
        preprocessing (bool): Normalize images in the graph. Defaults to False.
        images (str, optional): A folder of images on which to compare. Defaults to the config's
            test data, or to noise if the test data is missing.
        cfg_options (dict, optional): Values to override in the config.

    Returns:
        tuple: A description of what was exported and compared (str), and the difference from
        PyTorch (float), see :func:`export` and :func:`disagreement`.
    """
    cfg = load_config(config, cfg_options)
    model = model_to_export(cfg, checkpoint)
    if dynamic is None:
        dynamic = not backbone
    if shape is None:
        shape = 224, 224
        if dynamic:
            shape = example_shape(model)
        elif cfg.model.get('test_cfg', {}).get('mode') == 'slide' and not backbone:
            shape = model.test_cfg.crop_size
    if backbone:
        is_classifier = cfg.get('default_scope') == 'mmpretrain'
        error = export(model if is_classifier else model.backbone, out, shape, dynamic, batch)
        return f'{"classifier" if is_classifier else "backbone"}, compared on noise', error
    source = 'images'
    try:
        images = images_of(cfg, 'test', NUM_IMAGES, images)
    except FileNotFoundError:
        if images:
            raise
        source = 'noise, as the test data is not there'
        images = noise(cfg)
    content, error = agreeing_onnx(model, images, shape, dynamic, batch, preprocessing)
    _write(content, out)
    return f'{type(model).__name__}, compared on {source}', error


def model_to_export(cfg: Config, checkpoint: str) -> nn.Module:
    """Build a model and reparameterize it, if it has anything to merge.

    Args:
        cfg (Config): The config.
        checkpoint (str): Path of a checkpoint in either form.

    Returns:
        nn.Module: The model, with the class names of the checkpoint or else of the dataset in
        ``dataset_meta``.
    """
    model = build_model(cfg, checkpoint)
    if not model.dataset_meta.get('classes'):
        kind = dataset_config(cfg, 'test').type
        if isinstance(kind, str):
            with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
                kind = registry.get(kind)
        model.dataset_meta = kind.METAINFO
    if next(outermost(model), None):
        reparameterize_(model)
    return model


def example_shape(model: nn.Module) -> tuple[int, int]:
    """Return the height and width of an example to trace a model with, for images of any size.

    The size differs from the model's own, so that position embeddings are resized, and gives more
    than one window in the last stage of a Swin.
    """
    side = 224
    for module in model.modules():
        if isinstance(module, FastShiftWindowMSA):
            side = max(side, 32 * module.window_size)
    made_for = getattr(getattr(model, 'backbone', None), 'img_size', None)
    if isinstance(made_for, (list, tuple)):
        side = max(side, *made_for)
    return side + 32, side + 64


def images_of(cfg: Config, split: str, number: int, folder: str | None = None) -> list[dict]:
    """Read images through a config's test pipeline.

    Args:
        cfg (Config): Config with the test pipeline.
        split (str): Split of the dataset, 'train' or 'test'.
        number (int): Number of images, spread evenly over the dataset.
        folder (str, optional): A folder of images to take instead.

    Returns:
        list[dict]: Batches of one image.
    """
    dataset = build_images(cfg, split, folder)
    number = min(number, len(dataset))
    return [pseudo_collate([dataset[i * len(dataset) // number]]) for i in range(number)]


def noise(cfg: Config) -> list[dict]:
    """Return smooth random images after a config's test pipeline, as :func:`images_of` does."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(NUM_IMAGES):
            coarse = generator.integers(0, 256, (9, 12, 3), np.uint8)
            cv2.imwrite(osp.join(folder, f'{i}.png'), cv2.resize(coarse, (640, 480)))
        return images_of(cfg, 'test', NUM_IMAGES, folder)


def agreeing_onnx(
    model: nn.Module,
    images: Sequence[dict],
    shape: Sequence[int],
    dynamic: bool = True,
    batch: int = 1,
    preprocessing: bool = False,
) -> tuple[bytes, float]:
    """Return the content of an ONNX file of a whole model, from images to predictions.

    Predictions of the file are compared with ``model.test_step``. For detectors, all boxes are
    compared, also boxes below the score threshold. Metadata in the file describes its inputs and
    outputs, see :class:`~repa_mm.export.session.Session`.

    Args:
        model (nn.Module): A detector, segmentor or classifier in eval mode, on the CPU.
        images (Sequence[dict]): Batches of one image from a data loader, on which to compare.
        shape (Sequence[int]): Height and width of images, or of the example if ``dynamic``.
        dynamic (bool): Accept other sizes and numbers of images. Some are compared, too. Defaults
            to True.
        batch (int): Number of images, or of the example if ``dynamic``. Defaults to 1.
        preprocessing (bool): Take uint8 images (B, H, W, 3) as OpenCV reads them, and normalize
            them in the graph. Defaults to False, which takes normalized images (B, 3, H, W).

    Returns:
        tuple: The content, and the difference from PyTorch, see :func:`disagreement`.

    Raises:
        ValueError: If the file would not agree with the model.
    """
    whole = whole_model(model, preprocessing)
    height, width = shape
    if dynamic:
        batch = max(batch, 2)  # tracing fixes a dimension of size 1
        larger, other = (height + 64, width + 32), (width + 65, height)
        mixed = [shape, larger if whole.task == 'detection' else shape]
        batches = [images[0], *(resized(images, s) for s in (mixed, [larger], [other] * 3))]
    else:
        scale = 1.5 if whole.slides else 1  # several windows
        batches = [resized(images, [(round(scale * height), round(scale * width))] * batch)]
    content = whole_onnx(whole, (batch, height, width), dynamic)
    check = content
    if whole.task == 'detection':
        # Trained detectors find no objects in noise, so compare all boxes.
        check, model = _without_threshold(content), copy.deepcopy(model)
        head = model.roi_head if hasattr(model, 'roi_head') else model.bbox_head
        head.test_cfg['score_thr'] = 0.0
    exported = ExportedModel(check, model.data_preprocessor)
    error = _largest([disagreement(model, exported, data) for data in batches])
    _check(error, TOLERANCES[whole.task])
    return content, error


def resized(images: Sequence[dict], sizes: Sequence[tuple[int, int]]) -> dict:
    """Return a batch of images, resized to ``sizes`` (height, width), as from a data loader."""
    inputs, samples = [], []
    for i, size in enumerate(sizes):
        data = images[i % len(images)]
        pixels = F.interpolate(data['inputs'][0][None].float(), tuple(size), mode='bilinear')
        inputs.append(pixels[0].byte())
        samples.append(copy.deepcopy(data['data_samples'][0]))
        samples[-1].set_metainfo(
            dict(
                dict.fromkeys(('img_shape', 'pad_shape', 'ori_shape'), tuple(size)),
                scale_factor=(1.0, 1.0),
            )
        )
    return dict(inputs=inputs, data_samples=samples)


def whole_onnx(model: WholeModel, shape: Sequence[int], dynamic: bool = True) -> bytes:
    """Return the content of an ONNX file.

    Args:
        model (WholeModel): From :func:`~repa_mm.export.whole.whole_model`.
        shape (Sequence[int]): Number of images, height and width.
        dynamic (bool): Accept other sizes and numbers of images. Defaults to True.
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
    onnx.helper.set_model_props(proto, model.metadata())
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


def _without_threshold(content: bytes) -> bytes:
    """Return the ONNX model with positive score thresholds replaced by 0."""
    import onnx

    proto = onnx.load_from_string(content)
    for node in proto.graph.node:
        if node.op_type == 'ThresholdedRelu':
            node.attribute[0].f = 0
    names = {n.input[4] for n in proto.graph.node if n.op_type == 'NonMaxSuppression'}
    constants = [(t.name, t) for t in proto.graph.initializer]
    constants += [
        (n.output[0], n.attribute[0].t) for n in proto.graph.node if n.op_type == 'Constant'
    ]
    for name, tensor in constants:
        if name in names:
            value = np.minimum(onnx.numpy_helper.to_array(tensor), 0)
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    return proto.SerializeToString()


@torch.no_grad()
def disagreement(model: nn.Module, exported: ExportedModel, data: dict) -> float:
    """Measure how much an exported model differs from the model on a batch of images.

    Args:
        model (nn.Module): The model.
        exported (ExportedModel): The exported model.
        data (dict): Batch from a data loader.

    Returns:
        float: For detectors, the share of objects without a counterpart, NaN if there are no
        objects. A counterpart has the same label, a score within 1e-3, box coordinates within 0.1
        pixels, and a mask that differs in less than 2 % of the box's area plus 4 pixels. For
        segmentors and panoptic maps, the share of differing pixels. For classifiers, the largest
        difference of a score. The largest of them for a model with several outputs.
    """
    pairs = list(zip(exported.test_step(copy.deepcopy(data)), model.test_step(copy.deepcopy(data))))
    errors = []
    if 'pred_instances' in pairs[0][0]:
        objects = [(a.pred_instances, b.pred_instances) for a, b in pairs]
        lost = sum(lost_objects(a, b) + lost_objects(b, a) for a, b in objects)
        total = sum(len(a) + len(b) for a, b in objects)
        errors.append(lost / total if total else math.nan)
    for a, b in pairs:
        if 'pred_panoptic_seg' in b:
            differ = a.pred_panoptic_seg.sem_seg != b.pred_panoptic_seg.sem_seg
            errors.append(differ.float().mean())
        if 'pred_sem_seg' in b:
            errors.append((a.pred_sem_seg.data != b.pred_sem_seg.data).float().mean())
        if 'pred_score' in b:
            errors.append((a.pred_score - b.pred_score).abs().max())
    return _largest(errors)


def lost_objects(found: InstanceData, others: InstanceData) -> int:
    """Return the number of objects without a counterpart among others, see :func:`disagreement`.

    Args:
        found (InstanceData): Objects with bboxes (N, 4), scores (N, ), labels (N, ) and optionally
            masks (N, H, W).
        others (InstanceData): Objects with the same fields.
    """
    fits = (found.bboxes[:, None] - others.bboxes).abs().amax(-1) < 0.1
    fits &= (found.scores[:, None] - others.scores).abs() < 1e-3
    fits &= found.labels[:, None] == others.labels
    if 'masks' in found:
        areas = (found.bboxes[:, 2:] - found.bboxes[:, :2]).prod(1)
        for i, j in fits.nonzero().tolist():
            differing = (found.masks[i] != others.masks[j]).sum()
            fits[i, j] = differing < 0.02 * areas[i] + 4
    return int((~fits.any(1)).sum())


def _largest(errors: Iterable) -> float:
    """Return the largest number, or NaN if there is a NaN, which Python's max() would lose."""
    return torch.tensor(list(errors)).max().item()


def _check(error: float, tolerance: float) -> None:
    if not error <= tolerance:
        raise ValueError(
            f'the exported model differs from PyTorch by {error:.1e}, more than {tolerance:.0e}: '
            'nothing is written'
        )


def _write(content: bytes, out: str) -> None:
    with replacing(out) as path, open(path, 'wb') as file:
        file.write(content)


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


def read(file: str | bytes) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Return a function that runs a backbone's ONNX file, or its content, on images."""
    session = Session(file)
    return lambda image: [torch.from_numpy(x) for x in session(image.numpy()).values()]


@torch.no_grad()
def largest_error(model: nn.Module, exported: Callable, shapes: Sequence[tuple[int, ...]]) -> float:
    """Measure the largest error of outputs on noise, relative to the largest output.

    Args:
        model (nn.Module): Model that maps images to a tuple of tensors.
        exported (Callable): Exported model, which maps images to a sequence of tensors.
        shapes (Sequence[tuple[int]]): Shapes (B, 3, H, W) of the images.
    """
    errors = []
    for shape in shapes:
        image = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        errors.append(relative_error(exported(image), model(image)))
    return _largest(errors)


@torch.no_grad()
def export(
    model: nn.Module,
    out: str,
    shape: Sequence[int] = (224, 224),
    dynamic: bool = False,
    batch: int = 1,
) -> float:
    """Export a backbone or classifier to ONNX.

    Outputs of the file are compared with the model's on noise, and if ``dynamic`` also on noise of
    other sizes.

    Args:
        model (nn.Module): A model in eval mode on the CPU, usually in its deploy form, that maps
            normalized images (B, 3, H, W) to a tensor or a tuple of tensors.
        out (str): The file. It is written only if it agrees.
        shape (Sequence[int]): Height and width of images. Defaults to (224, 224).
        dynamic (bool): Accept other sizes and numbers of images. ``shape`` is then an example. It
            must differ from the model's own size, so that position embeddings are resized, and
            give a Swin more than one window in the last stage (above 224). Defaults to False.
        batch (int): Number of images, or of the example if ``dynamic``. Defaults to 1.

    Returns:
        float: The largest error, relative to the largest output.

    Raises:
        ValueError: If the file does not agree with the model.
    """
    height, width = shape
    model = _Tensors(copy.deepcopy(model))
    trace_any_size_(model)
    shapes = [(batch, 3, height, width)]
    if dynamic:  # tracing fixes a dimension of size 1
        shapes = [(max(batch, 2), 3, height, width), (1, 3, height + 64, width + 32)]
        shapes.append((3, 3, width + 65, height))
    axes = {0: 'batch', 2: 'height', 3: 'width'} if dynamic else {}
    names = dict(input_names=['image'], dynamic_axes=dict(image=axes))
    content = to_onnx(model, (torch.randn(shapes[0]),), **names)
    error = largest_error(model, read(content), shapes)
    _check(error, TOLERANCE)
    _write(content, out)
    return error
