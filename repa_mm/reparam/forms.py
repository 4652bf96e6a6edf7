"""The contract of every structure that trains large and deploys small.

A *training form* takes the weights of ordinary modules (``fill``), trains (``forward``), and merges
into a *deploy form* that computes the same in eval mode (``merge``). The model walk, checkpoints,
the hook, the tools and the exporters know nothing else about a structure, so that a
new one is a file with two classes::

    class Pair(TrainingForm):
        label = 'pair of linear layers'

        def __init__(self, dims):
            super().__init__()
            self.a, self.b = nn.Linear(dims, dims), nn.Linear(dims, dims)

        def fill(self, linear):
            for half in (self.a, self.b):
                half.weight.copy_(linear.weight / 2)
                half.bias.copy_(linear.bias / 2)

        def forward(self, x):
            return self.a(x) + self.b(x)

        def merge(self):
            merged = MergedPair(len(self.a.bias)).to(self.a.weight)
            merged.fc.weight.copy_(self.a.weight.double() + self.b.weight.double())
            merged.fc.bias.copy_(self.a.bias.double() + self.b.bias.double())
            return merged

    class MergedPair(DeployForm):
        label = 'pair of linear layers'

        def __init__(self, dims):
            super().__init__()
            self.fc = nn.Linear(dims, dims)

        def inference(self, x):
            return self.fc(x)
"""

import copy
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .numerics import check_finite

# Forward pre-hooks with which torch computes a weight from others before each forward pass.
_RECOMPUTING = (BasePruningMethod, SpectralNorm, WeightNorm)


def become_(module: nn.Module, other: type | nn.Module) -> None:
    """Turn a module into another one, in place.

    In place, since the parent's attribute may not be the only reference to the module.

    Args:
        module (nn.Module): The module.
        other (type | nn.Module): A class that computes something else with the parameters of the
            module, or the module whose parameters, buffers and hooks it gets.
    """
    if isinstance(other, nn.Module):
        module.__class__, module.__dict__ = type(other), other.__dict__
    else:
        module.__class__ = other


class CheckpointError(RuntimeError):
    """A checkpoint does not hold what the model needs."""


class Form(nn.Module):
    """Base of training and deploy forms, which load the weights of their own form only.

    Two forms of one structure must not have the same names of weights.

    Attributes:
        label (str): What messages call such a module.
        optional (tuple[str]): Endings of names that a checkpoint may lack.
    """

    label = 'mergeable module'
    optional = ('num_batches_tracked',)  # torch before 0.4 did not save it

    def names(self, weights: dict) -> frozenset:
        """Return the names that tell of which form weights (names inside this module) are."""
        return frozenset(key for key in weights if not key.endswith(self.optional))

    def check_weights(self, weights: dict, name: str) -> None:
        """Check that weights are those of this module, in the form that it has.

        Args:
            weights (dict): What a checkpoint holds for this module, by names inside it.
            name (str): The module's name in the model, for messages.

        Raises:
            CheckpointError: If the weights are in the other form, or of something else.
        """
        own = self.state_dict()
        lacking = sorted(self.names(own) - self.names(weights))
        foreign = sorted(self.names(weights) - self.names(own))
        if lacking or foreign:
            form, hint = self._form
            differences = [f'lacks {name!r}' for name in lacking[:1]]
            differences += [f'has {name!r}' for name in foreign[:1]]
            raise CheckpointError(
                f'the model has a {self.label} in its {form} form at {name!r}, and the checkpoint '
                f'is of something else there: it {" and ".join(differences)}. {hint}'
            )
        for key, value in own.items():
            if key in weights and weights[key].shape != value.shape:
                raise CheckpointError(
                    f'{name}.{key} has shape {tuple(weights[key].shape)} in the checkpoint and '
                    f'{tuple(value.shape)} in the model: they differ in architecture or idle ratio'
                )

    _form = (
        'training',
        'A reparameterized checkpoint needs deploy=True, and cannot be trained; weights of the '
        'ordinary model are for init_cfg',
    )

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        # Loading is often not strict, and random weights are never what was wanted.
        weights = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        if weights:
            self.check_weights(weights, prefix[:-1])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def check_state_dict(model: nn.Module, state_dict: dict, prefix: str = '', *args) -> None:
    """Check that a state dict has weights of every form of a model.

    The signature is that of a hook before ``load_state_dict``. A state dict without any weight of
    the model is left to the caller, and wrong weights of a form to :meth:`Form.check_weights`.

    Raises:
        CheckpointError: Naming the form that the state dict has no weights of.
    """
    if not any(key.startswith(prefix) for key in state_dict):
        return
    for name, form in outermost(model):
        start = f'{prefix}{name}.'
        if name and not any(key.startswith(start) for key in state_dict):
            raise CheckpointError(
                f'the model has a {form.label} at {start[:-1]!r}, and the checkpoint has nothing '
                'there: it is of another architecture, or of the ordinary model'
            )


