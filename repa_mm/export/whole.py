"""Whole models that can be traced from images to predictions."""

import json
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.export.detection import SingleStage, TwoStage, require
from repa_mm.export.transformers import CoQueries, Masks, Queries, bilinear, class_logits
from repa_mm.faster import rewrite_
from repa_mm.io.configs import dataset_config
from repa_mm.surgery import copied


def pad(image: torch.Tensor, config: nn.Module) -> torch.Tensor:
    """Pad images (B, C, H, W) at the right and below, as a ``data_preprocessor`` does in tests."""
    # MMSegmentation has its own settings for tests, and another name for the value.
    test_cfg = getattr(config, 'test_cfg', None) or {}
    divisor = test_cfg.get('size_divisor') or getattr(config, 'pad_size_divisor', 1) or 1
    value = float(getattr(config, 'pad_value', getattr(config, 'pad_val', 0)))
    if test_cfg.get('size'):
        size = torch._shape_as_tensor(image)[2:]
        below, right = (torch.tensor(test_cfg['size']) - size).clamp(min=0).unbind()
    elif divisor > 1:
        below, right = (-size % divisor for size in image.shape[2:])
    else:
        return image
    return F.pad(image, (0, right, 0, below), value=value)


class WholeModel(nn.Module):
    """Base class of models that predict from images in one graph."""

    task: str  # 'detection', 'instances', 'panoptic', 'segmentation' or 'classification'
    outputs: tuple[str, ...]
    option: str | None = None  # name of an optional second input, in :data:`session.OPTIONS`
    slides = False  # True if images are windows of larger images

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.training = model, model.training
        self.pad = partial(pad, config=model.data_preprocessor)
        self.noted: dict[str, str] = {}  # further metadata

    def resize(self, maps: torch.Tensor, image: torch.Tensor, output_size: torch.Tensor):
        """Crop maps of padded images, and resize them to a size; (0, 0) is that of the images."""
        own = torch._shape_as_tensor(image)[2:].to(output_size)
        size = torch.where(output_size > 0, output_size, own).unbind()
        maps = maps[..., : image.shape[2], : image.shape[3]]
        return bilinear(maps, size, getattr(self.model, 'align_corners', False))

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file.

        'mean' and 'std' are in the order 'channels'. 'pipeline' has the steps of the test pipeline
        between loading and packing, as the config has them.
        """
        classes = (getattr(self.model, 'dataset_meta', None) or {}).get('classes') or ()
        classes = () if isinstance(classes, str) else classes  # a file that is not there
        config = self.model.data_preprocessor
        mean, std = ([0.0], [1.0])
        if config._enable_normalize:
            mean, std = (x.flatten().tolist() for x in (config.mean, config.std))
        # MMEngine's name, and those of MMSegmentation 1.2 and MMPretrain.
        names = '_channel_conversion', 'channel_conversion', 'to_rgb'
        swapped = any(getattr(config, name, False) for name in names)
        cfg = getattr(self.model, 'cfg', None) or {}
        noted = dict(self.noted)
        if cfg.get('test_dataloader'):
            pipeline = dataset_config(cfg, 'test').pipeline
            steps = [dict(step, type=step['type'].rpartition('.')[2]) for step in pipeline]
            steps = [step for step in steps if not step['type'].startswith(('Load', 'Pack'))]
            noted['pipeline'] = json.dumps(steps, default=str)
        return dict(
            task=self.task,
            classes=json.dumps(list(classes)),
            outputs=','.join(self.outputs),
            channels='RGB' if swapped else 'BGR',
            mean=json.dumps(mean),
            std=json.dumps(std),
            **noted,
        )


#: What predicts objects from features, by the attribute that tells a detector.
PREDICTORS = dict(
    forward_transformer=Queries, query_head=CoQueries, roi_head=TwoStage, bbox_head=SingleStage
)


class WholeDetector(WholeModel):
    """A detector that predicts boxes from images (B, C, H, W) and ``image_size`` (B, 2) or (1, 2).

    ``image_size`` is the height and width of each image without padding, for images of several
    sizes that are padded to one size. Boxes are in pixels of the input images.
    """

    task = 'detection'
    option = 'image_size'

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        kind = next(kind for name, kind in PREDICTORS.items() if hasattr(model, name))
        self.predict = kind(model)
        self.outputs = self.predict.outputs
        if 'masks' in self.outputs:
            self.noted['mask_thr_binary'] = str(self.predict.cfg['mask_thr_binary'])

    def forward(self, image: torch.Tensor, image_size: torch.Tensor):
        own = torch._shape_as_tensor(image)[2:][None].to(image_size)
        size = torch.minimum(image_size, own).expand(image.shape[0], 2)
        image = self.pad(image)
        shape = torch._shape_as_tensor(image)[2:]
        return self.predict(self.model.extract_feat(image), shape, size)


class WholeSegmentor(WholeModel):
    """An ``EncoderDecoder`` that predicts label maps from images and ``output_size`` (2, ).

    Images are (B, C, H, W). ``output_size`` is the height and width of the label maps, by default
    the size of the images. As in MMSegmentation, scores are resized before the argmax.

    In the mode 'slide', images are windows, and the outputs are the ``logits`` (B, classes, H, W)
    of a window, without an option: whoever runs the file slides.
    """

    task = 'segmentation'
    outputs = ('labels',)
    option = 'output_size'

    def __init__(self, model: nn.Module) -> None:
        from mmseg.models import EncoderDecoder
        from mmseg.models.decode_heads import Mask2FormerHead
        from mmseg.models.decode_heads.decode_head import BaseDecodeHead

        super().__init__(model)
        methods = 'predict', 'encode_decode', 'whole_inference', 'postprocess_result'
        require(model, [EncoderDecoder], methods)
        heads = [BaseDecodeHead, Mask2FormerHead]
        require(model.decode_head, heads, ['predict', 'predict_by_feat'])
        self.has_masks = isinstance(model.decode_head, Mask2FormerHead)
        self.slides = model.test_cfg.get('mode', 'whole') == 'slide'
        if self.slides:
            self.outputs, self.option = ('logits',), None
            window = {name: tuple(model.test_cfg[name]) for name in ('crop_size', 'stride')}
            window.update(out_channels=model.out_channels, align_corners=model.align_corners)
            window['threshold'] = getattr(model.decode_head, 'threshold', None)
            self.noted['window'] = json.dumps(window)

    def forward(self, image: torch.Tensor, output_size: torch.Tensor | None = None):
        padded, head = image if self.slides else self.pad(image), self.model.decode_head
        features = self.model.extract_feat(padded)
        if self.has_masks:
            logits = class_logits(head, features, padded)
        else:
            logits = bilinear(head(features), padded.shape[2:], self.model.align_corners)
        if self.slides:
            return logits
        logits = self.resize(logits, image, output_size)
        if logits.shape[1] == 1:  # foreground and background by one score
            return (logits[:, 0].sigmoid() > head.threshold).int()
        return logits.argmax(1).int()


class WholeInstances(WholeModel):
    """A Mask2Former that predicts masks from images and ``output_size`` (2, ).

    Inputs are those of :class:`WholeSegmentor`, outputs those of
    :class:`~repa_mm.export.transformers.Masks`.
    """

    option = 'output_size'

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.predict = Masks(model)
        self.outputs = self.predict.outputs
        self.task = 'instances' if 'masks' in self.outputs else 'panoptic'

    def forward(self, image: torch.Tensor, output_size: torch.Tensor):
        padded = self.pad(image)

        def resize(masks):
            return self.resize(bilinear(masks, padded.shape[2:]), image, output_size)

        return self.predict(self.model.extract_feat(padded), resize)


class WholeClassifier(WholeModel):
    """An ``ImageClassifier`` that predicts scores (B, classes) and labels (B, ) from images.

    If images have several labels, the labels are (B, classes), True for each label of the image.
    """

    task = 'classification'
    outputs = ('scores', 'labels')

    def __init__(self, model: nn.Module) -> None:
        from mmpretrain.models.heads import ClsHead, MultiLabelClsHead

        super().__init__(model)
        require(model.head, [ClsHead, MultiLabelClsHead], ['predict', '_get_predictions'])
        self.several = isinstance(model.head, MultiLabelClsHead)

    def forward(self, image: torch.Tensor):
        logits = self.model(self.pad(image))
        if not self.several:
            scores = logits.softmax(1)
            return scores, scores.argmax(1)
        head, scores = self.model.head, logits.sigmoid()
        least = head.thr if head.thr is not None else scores.topk(head.topk, 1)[0][:, -1:]
        return scores, scores >= least


WHOLE_MODELS = dict(
    panoptic_fusion_head=WholeInstances,
    decode_head=WholeSegmentor,
    **dict.fromkeys(PREDICTORS, WholeDetector),
    head=WholeClassifier,
)


def whole_model(model: nn.Module) -> WholeModel:
    """Build a copy of a model to trace, which predicts as ``model.test_step`` for any image size.

    A ValueError names the module that predicts in a way that the export does not know.
    """
    kinds = [kind for name, kind in WHOLE_MODELS.items() if hasattr(model, name)]
    if not kinds:
        raise ValueError(f'a {type(model).__name__} has no head that is known')
    model = copied(model).cpu()
    rewrite_(model, 'trace')
    return kinds[0](model)
