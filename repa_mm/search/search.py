"""The search: for each candidate fit, export, test, time. What is known is kept."""

import copy
import io
import os
import os.path as osp
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from mmengine.dataset import pseudo_collate
from mmengine.logging import MMLogger

from repa_mm.benchmark.timing import compare, measure
from repa_mm.benchmark.variants import STOCK
from repa_mm.config import dataset_config, load_config
from repa_mm.convert.pretrained import ModelConversion, save_model
from repa_mm.export import NUM_IMAGES, ExportedModel, agreeing_onnx, quantize
from repa_mm.faster import faster_on_gpu_
from repa_mm.files import replacing, write_bytes, write_text
from repa_mm.images import cropped
from repa_mm.opening import build_images, deploy_, open_model, spread
from repa_mm.reparam import Form, outermost
from repa_mm.search.candidates import Candidate, with_faster_parts
from repa_mm.search.formats import (
    EAGER,
    FORMATS,
    INT8,
    PIXEL,
    Padded,
    divisor_for,
    in_format,
    installed_formats,
)
from repa_mm.search.judge import (
    LEAST_IMAGES,
    Agreement,
    Annotated,
    Score,
    content_of,
    files_of,
    hashed,
)
from repa_mm.search.record import Record
from repa_mm.search.report import print_table, write_report
from repa_mm.surgery import copied
from repa_mm.version import __version__

#: Least budget to try, and the first one.
LEAST, FIRST = 0.05, 0.4
#: Largest number of fits of a search.
STEPS = 4
#: A latency is searched for this much below the target, since times vary, and is found if it is
#: that close to the target.
MARGIN, CLOSE = 0.97, 0.93
#: Seconds after which a timing begins no more turns.
MOST_SECONDS = 240
#: Seconds that an image takes in a large model. Runtimes give memory back after each of its images,
#: since a search has many models open. It is not quantized, which took 16 GB and had no end in
#: sight. There are few turns, all of one image: to compile for its size counts in none of them.
LARGE = 20
#: Largest distance of the quartiles of a row's times, as a fraction of stock's, on a quiet machine.
QUIET = 0.3


