"""CUDA graphs of backbone, neck and heads: a few launches in place of a thousand."""

from threading import Lock
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from repa_mm.reparam.autograd import autocast_dtype

#: Types of arguments and outputs other than tensors with which a graph is captured.
_CONSTANTS = int, float, bool, str, torch.Size, type(None)


class Captured:
    """The forward pass of a module, which replays a CUDA graph for inputs of a known size.

    There is a graph for each shape, memory format and type of the inputs and type of autocast.
    Weights that are replaced give a new one. With gradients, in training mode, on another device
    than a GPU, and with arguments such as data samples, the module's own forward pass runs. That
    pass must not wait for the GPU, nor leave anything on the module.
    """

    device_type = 'cuda'

    def __init__(self, module: nn.Module) -> None:
        self.__setstate__(dict(module=module, forward=module.forward))

    def __getstate__(self) -> dict:  # of a copy, which has tensors of its own
        return dict(module=self.module, forward=self.forward)

    def __setstate__(self, state: dict) -> None:
        self.module, self.forward = state['module'], state['forward']
        self.stores, self.weights, self.graphs, self.pool = None, [], {}, None
        self.lock = Lock()  # of what a graph reads and writes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        if not self._fits(leaves):
            return self.forward(*args, **kwargs)
        with self.lock:
            return self._replay(leaves, form)

    def _replay(self, leaves: list, form: Any) -> Any:
        weights = self._weights()
        if weights != self.weights:
            self.weights, self.graphs = weights, {}
            self.pool = torch.cuda.graph_pool_handle()
        key = autocast_dtype('cuda'), *map(_described, leaves)
        if key not in self.graphs or self.graphs[key][0] != form:
            self.graphs[key] = form, *self._capture(leaves, form)
        _, graph, inputs, outputs = self.graphs[key]
        for static, leaf in zip(inputs, leaves):
            if torch.is_tensor(leaf):
                static.copy_(leaf)
        graph.replay()
        # The next replay, of any graph here, writes to this memory.
        return tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, outputs)

    def _fits(self, leaves: list) -> bool:
        tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
        return (
            len({tensor.device for tensor in tensors}) == 1
            and tensors[0].device.type == self.device_type
            and _are_plain(leaves)
            and not torch.is_grad_enabled()
            and not self.module.training
            and not torch.cuda.is_current_stream_capturing()
        )

    def _weights(self) -> list[int]:
        """Return where the weights are. A graph reads them there, with changes in place."""
        if self.stores is None:  # going through all modules takes a millisecond
            modules = [*self.module.modules()]
            self.stores = [store for m in modules for store in (m._parameters, m._buffers)]
        tensors = (tensor for store in self.stores for tensor in store.values())
        return [tensor.data_ptr() for tensor in tensors if tensor is not None]

    def _capture(self, leaves: list, form: Any) -> tuple:
        tensor = next(filter(torch.is_tensor, leaves))
        # Tensors of inference mode could not be written to outside of it. A stream of another
        # device would capture nothing.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device_of(tensor):
            inputs = [x.clone() if torch.is_tensor(x) else x for x in leaves]
            args, kwargs = tree_unflatten(inputs, form)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries choose and compile their kernels
                for _ in range(2):
                    outputs = self.forward(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(stream)
            if not _are_plain(tree_flatten(outputs)[0]):
                raise TypeError(
                    f'{type(self.module).__name__} returns {type(outputs).__name__}: for CUDA '
                    'graphs, it must return tensors, in tuples, lists or dicts'
                )
            graph = torch.cuda.CUDAGraph()
            torch.clear_autocast_cache()  # each replay casts the weights
            try:
                with torch.cuda.graph(graph, self.pool, stream, capture_error_mode='thread_local'):
                    outputs = self.forward(*args, **kwargs)
            finally:
                torch.clear_autocast_cache()  # of memory of the graph
        return graph, inputs, outputs


def _are_plain(leaves: list) -> bool:
    return all(torch.is_tensor(leaf) or isinstance(leaf, _CONSTANTS) for leaf in leaves)


def _described(leaf: Any) -> Any:
    if torch.is_tensor(leaf):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf
