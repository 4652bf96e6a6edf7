"""The forms of a model that are measured against each other."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
from mmengine.config import Config

from repa_mm.benchmark.timing import Recorder
from repa_mm.reparam import CheckpointError, has_deploy_form, has_training_form, reparameterize
from repa_mm.runtime import init_model, load_config, take_no_pretrained

AMP_DTYPES = dict(bf16=torch.bfloat16, fp16=torch.float16)
COMPILE = ('backbone', 'all')
FAIR = 'vanilla, fast parts'


def check_device(device: str, amp: str | None = None) -> torch.device:
    """The device of that name, if it is there and computes in that type.

    Raises:
        ValueError: If it is not, or does not.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'unknown device {device!r}: use cpu, cuda or cuda:1') from error
    if found.type == 'meta':
        raise ValueError("the device 'meta' computes nothing: use cpu or cuda")
    if found.type == 'cuda':
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise ValueError(
                f'there is no device {device!r}: PyTorch sees {count} GPUs; use --device cpu'
            )
    if amp:
        # Which types a CPU's convolutions take depends on PyTorch's version.
        try:
            with torch.no_grad(), torch.autocast(found.type, AMP_DTYPES[amp]):
                conv = nn.Conv2d(3, 8, 3).to(found)
                nn.GELU()(conv(torch.rand(1, 3, 8, 8, device=found)))
        except RuntimeError as error:
            other = 'bf16' if amp == 'fp16' else 'fp16'
            raise ValueError(
                f'--amp {amp} does not run on {device} with '
                f'PyTorch {torch.__version__}; try --amp {other}'
            ) from error
    return found


@torch.no_grad()
def randomize_norms(model: nn.Module) -> None:
    """Give BatchNorms statistics and weights like those after training.

    Fresh ones are nearly the identity: nothing would be left to merge.
    """
    generator = torch.Generator().manual_seed(0)

    def uniform(tensor: torch.Tensor, low: float, high: float) -> None:
        noise = torch.rand(tensor.shape, generator=generator)
        tensor.copy_(noise * (high - low) + low)

    for module in model.modules():
        if getattr(module, 'running_mean', None) is not None:
            uniform(module.running_mean, -0.2, 0.2)
            uniform(module.running_var, 0.5, 1.5)
            if module.weight is not None:
                uniform(module.weight, 0.5, 1.5)
                uniform(module.bias, -0.2, 0.2)


def build_model(cfg: Config, checkpoint: str | None = None, device='cpu') -> nn.Module:
    """A model in eval mode, in the training form if the checkpoint is.

    Without a checkpoint its weights are those that training from scratch
    would begin with, but for the BatchNorms', which are random. A detector
    then finds next to nothing, and not an object at every anchor.

    Raises:
        CheckpointError: If the checkpoint does not fit the model.
    """
    torch.manual_seed(0)
    if not checkpoint:
        cfg = copy.deepcopy(cfg)
        take_no_pretrained(cfg)
    try:
        model = init_model(cfg, checkpoint, device=device)
    except CheckpointError:
        # A merged one fits the deploy form alone; any other fails again.
        model = init_model(cfg, checkpoint, 'deploy', device)
    if not checkpoint:
        logging.disable(logging.INFO)  # of every parameter
        try:
            model.init_weights()
        finally:
            logging.disable(logging.NOTSET)
        randomize_norms(model)
    return model


def build_forms(
    cfg: Config,
    checkpoint: str | None = None,
    baseline: Config | None = None,
    baseline_checkpoint: str | None = None,
    fair: bool = False,
    device='cpu',
    notes: list | None = None,
) -> dict[str, nn.Module]:
    """The forms of a model, by name; the first is the one to compare with.

    Args:
        cfg (Config): Of a RePa model, or of a vanilla one alone.
        checkpoint (str, optional): Its weights. A merged one gives the deploy
            form alone. Defaults to None: random weights.
        baseline (Config, optional): Of its vanilla counterpart.
        baseline_checkpoint (str, optional): The counterpart's weights.
        fair (bool): Measure the counterpart with the fast window attention
            too. Defaults to False.
        device (str | torch.device): Defaults to 'cpu'.
        notes (list, optional): Gets a sentence if that cannot be.

    Returns:
        dict: Of 'vanilla', 'vanilla, fast parts', 'training' and 'deploy'
        those that there are, in eval mode.

    Raises:
        ValueError: If the two configs are of different codebases, or a form
            cannot be built.
        CheckpointError: If a checkpoint does not fit.
    """
    forms = {}
    if baseline is not None:
        if baseline.default_scope != cfg.default_scope:
            raise ValueError(
                f'the baseline is a model of {baseline.default_scope}, the '
                f'config one of {cfg.default_scope}: nothing to compare'
            )
        vanilla = build_model(baseline, baseline_checkpoint, device)
        if _is_repa(vanilla):
            raise ValueError(
                'the baseline has channel-idle FFNs itself: '
                '--baseline takes the config of the vanilla '
                'counterpart'
            )
        forms['vanilla'] = vanilla
    elif fair or baseline_checkpoint:
        raise ValueError('--fair and --baseline-checkpoint need --baseline')
    if fair:
        try:
            forms[FAIR] = _with_fast_parts(forms['vanilla'])
        except (ImportError, ValueError) as error:
            if notes is not None:
                notes.append(
                    f'the baseline is not measured with the fast window attention: {error}'
                )

    model = build_model(cfg, checkpoint, device)
    if not _is_repa(model):
        if forms:
            raise ValueError(
                'the config has no channel-idle FFN: give the '
                'RePa config first and the vanilla one as '
                '--baseline'
            )
        return dict(vanilla=model)
    if has_deploy_form(model):
        forms['deploy'] = model
    else:
        forms['training'] = model
        forms['deploy'] = reparameterize(model)
    return forms


def _is_repa(model: nn.Module) -> bool:
    return has_deploy_form(model) or has_training_form(model)


def _with_fast_parts(vanilla: nn.Module) -> nn.Module:
    """With all that RePa configs have besides their FFNs."""
    from repa_mm.models import fast_window_attention

    model = copy.deepcopy(vanilla)
    fast_window_attention(model)
    if hasattr(model, 'decode_head'):
        from repa_mm.models.heads.uper_head import fast_uper_head

        fast_uper_head(model)
    model.eval()
    return model


def load_configs(config: str, baseline: str | None = None, cfg_options: dict | None = None):
    """The config and the baseline's (or None); options are for the first."""
    return (load_config(config, cfg_options), load_config(baseline) if baseline else None)


@contextmanager
def explained(name: str, shape: Sequence[int]) -> Iterator[None]:
    """Say of errors with which form and which input they came.

    Raises:
        ValueError: Instead of any other error.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(
            f'{name} fails on an input of {"x".join(map(str, shape))} '
            f'({type(error).__name__}: {" ".join(str(error).split())[:300]})'
        ) from error


def networks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The networks of a detector, segmentor or classifier.

    What none of them does, such as NMS, resizing a segmentation or pasting
    masks, is post-processing.

    Returns:
        list: Pairs of 'preprocessing', 'backbone', 'neck' or 'head' and a
        module whose ``forward`` is called at inference.
    """
    names = dict(data_preprocessor='preprocessing', backbone='backbone', neck='neck')
    found = []

    def heads(module: nn.Module) -> None:
        # A RoI head and a list of heads are not called themselves.
        if isinstance(module, nn.ModuleList) or any(
            hasattr(module, f'{kind}_roi_extractor') for kind in ('bbox', 'mask')
        ):
            for child in module.children():
                heads(child)
        else:
            found.append(('head', module))

    for name, child in model.named_children():
        if name in names:
            found.append((names[name], child))
        elif name != 'auxiliary_head':
            heads(child)
    return found


def _to_float(value):
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _to_float(v) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_to_float, value))
    return value


