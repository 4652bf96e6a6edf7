"""Whole models that can be traced from images to predictions."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.export.detection import SingleStage, TwoStage
from repa_mm.export.transformers import CoQueries, Masks, Queries, class_logits, trace_masks_
from repa_mm.faster.tracing import trace_any_size_
from repa_mm.surgery import copied, replace_

# Larger than any image: "the whole image" for the optional input image_size.
WHOLE = 2**30


class AveragePool(nn.Module):
    """``nn.AdaptiveAvgPool2d`` as two matrix products, for export to ONNX with any input size.

    Args:
        output_size (tuple[int, int]): Height and width of the output.
    """

    def __init__(self, output_size: tuple[int, int]) -> None:
        super().__init__()
        self.output_size = output_size

    @staticmethod
    def _matrix(size: int, new_size: int, like: torch.Tensor) -> torch.Tensor:
        """Return (n, size) weights: row i averages floor(i size / n) to ceil((i + 1) size / n)."""
        rows, cells = torch.arange(size), torch.arange(new_size)[:, None]
        size = torch.ones_like(cells) * rows.shape[0]
        start = cells * size // new_size
        stop = ((cells + 1) * size + new_size - 1) // new_size
        inside = ((rows >= start) & (rows < stop)).to(like)
        return inside / (stop - start).to(like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pool x (B, C, H, W) to (B, C, height, width)."""
        height, width = self.output_size
        down = self._matrix(x.shape[2], height, x)
        across = self._matrix(x.shape[3], width, x)
        return down @ (x @ across.t())


def _average_pool(module: nn.Module) -> AveragePool | None:
    if type(module) is nn.AdaptiveAvgPool2d and module.output_size not in (1, (1, 1)):
        size = module.output_size
        return AveragePool((size, size) if isinstance(size, int) else size)
    return None


