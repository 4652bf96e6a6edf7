"""Any backbone of OpenMMLab with channel-idle FFNs, from its own config."""

import copy
import logging
from functools import cache

import torch.nn as nn
from mmengine.logging import print_log
from mmengine.model import initialize
from mmengine.registry import MODELS

from repa_mm.models.attention import swap_attention
from repa_mm.models.base import RePaBackbone, explained_start
from repa_mm.reparam import TrainingForm
from repa_mm.weights import check_pretrained


class _IdleBackbone(RePaBackbone):
    """Mixin of the backbones that :func:`build_idle_backbone` makes."""

    freezes_statistics = False
    vanilla_weights: str | None = None

    def init_weights(self) -> None:
        """Initialize, and load the weights that ``init_cfg`` names.

        The ways in which the parents read vanilla weights do not concern those of channel-idle
        FFNs.

        Raises:
            FileNotFoundError: If ``init_cfg`` names a local file that is not there.
            CheckpointError: If the weights are not those of this backbone.
        """
        init_cfg, self.init_cfg = self.init_cfg, None
        check_pretrained(init_cfg)
        if self.vanilla_weights and not init_cfg:
            print_log(
                f'The backbone starts from random weights: {self.vanilla_weights!r} has those of '
                'the vanilla one. tools/convert_pretrained.py makes channel-idle weights of them, '
                'for init_cfg of IdleChannels, or for load_from. Where load_from or resume is set, '
                'its weights follow',
                'current',
                logging.WARNING,
            )
        try:
            super().init_weights()
        finally:
            self.init_cfg = init_cfg
        if init_cfg:
            with explained_start(init_cfg):
                initialize(self, init_cfg)

    def train(self, mode: bool = True):
        super().train(mode)
        if mode and self.freezes_statistics:
            for module in self.modules():
                if isinstance(module, TrainingForm):
                    for norm in module.batch_norms():
                        norm.eval()
        return self


@cache
def _idle_class(kind: type) -> type:
    return type(
        f'Idle{kind.__name__}',
        (_IdleBackbone, kind),
        dict(__doc__=kind.__doc__, __module__=__name__),
    )


@MODELS.register_module(name='IdleChannels')
def build_idle_backbone(
    backbone: dict,
    idle_ratio: float | list[float | None] = 0.75,
    idle_schedule: str = 'constant',
    norm_cfg: dict = dict(type='BN'),
    norm_eval: bool = False,
    fast_attention: bool = True,
    deploy: bool = False,
    init_cfg: dict | None = None,
    pretrained: str | None = None,
    keep_tokens: float | list[float] = 1.0,
) -> nn.Module:
    """Build a backbone from its config, with channel-idle FFNs in place of its FFNs.

    The names of all other weights are those of the backbone. A config that inherits from any other
    one uses it like this::

        model = dict(backbone=dict(
            _delete_=True, type='IdleChannels', idle_ratio=0.75,
            backbone={{_base_.model.backbone}}))

    Args:
        backbone (dict): Config of a backbone of MMPretrain, MMDetection or MMSegmentation, whose
            blocks are known (see :func:`~repa_mm.models.idle_channels`).
        idle_ratio (float | list): As for :func:`~repa_mm.models.idle_channels`.
        idle_schedule (str): As there.
        norm_cfg (dict): As there.
        norm_eval (bool): Whether BatchNorm statistics in the FFNs stay as they were loaded.
            Defaults to False.
        fast_attention (bool): Use the window attention of
            :func:`~repa_mm.models.fast_window_attention` where the backbone has windows. Defaults
            to True.
        deploy (bool): Build the deploy form, for a reparameterized checkpoint. Defaults to False.
        init_cfg (dict, optional): Where the weights of the channel-idle backbone come from, such
            as ``dict(type='Pretrained', checkpoint=…, prefix='backbone.')``. The backbone's own
            ``init_cfg`` has those of the vanilla one and is not used; a warning says so.
        pretrained (str, optional): Weights of the vanilla backbone, which MMSegmentation's models
            hand on to their backbones. They are not used either.
        keep_tokens (float | list): Share of the windows or patches that blocks compute in
            full in eval mode, see :func:`~repa_mm.reduce_tokens`. Defaults to 1.

    Returns:
        nn.Module: The backbone.

    Raises:
        ValueError: If ``backbone`` is no config, or no block of it can become channel-idle.
    """
    if not isinstance(backbone, dict) or 'type' not in backbone:
        raise ValueError(
            "'backbone' of IdleChannels must be the config of a backbone, a dict with 'type', but "
            f'is {backbone!r}'
        )
    args = dict(backbone)
    vanilla, pretrained = args.pop('init_cfg', None), args.pop('pretrained', None) or pretrained
    kind = name = args.pop('type')
    with MODELS.switch_scope_and_registry(args.pop('_scope_', None)) as registry:
        if isinstance(name, str):
            kind = MODELS.get(name) or registry.get(name)
        if not isinstance(kind, type):
            what = 'is no class' if kind else 'is not registered'
            raise ValueError(f'there is no backbone {name!r} for IdleChannels: it {what}')
        if issubclass(kind, RePaBackbone):
            raise ValueError(f'a {kind.__name__} has channel-idle FFNs already: use it as it is')
        model = _idle_class(kind)(
            **args,
            idle_ratio=idle_ratio,
            idle_schedule=idle_schedule,
            ffn_norm_cfg=norm_cfg,
            deploy=deploy,
            keep_tokens=keep_tokens,
        )
    # Afterwards: not every backbone of a user has this argument.
    model.init_cfg = copy.deepcopy(init_cfg)
    model.freezes_statistics = norm_eval
    model.vanilla_weights = pretrained or isinstance(vanilla, dict) and vanilla.get('checkpoint')
    if fast_attention:
        swap_attention(model)
    return model
