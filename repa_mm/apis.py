"""What the tools do: runners for training and testing, models, merging."""

import importlib.util
import itertools
import os
import os.path as osp
import sys
from collections.abc import Iterator

import mmengine
import torch
import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.evaluator import DumpResults
from mmengine.hooks import Hook
from mmengine.registry import MODELS, OPTIMIZERS, RUNNERS, VISUALIZERS, init_default_scope
from mmengine.runner import BaseLoop, Runner
from mmengine.runner.checkpoint import load_state_dict, weights_to_cpu

from .engine.hooks import innermost
from .reparam import (
    ChannelIdleFFN,
    CheckpointError,
    calibrate_batch_norm,
    check_finite,
    has_deploy_form,
    is_reparameterized,
    reparameterize,
)
from .utils.checkpoint import (
    check_fit,
    check_pretrained,
    check_values,
    find_latest,
    is_remote,
    load_checkpoint,
    load_safely,
    save_checkpoint,
)
from .utils.complexity import count_macs, count_parameters
from .utils.data import AnnotationError, check_image, check_items, checked_annotations, leaves
from .utils.files import check_output, check_writable, replacing
from .version import __version__

SCOPES = ('mmdet', 'mmseg', 'mmpretrain')
FORMS = ('training', 'deploy')
HEADS = ('bbox_head', 'mask_head', 'decode_head', 'auxiliary_head', 'head')
# Parts of a config that tools look into.
DICTS = (
    'model',
    'train_dataloader',
    'val_dataloader',
    'test_dataloader',
    'train_cfg',
    'val_cfg',
    'test_cfg',
    'optim_wrapper',
    'default_hooks',
    'env_cfg',
    'auto_scale_lr',
    'tta_model',
)


