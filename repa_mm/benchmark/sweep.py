"""What conversions with several idle ratios cost and gain."""

import json
import os
import os.path as osp
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.registry import MODELS

from repa_mm.benchmark.inputs import TensorInputs
from repa_mm.benchmark.latency import Options, measure_forms
from repa_mm.benchmark.machine import environment, machine
from repa_mm.benchmark.output import write_json
from repa_mm.benchmark.plots import plot_sweep
from repa_mm.engine.complexity import count_macs
from repa_mm.files import check_writable
from repa_mm.fit.conversion import checksum
from repa_mm.fit.distillation import distillation_settings
from repa_mm.fit.pretrained import CalibrationImages, convert_checkpoint
from repa_mm.models.attention import swap_attention
from repa_mm.reparam import num_active_channels
from repa_mm.run import init_model, load_config, runner_for_testing, take_no_pretrained
from repa_mm.run.cli import align
from repa_mm.weights import load_anywhere, load_weights

RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def sweep_conversions(
    config: str,
    checkpoint: str,
    out: str,
    ratios: Sequence[float] = RATIOS,
    distill: int = 0,
    test: bool = False,
    images: str | None = None,
    device: str | None = None,
    cfg_options: dict | None = None,
    num_runs: int = 20,
    resume: bool = False,
    **options,
) -> dict[str, Any]:
    """Convert a model with several idle ratios, and compare quality and latency.

    Args:
        config (str): The model's own config.
        checkpoint (str): The model's checkpoint.
        out (str): The folder for the converted checkpoints and their configs, 'sweep.json' and
            'sweep.png'.
        ratios (Sequence[float]): Idle ratios. Defaults to 0, 0.25, 0.5, 0.75, 0.9 and 1.
        distill (int): Number of iterations of a distillation after each conversion. Defaults to 0.
        test (bool): Also test each model with the config's metrics. Defaults to False.
        images (str, optional): A folder of images to calibrate on.
        device (str, optional): Defaults to the GPU, if there is one.
        cfg_options (dict, optional): Values to override in the config.
        num_runs (int): How often each backbone runs for its latency, all in turn. Defaults to 20.
        resume (bool): Go on with an interrupted sweep. Defaults to False.
        **options: Others of :func:`~repa_mm.fit.pretrained.convert_checkpoint`.

    Returns:
        dict: ``rows``, one for the original model and one for each conversion: ``name``,
        ``idle_ratio``, ``distilled`` (whether), ``difference`` (of the backbone's outputs on the
        held-out images, relative to their variance), ``gmacs`` and ``latency_ms`` (of the
        reparameterized backbone), ``metrics``; ``size`` of the image for these, and ``machine``.

    Raises:
        FileNotFoundError, ValueError, CheckpointError, OSError: As convert_checkpoint.
    """
    if options.pop('target_gmacs', None) is not None:
        raise ValueError('--sweep tries idle ratios: it goes without --target-gmacs')
    if distill:
        distillation_settings(distill)  # checks it
    for ratio in ratios:
        num_active_channels(1, ratio)  # checks it
    cfg = load_config(config, cfg_options)
    take_no_pretrained(cfg)
    # As the conversions read it: from anywhere, with weights that the model does not have.
    original, loaded = MODELS.build(cfg.model), load_anywhere(checkpoint)
    load_weights(original, loaded['state_dict'], checkpoint, exact=False)
    check_writable(out)
    os.makedirs(out, exist_ok=True)
    done_path = osp.join(out, 'conversions.json')
    settings = dict(config=config, checkpoint=checkpoint, distill=distill, test=test, images=images)
    settings.update(cfg_options=cfg_options, weights=checksum(original), **options)
    settings.pop('progress', None)
    settings = json.loads(json.dumps(settings, default=str))
    done: dict[str, Any] = dict(settings=settings)
    if resume and osp.isfile(done_path):
        with open(done_path, encoding='utf-8') as file:
            done = json.load(file)
        if done.get('settings') != settings:
            raise ValueError(
                f'the sweep in {out!r} was made with other settings: resume it with the same ones, '
                'or choose another folder'
            )
    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    common = dict(images=images, device=device, cfg_options=cfg_options, **options)

    def metrics(config: str, checkpoint: str, form: str | None, **more) -> dict[str, float]:
        if not test:
            return {}
        values = runner_for_testing(config, checkpoint, osp.join(out, 'test'), form, **more)
        return {key: float(value) for key, value in values.test().items()}

    if 'original' not in done:
        done['original'] = [metrics(config, checkpoint, None, cfg_options=cfg_options), 0.0]
    rows = [dict(name='original', idle_ratio=None, distilled=False, difference=0.0)]
    for ratio in ratios:
        fitted = None
        for iters in (0, distill) if distill else (0,):
            name = f'idle_{ratio:g}' + '_distilled' * bool(iters)
            path = osp.join(out, f'{name}.pth')
            if name not in done:
                print(f'{name}: converting', flush=True)
                found = convert_checkpoint(
                    config,
                    checkpoint,
                    path,
                    ratio,
                    distill=iters,
                    resume=resume,
                    fitted=fitted,
                    **common,
                )
                fitted = found['fitted']
                values = found['distilled'] if iters else found['differences']
                # Nothing is held out of a single image.
                difference = sum(values) / len(values) if values else None
                done[name] = [metrics(found['config'], path, 'deploy'), difference]
                write_json(done, done_path)
            rows.append(
                dict(name=name, idle_ratio=ratio, distilled=bool(iters), difference=done[name][1])
            )

    original.eval()  # on a line of its own: that of some models returns None
    models = {'original': original.to(device)}
    swap_attention(models['original'].backbone)
    for row in rows[1:]:
        path = osp.join(out, row['name'])
        models[row['name']] = init_model(f'{path}.py', f'{path}.pth', 'deploy', device)
    batch = next(iter(CalibrationImages(cfg, 1, images)))
    batch = models['original'].data_preprocessor(batch, False)['inputs']
    size = tuple(batch.shape[-2:])
    run = Options(part='backbone', num_images=num_runs, warmup=2, device=device, memory=False)
    inputs = TensorInputs(size, 1, device, channels=batch.shape[1])
    measured = measure_forms(models, inputs, run, quiet=True)
    if measured['interrupted']:
        raise KeyboardInterrupt
    for row in rows:
        row['metrics'] = done[row['name']][0]
        row['gmacs'] = count_macs(models[row['name']].backbone, tuple(batch.shape[1:])) / 1e9
        row['latency_ms'] = measured['forms'][row['name']]['latency']['median']
    result = dict(config=config, rows=rows, size=size, machine=machine(environment(device)))
    write_json(result, osp.join(out, 'sweep.json'))
    plot_sweep(result, osp.join(out, 'sweep.png'))
    return dict(result, out=out)


def sweep_text(result: dict[str, Any]) -> str:
    """The rows of a sweep as a table."""
    # A model that finds nothing has no average precision.
    names = list(dict.fromkeys(name for row in result['rows'] for name in row['metrics']))
    table = [('', 'GMACs', 'latency (ms)', 'speed', 'difference', *names)]
    first = result['rows'][0]['latency_ms']
    for row in result['rows']:
        table.append(
            (
                row['name'].replace('_', ' '),
                f'{row["gmacs"]:.2f}',
                f'{row["latency_ms"]:.1f}',
                f'{first / row["latency_ms"]:.2f}x',
                'none' if row['difference'] is None else f'{row["difference"]:.2%}',
                *(f'{row["metrics"].get(name, float("nan")):.3f}' for name in names),
            )
        )
    size = 'x'.join(map(str, result['size']))
    return '\n'.join(
        [
            *align(table),
            f'Backbone, reparameterized, one image of {size}, median; {result["machine"]}.',
            'Where there is window attention, all have the fast one.',
            'Difference: of the outputs of the backbone on held-out images, relative to their '
            'variance.',
            f'wrote {osp.join(result["out"], "sweep.json")}, sweep.png, and the models',
        ]
    )
