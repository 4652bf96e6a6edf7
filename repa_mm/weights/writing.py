"""Writing checkpoints."""

import io

import torch

from repa_mm.files import write_bytes


def save_checkpoint(checkpoint: dict, path: str) -> None:
    """``torch.save`` that never leaves a half-written file at ``path``.

    Raises:
        OSError: If the file cannot be written.
    """
    # In memory first: torch's own writer does not say why it fails, and may end the process.
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    write_bytes(path, buffer.getbuffer())
