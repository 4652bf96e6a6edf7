"""The content of ONNX files, for models that agree with PyTorch."""

import copy
import io
import os.path as osp
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import cv2
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.config import Config

from repa_mm.apis import read_images
from repa_mm.apis.images import input_size
from repa_mm.export.comparison import agreement_of, num_found, overlaps
from repa_mm.export.runtime_model import ExportedModel
from repa_mm.export.session import OPTIONS
from repa_mm.export.whole import WholeModel, whole_model
from repa_mm.surgery import copied

OPSET = 17
#: By task the largest error of a file, and what it is a share of.
MAX_ERROR = dict(
    detection=(0.02, 'of the objects'),
    instances=(0.02, 'of the objects'),
    panoptic=(5e-3, 'of the pixels'),
    segmentation=(1e-3, 'of the pixels'),
    classification=(1e-4, 'of a score'),
)
#: Number of images to compare on.
NUM_IMAGES = 3


def example_shape(model: nn.Module) -> tuple[int, int]:
    """Return the height and width of an example to trace a model with, for images of any size.

    It differs from the model's own size, so that position embeddings are resized.
    """
    side = max(224, *input_size(model))
    return side + 32, side + 64


def noise(cfg: Config) -> list[dict]:
    """Return smooth random images after a config's test pipeline, as batches of one image."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(NUM_IMAGES):
            coarse = generator.integers(0, 256, (9, 12, 3), np.uint8)
            cv2.imwrite(osp.join(folder, f'{i}.png'), cv2.resize(coarse, (640, 480)))
        return read_images(cfg, 'test', NUM_IMAGES, folder)


class Difference(float):
    """A share of what two models find, and ``of`` how many objects, pixels or scores."""

    of = 0


def agreeing_onnx(
    model: nn.Module,
    images: Sequence[dict] | None,
    shape: Sequence[int] | None = None,
    dynamic: bool = True,
    batch: int = 1,
) -> tuple[bytes, Difference]:
    """Return the content of an ONNX file of a whole model, from normalized images to predictions.

    The file is compared with ``model.test_step``; that of a detector also without its score
    threshold, since trained detectors find few objects in a few images.

    Args:
        model (nn.Module): A detector, segmentor or classifier in eval mode, on any device.
        images (Sequence[dict], optional): Batches of one image, as from a data loader, to compare
            on. None: noise through the pipeline of ``model.cfg``, in which a trained detector finds
            no objects; the metadata call such a file 'unchecked'.
        shape (Sequence[int], optional): Height and width of images, or of the example if
            ``dynamic``. Defaults to a size that suits the model.
        dynamic (bool): Accept other sizes and numbers of images. Defaults to True.
        batch (int): Number of images, or of the example if ``dynamic``. Defaults to 1.

    Returns:
        tuple: The content, and the largest difference from PyTorch in a batch: 1 minus the strict
        :func:`~repa_mm.export.agreement`, ``of`` so many objects in all batches. From a difference
        above the limit, what the model itself changes by :func:`rounding` is subtracted.

    Raises:
        ValueError: If the model predicts in a way that the export does not know, or if the file
            would not agree with the model.
    """
    noted = dict(unchecked='1') if images is None else {}
    images = noise(model.cfg) if images is None else images
    models = [model, *_without_threshold(model)]
    wholes = [whole_model(one) for one in models]
    fixed = model.test_cfg.crop_size if wholes[0].slides else (224, 224)
    shape = tuple(shape or (example_shape(model) if dynamic else fixed))
    batch = max(batch, 2) if dynamic else batch  # tracing fixes a dimension of size 1
    batches, errors, number = [*cases(wholes[0], images, shape, dynamic, batch)], [], 0.0
    largest, share = MAX_ERROR[wholes[0].task]
    example = batch, len(images[0]['inputs'][0]), *shape
    contents = [whole_onnx(whole, example, dynamic, noted) for whole in wholes]
    for one, content in zip(models, contents):
        exported = ExportedModel(content, model.data_preprocessor)
        for data in batches:
            found = overlaps(one, exported, [data], strict=True)
            if num_found(found):
                error = 1 - agreement_of(found)
                if error > largest:
                    error = max(error - rounding(one, data), 0.0)
                if not error <= largest + 1e-9:  # or NaN
                    raise ValueError(
                        f'the exported model differs from PyTorch by {error:.1e} {share}, more '
                        f'than {largest:.0e}: nothing is written'
                    )
                errors.append(error)
                number += num_found(found) / 2
            elif one is models[-1]:
                raise ValueError(
                    'the model finds nothing in the images to compare on: give others (--images)'
                )
    result = Difference(max(errors))
    result.of = round(number)
    return contents[0], result


def cases(
    whole: WholeModel, images: Sequence[dict], shape: tuple[int, int], dynamic: bool, batch: int
) -> Iterator[dict]:
    """Yield batches to compare a file on, of several sizes and numbers if ``dynamic``."""
    height, width = shape
    if not dynamic:
        scale = 1.5 if whole.slides else 1  # several windows
        yield resized(images, [(round(scale * height), round(scale * width))] * batch)
        return
    larger = height + 64, width + 32
    yield images[0]
    yield resized(images, [shape, larger if whole.task == 'detection' else shape])
    yield resized(images, [larger])
    yield resized(images, [(width + 65, height)] * 3)


def rounding(model: nn.Module, data: dict) -> float:
    """Return how far a model differs from itself if images change by as much as rounding does.

    In an image of one colour, scores are equal, and rounding decides which boxes are suppressed.
    It is twice the mean of four changes, each of which changes the order of some boxes only.
    """
    generator, total = torch.Generator().manual_seed(0), 0.0
    for _ in range(4):
        noise = (torch.randn(x.shape, generator=generator) for x in data['inputs'])
        levels = (1e-6 if x.is_floating_point() else 1e-4 for x in data['inputs'])
        inputs = [x + level * y for x, y, level in zip(data['inputs'], noise, levels)]
        other = SimpleNamespace(test_step=lambda x, y=inputs: model.test_step(dict(x, inputs=y)))
        total += 1 - agreement_of(overlaps(model, other, [data], strict=True))
    return total / 2


def resized(images: Sequence[dict], sizes: Sequence[tuple[int, int]]) -> dict:
    """Return a batch of images, resized to ``sizes`` (height, width), as from a data loader."""
    inputs, samples = [], []
    for i, size in enumerate(sizes):
        data = images[i % len(images)]
        image = data['inputs'][0]
        pixels = F.interpolate(image[None].float(), tuple(size), mode='bilinear')
        inputs.append(pixels[0].to(image.dtype))
        samples.append(copy.deepcopy(data['data_samples'][0]))
        shapes = dict.fromkeys(('img_shape', 'pad_shape', 'ori_shape'), tuple(size))
        samples[-1].set_metainfo(dict(shapes, scale_factor=(1.0, 1.0)))
    return dict(inputs=inputs, data_samples=samples)


def whole_onnx(
    model: WholeModel, shape: Sequence[int], dynamic: bool = True, metadata: dict | None = None
) -> bytes:
    """Return the content of an ONNX file, traced with images of a shape (B, C, H, W)."""
    import onnx

    inputs, names = [torch.randn(*shape)], ['image']
    axes = dict(image={0: 'batch', 2: 'height', 3: 'width'}) if dynamic else {}
    if dynamic:
        axes.update((name, {0: 'batch'}) for name in model.outputs)
    if model.option:
        inputs.append(torch.tensor(OPTIONS[model.option]))
        names.append(model.option)
        if model.task == 'detection':  # one size for all images, or one size each
            axes[model.option] = {0: 'sizes'}
    content = to_onnx(
        model, tuple(inputs), input_names=names, output_names=list(model.outputs), dynamic_axes=axes
    )
    proto = onnx.load_from_string(content)
    if model.option:  # an input with an initial value can be left out
        value = np.array(OPTIONS[model.option], np.int64)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, model.option))
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
