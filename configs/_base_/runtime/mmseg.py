# A path, since MMEngine knows `mmseg::` by the name of OpenMMLab's distribution alone. The hooks
# come with MMSegmentation's schedules.
_base_ = __import__('repa_mm').config_path('mmseg::_base_/default_runtime.py')
custom_imports = dict(imports=['repa_mm'], allow_failed_imports=False)
