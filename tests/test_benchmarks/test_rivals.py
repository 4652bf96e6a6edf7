"""What others do beside the model that tools/speed_up.py chose."""

from types import SimpleNamespace

import pytest
import torch
from mmdet.structures import DetDataSample

from benchmarks.rivals import Given, Smaller


class Bright(torch.nn.Module):
    """A detector that finds the box of what is bright, in pixels of the original image."""

    data_preprocessor = SimpleNamespace(pad_size_divisor=32)

    def test_step(self, data):
        ((image,), (sample,)) = data['inputs'], data['data_samples']
        assert sample.img_shape == image.shape[1:]
        low, high = (image[0] > 127).nonzero().flip(1).aminmax(dim=0)
        return image.shape[1:], torch.cat([low, high + 1]) / torch.tensor(sample.scale_factor * 2)


def test_smaller_images():
    image = torch.zeros(3, 320, 192, dtype=torch.uint8)
    image[:, 80:240, 48:144] = 255
    given = dict(img_shape=(320, 192), scale_factor=(0.5, 0.25))
    data = dict(inputs=[image], data_samples=[DetDataSample(metainfo=given)])
    shape, box = Smaller(Bright(), 0.8).test_step(data)
    assert shape == (256, 160)  # 153.6 is rounded
    torch.testing.assert_close(box, torch.tensor([96.0, 320, 288, 960]).double(), atol=4, rtol=0)
    assert data['data_samples'][0].scale_factor == (0.5, 0.25)


def test_a_run_without_annotations_has_no_rivals(tmp_path):
    (tmp_path / 'results.json').write_text('{"metric": "agreement"}')
    with pytest.raises(ValueError, match='no metric of annotated images'):
        Given(str(tmp_path), repeats=1)