class Preprocessing(nn.Module):
    """Normalization and padding of images, as the ``data_preprocessor`` of a model does.

    Args:
        config (nn.Module): The model's ``data_preprocessor``.
        in_graph (bool): If True, take uint8 images (B, H, W, C) in BGR order, as
            ``LoadImageFromFile`` returns, and normalize them. If False, take normalized images
            (B, C, H, W).
    """

    def __init__(self, config: nn.Module, in_graph: bool) -> None:
        super().__init__()
        self.in_graph = in_graph
        # MMEngine's name, and those of MMSegmentation 1.2 and MMPretrain.
        names = '_channel_conversion', 'channel_conversion', 'to_rgb'
        self.flip = any(getattr(config, name, False) for name in names)
        self.normalize = config._enable_normalize
        if self.normalize:
            self.register_buffer('mean', config.mean.clone())
            self.register_buffer('std', config.std.clone())
        # MMSegmentation has another divisor for tests, and another name for the pad value.
        divisor = (getattr(config, 'test_cfg', None) or {}).get('size_divisor')
        self.divisor = divisor or getattr(config, 'pad_size_divisor', 1) or 1
        self.pad_value = float(getattr(config, 'pad_value', getattr(config, 'pad_val', 0)))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return normalized images (B, C, H, W)."""
        if not self.in_graph:
            return image
        image = image.permute(0, 3, 1, 2)
        if self.flip:
            image = image.flip(1)
        image = image.float()
        return (image - self.mean) / self.std if self.normalize else image

    def pad(self, image: torch.Tensor, size: torch.Tensor | None = None) -> torch.Tensor:
        """Pad images to a multiple of the divisor.

        Args:
            image (torch.Tensor): Images (B, C, H, W).
            size (torch.Tensor, optional): Height and width of each image without padding, (B, 2).
                Defaults to those of ``image``.
        """
        height, width = image.shape[2:]
        if self.in_graph and size is not None:
            rows, columns = torch.arange(height) < size[:, :1], torch.arange(width) < size[:, 1:]
            inside = rows[:, None, :, None] & columns[:, None, None]
            image = torch.where(inside, image, torch.full_like(image, self.pad_value))
        if self.divisor > 1:
            right, below = -width % self.divisor, -height % self.divisor
            image = F.pad(image, (0, right, 0, below), value=self.pad_value)
        return image


class WholeModel(nn.Module):
    """Base class of models that predict from images in one graph.

    Attributes:
        task (str): 'detection', 'instances', 'panoptic', 'segmentation' or 'classification'.
        outputs (tuple[str]): Names of the outputs.
        option (tuple, optional): Name and default value of an optional second input.
        slides (bool): Whether images are windows of larger images.
    """

    task: str
    outputs: tuple[str, ...]
    option: tuple[str, list] | None = None
    slides = False

    def __init__(self, model: nn.Module, preprocessing: bool) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = Preprocessing(model.data_preprocessor, preprocessing)
        self.training = model.training

    def example(self, batch: int, channels: int, height: int, width: int) -> torch.Tensor:
        """Return images to trace the model with."""
        if self.preprocessing.in_graph:
            return torch.full((batch, height, width, channels), 128, dtype=torch.uint8)
        return torch.randn(batch, channels, height, width)

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file: task, preprocessing, classes and outputs, as strings."""
        classes = (getattr(self.model, 'dataset_meta', None) or {}).get('classes') or ()
        return dict(
            task=self.task,
            preprocessing=str(int(self.preprocessing.in_graph)),
            classes=json.dumps(list(classes)),
            outputs=','.join(self.outputs),
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
    option = 'image_size', [[WHOLE, WHOLE]]

    def __init__(self, model: nn.Module, preprocessing: bool) -> None:
        super().__init__(model, preprocessing)
        kind = next(kind for name, kind in PREDICTORS.items() if hasattr(model, name))
        self.predict = kind(model)
        self.outputs = self.predict.outputs

    def forward(self, image: torch.Tensor, image_size: torch.Tensor):
        image = self.preprocessing(image)
        own = torch._shape_as_tensor(image)[2:][None].to(image_size)
        size = torch.minimum(image_size, own).expand(image.shape[0], 2)
        image = self.preprocessing.pad(image, size)
        shape = torch._shape_as_tensor(image)[2:]
        return self.predict(self.model.extract_feat(image), shape, size)

    def metadata(self) -> dict[str, str]:
        found = super().metadata()
        if 'masks' in self.outputs:
            found['mask_thr_binary'] = str(self.predict.cfg['mask_thr_binary'])
        return found


class WholeSegmentor(WholeModel):
    """An ``EncoderDecoder`` that predicts label maps from images and ``output_size`` (2, ).

    Images are (B, C, H, W). ``output_size`` is the height and width of the label maps, by default
    the size of the images. As in MMSegmentation, scores are resized before the argmax.

    In the mode 'slide', images are windows, and the outputs are the ``logits`` (B, classes, H, W)
    of a window, without an option: whoever runs the file slides.
    """

    task = 'segmentation'
    outputs = ('labels',)
    option = 'output_size', [0, 0]

    def __init__(self, model: nn.Module, preprocessing: bool) -> None:
        super().__init__(model, preprocessing)
        self.has_masks = hasattr(model.decode_head, 'mask_embed')
        trace_masks_(model.decode_head)
        self.slides = model.test_cfg.get('mode', 'whole') == 'slide'
        if self.slides:
            self.outputs, self.option = ('logits',), None

    def metadata(self) -> dict[str, str]:
        found = super().metadata()
        if self.slides:
            model = self.model
            window = {name: tuple(model.test_cfg[name]) for name in ('crop_size', 'stride')}
            window.update(out_channels=model.out_channels, align_corners=model.align_corners)
            window['threshold'] = getattr(model.decode_head, 'threshold', None)
            found['window'] = json.dumps(window)
        return found

    def logits(self, image: torch.Tensor) -> torch.Tensor:
        """Return class scores (B, classes, H, W) of normalized images (B, C, H, W)."""
        features = self.model.extract_feat(image)
        if self.has_masks:
            return class_logits(self.model.decode_head, features, image)
        kwargs = dict(mode='bilinear', align_corners=self.model.align_corners)
        return F.interpolate(self.model.decode_head(features), image.shape[2:], **kwargs)

    def forward(self, image: torch.Tensor, output_size: torch.Tensor | None = None):
        image = self.preprocessing(image)
        if self.slides:
            return self.logits(image)
        own = torch._shape_as_tensor(image)[2:].to(output_size)
        size = torch.where(output_size > 0, output_size, own).unbind()
        logits = self.logits(self.preprocessing.pad(image))
        logits = logits[..., : image.shape[2], : image.shape[3]]
        kwargs = dict(mode='bilinear', align_corners=self.model.align_corners)
        logits = F.interpolate(logits, size, **kwargs)
        if logits.shape[1] == 1:  # foreground and background by one score
            return (logits[:, 0].sigmoid() > self.model.decode_head.threshold).int()
        return logits.argmax(1).int()


class WholeInstances(WholeModel):
    """A Mask2Former or MaskFormer that predicts masks from images and ``output_size`` (2, ).

    Inputs are as for :class:`WholeSegmentor`. Outputs are those of
    :class:`~repa_mm.export.transformers.Masks`; a model without instances has the task 'panoptic'.
    """

    option = 'output_size', [0, 0]

    def __init__(self, model: nn.Module, preprocessing: bool) -> None:
        super().__init__(model, preprocessing)
        self.predict = Masks(model)
        self.outputs = self.predict.outputs
        self.task = 'instances' if 'masks' in self.outputs else 'panoptic'

    def forward(self, image: torch.Tensor, output_size: torch.Tensor):
        image = self.preprocessing(image)
        own = torch._shape_as_tensor(image)[2:].to(output_size)
        padded = self.preprocessing.pad(image)
        size = torch.where(output_size > 0, output_size, own)
        features = self.model.extract_feat(padded)
        return self.predict(features, padded, image, size)


class WholeClassifier(WholeModel):
    """An ``ImageClassifier`` that predicts scores (B, classes) and labels (B, ) from images.

    If images have several labels, the labels are (B, classes), True for each label of the image.
    """

    task = 'classification'
    outputs = ('scores', 'labels')

    def __init__(self, model: nn.Module, preprocessing: bool) -> None:
        super().__init__(model, preprocessing)
        from mmpretrain.models.heads import MultiLabelClsHead

        self.several = isinstance(model.head, MultiLabelClsHead)

    def forward(self, image: torch.Tensor):
        logits = self.model(self.preprocessing.pad(self.preprocessing(image)))
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


def whole_model(model: nn.Module, preprocessing: bool = False) -> WholeModel:
    """Build a copy of a model to trace, which predicts as ``model.test_step`` for any image size.

    Supported are heads that predict as in RetinaNet, ATSS, FCOS, GFL, Faster R-CNN, Mask R-CNN,
    Cascade R-CNN, DETRs, Co-DETR, MaskFormer, Mask2Former, ``EncoderDecoder`` and
    ``ImageClassifier``. :func:`~repa_mm.export.agreeing_onnx` compares predictions to detect
    other heads.

    Args:
        model (nn.Module): A detector, segmentor or classifier in eval mode, on any device. It is
            not changed.
        preprocessing (bool): Take uint8 images (B, H, W, C) as OpenCV reads them, and normalize
            them. Defaults to False, which takes normalized images (B, C, H, W).

    Raises:
        ValueError: If the model is neither a detector, nor a segmentor, nor a classifier.
    """
    kinds = [kind for name, kind in WHOLE_MODELS.items() if hasattr(model, name)]
    if not kinds:
        raise ValueError(f'a {type(model).__name__} has no head that is known')
    model = copied(model).cpu()
    trace_any_size_(model)
    replace_(model, _average_pool)
    return kinds[0](model, preprocessing)
