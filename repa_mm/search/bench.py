"""What is found of each candidate: its fit, its files, and for each format a time and a test."""

import io
import os
import os.path as osp
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from mmengine.logging import MMLogger

from repa_mm.apis import open_model
from repa_mm.apis.images import cropped
from repa_mm.benchmark.memory import peak_memory
from repa_mm.benchmark.timing import compare, measure
from repa_mm.convert import Conversion
from repa_mm.convert.pretrained import conversion_of, save_model
from repa_mm.export import NUM_IMAGES, ExportedModel, agreeing_onnx, quantize
from repa_mm.faster import faster_on_gpu_
from repa_mm.io.files import write_bytes
from repa_mm.search.candidates import Candidate, percent
from repa_mm.search.choice import meets
from repa_mm.search.formats import (
    EAGER,
    FORMATS,
    INT8,
    Padded,
    divisor_for,
    in_format_,
    installed_formats,
)
from repa_mm.search.judge import Judge, Score
from repa_mm.search.record import Record

#: Seconds after which the timing of a row begins no more turns.
MOST_SECONDS = 40
#: An image of a large model takes as many seconds. Its few turns are of one image, to compile for
#: a size in none of them, and quantizing it needed 16 GB and did not finish.
SLOW_SECONDS = 20
#: What a test finds.
FOUND = 'metric', 'difference', 'interval', 'method', 'tested_in'


