"""Configs, and the models that they describe."""

import copy
import os.path as osp
from collections.abc import Iterator
from typing import Any

import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope

from repa_mm.files import check_writable
from repa_mm.paths import config_path, config_root
from repa_mm.reparam import finish_schedules
from repa_mm.weights import load_checkpoint, load_weights

FORMS = ('training', 'deploy')
HEADS = ('bbox_head', 'mask_head', 'decode_head', 'auxiliary_head', 'head')


def load_config(path: str, cfg_options: dict | None = None) -> Config:
    """Read a config and make its codebase the default scope.

    Args:
        path (str): A config of MMDetection, MMSegmentation or MMPretrain, or the name of one that
            is installed, such as 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'.
        cfg_options (dict, optional): Values to override, by dotted names.

    Returns:
        Config: The config. A data preprocessor beside the model stands in ``model``, too.
    """
    cfg = Config.fromfile(config_path(path) if '::' in path else path)
    if cfg_options:
        cfg.merge_from_dict(cfg_options)
    # MMEngine's Runner does so, and a model that is built without one needs its normalization, too.
    if cfg.get('data_preprocessor'):
        cfg.model.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    return cfg


def build_model(cfg: Config, checkpoint: str | None = None) -> nn.Module:
    """A model in eval mode, on the CPU.

    Args:
        cfg (Config): From :func:`load_config`.
        checkpoint (str, optional): Path of a checkpoint; the model takes the form that its weights
            are in. Defaults to None: random weights, with every schedule at its end, so that the
            model can be merged.

    Returns:
        nn.Module: The detector, segmentor or classifier, with its config in ``cfg`` and the names
        of its classes in ``dataset_meta``.

    Raises:
        CheckpointError: If the checkpoint does not fit the model.
    """
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    model = MODELS.build(cfg.model)
    meta = {}
    if checkpoint:
        loaded = load_checkpoint(checkpoint)
        load_weights(model, loaded['state_dict'], checkpoint)
        meta = (loaded.get('meta') or {}).get('dataset_meta') or {}
    else:
        finish_schedules(model)
    if not meta and cfg.get('test_dataloader'):
        meta = dataset_config(cfg, 'test').get('metainfo') or {}
    model.cfg, model.dataset_meta = cfg, dict(meta)
    model.eval()
    return model


def dataset_config(cfg: Config, split: str) -> ConfigDict:
    """The config of the (first) data set of a data loader, inside any wrappers.

    Args:
        cfg (Config): The config.
        split (str): 'train', 'val' or 'test'.
    """
    dataset = cfg[f'{split}_dataloader'].dataset
    while True:
        inner = dataset.get('datasets') or dataset.get('dataset')
        if not inner:
            return dataset
        dataset = inner[0] if isinstance(inner, (list, tuple)) else inner


def codebase_tool(config: str, name: str) -> str:
    """Path of a tool of the codebase that a config is for.

    Args:
        config (str): Path of the config.
        name (str): The tool's, 'train.py' or 'test.py'.
    """
    scope = Config.fromfile(config).default_scope
    return osp.join(osp.dirname(config_root(scope)), 'tools', name)


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
        kinds = dict(mmdet='mmdet.DumpDetResults')
        kind = kinds.get(cfg.default_scope, 'mmengine.DumpResults')
        cfg.test_evaluator = [*evaluators(cfg, 'test'), dict(type=kind, out_file_path=out)]
    elif cfg.default_scope == 'mmseg' and isinstance(cfg.test_evaluator, dict):
        check_writable(out)
        cfg.test_evaluator.update(output_dir=out, keep_results=True)
    else:
        raise ValueError(f'--out must be a .pkl file, but got {out!r}')


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
