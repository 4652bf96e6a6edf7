"""Whole models with products of 8 bits, for OpenVINO, by NNCF."""

import logging
import os
import os.path as osp
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.structures import BaseDataElement
from mmengine.utils import track_iter_progress
from torch.overrides import TorchFunctionMode

from repa_mm.config import load_config
from repa_mm.export.export import agreeing_onnx, example_shape, images_of, model_to_export
from repa_mm.export.session import Session
from repa_mm.reparam import set_shortcut

#: What all layers in 8 bits may cost: a cosine of 1 - 1e-3.
MAX_ERROR = 2e-3
#: Images that the errors of layers are measured on, and the most pixels of their sides: every layer
#: runs the model once.
NUM_TABLE, TABLE_SIDE = 2, 448


def quantize_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    num_images: int = 64,
    images: str | None = None,
    max_error: float = MAX_ERROR,
    preprocessing: bool = False,
    shape: Sequence[int] | None = None,
    batch: int = 1,
) -> tuple[dict[str, float], list[str]]:
    """Write a whole model with products of 8 bits.

    Weights have a scale for each output channel and activations one for the tensor, from what they
    are on some images. Merged FFNs have their shortcut outside of their matrices, since a 1 on the
    diagonal of a matrix takes most of the range of its 8 bits.

    Args:
        config (str): Path of the config.
        checkpoint (str): Path of a checkpoint, of floats, in either form.
        out (str): The file to write, '.xml'; its weights are in '.bin'.
        num_images (int): Number of images to calibrate on. Defaults to 64.
        images (str, optional): A folder of images. Defaults to the config's training data, through
            its test pipeline.
        max_error (float): What the layers in 8 bits may cost together, as a share of the squares
            of the outputs; those that cost most stay in float until the others do. Defaults to
            2e-3: a cosine of 0.999 between the outputs and those of float.
        preprocessing (bool): Normalize images in the graph. Defaults to False.
        shape (Sequence[int], optional): Height and width that the file is to be fixed to, whatever
            the size of the images to calibrate on. Defaults to None: any.
        batch (int): Number of images that the file is fixed to, if there is a shape. Defaults to 1.

    Returns:
        tuple: The errors of all layers, see :func:`sensitivities`, and the names of those that stay
        in float.

    Raises:
        ValueError: If the model as ONNX, in float, does not agree with PyTorch.
    """
    import nncf
    import openvino

    cfg = load_config(config)
    batches = images_of(cfg, 'train', num_images, images)
    model = model_to_export(cfg, checkpoint)
    set_shortcut(model, 'outside')
    content, _ = agreeing_onnx(model, batches[:3], example_shape(model), True, 1, preprocessing)
    normalized = [model.data_preprocessor(data, False)['inputs'] for data in batches]
    errors = sensitivities(model, what_counts, [centre(x) for x in normalized[:NUM_TABLE]])
    kept = costliest(errors, max_error)
    inputs = [x.numpy() for x in normalized]
    if preprocessing:
        inputs = [data['inputs'][0].permute(1, 2, 0)[None].byte().numpy() for data in batches]
    graph = openvino.Core().read_model(content, b'')
    names = [op.get_friendly_name() for op in graph.get_ops()]
    nncf.set_log_level(logging.ERROR)
    quantized = nncf.quantize(
        graph,
        nncf.Dataset(inputs, lambda image: {'image': image}),
        subset_size=len(inputs),
        model_type=nncf.ModelType.TRANSFORMER,
        ignored_scope=nncf.IgnoredScope([op for name in kept for op in products_of(name, names)]),
    )
    if shape is not None:
        quantized.reshape([batch, *shape, 3] if preprocessing else [batch, 3, *shape])
    for key, value in dict(Session(content).metadata, precision='int8').items():
        quantized.set_rt_info(value, ['repa_mm', key])
    folder, name = osp.split(osp.abspath(out))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        openvino.save_model(quantized, osp.join(temporary, name), compress_to_fp16=False)
        # The weights first: a reader that finds the .xml finds its weights.
        for name in sorted(os.listdir(temporary)):
            os.replace(osp.join(temporary, name), osp.join(folder, name))
    return errors, kept


