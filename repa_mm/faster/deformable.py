"""Deformable attention with fewer copies, whose traced graph serves feature maps of any size.

mmcv's ``MultiScaleDeformableAttention`` has a kernel for GPUs. On CPUs it stacks the samples of all
levels, multiplies and sums them, each of which passes over a tensor 16 times as large as the
queries. Its traced graph has the sizes of the feature maps as constants.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttention
except ImportError:  # without mmcv's compiled operators, no model has this module
    MultiScaleDeformableAttention = None


def deformable_attention(
    value: torch.Tensor, spatial_shapes: torch.Tensor, grid: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sums (B, queries, C) of samples of the feature maps of all levels.

    Args:
        value (torch.Tensor): Feature maps of all levels, flattened and concatenated, (B, N, C).
        spatial_shapes (torch.Tensor): Heights and widths of the feature maps, (levels, 2).
        grid (torch.Tensor): Sampling points from -1 to 1, (levels, B, heads, points, queries, 2).
        weights (torch.Tensor): Weights of the samples, (levels, B, heads, points, queries).
    """
    _, batch, num_heads, _, num_queries, _ = grid.shape
    # One copy for all levels: the feature maps are views of the copy.
    value = value.transpose(1, 2).contiguous().unflatten(1, (num_heads, -1))
    out, start = 0, 0
    for (height, width), where, weight in zip(spatial_shapes, grid, weights):
        stop = start + height * width
        maps = value[..., start:stop].unflatten(-1, (height, width)).flatten(0, 1)
        samples = F.grid_sample(maps, where.flatten(0, 1), align_corners=False)
        # In place, since allocating a tensor of this size costs more than the product. The queries
        # are the last dimension, so that the sum over points adds whole rows.
        multiply = torch.mul if torch.is_grad_enabled() else torch.Tensor.mul_
        out = out + multiply(samples, weight.flatten(0, 1)[:, None]).sum(2)
        start = stop
    return out.view(batch, -1, num_queries).transpose(1, 2)


class FastDeformableAttention(MultiScaleDeformableAttention or nn.Module):
    """A ``MultiScaleDeformableAttention`` that is faster on CPUs.

    Arguments, parameters, state dict and outputs are the parent's, whose code runs on other
    devices.
    """

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None,
        reference_points=None, spatial_shapes=None, level_start_index=None, **kwargs,
    ) -> torch.Tensor:  # fmt: skip
        """Attend to some points of each level's feature map; the arguments are the parent's."""
        if query.device.type != 'cpu':
            return super().forward(
                query, key, value, identity, query_pos, key_padding_mask, reference_points,
                spatial_shapes, level_start_index, **kwargs,
            )  # fmt: skip
        value = query if value is None else value
        identity = query if identity is None else identity
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)

        value = self.value_proj(value)
        if key_padding_mask is not None:
            value = value.masked_fill(key_padding_mask[..., None], 0.0)
        sizes = self.num_heads, self.num_levels, self.num_points
        offsets = self.sampling_offsets(query).unflatten(-1, (*sizes, 2))
        # To (levels, B, heads, points, queries, 2).
        offsets = offsets.permute(3, 0, 2, 4, 1, 5).contiguous()
        weights = self.attention_weights(query).unflatten(-1, (self.num_heads, -1)).softmax(-1)
        weights = weights.unflatten(-1, sizes[1:]).permute(3, 0, 2, 4, 1).contiguous()
        reference = reference_points.permute(2, 0, 1, 3)[:, :, None, None]
        # In the coordinates of grid_sample, from -1 to 1.
        if reference_points.shape[-1] == 2:
            grid = offsets / (spatial_shapes.flip(1).to(offsets) / 2)[:, None, None, None, None]
        else:
            grid = offsets * (reference[..., 2:] / self.num_points)
        grid = grid + (2 * reference[..., :2] - 1)

        out = self.output_proj(deformable_attention(value, spatial_shapes, grid, weights))
        if not self.batch_first:
            out = out.transpose(0, 1)
        return self.dropout(out) + identity
