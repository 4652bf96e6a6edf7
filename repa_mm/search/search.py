"""The one command: how much faster a model can be on this machine, and what it costs."""

import os
import os.path as osp
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from mmengine.dataset import pseudo_collate

from repa_mm.apis import open_model
from repa_mm.apis.features import check_same
from repa_mm.apis.images import build_images, cropped, evenly
from repa_mm.benchmark.timing import show
from repa_mm.convert.pretrained import save_model
from repa_mm.io.configs import load_config
from repa_mm.io.files import replacing, write_text
from repa_mm.search.bench import Bench, meets, originals
from repa_mm.search.judge import LEAST_IMAGES, Agreement, Annotated, files_of
from repa_mm.search.record import Record, environment, hash_of_file, hashed, quiet
from repa_mm.search.report import notes, table, title, write_report
from repa_mm.version import __version__


def speed_up(
    config: str,
    checkpoint: str,
    out_dir: str,
    max_loss: float | None = None,
    latency: float | None = None,
    images: str | None = None,
    num_images: int = 100,
    budgets: Sequence[float] = (0.6, 0.4, 0.25, 0.15),
    fit_images: int = 64,
    repeats: int = 20,
    cfg_options: dict | None = None,
    device: str | None = None,
    batch_size: int = 1,
) -> list[dict]:
    """Make a trained model faster in all ways that this package has, and measure each of them.

    Candidates are the model with faster parts, and narrower models of several budgets, each in
    PyTorch and in files for the installed runtimes. A RePaFormer is merged first. On a GPU, the
    formats are PyTorch in float32, float16, bfloat16 (autocast), and float16 with CUDA graphs. Each
    is timed in turn with the original model, in this process. All that may be chosen are tested, on
    the same images.
    With a target, those that may be the best are timed again, two at a time. What is fitted and
    measured stays in ``out_dir``: a second call continues from there, also after it has moved.

    Args:
        config (str): The model's config: a path, or the name of an installed config.
        checkpoint (str): The model's checkpoint: a path or a URL.
        out_dir (str): The folder to write ``results.json`` and ``report.html`` to, and with a
            target the chosen model as ``model.py``, ``model.pth`` and its file.
        max_loss (float, optional): Choose the fastest model that loses at most this many points of
            the metric. The whole 95 % interval of the difference must be above this floor. No
            model is fitted that is narrower than the first that loses more.
        latency (float, optional): Choose the model that loses least of those that take at most this
            fraction of the original's time, in (0, 1).
        images (str, optional): A folder of images without annotations, instead of the config's
            data. The metric is then :func:`~repa_mm.export.agreement` with the original model, in
            percent.
        num_images (int): Number of images to test on, spread over the config's validation data.
            Defaults to 100. With 0, nothing is tested. A floor needs 30.
        budgets (Sequence[float]): Budgets of the narrower models, as for
            :func:`~repa_mm.convert_pretrained`. Defaults to 0.6, 0.4, 0.25 and 0.15.
        fit_images (int): Number of images to fit to. Two thirds of them calibrate int8, which is
            accepted on the others. Defaults to 64.
        repeats (int): Number of turns of the timing. Defaults to 20.
        cfg_options (dict, optional): Values to override in the config, such as paths of the data.
        device (str, optional): Where models are fitted, timed and tested: 'cpu', or a GPU such as
            'cuda'. Defaults to the GPU if there is one.
        batch_size (int): Number of images that are timed together. Defaults to 1.

    Returns:
        list[dict]: A row for each candidate and format, the original first: ``candidate``,
        ``format``, ``ms`` with ``ms_interval`` (quartiles) and ``ms_p95`` (95th percentile),
        ``speedup`` (stock's time in the same turns divided by this one) and ``speedup_interval``
        (95 %), ``metric`` (None without a test), ``difference`` from stock and ``interval`` (95 %,
        paired bootstrap over images) in points, ``tested_in`` (the format whose test it is:
        float32 formats of a candidate that find the same in an image share one), ``mb`` (size of
        the file, or of the weights), ``config``, ``checkpoint``, ``file``, ``budget`` and
        ``chosen``. With a target that nothing meets, no row is chosen.

    Raises:
        ValueError: If there are no data to test on, a target is out of range, ``out_dir`` belongs
            to another model, or the model with faster parts does not compute what the model does.
        CheckpointError: If the checkpoint does not fit the config.
    """
    for name, value, is_right, right in (
        ('latency', latency, latency is None or 0 < latency < 1, 'in (0, 1)'),
        ('max_loss', max_loss, max_loss is None or 0 <= max_loss < 100, 'in [0, 100)'),
        ('budgets', budgets, all(0 < budget <= 1 for budget in budgets), 'in (0, 1]'),
    ):
        if not is_right:
            raise ValueError(f'{name} must be {right}, not {value}')
    started, device = time.monotonic(), device or ('cuda' if torch.cuda.is_available() else 'cpu')
    if torch.device(device).type == 'cuda':
        torch.cuda.set_device(device)  # which is waited for when models are timed
    print(f'searching on {device}')
    with quiet():
        cfg = load_config(config, cfg_options)
        train = build_images(cfg, 'train', images)
        # Of a folder, every third image is tested.
        pool = [i for i in range(len(train)) if i % 3 or not images]
        to_fit = evenly(fit_images, pool)
        model_and_data = cfg.pretty_text, hash_of_file(checkpoint), files_of(train, to_fit)
    record = Record(out_dir, hashed(__version__, *model_and_data), environment(device))
    with quiet():
        model = open_model(cfg, checkpoint, merge=True)
        number = num_images or LEAST_IMAGES  # which are timed, if not tested
        if images:
            judge = Agreement(train, evenly(number, range(0, len(train), 3)))
        else:
            judge = Annotated(cfg, number, osp.join(out_dir, f'{number}_images.json'))
    tested = min(num_images, judge.num_images)
    if max_loss is not None and tested < LEAST_IMAGES:
        raise ValueError(f'max_loss needs {LEAST_IMAGES} images to test on, not {tested}')
    with quiet():
        image, folder = judge.images(1)[0], osp.join(out_dir, 'candidates')
        stock, base = originals(model, checkpoint, folder, image)
    del model
    bench = Bench(
        stock, base, checkpoint, record, judge, tested, device, repeats, batch_size,
        calibration=lambda: [pseudo_collate([train[i]]) for i in to_fit],
    )  # fmt: skip
    targets = [f'loses at most {max_loss} points'] if max_loss is not None else []
    targets += [f"takes at most {latency:.0%} of stock's time"] if latency is not None else []
    timed = 'one image' if batch_size == 1 else f'{batch_size} images'
    timed += f' of {len(bench.sizes)} sizes' if len(bench.sizes) > 1 else ''
    data = f'{tested} images of {osp.abspath(images) if images else "data"}'
    record.content.update(
        config=config, checkpoint=checkpoint, device=device, target=' and '.join(targets),
        timed=timed, images=data if tested else 'not tested',
    )  # fmt: skip
    record.save()
    bench.test(bench.stock, bench.original)  # before the fits: it may be refused
    floor = max_loss if latency is None else None
    rows = walk(bench.candidates(budgets), partial(bench.rows, floor=floor), max_loss, latency)
    rows.insert(0, bench.stock_row())
    chosen = settle(rows, bench.time_again, max_loss, latency) if targets else None
    if chosen:
        chosen['chosen'] = True
        with quiet():
            write_chosen(bench, chosen)
    if max_loss is not None:
        record.notes += unsure(rows, chosen, max_loss, latency)
    folder = osp.join(out_dir, '')  # which may move
    stored = [
        {key: x.removeprefix(folder) if isinstance(x, str) else x for key, x in row.items()}
        for row in rows
    ]
    record.content.update(rows=stored, notes=record.notes)
    record.save()
    show(title(record.content), *table(record.content))
    print('\n'.join(notes(record.content)))
    path, shown = osp.join(out_dir, 'report.html'), chosen or max(rows, key=lambda r: r['speedup'])
    with quiet(), torch.no_grad():
        models = [bench.original, bench.open(shown)]
        write_report(path, cfg, record.content, shown, models, judge)
    print(f'wrote {path} ({(time.monotonic() - started) / 60:.1f} min)')
    return rows


