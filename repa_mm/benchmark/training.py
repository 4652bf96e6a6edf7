"""Time and memory of a training step."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm

from repa_mm.benchmark.forms import AMP_DTYPES, explained, load_configs, randomize_norms
from repa_mm.benchmark.inputs import check_memory, parse_size
from repa_mm.benchmark.latency import set_machine
from repa_mm.benchmark.memory import SavedTensors, peak_bytes, weight_bytes
from repa_mm.benchmark.report import environment
from repa_mm.benchmark.timing import Clock, Progress, Recorder, compare, measure, summarize
from repa_mm.engine.complexity import count_parameters
from repa_mm.reparam import TrainingForm, has_deploy_form, set_training_path

OPTIMIZERS: dict[str, Callable | None] = dict(
    none=None,
    sgd=functools.partial(torch.optim.SGD, lr=1e-6, momentum=0.9),
    adamw=functools.partial(torch.optim.AdamW, lr=1e-6),
)
PATHS = ('literal', 'folded', 'auto')
PARTS = ('forward', 'backward', 'optimizer')


def benchmark_training(
    config: str,
    baseline: str | None = None,
    cfg_options: dict | None = None,
    size: str = '224x224',
    batch_size: int = 8,
    whole: bool = False,
    optimizer: str = 'adamw',
    steps: int = 20,
    warmup: int = 3,
    device: str = 'cpu',
    threads: int | None = None,
    amp: str | None = None,
    tf32: bool = False,
    paths: Sequence[str] = PATHS,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure training steps of vanilla, literal and folded FFNs, in turn.

    Weights are random. A step of a backbone is the forward pass on noise, the
    backward pass from the mean square of its features, and the optimizer's
    step; with ``whole``, the losses are the model's on synthetic targets.

    Args:
        config (str): Path of a RePa model's config.
        baseline (str, optional): Path of the vanilla counterpart's config.
        cfg_options (dict, optional): Values to override in the config.
        size (str): Of the images, 'HEIGHTxWIDTH'.
        batch_size (int): Images in a step.
        whole (bool): The whole model instead of its backbone.
        optimizer (str): 'none', 'sgd' or 'adamw'.
        steps (int): Steps to measure.
        warmup (int): Steps before that.
        device (str): 'cpu', 'cuda', ...
        threads (int, optional): Of the CPU.
        amp (str, optional): 'bf16' or 'fp16' autocast.
        tf32 (bool): Whether float32 products use TF32.
        paths (Sequence[str]): Of 'literal', 'folded' and 'auto', the choice
            by shape that is the default of a training. Defaults to all.
        quiet (bool): Show no progress. Defaults to False.

    Returns:
        dict: ``environment``, ``options``, ``notes``, ``interrupted``,
        ``count``, ``reference`` and ``forms``: for each one ``step``
        (statistics, milliseconds), ``parts``, ``ratio`` (of the step to the
        reference), ``ratio_without_optimizer``, ``saved_mib`` (activations
        kept for the backward pass), ``peak_mib``, ``parameters`` and ``raw``.

    Raises:
        ValueError: If options do not fit each other, the model or the machine.
        KeyboardInterrupt: If it ended before anything was measured.
    """
    options = {k: v for k, v in locals().items() if k not in ('config', 'baseline', 'quiet')}
    if batch_size < 1 or steps < 1 or warmup < 0:
        raise ValueError('--batch-size and --steps must be at least 1, --warmup at least 0')
    height, width = parse_size(size)
    check_memory((height, width), batch_size)
    set_machine(device, threads, tf32, amp)
    cfg, baseline_cfg = load_configs(config, baseline, cfg_options)
    forms, notes = training_forms(cfg, baseline_cfg, whole, device, paths)

    recorder = Recorder(Clock(device))
    steppers = {
        name: _Step(model, whole, OPTIMIZERS[optimizer], amp, recorder)
        for name, model in forms.items()
    }
    batch = (
        synthetic_batch(cfg, (height, width), batch_size, device)
        if whole
        else torch.randn(
            batch_size, 3, height, width, generator=torch.Generator().manual_seed(0)
        ).to(device)
    )
    progress = None if quiet else Progress(steps, warmup, unit='steps')
    memory: dict[str, tuple[int, int]] = {}
    for name, step in steppers.items():
        if progress:
            progress.say(f'first step of {name}')
        with explained(name, (batch_size, 3, height, width)):
            memory[name] = step.memory(batch, device)
    times = measure(steppers, lambda _: batch, steps, warmup, recorder, progress)
    if progress:
        progress.close()
    if not len(times):
        raise KeyboardInterrupt
    result: dict[str, Any] = dict(
        tool='benchmark_training',
        config=config,
        baseline=baseline,
        options=options,
        environment=environment(device),
        config_text=cfg.pretty_text,
        notes=notes,
        interrupted=times.interrupted,
        count=len(times),
        reference=next(iter(forms)),
        forms={},
    )
    raw = {}
    for name in forms:
        raw[name] = dict(
            step=1e3 * np.array(times.totals[name]),
            **{
                part: 1e3 * np.array(times.parts[name].get(part, [0.0] * len(times)))
                for part in PARTS
            },
        )
    reference = raw[result['reference']]
    for name, model in forms.items():
        mine = raw[name]
        saved, peak = memory[name]
        result['forms'][name] = dict(
            step=summarize(mine['step']),
            parts={part: summarize(mine[part]) for part in PARTS},
            ratio=compare(mine['step'], reference['step']),
            ratio_without_optimizer=compare(
                mine['step'] - mine['optimizer'], reference['step'] - reference['optimizer']
            ),
            images_per_second=1e3 * batch_size / np.median(mine['step']),
            saved_mib=saved / 2**20,
            peak_mib=peak / 2**20,
            parameters=count_parameters(model),
            raw={key: v.tolist() for key, v in mine.items()},
        )
    return result


