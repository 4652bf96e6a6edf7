"""Exported whole models: writing them from a checkpoint, and testing them on a data set."""

import os.path as osp
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner

from repa_mm.export.export import OPSET, export, export_whole, import_onnx
from repa_mm.export.session import Session, paste_masks
from repa_mm.export.whole import whole_model
from repa_mm.models.attention import FastShiftWindowMSA
from repa_mm.models.tracing import trace_any_size
from repa_mm.reparam import outermost, reparameterize
from repa_mm.run.config import dataset_config, load_config, set_form, set_work_dir
from repa_mm.run.data import check_data, check_loop
from repa_mm.run.inference import init_model

TASKS = dict(mmdet='detection', mmseg='segmentation', mmpretrain='classification')


def model_to_export(
    config: str, checkpoint: str | None, form: str = 'deploy', shortcut: str | None = None
) -> nn.Module:
    """A model as it is exported: with the fast attention, and the names of its classes.

    A vanilla model, which has nothing to merge, is taken as it is.

    Args:
        config (str): Path of a config.
        checkpoint (str, optional): Path of a checkpoint in either form; None for random weights.
        form (str): 'deploy' or 'training'. Defaults to 'deploy'.
        shortcut (str, optional): 'inside' or 'outside', where deploy forms have their shortcut.
            Defaults to None: inside.
    """
    model = init_model(config, checkpoint, None if form == 'deploy' else form)
    if form == 'deploy' and next(outermost(model), None):
        reparameterize(model, inplace=True, shortcut=shortcut)
    trace_any_size(model)
    classes = (model.dataset_meta or {}).get('classes')
    model.dataset_meta = dict(classes=classes or class_names(model.cfg))
    return model


def class_names(cfg: Config) -> Sequence[str]:
    """The names of the classes of the test data set, empty if the config does not tell."""
    dataset = dataset_config(cfg, 'test')
    classes = (dataset.get('metainfo') or {}).get('classes')
    if not classes:
        with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
            kind = dataset.get('type')
            kind = registry.get(kind) if isinstance(kind, str) else kind
            classes = (getattr(kind, 'METAINFO', None) or {}).get('classes')
    return classes if isinstance(classes, (list, tuple)) else ()


def example_shape(model: nn.Module) -> tuple[int, int]:
    """Height and width of images to trace a model of any size with.

    A size that the model is not made for, so that position embeddings are resized, and with more
    than one window in the last stage of a Swin.
    """
    side = 224
    for module in model.modules():
        if isinstance(module, FastShiftWindowMSA):
            side = max(side, 32 * module.window_size)
    made_for = getattr(getattr(model, 'backbone', None), 'img_size', None)
    if isinstance(made_for, (list, tuple)):
        side = max(side, *made_for)
    return side + 32, side + 64


def export_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    shape: Sequence[int] | None = None,
    dynamic: bool | None = None,
    batch: int = 1,
    form: str = 'deploy',
    backbone: bool = False,
    preprocessing: bool = False,
    opset: int = OPSET,
) -> tuple[str, float]:
    """Write a model of a config and a checkpoint in another format.

    Args:
        config (str): Path of the config of the training form.
        checkpoint (str): Path of a checkpoint in either form.
        out (str): The file: '.onnx' for a whole model, or '.onnx', '.pt2' or '.pt' for a backbone
            (of a classifier, all of it up to the logits).
        shape (Sequence[int], optional): Height and width of images. Defaults to 224 by 224, or to
            an example that suits the model if ``dynamic``.
        dynamic (bool, optional): Take images of any size, and any number of them. Defaults to what
            is written: whole models do, backbones do not.
        batch (int): Number of images. Defaults to 1.
        form (str): 'deploy' or 'training'. Defaults to 'deploy'.
        backbone (bool): Write the backbone only. Other formats than ONNX always do.
        preprocessing (bool): Normalize images in the graph. Defaults to False.
        opset (int): Version of ONNX's operators. Defaults to 17.

    Returns:
        tuple: What is written ('detector', 'backbone' ...), and how much it differs from PyTorch:
        see :func:`~repa_mm.export.export.export` and
        :func:`~repa_mm.export.export.export_whole`.
    """
    if min(shape or (1,)) < 1 or batch < 1:
        raise ValueError(f'sizes must be positive, but --shape is {shape} and --batch is {batch}')
    is_whole = not backbone and osp.splitext(out)[1] in ('.onnx', '')
    if not is_whole and preprocessing:
        raise ValueError('--preprocessing is for whole models: without --backbone, to .onnx')
    if not is_whole and opset != OPSET:
        raise ValueError(f'--opset is for whole models: backbones are written in opset {OPSET}')
    if is_whole:
        import_onnx()
        whole = whole_model(model_to_export(config, checkpoint, form), preprocessing)
        dynamic = dynamic is not False
        shape = shape or (example_shape(whole) if dynamic else (224, 224))
        error = export_whole(whole, out, shape, dynamic, batch, opset)
        part = dict(detection='detector', segmentation='segmentor').get(whole.task, 'classifier')
        return f'whole {part}', error
    model = model_to_export(config, checkpoint, form)
    part = 'classifier'
    if model.cfg.default_scope != 'mmpretrain':
        model, part = model.backbone, 'backbone'
    return part, export(model, out, shape or (224, 224), bool(dynamic), batch)


