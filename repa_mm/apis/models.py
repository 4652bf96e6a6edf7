"""Opening models: from a config and a checkpoint to a module."""

import copy
import warnings

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import DATASETS, MODELS, init_default_scope

from repa_mm.io.checkpoints import load_checkpoint, load_weights, split_init_cfg
from repa_mm.io.configs import dataset_config, load_config
from repa_mm.models.channel_idle import RePaBackbone
from repa_mm.reparam import finish_schedules_, has_training_form, reparameterize_


def open_model(
    config: str | Config, checkpoint: str | None = None, *, merge: bool = False
) -> nn.Module:
    """Build a model and load its weights: in eval mode, on the CPU.

    Args:
        config (str | Config): The model's config: from :func:`~repa_mm.io.configs.load_config`,
            which takes options, a path, or the name of an installed config ('mmdet::swin/….py').
        checkpoint (str, optional): A file, a URL or another address that MMEngine knows. The model
            gets the form of the checkpoint's weights. Defaults to None: initialized weights, the
            same each time, without those of pretraining, and with all schedules finished.
        merge (bool): Return the deploy form of a model in the training form. Defaults to False.

    Returns:
        nn.Module: The detector, segmentor or classifier, with its config in ``cfg`` and the class
        names of the checkpoint, else of the test data, in ``dataset_meta``.

    Raises:
        CheckpointError: If the checkpoint does not fit the model. It may have weights beside those
            of the model's modules, such as a teacher's, and heads that the model lacks.
    """
    cfg = load_config(config) if isinstance(config, str) else config
    init_default_scope(cfg.default_scope)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS.build(copy.deepcopy(cfg.model))  # some detectors write into their config
        if not checkpoint:
            _initialize_(model)
    meta = {}
    if checkpoint:
        loaded = load_checkpoint(checkpoint)
        load_weights(model, loaded['state_dict'], checkpoint)
        meta = loaded.get('meta') or {}
        meta = meta.get('dataset_meta') or {k: meta[k] for k in ('CLASSES', 'PALETTE') if k in meta}
        meta = {key.lower(): value for key, value in meta.items()}  # older ones are in capitals
    model.cfg, model.dataset_meta = cfg, dict(meta if 'classes' in meta else _metainfo(cfg))
    if merge and has_training_form(model):
        model = reparameterize_(model)
    model.eval()  # on a line of its own: the eval() of some backbones returns None
    return model


def deploy_(cfg: dict) -> None:
    """Set ``deploy=True`` in the configs of models with structures in ``cfg.model``, in place."""
    for part in (cfg, cfg.get('backbone') or {}):
        if part.get('type') == 'Restructured' or has_structures(part):
            part['deploy'] = True


def has_structures(cfg: dict) -> bool:
    """Return True if a config is of a backbone of this package, which has structures."""
    kind = MODELS.get(cfg['type']) if 'type' in cfg else None
    return isinstance(kind, type) and issubclass(kind, RePaBackbone)


def _initialize_(model: nn.Module) -> None:
    """Initialize weights as for training from scratch, in place.

    Without it, a detector finds an object at every anchor, and its post-processing takes long.
    """
    finish_schedules_(model)
    for module in model.modules():
        files, others = split_init_cfg(module)
        if files:
            module.init_cfg = others
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel('WARNING')  # hides where each weight is initialized from
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', '.*never estimated')  # which a checkpoint is to have
            model.init_weights()
    finally:
        logger.setLevel(level)


def _metainfo(cfg: Config) -> dict:
    """Return what a config's test data set says of itself, such as the names of its classes."""
    if not cfg.get('test_dataloader'):
        return {}
    dataset = dataset_config(cfg, 'test')
    try:
        return DATASETS.build(dict(dataset, pipeline=[], lazy_init=True)).metainfo
    except (AssertionError, OSError, TypeError):  # it needs its files, or is no BaseDataset
        with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
            kind = registry.get(dataset.type)
        return dataset.get('metainfo') or getattr(kind, 'METAINFO', {})
