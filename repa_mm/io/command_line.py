"""What the command lines of ``tools/`` share."""

import argparse
import logging
import os.path as osp
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mmengine.config import DictAction
from mmengine.logging import MMLogger

from repa_mm.io.configs import load_config
from repa_mm.io.paths import config_root
from repa_mm.reparam import CheckpointError


def tool_parser(description: str, **options) -> argparse.ArgumentParser:
    """Return the parser of a tool, with the arguments ``config`` and ``--cfg-options``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )
    parser.add_argument('config', help="the model's config: a path, or mmdet::swin/….py")
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, help='override the config: key=value ...'
    )
    return parser


@contextmanager
def readable_errors() -> Iterator[None]:
    """End a tool with a message instead of a traceback if a file or a value is wrong.

    What MMEngine logs, such as where weights come from, is printed once.
    """
    logger, seen = MMLogger.get_current_instance(), set()

    def is_new(record: logging.LogRecord) -> bool:
        what = record.getMessage().partition(':')[0]
        return not (what in seen or seen.add(what))

    logger.addFilter(is_new)
    try:
        yield
    except (ValueError, OSError, CheckpointError) as error:
        sys.exit(f'error: {error}')
    finally:
        logger.removeFilter(is_new)


def codebase_tool(arguments: Sequence[str], name: str) -> str | None:
    """Return the path of a codebase's tool, 'train.py' or 'test.py', None without a config.

    The first of the command-line arguments that ends with '.py' is the config; options may precede
    it.
    """
    for argument in arguments:
        if argument.endswith('.py') and not argument.startswith('-'):
            scope = load_config(argument).default_scope
            return osp.join(osp.dirname(config_root(scope)), 'tools', name)
    return None


def run_codebase_tool(name: str, usage: str) -> None:
    """Run a codebase's tool as this command, or print the usage if no config is given."""
    tool = codebase_tool(sys.argv[1:], name)
    if tool is None:
        print(usage)
        sys.exit(0 if {'-h', '--help'} & {*sys.argv} else 2)
    runpy.run_path(tool, run_name='__main__')
