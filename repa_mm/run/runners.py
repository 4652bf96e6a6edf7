"""MMEngine's Runners for training and testing."""

import copy
import os
import os.path as osp
import sys

import mmengine
import torch
from mmengine.config import Config, ConfigDict
from mmengine.evaluator import DumpResults
from mmengine.registry import OPTIMIZERS, RUNNERS
from mmengine.runner import BaseLoop, Runner

from repa_mm.files import check_output, check_writable, replacing
from repa_mm.run.config import (
    dataset_config,
    dump_predictions,
    load_config,
    set_form,
    set_work_dir,
    show_pictures,
    take_no_pretrained,
    with_pretrained,
    without_sync_bn,
)
from repa_mm.run.data import check_data, check_loop
from repa_mm.weights import (
    check_pretrained,
    check_resumable,
    check_values,
    find_latest,
    is_remote,
    load_anywhere,
    load_checkpoint,
    load_safely,
    load_weights,
)


def runner_for_training(
    config: str,
    work_dir: str | None = None,
    amp: bool = False,
    resume: None | str = None,
    from_scratch: bool = False,
    auto_scale_lr: bool = False,
    launcher: str = 'none',
    cfg_options: dict | None = None,
) -> Runner:
    """A runner that is ready for ``runner.train()``.

    Args:
        config (str): Path of a config.
        work_dir (str, optional): Where logs and checkpoints go. Defaults to that of the config, or
            ``work_dirs/<name of the config>``.
        amp (bool): Train with automatic mixed precision. Defaults to False.
        resume (str, optional): A checkpoint to resume from, or 'auto' for the latest one in the
            work dir. Defaults to None.
        from_scratch (bool): Take no pretrained weights; BatchNorm statistics are then estimated
            even if the config freezes them. Defaults to False.
        auto_scale_lr (bool): Scale the learning rate with the batch size. Defaults to False.
        launcher (str): 'none', 'pytorch', 'slurm' or 'mpi'.
        cfg_options (dict, optional): Values to override in the config.

    Raises:
        FileNotFoundError: If the config, a checkpoint or the data set is missing.
        ValueError: If the config, an option or the data set is unusable.
        CheckpointError: If a checkpoint is damaged.
    """
    cfg = load_config(config, cfg_options)
    for key in ('train_dataloader', 'train_cfg', 'optim_wrapper'):
        if not cfg.get(key):
            raise ValueError(f'the config {config!r} has no {key!r}, which training needs')
    optimizer = cfg.optim_wrapper.get('optimizer') or {}
    kind = optimizer.get('type')
    with OPTIMIZERS.switch_scope_and_registry(cfg.default_scope) as registry:
        if isinstance(kind, str) and registry.get(kind) is None:
            raise ValueError(f'optim_wrapper.optimizer.type {kind!r} is unknown')
    rate = optimizer.get('lr', 0)
    if not isinstance(rate, (int, float)) or not 0 <= rate < float('inf'):
        raise ValueError(
            f'optim_wrapper.optimizer.lr must be a number of at least 0, but is {rate!r}'
        )
    cfg.launcher = launcher
    set_work_dir(cfg, config, work_dir)
    if amp:
        if not torch.cuda.is_available():
            raise ValueError('mixed precision training (--amp) needs a GPU')
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    if auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise ValueError(f'--auto-scale-lr needs auto_scale_lr.base_batch_size in {config!r}')
        cfg.auto_scale_lr.enable = True
    # A checkpoint is read before anything is built from the config.
    checkpoint = None
    if resume:
        found = find_latest(cfg.work_dir) if resume == 'auto' else (resume, None)
        cfg.resume = bool(found)
        if found:
            cfg.load_from, checkpoint = found
        else:
            start = cfg.get('load_from')
            begins = f'begins with {start!r}' if start else 'starts anew'
            print(f'no checkpoint in {cfg.work_dir!r} to resume from: training {begins}')
    if from_scratch:
        take_no_pretrained(cfg)
        if not cfg.get('resume'):
            cfg.load_from = None
    if cfg.get('load_from'):
        if not checkpoint and not is_remote(cfg.load_from):
            checkpoint = load_checkpoint(cfg.load_from)
        if checkpoint and cfg.get('resume'):
            check_resumable(checkpoint)
    else:
        for owner in with_pretrained(cfg.model):
            check_pretrained(owner.init_cfg)
            if not is_remote(owner.init_cfg.checkpoint):
                check_values(load_checkpoint(owner.init_cfg.checkpoint)['state_dict'])
    check_data(cfg, 'train', 'val')
    runner = _build_runner(cfg, checkpoint)
    check_loop(runner, 'train')
    # Not only after the first epoch.
    if runner._val_loop is not None:
        check_loop(runner, 'val')
    return runner


