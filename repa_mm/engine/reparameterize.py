"""Testing the deploy form, training the training form."""

import collections
import os.path as osp
import time
from collections.abc import Sequence

import mmengine
import torch.nn as nn
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.checkpoints import is_remote, load_checkpoint, save_checkpoint
from repa_mm.engine.complexity import count_macs, count_parameters
from repa_mm.reparam import (
    CheckpointError,
    TrainingForm,
    finish_schedules,
    has_deploy_form,
    innermost,
    is_reparameterized,
    outermost,
    reparameterize,
)
from repa_mm.version import __version__


@HOOKS.register_module()
class ReparameterizeHook(Hook):
    """Test with the deploy form of the model.

    Before a test epoch ``runner.model`` is replaced by a reparameterized copy,
    afterwards the training form is put back, untouched. The copy is made after
    :class:`EMAHook` has put the averaged weights into the model, and
    :class:`CheckpointHook` only ever sees the training form.

    When a merged checkpoint is tested with a config of the training form, the
    model takes the deploy form before the checkpoint is loaded.

    Args:
        when (str | Sequence[str]): 'test', 'val' or both: in which loops the
            deploy form is used. Defaults to 'test'.
        out (str, optional): Where to write the merged checkpoint before
            testing. Defaults to None, nowhere.
        input_shape (Sequence[int]): Image size (height, width) for which GMACs
            are logged. Defaults to (224, 224).

    Raises:
        ValueError: If nothing can be merged, a model in its deploy form is to
            be trained, or a custom ``priority`` puts this hook before EMAHook
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
        if isinstance(runner._train_loop, BaseLoop):
            if has_deploy_form(runner.model):
                raise ValueError(
                    'the model is in its deploy form, which cannot be trained:'
                    ' set deploy=False in its config'
                )
        else:
            self._match_form(runner)

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

    def _match_form(self, runner) -> None:
        """Give the model the deploy form if its checkpoint to test is merged."""
        path = runner._load_from
        if (
            not path
            or runner._resume
            or is_remote(path)
            or not osp.isfile(path)
            or has_deploy_form(runner.model)
        ):
            return
        model = innermost(runner.model)
        if not is_reparameterized(model, load_checkpoint(path)['state_dict']):
            return
        runner.logger.info(f'{path} is reparameterized already: the model takes its deploy form.')
        self._take_deploy_form(model)
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):
                self._take_deploy_form(hook.ema_model)

    @staticmethod
    def _take_deploy_form(model) -> None:
        # Its weights are loaded afterwards: nothing is lost with a lambda that is not at its end.
        reparameterize(finish_schedules(model), inplace=True, fuse_conv_bn=False)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        state_dict = checkpoint.get('state_dict', checkpoint)
        own = innermost(runner.model).state_dict()
        if not any(k[k.startswith('module.') * 7 :] in own for k in state_dict):
            raise CheckpointError(
                'the checkpoint has none of the weights of '
                f'{type(innermost(runner.model)).__name__}: it is of another '
                f'architecture (it has {next(iter(state_dict), "nothing")!r}, '
                f'the model {next(iter(own))!r})'
            )

    def before_test_epoch(self, runner) -> None:
        if 'test' in self.when:
            self._swap(runner)

    def after_test_epoch(self, runner, metrics=None) -> None:
        self._restore(runner)

    def before_val_epoch(self, runner) -> None:
        if 'val' in self.when:
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
                macs = count_macs(backbone, (3, *self.input_shape))
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
