"""Registration of models without importing what they derive from.

``import mmpretrain.models`` takes seconds, and imports MMDetection where that
is installed. So the backbones are entered in MMEngine's root registry, from
which those of MMPretrain, MMDetection and MMSegmentation inherit, by name, and
imported when one is first asked for.
"""

from importlib import import_module

from mmengine.registry import MODELS, TRANSFORMS

BACKBONES = (
    'FastSwinTransformer',
    'IdleChannels',
    'LVViT',
    'ParallelMAEViT',
    'ParallelSwinTransformer',
    'ParallelVisionTransformer',
    'RePaLVViT',
    'RePaMlpMixer',
    'RePaPoolFormer',
    'RePaSwinTransformer',
    'RePaVisionTransformer',
)
HEADS = ('TokenLabelHead',)
SELF_SUPERVISED = ('ClassTokens', 'DINO', 'DINOHead', 'DINOProjection')
DATA_TRANSFORMS = ('LoadTokenLabels', 'RandomResizedCropWithBox')


class _LazyModules(dict):
    """The modules of a registry, and where those yet to import are."""

    def __init__(self, modules: dict, locations: dict) -> None:
        super().__init__(modules)
        self.locations = locations

    def __contains__(self, name: str) -> bool:
        if name in self.locations:
            # Emptied first: importing registers, and registering looks here.
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
    """Make the names above, as in ``type='RePaSwinTransformer'``, build from every registry."""
    models = dict.fromkeys(BACKBONES + HEADS, 'repa_mm.models')
    models |= dict.fromkeys(SELF_SUPERVISED, 'repa_mm.models.dino')
    # Alone, since it needs MMSegmentation.
    models['FastUPerHead'] = 'repa_mm.models.heads.uper_head'
    for registry, locations in (
        (MODELS, models),
        (TRANSFORMS, dict.fromkeys(DATA_TRANSFORMS, 'repa_mm.datasets.token_label')),
    ):
        if not isinstance(registry._module_dict, _LazyModules):
            registry._module_dict = _LazyModules(registry._module_dict, locations)