class Search:
    """Candidates, and what is known of each. :func:`repa_mm.speed_up` has the arguments.

    Attributes:
        candidates (dict[str, Candidate]): By name: ``stock``, which the others are compared with,
            ``base``, which is narrowed, and the narrower ones.
        formats (list[str]): Keys of :data:`~repa_mm.search.formats.FORMATS` to try.
        judge (Judge): Tests models.
        is_large (bool): The original takes more than :data:`LARGE` seconds for an image.
        timed (list[dict]): Batches to time: images as they come, or one image if ``is_large``.
        record (Record): What is known, fits, files and tests.
        notes (list[str]): What the reader of the table should know.
    """

    def __init__(
        self,
        config: str,
        checkpoint: str,
        out_dir: str,
        images: str | None = None,
        num_images: int = 100,
        fit_images: int = 64,
        repeats: int = 20,
        cfg_options: dict | None = None,
        device: str = 'cpu',
        batch_size: int = 1,
    ) -> None:
        self.started, self.steps = time.monotonic(), 0
        self.out_dir, self.folder = out_dir, osp.join(out_dir, 'candidates')
        self.num_images, self.repeats, self.device = num_images, repeats, device
        self.cfg = load_config(config, cfg_options)
        self.train = build_images(self.cfg, 'train', images)
        # Of a folder, every third image is tested.
        pool = [i for i in range(len(self.train)) if i % 3 or not images]
        self.to_fit = [pool[i] for i in spread(fit_images, len(pool))]
        model_and_data = (
            *(self.cfg.pretty_text, content_of(checkpoint)), files_of(self.train, self.to_fit)
        )  # fmt: skip
        self.record = Record(out_dir, hashed(__version__, *model_and_data))
        model = open_model(self.cfg, checkpoint, merge=True)
        if images:
            self.judge = Agreement(self.train, range(0, len(self.train), 3), num_images)
        else:
            subset = osp.join(out_dir, f'{max(num_images, 1)}_images.json')
            self.judge = Annotated(self.cfg, num_images, subset)
        self.formats, self.notes = installed_formats(device)
        self.notes += filter(None, [self.judge.note])
        self.opened: dict[tuple[str, str], nn.Module | None] = {}
        self._add_originals(model, checkpoint)
        begin = time.monotonic()
        self.open(self.stock, EAGER)
        self.is_large = time.monotonic() - begin > LARGE
        self.timed = self.judge.images(repeats, batch_size)
        if self.is_large:
            by_size = sorted(self.timed, key=lambda data: sum(x.numel() for x in data['inputs']))
            self.timed = [by_size[len(by_size) // 2]]
        sizes = {tuple(image.shape[-2:]) for data in self.timed for image in data['inputs']}
        self._adapt_formats(sizes)
        several = f' of {len(sizes)} sizes' if len(sizes) > 1 else ''
        self.record.content.update(
            config=config, checkpoint=checkpoint, device=device,
            timed=('one image' if batch_size == 1 else f'{batch_size} images') + several,
            images=f'{self.judge.num_images} images of {osp.abspath(images) if images else "data"}',
        )  # fmt: skip
        for budget in self.record.content['fits'].values():
            self._add_narrow(budget)

    def run(
        self, max_loss: float | None, latency: float | None, budgets: Sequence[float]
    ) -> list[dict]:
        """Search, choose, write the files, and return the table's rows."""
        if max_loss is not None and self.judge.num_images < LEAST_IMAGES:
            raise ValueError(
                f'a floor (max_loss) needs {LEAST_IMAGES} images to test on, and there are '
                f'{self.judge.num_images}'
            )
        self.record.save()
        targets = [f'loses at most {max_loss} points'] if max_loss is not None else []
        if latency is not None:
            targets.append(f"takes at most {latency:.0%} of stock's time")
            self._search_latency(latency)
        elif max_loss is not None:
            self._search_floor(max_loss)
        else:
            for budget in budgets:
                self.fit(budget)
        rows = self._rows(full=not targets)
        chosen = self._choose(rows, max_loss, latency) if targets else None
        self.record.content.update(rows=rows, target=' and '.join(targets), notes=self.notes)
        self.record.save()
        if chosen:
            self._write_chosen(chosen)
        print_table(self.record.content)
        self._report(rows, chosen)
        return rows

    def _search_floor(self, max_loss: float) -> None:
        """Bisect the budget in the fastest format that keeps the floor with all widths.

        Quantizing takes minutes: int8 stands back for another, and is tested in what that keeps.
        """
        order = [*self.latency_ratios(self.base, self.formats)]
        kind = next((k for k in order if self.keeps(self.base, k, max_loss)), order[0])
        others = [k for k in order if FORMATS[k].file != 'int8']
        probe = next((k for k in others if self.keeps(self.base, k, max_loss)), others[0])
        low, high, budget, kept = LEAST, 1.0, FIRST, []
        for _ in range(STEPS):
            candidate = self.fit(budget)
            if candidate is None:
                break
            if self.keeps(candidate, probe, max_loss):
                kept.insert(0, candidate)
                high = budget
                if candidate.budget > round(budget, 2):
                    break  # as narrow as it can be
            else:
                low = budget
            budget = (low + high) / 2
        for candidate in kept:  # the narrowest first
            if self.keeps(candidate, kind, max_loss):
                break

    def _search_latency(self, latency: float) -> None:
        """Fit models until one takes as long as it may, in the format that is fastest."""
        kind, ratio = next(iter(self.latency_ratios(self.base, self.formats).items()))
        if ratio <= latency * MARGIN:
            return
        points, budget = [(1.0, ratio)], FIRST
        for _ in range(STEPS):
            candidate = self.fit(budget)
            if candidate is None or self.open(candidate, kind) is None:
                return
            ratio = self.latency_ratios(candidate, [kind])[kind]
            if CLOSE * latency <= ratio <= latency:
                return
            points.append((candidate.budget, ratio))
            budget = on_line(points, latency * MARGIN)

    def _adapt_formats(self, sizes: set[tuple[int, int]]) -> None:
        """Add padded formats if detectors see many sizes; leave out int8 of a large model."""
        if self.is_large and INT8 in self.formats:
            self.formats.remove(INT8)
            why = f'an image takes more than {LARGE} s. tools/quantize.py writes it'
            self._note(f'{INT8} is left out: {why}')
        self.divisor = divisor_for(sizes) if self.cfg.default_scope == 'mmdet' else None
        if self.divisor:
            padded = (f'{kind}, padded' for kind in self.formats)
            self.formats += [kind for kind in padded if kind in FORMATS]

    # Candidates

    def _add_originals(self, model: nn.Module, checkpoint: str) -> None:
        """Add the original, which is merged if it is a RePaFormer, and the one to be narrowed."""
        name, stem, self.checkpoint = STOCK, osp.join(self.folder, 'stock'), checkpoint
        if any(outermost(model, Form)):  # nobody deploys the training form
            name, checkpoint = 'merged', f'{stem}.pth'
            model.cfg = copy.deepcopy(self.cfg)
            deploy_(model.cfg.model)
            save_model(model, self.checkpoint, checkpoint)
        write_text(f'{stem}.py', model.cfg.pretty_text)
        self.stock = self.base = Candidate(name, f'{stem}.py', checkpoint)
        self.models = {name: model.to(self.device)}
        faster = with_faster_parts(model.cfg, model)
        if faster is not model.cfg:
            path = osp.join(self.folder, 'faster.py')
            write_text(path, faster.pretty_text)
            self.base = Candidate('faster parts', path, checkpoint)
        self.candidates = {c.name: c for c in (self.stock, self.base)}

    def _add_narrow(self, budget: float) -> Candidate:
        stem = osp.join(self.folder, f'{100 * budget:.0f}')
        found = Candidate(percent_name(budget), f'{stem}.py', f'{stem}.pth', budget)
        return self.candidates.setdefault(found.name, found)

    def model(self, candidate: Candidate) -> nn.Module:
        """Return a candidate's model, on the device."""
        if candidate.name not in self.models:
            model = open_model(candidate.config, candidate.checkpoint)
            self.models[candidate.name] = model.to(self.device)
        return self.models[candidate.name]

    def calibration(self) -> list[dict]:
        """Return the images to fit to, and to calibrate int8 on."""
        return [pseudo_collate([self.train[i]]) for i in self.to_fit]

    # Fit, export, test, time

    def _step(self, what: str, do: Callable, *args) -> Any:
        """Say what is done, and hide what others print meanwhile."""
        self.steps += 1
        print(f'[{self.steps}] {what}', flush=True)
        with quiet(), torch.no_grad():
            return do(*args)

    def _find(self, kind: str, name: str, what: str, do: Callable, *args) -> Any:
        """Return what is known under a name, or find it in a step."""
        return self.record.find(kind, name, lambda: self._step(what, do, *args))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @cached_property
    def conversion(self) -> ModelConversion:
        """What every budget needs: the parts, and what a loss of each costs."""
        return ModelConversion(self.model(self.base), self.calibration())

    def fit(self, budget: float) -> Candidate | None:
        """Return the narrower model of a budget, or None if the fit fails.

        It is named by the budget that is left, since sizes have a least.
        """
        budget = max(0.01, round(budget, 2))
        name = percent_name(budget)
        if name in self.candidates:  # or what is left of a smaller budget
            return self.candidates[name]
        what = f'fit {name} of the blocks to {len(self.to_fit)} images'
        try:
            left = self._find('fits', name, what, self._fit, budget)
        except (ValueError, ArithmeticError, RuntimeError) as error:  # others are tried still
            self._note(f'{name} of the blocks is left out: {error}')
            return None
        return self._add_narrow(left)

    def _fit(self, budget: float) -> float:
        narrow, report = self.conversion.fit(self.conversion.sizes(budget))
        left = max(budget, round(report.fraction, 2))
        if percent_name(left) not in self.candidates:  # whose files and tests are of its own fit
            save_model(narrow, self.checkpoint, osp.join(self.folder, f'{100 * left:.0f}.pth'))
        return left

    def _export(self, candidate: Candidate, kind: str) -> dict:
        """Write a file, 'onnx' or 'int8', and return its path, or why there is none."""
        path = osp.splitext(candidate.config)[0] + ('_int8.xml' if kind == 'int8' else '.onnx')
        model = copied(self.model(candidate)).cpu()
        try:
            if kind == 'int8':
                crops = [cropped(data) for data in self.calibration()]
                quantize(model, path, crops, self.judge.images(-(-len(crops) // 2)))
            else:
                write_bytes(path, agreeing_onnx(model, self.judge.images(NUM_IMAGES))[0])
        except ValueError as error:
            return dict(refused=str(error))
        except Exception as error:  # from any exporter: other formats are measured still
            return dict(failed=repr(error))
        return dict(path=path)

    def open(self, candidate: Candidate, kind: str) -> nn.Module | None:
        """Return a candidate in a format, or None and a note if it does not run."""
        form, path = FORMATS[kind], None
        if form.file:
            name = f'{candidate.name} in {form.file}'
            file = self._find('files', name, f'write {name}', self._export, candidate, form.file)
            if 'path' not in file:
                self._note(f'{name} is left out: {file.get("refused") or file["failed"]}')
                return None
            path = file['path']
        if (candidate.name, kind) not in self.opened:
            try:
                model = self._open(candidate, kind, path)
                first = self.judge.images(1)[0]  # at which compilers compile, or fail
                if form.compiled:
                    self._step(f'compile {candidate.name}, {kind}', model.test_step, first)
                else:
                    with quiet(), torch.no_grad():
                        model.test_step(first)
            except Exception as error:  # from any runtime
                if kind == EAGER:
                    raise
                self._note(f'{candidate.name} in {kind} is left out: {error!r}')
                model = None
            self.opened[candidate.name, kind] = model
        return self.opened[candidate.name, kind]

    def _open(self, candidate: Candidate, kind: str, path: str | None) -> nn.Module:
        if path:
            preprocessor = self.model(self.stock).data_preprocessor
            exported = ExportedModel(path, preprocessor, FORMATS[kind].runtime)
            exported.session.keep_memory = not self.is_large
            return Padded(exported, self.divisor) if FORMATS[kind].padded else exported
        model = self.model(candidate)
        if candidate is not self.stock and next(model.parameters()).is_cuda:
            model = faster_on_gpu_(copied(model))
        return in_format(model, FORMATS[kind])

    def keeps(self, candidate: Candidate, kind: str, max_loss: float) -> bool:
        """Return True if a candidate in a format keeps the floor."""
        return meets(self.test(candidate, kind), max_loss)

    def test(self, candidate: Candidate, kind: str) -> dict:
        """Return ``metric``, ``difference`` and ``interval`` of a candidate in a format.

        Formats of float32 share one test: ``tested_in`` is the format that it was.
        """
        if self.num_images and self.open(candidate, kind) is not None:
            name, what = self._test_name(candidate.name, kind), f'test {candidate.name}, {kind}'
            self._find('tests', name, what, self._test, candidate, kind)
        return self.tested(candidate.name, kind)

    def tested(self, name: str, kind: str) -> dict:
        """Return what is known of a test, or None for each of its values."""
        untested = dict.fromkeys(('metric', 'difference', 'interval', 'tested_in'))
        return self.record.content['tests'].get(self._test_name(name, kind), untested)

    def _test_name(self, name: str, kind: str) -> str:
        """Return the name of all that a test depends on."""
        form = FORMATS[kind]
        kind = 'float32' if form.exact else kind
        kind += f' to multiples of {self.divisor}' if form.padded else ''
        return f'{name} in {kind} on {self.judge.mark}'

    @cached_property
    def stock_score(self) -> Score:
        """What the judge says of stock."""
        return self.judge(self.open(self.stock, EAGER))

    def _test(self, candidate: Candidate, kind: str) -> dict:
        stock = self.stock_score
        self.record.content['metric'] = self.judge.name
        if candidate is self.stock and kind == EAGER:
            return dict(metric=stock.value, difference=0.0, interval=[0.0, 0.0], tested_in=kind)
        score = self.judge(self.open(candidate, kind))
        same = candidate.budget == 1 and FORMATS[kind].exact
        change, *interval = self.judge.difference(score, stock, same)
        self.record.content['how'] = self.judge.how
        return dict(metric=score.value, difference=change, interval=interval, tested_in=kind)

    def latency_ratios(self, candidate: Candidate, kinds: Sequence[str]) -> dict[str, float]:
        """Return the times of a candidate in formats, divided by stock's, shortest first."""
        models = {(candidate.name, kind): self.open(candidate, kind) for kind in kinds}
        models = {key: model for key, model in models.items() if model is not None}
        latencies = self.time(models, 5, f'{candidate.name}, {", ".join(kinds)}', least=1)
        stock = np.median(latencies[self.stock.name, EAGER])
        found = {kind: float(np.median(latencies[name, kind]) / stock) for name, kind in models}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def time(
        self, models: dict, repeats: int, what: str, least: int = 3
    ) -> dict[tuple, np.ndarray]:
        """Time models in turn with stock, each turn with the next of ``timed``."""
        models = {(self.stock.name, EAGER): self.open(self.stock, EAGER), **models}
        calls = {key: model.test_step for key, model in models.items()}
        return self._step(
            f'time {what}',
            lambda: measure(calls, self.timed, repeats, MOST_SECONDS, per_turn=True, least=least),
        )

    # Results

    def _rows(self, full: bool) -> list[dict]:
        """Time all candidates in turn, and return the rows of the table.

        Args:
            full (bool): Write and test all formats, and not only what the search needed.
        """
        models = {}
        # Runtimes compile for a size at its first image, and tests have seen all: open files anew.
        self.opened = {key: m for key, m in self.opened.items() if not FORMATS[key[1]].file}
        for candidate in self.candidates.values():
            for kind in self.formats:
                file = FORMATS[kind].file
                if file and candidate is self.stock is not self.base:
                    continue  # the files are of the same model with faster parts
                known = f'{candidate.name} in {file}' in self.record.content['files']
                if full or not file or known:
                    models[candidate.name, kind] = self.open(candidate, kind)
        models = {key: model for key, model in models.items() if model is not None}
        latencies = self.time(models, self.repeats, f'{len(models)} rows in turn')
        stock = latencies[self.stock.name, EAGER]
        vary = max(np.ptp(np.percentile(v / stock, [25, 75])) for v in latencies.values())
        if vary > QUIET:
            self._note(
                f"the machine was not quiet: a row's times vary by {vary:.0%} of stock's between "
                'their quartiles. Run the command again: only times are taken anew'
            )
        rows = [self._row(*key, models[key], stock, v) for key, v in latencies.items()]
        for row in sorted(rows, key=lambda row: row['ms']):
            if full or row is rows[0]:
                self.test(self.candidates[row['candidate']], row['format'])
        for row in rows:
            row.update(self.tested(row['candidate'], row['format']))
        return rows

    def _row(self, name: str, kind: str, model: nn.Module, stock, times: np.ndarray) -> dict:
        candidate, form = self.candidates[name], FORMATS[kind]
        speedup, *interval = compare(stock, times)
        files = self.record.content['files']
        file = files[f'{name} in {form.file}']['path'] if form.file else None
        return dict(
            candidate=name, format=kind, ms=float(np.median(times)),
            ms_interval=np.percentile(times, [25, 75]).tolist(), speedup=speedup,
            speedup_interval=interval, mb=megabytes(model, file), file=file,
            config=candidate.config, checkpoint=candidate.checkpoint, budget=candidate.budget,
            chosen=False,
        )  # fmt: skip

    def _choose(self, rows, max_loss: float | None, latency: float | None) -> dict | None:
        """Return the row that meets the targets best: the fastest, or for a latency the best."""
        limit = 1 if latency is None else latency
        found = sorted(rows[1:], key=lambda row: row['ms'])
        found = [row for row in found if row['ms'] / rows[0]['ms'] <= limit]
        if latency is not None:
            for row in found:
                row.update(self.test(self.candidates[row['candidate']], row['format']))
            found.sort(key=lambda row: (-(row['difference'] or 0), -row['budget']))
        unsure = []
        for row in found:
            if max_loss is None or meets(row, max_loss):
                row['chosen'] = True
                break
            if row['interval'] and row['difference'] >= -max_loss:
                unsure.append(f'{row["candidate"]} ({row["format"]})')
        if unsure:
            self._note(
                f'{self.judge.num_images} images are too few to tell whether these lose more than '
                f'{max_loss} points: {", ".join(unsure)}. Test on more images (--num-images)'
            )
        return next((row for row in found if row['chosen']), None)

    def _report(self, rows: list[dict], chosen: dict | None) -> None:
        """Write the page, with what stock and the chosen model, or else the fastest, find."""
        shown = chosen or min(rows[1:], key=lambda row: row['ms'], default=rows[0])
        models = [
            self.open(self.candidates[row['candidate']], row['format']) for row in (rows[0], shown)
        ]
        path = osp.join(self.out_dir, 'report.html')
        with quiet():
            write_report(path, self.cfg, self.record.content, shown, models, self.judge)
        print(f'wrote {path} ({(time.monotonic() - self.started) / 60:.1f} min)')

    def _write_chosen(self, row: dict) -> None:
        """Write the chosen model, and a config that tests it on the images it was chosen on."""
        candidate, stem = self.candidates[row['candidate']], osp.join(self.out_dir, 'model')
        cfg = load_config(candidate.config)
        cfg.load_from, cfg.resume = osp.abspath(f'{stem}.pth'), False
        tested = copy.deepcopy(cfg)
        tested.update(self.judge.config)
        if FORMATS[row['format']].padded:
            step = dict(type='Pad', size_divisor=self.divisor, pad_val=dict(img=PIXEL))
            for one in (cfg, tested):
                dataset_config(one, 'test').pipeline.insert(-1, step)
        model = copy.copy(self.model(candidate))
        model.cfg = cfg
        save_model(model, self.checkpoint, f'{stem}.pth')
        if self.judge.config:
            write_text(osp.join(self.out_dir, 'tested.py'), tested.pretty_text)
        source = osp.splitext(row['file'] or '')[0]
        for suffix in ('.bin', '.xml', '.onnx'):  # weights first
            if source and osp.exists(source + suffix):
                with replacing(stem + suffix) as temporary:
                    shutil.copyfile(source + suffix, temporary)
            elif osp.exists(stem + suffix):  # of an earlier choice
                os.unlink(stem + suffix)


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


def megabytes(model: nn.Module, file: str | None) -> float:
    """Return the size of a file with its weights, or of a model's parameters and buffers."""
    if file is None:
        tensors = model.state_dict().values()
        return sum(x.numel() * x.element_size() for x in tensors if torch.is_tensor(x)) / 1e6
    weights = f'{osp.splitext(file)[0]}.bin'
    return sum(os.path.getsize(f) / 1e6 for f in {file, weights} if osp.exists(f))


def percent_name(budget: float) -> str:
    """Return the name of the candidate of a budget."""
    return f'{100 * budget:.0f} %'


def meets(test: dict, max_loss: float) -> bool:
    """Return True if the whole interval of a difference is above the floor."""
    return bool(test['interval']) and test['interval'][0] >= -max_loss


def on_line(points: Sequence[tuple[float, float]], ratio: float) -> float:
    """Return the budget at which the line through two points has a ratio to stock's time.

    Args:
        points (Sequence): Budgets and their ratios; the two nearest to the ratio count.
        ratio (float): The ratio to meet.
    """
    (a, at_a), (b, at_b) = sorted(points, key=lambda point: abs(point[1] - ratio))[:2]
    slope = (at_b - at_a) / (b - a) if b != a else 0.0
    return min(1.0, max(LEAST, a + (ratio - at_a) / slope)) if slope > 0 else LEAST
