"""What a tool that measures does with a result: print it, write it, draw it."""

import json
import os.path as osp
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from repa_mm.benchmark.machine import AMP_DTYPES
from repa_mm.benchmark.timing import interruptible
from repa_mm.files import check_output, replacing
from repa_mm.run.cli import clear_errors


def add_machine_options(parser, amp: bool = False) -> None:
    """Add the options that :func:`~repa_mm.benchmark.machine.set_machine` takes to a parser."""
    parser.add_argument(
        '--device',
        default='cuda' if torch.cuda.is_available() else 'cpu',
        help='cpu, cuda, cuda:1, ... (%(default)s)',
    )
    parser.add_argument('--threads', type=int, help='threads of the CPU')
    parser.add_argument(
        '--tf32', action='store_true', help='let float32 products use TF32 (off by default)'
    )
    if amp:
        parser.add_argument(
            '--amp',
            choices=tuple(AMP_DTYPES),
            help='autocast in the networks; post-processing stays in float32',
        )


def run_tool(
    measure: Callable[..., dict],
    arguments: dict[str, Any],
    text: Callable[[dict], str],
    out: str | None,
    plot: str | None = None,
    draw: Callable[[dict, str], None] | None = None,
    inputs: Sequence[str | None] = (),
) -> None:
    """Measure, print the result and write it; errors end the program with a line.

    ``measure(**arguments)`` is the result, ``text`` makes it readable, and ``draw`` draws it to the
    path ``plot``; ``out`` is the path of a JSON file. Neither may be one of ``inputs``. An
    interrupted measurement that has something to report ends with status 130.
    """
    with clear_errors():
        check_outputs(out, plot, inputs)
        with interruptible():
            result = measure(**arguments)
        print(text(result))
        for path, write in ((out, write_json), (plot, draw)):
            if path:
                write(result, path)
                print(f'wrote {path}')
    if result.get('interrupted'):
        sys.exit(130)


def check_outputs(
    out: str | None = None, plot: str | None = None, inputs: Sequence[str | None] = ()
) -> None:
    """Check, before hours of measuring, that the files can be written.

    A ValueError says that one is an input, that both are the same, or that matplotlib does not know
    the plot's format; other problems are an OSError.
    """
    check_output(out, *inputs)
    check_output(plot, out, *inputs)
    if plot:
        from matplotlib.figure import Figure

        known = Figure().canvas.get_supported_filetypes()
        if osp.splitext(plot)[1][1:].lower() not in known:
            raise ValueError(
                f'--plot {plot!r}: name a file that ends in one of .{", .".join(sorted(known))}'
            )


def write_json(result: dict[str, Any], path: str) -> None:
    """Write a result, all of it or nothing; an OSError if it cannot be written."""
    with replacing(path) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        json.dump(result, file, indent=1, default=str, allow_nan=False)
