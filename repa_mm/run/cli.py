"""What the command lines share: options, errors in one line, and aligned tables."""

import argparse
import logging
import os
import os.path as osp
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mmengine import config

from repa_mm.reparam import CheckpointError

# Errors of these types are raised with a sentence for people; of others the type is shown, too.
_PLAIN = (CheckpointError, OSError, ValueError)
_LONGEST = 600


class DictAction(config.DictAction):
    """MMEngine's ``--cfg-options key=value ...``; an argument of another form is a usage error.

    A value that is no list may have spaces, as paths do.
    """

    def __call__(self, parser, namespace, values, option_string=None):
        for pair in values:
            key, equals, value = pair.partition('=')
            if not equals or not all(key.split('.')):
                raise argparse.ArgumentError(self, f'{pair!r} is not of the form key=value')
            value = value.strip()
            if ' ' in value and ',' not in value and value[0] not in '([':
                options = dict(getattr(namespace, self.dest) or {})
                setattr(namespace, self.dest, {**options, key: value})
                continue
            try:
                super().__call__(parser, namespace, [pair], option_string)
            except Exception as error:
                reason = str(error) or type(error).__name__
                raise argparse.ArgumentError(
                    self, f'{pair!r} has no value that can be read ({reason})'
                ) from error


def tool_parser(doc: str, examples: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a tool, and its examples."""
    return argparse.ArgumentParser(
        description=doc, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def show_progress(what: str, done: int, total: int, unit: str) -> None:
    """Count in one line of a terminal; elsewhere only tell the end."""
    end = '\n' if done == total else '\r'
    if sys.stderr.isatty() or done == total:
        print(f'{what}: {done} of {total} {unit}', end=end, file=sys.stderr, flush=True)


def add_cfg_options(parser) -> None:
    """Add the option ``--cfg-options`` to a parser or a group of its options."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        help='override values of the config: key=value ...',
    )


def parse_runner_args(parser: argparse.ArgumentParser) -> dict:
    """Parse the command line of a tool with a Runner; return the arguments by name.

    The function adds the options that all such tools have: ``--cfg-options``, ``--launcher``, and
    ``--local-rank``, which launchers before torchrun pass and which becomes LOCAL_RANK.
    """
    add_cfg_options(parser)
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)
    args = vars(parser.parse_args())
    os.environ.setdefault('LOCAL_RANK', str(args.pop('local_rank')))
    return args


def _exit(signum, frame):
    # sys.exit raises an exception, so that temporary files are removed.
    sys.exit(128 + signum)


def one_line(error: BaseException) -> str:
    """The text of an error, in one line of moderate length."""
    lines = str(error).splitlines()
    # Errors of a DataLoader's worker arrive with its whole trace.
    files = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    if files and 'Traceback' in str(error):
        lines = [line for line in lines[files[-1] + 1 :] if not line.startswith('  ')]
        name, _, rest = (lines or ['']).pop(0).partition(': ')
        plain = {kind.__name__ for kind in _PLAIN}
        lines.insert(0, rest if name in plain else f'{name}: {rest}')
        known = True
    else:
        known = isinstance(error, _PLAIN) and bool(str(error))
    text = ' '.join(' '.join(lines).split())
    if len(text) > _LONGEST:
        text = f'{text[:_LONGEST]} ...'
    if not known:
        text = ': '.join(filter(None, (type(error).__name__, text)))
        frames = traceback.extract_tb(error.__traceback__)
        if frames and not isinstance(error, ImportError):
            text += f' in {osp.basename(frames[-1].filename)}, line {frames[-1].lineno}'
    return text


@contextmanager
def clear_errors(*kinds: type, logger: logging.Logger | None = None) -> Iterator[None]:
    """End the program with one line instead of a stack trace.

    Args:
        *kinds: The exceptions that are caught. Defaults to all.
        logger (logging.Logger, optional): The stack trace goes to the files of this logger.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    # Otherwise logging prints a stack trace for every line that it cannot write to a log file.
    raises, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except kinds or Exception as error:  # noqa: B030, a tuple of classes
        # While MMEngine formats a config, it turns a KeyboardInterrupt into an error of its own.
        if isinstance(error.__context__, KeyboardInterrupt):
            sys.exit(128 + signal.SIGINT)
        if os.environ.get('REPA_MM_TRACEBACK'):
            raise
        for handler in getattr(logger, 'handlers', ()):
            if isinstance(handler, logging.FileHandler):
                args = logger.name, logging.ERROR, __file__, 0, 'stopped', (), sys.exc_info()
                handler.handle(logger.makeRecord(*args))
        sys.exit(f'error: {one_line(error)} (REPA_MM_TRACEBACK=1 shows where)')
    finally:
        logging.raiseExceptions = raises
        signal.signal(signal.SIGTERM, before)


def align(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows of a table as lines of text, with columns of equal width.

    The first ``left`` columns are aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for cells in rows:
        cells = [
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))
        ]
        lines.append('   '.join(cells).rstrip())
    return lines
