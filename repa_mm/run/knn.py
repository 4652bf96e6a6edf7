"""Evaluation of features by their nearest neighbours."""

import copy
import os.path as osp
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from repa_mm.run.config import dataset_config, load_config
from repa_mm.run.data import check_data
from repa_mm.run.inference import init_any_model

NETWORKS = ('teacher', 'student')
# Of images in folders: as in configs/_base_/datasets/imagenet.py.
_PIPELINE = [
    dict(type='LoadImageFromFile'),
    dict(
        type='mmpretrain.ResizeEdge',
        scale=256,
        edge='short',
        backend='pillow',
        interpolation='bicubic',
    ),
    dict(type='mmpretrain.CenterCrop', crop_size=224),
    dict(type='mmpretrain.PackInputs'),
]


def knn_predict(
    gallery: torch.Tensor,
    labels: torch.Tensor,
    queries: torch.Tensor,
    k: Sequence[int] = (20,),
    temperature: float = 0.07,
    chunk: int = 1024,
) -> dict[int, torch.Tensor]:
    """Classify queries by a weighted vote of their nearest neighbours.

    A neighbour of cosine similarity s has the weight exp(s / temperature), as in the evaluation
    of `DINO <https://arxiv.org/abs/2104.14294>`_ and of `instance discrimination
    <https://arxiv.org/abs/1805.01978>`_.

    Args:
        gallery (torch.Tensor): Features (N, C), of any length.
        labels (torch.Tensor): Their classes (N,), from 0.
        queries (torch.Tensor): Features (M, C).
        k (Sequence[int]): Numbers of neighbours. Defaults to (20,).
        temperature (float): Defaults to 0.07.
        chunk (int): Number of queries that are compared at once. Defaults to 1024.

    Returns:
        dict[int, torch.Tensor]: The classes of the queries (M,), by number of neighbours.

    Raises:
        ValueError: If there is nothing to compare, a number of neighbours is below 1 or above N, or
            the temperature is not positive.
    """
    if not len(gallery) or not len(queries):
        raise ValueError(f'{len(gallery)} and {len(queries)} images: there is nothing to compare')
    _check_votes(k, len(gallery), temperature)
    gallery = F.normalize(gallery, dim=1)
    classes = int(labels.max()) + 1
    found = {number: [] for number in k}
    for part in F.normalize(queries, dim=1).split(chunk):
        similarity, index = (part @ gallery.T).topk(max(k))
        # Weights relative to the nearest one, which cannot overflow.
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        for number in k:
            votes = part.new_zeros(len(part), classes)
            votes.scatter_add_(1, labels[index[:, :number]], weights[:, :number])
            found[number].append(votes.argmax(1))
    return {number: torch.cat(parts) for number, parts in found.items()}


def _check_votes(k: Sequence[int], count: int, temperature: float) -> None:
    if not k or min(k) < 1 or max(k) > count:
        raise ValueError(
            f'numbers of neighbours must be from 1 to {count}, the number of training images, but '
            f'are {", ".join(map(str, k))}: choose them with --k'
        )
    if not temperature > 0:
        raise ValueError(f'the temperature must be positive, but is {temperature}')


