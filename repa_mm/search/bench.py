"""Rows of the table: candidates in each format, opened one at a time beside the original."""

import copy
import gc
import os.path as osp
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn as nn
from mmengine.structures import BaseDataElement

from repa_mm.apis import open_model
from repa_mm.apis.features import check_same
from repa_mm.apis.images import cropped
from repa_mm.apis.models import deploy_
from repa_mm.benchmark.timing import SETTLE, compare, measure
from repa_mm.benchmark.variants import STOCK
from repa_mm.convert import Conversion
from repa_mm.convert.changed_config import converted_config
from repa_mm.convert.pretrained import conversion_of, save_model
from repa_mm.export import NUM_IMAGES, ExportedModel, agreeing_onnx, quantize
from repa_mm.export.comparison import agreement_of, num_found, overlap
from repa_mm.export.exporter import MAX_ERROR
from repa_mm.faster import faster_on_gpu_, rewrite_
from repa_mm.io.files import write_bytes, write_text
from repa_mm.reparam import has_deploy_form
from repa_mm.search.formats import EAGER, FLOAT32, FORMATS, INT8, in_format_, installed_formats
from repa_mm.search.judge import Judge, Score
from repa_mm.search.record import Record, quiet, step
from repa_mm.surgery import copied

#: Seconds for each timed model, after which no more turns begin.
MOST_SECONDS = 20
#: A model that takes longer for an image is large. All its turns are of one image, so that none of
#: them compiles for a new size, and int8 is left out: quantizing took 16 GB and did not finish.
SLOW_SECONDS = 20
#: Columns of a row that tell its test.
TESTED = 'metric', 'difference', 'interval', 'tested_in'
#: By what is found in an image, the task. Others are classification.
TASKS = dict(
    pred_instances='detection', pred_panoptic_seg='panoptic', pred_sem_seg='segmentation'
)  # fmt: skip


def candidate(name: str, config: str, checkpoint: str, budget: float = 1.0) -> dict:
    """Return the columns of a model, which keeps a fraction of its blocks' multiply-adds."""
    return dict(candidate=name, config=config, checkpoint=checkpoint, budget=budget)


def row_of(model: dict, kind: str, file: str | None = None) -> dict:
    """Return a row of a candidate that is not tested, without what is measured."""
    return dict(model, format=kind, file=file, chosen=False, **dict.fromkeys(TESTED))


def originals(model: nn.Module, checkpoint: str, folder: str, data: dict) -> tuple[dict, dict]:
    """Return two candidates, the original and the same with faster parts, and write their configs.

    Where no part becomes faster, both are the original. ``model`` is from ``open_model(…,
    merge=True)``; if that has merged it, its checkpoint is written, too. What is written is opened
    again, and must compute what the model computes on ``data``, a batch of one image.
    """
    name, stem, given = STOCK, osp.join(folder, 'stock'), checkpoint
    if has_deploy_form(model):  # nobody deploys the training form
        name, checkpoint = 'merged', f'{stem}.pth'
        model.cfg = copy.deepcopy(model.cfg)
        deploy_(model.cfg.model)
        save_model(model, given, checkpoint, data)
    write_text(f'{stem}.py', model.cfg.pretty_text)
    found = [candidate(name, f'{stem}.py', checkpoint)]
    faster = converted_config(model.cfg, model, rewritten=rewrite_(copied(model), 'train'))
    if faster is not model.cfg:
        path = osp.join(folder, 'faster.py')
        write_text(path, faster.pretty_text)
        found.append(candidate('faster parts', path, checkpoint))
    for one in found:
        opened = open_model(one['config'], checkpoint)
        check_same(opened, model, cropped(data), f'{one["candidate"]} ({one["config"]})')
    return found[0], found[-1]


def export(model: nn.Module, path: str, calibration: Callable, judge: Judge) -> None:
    """Write a model to a file for ONNX Runtime, or in int8 for OpenVINO if its suffix is '.xml'."""
    if path.endswith('.xml'):
        # Not the test's images, which would favour the attempt that fits these best.
        found = calibration()
        quantize(model, path, [cropped(x) for i, x in enumerate(found) if i % 3], found[::3])
    else:
        write_bytes(path, agreeing_onnx(model, judge.images(NUM_IMAGES))[0])


def same(found: BaseDataElement, expected: BaseDataElement) -> bool:
    """Return True if models find the same in an image, as far as a file must that is exported."""
    both = overlap(found, expected, strict=True)
    largest = min((MAX_ERROR[TASKS.get(name, 'classification')][0] for name in both), default=0)
    return num_found([both]) > 0 and 1 - agreement_of([both]) <= largest


def meets(row: dict, max_loss: float) -> bool:
    """Return True if the whole interval of a row's difference is above the floor."""
    return bool(row['interval']) and row['interval'][0] >= -max_loss