@dataclass
class Bench:
    """Opens candidates one at a time beside the original, and finds what is not known of them.

    Attributes:
        stock (Candidate): The original.
        base (Candidate): The same with faster parts, if there are any, which is narrowed.
        checkpoint (str): The checkpoint that was given, whose ``meta`` stays.
        record (Record): What is known.
        judge (Judge): Has the images, and tests models.
        device (str): Where models run.
        is_tested (bool): Test models.
        repeats (int): Number of turns of the timing.
        batch_size (int): Number of images that are timed together.
        calibration (Callable): Returns the images to fit to, and to calibrate int8 on.
        candidates (dict[str, Candidate]): Those of the rows, by name.
        notes (list[str]): What the reader of the table should know.
    """

    stock: Candidate
    base: Candidate
    checkpoint: str
    record: Record
    judge: Judge
    device: str
    is_tested: bool
    repeats: int
    batch_size: int
    calibration: Callable[[], list[dict]]

    def __post_init__(self) -> None:
        self.candidates, self.steps, self.divisor = {self.stock.name: self.stock}, 0, None
        self.stock_times, self._last = [], (None, None, None)
        self.formats, self.notes = installed_formats(self.device)
        self.timed = self.judge.images(self.repeats, self.batch_size)
        begin = time.monotonic()
        with quiet(), torch.no_grad():
            self.original, self.memory = self._open(self.stock, EAGER, '')
        if time.monotonic() - begin > SLOW_SECONDS:
            by_size = sorted(self.timed, key=lambda data: sum(x.numel() for x in data['inputs']))
            self.timed = [by_size[len(by_size) // 2]]
            if INT8 in self.formats:
                self.formats.remove(INT8)
                self._note(f'{INT8} is left out: an image takes more than {SLOW_SECONDS} s')
        self.sizes = {tuple(image.shape[-2:]) for data in self.timed for image in data['inputs']}
        if self.original.cfg.default_scope == 'mmdet':
            self.divisor = divisor_for(self.sizes)
        padded = [f'{kind}, padded' for kind in self.formats if self.divisor]
        self.formats += [kind for kind in padded if kind in FORMATS]

    def _step(self, what: str, do: Callable, *args) -> Any:
        """Say what is done, and hide what others print meanwhile."""
        self.steps += 1
        print(f'[{self.steps}] {what}', flush=True)
        with quiet(), torch.no_grad():
            return do(*args)

    def _find(self, kind: str, name: str, what: str, do: Callable, *args) -> dict:
        """Return what is known under a name, or find it in a step."""
        return self.record.find(kind, name, lambda: self._step(what, do, *args))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def wide_to_narrow(self, budgets: Sequence[float]) -> Iterator[Candidate]:
        """Yield the originals and the narrower models. A fit that fails is left out."""
        yield self.stock
        if self.base is not self.stock:
            yield self.candidates.setdefault(self.base.name, self.base)
        for budget in sorted({max(0.01, round(b, 2)) for b in budgets}, reverse=True):
            name = f'{percent(budget)} of the blocks'
            try:
                fit = self._find('fits', name, f'fit {name}', self._fit, budget)
            except (ValueError, ArithmeticError, RuntimeError) as error:  # others are tried still
                self._note(f'{name} is left out: {error}')
                continue
            path = osp.join(self.record.out_dir, fit['file'])
            config, left = f'{osp.splitext(path)[0]}.py', fit['budget']
            narrow = Candidate(percent(left), config, path, left)
            if narrow.name not in self.candidates:  # sizes have a least
                yield self.candidates.setdefault(narrow.name, narrow)

    @cached_property
    def _conversion(self) -> Conversion:
        """What every budget needs: the parts, and what a loss of each costs."""
        model = open_model(self.base.config, self.base.checkpoint).to(self.device)
        return conversion_of(model, self.calibration())

    def _fit(self, budget: float) -> dict:
        narrow, report = self._conversion.fit(self._conversion.sizes(budget))
        left = max(budget, round(report.fraction, 2))
        file = f'candidates/{100 * left:.0f}.pth'
        if not any(fit['file'] == file for fit in self.record.content['fits'].values()):
            save_model(narrow, self.checkpoint, osp.join(self.record.out_dir, file))
        return dict(budget=left, file=file, candidate=percent(left))

    def _file(self, candidate: Candidate, kind: str) -> str | None:
        """Return the path of the file of a format; '' if it needs none, None if there is none."""
        suffix = FORMATS[kind].file
        if not suffix:
            return ''
        name = f'{candidate.name} in {suffix.split(".")[-1]}'
        found = self._find('files', name, f'write {name}', self._export, candidate, suffix)
        if 'file' in found:
            return osp.join(self.record.out_dir, found['file'])
        self._note(f'{name} is left out: {found.get("refused") or found["failed"]}')
        return None

    def _export(self, candidate: Candidate, suffix: str) -> dict:
        path = osp.splitext(candidate.config)[0] + suffix
        try:
            model = open_model(candidate.config, candidate.checkpoint)
            export(model, path, self.calibration, self.judge)
        except ValueError as error:
            return dict(refused=str(error))
        except Exception as error:  # from any exporter: other formats are measured still
            return dict(failed=repr(error))
        return dict(file=self.record.inside(path), candidate=candidate.name)

    def open(self, candidate: Candidate, kind: str) -> nn.Module:
        """Return a candidate in a format. The one before, except the original, is closed."""
        if candidate is self.stock and kind == EAGER:
            return self.original
        if self._last[0] != (candidate.name, kind):
            self._last, path = (None, None, None), self._file(candidate, kind)
            with quiet(), torch.no_grad():
                self._last = (candidate.name, kind), *self._open(candidate, kind, path)
        return self._last[1]

    def _open(self, candidate: Candidate, kind: str, path: str) -> tuple[nn.Module, float | None]:
        """Return a model that has run one image, at which compilers compile, and its memory."""
        form, first = FORMATS[kind], self.judge.images(1)[0]

        def opened() -> nn.Module:
            if path:
                model = ExportedModel(path, self.original.data_preprocessor, form.runtime)
                model = Padded(model, self.divisor) if form.padded else model
            else:
                model = open_model(candidate.config, candidate.checkpoint).to(self.device)
                if candidate is not self.stock and next(model.parameters()).is_cuda:
                    model = faster_on_gpu_(model)
                model = in_format_(model, form)
            model.test_step(first)
            return model

        if path:  # a runtime's own code is no part of a model's memory
            import_module(
                'onnxruntime' if form.file == '.onnx' and not form.runtime else 'openvino'
            )
        return peak_memory(opened, self.device)

    def rows(self, candidate: Candidate, int8: bool, floor: float | None) -> list[dict]:
        """Return the rows of a candidate in its formats of floats, or in int8.

        With a floor, the tests end with that of the fastest format that keeps it.
        """
        kinds = [kind for kind in self.formats if ('int8' in FORMATS[kind].file) == int8]
        if candidate is self.stock:  # files are of the same model with faster parts
            has_files = self.base is self.stock
            kinds = [k for k in kinds if k != EAGER and (has_files or not FORMATS[k].file)]
        found = []
        for kind in kinds:
            path = self._file(candidate, kind)
            if path is None:
                continue
            try:
                what = f'time {candidate.name}, {kind}'
                found.append(self._step(what, self._row, candidate, kind, path))
            except Exception as error:  # from any runtime
                if kind == EAGER:
                    raise
                self._note(f'{candidate.name} in {kind} is left out: {error!r}')
        for row in sorted(found, key=lambda row: -row['speedup']):
            row.update(self.test(candidate, row['format']))
            if floor is not None and meets(row, floor):
                break
        for row in found:  # the formats of float32 share one test
            row.update(self._tested(candidate, row['format']))
        return found

    def _row(self, candidate: Candidate, kind: str, path: str) -> dict:
        model = self.open(candidate, kind)
        times = self._time(stock=self.original, model=model)
        self.stock_times.append(times['stock'])
        memory = self._last[2]
        return row_of(candidate, kind, model, path, memory, times['model'], times['stock'])

    def _time(self, **models: nn.Module) -> dict[str, np.ndarray]:
        calls = {name: model.test_step for name, model in models.items()}
        return measure(calls, self.timed, self.repeats, MOST_SECONDS, per_turn=True)

    def stock_row(self) -> dict:
        """Return the row of the original, from all its turns beside others."""
        if not self.stock_times:
            self.stock_times += self._time(stock=self.original).values()
        times = np.concatenate(self.stock_times)
        row = row_of(self.stock, EAGER, self.original, '', self.memory, times, times)
        return row | self._tested(self.stock, EAGER)

    def test(self, candidate: Candidate, kind: str) -> dict:
        """Return what is known of a test, after a test if need be; None for each value if not."""
        if self.is_tested:
            name, what = self._test_name(candidate, kind), f'test {candidate.name}, {kind}'
            self._find('tests', name, what, self._test, candidate, kind)
        return self._tested(candidate, kind)

    def _tested(self, candidate: Candidate, kind: str) -> dict:
        known = self.record.content['tests'] if self.is_tested else {}
        return known.get(self._test_name(candidate, kind), dict.fromkeys(FOUND))

    def _test_name(self, candidate: Candidate, kind: str) -> str:
        """Return the name of all that a test depends on: formats of float32 share one."""
        form = FORMATS[kind]
        kind = 'float32' if form.is_float32 else kind
        kind += f' to multiples of {self.divisor}' if form.padded else ''
        return f'{candidate.name} in {kind} on {self.judge.mark}'

    @cached_property
    def _stock_score(self) -> Score:
        return self.judge(self.original)

    def _test(self, candidate: Candidate, kind: str) -> dict:
        stock = self._stock_score
        self.record.content['metric'] = self.judge.name
        if candidate is self.stock and kind == EAGER:
            return dict(zip(FOUND, (stock.value, 0.0, [0.0, 0.0], '', kind)))
        score = self.judge(self.open(candidate, kind))
        same = candidate.budget == 1 and FORMATS[kind].is_float32
        change, *interval, method = self.judge.difference(score, stock, same)
        return dict(zip(FOUND, (score.value, change, interval, method, kind)))


def export(model: nn.Module, path: str, calibration: Callable, judge: Judge) -> None:
    """Write a model to a file for ONNX Runtime, or in int8 for OpenVINO if its suffix is '.xml'."""
    if path.endswith('.xml'):
        crops = [cropped(data) for data in calibration()]
        quantize(model, path, crops, judge.images(-(-len(crops) // 2)))
    else:
        write_bytes(path, agreeing_onnx(model, judge.images(NUM_IMAGES))[0])


def row_of(
    candidate: Candidate,
    kind: str,
    model: nn.Module,
    file: str,
    memory: float | None,
    times: np.ndarray,
    stock: np.ndarray,
) -> dict:
    """Return a row of the table, without what a test finds."""
    speedup, *interval = compare(stock, times)
    low, ms, high, p95 = np.percentile(times, [25, 50, 75, 95]).tolist()
    return dict(
        candidate=candidate.name, format=kind, ms=ms, ms_interval=[low, high], ms_p95=p95,
        speedup=speedup, speedup_interval=interval, memory_mb=memory, mb=megabytes(model, file),
        file=file or None, config=candidate.config, checkpoint=candidate.checkpoint,
        budget=candidate.budget, chosen=False,
    )  # fmt: skip


def megabytes(model: nn.Module, file: str) -> float:
    """Return the size of a file with its weights, or of a model's parameters and buffers."""
    if not file:
        tensors = model.state_dict().values()
        return sum(x.numel() * x.element_size() for x in tensors if torch.is_tensor(x)) / 1e6
    weights = f'{osp.splitext(file)[0]}.bin'
    return sum(os.path.getsize(f) / 1e6 for f in {file, weights} if osp.exists(f))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what the codebases, COCO and NNCF print, and where weights come from."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel('ERROR')
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logger.setLevel(level)
