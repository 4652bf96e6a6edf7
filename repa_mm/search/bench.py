"""Models to choose from, and what is found of each: a fit, files, times and tests."""

import copy
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
from repa_mm.apis.models import deploy_
from repa_mm.benchmark.memory import peak_memory
from repa_mm.benchmark.timing import SETTLE, compare, measure
from repa_mm.benchmark.variants import STOCK
from repa_mm.convert import Conversion
from repa_mm.convert.changed_config import converted_config
from repa_mm.convert.pretrained import conversion_of, save_model
from repa_mm.export import NUM_IMAGES, ExportedModel, agreeing_onnx, quantize
from repa_mm.faster import faster_on_gpu_
from repa_mm.io.files import write_bytes, write_text
from repa_mm.reparam import has_deploy_form
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

#: Seconds for each timed model, after which no more turns begin.
MOST_SECONDS = 20
#: An image of a large model takes as many seconds. Its few turns are of one image, to compile for
#: a size in none of them, quantizing it needed 16 GB and did not finish, and no more than two of
#: its rows are open at a time, beside the original. Of others, more are.
SLOW_SECONDS, MOST_OPEN = 20, 4
#: What a test finds.
FOUND = 'metric', 'difference', 'interval', 'method', 'tested_in'


@dataclass
class Candidate:
    """A model to choose from, which keeps a fraction ``budget`` of its blocks' multiply-adds."""

    name: str
    config: str
    checkpoint: str
    budget: float = 1.0


def originals(model: nn.Module, checkpoint: str, folder: str) -> tuple[Candidate, Candidate]:
    """Write configs of the original, and of the same with faster parts (or the same twice).

    ``model`` is from ``open_model(…, merge=True)``. The checkpoint of a merged one is written.
    """
    name, stem, given = STOCK, osp.join(folder, 'stock'), checkpoint
    if has_deploy_form(model):  # nobody deploys the training form
        name, checkpoint = 'merged', f'{stem}.pth'
        model.cfg = copy.deepcopy(model.cfg)
        deploy_(model.cfg.model)
        save_model(model, given, checkpoint)
    write_text(f'{stem}.py', model.cfg.pretty_text)
    stock = Candidate(name, f'{stem}.py', checkpoint)
    faster = converted_config(model.cfg, model)
    if faster is model.cfg:
        return stock, stock
    path = osp.join(folder, 'faster.py')
    write_text(path, faster.pretty_text)
    return stock, Candidate('faster parts', path, checkpoint)


