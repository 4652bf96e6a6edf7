"""A hook that tests a model in its deploy form."""

from collections import Counter
from collections.abc import Sequence

from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop

from repa_mm.faster import rewrite_
from repa_mm.reparam import (
    TrainingForm,
    has_deploy_form,
    has_training_form,
    match_form,
    outermost,
    reparameterize,
    schedules_have_ended,
)
from repa_mm.surgery import innermost


@HOOKS.register_module()
class ReparameterizeHook(Hook):
    """Test with the deploy form of the model.

    Before the first batch of a test, the hook replaces ``runner.model`` with a reparameterized
    copy. If an :class:`EMAHook` tests averaged weights, the copy has the averaged weights. After
    the last batch, the hook puts the training form back, unchanged, before other hooks swap
    weights or save a checkpoint. A model that is already merged, by another such hook or in its
    checkpoint, is tested as it is.

    If a merged checkpoint is tested with a config of the training form, the model takes the deploy
    form before the checkpoint is loaded.

    Args:
        when (str | Sequence[str]): The loops that use the deploy form: 'test', 'val' or both. Until
            every schedule has ended, the model cannot merge, and the training form is validated.
            Defaults to 'test'.

    Raises:
        ValueError: If ``when`` is something else; before a test, if nothing can be merged.

    Examples:
        >>> default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))
    """

    # Before EMAHook (NORMAL), which loads the checkpoint into the averaged model and swaps the
    # weights back after an epoch. EMAHook's swap before an epoch precedes the first batch anyway.
    priority = 'VERY_HIGH'

    def __init__(self, when: str | Sequence[str] = 'test') -> None:
        self.when = {when} if isinstance(when, str) else set(when)
        if not self.when or self.when - {'test', 'val'}:
            raise ValueError(f"when must be 'test', 'val' or both, but got {when!r}")
        self._training_form, self._is_due = None, False

    def before_run(self, runner) -> None:
        self._restore(runner)  # an earlier test may have been interrupted

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        if isinstance(runner._train_loop, BaseLoop):  # which a merged checkpoint is no start for
            return
        # MMEngine strips the prefix of wrapped models after this.
        weights = checkpoint.get('state_dict', checkpoint)
        state_dict = {key.removeprefix('module.'): value for key, value in weights.items()}
        models = [runner.model]
        models += [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)]
        changed = [match_form(innermost(model), state_dict) for model in models]
        if any(changed):
            runner.logger.info('The checkpoint is merged: the model takes its deploy form.')

    def before_test_epoch(self, runner) -> None:
        self._restore(runner)
        self._is_due = 'test' in self.when

    def before_val_epoch(self, runner) -> None:
        self._restore(runner)
        self._is_due = 'val' in self.when and schedules_have_ended(runner.model)

    def before_test_iter(self, runner, batch_idx, data_batch=None) -> None:
        # MMDetection's loop for semi-supervised detectors passes over the data twice in an epoch,
        # and sets in between what the model that it began with predicts.
        if self._is_due or batch_idx == 0 and self._training_form is not None:
            self._is_due = False
            self._restore(runner)
            if has_training_form(runner.model) or not has_deploy_form(runner.model):
                self._merge(runner)  # which refuses a model without forms

    def after_test_epoch(self, runner, metrics=None) -> None:
        self._restore(runner)

    before_val_iter, after_val_epoch = before_test_iter, after_test_epoch

    def _merge(self, runner) -> None:
        models = runner.model, reparameterize(runner.model)
        rewrite_(models[1], 'infer', 'cuda')
        self._training_form, runner.model = models
        merged = Counter(form.label for _, form in outermost(models[0], TrainingForm))
        what = ', '.join(f'{count} {label}s' for label, count in merged.items())
        before, after = (sum(p.numel() for p in model.parameters()) / 1e6 for model in models)
        runner.logger.info(f'Reparameterized {what}: {before:.1f} M -> {after:.1f} M parameters')

    def _restore(self, runner) -> None:
        if self._training_form is not None:
            runner.model, self._training_form = self._training_form, None
