"""Models for inference, and pictures of what they predict."""

import os.path as osp

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, VISUALIZERS, init_default_scope

from repa_mm.datasets.checks import check_image
from repa_mm.files import check_output, write_bytes
from repa_mm.reparam import finish_schedules, outermost, reparameterize
from repa_mm.run.config import FORMS, dataset_config, load_config
from repa_mm.weights import load_checkpoint, load_safely, load_weights, match_form


def init_model(
    config: str | Config,
    checkpoint: str | None = None,
    form: str | None = 'training',
    device: str | torch.device = 'cpu',
) -> nn.Module:
    """A model for inference.

    Args:
        config (str | Config): A config or its path.
        checkpoint (str, optional): Path of a checkpoint. Defaults to None: random weights.
        form (str, optional): 'training' or 'deploy'; None for that of the checkpoint. Defaults to
            'training'.
        device (str | torch.device): Defaults to 'cpu'.

    Returns:
        nn.Module: The detector, segmentor or classifier in eval mode, with its config in ``cfg``
        and the names of its classes in ``dataset_meta``.

    Raises:
        CheckpointError: If the checkpoint does not fit the model, or is merged and the training
            form is asked for.
    """
    return model_and_meta(config, checkpoint, form, device)[0]


def init_any_model(
    config: str | Config,
    checkpoint: str | None = None,
    form: str = 'deploy',
    device: str | torch.device = 'cpu',
) -> nn.Module:
    """As :func:`init_model`, and a vanilla model, which has nothing to merge, as it is."""
    model = init_model(config, checkpoint, None if form == 'deploy' else form)
    if form == 'deploy' and next(outermost(model), None):
        reparameterize(model, inplace=True)
    return model.to(device)


def model_and_meta(
    config: str | Config,
    checkpoint: str | None = None,
    form: str | None = 'training',
    device: str | torch.device = 'cpu',
) -> tuple[nn.Module, dict]:
    """As :func:`init_model`, with the ``meta`` of the checkpoint."""
    if form not in (*FORMS, None):
        raise ValueError(f'form must be one of {FORMS}, but got {form!r}')
    cfg = load_config(config) if isinstance(config, str) else config
    init_default_scope(cfg.default_scope)
    load_safely()
    model = MODELS.build(cfg.model)
    model.cfg, meta = cfg, {}
    if not checkpoint:
        # Random weights are looked at for their cost, which is that of what is deployed.
        finish_schedules(model)
    else:
        loaded = load_checkpoint(checkpoint)
        state_dict = loaded['state_dict']
        if form != 'training':
            match_form(model, state_dict)
        load_weights(model, state_dict, checkpoint)
        if isinstance(loaded.get('meta'), dict):
            meta = loaded['meta']
    classes = meta.get('dataset_meta')
    model.dataset_meta = classes if isinstance(classes, dict) else None
    if form == 'deploy':
        reparameterize(model, inplace=True)
    return model.to(device).eval(), meta


def draw_predictions(model: nn.Module, image: str, out: str, score_thr: float = 0.3) -> object:
    """Run a model on an image file and draw what it predicts.

    Args:
        model (nn.Module): From :func:`init_model`.
        image (str): Path of the image.
        out (str): Path of the picture to write.
        score_thr (float): Detections below this score are not drawn. Defaults to 0.3.

    Returns:
        The prediction, a data sample of the model's codebase.

    Raises:
        FileNotFoundError, ValueError: If the image is missing, cannot be read, or has a size that
            the model cannot take.
        OSError: If the picture cannot be written.
    """
    import cv2
    import mmcv
    from mmengine.dataset import Compose, pseudo_collate

    check_output(out, image)
    # OpenCV does not survive names that are not in the locale's encoding.
    suffix = osp.splitext(out)[1].encode(errors='replace').decode()
    if not cv2.haveImageWriter(f'picture{suffix}'):
        raise ValueError(f'{out!r} is not the name of a picture, such as prediction.png')
    if not 0 <= score_thr <= 1:
        raise ValueError(f'the score threshold must be from 0 to 1, but is {score_thr}')
    if not model.cfg.get('visualizer'):
        raise ValueError("the config has no 'visualizer', which draws the predictions")
    check_image(image)
    pixels = mmcv.imread(image)
    if pixels is None:
        raise ValueError(f'{image!r} is not an image that can be read')
    size = pixels.shape[:2]
    pixels = mmcv.bgr2rgb(pixels)
    cfg = model.cfg
    steps = [s for s in dataset_config(cfg, 'test').pipeline if 'Annotations' not in s['type']]
    try:
        data = Compose(steps)(dict(img_path=osp.abspath(image), img_id=0))
        with torch.no_grad():
            prediction = model.test_step(pseudo_collate([data]))[0]
    except Exception as error:
        raise ValueError(
            f'the model fails on {image!r} of {"x".join(map(str, size))} pixels '
            f'({type(error).__name__}: {error})'
        ) from error
    settings = dict(cfg.visualizer, name=f'demo_{id(model)}', vis_backends=None)
    visualizer = VISUALIZERS.build(settings)
    visualizer.dataset_meta = model.dataset_meta or {}
    own = dict(mmdet=dict(pred_score_thr=score_thr), mmpretrain=dict(draw_score=True))
    kwargs = dict(draw_gt=False, **own.get(cfg.default_scope, {}))
    visualizer.add_datasample('prediction', pixels, data_sample=prediction, **kwargs)
    encoded = cv2.imencode(suffix, mmcv.rgb2bgr(visualizer.get_image()))[1]
    write_bytes(out, encoded.tobytes())
    return prediction
