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
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from repa_mm.export.session import Session
from repa_mm.surgery import copied


class ExportedModel(BaseModel):
    """Run an exported file instead of the original model in tests.

    ``import repa_mm`` registers it in MMEngine.

    Args:
        file, precision: See :class:`~repa_mm.export.Session`.
        data_preprocessor (dict | nn.Module): The ``data_preprocessor`` of the original model.

    Examples:
        >>> model = dict(type='ExportedModel', file='model.onnx',
        ...              data_preprocessor=dict(type='DetDataPreprocessor', …))
    """

    def __init__(
        self, file, data_preprocessor: dict | nn.Module | None = None, precision: str | None = None
    ) -> None:
        session = Session(file, precision)
        if isinstance(data_preprocessor, nn.Module):
            data_preprocessor = copied(data_preprocessor).cpu()
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
        """Return the data samples of a data loader's batch with predictions."""
        metadata, data = self.session.metadata, self.data_preprocessor(data, False)
        images, samples = data['inputs'], data['data_samples']
        if 'window' in metadata:
            return self._slide(images, samples)
        add = _ADD[metadata['task']]
        for sample, outputs in zip(samples, self._run(list(images.numpy()), samples)):
            add(sample, {name: torch.as_tensor(x) for name, x in outputs.items()}, metadata)
        return samples

    val_step = test_step

    def forward(self, *args, **kwargs):
        """Raise an error, since an exported model cannot be trained."""
        raise RuntimeError('an exported model is for tests only')

    def _run(self, images: list[np.ndarray], samples: list) -> list[dict[str, np.ndarray]]:
        """Return the outputs for each image, which are of one pass where sizes are equal."""
        options, chosen, sizes = self.session.options, {}, []
        if not options and self.session.metadata['task'] != 'classification':
            raise ValueError(
                "the file lacks image_size or output_size: save what openvino's read_model returns"
            )
        if 'image_size' in options:
            chosen['image_size'] = [sample.img_shape[:2] for sample in samples]
        if 'output_size' in options:
            shapes = (sample.img_shape[:2] for sample in samples)  # without padding
            images = [image[:, :height, :width] for image, (height, width) in zip(images, shapes)]
            sizes = [tuple(sample.ori_shape[:2]) for sample in samples]
            chosen['output_size'] = sizes[0]
        if len({image.shape for image in images}) > 1 or len({*sizes}) > 1:
            return [self._run([image], [s])[0] for image, s in zip(images, samples)]
        outputs = self.session(np.stack(images), **chosen)
        return [{name: x[i] for name, x in outputs.items()} for i in range(len(images))]

    def _slide(self, images: torch.Tensor, samples: list) -> list:
        """Run the file on windows of images; MMSegmentation slides and merges."""
        from mmseg.models import EncoderDecoder

        def encode_decode(windows, metas):
            return torch.from_numpy(self.session(windows.numpy())['logits'])

        settings = SimpleNamespace(**json.loads(self.session.metadata['window']))
        host = SimpleNamespace(
            **vars(settings), test_cfg=settings, decode_head=settings, encode_decode=encode_decode
        )
        metas = [sample.metainfo for sample in samples]
        logits = EncoderDecoder.slide_inference(host, images, metas)
        return EncoderDecoder.postprocess_result(host, logits, samples)


def _objects(outputs: dict) -> InstanceData:
    """Return the objects; other rows have the label -1."""
    found = {name: x[outputs['labels'] >= 0] for name, x in outputs.items()}
    return InstanceData(bboxes=found.pop('boxes'), **found)


def _add_boxes(sample: BaseDataElement, outputs: dict, metadata: dict) -> None:
    found = _objects(outputs)
    found.bboxes = found.bboxes / found.bboxes.new_tensor(sample.scale_factor).repeat(2)
    if 'masks' in found:
        args = *sample.ori_shape[:2], float(metadata['mask_thr_binary'])
        found.masks = paste_masks(found.masks, found.bboxes, *args)
    sample.pred_instances = found


def _add_masks(sample: BaseDataElement, outputs: dict, metadata: dict) -> None:
    if 'panoptic' in outputs:
        sample.pred_panoptic_seg = PixelData(sem_seg=outputs.pop('panoptic')[None])
    if 'masks' in outputs:
        sample.pred_instances = _objects(outputs)


def _add_label_map(sample: BaseDataElement, outputs: dict, metadata: dict) -> None:
    sample.pred_sem_seg = PixelData(data=outputs['labels'][None].long())


def _add_scores(sample: BaseDataElement, outputs: dict, metadata: dict) -> None:
    label = outputs['labels'].long()
    sample.set_pred_score(outputs['scores'])
    sample.set_pred_label(label.nonzero()[:, 0] if label.ndim else label[None])


#: Functions that add the outputs for one image to its data sample, by task.
_ADD = dict(
    detection=_add_boxes,
    instances=_add_masks,
    panoptic=_add_masks,
    segmentation=_add_label_map,
    classification=_add_scores,
)


def paste_masks(
    masks: torch.Tensor, boxes: torch.Tensor, height: int, width: int, threshold: float
) -> torch.Tensor:
    """Paste probabilities (N, h, w) within boxes (N, 4) into masks (N, H, W), as MMDetection does.

    Pixels with at least the threshold are in the mask. With a threshold below 0, masks are
    probabilities from 0 to 255.
    """
    from mmdet.models.roi_heads.mask_heads.fcn_mask_head import _do_paste_mask

    kind = torch.bool if threshold >= 0 else torch.uint8
    out = torch.zeros(len(masks), height, width, dtype=kind)
    for mask, box, whole in zip(masks, boxes, out):
        pasted, place = _do_paste_mask(mask[None, None], box[None], height, width)
        whole[place] = pasted[0] >= threshold if threshold >= 0 else pasted[0] * 255
    return out


def runner_for_exported(
    cfg: Config, file: str, work_dir: str | None = None, precision: str | None = None
) -> Runner:
    """Build a runner whose ``test()`` evaluates the exported file of a config's model.

    The metrics are written to ``work_dir``, the config's, or ``work_dirs/<name of the config>``.
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
