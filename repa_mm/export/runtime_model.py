"""A model that runs an exported file, for tests with MMEngine's runner."""

import copy
import json
import os.path as osp
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner import Runner
from mmengine.structures import InstanceData, PixelData

from repa_mm.export.session import Session


@MODELS.register_module()
class ExportedModel(BaseModel):
    """Run an exported file instead of the original model in tests.

    Args:
        file (str | bytes): The file, see :class:`~repa_mm.export.Session`.
        data_preprocessor (dict | nn.Module): The ``data_preprocessor`` of the original model.
        precision (str, optional): See :class:`~repa_mm.export.Session`.

    Examples:
        >>> model = dict(type='ExportedModel', file='model.onnx',
        ...              data_preprocessor=dict(type='DetDataPreprocessor', …))
    """

    def __init__(
        self,
        file: str | bytes,
        data_preprocessor: dict | nn.Module | None = None,
        precision: str | None = None,
    ) -> None:
        session = Session(file, precision)
        if isinstance(data_preprocessor, nn.Module):
            data_preprocessor = copy.deepcopy(data_preprocessor).cpu()
        elif data_preprocessor and session.metadata['task'] == 'classification':
            # The type that MMPretrain's classifiers add.
            data_preprocessor = {'type': 'mmpretrain.ClsDataPreprocessor', **data_preprocessor}
        super().__init__(data_preprocessor)
        self.session = session

    def to(self, *args, **kwargs) -> 'ExportedModel':
        """Stay on the CPU, where the file runs, whatever device a runner asks for."""
        return self

    cuda = to

    def test_step(self, data: dict) -> list:
        """Predict a batch from a data loader.

        Args:
            data (dict): Batch with ``inputs`` and ``data_samples``.

        Returns:
            list: Data samples with predictions, as from the original model.

        Raises:
            ValueError: If the file normalizes images, and these are not of bytes.
        """
        if self.session.takes_pixels:
            data = self.data_preprocessor.cast_data(data)
            kinds = {x.dtype for x in data['inputs']} - {torch.uint8}
            if kinds:
                raise ValueError(
                    'a file that normalizes images takes images of bytes, and the test pipeline '
                    f'gives {kinds.pop()}: export the model without --preprocessing'
                )
            images = [x.permute(1, 2, 0).numpy() for x in data['inputs']]
        else:
            data = self.data_preprocessor(data, False)
            images = data['inputs'].numpy()
        predict = getattr(self, f'_predict_{self.session.metadata["task"]}')
        return predict(images, data['data_samples'])

    val_step = test_step

    def forward(self, *args, **kwargs):
        """Raise an error, since an exported model cannot be trained."""
        raise RuntimeError('an exported model is for tests only')

    def _predict_detection(self, images, samples):
        for result, sample in zip(self._run_padded(images, samples), samples):
            result = _objects(result)
            found = InstanceData(scores=result['scores'], labels=result['labels'])
            scale = result['boxes'].new_tensor(sample.scale_factor).repeat(2)
            found.bboxes = result['boxes'] / scale
            if 'masks' in result:
                threshold = float(self.session.metadata['mask_thr_binary'])
                size = sample.ori_shape[:2]
                found.masks = paste_masks(result['masks'], found.bboxes, *size, threshold)
            sample.pred_instances = found
        return samples

    def _predict_instances(self, images, samples):
        for result, sample in zip(self._run_own(images, samples), samples):
            size = tuple(sample.ori_shape[:2])
            if 'panoptic' in result:
                maps = torch.from_numpy(result.pop('panoptic'))[None]
                if maps.shape[1:] != size:  # a file without the option
                    maps = nn.functional.interpolate(maps[None].double(), size)[0].int()
                sample.pred_panoptic_seg = PixelData(sem_seg=maps)
            if 'masks' not in result:
                continue
            result = _objects(result)
            height, width = result['masks'].shape[1:]
            if size != (height, width):
                masks = result['masks'][None].float()
                result['masks'] = nn.functional.interpolate(masks, size)[0].bool()
                scale = size[1] / width, size[0] / height
                result['boxes'] = result['boxes'] * torch.tensor(scale).repeat(2)
            result['bboxes'] = result.pop('boxes')
            sample.pred_instances = InstanceData(**result)
        return samples

    _predict_panoptic = _predict_instances

    def _run_own(self, images, samples):
        """Yield the outputs for each image, which are run together if their sizes are the same."""
        if not self.session.takes_pixels:  # take the padding off
            shapes = [sample.img_shape[:2] for sample in samples]
            images = [image[:, :height, :width] for image, (height, width) in zip(images, shapes)]
        sizes = [tuple(sample.ori_shape[:2]) for sample in samples]
        groups = [[i] for i in range(len(images))]
        if len({(image.shape, size) for image, size in zip(images, sizes)}) == 1:
            groups = [range(len(images))]
        for group in groups:
            options = {}
            if 'output_size' in self.session.options:
                options['output_size'] = sizes[group[0]]
            outputs = self.session(np.stack([images[i] for i in group]), **options)
            for i in range(len(group)):
                yield {k: v[i] for k, v in outputs.items()}

    def _run_padded(self, images, samples):
        """Yield the outputs for each image."""
        sizes = [tuple(sample.img_shape[:2]) for sample in samples]
        if 'image_size' not in self.session.options:
            yield from self._run_own(images, samples)
            return
        if self.session.takes_pixels:  # not padded yet
            channels = images[0].shape[2]
            padded = np.zeros((len(images), *np.max(sizes, 0), channels), np.uint8)
            for to, image in zip(padded, images):
                to[: image.shape[0], : image.shape[1]] = image
            images = padded
        outputs = self.session(images, image_size=sizes)
        for i in range(len(samples)):
            yield {k: v[i] for k, v in outputs.items()}

    def _predict_segmentation(self, images, samples):
        if 'window' in self.session.metadata:
            return self._slide(torch.from_numpy(np.stack(images)), samples)
        for result, sample in zip(self._run_own(images, samples), samples):
            size = tuple(sample.ori_shape[:2])
            labels = torch.from_numpy(result['labels'])[None].long()
            if labels.shape[1:] != size:
                labels = nn.functional.interpolate(labels[None].float(), size).long()[0]
            sample.pred_sem_seg = PixelData(data=labels)
        return samples

    def _slide(self, images, samples):
        """Run the file on windows of images; MMSegmentation slides and merges."""
        from mmseg.models import EncoderDecoder

        window = json.loads(self.session.metadata['window'])
        pixels = self.session.takes_pixels

        def encode_decode(images, metas):
            images = images.permute(0, 2, 3, 1).byte() if pixels else images
            return torch.from_numpy(self.session(images.numpy())['logits'])

        settings = SimpleNamespace(**window)
        host = SimpleNamespace(
            **window, test_cfg=settings, decode_head=settings, encode_decode=encode_decode
        )
        images = images.permute(0, 3, 1, 2).float() if pixels else images
        metas = [sample.metainfo for sample in samples]
        logits = EncoderDecoder.slide_inference(host, images, metas)
        return EncoderDecoder.postprocess_result(host, logits, samples)

    def _predict_classification(self, images, samples):
        outputs = self.session(np.stack(images))
        for score, label, sample in zip(outputs['scores'], outputs['labels'], samples):
            label = np.flatnonzero(label) if label.ndim else label[None]
            sample.set_pred_score(torch.from_numpy(score))
            sample.set_pred_label(torch.from_numpy(label).long())
        return samples