class _CUDAGraphs:
    """A function of one tensor, replayed from a CUDA graph for each shape."""

    # Each holds its own memory; a data set of many sizes would fill the GPU.
    LIMIT = 8

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.graphs: dict = {}

    def __call__(self, x: torch.Tensor):
        key = tuple(x.shape), x.dtype, x.stride()
        if key not in self.graphs:
            if len(self.graphs) == self.LIMIT:
                raise ValueError(
                    '--cuda-graphs records a graph for each input'
                    f' size, and these are more than {self.LIMIT}'
                    ': use --synthetic HxW'
                )
            self.graphs[key] = self._capture(x)
        graph, static, output = self.graphs[key]
        static.copy_(x)
        graph.replay()
        return output

    def _capture(self, x: torch.Tensor):
        static = x.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.function(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.function(static)
        return graph, static, output


@contextmanager
def accelerated(
    model: nn.Module,
    amp: str | None = None,
    compiled: str | None = None,
    dynamic: bool = False,
    channels_last: bool = False,
    cuda_graphs: bool = False,
    recorder: Recorder | None = None,
) -> Iterator[None]:
    """Run the networks of a model in another way, and time them.

    Args:
        model (nn.Module): A detector, segmentor or classifier.
        amp (str, optional): 'bf16' or 'fp16': autocast within the networks;
            post-processing and RoIAlign stay in float32.
        compiled (str, optional): 'backbone', or 'all' for the neck and heads
            too: torch.compile.
        dynamic (bool): Whether compiled networks are to take any size.
        channels_last (bool): Weights and input in channels-last memory format.
        cuda_graphs (bool): Replay the backbone from a CUDA graph.
        recorder (Recorder, optional): Gets a section for each network.
    """
    device = next(model.parameters()).device.type
    replaced = []
    if channels_last:
        model.to(memory_format=torch.channels_last)

    def run(part: str, module: nn.Module) -> Callable:
        function = module.forward
        if part == 'preprocessing':
            return _channels_last(function) if channels_last else function
        extractor = hasattr(module, 'roi_layers')
        if compiled == 'all' and not extractor or compiled and part == 'backbone':
            # The number of proposals changes even if the image's size does
            # not: None becomes dynamic when it has to.
            function = torch.compile(
                function,
                dynamic=dynamic or (None if part == 'head' else False),
                # On a CPU: weights laid out, and cast, once and for all. With
                # sizes that change, Inductor compiles that for minutes.
                options=dict(freezing=True) if device == 'cpu' and not dynamic else None,
            )
        if cuda_graphs and part == 'backbone':
            function = _CUDAGraphs(function)
        if amp:
            function = _autocast(
                function,
                device,
                amp,
                enabled=not extractor,
                to_float=part == 'head',
                cache=not cuda_graphs,
            )
        return function

    try:
        for part, module in networks(model):
            function = run(part, module)
            if recorder:
                function = recorder.wrap(function, part)
            replaced.append((module, module.__dict__.get('forward')))
            # As an attribute of the instance: mmseg calls forward itself,
            # which hooks would not notice.
            module.forward = function
        yield
    finally:
        for module, before in reversed(replaced):
            del module.forward
            if before is not None:
                module.forward = before
        if channels_last:
            model.to(memory_format=torch.contiguous_format)


def _channels_last(preprocess: Callable) -> Callable:

    def run(*args, **kwargs):
        data = preprocess(*args, **kwargs)
        data['inputs'] = data['inputs'].contiguous(memory_format=torch.channels_last)
        return data

    return run


def _autocast(
    function: Callable, device: str, amp: str, enabled: bool, to_float: bool, cache: bool
) -> Callable:

    def run(*args, **kwargs):
        if not enabled:
            args, kwargs = _to_float(args), _to_float(kwargs)
        with torch.autocast(device, AMP_DTYPES[amp], enabled=enabled, cache_enabled=cache):
            result = function(*args, **kwargs)
        return _to_float(result) if to_float else result

    return run
