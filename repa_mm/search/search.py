"""The search: what is fitted, exported, tested and timed, and what is kept of it."""

import copy
import hashlib
import io
import json
import os
import os.path as osp
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
import torch.nn as nn
from mmengine.dataset import pseudo_collate

from repa_mm.checkpoints import load_checkpoint, save_checkpoint
from repa_mm.config import load_config
from repa_mm.convert.pretrained import convert_checkpoint, deploy_
from repa_mm.datasets import ImageFolder
from repa_mm.export.export import NUM_IMAGES, agreeing_onnx
from repa_mm.export.int8 import images_to_quantize, quantize
from repa_mm.files import replacing, write_bytes, write_text
from repa_mm.opening import open_model, read_images
from repa_mm.reparam import has_training_form, reparameterize_
from repa_mm.search import candidates
from repa_mm.search.candidates import EAGER, FLOATS, INT8, Candidate
from repa_mm.search.judge import Agreement, Annotated, Score
from repa_mm.search.report import print_table, write_report
from repa_mm.timing import compare, measure
from repa_mm.variants import STOCK, build
from repa_mm.version import __version__

#: Least budget to try, and the first one.
LEAST, FIRST = 0.05, 0.4
#: Steps of a bisection for a floor, each with a fit, and for a latency, each without one.
FLOOR_STEPS, LATENCY_STEPS = 4, 6
#: A latency is searched for this much below the target, since times vary.
MARGIN = 0.97
#: Seconds after which a timing begins no more turns.
MOST_SECONDS = 240


