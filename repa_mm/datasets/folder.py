"""Images without annotations."""

import os
import os.path as osp
from collections.abc import Sequence

from mmengine.dataset import Compose
from mmengine.registry import DATASETS
from torch.utils.data import Dataset

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


@DATASETS.register_module()
class ImageFolder(Dataset):
    """The images of a folder and its subfolders, sorted by path.

    Args:
        data_root (str): The folder.
        pipeline (Sequence[dict]): The pipeline of any data set. Steps that load annotations are
            left out.

    Raises:
        FileNotFoundError: If the folder has no image.
    """

    def __init__(self, data_root: str, pipeline: Sequence[dict]) -> None:
        paths = {
            osp.abspath(osp.join(root, name))
            for root, _, names in os.walk(data_root)
            for name in names
            if name.lower().endswith(SUFFIXES)
        }
        self.paths = sorted(paths)
        if not self.paths:
            raise FileNotFoundError(f'no image in the folder {data_root!r} ({", ".join(SUFFIXES)})')
        self.pipeline = Compose([step for step in pipeline if 'Annotations' not in step['type']])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict:
        return self.pipeline(self.get_data_info(index))

    def get_data_info(self, index: int) -> dict:
        """Return what the pipeline begins with, as MMEngine's data sets do."""
        return dict(img_path=self.paths[index], img_id=index, seg_fields=[])
