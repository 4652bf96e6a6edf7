"""DINO: self-supervised pretraining of a vision transformer."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
import torch.nn as nn
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from mmpretrain.models import BaseSelfSupervisor
from torch.nn.utils import remove_weight_norm
from torch.nn.utils.parametrizations import weight_norm

from repa_mm.surgery import copied


@MODELS.register_module()
class DINOProjection(BaseModule):
    """The projection head of DINO, by ``lightly``, as the neck of :class:`DINO`.

    Args:
        in_channels (int): Channels of the backbone's class token.
        hidden_channels (int): Width of its multilayer perceptron. Defaults to 2048.
        bottleneck_channels (int): Channels before the last layer. Defaults to 256.
        out_channels (int): Number of prototypes. Defaults to 65536.
        norm_last_layer (bool): Keep the length of the last layer's weights at 1. Defaults to True.
        init_cfg (dict, optional): Initialization of MMEngine.

    Raises:
        ImportError: If ``lightly`` is not installed.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int = 2048,
        bottleneck_channels: int = 256,
        out_channels: int = 65536,
        norm_last_layer: bool = True,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        from lightly.models.modules import DINOProjectionHead  # the linear evaluation does without

        head = DINOProjectionHead(
            in_channels,
            hidden_channels,
            bottleneck_channels,
            out_channels,
            norm_last_layer=norm_last_layer,
        )
        # As a parametrization: a module with the weight norm of old cannot be copied once it has
        # computed anything, which hooks and reparameterize() do.
        last = weight_norm(remove_weight_norm(head.last_layer))
        length = last.parametrizations.weight.original0
        length.data.fill_(1)
        length.requires_grad = not norm_last_layer
        self.layers, self.last_layer = head.layers, last

    def forward(self, x: Sequence[torch.Tensor]) -> torch.Tensor:
        """Project the last of a backbone's outputs, of shape (N, C)."""
        return self.last_layer(nn.functional.normalize(self.layers(x[-1]), dim=-1))


@MODELS.register_module()
class ClassTokens(BaseModule):
    """A neck that joins a backbone's outputs to one vector, as the linear evaluation of DINO does.

    A backbone normalizes its last output only. Here the others are normalized, too, without an
    affine map, since a linear classifier follows.

    Args:
        patch_mean (bool): Join the mean of the last output's patch tokens, too, for backbones with
            ``out_type='raw'``. Defaults to False.
        init_cfg (dict, optional): Initialization of MMEngine.
    """

    def __init__(self, patch_mean: bool = False, init_cfg: dict | None = None) -> None:
        super().__init__(init_cfg)
        self.patch_mean = patch_mean

    def forward(self, x: Sequence[torch.Tensor]) -> tuple[torch.Tensor]:
        """Join outputs, class tokens (N, C) or all tokens (N, L, C), to (N, channels in all)."""
        tokens = [y[:, 0] if y.dim() == 3 else y for y in x]
        # int(): exporters to ONNX want to know the size.
        parts = [nn.functional.layer_norm(y, [int(y.shape[1])]) for y in tokens[:-1]] + tokens[-1:]
        if self.patch_mean:
            parts.append(x[-1][:, 1:].mean(1))
        return (torch.cat(parts, dim=1),)


