"""Latency and training steps of models, timed in turn in one process.

Of a RePa model the deploy form is measured, beside its vanilla counterpart (--baseline) and the
counterpart with our window attention: the table shows how much of the gain is due to the merge.
Images are noise; without checkpoints, weights are random.
"""

import argparse

import torch
from mmengine.config import DictAction
from mmengine.logging import MMLogger
from rich.progress import track

from repa_mm.benchmark.paper import COLUMNS, measure_pairs, paper_configs
from repa_mm.benchmark.profile import detector_parts, ffn_modules, measure_shares
from repa_mm.benchmark.tables import latency_rows, ratios, share_rows, show, show_machine
from repa_mm.benchmark.timing import measure
from repa_mm.benchmark.training import ENCODER_SHAPE, FFN_SHAPES, Step, measure_ffn
from repa_mm.benchmark.variants import exported, noise, synthetic_batch, training_variants, variants
from repa_mm.config import load_config

EXAMPLES = """examples:
  %(prog)s configs/retinanet_repa_swin_b.py --baseline configs/retinanet_swin_b.py
  %(prog)s configs/repa_swin_b_in1k.py --baseline configs/swin_b_in1k.py \\
      --part backbone --input-shape 224 224 --batch-size 8
  # training steps of a whole model, or of its backbone
  %(prog)s configs/retinanet_repa_swin_b.py --baseline configs/retinanet_swin_b.py --train
  # one FFN alone, of several sizes: deploy form, and training paths
  %(prog)s --part ffn
  # figure 3 of the paper: the share of FFNs in the time of a backbone
  %(prog)s configs/repa_swin_b_in1k.py --baseline configs/swin_b_in1k.py \\
      --part backbone --input-shape 224 224 --shares
  # the paper's table 2 and figure 3, its table 3, its table 4: beside the vanilla counterparts
  %(prog)s --paper
  %(prog)s --paper configs/structures/progressive_{deit,swin}_b_in1k.py
  %(prog)s --paper configs/repa_{deit,swin}_b_in1k.py --idle-ratios 0.25 0.5 0.75 1
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', nargs='?', help='config of the RePa model')
    parser.add_argument('checkpoint', nargs='?', help='its weights, in either form')
    parser.add_argument('--baseline', metavar='CONFIG', help='of the vanilla counterpart')
    parser.add_argument('--baseline-checkpoint', metavar='CHECKPOINT')
    parser.add_argument(
        '--part',
        choices=('predict', 'backbone', 'ffn'),
        default='predict',
        help='the whole model with post-processing, its backbone, or one FFN (%(default)s)',
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument('--train', action='store_true', help='training steps, on synthetic targets')
    mode.add_argument(
        '--shares', action='store_true', help="of FFNs in a backbone, or of a detector's parts"
    )
    mode.add_argument(
        '--paper',
        nargs='*',
        metavar='CONFIG',
        help="parameters, GMACs, latency and the FFNs' share of models beside their vanilla "
        "counterparts: by default, of the paper's 15",
    )
    parser.add_argument(
        '--idle-ratios', type=float, nargs='+', default=[], help='of the models of --paper'
    )
    parser.add_argument(
        '--exported',
        nargs='+',
        default=[],
        metavar='FILE[:TYPE]',
        help='also run exported files: .onnx by ONNX Runtime; .xml, and both with :f32 or :bf16, '
        'by OpenVINO',
    )
    parser.add_argument(
        '--input-shape',
        type=int,
        nargs=2,
        metavar=('HEIGHT', 'WIDTH'),
        help='of images (800 1344; with --paper 224 224)',
    )
    parser.add_argument('--batch-size', type=int, default=1)
    parser.add_argument('--repeats', type=int, default=10, help='to measure (%(default)s)')
    parser.add_argument('--warmup', type=int, default=1, help='before those (%(default)s)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='of the config')
    args = parser.parse_args()
    if args.config is None and args.part != 'ffn' and args.paper is None:
        parser.error('a config is missing')
    usual = (800, 1344) if args.paper is None else (224, 224)
    args.input_shape = tuple(args.input_shape or usual)
    return args


def benchmark_paper(args: argparse.Namespace, size: str) -> None:
    images = noise(args.input_shape, args.batch_size).to(args.device)
    rows = []
    for config in track(args.paper or paper_configs()):
        cfg = load_config(config, args.cfg_options)
        rows += measure_pairs(cfg, args.idle_ratios, images, args.repeats, args.warmup)
    title = f'vanilla / training form / deploy form, {size}, medians of {args.repeats} turns [95 %]'
    show(title, COLUMNS, rows)


def benchmark_ffn(args: argparse.Namespace) -> None:
    columns = 'N, C', 'deploy', 'training: literal', 'folded', 'auto'
    rows = []
    for shape in (*FFN_SHAPES, ENCODER_SHAPE):
        encoder = shape == ENCODER_SHAPE
        times = measure_ffn(*shape, args.repeats, args.warmup, args.device, encoder)
        found = {**ratios(times[0]), **ratios(times[1])}
        rows.append(['{}, {}'.format(*shape) + ' (DETR)' * encoder])
        rows[-1] += [found[name] for name in ('deploy', 'literal', 'folded', 'auto')]
    show('Time of one FFN, ratio to an ordinary one', columns, rows)


def benchmark_training(args: argparse.Namespace, cfg, baseline, title: str) -> None:
    models = training_variants(cfg, baseline)
    whole = args.part == 'predict'
    steps = {
        name: Step((model if whole else model.backbone).to(args.device), whole)
        for name, model in models.items()
    }
    if whole:
        batch = synthetic_batch(cfg, args.input_shape, args.batch_size)
        batch = next(iter(models.values())).data_preprocessor(batch, True)
    else:
        batch = noise(args.input_shape, args.batch_size).to(args.device)
    times = measure(steps, batch, args.repeats, args.warmup)
    rows = [[*row[:4], ''] for row in latency_rows(times, args.batch_size)]
    for row in rows:
        peak = steps[row[0]].peak_mib
        row[4] = '' if peak is None else f'{peak:.0f}'
    show(title, ('training step', 'ms', 'images/s', 'change', 'peak memory, MiB'), rows)


@torch.no_grad()
def benchmark_latency(args: argparse.Namespace, cfg, baseline, title: str) -> None:
    models = variants(cfg, args.checkpoint, baseline, args.baseline_checkpoint)
    models = {name: model.to(args.device) for name, model in models.items()}
    images = noise(args.input_shape, args.batch_size).to(args.device)
    backbones = {name: model.backbone for name, model in models.items()}
    if args.part == 'backbone':
        calls, argument = backbones, images
    else:
        batch = synthetic_batch(cfg, args.input_shape, args.batch_size)
        argument = next(iter(models.values())).data_preprocessor(batch)
        calls = {
            name: lambda batch, model=model: model(**batch, mode='predict')
            for name, model in models.items()
        }
    if args.shares:
        if args.part == 'backbone':
            parts = {name: {'FFNs': ffn_modules(model)} for name, model in backbones.items()}
        else:
            parts = {name: detector_parts(model) for name, model in models.items()}
        rows = share_rows(*measure_shares(calls, parts, argument, args.repeats, args.warmup))
        return show(title, ('part', 'ms', 'share'), rows)
    for file in args.exported:
        calls[file] = exported(file, args.input_shape, args.batch_size)
    rows = latency_rows(measure(calls, argument, args.repeats, args.warmup), args.batch_size)
    show(title, ('model', 'ms', 'images/s', 'against stock', 'by the merge'), rows)


def main() -> None:
    args = parse_args()
    show_machine()
    if args.part == 'ffn':
        return benchmark_ffn(args)
    MMLogger.get_current_instance().setLevel('WARNING')  # of where each weight is from
    size = 'x'.join(map(str, (args.batch_size, 3, *args.input_shape)))
    if args.paper is not None:
        return benchmark_paper(args, size)
    cfg = load_config(args.config, args.cfg_options)
    baseline = load_config(args.baseline) if args.baseline else None
    title = f'{args.config}, {args.part}, {size}, medians of {args.repeats} turns [95 %]'
    run = benchmark_training if args.train else benchmark_latency
    run(args, cfg, baseline, title)


if __name__ == '__main__':
    main()
