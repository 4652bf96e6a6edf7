"""What all RePa backbones share."""
import warnings
from typing import Sequence, Union

from mmengine.model import initialize
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm

from ..reparam import has_deploy_form, reparameterize
from ..utils.checkpoint import check_pretrained
from .idle import idle_channels


class RePaBackbone:
    """Mixin before the mmpretrain parent of a RePa backbone.

    Args:
        *args, **kwargs: Those of the parent.
        idle_ratio (float | Sequence[float]): Share of FFN hidden channels that
            skip the activation, in [0, 1]: one for all blocks, or one per
            block. Defaults to 0.75.
        idle_schedule (str): 'constant', or 'linear' for ratios that grow with
            depth. Defaults to 'constant'.
        ffn_norm_cfg (dict): Norm of the FFNs: 'BN', 'SyncBN' or 'LN'.
            Defaults to ``dict(type='BN')``.
        deploy (bool): Build the deploy form, for a reparameterized checkpoint.
            Defaults to False.
    """

    def __init__(self,
                 *args,
                 idle_ratio: Union[float, Sequence[float]] = 0.75,
                 idle_schedule: str = 'constant',
                 ffn_norm_cfg: dict = dict(type='BN'),
                 deploy: bool = False,
                 **kwargs) -> None:
        super().__init__(*args, **kwargs)
        idle_channels(self, idle_ratio, idle_schedule, ffn_norm_cfg)
        if deploy:
            self.switch_to_deploy()

    def switch_to_deploy(self) -> None:
        """Merge all FFNs in place; the backbone is in eval mode afterwards."""
        reparameterize(self, inplace=True, fuse_conv_bn=False)

    def init_weights(self) -> None:
        """Initialize, with clear words where pretrained weights are missing.

        Raises:
            FileNotFoundError: If ``init_cfg`` names a local file that is not
                there.
        """
        check_pretrained(self.init_cfg)
        if has_deploy_form(self):
            # It is loaded, never trained; and the blocks of some parents
            # expect a bias in every linear layer.
            cfgs = self.init_cfg
            for cfg in cfgs if isinstance(cfgs, (list, tuple)) else [cfgs]:
                if cfg and cfg['type'] == 'Pretrained':
                    initialize(self, cfg)
            return
        super().init_weights()
        norms = [m for m in self.modules() if isinstance(m, _BatchNorm)]
        if getattr(self, 'norm_eval', False) and norms and all(
                m.num_batches_tracked == 0 for m in norms):
            warnings.warn(
                f'{type(self).__name__}: norm_eval=True freezes BatchNorm '
                'statistics that were never estimated. Unless a checkpoint is '
                'loaded later (load_from), set norm_eval=False.')

    def train(self, mode: bool = True):
        # mmpretrain's backbones return None.
        super().train(mode)
        return self
