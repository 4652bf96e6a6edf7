"""How near a model comes to the time of its matrix products alone.

Every product of the deploy form (linear layers, convolutions, the two products of attention) is
timed by itself on operands of its shape. The sum is what the model would take if it did nothing
else. Of exported models OpenVINO tells the time of every operation.

    python tools/dev/roofline.py configs/repa_swin_b_in1k.py deploy.onnx:f32 deploy.onnx:bf16 \
        int8.xml:bf16 --batch-size 8 --compile
"""

import argparse
import statistics
import time
from collections import Counter

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import repa_mm
from repa_mm.benchmark.inputs import parse_size
from repa_mm.benchmark.variants import build_model
from repa_mm.run import load_config
from repa_mm.run.cli import align, clear_errors

#: Types of OpenVINO's operations that are products.
PRODUCTS = ('FullyConnected', 'FullyConnectedQuantizedLegacy', 'MatMul', 'Convolution')


class Shapes(TorchFunctionMode):
    """Counts products by what they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight = args[:2]
            self.found['linear', x.numel() // x.shape[-1], weight.shape[0], weight.shape[1]] += 1
        elif func is torch.addmm:
            self.found['linear', args[1].shape[0], args[2].shape[1], args[2].shape[0]] += 1
        elif func is F.scaled_dot_product_attention:
            q, k = args[:2]
            batch, (n, d), m = q.shape[:-2].numel(), q.shape[-2:], k.shape[-2]
            self.found['bmm', batch, n, d, m] += 1
            self.found['bmm', batch, n, m, d] += 1
        elif func in (F.conv2d, torch.conv2d):
            x, weight, _, stride, padding = (*args, None, 1, 0)[:5]
            stride = kwargs.get('stride', stride)
            padding = kwargs.get('padding', padding)
            self.found['conv', x.shape, weight.shape, stride, padding] += 1
        return func(*args, **kwargs)


def operation(kind: str, *shape):
    """A product of this shape, to be called with a dtype's operands."""
    if kind == 'linear':
        n, out, inner = shape
        return F.linear, [(n, inner), (out, inner), (out,)], {}
    if kind == 'bmm':
        batch, n, d, m = shape
        return torch.bmm, [(batch, n, d), (batch, d, m)], {}
    x, weight, stride, padding = shape
    return F.conv2d, [x, weight], dict(stride=stride, padding=padding)


def seconds(turns: int, call, *args, **kwargs) -> float:
    """The median of some calls, after one that does not count."""
    times = []
    for turn in range(turns + 1):
        start = time.perf_counter()
        call(*args, **kwargs)
        if turn:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def exported_rows(names, size, batch: int, turns: int):
    import numpy as np
    import openvino

    core, image = openvino.Core(), np.random.default_rng(0).standard_normal((batch, 3, *size))
    for name in names:
        file, _, precision = name.partition(':')
        config = {'INFERENCE_PRECISION_HINT': precision} if precision else {}
        for profiled in (False, True):  # timers of single operations cost time
            options = dict(config, PERF_COUNT='YES' if profiled else 'NO')
            request = core.compile_model(file, 'CPU', options).create_infer_request()
            took = seconds(turns, request.infer, {0: image.astype('f')})
            if not profiled:
                total = took
        products = sum(
            info.real_time.total_seconds()
            for info in request.profiling_info
            if info.node_type in PRODUCTS
        )
        yield name, total, products


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config')
    parser.add_argument('exported', nargs='*', help='FILE[:f32|bf16] for OpenVINO, or .onnx')
    parser.add_argument('--size', default='224x224')
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--turns', type=int, default=7)
    parser.add_argument('--compile', action='store_true', help='bf16 with torch.compile, too')
    args = parser.parse_args()
    rows = [('backbone', 'ms', 'products alone, ms', 'share')]

    def add(name: str, total: float, products: float) -> None:
        rows.append(
            (name, f'{total * 1e3:.0f}', f'{products * 1e3:.0f}', f'{products / total:.0%}')
        )
        print(*rows[-1], flush=True)

    with clear_errors():
        size = parse_size(args.size)
        model = repa_mm.reparameterize(build_model(load_config(args.config)).backbone).eval()
        image = torch.randn(args.batch_size, 3, *size)
        shapes = Shapes()
        with shapes:
            model(image)
        for dtype in (torch.float32, torch.bfloat16):
            model, image = model.to(dtype), image.to(dtype)
            products = 0.0
            for shape, count in shapes.found.items():
                function, operands, options = operation(*shape)
                operands = [torch.randn(*s).to(dtype) for s in operands]
                products += count * seconds(args.turns, function, *operands, **options)
            name = str(dtype).removeprefix('torch.')
            add(f'eager, {name}', seconds(args.turns, model, image), products)
            if args.compile:
                took = seconds(args.turns, torch.compile(model), image)
                add(f'compiled, {name}', took, products)
        for row in exported_rows(args.exported, size, args.batch_size, args.turns):
            add(*row)
    print('\n'.join(align(rows)))


if __name__ == '__main__':
    main()
