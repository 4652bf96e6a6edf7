"""Whether a checkpoint fits a model."""

import torch.nn as nn

from repa_mm.checkpoints.reading import is_remote, load_checkpoint
from repa_mm.reparam import CheckpointError


def check_values(state_dict: dict) -> None:
    """Check that weights are numbers that a trained model has.

    Args:
        state_dict (dict): Parameters and BatchNorm statistics, by name.

    Raises:
        CheckpointError: If some are not finite or a variance is negative.
    """
    for key, value in state_dict.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(
                f'{key!r} in the checkpoint has values that are not finite (NaN or infinity)'
            )
        if key.endswith('.running_var') and (value < 0).any():
            raise CheckpointError(f'{key!r} in the checkpoint has negative variances')


def check_fit(model: nn.Module, state_dict: dict, complete: bool) -> None:
    """Check that a state dict is one of this model, and load it.

    Args:
        model (nn.Module): Without wrappers.
        state_dict (dict): The weights.
        complete (bool): Whether it must have all of the model's weights.

    Raises:
        CheckpointError: If none of the weights is the model's, or some are
            not numbers that a trained model has, or are missing or of another
            shape although all are needed.
    """
    own = model.state_dict()
    if not any(key in own for key in state_dict):
        raise CheckpointError(
            f'the checkpoint has none of the weights of {type(model).__name__}'
            f': it is of another architecture (it has '
            f'{next(iter(state_dict), "nothing")!r}, the model '
            f'{next(iter(own))!r})'
        )
    parameters = dict(model.named_parameters())
    for key, value in state_dict.items():
        if key in own and own[key].is_floating_point() != value.is_floating_point():
            raise CheckpointError(
                f'{key!r} is of type {value.dtype} in the checkpoint, not {own[key].dtype}'
            )
    check_values(
        {
            key: value
            for key, value in state_dict.items()
            if key in parameters or key in own and '.running_' in key
        }
    )
    if not complete:
        return
    try:
        missing, _ = model.load_state_dict(state_dict, strict=False)
    except CheckpointError:
        raise
    except RuntimeError as error:
        # The first line only says so.
        lines = str(error).splitlines()
        raise CheckpointError(
            f'the checkpoint is of another model: {lines[-1].strip()}'
            + f' and {len(lines) - 2} more' * (len(lines) > 2)
        ) from error
    missing = [k for k in missing if not k.endswith('num_batches_tracked')]
    if missing:
        raise CheckpointError(
            f'the checkpoint is of another model: it lacks {missing[0]!r}'
            + f' and {len(missing) - 1} more' * (len(missing) > 1)
        )


def check_checkpoint(path: str, resume: bool = False) -> None:
    """Read it early, before a data set or a model is built."""
    if not is_remote(path):
        loaded = load_checkpoint(path)
        check_values(
            {
                key: value
                for key, value in loaded['state_dict'].items()
                if key.endswith(('.weight', '.bias', '.running_mean', '.running_var'))
            }
        )
        if resume:
            check_resumable(loaded)


def check_resumable(checkpoint: dict) -> None:
    """Check that a checkpoint holds all that MMEngine needs to go on with a training.

    Raises:
        CheckpointError: If the epoch, the iteration or the state of the optimizer is missing,
            or the message hub is unreadable.
    """
    meta, optimizer = checkpoint.get('meta'), checkpoint.get('optimizer')
    meta = meta if isinstance(meta, dict) else {}
    for key, there in (
        ('epoch', isinstance(meta.get('epoch'), int)),
        ('iter', isinstance(meta.get('iter'), int)),
        # MMEngine's MessageHub, or its state.
        ('message_hub', not isinstance(checkpoint.get('message_hub', 0), (int, float, str, list))),
        ('optimizer', isinstance(optimizer, dict)),
    ):
        if not there:
            raise CheckpointError(
                f'the checkpoint has no {key!r} and cannot be resumed from; '
                'to start from its weights: --cfg-options load_from=FILE'
            )


def check_fit_of(model: nn.Module, state_dict: dict, path: str | None, complete: bool) -> None:
    """Run :func:`check_fit`, and name the file in its error.

    Raises:
        CheckpointError: If the state dict does not fit the model.
    """
    try:
        check_fit(model, state_dict, complete)
    except CheckpointError as error:
        raise CheckpointError(f'{path!r}: {error}' if path else str(error)) from error
