"""MLP-Mixer."""

from repa_mm.weights.layout_family import Family, Weights, count, image_settings, shape_of


class Mixer(Family):
    """MLP-Mixers, whose channel MLPs are the FFNs."""

    backbone = 'RePaMlpMixer'
    marker = 'mlp_tokens|token_mix'
    configs = dict(base='repa_mlp_mixer_b16_in1k.py', large='repa_mlp_mixer_l16_in1k.py')
    ffn = 'layers.#.channel_mix'
    names = {
        'stem.proj': 'patch_embed.projection',
        'blocks.#.mlp_tokens.norm': 'layers.#.ln1',
        'blocks.#.mlp_tokens.fc1': 'layers.#.token_mix.layers.0.0',
        'blocks.#.mlp_tokens.fc2': 'layers.#.token_mix.layers.1',
        'blocks.#.mlp_channels': 'layers.#.channel_mix',
        'norm': 'ln1',
        'head': 'head.fc',
    }
    # Of a vanilla Mixer, to say that it is one.
    others = {
        'blocks.#.norm1': 'layers.#.ln1',
        'blocks.#.norm2': 'layers.#.channel_mix.norm1',
        'blocks.#.mlp_channels.norm': 'layers.#.channel_mix.norm1',
    }
    vanilla = False
    complete = True
    only_ratio = 0.75

    def settings(self, weights: Weights) -> dict:
        channels, _, _, patch_size = shape_of(weights, 'patch_embed.projection.weight', 4)
        hidden, tokens = shape_of(weights, 'layers.0.token_mix.layers.0.0.weight', 2)
        arch = dict(
            embed_dims=channels,
            num_layers=count(weights, 'layers.#'),
            tokens_mlp_dims=hidden,
            channels_mlp_dims=4 * channels,
        )
        return dict(arch=arch, **image_settings(tokens, patch_size))

    def active_channels(self, ratio: float, hidden: list[int], args: dict) -> list[int]:
        return [h // 4 for h in hidden]
