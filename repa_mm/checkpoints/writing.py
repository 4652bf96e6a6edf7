"""Writing checkpoints."""

import torch

from repa_mm.files import replacing


def save_checkpoint(checkpoint: dict, path: str) -> None:
    """``torch.save`` that never leaves a half-written file at ``path``."""
    with replacing(path) as temporary:
        try:
            torch.save(checkpoint, temporary)
        except RuntimeError as error:
            # torch's writer does not say why.
            raise OSError(
                f'cannot write {path!r}: is the disk full? ({str(error)[-100:]})'
            ) from error
