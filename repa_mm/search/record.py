"""What a search knows, so that a later call need not find it again."""

import json
import os.path as osp
from collections.abc import Callable
from typing import Any

from repa_mm.files import write_text


class Record:
    """The content of ``results.json``.

    A value is kept under the name of all that it depends on, besides the fingerprint. A file has
    its ``path``, or why it is ``refused``. An export that ``failed`` for a reason that is not ours,
    such as too little memory, is tried again by the next call.

    Args:
        out_dir (str): The folder.
        fingerprint (str): Hash of what every value depends on: the version, the model, and the
            images to fit to.

    Attributes:
        content (dict): ``fits`` (the budgets that are left), ``files`` and ``tests``, by name; and
            of the last call the ``rows`` of its table, and what the table says of itself.

    Raises:
        ValueError: If the folder has the results of something else.
    """

    def __init__(self, out_dir: str, fingerprint: str) -> None:
        self.path = osp.join(out_dir, 'results.json')
        self.content = dict(fingerprint=fingerprint, fits={}, files={}, tests={}, metric='')
        if osp.exists(self.path):
            with open(self.path, encoding='utf-8') as file:
                self.content = json.load(file)
            if self.content['fingerprint'] != fingerprint:
                raise ValueError(
                    f'{out_dir!r} has the results of another model, of other data or of other '
                    'options: give another folder'
                )
            files = self.content['files']
            self.content['files'] = {k: file for k, file in files.items() if 'failed' not in file}
        elif any(osp.exists(osp.join(out_dir, name)) for name in ('model.py', 'model.pth')):
            raise ValueError(
                f'{out_dir!r} has a model.py or model.pth of something else: give another folder'
            )

    def find(self, kind: str, name: str, find: Callable[[], Any]) -> Any:
        """Return what is known under a name, or else find it and keep it, unless that raises.

        Args:
            kind (str): 'fits', 'files' or 'tests'.
            name (str): The name.
            find (Callable): Returns something of which JSON can be made.
        """
        known = self.content[kind]
        if name not in known:
            known[name] = find()
            self.save()
        return known[name]

    def save(self) -> None:
        """Write ``results.json``."""
        write_text(self.path, json.dumps(self.content, indent=1))
