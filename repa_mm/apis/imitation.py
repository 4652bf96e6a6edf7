"""Train a model beside a trained one, the teacher, whose backbone's maps its own are drawn to."""

import copy

import torch
import torch.nn as nn
from mmengine.registry import MODELS, DefaultScope

from repa_mm.apis.features import tensors
from repa_mm.apis.models import open_model
from repa_mm.faster import rewrite_
from repa_mm.models.builder import derived
from repa_mm.surgery import become_


class Teacher:
    """The backbone of a trained model: no module of the student, and opened anew in its copies."""

    def __init__(self, config: str, checkpoint: str) -> None:
        self.config, self.checkpoint, self.opened = config, checkpoint, None

    def __getstate__(self) -> dict:  # of copies and pickles
        return dict(vars(self), opened=None)

    @torch.no_grad()
    def maps(self, student: nn.Module, images: torch.Tensor, *args, **kwargs) -> list[torch.Tensor]:
        """Return the teacher's maps of the images (B, C, H, W) that the student's backbone got."""
        place = images.device, images.dtype
        if self.opened is None or self.opened[0] != place:
            self.opened = place, self._open(student).to(images)
        return tensors(self.opened[1](images, *args, **kwargs))

    @torch.compiler.disable
    def _open(self, student: nn.Module) -> nn.Module:
        scope = DefaultScope.get_current_instance()
        with DefaultScope.overwrite_default_scope(scope and scope.scope_name):
            try:
                model = open_model(self.config, self.checkpoint, merge=True)
            except FileNotFoundError as error:
                raise ValueError(f'the teacher is missing: {error}') from error
        if not isinstance(getattr(model, 'backbone', None), nn.Module):
            raise ValueError(f'the teacher, a {type(model).__name__}, has no backbone')
        theirs, own = map(_normalization, (model, student))
        if theirs != own:
            raise ValueError(
                f'the teacher was trained on other images: its data preprocessor has {theirs}, and '
                f'that of the model {own}'
            )
        rewrite_(model.backbone, 'train')
        return model.backbone.requires_grad_(False)


def _normalization(model: nn.Module) -> dict:
    """Return what a data preprocessor does with the values of an image."""

    def value(name: str, default):
        return getattr(model.data_preprocessor, name, default)

    # In MMDetection, MMSegmentation and MMPretrain.
    names = '_channel_conversion', 'channel_conversion', 'to_rgb'
    values = {k: torch.as_tensor(value(k, ())).flatten().tolist() for k in ('mean', 'std')}
    return dict(values, flips_channels=any(value(name, False) for name in names))


def _distance(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of maps (B, C, …), tokens (B, N, C) or vectors (B, C).

    It is relative to the variance of the teacher's channels, or to their mean square where they
    hardly vary, such as those of a single vector.
    """
    own, given = own.float(), given.float()
    places = (0, 1) if given.ndim == 3 else (0, *range(2, given.ndim))
    variance, power = given.var(places, unbiased=False).mean(), given.square().mean()
    scale = torch.where(variance > 1e-4 * power, variance, power)
    return (own - given).square().mean() / scale.clamp(min=1e-6)


class Imitates:
    """Mixin that adds the distance of a backbone's maps to those of a teacher to the losses."""

    _prefix = 'Imitating'

    def loss(self, *args, **kwargs) -> dict:
        """Return the losses of the model, and ``loss_imitation``, the mean over all maps."""
        terms = []

        def compare(backbone, inputs, options, outputs) -> None:
            own, given = tensors(outputs), self.imitated.maps(self, *inputs, **options)
            theirs, ours = ([tuple(x.shape) for x in maps] for maps in (given, own))
            if theirs != ours:
                raise ValueError(
                    f'the maps of the teacher have the shapes {theirs}, and those of the model '
                    f'{ours}: they can only be compared if these are the same'
                )
            terms.extend(map(_distance, own, given))

        hook = self.backbone.register_forward_hook(compare, with_kwargs=True)
        try:
            losses = super().loss(*args, **kwargs)
        finally:
            hook.remove()
        if not terms:
            raise ValueError(f'the loss of an {type(self).__name__} does not call its backbone')
        losses['loss_imitation'] = self.imitation_weight * sum(terms) / len(terms)
        return losses


def build_imitating(model: dict, teacher: dict, weight: float = 1.0, **kwargs) -> nn.Module:
    """Build a model that imitates a trained one while it trains, registered as ``Imitation``.

    A config that inherits from another config uses this function as follows::

        model = dict(type='Imitation', _delete_=True, model={{_base_.model}},
                     teacher=dict(config='…', checkpoint='…'))

    The losses get ``loss_imitation``: the mean squared error of each of the backbone's maps,
    relative to the variance of the teacher's channels, and then the mean over the maps of all calls
    of the backbone. The teacher belongs to no state dict: the plain config tests a checkpoint.

    Args:
        model (dict): Config of a detector, segmentor or classifier.
        teacher (dict): The ``config`` of a trained model whose backbone has maps of the same
            shapes, a path or a name such as 'mmdet::swin/….py', and its ``checkpoint``, a file or
            URL. It is opened in the first step.
        weight (float): Weight of the loss. Defaults to 1.0.
        **kwargs: Arguments that a Runner passes to a whole model, or that the config has inherited
            beside ``model``: they stand where ``model`` has none.

    Returns:
        nn.Module: The model. Its class derives from the class that the config names.

    Raises:
        ValueError: If ``teacher`` lacks either of them, an argument differs from that in ``model``,
            or the model has no ``loss`` or no ``backbone``; in the first step, if the teacher's
            files are missing, its data preprocessor differs, or its maps have other shapes.
    """
    if {key for key, value in teacher.items() if value} != {'config', 'checkpoint'}:
        raise ValueError(f"teacher needs a 'config' and a 'checkpoint', but is {teacher}")
    cfg = dict(copy.deepcopy(model))
    inherited = kwargs.keys() - {'data_preprocessor'}  # a Runner gives that to every model
    for key, value in kwargs.items():
        if cfg.setdefault(key, value) != value and inherited:
            raise ValueError(
                f'model.{key} and model.model.{key} differ: change the second, and set '
                '_delete_=True beside model'
            )
    built = MODELS.build(cfg)
    if not hasattr(built, 'loss') or not isinstance(getattr(built, 'backbone', None), nn.Module):
        raise ValueError(f'a {type(built).__name__} cannot imitate: it has no loss or no backbone')
    become_(built, derived(Imitates, type(built)))
    built.imitated, built.imitation_weight = Teacher(**teacher), weight
    return built
