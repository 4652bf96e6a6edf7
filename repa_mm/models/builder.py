"""Build models with structures from configs of ordinary backbones or whole models."""

import copy
import logging
import warnings
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn as nn
from mmengine.logging import print_log
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict

from repa_mm.faster import rewrite_
from repa_mm.io.checkpoints import load_weights, split_init_cfg
from repa_mm.io.layouts import WeightsFile
from repa_mm.models.sites import attention_sites, ffn_sites
from repa_mm.models.structures import STRUCTURES, Structure
from repa_mm.reparam import (
    Form,
    TrainingForm,
    check_ordinary,
    check_state_dict,
    finish_schedules_,
    has_deploy_form,
    outermost,
    reparameterize_,
)


def _structure(type: str, **kwargs) -> Structure:
    # Registry.build would search the scope of a codebase, where structures are not registered.
    kind = STRUCTURES.get(type)
    if kind is None:
        known = ', '.join(sorted(STRUCTURES.module_dict))
        raise ValueError(f'unknown structure {type!r}; known are {known}')
    return kind(**kwargs)


def add_structures_(model: nn.Module, structures: Sequence[dict | Structure]) -> nn.Module:
    """Put structures into a backbone or a whole model, one after the other, in place.

    Each form keeps the ordinary weights that it can use, as a start for training. From then on,
    ``load_state_dict`` refuses weights that do not fit a site: weights of another form, or weights
    of a form for an FFN or attention that is ordinary.

    Args:
        model (nn.Module): Model with blocks of a family in :data:`repa_mm.models.FAMILIES`.
        structures (Sequence[dict | Structure]): Configs, such as ``dict(type='ChannelIdle',
            idle_ratio=0.75)``, see :mod:`repa_mm.models.structures`.

    Raises:
        ValueError: If the model has no site for a structure, or a form does not suit a site. The
            structures before that one are in the model then.
    """
    _put_all(model, structures)
    return model


def _put_all(
    model: nn.Module, structures: Sequence[dict | Structure]
) -> list[tuple[Structure, dict[str, str]]]:
    """Put structures into a model, and return each with what :meth:`Structure.put_` returns."""
    built = [_structure(**s) if isinstance(s, dict) else s for s in structures]
    model._register_load_state_dict_pre_hook(check_state_dict, with_module=True)
    rewrite_(model, 'maps')
    # All sites of the model, since other parts of it may have structures already. Listed before
    # the structures are put in, since a structure may change the class of a block.
    sites = [*ffn_sites(model, where=''), *attention_sites(model, where='')]
    placed = [(structure, structure.put_(model)) for structure in built]
    sites += [site for structure in built for site in structure.sites(model)]
    for module in {site.module: None for site in sites}:
        if not any(isinstance(m, Form) for m in module.modules()):
            module._register_load_state_dict_pre_hook(check_ordinary, with_module=True)
    return placed