def centre(image: torch.Tensor) -> torch.Tensor:
    """Return the centre of images (B, 3, H, W), of at most ``TABLE_SIDE`` pixels."""
    top, left = (max(size - TABLE_SIDE, 0) // 2 for size in image.shape[2:])
    return image[..., top : top + TABLE_SIDE, left : left + TABLE_SIDE].contiguous()


def what_counts(model: nn.Module, image: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the maps of scores and boxes of a detector, or the scores of another model."""
    if hasattr(model, 'forward_transformer'):
        return _of_queries(model, image)
    masks = getattr(model, 'panoptic_head', None) or getattr(model, 'decode_head', None)
    if hasattr(masks, 'mask_embed'):
        return [x[-1] for x in masks(model.extract_feat(image), _samples(image))]
    if hasattr(model, 'decode_head'):
        return [model.decode_head(model.extract_feat(image))]
    head = getattr(model, 'bbox_head', None) or getattr(model, 'rpn_head', None)
    if head is None:
        return [model(image)]
    features = model.extract_feat(image)
    maps = [x for group in head(features) for x in group]
    # Of the second stage only its inputs count: what it looks at depends on the first.
    return maps if hasattr(model, 'bbox_head') else [*features, *maps]


def _samples(image: torch.Tensor) -> list[BaseDataElement]:
    sizes = dict.fromkeys(('img_shape', 'pad_shape', 'batch_input_shape'), tuple(image.shape[2:]))
    return [BaseDataElement(metainfo=sizes)] * len(image)


def _of_queries(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    """What the encoder of a DETR returns, scores and boxes."""
    encoder, decoder = model.pre_transformer(model.extract_feat(image), _samples(image))
    encoded = model.forward_encoder(**encoder)
    queries, _ = model.pre_decoder(**encoded)
    if getattr(model, 'as_two_stage', False):  # which boxes come first depends on what is before
        boxes = queries['reference_points']
        queries['reference_points'] = torch.linspace(0.2, 0.8, boxes.numel()).view(boxes.shape)
    found = model.bbox_head(**model.forward_decoder(**decoder, **queries))
    return [encoded['memory'], *(x[-1] for x in found)]


def costliest(errors: dict[str, float], max_error: float) -> list[str]:
    """Choose the fewest layers whose rest has errors that add up to no more than an error."""
    rest, kept = sum(errors.values()), []
    for name, error in sorted(errors.items(), key=lambda item: -item[1]):
        if rest <= max_error:
            break
        kept.append(name)
        rest -= error
    return kept


def products_of(layer: str, names: Sequence[str]) -> list[str]:
    """Return the products of a layer among the names of an exported model's operations.

    Args:
        layer (str): Its name in the model, from :func:`sensitivities`.
        names (Sequence[str]): Such as '/backbone/stages.0/blocks.0/ffn/fc1/Gemm'.
    """
    # A module in a container has the container's name, too: blocks.0.
    parts = re.findall(r'[^.]+(?:\.\d+)*', layer.removesuffix('.addmm'))
    for start in (0, -2):  # a tracer leaves out containers that it does not call
        path = '/'.join(map(re.escape, parts[start:]))
        # A module or product that is run several times is numbered.
        pattern = re.compile(rf'(.*/)?{path}(_\d+)?/(Gemm|MatMul|Conv)(_\d+)?(/WithoutBiases)?')
        if found := [name for name in names if pattern.fullmatch(name)]:
            return found
    return []


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """Round values to a grid of 8 bits, from the smallest to the largest of them and zero."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-12)
    return ((x - low) / scale).round() * scale + low


def round_weights(weight: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Round weights to a symmetric grid of 8 bits, one for each channel along an axis."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    scale = (weight.abs().amax(others, keepdim=True) / 127).clamp(min=1e-12)
    return (weight / scale).round() * scale


# Of each kind of product: the positions of its activations and of its weights among the arguments,
# and the axis of the output channels.
_OPERANDS = {
    F.linear: ((0,), (1,), 0),
    F.conv2d: ((0,), (1,), 0),
    torch.conv2d: ((0,), (1,), 0),
    torch.addmm: ((1,), (2,), 1),
    F.multi_head_attention_forward: ((0, 1, 2), (5, 11), 0),
}


class _Rounding(TorchFunctionMode):
    """Rounds the operands of the products with weights of one layer.

    A layer is a module, or the part of one (``addmm`` of a merged FFN). ``seen`` has them all. An
    ``nn.MultiheadAttention`` is one layer, whose products among activations stay as they are.
    """

    def __init__(self, path: list, chosen: str | None = None) -> None:
        super().__init__()
        self.path, self.chosen, self.seen = path, chosen, {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = list(args), dict(kwargs or {})
        if func in _OPERANDS:
            name = '.'.join([*self.path[-1:], *['addmm'] * (func is torch.addmm)])
            self.seen[name] = True
            if name == self.chosen:
                if func is F.linear:  # which some backbones call with names
                    args += [kwargs.pop(key) for key in ('input', 'weight') if key in kwargs]
                activations, weights, axis = _OPERANDS[func]
                for i in activations:
                    args[i] = round_activations(args[i])
                for i in weights:
                    args[i] = round_weights(args[i], axis)
        return func(*args, **kwargs)


@contextmanager
def _tracked(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules that are being run, outermost first."""
    path, handles = [], []

    def leave(*_) -> None:  # what a hook returns would replace the output
        path.pop()

    for name, module in model.named_modules():
        if name:
            handles += [
                module.register_forward_pre_hook(lambda *_, name=name: path.append(name)),
                module.register_forward_hook(leave, always_call=True),
            ]
    try:
        yield path
    finally:
        for handle in handles:
            handle.remove()


def _share(actual: torch.Tensor, expected: torch.Tensor) -> float:
    # The mean of a channel is not counted, since biases alone make it: a detector's scores lie
    # about that of the background.
    # The channels of maps (B, C, H, W) are second, those of tokens (B, N, C) last.
    axes = {4: (0, 2, 3), 3: (0, 1)}.get(expected.ndim, (-1,))
    variation = (expected - expected.mean(axes, keepdim=True)).square().sum()
    return ((actual - expected).square().sum() / variation.clamp(min=1e-30)).item()


@torch.no_grad()
def sensitivities(
    model: nn.Module,
    outputs: Callable[[nn.Module, torch.Tensor], Sequence[torch.Tensor]],
    images: Sequence[torch.Tensor],
) -> dict[str, float]:
    """Measure what 8 bits in one layer alone cost, for every layer.

    The operands of the layer are rounded: its input to a grid of 8 bits for the whole tensor, its
    weights to one for each output channel.

    Args:
        model (nn.Module): The model, in eval mode.
        outputs (Callable): From the model and images to the outputs that count.
        images (Sequence[torch.Tensor]): Batches that the model takes.

    Returns:
        dict: By the name of each layer the squared error of an output, relative to the variance of
        its channels, on average over the outputs; from the largest to the smallest.
    """
    with _tracked(model) as path:
        with _Rounding(path) as probe:
            expected = [outputs(model, image) for image in images]
        errors = {}
        for name in track_iter_progress(list(probe.seen)):
            with _Rounding(path, name):
                actual = [outputs(model, image) for image in images]
            shares = [_share(x, y) for a, b in zip(actual, expected) for x, y in zip(a, b)]
            errors[name] = sum(shares) / len(shares)
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
