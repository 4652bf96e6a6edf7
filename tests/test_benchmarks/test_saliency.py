"""The decoder of the saliency model, as MMSegmentation's head."""

import onnx
import torch
import torch.nn as nn
from mmengine.registry import MODELS

from benchmarks import dinov2, saliency


class Decoder(nn.Module):
    """As the wheel's file names its parts."""

    def __init__(self):
        super().__init__()
        for i, (before, after) in enumerate(((384, 256), (256, 128), (128, 64)), 1):
            setattr(self, f'upconv{i}', nn.ConvTranspose2d(before, after, 4, stride=2, padding=1))
            setattr(self, f'bn{i}', nn.BatchNorm2d(after))
        self.final_conv = nn.Conv2d(64, 1, 1)

    def forward(self, x):
        for i in (1, 2, 3):
            x = getattr(self, f'bn{i}')(getattr(self, f'upconv{i}')(x)).relu()
        return self.final_conv(x)


def test_the_decoder_computes_what_the_file_does(tmp_path, monkeypatch, randomize, relative_error):
    decoder = randomize(Decoder()).eval()
    weights = [
        onnx.numpy_helper.from_array(value.numpy(), f'decoder.{name}')
        for name, value in decoder.state_dict().items()
        if value.ndim
    ]
    graph = onnx.helper.make_graph([], 'decoder', [], [], weights)
    onnx.save(onnx.helper.make_model(graph), tmp_path / 'model.onnx')
    monkeypatch.setattr(dinov2, 'load', lambda _: MODELS.build(dinov2.CONFIG))
    model = saliency.load(str(tmp_path / 'model.onnx'))
    x, image = torch.randn(2, 384, 3, 2), torch.randint(256, (3, 224, 224), dtype=torch.uint8)
    with torch.no_grad():
        assert relative_error(model.decode_head((x,)), decoder(x)) < 1e-5
        (sample,) = model.test_step(dict(inputs=[image]))
    found, share = sample.pred_sem_seg.data, sample.seg_logits.data
    assert found.shape == (1, 224, 224) and torch.equal(found, (share > 0.5).to(found))