class WithStructures:
    """Mixin that puts ``structures`` into a backbone or a whole model when it is built.

    The mixin precedes the model's class in the list of bases.

    Args:
        *args, **kwargs: Arguments of the model's class.
        structures (Sequence[dict]): As for :func:`add_structures_`.
        deploy (bool): Build the deploy form, for a reparameterized checkpoint. Defaults to False.
        fast_attention (bool): Use the faster attention and heads of the stage 'train' of
            :func:`~repa_mm.faster.rewrite_`. Defaults to True.
        norm_eval (bool, optional): Keep the BatchNorms of the forms in eval mode, with the
            statistics that were loaded. Defaults to what the model's class does.

    Attributes:
        placed (list): Pairs of a structure and a dict from the names of its sites to the names of
            its forms.
        build_ordinary (Callable): Builds the model without structures, whose weights fill the
            forms.
    """

    def __init__(
        self,
        *args,
        structures: Sequence[dict],
        deploy: bool = False,
        fast_attention: bool = True,
        norm_eval: bool | None = None,
        **kwargs,
    ) -> None:
        kind = _ordinary_class(type(self))
        # Copied first, since detectors write into their configs.
        build = partial(kind, *copy.deepcopy(args), **copy.deepcopy(kwargs))
        super().__init__(*args, **kwargs)
        self.build_ordinary = build
        if norm_eval is not None:
            self.norm_eval = norm_eval
        rewrite_(self, 'padding', *['train'] * fast_attention)
        self.placed = _put_all(self, structures)
        # Freezes the new modules in frozen stages.
        self.train()
        if deploy:
            finish_schedules_(self)
            self.switch_to_deploy()

    def switch_to_deploy(self) -> None:
        """Merge all forms in place; the model is in eval mode afterwards."""
        reparameterize_(self)

    def init_weights(self) -> None:
        """Initialize the weights, or load the pretrained weights that ``init_cfg`` names.

        Weights of this model are loaded as they are. Weights of the ordinary model are loaded into
        an ordinary model, and fill the forms from there. Both may have the layout of the authors'
        code, of timm, or of the official Swin, too.

        Raises:
            CheckpointError: If the weights belong to neither model, or are reparameterized; see
                :func:`~repa_mm.io.checkpoints.load_weights`.
        """
        # Only once, as in MMEngine's modules: weights may have been loaded or trained since.
        if self._is_init:
            return
        cfgs, others = split_init_cfg(self)
        files = [WeightsFile(cfg, hasattr(self, 'backbone')) for cfg in cfgs]
        found, model = [file.weights_of(self) for file in files], self
        if self._takes_ordinary(found):
            model = self._ordinary()
            found = [file.weights_of(model) for file in files]
        model.init_cfg = others[0] if others and len(others) == 1 else others  # some take a dict
        if model is not self:
            model.init_weights()
        elif not has_deploy_form(self):  # where modules that the class initializes are gone
            super().init_weights()
        for file, (weights, is_translated) in zip(files, found):
            if model is self or is_translated:
                load_weights(model, weights, file.path, start=True)
            else:
                load_state_dict(model, weights, logger='current')
        if model is not self:
            self.fill(model)
        self._is_init = True
        self._warn_of_fresh_statistics()

    def _takes_ordinary(self, found: list[tuple[dict, bool]]) -> bool:
        """Return True if pretrained weights, in files or of a part, are the ordinary model's."""
        name, form = next(outermost(self, TrainingForm), ('', None))
        if form is None or has_deploy_form(self):  # None: ordinary FFNs of other widths
            return False
        if not found:
            return any(split_init_cfg(module)[0] for module in self.modules())
        start, (weights, _) = f'{name}.', found[0]
        return not form.owns({k[len(start) :]: None for k in weights if k.startswith(start)})

    def _ordinary(self) -> nn.Module:
        """Build the ordinary model, which refuses weights that would not fill the forms."""
        ordinary = self.build_ordinary()
        for structure, placed in self.placed:
            sites = {site.name: site for site in structure.sites(ordinary)}
            for source in (one for name in placed for one in structure.sources(self, name)):
                site, check = sites[source], partial(check_ordinary, complete=True)
                for module in (site.module, getattr(site, 'norm', nn.Identity())):
                    module._register_load_state_dict_pre_hook(check, with_module=True)
        return ordinary

    def _warn_of_fresh_statistics(self) -> None:
        forms = (form for _, form in outermost(self, TrainingForm))
        fresh = any(norm.num_batches_tracked == 0 for form in forms for norm in form.batch_norms())
        if getattr(self, 'norm_eval', False) and fresh:
            warnings.warn(
                f'{type(self).__name__}: norm_eval=True freezes BatchNorm statistics that were '
                'never estimated. Unless a checkpoint is loaded later (load_from), set '
                'norm_eval=False.'
            )

    @torch.no_grad()
    def fill(self, ordinary: nn.Module) -> None:
        """Copy the weights of an ordinary model, in place, and fill the forms with them."""
        inside = tuple(f'{form}.' for _, placed in self.placed for form in placed.values())
        theirs = ordinary.state_dict()
        for name, value in self.state_dict().items():
            other = theirs.get(name)
            if not name.startswith(inside) and other is not None and other.shape == value.shape:
                value.copy_(other)
        # In reverse, since a later structure may reset norms that an earlier one fills.
        for structure, placed in reversed(self.placed):
            structure.fill_(self, placed, ordinary)
        names = ', '.join(type(structure).__name__ for structure, _ in self.placed)
        print_log(
            f'Ordinary pretrained weights fill the forms of {names}: a start for training',
            'current',
            logging.INFO,
        )

    def train(self, mode: bool = True):
        super().train(mode)
        # Some classes freeze their stages only when they are built. That is enough for LayerNorm,
        # while BatchNorm would keep updating its statistics.
        for module in self.modules() if mode else ():
            if getattr(module, 'frozen_stages', -1) > 0 and hasattr(module, '_freeze_stages'):
                module._freeze_stages()
            if getattr(self, 'norm_eval', False) and isinstance(module, TrainingForm):
                for norm in module.batch_norms():
                    norm.eval()
        return self  # mmpretrain's backbones return None

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(protocol)
        kind = _ordinary_class(type(self))
        if type(self) is not _class_with_structures(kind):
            return reduced
        # Pickle looks up classes by name and would not find this one, so unpickling creates it
        # again from its parent.
        return _new, (kind,), *reduced[2:]