def training_forms(
    cfg: Config, baseline: Config | None, whole: bool, device: str, paths: Sequence[str] = PATHS
):
    """The models to train, in training mode, with the same random weights.

    Returns:
        tuple: Models by name, the reference first; and notes about them.

    Raises:
        ValueError: If a config has no channel-idle FFN, or the baseline has.
    """

    def build(cfg: Config) -> nn.Module:
        torch.manual_seed(0)
        model = revert_sync_batchnorm(MODELS.build(cfg.model))
        randomize_norms(model)
        model = model if whole else model.backbone
        model.to(device)
        model.train()
        return model

    forms = {}
    if baseline is not None:
        forms['vanilla'] = build(baseline)
        if _training_forms(forms['vanilla']):
            raise ValueError('the baseline has channel-idle FFNs itself')
    model = build(cfg)
    if has_deploy_form(model):
        raise ValueError('the config is of the deploy form, which is not trained')
    if not _training_forms(model):
        raise ValueError(
            'the config has no channel-idle FFN: give the RePa '
            'config first and the vanilla one as --baseline'
        )
    notes = []
    frozen = sum(not m.training for m in model.modules() if isinstance(m, _BatchNorm))
    if frozen:
        notes.append(
            f'{frozen} BatchNorms use running statistics, as the config says '
            '(for batch statistics: --cfg-options '
            'model.backbone.norm_eval=False)'
        )
    for path in paths:
        forms[path] = set_training_path(copy.deepcopy(model), path)
    return forms, notes


def _training_forms(model: nn.Module) -> list:
    return [m for m in model.modules() if isinstance(m, TrainingForm)]


