"""Show the whole job on a small data set: train, test in both forms, compare, draw."""

import os.path as osp
import sys

from repa_mm.demo.run import main

if __name__ == '__main__':
    sys.exit(main(tools=osp.dirname(osp.abspath(__file__))))
