import copy
import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from hypothesis import settings
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope, init_default_scope
from mmengine.visualization import Visualizer

# The kernels run on a CPU in Triton's interpreter, if this comes before Triton's first import.
if not torch.cuda.is_available():
    os.environ['TRITON_INTERPRET'] = '1'

# The same cases each time; `make test-all` draws others.
settings.register_profile('derandomized', derandomize=True)
settings.load_profile('derandomized')


def pytest_configure() -> None:
    # A shell's background jobs ignore it, and with them what they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Parameters and BatchNorm statistics as after training.

    A fresh BatchNorm is nearly the identity, and hides most merge bugs.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(m, name, low, high):
        tensor = getattr(m, name, None)
        if tensor is not None:
            noise = torch.rand(tensor.shape, generator=generator)
            tensor.data.copy_(noise * (high - low) + low)

    for m in module.modules():
        uniform(m, 'running_mean', -1, 1)
        uniform(m, 'running_var', 0.1, 3)
        if hasattr(m, 'running_mean') or isinstance(m, nn.LayerNorm):
            uniform(m, 'weight', 0.3, 1.5)
        if hasattr(m, 'running_mean') or isinstance(m, (nn.LayerNorm, nn.Linear)):
            uniform(m, 'bias', -0.5, 0.5)
        if isinstance(getattr(m, 'layer_scale', None), nn.Parameter):
            uniform(m, 'layer_scale', -1, 1)
    return module


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = (actual.double() - expected.double()).abs().max()
    return (error / expected.double().abs().max()).item()


def random_model(cfg):
    """A model in eval mode with PyTorch's random weights.

    Detectors find objects by them, unlike by those that `open_model` initializes.
    """
    from repa_mm.io.configs import dataset_config
    from repa_mm.reparam import finish_schedules_

    init_default_scope(cfg.default_scope)
    model = finish_schedules_(MODELS.build(copy.deepcopy(cfg.model)))
    for name, parameter in model.named_parameters():
        if name.endswith('level_embed'):  # a DETR's is uninitialized memory
            nn.init.normal_(parameter)
    metainfo = dataset_config(cfg, 'test').get('metainfo') if 'test_dataloader' in cfg else None
    model.cfg, model.dataset_meta = cfg, dict(metainfo or {})
    model.eval()
    return model


@pytest.fixture
def randomize():
    return _randomize


@pytest.fixture
def relative_error():
    return _relative_error


@pytest.fixture
def quick_init(monkeypatch):
    """Weights whose values do not matter, but are finite."""
    for name in ('kaiming_uniform_', 'uniform_', 'xavier_uniform_', 'trunc_normal_', 'normal_'):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor.data.zero_())


@pytest.fixture(autouse=True, scope='session')
def _unformatted_configs():
    """The text of a config is right without yapf, too, which takes seconds for each."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ('yapf.yapflib.yapf_api', 'mmengine.config.config'):
            patch.setattr(f'{module}.FormatCode', lambda text, **_: (text, True), raising=False)
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _instances():
    """Forget the default scope that another test has set, its logs and its visualizers.

    Runs of one name that begin in the same second share both.
    """
    for kind in (DefaultScope, MMLogger, Visualizer, *Visualizer.__subclasses__()):
        kind._instance_dict.clear()


@pytest.fixture(scope='session')
def run_tool():
    """Run a tool in this process, from another folder."""

    def run(tool, *arguments, cwd='.'):
        path = str(Path(__file__).parents[1] / f'tools/{tool}.py')
        before, threads = (os.getcwd(), sys.argv), torch.get_num_threads()
        os.chdir(cwd)
        sys.argv = [path, *map(str, arguments)]
        try:
            runpy.run_path(path, run_name='__main__')
        finally:
            os.chdir(before[0])
            sys.argv = before[1]
            torch.set_num_threads(threads)

    return run