def check_ordinary(module: nn.Module, state_dict: dict, prefix: str, *args) -> None:
    """Check that a state dict has no weights of a form for an ordinary module.

    The signature is that of a hook before ``load_state_dict``. Loading that is not strict would
    leave the module with the weights that it has.

    Raises:
        CheckpointError: Naming a weight that the module does not have.
    """
    own = module.state_dict()
    for key in state_dict:
        if key.startswith(prefix) and key[len(prefix) :] not in own:
            raise CheckpointError(
                f'the model has an ordinary {type(module).__name__} at {prefix[:-1]!r}, and the '
                f'checkpoint is of something else there: it has {key[len(prefix) :]!r}. The '
                'structures must be those of the checkpoint'
            )


class TrainingForm(Form):
    """A module that trains, and merges into a smaller one afterwards.

    A subclass implements :meth:`fill`, ``forward`` and :meth:`merge`. Around every :meth:`merge`,
    this class checks that the merge knows all that the module computes.

    Attributes:
        computes (tuple[str]): The methods whose result :meth:`merge` reproduces.
        contains_norm (bool): Whether the form, in the place of an FFN, takes the place of the norm
            before the FFN, too.
    """

    computes = ('forward',)
    contains_norm = True

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if 'merge' in cls.__dict__:
            cls.merge = _checked(cls.merge)
        if 'fill' in cls.__dict__:
            cls.fill = torch.no_grad()(cls.fill)

    def fill(self, *parts) -> None:
        """Take the weights of ordinary modules, in place.

        In place, since MMEngine builds the optimizer before the weights are initialized.

        Args:
            *parts: What stands at the site in an ordinary model, such as
                :class:`~repa_mm.reparam.parts.FFNParts`: one, or several.
        """
        raise NotImplementedError(f'{type(self).__name__} cannot be filled from ordinary weights')

    def merge(self) -> 'DeployForm':
        """Return a new module that computes what this one computes in eval mode.

        Every product and sum is to be computed in float64 and rounded once.

        Raises:
            ValueError: If the module computes something that the merge does not know: a subclass
                with its own forward, a forward hook, a replaced layer; or if weights or statistics
                are not finite numbers of 16 bits or more.
        """
        raise NotImplementedError

    def batch_norms(self) -> list[nn.Module]:
        """Return the norms whose statistics are those of batches."""
        return [m for m in self.modules() if getattr(m, 'running_mean', None) is not None]

    def switch_to_deploy(self) -> None:
        """Become the deploy form, in place (OpenMMLab's convention)."""
        become_(self, self.merge())


