"""The search: for each candidate fit, export, test, time. What is known is kept."""

import copy
import io
import json
import os
import os.path as osp
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
import torch.nn as nn
from mmengine.dataset import pseudo_collate
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.benchmark.timing import compare, measure
from repa_mm.benchmark.variants import STOCK
from repa_mm.checkpoints import load_checkpoint, save_checkpoint
from repa_mm.config import dataset_config, load_config
from repa_mm.convert.conversion import spread_budget
from repa_mm.convert.pretrained import convert_model
from repa_mm.export.export import NUM_IMAGES, agreeing_onnx
from repa_mm.export.int8 import quantize
from repa_mm.export.runtime_model import ExportedModel
from repa_mm.files import replacing, write_bytes, write_text
from repa_mm.images import cropped
from repa_mm.opening import build_images, deploy_, open_model, spread
from repa_mm.reparam import Form, outermost
from repa_mm.search.candidates import Candidate, with_faster_parts
from repa_mm.search.formats import (
    EAGER,
    FORMATS,
    PIXEL,
    Padded,
    divisor_for,
    in_format,
    installed_formats,
    megabytes,
)
from repa_mm.search.judge import LEAST_IMAGES, Agreement, Annotated, Score, files_of, hashed
from repa_mm.search.report import print_table, write_report
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