class _Step:
    """A training step of one model, in timed parts."""

    def __init__(
        self,
        model: nn.Module,
        whole: bool,
        optimizer: Callable | None,
        amp: str | None,
        recorder: Recorder,
    ) -> None:
        self.model, self.whole, self.amp = model, whole, amp
        self.recorder = recorder
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer(parameters) if optimizer else None

    def forward(self, batch: Any) -> torch.Tensor:
        device = next(self.model.parameters()).device.type
        dtype = AMP_DTYPES[self.amp] if self.amp else None
        with torch.autocast(device, dtype, enabled=bool(self.amp)):
            if self.whole:
                data = self.model.data_preprocessor(batch, True)
                losses = self.model(**data, mode='loss')
                return self.model.parse_losses(losses)[0]
            return sum(f.float().pow(2).mean() for f in self.model(batch))

    def __call__(self, batch: Any) -> None:
        with self.recorder.section('forward'):
            loss = self.forward(batch)
        with self.recorder.section('backward'):
            loss.backward()
        with self.recorder.section('optimizer'):
            if self.optimizer:
                self.optimizer.step()
            self.model.zero_grad(set_to_none=True)

    def memory(self, batch: Any, device: str) -> tuple[int, int]:
        """Bytes saved for the backward pass, and at the peak of a step."""
        # The peak in a step of its own: to look at what is saved keeps it.
        with SavedTensors(self.model) as saved:
            loss = self.forward(copy.deepcopy(batch))
        count = saved.bytes
        del loss, saved
        self(copy.deepcopy(batch))
        _, peak = peak_bytes(self, copy.deepcopy(batch), device)
        states = self.optimizer.state.values() if self.optimizer else ()
        state = sum(
            t.numel() * t.element_size()
            for s in states
            for t in s.values()
            if isinstance(t, torch.Tensor)
        )
        return count, peak + weight_bytes(self.model) + state


def synthetic_batch(
    cfg: Config, size: tuple[int, int], batch_size: int, device: str
) -> dict[str, Any]:
    """Noise with labels: ten objects, a label map or a class per image.

    Raises:
        ValueError: If the model has no number of classes where it is expected.
    """
    generator = torch.Generator().manual_seed(0)
    height, width = size
    model = cfg.model

    def image() -> torch.Tensor:
        return torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    meta = dict(
        img_shape=size,
        ori_shape=size,
        pad_shape=size,
        scale_factor=(1.0, 1.0),
        img_path='noise',
        img_id=0,
    )
    samples = []
    for _ in range(batch_size):
        if cfg.default_scope == 'mmdet':
            samples.append(_detection_sample(model, size, integers, meta))
        elif cfg.default_scope == 'mmseg':
            from mmengine.structures import PixelData
            from mmseg.structures import SegDataSample

            head = model.decode_head
            head = head[-1] if isinstance(head, list) else head
            sample = SegDataSample(metainfo=meta)
            sample.gt_sem_seg = PixelData(data=integers(head.num_classes, 1, height, width))
            samples.append(sample)
        else:
            from mmpretrain.structures import DataSample

            samples.append(
                DataSample(metainfo=meta).set_gt_label(integers(model.head.num_classes, 1))
            )
    images = [image() for _ in range(batch_size)]
    if cfg.default_scope == 'mmpretrain':
        images = torch.stack(images)
    return dict(inputs=images, data_samples=samples)


def _detection_sample(model, size, integers, meta):
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    head = model.get('bbox_head') or model.roi_head.bbox_head
    head = head[-1] if isinstance(head, list) else head
    height, width = size
    corner = torch.stack([integers(width * 3 // 4, 10), integers(height * 3 // 4, 10)], 1)
    extent = torch.stack(
        [8 + integers(max(width // 4 - 8, 1), 10), 8 + integers(max(height // 4 - 8, 1), 10)], 1
    )
    boxes = torch.cat([corner, corner + extent], 1).float()
    instances = InstanceData(bboxes=boxes, labels=integers(head.num_classes, 10))
    if model.get('roi_head', {}).get('mask_head'):
        masks = np.zeros((10, height, width), np.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist()):
            mask[y1:y2, x1:x2] = 1
        instances.masks = BitmapMasks(masks, height, width)
    sample = DetDataSample(metainfo=meta)
    sample.gt_instances = instances
    sample.ignored_instances = InstanceData(
        bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long)
    )
    return sample
