"""Reading, loading and writing checkpoints."""

import torch
import torch.nn as nn
from mmengine.runner.checkpoint import CheckpointLoader

from repa_mm.files import replacing
from repa_mm.reparam import CheckpointError, match_form
from repa_mm.surgery import innermost


def load_checkpoint(path: str) -> dict:
    """Read a checkpoint onto the CPU, as MMEngine does.

    Args:
        path (str): A file, a URL or another address that MMEngine knows. The file has a state dict,
            either alone or under 'state_dict'.

    Returns:
        dict: The checkpoint, with the state dict under 'state_dict'.
    """
    checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    return checkpoint if 'state_dict' in checkpoint else dict(state_dict=checkpoint)


def save_checkpoint(checkpoint: dict, path: str) -> None:
    """Write a checkpoint with ``torch.save``: the file is complete or not written at all."""
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)


# Counters, and the tables of Swin V2 that MMPretrain recomputes and does not load.
_OPTIONAL = (
    *('num_batches_tracked', 'num_active_channels'),
    *('relative_coords_table', 'relative_position_index'),
)


def load_weights(
    model: nn.Module, state_dict: dict, path: str = 'the checkpoint', partly: bool = False
) -> None:
    """Load weights into a model, which is reparameterized if the weights are in the deploy form.

    Weights outside the model's lists of layers are ignored, such as those of a teacher, or of
    another version of the codebase.

    Args:
        model (nn.Module): The model, wrapped or not.
        state_dict (dict): The weights.
        path (str): The file of the weights, for error messages.
        partly (bool): Weights outside the lists of layers may be missing, too. Defaults to False.

    Raises:
        CheckpointError: If weights are missing or have other shapes, or there are further layers,
            or further weights in a layer.
    """
    model = innermost(model)
    match_form(model, state_dict)
    try:
        found = model.load_state_dict(state_dict, strict=False)
    except RuntimeError as error:  # of other shapes
        raise CheckpointError(f'{path}: {error}') from error
    lists = nn.ModuleList, nn.Sequential
    layers = tuple(f'{name}.' for name, m in model.named_modules() if name and isinstance(m, lists))
    missing, foreign = ([key for key in keys if not key.endswith(_OPTIONAL)] for keys in found)
    if partly:
        missing = [key for key in missing if key.startswith(layers)]
    foreign = [key for key in foreign if key.startswith(layers)]
    for kind, keys in (('lacks', missing), ('has', foreign)):
        if keys:
            raise CheckpointError(f'{path} is of another model: it {kind} {", ".join(keys[:3])} …')
