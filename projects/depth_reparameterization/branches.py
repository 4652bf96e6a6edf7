"""Depth: a few blocks of parallel branches in place of many blocks.

`Rethinking Vision Transformer Depth via Structural Reparameterization
<https://arxiv.org/abs/2511.19718>`_ lays B layers of a transformer side by side, behind one norm
u = LN(x), and joins them while they train. With z_b for the queries, keys, values and hidden
channels of branch b, the entries of its nonlinearities, and their mean z' over the branches,

    z~_b = (1 - lambda) z_b + lambda z'
    y = x + sum_b Attention(q~_b, k~_b, v~_b) Wo_b,    then the same with sum_b act(h~_b) W2_b.

At lambda = 1 all branches compute the same nonlinearity, so that they are one ordinary layer: its
W^q, W^k, W^v and W1 are the means over the branches, its Wo and W2 the sums.

Two identities make that cheap. The z_b are linear in u, so that joining them is joining rows of
weights. And the heads of an attention are summed, sum_h P_h (u Wv_h) Wo_h, so that B branches of
h heads are one attention of B h heads, with all Wo_b side by side in one matrix.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from projects.schedules import Scheduled, set_lam_
from repa_mm.reparam import (
    AttentionParts,
    DeployForm,
    DropPath,
    FFNParts,
    TrainingForm,
    build_activation,
    check_dropouts,
    copy_matrix_,
    double,
    fold_norm,
    rounded,
    weight_and_bias,
)


class JoinedLinear(Scheduled, nn.Linear):
    """The linear layers of B branches, whose outputs lambda joins.

    As an ``nn.Linear`` it has B times the outputs, those of one branch after those of another, and
    weight and bias are computed from the branches'.

    Args:
        in_features (int): Number of inputs.
        out_features (int): Number of outputs of one branch.
        num_branches (int): Number of branches B.
        bias (bool): Whether the layers have a bias. Defaults to True.

    Raises:
        ValueError: If the number of branches is not an integer of at least 1.
    """

    scalar = 'joined'
    unfinished = 'the branches are joined to'

    def __init__(
        self, in_features: int, out_features: int, num_branches: int, bias: bool = True
    ) -> None:
        nn.Module.__init__(self)
        if num_branches < 1:
            raise ValueError(f'a block has 1 branch or more, but got num_branches={num_branches!r}')
        self.in_features, self.out_features = in_features, num_branches * out_features
        self.branches = nn.ModuleList(
            nn.Linear(in_features, out_features, bias) for _ in range(num_branches)
        )
        self.add_lam()

    @property
    def weight(self) -> torch.Tensor:
        return self._join([branch.weight for branch in self.branches])

    @property
    def bias(self) -> torch.Tensor | None:
        biases = [branch.bias for branch in self.branches]
        return None if biases[0] is None else self._join(biases)

    def _join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.stack(tensors)
        return rows.lerp(rows.mean(0, keepdim=True), self.lam.to(rows.dtype)).flatten(0, 1)

    def mean(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias of the one layer that the branches are at lambda = 1."""
        weight = torch.stack([branch.weight for branch in self.branches]).mean(0)
        if self.branches[0].bias is None:
            return weight, None
        return weight, torch.stack([branch.bias for branch in self.branches]).mean(0)

    def fill(self, *layers: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Give each branch the weight and bias of one layer."""
        for branch, (weight, bias) in zip(self.branches, layers, strict=True):
            copy_matrix_(branch, weight, bias)

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, in float64, what :meth:`mean` returns.

        Raises:
            ValueError: If lambda is not 1, or a branch is not the layer that it was built as.
        """
        self.check_finished()
        weights, biases = zip(*(weight_and_bias(branch, 'a branch') for branch in self.branches))
        return torch.stack(weights).mean(0), torch.stack(biases).mean(0)


class _Parallel(TrainingForm):
    """Output projection, layer scale and drop path, shared by the parallel forms.

    The last linear layer has the output matrices of all branches side by side, (C, B n), and one
    bias, the sum of theirs.

    Attributes:
        entry (str): Name of the linear layer whose outputs are joined.
        exit (str): Name of the last linear layer.
        sources (tuple[str]): Names of these two layers in the parts of an ordinary layer.
    """

    entry: str
    exit: str
    sources: tuple[str, str]

    def finish_schedule(self) -> None:
        getattr(self, self.entry).finish_schedule()

    def schedule_has_ended(self) -> bool:
        return getattr(self, self.entry).schedule_has_ended()

    def _add_exit(
        self, features: int, drop_rate: float, drop_path: float, layer_scale: float
    ) -> None:
        setattr(self, self.exit, nn.Linear(self.num_branches * features, self.embed_dims))
        self.layer_scale = (
            nn.Parameter(torch.full((self.embed_dims,), float(layer_scale)))
            if layer_scale
            else None
        )
        self.drop = nn.Dropout(drop_rate)
        self.dropout_layer = DropPath(drop_path)

    def _leave(self, x: torch.Tensor, is_joined: bool) -> torch.Tensor:
        layer = getattr(self, self.exit)
        weight = self._summed(layer.weight) if is_joined else layer.weight
        z = self.drop(F.linear(x, weight, layer.bias))
        if self.layer_scale is not None:
            z = z * self.layer_scale
        return self.dropout_layer(z)

    def _summed(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(1, (self.num_branches, -1)).sum(1)

    def fill(self, *parts: FFNParts | AttentionParts) -> None:
        """Lay ordinary layers side by side in the branches.

        Each branch then computes from the block's input what its layer computes from the same
        input, behind a norm that neither scales nor shifts: weight and bias of each layer's norm go
        into the matrix behind the norm.

        Args:
            *parts (FFNParts | AttentionParts): One layer for each branch.

        Raises:
            ValueError: If a norm shifts its output and the linear layer behind it has no bias.
        """
        layers = [[getattr(p, name) for p in parts] for name in self.sources]
        getattr(self, self.entry).fill(*map(fold_norm, [p.norm for p in parts], layers[0]))
        weights, biases = zip(*map(weight_and_bias, layers[1]))
        scales = [torch.ones_like(biases[0]) if p.scale is None else double(p.scale) for p in parts]
        if self.layer_scale is not None:
            common = torch.stack(scales).abs().amax(0)
            self.layer_scale.copy_(common)
            scales = [torch.where(common > 0, scale / common, 0.0) for scale in scales]
        weight = torch.cat([s[:, None] * w for s, w in zip(scales, weights)], 1)
        copy_matrix_(getattr(self, self.exit), weight, sum(s * b for s, b in zip(scales, biases)))

    def _set_merged(self, into: nn.Linear, out: nn.Linear) -> None:
        """Put the merged weights into the two linear layers of the deploy form."""
        entry, layer = getattr(self, self.entry), getattr(self, self.exit)
        check_dropouts(self)
        like = layer.weight
        w_out, b_out = weight_and_bias(layer, f'its {self.exit}')
        w_in, b_in = entry.weight_and_bias()
        w_out = self._summed(w_out)
        if self.layer_scale is not None:
            scale = double(self.layer_scale)
            w_out, b_out = scale[:, None] * w_out, scale * b_out
        into.weight = rounded(w_in, like)
        if into.bias is not None:
            into.bias = rounded(b_in, like)
        out.weight, out.bias = rounded(w_out, like), rounded(b_out, like)


class ParallelAttention(_Parallel):
    """Multi-head attention in B branches that lambda joins.

    It takes normalized tokens, and returns what is to be added to the shortcut. With a window size
    it is the attention inside of Swin's windows, whose relative position biases, added where
    queries meet keys, are joined as those are.

    Args:
        embed_dims (int): Number of channels C.
        num_heads (int): Number of heads of each branch.
        num_branches (int): Number of branches B. Defaults to 2.
        qkv_bias (bool): Whether queries, keys and values have a bias. Defaults to True.
        window_size (tuple[int], optional): Height and width of the windows. Defaults to None: no
            relative position bias.
        qk_scale (float, optional): Scale of the scores. Defaults to None, 1 / sqrt(C / heads).
        attn_drop (float): Dropout rate of the attention. Defaults to 0.
        proj_drop (float): Dropout rate of the output. Defaults to 0.
        drop_path (float): Stochastic depth rate, of all branches together. Defaults to 0.
        layer_scale_init_value (float): Initial value of the layer scale; 0 for none. Defaults to 0.

    Raises:
        ValueError: If the number of branches is below 1.
    """

    label = 'parallel attention'
    entry, exit = sources = 'qkv', 'proj'

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        num_branches: int = 2,
        qkv_bias: bool = True,
        window_size: tuple[int, int] | None = None,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        layer_scale_init_value: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_dims, self.num_heads, self.num_branches = embed_dims, num_heads, num_branches
        self.window_size = window_size
        self.scale = qk_scale or (embed_dims // num_heads) ** -0.5
        self.qkv = JoinedLinear(embed_dims, 3 * embed_dims, num_branches, qkv_bias)
        _add_position_bias(self, num_branches * num_heads)
        self.attn_drop = nn.Dropout(attn_drop)
        self._add_exit(embed_dims, proj_drop, drop_path, layer_scale_init_value)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Sum of the branches.

        Args:
            x (torch.Tensor): Normalized tokens of shape (N, L, C).
            mask (torch.Tensor, optional): Added to the scores, (M, L, L) with M a divisor of N:
                sample n has mask n modulo M, as the windows of a map do. A boolean mask is true
                where a token is attended to. Defaults to None.

        Returns:
            torch.Tensor: Of the shape of x, without the shortcut.
        """
        is_joined = self.qkv.is_finished
        weight, bias = self.qkv.mean() if is_joined else (self.qkv.weight, self.qkv.bias)
        qkv = F.linear(x, weight, bias)
        # (N, L, branches, 3, heads, d): the branches' heads become heads of one attention.
        sizes = 1 if is_joined else self.num_branches, 3, self.num_heads
        qkv = qkv.view(*x.shape[:2], *sizes, self.embed_dims // self.num_heads)
        bias = self._position_bias(is_joined)
        q, k, v = qkv.permute(3, 0, 2, 4, 1, 5).flatten(2, 3)
        x = _attend(scale_queries(q, self), k, v, bias, mask, self.attn_drop)
        return self._leave(x, is_joined)

    def _position_bias(self, is_joined: bool) -> torch.Tensor | None:
        if self.window_size is None:
            return None
        table = self.relative_position_bias_table.unflatten(1, (self.num_branches, -1))
        mean = table.mean(1, keepdim=True)
        table = mean if is_joined else table.lerp(mean, self.qkv.lam.to(table.dtype))
        return table.flatten(1)[self.relative_position_index].permute(2, 0, 1)

    def fill(self, *parts: AttentionParts) -> None:
        """As :meth:`_Parallel.fill`, with the relative position biases of windows."""
        super().fill(*parts)
        if self.window_size is not None:
            self.relative_position_bias_table.copy_(torch.cat([p.table for p in parts], 1))

    def merge(self) -> 'OrdinaryAttention':
        """Compute the ordinary attention that the joined branches are, in float64.

        Raises:
            ValueError: As :meth:`TrainingForm.merge`; or if lambda is not 1.
        """
        with torch.device('meta'):
            merged = OrdinaryAttention(
                self.embed_dims,
                self.num_heads,
                self.qkv.branches[0].bias is not None,
                self.window_size,
                self.scale,
            )
        self._set_merged(merged.qkv, merged.proj)
        if self.window_size is not None:
            table = double(self.relative_position_bias_table)
            merged.relative_position_bias_table = rounded(
                table.unflatten(1, (self.num_branches, -1)).mean(1),
                self.relative_position_bias_table,
            )
            merged.relative_position_index = self.relative_position_index.clone()
        return merged


class OrdinaryAttention(DeployForm):
    """Multi-head attention, with the names of mmpretrain's: what branches merge into.

    Args:
        embed_dims (int): Number of channels C.
        num_heads (int): Number of heads.
        qkv_bias (bool): Whether queries, keys and values have a bias. Defaults to True.
        window_size (tuple[int], optional): Height and width of the windows, for the names of
            ``WindowMSA``. Defaults to None, those of ``MultiheadAttention``.
        scale (float, optional): Scale of the scores. Defaults to None, 1 / sqrt(C / heads).
    """

    label = 'parallel attention'

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        qkv_bias: bool = True,
        window_size: tuple[int, int] | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.embed_dims, self.num_heads = embed_dims, num_heads
        self.window_size = window_size
        self.scale = scale or (embed_dims // num_heads) ** -0.5
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, qkv_bias)
        _add_position_bias(self, num_heads)
        # Window attention asks for all of them.
        self.softmax, self.attn_drop = nn.Softmax(dim=-1), nn.Dropout(0.0)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(0.0)

    def inference(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`ParallelAttention.forward`."""
        sizes = 3, self.num_heads, self.embed_dims // self.num_heads
        q, k, v = self.qkv(x).view(*x.shape[:2], *sizes).permute(2, 0, 3, 1, 4)
        bias = None
        if self.window_size is not None:
            bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        q = scale_queries(q, self)
        return self.proj(_attend(q, k, v, bias, mask, self.attn_drop))


def _add_position_bias(attention: nn.Module, num_heads: int) -> None:
    """Swin's table of relative position biases, and which entry each pair of tokens has."""
    if attention.window_size is None:
        return
    height, width = attention.window_size
    shape = (2 * height - 1) * (2 * width - 1), num_heads
    attention.relative_position_bias_table = nn.Parameter(0.02 * torch.randn(shape))
    y, x = torch.arange(height * width) // width, torch.arange(height * width) % width
    index = (y[:, None] - y + height - 1) * (2 * width - 1) + x[:, None] - x + width - 1
    attention.register_buffer('relative_position_index', index)


def scale_queries(q: torch.Tensor, attention: nn.Module) -> torch.Tensor:
    """Scale queries (…, L, d) so that 1 / sqrt(d) gives the scores of the attention's own scale.

    torch 2.1 exports ``scaled_dot_product_attention`` to ONNX without another scale only.
    """
    usual = (attention.embed_dims // attention.num_heads) ** -0.5
    return q if attention.scale == usual else q * (attention.scale / usual)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    dropout: nn.Dropout,
) -> torch.Tensor:
    """Attention (N, L, heads d) of queries, keys and values (N, heads, L, d)."""
    n, heads = q.shape[:2]
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float('-inf'))
        mask = mask[:, None] if bias is None else mask[:, None] + bias
        bias = mask.to(q.dtype).expand(-1, heads, -1, -1).repeat(n // len(mask), 1, 1, 1)
    elif bias is not None:
        bias = bias.to(q.dtype)[None].expand(n, -1, -1, -1)
    x = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, dropout_p=dropout.p if dropout.training else 0.0
    )
    return x.transpose(1, 2).flatten(2)


class ParallelFFN(_Parallel):
    """An FFN in B branches that lambda joins.

    It takes normalized tokens and the shortcut, as mmcv's ``FFN``.

    Args:
        embed_dims (int): Number of channels C.
        feedforward_channels (int): Hidden width H of each branch.
        num_branches (int): Number of branches B. Defaults to 2.
        act_cfg (dict | nn.Module): An elementwise activation, as a ``ChannelIdleFFN`` takes it.
            Defaults to ``dict(type='GELU')``.
        drop_rate (float): Dropout rate of hidden channels and output. Defaults to 0.
        drop_path (float): Stochastic depth rate, of all branches together. Defaults to 0.
        layer_scale_init_value (float): Initial value of the layer scale; 0 for none. Defaults to 0.

    Raises:
        ValueError: If the number of branches is below 1, or the activation is unknown.
    """

    contains_norm = False
    label = 'parallel FFN'
    entry, exit = sources = 'fc1', 'fc2'

    def __init__(
        self,
        embed_dims: int,
        feedforward_channels: int,
        num_branches: int = 2,
        act_cfg: dict | nn.Module = dict(type='GELU'),
        drop_rate: float = 0.0,
        drop_path: float = 0.0,
        layer_scale_init_value: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_dims, self.feedforward_channels = embed_dims, feedforward_channels
        self.num_branches = num_branches
        self.fc1 = JoinedLinear(embed_dims, feedforward_channels, num_branches)
        self.act = build_activation(act_cfg)
        self._add_exit(feedforward_channels, drop_rate, drop_path, layer_scale_init_value)

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """The shortcut plus the sum of the branches.

        Args:
            x (torch.Tensor): Normalized tokens of shape (B, L, C).
            identity (torch.Tensor, optional): The shortcut. Defaults to None, x.

        Returns:
            torch.Tensor: Of the shape of x.
        """
        is_joined = self.fc1.is_finished
        weight, bias = self.fc1.mean() if is_joined else (self.fc1.weight, self.fc1.bias)
        z = self._leave(self.drop(self.act(F.linear(x, weight, bias))), is_joined)
        return (x if identity is None else identity) + z

    def merge(self) -> 'OrdinaryFFN':
        """Compute the ordinary FFN that the joined branches are, in float64.

        Raises:
            ValueError: As :meth:`TrainingForm.merge`; or if lambda is not 1.
        """
        with torch.device('meta'):
            merged = OrdinaryFFN(
                self.embed_dims, self.feedforward_channels, copy.deepcopy(self.act)
            )
        self._set_merged(merged.layers[0][0], merged.layers[1])
        return merged


class OrdinaryFFN(DeployForm):
    """An FFN with the names of mmcv's: what branches merge into.

    Args:
        embed_dims (int): Number of channels C.
        feedforward_channels (int): Hidden width H.
        act_cfg (dict | nn.Module): The activation. Defaults to ``dict(type='GELU')``.
    """

    label = 'parallel FFN'

    def __init__(
        self,
        embed_dims: int,
        feedforward_channels: int,
        act_cfg: dict | nn.Module = dict(type='GELU'),
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(embed_dims, feedforward_channels), build_activation(act_cfg)),
            nn.Linear(feedforward_channels, embed_dims),
        )

    def inference(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`ParallelFFN.forward`."""
        return (x if identity is None else identity) + self.layers(x)


def join_branches(model: nn.Module, lam: float) -> nn.Module:
    """Join the parallel branches of a model, in place.

    Args:
        model (nn.Module): A model with parallel branches.
        lam (float): Lambda in [0, 1]: 0 for branches apart, 1 for branches that merge.

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If lambda is not a number in [0, 1], or the model has no branches.

    Examples:
        >>> join_branches(model, 1)
        >>> deployed = repa_mm.reparameterize(model)
    """
    return set_lam_(model, lam, JoinedLinear)
