"""Time and memory of a training step."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS
from mmengine.structures import PixelData
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm

from repa_mm.benchmark.execution import explained
from repa_mm.benchmark.inputs import TensorInputs, check_memory, parse_size
from repa_mm.benchmark.machine import AMP_DTYPES, environment, set_machine
from repa_mm.benchmark.memory import SavedTensors, peak_bytes, weight_bytes
from repa_mm.benchmark.progress import Progress
from repa_mm.benchmark.timing import Clock, Recorder, compare, measure, statistics
from repa_mm.benchmark.variants import check_pair, load_configs, randomize_norms
from repa_mm.engine.complexity import count_parameters
from repa_mm.reparam import TrainingForm, has_deploy_form, set_training_path

OPTIMIZERS: dict[str, Callable | None] = dict(
    none=None,
    sgd=functools.partial(torch.optim.SGD, lr=1e-6, momentum=0.9),
    adamw=functools.partial(torch.optim.AdamW, lr=1e-6),
)


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
    paths: Sequence[str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure training steps of a vanilla model and of the training paths of a RePa model, in turn.

    Weights are random. A step of a backbone is the forward pass on noise, the backward pass from
    the mean square of its features, and the optimizer's step; with ``whole``, the losses are the
    model's on synthetic targets. The arguments are the options of ``tools/benchmark_training.py``;
    ``paths`` are all that the training forms of the model have, if it is None.

    Returns:
        dict: ``environment``, ``options``, ``notes``, ``interrupted``, ``count``, ``reference``
        and ``forms``: for each one :func:`~repa_mm.benchmark.timing.statistics` of a step, and
        ``ratio_without_optimizer``, ``images_per_second``, ``saved_mib`` (activations kept for the
        backward pass), ``peak_mib``, ``parameters``.

    Raises:
        ValueError: If options do not fit each other, the model or the machine.
        KeyboardInterrupt: If it ended before anything was measured.
    """
    options = {k: v for k, v in locals().items() if k not in ('config', 'baseline', 'quiet')}
    if batch_size < 1 or steps < 1 or warmup < 0:
        raise ValueError('--batch-size and --steps must be at least 1, --warmup at least 0')
    pixels = parse_size(size)
    check_memory(pixels, batch_size)
    set_machine(device, threads, tf32, amp)
    cfg, baseline_cfg = load_configs(config, baseline, cfg_options)
    forms, notes = training_forms(cfg, baseline_cfg, whole, device, paths)
    recorder = Recorder(Clock(device))
    steppers = {
        name: Step(model, whole, OPTIMIZERS[optimizer], amp, recorder)
        for name, model in forms.items()
    }
    if whole:
        batch: Any = synthetic_batch(cfg, pixels, batch_size)
    else:
        batch = TensorInputs(pixels, batch_size, device)(0)
    memory: dict[str, tuple[int, int]] = {}
    with Progress(steps, warmup, unit='steps', quiet=quiet) as progress:
        for name, step in steppers.items():
            progress.say(f'first step of {name}')
            with explained(name, (batch_size, 3, *pixels)):
                memory[name] = step.memory(batch, device)
        times = measure(steppers, lambda _: batch, steps, warmup, recorder, progress)
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
    reference = result['reference']
    without = {n: np.subtract(r['total'], r['optimizer']) for n, r in times.raw.items()}
    for name, form in statistics(times.raw, reference).items():
        result['forms'][name] = dict(
            form,
            ratio_without_optimizer=compare(without[name], without[reference]),
            images_per_second=1e3 * batch_size / form['latency']['median'],
            saved_mib=memory[name][0] / 2**20,
            peak_mib=memory[name][1] / 2**20,
            parameters=count_parameters(forms[name]),
        )
    return result


