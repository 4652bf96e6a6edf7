"""The demonstration of a conversion: a trained vanilla detector becomes channel-idle."""

import json
import os
import os.path as osp
import shutil
import time
from collections.abc import Sequence
from typing import Any

from mmengine.device import get_device
from mmengine.fileio import load

from repa_mm.demo.report import conversion_table, read_metrics
from repa_mm.demo.run import BOX, draw, headline, measure, parse_options, run_step, short
from repa_mm.files import check_writable, replacing
from repa_mm.run import init_model, load_config
from repa_mm.weights import load_checkpoint

CONFIG = 'retinanet_swin_digits.py'
# One epoch with a small step and without a validation, over what the command line says.
FINE_TUNING = (
    'train_cfg.max_epochs=1',
    'train_cfg.val_begin=2',
    'param_scheduler.1.end=1',
    'optim_wrapper.optimizer.lr=1e-4',
)


def run_conversion(
    tools: str, work_dir: str, vanilla: str | None = None, cfg_options: Sequence[str] = ()
) -> dict[str, Any]:
    """Train the demo's vanilla RetinaNet, convert it, fine-tune it, and compare the three.

    Args:
        tools (str): Folder of the tools; ``configs`` lies beside it.
        work_dir (str): Folder for everything that is written, except the data set (``data/demo``).
        vanilla (str, optional): A checkpoint of the vanilla RetinaNet, instead of training one.
        cfg_options (Sequence[str]): ``key=value`` pairs that override the config.

    Returns:
        dict: The content of ``summary.json``: ``models`` by name, each with ``metrics``,
        parameters, multiply-adds and latencies.

    Raises:
        StepError: If one of the commands fails.
        FileNotFoundError, CheckpointError: If the checkpoint cannot be read.
        OSError: If ``work_dir`` cannot be written to.
    """
    start = time.perf_counter()
    config = osp.join(osp.dirname(osp.abspath(tools)), 'configs', 'demo', CONFIG)
    options = ['--cfg-options', *cfg_options] if cfg_options else []
    if vanilla is not None:
        load_checkpoint(vanilla)  # before anything is done
    check_writable(work_dir)
    os.makedirs(work_dir, exist_ok=True)
    converted = osp.join(work_dir, 'converted.pth')
    own_config = osp.join(work_dir, 'converted.py')
    predictions, metrics = {}, {}

    def step(name: str, tool: str, *arguments: str) -> None:
        run_step(name, osp.join(tools, f'{tool}.py'), *arguments)

    def train(name: str, config: str, *more: str) -> str:
        folder = osp.join(work_dir, name.replace(' ', '_'))
        # Nothing but the new checkpoint is to be found there.
        shutil.rmtree(folder, ignore_errors=True)
        options = ['--cfg-options', *cfg_options, *more] if cfg_options or more else []
        step(name, 'train', config, '--work-dir', folder, *options)
        with open(osp.join(folder, 'last_checkpoint'), encoding='utf-8') as file:
            return file.read().strip()

    def test(name: str, config: str, checkpoint: str) -> None:
        folder = osp.join(work_dir, 'test_' + name.replace(' ', '_'))
        out = f'{folder}.pkl'
        form = [] if name == 'vanilla' else ['--form', 'deploy']
        more = ['--work-dir', folder, '--out', out, *form, *options]
        step(f'test, {name}', 'test', config, checkpoint, *more)
        predictions[name], metrics[name] = out, read_metrics(folder)

    step('data', 'make_demo_data')
    vanilla = vanilla or train('training', config)
    step('conversion', 'convert_pretrained', config, vanilla, converted, *options)
    test('vanilla', config, vanilla)
    test('converted', own_config, converted)
    tuned = train('fine-tuning', own_config, *FINE_TUNING)
    test('fine-tuned', own_config, tuned)

    headline('comparison')
    chosen = parse_options(cfg_options)
    cfg, own = load_config(config, chosen), load_config(own_config, chosen)
    device = get_device()
    models = {
        'vanilla': init_model(cfg, vanilla, device=device),
        'converted': init_model(own, converted, 'deploy', device),
        'fine-tuned': init_model(own, tuned, 'deploy', device),
    }
    measured = measure(cfg, models, device)
    summary: dict[str, Any] = dict(
        task='convert',
        checkpoints=dict(vanilla=vanilla, converted=converted) | {'fine-tuned': tuned},
        models={name: measured.pop(name) for name in models},
        **measured,
    )
    for name, row in summary['models'].items():
        row['metrics'] = {title: metrics[name].get(key) for key, title in BOX.items()}
    title = 'RetinaNet, converted from a vanilla Swin without training, on validation scenes'
    picture = draw(cfg, title, load(predictions['converted']), work_dir)
    summary['total_seconds'] = time.perf_counter() - start
    with replacing(osp.join(work_dir, 'summary.json')) as path, open(path, 'w') as file:
        json.dump(summary, file, indent=2)
    print(conversion_table(summary))
    print(f'Picture: {short(picture)}', flush=True)
    return summary
