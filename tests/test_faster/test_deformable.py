"""Deformable attention computes what mmcv's does."""

import copy

import pytest
import torch
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttention

from repa_mm.faster import rewrite_
from repa_mm.faster.deformable import FastDeformableAttention

SHAPES = [[7, 9], [4, 5], [2, 1]]


def pair(dtype=torch.float64, **options):
    torch.manual_seed(0)
    stock = MultiScaleDeformableAttention(32, 4, 3, 2, dropout=0.0, **options).to(dtype)
    for parameter in stock.parameters():
        parameter.data.normal_(0, 0.5)
    fast = copy.deepcopy(stock)
    rewrite_(fast, 'train')
    assert type(fast) is FastDeformableAttention
    return stock, fast


def inputs_of(num_coordinates, dtype=torch.float64, shapes=SHAPES):
    """Reference points outside of the maps, too."""
    shapes = torch.tensor(shapes)
    num_values = int(shapes.prod(1).sum())
    tensors = dict(
        query=torch.randn(2, 11, 32, dtype=dtype),
        value=torch.randn(2, num_values, 32, dtype=dtype),
        query_pos=torch.randn(2, 11, 32, dtype=dtype),
        identity=torch.randn(2, 11, 32, dtype=dtype),
        reference_points=torch.rand(2, 11, 3, num_coordinates, dtype=dtype) * 1.4 - 0.2,
    )
    others = dict(key_padding_mask=torch.rand(2, num_values) < 0.2, spatial_shapes=shapes)
    return tensors, others


@pytest.mark.parametrize('num_coordinates', [2, 4])
@pytest.mark.parametrize('ratio', [1.0, 0.5])
def test_outputs_and_gradients(num_coordinates, ratio):
    stock, fast = pair(batch_first=True, value_proj_ratio=ratio)
    tensors, others = inputs_of(num_coordinates)
    found = []
    for module in (fast, stock):
        leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
        out = module(**leaves, **others)
        wanted = [*leaves.values(), *module.parameters()]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        torch.testing.assert_close(fast(**tensors, **others), found[1][0].detach())


def test_defaults_of_the_arguments():
    """Self-attention without positions and padding, and tokens before images."""
    stock, fast = pair()
    tensors, others = inputs_of(2)
    inputs = dict(
        query=tensors['value'].transpose(0, 1),
        reference_points=torch.rand(2, 85, 3, 2, dtype=torch.float64),
        spatial_shapes=others['spatial_shapes'],
    )
    torch.testing.assert_close(fast(**inputs), stock(**inputs))


def test_half_precision_by_autocast():
    stock, fast = pair(torch.float32, batch_first=True)
    tensors, others = inputs_of(4, torch.float32)
    expected = stock(**tensors, **others)
    with torch.autocast('cpu', torch.bfloat16):
        found = fast(**tensors, **others)
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def test_traced_for_other_sizes():
    _, fast = pair(torch.float32, batch_first=True)

    class Attend(torch.nn.Module):
        def forward(self, query, value, points, shapes):
            return self.fast(query, value=value, reference_points=points, spatial_shapes=shapes)

    model, names = Attend(), ('query', 'value', 'reference_points')
    model.fast = fast
    tensors, others = inputs_of(4, torch.float32)
    example = (*(tensors[name] for name in names), others['spatial_shapes'])
    traced = torch.jit.trace(model, example, check_trace=False)
    tensors, others = inputs_of(4, torch.float32, [[3, 8], [5, 5], [1, 2]])
    found = [tensors[name][:, :7] if 'value' not in name else tensors[name] for name in names]
    found = (*found, others['spatial_shapes'])
    torch.testing.assert_close(traced(*found), model(*found))


def test_only_the_stock_module_is_replaced():
    class Other(MultiScaleDeformableAttention):
        pass

    model = torch.nn.ModuleList([Other(32, 4), MultiScaleDeformableAttention(32, 4)])
    rewrite_(model, 'train')
    assert type(model[1]) is FastDeformableAttention and type(model[0]) is Other
