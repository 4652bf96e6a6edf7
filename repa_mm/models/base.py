"""What all RePa backbones share."""
import warnings

from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm

from ..reparam import reparameterize
from ..utils.checkpoint import check_pretrained


class RePaBackbone:
    """Mixin before the mmpretrain parent of a RePa backbone."""

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
