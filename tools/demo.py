"""Train a small model on a small data set, test both forms, compare them and draw predictions."""

import os.path as osp
import sys

# Before this script's own folder, in which `demo` would be this file.
sys.path.insert(0, osp.dirname(osp.dirname(osp.abspath(__file__))))

from demo.run import main  # noqa: E402

if __name__ == '__main__':
    main()