@MODELS.register_module()
class ExportedModel(BaseModel):
    """A whole model in a file, in the place of a model that is tested.

    Args:
        file (str): The file, see :class:`~repa_mm.export.session.Session`.
        data_preprocessor (dict): That of the model that was exported.
        precision (str, optional): As for the session.

    Raises:
        ValueError: If masks are not to become binary (a negative ``mask_thr_binary``).
    """

    def __init__(
        self, file: str, data_preprocessor: dict | None = None, precision: str | None = None
    ) -> None:
        session = Session(file, precision)
        if data_preprocessor and session.metadata['task'] == 'classification':
            data_preprocessor = {'type': 'mmpretrain.ClsDataPreprocessor', **data_preprocessor}
        super().__init__(data_preprocessor)
        self.session = session
        self.mask_threshold = float(session.metadata.get('mask_thr_binary', 0.5))
        if self.mask_threshold < 0:
            raise ValueError(
                f'{file!r} has mask_thr_binary={self.mask_threshold:g}, for masks of '
                'probabilities, but metrics need binary masks: export it from a config with '
                'test_cfg.rcnn.mask_thr_binary=0.5'
            )

    def test_step(self, data: dict) -> list:
        """Predict a batch from a data loader.

        Args:
            data (dict): With ``inputs`` and ``data_samples``.

        Returns:
            list: Data samples with predictions, as those of the model that was exported.
        """
        if self.session.takes_pixels:
            data = self.data_preprocessor.cast_data(data)
            images = [x.permute(1, 2, 0).byte().numpy() for x in data['inputs']]
        else:
            data = self.data_preprocessor(data, False)
            images = data['inputs'].numpy()
        return getattr(self, f'_predict_{self.session.metadata["task"]}')(
            images, data['data_samples']
        )

    val_step = test_step

    def forward(self, *args, **kwargs):
        """Not for training."""
        raise RuntimeError('an exported model is for tests only')

    def _predict_detection(self, images, samples):
        from mmengine.structures import InstanceData

        for result, sample in zip(self._run_padded(images, samples), samples):
            is_object = result['labels'] >= 0
            result = {k: torch.from_numpy(v[is_object]) for k, v in result.items()}
            scale = result['boxes'].new_tensor(sample.scale_factor).repeat(2)
            found = InstanceData(
                bboxes=result['boxes'] / scale, scores=result['scores'], labels=result['labels']
            )
            if 'masks' in result:
                found.masks = paste_masks(
                    result['masks'], found.bboxes, *sample.ori_shape[:2], self.mask_threshold
                )
            sample.pred_instances = found
        return samples

    def _run_padded(self, images, samples):
        """Outputs of each image."""
        sizes = [tuple(sample.img_shape[:2]) for sample in samples]
        if 'image_size' in self.session.options:
            if isinstance(images, list):  # not padded yet
                height, width = np.max(sizes, 0)
                images = np.stack(
                    [
                        np.pad(x, [(0, height - x.shape[0]), (0, width - x.shape[1]), (0, 0)])
                        for x in images
                    ]
                )
            outputs = self.session(images, image_size=sizes)
            for i in range(len(samples)):
                yield {k: v[i] for k, v in outputs.items()}
            return
        for image, (height, width) in zip(images, sizes):
            if not self.session.takes_pixels:
                image = np.ascontiguousarray(image[:, :height, :width])
            yield {k: v[0] for k, v in self.session(image[None]).items()}

    def _predict_segmentation(self, images, samples):
        from mmengine.structures import PixelData

        for image, sample in zip(images, samples):
            size = tuple(sample.ori_shape[:2])
            options = dict(output_size=size) if 'output_size' in self.session.options else {}
            labels = torch.from_numpy(self.session(image[None], **options)['labels']).long()
            if labels.shape[1:] != size:
                labels = nn.functional.interpolate(labels[None].float(), size).long()[0]
            sample.pred_sem_seg = PixelData(data=labels)
        return samples

    def _predict_classification(self, images, samples):
        outputs = self.session(np.stack(images) if isinstance(images, list) else images)
        for score, sample in zip(torch.from_numpy(outputs['scores']), samples):
            sample.set_pred_score(score).set_pred_label(score.argmax(0, keepdim=True))
        return samples


