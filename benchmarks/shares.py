r"""The shares of FFNs in the time of a backbone, or of a detector's parts in its time.

Weights are random, images are noise::

    python -m benchmarks.shares configs/repa_swin_b_in1k.py --baseline configs/swin_b_in1k.py \
        --part backbone --input-shape 224 224
    python -m benchmarks.shares configs/detr/dino-4scale_repa-r50.py \
        --baseline mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py
"""

import argparse
import time
from collections.abc import Callable
from fnmatch import fnmatchcase

import numpy as np
import torch
import torch.nn as nn
from mmengine.logging import MMLogger

from repa_mm.benchmark.timing import measure, show, show_machine, synchronize
from repa_mm.benchmark.variants import calls_on_noise, variants
from repa_mm.io.configs import load_config

# Names in a block of a MetaFormer: the token mixer; the FFN and the norm before it.
TOKEN_MIXERS = {'attn', 'token_mixer', 'token_mix'}
FFNS = {'ffn', 'channel_mix', 'mlp', 'norm2', 'ln2'}
# The parts of a detector, by patterns of their names. What is left computes queries and boxes.
PARTS = {
    'backbone': 'backbone',
    'neck': 'neck',
    "encoder's attention": 'encoder.layers.*.self_attn',
    "encoder's FFNs": 'encoder.layers.*.ffn',
    'decoder': 'decoder',
    'head': 'bbox_head',
}


def ffn_modules(backbone: nn.Module) -> list[nn.Module]:
    """Return the FFNs of a MetaFormer backbone, and the norms before them.

    Raises:
        ValueError: If the backbone has no blocks of a token mixer and an FFN.
    """
    found = []
    for block in backbone.modules():
        children = dict(block.named_children())
        if TOKEN_MIXERS & set(children):
            found += [child for name, child in children.items() if name in FFNS]
    if not found:
        raise ValueError(f'{type(backbone).__name__} has no blocks of a token mixer and an FFN')
    return found


def detector_parts(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules of a detector's :data:`PARTS`, of those that it has."""
    found = {
        part: [m for name, m in model.named_modules() if fnmatchcase(name, pattern)]
        for part, pattern in PARTS.items()
    }
    return {part: modules for part, modules in found.items() if modules}


def measure_shares(
    calls: dict[str, Callable], parts: dict[str, dict[str, list[nn.Module]]], argument, repeats: int
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Time models in turn, with timers around some of their modules.

    Args:
        calls (dict): Run the models, by name.
        parts (dict): For each of them its modules in eval mode, by the name of their part.
        argument (Any): Of the calls.
        repeats (int): Number of turns. One more before those does not count.

    Returns:
        tuple: For each model its times, and those of its parts, in milliseconds, (repeats, ).
    """
    spent = {name: {part: [] for part in modules} for name, modules in parts.items()}

    def timed(name: str) -> Callable:
        def count(values: list[float], sign: int) -> None:
            synchronize()
            values[-1] += sign * 1e3 * time.perf_counter()

        for part, modules in parts[name].items():
            for module in modules:
                values = spent[name][part]
                module.register_forward_pre_hook(lambda *_, values=values: count(values, -1))
                module.register_forward_hook(lambda *_, values=values: count(values, 1))

        def run(argument) -> None:
            for values in spent[name].values():
                values.append(0.0)
            calls[name](argument)

        return run

    # Every call counts, and only PyTorch runs.
    times = measure({name: timed(name) for name in calls}, argument, repeats, settle=0)
    return times, {
        name: {part: np.array(values[1:]) for part, values in found.items()}
        for name, found in spent.items()
    }


def share_rows(
    times: dict[str, np.ndarray], spent: dict[str, dict[str, np.ndarray]]
) -> list[list[str]]:
    """Return rows of model, part, milliseconds, and the share in those of the model."""
    return [
        [f'{name}, {part}', f'{np.median(values):.1f}', f'{np.median(values / times[name]):.1%}']
        for name, parts in spent.items()
        for part, values in {'all': times[name], **parts}.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a benchmark of two configs to its command line."""
    parser.add_argument('--baseline', metavar='CONFIG', help='of the stock model')
    parser.add_argument(
        '--part', choices=('model', 'backbone'), default='model', help='%(default)s'
    )
    parser.add_argument(
        '--input-shape', type=int, nargs=2, default=[800, 1344], help='of images (800 1344)'
    )
    parser.add_argument('--batch-size', type=int, default=1, help='%(default)s')
    parser.add_argument('--repeats', type=int, default=10, help='number of turns (%(default)s)')


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config')
    add_arguments(parser)
    args = parser.parse_args()
    show_machine()
    MMLogger.get_current_instance().setLevel('WARNING')
    cfg = load_config(args.config)
    models = variants(cfg, baseline=load_config(args.baseline) if args.baseline else None)
    shape = tuple(args.input_shape)
    calls, argument = calls_on_noise(models, args.part, shape, args.batch_size)
    if args.part == 'backbone':
        parts = {name: {'FFNs': ffn_modules(call)} for name, call in calls.items()}
    else:
        parts = {name: detector_parts(model) for name, model in models.items()}
    rows = share_rows(*measure_shares(calls, parts, argument, args.repeats))
    show(f'{args.config}, medians of {args.repeats} turns', ('part', 'ms', 'share'), rows)


if __name__ == '__main__':
    main()
