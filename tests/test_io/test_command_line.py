"""What tools print of the hosts and of errors."""

import logging

import pytest
import torch
from mmengine.logging import MMLogger

from repa_mm.io.checkpoints import load_checkpoint
from repa_mm.io.command_line import readable_errors


def test_what_mmengine_logs_is_printed_once(tmp_path):
    logger, said = MMLogger.get_current_instance(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        for _ in range(2):
            with pytest.raises(SystemExit, match='error: no'), readable_errors():
                for name in 'ab':
                    torch.save({}, tmp_path / f'{name}.pth')
                    load_checkpoint(str(tmp_path / f'{name}.pth'))
                raise ValueError('no')
        assert len(said) == 2 and all('a.pth' in text for text in said)
    finally:
        logger.removeHandler(handler)
