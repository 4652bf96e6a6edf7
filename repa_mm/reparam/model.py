"""From one mergeable module to a model."""

import copy

import torch
import torch.nn as nn

from .convbn import foldable_conv_bns, folded_conv, set_folded_conv, warn_of_folded_weights
from .forms import DeployForm, TrainingForm, become, merge_whole, naming, outermost


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel, torch.compile.

    Raises:
        ValueError: If the model's parameters are sharded (FSDP).
    """
    while True:
        if type(model).__name__.endswith('FullyShardedDataParallel'):
            raise ValueError(
                'the parameters of a FullyShardedDataParallel model are spread over processes: '
                'gather them into an ordinary model first'
            )
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, '_orig_mod'):
            model = model._orig_mod
        else:
            return model


def innermost(model: nn.Module) -> nn.Module:
    """The detector, segmentor or classifier inside any wrappers (DDP, TTA, EMA)."""
    model = unwrap(model)
    while isinstance(getattr(model, 'module', None), nn.Module):
        model = unwrap(model.module)
    return model


def set_training_path(model: nn.Module, path: str) -> nn.Module:
    """Choose how the training forms of a model compute in training mode.

    Args:
        model (nn.Module): Any model.
        path (str): One of the ``training_paths`` of the model's forms. A channel-idle FFN has
            'auto' (by shape), 'literal' (eq. 3 of the paper as it stands) and 'folded' (see
            :mod:`repa_mm.reparam.ffn.folded`). Forms without that path stay as they are.

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If no form has that path.
    """
    forms = [m for m in model.modules() if isinstance(m, TrainingForm)]
    known = sorted({name for form in forms for name in form.training_paths})
    if forms and path not in known:
        raise ValueError(f'the training path must be one of {known}, but got {path!r}')
    for form in forms:
        if path in form.training_paths:
            form.training_path = path
    return model


@torch.inference_mode(False)
def reparameterize(
    model: nn.Module, inplace: bool = False, fuse_conv_bn: bool = True, shortcut: str | None = None
) -> nn.Module:
    """Merge everything in a model that is in a training form.

    The result computes what the model computes in eval mode, up to rounding. Of a model that is
    reparameterized already, nothing is merged: the result is a copy (with ``inplace`` the model
    itself) in eval mode, whose ConvModules are folded. A training form inside of another one is
    left to the outer one's merge; what that leaves in a training form is merged afterwards.

    Args:
        model (nn.Module): Any model. DataParallel, DistributedDataParallel and torch.compile
            wrappers are taken off; an averaged model (EMA) keeps its wrapper.
        inplace (bool): Change the model itself instead of a copy. Defaults to False.
        fuse_conv_bn (bool): Also fold the BatchNorms of mmcv's ConvModules (of a detector's neck
            and heads) into their convolutions. The weights of such a model are for running it only;
            without, they load into a model built with ``deploy=True``. Defaults to True.
        shortcut (str, optional): Where deploy forms that have the choice add their shortcut,
            'inside' their weights or 'outside', see
            :meth:`~repa_mm.reparam.MergedFFN.set_shortcut`. Defaults to None: inside of what is
            merged now, and as it is in what was merged before.

    Returns:
        nn.Module: The reparameterized model, in eval mode.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If nothing in the model can be merged, or it is sharded; names the module that
            cannot be merged, see :meth:`~repa_mm.reparam.TrainingForm.merge`.

    Examples:
        >>> deployed = repa_mm.reparameterize(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'reparameterize takes a torch.nn.Module, but got {model!r}')
    if shortcut not in (None, 'inside', 'outside'):
        raise ValueError(f"the shortcut is 'inside' or 'outside', but got {shortcut!r}")
    model = unwrap(model)
    if next(outermost(model), None) is None:
        raise ValueError(
            f'nothing to reparameterize: {type(model).__name__} has no channel-idle FFN or other '
            'module in a training form'
        )
    # All of it before anything is changed, so that an error leaves the model as it was.
    forms = dict(outermost(model, TrainingForm))
    own_name = type(model).__name__
    memo = {id(form): merge_whole(form, name or own_name) for name, form in forms.items()}
    convs = []
    if fuse_conv_bn:
        inside = tuple(f'{name}.' if name else '' for name in forms)
        found = [item for item in foldable_conv_bns(model) if not item[0].startswith(inside)]
        for merged in memo.values():
            found += foldable_conv_bns(merged)
        for name, module in found:
            with naming(name or own_name):
                convs.append((module, folded_conv(module)))
    if not inplace:
        # What is merged takes its place in the copy, instead of being copied.
        model = copy.deepcopy(model, memo)
    else:
        for form in forms.values():
            become(form, memo[id(form)])
    for module, weights in convs:
        set_folded_conv(memo.get(id(module), module), *weights)
    if convs:
        model._register_state_dict_hook(warn_of_folded_weights)
    # On a line of its own: the eval() of some backbones returns None.
    model.eval()
    for module in model.modules():
        if shortcut and isinstance(module, DeployForm):
            module.set_shortcut(shortcut)
    return model
