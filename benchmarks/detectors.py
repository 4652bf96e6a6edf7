r"""Time detectors of OpenMMLab beside those that one would train today, on a CPU.

All models run in turn in one process, on one photograph and with random weights. A time is that of
the model and its post-processing, from an image of the model's own resolution to boxes. Detectors
with Swins run as they are (stock), as a RePaFormer where there is a config, and with a share of the
channels and dimensions of all blocks (``--budget``), in PyTorch and in files for ONNX Runtime and
OpenVINO. RF-DETR and D-FINE run in PyTorch, too, and in the files that their packages export::

    .venv/bin/uv pip install --target .venv-rivals --no-deps PACKAGES
    python -m benchmarks.detectors --packages .venv-rivals --cpu 'Intel Xeon, 2 cores'

YOLO26's licence asks for an environment of its own, where its own command line writes files. They
are given by their names::

    yolo export model=yolo26n.yaml format=onnx
    python -m benchmarks.detectors --models yolo26n.onnx 'RF-DETR Nano'

Files stay in ``--work-dir`` for further calls. All models at once need more than 24 GB: give one or
two of OpenMMLab's at a time (``--models``), and a large one in two ways (``--ways``). Published box
APs, which trained models have by their authors' words, stand beside the times.
"""

import argparse
import os
import os.path as osp
import sys
from collections.abc import Callable, Iterator
from functools import partial

import cv2
import numpy as np
import torch
import torch.nn as nn

from benchmarks.compare import append
from benchmarks.even import even_config
from demo.dataset import PHOTOGRAPHS, load_photograph
from repa_mm.apis import open_model, read_images
from repa_mm.export import ExportedModel, example_shape, whole_model, whole_onnx
from repa_mm.export.exporter import to_onnx
from repa_mm.faster import fuse_conv_bn_
from repa_mm.io.configs import load_config
from repa_mm.io.files import write_bytes
from repa_mm.io.paths import config_path
from repa_mm.measure.timing import compare, measure, show
from repa_mm.search.formats import BF16, EAGER, F32, FORMATS, ORT

#: Configs: stock, and as a RePaFormer if there is one.
OURS = {
    'Mask R-CNN Swin-T': ('mask_rcnn_swin_t.py', 'mask_rcnn_repa_swin_t.py'),
    'RetinaNet Swin-T': ('retinanet_swin_t.py', 'retinanet_repa_swin_t.py'),
    'RetinaNet Swin-B': ('retinanet_swin_b.py', 'retinanet_repa_swin_b.py'),
    'DINO Swin-L': ('mmdet::dino/dino-5scale_swin-l_8xb2-36e_coco.py',),
}
#: Box AP on COCO of trained models, and who says so.
PUBLISHED = {
    'Mask R-CNN Swin-T': (42.7, "MMDetection's configs/swin/metafile.yml, 1x"),
    'RetinaNet Swin-B': (38.9, "RePaFormer's table 6 (39.8 as a RePaFormer)"),
    'DINO Swin-L': (58.4, "MMDetection's configs/dino/metafile.yml, 36 epochs"),
    'RF-DETR Nano': (48.4, "RF-DETR's README"),
    'RF-DETR Small': (53.0, "RF-DETR's README"),
    'D-FINE-S': (50.6, "RF-DETR's README (48.5 without Objects365)"),
    'yolo26n': (40.9, "Ultralytics' docs"),
    'yolo26s': (48.6, "Ultralytics' docs"),
}
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
FORMS, KINDS = ('stock', 'merged', 'narrow'), (EAGER, ORT, F32, BF16)
COLUMNS = 'model', 'form', 'format', 'ms', '× PyTorch [95 %]', 'published AP'
Call = Callable[[dict], object]


def photograph(folder: str) -> str:
    """Return a folder with one photograph, of the size that COCO's images are scaled to."""
    folder = osp.join(folder, 'photographs')
    os.makedirs(folder, exist_ok=True)
    image = cv2.resize(load_photograph(*PHOTOGRAPHS[0][:2]), (1333, 800))
    cv2.imwrite(osp.join(folder, '0.png'), image)
    return folder


def open_ours(name: str, form: str, args: argparse.Namespace) -> nn.Module:
    """Return a detector of OpenMMLab in a form."""
    stock, *repa = map(config_path, OURS[name])
    if form == 'stock':
        return open_model(stock)
    if form == 'merged':
        return fuse_conv_bn_(open_model(*repa, merge=True))
    return open_model(even_config(load_config(stock), *3 * [args.budget]))


