"""Training steps: of whole models, of backbones, and of one FFN by its training path."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import FFN

from repa_mm.benchmark.timing import measure
from repa_mm.benchmark.variants import DEPLOY, VANILLA
from repa_mm.reparam import ChannelIdleFFN, reparameterize, set_training_path

PATHS = 'literal', 'folded', 'auto'
# (N, C): tokens and channels of one FFN, as in the stages of Swins.
FFN_SHAPES = (8192, 128), (8192, 256), (8192, 512), (2048, 1024), (1568, 512), (392, 1024)
# As in the encoder of a DINO, of an image of 800 x 1344.
ENCODER_SHAPE = 22323, 256


class Step:
    """A training step of one model, forward and backward, without that of an optimizer.

    Args:
        model (nn.Module): In training mode, on its device. A whole model takes a batch of its data
            preprocessor, and its losses are the model's. Of a backbone or another module the loss
            is the mean square of what it returns.
        whole (bool): Whether the model is a whole one.

    Attributes:
        peak_mib (float | None): Peak memory of the last step on a GPU, weights included.
    """

    def __init__(self, model: nn.Module, whole: bool) -> None:
        self.model, self.whole = model, whole
        self.peak_mib: float | None = None

    def loss(self, batch: Any) -> torch.Tensor:
        if self.whole:
            return self.model.parse_losses(self.model(**batch, mode='loss'))[0]
        outputs = self.model(batch)
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        return sum(output.pow(2).mean() for output in outputs)

    def __call__(self, batch: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.loss(batch).backward()
        self.model.zero_grad()
        if torch.cuda.is_initialized():
            self.peak_mib = torch.cuda.max_memory_allocated() / 2**20


class VanillaFFN(nn.Module):
    """x + W2 GELU(W1 LayerNorm(x)), on tokens (..., C)."""

    def __init__(self, embed_dims: int, feedforward_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(embed_dims),
            nn.Linear(embed_dims, feedforward_channels),
            nn.GELU(),
            nn.Linear(feedforward_channels, embed_dims),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def measure_ffn(
    num_tokens: int,
    embed_dims: int,
    repeats: int,
    warmup: int = 1,
    device: str = 'cpu',
    encoder: bool = False,
) -> tuple[dict, dict]:
    """Time one FFN (idle ratio 0.75) beside an ordinary one.

    Args:
        num_tokens (int): Number of tokens N.
        embed_dims (int): Number of channels C.
        repeats (int): Number of turns.
        warmup (int): Number of turns before those. Defaults to 1.
        device (str): Defaults to 'cpu'.
        encoder (bool): Whether it is that of a DETR's encoder: without norms, with a ReLU and a
            hidden width of 8C, beside mmcv's. Otherwise it has norms, a GELU and a hidden width of
            4C, beside one with a LayerNorm. Defaults to False.

    Returns:
        tuple: Times in milliseconds, by name, of the forward pass of the deploy form; and of a
        forward and backward pass of each training path.
    """
    torch.manual_seed(0)
    if encoder:
        own = dict(act_cfg=dict(type='ReLU'), norm_cfg=None)
        vanilla = FFN(embed_dims, 8 * embed_dims).to(device)
        ffn = ChannelIdleFFN(embed_dims, 8 * embed_dims, 0.75, **own).to(device)
    else:
        vanilla = VanillaFFN(embed_dims, 4 * embed_dims).to(device)
        ffn = ChannelIdleFFN(embed_dims, 4 * embed_dims, 0.75).to(device)
    x = torch.randn(1, num_tokens, embed_dims, device=device)
    paths = {path: set_training_path(copy.deepcopy(ffn), path) for path in PATHS}
    with torch.no_grad():
        calls = {VANILLA: vanilla, DEPLOY: reparameterize(ffn.eval())}
        inference = measure(calls, x, repeats, warmup)

    def step(model: nn.Module) -> Callable:
        def run(x: torch.Tensor) -> None:
            model(x.requires_grad_()).backward(x.detach())
            model.zero_grad()

        return run

    calls = {name: step(model.train()) for name, model in {VANILLA: vanilla, **paths}.items()}
    return inference, measure(calls, x, repeats, warmup)
