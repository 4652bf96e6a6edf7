"""Reading a config, and setting what a command line asks for."""

import ast
import copy
import importlib.util
import os.path as osp
from collections.abc import Iterator
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope

from repa_mm.datasets.checks import leaves
from repa_mm.files import check_writable
from repa_mm.paths import config_path

SCOPES = ('mmdet', 'mmseg', 'mmpretrain')
FORMS = ('training', 'deploy')
HEADS = ('bbox_head', 'mask_head', 'decode_head', 'auxiliary_head', 'head')
SPLITS = ('train', 'val', 'test')
# Parts of a config that tools look into.
DICTS = (
    *(f'{split}_{part}' for split in SPLITS for part in ('dataloader', 'cfg')),
    *('model', 'optim_wrapper', 'default_hooks', 'env_cfg', 'auto_scale_lr'),
    *('tta_model', 'visualizer'),
)


def load_config(path: str, cfg_options: dict | None = None) -> Config:
    """Read a config and make its codebase the default scope.

    Args:
        path (str): A config of MMDetection, MMSegmentation or MMPretrain, or the name of one that
            is installed, such as 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'.
        cfg_options (dict, optional): Values to override, by dotted names.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no config, or of no known codebase.
        ImportError: If its codebase is not installed.
    """
    if '::' in path and not osp.exists(path):
        path = config_path(path)
    if not osp.isfile(path):
        raise FileNotFoundError(f'no config at {path!r}' + ': it is a folder' * osp.isdir(path))
    try:
        _check_bases(path, set())
        cfg = Config.fromfile(path)
    except RecursionError as error:
        raise ValueError(
            f'cannot read the config {path!r}: it inherits from itself, perhaps through others, or '
            'its parts are nested too deeply'
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
    try:
        _check_parts(cfg)
    except ValueError as error:
        raise ValueError(f'the config {path!r} is wrong: {error}') from error
    # MMEngine's Runner does so, and a model that is built without one needs its normalization, too.
    if cfg.get('data_preprocessor'):
        cfg.model.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
    init_default_scope(scope)
    return cfg


def _check_bases(path: str, seen: set[str]) -> None:
    """Check that a config inherits from files: MMEngine would read a pipe without end.

    Bases that are not written as plain strings are left to MMEngine.
    """
    if not osp.exists(path) or osp.realpath(path) in seen:
        return
    if not osp.isfile(path):
        raise ValueError(f'the base {path!r} is not a file')
    seen.add(osp.realpath(path))
    if not path.endswith('.py'):
        return
    with open(path, encoding='utf-8') as file:
        statements = ast.parse(file.read()).body
    for statement in statements:
        targets = getattr(statement, 'targets', ())
        if any(isinstance(target, ast.Name) and target.id == '_base_' for target in targets):
            for node in getattr(statement.value, 'elts', [statement.value]):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    _check_bases(osp.join(osp.dirname(path), node.value), seen)


def _check_parts(cfg: Config) -> None:
    """Check the types of what tools or MMEngine's Runner look into."""
    for key in DICTS:
        if not isinstance(cfg.get(key, {}), (dict, type(None))):
            raise ValueError(f'{key!r} must be a dict, but is {cfg[key]!r}')
    typed = dict(model=cfg.model)
    if 'backbone' in cfg.model:
        typed['model.backbone'] = cfg.model.backbone
    lists = dict(custom_hooks=cfg.get('custom_hooks') or [])
    for key, hook in (cfg.get('default_hooks') or {}).items():
        typed[f'default_hooks.{key}'] = hook or dict(type=None)
    for split in SPLITS:
        lists[f'{split}_evaluator'] = evaluators(cfg, split)
        dataset = (cfg.get(f'{split}_dataloader') or {}).get('dataset')
        for leaf in leaves(dataset) if isinstance(dataset, dict) else ():
            lists[f'{split}_dataloader.dataset.pipeline'] = leaf.get('pipeline') or []
    for name, items in lists.items():
        if not isinstance(items, (list, tuple)):
            raise ValueError(f'{name!r} must be a list, but is {items!r}')
        typed.update((f'{name}[{i}]', item) for i, item in enumerate(items))
    for name, part in typed.items():
        if not isinstance(part, dict):
            raise ValueError(f'{name!r} must be a dict, but is {part!r}')
        if 'type' not in part:
            raise ValueError(f"{name!r} has no 'type': {str(part)[:80]}")
    _check_keys(cfg._cfg_dict)


def _check_keys(value: Any, depth: int = 0) -> None:
    """Check that MMEngine can write a config: what has an empty name or lies deep, it cannot."""
    if depth > 50:
        raise ValueError(f'parts are nested too deeply: {str(value)[:80]}')
    if isinstance(value, dict):
        if '' in value:
            raise ValueError(f'an empty key has the value {str(value[""])[:80]}')
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item, depth + 1)


