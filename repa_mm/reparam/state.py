"""The form that a model or a state dict has. Every form answers for itself."""

from collections.abc import Iterator

import torch.nn as nn

from .forms import CheckpointError, DeployForm, Form, TrainingForm, outermost


def has_deploy_form(model: nn.Module) -> bool:
    """Whether a part of the model is in its deploy form."""
    return any(isinstance(m, DeployForm) for m in model.modules())


def has_training_form(model: nn.Module) -> bool:
    """Whether a part of the model is in its training form, and can be merged."""
    return any(isinstance(m, TrainingForm) for m in model.modules())


def _weights_of_forms(
    model: nn.Module, state_dict: dict, prefix: str = ''
) -> Iterator[tuple[Form, str, dict]]:
    """Every outermost form of a model, its name, and its weights in a state dict."""
    for name, form in outermost(model):
        start = f'{prefix}{name}.' if name else prefix
        weights = {
            key[len(start) :]: value for key, value in state_dict.items() if key.startswith(start)
        }
        yield form, start[:-1], weights


def is_reparameterized(model: nn.Module, state_dict: dict) -> bool:
    """Whether a state dict for this model, which may be in either form, is merged."""
    return any(
        form.form_of(weights) == 'deploy'
        for form, _, weights in _weights_of_forms(model, state_dict)
    )


def check_state_dict(model: nn.Module, state_dict: dict, prefix: str = '', *args) -> None:
    """Check that a state dict has the weights of all forms of a model, in the form of each.

    The signature is that of a hook before ``load_state_dict``. A state dict without any weight of
    the model is left to the caller.

    Raises:
        CheckpointError: See :meth:`~repa_mm.reparam.forms.Form.check_weights`.
    """
    if not any(key.startswith(prefix) for key in state_dict):
        return
    known = {}
    for form, name, weights in _weights_of_forms(model, state_dict, prefix):
        form.check_weights(weights, name)
        known[name] = form
    # Blocks that only the checkpoint has.
    own = model.state_dict()
    suffixes = {
        f'.{name.rpartition(".")[2]}.{key}': form.label
        for name, form in known.items()
        if name
        for key in form.state_dict()
    }
    for key in state_dict:
        if not key.startswith(prefix) or key[len(prefix) :] in own:
            continue
        for suffix, label in suffixes.items():
            name = key[: -len(suffix)] + '.' + suffix.split('.')[1]
            if key.endswith(suffix) and name not in known:
                raise CheckpointError(
                    f'the checkpoint has a {label} {name!r} and the model has none: they differ '
                    'in architecture'
                )
