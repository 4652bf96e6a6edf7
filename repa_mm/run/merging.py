"""From a checkpoint to a merged or calibrated one."""

import itertools
import os.path as osp

import torch
from mmengine.registry import MODELS
from mmengine.runner import Runner
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.engine.complexity import count_macs, count_parameters, image_channels, image_size
from repa_mm.files import check_output
from repa_mm.reparam import (
    CheckpointError,
    TrainingForm,
    calibrate_batch_norm,
    check_finite,
    has_deploy_form,
    is_reparameterized,
    reparameterize,
)
from repa_mm.reparam.state import below
from repa_mm.run.config import load_config, with_pretrained, without_sync_bn
from repa_mm.run.data import check_data
from repa_mm.run.inference import model_and_meta
from repa_mm.version import __version__
from repa_mm.weights import load_checkpoint, load_weights, save_checkpoint


def reparameterize_checkpoint(
    config: str, checkpoint: str, out: str, tolerance: float = 1e-4
) -> dict:
    """Write the merged checkpoint of a checkpoint in the training form.

    The features of both backbones are compared on a random image first.

    Args:
        config (str): Path of the config, of the training form.
        checkpoint (str): The checkpoint to merge.
        out (str): The file to write; it is replaced only when complete.
        tolerance (float): Largest acceptable error, relative to the largest feature. Defaults to
            1e-4.

    Returns:
        dict: ``error`` (relative), and of both forms ``parameters``, ``macs`` (of the backbone,
        for an image of ``size``) and ``bytes`` (of the file); ``size`` is the image's height and
        width.

    Raises:
        ValueError: If ``out`` is the input, or nothing can be merged.
        CheckpointError: If the checkpoint does not fit, is merged already, or the error exceeds the
            tolerance.
        OSError: If ``out`` cannot be written.
    """
    check_output(out, config, checkpoint)
    if not 0 < tolerance < float('inf'):
        raise ValueError(f'the tolerance must be positive, but is {tolerance}')
    cfg = load_config(config)
    if isinstance(cfg.model.get('backbone'), dict):  # what is compared is the merge alone
        cfg.model.backbone.pop('keep_tokens', None)
    model, meta = model_and_meta(cfg, checkpoint)
    if has_deploy_form(model):
        raise CheckpointError(f'{checkpoint!r} is reparameterized already')
    try:
        check_finite(model)
    except ValueError as error:
        raise CheckpointError(f'{checkpoint!r} cannot be merged: {error}') from error
    deployed = reparameterize(model, fuse_conv_bn=False)

    backbones = [getattr(m, 'backbone', m) for m in (model, deployed)]
    size = image_size(backbones[0])
    shape = image_channels(backbones[0]), *size
    image = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = [backbone(image) for backbone in backbones]
    error = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*features))
    if not error <= tolerance:
        raise CheckpointError(
            f'merging changes the features by {error:.1e}, more than {tolerance:.0e}: the '
            'checkpoint has weights or BatchNorm statistics that are too extreme; nothing is '
            'written'
        )
    meta = dict(meta, repa_mm_version=__version__)
    save_checkpoint(dict(meta=meta, state_dict=weights_to_cpu(deployed.state_dict())), out)
    return dict(
        error=error,
        parameters=[count_parameters(m) for m in (model, deployed)],
        macs=[count_macs(b, shape) for b in backbones],
        size=size,
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

    See :func:`~repa_mm.reparam.calibrate_batch_norm`. Nothing else in the checkpoint changes. Mixup
    and CutMix are left out.

    Args:
        config (str): Path of the config, of the training form.
        checkpoint (str): A checkpoint with the weights of its backbone.
        out (str): The file to write; it is replaced only when complete.
        split (str): Whose data loader and pipeline: 'train', 'val' or 'test'. Defaults to 'train'.
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
    prefix = 'backbone.'
    own = below(prefix, state_dict)
    if not own:
        raise CheckpointError(
            f'{checkpoint!r} has no weight of a backbone: none is named {prefix!r}'
        )
    for owner in with_pretrained(cfg.model):
        owner.init_cfg = None
    (cfg.model.get('train_cfg') or {}).pop('augments', None)
    without_sync_bn(cfg.model)
    model = MODELS.build(cfg.model)
    backbone = model.backbone
    if has_deploy_form(backbone) or is_reparameterized(backbone, own):
        raise CheckpointError(
            f'{checkpoint!r} or its config is of the deploy form, which has no BatchNorm left: '
            'calibrate the checkpoint of the training form'
        )
    load_weights(backbone, own, checkpoint)
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

    forms = [m for m in backbone.modules() if isinstance(m, TrainingForm)]
    done = calibrate_batch_norm(backbone, itertools.islice(loader, num_batches), forward)
    new = weights_to_cpu(backbone.state_dict())
    norms = {id(norm) for form in forms for norm in form.batch_norms()}
    statistics = {
        f'{prefix}{name}.{key}': new[f'{name}.{key}']
        for name, module in backbone.named_modules()
        if id(module) in norms
        for key in ('running_mean', 'running_var', 'num_batches_tracked')
    }
    meta = dict(loaded.get('meta') or {}, repa_mm_version=__version__)
    save_checkpoint(dict(meta=meta, state_dict={**state_dict, **statistics}), out)
    return dict(ffns=len(forms), batches=done, images=num_images)
