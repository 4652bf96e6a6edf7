"""What a search knows, so that a later call need not find it again."""

import hashlib
import json
import os
import os.path as osp
from collections.abc import Callable
from typing import Any

from repa_mm.io.files import write_text

#: Files that belong to a file of the same stem.
BESIDE = {'.pth': '.py', '.xml': '.bin'}


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
    """The content of ``results.json``.

    A value is kept under the name of all that it depends on, besides the fingerprint: 'CANDIDATE'
    or 'CANDIDATE in …'. A value with a ``file``, by its name inside the folder, counts as long as
    the file is what was written; otherwise all of this candidate is found anew. A file may have
    been ``refused``. An export that ``failed`` for a reason that is not ours, such as too little
    memory, is tried again by the next call.

    Args:
        out_dir (str): The folder.
        fingerprint (str): Hash of what every value depends on: the version, the model, and the
            images to fit to.

    Attributes:
        content (dict): ``fits``, ``files`` and ``tests``, by name; and of the last call the
            ``rows`` of its table, and what the table says of itself.

    Raises:
        ValueError: If the folder has the results of something else.
    """

    def __init__(self, out_dir: str, fingerprint: str) -> None:
        self.out_dir, self.path = out_dir, osp.join(out_dir, 'results.json')
        self.content = dict(fingerprint=fingerprint, fits={}, files={}, tests={}, metric='')
        if osp.exists(self.path):
            with open(self.path, encoding='utf-8') as file:
                self.content = json.load(file)
            if self.content['fingerprint'] != fingerprint:
                raise ValueError(
                    f'{out_dir!r} has the results of another model, of other data or of other '
                    'options: give another folder'
                )
            self._forget_changed()
        elif any(osp.exists(osp.join(out_dir, name)) for name in ('model.py', 'model.pth')):
            raise ValueError(
                f'{out_dir!r} has a model.py or model.pth of something else: give another folder'
            )

    def _forget_changed(self) -> None:
        known = [self.content[kind] for kind in ('fits', 'files', 'tests')]
        for name, value in [found for part in known[:2] for found in part.items()]:
            if 'failed' in value:
                self.content['files'].pop(name, None)
            elif 'file' in value and value['hash'] != self._hash(value['file']):
                candidate = value['candidate']
                for part in known:
                    of = [n for n, v in part.items() if v.get('candidate') == candidate]
                    for other in [*of, *(n for n in part if n.startswith(f'{candidate} in '))]:
                        part.pop(other, None)

    def _hash(self, name: str) -> str:
        stem, suffix = osp.splitext(osp.join(self.out_dir, name))
        return hashed(*(content_of(stem + s) for s in (suffix, BESIDE.get(suffix)) if s))

    def find(self, kind: str, name: str, find: Callable[[], Any]) -> Any:
        """Return what is known under a name, or else find it and keep it, unless that raises.

        Args:
            kind (str): 'fits', 'files' or 'tests'.
            name (str): The name.
            find (Callable): Returns a dict of which JSON can be made.
        """
        known = self.content[kind]
        if name not in known:
            known[name] = find()
            if 'file' in known[name]:
                known[name]['hash'] = self._hash(known[name]['file'])
            self.save()
        return known[name]

    def inside(self, value: Any) -> Any:
        """Return the name inside the folder of a path in it, and any other value as it is."""
        folder = osp.join(self.out_dir, '')
        is_path = isinstance(value, str) and value.startswith(folder)
        return value[len(folder) :] if is_path else value

    def movable(self, text: str) -> str:
        """Return the text of a config in the folder that finds files beside it by its own path."""
        folder = osp.join(osp.abspath(self.out_dir), '')
        for name in os.listdir(folder):
            text = text.replace(repr(folder + name), f'"{{{{ fileDirname }}}}/{name}"')
        return text

    def save(self) -> None:
        """Write ``results.json``."""
        write_text(self.path, json.dumps(self.content, indent=1))
