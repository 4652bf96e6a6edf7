"""Test a checkpoint, in the deploy form if the config has a ReparameterizeHook.

    python tools/test.py CONFIG CHECKPOINT [options]

This runs tools/test.py of the config's codebase (MMDetection, MMSegmentation or MMPretrain) after
importing repa_mm. `python tools/test.py CONFIG --help` lists the options.
"""

from repa_mm.io.command_line import run_codebase_tool

if __name__ == '__main__':
    run_codebase_tool('test.py', __doc__)
