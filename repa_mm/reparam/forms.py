"""The contract of every structure that trains large and deploys small.

A *training form* takes the weights of ordinary modules (``fill``), trains (``forward``), and merges
into a *deploy form* that computes the same in eval mode (``merge``). The model walk, checkpoints,
the hook, the tools and the exporters use nothing else of a structure: docs/architecture.md writes
one in two classes.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized

from repa_mm.surgery import become_, copied, hooks_of

from .numerics import check_finite


class CheckpointError(RuntimeError):
    """Raised if a checkpoint does not have the weights that the model needs."""


class Form(nn.Module):
    """Base class of training and deploy forms, which load only the weights of their own form.

    The two forms of a structure must have different weight names. ``label`` is the structure's name
    in messages, and ``optional`` has suffixes of names that may be missing from a checkpoint.
    """

    label = 'mergeable module'
    optional = ('num_batches_tracked',)  # torch before 0.4 did not save it

    def names(self, weights: dict) -> frozenset:
        """Return the names among ``weights``, relative to this module, that identify the form."""
        return frozenset(key for key in weights if not key.endswith(self.optional))

    def owns(self, weights: dict) -> bool:
        """Return True if weights, by their names, are of this form, perhaps with other options."""
        return self.names(weights) == self.names(self.state_dict())

    def check_weights(self, weights: dict, name: str) -> None:
        """Raise a :class:`CheckpointError` if weights are of the other form or another module.

        The names in ``weights`` are relative to the module; ``name`` is the module's in the model.
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
            if weights.get(key, value).shape != value.shape:
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
        # Loading is often not strict, and would leave random weights.
        weights = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        if weights:
            self.check_weights(weights, prefix[:-1])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def check_state_dict(model: nn.Module, state_dict: dict, prefix: str = '', *args) -> None:
    """Raise a :class:`CheckpointError` if a form of the model has no weights in a state dict.

    The signature fits a ``load_state_dict`` pre-hook. A state dict without any weight of the model,
    but perhaps with those of LoRA, passes; :meth:`Form.check_weights` checks those of each form.
    """
    if not any(key.startswith(prefix) and '.lora_' not in key for key in state_dict):
        return
    for name, form in outermost(model):
        start = f'{prefix}{name}.'
        if name and not any(key.startswith(start) for key in state_dict):
            raise CheckpointError(
                f'the model has a {form.label} at {start[:-1]!r}, and the checkpoint has nothing '
                'there: it is of another architecture, or of the ordinary model'
            )


def check_ordinary(
    module: nn.Module, state_dict: dict, prefix: str, *args, complete: bool = False
) -> None:
    """Raise a :class:`CheckpointError` if weights are not those of an ordinary module.

    The signature fits a ``load_state_dict`` pre-hook. Non-strict loading would ignore the weights
    of a form and weights of other widths, and keep the module's own. If ``complete``, none of the
    module's weights may be missing.
    """
    own = {k: v for k, v in module.state_dict().items() if 'relative_' not in k}
    differences = [f'it lacks {k!r}' for k in own if complete and f'{prefix}{k}' not in state_dict]
    for key, value in state_dict.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or 'relative_' in name:  # tables, which hosts resize
            continue
        if name not in own:
            differences.append(f'it has {name!r}')
        elif value.shape != own[name].shape:
            differences.append(f'{key} is {(*value.shape,)}, and not {(*own[name].shape,)}')
    if differences:
        raise CheckpointError(
            f'the model has an ordinary {type(module).__name__} at {prefix[:-1]!r}, and the '
            f'checkpoint is of something else there: {differences[0]}. The structures must be '
            'those of the checkpoint, and a reparameterized checkpoint needs deploy=True'
        )


