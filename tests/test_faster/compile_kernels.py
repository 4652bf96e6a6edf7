"""Compile the kernels for Ampere, or trace them, without a GPU: compile_kernels.py FILE STEP."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

sys.modules['mmengine'] = None  # whose import takes longer than all that follows

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, compile  # noqa: E402

SHARED = 99 * 1024  # bytes of an Ampere's program
POINTERS = dict(table='*fp32', index='*i64', grad_bias='*fp32', grad_scores='*fp32')


def compile_kernel(kernels, kernel, kind, dims, stages):
    channels = 2 * dims[0] + dims[1]
    how = 1, 7, 7, 7, 3, dims[1], 1.0
    _, _, constants = kernels._launch((1, 1, channels), torch.float16, False, *how)
    constants.pop('num_warps')
    types = {name: POINTERS.get(name, f'*{kind}') for name in kernel.arg_names}
    types |= dict.fromkeys(kernels._SIZES, 'i32') | dict(scale='fp32')
    types |= dict.fromkeys(constants, 'constexpr')
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = dict(num_warps=4, num_stages=stages)
    done = compile(ASTSource(kernel, types, values), GPUTarget('cuda', 80, 32), options)
    assert done.metadata.shared < SHARED


def traced(kernels):
    """Return the code of the graph for maps of any size."""
    from torch._dynamo.backends.common import aot_autograd

    def record(graph, inputs):
        graphs.append(graph.code)
        raise NotImplementedError  # there is nothing to run it

    graphs, backend = [], aot_autograd(fw_compiler=record)
    call = torch.compile(kernels.window_attention, backend=backend, fullgraph=True, dynamic=True)
    tensors = [torch.zeros(shape) for shape in ((2, 72, 48), (48,), (169, 2))]
    index = torch.zeros(49, 49, dtype=torch.int64)
    try:
        with torch.no_grad():
            call(*tensors, index, 9, 8, 7, 3, 16, 1.0)
    except torch._dynamo.exc.BackendCompilerFailed:
        return graphs[0]


if __name__ == '__main__':
    spec = spec_from_file_location('kernels', sys.argv[1])
    kernels = module_from_spec(spec)
    spec.loader.exec_module(kernels)
    if sys.argv[2] == 'trace':
        assert 'triton_kernel_wrapper' in traced(kernels)
    else:
        compile_kernel(kernels, kernels._forward, 'bf16', (8, 64), 3)
        compile_kernel(kernels, kernels._backward, 'fp16', (16, 32), 1)
