"""Measures candidates in each format: files are written, then timed, then tested."""

import copy
import gc
import os.path as osp
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.structures import BaseDataElement

from repa_mm.apis import open_model
from repa_mm.apis.features import check_same
from repa_mm.apis.images import cropped
from repa_mm.apis.models import deploy_
from repa_mm.convert import Conversion
from repa_mm.convert.changed_config import converted_config
from repa_mm.convert.pretrained import conversion_of, save_model
from repa_mm.export import MIN_AGREEMENT, NUM_IMAGES, ExportedModel, agreeing_onnx, quantize
from repa_mm.export.comparison import agreement_of, num_found, overlap
from repa_mm.export.exporter import MAX_ERROR
from repa_mm.faster import faster_on_gpu_, rewrite_
from repa_mm.io.files import write_bytes, write_text
from repa_mm.measure.timing import SETTLE, compare, duration, measure
from repa_mm.measure.variants import STOCK
from repa_mm.reparam import has_deploy_form
from repa_mm.search.formats import EAGER, FLOAT32, FORMATS, INT8, in_format_, installed_formats
from repa_mm.search.judge import Judge, Score
from repa_mm.search.options import Options
from repa_mm.search.record import Record
from repa_mm.search.rows import Candidate, Row, Target
from repa_mm.search.steps import quiet
from repa_mm.surgery import copied

#: Name of the model whose parts compute the same faster.
EXACT = 'exact parts'
#: Smallest agreement of a file in int8 that is worth a test.
TESTED_AGREEMENT = 0.9
#: Seconds for each timed model, after which no more turns begin.
MOST_SECONDS = 20
#: A model that takes longer for an image is large. All its turns are of one image, so that none of
#: them compiles for a new size, and int8 is left out: quantizing took 16 GB and did not finish.
SLOW_SECONDS = 20
#: By what is found in an image, the task. Others are classification.
TASKS = dict(
    pred_instances='detection', pred_panoptic_seg='panoptic', pred_sem_seg='segmentation'
)  # fmt: skip