class Search:
    """See :func:`repa_mm.speed_up`, which has the arguments."""

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
        self.started, self.screen = time.monotonic(), sys.stdout
        self.out_dir, self.folder = out_dir, osp.join(out_dir, 'candidates')
        self.repeats, self.device = repeats, device
        self.tests_wanted = num_images > 0
        self.cfg = load_config(config, cfg_options)
        if not (images or self.cfg.get('train_dataloader')):
            raise ValueError(
                'the config has no training data to fit to: give a folder of images (--images)'
            )
        self.train = build_images(self.cfg, 'train', images)
        # Of a folder, every third image is tested.
        pool = [i for i in range(len(self.train)) if i % 3 or not images]
        if not pool:
            raise ValueError(f'{images} needs two images: one to fit to, one to test on')
        self.to_fit = [pool[i] for i in spread(fit_images, len(pool))]
        fixed = f'{self.cfg.pretty_text}{__version__}', files_of(self.train, self.to_fit)
        self.results = self._resume(hashed(*fixed, content_of(checkpoint)))
        model = open_model(self.cfg, checkpoint, merge=True)
        if images:
            self.judge = Agreement(self.train, range(0, len(self.train), 3), num_images)
        else:
            subset = osp.join(out_dir, f'{max(num_images, 1)}_images.json')
            self.judge = Annotated(self.cfg, num_images, subset)
        self.timed = self.judge.images(repeats, batch_size)
        sizes = {tuple(image.shape[-2:]) for data in self.timed for image in data['inputs']}
        self.results.update(
            config=config, checkpoint=checkpoint, device=device,
            timed='one image' if batch_size == 1 else f'{batch_size} images',
            images=f'{self.judge.num_images} images of {osp.abspath(images) if images else "data"}',
        )  # fmt: skip
        self.tests = self.results['tests'].setdefault(self.judge.mark, {})
        self.formats, notes = installed_formats(device)
        self.notes = [*notes, *filter(None, [self.judge.note])]
        if len(sizes) > 1:
            self.results['timed'] += f' of {len(sizes)} sizes'
        self.divisor = divisor_for(sizes) if self.cfg.default_scope == 'mmdet' else None
        if self.divisor:
            padded = (f'{kind}, padded' for kind in self.formats)
            self.formats += [kind for kind in padded if kind in FORMATS]
        self.steps, self.parts = 0, 0
        self.opened: dict[tuple[str, str], nn.Module] = {}
        self.stock_score: Score | None = None
        self._add_originals(model, checkpoint)
        for found in self.results['candidates'].values():
            self.candidates[found['name']] = Candidate(**found)

    # What is kept

    def _resume(self, mark: str) -> dict:
        kept = osp.join(self.out_dir, 'results.json')
        if osp.exists(kept):
            with open(kept, encoding='utf-8') as file:
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
            fingerprint=mark, candidates={}, files={}, refused={}, tests={}, rows=[], metric='',
        )  # fmt: skip

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _save(self) -> None:
        write_text(osp.join(self.out_dir, 'results.json'), json.dumps(self.results, indent=1))

    def _add_originals(self, model: nn.Module, checkpoint: str) -> None:
        """Add the original, which is merged if it is a RePaFormer, and the one to be narrowed."""
        cfg, name, stem = copy.deepcopy(self.cfg), STOCK, osp.join(self.folder, 'stock')
        if any(outermost(model, Form)):  # nobody deploys the training form
            name, path = 'merged', f'{stem}.pth'
            deploy_(cfg.model)
            if not self.results.get('merged'):
                meta = load_checkpoint(checkpoint).get('meta') or {}
                save_checkpoint(
                    dict(meta=dict(meta, cfg=cfg.pretty_text), state_dict=model.state_dict()), path
                )
                self.results['merged'] = True
            checkpoint = path
        write_text(f'{stem}.py', cfg.pretty_text)
        self.stock = self.base = Candidate(name, f'{stem}.py', checkpoint)
        self.preprocessor = copy.deepcopy(model.data_preprocessor)
        self.models = {name: model.to(self.device)}
        faster = with_faster_parts(cfg, model)
        if faster is not cfg:
            path = osp.join(self.folder, 'faster.py')
            write_text(path, faster.pretty_text)
            self.base = Candidate('faster parts', path, checkpoint)
        self.candidates = {c.name: c for c in (self.stock, self.base)}

    # Steps

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """Say what is done, hide what others print meanwhile, and keep the results."""
        self.steps += 1
        print(f'[{self.steps}] {what}', file=self.screen, flush=True)
        with quiet():
            yield
        self._save()

    def model(self, candidate: Candidate) -> nn.Module:
        """Return a candidate's model, on the device."""
        if candidate.name not in self.models:
            model = open_model(load_config(candidate.config), candidate.checkpoint)
            self.models[candidate.name] = model.to(self.device)
        return self.models[candidate.name]

    def calibration(self) -> list[dict]:
        """Return the images to fit to, and to calibrate int8 on."""
        return [pseudo_collate([self.train[i]]) for i in self.to_fit]

    def fit(self, budget: float) -> Candidate | None:
        """Return the narrower model of a budget, or None if the fit fails."""
        # The least that the sizes of an earlier fit allowed, if its budget was below.
        budget = max(0.01, round(max(budget, self.results.get('least', 0.0)), 2))
        name = percent_name(budget)
        if name in self.candidates:
            return self.candidates[name]
        with self._step(f'fit {name} of the blocks to {len(self.to_fit)} images'):
            try:
                self.parts = 0
                narrow, report = convert_model(
                    self.model(self.base), self.calibration(), [],
                    partial(spread_budget, budget=budget), progress=self._progress,
                )  # fmt: skip
            except (ValueError, ArithmeticError, RuntimeError) as error:  # others are tried still
                self._note(f'{name} of the blocks is left out: {error}')
                return None
            left = max(budget, round(report.fraction, 2))
            if left > budget:
                self.results['least'] = left
            found = self._keep(percent_name(left), left, narrow, report)
            self.results['candidates'][found.name] = asdict(found)
        return self.candidates.setdefault(found.name, found)

    def _progress(self, row, number: int) -> None:
        """Print every tenth of a fit."""
        self.parts += 1
        if self.parts * 10 // number > (self.parts - 1) * 10 // number:
            print(f'    {self.parts} of {number} parts', file=self.screen, flush=True)

    def _keep(self, name: str, budget: float, model: nn.Module, report) -> Candidate:
        """Write a narrower model's config and checkpoint."""
        stem = osp.join(self.folder, name.removesuffix(' %'))
        meta = load_checkpoint(self.base.checkpoint).get('meta') or {}
        meta = dict(meta, cfg=model.cfg.pretty_text)
        save_checkpoint(
            dict(meta=meta, state_dict=weights_to_cpu(model.state_dict())), f'{stem}.pth'
        )
        write_text(f'{stem}.py', model.cfg.pretty_text)
        blocks = [dict(name=b.name, before=b.before, after=b.after) for b in report.blocks]
        return Candidate(name, f'{stem}.py', f'{stem}.pth', budget, blocks)

    def file(self, candidate: Candidate, kind: str) -> str:
        """Return a candidate's file, 'onnx' or 'int8', or '' if it was refused."""
        key, files = f'{candidate.name}|{kind}', self.results['files']
        if key not in files or files[key] and not osp.exists(files[key]):
            stem = osp.join(self.folder, candidate.name.removesuffix(' %').replace(' ', '_'))
            path = f'{stem}_int8.xml' if kind == 'int8' else f'{stem}.onnx'
            with self._step(f'write {kind} of {candidate.name}'):
                try:
                    self._write(candidate, path)
                    files[key] = path
                except OSError:
                    raise
                except Exception as error:  # from any exporter: other formats are measured still
                    files[key] = ''
                    text = str(error) if isinstance(error, ValueError) else repr(error)
                    self.results['refused'][key] = text
        return files[key]

    def _write(self, candidate: Candidate, path: str) -> None:
        """Write a file, if it agrees with PyTorch on images."""
        model = copy.deepcopy(self.model(candidate)).cpu()
        if path.endswith('.xml'):
            held_out = self.judge.images(-(-len(self.to_fit) // 2))
            crops = [cropped(data) for data in self.calibration()]
            quantize(model, path, crops, held_out)
        else:
            write_bytes(path, agreeing_onnx(model, self.judge.images(NUM_IMAGES))[0])

    def open(self, candidate: Candidate, kind: str) -> nn.Module | None:
        """Return a candidate in a format, or None if there is no such file, or it does not run."""
        key, form = (candidate.name, kind), FORMATS[kind]
        if key not in self.opened:
            file = self.file(candidate, form.file) if form.file else None
            if file == '':
                return None
            try:
                if file:
                    model = ExportedModel(file, self.preprocessor, form.runtime)
                    model = Padded(model, self.divisor) if form.padded else model
                else:
                    is_stock = candidate is self.stock
                    model = in_format(self.model(candidate), form, as_it_is=is_stock)
                if kind != EAGER:  # its first image: compilers fail here
                    with quiet(), torch.no_grad():
                        model.test_step(self.judge.images(1)[0])
            except Exception as error:
                if kind == EAGER:
                    raise
                self._note(f'{candidate.name} in {kind} is left out: {error!r}')
                return None
            self.opened[key] = model
        return self.opened[key]

    def test(self, candidate: Candidate, kind: str) -> dict | None:
        """Return ``metric``, ``difference`` and ``interval`` of a candidate in a format."""
        if not self.tests_wanted:
            return None
        key = f'{candidate.name}|{kind}'
        model = self.open(candidate, kind) if key not in self.tests else None
        if model is None:
            return self.tests.get(key)
        if self.stock_score is None:
            with self._step(f'test {self.stock.name} on {self.judge.num_images} images'):
                score = self.stock_score = self.judge(self.open(self.stock, EAGER))
                self.tests[f'{self.stock.name}|{EAGER}'] = dict(
                    metric=score.value, difference=0.0, interval=[0.0, 0.0]
                )
                self.results['metric'] = self.judge.name
        if key not in self.tests:
            with self._step(f'test {candidate.name}, {kind}'):
                score = self.judge(model)
                same = candidate.budget == 1 and FORMATS[kind].exact
                change, *interval = self.judge.difference(score, self.stock_score, same)
                self.tests[key] = dict(metric=score.value, difference=change, interval=interval)
                self.results['how'] = self.judge.how
        return self.tests[key]

    def keeps(self, candidate: Candidate, kind: str, max_loss: float) -> bool:
        """Return True if a candidate in a format keeps the floor."""
        return meets(self.test(candidate, kind), max_loss)

    def time(self, models: dict, repeats: int, what: str) -> dict[tuple, np.ndarray]:
        """Time models in turn with stock, each turn with other images, as they come."""
        models = {(self.stock.name, EAGER): self.open(self.stock, EAGER), **models}
        calls = {key: model.test_step for key, model in models.items()}
        with self._step(what), torch.no_grad():
            return measure(calls, self.timed, repeats, MOST_SECONDS, per_turn=True)

    def shares(self, candidate: Candidate, kinds: Sequence[str]) -> dict[str, float]:
        """Return the shares of stock's time that a candidate takes in formats, shortest first."""
        models = {(candidate.name, kind): self.open(candidate, kind) for kind in kinds}
        models = {key: model for key, model in models.items() if model is not None}
        latencies = self.time(models, 5, f'time {candidate.name}, {", ".join(kinds)}')
        stock = np.median(latencies[self.stock.name, EAGER])
        found = {kind: float(np.median(latencies[name, kind]) / stock) for name, kind in models}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    # Searches

    def run(
        self, max_loss: float | None, latency: float | None, budgets: Sequence[float]
    ) -> list[dict]:
        """Search, choose, write the files, and return the table's rows."""
        if max_loss is not None and self.judge.num_images < LEAST_IMAGES:
            raise ValueError(
                f'a floor (max_loss) needs {LEAST_IMAGES} images to test on, and there are '
                f'{self.judge.num_images}'
            )
        self._save()
        if latency is not None:
            self._search_latency(latency)
        elif max_loss is not None:
            self._search_floor(max_loss)
        else:
            for budget in budgets:
                self.fit(budget)
        rows = self._rows(full=latency is None and max_loss is None)
        for key, why in self.results['refused'].items():
            self._note(f'{key.replace("|", " in ")} is left out: {why}')
        chosen = self._choose(rows, max_loss, latency)
        target = ' and '.join(
            text.format(value)
            for text, value in (
                ('loses at most {} points', max_loss),
                ("takes at most {:.0%} of stock's time", latency),
            )
            if value is not None
        )
        if chosen:
            self._write_chosen(chosen)
        elif target:
            self._name_nearest(rows, target, max_loss)
        if max_loss is not None:
            self._name_unsure(rows, chosen, max_loss)
        self.results.update(rows=rows, target=target)
        self._save()
        self._report(rows, chosen)
        return rows

    def _search_floor(self, max_loss: float) -> None:
        """Bisect the budget in the fastest format that keeps the floor with all widths.

        Quantizing takes minutes: int8 stands back for another, and is tested in what that keeps.
        """
        order = [*self.shares(self.base, self.formats)]
        kind = next((k for k in order if self.keeps(self.base, k, max_loss)), order[0])
        others = [k for k in order if FORMATS[k].file != 'int8']
        probe = next((k for k in others if self.keeps(self.base, k, max_loss)), others[0])
        low, high, budget, kept = LEAST, 1.0, FIRST, []
        for _ in range(STEPS):
            candidate = self.fit(budget)
            if candidate is None:
                break
            if self.keeps(candidate, probe, max_loss):
                kept.insert(0, candidate)  # the narrowest first
                high = budget
                if candidate.budget > round(budget, 2):
                    break  # as narrow as it can be
            else:
                low = budget
            budget = (low + high) / 2
        next((c for c in kept if self.keeps(c, kind, max_loss)), None)
        if kept and len(order) > 1:  # which of two formats is faster may change with the widths
            self.test(kept[0], next(k for k in order if k != kind))

    def _search_latency(self, latency: float) -> None:
        """Fit models until one takes as long as it may, in the format that is fastest."""
        order = self.shares(self.base, self.formats)
        met = [kind for kind, share in order.items() if share <= latency * MARGIN]
        for kind in met:
            self.test(self.base, kind)
        if met:
            return
        kind, share = next(iter(order.items()))
        points, budget = [(1.0, share)], FIRST
        for _ in range(STEPS):
            candidate = self.fit(budget)
            if candidate is None or self.open(candidate, kind) is None:
                return
            share = self.shares(candidate, [kind])[kind]
            self.test(candidate, kind)
            points.append((candidate.budget, share))
            budget = on_line(points, latency * MARGIN)
            known = percent_name(max(budget, self.results.get('least', 0.0))) in self.candidates
            if CLOSE * latency <= share <= latency or known:
                return

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
                if full or not file or self.results['files'].get(f'{candidate.name}|{file}'):
                    model = self.open(candidate, kind)
                    if model is not None:
                        models[candidate.name, kind] = model
        latencies = self.time(models, self.repeats, f'time {len(models)} rows in turn')
        stock = latencies[self.stock.name, EAGER]
        vary = max(np.ptp(np.percentile(v / stock, [25, 75])) for v in latencies.values())
        if vary > 0.3:
            self._note(
                f"the times of a row vary by {vary:.0%} of stock's between quartiles: other "
                'processes may be running. Run the command again on a quiet machine: only times '
                'are taken anew'
            )
        if len(stock) < min(6, self.repeats):
            self._note(f'the models are slow: each row has {len(stock)} times only')
        rows = []
        for (name, kind), values in latencies.items():
            candidate = self.candidates[name]
            speedup, low, high = compare(stock, values)
            form = FORMATS[kind]
            file = self.file(candidate, form.file) if form.file else None
            rows.append(
                dict(
                    candidate=name, format=kind, ms=float(np.median(values)),
                    ms_interval=np.percentile(values, [25, 75]).tolist(), speedup=speedup,
                    speedup_interval=[low, high], mb=megabytes(models[name, kind], file), file=file,
                    config=candidate.config, checkpoint=candidate.checkpoint,
                    budget=candidate.budget, chosen=False,
                )
            )  # fmt: skip
        if full:
            self._test_fastest(rows)
        for row in rows:
            self._fill(row)
        return rows

    def _test_fastest(self, rows: list[dict]) -> None:
        """Test the fastest exact format of each candidate, and all others."""
        best: dict[tuple, dict] = {}
        for row in sorted(rows, key=lambda row: row['ms']):
            group = 'exact' if FORMATS[row['format']].exact else row['format']
            best.setdefault((row['candidate'], group), row)
        for row in best.values():
            self.test(self.candidates[row['candidate']], row['format'])

    def _fill(self, row: dict) -> None:
        """Put the test of a row into it, or that of another exact format."""
        kinds = [row['format']]
        if FORMATS[row['format']].exact:
            kinds += [kind for kind, form in FORMATS.items() if form.exact]
        found = next((k for k in kinds if f'{row["candidate"]}|{k}' in self.tests), None)
        nothing = dict(metric=None, difference=None, interval=None)
        test = self.tests[f'{row["candidate"]}|{found}'] if found else nothing
        row.update(test, tested_in=found)

    def _choose(self, rows, max_loss: float | None, latency: float | None) -> dict | None:
        """Return the row that meets the targets best, tested itself."""
        if max_loss is None and latency is None:
            return None
        limit = 1 if latency is None else latency
        found = [row for row in rows[1:] if row['ms'] / rows[0]['ms'] <= limit]
        found.sort(key=lambda row: row['ms'])
        if latency is not None:
            for row in found:  # what was slower when the search looked at it
                self.test(self.candidates[row['candidate']], row['format'])
                self._fill(row)
            found.sort(key=lambda row: (-(row['difference'] or 0), -row['budget'], row['ms']))
        for row in found:
            if max_loss is None or meets(row, max_loss):
                self.test(self.candidates[row['candidate']], row['format'])
                self._fill(row)
                if max_loss is None or meets(row, max_loss):
                    row['chosen'] = True
                    return row
        return None

    def _name_nearest(self, rows: list[dict], target: str, max_loss: float | None) -> None:
        """Note that nothing meets the target, and what is nearest."""
        known = [r for r in rows[1:] if max_loss is None or r['interval']] or rows[1:] or rows
        key = (lambda r: r['speedup']) if max_loss is None else lambda r: r['interval'][0]
        near = max(known, key=key)
        text = f'{near["candidate"]} in {near["format"]}, {1 / near["speedup"]:.0%} of the time'
        if near['interval']:
            text += f' and {near["difference"]:+.2f} points, or {near["interval"][0]:+.2f}'
        self._note(f'nothing {target}: nothing is chosen. The nearest is {text}')
        if osp.exists(osp.join(self.out_dir, 'model.py')):
            self._note('model.py and its files are the choice of an earlier run')

    def _name_unsure(self, rows: list[dict], chosen: dict | None, max_loss: float) -> None:
        """Note which faster rows may keep the floor, if more images were tested."""
        limit = chosen['ms'] if chosen else np.inf
        names = [
            f'{r["candidate"]} ({r["format"]})' for r in rows[1:]
            if r['interval'] and r['ms'] < limit and r['interval'][0] < -max_loss <= r['difference']
        ]  # fmt: skip
        if names:
            self._note(
                f'{self.judge.num_images} images are too few to tell whether these lose more than '
                f'{max_loss} points: {", ".join(names)}. Test on more images (--num-images)'
            )

    def _report(self, rows: list[dict], chosen: dict | None) -> None:
        """Print the table and the notes, and write the page."""
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
        """Write the chosen model, and a config that tests it on the images it was chosen on."""
        stem = osp.join(self.out_dir, 'model')
        loaded = load_checkpoint(row['checkpoint'])
        kept = {key: loaded[key] for key in ('meta', 'state_dict') if key in loaded}
        save_checkpoint(kept, f'{stem}.pth')
        cfg = load_config(row['config'])
        cfg.load_from, cfg.resume = osp.abspath(f'{stem}.pth'), False
        tested = copy.deepcopy(cfg)
        tested.update(self.judge.config)
        for one in (cfg, tested):
            if FORMATS[row['format']].padded:
                step = dict(type='Pad', size_divisor=self.divisor, pad_val=dict(img=PIXEL))
                dataset_config(one, 'test').pipeline.insert(-1, step)
        write_text(f'{stem}.py', cfg.pretty_text)
        if self.judge.config:
            write_text(osp.join(self.out_dir, 'tested.py'), tested.pretty_text)
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


def content_of(checkpoint: str) -> str:
    """Return a hash of a checkpoint file, or its address."""
    if not osp.isfile(checkpoint):
        return checkpoint
    with open(checkpoint, 'rb') as file:
        return hashed(file.read())


def percent_name(budget: float) -> str:
    """Return the name of the candidate of a budget."""
    return f'{100 * budget:.0f} %'


def meets(test: dict | None, max_loss: float) -> bool:
    """Return True if the whole interval of a difference is above the floor."""
    return bool(test and test['interval'] and test['interval'][0] >= -max_loss)


def on_line(points: Sequence[tuple[float, float]], share: float) -> float:
    """Return the budget at which the line through two points has a share of stock's time.

    Args:
        points (Sequence): Budgets and their shares; the two nearest to the share count.
        share (float): The share to meet.
    """
    (a, at_a), (b, at_b) = sorted(points, key=lambda point: abs(point[1] - share))[:2]
    slope = (at_b - at_a) / (b - a) if b != a else 0.0
    return min(1.0, max(LEAST, a + (share - at_a) / slope)) if slope > 0 else LEAST