def walk(
    candidates: Iterable[dict], rows_of: Callable, max_loss: float | None = None,
    latency: float | None = None,
) -> list[dict]:  # fmt: skip
    """Return the rows of candidates, given those of one in formats of floats, or in int8.

    With a floor, the walk from wide to narrow ends at the first model that falls short in all
    formats of floats that it has: a failure is not a loss. Quantizing takes minutes, so int8 goes
    from narrow to wide over the models before that one, and, if the loss alone counts, ends at the
    first that keeps the floor.
    """
    rows, kept = [], []
    for candidate in candidates:
        rows += (new := rows_of(candidate, False))
        falls_short = new and max_loss is not None and not any(meets(x, max_loss) for x in new)
        if candidate['budget'] < 1 and falls_short:
            break
        kept.insert(0, candidate)
    for candidate in kept:
        rows += (new := rows_of(candidate, True))
        if max_loss is not None and latency is None and any(meets(row, max_loss) for row in new):
            break
    names = list(dict.fromkeys(row['candidate'] for row in rows))
    return sorted(rows, key=lambda row: names.index(row['candidate']))


def settle(
    rows: Sequence[dict], time_again: Callable, max_loss: float | None = None,
    latency: float | None = None,
) -> dict | None:  # fmt: skip
    """Choose a row by times that were taken anew, in turn with those of its rivals.

    A row was timed in turn with the original alone, in a minute that may have been a busy one. A
    rival of the chosen row would be chosen with a speedup at the upper end of its interval, if the
    chosen row's were at the lower end.

    ``time_again`` times one or two rows anew, in place. More at a time would take too much memory,
    as the original is open beside them. The other arguments are those of :func:`choose`.
    """
    timed: list[dict] = []
    while True:
        chosen = choose(rows, max_loss, latency)
        pair = [chosen] if chosen else []
        least = [dict(row, speedup=row['speedup_interval'][0]) for row in pair]
        for row in sorted(rows[1:], key=lambda row: (row in timed, -row['speedup_interval'][1])):
            most = dict(row, speedup=row['speedup_interval'][1])
            if row is not chosen and choose([rows[0], *least, most], max_loss, latency) is most:
                pair.append(row)
        pair = pair[:2]
        if all(row in timed for row in pair):
            return chosen
        time_again(pair)
        timed += pair


