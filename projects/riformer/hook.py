"""Affine mixers that imitate token mixers while they train."""

import torch
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS

from projects.riformer.mixer import NormedAffine
from repa_mm.surgery import innermost


@HOOKS.register_module()
class ImitateMixersHook(Hook):
    """Adds to the loss how far affine mixers are from the token mixers of a teacher.

    The module imitation of `RIFormer <https://arxiv.org/abs/2304.05659>`_: block by block, the mean
    squared difference between the output of the affine map and that of the teacher's token mixer,
    and that between their inputs, the normalized feature maps. Their mean over blocks is
    ``loss_imitation``.

    Args:
        teacher (dict): Config of the teacher's backbone, a PoolFormer with as many blocks of the
            same widths, with an ``init_cfg`` that loads its weights.

    Raises:
        ValueError: In training, if the model has no affine mixers, or not one for each token mixer
            of the teacher; or if it runs more than once for a loss.
    """

    def __init__(self, teacher: dict) -> None:
        self.teacher_cfg, self._handles = teacher, []

    def before_train(self, runner) -> None:
        self.teacher = MODELS.build(self.teacher_cfg)
        self.teacher.init_weights()
        self.teacher.eval()  # of some backbones it returns None
        self.teacher.to(next(runner.model.parameters()).device).requires_grad_(False)

    # Only around an iteration: forms with hooks do not merge.
    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        self._remove_hooks()  # of an iteration that was interrupted
        model, self._taught, self._learnt = innermost(runner.model), [], []
        for mixer in (m.token_mixer for m in self.teacher.modules() if hasattr(m, 'token_mixer')):
            self._watch(mixer, self._taught)
        for form in (m for m in model.modules() if isinstance(m, NormedAffine)):
            self._watch(form.affine, self._learnt)
        self._handles.append(model.register_forward_hook(self._imitate, with_kwargs=True))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self._remove_hooks()

    def _watch(self, module: torch.nn.Module, seen: list) -> None:
        handle = module.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        self._handles.append(handle)

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _imitate(self, model, args: tuple, kwargs: dict, losses: dict) -> dict:
        with torch.no_grad():
            self.teacher(kwargs['inputs'] if 'inputs' in kwargs else args[0])
        if not self._learnt or len(self._learnt) != len(self._taught):
            raise ValueError(
                f'{len(self._taught)} token mixers of the teacher ran, and {len(self._learnt)} '
                'affine mixers of the model: every block is to run once for a loss'
            )
        # The affine map gives alpha u + c, of which u is subtracted behind it.
        terms = [
            F.mse_loss(affine - u, mixed) + F.mse_loss(u, x)
            for (x, mixed), (u, affine) in zip(self._taught, self._learnt)
        ]
        return dict(losses, loss_imitation=sum(terms) / len(terms))