def knn_evaluate(
    config: str,
    checkpoint: str | None = None,
    form: str = 'deploy',
    k: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.07,
    data: str | None = None,
    network: str = 'teacher',
    batch_size: int = 64,
    device: str = 'cpu',
    cfg_options: dict | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[int, float]:
    """Accuracy of a backbone's features under a vote of nearest neighbours.

    The training images, without augmentation, are the gallery; the test images are classified.

    Args:
        config (str): Path of any config that has a backbone.
        checkpoint (str, optional): Defaults to None: random weights.
        form (str): 'deploy' or 'training', or 'pixels' for the images themselves, as a yardstick.
            A vanilla backbone, which has nothing to merge, is taken as it is. Defaults to 'deploy'.
        k (Sequence[int]): Numbers of neighbours. Defaults to (10, 20, 100, 200).
        temperature (float): See :func:`knn_predict`.
        data (str, optional): A folder with the folders ``train`` and ``val``, each with one folder
            for each class. Defaults to None: the data sets of the config.
        network (str): 'teacher' or 'student', of a model that has both. Defaults to 'teacher'.
        batch_size (int): Defaults to 64.
        device (str): Defaults to 'cpu'.
        cfg_options (dict, optional): Values to override in the config.
        progress (Callable): Called with what is looked at, and how many images are done of how
            many.

    Returns:
        dict[int, float]: Accuracy in percent, by number of neighbours.

    Raises:
        FileNotFoundError, ValueError, CheckpointError: If the config, the data or the checkpoint
            cannot be used.
    """
    if network not in NETWORKS:
        raise ValueError(f'network must be one of {NETWORKS}, but got {network!r}')
    cfg = load_config(config, cfg_options)
    loaders = _loaders(cfg, data, batch_size)
    _check_votes(k, len(loaders['train'].dataset), temperature)
    model = init_any_model(cfg, checkpoint, 'training' if form == 'pixels' else form, device)
    backbone = backbone_of(model, network) if form != 'pixels' else _pixels
    features = {}
    for split, loader in loaders.items():
        done, parts, labels = 0, [], []
        for batch in loader:
            batch = model.data_preprocessor(batch)
            with torch.no_grad():
                part = _vector(backbone(batch['inputs'].to(device)))
            if not torch.isfinite(part).all():
                raise ValueError('the features of the backbone are not finite')
            parts.append(part)
            labels += [int(sample.gt_label) for sample in batch['data_samples']]
            done += len(part)
            progress(split, done, len(loader.dataset))
        features[split] = torch.cat(parts), torch.tensor(labels, device=device)
    (gallery, known), (queries, truth) = features['train'], features['test']
    predicted = knn_predict(gallery, known, queries, k, temperature)
    return {number: float((p == truth).float().mean()) * 100 for number, p in predicted.items()}


def _loaders(cfg: Config, data: str | None, batch_size: int) -> dict[str, DataLoader]:
    """Loaders of the training and the test images as they are tested, in order."""
    loaders = {}
    for split in ('train', 'test'):
        if data:
            folder = osp.join(data, 'train' if split == 'train' else 'val')
            if not osp.isdir(folder):
                raise FileNotFoundError(f'no data set at {folder!r}')
            dataset = dict(type='mmpretrain.CustomDataset', data_root=folder, pipeline=_PIPELINE)
        else:
            if cfg.default_scope != 'mmpretrain' or not cfg.get('test_dataloader'):
                raise ValueError(
                    'the config has no data set with a class for each image: name a folder with '
                    'the folders train and val'
                )
            check_data(cfg, split)
            dataset = copy.deepcopy(dataset_config(cfg, split))
            dataset.pipeline = dataset_config(cfg, 'test').pipeline
        loader = dict(
            batch_size=batch_size,
            num_workers=min(4, (cfg.get('test_dataloader') or {}).get('num_workers', 0)),
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
            dataset=dataset,
        )
        try:
            loaders[split] = Runner.build_dataloader(loader, seed=0)
        except Exception as error:
            raise ValueError(
                f'cannot read the {split} data set: {type(error).__name__}: {error}'
            ) from error
    known, asked = (loader.dataset.metainfo.get('classes') for loader in loaders.values())
    if known and asked and tuple(known) != tuple(asked):
        differ = sorted(set(known) ^ set(asked)) or 'in their order'
        raise ValueError(f'the classes of the training and the test images differ: {differ}')
    return loaders


def backbone_of(model: nn.Module, network: str = 'teacher') -> nn.Module:
    """The backbone of a model, or that of DINO's 'teacher' or 'student'."""
    teacher = getattr(model, 'teacher', None)
    owner = teacher if teacher is not None and network == 'teacher' else model
    return owner.backbone


def _pixels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def _vector(output: torch.Tensor | Sequence) -> torch.Tensor:
    """One vector for an image: the class token, or the mean of the last feature map."""
    x = output[-1] if isinstance(output, (list, tuple)) else output
    if not (torch.is_tensor(x) and x.is_floating_point() and x.dim() in (2, 3, 4)):
        raise ValueError(
            'the last output of the backbone is no feature map, nor class tokens: use the config '
            'of a classifier, detector, segmentor or of DINO'
        )
    if x.dim() == 4:
        return x.float().flatten(2).mean(2)
    return x.float() if x.dim() == 2 else x[:, 0].float()
