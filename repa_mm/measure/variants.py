"""Models to compare, and images of noise to run them on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from mmengine.config import Config

from repa_mm.apis import open_model
from repa_mm.apis.images import input_channels
from repa_mm.export import noise, resized
from repa_mm.faster import rewrite_
from repa_mm.reparam import Form, outermost
from repa_mm.surgery import PARTS, copied

STOCK, OURS, DEPLOY, MODEL = 'stock', 'stock with our parts', 'deploy form', 'model'


def variants(
    cfg: Config,
    checkpoint: str | None = None,
    baseline: Config | None = None,
    baseline_checkpoint: str | None = None,
) -> dict[str, nn.Module]:
    """Build the models to compare, in eval mode, by name.

    They are the stock model ``baseline``, if there is one, the same with all that makes a deploy
    form faster except the merged FFNs, unless there is nothing, and the model of ``cfg``, in the
    deploy form if it is a RePaFormer. Without a checkpoint, weights are random, and a detector
    finds next to nothing, and skips suppression and masks.
    """
    models = {}
    if baseline is not None:
        models[STOCK] = open_model(baseline, baseline_checkpoint)
        ours = copied(models[STOCK])
        if rewrite_(ours, 'train', 'infer'):
            models[OURS] = ours
    model = open_model(cfg, checkpoint, merge=True)
    rewrite_(model, 'infer')
    models[DEPLOY if any(outermost(model, Form)) else MODEL] = model
    return models


def compile_(model: nn.Module) -> nn.Module:
    """Let ``torch.compile`` run the backbone, neck and heads of a model, in place.

    The encoder and decoder of a DETR stay eager, since deformable attention breaks their graphs,
    and so does a RoI head, whose ``predict`` does not call the module itself.
    """
    for part in PARTS:
        if isinstance(getattr(model, part, None), nn.Module):
            getattr(model, part).compile()
    return model


def calls_on(
    models: dict[str, nn.Module], part: str, batch: dict
) -> tuple[dict[str, Callable], Any]:
    """Return the call of each model, by name, and its argument.

    ``part`` is 'backbone', whose argument are the preprocessed images (B, C, H, W), of one size; or
    else whole models run, from preprocessing to post-processing, on the ``batch``.
    """
    if part == 'backbone':
        height, width = batch['inputs'][0].shape[1:]
        images = next(iter(models.values())).data_preprocessor(batch)['inputs']
        images = images[..., :height, :width]  # not padded
        return {name: model.backbone for name, model in models.items()}, images
    return {name: model.test_step for name, model in models.items()}, batch


def noise_of_size(model: nn.Module, shape: Sequence[int], batch_size: int) -> dict:
    """Return a batch of images of noise of one height and width, as from a data loader."""
    data, channels = resized(noise(model.cfg), [shape] * batch_size), input_channels(model)
    if len(data['inputs'][0]) != channels:  # the pipeline is of other data
        data['inputs'] = [image[:1].expand(channels, -1, -1) for image in data['inputs']]
    return data


def autocasting(call: Callable, dtype: str | None, device: str) -> Callable:
    """Return a function that runs under autocast to 'float16' or 'bfloat16', if not None."""
    if dtype is None:
        return call
    return torch.autocast(torch.device(device).type, getattr(torch, dtype))(call)
