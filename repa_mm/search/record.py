"""What a search knows, so that a later call need not find it again."""

import hashlib
import json
import os.path as osp
from collections.abc import Callable, Sequence
from typing import Any

from repa_mm.io.files import write_text


def content_of(path: str) -> bytes | str:
    """Return the bytes of a file, or the path if it is none, such as a URL."""
    if not osp.isfile(path):
        return path
    with open(path, 'rb') as file:
        return file.read()


def hashed(*values: Any) -> str:
    """Return a hash of values of which JSON can be made, or of the bytes among them."""
    found = hashlib.sha256()
    for value in values:
        if not isinstance(value, bytes):
            value = json.dumps(value, sort_keys=True, default=_plain).encode()
        found.update(value)
    return found.hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, 'tolist') else str(value)


class Record:
    """The content of ``results.json``: the last table, and by their names all ``known`` values.

    A value with ``files``, by their names inside the folder, has their hash. If any file is not
    what was written, nothing counts as known. An ``error`` counts for one call alone: other images
    or more memory may help.

    Args:
        out_dir (str): The folder.
        fingerprint (str): Hash of what every value depends on.

    Raises:
        ValueError: If the folder has the results of something else.
    """

    def __init__(self, out_dir: str, fingerprint: str) -> None:
        self.out_dir, self.path = out_dir, osp.join(out_dir, 'results.json')
        self.content = dict(fingerprint=fingerprint, known={}, metric='')
        if osp.exists(self.path):
            with open(self.path, encoding='utf-8') as file:
                content = json.load(file)
            if content['fingerprint'] != fingerprint:
                raise ValueError(
                    f'{out_dir!r} has the results of another model, of other data or of other '
                    'options: give another folder'
                )
            known = {k: v for k, v in content['known'].items() if 'error' not in v}
            if all(v['hash'] == self._hash(v['files']) for v in known.values() if 'files' in v):
                self.content = dict(content, known=known)
        elif any(osp.exists(osp.join(out_dir, name)) for name in ('model.py', 'model.pth')):
            raise ValueError(
                f'{out_dir!r} has a model.py or model.pth of something else: give another folder'
            )
        self.known = self.content['known']

    def _hash(self, files: Sequence[str]) -> str:
        return hashed(*(content_of(osp.join(self.out_dir, name)) for name in files))

    def find(self, name: str, find: Callable[[], dict]) -> dict:
        """Return what is known under a name, or else find it and keep it, unless that raises."""
        if name not in self.known:
            value = find()
            if 'files' in value:
                value['hash'] = self._hash(value['files'])
            self.known[name] = value
            self.save()
        return self.known[name]

    def inside(self, value: Any) -> Any:
        """Return the name inside the folder of a path in it, and any other value as it is."""
        folder = osp.join(self.out_dir, '')
        return value.removeprefix(folder) if isinstance(value, str) else value

    def save(self) -> None:
        """Write ``results.json``."""
        write_text(self.path, json.dumps(self.content, indent=1))
