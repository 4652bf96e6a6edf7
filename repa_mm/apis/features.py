"""Inputs of a model's heads, and the difference between those of two models."""

import inspect
from collections.abc import Callable, Iterable

import torch
import torch.nn as nn


def head_inputs(model: nn.Module, data: dict):
    """Return the inputs of a model's heads for preprocessed ``data``, nested tensors.

    They are the encoder's memory of a DETR, with zeros where images are padded; the feature maps of
    a Co-DETR; the pixel decoder's outputs of a Mask2Former; and else the maps of ``extract_feat``.
    """
    features, samples = model.extract_feat(data['inputs']), data.get('data_samples')
    if hasattr(model, 'forward_encoder'):
        inputs, _ = model.pre_transformer(features, samples)
        memory, padded = model.forward_encoder(**inputs)['memory'], inputs['feat_mask']
        return memory if padded is None else memory.masked_fill(padded[..., None], 0)
    if hasattr(model, 'query_head'):  # has the encoder of a Co-DETR, and returns its memory last
        return model.query_head(features, [sample.metainfo for sample in samples])[-1]
    heads = (getattr(model, name, None) for name in ('panoptic_head', 'decode_head'))
    for decoder in (getattr(head, 'pixel_decoder', None) for head in heads):
        if decoder is not None:
            if 'batch_img_metas' not in inspect.signature(decoder.forward).parameters:
                return decoder(features)
            # MMSegmentation sets no batch_input_shape; all images of its batches have one size.
            metas = [{'batch_input_shape': s.img_shape, **s.metainfo} for s in samples]
            return decoder(features, metas)
    return features


def run_batches(forward: Callable, batches: Iterable) -> list[list[torch.Tensor]]:
    """Return the floating-point tensors that ``forward`` returns, for every batch."""
    return [[v.cpu() for v in tensors(forward(batch))] for batch in batches]


def tensors(value) -> list[torch.Tensor]:
    """Return the floating-point tensors in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) and value.is_floating_point() else []


def relative_error(found: Iterable, expected: Iterable) -> float:
    """Return the largest error of tensors, each relative to its largest expected value, or NaN."""
    pairs = zip(found, expected, strict=True)
    return torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()


def differences(before: list, after: list) -> list[float]:
    """Return the mean square change of each output, relative to the variance of its channels.

    Both lists have the outputs for each batch: maps (B, C, H, W), tokens (B, N, C) or (B, C, N), or
    vectors (B, C). The change of a single vector over all batches is relative to its mean square.
    """
    result = []
    for values in zip(zip(*before), zip(*after)):
        first = values[0][0]
        dim = 1 if first.ndim == 4 else -1  # of the channels
        # An MLP-Mixer's maps: channels differ more from each other than places.
        if first.ndim == 3 and len({x.shape[1] for x in values[0]}) == 1:
            dim = 1 if first.mean((0, 2)).var() > first.mean((0, 1)).var() else -1
        a, b = (
            torch.cat([torch.atleast_2d(x).movedim(dim, -1).flatten(0, -2) for x in xs]).double()
            for xs in values
        )
        variance = float((a - a.mean(0)).square().sum()) or float(a.square().sum())
        result.append(float((a - b).square().sum()) / max(variance, 1e-300))
    return result
