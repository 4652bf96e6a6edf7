"""Narrowing the FFNs and attention heads of a trained checkpoint, and of its config."""

import copy
import inspect
import os.path as osp
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.checkpoints import load_checkpoint, save_checkpoint
from repa_mm.config import load_config
from repa_mm.convert.budget import even_sizes
from repa_mm.convert.conversion import (
    PARTS,
    BlockReport,
    ConversionReport,
    Plan,
    Sizes,
    convert,
    spread_budget,
)
from repa_mm.convert.training_form import fit_channel_idle, idle_sizes, idle_structure
from repa_mm.faster.tracing import swap_faster_attention_
from repa_mm.features import head_inputs
from repa_mm.files import write_text
from repa_mm.images import cropped
from repa_mm.models.sites import FFNSite, attention_sites, ffn_sites
from repa_mm.models.structures import Widths
from repa_mm.opening import deploy_, has_structures, open_model, read_images
from repa_mm.reparam import has_deploy_form
from repa_mm.version import __version__


def split_images(images: Sequence) -> tuple[list, list]:
    """Split images into those to fit to, and one in nine, spread evenly, to hold out."""
    number = min(max(1, len(images) // 9), len(images) - 1)
    held_out = [int((i + 0.5) * len(images) / number) for i in range(number)]
    to_fit = [image for i, image in enumerate(images) if i not in held_out]
    return to_fit, [images[i] for i in held_out]


def convert_model(
    model: nn.Module,
    images: Sequence[dict],
    held_out: Sequence[dict],
    choose: Callable[[Plan], Sizes],
    parts: Sequence[str] = PARTS,
    where: str | None = None,
    progress: Callable[[BlockReport, int], None] | None = None,
    idle_ratio: float | None = None,
) -> tuple[nn.Module, ConversionReport]:
    """Narrow a whole model and its config, without labels.

    Args:
        model (nn.Module): A detector, segmentor or classifier with ordinary FFNs or in its deploy
            form, with its config in ``cfg``, from :func:`~repa_mm.opening.open_model`. Its
            attention becomes the faster one.
        images (Sequence[dict]): Images to fit to, from :func:`~repa_mm.opening.read_images`. They
            are cropped; multiply-adds are counted on the one of median size.
        held_out (Sequence[dict]): Images to measure the change of the heads' inputs on.
        choose (Callable): As for :func:`~repa_mm.convert.conversion.convert`.
        parts (Sequence[str]): As for :func:`~repa_mm.convert_pretrained`.
        where (str, optional): As for :func:`~repa_mm.convert.conversion.convert`.
        progress (Callable, optional): As for :func:`~repa_mm.convert.conversion.convert`.
        idle_ratio (float, optional): Make the FFNs channel-idle instead, see
            :func:`~repa_mm.convert.training_form.fit_channel_idle`. ``choose`` is then
            :func:`~repa_mm.convert.training_form.idle_sizes`.

    Returns:
        tuple: The narrower model, with its config in ``cfg``, and the report.

    Raises:
        ValueError: As :func:`~repa_mm.convert.conversion.convert`.
    """
    cfg = copy.deepcopy(model.cfg)
    if has_deploy_form(model):
        deploy_(cfg.model)
    swap_faster_attention_(model)
    by_size = sorted(images, key=lambda data: data['inputs'][0].numel())
    full_size = model.data_preprocessor(by_size[len(images) // 2], False)
    to_fit, to_compare = (
        [model.data_preprocessor(cropped(data), False) for data in some]
        for some in (images, held_out)
    )

    def config(sizes: Sizes) -> Config:
        if idle_ratio is None:
            return converted_config(cfg, model, sizes, where)
        return idle_config(cfg, model, sizes, idle_ratio, where)

    def checked(plan: Plan) -> Sizes:
        # Errors in the config should show before the long fit.
        MODELS.build(config(even_sizes(plan, 0.5, 0.5, 0.5)).model)
        return choose(plan)

    options = dict(
        where=where, forward=head_inputs, held_out=to_compare, full_size=[full_size],
        progress=progress,
    )  # fmt: skip
    if idle_ratio is None:
        narrow, report = convert(model, to_fit, checked, parts, **options)
    else:
        narrow, report = fit_channel_idle(model, to_fit, idle_ratio, choose=checked, **options)
    narrow.cfg = config(report.sizes)
    return narrow, report


def convert_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    budget: float = 0.5,
    parts: Sequence[str] = PARTS,
    where: str | None = None,
    num_images: int = 64,
    images: str | None = None,
    device: str | None = None,
    cfg_options: dict | None = None,
    choose: Callable[[Plan], Sizes] | None = None,
    idle_ratio: float | None = None,
    progress: Callable[[BlockReport, int], None] | None = None,
) -> dict:
    """Narrow FFNs of the backbone and encoder, and attention heads of the backbone, without labels.

    The neck and the detection heads stay as they are. Channel-idle FFNs merge first. A config is
    written beside the checkpoint, so that both are ready for tests and training. MMPretrain loads
    ViTs and Swins with narrower FFNs without this package.

    Args:
        config (str): The model's config: a path, or the name of an installed config
            ('mmdet::swin/….py').
        checkpoint (str): The model's checkpoint: a path or a URL.
        out (str): The checkpoint to write, '….pth'. Its config becomes '….py'.
        budget (float): As for :func:`~repa_mm.convert_pretrained`. Defaults to 0.5.
        parts (Sequence[str]): As for :func:`~repa_mm.convert_pretrained`. Defaults to both.
        where (str, optional): Name of the module whose blocks are converted: 'backbone' or
            'encoder', see :func:`~repa_mm.models.sites.ffn_sites`. Defaults to both.
        num_images (int): Number of images to fit to. One more image for every eight is held out to
            measure the change of the outputs. Defaults to 64.
        images (str, optional): A folder of images. Defaults to the config's training data. The
            images go through the test pipeline.
        device (str, optional): Device of the fit. Defaults to the GPU if there is one.
        cfg_options (dict, optional): Values to override in the config.
        choose (Callable, optional): Chooses the sizes instead of the budget, as for
            :func:`~repa_mm.convert.conversion.convert`.
        idle_ratio (float, optional): Make the FFNs channel-idle instead, in their training form,
            see :func:`~repa_mm.convert.training_form.fit_channel_idle`. The config merges them
            before a test.
        progress (Callable, optional): Called with the report of each part once it is fitted, and
            with the number of parts.

    Returns:
        dict: ``report`` (a :class:`~repa_mm.convert.conversion.ConversionReport` with the
        differences of the heads' inputs), ``images`` and ``held_out`` (numbers of images), and
        ``config`` (path of the written config).

    Raises:
        ValueError: If the output would replace a file that is read, or for the reasons of
            :func:`~repa_mm.convert_pretrained`.
        CheckpointError: If the checkpoint does not fit the config.
        FileNotFoundError: If a file or the data are not there.
    """
    stem = osp.splitext(out)[0]
    out_config = f'{stem}.py'
    if len({osp.realpath(path) for path in (config, checkpoint, out, out_config)}) < 4:
        raise ValueError(f'{out!r} or its config {out_config!r} would replace a file that is read')
    cfg = load_config(config, cfg_options)
    model = open_model(cfg, checkpoint, merge=True)  # only the deploy form is worth narrowing
    number = num_images + max(1, num_images // 8)
    to_fit, held_out = split_images(read_images(cfg, 'train', number, images))
    model.to(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    if choose is None:
        choose = partial(spread_budget, budget=budget) if idle_ratio is None else idle_sizes
    narrow, report = convert_model(
        model, to_fit, held_out, choose, parts, where, progress, idle_ratio
    )
    # Training starts from the converted weights.
    narrow.cfg.load_from, narrow.cfg.resume = osp.abspath(out), False
    layers = 'narrower layers' if idle_ratio is None else 'channel-idle FFNs'
    text = f'# {osp.basename(config)} with {layers}.\n{narrow.cfg.pretty_text}'
    # MMEngine's inferencers read the config from the checkpoint if they are given weights alone.
    meta = load_checkpoint(checkpoint).get('meta') or {}
    meta = dict(meta, repa_mm_version=__version__, cfg=text)
    state_dict = weights_to_cpu(narrow.state_dict())
    save_checkpoint(dict(meta=meta, state_dict=state_dict), out)
    write_text(out_config, text)
    return dict(report=report, images=len(to_fit), held_out=len(held_out), config=out_config)


def converted_config(
    cfg: Config, model: nn.Module, sizes: Sizes, where: str | None = None
) -> Config:
    """Return the config of a converted model.

    Args:
        cfg (Config): Config of the original model.
        model (nn.Module): The original model.
        sizes (dict): New sizes of the converted parts, by name.
        where (str, optional): As for :func:`convert_checkpoint`.
    """
    cfg = copy.deepcopy(cfg)
    _without_pretraining_(cfg.model)
    given = cfg.model.get('backbone')  # None if the whole model is Restructured
    start = 'backbone.' if given else '\0'
    inside = {name[len(start) :]: x for name, x in sizes.items() if name.startswith(start)}
    if inside:
        cfg.model.backbone = backbone_config(cfg.model.backbone, model.backbone, inside)
    others = {name: x for name, x in sizes.items() if not name.startswith(start)}
    if others:
        cfg.model = with_structures(cfg.model, widths_structure(model, others, where))
    cfg.pop('work_dir', None)  # has checkpoints of the original model
    if 'Restructured' in (cfg.model.type, cfg.model.get('backbone', cfg.model).type):
        with_import(cfg)
    return cfg


def _without_pretraining_(cfg: dict) -> None:
    """Let a model start without files of weights, in place: training starts from a checkpoint."""
    if str(cfg.get('type')).endswith('TIMMBackbone'):
        cfg['pretrained'] = False  # MMSegmentation's default is True
    elif 'pretrained' in cfg:
        cfg['pretrained'] = None
    inits = cfg.get('init_cfg') or []
    inits = inits if isinstance(inits, list) else [inits]
    if any(init.get('type') == 'Pretrained' for init in inits):
        del cfg['init_cfg']
    for value in cfg.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                _without_pretraining_(part)


def idle_config(
    cfg: Config, model: nn.Module, sizes: Sizes, idle_ratio: float, where: str | None
) -> Config:
    """Return the config of a model with fitted channel-idle FFNs, which merge before a test.

    Args:
        cfg (Config): Config of the original model.
        model (nn.Module): The original model.
        sizes (dict): New sizes of the channel-idle FFNs, by name of their blocks.
        idle_ratio (float): As for :func:`~repa_mm.convert.training_form.fit_channel_idle`.
        where (str, optional): As for :func:`convert_checkpoint`.
    """
    cfg = converted_config(cfg, model, {})
    cfg.model = with_structures(cfg.model, idle_structure(model, sizes, idle_ratio, where))
    cfg.merge_from_dict({'default_hooks.reparameterize': dict(type='ReparameterizeHook')})
    return with_import(cfg)


def widths_structure(model: nn.Module, sizes: Sizes, where: str | None = None) -> dict:
    """Return the config of the structure that gives the parts of a model their new sizes."""
    widths = [sizes.get(site.block_name, (None,))[0] for site in ffn_sites(model, where)]
    heads = [sizes.get(site.name) for site in attention_sites(model, where or '')]
    structure = dict(type='Widths')
    if any(widths):
        structure['widths'] = widths
    if any(heads):
        structure['heads'] = heads
    return dict(structure, where=where) if where else structure


def backbone_config(cfg: dict, backbone: nn.Module, sizes: Sizes) -> dict:
    """Return the config of a backbone whose parts get new sizes.

    It is a config of the codebase alone if the backbone's class has arguments for each block, as
    MMPretrain's ViTs and Swins have for FFNs, else one of ``Restructured``.

    Args:
        cfg (dict): Config of the original backbone.
        backbone (nn.Module): The backbone, of any sizes.
        sizes (dict): The new sizes, by the names of the parts that change.
    """
    structure = widths_structure(backbone, sizes)
    if 'heads' not in structure:
        sites, widths = ffn_sites(backbone), structure['widths']
        backbone = copy.deepcopy(backbone)
        Widths(widths).put_(backbone)
        shapes = {key: value.shape for key, value in backbone.state_dict().items()}
        for candidate in _stock_configs(cfg, type(backbone), sites, widths):
            try:
                built = MODELS.build(copy.deepcopy(candidate))
            except (TypeError, AssertionError):  # the blocks of this class have no such argument
                continue
            if {key: value.shape for key, value in built.state_dict().items()} == shapes:
                return candidate
    return with_structures(cfg, structure)


def with_structures(cfg: dict, *structures: dict) -> ConfigDict:
    """Return the config of a model with more structures; without any, it has faster attention."""
    if cfg['type'] == 'Restructured' or has_structures(cfg):
        return ConfigDict(cfg, structures=[*cfg.get('structures', []), *structures])
    return ConfigDict(type='Restructured', model=cfg, structures=[*structures])


def with_import(cfg: Config) -> Config:
    """Let a config import this package, in place, and return the config."""
    given = cfg.get('custom_imports') or {}
    imports = given.get('imports') or []
    imports = [imports] if isinstance(imports, str) else list(imports)
    cfg.custom_imports = dict(given, imports=list(dict.fromkeys([*imports, 'repa_mm'])))
    return cfg


def _stock_configs(
    cfg: dict, kind: type, sites: Sequence[FFNSite], widths: Sequence[int | None]
) -> Iterator[dict]:
    """Yield configs of the codebase's backbone that may give its FFNs these widths."""
    arguments = inspect.signature(kind).parameters
    ffns = [{} if w is None else dict(feedforward_channels=w) for w in widths]
    if 'layer_cfgs' in arguments and not cfg.get('layer_cfgs'):  # MMPretrain's ViTs
        yield ConfigDict(cfg, layer_cfgs=ffns)
    if 'stage_cfgs' in arguments and not cfg.get('stage_cfgs'):  # MMPretrain's Swins
        stages: dict[str, list] = {}
        for site, ffn in zip(sites, ffns):
            stages.setdefault(site.name.split('.')[1], []).append(dict(ffn_cfgs=ffn))
        yield ConfigDict(cfg, stage_cfgs=[dict(block_cfgs=blocks) for blocks in stages.values()])


def result_text(result: dict, out: str) -> str:
    """Format the result of :func:`convert_checkpoint` as a table and text."""
    return (
        f'{result["report"]}\n'
        f'fitted on {result["images"]} images, {result["held_out"]} held out\n'
        f'wrote {out} and {result["config"]}'
    )
