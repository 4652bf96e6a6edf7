"""Models for inference, and pictures of what they predict."""

import os.path as osp

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, VISUALIZERS, init_default_scope
from mmengine.runner.checkpoint import load_state_dict

from repa_mm.checkpoints import check_fit_of, load_checkpoint, load_safely
from repa_mm.datasets.checks import check_image
from repa_mm.files import check_output, replacing
from repa_mm.reparam import CheckpointError, finish_schedules, is_reparameterized, reparameterize
from repa_mm.runtime.config import FORMS, dataset_config, load_config


def init_model(
    config: str | Config,
    checkpoint: str | None = None,
    form: str = 'training',
    device: str | torch.device = 'cpu',
) -> nn.Module:
    """A model for inference.

    Args:
        config (str | Config): A config or its path.
        checkpoint (str, optional): Path of a checkpoint. Defaults to None:
            random weights.
        form (str): 'training' or 'deploy'. Defaults to 'training'.
        device (str | torch.device): Defaults to 'cpu'.

    Returns:
        nn.Module: The detector, segmentor or classifier in eval mode, with its
        config in ``cfg`` and the names of its classes in ``dataset_meta``.

    Raises:
        CheckpointError: If the checkpoint does not fit the model, or is merged
            and the training form is asked for.
    """
    if form not in FORMS:
        raise ValueError(f'form must be one of {FORMS}, but got {form!r}')
    cfg = load_config(config) if isinstance(config, str) else config
    init_default_scope(cfg.default_scope)
    load_safely()
    model = MODELS.build(cfg.model)
    model.dataset_meta = None
    if not checkpoint:
        # Random weights are looked at for their cost, which is that of what is deployed.
        finish_schedules(model)
    else:
        loaded = load_checkpoint(checkpoint)
        state_dict = {
            key[key.startswith('module.') * 7 :]: value
            for key, value in loaded['state_dict'].items()
        }
        if form == 'deploy' and is_reparameterized(model, state_dict):
            reparameterize(finish_schedules(model), inplace=True, fuse_conv_bn=False)
        check_fit_of(model, state_dict, checkpoint, complete=True)
        try:
            load_state_dict(model, state_dict, strict=True)
        except RuntimeError as error:
            text = ' '.join(str(error).split())
            raise CheckpointError(f'{checkpoint!r} does not fit the model: {text[:300]}') from error
        meta = loaded.get('meta')
        if isinstance(meta, dict) and isinstance(meta.get('dataset_meta'), dict):
            model.dataset_meta = meta['dataset_meta']
    if form == 'deploy':
        reparameterize(model, inplace=True)
    model.cfg = cfg
    return model.to(device).eval()


def draw_predictions(model: nn.Module, image: str, out: str, score_thr: float = 0.3) -> object:
    """Run a model on an image file and draw what it predicts.

    Args:
        model (nn.Module): From :func:`init_model`.
        image (str): Path of the image.
        out (str): Path of the picture to write.
        score_thr (float): Detections below this score are not drawn.

    Returns:
        The prediction, a data sample of the model's codebase.

    Raises:
        FileNotFoundError, ValueError: If the image is missing, is none, or
            of a size that the model cannot take.
        OSError: If the picture cannot be written.
    """
    import cv2
    import mmcv
    from mmengine.dataset import Compose, pseudo_collate

    check_output(out, image)
    if not cv2.haveImageWriter(out):
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
    pipeline = Compose(
        [step for step in dataset_config(cfg, 'test').pipeline if 'Annotations' not in step['type']]
    )
    try:
        data = pipeline(dict(img_path=osp.abspath(image), img_id=0))
        with torch.no_grad():
            prediction = model.test_step(pseudo_collate([data]))[0]
    except Exception as error:
        raise ValueError(
            f'the model fails on {image!r} of {"x".join(map(str, size))} '
            f'pixels ({type(error).__name__}: {error})'
        ) from error
    visualizer = VISUALIZERS.build(
        dict(cfg.visualizer, name=f'demo_{id(model)}', vis_backends=None)
    )
    visualizer.dataset_meta = model.dataset_meta or {}
    kwargs = {}
    if cfg.default_scope == 'mmdet':
        kwargs = dict(pred_score_thr=score_thr)
    if cfg.default_scope == 'mmpretrain':
        kwargs = dict(draw_score=True)
    visualizer.add_datasample('prediction', pixels, data_sample=prediction, draw_gt=False, **kwargs)
    with replacing(out) as temporary:
        mmcv.imwrite(mmcv.rgb2bgr(visualizer.get_image()), temporary)
    return prediction
