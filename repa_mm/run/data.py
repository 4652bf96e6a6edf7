"""Checks of data sets before a run."""

import logging
import os
import os.path as osp

from mmengine.config import Config, ConfigDict
from mmengine.dataset import BaseDataset
from mmengine.logging import print_log
from mmengine.runner import BaseLoop, Runner

from repa_mm.datasets.checks import check_items, leaves
from repa_mm.datasets.coco import (
    AnnotationError,
    check_categories,
    check_coco,
    checked_annotations,
    renumber_annotation_0,
)
from repa_mm.reparam import innermost
from repa_mm.run.config import HEADS, dataset_config, evaluators
from repa_mm.weights import is_remote


def check_data(cfg: Config, *splits: str) -> None:
    """Check that the files and folders of data sets are there.

    Args:
        cfg (Config): The config.
        *splits (str): 'train', 'val' or 'test'.

    Raises:
        FileNotFoundError: If a file or folder is not there.
        ValueError: If a data loader has no data set, or too many workers.
    """
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        if not loader:
            continue
        dataset_config(cfg, split)
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
                        f'no data set at {path!r}: put it there or a link to it, or set '
                        f'{split}_dataloader.dataset.data_root'
                    )


def _paths_of(dataset: ConfigDict) -> list:
    """Paths of a data set, and what each must be."""
    for key, kinds in (('data_root', str), ('ann_file', str), ('data_prefix', (str, dict))):
        if not isinstance(dataset.get(key) or '', kinds):
            raise ValueError(f'{key} of a data set must be a path, but is {dataset[key]!r}')
    root, ann_file = dataset.get('data_root') or '', dataset.get('ann_file') or ''
    prefixes = dataset.get('data_prefix') or {}
    if isinstance(prefixes, str):
        prefixes = dict(img=prefixes)
    return [
        (root, osp.isdir),
        (osp.join(root, ann_file), osp.isfile if ann_file else osp.isdir),
        *((osp.join(root, p), osp.isdir) for p in prefixes.values() if isinstance(p, str)),
    ]


def check_loop(runner: Runner, split: str) -> None:
    """Build a loop, and check that it has something to do.

    From then on, errors while an item of the data set is loaded name the file.

    Args:
        runner (Runner): The runner.
        split (str): 'train', 'val' or 'test'.

    Raises:
        ValueError: If the data set or a setting of the loop is unusable.
    """
    config = dataset_config(runner.cfg, split)
    where = ', '.join(
        f'{key}={config.get(key)!r}' for key in ('data_root', 'ann_file', 'data_prefix')
    )
    for path in (e.get('ann_file') for e in evaluators(runner.cfg, split)):
        # A device would not end.
        if isinstance(path, str) and not is_remote(path) and not osp.isfile(path):
            raise FileNotFoundError(f'there is no file {path!r} for {split}_evaluator.ann_file')
    # Predictions that are only written are compared with nothing.
    annotated = not any(e.get('format_only') for e in evaluators(runner.cfg, split))
    try:
        with checked_annotations(annotated):
            loop = getattr(runner, f'{split}_loop')
    except AnnotationError as error:
        raise ValueError(f'cannot use the {split} data set: {error}') from error
    except Exception as error:
        raise ValueError(
            f'cannot read the {split} data set: {type(error).__name__}: {error} (with {where}; '
            'is it empty, or does it have other class names than its metainfo?)'
        ) from error
    dataset = loop.dataloader.dataset
    for inner in leaves(dataset):
        _check_classes(runner, inner, split)
    _check_ground_truth(runner.cfg, loop, inner, split)
    if not len(dataset):
        raise ValueError(f'the {split} data set is empty: no image was found with {where}')
    if not len(loop.dataloader):
        raise ValueError(
            f'the {split} data set has {len(dataset)} images, fewer than a batch: set '
            f'{split}_dataloader.batch_size'
        )
    for key in ('max_epochs', 'max_iters', 'val_interval'):
        if split == 'train' and getattr(loop, key, 1) < 1:
            raise ValueError(f'train_cfg.{key} must be at least 1')
    check_items(dataset)


def _check_ground_truth(cfg: Config, loop: BaseLoop, dataset: BaseDataset, split: str) -> None:
    """Check what MMDetection's metrics have read, and mend an annotation with the id 0."""
    config = dataset_config(cfg, split)
    checked = osp.join(config.get('data_root') or '', config.get('ann_file') or '')
    classes = getattr(dataset, 'metainfo', {}).get('classes') or ()
    metrics = getattr(getattr(loop, 'evaluator', None), 'metrics', ())
    for evaluator, metric in zip(evaluators(cfg, split), metrics):
        path, coco = evaluator.get('ann_file'), getattr(metric, '_coco_api', None)
        if not path or type(coco).__name__ != 'COCO':  # nor the one for panoptic segmentation
            continue
        try:
            if osp.realpath(path) != osp.realpath(checked):
                check_coco(coco.dataset, path)
            found = [coco.cats[i]['name'] for i in coco.get_cat_ids(cat_names=classes)]
            check_categories(found, classes, path)
        except AnnotationError as error:
            raise ValueError(f'cannot use {split}_evaluator.ann_file: {error}') from error
        new = renumber_annotation_0(coco)
        if new is not None:
            print_log(
                f'The annotation 0 of {path!r} counts as {new} here, since pycocotools takes 0 for '
                '"no annotation": number annotations from 1 for other tools',
                'current',
                logging.WARNING,
            )


def _check_classes(runner: Runner, dataset: BaseDataset, split: str) -> None:
    """Check that the model has as many classes as a data set."""
    classes = getattr(dataset, 'metainfo', {}).get('classes')
    if not isinstance(classes, (list, tuple)):
        return
    if not classes:
        raise ValueError(f'{split}_dataloader.dataset.metainfo.classes is empty')
    for name, module in innermost(runner.model).named_modules():
        count = getattr(module, 'num_classes', None)
        if name.rpartition('.')[2] not in HEADS or not isinstance(count, int):
            continue
        # A classifier may be asked about a part of its classes.
        fewer = len(classes) < count and name != 'head' and split != 'train'
        if len(classes) > count or fewer:
            raise ValueError(
                f'the {split} data set has {len(classes)} classes, but {name} of the model has '
                f'{count}: set model.{name}.num_classes, or '
                f'{split}_dataloader.dataset.metainfo.classes'
            )
