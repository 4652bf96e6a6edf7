"""The form of models and of state dicts, as the forms themselves recognize it."""

from collections.abc import Iterator

import torch.nn as nn

from .forms import CheckpointError, DeployForm, Form, TrainingForm, outermost


def has_deploy_form(model: nn.Module) -> bool:
    """Whether a part of the model is in its deploy form."""
    return any(isinstance(m, DeployForm) for m in model.modules())


def has_training_form(model: nn.Module) -> bool:
    """Whether a part of the model is in its training form, and can be merged."""
    return any(isinstance(m, TrainingForm) for m in model.modules())


def below(start: str, state_dict: dict) -> dict:
    """The entries whose names begin with ``start``, by the rest of their names."""
    return {key[len(start) :]: value for key, value in state_dict.items() if key.startswith(start)}


def _weights_of_forms(
    model: nn.Module, state_dict: dict, prefix: str = ''
) -> Iterator[tuple[Form, str, dict]]:
    """Every outermost form of a model, its name, and its weights in a state dict."""
    for name, form in outermost(model):
        start = f'{prefix}{name}.' if name else prefix
        yield form, start[:-1], below(start, state_dict)


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
    found, kinds = set(), {}
    for form, name, weights in _weights_of_forms(model, state_dict, prefix):
        form.check_weights(weights, name)
        found.add(name)
        kinds.setdefault(name.rpartition('.')[2], form)
    # Forms that only the checkpoint has: of a deeper model.
    own = model.state_dict()
    for key in state_dict:
        if not key.startswith(prefix) or key[len(prefix) :] in own:
            continue
        for last, form in kinds.items():
            before, middle, _ = key.rpartition(f'.{last}.')
            name = before + middle[:-1]
            if not middle or name in found:
                continue
            if form.form_of(below(f'{name}.', state_dict)):
                raise CheckpointError(
                    f'the checkpoint has a {form.label} {name!r} and the model has none: they '
                    'differ in architecture'
                )
            found.add(name)
    # Blocks that only the checkpoint has, of a deeper model in whose other blocks all is found.
    lists = {
        f'{prefix}{name}.': module
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and any(isinstance(m, Form) for m in module.modules())
    }
    for key in state_dict:
        for start, blocks in lists.items():
            number = key[len(start) :].partition('.')[0]
            if key.startswith(start) and number.isdigit() and int(number) >= len(blocks):
                raise CheckpointError(
                    f'the checkpoint has {start}{number} and the model {len(blocks)} of these '
                    'blocks: they differ in architecture'
                )
