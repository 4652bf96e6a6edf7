"""Reparameterize whole models."""

import torch
import torch.nn as nn

from repa_mm.surgery import become_, copied, unwrap

from .forms import DeployForm, TrainingForm, merge_whole, outermost


def has_deploy_form(model: nn.Module) -> bool:
    """Return True if any module of the model is in its deploy form."""
    return any(isinstance(m, DeployForm) for m in model.modules())


def has_training_form(model: nn.Module) -> bool:
    """Return True if any module of the model is in its training form."""
    return bool(_training_forms(model))


def is_reparameterized(model: nn.Module, state_dict: dict) -> bool:
    """Return True if a state dict for a model in its training form is merged.

    The first form whose weights do not have the names of the training form decides: the state dict
    is merged if the weights have the names of the deploy form.
    """
    for name, form in outermost(model, TrainingForm):
        start = f'{name}.' if name else ''
        found = {k[len(start) :]: v for k, v in state_dict.items() if k.startswith(start)}
        if not form.owns(found):
            return merge_whole(finish_schedules_(copied(form)), name).owns(found)
    return False


def finish_schedules_(model: nn.Module) -> nn.Module:
    """Take every schedule of a model to its end, in place, so that the model merges.

    This changes the output of a model whose schedule has not ended: use it for a model that gets
    its weights afterwards or is only timed.
    """
    for form in _training_forms(model):
        form.finish_schedule()
    return model


def schedules_have_ended(model: nn.Module) -> bool:
    """Return True if every schedule of a model has ended, so that the model merges."""
    return all(form.schedule_has_ended() for form in _training_forms(model))


def _training_forms(model: nn.Module) -> list[TrainingForm]:
    """Return all training forms, those inside other forms included."""
    return [module for module in model.modules() if isinstance(module, TrainingForm)]


def reparameterize(model: nn.Module) -> nn.Module:
    """Return a copy of a model, in eval mode, with every module in a training form merged.

    The copy equals the model in eval mode, up to rounding. A training form inside another training
    form is left to the outer form's merge; inner forms that remain in their training form are
    merged afterwards. A model that is reparameterized already is copied.

    Args:
        model (nn.Module): The model. DataParallel, DistributedDataParallel and torch.compile
            wrappers are removed; an averaged model (EMA) keeps its wrapper.

    Raises:
        ValueError: If nothing in the model can be merged, or it is sharded; names the module that
            cannot be merged, see :meth:`~repa_mm.reparam.TrainingForm.merge`.

    Examples:
        >>> deployed = repa_mm.reparameterize(model)
    """
    model, memo = _merged(model)
    # What is merged takes its place in the copy, instead of being copied.
    with torch.inference_mode(False):
        model = copied(model, memo)
    model.eval()  # on a line of its own: the eval() of some backbones returns None
    return model


def reparameterize_(model: nn.Module) -> nn.Module:
    """Merge every module of a model that is in its training form, in place.

    Returns the same model without the wrappers that :func:`reparameterize` removes, in eval mode.
    Raises a ``ValueError`` as that function; the model is then as it was.
    """
    model, memo = _merged(model)
    for form in dict(outermost(model, TrainingForm)).values():
        become_(form, memo[id(form)])
    model.eval()
    return model


@torch.inference_mode(False)
def _merged(model: nn.Module) -> tuple[nn.Module, dict[int, DeployForm]]:
    """Return the model inside its wrappers, and the deploy forms by the ids of its forms."""
    model = unwrap(model)
    if next(outermost(model), None) is None:
        raise ValueError(
            f'nothing to reparameterize: {type(model).__name__} has no channel-idle FFN or other '
            'module in a training form'
        )
    name_of_all = type(model).__name__
    forms = outermost(model, TrainingForm)
    return model, {id(form): merge_whole(form, name or name_of_all) for name, form in forms}


def match_form(model: nn.Module, state_dict: dict) -> bool:
    """Reparameterize a model in place if the weights are in the deploy form; return True if so."""
    if has_deploy_form(model) or not is_reparameterized(model, state_dict):
        return False
    # The weights are loaded afterwards, so that finishing the schedules loses nothing.
    reparameterize_(finish_schedules_(model))
    return True