def ours(name: str, args: argparse.Namespace) -> Iterator[tuple[str, str, Call]]:
    """Yield the form, the format and the call of each way to run a detector of OpenMMLab.

    Files are not compared with PyTorch: models of random weights find nothing to compare.
    """
    for form in args.forms:
        if form == 'merged' and len(OURS[name]) == 1:
            continue
        kinds = [k for k in args.formats if not args.ways or f'{form}, {k}' in args.ways]
        if not kinds:
            continue
        model = open_ours(name, form, args)
        for kind in kinds:
            if kind == EAGER:
                call = model.test_step
            else:
                stem = f'{name}, {args.budget:g}' if form == 'narrow' else f'{name}, {form}'
                file = osp.join(args.work_dir, f'{stem}.onnx')
                if not osp.exists(file):
                    shape = 2, 3, *example_shape(model)
                    write_bytes(file, whole_onnx(whole_model(model), shape))
                call = ExportedModel(file, model.data_preprocessor, FORMATS[kind].runtime).test_step
            yield form, kind, call


class Named(nn.Module):
    """A model of transformers, whose outputs have names, as a function to a tuple."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.model(image)
        return tuple(found[name] for name in self.names)


def rf_detr(size: str, folder: str) -> tuple[nn.Module, Callable, str, int]:
    """RF-DETR: the model in PyTorch, its post-processing, its file and its resolution."""
    import rfdetr
    from rfdetr.models.postprocess import PostProcess

    detector = getattr(rfdetr, f'RFDETR{size}')(pretrain_weights=None, device='cpu')
    file = detector.export(output_dir=osp.join(folder, f'RF-DETR {size}'), verbose=False)
    detector.inference()  # traces it
    finish, whole = PostProcess(), torch.tensor([[800, 1333]])

    def decode(boxes: torch.Tensor, logits: torch.Tensor, *_) -> list[dict]:
        return finish(dict(pred_boxes=boxes, pred_logits=logits), whole)

    return detector.model.inference_model, decode, str(file), detector.model.resolution


def d_fine(folder: str) -> tuple[nn.Module, Callable, str, int]:
    """D-FINE-S of transformers, as :func:`rf_detr`."""
    from transformers import DFineConfig, DFineForObjectDetection, HGNetV2Config

    backbone = HGNetV2Config(
        hidden_sizes=[128, 256, 512, 1024],
        stem_channels=[3, 16, 16],
        stage_in_channels=[16, 64, 256, 512],
        stage_mid_channels=[16, 32, 64, 128],
        stage_out_channels=[64, 256, 512, 1024],
        stage_num_blocks=[1, 1, 2, 1],
        stage_downsample=[False, True, True, True],
        stage_light_block=[False, False, True, True],
        stage_kernel_size=[3, 3, 5, 5],
        stage_numb_of_layers=[3, 3, 3, 3],
        use_learnable_affine_block=True,
        out_indices=[2, 3, 4],
    )
    config = DFineConfig(
        num_labels=80,
        backbone_config=backbone,
        decoder_layers=3,
        hidden_expansion=0.5,
        depth_mult=0.34,
        decoder_n_points=[3, 6, 3],
        encoder_in_channels=[256, 512, 1024],
        anchor_image_size=[640, 640],
    )
    model = Named(DFineForObjectDetection(config).eval(), 'logits', 'pred_boxes')
    file = osp.join(folder, 'D-FINE-S.onnx')
    write_bytes(file, to_onnx(model, (torch.rand(1, 3, 640, 640),)))
    scale = torch.tensor([1333, 800] * 2)

    def decode(logits: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # As RTDetrImageProcessor.post_process_object_detection of transformers.
        scores, index = logits.sigmoid().flatten(1).topk(boxes.shape[1])
        centre, side = (x * scale[:2] for x in boxes.split(2, 2))
        corners = torch.cat([centre - side / 2, centre + side / 2], 2)
        rows = (index // logits.shape[2])[..., None].expand(-1, -1, 4)
        return scores, index % logits.shape[2], corners.gather(1, rows)

    return model, decode, file, 640


RIVALS = {
    'RF-DETR Nano': partial(rf_detr, 'Nano'),
    'RF-DETR Small': partial(rf_detr, 'Small'),
    'D-FINE-S': d_fine,
}


def run(file: str, kind: str) -> Callable:
    """Return a function from an image (1, 3, H, W) to the outputs of a file."""
    threads = torch.get_num_threads()
    if kind == ORT:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(file, options, providers=['CPUExecutionProvider'])
        name = session.get_inputs()[0].name
        return lambda x: [torch.from_numpy(y) for y in session.run(None, {name: x.numpy()})]
    import openvino

    config = {'INFERENCE_NUM_THREADS': threads}
    if FORMATS[kind].runtime:
        config['INFERENCE_PRECISION_HINT'] = FORMATS[kind].runtime
    compiled = openvino.Core().compile_model(file, 'CPU', config)
    return lambda x: [torch.from_numpy(y) for y in compiled([x.numpy()]).values()]


def rival(name: str, args: argparse.Namespace) -> Iterator[tuple[str, str, Call]]:
    """Yield the form, the format and the call of each way to run another detector, or a file."""
    if name in RIVALS:
        model, decode, file, side = RIVALS[name](args.work_dir)
        kinds = args.formats
    else:  # of YOLO26, which suppresses nothing: rows of box, score and class, the best first
        model, decode, file, side = None, lambda x, *_: x[0][x[0, :, 4] > 0.25], name, 640
        in_onnx = osp.splitext(file)[1] == '.onnx'
        kinds = [kind for kind in KINDS[1:] if kind in args.formats and (in_onnx or kind != ORT)]
    image = cv2.imread(osp.join(args.images, '0.png'))[..., ::-1]
    pixels = torch.from_numpy(cv2.resize(image, (side, side)).astype(np.float32))
    pixels = ((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)[None]
    pixels = pixels.contiguous()
    for kind in kinds:
        inner = model if kind == EAGER else run(file, kind)
        yield 'stock', kind, lambda _, inner=inner: decode(*inner(pixels))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*OURS, *RIVALS]
    parser.add_argument(
        '--models', nargs='+', default=names, help=f'of {names}, or files of YOLO26'
    )
    parser.add_argument('--forms', nargs='+', default=FORMS, choices=FORMS)
    parser.add_argument('--formats', nargs='+', default=KINDS, choices=KINDS)
    parser.add_argument('--ways', nargs='+', help="such as 'stock, PyTorch' (default: all)")
    parser.add_argument('--budget', type=float, default=0.25, help='of the narrow form')
    parser.add_argument('--repeats', type=int, default=10, help='turns of timing')
    parser.add_argument('--cpu', default='', help='the processor, in plain words')
    parser.add_argument('--packages', default='', help='folder with rfdetr and transformers')
    parser.add_argument('--work-dir', default='work_dirs/detectors')
    parser.add_argument('--out', help='results (default: results.csv in the work folder)')
    args = parser.parse_args()
    if args.packages:  # only now: MMPretrain does not import beside transformers 5
        sys.path.append(args.packages)
    args.images = photograph(args.work_dir)
    calls, data = {}, None
    for name in args.models:
        ways = ours(name, args) if name in OURS else rival(name, args)
        for form, kind, call in ways:
            print(f'{name}, {form}, {kind}: ready', flush=True)
            calls[name, form, kind] = call
    known = [name for name in args.models if name in OURS]
    if known:
        cfg = load_config(config_path(OURS[known[0]][0]))
        (data,) = read_images(cfg, 'test', 1, args.images)
    with torch.no_grad():
        times = measure(calls, data, args.repeats)
    rows, out = [], args.out or osp.join(args.work_dir, 'results.csv')
    for (name, form, kind), values in times.items():
        model = osp.splitext(osp.basename(name))[0] if name not in {**OURS, **RIVALS} else name
        ms, ap = float(np.median(values)), PUBLISHED.get(model, ('', ''))
        first = times.get((name, 'stock', EAGER))
        ratio = '' if first is None else '{:.2f} [{:.2f}, {:.2f}]'.format(*compare(first, values))
        rows.append([model, form, kind, f'{ms:.1f}', ratio, str(ap[0])])
        row = dict(what='detectors', model=model, form=f'{form}, {kind}', cpu=args.cpu, unit='ms')
        append(out, dict(row, run=f'{len(values)} turns'), dict(time=ms))
    for model in dict.fromkeys(row[0] for row in rows):
        if model in PUBLISHED:
            ap, source = PUBLISHED[model]
            row = dict(what='detectors', model=model, form='stock', run='', cpu='', unit='')
            row |= dict(command=source, version="the publisher's")
            append(out, row, {'published box AP': ap})
    rows.sort(key=lambda row: float(row[3]))
    show("detectors, the fastest first; APs are their authors'", COLUMNS, rows)


if __name__ == '__main__':
    main()