def export(model: nn.Module, path: str, calibration: Callable, judge: Judge) -> None:
    """Write a model to a file for ONNX Runtime, or in int8 for OpenVINO if its suffix is '.xml'."""
    if path.endswith('.xml'):
        crops = [cropped(data) for data in calibration()]
        quantize(model, path, crops, judge.images(-(-len(crops) // 2)))
    else:
        write_bytes(path, agreeing_onnx(model, judge.images(NUM_IMAGES))[0])


def meets(row: dict, max_loss: float) -> bool:
    """Return True if the whole interval of a row's difference is above the floor."""
    return bool(row['interval']) and row['interval'][0] >= -max_loss


def step(what: str, do: Callable, *args) -> Any:
    """Say what is done, and hide what others print meanwhile."""
    print(f'- {what}', flush=True)
    with quiet(), torch.no_grad():
        return do(*args)


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
        self.divisor, self.stock_times, self.most_open = None, [], MOST_OPEN
        self.kinds, self.notes = installed_formats(self.device)
        self.timed = self.judge.images(self.repeats, self.batch_size)
        with quiet(), torch.no_grad():
            self.original, self.memory = self.open(self.stock, EAGER)
            begin = time.monotonic()
            self.original.test_step(self.judge.images(1)[0])
        if time.monotonic() - begin > SLOW_SECONDS:
            by_size = sorted(self.timed, key=lambda data: sum(x.numel() for x in data['inputs']))
            self.timed, self.most_open = [by_size[len(by_size) // 2]], 2
            if INT8 in self.kinds:
                self.kinds.remove(INT8)
                self.notes.append(f'{INT8} is left out: an image takes more than {SLOW_SECONDS} s')
        self.sizes = {tuple(image.shape[-2:]) for data in self.timed for image in data['inputs']}
        # Masks of a whole image would be squeezed.
        is_panoptic = hasattr(self.original, 'panoptic_fusion_head')
        if self.original.cfg.default_scope == 'mmdet' and not is_panoptic:
            self.divisor = divisor_for(self.sizes)
        padded = [f'{kind}, padded' for kind in self.kinds if self.divisor]
        self.kinds += [kind for kind in padded if kind in FORMATS]

    def candidates(self, budgets: Sequence[float]) -> Iterator[Candidate]:
        """Yield the originals, and narrower models from wide to narrow, unless their fit fails."""
        yield from [self.stock, self.base][: 1 + (self.base is not self.stock)]
        known = set()
        for percent in sorted({max(1, round(100 * budget)) for budget in budgets}, reverse=True):
            what = f'{percent} % of the blocks'
            try:
                fit = self._find(f'fit {what}', self._fit, percent)
            except (ValueError, ArithmeticError, RuntimeError) as error:  # others are tried still
                self.notes.append(f'{what} is left out: {error}')
                continue
            checkpoint, config = (osp.join(self.record.out_dir, name) for name in fit['files'])
            narrow = Candidate(f'{100 * fit["budget"]:.0f} %', config, checkpoint, fit['budget'])
            if narrow.name not in known:  # sizes have a least
                known.add(narrow.name)
                yield narrow

    def _find(self, what: str, do: Callable, *args) -> dict:
        return self.record.find(what, lambda: step(what, do, *args))

    @cached_property
    def _conversion(self) -> Conversion:
        """What every budget needs: the parts, and what a loss of each costs."""
        model = open_model(self.base.config, self.base.checkpoint).to(self.device)
        return conversion_of(model, self.calibration())

    def _fit(self, percent: int) -> dict:
        narrow, report = self._conversion.fit(self._conversion.sizes(percent / 100))
        files = [f'candidates/{percent}.pth', f'candidates/{percent}.py']
        save_model(narrow, self.checkpoint, osp.join(self.record.out_dir, files[0]))
        return dict(budget=max(percent / 100, round(report.fraction, 2)), files=files)

    def rows(self, candidate: Candidate, int8: bool, floor: float | None) -> list[dict]:
        """Return the rows of a candidate in its formats of floats, or in int8.

        With a floor, no format is tested that is surely slower than one that keeps it.
        """
        kinds = [kind for kind in self.kinds if ('int8' in FORMATS[kind].file) == int8]
        if candidate is self.stock:  # files are of the same model with faster parts
            has_files = self.base is self.stock
            kinds = [k for k in kinds if k != EAGER and (has_files or not FORMATS[k].file)]
        rows, enough = [], 0.0
        for kind in reversed(kinds):  # the fastest comes first, mostly
            file = self._file(candidate, FORMATS[kind].file)
            if file is None:
                continue
            try:
                row = self._row(candidate, kind, file, enough)
            except Exception as error:  # from any runtime
                if kind == EAGER:
                    raise
                self.notes.append(f'{candidate.name} in {kind} is left out: {error!r}')
                continue
            rows.insert(0, row)
            if floor is not None and meets(row, floor):
                enough = max(enough, row['speedup_interval'][0])
        return rows

    def _file(self, candidate: Candidate, suffix: str) -> str | None:
        """Return the path of a candidate's file, '' if it needs none, None if there is none."""
        if not suffix:
            return ''
        name = f'{candidate.name} in {suffix.split(".")[-1]}'
        found = self._find(f'write {name}', self._export, candidate, suffix)
        if 'files' in found:
            return osp.join(self.record.out_dir, found['files'][0])
        note = f'{name} is left out: {found["error"]}'
        self.notes += [note] * (note not in self.notes)
        return None

    def _export(self, candidate: Candidate, suffix: str) -> dict:
        path = osp.splitext(candidate.config)[0] + suffix
        try:
            model = open_model(candidate.config, candidate.checkpoint)
            export(model, path, self.calibration, self.judge)
        except Exception as error:  # from any exporter: other formats are measured still
            return dict(error=repr(error))
        files = [path, *[path.replace('.xml', '.bin')] * path.endswith('.xml')]
        return dict(files=[self.record.inside(file) for file in files])

    def _row(self, candidate: Candidate, kind: str, file: str, enough: float) -> dict:
        def timed() -> tuple:
            model, memory = self.open(candidate, kind, file)
            return model, memory, self._times(stock=self.original, model=model)

        model, memory, times = step(f'time {candidate.name}, {kind}', timed)
        self.stock_times.append(times['stock'])
        row = row_of(candidate, kind, model, file, memory, times['model'], times['stock'])
        return row | self.test(candidate, kind, model, row['speedup_interval'][1] > enough)

    def time_together(self, rows: Sequence[dict]) -> list[dict]:
        """Time the first few rows anew, in turn with each other, and return them."""
        rows = rows[: self.most_open]

        def timed() -> dict:
            models = {str(i): self.reopen(row) for i, row in enumerate(rows)}
            return self._times(stock=self.original, **models)

        names = ' | '.join(f'{row["candidate"]}, {row["format"]}' for row in rows)
        try:
            times = step(f'time together: {names}', timed)
        except Exception as error:  # of memory, mostly
            self.notes.append(f'These could not be timed together: {names}: {error!r}')
            return rows
        for i, row in enumerate(rows):
            row.update(columns_of(times[str(i)], times['stock']))
        return rows

    def stock_row(self) -> dict:
        """Return the row of the original, from all its turns beside others."""
        times = self.stock_times or [*self._times(stock=self.original).values()]
        times = np.concatenate(times)
        row = row_of(self.stock, EAGER, self.original, '', self.memory, times, times)
        return row | self.test(self.stock, EAGER, self.original)

    def _times(self, **models: nn.Module) -> dict[str, np.ndarray]:
        calls = {name: model.test_step for name, model in models.items()}
        seconds = MOST_SECONDS * len(calls)
        settle = 0 if torch.device(self.device).type == 'cuda' else SETTLE
        return measure(calls, self.timed, self.repeats, seconds, settle, per_turn=True)

    def reopen(self, row: dict) -> nn.Module:
        """Return the model of a row, see :meth:`open`."""
        candidate = Candidate(*(row[k] for k in ('candidate', 'config', 'checkpoint', 'budget')))
        return self.open(candidate, row['format'], row['file'] or '')[0]

    def open(self, candidate: Candidate, kind: str, file: str = '') -> tuple:
        """Return a model that has run one image, at which compilers compile, and its memory."""
        form, first = FORMATS[kind], self.judge.images(1)[0]
        if file:  # a runtime's own code is no part of a model's memory
            import_module('openvino' if form.runtime or file.endswith('.xml') else 'onnxruntime')

        def opened() -> nn.Module:
            if file:
                model = ExportedModel(file, self.original.data_preprocessor, form.runtime)
            else:
                model = open_model(candidate.config, candidate.checkpoint).to(self.device)
                if candidate != self.stock and next(model.parameters()).is_cuda:
                    model = faster_on_gpu_(model)
                model = in_format_(model, form)
            model = Padded(model, self.divisor) if form.padded else model
            # A graph is captured for each size.
            for data in (first, *self.timed) if form.captured else (first,):
                model.test_step(copy.deepcopy(data))
            return model

        return peak_memory(opened, self.device)

    def test(
        self, candidate: Candidate, kind: str, model: nn.Module, is_needed: bool = True
    ) -> dict:
        """Return what is known of a test, or what a test finds if it is needed.

        Formats of float32 share one test.
        """
        form, what = FORMATS[kind], f'test {candidate.name}, {kind}'
        name = f'{candidate.name} in {"float32" if form.is_float32 else kind}'
        name += f' to multiples of {self.divisor}' if form.padded else ''
        name = f'test {name} on {self.judge.mark}'
        if not self.is_tested or not (is_needed or name in self.record.known):
            return {}
        return self.record.find(name, lambda: step(what, self._test, candidate, kind, model))

    @cached_property
    def _stock_score(self) -> Score:
        return self.judge(self.original)

    def _test(self, candidate: Candidate, kind: str, model: nn.Module) -> dict:
        stock = self._stock_score
        self.record.content['metric'] = self.judge.name
        if model is self.original:
            return dict(zip(FOUND, (stock.value, 0.0, [0.0, 0.0], '', kind)))
        score = self.judge(model)
        same = candidate.budget == 1 and FORMATS[kind].is_float32
        change, *interval, method = self.judge.difference(score, stock, same)
        return dict(zip(FOUND, (score.value, change, interval, method, kind)))


def row_of(
    candidate: Candidate, kind: str, model: nn.Module, file: str, memory: float | None,
    times: np.ndarray, stock: np.ndarray,
) -> dict:  # fmt: skip
    """Return a row of the table, without what a test finds."""
    return dict(
        candidate=candidate.name, format=kind, **columns_of(times, stock), memory_mb=memory,
        mb=megabytes(model, file), file=file or None, config=candidate.config,
        checkpoint=candidate.checkpoint, budget=candidate.budget, chosen=False,
        **dict.fromkeys(FOUND),
    )  # fmt: skip


def columns_of(times: np.ndarray, stock: np.ndarray) -> dict:
    """Return the columns of a row that tell its times, given those of both in the same turns."""
    speedup, *interval = compare(stock, times)
    low, ms, high, p95 = np.percentile(times, [25, 50, 75, 95]).tolist()
    return dict(
        ms=ms, ms_interval=[low, high], ms_p95=p95, speedup=speedup, speedup_interval=interval
    )


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
