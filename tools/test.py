"""Test a checkpoint, in its deploy form if the config has a ReparameterizeHook.

    python tools/test.py CONFIG CHECKPOINT [options]

imports repa_mm and runs the tools/test.py of the config's codebase (MMDetection, MMSegmentation or
MMPretrain). CONFIG comes first; `python tools/test.py CONFIG --help` lists the options.
"""

import runpy
import sys

from repa_mm.config import codebase_tool

if __name__ == '__main__':
    # Launchers may put --local-rank before the config.
    configs = [argument for argument in sys.argv[1:] if not argument.startswith('-')]
    if not configs:
        sys.exit(__doc__)
    runpy.run_path(codebase_tool(configs[0], 'test.py'), run_name='__main__')
