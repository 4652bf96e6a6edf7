"""ViT with parallel branches, which merge into a shallower ViT."""

from mmengine.registry import MODELS
from mmpretrain.models import VisionTransformer
from mmpretrain.models.selfsup import MAEViT

from repa_mm.models.base import ReparamBackbone
from repa_mm.models.surgery.branches import (
    VIT,
    fill_block,
    number_of_layers,
    parallel_attention,
    parallel_ffn,
)
from repa_mm.models.surgery.idle import idle_channels
from repa_mm.reparam import CheckpointError, has_deploy_form


def share_out(num_layers: int, num_branches: int, what: str) -> int:
    """The number of blocks in which so many layers have so many branches.

    Raises:
        ValueError: If the layers cannot be shared out, or the number of branches is below 1.
    """
    if isinstance(num_branches, bool) or not isinstance(num_branches, int) or num_branches < 1:
        raise ValueError(f'a block has 1 branch or more, but got num_branches={num_branches!r}')
    if num_layers % num_branches:
        raise ValueError(
            f'the {num_layers} layers of {what} cannot be shared out among blocks of '
            f'{num_branches} branches: choose a divisor of {num_layers}, or give arch as a dict, '
            'which counts blocks'
        )
    return num_layers // num_branches


class ParallelBackbone(ReparamBackbone):
    """Mixin before the mmpretrain parent of a backbone with parallel branches.

    Args:
        arch (str | dict): The architecture. A name stands for the layers of an ordinary backbone,
            which the branches share; in a dict the numbers of layers count blocks.
        *args, **kwargs: Those of the parent.
        num_branches (int): Number of branches of each block. Defaults to 2.
        idle_ratio (float, optional): Make the FFNs channel-idle, with this share of hidden channels
            that skip the activation. Defaults to None, ordinary FFNs.
        ffn_norm_cfg (dict): Norm of channel-idle FFNs. Defaults to ``dict(type='BN')``.
        deploy (bool): Build the deploy form, for a reparameterized checkpoint. Defaults to False.

    Raises:
        ValueError: If the layers cannot be shared out among the branches.
    """

    def __init__(
        self,
        arch: str | dict,
        *args,
        num_branches: int = 2,
        idle_ratio: float | None = None,
        ffn_norm_cfg: dict = dict(type='BN'),
        deploy: bool = False,
        **kwargs,
    ) -> None:
        arch, num_branches = self._share_out(arch, num_branches)
        super().__init__(arch, *args, **kwargs)
        self.num_branches = num_branches
        if idle_ratio is not None:
            idle_channels(self, idle_ratio, norm_cfg=ffn_norm_cfg)
        self._add_branches(ffn_norm_cfg)
        self._finish(deploy)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if not has_deploy_form(self):
            self._fill_branches(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def check_number(found: int, num_blocks: int, num_branches: int, where: str) -> bool:
    """Whether so many ordinary layers are to become the branches of blocks.

    As many layers as blocks are those of the merged model, which the check of forms reports.

    Raises:
        CheckpointError: If there are some, and of another number than that of the branches.
    """
    wanted = num_blocks * num_branches
    if found not in (0, num_blocks, wanted):
        raise CheckpointError(
            f'the checkpoint has {found} layers {where}, and the model {num_blocks} blocks of '
            f'{num_branches} branches for {wanted}'
        )
    return found == wanted


class _ParallelViT(ParallelBackbone):
    arch_zoo = {
        **VisionTransformer.arch_zoo,
        **{
            f'vit-{name}': VisionTransformer.arch_zoo[f'deit-{name}']
            for name in ('t', 'tiny', 's', 'small', 'b', 'base')
        },
    }

    def _share_out(self, arch, num_branches):
        name, arch = arch, self.arch_zoo.get(arch.lower(), arch) if isinstance(arch, str) else arch
        if isinstance(name, str) and isinstance(arch, dict):
            blocks = share_out(arch['num_layers'], num_branches, name)
            arch = dict(arch, num_layers=blocks)
        return arch, num_branches

    def _add_branches(self, ffn_norm_cfg):
        for layer in self.layers:
            layer.attn = parallel_attention(layer.attn, self.num_branches)
            layer.ffn = parallel_ffn(layer, self.num_branches, ffn_norm_cfg)

    def _fill_branches(self, state_dict, prefix):
        layers, n = f'{prefix}layers.', self.num_branches
        found = number_of_layers(state_dict, layers, VIT)
        if check_number(found, len(self.layers), n, f'{layers}*'):
            for i, layer in enumerate(self.layers):
                sources = [f'{layers}{j}' for j in range(i * n, (i + 1) * n)]
                fill_block(state_dict, f'{layers}{i}', layer, sources, VIT)


@MODELS.register_module()
class ParallelVisionTransformer(_ParallelViT, VisionTransformer):
    """Vision Transformer with parallel branches, which merges into a shallower one.

    `Depth reparameterization <https://arxiv.org/abs/2511.19718>`_: see
    :mod:`repa_mm.reparam.depth`. Merged, it has, name by name, the weights of mmpretrain's
    ``VisionTransformer`` with ``num_layers`` blocks and without layer scale.

    The weights of an ordinary ViT with ``num_branches`` times the layers load into the branches,
    consecutive layers side by side.

    Args:
        arch (str | dict): As mmpretrain's, or 'vit-tiny', 'vit-small', 'vit-base' (12 layers). The
            layers of a named architecture are shared out among the branches: 'vit-tiny' with 2
            branches has 6 blocks. The ``num_layers`` of a dict counts blocks.
        *args, **kwargs: Other arguments of ``VisionTransformer``, and ``num_branches``,
            ``idle_ratio``, ``ffn_norm_cfg`` and ``deploy`` of :class:`ParallelBackbone`.

    Examples:
        >>> model = ParallelVisionTransformer('vit-tiny', num_branches=2)
        >>> ...  # train, with JoinBranchesHook
        >>> deployed = repa_mm.reparameterize(model)  # 6 ordinary layers
    """


@MODELS.register_module()
class ParallelMAEViT(_ParallelViT, MAEViT):
    """:class:`ParallelVisionTransformer` for pretraining as a masked autoencoder.

    Args:
        arch (str | dict): As there.
        *args, **kwargs: Those of mmpretrain's ``MAEViT``, and of :class:`ParallelBackbone`.
    """
