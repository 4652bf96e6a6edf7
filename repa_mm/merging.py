"""From a checkpoint to a merged or calibrated one."""

import itertools

import torch
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement

from repa_mm.checkpoints import load_checkpoint, load_weights, save_checkpoint
from repa_mm.config import build_model, load_config
from repa_mm.features import head_inputs, tensors
from repa_mm.reparam import (
    CheckpointError,
    TrainingForm,
    calibrate_batch_norm,
    has_deploy_form,
    reparameterize,
)
from repa_mm.version import __version__


def reparameterize_checkpoint(
    config: str, checkpoint: str, out: str, tolerance: float = 1e-4, cfg_options: dict | None = None
) -> dict:
    """Write the merged checkpoint of a checkpoint in the training form.

    What the backbones and encoders of the two forms return for a random image is compared first.

    Args:
        config (str): Path of the config, of the training form.
        checkpoint (str): The checkpoint to merge.
        out (str): The file to write; it is replaced only when complete.
        tolerance (float): Largest acceptable error, relative to the largest feature. Defaults to
            1e-4.
        cfg_options (dict, optional): Values to override in the config.

    Returns:
        dict: ``error`` (relative), and ``parameters``, the numbers of the training and of the
        deploy form.

    Raises:
        ValueError: If nothing can be merged, or some weights are not finite; names the module.
        CheckpointError: If the checkpoint does not fit, is merged already, or the error exceeds the
            tolerance.
    """
    cfg = load_config(config, cfg_options)
    for part in (cfg.model, cfg.model.get('backbone', {})):
        part.pop('keep_tokens', None)  # what is compared is the merge alone
    loaded = load_checkpoint(checkpoint)
    model = build_model(cfg)
    load_weights(model, loaded['state_dict'], checkpoint)
    if has_deploy_form(model):
        raise CheckpointError(f'{checkpoint!r} is reparameterized already')
    deployed = reparameterize(model)

    size = getattr(model.backbone, 'img_size', 224)
    size = (size, size) if isinstance(size, int) else tuple(size)
    image = torch.randn(1, 3, *size)
    sample = BaseDataElement(metainfo=dict(batch_input_shape=size, img_shape=size))
    data = dict(inputs=image, data_samples=[sample])
    with torch.no_grad():
        # What heads get may come from another network: the teacher of a self-supervised model.
        features = [tensors([m.backbone(image), head_inputs(m, data)]) for m in (model, deployed)]
    error = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*features))
    if not error <= tolerance:
        raise CheckpointError(
            f'merging changes the features by {error:.1e}, more than {tolerance:.0e}: the '
            'checkpoint has weights or BatchNorm statistics that are too extreme; nothing is '
            'written'
        )
    _save(deployed.state_dict(), loaded, out)
    return dict(
        error=error, parameters=[sum(p.numel() for p in m.parameters()) for m in (model, deployed)]
    )


def calibrate_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    split: str = 'train',
    num_batches: int = 50,
    device: str = 'cpu',
    cfg_options: dict | None = None,
) -> dict:
    """Estimate the BatchNorm statistics of a backbone's training forms from data.

    See :func:`~repa_mm.reparam.calibrate_batch_norm`. Nothing else in the checkpoint changes. Mixup
    and CutMix are left out.

    Args:
        config (str): Path of the config, of the training form.
        checkpoint (str): A checkpoint with the weights of its backbone.
        out (str): The file to write; it is replaced only when complete.
        split (str): Whose data loader and pipeline: 'train', 'val' or 'test'. Defaults to 'train'.
        num_batches (int): Number of batches, at most. Defaults to 50.
        device (str): Defaults to 'cpu'.
        cfg_options (dict, optional): Values to override in the config.

    Returns:
        dict: The numbers of ``forms``, ``batches`` and ``images``.

    Raises:
        ValueError: If there is nothing to calibrate, or statistics are not finite.
        CheckpointError: If the checkpoint does not fit, or is merged.
    """
    cfg = load_config(config, cfg_options)
    (cfg.model.get('train_cfg') or {}).pop('augments', None)
    model = build_model(cfg)
    loaded = load_checkpoint(checkpoint)
    prefix, state_dict = 'backbone.', loaded['state_dict']
    own = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    load_weights(model.backbone, own, checkpoint)
    if has_deploy_form(model.backbone):
        raise CheckpointError(
            f'{checkpoint!r} or its config is of the deploy form, which has no BatchNorm left: '
            'calibrate the checkpoint of the training form'
        )
    loader = Runner.build_dataloader(cfg[f'{split}_dataloader'], seed=0)
    model.to(device)
    num_images = 0

    def forward(batch: dict) -> None:
        nonlocal num_images
        images = model.data_preprocessor(batch, split == 'train')['inputs']
        num_images += len(images)
        model.backbone(images)

    batches = itertools.islice(loader, num_batches)
    num_batches = calibrate_batch_norm(model.backbone, batches, forward)
    forms = [m for m in model.backbone.modules() if isinstance(m, TrainingForm)]
    norms = {norm for form in forms for norm in form.batch_norms()}
    statistics = {
        f'{prefix}{name}.{key}': value.cpu()
        for name, module in model.backbone.named_modules()
        if module in norms
        for key, value in module.named_buffers(recurse=False)
    }
    state_dict.update(statistics)
    _save(state_dict, loaded, out)
    return dict(forms=len(forms), batches=num_batches, images=num_images)


def _save(state_dict: dict, loaded: dict, out: str) -> None:
    """Write weights with the meta data of the checkpoint that they come from."""
    meta = dict(loaded.get('meta') or {}, repa_mm_version=__version__)
    save_checkpoint(dict(meta=meta, state_dict=state_dict), out)
