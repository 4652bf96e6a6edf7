"""Cosine between the last features of a Swin in int8 and in float, for ways to quantize it.

Weights are random, BatchNorm statistics are those of the images, of which crops are taken.

    python tools/dev/quantized_features.py t FOLDER_OF_PHOTOS
"""

import argparse
import io
import logging
import os

import cv2
import nncf
import numpy as np
import openvino
import torch

import repa_mm
from repa_mm.benchmark.variants import build_model
from repa_mm.export.export import _to_onnx
from repa_mm.export.quantization import costliest
from repa_mm.export.quantize import products_of
from repa_mm.export.sensitivity import sensitivities
from repa_mm.models.tracing import trace_any_size
from repa_mm.reparam import calibrate_batch_norm
from repa_mm.run import load_config
from repa_mm.run.cli import align

# Shortcut (None for the vanilla model), SmoothQuant, errors of the layers in 8 bits.
WAYS = [
    ('inside', True, 1),
    ('outside', False, 1),
    ('outside', True, 1),
    ('outside', True, 2e-3),
    (None, True, 1),
]


def crops(folder: str, number: int, seed: int) -> list[np.ndarray]:
    """Normalized crops (1, 3, 224, 224)."""
    files = sorted(os.path.join(root, f) for root, _, names in os.walk(folder) for f in names)
    images = [image for image in map(cv2.imread, files) if image is not None]
    generator, found = np.random.default_rng(seed), []
    for _ in range(number):
        image = images[generator.integers(len(images))][..., ::-1]
        height, width = image.shape[:2]
        side = int(generator.integers(min(height, width) // 2, min(height, width) + 1))
        top = generator.integers(height - side + 1)
        left = generator.integers(width - side + 1)
        crop = image[top : top + side, left : left + side]
        crop = cv2.resize(crop, (224, 224), interpolation=cv2.INTER_AREA)
        crop = (crop - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]
        found.append(crop.transpose(2, 0, 1)[None].astype('f'))
    return found


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('arch', choices='tsb')
    parser.add_argument('images', help='folder of photos')
    parser.add_argument('--num-images', type=int, default=16, help='to calibrate on')
    parser.add_argument('--num-tests', type=int, default=8)
    args = parser.parse_args()
    nncf.set_log_level(logging.ERROR)
    images, tests = crops(args.images, args.num_images, 0), crops(args.images, args.num_tests, 1)
    tensors = [torch.from_numpy(x) for x in images]
    core = openvino.Core()
    rows = [('shortcut', 'SmoothQuant', 'layers in float', 'mean cosine', 'smallest')]
    for shortcut, smooth, max_error in WAYS:
        name = f'{"repa_" if shortcut else ""}swin_{args.arch}_in1k.py'
        model = build_model(load_config(repa_mm.config_path(name))).backbone
        trace_any_size(model)
        if shortcut:
            calibrate_batch_norm(model, [torch.cat(tensors)], model)
        model.eval()
        expected = [model(torch.from_numpy(x))[-1].numpy() for x in tests]
        if shortcut:
            model = repa_mm.reparameterize(model, shortcut=shortcut)
        file = io.BytesIO()
        _to_onnx(model, (tensors[0],), file, opset_version=17, input_names=['image'])
        graph = core.read_model(file.getvalue(), b'')
        names = [op.get_friendly_name() for op in graph.get_ops()]
        kept = []
        if max_error < 1:
            errors = sensitivities(model, lambda m, x: [m(x)[-1]], tensors[:2])
            kept = costliest(errors, max_error)
        alphas = nncf.AdvancedSmoothQuantParameters(matmul=0.95 if smooth else -1)
        quantized = nncf.quantize(
            graph,
            nncf.Dataset(images, lambda x: {'image': x}),
            subset_size=len(images),
            model_type=nncf.ModelType.TRANSFORMER,
            ignored_scope=nncf.IgnoredScope(
                names=[op for layer in kept for op in products_of(layer, names)]
            ),
            advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=alphas),
        )
        run = core.compile_model(quantized, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})
        found = [cosine(run(x)[0], y) for x, y in zip(tests, expected)]
        rows.append(
            (
                shortcut or 'vanilla',
                'yes' if smooth else 'no',
                str(len(kept)),
                f'{np.mean(found):.4f}',
                f'{min(found):.4f}',
            )
        )
        print(rows[-1], flush=True)
    print('\n'.join(align(rows)))


if __name__ == '__main__':
    main()