class DeployForm(Form):
    """What a :class:`TrainingForm` merges into, for inference only.

    A subclass implements :meth:`inference`.
    """

    _form = (
        'deploy',
        'A checkpoint in the training form needs deploy=False, or tools/reparameterize.py first',
    )

    def switch_to_deploy(self) -> None:
        """Do nothing: this is the deploy form."""

    def inference(self, *args, **kwargs) -> torch.Tensor:
        """The forward pass."""
        raise NotImplementedError

    def forward(self, *args, **kwargs):
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f'a {type(self).__name__} is in its deploy form, which is for inference: train the '
                'training form (deploy=False and a checkpoint that is not reparameterized), or '
                'call model.eval()'
            )
        return self.inference(*args, **kwargs)


def outermost(model: nn.Module, kind: type = Form) -> Iterator[tuple[str, Form]]:
    """Return the forms of a model, by name, that are not inside of another form.

    A form inside of another one is a matter of the outer one's merge.
    """
    inside = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, kind):
            inside = f'{name}.' if name else ''
            yield name, module


def merge_whole(form: TrainingForm, name: str) -> DeployForm:
    """Return the deploy form of a form and of all forms that are inside of it.

    Args:
        form (TrainingForm): The form, which stays as it is.
        name (str): Its name in the model, for messages.

    Raises:
        ValueError: As :meth:`TrainingForm.merge`, with the name.
    """
    try:
        merged = form.merge()
    except ValueError as error:
        raise ValueError(f'cannot merge {name!r}: {error}') from error
    for inner_name, inner in list(outermost(merged, TrainingForm)):
        become_(inner, merge_whole(inner, f'{name}.{inner_name}'))
    return merged


def _checked(merge: Callable) -> Callable:
    """Surround a subclass's ``merge`` with the checks that hold for every form."""

    @functools.wraps(merge)
    def wrapped(self: TrainingForm) -> DeployForm:
        # Parameters made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            _check_whole(self)
            _recompute_weights(self)
            # A parametrization may compute another weight in training mode, or change its state.
            modes = {module: module.training for module in self.modules()}
            try:
                for module in modes:
                    module.training = False
                check_finite(self)
                merged = merge(self)
                if _parts(merged) & _parts(self):  # training is not to change the deploy form
                    merged = copy.deepcopy(merged)
            finally:
                for module, mode in modes.items():
                    module.training = mode
        return merged.train(self.training)

    return wrapped


def _parts(module: nn.Module) -> set[int]:
    """The identities of all modules, parameters and buffers."""
    return {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}


def _check_whole(form: TrainingForm) -> None:
    """Check that nothing changes what the form computes without its merge knowing.

    Raises:
        ValueError: Naming the subclass, or the module with a hook.
    """
    for name, module in form.named_modules():
        where = f'{name!r} ({type(module).__name__})' if name else type(form).__name__
        methods = module.computes if isinstance(module, TrainingForm) else ('forward',)
        if isinstance(module, TrainingForm):
            for cls in type(module).__mro__:
                if 'merge' in cls.__dict__:
                    break
                own = [method for method in methods if method in cls.__dict__]
                if own:
                    raise ValueError(
                        f'{cls.__name__} has its own {own[0]}(), which the merge() that it '
                        'inherits does not know: give it a merge() of its own'
                    )
        if any(method in module.__dict__ for method in methods):
            raise ValueError(
                f'the forward() of {where} is replaced, which the merge does not know: remove '
                'the replacement first'
            )
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        hooks = [hook for hook in hooks if not isinstance(hook, _RECOMPUTING)]
        if hooks:
            hook = getattr(hooks[0], '__qualname__', type(hooks[0]).__name__)
            raise ValueError(
                f'{where} has a forward hook, {hook}, which would be lost in the merge: remove it '
                'first (handle.remove()), or register it on a module that stays, such as the block'
            )


def _recompute_weights(form: TrainingForm) -> None:
    """Compute weights anew that torch computes from others before a forward pass."""
    for module in form.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _RECOMPUTING):
                training, module.training = module.training, False
                try:
                    hook(module, ())
                finally:
                    module.training = training
