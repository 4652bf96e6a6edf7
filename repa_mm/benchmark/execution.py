"""Ways to run the networks of a model: autocast, torch.compile, CUDA graphs, memory format."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from mmengine.utils import apply_to

from repa_mm.benchmark.machine import AMP_DTYPES
from repa_mm.benchmark.timing import Recorder

COMPILE = ('backbone', 'all')
# Each CUDA graph holds its own memory; a data set of many sizes would fill the GPU.
MAX_GRAPHS = 8


@contextmanager
def explained(name: str, shape: Sequence[int]) -> Iterator[None]:
    """Turn any error into a ValueError that says with which form and which input it came."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f'{name} fails on an input of {"x".join(map(str, shape))} '
            f'({type(error).__name__}: {" ".join(str(error).split())[:300]})'
        ) from error


def networks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The networks of a detector, segmentor or classifier.

    What none of them does, such as NMS, resizing a segmentation or pasting masks, is
    post-processing.

    Returns:
        list: Pairs of 'preprocessing', 'backbone', 'neck' or 'head' and a module whose ``forward``
        is called at inference.
    """
    names = dict(data_preprocessor='preprocessing', backbone='backbone', neck='neck')
    found = []

    def heads(module: nn.Module) -> None:
        # A RoI head and a list of heads are not called themselves.
        if isinstance(module, nn.ModuleList) or any(
            hasattr(module, f'{kind}_roi_extractor') for kind in ('bbox', 'mask')
        ):
            for child in module.children():
                heads(child)
        else:
            found.append(('head', module))

    for name, child in model.named_children():
        if name in names:
            found.append((names[name], child))
        elif name != 'auxiliary_head':
            heads(child)
    return found


@contextmanager
def accelerated(
    model: nn.Module,
    amp: str | None = None,
    compiled: str | None = None,
    dynamic: bool = False,
    channels_last: bool = False,
    cuda_graphs: bool = False,
    recorder: Recorder | None = None,
) -> Iterator[None]:
    """Run the networks of a model in another way, and time them.

    Args:
        model (nn.Module): A detector, segmentor or classifier.
        amp (str, optional): 'bf16' or 'fp16': autocast within the networks; post-processing and
            RoIAlign stay in float32.
        compiled (str, optional): 'backbone', or 'all' for the neck and heads too: torch.compile.
        dynamic (bool): Whether compiled networks are to take any size.
        channels_last (bool): Weights and input in channels-last memory format.
        cuda_graphs (bool): Replay the backbone from a CUDA graph.
        recorder (Recorder, optional): Gets a section for each network.
    """
    device = next(model.parameters()).device.type
    replaced = []
    if channels_last:
        model.to(memory_format=torch.channels_last)

    def changed(part: str, module: nn.Module) -> Callable:
        function = module.forward
        if part == 'preprocessing':
            return _channels_last(function) if channels_last else function
        extractor = hasattr(module, 'roi_layers')
        if compiled == 'all' and not extractor or compiled and part == 'backbone':
            # The number of proposals changes even if the image's size does not: None becomes
            # dynamic when it has to.
            function = torch.compile(
                function,
                dynamic=dynamic or (None if part == 'head' else False),
                # On a CPU: weights laid out, and cast, once and for all. With sizes that change,
                # Inductor compiles that for minutes.
                options=dict(freezing=True) if device == 'cpu' and not dynamic else None,
            )
        if cuda_graphs and part == 'backbone':
            function = _graphed(function)
        if not amp:
            return function
        autocast = torch.autocast(
            device, AMP_DTYPES[amp], enabled=not extractor, cache_enabled=not cuda_graphs
        )

        def run(*args, **kwargs):
            if extractor:
                args, kwargs = _to_float(args), _to_float(kwargs)
            with autocast:
                result = function(*args, **kwargs)
            return _to_float(result) if part == 'head' else result

        return run

    try:
        for part, module in networks(model):
            function = changed(part, module)
            if recorder:
                function = recorder.section(part)(function)
            replaced.append((module, module.__dict__.get('forward')))
            # As an attribute of the instance: mmseg calls forward itself, which hooks would not
            # notice.
            module.forward = function
        yield
    finally:
        for module, before in reversed(replaced):
            del module.forward
            if before is not None:
                module.forward = before
        if channels_last:
            model.to(memory_format=torch.contiguous_format)


def _channels_last(preprocess: Callable) -> Callable:

    def run(*args, **kwargs):
        data = preprocess(*args, **kwargs)
        data['inputs'] = data['inputs'].contiguous(memory_format=torch.channels_last)
        return data

    return run


def _graphed(function: Callable) -> Callable:
    """A function of one tensor, replayed from a CUDA graph for each shape."""
    graphs: dict = {}

    def run(x: torch.Tensor):
        key = tuple(x.shape), x.dtype, x.stride()
        if key not in graphs:
            if len(graphs) == MAX_GRAPHS:
                raise ValueError(
                    '--cuda-graphs records a graph for each input size, and these are more than '
                    f'{MAX_GRAPHS}: use --synthetic HxW'
                )
            # Its own copy of the input: the graph reads it anew at every replay.
            graphs[key] = torch.cuda.make_graphed_callables(function, (x.clone(),))
        return graphs[key](x)

    return run


def _to_float(value: Any) -> Any:
    return apply_to(value, torch.is_tensor, lambda x: x.float() if x.is_floating_point() else x)
