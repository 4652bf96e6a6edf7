"""Train a detector, segmentor or classifier.

    python tools/train.py CONFIG [options]

This runs tools/train.py of the config's codebase (MMDetection, MMSegmentation or MMPretrain) after
importing repa_mm. `python tools/train.py CONFIG --help` lists the options.
"""

from repa_mm.io.command_line import run_codebase_tool

if __name__ == '__main__':
    run_codebase_tool('train.py', __doc__)
