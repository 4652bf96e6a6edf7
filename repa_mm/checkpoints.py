"""Checkpoints: reading them, fitting them to models, writing them."""

import torch
import torch.nn as nn
from mmengine.runner.checkpoint import CheckpointLoader

from repa_mm.files import replacing
from repa_mm.reparam import (
    CheckpointError,
    finish_schedules,
    has_deploy_form,
    innermost,
    is_reparameterized,
    reparameterize,
)


def load_checkpoint(path: str) -> dict:
    """Read a checkpoint onto the CPU, as MMEngine does.

    Args:
        path (str): A file, a URL or another address that MMEngine knows, with a state dict, alone
            or under 'state_dict'.

    Returns:
        dict: The checkpoint, with the state dict under 'state_dict'.
    """
    checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    return checkpoint if 'state_dict' in checkpoint else dict(state_dict=checkpoint)


def save_checkpoint(checkpoint: dict, path: str) -> None:
    """``torch.save`` to a file that is whole, or is not written."""
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)


def match_form(model: nn.Module, state_dict: dict) -> bool:
    """Give a model the deploy form, in place, if the weights for it are merged.

    Args:
        model (nn.Module): The model. One in its deploy form stays as it is.
        state_dict (dict): The weights, in either form.

    Returns:
        bool: Whether the model has changed.
    """
    if has_deploy_form(model) or not is_reparameterized(model, state_dict):
        return False
    # The weights are loaded afterwards: nothing is lost with a schedule that is not at its end.
    reparameterize(finish_schedules(model), inplace=True)
    return True


# Tables of Swin V2, which MMPretrain computes anew, and leaves out when it loads.
_COMPUTED = 'relative_coords_table', 'relative_position_index'


def load_weights(model: nn.Module, state_dict: dict, path: str | None = None) -> None:
    """Load weights into a model, which takes the form that they are in.

    Args:
        model (nn.Module): The model, in any wrappers.
        state_dict (dict): Its weights. Only those may be missing that tell nothing about the model:
            how many batches its norms have seen, how many channels are active.
        path (str, optional): Where they are from, for messages.

    Raises:
        CheckpointError: If the weights are not exactly those of the model.
    """
    model = innermost(model)
    match_form(model, state_dict)
    optional = ('num_batches_tracked', 'num_active_channels')
    own = {key: value for key, value in model.state_dict().items() if key.endswith(optional)}
    try:
        found = model.load_state_dict({**own, **state_dict}, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f'{path or "the checkpoint"}: {error}') from error
    missing = [key for key in found.missing_keys if not key.endswith(_COMPUTED)]
    _check_keys(missing, found.unexpected_keys, path)


def load_original(model: nn.Module, state_dict: dict, path: str) -> None:
    """Load the weights of a vanilla model.

    Weights of parts that the model does not have, such as those of a teacher, do not matter.

    Args:
        model (nn.Module): The model.
        state_dict (dict): The weights.
        path (str): Where they are from.

    Raises:
        CheckpointError: If some are missing, or the file has others of a part, as of more blocks.
    """
    found = model.load_state_dict(state_dict, strict=False)
    parts = tuple(f'{name}.' for name, _ in model.named_children())
    missing, foreign = (
        [key for key in keys if not key.endswith(('num_batches_tracked', *_COMPUTED))]
        for keys in found
    )
    _check_keys(missing, [key for key in foreign if key.startswith(parts)], path)


def _check_keys(missing: list[str], foreign: list[str], path: str | None) -> None:
    for kind, keys in (('lacks', missing), ('has', foreign)):
        if keys:
            raise CheckpointError(
                f'{path or "the checkpoint"} is of another model: it {kind} {", ".join(keys[:3])} …'
            )
