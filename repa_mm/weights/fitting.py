"""Whether a checkpoint fits a model, and in which form."""

import logging
from collections.abc import Collection

import torch
import torch.nn as nn
from mmengine.logging import print_log
from mmengine.runner.checkpoint import load_state_dict

from repa_mm.reparam import (
    CheckpointError,
    check_state_dict,
    finish_schedules,
    has_deploy_form,
    innermost,
    is_reparameterized,
    reparameterize,
)


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


def load_weights(
    model: nn.Module,
    state_dict: dict,
    path: str | None = None,
    exact: bool = True,
    partial: bool = False,
) -> None:
    """Load weights into a model that has the form they are in, and refuse what does not fit.

    Args:
        model (nn.Module): The model, in any wrappers.
        state_dict (dict): The weights.
        path (str, optional): Where they are from, for messages.
        exact (bool): Refuse weights that the model does not have, instead of logging them.
            Defaults to True.
        partial (bool): Log weights that are missing or of another shape, as at the start of a
            training, instead of refusing them. Defaults to False.

    Raises:
        CheckpointError: If none of the weights is the model's, or some are of the other form, not
            numbers that a trained model has, or one of those that are refused.
    """
    model = innermost(model)
    try:
        check_known(model, state_dict)
        own = model.state_dict()
        known = {key: value for key, value in state_dict.items() if key in own}
        for key, value in known.items():
            if own[key].is_floating_point() != value.is_floating_point():
                raise CheckpointError(
                    f'{key!r} is of type {value.dtype} in the checkpoint, not {own[key].dtype}'
                )
        check_values(known, dict(model.named_parameters()))
        if partial:
            load_state_dict(model, state_dict, logger='current')
            return
        try:
            missing, unknown = model.load_state_dict(state_dict, strict=False)
        except CheckpointError:
            raise
        except RuntimeError as error:
            check_state_dict(model, state_dict)  # may say more
            # The first line of torch's message only says that there are others.
            wrong = [line.strip() for line in str(error).splitlines()[1:]]
            raise _other_model(wrong[-1], wrong) from error
        missing = [k for k in missing if not k.endswith('num_batches_tracked')]
        if missing:
            check_state_dict(model, state_dict)
            raise _other_model(f'it lacks {missing[0]!r}', missing)
        if unknown and exact:
            raise _other_model(f'the model has no {unknown[0]!r}', unknown)
    except CheckpointError as error:
        raise CheckpointError(f'{path!r}: {error}' if path else str(error)) from error
    if unknown:
        text = f'The model has none of these weights of {path!r}: {", ".join(unknown)}'
        print_log(text, 'current', logging.WARNING)


def _other_model(problem: str, all_problems: list) -> CheckpointError:
    more = f' and {len(all_problems) - 1} more' * (len(all_problems) > 1)
    return CheckpointError(f'the checkpoint is of another model: {problem}{more}')


def check_known(model: nn.Module, state_dict: dict) -> None:
    """Check that a model has at least one of the weights; a CheckpointError if not."""
    own = model.state_dict()
    if not any(key in own for key in state_dict):
        raise CheckpointError(
            f'the checkpoint has none of the weights of {type(model).__name__}: it is of another '
            f'architecture (it has {next(iter(state_dict), "nothing")!r}, the model '
            f'{next(iter(own))!r})'
        )


def check_values(state_dict: dict, parameters: Collection[str] = ()) -> None:
    """Check that weights are numbers that a trained model has.

    Args:
        state_dict (dict): Weights by name. Buffers that are no statistics may be infinite.
        parameters (Collection[str]): Names of parameters besides weights and biases.

    Raises:
        CheckpointError: If some are not finite, of a type in which torch does not compute, or a
            negative variance.
    """
    for key, value in state_dict.items():
        ends = ('.weight', '.bias', '.running_mean', '.running_var')
        if not value.is_floating_point() or not (key in parameters or key.endswith(ends)):
            continue
        if torch.finfo(value.dtype).bits < 16:
            raise CheckpointError(
                f'{key!r} in the checkpoint is of type {value.dtype}, in which torch does not '
                'compute: convert the weights to float32 first'
            )
        if not value.isfinite().all():
            raise CheckpointError(
                f'{key!r} in the checkpoint has values that are not finite (NaN or infinity)'
            )
        if key.endswith('.running_var') and (value < 0).any():
            raise CheckpointError(f'{key!r} in the checkpoint has negative variances')


def check_resumable(checkpoint: dict) -> None:
    """Check that a training can go on from a checkpoint.

    Raises:
        CheckpointError: If it lacks what MMEngine stores besides the weights.
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
