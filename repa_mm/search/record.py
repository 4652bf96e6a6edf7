"""What a search knows, so that a later call need not find it again."""

import hashlib
import json
import os.path as osp
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

import torch

from repa_mm.io.files import write_text
from repa_mm.search.steps import Steps


def hashed(*values: Any) -> str:
    """Return a hash of what values look like."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def hash_of_file(path: str) -> str:
    """Return a hash of a file's content, or the path if it is no file, such as a URL."""
    if not osp.isfile(path):
        return path
    with open(path, 'rb') as file:
        return hashlib.sha256(file.read()).hexdigest()


def environment(device: str) -> dict[str, str]:
    """Return what times and metrics depend on beside the model: processors and versions."""
    cpu, threads = platform.processor(), torch.get_num_threads()
    with suppress(OSError), open('/proc/cpuinfo', encoding='utf-8') as file:
        cpu = next((x.split(': ')[1].strip() for x in file if x.startswith('model name')), cpu)
    found = dict(CPU=f'{cpu} ({torch.backends.cpu.get_cpu_capability()}, {threads} threads)')
    if torch.device(device).type == 'cuda':
        found['GPU'] = torch.cuda.get_device_name(device)
    versions = {str(x.name): x.version for x in metadata.distributions()}
    names = '(onedl-)?mm(engine|cv|det|seg|pre).*|torch(vision)?|onnx(runtime.*)?|openvino|nncf'
    versions = {name: versions[name] for name in sorted(versions) if re.fullmatch(names, name)}
    return found | dict(Python=platform.python_version()) | versions


class Record:
    """The content of ``results.json``: the last table, and by their names all ``known`` values.

    If any of the files that values name is not what was written, or in another
    :func:`environment` than ``here``, nothing counts as known. ``fingerprint`` is a hash of what
    every value depends on.

    Attributes:
        notes (list[str]): What the reader of the table should know.
        steps (Steps): Find what is not known.

    Raises:
        ValueError: If the folder has the results of something else.
    """

    def __init__(self, out_dir: str, fingerprint: str, here: dict[str, str]) -> None:
        self.out_dir, self.path = out_dir, osp.join(out_dir, 'results.json')
        self.notes, self.steps = [], Steps()
        self.content = dict(fingerprint=fingerprint, environment=here, known={}, metric='')
        if osp.exists(self.path):
            with open(self.path, encoding='utf-8') as file:
                content = json.load(file)
            if content['fingerprint'] != fingerprint:
                raise ValueError(
                    f'{out_dir!r} has the results of another model, of other data or of other '
                    'options: give another folder'
                )
            before, files = content.get('environment', {}), content['known'].values()
            changed = [name for name in before | here if before.get(name) != here.get(name)]
            files = [value.get('files', {}) for value in files]
            if changed:
                pairs = (f'{x} {here.get(x)} instead of {before.get(x)}' for x in changed)
                print(f'starting anew in {out_dir}: {", ".join(pairs)}')
            elif all(found == self.hashes(found) for found in files):
                self.content = content
        elif any(osp.exists(osp.join(out_dir, name)) for name in ('model.py', 'model.pth')):
            raise ValueError(
                f'{out_dir!r} has a model.py or model.pth of something else: give another folder'
            )

    def hashes(self, names: Sequence[str]) -> dict[str, str]:
        """Return by their names inside the folder the hashes of files."""
        return {name: hash_of_file(osp.join(self.out_dir, name)) for name in names}

    def find(self, what: str, do: Callable[..., dict], *args, mark: str = '') -> dict:
        """Return what is known, or else find it in a step and keep it, unless that raises.

        ``mark`` is a part of the value's name that is not printed.
        """
        known, name = self.content['known'], what + mark
        if name not in known:
            known[name] = self.steps.run(what, do, *args)
            self.save()
        return known[name]

    @contextmanager
    def optional(self, what: str) -> Iterator[None]:
        """Go on if something fails, and note it: the next call tries it again."""
        try:
            yield
        except Exception as error:  # from any runtime
            self.notes.append(f'{what} is left out: {error!r}')

    def save(self) -> None:
        """Write ``results.json``."""
        write_text(self.path, json.dumps(self.content, indent=1))
