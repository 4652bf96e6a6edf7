"""A small model and data for tests through the real Runner."""

import copy
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from mmengine.runner import Runner
from torch.utils.data import Dataset

from repa_mm.reparam import ChannelIdleFFN, MergedFFN


def step(module, x, *args):
    """Output, gradients and buffers of a step of training of a copy of a module, by name."""
    module, x = copy.deepcopy(module), x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    return results(module, module(x, *args), x)


def results(module, y, x):
    """What :func:`step` returns."""
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.arange(y.numel(), dtype=torch.float64).sin().to(y).view(y.shape))
    found = {'y': y.detach(), 'x': x.grad}
    found.update((k, p.grad) for k, p in module.named_parameters() if p.grad is not None)
    return {**found, **dict(module.named_buffers())}


@MODELS.register_module()
class ToyClassifier(BaseModel):
    def __init__(self, deploy=False):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4),
            nn.Flatten(2),
            Transpose(),
            ChannelIdleFFN(8, 32),
            ChannelIdleFFN(8, 32, 0.5),
        )
        self.head = nn.Linear(8, 2)
        if deploy:
            for m in self.backbone:
                if isinstance(m, ChannelIdleFFN):
                    m.switch_to_deploy()

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(torch.stack(inputs)).mean(1))
        if mode == 'loss':
            labels = torch.as_tensor(labels)
            return dict(loss=nn.functional.cross_entropy(logits, labels))
        return list(logits)


class Adapter(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Transpose(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


@DATASETS.register_module()
class ToyData(Dataset):
    metainfo = dict(classes=('dark', 'light'))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
        return dict(inputs=image + index % 2, labels=index % 2)


@METRICS.register_module()
class KeepLogits(BaseMetric):
    """Reports nothing, and keeps what was predicted last."""

    logits = None

    def process(self, data_batch, data_samples):
        self.results.extend(x.detach().clone() for x in data_samples)

    def compute_metrics(self, results):
        KeepLogits.logits = torch.stack(results)
        return dict(mean=KeepLogits.logits.mean().item())


class Spy(Hook):
    """Notes which form is used where."""

    priority = 'LOWEST'

    def __init__(self):
        self.forms = []

    def note(self, when, runner):
        merged = any(isinstance(m, MergedFFN) for m in runner.model.modules())
        self.forms.append((when, 'deploy' if merged else 'training'))

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.note('train', runner)

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.note('val', runner)

    def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.note('test', runner)

    def before_save_checkpoint(self, runner, checkpoint):
        self.note('save', runner)


def make_runner(work_dir, hooks=(), model=None, **kwargs):
    data = dict(
        batch_size=4,
        dataset=ToyData(),
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='pseudo_collate'),
    )
    cfg = dict(
        model=model or dict(type='ToyClassifier'),
        work_dir=str(work_dir),
        train_dataloader=data,
        val_dataloader=data,
        test_dataloader=data,
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        val_cfg=dict(),
        test_cfg=dict(),
        val_evaluator=dict(type='KeepLogits'),
        test_evaluator=dict(type='KeepLogits'),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        custom_hooks=list(hooks),
        experiment_name=f'toy_{id(hooks)}_{torch.rand(1).item()}',
        log_level='WARNING',
        randomness=dict(seed=0),
    )
    cfg.update(kwargs)
    return Runner(**cfg)


@pytest.fixture
def distributed(tmp_path, monkeypatch):
    """Options of a Runner with DistributedDataParallel, in a group of this process alone."""
    for name, value in (('LOCAL_RANK', '0'), ('OMP_NUM_THREADS', '1'), ('MKL_NUM_THREADS', '1')):
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group('gloo', f'file://{tmp_path}/store', rank=0, world_size=1)
    yield dict(launcher='pytorch', cfg=dict(model_wrapper_cfg=dict(device_ids=None)))
    torch.distributed.destroy_process_group()


def run_in_two_processes(script, folder):
    """Run a script in two processes of a gloo group, whose `rank` it has."""
    path = folder / 'run.py'
    path.write_text(f'{BEGIN}{script}{END}')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    root = os.path.dirname(os.path.dirname(__file__))
    env = dict(os.environ, PYTHONPATH=root, OMP_NUM_THREADS='1')
    env.update(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    processes = []
    try:
        for rank in '01':
            with open(folder / f'{rank}.txt', 'w') as file:
                command = [sys.executable, str(path)]
                options = dict(env=dict(env, RANK=rank), stdout=file, stderr=file)
                processes.append(subprocess.Popen(command, **options))
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], ''.join((folder / f'{rank}.txt').read_text()[-3000:] for rank in '01')


BEGIN = """
import os, sys, torch
torch.distributed.init_process_group('gloo')
rank = torch.distributed.get_rank()
"""
# Without the interpreter's own end, in which PyTorch aborts every other process on gloo.
END = """
torch.distributed.barrier()
os._exit(0)
"""
