"""What all backbones with training forms share."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import AdaptivePadding
from mmengine.model import initialize
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm

from repa_mm.models.attention import swap_attention
from repa_mm.models.surgery.idle import idle_channels
from repa_mm.models.surgery.replace import replace
from repa_mm.models.tokens import reduce_tokens
from repa_mm.models.windows import is_traced
from repa_mm.reparam import (
    CheckpointError,
    check_state_dict,
    finish_schedules,
    has_deploy_form,
    reparameterize,
)
from repa_mm.weights import check_pretrained


class PatchPadding(AdaptivePadding):
    """mmcv's ``AdaptivePadding`` to whole patches, whose traced graph serves images of any size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_traced():
            return super().forward(x)
        h, w = (-size % stride for size, stride in zip(x.shape[2:], self.stride))
        top, left = (h // 2, w // 2) if self.padding == 'same' else (0, 0)
        return F.pad(x, (left, w - left, top, h - top))


def _padding_of_patches(module: nn.Module) -> type | None:
    is_of_patches = (
        type(module) is AdaptivePadding
        and module.kernel_size == module.stride
        and module.dilation == (1, 1)
    )
    return PatchPadding if is_of_patches else None


def trace_any_size(model: nn.Module) -> None:
    """Let a graph that is traced of a model serve images of any size, in place.

    What MMPretrain, MMDetection and MMSegmentation compute in Python, for the size that is traced,
    is replaced in vanilla backbones: the attention and patch merging of Swin, and the padding to
    whole patches.
    """
    swap_attention(model)
    replace(model, _padding_of_patches)


def adapt_output_norms(model: nn.Module, state_dict: dict, prefix: str, last: str) -> None:
    """Make a state dict fit a model with other outputs, in place.

    Every output of a backbone has a norm of its own. The state dict of a classifier has one norm,
    behind the last stage: the norms of other outputs keep their initial values. Norms of outputs
    that the model does not have are left out.

    Args:
        model (nn.Module): A backbone with norms 'norm0', 'norm1', ...
        state_dict (dict): The state dict that the model is about to load.
        prefix (str): Prefix of the names in the state dict.
        last (str): Name of the norm behind the last stage.
    """
    pattern = re.compile(re.escape(prefix) + r'(norm\d+)\.')
    given = {}
    for key in state_dict:
        if found := pattern.match(key):
            given.setdefault(found[1], []).append(key)
    own = {name: m for name, m in model.named_children() if re.fullmatch(r'norm\d+', name)}
    if set(given) == {last}:
        for name in set(own) - {last}:
            for key, value in own[name].state_dict().items():
                state_dict[f'{prefix}{name}.{key}'] = value.clone()
    for name in set(given) - set(own):
        for key in given[name]:
            del state_dict[key]


@contextmanager
def explained_start(init_cfg: dict | list | None) -> Iterator[None]:
    """Let errors while pretrained weights are loaded name the file, and say what to do.

    Args:
        init_cfg (dict | list, optional): What a backbone starts from.

    Raises:
        CheckpointError: If weights that ``init_cfg`` names do not fit.
    """
    try:
        yield
    except (AssertionError, CheckpointError) as error:
        cfgs = init_cfg if isinstance(init_cfg, (list, tuple)) else [init_cfg]
        paths = [cfg['checkpoint'] for cfg in cfgs if cfg and 'checkpoint' in cfg]
        if not paths:
            raise
        raise CheckpointError(
            f'the backbone cannot start from {paths[0]!r}: {str(error).rstrip(".")}. '
            "prefix='backbone.' in init_cfg takes the backbone of a whole model, and "
            'tools/convert_pretrained.py makes channel-idle weights of vanilla ones'
        ) from error


class ReparamBackbone:
    """Mixin before the mmpretrain parent of a backbone with training forms.

    A subclass puts the forms in after its parent's ``__init__``, and ends with :meth:`_finish`.
    """

    def _finish(self, deploy: bool) -> None:
        """What follows on the last form: any image size, frozen stages, checks, the deploy form.

        Args:
            deploy (bool): Whether to take the deploy form, for a reparameterized checkpoint.
        """
        replace(self, _padding_of_patches)
        # What is new in a stage is frozen where its parent freezes the stage.
        self.train()
        # MMEngine loads non-strictly, with only a warning for what is missing; a backbone without
        # the weights of its forms is never what was wanted.
        self._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
        if deploy:
            finish_schedules(self)
            self.switch_to_deploy()

    def switch_to_deploy(self) -> None:
        """Merge all forms in place; the backbone is in eval mode afterwards."""
        reparameterize(self, inplace=True, fuse_conv_bn=False)

    def init_weights(self) -> None:
        """Initialize the weights, or load the pretrained ones that ``init_cfg`` names.

        Raises:
            FileNotFoundError: If ``init_cfg`` names a local file that is not there.
            CheckpointError: If its weights are not those of this backbone.
        """
        check_pretrained(self.init_cfg)
        if has_deploy_form(self):
            # A deploy form is only loaded. The blocks of some parents would expect a bias in every
            # linear layer of it.
            cfgs = self.init_cfg
            for cfg in cfgs if isinstance(cfgs, (list, tuple)) else [cfgs]:
                if cfg and cfg.get('type') == 'Pretrained':
                    with explained_start(cfg):
                        initialize(self, cfg)
            return
        with explained_start(self.init_cfg):
            super().init_weights()
        norms = [m for m in self.modules() if isinstance(m, _BatchNorm)]
        fresh = norms and all(m.num_batches_tracked == 0 for m in norms)
        if getattr(self, 'norm_eval', False) and fresh:
            warnings.warn(
                f'{type(self).__name__}: norm_eval=True freezes BatchNorm statistics that were '
                'never estimated. Unless a checkpoint is loaded later (load_from), set '
                'norm_eval=False.'
            )

    def train(self, mode: bool = True):
        super().train(mode)
        # Some parents freeze stages once, which was enough for LayerNorm: BatchNorm would go on
        # changing its statistics.
        if mode and getattr(self, 'frozen_stages', -1) > 0 and hasattr(self, '_freeze_stages'):
            self._freeze_stages()
        return self  # mmpretrain's backbones return None


class RePaBackbone(ReparamBackbone):
    """Mixin before the mmpretrain parent of a RePa backbone.

    Args:
        *args, **kwargs: Those of the parent.
        idle_ratio (float | Sequence[float]): Share of FFN hidden channels that skip the activation,
            in [0, 1]: one for all blocks, or one per block. Defaults to 0.75.
        idle_schedule (str): 'constant', or 'linear' for ratios that grow with depth. Defaults to
            'constant'.
        ffn_norm_cfg (dict): Norm of the FFNs: 'BN', 'SyncBN', 'LN' or 'keep', see
            :func:`~repa_mm.models.idle_channels`. Defaults to ``dict(type='BN')``.
        deploy (bool): Build the deploy form, for a reparameterized checkpoint. Defaults to False.
        keep_tokens (float | Sequence): Share of the windows or patches that blocks compute in
            full in eval mode, see :func:`~repa_mm.reduce_tokens`. Defaults to 1.
    """

    def __init__(
        self,
        *args,
        idle_ratio: float | Sequence[float] = 0.75,
        idle_schedule: str = 'constant',
        ffn_norm_cfg: dict = dict(type='BN'),
        deploy: bool = False,
        keep_tokens: float | Sequence[float] = 1.0,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        idle_channels(self, idle_ratio, idle_schedule, ffn_norm_cfg)
        if keep_tokens != 1:
            reduce_tokens(self, keep_tokens, inplace=True)
        self._finish(deploy)
