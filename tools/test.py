"""Test a checkpoint, in its deploy form if the config has a ReparameterizeHook.

    python tools/test.py CONFIG CHECKPOINT [options]

imports repa_mm and runs the tools/test.py of the config's codebase (MMDetection, MMSegmentation or
MMPretrain). `python tools/test.py CONFIG --help` lists the options.
"""

import runpy
import sys

from repa_mm.config import codebase_tool

if __name__ == '__main__':
    tool = codebase_tool(sys.argv[1:], 'test.py')
    if tool is None:
        sys.exit(__doc__)
    runpy.run_path(tool, run_name='__main__')
