"""Reparameterizing checkpoints."""

import torch
from mmengine.structures import BaseDataElement

from repa_mm.apis.features import check_same, outputs
from repa_mm.apis.images import input_channels, input_size
from repa_mm.apis.models import open_model
from repa_mm.io.checkpoints import load_checkpoint
from repa_mm.io.configs import load_config
from repa_mm.io.files import replacing
from repa_mm.reparam import CheckpointError, has_deploy_form, reparameterize
from repa_mm.version import __version__


def reparameterize_checkpoint(
    config: str, checkpoint: str, out: str, tolerance: float = 1e-4, cfg_options: dict | None = None
) -> dict:
    """Reparameterize a checkpoint and write the result, if ``tolerance`` allows.

    The file is opened again first, and compared with the checkpoint on a random image, see
    :func:`~repa_mm.apis.features.outputs`. Returns the ``error``, the largest difference relative
    to the largest feature, and the numbers of ``parameters`` of both forms. Raises a
    :class:`CheckpointError` if the checkpoint does not fit the model or is in the deploy form, or
    if the difference exceeds the tolerance.
    """
    model = open_model(load_config(config, cfg_options), checkpoint)
    if has_deploy_form(model):
        raise CheckpointError(f'{checkpoint!r} is reparameterized already')
    deployed, size = reparameterize(model), input_size(model)
    image = torch.randn(1, input_channels(model), *size)
    sample = BaseDataElement(metainfo=dict(batch_input_shape=size, img_shape=size))
    data = dict(inputs=image, data_samples=[sample])
    meta = load_checkpoint(checkpoint).get('meta') or {}
    meta = dict(meta, repa_mm_version=__version__)
    with replacing(out) as temporary:
        torch.save(dict(meta=meta, state_dict=deployed.state_dict()), temporary)
        deployed = open_model(model.cfg, temporary)
        try:
            error = check_same(deployed, model, data, out, tolerance, outputs)
        except ValueError as err:
            raise CheckpointError(
                f'merging changes the features by more than {tolerance:.0e}: weights or BatchNorm '
                'statistics of the checkpoint are too extreme. Nothing was written. Raise the '
                f'tolerance to accept this difference ({err})'
            ) from err
    numbers = [sum(p.numel() for p in m.parameters()) for m in (model, deployed)]
    return dict(error=error, parameters=numbers)
