"""Test a checkpoint, in the deploy form if the config has a ReparameterizeHook.

    python tools/test.py CONFIG CHECKPOINT [options]

This runs tools/test.py of the config's codebase (MMDetection, MMSegmentation or MMPretrain) after
importing repa_mm. `python tools/test.py CONFIG --help` lists the options.
"""

import runpy
import sys

from repa_mm.io.command_line import codebase_tool

if __name__ == '__main__':
    tool = codebase_tool(sys.argv[1:], 'test.py')
    if tool is None:
        print(__doc__)
        sys.exit(0 if {'-h', '--help'} & {*sys.argv} else 2)
    runpy.run_path(tool, run_name='__main__')