def choose(
    rows: Sequence[dict], max_loss: float | None = None, latency: float | None = None
) -> dict | None:
    """Return the fastest row that loses at most so much, or the one that loses least in its time.

    The first row is never chosen, nor what is slower. ``max_loss`` is of the whole interval, in
    points. ``latency`` is a fraction of the original's time: of rows that lose the same, or are not
    tested, it chooses the fastest of the widest models.
    """
    found = [row for row in rows[1:] if row['speedup'] * (latency or 1) >= 1]
    if max_loss is not None:
        found = [row for row in found if meets(row, max_loss)]

    def rank(row: dict) -> tuple:
        loss = () if latency is None else (row['difference'] or 0, row['budget'])
        return *loss, row['speedup']

    return max(found, key=rank, default=None)


def unsure(
    rows: Sequence[dict], chosen: dict | None, max_loss: float, latency: float | None
) -> list[str]:
    """Return a line that names the row to choose if its difference were certain, or none."""
    certain = [dict(row, interval=row['interval'] and [row['difference']]) for row in rows]
    found = choose(certain, max_loss, latency)
    if not found or chosen and all(found[key] == chosen[key] for key in ('candidate', 'format')):
        return []
    return [
        f'The images are too few to tell whether {found["candidate"]} ({found["format"]}) loses '
        f'more than {max_loss} points: test on more (--num-images)'
    ]


def write_chosen(bench: Bench, row: dict) -> None:
    """Write the chosen model, and a config that tests it on the images it was chosen on."""
    folder = osp.join(osp.abspath(bench.record.out_dir), '')
    stem, source = f'{folder}model', osp.splitext(row['file'] or '')[0]
    model = open_model(row['config'], row['checkpoint'])
    model.cfg.load_from, model.cfg.resume = f'{stem}.pth', False
    save_model(model, bench.checkpoint, f'{stem}.pth', bench.image)
    texts = {f'{stem}.py': model.cfg.pretty_text}
    if bench.judge.config:
        model.cfg.update(bench.judge.config)
        texts[f'{folder}tested.py'] = model.cfg.pretty_text
    for path, text in texts.items():  # the folder may move
        write_text(path, text.replace(f"'{folder}", "'{{ fileDirname }}/"))
    written = open_model(f'{stem}.py', f'{stem}.pth')
    check_same(written, model, cropped(bench.image), f'{stem}.py')
    for suffix in ('.bin', '.xml', '.onnx'):  # weights first
        if source and osp.exists(source + suffix):
            with replacing(stem + suffix) as temporary:
                shutil.copyfile(source + suffix, temporary)
        elif osp.exists(stem + suffix):  # of an earlier choice
            os.unlink(stem + suffix)
