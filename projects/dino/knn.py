"""Evaluate the features of a backbone by a weighted vote of nearest neighbours."""

import argparse
import copy
import os.path as osp
from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.runner import Runner
from mmengine.utils import track_iter_progress
from torch.utils.data import DataLoader

from repa_mm.apis import open_model
from repa_mm.io.configs import dataset_config, load_config
from repa_mm.reparam import has_training_form, reparameterize_

# For images in folders: as in configs/_base_/datasets/imagenet.py.
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
        k (Sequence[int]): Numbers of neighbours, up to N. Defaults to (20,).
        temperature (float): Defaults to 0.07.
        chunk (int): Number of queries that are compared at once. Defaults to 1024.

    Returns:
        dict[int, torch.Tensor]: The classes of the queries (M,), by number of neighbours.
    """
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


def knn_evaluate(
    config: str,
    checkpoint: str | None = None,
    k: Sequence[int] = (10, 20, 100, 200),
    data: str | None = None,
    network: str = 'teacher',
    batch_size: int = 64,
    device: str = 'cpu',
    cfg_options: dict | None = None,
) -> dict[int, float]:
    """Measure the accuracy of a backbone's features under a vote of nearest neighbours.

    The training images, without augmentation, are the gallery; the test images are classified. What
    can be merged is merged first.

    Args:
        config (str): Path of any config that has a backbone.
        checkpoint (str, optional): Defaults to None: random weights.
        k (Sequence[int]): Numbers of neighbours. Defaults to (10, 20, 100, 200).
        data (str, optional): A folder with the folders ``train`` and ``val``, each with one folder
            for each class. Defaults to None: the data sets of the config, a classifier's.
        network (str): 'teacher' or 'student', of a model that has both. Defaults to 'teacher'.
        batch_size (int): Defaults to 64.
        device (str): Defaults to 'cpu'.
        cfg_options (dict, optional): Values to override in the config.

    Returns:
        dict[int, float]: Accuracy in percent, by number of neighbours.

    Raises:
        ValueError: If the data sets differ in their classes, or the backbone gives one vector for
            each patch and nothing in the model pools them.
    """
    cfg = load_config(config, cfg_options)
    loaders = {split: _loader(cfg, split, data, batch_size) for split in ('train', 'test')}
    known, asked = (loader.dataset.metainfo.get('classes') for loader in loaders.values())
    if known and asked and tuple(known) != tuple(asked):
        differ = sorted(set(known) ^ set(asked)) or 'in their order'
        raise ValueError(f'the classes of the training and the test images differ: {differ}')
    model = open_model(cfg, checkpoint)
    if has_training_form(model):
        reparameterize_(model)
    model.to(device)
    owner = getattr(model, 'teacher', model) if network == 'teacher' else model
    features = {}
    for split, loader in loaders.items():
        parts, labels = [], []
        for batch in track_iter_progress((loader, len(loader))):
            batch = model.data_preprocessor(batch)
            with torch.no_grad():
                parts.append(image_features(owner, batch['inputs']))
            labels += [int(sample.gt_label) for sample in batch['data_samples']]
        features[split] = torch.cat(parts), torch.tensor(labels, device=device)
    (gallery, known), (queries, truth) = features['train'], features['test']
    predicted = knn_predict(gallery, known, queries, k)
    return {number: float((p == truth).float().mean()) * 100 for number, p in predicted.items()}


def image_features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return one vector for each image, from the last output of a backbone.

    This is the mean of a feature map, or the class token. The outputs of a backbone that has one
    vector for each patch and no class token are pooled by the neck of the classifier, since they
    are of the shape (N, L, C) for some backbones and (N, C, L) for others.

    Args:
        model (nn.Module): A model with a ``backbone``, and perhaps a ``neck``.
        images (torch.Tensor): Images (N, 3, H, W) as the backbone takes them.

    Returns:
        torch.Tensor: Features (N, C) in float32.

    Raises:
        ValueError: If there is no such neck.
    """
    outputs = model.backbone(images)
    x = outputs[-1]
    if isinstance(x, (list, tuple)):  # with what a head needs besides
        x = x[0]
    if x.dim() == 4:
        x = x.flatten(2).mean(2)
    elif x.dim() == 3 and getattr(model.backbone, 'cls_token', None) is not None:
        x = x[:, 0]
    elif x.dim() == 3 and getattr(model, 'neck', None) is not None:
        x = model.neck(outputs)[-1]
    if x.dim() != 2:
        raise ValueError(
            f'the {type(model.backbone).__name__} has outputs of the shape {tuple(x.shape)} and no '
            'class token, and the model has no neck that pools them: add one, such as '
            "neck=dict(type='GlobalAveragePooling', dim=1)"
        )
    return x.float()


def _loader(cfg: Config, split: str, data: str | None, batch_size: int) -> DataLoader:
    """A loader of the images of a split as they are tested, in order."""
    if data:
        folder = osp.join(data, 'train' if split == 'train' else 'val')
        dataset = dict(type='mmpretrain.CustomDataset', data_root=folder, pipeline=_PIPELINE)
    else:
        dataset = copy.deepcopy(dataset_config(cfg, split))
        dataset.pipeline = dataset_config(cfg, 'test').pipeline
    return Runner.build_dataloader(
        dict(
            batch_size=batch_size,
            num_workers=cfg.test_dataloader.get('num_workers', 0),
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
            dataset=dataset,
        ),
        seed=0,
    )


def main() -> None:
    """Print the accuracies that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of any config with a backbone')
    parser.add_argument('checkpoint', nargs='?', help='(default: random weights)')
    parser.add_argument('--k', type=int, nargs='+', default=[10, 20, 100, 200], help='neighbours')
    parser.add_argument(
        '--data', help="folder with train/CLASS/ and val/CLASS/ (default: the config's data sets)"
    )
    parser.add_argument(
        '--network', choices=['teacher', 'student'], default='teacher', help='of DINO'
    )
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--device', default=get_device())
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='key=value ...')
    for k, percent in knn_evaluate(**vars(parser.parse_args())).items():
        print(f'{k:4d} neighbours: {percent:.2f} %')


if __name__ == '__main__':
    main()