def load_config(path: str, cfg_options: dict | None = None) -> Config:
    """Read a config and make its codebase the default scope.

    Args:
        path (str): A config of MMDetection, MMSegmentation or MMPretrain.
        cfg_options (dict, optional): Values to override, by dotted names.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no config, or of no known codebase.
        ImportError: If its codebase is not installed.
    """
    if not osp.isfile(path):
        raise FileNotFoundError(f'no config at {path!r}' + ': it is a folder' * osp.isdir(path))
    try:
        cfg = Config.fromfile(path)
    except RecursionError as error:
        raise ValueError(
            f'cannot read the config {path!r}: it inherits from '
            'itself, perhaps through others, or recurses without '
            'end'
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(
            f'cannot read the config {path!r}: {type(error).__name__}: {error}'
        ) from error
    try:
        if cfg_options:
            cfg.merge_from_dict(cfg_options)
    except Exception as error:
        raise ValueError(
            f'cannot apply --cfg-options to {path!r}: {type(error).__name__}: {error}'
        ) from error
    scope = cfg.get('default_scope')
    if scope not in SCOPES:
        raise ValueError(
            f'default_scope of {path!r} must be one of {", ".join(SCOPES)}, but is {scope!r}'
        )
    if importlib.util.find_spec(scope) is None:
        raise ImportError(f'{path!r} needs {scope}, which is not installed')
    for key in ('model', 'test_dataloader'):
        if key not in cfg:
            raise ValueError(f'the config {path!r} has no {key!r}')
    for key in DICTS:
        if not isinstance(cfg.get(key, {}), (dict, type(None))):
            raise ValueError(f'{key!r} of {path!r} must be a dict, but is {cfg[key]!r}')
    if not isinstance(cfg.model, dict) or 'type' not in cfg.model:
        raise ValueError(f"'model' of {path!r} has no 'type'")
    init_default_scope(scope)
    return cfg


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
        work_dir (str, optional): Where logs and checkpoints go. Defaults to
            that of the config, or ``work_dirs/<name of the config>``.
        amp (bool): Train with automatic mixed precision. Defaults to False.
        resume (str, optional): A checkpoint to resume from, or 'auto' for the
            latest one in the work dir. Defaults to None.
        from_scratch (bool): Take no pretrained weights; BatchNorm statistics
            are then estimated even if the config freezes them.
            Defaults to False.
        auto_scale_lr (bool): Scale the learning rate with the batch size.
            Defaults to False.
        launcher (str): 'none', 'pytorch', 'slurm' or 'mpi'.
        cfg_options (dict, optional): Values to override in the config.

    Raises:
        FileNotFoundError: If the config, a checkpoint or the data set is
            missing.
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
    _set_work_dir(cfg, config, work_dir)
    if amp:
        if not torch.cuda.is_available():
            raise ValueError('mixed precision training (--amp) needs a GPU')
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    if auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise ValueError(f'--auto-scale-lr needs auto_scale_lr.base_batch_size in {config!r}')
        cfg.auto_scale_lr.enable = True
    if resume:
        cfg.load_from = find_latest(cfg.work_dir) if resume == 'auto' else resume
        cfg.resume = cfg.load_from is not None
        if not cfg.resume:
            print(
                f'no checkpoint in {cfg.work_dir!r} to resume from: '
                'training starts at the beginning'
            )
    if from_scratch:
        take_no_pretrained(cfg)
    if cfg.get('load_from'):
        _check_checkpoint(cfg.load_from, cfg.resume)
    else:
        for owner in _with_pretrained(cfg.model):
            check_pretrained(owner.init_cfg)
            _check_checkpoint(owner.init_cfg.checkpoint)
    check_data(cfg, 'train', 'val')
    runner = _build_runner(cfg)
    _check_loop(runner, 'train')
    # Not only after the first epoch.
    if runner._val_loop is not None:
        _check_loop(runner, 'val')
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
        work_dir (str, optional): Where metrics are written. Defaults to that
            of the config, or ``work_dirs/<name of the config>``.
        form (str, optional): 'deploy' tests the reparameterized model,
            'training' does not. Defaults to None: as the config's hooks say.
        out (str, optional): A ``.pkl`` file for the predictions; for
            segmentation also a folder, for label maps.
        show_dir (str, optional): Folder for pictures of the predictions.
        tta (bool): Test-time augmentation. Defaults to False.
        launcher (str): 'none', 'pytorch', 'slurm' or 'mpi'.
        cfg_options (dict, optional): Values to override in the config.

    Raises:
        FileNotFoundError, ValueError, CheckpointError: As
            :func:`runner_for_training`.
    """
    cfg = load_config(config, cfg_options)
    cfg.launcher = launcher
    _set_work_dir(cfg, config, work_dir)
    if out and out.endswith(('.pkl', '.pickle')):
        check_output(out, config, checkpoint)
    if show_dir:
        check_writable(show_dir)
    _check_checkpoint(checkpoint)
    cfg.load_from = checkpoint
    cfg.resume = False
    _set_form(cfg, form)
    if show_dir:
        _show(cfg, show_dir)
    if out:
        _dump(cfg, out)
    if tta:
        for key in ('tta_model', 'tta_pipeline'):
            if key not in cfg:
                raise ValueError(f'--tta needs {key!r} in {config!r}')
        dataset_config(cfg, 'test').pipeline = cfg.tta_pipeline
        cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    check_data(cfg, 'test')
    runner = _build_runner(cfg)
    _check_loop(runner, 'test')
    if out:
        _write_whole(runner, out)
    return runner


def init_model(
    config: str | Config,
    checkpoint: str | None = None,
    form: str = 'training',
    device: str | torch.device = 'cpu',
) -> nn.Module:
    """A model for inference.

    Args:
        config (str | Config): A config or its path.
        checkpoint (str, optional): Path of a checkpoint. Defaults to None:
            random weights.
        form (str): 'training' or 'deploy'. Defaults to 'training'.
        device (str | torch.device): Defaults to 'cpu'.

    Returns:
        nn.Module: The detector, segmentor or classifier in eval mode, with its
        config in ``cfg`` and the names of its classes in ``dataset_meta``.

    Raises:
        CheckpointError: If the checkpoint does not fit the model, or is merged
            and the training form is asked for.
    """
    if form not in FORMS:
        raise ValueError(f'form must be one of {FORMS}, but got {form!r}')
    cfg = load_config(config) if isinstance(config, str) else config
    init_default_scope(cfg.default_scope)
    load_safely()
    model = MODELS.build(cfg.model)
    model.dataset_meta = None
    if checkpoint:
        loaded = load_checkpoint(checkpoint)
        state_dict = {
            key[key.startswith('module.') * 7 :]: value
            for key, value in loaded['state_dict'].items()
        }
        if form == 'deploy' and is_reparameterized(model, state_dict):
            reparameterize(model, inplace=True, fuse_conv_bn=False)
        _check_fit(model, state_dict, checkpoint, complete=True)
        try:
            load_state_dict(model, state_dict, strict=True)
        except RuntimeError as error:
            text = ' '.join(str(error).split())
            raise CheckpointError(f'{checkpoint!r} does not fit the model: {text[:300]}') from error
        meta = loaded.get('meta')
        if isinstance(meta, dict) and isinstance(meta.get('dataset_meta'), dict):
            model.dataset_meta = meta['dataset_meta']
    if form == 'deploy':
        reparameterize(model, inplace=True)
    model.cfg = cfg
    return model.to(device).eval()


def reparameterize_checkpoint(
    config: str, checkpoint: str, out: str, tolerance: float = 1e-4
) -> dict:
    """Write the merged checkpoint of a checkpoint in the training form.

    The features of both backbones are compared on a random image first.

    Args:
        config (str): Path of the config, of the training form.
        checkpoint (str): The checkpoint to merge.
        out (str): The file to write; it is replaced only when complete.
        tolerance (float): Largest acceptable error, relative to the largest
            feature. Defaults to 1e-4.

    Returns:
        dict: ``error`` (relative), and of both forms ``parameters``, ``macs``
        (of the backbone, for a 224x224 image) and ``bytes`` (of the file).

    Raises:
        ValueError: If ``out`` is the input, or nothing can be merged.
        CheckpointError: If the checkpoint does not fit, is merged already, or
            the error exceeds the tolerance.
        OSError: If ``out`` cannot be written.
    """
    check_output(out, config, checkpoint)
    if not 0 < tolerance < float('inf'):
        raise ValueError(f'the tolerance must be positive, but is {tolerance}')
    model = init_model(config, checkpoint)
    if has_deploy_form(model):
        raise CheckpointError(f'{checkpoint!r} is reparameterized already')
    try:
        check_finite(model)
    except ValueError as error:
        raise CheckpointError(f'{checkpoint!r} cannot be merged: {error}') from error
    deployed = reparameterize(model, fuse_conv_bn=False)

    backbones = [getattr(m, 'backbone', m) for m in (model, deployed)]
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = [backbone(image) for backbone in backbones]
    error = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*features))
    if not error <= tolerance:
        raise CheckpointError(
            f'merging changes the features by {error:.1e}, more than '
            f'{tolerance:.0e}: the checkpoint has weights or BatchNorm '
            'statistics that are too extreme; nothing is written'
        )
    loaded = load_checkpoint(checkpoint)
    meta = loaded.get('meta')
    meta = dict(meta if isinstance(meta, dict) else {}, repa_mm_version=__version__)
    save_checkpoint(dict(meta=meta, state_dict=weights_to_cpu(deployed.state_dict())), out)
    return dict(
        error=error,
        parameters=[count_parameters(m) for m in (model, deployed)],
        macs=[count_macs(b, (3, 224, 224)) for b in backbones],
        bytes=[osp.getsize(f) for f in (checkpoint, out)],
    )


def calibrate_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    split: str = 'train',
    num_batches: int = 50,
    device: str | None = None,
    cfg_options: dict | None = None,
) -> dict:
    """Estimate the BatchNorm statistics of a backbone's FFNs from data.

    See :func:`~repa_mm.reparam.calibrate_batch_norm`. Nothing else in the
    checkpoint changes. Mixup and CutMix are left out.

    Args:
        config (str): Path of the config, of the training form.
        checkpoint (str): A checkpoint with the weights of its backbone.
        out (str): The file to write; it is replaced only when complete.
        split (str): Whose data loader and pipeline: 'train', 'val' or 'test'.
            Defaults to 'train'.
        num_batches (int): Number of batches, at most. Defaults to 50.
        device (str, optional): Defaults to the GPU, if there is one.
        cfg_options (dict, optional): Values to override in the config.

    Returns:
        dict: ``ffns`` and ``batches``, their numbers, and ``images``.

    Raises:
        FileNotFoundError: If the config, checkpoint or data set is missing.
        ValueError: If ``out`` is the input, or there is nothing to calibrate.
        CheckpointError: If the checkpoint does not fit, or is merged.
        OSError: If ``out`` cannot be written.
    """
    check_output(out, config, checkpoint)
    if num_batches < 1:
        raise ValueError(f'{num_batches} batches are none')
    cfg = load_config(config, cfg_options)
    loader_cfg = cfg.get(f'{split}_dataloader')
    if not loader_cfg:
        raise ValueError(f'the config {config!r} has no {split}_dataloader')
    loaded = load_checkpoint(checkpoint)
    state_dict = loaded['state_dict']
    prefix = 'module.' * all(k.startswith('module.') for k in state_dict)
    prefix += 'backbone.'
    own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    if not own:
        raise CheckpointError(
            f'{checkpoint!r} has no weight of a backbone: none is named {prefix!r}'
        )
    for owner in _with_pretrained(cfg.model):
        owner.init_cfg = None
    (cfg.model.get('train_cfg') or {}).pop('augments', None)
    _without_sync_bn(cfg.model)
    model = MODELS.build(cfg.model)
    backbone = model.backbone
    if has_deploy_form(backbone) or is_reparameterized(backbone, own):
        raise CheckpointError(
            'the deploy form has no BatchNorm left: calibrate the checkpoint of the training form'
        )
    try:
        load_state_dict(backbone, own, strict=True)
    except CheckpointError:
        raise
    except RuntimeError as error:
        raise CheckpointError(
            f'{checkpoint!r} does not fit the backbone: {" ".join(str(error).split())[:300]}'
        ) from error
    check_data(cfg, split)
    loader = Runner.build_dataloader(loader_cfg, seed=0)
    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    model.to(device)
    num_images = 0

    def forward(batch):
        nonlocal num_images
        data = model.data_preprocessor(batch, split == 'train')
        num_images += len(data['inputs'])
        backbone(data['inputs'])

    done = calibrate_batch_norm(backbone, itertools.islice(loader, num_batches), forward)
    new = weights_to_cpu(backbone.state_dict())
    ffns = [name for name, module in backbone.named_modules() if isinstance(module, ChannelIdleFFN)]
    statistics = {
        f'{prefix}{key}': new[key]
        for name in ffns
        for key in new
        if key.startswith(f'{name}.norm')
        and key.rpartition('.')[2] in ('running_mean', 'running_var', 'num_batches_tracked')
    }
    meta = dict(loaded.get('meta') or {}, repa_mm_version=__version__)
    save_checkpoint(dict(meta=meta, state_dict={**state_dict, **statistics}), out)
    return dict(ffns=len(ffns), batches=done, images=num_images)


def draw_predictions(model: nn.Module, image: str, out: str, score_thr: float = 0.3) -> object:
    """Run a model on an image file and draw what it predicts.

    Args:
        model (nn.Module): From :func:`init_model`.
        image (str): Path of the image.
        out (str): Path of the picture to write.
        score_thr (float): Detections below this score are not drawn.

    Returns:
        The prediction, a data sample of the model's codebase.

    Raises:
        FileNotFoundError, ValueError: If the image is missing, is none, or
            of a size that the model cannot take.
        OSError: If the picture cannot be written.
    """
    import cv2
    import mmcv
    from mmengine.dataset import Compose, pseudo_collate

    check_output(out, image)
    if not cv2.haveImageWriter(out):
        raise ValueError(f'{out!r} is not the name of a picture, such as prediction.png')
    if not 0 <= score_thr <= 1:
        raise ValueError(f'the score threshold must be from 0 to 1, but is {score_thr}')
    check_image(image)
    pixels = mmcv.imread(image)
    if pixels is None:
        raise ValueError(f'{image!r} is not an image that can be read')
    size = pixels.shape[:2]
    pixels = mmcv.bgr2rgb(pixels)
    cfg = model.cfg
    pipeline = Compose(
        [step for step in dataset_config(cfg, 'test').pipeline if 'Annotations' not in step['type']]
    )
    try:
        data = pipeline(dict(img_path=osp.abspath(image), img_id=0))
        with torch.no_grad():
            prediction = model.test_step(pseudo_collate([data]))[0]
    except Exception as error:
        raise ValueError(
            f'the model fails on {image!r} of {"x".join(map(str, size))} '
            f'pixels ({type(error).__name__}: {error})'
        ) from error
    visualizer = VISUALIZERS.build(
        dict(cfg.visualizer, name=f'demo_{id(model)}', vis_backends=None)
    )
    visualizer.dataset_meta = model.dataset_meta or {}
    kwargs = {}
    if cfg.default_scope == 'mmdet':
        kwargs = dict(pred_score_thr=score_thr)
    if cfg.default_scope == 'mmpretrain':
        kwargs = dict(draw_score=True)
    visualizer.add_datasample('prediction', pixels, data_sample=prediction, draw_gt=False, **kwargs)
    with replacing(out) as temporary:
        mmcv.imwrite(mmcv.rgb2bgr(visualizer.get_image()), temporary)
    return prediction


def _set_work_dir(cfg: Config, config: str, work_dir: str | None) -> None:
    name = osp.splitext(osp.basename(config))[0]
    for key in ('work_dir', 'load_from'):
        if not isinstance(cfg.get(key), (str, type(None))):
            raise ValueError(f'{key} must be a path, but is {cfg[key]!r}')
    cfg.work_dir = work_dir or cfg.get('work_dir') or osp.join('work_dirs', name)
    check_writable(cfg.work_dir)


def _check_checkpoint(path: str, resume: bool = False) -> None:
    """Read it early, before a data set or a model is built."""
    if not is_remote(path):
        loaded = load_checkpoint(path)
        check_values(
            {
                key: value
                for key, value in loaded['state_dict'].items()
                if key.endswith(('.weight', '.bias', '.running_mean', '.running_var'))
            }
        )
        if resume:
            _check_resumable(loaded)


def _check_resumable(checkpoint: dict) -> None:
    meta, optimizer = checkpoint.get('meta'), checkpoint.get('optimizer')
    meta = meta if isinstance(meta, dict) else {}
    for key, there in (
        ('epoch', isinstance(meta.get('epoch'), int)),
        ('iter', isinstance(meta.get('iter'), int)),
        # MMEngine's MessageHub, or its state.
        ('message_hub', not isinstance(checkpoint.get('message_hub', 0), (int, float, str, list))),
        ('optimizer', isinstance(optimizer, dict)),
    ):
        if not there:
            raise CheckpointError(
                f'the checkpoint has no {key!r} and cannot be resumed from; '
                'to start from its weights: --cfg-options load_from=FILE'
            )


def _check_fit(model: nn.Module, state_dict: dict, path: str | None, complete: bool) -> None:
    try:
        check_fit(model, state_dict, complete)
    except CheckpointError as error:
        raise CheckpointError(f'{path!r}: {error}' if path else str(error)) from error


class _CheckpointHook(Hook):
    """Checks what MMEngine is about to load, for it only warns."""

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        training = isinstance(runner._train_loop, BaseLoop)
        if runner._resume and training:
            _check_resumable(checkpoint)
        state_dict = {
            key[key.startswith('module.') * 7 :]: value
            for key, value in checkpoint['state_dict'].items()
        }
        # Training may begin with a part of the weights.
        _check_fit(
            innermost(runner.model),
            state_dict,
            runner._load_from,
            complete=runner._resume or not training,
        )


def take_no_pretrained(cfg: Config) -> None:
    """Change a config so that its model begins with random weights."""
    for owner in _with_pretrained(cfg.model):
        owner.init_cfg = None
    if cfg.model.get('backbone', {}).get('norm_eval'):
        cfg.model.backbone.norm_eval = False


def _with_pretrained(cfg: ConfigDict) -> Iterator[ConfigDict]:
    """The parts of a model's config that load pretrained weights."""
    if isinstance(cfg, dict):
        init_cfg = cfg.get('init_cfg')
        if isinstance(init_cfg, dict) and init_cfg.get('type') == 'Pretrained':
            yield cfg
        for value in cfg.values():
            yield from _with_pretrained(value)


def _set_form(cfg: Config, form: str | None) -> None:
    hooks = cfg.get('custom_hooks') or []
    has_hook = any(h.get('type') == 'ReparameterizeHook' for h in hooks)
    if form == 'training':
        cfg.custom_hooks = [h for h in hooks if h.get('type') != 'ReparameterizeHook']
    elif form == 'deploy' and not has_hook:
        cfg.custom_hooks = [*hooks, dict(type='ReparameterizeHook')]


def _show(cfg: Config, show_dir: str) -> None:
    hook = cfg.default_hooks.get('visualization')
    if hook is None:
        raise ValueError('--show-dir needs default_hooks.visualization in the config')
    if cfg.default_scope == 'mmdet':
        hook.update(draw=True, test_out_dir=show_dir)
    elif cfg.default_scope == 'mmseg':
        hook.update(draw=True)
        cfg.visualizer.save_dir = show_dir
    else:
        hook.update(enable=True, out_dir=show_dir)


def _write_whole(runner: Runner, out: str) -> None:
    """Let the predictions replace the file when they are complete."""

    def compute_metrics(results: list) -> dict:
        with replacing(out) as temporary:
            mmengine.dump(results, temporary)
        return {}

    for metric in runner.test_loop.evaluator.metrics:
        if isinstance(metric, DumpResults):
            metric.compute_metrics = compute_metrics


def _dump(cfg: Config, out: str) -> None:
    """Add what writes the predictions to the evaluators."""
    if out.endswith(('.pkl', '.pickle')):
        kind = dict(
            mmdet='mmdet.DumpDetResults',
            mmseg='mmengine.DumpSegResults',
            mmpretrain='mmengine.DumpResults',
        )[cfg.default_scope]
        evaluators = cfg.get('test_evaluator') or []
        if isinstance(evaluators, dict):
            evaluators = [evaluators]
        cfg.test_evaluator = [*evaluators, dict(type=kind, out_file_path=out)]
    elif cfg.default_scope == 'mmseg' and isinstance(cfg.test_evaluator, dict):
        check_writable(out)
        cfg.test_evaluator.update(output_dir=out, keep_results=True)
    else:
        raise ValueError(f'--out must be a .pkl file, but got {out!r}')


def dataset_config(cfg: Config, split: str) -> ConfigDict:
    """The config of the innermost data set of a data loader.

    Raises:
        ValueError: If there is none.
    """
    loader = cfg.get(f'{split}_dataloader') or {}
    if not isinstance(loader.get('dataset'), dict):
        raise ValueError(f'the config has no {split}_dataloader.dataset')
    return next(leaves(loader.dataset))


def check_data(cfg: Config, *splits: str) -> None:
    """Check that the files and folders of data sets are there.

    Raises:
        FileNotFoundError: If not.
        ValueError: If a data loader has no data set, or too many workers.
    """
    for split in splits:
        if not cfg.get(f'{split}_dataloader'):
            continue
        dataset_config(cfg, split)
        loader = cfg[f'{split}_dataloader']
        workers = loader.get('num_workers', 0)
        most = max(64, 8 * (os.cpu_count() or 1))
        if not isinstance(workers, int) or not 0 <= workers <= most:
            raise ValueError(
                f'{split}_dataloader.num_workers must be from 0 to {most}, but is {workers!r}'
            )
        for dataset in leaves(loader.dataset):
            if dataset.get('backend_args'):  # not among the files here
                continue
            for path, is_there in _paths_of(dataset):
                if path and not is_remote(path) and not is_there(path):
                    raise FileNotFoundError(
                        f'no data set at {path!r}: put it there or a link to '
                        f'it, or set {split}_dataloader.dataset.data_root'
                    )


def _paths_of(dataset: ConfigDict) -> list:
    """Paths of a data set, and what each must be."""
    root = dataset.get('data_root') or ''
    prefixes = dataset.get('data_prefix') or {}
    if isinstance(prefixes, str):
        prefixes = dict(img=prefixes)
    for key, value, kind in (
        ('data_root', root, str),
        ('ann_file', dataset.get('ann_file') or '', str),
        ('data_prefix', prefixes, dict),
    ):
        if not isinstance(value, kind):
            raise ValueError(f'{key} of a data set must be a path, but is {value!r}')
    paths = [(root, osp.isdir)]
    # Not a pipe or a device, which would not end.
    ann_file = dataset.get('ann_file') or ''
    paths.append((osp.join(root, ann_file), osp.isfile if ann_file else osp.isdir))
    paths += [
        (osp.join(root, prefix), osp.isdir)
        for prefix in prefixes.values()
        if isinstance(prefix, str)
    ]
    return paths


def _check_loop(runner: Runner, split: str) -> None:
    """Build a loop, and check that it has something to do."""
    config = dataset_config(runner.cfg, split)
    where = ', '.join(
        f'{key}={config.get(key)!r}' for key in ('data_root', 'ann_file', 'data_prefix')
    )
    try:
        with checked_annotations(_is_annotated(runner.cfg, split)):
            loop = getattr(runner, f'{split}_loop')
    except AnnotationError as error:
        raise ValueError(f'the {split} data set is damaged: {error}') from error
    except Exception as error:
        raise ValueError(
            f'cannot read the {split} data set: {type(error).__name__}: '
            f'{error} (with {where}; is it empty, or does it have other class '
            'names than its metainfo?)'
        ) from error
    dataset = loop.dataloader.dataset
    for inner in leaves(dataset):
        _check_classes(runner, inner, split)
    if not len(dataset):
        raise ValueError(f'the {split} data set is empty: no image was found with {where}')
    if not len(loop.dataloader):
        raise ValueError(
            f'the {split} data set has {len(dataset)} images, '
            'fewer than a batch: set '
            f'{split}_dataloader.batch_size'
        )
    for key in ('max_epochs', 'max_iters', 'val_interval'):
        if split == 'train' and getattr(loop, key, 1) < 1:
            raise ValueError(f'train_cfg.{key} must be at least 1')
    check_items(dataset)


def _is_annotated(cfg: Config, split: str) -> bool:
    """Whether a data set is to be compared with its annotations."""
    evaluators = cfg.get(f'{split}_evaluator') or []
    if isinstance(evaluators, dict):
        evaluators = [evaluators]
    return not any(e.get('format_only') for e in evaluators)


def _check_classes(runner: Runner, dataset, split: str) -> None:
    """Check that a data set has the classes that it and the model name."""
    classes = getattr(dataset, 'metainfo', {}).get('classes')
    if not isinstance(classes, (list, tuple)):
        return
    if not classes:
        raise ValueError(f'{split}_dataloader.dataset.metainfo.classes is empty')
    found = getattr(dataset, 'cat_ids', None)  # those in a file of COCO's kind
    if isinstance(found, list) and len(found) < len(classes):
        raise ValueError(
            f'the {split} data set has other class names than its metainfo: '
            f'{len(found)} of the {len(classes)} in '
            f'{split}_dataloader.dataset.metainfo.classes are in '
            f'{dataset.ann_file!r}'
        )
    for name, module in innermost(runner.model).named_modules():
        count = getattr(module, 'num_classes', None)
        # A classifier may be asked about a part of its classes.
        if (
            name.rpartition('.')[2] in HEADS
            and isinstance(count, int)
            and (
                len(classes) > count or len(classes) < count and name != 'head' and split != 'train'
            )
        ):
            raise ValueError(
                f'the {split} data set has {len(classes)} classes, but {name} '
                f'of the model has {count}: set model.{name}.num_classes, or '
                f'{split}_dataloader.dataset.metainfo.classes'
            )


def _build_runner(cfg: Config) -> Runner:
    variable = dict(pytorch='RANK', slurm='SLURM_PROCID', mpi='OMPI_COMM_WORLD_LOCAL_RANK').get(
        cfg.launcher
    )
    if variable and variable not in os.environ:
        raise ValueError(
            f'--launcher {cfg.launcher} needs the environment of '
            'such a job: use tools/dist_train.sh, dist_test.sh, '
            'slurm_train.sh or slurm_test.sh'
        )
    if cfg.launcher == 'pytorch' and not torch.cuda.is_available():
        _distribute_on_cpu(cfg)
    load_safely()
    runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
    runner.register_hook(_CheckpointHook(), 'VERY_HIGH')
    return runner


def _distribute_on_cpu(cfg: Config) -> None:
    """MMEngine's own set-up of several processes asks for GPUs."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group('gloo')
    cfg.model_wrapper_cfg = dict(
        type='MMDistributedDataParallel',
        device_ids=None,
        broadcast_buffers=False,
        find_unused_parameters=cfg.get('find_unused_parameters', False),
    )
    cfg.sync_bn = None
    _without_sync_bn(cfg)


def end_process() -> None:
    """End a process that has done its work together with others on a CPU.

    While the interpreter takes down a DistributedDataParallel model on gloo,
    PyTorch aborts the process every other time (seen with 2.13), and with it
    a job that has succeeded. Does nothing in any other process.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == 'gloo':
        torch.distributed.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _without_sync_bn(cfg) -> None:
    """Torch's SyncBatchNorm does not train on a CPU: use plain BatchNorm."""
    if isinstance(cfg, (dict, Config)):
        if cfg.get('type') == 'SyncBN':
            cfg['type'] = 'BN'
        for value in cfg.values():
            _without_sync_bn(value)
    elif isinstance(cfg, (list, tuple)):
        for value in cfg:
            _without_sync_bn(value)
