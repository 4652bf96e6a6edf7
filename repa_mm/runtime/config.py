"""Reading a config, and setting what a command line asks for."""

import importlib.util
import os.path as osp
from collections.abc import Iterator

from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope

from repa_mm.datasets.checks import leaves
from repa_mm.files import check_writable

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


def set_work_dir(cfg: Config, config: str, work_dir: str | None) -> None:
    """Set the folder for logs and checkpoints, and check that it can be written.

    Args:
        cfg (Config): The config to change.
        config (str): The config's file; its name is the folder's where nothing else is given.
        work_dir (str, optional): The folder. Defaults to the config's ``work_dir``, or
            ``work_dirs/<name of the config>``.

    Raises:
        ValueError: If ``work_dir`` or ``load_from`` in the config is not a path.
        OSError: If the folder cannot be written.
    """
    name = osp.splitext(osp.basename(config))[0]
    for key in ('work_dir', 'load_from'):
        if not isinstance(cfg.get(key), (str, type(None))):
            raise ValueError(f'{key} must be a path, but is {cfg[key]!r}')
    cfg.work_dir = work_dir or cfg.get('work_dir') or osp.join('work_dirs', name)
    check_writable(cfg.work_dir)


def take_no_pretrained(cfg: Config) -> None:
    """Change a config so that its model begins with random weights."""
    for owner in with_pretrained(cfg.model):
        owner.init_cfg = None
    if cfg.model.get('backbone', {}).get('norm_eval'):
        cfg.model.backbone.norm_eval = False


def with_pretrained(cfg: ConfigDict) -> Iterator[ConfigDict]:
    """The parts of a model's config that load pretrained weights."""
    if isinstance(cfg, dict):
        init_cfg = cfg.get('init_cfg')
        if isinstance(init_cfg, dict) and init_cfg.get('type') == 'Pretrained':
            yield cfg
        for value in cfg.values():
            yield from with_pretrained(value)


def set_form(cfg: Config, form: str | None) -> None:
    """Change a config's hooks so that tests run this form of the model.

    Args:
        cfg (Config): The config to change.
        form (str, optional): 'training' removes ``ReparameterizeHook``, 'deploy' adds one if
            there is none, None leaves the hooks as they are.
    """
    hooks = cfg.get('custom_hooks') or []
    has_hook = any(h.get('type') == 'ReparameterizeHook' for h in hooks)
    if form == 'training':
        cfg.custom_hooks = [h for h in hooks if h.get('type') != 'ReparameterizeHook']
    elif form == 'deploy' and not has_hook:
        cfg.custom_hooks = [*hooks, dict(type='ReparameterizeHook')]


def show_pictures(cfg: Config, show_dir: str) -> None:
    """Change a config so that a test writes pictures of its predictions.

    Raises:
        ValueError: If the config has no visualization hook.
    """
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


def dump_predictions(cfg: Config, out: str) -> None:
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


def without_sync_bn(cfg) -> None:
    """Torch's SyncBatchNorm does not train on a CPU: use plain BatchNorm."""
    if isinstance(cfg, (dict, Config)):
        if cfg.get('type') == 'SyncBN':
            cfg['type'] = 'BN'
        for value in cfg.values():
            without_sync_bn(value)
    elif isinstance(cfg, (list, tuple)):
        for value in cfg:
            without_sync_bn(value)
