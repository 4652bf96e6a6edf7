"""Lazy registration of models and transforms.

``import mmpretrain.models`` takes seconds, and imports MMDetection where that is installed. So this
module enters names without importing anything: into MMEngine's root registries, in which
MMPretrain, MMDetection and MMSegmentation look, too. A registry imports the module of a name when a
config first asks for the name.
"""

from importlib import import_module

from mmengine.registry import DATASETS, MODELS, TRANSFORMS

BACKBONES = (
    'AffineRIFormer',
    'ExpertsVisionTransformer',
    'FastSwinTransformer',
    'IdleChannels',
    'LVViT',
    'ParallelMAEViT',
    'ParallelSwinTransformer',
    'ParallelVisionTransformer',
    'ProgressiveSwinTransformer',
    'ProgressiveVisionTransformer',
    'RePaLVViT',
    'RePaMlpMixer',
    'RePaPoolFormer',
    'RePaSwinTransformer',
    'RePaVisionTransformer',
)
HEADS = ('TokenLabelHead',)
DISTILLERS = ('FeatureDistiller',)
SELF_SUPERVISED = ('ClassTokens', 'DINO', 'DINOHead', 'DINOProjection')
DATA_TRANSFORMS = ('LoadTokenLabels', 'RandomResizedCropWithBox')


class _LazyModules(dict):
    """The registered modules by name, and the places (``locations``) of those not yet imported."""

    def __init__(self, modules: dict, locations: dict) -> None:
        super().__init__(modules)
        self.locations = locations

    def __contains__(self, name: str) -> bool:
        if name in self.locations:
            # Emptied first: the import registers names, and registering looks them up here.
            locations, self.locations = self.locations, {}
            try:
                import_module(locations[name])
            except Exception:
                self.locations = locations
                raise
            self.locations = {
                key: location for key, location in locations.items() if location != locations[name]
            }
        return super().__contains__(name)


def register_lazily() -> None:
    """Register the names above, so that every codebase builds them from a config."""
    models = dict.fromkeys(BACKBONES + HEADS + DISTILLERS, 'repa_mm.models')
    models |= dict.fromkeys(SELF_SUPERVISED, 'repa_mm.models.dino')
    # A module of its own, since the head needs MMSegmentation.
    models['FastUPerHead'] = 'repa_mm.models.heads.uper_head'
    for registry, locations in (
        (MODELS, models),
        (TRANSFORMS, dict.fromkeys(DATA_TRANSFORMS, 'repa_mm.datasets.token_label')),
        (DATASETS, dict(ImageFolder='repa_mm.datasets.folder')),
    ):
        if not isinstance(registry._module_dict, _LazyModules):
            registry._module_dict = _LazyModules(registry._module_dict, locations)
