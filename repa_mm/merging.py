"""From a checkpoint in the training form to a merged one."""

import torch
from mmengine.structures import BaseDataElement

from repa_mm.checkpoints import load_checkpoint, load_weights, save_checkpoint
from repa_mm.config import build_model, load_config
from repa_mm.features import head_inputs, tensors
from repa_mm.reparam import CheckpointError, has_deploy_form, reparameterize
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
    meta = dict(loaded.get('meta') or {}, repa_mm_version=__version__)
    save_checkpoint(dict(meta=meta, state_dict=deployed.state_dict()), out)
    return dict(
        error=error, parameters=[sum(p.numel() for p in m.parameters()) for m in (model, deployed)]
    )