def runner_for_testing(
    config: str,
    checkpoint: str,
    work_dir: str | None = None,
    form: str | None = None,
    out: str | None = None,
    show_dir: str | None = None,
    tta: bool = False,
    launcher: str = 'none',
    cfg_options: dict | None = None,
) -> Runner:
    """A runner that is ready for ``runner.test()``.

    Args:
        config (str): Path of a config.
        checkpoint (str): Path or URL of a checkpoint, in either form.
        work_dir (str, optional): Where metrics go, as for :func:`runner_for_training`.
        form (str, optional): 'deploy' tests the reparameterized model, 'training' does not.
            Defaults to None: as the config's hooks say.
        out (str, optional): A ``.pkl`` file for the predictions; for segmentation also a folder,
            for label maps.
        show_dir (str, optional): Folder for pictures of the predictions.
        tta (bool): Test-time augmentation. Defaults to False.
        launcher (str): 'none', 'pytorch', 'slurm' or 'mpi'.
        cfg_options (dict, optional): Values to override in the config.

    Raises:
        FileNotFoundError, ValueError, CheckpointError: As :func:`runner_for_training`.
    """
    cfg = load_config(config, cfg_options)
    cfg.launcher = launcher
    set_work_dir(cfg, config, work_dir)
    if out and out.endswith(('.pkl', '.pickle')):
        check_output(out, config, checkpoint)
    if show_dir:
        # MMDetection would look for a relative path in a folder of the run.
        show_dir = osp.abspath(show_dir)
        check_writable(show_dir)
    loaded = None if is_remote(checkpoint) else load_checkpoint(checkpoint)
    cfg.load_from = checkpoint
    cfg.resume = False
    set_form(cfg, form)
    if show_dir:
        show_pictures(cfg, show_dir)
    if out:
        dump_predictions(cfg, out)
    if tta:
        for key in ('tta_model', 'tta_pipeline'):
            if key not in cfg:
                raise ValueError(f'--tta needs {key!r} in {config!r}')
        dataset_config(cfg, 'test').pipeline = cfg.tta_pipeline
        cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    check_data(cfg, 'test')
    runner = _build_runner(cfg, loaded)
    check_loop(runner, 'test')
    if out:
        _write_predictions(runner, out)
    if show_dir:
        _write_pictures(runner, show_dir)
    return runner


def _load_once(runner: Runner, path: str | None, checkpoint: dict | None) -> None:
    """Let a runner load a checkpoint that is read already, and refuse one that does not fit.

    MMEngine would read the file again, and only warn.
    """
    read = {path: checkpoint} if checkpoint else {}

    def load(filename: str, *args, **kwargs) -> dict:
        checkpoint = read.pop(filename, None) or load_anywhere(filename)
        training = isinstance(runner._train_loop, BaseLoop)
        if runner._resume and training:
            check_resumable(checkpoint)
            # The optimizer goes on with its tensors.
            checkpoint = copy.deepcopy(checkpoint)
        runner.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        starts = training and not runner._resume
        load_weights(runner.model, checkpoint['state_dict'], filename, exact=False, partial=starts)
        runner._has_loaded = True
        runner.logger.info(f'Load checkpoint from {filename}')
        return checkpoint

    runner.load_checkpoint = load


def _write_predictions(runner: Runner, out: str) -> None:
    """Let the predictions replace the file when they are complete."""

    def compute_metrics(results: list) -> dict:
        with replacing(out) as temporary:
            mmengine.dump(results, temporary)
        return {}

    for metric in runner.test_loop.evaluator.metrics:
        if isinstance(metric, DumpResults):
            metric.compute_metrics = compute_metrics


def _write_pictures(runner: Runner, show_dir: str) -> None:
    """Let every picture be written whole, or end the test with an error that names it."""
    is_classifier = runner.cfg.default_scope == 'mmpretrain'
    method = 'visualize_cls' if is_classifier else 'add_datasample'
    draw = getattr(runner.visualizer, method)

    def draw_into(*args, out_file: str | None = None, **kwargs) -> None:
        # MMSegmentation names none, and OpenCV then writes without saying when it fails.
        name = out_file or f'vis_data/vis_image/{args[0]}_{kwargs["step"]}.png'
        with replacing(osp.join(show_dir, name)) as temporary:
            draw(*args, out_file=temporary, **kwargs)

    setattr(runner.visualizer, method, draw_into)


def _build_runner(cfg: Config, checkpoint: dict | None) -> Runner:
    variable = dict(pytorch='RANK', slurm='SLURM_PROCID', mpi='OMPI_COMM_WORLD_LOCAL_RANK').get(
        cfg.launcher
    )
    if variable and variable not in os.environ:
        raise ValueError(
            f'--launcher {cfg.launcher} needs the environment of such a job: use '
            'tools/dist_train.sh, dist_test.sh, slurm_train.sh or slurm_test.sh'
        )
    if cfg.launcher == 'pytorch' and not torch.cuda.is_available():
        _distribute_on_cpu(cfg)
    load_safely()
    runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
    _load_once(runner, cfg.get('load_from'), checkpoint)
    return runner


def _distribute_on_cpu(cfg: Config) -> None:
    """Set up several processes on the CPU, since MMEngine's own set-up asks for GPUs."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group('gloo')
    cfg.model_wrapper_cfg = dict(
        type='MMDistributedDataParallel',
        device_ids=None,
        broadcast_buffers=False,
        find_unused_parameters=cfg.get('find_unused_parameters', False),
    )
    cfg.sync_bn = None
    without_sync_bn(cfg)


def end_process() -> None:
    """End a process that has done its work together with others on a CPU.

    While the interpreter takes down a DistributedDataParallel model on gloo, PyTorch aborts the
    process every other time (seen with 2.13), and with it a job that has succeeded. Any other
    process goes on.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == 'gloo':
        torch.distributed.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
