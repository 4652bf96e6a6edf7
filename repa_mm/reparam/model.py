"""From one FFN to a model."""

import collections
import copy
import warnings

import torch.nn as nn

from .ffn import (
    ChannelIdleFFN,
    CheckpointError,
    DeployForm,
    MergedFFN,
    TrainingForm,
    _of_deploy_form,
    check_finite,
    check_weights,
)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel, torch.compile.

    Raises:
        ValueError: If the model's parameters are sharded (FSDP).
    """
    while True:
        if type(model).__name__.endswith('FullyShardedDataParallel'):
            raise ValueError(
                'the parameters of a FullyShardedDataParallel '
                'model are spread over processes: gather them '
                'into an ordinary model first'
            )
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, '_orig_mod'):
            model = model._orig_mod
        else:
            return model


def set_training_path(model: nn.Module, path: str) -> nn.Module:
    """Choose how the channel-idle FFNs of a model compute in training mode.

    Args:
        model (nn.Module): Any model with channel-idle FFNs.
        path (str): 'auto' (by shape), 'literal' (eq. 3 of the paper as it
            stands) or 'folded' (see :mod:`repa_mm.reparam.folded`).

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If the path is unknown.
    """
    if path not in ('auto', 'literal', 'folded'):
        raise ValueError(f"path must be 'auto', 'literal' or 'folded', but got {path!r}")
    for module in model.modules():
        if isinstance(module, ChannelIdleFFN):
            module.training_path = path
    return model


def has_deploy_form(model: nn.Module) -> bool:
    """Whether any part of the model is in its deploy form."""
    return any(isinstance(m, DeployForm) for m in model.modules())


def _weights_of(model: nn.Module, state_dict: dict, prefix: str = ''):
    """Each FFN of a model with its name and its weights in a state dict."""
    for name, module in model.named_modules():
        if isinstance(module, (TrainingForm, DeployForm)):
            name = f'{prefix}{name}' if name else prefix[:-1]
            weights = {
                key[len(name) + 1 :]: value
                for key, value in state_dict.items()
                if key.startswith(f'{name}.')
            }
            yield module, name, weights


def is_reparameterized(model: nn.Module, state_dict: dict) -> bool:
    """Whether a state dict for this model, in either form, is merged."""
    return any(_of_deploy_form(weights) for _, _, weights in _weights_of(model, state_dict))


def check_state_dict(model: nn.Module, state_dict: dict, prefix: str = '', *args) -> None:
    """Check that a state dict has the weights of all FFNs, in their form.

    Its signature is that of a hook before ``load_state_dict``. A state dict
    without any weights of the model is left to the caller.

    Raises:
        CheckpointError: See :func:`~repa_mm.reparam.ffn.check_weights`.
    """
    if not any(key.startswith(prefix) for key in state_dict):
        return
    names = set()
    for ffn, name, weights in _weights_of(model, state_dict, prefix):
        check_weights(ffn, weights, name)
        names.add(name)
    suffixes = tuple(f'{name.rpartition(".")[2]}.fc1.weight' for name in names)
    for key in state_dict:
        name = key[: -len('.fc1.weight')]
        if key.startswith(prefix) and key.endswith(suffixes) and name not in names:
            raise CheckpointError(
                f'the checkpoint has an FFN {name!r} and the'
                ' model has none: they differ in '
                'architecture'
            )


def _conv_bns(model: nn.Module):
    """The mmcv ConvModules, by name, whose BatchNorm can be folded."""
    try:
        from mmcv.cnn import ConvModule
    except ImportError:  # without mmcv there is no ConvModule either
        return
    modules = dict(model.named_modules())
    owners = collections.Counter(id(child) for m in modules.values() for child in m.children())
    for name, m in modules.items():
        if not (
            isinstance(m, ConvModule)
            and m.with_norm
            and isinstance(m.conv, nn.Conv2d)
            and isinstance(m.norm, (nn.BatchNorm2d, nn.SyncBatchNorm))
        ):
            continue
        # Some heads share convolutions between levels and not their norms.
        if (
            m.order.index('norm') == m.order.index('conv') + 1
            and owners[id(m.conv)] == 1
            and m.norm.affine
            and m.norm.running_mean is not None
        ):
            yield name, m


def _fold_conv_bns(model: nn.Module) -> None:
    """Fold the BatchNorm of every mmcv ConvModule into its convolution."""
    conv_bns = dict(_conv_bns(model))
    for m in conv_bns.values():
        from mmcv.cnn import fuse_conv_bn

        fuse_conv_bn(m)
    if conv_bns:
        model._register_state_dict_hook(_warn_of_folded_weights)


def _warn_of_folded_weights(*args) -> None:
    warnings.warn(
        'this model has its BatchNorms folded into convolutions: its weights '
        'do not load into a model built from the config. For a checkpoint, '
        'use tools/reparameterize.py or reparameterize(model, '
        'fuse_conv_bn=False)'
    )


def reparameterize(
    model: nn.Module, inplace: bool = False, fuse_conv_bn: bool = True, shortcut: str = 'inside'
) -> nn.Module:
    """Merge every channel-idle FFN of a model.

    The result computes what the model computes in eval mode, up to rounding.
    A model that is reparameterized already is returned as it is.

    Args:
        model (nn.Module): Any model with channel-idle FFNs. DataParallel,
            DistributedDataParallel and torch.compile wrappers are taken off;
            an averaged model (EMA) keeps its wrapper.
        inplace (bool): Change the model itself instead of a copy.
            Defaults to False.
        fuse_conv_bn (bool): Also fold the BatchNorms of mmcv's ConvModules
            (of a detector's neck and heads) into their convolutions. The
            weights of such a model are for running it only; without, they
            load into a model built with ``deploy=True``. Defaults to True.
        shortcut (str): Where the FFNs have their shortcut, see
            :meth:`MergedFFN.set_shortcut`. Defaults to 'inside'.

    Returns:
        nn.Module: The reparameterized model, in eval mode.

    Raises:
        ValueError: If nothing in the model can be merged, or it is sharded;
            names the module whose weights or statistics cannot be merged
            (see :meth:`ChannelIdleFFN.merge`).

    Examples:
        >>> deployed = repa_mm.reparameterize(model)
    """
    model = unwrap(model)
    parts = dict(model.named_modules())
    if not any(isinstance(m, (TrainingForm, DeployForm)) for m in parts.values()):
        raise ValueError(
            f'nothing to reparameterize: {type(model).__name__} has no channel-idle FFN'
        )
    # What is merged takes its place in the copy, instead of being copied.
    memo = {}
    conv_bns = dict(_conv_bns(model)) if fuse_conv_bn else {}
    for name, module in parts.items():
        try:
            if isinstance(module, TrainingForm):
                memo[id(module)] = module.merge()
            elif name in conv_bns:
                check_finite(module)
        except ValueError as error:
            raise ValueError(f'cannot merge {name or type(module).__name__!r}: {error}') from error
    if not inplace:
        model = copy.deepcopy(model, memo)
    else:  # only now, so that an error leaves the model as it was
        for module in parts.values():
            if id(module) in memo:
                module._become(memo[id(module)])
    # On a line of its own: the eval() of some backbones returns None.
    model.eval()
    if fuse_conv_bn:
        _fold_conv_bns(model)
    for module in model.modules():
        if isinstance(module, MergedFFN):
            module.set_shortcut(shortcut)
    return model
