"""Testing the deploy form, training the training form."""

import collections
import time
from collections.abc import Sequence

import mmengine
import torch.nn as nn
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.engine.channels import check_channels
from repa_mm.engine.complexity import count_macs, count_parameters, image_channels
from repa_mm.reparam import (
    TrainingForm,
    has_deploy_form,
    innermost,
    outermost,
    reparameterize,
    schedules_have_ended,
)
from repa_mm.version import __version__
from repa_mm.weights import check_known, match_form, save_checkpoint, without_wrappers


@HOOKS.register_module()
class ReparameterizeHook(Hook):
    """Test with the deploy form of the model.

    The hook replaces ``runner.model`` by a reparameterized copy before a test epoch, and puts the
    training form back afterwards, untouched. It makes the copy after :class:`EMAHook` has put the
    averaged weights into the model, and :class:`CheckpointHook` only ever sees the training form.

    If a merged checkpoint is tested with a config of the training form, the model takes the deploy
    form before the checkpoint is loaded.

    Args:
        when (str | Sequence[str]): 'test', 'val' or both: in which loops the deploy form is used.
            Defaults to 'test'.
        out (str, optional): Where to write the merged checkpoint before testing. Defaults to None,
            nowhere.
        input_shape (Sequence[int]): Image size (height, width) for which GMACs are logged.
            Defaults to (224, 224).

    Raises:
        ValueError: If nothing can be merged, the neck or heads do not fit the backbone, a model in
            its deploy form is to be trained, or a custom ``priority`` puts this hook before EMAHook
            or after CheckpointHook.
        CheckpointError: If a checkpoint has no weight of the model.
    """

    # After EMAHook (NORMAL), before CheckpointHook (VERY_LOW).
    priority = 'LOW'

    def __init__(
        self,
        when: str | Sequence[str] = 'test',
        out: str | None = None,
        input_shape: Sequence[int] = (224, 224),
    ) -> None:
        self.when = {when} if isinstance(when, str) else set(when)
        if not self.when or self.when - {'test', 'val'}:
            raise ValueError(f"when must be 'test', 'val' or both, but got {when!r}")
        self.out = out
        self.input_shape = tuple(input_shape)
        self._training_form = None
        self._has_counted = False

    def before_run(self, runner) -> None:
        self._check_order(runner)
        self._restore(runner)
        check_channels(runner.model)
        # MMEngine goes through its list of hooks, and may come to this one again.
        if not any(isinstance(hook, _Before) for hook in runner.hooks):
            runner.register_hook(_Before(self))
        if isinstance(runner._train_loop, BaseLoop) and has_deploy_form(runner.model):
            raise ValueError(
                'the model is in its deploy form, which cannot be trained: '
                'set deploy=False in its config'
            )

    def _check_order(self, runner) -> None:
        index = runner.hooks.index(self)
        for i, hook in enumerate(runner.hooks):
            if (
                isinstance(hook, EMAHook)
                and i > index
                or isinstance(hook, CheckpointHook)
                and i < index
            ):
                raise ValueError(
                    'ReparameterizeHook must come after EMAHook and before '
                    f"CheckpointHook (leave its priority at '{self.priority}')"
                    f': it is on the wrong side of {type(hook).__name__}'
                )

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        state_dict = checkpoint.get('state_dict', checkpoint)
        check_known(innermost(runner.model), without_wrappers(state_dict))

    def before_test_epoch(self, runner) -> None:
        if 'test' in self.when:
            self._swap(runner)

    def after_test_epoch(self, runner, metrics=None) -> None:
        self._restore(runner)

    def before_val_epoch(self, runner) -> None:
        # In the middle of a schedule nothing merges, and the training form is validated.
        if 'val' in self.when and schedules_have_ended(runner.model):
            self._swap(runner)

    def after_val_epoch(self, runner, metrics=None) -> None:
        self._restore(runner)

    def _swap(self, runner) -> None:
        # After an interrupted epoch.
        self._restore(runner)
        deployed = reparameterize(runner.model)
        merged = collections.Counter(
            form.label for _, form in outermost(runner.model, TrainingForm)
        )
        if merged:
            self._log(runner, deployed, merged)
        else:
            runner.logger.info('The model is reparameterized already.')
        self._training_form, runner.model = runner.model, deployed
        if self.out and is_main_process():
            self._write(runner)

    def _restore(self, runner) -> None:
        if self._training_form is not None:
            runner.model, self._training_form = self._training_form, None

    def _log(self, runner, deployed: nn.Module, merged: dict) -> None:
        # Counting costs more than merging, and finds the same every time.
        if self._has_counted or not is_main_process():
            return
        self._has_counted = True
        figures = []
        for model in (runner.model, deployed):
            model = innermost(model)
            figures.append(f'{count_parameters(model) / 1e6:.1f} M parameters')
            backbone = getattr(model, 'backbone', None)
            if backbone is not None:
                macs = count_macs(backbone, (image_channels(backbone), *self.input_shape))
                figures[-1] += (
                    f' (backbone {count_parameters(backbone) / 1e6:.1f} M, '
                    f'{macs / 1e9:.2f} GMACs at {self.input_shape[0]}x'
                    f'{self.input_shape[1]})'
                )
        what = ', '.join(f'{count} {label}s' for label, count in merged.items())
        runner.logger.info(f'Reparameterized {what}: {figures[0]} -> {figures[1]}')

    def _write(self, runner) -> None:
        # Without what cannot be loaded again.
        model = innermost(reparameterize(self._training_form, fuse_conv_bn=False))
        meta = dict(
            cfg=runner.cfg.pretty_text,
            experiment_name=runner.experiment_name,
            dataset_meta=getattr(runner.visualizer, 'dataset_meta', None),
            time=time.strftime('%Y%m%d_%H%M%S', time.localtime()),
            mmengine_version=mmengine.__version__,
            repa_mm_version=__version__,
        )
        save_checkpoint(dict(meta=meta, state_dict=weights_to_cpu(model.state_dict())), self.out)
        runner.logger.info(f'Wrote the merged checkpoint to {self.out}')


class _Before(Hook):
    """What :class:`ReparameterizeHook` does before :class:`EMAHook` does its part.

    It gives a model that is tested the deploy form if its checkpoint is merged: EMAHook loads the
    checkpoint into the averaged model. And it puts the training form back after an epoch:
    MMPretrain's EMAHook may evaluate the weights that are not averaged then.
    """

    priority = 'VERY_HIGH'

    def __init__(self, hook: ReparameterizeHook) -> None:
        self.hook = hook

    def after_val_epoch(self, runner, metrics=None) -> None:
        self.hook._restore(runner)

    def after_test_epoch(self, runner, metrics=None) -> None:
        self.hook._restore(runner)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        if runner._resume or isinstance(runner._train_loop, BaseLoop):
            return
        state_dict = without_wrappers(checkpoint.get('state_dict', checkpoint))
        models = [runner.model]
        models += [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)]
        changed = [match_form(innermost(model), state_dict) for model in models]
        if any(changed):
            runner.logger.info('The checkpoint is merged: the model takes its deploy form.')