class TrainingForm(Form):
    """Base class of modules that train, and merge into a smaller module afterwards.

    A subclass implements :meth:`fill`, ``forward`` and :meth:`merge`. Around every :meth:`merge`,
    this class checks that the merge covers everything that the module computes.

    Attributes:
        computes (tuple[str]): Names of the methods whose result :meth:`merge` reproduces.
        contains_norm (bool): Whether a form that replaces an FFN also replaces the norm before the
            FFN.
        shortcut (bool): Whether a form that replaces an FFN adds the shortcut.
    """

    computes = ('forward',)
    contains_norm = True
    shortcut = True

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if 'merge' in cls.__dict__:
            cls.merge = _checked(cls.merge)
        if 'fill' in cls.__dict__:
            cls.fill = torch.no_grad()(cls.fill)

    def fill(self, *parts) -> None:
        """Copy the weights of ordinary modules into this form.

        Parameters change in place: MMEngine builds the optimizer before it initializes weights.
        ``parts`` are one or several groups of ordinary modules at the site, such as
        :class:`~repa_mm.reparam.FFNParts`.
        """
        raise NotImplementedError(f'{type(self).__name__} cannot be filled from ordinary weights')

    def merge(self) -> 'DeployForm':
        """Return a new module with the same output as this module in eval mode.

        Subclasses compute every product and sum in float64, and round once.

        Raises:
            ValueError: If the merge does not cover what the module computes (a subclass with its
                own forward, a hook, a replaced layer), or if weights or statistics are not
                finite.
        """
        raise NotImplementedError

    def finish_schedule(self) -> None:
        """Finish the schedule so that the form can merge. Does nothing by default."""

    def schedule_has_ended(self) -> bool:
        """Return True if the form merges now, since its schedule, if any, has ended."""
        return True

    def batch_norms(self) -> list[nn.Module]:
        """Return the norms with running statistics."""
        return [m for m in self.modules() if getattr(m, 'running_mean', None) is not None]

    def switch_to_deploy(self) -> None:
        """Turn this module into its deploy form, in place (OpenMMLab's convention)."""
        become_(self, self.merge())


class DeployForm(Form):
    """Base class of merged training forms, for inference only.

    A subclass implements :meth:`inference`.
    """

    _form = (
        'deploy',
        'A checkpoint in the training form needs deploy=False, or tools/reparameterize.py first',
    )

    def switch_to_deploy(self) -> None:
        """Do nothing, since the module is in its deploy form already."""

    def inference(self, *args, **kwargs) -> torch.Tensor:
        """Compute the forward pass."""
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
    """Yield the forms, with their names in a state dict, that no other form has inside."""
    inside = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, kind):
            inside = f'{name}.' if name else ''
            # PyTorch's apply_activation_checkpointing adds a level that state dicts do not have.
            yield f'.{name}'.replace('._checkpoint_wrapped_module', '')[1:], module


def merge_whole(form: TrainingForm, name: str) -> DeployForm:
    """Merge a form, which does not change, and all forms inside it; ``name`` is for messages."""
    try:
        merged = form.merge()
    except ValueError as error:
        raise ValueError(f'cannot merge {name!r}: {error}') from error
    for inner_name, inner in list(outermost(merged, TrainingForm)):
        become_(inner, merge_whole(inner, f'{name}.{inner_name}'))
    return merged


def _checked(merge: Callable) -> Callable:
    """Wrap a subclass's ``merge`` in the checks common to all forms."""

    @functools.wraps(merge)
    def wrapped(self: TrainingForm) -> DeployForm:
        # Parameters made in inference mode cannot be used outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            _check_whole(self)
            check_finite(self)
            merged = merge(self)
            if _contents(merged) & _contents(self):  # training must not change the deploy form
                merged = copied(merged)
        return merged.train(self.training)

    return wrapped


def _contents(module: nn.Module) -> set[int]:
    """Return the ids of all modules, parameters and buffers."""
    return {id(x) for x in (*module.modules(), *module.parameters(), *module.buffers())}


def _check_whole(form: TrainingForm) -> None:
    """Raise a ``ValueError`` if the merge does not cover everything that the form computes."""
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
                        f'{cls.__name__} overrides {own[0]}(), but inherits merge(), which would '
                        'ignore the change: override merge(), too'
                    )
        lost = [f'a replaced {method}()' for method in methods if method in vars(module)]
        lost += ['parametrized weights'] * is_parametrized(module)
        for hook in hooks_of(module).values():
            lost.append(f'a hook, {getattr(hook, "__qualname__", type(hook).__name__)}')
        if lost:
            raise ValueError(
                f'{where} has {lost[0]}, and the merge would lose that: remove it first (del '
                'module.forward, handle.remove(), remove_weight_norm, prune.remove, '
                'remove_parametrizations), or put it on a module that stays, such as the block'
            )
