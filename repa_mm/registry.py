"""Registration of models without importing what they derive from.

``import mmpretrain.models`` takes seconds, and imports MMDetection where that
is installed. So the backbones are entered in MMEngine's root registry, from
which those of MMPretrain, MMDetection and MMSegmentation inherit, by name, and
imported when one is first asked for.
"""
from importlib import import_module

from mmengine.registry import MODELS, TRANSFORMS

BACKBONES = ('FastSwinTransformer', 'LVViT', 'RePaLVViT', 'RePaMlpMixer',
             'RePaPoolFormer', 'RePaSwinTransformer', 'RePaVisionTransformer')
HEADS = ('TokenLabelHead', )
DATA_TRANSFORMS = ('LoadTokenLabels', 'RandomResizedCropWithBox')


class _LazyModules(dict):
    """The modules of a registry; those named ``pending`` are yet to import."""

    def __init__(self, modules: dict, pending: set, location: str) -> None:
        super().__init__(modules)
        self.pending = pending
        self.location = location

    def __contains__(self, name: str) -> bool:
        if name in self.pending:
            # Emptied first: importing registers, and registering looks here.
            pending, self.pending = self.pending, set()
            try:
                import_module(self.location)
            except Exception:
                self.pending = pending
                raise
        return super().__contains__(name)


def register_lazily() -> None:
    """Make ``type='RePaSwinTransformer'`` build from every MM registry.

    And the other names above.
    """
    for registry, names, location in (
            (MODELS, BACKBONES + HEADS, 'repa_mm.models'),
            (TRANSFORMS, DATA_TRANSFORMS, 'repa_mm.datasets')):
        if not isinstance(registry._module_dict, _LazyModules):
            registry._module_dict = _LazyModules(registry._module_dict,
                                                 set(names), location)
