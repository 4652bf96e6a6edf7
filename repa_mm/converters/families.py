"""How the weights of each family are named, and what their shapes tell.

The names on the right of the tables are ours, in the training form; '#' stands
for a number, and a name covers what is below it.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from repa_mm.reparam import CheckpointError

Weights = dict[str, torch.Tensor]


class Family(NamedTuple):
    """What a converter knows of a family of backbones.

    Attributes:
        backbone: The registered backbone.
        marker: Part of a name that only this family has, in any layout.
        configs: By the name of the architecture, its ImageNet config.
        ffn: Name of the FFNs.
        names: From the layout of the authors' repository, one to one.
        others: From other layouts: of timm, of the vanilla's own repository
            and of OpenMMLab's packages.
        left_out: Parts that RePaFormers do not have.
        vanilla: Whether vanilla checkpoints are taken.
        settings: From the weights, the arguments of the backbone; 'arch' has
            what the shapes tell of it.
        complete: Whether they tell all of it.
        expansion: Hidden channels of an FFN by its channels.
    """

    backbone: str
    marker: str
    configs: dict[str, str]
    ffn: str
    names: dict[str, str]
    others: dict[str, str]
    left_out: tuple[str, ...]
    vanilla: bool
    settings: Callable[[Weights], dict]
    complete: bool
    expansion: int = 4


@cache
def _pattern(template: str) -> 're.Pattern':
    return re.compile(re.escape(template).replace('\\#', '#').replace('#', r'(\d+)') + r'(?=\.|$)')


def match(key: str, template: str) -> 're.Match | None':
    """Whether a key is, or is below, a name; the numbers are its groups."""
    return _pattern(template).match(key)


def rename(key: str, names: dict[str, str]) -> str | None:
    """A key by a table of names, the longest that fits; None if none does."""
    for template in sorted(names, key=len, reverse=True):
        found = match(key, template)
        if found:
            new = names[template]
            for number in found.groups():
                new = new.replace('#', number, 1)
            return new + key[found.end() :]
    return None


def count(weights: Weights, template: str) -> int:
    """How many numbers there are in the last place of a name."""
    found = (match(key, template) for key in weights)
    return len({m.groups()[-1] for m in found if m})


def get(weights: Weights, key: str) -> torch.Tensor:
    """Look up a tensor of a state dict.

    Raises:
        CheckpointError: If the state dict has no tensor of this name.
    """
    if key not in weights:
        raise CheckpointError(f'the checkpoint is incomplete: it has no {key}')
    return weights[key]


def _image(num_patches: int, patch_size: int) -> dict:
    """Arguments for sizes other than 224 and 16."""
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        raise CheckpointError(
            f'{num_patches} patches are not of a square image: give a --config with img_size'
        )
    settings = {}
    if patch_size != 16:
        settings['patch_size'] = patch_size
    if side * patch_size != 224:
        settings['img_size'] = side * patch_size
    return settings


def _swin(weights: Weights) -> dict:
    depths, heads, windows = [], [], set()
    table = 'attn.w_msa.relative_position_bias_table'
    while count(weights, f'stages.{len(depths)}.blocks.#'):
        stage = f'stages.{len(depths)}.blocks'
        depths.append(count(weights, f'{stage}.#'))
        length, num_heads = get(weights, f'{stage}.0.{table}').shape
        heads.append(num_heads)
        windows.add((math.isqrt(length) + 1) // 2)
    projection = get(weights, 'patch_embed.projection.weight')
    settings = dict(arch=dict(embed_dims=projection.shape[0], depths=depths, num_heads=heads))
    # Those of the last stages may be smaller than what the model was given.
    if windows and max(windows) != 7:
        settings['window_size'] = max(windows)
    if projection.shape[-1] != 4:
        settings['patch_size'] = projection.shape[-1]
    return settings


def _vit(weights: Weights) -> dict:
    patch_size = get(weights, 'patch_embed.projection.weight').shape[-1]
    _, length, channels = get(weights, 'pos_embed').shape
    return dict(
        arch=dict(embed_dims=channels, num_layers=count(weights, 'layers.#')),
        **_image(length - 1, patch_size),
    )


def _lvvit(weights: Weights) -> dict:
    # The stem halves the image before the patches are taken.
    patch_size = 2 * get(weights, 'patch_embed.projection.weight').shape[-1]
    _, length, channels = get(weights, 'pos_embed').shape
    settings = dict(
        arch=dict(embed_dims=channels, num_layers=count(weights, 'layers.#')),
        **_image(length - 1, patch_size),
    )
    stem = get(weights, 'patch_embed.stem.0.weight').shape[0]
    if stem != 64:
        settings['stem_channels'] = stem
    return settings


def _poolformer(weights: Weights) -> dict:
    # Downsampling layers are numbered in between.
    stages = [i for i in range(count(weights, 'network.#')) if count(weights, f'network.{i}.#.mlp')]
    return dict(
        arch=dict(
            layers=[count(weights, f'network.{i}.#') for i in stages],
            embed_dims=[get(weights, f'network.{i}.0.norm1.weight').shape[0] for i in stages],
        )
    )


def _mixer(weights: Weights) -> dict:
    channels, _, _, patch_size = get(weights, 'patch_embed.projection.weight').shape
    hidden, tokens = get(weights, 'layers.0.token_mix.layers.0.0.weight').shape
    return dict(
        arch=dict(
            embed_dims=channels,
            num_layers=count(weights, 'layers.#'),
            tokens_mlp_dims=hidden,
            channels_mlp_dims=4 * channels,
        ),
        **_image(tokens, patch_size),
    )


_VIT_NAMES = {
    'cls_token': 'cls_token',
    'pos_embed': 'pos_embed',
    'patch_embed.proj': 'patch_embed.projection',
    'blocks.#.attn.qkv': 'layers.#.attn.qkv',
    'blocks.#.attn.proj': 'layers.#.attn.proj',
    'blocks.#.mlp': 'layers.#.ffn',
    'norm': 'ln1',
    'head': 'head.fc',
}
# timm's vanilla, then OpenMMLab's.
_VIT_OTHERS = {
    'blocks.#.norm1': 'layers.#.ln1',
    'blocks.#.norm2': 'layers.#.ffn.norm1',
    'blocks.#.mlp.norm': 'layers.#.ffn.norm1',
    'patch_embed.projection': 'patch_embed.projection',
    'layers.#.ln1': 'layers.#.ln1',
    'layers.#.attn.qkv': 'layers.#.attn.qkv',
    'layers.#.attn.proj': 'layers.#.attn.proj',
    'layers.#.ln2': 'layers.#.ffn.norm1',
    'layers.#.ffn.layers.0.0': 'layers.#.ffn.fc1',
    'layers.#.ffn.layers.1': 'layers.#.ffn.fc2',
    'ln1': 'ln1',
    'head.fc': 'head.fc',
    'head.layers.head': 'head.fc',
}

FAMILIES = dict(
    Swin=Family(
        backbone='RePaSwinTransformer',
        marker='relative_position_bias_table',
        configs=dict(
            tiny='repa_swin_t_in1k.py', small='repa_swin_s_in1k.py', base='repa_swin_b_in1k.py'
        ),
        ffn='stages.#.blocks.#.ffn',
        names={
            'patch_embed.proj': 'patch_embed.projection',
            'patch_embed.norm': 'patch_embed.norm',
            'layers.#.blocks.#.norm1': 'stages.#.blocks.#.norm1',
            'layers.#.blocks.#.attn': 'stages.#.blocks.#.attn.w_msa',
            'layers.#.blocks.#.mlp': 'stages.#.blocks.#.ffn',
            'layers.#.downsample': 'stages.#.downsample',
            'norm': 'norm3',
            'head': 'head.fc',
        },
        others={
            'layers.#.blocks.#.norm2': 'stages.#.blocks.#.ffn.norm1',
            'layers.#.blocks.#.mlp.norm': 'stages.#.blocks.#.ffn.norm1',
            'patch_embed.projection': 'patch_embed.projection',
            'stages.#.blocks.#.norm1': 'stages.#.blocks.#.norm1',
            'stages.#.blocks.#.attn.w_msa': 'stages.#.blocks.#.attn.w_msa',
            'stages.#.blocks.#.norm2': 'stages.#.blocks.#.ffn.norm1',
            'stages.#.blocks.#.ffn.layers.0.0': 'stages.#.blocks.#.ffn.fc1',
            'stages.#.blocks.#.ffn.layers.1': 'stages.#.blocks.#.ffn.fc2',
            'stages.#.downsample': 'stages.#.downsample',
            **{f'norm{i}': f'norm{i}' for i in range(4)},
            'head.fc': 'head.fc',
        },
        left_out=(),
        vanilla=True,
        settings=_swin,
        complete=True,
    ),
    LVViT=Family(
        backbone='RePaLVViT',
        marker='patch_embed.conv1|patch_embed.stem',
        configs=dict(s='repa_lvvit_s_in1k.py', m='repa_lvvit_m_in1k.py'),
        ffn='layers.#.ffn',
        names={
            **_VIT_NAMES,
            'blocks.#.norm1': 'layers.#.ln1',
            **{
                f'patch_embed.{kind}{i + 1}': f'patch_embed.stem.{3 * i + j}'
                for i in range(3)
                for j, kind in enumerate(('conv', 'bn'))
            },
            'aux_head': 'head.aux_fc',
        },
        others={
            'blocks.#.attn.norm': 'layers.#.ln1',
            'blocks.#.norm2': 'layers.#.ffn.norm1',
            'blocks.#.mlp.norm': 'layers.#.ffn.norm1',
        },
        left_out=(),
        vanilla=True,
        settings=_lvvit,
        complete=False,
        expansion=3,
    ),
    PoolFormer=Family(
        backbone='RePaPoolFormer',
        marker='network.',
        configs={f's{n}': f'repa_poolformer_s{n}_in1k.py' for n in (12, 24, 36)},
        ffn='network.#.#.mlp',
        names={
            'patch_embed.proj': 'patch_embed.proj',
            'network.#.#.layer_scale_1': 'network.#.#.layer_scale_1',
            'network.#.#.norm1': 'network.#.#.norm1',
            'network.#.#.mlp': 'network.#.#.mlp',
            'network.#.#.mlp.ls': 'network.#.#.mlp.layer_scale',
            'network.#.proj': 'network.#.proj',
            'norm': 'norm6',
            'head': 'head.fc',
        },
        # Only to say that it is one.
        others={
            'network.#.#.norm2': 'network.#.#.mlp.norm1',
            'network.#.#.layer_scale_2': 'network.#.#.mlp.layer_scale',
            **{f'norm{i}': f'norm{i}' for i in (0, 2, 4, 6)},
            'head.fc': 'head.fc',
        },
        left_out=(),
        vanilla=False,
        settings=_poolformer,
        complete=False,
    ),
    Mixer=Family(
        backbone='RePaMlpMixer',
        marker='mlp_tokens|token_mix',
        configs=dict(base='repa_mlp_mixer_b16_in1k.py', large='repa_mlp_mixer_l16_in1k.py'),
        ffn='layers.#.channel_mix',
        names={
            'stem.proj': 'patch_embed.projection',
            'blocks.#.mlp_tokens.norm': 'layers.#.ln1',
            'blocks.#.mlp_tokens.fc1': 'layers.#.token_mix.layers.0.0',
            'blocks.#.mlp_tokens.fc2': 'layers.#.token_mix.layers.1',
            'blocks.#.mlp_channels': 'layers.#.channel_mix',
            'norm': 'ln1',
            'head': 'head.fc',
        },
        others={
            'blocks.#.norm1': 'layers.#.ln1',
            'blocks.#.norm2': 'layers.#.channel_mix.norm1',
            'blocks.#.mlp_channels.norm': 'layers.#.channel_mix.norm1',
        },
        left_out=(),
        vanilla=False,
        settings=_mixer,
        complete=True,
    ),
    ViT=Family(
        backbone='RePaVisionTransformer',
        marker='cls_token',
        configs={
            'deit-tiny': 'repa_deit_t_in1k.py',
            'deit-small': 'repa_deit_s_in1k.py',
            'deit-base': 'repa_deit_b_in1k.py',
            'large': 'repa_vit_l_in1k.py',
            'huge': 'repa_vit_h_in1k.py',
        },
        ffn='layers.#.ffn',
        names={**_VIT_NAMES, 'blocks.#.attn.norm': 'layers.#.ln1', 'norm_pre': 'pre_norm'},
        others={**_VIT_OTHERS, 'pre_norm': 'pre_norm'},
        # Of distilled models.
        left_out=('dist_token', 'head_dist', 'head.layers.head_dist'),
        vanilla=True,
        settings=_vit,
        complete=False,
    ),
)


def family_of(keys: list[str]) -> Family:
    """The family that names belong to, in any layout.

    Raises:
        CheckpointError: If it is none of them; names some keys.
    """
    for family in FAMILIES.values():
        if any(re.search(family.marker, key) for key in keys):
            return family
    raise CheckpointError(
        'the checkpoint is of no known architecture (known are '
        f'{", ".join(FAMILIES)}): it has {listed(keys)}'
    )


def listed(keys) -> str:
    """The first of many keys, for a message."""
    keys = list(keys)
    rest = f' and {len(keys) - 5} more' if len(keys) > 5 else ''
    return ', '.join(map(repr, keys[:5])) + rest


def swap_merged_patches(weights: Weights, to_ours: bool) -> None:
    """Reorder what Swin's patch merging reads.

    The four neighbours are (0, 0), (1, 0), (0, 1), (1, 1), one behind the
    other, in the original; ``nn.Unfold`` has rows first, and all four next to
    each other for each channel.
    """
    for key, value in weights.items():
        if re.search(r'downsample\.(norm|reduction)\.', key):
            *rows, columns = value.shape
            if to_ours:
                value = value.view(*rows, 4, columns // 4)
                value = value[..., [0, 2, 1, 3], :].transpose(-2, -1)
            else:
                value = value.view(*rows, columns // 4, 4)
                value = value[..., [0, 2, 1, 3]].transpose(-2, -1)
            weights[key] = value.reshape(*rows, columns)


def window_buffers(img_size: int, patch_size: int, depths: list[int], window: int) -> Weights:
    """The buffers of the original Swin, which depend on the image size.

    ``relative_position_index`` of every block, and the ``attn_mask`` of those
    whose windows are shifted.
    """
    buffers = {}
    for i, depth in enumerate(depths):
        size = img_size // patch_size // 2**i
        side = min(window, size)
        y, x = (c.flatten() for c in _grid(side))
        dy, dx = (c[:, None] - c + side - 1 for c in (y, x))
        index = dy * (2 * side - 1) + dx
        for j in range(depth):
            name = f'layers.{i}.blocks.{j}'
            buffers[f'{name}.attn.relative_position_index'] = index.clone()
            if j % 2 and size > window:
                # Numbers of the parts that the shift brings together.
                y, x = _grid(size)
                shift = side // 2
                part = sum(
                    k * ((c >= size - side).long() + (c >= size - shift).long())
                    for k, c in ((3, y), (1, x))
                )
                part = part.view(size // side, side, size // side, side)
                part = part.transpose(1, 2).reshape(-1, side**2)
                mask = part[:, None] != part[:, :, None]
                buffers[f'{name}.attn_mask'] = -100.0 * mask
    return buffers


def _grid(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every place of a square."""
    line = torch.arange(size)
    return line[:, None].expand(size, size), line.expand(size, size)
