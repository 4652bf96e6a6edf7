"""Keeping predictions for later."""

from mmengine.evaluator import DumpResults
from mmengine.registry import METRICS


@METRICS.register_module()
class DumpSegResults(DumpResults):
    """Write label maps to a pickle file, without the logits.

    The logits of one image of ADE20K are 150 floats a pixel.

    Args:
        out_file_path (str): The file, ``.pkl`` or ``.pickle``.
        collect_device (str): As in ``BaseMetric``. Defaults to 'cpu'.
        collect_dir (str, optional): As in ``BaseMetric``. Defaults to None.
    """

    def process(self, data_batch, data_samples) -> None:
        super().process(
            data_batch,
            [
                {key: value for key, value in sample.items() if key != 'seg_logits'}
                for sample in data_samples
            ],
        )
