"""Checkpoints of a training that may be killed at any moment."""

from contextlib import contextmanager, suppress

from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from repa_mm.files import write_bytes


@register_backend('atomic', force=True)
class AtomicBackend(LocalBackend):
    """Local files that are replaced only by complete ones."""

    def put(self, obj: bytes, filepath: str) -> None:
        write_bytes(filepath, obj)


class _Keeping:
    """A file backend that puts off removing."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.outdated = []

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def remove(self, path: str) -> None:
        self.outdated.append((self.backend.remove, path))

    def rmtree(self, path: str) -> None:
        self.outdated.append((self.backend.rmtree, path))


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """A ``CheckpointHook`` after which there is always a complete checkpoint.

    MMEngine's hook writes into the file itself, and removes the previous checkpoint first: killed
    in between, it leaves none that can be read. This hook writes each file under another name and
    renames it, and removes outdated ones afterwards. Arguments and files are the same. With a file
    backend of the user's own, writing is as safe as that backend is.
    """

    def before_train(self, runner) -> None:
        if (
            self.backend_args is None
            and self.file_client_args is None
            and '://' not in (self.out_dir or runner.work_dir)
        ):
            self.backend_args = dict(backend='atomic')
        super().before_train(runner)

    @contextmanager
    def _removing_afterwards(self):
        backend = self.file_backend
        self.file_backend = keeping = _Keeping(backend)
        try:
            yield
        finally:
            self.file_backend = backend
        # A file that was written anew under its old name is not outdated.
        current = {
            self.last_ckpt,
            getattr(self, 'best_ckpt_path', None),
            *getattr(self, 'best_ckpt_path_dict', {}).values(),
        }
        for remove, path in keeping.outdated:
            if path not in current:
                with suppress(FileNotFoundError):  # another training in the same folder
                    remove(path)

    def _save_checkpoint_with_step(self, *args, **kwargs) -> None:
        with self._removing_afterwards():
            super()._save_checkpoint_with_step(*args, **kwargs)

    def _save_best_checkpoint(self, *args, **kwargs) -> None:
        with self._removing_afterwards():
            super()._save_best_checkpoint(*args, **kwargs)
