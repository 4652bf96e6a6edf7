"""PoolFormer."""

import torch.nn as nn

from repa_mm.weights.layout_family import Family, Weights, count, match, shape_of


class PoolFormer(Family):
    """PoolFormers, whose FFNs are convolutions of 1x1 in the authors' code."""

    backbone = 'RePaPoolFormer'
    marker = 'network.'
    configs = {f's{n}': f'repa_poolformer_s{n}_in1k.py' for n in (12, 24, 36)}
    ffn = 'network.#.#.mlp'
    names = {
        'patch_embed.proj': 'patch_embed.proj',
        'network.#.#.layer_scale_1': 'network.#.#.layer_scale_1',
        'network.#.#.norm1': 'network.#.#.norm1',
        'network.#.#.mlp': 'network.#.#.mlp',
        'network.#.#.mlp.ls': 'network.#.#.mlp.layer_scale',
        'network.#.proj': 'network.#.proj',
        'norm': 'norm6',
        'head': 'head.fc',
    }
    others = {
        'norm#': 'norm#',
        # Of a vanilla PoolFormer, to say that it is one.
        'network.#.#.norm2': 'network.#.#.mlp.norm1',
        'network.#.#.layer_scale_2': 'network.#.#.mlp.layer_scale',
    }
    vanilla = False

    def rename(self, given: Weights) -> tuple[Weights, dict]:
        weights, origin = super().rename(given)
        for key, value in weights.items():
            if value.ndim == 4 and match(key, self.ffn):
                weights[key] = value.flatten(1)
        return weights, origin

    def settings(self, weights: Weights) -> dict:
        places = range(count(weights, 'network.#'))
        # Downsampling layers are numbered in between.
        stages = [i for i in places if count(weights, f'network.{i}.#.mlp')]
        widths = [shape_of(weights, f'network.{i}.0.norm1.weight', 1)[0] for i in stages]
        layers = [count(weights, f'network.{i}.#') for i in stages]
        return dict(arch=dict(layers=layers, embed_dims=widths))

    def to_authors(self, weights: Weights, model: nn.Module, img_size: int) -> Weights:
        for key, value in weights.items():
            if value.ndim == 2 and match(key, self.ffn):
                weights[key] = value[:, :, None, None]
        return {}

    def active_channels(self, ratio: float, hidden: list[int], args: dict) -> list[int]:
        return [int(h * (1 - ratio)) for h in hidden]
