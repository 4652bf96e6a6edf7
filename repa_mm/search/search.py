"""The one command: how much faster a model can be on this machine, and what it costs."""

import os
import os.path as osp
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace

import torch
from mmengine.dataset import pseudo_collate

from repa_mm.apis import open_model
from repa_mm.apis.features import check_same
from repa_mm.apis.images import build_images, cropped, evenly
from repa_mm.convert.pretrained import save_model
from repa_mm.io.configs import load_config
from repa_mm.io.files import replacing, write_bytes, write_text
from repa_mm.measure.timing import duration, show
from repa_mm.search.formats import FORMATS, precision_of
from repa_mm.search.judge import LEAST_IMAGES, Agreement, Annotated, files_of
from repa_mm.search.options import Options
from repa_mm.search.record import Record, environment, hash_of_file, hashed
from repa_mm.search.report import gain, notes, table, title, write_report
from repa_mm.search.rows import Row, Target, settle, unsure, walk
from repa_mm.search.steps import quiet
from repa_mm.search.workbench import Workbench, originals
from repa_mm.version import __version__

#: OpenVINO's name of the type in which it computes floats, also in the metadata of a chosen file.
PRECISION = 'INFERENCE_PRECISION_HINT'


def speed_up(
    config: str,
    checkpoint: str,
    out_dir: str,
    max_loss: float | None = None,
    latency: float | None = None,
    **options,
) -> list[Row]:
    """Make a trained model faster in all ways that this package has, and measure each of them.

    Candidates are the model with exact parts, which compute the same faster, and narrower models of
    several budgets, each in PyTorch and in files for the installed runtimes. A RePaFormer is merged
    first. On a GPU, the formats are PyTorch in float32, float16, bfloat16 (autocast), and float16
    with CUDA graphs. Each is timed in turn with the original model, in this process. All that may
    be chosen are tested, on the same images.
    With a target, those that may be the best are timed again, two at a time. What is fitted and
    measured stays in ``out_dir``: a second call continues from there, also after it has moved.

    Args:
        config (str): The model's config: a path, or the name of an installed config.
        checkpoint (str): The model's checkpoint: a path or a URL.
        out_dir (str): The folder to write ``results.json`` and the report to (``report.html``,
            ``.md`` and ``.svg``), and with a target the chosen model as ``model.py``, ``model.pth``
            and its file, whose metadata have the precision that was tested.
        max_loss (float, optional): Choose the fastest model that loses at most this many points of
            the metric. The whole 95 % interval of the difference must be above this floor. No
            model is fitted that is narrower than the first that loses more.
        latency (float, optional): Choose the model that loses least of those that take at most this
            fraction of the original's time, in (0, 1).
        **options: Those of :class:`~repa_mm.search.Options`.

    Returns:
        list[Row]: A :class:`~repa_mm.search.Row` for each candidate and format, the original first.
        With a target that nothing meets, no row is chosen.

    Raises:
        ValueError: If there are no data to test on, a target is out of range, the original's metric
            is at most ``max_loss``, ``out_dir`` belongs to another model, or the model with exact
            parts does not compute what the model does.
        CheckpointError: If the checkpoint does not fit the config.
    """
    started, target, options = time.monotonic(), Target(max_loss, latency), Options(**options)
    print(f'searching on {options.device}')
    bench = prepare(config, checkpoint, out_dir, target, options)
    rows = search(bench)
    rows, chosen = settle(rows, bench.time_again, target) if str(target) else (rows, None)
    rows = publish(bench, rows, chosen)
    print(f'wrote {osp.join(out_dir, "report.html")} ({duration(time.monotonic() - started)})')
    if chosen:
        print('\n'.join(advice(bench, next(row for row in rows if row.chosen))))
    return rows


def prepare(
    config: str, checkpoint: str, out_dir: str, target: Target, options: Options
) -> Workbench:
    """Open the model, its data, and what is known of them."""
    device, folder = options.device, options.images
    if torch.device(device).type == 'cuda':
        torch.cuda.set_device(device)  # which is waited for when models are timed
    with quiet():
        cfg = load_config(config, options.cfg_options)
        train = build_images(cfg, 'train', folder)
        # Of a folder, every third image is tested.
        pool = [i for i in range(len(train)) if i % 3 or not folder]
        to_fit = evenly(options.fit_images, pool)
        given = cfg.pretty_text, hash_of_file(checkpoint), files_of(train, to_fit)
    record = Record(out_dir, hashed(__version__, *given), environment(device))
    with quiet():
        model = open_model(cfg, checkpoint, merge=True)
        number = options.num_images or LEAST_IMAGES  # which are timed, if not tested
        if folder:
            judge = Agreement(train, evenly(number, range(0, len(train), 3)))
        else:
            judge = Annotated(cfg, number, osp.join(out_dir, f'{number}_images.json'))
    tested = min(options.num_images, judge.num_images)
    if target.max_loss is not None and tested < LEAST_IMAGES:
        raise ValueError(f'max_loss needs {LEAST_IMAGES} images to test on, not {tested}')
    with quiet():
        pair = originals(model, checkpoint, osp.join(out_dir, 'candidates'), judge.images(1)[0])
    del model
    record.content.update(
        config=config, checkpoint=checkpoint, device=device, target=str(target),
        images=f'{tested} images of {osp.abspath(folder) if folder else "data"}' if tested
        else 'not tested', rows=[], notes=[],  # those of an earlier call had another target
    )  # fmt: skip
    return Workbench(
        *pair, cfg, record, judge, tested, target, options,
        calibration=lambda: [pseudo_collate([train[i]]) for i in to_fit],
    )  # fmt: skip


