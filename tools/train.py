"""Train a detector, segmentor or classifier.

    python tools/train.py CONFIG [options]

This runs tools/train.py of the config's codebase (MMDetection, MMSegmentation or MMPretrain) after
importing repa_mm. `python tools/train.py CONFIG --help` lists the options.
"""

import runpy
import sys

from repa_mm.io.command_line import codebase_tool

if __name__ == '__main__':
    tool = codebase_tool(sys.argv[1:], 'train.py')
    if tool is None:
        print(__doc__)
        sys.exit(0 if {'-h', '--help'} & {*sys.argv} else 2)
    runpy.run_path(tool, run_name='__main__')