def training_forms(
    cfg: Config,
    baseline: Config | None,
    whole: bool,
    device: str,
    paths: Sequence[str] | None = None,
) -> tuple[dict[str, nn.Module], list[str]]:
    """The models to train, in training mode, with the same random weights.

    Returns:
        tuple: Models by name, the reference first; and notes about them.

    Raises:
        ValueError: If a config has no training form, or the baseline has one; if there is no such
            training path.
    """

    def build(cfg: Config) -> nn.Module:
        torch.manual_seed(0)
        model = revert_sync_batchnorm(MODELS.build(cfg.model))
        randomize_norms(model)
        model = (model if whole else model.backbone).to(device)
        model.train()  # on a line of its own: that of some backbones returns None
        return model

    forms = {} if baseline is None else dict(vanilla=build(baseline))
    model = build(cfg)
    check_pair(model, forms.get('vanilla', nn.Identity()))
    if has_deploy_form(model):
        raise ValueError('the config is of the deploy form, which is not trained')
    notes = []
    frozen = sum(not m.training for m in model.modules() if isinstance(m, _BatchNorm))
    if frozen:
        notes.append(
            f'{frozen} BatchNorms use running statistics, as the config says (for batch '
            'statistics: --cfg-options model.backbone.norm_eval=False)'
        )
    known = [m.training_paths for m in model.modules() if isinstance(m, TrainingForm)]
    for path in paths or dict.fromkeys(sum(known, ())):
        forms[path] = set_training_path(copy.deepcopy(model), path)
    return forms, notes


@dataclasses.dataclass
class Step:
    """A training step of one model, in timed parts.

    Args:
        model (nn.Module): A backbone, or a whole model.
        whole (bool): Which of both it is.
        optimizer (Callable, optional): Makes the optimizer of parameters.
        amp (str, optional): 'bf16' or 'fp16' autocast.
        recorder (Recorder): Gets the parts.
    """

    model: nn.Module
    whole: bool
    optimizer: Any
    amp: str | None
    recorder: Recorder

    def __post_init__(self) -> None:
        if self.optimizer:
            self.optimizer = self.optimizer([p for p in self.model.parameters() if p.requires_grad])

    def forward(self, batch: Any) -> torch.Tensor:
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, AMP_DTYPES.get(self.amp), enabled=bool(self.amp)):
            if self.whole:
                data = self.model.data_preprocessor(batch, True)
                return self.model.parse_losses(self.model(**data, mode='loss'))[0]
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
            self.forward(copy.deepcopy(batch))
        self(copy.deepcopy(batch))
        _, peak = peak_bytes(self, copy.deepcopy(batch), device)
        states = self.optimizer.state.values() if self.optimizer else ()
        state = sum(t.nbytes for s in states for t in s.values() if torch.is_tensor(t))
        return saved.bytes, peak + weight_bytes(self.model) + state


def synthetic_batch(cfg: Config, size: tuple[int, int], batch_size: int) -> dict[str, Any]:
    """Noise with labels: ten objects with masks, a label map or a class per image."""
    generator = torch.Generator().manual_seed(0)
    model = cfg.model

    def integers(high: int, *shape: int, **kwargs) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, **kwargs)

    head = model.get('roi_head', model)
    head = next(head[k] for k in ('bbox_head', 'decode_head', 'head') if k in head)
    num_classes = (head[-1] if isinstance(head, list) else head).num_classes
    if cfg.default_scope == 'mmdet':
        from mmdet.testing import demo_mm_inputs

        with_mask = bool(model.get('roi_head', {}).get('mask_head'))
        batch = demo_mm_inputs(batch_size, (3, *size), [10] * batch_size, with_mask=with_mask)
        for sample in batch['data_samples']:
            sample.gt_instances.labels = integers(num_classes, 10)
        return batch
    images = integers(256, batch_size, 3, *size, dtype=torch.uint8)
    if cfg.default_scope == 'mmseg':
        from mmseg.structures import SegDataSample

        samples = [SegDataSample(metainfo=dict(img_shape=size)) for _ in images]
        for sample in samples:
            sample.gt_sem_seg = PixelData(data=integers(num_classes, 1, *size))
        return dict(inputs=list(images), data_samples=samples)
    from mmpretrain.structures import DataSample

    labels = integers(num_classes, batch_size)
    return dict(inputs=images, data_samples=[DataSample().set_gt_label(x) for x in labels])