def evaluators(cfg: Config, split: str) -> list[ConfigDict]:
    """The configs of the metrics of 'val' or 'test'."""
    found = cfg.get(f'{split}_evaluator') or []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def set_work_dir(cfg: Config, config: str, work_dir: str | None) -> None:
    """Set the folder of a run: that of the command line, of the config, or its name."""
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
    """Let tests use one form, whatever hooks a config has. None leaves the hooks as they are."""
    kind = 'ReparameterizeHook'
    custom, default = cfg.get('custom_hooks') or [], cfg.get('default_hooks') or {}
    named = [key for key, hook in default.items() if hook and hook['type'] == kind]
    others = [hook for hook in custom if hook['type'] != kind]
    if form == 'training':
        cfg.custom_hooks = others
        for key in named:
            del default[key]
    elif form == 'deploy' and not named and len(others) == len(custom):
        cfg.custom_hooks = [*custom, dict(type=kind)]


def show_pictures(cfg: Config, show_dir: str) -> None:
    """Let a test draw its predictions."""
    hook = cfg.default_hooks.get('visualization')
    if hook is None:
        raise ValueError('--show-dir needs default_hooks.visualization in the config')
    if cfg.default_scope == 'mmdet':
        hook.update(draw=True, test_out_dir=show_dir)
    elif cfg.default_scope == 'mmseg':
        if not cfg.get('visualizer'):
            raise ValueError("--show-dir needs a 'visualizer' in the config")
        hook.update(draw=True)
        cfg.visualizer.save_dir = show_dir
    else:
        hook.update(enable=True, out_dir=show_dir)


def dump_predictions(cfg: Config, out: str) -> None:
    """Add what writes the predictions to the evaluators."""
    if out.endswith(('.pkl', '.pickle')):
        kinds = dict(mmdet='mmdet.DumpDetResults', mmseg='mmengine.DumpSegResults')
        kind = kinds.get(cfg.default_scope, 'mmengine.DumpResults')
        cfg.test_evaluator = [*evaluators(cfg, 'test'), dict(type=kind, out_file_path=out)]
    elif cfg.default_scope == 'mmseg' and isinstance(cfg.test_evaluator, dict):
        check_writable(out)
        cfg.test_evaluator.update(output_dir=out, keep_results=True)
    else:
        raise ValueError(f'--out must be a .pkl file, but got {out!r}')


def dataset_config(cfg: Config, split: str) -> ConfigDict:
    """The config of the innermost data set of a data loader.

    Args:
        cfg (Config): The config.
        split (str): 'train', 'val' or 'test'.

    Raises:
        ValueError: If there is none.
    """
    loader = cfg.get(f'{split}_dataloader') or {}
    if not isinstance(loader.get('dataset'), dict):
        raise ValueError(f'the config has no {split}_dataloader.dataset')
    return next(leaves(loader.dataset))


def without_sync_bn(cfg: Any) -> None:
    """Replace SyncBatchNorm in a config by plain BatchNorm, as torch trains it on GPUs only."""
    if isinstance(cfg, (dict, Config)):
        if cfg.get('type') == 'SyncBN':
            cfg['type'] = 'BN'
        cfg = list(cfg.values())
    if isinstance(cfg, (list, tuple)):
        for value in cfg:
            without_sync_bn(value)


def plain(value: Any) -> Any:
    """Config values as ordinary dicts, lists and tuples, for writing them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value