def _objects(result: dict) -> dict[str, torch.Tensor]:
    """Return the rows of objects; other rows have the label -1."""
    return {k: torch.from_numpy(v[result['labels'] >= 0]) for k, v in result.items()}


def paste_masks(
    masks: torch.Tensor, boxes: torch.Tensor, height: int, width: int, threshold: float
) -> torch.Tensor:
    """Paste masks within boxes into masks of the whole image, as MMDetection does.

    Args:
        masks (torch.Tensor): Probabilities (N, h, w).
        boxes (torch.Tensor): Boxes (N, 4), in pixels of the whole image.
        height (int): Height of the whole image.
        width (int): Width of the whole image.
        threshold (float): Smallest probability of a pixel in the mask.

    Returns:
        torch.Tensor: Bool masks (N, height, width).
    """
    from mmdet.models.roi_heads.mask_heads.fcn_mask_head import _do_paste_mask

    out = torch.zeros(len(masks), height, width, dtype=torch.bool)
    for mask, box, whole in zip(masks, boxes, out):
        pasted, place = _do_paste_mask(mask[None, None], box[None], height, width)
        whole[place] = pasted[0] >= threshold
    return out


def runner_for_exported(
    cfg: Config, file: str, work_dir: str | None = None, precision: str | None = None
) -> Runner:
    """Build a runner whose ``test()`` evaluates an exported model.

    Args:
        cfg (Config): The config of the original model.
        file (str): The exported model.
        work_dir (str, optional): Directory for metrics. Defaults to the config's ``work_dir``,
            or ``work_dirs/<name of the config>``.
        precision (str, optional): Precision of OpenVINO, 'f32' or 'bf16'.
    """
    cfg = copy.deepcopy(cfg)
    name = osp.splitext(osp.basename(cfg.filename))[0]
    cfg.work_dir = work_dir or cfg.get('work_dir') or osp.join('work_dirs', name)
    model = cfg.model
    while 'data_preprocessor' not in model and 'model' in model:  # of `Restructured`
        model = model.model
    cfg.model = dict(
        type='ExportedModel',
        file=file,
        precision=precision,
        data_preprocessor=model.get('data_preprocessor'),
    )
    # A file has nothing to merge, average or load.
    cfg.custom_hooks, cfg.load_from, cfg.resume = [], None, False
    hooks = cfg.get('default_hooks') or {}
    cfg.default_hooks = {
        name: hook for name, hook in hooks.items() if 'ReparameterizeHook' not in str(hook)
    }
    return Runner.from_cfg(cfg)
