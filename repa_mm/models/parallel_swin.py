"""Swin with parallel branches, which merge into a shallower Swin."""

from collections.abc import Sequence

from mmengine.registry import MODELS
from mmpretrain.models import SwinTransformer

from repa_mm.models.attention import swap_attention
from repa_mm.models.parallel_vit import ParallelBackbone, check_number, share_out
from repa_mm.models.surgery.branches import (
    SWIN,
    ParallelShiftWindowMSA,
    fill_block,
    number_of_layers,
    parallel_attention,
    parallel_ffn,
)
from repa_mm.models.swin import SwinStateDicts
from repa_mm.reparam import become


@MODELS.register_module()
class ParallelSwinTransformer(ParallelBackbone, SwinStateDicts, SwinTransformer):
    """Swin Transformer with parallel branches, which merges into a shallower one.

    `Depth reparameterization <https://arxiv.org/abs/2511.19718>`_ on window attention. Windows of
    successive blocks alternate between two grids, and branches that are joined attend to the same
    windows. So the branches of a block take the place of layers of one grid, every second one, and
    a stage keeps an even number of blocks: B branches need a multiple of 2B layers.

    Merged, it has, name by name, the weights of mmpretrain's ``SwinTransformer`` with these depths.
    Those of an ordinary Swin with the layers of all branches load into the branches.

    Args:
        arch (str | dict): As mmpretrain's. The layers of a named architecture are shared out among
            the branches: 'small', 2-2-18-2 layers, with 3 branches has 2-2-6-2 blocks. The
            ``depths`` of a dict count blocks.
        *args, **kwargs: Other arguments of ``SwinTransformer``, and ``idle_ratio``,
            ``ffn_norm_cfg`` and ``deploy`` of :class:`ParallelBackbone`.
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
        name, arch = arch, self.arch_zoo.get(arch.lower(), arch) if isinstance(arch, str) else arch
        if not isinstance(arch, dict) or 'depths' not in arch:
            return arch, num_branches
        depths, is_named = arch['depths'], isinstance(name, str)
        if isinstance(num_branches, Sequence) and not isinstance(num_branches, str):
            if len(num_branches) != len(depths):
                raise ValueError(
                    f'num_branches has {len(num_branches)} entries for {len(depths)} stages'
                )
            branches = list(num_branches)
        else:
            share_out(0, num_branches, name)
            branches = [
                num_branches if not is_named or depth % (2 * num_branches) == 0 else 1
                for depth in depths
            ]
        if all(n == 1 for n in branches):
            raise ValueError(
                f'no stage of {depths} layers has branches with num_branches={num_branches!r}: a '
                'stage needs a multiple of 2 layers for each branch, since windows alternate'
            )
        for i, (n, depth) in enumerate(zip(branches, depths)):
            if n != 1 and is_named:
                share_out(depth // 2, n, f'one grid of windows in stage {i} of {name!r}')
        if is_named:
            depths = [depth // n for depth, n in zip(depths, branches)]
        return dict(arch, depths=depths), branches

    def _add_branches(self, ffn_norm_cfg):
        for stage, num_branches in zip(self.stages, self.num_branches):
            if num_branches == 1:
                continue
            for block in stage.blocks:
                block.attn.w_msa = parallel_attention(block.attn.w_msa, num_branches)
                become(block.attn, ParallelShiftWindowMSA)
                block.ffn = parallel_ffn(block, num_branches, ffn_norm_cfg)
        swap_attention(self)

    def _fill_branches(self, state_dict, prefix):
        for i, (stage, n) in enumerate(zip(self.stages, self.num_branches)):
            blocks = f'{prefix}stages.{i}.blocks.'
            found = number_of_layers(state_dict, blocks, SWIN)
            if n == 1 or not check_number(found, len(stage.blocks), n, f'{blocks}*'):
                continue
            for k, block in enumerate(stage.blocks):
                # The next n layers of the same grid.
                first = 2 * n * (k // 2) + k % 2
                sources = [f'{blocks}{j}' for j in range(first, first + 2 * n, 2)]
                fill_block(state_dict, f'{blocks}{k}', block, sources, SWIN)
