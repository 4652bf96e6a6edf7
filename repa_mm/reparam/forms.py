"""The contract of every structure that trains large and deploys small.

A *training form* merges into a *deploy form* that computes the same in eval mode. The model walk,
checkpoints, calibration, the hook, the tools and the exporters know nothing else about a structure,
so that a new one is a file with two classes::

    class Pair(TrainingForm):
        label = 'pair of linear layers'

        def __init__(self, dims):
            super().__init__()
            self.a, self.b = nn.Linear(dims, dims), nn.Linear(dims, dims)

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

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .numerics import check_finite

# Endings of names that a checkpoint may lack: by torch before 0.4, or with the FFNs of the
# paper's authors, which do not say how many channels are active.
OPTIONAL = ('num_batches_tracked', 'num_active_channels')
# Forward pre-hooks with which torch computes a weight from others before each forward pass.
_RECOMPUTING = (BasePruningMethod, SpectralNorm, WeightNorm)


def become(module: nn.Module, other: type | nn.Module) -> None:
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
    """What training and deploy forms share: they know the weights of both.

    Attributes:
        label (str): What messages call such a module.
    """

    label = 'mergeable module'

    def form_of(self, weights: dict) -> str | None:
        """The form that weights for this place in a model are in.

        By default the names decide. A form overrides this method if names alone do not tell, or if
        weights of another size are to be recognized too.

        Args:
            weights (dict): Tensors by their names inside this module.

        Returns:
            str | None: 'training', 'deploy', or None if they are of neither.
        """
        found = names_of(weights)
        for form, names in self._names_by_form().items():
            if found == names:
                return form
        return None

    def _names_by_form(self) -> dict:
        raise NotImplementedError

    def explain(self, weights: dict) -> str | None:
        """What the weights are of, if the form knows weights that are often taken for its own."""

    def check_weights(self, weights: dict, name: str) -> None:
        """Check that weights are those of this module, in the form that it has.

        Args:
            weights (dict): What a checkpoint holds for this module, by names inside it.
            name (str): The module's name in the model, for messages.

        Raises:
            CheckpointError: If the weights are in the other form, or of something else.
        """
        known = self.explain(weights)
        if known:
            raise CheckpointError(
                f'the checkpoint holds {known} at {name!r} where the model has a {self.label}: it '
                'is of the vanilla backbone, not of its RePa counterpart'
            )
        found = self.form_of(weights)
        if found == 'deploy' and isinstance(self, TrainingForm):
            raise CheckpointError(
                f'the checkpoint is reparameterized (merged {self.label} at {name!r}), but the '
                'model is in its training form: build the model with deploy=True to run it; a '
                'merged checkpoint cannot be trained'
            )
        if found == 'training' and isinstance(self, DeployForm):
            raise CheckpointError(
                f'the checkpoint is in the training form (at {name!r}), but the model was built '
                'with deploy=True: load it into a model with deploy=False and reparameterize that, '
                'or convert the checkpoint with tools/reparameterize.py'
            )
        for key, own in self.state_dict().items():
            if key.endswith(OPTIONAL):
                continue
            if key not in weights:
                raise CheckpointError(
                    f'the checkpoint has no {name}.{key}: it is of another architecture than the '
                    'model'
                )
            if weights[key].shape != own.shape:
                raise CheckpointError(
                    f'{name}.{key} has shape {tuple(weights[key].shape)} in the checkpoint and '
                    f'{tuple(own.shape)} in the model: they differ in architecture or idle ratio'
                )

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        # Loading is often not strict, and random weights are never what was wanted.
        weights = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        if weights:
            self.check_weights(weights, prefix[:-1])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def names_of(weights: dict) -> frozenset:
    """The names that tell of what kind weights are."""
    return frozenset(key for key in weights if not key.endswith(OPTIONAL))


class TrainingForm(Form):
    """A module that trains, and merges into a smaller one afterwards.

    A subclass implements ``forward`` and :meth:`merge`. Around every :meth:`merge`, this class
    checks that the merge knows all that the module computes.

    Attributes:
        training_paths (tuple[str]): Ways to compute the same in training mode, of which
            ``training_path`` is one. The first is the literal equation.
        computes (tuple[str]): The methods whose result :meth:`merge` reproduces.
    """

    training_paths = ('literal',)
    training_path = 'literal'
    computes = ('forward',)

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if 'merge' in cls.__dict__:
            cls.merge = _checked(cls.merge)

    def merge(self) -> 'DeployForm':
        """A new module that computes what this one computes in eval mode.

        Every product and sum is to be computed in float64 and rounded once.

        Raises:
            ValueError: If the module computes something that the merge does not know: a subclass
                with its own forward, a forward hook, a replaced layer; or if weights or statistics
                are not finite numbers of 16 bits or more.
        """
        raise NotImplementedError

    def batch_norms(self) -> list[nn.Module]:
        """The norms whose statistics are estimated from data (calibration)."""
        return [m for m in self.modules() if getattr(m, 'running_mean', None) is not None]

    def switch_to_deploy(self) -> None:
        """Become the deploy form, in place (OpenMMLab's convention)."""
        become(self, self.merge())

    def _names_by_form(self) -> dict:
        names = dict(training=names_of(self.state_dict()))
        tensors = [*self.parameters(), *self.buffers()]
        without_values = {id(t): torch.empty_like(t, device='meta') for t in tensors}
        for param in self.parameters():
            without_values[id(param)] = nn.Parameter(without_values[id(param)], param.requires_grad)
        try:
            merged = merge_whole(copy.deepcopy(self, without_values), '')
            names['deploy'] = names_of(merged.state_dict())
        except (RuntimeError, ValueError):  # a merge that looks at values, or that is refused
            pass
        return names


class DeployForm(Form):
    """What a :class:`TrainingForm` merges into, for inference only.

    A subclass implements :meth:`inference`.
    """

    # Names of the weights of the training form, if a merge has made this module.
    _training_names: frozenset | None = None

    def switch_to_deploy(self) -> None:
        """Do nothing: this is the deploy form."""

    def set_shortcut(self, where: str) -> None:
        """Put the shortcut into the weights ('inside') or add it at run time ('outside').

        A form without such a choice stays as it is.
        """

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

    def _names_by_form(self) -> dict:
        return dict(deploy=names_of(self.state_dict()), training=self._training_names)


def outermost(model: nn.Module, kind: type = Form) -> Iterator[tuple[str, Form]]:
    """The forms of a model, by name, that are not inside of another form.

    A form inside of another one is a matter of the outer one's merge.
    """
    inside = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, kind):
            inside = f'{name}.' if name else ''
            yield name, module


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of a module before what an error says about its merge."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f'cannot merge {name!r}: {error}') from error


def merge_whole(form: TrainingForm, name: str) -> DeployForm:
    """The deploy form of a form and of all forms that are inside of it.

    Args:
        form (TrainingForm): The form, which stays as it is.
        name (str): Its name in the model, for messages.

    Raises:
        ValueError: As :meth:`TrainingForm.merge`, with the name.
    """
    with naming(name):
        merged = form.merge()
    for inner_name, inner in list(outermost(merged, TrainingForm)):
        become(inner, merge_whole(inner, f'{name}.{inner_name}'))
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
        merged._training_names = names_of(self.state_dict())
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