class Bench:
    """Finds what is not known of candidates: fits, files, times and tests.

    ``stock`` and ``base`` are the candidates of :func:`originals`, of which the second is narrowed.
    ``tested`` is the number of images to test on, ``calibration`` returns those to fit to, and to
    calibrate int8 on. The other arguments are those of :func:`~repa_mm.speed_up`.
    """

    def __init__(
        self, stock: dict, base: dict, checkpoint: str, record: Record, judge: Judge, tested: int,
        device: str, repeats: int, batch_size: int, calibration: Callable[[], list[dict]],
    ) -> None:  # fmt: skip
        self.base, self.checkpoint, self.record, self.judge = base, checkpoint, record, judge
        self.tested, self.device, self.repeats = tested, device, repeats
        self.calibration = calibration
        self.timed, self.stock_times = judge.images(repeats, batch_size), []
        self.image, self.tests = judge.images(1)[0], []  # tested rows of float32 and their finds
        self.kinds, reasons = installed_formats(device)
        self.stock = row_of(stock, EAGER)
        with quiet(), torch.no_grad():
            self.original = self.open(self.stock)
            begin = time.monotonic()
            self.expected = self.original.test_step(copy.deepcopy(self.image))[0].cpu()
        if time.monotonic() - begin > SLOW_SECONDS:
            by_size = sorted(self.timed, key=lambda data: sum(x.numel() for x in data['inputs']))
            self.timed = [by_size[len(by_size) // 2]]
            if INT8 in self.kinds:
                self.kinds.remove(INT8)
                reasons.append(f'{INT8} is left out: an image takes more than {SLOW_SECONDS} s')
        self.sizes = {tuple(image.shape[-2:]) for data in self.timed for image in data['inputs']}
        record.notes += reasons

    def candidates(self, budgets: Sequence[float]) -> Iterator[dict]:
        """Yield the base, and narrower models from wide to narrow, unless their fit fails."""
        yield self.base
        names = set()
        for percent in sorted({max(1, round(100 * budget)) for budget in budgets}, reverse=True):
            what = f'{percent} % of the blocks'
            with self.record.optional(what):
                found = self.record.find(f'fit {what}', self._fit, percent)
                name = f'{100 * found["budget"]:.0f} %'
                if name not in names:  # sizes have a least
                    names.add(name)
                    stem = osp.join(self.record.out_dir, f'candidates/{percent}')
                    yield candidate(name, f'{stem}.py', f'{stem}.pth', found['budget'])

    @cached_property
    def _conversion(self) -> Conversion:
        """What every budget needs: the parts, and what a loss of each costs."""
        model = open_model(self.base['config'], self.base['checkpoint']).to(self.device)
        return conversion_of(model, self.calibration())

    def _fit(self, percent: int) -> dict:
        narrow, report = self._conversion.fit(self._conversion.sizes(percent / 100))
        stem = f'candidates/{percent}'
        save_model(narrow, self.checkpoint, f'{self.record.out_dir}/{stem}.pth', self.image)
        files = self.record.hashes([f'{stem}.pth', f'{stem}.py'])
        return dict(budget=max(percent / 100, round(report.fraction, 2)), files=files)

    def rows(self, model: dict, is_int8: bool, floor: float | None = None) -> list[dict]:
        """Return the rows of a candidate in its formats of floats, or in int8.

        With a floor, no row is tested that is surely slower than one that keeps it.
        """
        name, stem = model['candidate'], osp.splitext(model['config'])[0]
        kinds = [kind for kind in self.kinds if (kind == INT8) == is_int8]
        if name == self.stock['candidate']:
            kinds = [kind for kind in kinds if kind != EAGER]
        rows, files = [], {'': None}
        for suffix in {FORMATS[kind].file for kind in kinds} - {''}:
            what = f'{name} in {suffix.split(".")[-1]}'
            with self.record.optional(what):
                path = f'{stem}{suffix}'
                mark = f' as {osp.basename(path)}'  # fits of two budgets may have one name
                self.record.find(f'write {what}', self._export, model, path, mark=mark)
                files[suffix] = path
        for kind in reversed(kinds):  # the fastest comes first, mostly
            if FORMATS[kind].file in files:
                kept = [row for row in rows if floor is not None and meets(row, floor)]
                enough = max((row['speedup_interval'][0] for row in kept), default=0)
                with self.record.optional(f'{name} in {kind}'):
                    row = row_of(model, kind, files[FORMATS[kind].file])
                    rows.insert(0, self._measured(row, enough))
        return rows

    def _export(self, model: dict, path: str) -> dict:
        opened = open_model(model['config'], model['checkpoint'])
        export(opened, path, self.calibration, self.judge)
        names = {path, path.replace('.xml', '.bin')}
        return dict(files=self.record.hashes([f'candidates/{osp.basename(x)}' for x in names]))

    def _measured(self, row: dict, enough: float) -> dict:
        # A method, since its return frees the model before the next one is opened.
        (model,) = self.time([row])
        self.test(row, model, row['speedup_interval'][1] > enough)
        return row

    def open(self, row: dict) -> nn.Module:
        """Return the model of a row, which has run one image, at which compilers compile."""
        form, file = FORMATS[row['format']], row['file']
        gc.collect()  # of the model before
        if file:
            model = ExportedModel(file, self.original.data_preprocessor, form.runtime)
        else:
            model = open_model(row['config'], row['checkpoint']).to(self.device)
            is_stock = row['candidate'] == self.stock['candidate']
            if not is_stock and next(model.parameters()).is_cuda:
                model = faster_on_gpu_(model)
            model = in_format_(model, form)
        # A graph for each size.
        for data in [self.image, *(self.timed if form.captured else ())]:
            model.test_step(copy.deepcopy(data))
        row.setdefault('mb', megabytes(model, file))
        return model

    def time(self, rows: Sequence[dict]) -> list[nn.Module]:
        """Time rows in turn with the original and with each other, and return their models."""

        def timed() -> tuple:
            models = [self.open(row) for row in rows]
            return models, self._times(*models)

        names = ' | '.join(f'{row["candidate"]}, {row["format"]}' for row in rows)
        models, (stock, *others) = step(f'time {names}', timed)
        self.stock_times.append(stock)
        for row, times in zip(rows, others):
            row.update(columns_of(times, stock))
        return models

    def _times(self, *models: nn.Module) -> list[np.ndarray]:
        """Return the times of the original and of other models."""
        calls = {str(i): model.test_step for i, model in enumerate((self.original, *models))}
        seconds = MOST_SECONDS * len(calls)
        settle = 0 if torch.device(self.device).type == 'cuda' else SETTLE
        times = measure(calls, self.timed, self.repeats, seconds, settle, per_turn=True)
        return [*times.values()]

    def time_again(self, rows: Sequence[dict]) -> None:
        """Time rows again, unless that fails, of memory mostly."""
        with self.record.optional('a second timing'):
            self.time(rows)

    def stock_row(self) -> dict:
        """Return the row of the original, with all its turns beside others."""
        times = np.concatenate(self.stock_times or self._times())
        self.stock.update(columns_of(times, times))
        return self.stock

    def test(self, row: dict, model: nn.Module, is_needed: bool = True) -> None:
        """Add what is known of a test, or if it is needed what it finds.

        A format of float32 shares the test of another one that finds the same in an image.
        """
        if not self.tested:
            return
        found, what = None, f'test {row["candidate"]}, {row["format"]}'
        mark = f' of {osp.basename(row["config"])} on {self.judge.mark}'
        if row['format'] in FLOAT32:
            with quiet(), torch.no_grad():
                found = model.test_step(copy.deepcopy(self.image))[0].cpu()
            for other, expected in self.tests:
                if other['config'] == row['config'] and same(found, expected):
                    row.update({key: other[key] for key in TESTED})
                    return
        if is_needed or what + mark in self.record.content['known']:
            row.update(self.record.find(what, self._test, row, model, found, mark=mark))
            if found is not None:
                self.tests.append((row, found))

    @cached_property
    def _score(self) -> Score:
        return self.judge(self.original)

    def _test(self, row: dict, model: nn.Module, found: BaseDataElement | None) -> dict:
        stock, kind = self._score, row['format']
        self.record.content['metric'] = self.judge.name
        score, change, interval = stock, 0.0, [0.0, 0.0]
        if row is not self.stock:
            score, is_equal = self.judge(model), row['budget'] == 1 and found is not None
            is_equal = is_equal and same(found, self.expected)
            change, *interval = self.judge.difference(score, stock, is_equal)
        return dict(metric=score.value, difference=change, interval=interval, tested_in=kind)


def columns_of(times: np.ndarray, stock: np.ndarray) -> dict:
    """Return the columns of a row that tell its times, given those of both in the same turns."""
    speedup, *interval = compare(stock, times)
    low, ms, high, p95 = np.percentile(times, [25, 50, 75, 95]).tolist()
    return dict(
        ms=ms, ms_interval=[low, high], ms_p95=p95, speedup=speedup, speedup_interval=interval
    )


def megabytes(model: nn.Module, file: str | None) -> float:
    """Return the size of a file with its weights, or of a model's parameters and buffers."""
    if not file:
        tensors = model.state_dict().values()
        return sum(x.numel() * x.element_size() for x in tensors if torch.is_tensor(x)) / 1e6
    weights = f'{osp.splitext(file)[0]}.bin'
    return sum(osp.getsize(f) / 1e6 for f in {file, weights} if osp.exists(f))
