"""Checks of data sets before a run."""

import os
import os.path as osp

from mmengine.config import Config, ConfigDict
from mmengine.runner import Runner

from repa_mm.checkpoints import is_remote
from repa_mm.datasets.checks import AnnotationError, check_items, checked_annotations, leaves
from repa_mm.reparam import innermost
from repa_mm.runtime.config import HEADS, dataset_config


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


def check_loop(runner: Runner, split: str) -> None:
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
