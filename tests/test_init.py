"""What `import repa_mm` needs."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
sys.modules['mmengine'] = None  # not installed
import repa_mm
assert repa_mm.reparameterize and not hasattr(repa_mm, 'config_path')
for name in [name for name in sys.modules if name.split('.')[0] in ('repa_mm', 'mmengine')]:
    del sys.modules[name]
sys.modules['mmcv._ext'] = None
try:
    import repa_mm
except ImportError as error:
    assert 'compiled operators do not load' in str(error)
else:
    assert False
"""


def test_without_mmengine_and_without_compiled_operators():
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))
    subprocess.run([sys.executable, '-c', CODE], check=True, env=env)