@MODELS.register_module()
class DINOHead(BaseModule):
    """The loss of DINO with its center, by ``lightly``.

    Args:
        out_channels (int): Number of prototypes. Defaults to 65536.
        student_temperature (float): Defaults to 0.1.
        teacher_temperature (float): Defaults to 0.07.
        warmup_teacher_temperature (float): Temperature of the teacher in the first epoch. Defaults
            to 0.04.
        warmup_epochs (int): Number of epochs in which it rises linearly. Defaults to 30.
        center_momentum (float): Share of the former center that a step keeps. Defaults to 0.9.
        init_cfg (dict, optional): Initialization of MMEngine.

    Attributes:
        epoch (int, optional): The epoch of the training, from 0, which
            :class:`~projects.dino.DINOHook` sets.

    Raises:
        ImportError: If ``lightly`` is not installed.
    """

    def __init__(
        self,
        out_channels: int = 65536,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.07,
        warmup_teacher_temperature: float = 0.04,
        warmup_epochs: int = 30,
        center_momentum: float = 0.9,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        from lightly.loss import DINOLoss

        self.loss_module = DINOLoss(
            out_channels,
            warmup_teacher_temperature,
            teacher_temperature,
            warmup_epochs,
            student_temperature,
            center_momentum,
        )
        self.epoch: int | None = None

    def loss(self, student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> dict:
        """Cross-entropy of each crop's prediction with the teacher's of every other global crop.

        Args:
            student (Sequence[torch.Tensor]): Logits (N, K) for each crop, global ones first.
            teacher (Sequence[torch.Tensor]): Logits (N, K) for each global crop.

        Raises:
            ValueError: If no epoch is set: without the hook, the teacher would never move.
        """
        if self.epoch is None:
            raise ValueError(
                "DINO does not train without DINOHook: add dict(type='DINOHook') to custom_hooks"
            )
        # lightly sums products over all prototypes, which autocast would do in half precision.
        with torch.autocast(student[0].device.type, enabled=False):
            teacher, student = ([x.float() for x in logits] for logits in (teacher, student))
            return dict(loss=self.loss_module(teacher, student, epoch=self.epoch))


@contextmanager
def _running_statistics_kept(model: nn.Module) -> Iterator[None]:
    """Let BatchNorms normalize by their batch, and leave their running statistics as they are."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    before = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
        yield
    finally:
        for norm, momentum in zip(norms, before):
            norm.momentum = momentum


@MODELS.register_module()
class DINO(BaseSelfSupervisor):
    """Self-distillation of a vision transformer without labels.

    `Emerging Properties in Self-Supervised Vision Transformers
    <https://arxiv.org/abs/2104.14294>`_. The student sees all crops of an image, the teacher the
    global ones. :class:`~projects.dino.DINOHook` lets the teacher follow the student.

    The student's BatchNorms meet the crops of one size at a time, as in the authors' code, and so
    normalize each size by its own statistics. The running statistics, which tests and the deploy
    form use, are those of global crops alone (in the authors' code, of all crops): a pretrained
    backbone is used on whole images.

    The teacher has BatchNorm statistics of its own: in training mode it normalizes by its batch,
    as the authors' teacher does, and gathers running statistics from that.

    Args:
        backbone (dict): A backbone whose last output is the class token (N, C), such as
            ``dict(type='RePaVisionTransformer', arch='deit-small', out_type='cls_token')``.
        neck (dict): :class:`DINOProjection`.
        head (dict): :class:`DINOHead`.
        num_global_crops (int): Number of global crops, which are the first of an image's crops.
            Defaults to 2.
        data_preprocessor (dict, optional): Defaults to MMPretrain's ``SelfSupDataPreprocessor``.
        init_cfg (dict, optional): Initialization of MMEngine.
    """

    def __init__(
        self,
        backbone: dict,
        neck: dict,
        head: dict,
        num_global_crops: int = 2,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(
            backbone, neck, head, data_preprocessor=data_preprocessor, init_cfg=init_cfg
        )
        self.num_global_crops = num_global_crops
        self.teacher = nn.Sequential(
            OrderedDict(backbone=copied(self.backbone), neck=copied(self.neck))
        )
        self.teacher.requires_grad_(False)
        for module in self.teacher.modules():
            if hasattr(module, 'drop_prob'):  # drop path is the student's alone
                module.drop_prob = 0.0

    def start_teacher(self) -> None:
        """Make the teacher a copy of the student."""
        self.teacher.backbone.load_state_dict(self.backbone.state_dict())
        self.teacher.neck.load_state_dict(self.neck.state_dict())

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """Move the teacher's parameters towards the student's.

        Args:
            momentum (float): Share of themselves that the teacher's parameters keep.
        """
        for name, network in self.teacher.named_children():
            for old, new in zip(network.parameters(), getattr(self, name).parameters()):
                old.lerp_(new.detach().to(old.dtype), 1 - momentum)

    def extract_feat(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return features of the teacher, which is the better network."""
        return self.teacher.backbone(inputs)

    def loss(self, inputs: Sequence[torch.Tensor], data_samples=None) -> dict:
        """Compute the loss of a batch.

        Args:
            inputs (Sequence[torch.Tensor]): A batch (N, 3, H, W) for each crop, global ones first.
            data_samples (list, optional): Not used.
        """
        images = torch.cat(list(inputs[: self.num_global_crops]))
        with torch.no_grad():
            teacher = self.teacher(images)
        features = [self.backbone(images)[-1]]
        local_crops = inputs[self.num_global_crops :]
        for _, crops in groupby(local_crops, key=lambda crop: crop.shape[2:]):
            with _running_statistics_kept(self.backbone):
                features.append(self.backbone(torch.cat(list(crops)))[-1])
        student = self.neck((torch.cat(features),))
        batch = len(inputs[0])
        return self.head.loss(student.split(batch), teacher.split(batch))