def runner_for_exported(
    config: str,
    file: str,
    work_dir: str | None = None,
    precision: str | None = None,
    launcher: str = 'none',
    cfg_options: dict | None = None,
) -> Runner:
    """A runner that is ready for ``runner.test()`` of an exported model.

    Args:
        config (str): Path of the config that was exported.
        file (str): The exported model.
        work_dir (str, optional): Where metrics are written. Defaults to that of the config, or
            ``work_dirs/<name of the config>``.
        precision (str, optional): What OpenVINO computes in, 'f32' or 'bf16'.
        launcher (str): 'none' only.
        cfg_options (dict, optional): Values to override in the config.

    Raises:
        FileNotFoundError, ValueError: If the config, the file or the data set is unusable, or they
            do not fit each other.
    """
    cfg = load_config(config, cfg_options)
    if launcher != 'none':
        raise ValueError('an exported model is tested by one process: --launcher none')
    session = Session(file, precision)
    expected = TASKS[cfg.default_scope]
    if session.metadata['task'] != expected:
        raise ValueError(
            f'{file!r} is a model for {session.metadata["task"]}, but the config {config!r} is of '
            f'{expected}'
        )
    known, own = list(class_names(cfg)), session.classes
    if known and own and len(known) != len(own):  # names are often spelled in two ways
        raise ValueError(
            f'{file!r} knows {len(own)} classes ({", ".join(own[:3])} ...), but the test data set '
            f'of {config!r} has {len(known)} ({", ".join(known[:3])} ...)'
        )
    if known != own and sorted(known) == sorted(own):
        first = next(i for i, names in enumerate(zip(own, known)) if names[0] != names[1])
        raise ValueError(
            f'{file!r} numbers the classes in another order than the test data set of {config!r}: '
            f'class {first} is {own[first]!r} in the file, but {known[first]!r} in the data set'
        )
    set_work_dir(cfg, config, work_dir)
    set_form(cfg, 'training')  # there is nothing to merge
    cfg.model = dict(
        type='ExportedModel',
        file=file,
        precision=precision,
        data_preprocessor=cfg.model.get('data_preprocessor') or cfg.get('data_preprocessor'),
    )
    cfg.load_from, cfg.resume = None, False
    for key in ('train_dataloader', 'train_cfg', 'optim_wrapper', 'auto_scale_lr'):
        cfg.pop(key, None)
    for key in ('val_dataloader', 'val_cfg', 'val_evaluator', 'param_scheduler'):
        cfg.pop(key, None)
    check_data(cfg, 'test')
    runner = Runner.from_cfg(cfg)
    check_loop(runner, 'test')
    return runner
