"""ViTs, masked autoencoders and Swins with parallel branches."""

from collections.abc import Sequence
from functools import partial

from mmengine.registry import MODELS
from mmpretrain.models import SwinTransformer, VisionTransformer
from mmpretrain.models.selfsup import MAEViT

from repa_mm.models import WithStructures


def share_out(num_layers: int, num_branches: int, what: str) -> int:
    """Return the number of blocks in which so many layers have so many branches.

    Raises:
        ValueError: If the layers cannot be shared out.
    """
    if num_layers % num_branches:
        raise ValueError(
            f'the {num_layers} layers of {what} cannot be shared out among blocks of '
            f'{num_branches} branches: choose a divisor of {num_layers}, or give arch as a dict, '
            'which counts blocks'
        )
    return num_layers // num_branches


class ParallelBackbone(WithStructures):
    """Mixin before the mmpretrain parent of a backbone with parallel branches.

    `Depth reparameterization <https://arxiv.org/abs/2511.19718>`_: see
    :mod:`projects.depth_reparameterization.branches`. Merged, it has, name by name, the weights of
    the parent with as many blocks and without layer scale. The weights of an ordinary backbone with
    the layers of all branches, given as ``init_cfg``, fill the branches.

    Args:
        arch (str | dict): The architecture. A name stands for the layers of an ordinary backbone,
            which the branches share; in a dict the numbers of layers count blocks.
        *args: Those of the parent.
        num_branches (int | Sequence[int]): Number of branches of each block.
        **kwargs: Those of the parent, and of :class:`~repa_mm.models.WithStructures`.

    Raises:
        ValueError: If the layers cannot be shared out among the branches.
    """

    def __init__(
        self, arch: str | dict, *args, num_branches: int | Sequence[int], **kwargs
    ) -> None:
        shallow, deep, branches = self._share_out(arch, num_branches)
        structures = [dict(type='Branches', num_branches=branches)]
        super().__init__(shallow, *args, structures=structures, **kwargs)
        build = self.build_ordinary
        self.build_ordinary = partial(build.func, deep, *args, **build.keywords)
        self.num_branches = num_branches


class _ParallelViT(ParallelBackbone):
    arch_zoo = {
        **VisionTransformer.arch_zoo,
        **{
            f'vit-{name}': VisionTransformer.arch_zoo[f'deit-{name}']
            for name in ('t', 'tiny', 's', 'small', 'b', 'base')
        },
    }

    def __init__(self, arch: str | dict, *args, num_branches: int = 2, **kwargs) -> None:
        super().__init__(arch, *args, num_branches=num_branches, **kwargs)

    def _share_out(self, arch, num_branches):
        if isinstance(arch, dict):
            return arch, dict(arch, num_layers=num_branches * arch['num_layers']), num_branches
        deep = self.arch_zoo[arch.lower()]
        blocks = share_out(deep['num_layers'], num_branches, arch)
        return dict(deep, num_layers=blocks), deep, num_branches


@MODELS.register_module()
class ParallelVisionTransformer(_ParallelViT, VisionTransformer):
    """Vision Transformer with parallel branches, which merges into a shallower one.

    Args:
        arch (str | dict): As mmpretrain's, or 'vit-tiny', 'vit-small', 'vit-base' (12 layers). The
            layers of a named architecture are shared out among the branches: 'vit-tiny' with 2
            branches has 6 blocks. The ``num_layers`` of a dict counts blocks.
        *args, **kwargs: Other arguments of ``VisionTransformer``, and of :class:`ParallelBackbone`;
            ``num_branches`` is 2 by default.

    Examples:
        >>> model = ParallelVisionTransformer('vit-tiny', num_branches=2)
        >>> ...  # train, with ScheduleHook
        >>> deployed = repa_mm.reparameterize(model)  # 6 ordinary layers
    """


@MODELS.register_module()
class ParallelMAEViT(_ParallelViT, MAEViT):
    """:class:`ParallelVisionTransformer` for pretraining as a masked autoencoder.

    Args:
        arch (str | dict): As for :class:`ParallelVisionTransformer`.
        *args, **kwargs: Those of mmpretrain's ``MAEViT``, and of :class:`ParallelBackbone`.
    """


@MODELS.register_module()
class ParallelSwinTransformer(ParallelBackbone, SwinTransformer):
    """Swin Transformer with parallel branches, which merges into a shallower one.

    Windows of successive blocks alternate between two grids, and branches that are joined attend to
    the same windows. So the branches of a block take the place of layers of one grid, every second
    one, and a stage keeps an even number of blocks: B branches need a multiple of 2B layers.

    Args:
        arch (str | dict): As mmpretrain's. The layers of a named architecture are shared out among
            the branches: 'small', 2-2-18-2 layers, with 3 branches has 2-2-6-2 blocks. The
            ``depths`` of a dict count blocks.
        *args, **kwargs: Other arguments of ``SwinTransformer``, and of :class:`ParallelBackbone`.
        num_branches (int | Sequence[int]): Number of branches in each stage. One number is that
            of the stages whose layers it can share out, the others have ordinary blocks. Defaults
            to 3.

    Raises:
        ValueError: If no stage, or not the stage that is asked for, can have so many branches.

    Examples:
        >>> model = ParallelSwinTransformer('small', num_branches=3)
        >>> model.depths
        [2, 2, 6, 2]
    """

    def __init__(
        self, arch: str | dict = 'small', *args, num_branches: int | Sequence[int] = 3, **kwargs
    ) -> None:
        super().__init__(arch, *args, num_branches=num_branches, **kwargs)

    def _share_out(self, arch, num_branches):
        is_named = isinstance(arch, str)
        name, arch = arch, self.arch_zoo[arch.lower()] if is_named else arch
        depths, branches = arch['depths'], num_branches
        if isinstance(num_branches, int):
            branches = [
                num_branches if not is_named or depth % (2 * num_branches) == 0 else 1
                for depth in depths
            ]
        if all(n == 1 for n in branches):
            raise ValueError(
                f'no stage of {depths} layers has branches with num_branches={num_branches!r}: a '
                'stage needs a multiple of 2 layers for each branch, since windows alternate'
            )
        shallow, deep = list(depths), list(depths)
        for i, (n, depth) in enumerate(zip(branches, depths, strict=True)):
            if is_named and n > 1:
                what = f'one grid of windows in stage {i} of {name!r}'
                shallow[i] = 2 * share_out(depth // 2, n, what)
            elif not is_named:
                deep[i] = n * depth
        per_block = [n for n, depth in zip(branches, shallow) for _ in range(depth)]
        return dict(arch, depths=shallow), dict(arch, depths=deep), per_block