class Search:
    """See :func:`repa_mm.speed_up`, which has the arguments."""

    def __init__(
        self, config, checkpoint, out_dir, images, num_images, fit_images, repeats, cfg_options
    ) -> None:
        self.out_dir, self.repeats, self.fit_images = out_dir, repeats, fit_images
        self.kept, self.folder = osp.join(out_dir, 'results.json'), osp.join(out_dir, 'candidates')
        self.cfg = load_config(config, cfg_options)
        given = [osp.abspath(path) for path in ImageFolder(images, []).paths] if images else []
        self.results = self._resume(
            fingerprint(f'{self.cfg.pretty_text}{__version__} {fit_images} {given}', checkpoint)
        )
        stock = build(self.cfg, checkpoint)
        self.preprocessor = copy.deepcopy(stock.data_preprocessor)
        self.images = self.judge = None
        if images:
            self.images = osp.join(self.folder, 'fit_images')
            of_judge = split_images(images, self.images, osp.join(self.folder, 'test_images'))
            self.judge = Agreement(self.cfg, max(num_images, 1), of_judge)
        else:
            subset = osp.join(out_dir, f'first_{max(num_images, 1)}_images.json')
            self.judge = Annotated(self.cfg, max(num_images, 1), subset)
        self.tests_wanted = num_images > 0
        self.key = f'{self.judge.num_images} images of {osp.abspath(images) if images else "data"}'
        if cfg_options or '::' in config:
            config = self._dump('original', self.cfg)
        self.config, self.checkpoint = config, checkpoint
        self.formats, self.notes = candidates.installed_formats()
        self.planned: list[str] = []
        self.done, self.started = 0, time.monotonic()
        self.opened: dict[tuple, nn.Module] = {}
        self.candidates = {STOCK: Candidate(STOCK, config, checkpoint)}
        self.base = self._base(stock)
        for found in self.results['candidates'].values():
            self.candidates[found['name']] = Candidate(**found)
        self.stock_score: Score | None = None

    # What is kept

    def _resume(self, mark: str) -> dict:
        if osp.exists(self.kept):
            with open(self.kept, encoding='utf-8') as file:
                results = json.load(file)
            if results['fingerprint'] != mark:
                raise ValueError(
                    f'{self.out_dir!r} has the results of another model, of other data or of other '
                    f'options ({results["checkpoint"]} with {results["config"]}, as they were): '
                    'give another folder'
                )
            return results
        for name in ('model.py', 'model.pth'):
            if osp.exists(osp.join(self.out_dir, name)):
                raise ValueError(
                    f'{self.out_dir!r} has a {name} of something else: give another folder'
                )
        return dict(
            fingerprint=mark, config='', checkpoint='', candidates={}, files={}, tests={},
            seconds={}, rows=[], metric='',
        )  # fmt: skip

    def _save(self) -> None:
        self.results.update(config=self.config, checkpoint=self.checkpoint)
        write_text(self.kept, json.dumps(self.results, indent=1))

    def _dump(self, stem: str, cfg) -> str:
        path = osp.join(self.folder, f'{stem}.py')
        write_text(path, cfg.pretty_text)
        return path

    def _step(self, kind: str, what: str, work: Callable):
        """Run a step, with a line on what it does and how long the planned steps take."""
        if kind in self.planned:
            self.planned.remove(kind)
        self.done += 1
        seconds = self.results['seconds']
        rest = [kind, *self.planned]
        known = [np.mean(seconds[k]) for k in rest if k in seconds]
        left = f'{sum(known) / 60:.1f} min left' if known else 'time left not known yet'
        more = ' or more' * (0 < len(known) < len(rest))
        total = self.done + len(self.planned)
        print(f'[{self.done}/{total}] {what}; {left}{more}', flush=True)
        begin = time.monotonic()
        with quiet():
            result = work()
        seconds.setdefault(kind, []).append(time.monotonic() - begin)
        self._save()
        return result

    def _missing(self, names: Sequence[str]) -> list[str]:
        """Return the kinds of the steps that candidates of these names still need."""
        kinds, tests = ['time'], self.results['tests'].get(self.key, {})
        for name in dict.fromkeys(names):
            formats = self._formats_of(name)
            files = ['onnx'] * (len(formats) > 1) + ['int8'] * (INT8 in formats)
            kinds += ['fit'] * (name.endswith('%') and name not in self.candidates)
            kinds += [kind for kind in files if f'{name}|{kind}' not in self.results['files']]
            # One test of floats, and one of each other format.
            groups = {'floats' if kind in FLOATS else kind for kind in formats}
            groups -= {'floats' if k in FLOATS else k for k in formats if f'{name}|{k}' in tests}
            kinds += ['test'] * len(groups) * self.tests_wanted
        return kinds

    # Steps

    def _formats_of(self, name: str) -> list[str]:
        """Return the formats of a candidate: stock has files only if it is what becomes narrow."""
        return [EAGER] if name == STOCK != self.base.name else self.formats

    def _base(self, stock: nn.Module) -> Candidate:
        """Return the candidate with all widths: the model with faster parts, merged."""
        cfg = candidates.with_faster_parts(self.cfg, stock)
        if has_training_form(stock):
            path = osp.join(self.folder, 'merged.pth')
            cfg = copy.deepcopy(cfg)
            deploy_(cfg.model)
            if not self.results.get('merged'):
                meta = load_checkpoint(self.checkpoint).get('meta') or {}
                meta = dict(meta, cfg=cfg.pretty_text)
                save_checkpoint(
                    dict(meta=meta, state_dict=reparameterize_(stock).state_dict()), path
                )
                self.results['merged'] = True
            base = Candidate('merged', self._dump('merged', cfg), path)
        elif cfg is self.cfg:
            base = Candidate(STOCK, self.config, self.checkpoint)
        else:
            base = Candidate('faster parts', self._dump('faster', cfg), self.checkpoint)
        self.candidates.setdefault(base.name, base)
        return base

    def fit(self, budget: float) -> Candidate | None:
        """Return the narrower model of a budget, or None if there can be none."""
        # The least that the sizes of an earlier fit allowed, if its budget was below.
        budget = round(max(budget, self.results.get('least', 0.0)), 2)
        name = percent_name(budget)
        if name not in self.candidates and not self.results.get('cannot_narrow'):
            out = osp.join(self.folder, f'{100 * budget:.0f}.pth')
            self.opened.clear()  # memory, for the fit
            begin = last = time.monotonic()
            blocks, screen = [], sys.stdout

            def progress(row, number: int) -> None:
                nonlocal last
                blocks.append(dict(name=row.name, before=row.before, after=row.after))
                if time.monotonic() - last > 30:
                    last = time.monotonic()
                    left = (last - begin) * (number - len(blocks)) / len(blocks)
                    text = f'    {len(blocks)} of {number} parts, {left / 60:.1f} min left of this'
                    print(text, file=screen, flush=True)

            def work() -> None:
                nonlocal name
                try:
                    result = convert_checkpoint(
                        self.base.config, self.base.checkpoint, out, budget=budget,
                        images=self.images, num_images=self.fit_images, progress=progress,
                        device='cpu',
                    )  # fmt: skip
                except ValueError as error:
                    self.results['cannot_narrow'] = str(error)
                    return
                config = f'{osp.splitext(out)[0]}.py'
                left = max(budget, round(result['report'].share, 2))
                if left > budget:
                    self.results['least'] = left
                    name = percent_name(left)
                found = Candidate(name, config, out, left, blocks)
                self.candidates[name] = found
                self.results['candidates'][name] = asdict(found)

            self._step('fit', f'fit {name} of the blocks to {self.fit_images} images', work)
        return self.candidates.get(name)

    def file(self, candidate: Candidate, kind: str) -> str | None:
        """Return the file of a candidate for a format; '' if it was refused, None for PyTorch."""
        if kind == EAGER:
            return None
        what = 'int8' if kind == INT8 else 'onnx'
        key, files = f'{candidate.name}|{what}', self.results['files']
        if key not in files or files[key] and not osp.exists(files[key]):
            stem = osp.join(self.folder, candidate.name.replace(' %', '').replace(' ', '_'))
            path = f'{stem}_int8.xml' if kind == INT8 else f'{stem}.onnx'

            def work() -> None:
                cfg = load_config(candidate.config)
                model = open_model(cfg, candidate.checkpoint, merge=True)
                try:
                    if kind == INT8:
                        seen, others = images_to_quantize(cfg, self.fit_images, self.images)
                        quantize(model, path, seen, others)
                    else:
                        split = getattr(self.judge, 'split', 'test')
                        images = read_images(cfg, split, NUM_IMAGES, self.images)
                        write_bytes(path, agreeing_onnx(model, images)[0])
                    files[key] = path
                except OSError:
                    raise
                except Exception as error:  # from any exporter: other formats are measured still
                    files[key] = ''
                    text = str(error) if isinstance(error, ValueError) else repr(error)
                    self.results.setdefault('refused', {})[key] = text

            self._step(what, f'write {what} of {candidate.name}', work)
        return files[key]

    def open(self, candidate: Candidate, kind: str) -> nn.Module | None:
        """Return a candidate in a format, or None if there is no such file."""
        key = candidate.name, kind
        if key not in self.opened:
            file = self.file(candidate, kind)
            if file == '':
                return None
            self.opened[key] = candidates.open_model(candidate, kind, file, self.preprocessor)
        return self.opened[key]

    def test(self, candidate: Candidate, kind: str) -> dict | None:
        """Return ``metric``, ``difference`` and ``interval`` of a candidate in a format."""
        if not self.tests_wanted:
            return None
        tests, key = self.results['tests'].setdefault(self.key, {}), f'{candidate.name}|{kind}'
        model = self.open(candidate, kind) if key not in tests else None
        if model is not None:
            if self.stock_score is None:
                stock = self.open(self.candidates[STOCK], EAGER)
                what = f'test {STOCK} on {self.judge.num_images} images'
                score = self.stock_score = self._step('test', what, lambda: self.judge(stock))
                nothing = dict(metric=score.value, difference=0.0, interval=[0.0, 0.0])
                tests[f'{STOCK}|{EAGER}'] = nothing
                self.results['metric'] = self.judge.name

            def work() -> None:
                score = self.judge(model)
                same = candidate.budget == 1 and kind in FLOATS
                change, low, high = self.judge.difference(score, self.stock_score, same)
                tests[key] = dict(metric=score.value, difference=change, interval=[low, high])
                self.results['how'] = self.judge.how

            self._step('test', f'test {candidate.name}, {kind}', work)
        return tests.get(key)

    def time(self, models: dict, repeats: int, what: str) -> dict[tuple, np.ndarray]:
        """Time models in turn with stock, on the first image."""
        models = {(STOCK, EAGER): self.open(self.candidates[STOCK], EAGER), **models}
        calls = {key: model.test_step for key, model in models.items()}
        data = pseudo_collate([self.judge.dataset[0]])

        @torch.no_grad()
        def work() -> dict[tuple, np.ndarray]:
            return measure(calls, data, repeats, MOST_SECONDS)

        return self._step('time', what, work)

    # Searches

    def run(self, max_loss: float | None, latency: float | None, budgets: Sequence[float]):
        """Search, choose, write the files, and return the table's rows."""
        self._save()
        step = ['fit', 'onnx', 'test']
        if latency is not None:
            self.planned = self._missing([self.base.name]) + LATENCY_STEPS * ['time'] + step
            self._search_latency(latency)
        elif max_loss is not None:
            self.planned = (
                self._missing([self.base.name])
                + FLOOR_STEPS * step
                + ['int8'] * (INT8 in self.formats)
                + ['onnx', 'test', 'time']
            )
            self._search_floor(max_loss)
        else:
            names = [percent_name(budget) for budget in budgets]
            self.planned = self._missing([*self.candidates, *names])
            for budget in budgets:
                self.fit(budget)
        full = latency is None and max_loss is None
        self.planned = self._missing([*self.candidates]) if full else ['time']
        rows = self._rows(full)
        if 'cannot_narrow' in self.results:
            self.notes.append(f'there is no narrower model: {self.results["cannot_narrow"]}')
        for key, why in self.results.get('refused', {}).items():
            self.notes.append(f'{key.replace("|", " in ")} is left out: {why}')
        chosen = self._choose(rows, max_loss, latency)
        target = ' and '.join(
            text.format(value)
            for text, value in (
                ('loses at most {} points', max_loss),
                ("takes at most {:.0%} of stock's time", latency),
            )
            if value is not None
        )
        self._finish(rows, chosen, target, max_loss)
        return rows

    def _promising(self) -> tuple[list[str], dict]:
        """Return the formats in ascending order of the base's time, and the times."""
        models = {(self.base.name, k): self.open(self.base, k) for k in self.formats}
        models = {key: model for key, model in models.items() if model is not None}
        times = self.time(models, 3, f'time {self.base.name} in all formats')
        return sorted(
            (kind for _, kind in models), key=lambda kind: np.median(times[self.base.name, kind])
        ), times

    def _search_floor(self, max_loss: float) -> None:
        """Bisect the budget in the fastest format that keeps the floor with all widths.

        Quantizing takes minutes: int8 stands back for floats, and is then tested in what they keep.
        """
        order, _ = self._promising()

        def keeps(kind: str, candidate: Candidate = self.base) -> bool:
            return meets(self.test(candidate, kind), max_loss)

        kind = probe = next(filter(keeps, order), order[0])
        if kind == INT8:
            others = [k for k in order if k != INT8]
            probe = next(filter(keeps, others), others[0])
        low, high, kept = LEAST, 1.0, []
        for step in range(FLOOR_STEPS):
            budget = FIRST if step == 0 else (low + high) / 2
            candidate = self.fit(budget)
            if candidate is None:
                return
            meets_it = keeps(probe, candidate)
            low, high = (low, budget) if meets_it else (budget, high)
            kept = [candidate, *kept] if meets_it else kept  # the narrowest first
            if meets_it and candidate.budget > round(budget, 2):
                break  # as narrow as it can be
        for candidate in kept:
            if keeps(kind, candidate):
                break
        second = next((k for k in order if k != kind), None)
        if kept and second:  # which of two formats is faster may change with the widths
            self.test(kept[0], second)

    def _search_latency(self, latency: float) -> None:
        """Find the budget that meets the target in each promising format, and fit the largest."""
        order, times = self._promising()
        stock = np.median(times[STOCK, EAGER])
        shares = {kind: np.median(times[self.base.name, kind]) / stock for kind in order}
        met = [kind for kind in order if shares[kind] <= latency * MARGIN]
        for kind in met:
            self.test(self.base, kind)
        if met:
            return
        measured: dict[tuple[float, str], float] = {}

        def share(budget: float, kind: str) -> float:
            if (budget, kind) not in measured:
                key = f'{100 * budget:.0f} %, random weights', kind
                model = candidates.random_narrow(self.base, budget, kind, self.preprocessor)
                found = self.time({key: model}, 5, f'time {key[0]}, {kind}')
                measured[budget, kind] = np.median(found[key]) / np.median(found[STOCK, EAGER])
            return measured[budget, kind]

        plans = []
        for kind in [k for k in order if k in FLOATS][:1] + [k for k in order if k not in FLOATS]:
            # Quantizing a random model would take minutes: int8 is taken to gain as its floats do.
            other = next(k for k in order if k != INT8) if kind == INT8 else kind
            target = latency * MARGIN * shares[other] / shares[kind]
            try:
                budget = bisect(partial(share, kind=other), target)
            except ValueError as error:  # no block can be narrowed
                self.results['cannot_narrow'] = str(error)
                return
            if budget is None:
                print(f'    {kind} does not meet the target with {LEAST:.0%} of the blocks either')
            else:
                plans.append((budget, kind))
        for budget, kind in sorted(plans, reverse=True):
            for _ in range(3):
                candidate = self.fit(budget)
                model = candidate and self.open(candidate, kind)
                if model is None:
                    break
                key = candidate.name, kind
                found = self.time({key: model}, 5, f'time {candidate.name}, {kind}')
                ratio = np.median(found[key]) / np.median(found[STOCK, EAGER])
                self.test(candidate, kind)
                if ratio <= latency:
                    return
                if budget <= LEAST or candidate.budget > round(budget, 2):
                    break
                budget = max(LEAST, budget * min(0.95, latency / ratio))

    # Results

    def _rows(self, full: bool) -> list[dict]:
        """Time all candidates in turn, and return the rows of the table.

        Args:
            full (bool): Write and test all formats, and not only what the search needed.
        """
        models = {}
        for candidate in self.candidates.values():
            for kind in self._formats_of(candidate.name):
                what = f'{candidate.name}|{"int8" if kind == INT8 else "onnx"}'
                wanted = full or kind == EAGER or self.results['files'].get(what)
                model = self.open(candidate, kind) if wanted else None
                if model is not None:
                    models[candidate.name, kind] = model
        times = self.time(models, self.repeats, f'time {len(models)} rows in turn')
        rows, stock = [], times[STOCK, EAGER]
        spread = max(np.ptp(np.percentile(v, [25, 75])) / np.median(v) for v in times.values())
        if spread > 0.3:
            self.notes.append(
                f'the times of a row vary by {spread:.0%} between quartiles: other processes may '
                'be running. Run the command again on a quiet machine: only times are taken anew'
            )
        if len(stock) < 6:
            self.notes.append(f'large models: each row has {len(stock)} times only')
        for (name, kind), values in times.items():
            candidate, model = self.candidates[name], models[name, kind]
            ratio, low, high = compare(stock, values)
            file = self.file(candidate, kind)
            rows.append(
                dict(
                    candidate=name, format=kind, ms=float(np.median(values)),
                    ms_interval=np.percentile(values, [25, 75]).tolist(), times=ratio,
                    times_interval=[low, high], mb=candidates.megabytes(model, file), file=file,
                    config=candidate.config, checkpoint=candidate.checkpoint,
                    budget=candidate.budget, chosen=False,
                )
            )  # fmt: skip
        if full and self.tests_wanted:
            self._test_rows(rows)
        for row in rows:
            self._fill(row)
        return rows

    def _test_rows(self, rows: list[dict]) -> None:
        """Test the fastest format of floats of each candidate, bf16 and int8."""
        best: dict[tuple, dict] = {}
        for row in sorted(rows, key=lambda row: row['ms']):
            group = 'floats' if row['format'] in FLOATS else row['format']
            best.setdefault((row['candidate'], group), row)
        for row in best.values():
            self.test(self.candidates[row['candidate']], row['format'])

    def _fill(self, row: dict) -> None:
        """Put the test of a row into it, or that of another format of floats."""
        tests = self.results['tests'].get(self.key, {})
        kinds = [row['format'], *(FLOATS if row['format'] in FLOATS else ())]
        found = next((k for k in kinds if f'{row["candidate"]}|{k}' in tests), None)
        nothing = dict(metric=None, difference=None, interval=None)
        row.update(tests[f'{row["candidate"]}|{found}'] if found else nothing, tested_in=found)

    def _choose(self, rows, max_loss: float | None, latency: float | None) -> dict | None:
        """Return the row that meets the targets best, tested itself."""
        if max_loss is None and latency is None:
            return None

        def fast(row: dict) -> bool:
            share = row['ms'] / rows[0]['ms']
            return share < 1 if latency is None else share <= latency

        def worth(row: dict) -> tuple:
            if latency is None:
                return (row['ms'],)
            return -(row['difference'] or 0), -row['budget'], row['ms']

        found = [row for row in rows[1:] if fast(row)]
        if latency is not None:  # what was slower when the search looked at it
            for row in found:
                self.test(self.candidates[row['candidate']], row['format'])
                self._fill(row)
        for row in sorted(found, key=worth):
            if max_loss is not None:
                if not meets(row, max_loss):
                    continue
                self.test(self.candidates[row['candidate']], row['format'])
                self._fill(row)
            if max_loss is None or meets(row, max_loss):
                row['chosen'] = True
                return row
        return None

    def _finish(self, rows, chosen: dict | None, target: str, max_loss: float | None) -> None:
        if chosen:
            self._write_chosen(chosen)
        elif target:
            known = [r for r in rows[1:] if max_loss is None or r['interval']] or rows[1:]
            near = max(known, key=lambda r: r['times'] if max_loss is None else r['interval'][0])
            text = f'{near["candidate"]} in {near["format"]}, {1 / near["times"]:.0%} of the time'
            if near['interval']:
                text += f' and {near["difference"]:+.2f} points, or {near["interval"][0]:+.2f}'
            self.notes.append(f'nothing {target}: nothing is chosen. The nearest is {text}')
            if osp.exists(osp.join(self.out_dir, 'model.py')):
                self.notes.append('model.py and its files are the choice of an earlier run')
        if max_loss is not None:
            unsure = [r for r in rows[1:] if r['difference'] is not None]
            unsure = [r for r in unsure if r['difference'] >= -max_loss and not meets(r, max_loss)]
            if unsure and not (chosen and all(r['ms'] >= chosen['ms'] for r in unsure)):
                names = ', '.join(f'{r["candidate"]} ({r["format"]})' for r in unsure)
                self.notes.append(
                    f'{self.judge.num_images} images are too few to tell whether these lose more '
                    f'than {max_loss} points: {names}. Test on more images (--num-images)'
                )
        self.results.update(rows=rows, target=target, key=self.key)
        self._save()
        print_table(rows, self.results)
        for note in self.notes:
            print(note)
        shown = chosen or min(rows[1:], key=lambda row: row['ms'], default=rows[0])
        models = [
            self.open(self.candidates[row['candidate']], row['format']) for row in (rows[0], shown)
        ]
        path = osp.join(self.out_dir, 'report.html')
        with quiet():
            write_report(path, self.cfg, self.results, self.notes, shown, models, self.judge)
        print(f'wrote {path} ({(time.monotonic() - self.started) / 60:.1f} min)')

    def _write_chosen(self, row: dict) -> None:
        """Write the chosen model's config, checkpoint and file."""
        stem = osp.join(self.out_dir, 'model')
        loaded = load_checkpoint(row['checkpoint'])
        kept = {key: loaded[key] for key in ('meta', 'state_dict') if key in loaded}
        save_checkpoint(kept, f'{stem}.pth')
        cfg = load_config(row['config'])
        cfg.load_from = osp.abspath(f'{stem}.pth')
        if isinstance(self.judge, Annotated):  # by what it was chosen
            for name in ('dataloader', 'evaluator'):
                cfg[f'test_{name}'] = cfg[f'{self.judge.split}_{name}']
        write_text(f'{stem}.py', cfg.pretty_text)
        source, suffix = osp.splitext(row['file'] or '')
        copied = {'.onnx': ['.onnx'], '.xml': ['.bin', '.xml']}.get(suffix, [])  # weights first
        for other in {'.onnx', '.bin', '.xml'} - {*copied}:
            with suppress(FileNotFoundError):  # of an earlier choice
                os.unlink(stem + other)
        for suffix in copied:
            with replacing(stem + suffix) as temporary:
                shutil.copyfile(source + suffix, temporary)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what the codebases, COCO and NNCF print."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def fingerprint(config: str, checkpoint: str) -> str:
    """Return a hash of a config's text and of a checkpoint file, or of its address."""
    found = hashlib.sha256(config.encode())
    if osp.isfile(checkpoint):
        with open(checkpoint, 'rb') as file:
            for block in iter(lambda: file.read(1 << 24), b''):
                found.update(block)
    else:
        found.update(checkpoint.encode())
    return found.hexdigest()


