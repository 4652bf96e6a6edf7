"""What `import repa_mm` needs, and what it does where something is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys, warnings
import torch

class Broken:
    '''A finder by which the import of some packages fails.'''

    def __init__(self, **errors):
        self.errors = errors

    def find_spec(self, name, path=None, target=None):
        error = self.errors.get(name.replace('.', '_'))
        if error:
            raise error

def check_the_method():
    import repa_mm.reparam
    ffn = repa_mm.ChannelIdleFFN(8, 32).eval()
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(repa_mm.reparameterize(ffn)(x), ffn(x))
    return repa_mm

def check_raises(function, message):
    try:
        function()
    except ImportError as error:
        assert message in str(error), error
    else:
        assert False
"""
WITHOUT_MMENGINE = """
sys.modules['mmengine'] = None
with warnings.catch_warnings():
    warnings.simplefilter('error')
    repa_mm = check_the_method()
assert not hasattr(repa_mm, 'another_name')
check_raises(lambda: repa_mm.convert_pretrained, 'convert_pretrained needs MMEngine')
"""
WITH_A_BROKEN_MMCV = """
message = 'operator torchvision::nms does not exist'
sys.meta_path.insert(0, Broken(mmcv=RuntimeError(message)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    repa_mm = check_the_method()
assert [message in str(w.message) for w in caught if 'repa_mm cannot' in str(w.message)] == [True]
check_raises(lambda: repa_mm.convert_pretrained, f'(RuntimeError: {message})')
"""
# As a config does, with mmcv as `pip install mmcv` without a compiler leaves it, and without what
# only conversion, export and search need.
WITHOUT_OPERATORS = """
for name in ('greenlet', 'nncf', 'onnx', 'onnxruntime', 'openvino'):
    sys.modules[name] = None
sys.meta_path.insert(0, Broken(mmcv__ext=ModuleNotFoundError("No module named 'mmcv._ext'")))
check_the_method()
from mmengine.registry import HOOKS, MODELS
from mmengine.utils import import_modules_from_strings
import_modules_from_strings(imports=['repa_mm'], allow_failed_imports=False)
import repa_mm
for registry, name in (
    (MODELS, 'Restructured'), (MODELS, 'RePaSwinTransformer'), (MODELS, 'FastUPerHead'),
    (MODELS, 'ExportedModel'), (HOOKS, 'ReparameterizeHook')
):
    assert registry.get(name), name
assert 'convert_pretrained' in repa_mm.__all__
check_raises(lambda: repa_mm.convert_pretrained, 'pip install -e ".[speed_up]"')
# MMPretrain itself imports MMDetection.
assert 'mmseg' not in sys.modules

vit = dict(
    type='mmpretrain.VisionTransformer', img_size=32, out_type='featmap',
    arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=64))
model = MODELS.build(dict(
    type='Restructured', model=vit, structures=[dict(type='ChannelIdle', idle_ratio=.75)])).eval()
image = torch.randn(1, 3, 32, 32)
with torch.no_grad():
    merged = repa_mm.reparameterize(model)(image)
    torch.testing.assert_close(merged, model(image), rtol=1e-4, atol=1e-4)
import mmdet
# docs/install.md has this message.
message = "No module named 'mmcv._ext'"
check_raises(lambda: MODELS.build(dict(type='mmdet.RetinaNet')), message)
"""


@pytest.mark.parametrize(
    'code',
    [
        pytest.param(code, id=name.lower())
        for name, code in list(globals().items())
        if name.startswith('WITH')
    ],
)
def test_import(code):
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))
    subprocess.run([sys.executable, '-c', START + code], check=True, env=env)
