"""Registration of the backbones without importing what they derive from.

``import mmpretrain.models`` takes seconds, and imports MMDetection where that
is installed. So the backbones are entered in MMEngine's root registry, from
which those of MMPretrain, MMDetection and MMSegmentation inherit, by name, and
imported when one is first asked for.
"""
from importlib import import_module

from mmengine.registry import MODELS

BACKBONES = ('RePaSwinTransformer', 'FastSwinTransformer')


class _LazyModules(dict):
    """The modules of a registry; those named ``pending`` are yet to import."""

    def __init__(self, modules: dict, pending: set) -> None:
        super().__init__(modules)
        self.pending = pending

    def __contains__(self, name: str) -> bool:
        if name in self.pending:
            # Emptied first: importing registers, and registering looks here.
            pending, self.pending = self.pending, set()
            try:
                import_module('repa_mm.models')
            except Exception:
                self.pending = pending
                raise
        return super().__contains__(name)


def register_backbones() -> None:
    """Make ``type='RePaSwinTransformer'`` build from every MM registry."""
    if not isinstance(MODELS._module_dict, _LazyModules):
        MODELS._module_dict = _LazyModules(MODELS._module_dict, set(BACKBONES))