def _ordinary_class(kind: type) -> type:
    return next(cls for cls in kind.__mro__ if not issubclass(cls, WithStructures))


def _new(kind: type) -> nn.Module:
    cls = _class_with_structures(kind)
    return cls.__new__(cls)


@cache
def _class_with_structures(kind: type) -> type:
    members = dict(__doc__=kind.__doc__, __module__=__name__)
    return type(f'Restructured{kind.__name__}', (WithStructures, kind), members)


@MODELS.register_module(name='Restructured')
def build_with_structures(
    model: dict, structures: Sequence[dict], init_cfg: dict | None = None, **kwargs
) -> nn.Module:
    """Build a backbone or a whole model from its config, and put structures into it.

    All other weights keep their names. A config that inherits from another config uses this
    function as follows::

        model = dict(backbone=dict(
            _delete_=True, type='Restructured', model={{_base_.model.backbone}},
            structures=[dict(type='ChannelIdle', idle_ratio=0.75)]))

    Args:
        model (dict): Config of a backbone, detector, segmentor or classifier.
        structures (Sequence[dict]): As for :func:`add_structures_`.
        init_cfg (dict, optional): Replaces the model's ``init_cfg``. The weights may be those of
            the model with structures or of the ordinary model. Defaults to None.
        **kwargs: ``deploy``, ``fast_attention`` and ``norm_eval`` of :class:`WithStructures`; and
            arguments that a whole model passes to its backbone, or a Runner to a whole model, over
            which values in ``model`` take precedence.

    Returns:
        nn.Module: The model. Its class derives from the class that the config names.

    Raises:
        ValueError: If ``type`` is not the name of a model, or the model has structures already, and
            as :func:`add_structures_`.
    """
    args = dict(copy.deepcopy(model))
    ours = 'deploy', 'fast_attention', 'norm_eval'
    args.update((k, v) for k, v in kwargs.items() if k in ours or args.get(k) is None)
    if init_cfg is not None:
        args['init_cfg'] = init_cfg
    kind = args.pop('type')
    with MODELS.switch_scope_and_registry(args.pop('_scope_', None)) as registry:
        name, kind = kind, registry.get(kind) if isinstance(kind, str) else kind
        if not isinstance(kind, type):
            raise ValueError(f'Restructured takes the config of a model, and {name!r} is no class')
        if issubclass(kind, WithStructures):
            raise ValueError(f'a {kind.__name__} has structures already: use it as it is')
        return _class_with_structures(kind)(**args, structures=structures)
