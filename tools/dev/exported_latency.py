"""Latency of exported models beside a model in eager PyTorch, in one run.

All take turns with test_step on the same batches: preprocessing, network, post-processing.

    python tools/dev/exported_latency.py configs/retinanet_swin_b.py --size 800x1344 \
        deploy.onnx deploy.onnx:openvino int8.xml int8.xml:bf16
"""

import argparse
import os
import statistics
import tempfile
import time

import torch

from repa_mm.benchmark.inputs import DatasetInputs, NoiseInputs, parse_size
from repa_mm.benchmark.variants import build_model
from repa_mm.export.exported import ExportedModel
from repa_mm.run import load_config
from repa_mm.run.cli import align, clear_errors


def exported(name: str, cfg, folder: str) -> ExportedModel:
    """A model of FILE, FILE:f32, FILE:bf16, FILE:openvino or FILE:openvino-bf16."""
    file, _, how = name.partition(':')
    if how.startswith('openvino'):  # an ONNX file in OpenVINO
        import openvino

        from repa_mm.export.session import Session

        model = openvino.convert_model(file)
        for key, value in Session(file).metadata.items():
            model.set_rt_info(value, ['repa_mm', key])
        file = os.path.join(folder, f'{len(os.listdir(folder))}.xml')
        openvino.save_model(model, file, compress_to_fp16=False)
        how = how.partition('-')[2] or 'f32'
    return ExportedModel(file, cfg.model.get('data_preprocessor'), how or None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='of the model in eager PyTorch, the one to compare with')
    parser.add_argument('files', nargs='+', help='FILE[:f32|bf16|openvino|openvino-bf16]')
    parser.add_argument('--checkpoint', help='of the config; random weights if left out')
    parser.add_argument('--size', default='800x1344', help='of noise (default: 800x1344)')
    parser.add_argument('--images', action='store_true', help="the config's test data instead")
    parser.add_argument('--batch-size', type=int, default=1)
    parser.add_argument('--turns', type=int, default=7)
    parser.add_argument('--threads', type=int, help='of PyTorch')
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with clear_errors(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        cfg = load_config(args.config)
        if args.images:
            inputs = DatasetInputs(cfg, args.batch_size)
        else:
            inputs = NoiseInputs(cfg, parse_size(args.size), args.batch_size)
        models = {f'{args.config}, eager': build_model(cfg, args.checkpoint)}
        models.update((name, exported(name, cfg, folder)) for name in args.files)
        times = {name: [] for name in models}
        for turn in range(args.turns + 1):
            for name, model in models.items():
                data = inputs(turn)
                start = time.perf_counter()
                model.test_step(data)
                if turn:  # the first is a warm-up
                    times[name].append(time.perf_counter() - start)
        first = None
        rows = [('model', 'ms', 'fastest', 'images/s', 'times as fast')]
        for name, values in times.items():
            median = statistics.median(values)
            first = first or median
            rows.append(
                (
                    name,
                    f'{median * 1e3:.0f}',
                    f'{min(values) * 1e3:.0f}',
                    f'{args.batch_size / median:.2f}',
                    f'{first / median:.2f}',
                )
            )
        print(f'{inputs.describe()}, {torch.get_num_threads()} threads, {args.turns} turns')
        print('\n'.join(align(rows)))


if __name__ == '__main__':
    main()