def split_images(folder: str, to_fit: str, to_test: str) -> str:
    """Link every third image of a folder into a folder to test on, the others into one to fit to.

    Returns:
        str: The folder to test on.
    """
    paths = ImageFolder(folder, []).paths
    if len(paths) < 2:
        raise ValueError(f'{folder} needs two images: one to fit to, one to test on')
    for i, path in enumerate(paths):
        target = to_fit if i % 3 else to_test
        os.makedirs(target, exist_ok=True)
        link = osp.join(target, f'{i:06}{osp.splitext(path)[1]}')
        if not osp.lexists(link):  # the same paths as then: they are in the fingerprint
            os.symlink(osp.abspath(path), link)
    return to_test


def percent_name(budget: float) -> str:
    """Return the name of the candidate of a budget."""
    return f'{100 * budget:.0f} %'


def meets(test: dict | None, max_loss: float) -> bool:
    """Return True if the whole interval of a difference is above the floor."""
    return bool(test and test['interval'] and test['interval'][0] >= -max_loss)


def bisect(share: Callable[[float], float], target: float) -> float | None:
    """Return the largest budget that meets a share of stock's time, or None if the least does not.

    Args:
        share (Callable): Maps a budget to a share of stock's time.
        target (float): The share to meet.
    """
    if share(LEAST) > target:
        return None
    low, high = LEAST, 1.0
    for step in range(LATENCY_STEPS - 1):
        budget = FIRST if step == 0 else (low + high) / 2
        if share(budget) <= target:
            low = budget
        else:
            high = budget
    return low
