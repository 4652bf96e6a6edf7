"""Reading configs."""

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, Registry, init_default_scope, root

from repa_mm.io.paths import config_path

CODEBASES = 'mmdet', 'mmseg', 'mmpretrain'


def load_config(path: str, cfg_options: dict | None = None) -> Config:
    """Read a config and make its codebase the default scope.

    Args:
        path (str): A config of MMDetection, MMSegmentation or MMPretrain: a path, or the name of an
            installed config, such as 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'.
        cfg_options (dict, optional): Values to override, by dotted names.

    Returns:
        Config: The config. A ``data_preprocessor`` beside the model is copied into ``model``. In a
        pure Python config (``with read_base():``), classes are replaced by the names under which
        they are registered, and ``default_scope`` is the codebase of the model's class.
    """
    if os.getcwd() not in sys.path:  # a config may import from there, as under ``python -m``
        sys.path.append(os.getcwd())
    cfg = Config.fromfile(config_path(path) if '::' in path else path)
    scope = cfg.get('default_scope') or _codebase(cfg.get('model') or {})
    named = {key: _with_names(cfg[key], scope) for key in cfg.to_dict()}  # which skips imports
    cfg = Config(dict(named, default_scope=scope), cfg.text, cfg.filename, cfg.env_variables)
    if cfg_options:
        cfg.merge_from_dict(cfg_options)
    # As MMEngine's Runner does: models that are built without a Runner need the normalization, too.
    if cfg.get('data_preprocessor'):
        cfg.model.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
    init_default_scope(cfg.default_scope)
    return cfg


def _codebase(model: dict) -> str:
    """Return the scope of a model, which its class or the nearest of its bases belongs to."""
    kind = model.get('type')
    if isinstance(kind, str):
        try:
            kind = MODELS.get(kind)
        except RuntimeError:  # a name that only a scope would find
            kind = None
    for cls in getattr(kind, '__mro__', ()):
        if cls.__module__.partition('.')[0] in CODEBASES:
            return cls.__module__.partition('.')[0]
    return _codebase(model['model']) if 'model' in model else 'mmengine'  # of `Restructured`


def _with_names(value: Any, scope: str) -> Any:
    """Return a part of a config with the registered names of the classes to build."""
    if isinstance(value, dict):
        return {
            key: _name(inner, scope)
            if key in ('type', 'constructor') and callable(inner)
            else _with_names(inner, scope)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_with_names(inner, scope) for inner in value)
    return value


def _name(kind: Callable, scope: str) -> str:
    """Return the name by which the default scope's registries find a class or function."""
    nodes = [node for node in vars(root).values() if isinstance(node, Registry)]
    for node in nodes:  # grows
        nodes += node.children.values()
        for name, module in node.module_dict.items():
            if module is kind:
                with node.switch_scope_and_registry(scope) as own:
                    found = own.module_dict.get(name, own.root.module_dict.get(name))
                return name if found is kind else f'{node.scope}.{name}'
    return f'{kind.__module__}.{kind.__qualname__}'


def dataset_config(cfg: Config, split: str) -> ConfigDict:
    """Return the config of the (first) data set of a split, 'train', 'val' or 'test', unwrapped."""
    dataset = cfg[f'{split}_dataloader'].dataset
    while True:
        inner = dataset.get('datasets') or dataset.get('dataset')
        if not inner:
            return dataset
        dataset = inner[0] if isinstance(inner, (list, tuple)) else inner