def search(bench: Workbench) -> list[Row]:
    """Return the rows of all candidates; the first one is of the original."""
    bench.record.save()
    bench.plan()
    print(f'at most {bench.steps.left.total()} steps')
    bench.stock = bench.test(bench.stock, bench.original)  # before the fits: it may be refused
    metric, max_loss = bench.stock.metric, bench.target.max_loss
    if max_loss is not None and metric <= max_loss:
        raise ValueError(
            f'the original has {metric:.2f} {bench.judge.name} on these images, no more than '
            f'max_loss={max_loss} lets a model lose: check the checkpoint, the classes and the data'
        )
    rows = walk(bench.candidates(), bench.rows, bench.target)
    return [bench.stock_row(), *rows]


def publish(bench: Workbench, rows: Sequence[Row], chosen: Row | None) -> list[Row]:
    """Write the chosen model, the results and the report, and print the table."""
    record, judge = bench.record, bench.judge
    rows = [replace(row, chosen=row is chosen) for row in rows]
    record.notes += unsure(rows, chosen, bench.target)
    if chosen:
        with quiet():
            write_chosen(bench, chosen)
    folder = osp.join(record.out_dir, '')  # which may move
    stored = [
        {key: x.removeprefix(folder) if isinstance(x, str) else x for key, x in asdict(row).items()}
        for row in rows
    ]
    record.content.update(rows=stored, notes=record.notes)
    record.save()
    results = record.content
    show(title(results), *table(rows, results['metric'], wide=False), box=None)
    print('\n'.join(notes(results, rows)))
    shown = next((row for row in rows if row.chosen), None) or max(rows, key=lambda r: r.speedup)
    with quiet(), torch.no_grad():
        models = [bench.original, bench.open(shown)]
        write_report(f'{folder}report', bench.cfg, results, rows, shown, models, judge)
    return rows


def write_chosen(bench: Workbench, row: Row) -> None:
    """Write the chosen model, and a config that tests it on the images it was chosen on."""
    folder = osp.join(osp.abspath(bench.record.out_dir), '')
    stem, model = f'{folder}model', open_model(row.config, row.checkpoint)
    model.cfg.load_from, model.cfg.resume = f'{stem}.pth', False
    save_model(model, bench.stock.checkpoint, f'{stem}.pth', bench.image)
    texts = {f'{stem}.py': model.cfg.pretty_text}
    if bench.judge.config:
        model.cfg.update(bench.judge.config)
        texts[f'{folder}tested.py'] = model.cfg.pretty_text
    for path, text in texts.items():  # the folder may move
        write_text(path, text.replace(f"'{folder}", "'{{ fileDirname }}/"))
    written = open_model(f'{stem}.py', f'{stem}.pth')
    check_same(written, model, cropped(bench.image), f'{stem}.py')
    for suffix in '.onnx', '.xml', '.bin':  # of an earlier choice
        with suppress(FileNotFoundError):
            os.unlink(f'{stem}{suffix}')
    if row.file:
        path = f'{stem}{osp.splitext(row.file)[1]}'
        copy_with_precision(row.file, path, precision_of(row.format))


def copy_with_precision(source: str, out: str, precision: str) -> None:
    """Copy an exported file, and note in its metadata in which precision it was tested."""
    if source.endswith('.xml'):
        import openvino

        model = openvino.Core().read_model(source)
        model.set_rt_info(precision, ['framework', PRECISION])
        with replacing(out) as path, replacing(f'{osp.splitext(osp.realpath(out))[0]}.bin'):
            openvino.save_model(model, path, compress_to_fp16=False)
    else:
        import onnx

        model = onnx.load(source)
        model.metadata_props.add(key=PRECISION, value=precision)
        write_bytes(out, model.SerializeToString())


def advice(bench: Workbench, row: Row) -> list[str]:
    """Return what was chosen, and what tests, times and runs it."""
    form, folder, stock = FORMATS[row.format], bench.record.out_dir, bench.stock
    weights = file = osp.join(folder, 'model.pth')
    config = osp.join(folder, 'tested.py' if bench.judge.config else 'model.py')
    timing = ['tools/benchmark.py', config, weights, '--dataset', '--device', bench.device]
    timing += ['--baseline', stock.config, '--baseline-checkpoint', stock.checkpoint]
    timing += ['--images', bench.options.images] if bench.options.images else []
    if row.file:
        file = osp.join(folder, f'model{osp.splitext(row.file)[1]}')
        test = ['tools/test_exported.py', config, file]
        test += ['--precision', form.runtime] if form.runtime else []
        timing += ['--exported', ':'.join(filter(None, [file, form.runtime]))]
        run = f'onnxruntime.InferenceSession({file!r})'
        if 'openvino' in form.packages:
            hint = {PRECISION: precision_of(row.format)}
            run = f"openvino.compile_model({file!r}, 'CPU', {hint})"
    else:
        test = ['tools/test.py', config, weights]
        test += ['--cfg-options', 'test_cfg.fp16=True'] if form.dtype else []
        timing += ['--amp', form.dtype] if form.dtype else []
        timing += ['--cuda-graphs'] if form.captured else []
        run = f'repa_mm.apis.open_model({config!r}, {weights!r})'
        if torch.device(bench.device).type == 'cuda':
            run = f'repa_mm.faster.faster_on_gpu_({run}.cuda())'
        run = f'repa_mm.faster.cuda_graphs_({run})' if form.captured else run
        run += f', under torch.autocast to {form.dtype}' if form.dtype else ''
    found = [f'Chosen: {gain(row, bench.record.content["metric"])} → {file}']
    if bench.judge.config and form.dtype != 'bfloat16':  # MMEngine tests under float16 alone
        found.append(f'test it: python {shlex.join(test)}')
    return [*found, f'time it: python {shlex.join(timing)}', f'run it:  {run}']
