"""What models compute for an image, up to their heads' choices, and how far two models differ."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn as nn
from torch.nn.modules.module import register_module_forward_hook

_HEADS = 'rpn_head', 'bbox_head', 'decode_head', 'head'


def outputs(model: nn.Module, data: dict) -> list:
    """Return what the parts of a model compute for preprocessed ``data``, nested tensors.

    They are the maps of each backbone, the inputs of the heads, the outputs of heads that take
    feature maps alone, and those of a DETR's decoder. Other heads and decoders choose first, and
    rounding may change what they choose: they are left out. A semi-supervised detector has two
    networks, and a self-supervised one has a second backbone. A model without one is called.
    """
    networks = [m for m in model.modules() if isinstance(getattr(m, 'backbone', None), nn.Module)]
    found = [network.backbone(data['inputs']) for network in networks]
    for network in networks:
        if hasattr(network, 'extract_feat'):
            inputs = head_inputs(network, data)
            found += [inputs, *(head(inputs) for head in _dense_heads(network))]
        if hasattr(network, 'forward_transformer') and not getattr(network, 'as_two_stage', False):
            features = network.extract_feat(data['inputs'])
            found.append(network.forward_transformer(features, data['data_samples']))
    return found or model(data['inputs'])


def _dense_heads(network: nn.Module) -> list[nn.Module]:
    """Return the heads that take the inputs of :func:`head_inputs` and nothing else."""
    if hasattr(network, 'forward_encoder') or hasattr(network, 'query_head'):
        return []  # of a DETR: they take queries
    found = []
    for head in (getattr(network, name, None) for name in _HEADS):
        needed = inspect.signature(head.forward).parameters.values() if head is not None else ()
        kinds = [p.kind for p in needed if p.default is p.empty]
        if kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
            found.append(head)
    return found


def outputs_for(model: nn.Module, data: dict) -> list:
    """Return the :func:`outputs` for a batch from a data loader."""
    return outputs(model, model.data_preprocessor(copy.deepcopy(data), False))


@torch.no_grad()
def check_same(
    found: nn.Module,
    expected: nn.Module,
    data,
    what: str,
    tolerance: float = 1e-3,
    forward: Callable = outputs_for,
) -> float:
    """Check that a model computes the same as another one, both in eval mode, and return the error.

    ``what`` names the model in the message. ``forward`` is called with a model and ``data``, and
    returns nested tensors; by default, ``data`` are a batch from a data loader. The error is that
    of :func:`relative_error`.

    Raises:
        ValueError: If the error exceeds the tolerance, or there are NaNs. The message names the
            module that differs first.
    """
    error = relative_error(*(tensors(forward(model, data)) for model in (found, expected)))
    if error <= tolerance:
        return error
    calls = [_calls(model, forward, data) for model in (found, expected)]
    name = next((n for n, own in calls[0].items() if _differs(own, calls[1].get(n, []))), '')
    kinds = [type(model.get_submodule(name)).__name__ for model in (found, expected)]
    where = f'; {name!r} differs first ({kinds[0]}, expected is {kinds[1]})' if name else ''
    raise ValueError(
        f'{what} computes something else: on an image, outputs differ by {error:.1e} of the '
        f'largest value{where}'
    )


def _calls(model: nn.Module, forward: Callable, data) -> dict[str, list]:
    """Return the inputs and outputs of each call of each module, in the order of their ends."""
    names, calls = {id(module): name for name, module in model.named_modules()}, {}

    def note(module: nn.Module, args: tuple, output) -> None:
        if id(module) in names:
            values = [[x.cpu().clone() for x in tensors(value)] for value in (args, output)]
            calls.setdefault(names[id(module)], []).append(values)

    # A hook on a module would change what runs: our attention leaves a hooked one to its parent.
    handle = register_module_forward_hook(note)
    try:
        forward(model, data)
    finally:
        handle.remove()
    return calls


def _differs(calls: list, others: list, tolerance: float = 1e-3) -> bool:
    """Return True if the outputs of a module differ in a call whose inputs do not."""
    errors = ([relative_error(*x) for x in zip(*pair)] for pair in zip(calls, others))
    return any(of_inputs <= tolerance < of_outputs for of_inputs, of_outputs in errors)


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
    """Return the largest error of tensors, each relative to its largest expected value.

    It is infinite for NaN, for tensors of other shapes or another number, and without any.
    """
    found, expected = [*found], [*expected]
    if [x.shape for x in found] != [x.shape for x in expected]:
        return math.inf
    errors = [_relative(a.cpu().double(), b.cpu().double()) for a, b in zip(found, expected)]
    return max((math.inf if math.isnan(error) else error for error in errors), default=math.inf)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.equal(b):
        return 0.0  # also where all are zero
    size = float(b.abs().max())
    return float((a - b).abs().max()) / size if size else math.inf


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
