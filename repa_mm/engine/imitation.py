"""Training without token mixers, after a teacher that has them."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS

from repa_mm.reparam import CheckpointError, NormedAffine, innermost
from repa_mm.weights import load_checkpoint


@HOOKS.register_module()
class ImitateMixersHook(Hook):
    """Adds to the loss how far affine mixers are from the token mixers of a teacher.

    The module imitation of `RIFormer <https://arxiv.org/abs/2304.05659>`_: block by block, the mean
    squared difference between the output of the affine map and that of the teacher's token mixer,
    and that between their inputs, the normalized feature maps.

    Args:
        teacher (dict): Config of the teacher's backbone, a PoolFormer with as many blocks of the
            same widths.
        checkpoint (str): Its weights, of the backbone alone or of a classifier.
        output_weight (float): Weight of the differences of outputs. Defaults to 1.
        input_weight (float): Weight of the differences of inputs. Defaults to 1.

    Raises:
        ValueError: If the model has no affine mixers, or the teacher other blocks.
        CheckpointError: If the checkpoint is not the teacher's.
    """

    def __init__(
        self, teacher: dict, checkpoint: str, output_weight: float = 1.0, input_weight: float = 1.0
    ) -> None:
        self.teacher_cfg, self.checkpoint = teacher, checkpoint
        self.output_weight, self.input_weight = output_weight, input_weight

    def before_train(self, runner) -> None:
        model = innermost(runner.model)
        self._students = [m for m in model.modules() if isinstance(m, NormedAffine)]
        if not self._students:
            raise ValueError(f'{type(model).__name__} has no affine mixers that could imitate')
        self.teacher = self._build_teacher().to(next(model.parameters()).device)
        self._teachers = [
            m.token_mixer for m in self.teacher.modules() if hasattr(m, 'token_mixer')
        ]
        if len(self._teachers) != len(self._students):
            raise ValueError(
                f'the teacher has {len(self._teachers)} token mixers, and the model '
                f'{len(self._students)} affine ones'
            )

    # Only around an iteration: what is validated, averaged and saved is the model as it is.
    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        model = innermost(runner.model)
        vars(model).pop('loss', None)  # of an iteration that was interrupted
        self._loss, model.loss = model.loss, self._loss_with_imitation

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        del innermost(runner.model).loss

    def _build_teacher(self) -> nn.Module:
        teacher = MODELS.build(self.teacher_cfg)
        state_dict = load_checkpoint(self.checkpoint)['state_dict']
        start = 'backbone.' * any(key.startswith('backbone.') for key in state_dict)
        own = {k[len(start) :]: v for k, v in state_dict.items() if k.startswith(start)}
        missing, unknown = teacher.load_state_dict(own, strict=False)
        if missing:
            raise CheckpointError(
                f'{self.checkpoint!r} is not of the teacher: it lacks {missing[0]!r}'
            )
        # But for norms of other outputs, and a head.
        unknown = [key for key in unknown if not key.startswith(('norm', 'head.'))]
        if unknown:
            raise CheckpointError(
                f'{self.checkpoint!r} is not of the teacher: it has {unknown[0]!r}, of a deeper '
                'model'
            )
        # On a line of its own: the eval() of some backbones returns None.
        teacher.eval()
        return teacher.requires_grad_(False)

    def _loss_with_imitation(self, inputs, *args, **kwargs) -> dict:
        seen = [], []

        def note(into):
            return lambda module, args, output: into.append((args[0], output))

        # Only for the forward pass: forms with hooks do not merge.
        handles = [mixer.register_forward_hook(note(seen[0])) for mixer in self._teachers]
        try:
            with torch.no_grad():
                self.teacher(inputs)
            handles += [form.affine.register_forward_hook(note(seen[1])) for form in self._students]
            losses = self._loss(inputs, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if len(seen[0]) != len(seen[1]):
            raise ValueError(
                f'{len(seen[0])} token mixers of the teacher ran, and {len(seen[1])} affine ones: '
                'the model is to run once for a loss'
            )
        terms = []
        for (x, mixed), (u, affine) in zip(*seen):
            if mixed.shape != affine.shape:
                raise ValueError(
                    f'a mixer of the teacher gives a map of shape {tuple(mixed.shape)}, and the '
                    f'affine one in its place {tuple(affine.shape)}: the teacher has other blocks'
                )
            # The affine map gives alpha u + c, of which u is subtracted behind it.
            terms.append(self.output_weight * F.mse_loss(affine - u, mixed))
            terms.append(self.input_weight * F.mse_loss(u, x))
        losses['loss_imitation'] = sum(terms) / len(self._students)
        return losses
