"""Narrowing the FFNs and attention heads of a trained checkpoint, and of its config."""

import copy
import inspect
import os.path as osp
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce

import torch
import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import weights_to_cpu
from rich.progress import track as rich_track
from torch.utils.data import Dataset

from repa_mm.checkpoints import load_checkpoint, load_original, load_weights, save_checkpoint
from repa_mm.config import build_images, build_model, load_config
from repa_mm.convert.conversion import BlockReport, Keep, convert_pretrained, plan_conversion
from repa_mm.datasets.cropping import MAX_SIZE, cropped
from repa_mm.faster.tracing import swap_faster_attention_
from repa_mm.features import head_inputs
from repa_mm.files import write_text
from repa_mm.models.sites import FFNSite, attention_sites, ffn_sites
from repa_mm.models.structures import Widths
from repa_mm.opening import deploy_, has_structures
from repa_mm.reparam import Form, has_deploy_form, outermost, reparameterize_
from repa_mm.version import __version__


def calibration_images(
    cfg: Config, num_images: int, folder: str | None = None
) -> tuple[Dataset, list[int], list[int]]:
    """Choose images of a data set, spread evenly, to fit to and to hold out.

    The images go through the test pipeline.

    Args:
        cfg (Config): Config with the test pipeline and the (first) training data set.
        num_images (int): Number of images to fit to. One more image for every eight is held out.
        folder (str, optional): A folder of images to use instead of the training data.

    Returns:
        tuple: The data set, the indices of the images to fit to, and the indices of the held-out
        images.
    """
    dataset = build_images(cfg, 'train', folder)
    total = min(num_images + max(1, num_images // 8), len(dataset))
    indices = [i * len(dataset) // total for i in range(total)]
    number = min(max(1, total // 9), total - 1)
    held_out = [indices[int((i + 0.5) * total / number)] for i in range(number)]
    return dataset, [i for i in indices if i not in held_out], held_out


def convert_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    keep: Keep = 0.375,
    qk_keep: Keep | str = 1.0,
    v_keep: Keep | str = 1.0,
    budget: float | None = None,
    where: str | None = None,
    num_images: int = 64,
    images: str | None = None,
    device: str | None = None,
    cfg_options: dict | None = None,
    skip_unsupported: bool = False,
    progress: Callable[[BlockReport, int], None] | None = None,
) -> dict:
    """Narrow FFNs of the backbone and encoder, and attention heads of the backbone, without labels.

    The neck and the detection heads stay as they are. Channel-idle FFNs merge first. A config is
    written beside the checkpoint, so that both are ready for tests and training. The codebase loads
    them without this package if its config can express the widths of the FFNs.

    Args:
        config (str): The model's config: a path, or the name of an installed config
            ('mmdet::swin/….py').
        checkpoint (str): The model's checkpoint: a path or a URL.
        out (str): The checkpoint to write, '….pth'. Its config becomes '….py'.
        keep (float | list): Share of the FFNs' hidden channels that stays: one for all blocks, or
            one per block, where None leaves the block as it is. Defaults to 0.375.
        qk_keep (float | list | str): As for :func:`~repa_mm.convert_pretrained`.
        v_keep (float | list | str): As for :func:`~repa_mm.convert_pretrained`.
        budget (float, optional): As for :func:`~repa_mm.convert_pretrained`.
        where (str, optional): Name of the module whose blocks are converted: 'backbone' or
            'encoder', see :func:`~repa_mm.models.sites.ffn_sites`. Defaults to both.
        num_images (int): Number of images to fit to. One more image for every eight is held out to
            measure the change of the outputs. Defaults to 64.
        images (str, optional): A folder of images. Defaults to the config's training data. The
            images go through the test pipeline.
        device (str, optional): Device of the fit. Defaults to the GPU if there is one.
        cfg_options (dict, optional): Values to override in the config.
        skip_unsupported (bool): Skip blocks whose FFN cannot be narrowed. Defaults to False.
        progress (Callable, optional): Called with the report of each part once it is fitted, and
            with the number of parts. With it, a bar shows how many images are prepared.

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
    model = build_model(cfg)
    loaded = load_checkpoint(checkpoint)
    if any(outermost(model, Form)):  # only the deploy form is worth narrowing
        load_weights(model, loaded['state_dict'], checkpoint)
        if not has_deploy_form(model):
            reparameterize_(model)
        deploy_(cfg.model)
    else:
        load_original(model, loaded['state_dict'], checkpoint)
    meta = loaded.get('meta') or {}
    del loaded  # as large as the model
    dataset, chosen, held_out = calibration_images(cfg, num_images, images)
    model.to(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    swap_faster_attention_(model)
    # Errors in the config should show before the long fit.
    shares = dict(keep=keep, qk_keep=qk_keep, v_keep=v_keep)
    planned = shares
    if budget is not None:  # any sizes: the fit decides
        heads = 0.5 if attention_sites(model, where or '') else 1.0
        planned = dict(keep=1.0, qk_keep=heads, v_keep=heads)
    skip = skip_unsupported or budget is not None
    plan = plan_conversion(copy.deepcopy(model), where=where, skip_unsupported=skip, **planned)
    sizes = plan.sizes
    del plan  # which has a copy of the model
    MODELS.build(converted_config(cfg, model, sizes, where, out).model)
    track = partial(rich_track, description='images') if progress else list

    pixels = {}

    def batch(index: int, size: int | None = None) -> dict:
        data = pseudo_collate([dataset[index]])
        pixels[index] = data['inputs'][0].numel()
        return model.data_preprocessor(cropped(data, size) if size else data, False)

    def batches(indices: list[int]) -> list[dict]:
        return [batch(i, MAX_SIZE) for i in track(indices)]

    to_fit, to_compare = batches(chosen), batches(held_out)
    typical = sorted(chosen, key=pixels.__getitem__)[len(chosen) // 2]
    narrow, report = convert_pretrained(
        model, to_fit, **shares, budget=budget, where=where,
        forward=head_inputs, held_out=to_compare, full_size=[batch(typical)],
        skip_unsupported=skip_unsupported, progress=progress,
    )  # fmt: skip
    text = converted_config(cfg, model, report.sizes, where, out).pretty_text
    text = f'# {osp.basename(config)} with narrower layers.\n{text}'
    # MMEngine's inferencers read the config from the checkpoint if they are given weights alone.
    meta = dict(meta, repa_mm_version=__version__, cfg=text)
    state_dict = weights_to_cpu(narrow.state_dict())
    save_checkpoint(dict(meta=meta, state_dict=state_dict), out)
    write_text(out_config, text)
    return dict(report=report, images=len(chosen), held_out=len(held_out), config=out_config)


def converted_config(
    cfg: Config, model: nn.Module, sizes: dict[str, tuple], where: str | None, out: str
) -> Config:
    """Return the config of a converted model.

    Args:
        cfg (Config): Config of the original model.
        model (nn.Module): The original model.
        sizes (dict): New sizes of the converted parts, by name, see
            :class:`~repa_mm.convert.conversion.Plan`.
        where (str, optional): As for :func:`convert_checkpoint`.
        out (str): Path of the converted checkpoint, from which training starts.
    """
    cfg = copy.deepcopy(cfg)
    _without_pretraining_(cfg.model)
    given = cfg.model.get('backbone')  # None if the whole model is Restructured
    start = 'backbone.' if given else '\0'
    inside = {name[len(start) :]: x for name, x in sizes.items() if name.startswith(start)}
    if inside:
        cfg.model.backbone = backbone_config(cfg.model.backbone, model.backbone, inside)
    others = {name: x for name, x in sizes.items() if not name.startswith(start)}
    left = _with_stock_layers(cfg.model, others)
    if left:
        cfg.model = restructured(cfg.model, widths_structure(model, left, where))
    cfg.load_from, cfg.resume = osp.abspath(out), False
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


def widths_structure(model: nn.Module, sizes: dict[str, tuple], where: str | None = None) -> dict:
    """Return the config of the structure that gives the parts of a model their new sizes."""
    widths = [sizes.get(site.block_name, (None,))[0] for site in ffn_sites(model, where)]
    heads = [sizes.get(site.name) for site in attention_sites(model, where or '')]
    structure = dict(type='Widths')
    if any(widths):
        structure['widths'] = widths
    if any(heads):
        structure['heads'] = heads
    return dict(structure, where=where) if where else structure


def backbone_config(cfg: dict, backbone: nn.Module, sizes: dict[str, tuple]) -> dict:
    """Return the config of a backbone whose parts get new sizes.

    It is a config of the codebase alone if the arguments of the backbone's class can express the
    sizes, else one of ``Restructured``.

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
    return restructured(cfg, structure)


def restructured(cfg: dict, *structures: dict) -> ConfigDict:
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


def _with_stock_layers(cfg: ConfigDict, sizes: dict[str, tuple]) -> dict[str, tuple]:
    """Set the widths of layers that share a config, as in encoders; return the other sizes."""
    groups: dict[str, dict] = {}
    for name, size in sizes.items():
        groups.setdefault(name.rpartition('.layers.')[0], {})[name] = size
    left = {}
    for owner, found in groups.items():
        part = reduce(lambda part, key: part.get(key) or {}, owner.split('.'), cfg)
        ffn = (part.get('layer_cfg') or {}).get('ffn_cfg')
        if ffn and len(found) == part.get('num_layers') and len({*found.values()}) == 1:
            (ffn.feedforward_channels,) = next(iter(found.values()))
        else:
            left.update(found)
    return left


def _stock_configs(
    cfg: dict, kind: type, sites: Sequence[FFNSite], widths: Sequence[int | None]
) -> Iterator[dict]:
    """Yield configs of the codebase's backbone that may give its FFNs these widths."""
    arguments = inspect.signature(kind).parameters
    if 'mlp_ratio' in arguments and None not in widths:
        # In MMDetection's and MMSegmentation's Swin and MMSegmentation's ViT, an integer.
        dims = [site.modules().fc1.weight.shape[1] for site in sites]
        ratio = widths[0] // dims[0]
        if widths == [ratio * c for c in dims]:
            yield ConfigDict(cfg, mlp_ratio=ratio)
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