def originals(
    model: nn.Module, checkpoint: str, folder: str, data: dict
) -> tuple[Candidate, Candidate]:
    """Return two candidates, the original and that with exact parts, and write their configs.

    Where no part becomes another one, both are the original. ``model`` is from ``open_model(…,
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
    found = [Candidate(name, f'{stem}.py', checkpoint)]
    exact = converted_config(model.cfg, model, rewritten=rewrite_(copied(model), 'train'))
    if exact is not model.cfg:
        path = osp.join(folder, 'exact.py')
        write_text(path, exact.pretty_text)
        found.append(Candidate(EXACT, path, checkpoint))
    for one in found:
        opened = open_model(one.config, checkpoint)
        check_same(opened, model, cropped(data), f'{one.candidate} ({one.config})')
    return found[0], found[-1]


def export(model: nn.Module, path: str, calibration: Callable, judge: Judge, least: float) -> None:
    """Write a model to a file for ONNX Runtime, or in int8 for OpenVINO if its suffix is '.xml'."""
    if path.endswith('.xml'):
        # Not the test's images, which would favour the attempt that fits these best.
        found = calibration()
        to_calibrate = [cropped(x) for i, x in enumerate(found) if i % 3]
        quantize(model, path, to_calibrate, found[::3], least=least)
    else:
        write_bytes(path, agreeing_onnx(model, judge.images(NUM_IMAGES))[0])


def same(found: BaseDataElement, expected: BaseDataElement) -> bool:
    """Return True if models find the same in an image, as far as a file must that is exported."""
    both = overlap(found, expected, strict=True)
    largest = min((MAX_ERROR[TASKS.get(name, 'classification')][0] for name in both), default=0)
    return num_found([both]) > 0 and 1 - agreement_of([both]) <= largest


class Workbench:
    """Finds what is not known of candidates: fits, files, times and tests.

    ``stock`` and ``base`` are the candidates of :func:`originals`, of which the second is narrowed.
    ``cfg`` is the original's. ``tested`` is the number of images to test on. ``calibration``
    returns those to fit to, and to calibrate int8 on.
    """

    def __init__(
        self, stock: Candidate, base: Candidate, cfg: Config, record: Record, judge: Judge,
        tested: int, target: Target, options: Options, calibration: Callable[[], list[dict]],
    ) -> None:  # fmt: skip
        self.base, self.cfg, self.record, self.judge, self.tested = base, cfg, record, judge, tested
        self.target, self.options, self.calibration = target, options, calibration
        self.device, self.steps, self.begun = options.device, record.steps, Counter()
        self.timed = judge.images(options.repeats, options.batch_size)
        self.image, self.stock_times = judge.images(1)[0], []
        #: By the config, what formats of float32 find in an image, and their tests.
        self.tests: dict[str, list[tuple[BaseDataElement, dict]]] = defaultdict(list)
        self.kinds, reasons = installed_formats(self.device, options.formats)
        self.stock = Row(**vars(stock))
        with quiet(), torch.no_grad():
            self.original = self.open(self.stock)
            begin = time.monotonic()
            self.expected = self.find(self.original)
        if time.monotonic() - begin > SLOW_SECONDS:
            by_size = sorted(self.timed, key=lambda data: sum(x.numel() for x in data['inputs']))
            self.timed = [by_size[len(by_size) // 2]]
            if INT8 in self.kinds:
                self.kinds.remove(INT8)
                reasons.append(f'{INT8} is left out: an image takes more than {SLOW_SECONDS} s')
        sizes = {tuple(image.shape[-2:]) for data in self.timed for image in data['inputs']}
        timed = f'{options.batch_size} images' if options.batch_size > 1 else 'one image'
        record.content['timed'] = timed + (f' of {len(sizes)} sizes' if len(sizes) > 1 else '')
        record.notes += reasons

    def candidates(self) -> Iterator[Candidate]:
        """Yield the base, and narrower models from wide to narrow, unless their fit fails."""
        yield self.base
        names = set()
        for percent in self.options.percents:
            what = f'{percent} % of the blocks'
            with self.record.optional(what):
                if f'fit {what}' not in self.record.content['known']:
                    _ = self.conversion  # is a step of its own
                found = self.record.find(f'fit {what}', self._fit, percent)
                name = f'{100 * found["budget"]:.0f} %'
                if name not in names:  # sizes have a least
                    names.add(name)
                    stem = osp.join(self.record.out_dir, f'candidates/{percent}')
                    yield Candidate(name, f'{stem}.py', f'{stem}.pth', found['budget'])

    @cached_property
    def conversion(self) -> Conversion:
        """What every budget needs: the parts, and what a loss of each costs."""

        def prepare() -> Conversion:
            model = open_model(self.base.config, self.base.checkpoint).to(self.device)
            found = conversion_of(model, self.calibration())
            found.sizes()
            return found

        return self.steps.run('measure what each part costs', prepare)

    def _fit(self, percent: int) -> dict:
        def tell(part, number: int, seconds: float) -> None:
            self.steps.tell(f'{part.name}, about {duration(seconds)} left for this fit')

        sizes = self.conversion.sizes(percent / 100)
        narrow, report = self.conversion.fit(sizes, progress=tell)
        stem = f'candidates/{percent}'
        save_model(narrow, self.stock.checkpoint, f'{self.record.out_dir}/{stem}.pth', self.image)
        files = self.record.hashes([f'{stem}.pth', f'{stem}.py'])
        return dict(budget=max(percent / 100, round(report.fraction, 2)), files=files)

    def plan(self, is_int8: bool = False) -> None:
        """Count the steps that are left at most, before a candidate is measured."""
        number, begun = len(self.options.percents) + 1, self.begun[False]
        floats, int8 = (0, begun) if is_int8 else (number - begun, number)
        int8 = (int8 - self.begun[True]) * (INT8 in self.kinds)
        kinds = [kind for kind in self.kinds if kind != INT8]
        # Formats of float32 share a test.
        tests = floats * len({kind in FLOAT32 or kind for kind in kinds}) + int8
        self.steps.left = +Counter(  # without zeros
            measure=int(1 < floats == number), fit=max(floats - 1, 0), quantize=int8,
            write=floats * len({FORMATS[kind].file for kind in kinds} - {''}),
            time=floats * len(kinds) + int8,
            test=(tests + (self.stock.metric is None)) * bool(self.tested),
        )  # fmt: skip

    def rows(self, model: Candidate, is_int8: bool) -> list[Row]:
        """Return the rows of a candidate in its formats of floats, or in int8.

        If the loss alone counts, no row is tested that is surely slower than one that keeps it.
        """
        self.plan(is_int8)
        self.begun[is_int8] += 1
        kinds = [kind for kind in self.kinds if (kind == INT8) == is_int8]
        if model.candidate == self.stock.candidate:
            kinds = [kind for kind in kinds if kind != EAGER]
        files, rows = self.files(model, kinds), []
        for kind in reversed(kinds):  # the fastest comes first, mostly
            if FORMATS[kind].file in files:
                kept = rows if self.target.is_loss_alone else ()
                kept = [row.speedup_interval[0] for row in kept if self.target.keeps(row)]
                with self.record.optional(f'{model.candidate} in {kind}'):
                    row = Row(**vars(model), format=kind, file=files[FORMATS[kind].file])
                    rows.insert(0, self.measured(row, max(kept, default=0)))
        return rows

    def files(self, model: Candidate, kinds: Sequence[str]) -> dict[str, str | None]:
        """Return the files that formats need, by their suffix, unless the export fails."""
        stem, found = osp.splitext(model.config)[0], {'': None}
        for suffix in {FORMATS[kind].file for kind in kinds} - {''}:
            verb = 'quantize' if suffix == FORMATS[INT8].file else 'write'
            what = f'{model.candidate} in {suffix.split(".")[-1]}'
            with self.record.optional(what):
                path = f'{stem}{suffix}'
                mark = f' as {osp.basename(path)}'  # fits of two budgets may have one name
                self.record.find(f'{verb} {what}', self._export, model, path, mark=mark)
                found[suffix] = path
        return found

    def _export(self, model: Candidate, path: str) -> dict:
        opened = open_model(model.config, model.checkpoint)
        # What is tested is judged by its metric.
        least = TESTED_AGREEMENT if self.tested else MIN_AGREEMENT
        export(opened, path, self.calibration, self.judge, least)
        names = {path, path.replace('.xml', '.bin')}
        return dict(files=self.record.hashes([f'candidates/{osp.basename(x)}' for x in names]))

    def measured(self, row: Row, enough: float) -> Row:
        """Return a row with its times and, unless others are surely ``enough`` faster, a test."""
        # A method, since its return frees the model before the next one is opened.
        (row,), (model,) = self.time([row])
        return self.test(row, model, row.speedup_interval[1] > enough)

    def open(self, row: Row) -> nn.Module:
        """Return the model of a row, which has run one image, at which compilers compile."""
        form = FORMATS[row.format]
        gc.collect()  # of the model before
        if row.file:
            model = ExportedModel(row.file, self.original.data_preprocessor, form.runtime)
        else:
            model = open_model(row.config, row.checkpoint).to(self.device)
            is_stock = row.candidate == self.stock.candidate
            if not is_stock and next(model.parameters()).is_cuda:
                model = faster_on_gpu_(model)
            model = in_format_(model, form)
        # A graph for each size.
        for data in [self.image, *(self.timed if form.captured else ())]:
            model.test_step(copy.deepcopy(data))
        return model

    def find(self, model: nn.Module) -> BaseDataElement:
        """Return what a model finds in an image."""
        with quiet(), torch.no_grad():
            return model.test_step(copy.deepcopy(self.image))[0].cpu()

    def time(self, rows: Sequence[Row]) -> tuple[list[Row], list[nn.Module]]:
        """Time rows in turn with the original and with each other; return them and their models."""

        def timed() -> tuple:
            models = [self.open(row) for row in rows]
            return models, self._times(*models)

        names = ' | '.join(row.name for row in rows)
        models, (stock, *others) = self.steps.run(f'time {names}', timed)
        self.stock_times.append(stock)
        sizes = [megabytes(model, row.file) for model, row in zip(models, rows)]
        found = zip(rows, sizes, others)
        return [replace(row, mb=mb, **columns_of(x, stock)) for row, mb, x in found], models

    @torch.no_grad()
    def _times(self, *models: nn.Module) -> list[np.ndarray]:
        """Return the times of the original and of other models."""
        calls = {str(i): model.test_step for i, model in enumerate((self.original, *models))}
        seconds = MOST_SECONDS * len(calls)
        settle = 0 if torch.device(self.device).type == 'cuda' else SETTLE
        times = measure(calls, self.timed, self.options.repeats, seconds, settle, per_turn=True)
        return [*times.values()]

    def time_again(self, rows: list[Row]) -> list[Row]:
        """Return rows that are timed again, or as they are if that fails, of memory mostly."""
        with self.record.optional('a second timing'):
            return self.time(rows)[0]
        return rows

    def stock_row(self) -> Row:
        """Return the row of the original, with all its turns beside others."""
        times = np.concatenate(self.stock_times or self._times())
        mb = megabytes(self.original, None)
        return replace(self.stock, mb=mb, **columns_of(times, times))

    def test(self, row: Row, model: nn.Module, is_needed: bool = True) -> Row:
        """Return a row with what is known of a test, or if it is needed what it finds.

        A format of float32 shares the test of another one that finds the same in an image.
        """
        if not self.tested:
            return row
        found, tests = self.find(model) if row.format in FLOAT32 else None, self.tests[row.config]
        shared = (test for expected, test in tests if found is not None and same(found, expected))
        if test := next(shared, None):
            return replace(row, **test)
        what, mark = f'test {row.name}', f' of {osp.basename(row.config)} on {self.judge.mark}'
        if not is_needed and what + mark not in self.record.content['known']:
            return row
        test = self.record.find(what, self._test, row, model, found, mark=mark)
        if found is not None:
            tests.append((found, test))
        return replace(row, **test)

    @cached_property
    def _score(self) -> Score:
        return self.judge(self.original)

    def _test(self, row: Row, model: nn.Module, found: BaseDataElement | None) -> dict:
        score, change, interval = self._score, 0.0, [0.0, 0.0]
        self.record.content['metric'] = self.judge.name
        if row.name != self.stock.name:
            score, is_equal = self.judge(model), row.budget == 1 and found is not None
            is_equal = is_equal and same(found, self.expected)
            change, *interval = self.judge.difference(score, self._score, is_equal)
        return dict(metric=score.value, difference=change, interval=interval, tested_in=row.format)


def columns_of(times: np.ndarray, stock: np.ndarray) -> dict:
    """Return the fields of a row that tell its times, given those of both in the same turns."""
    speedup, *interval = compare(stock, times)
    low, ms, high, p95 = np.percentile(times, [25, 50, 75, 95]).tolist()
    return dict(
        ms=ms, ms_interval=[low, high], ms_p95=p95, stock_ms=float(np.median(stock)),
        speedup=speedup, speedup_interval=interval,
    )  # fmt: skip


def megabytes(model: nn.Module, file: str | None) -> float:
    """Return the size of a file with its weights, or of a model's parameters and buffers."""
    if not file:
        tensors = model.state_dict().values()
        return sum(x.numel() * x.element_size() for x in tensors if torch.is_tensor(x)) / 1e6
    weights = f'{osp.splitext(file)[0]}.bin'
    return sum(osp.getsize(f) / 1e6 for f in {file, weights} if osp.exists(f))
