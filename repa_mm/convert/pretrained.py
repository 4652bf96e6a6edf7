"""From a trained checkpoint to one with narrower FFNs, and its config."""

import copy
import inspect
import os.path as osp
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce

import torch
import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS
from mmengine.runner.checkpoint import weights_to_cpu
from torch.utils.data import Dataset

from repa_mm.checkpoints import load_checkpoint, load_original, save_checkpoint
from repa_mm.config import build_model, image_config, load_config
from repa_mm.convert.conversion import BlockReport, convert_pretrained, find_ffns
from repa_mm.convert.distillation import distill_checkpoint
from repa_mm.faster.tracing import swap_faster_attention
from repa_mm.features import differences, has_channels_first, head_inputs, percent, run_batches
from repa_mm.files import replacing
from repa_mm.models.sites import FFNSite, ffn_sites
from repa_mm.models.structures import Widths
from repa_mm.version import __version__


def calibration_images(
    cfg: Config, num_images: int, folder: str | None = None
) -> tuple[Dataset, list[int], list[int]]:
    """Read images as a model gets them when it is tested, spread evenly over what there is.

    Args:
        cfg (Config): Whose test pipeline, and whose (first) training data.
        num_images (int): How many to fit to. One more for each eight of them is held out.
        folder (str, optional): A folder of images to take instead of the training data.

    Returns:
        tuple: The data set, the indices of the images to fit to, and those of the others.
    """
    dataset = DATASETS.build(image_config(cfg, 'train', folder))
    total = min(num_images + max(1, num_images // 8), len(dataset))
    indices = [i * len(dataset) // total for i in range(total)]
    number = min(max(1, total // 9), total - 1)
    held_out = [indices[int((i + 0.5) * total / number)] for i in range(number)]
    return dataset, [i for i in indices if i not in held_out], held_out


def convert_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    keep: float | list[float | None] = 0.375,
    where: str | None = None,
    num_images: int = 64,
    images: str | None = None,
    device: str | None = None,
    cfg_options: dict | None = None,
    distill: int = 0,
    skip_unsupported: bool = False,
    progress: Callable[[BlockReport], None] | None = None,
) -> dict:
    """Narrow the FFNs in backbone and encoder of a trained model, without labels.

    Neck and heads stay as they are. Beside the checkpoint, a config of the same name is written, so
    that both are ready for tests and training. The codebase loads them without this package where
    its config can say the widths of FFNs.

    Args:
        config (str): The model's own config: a path, or the name of an installed one
            ('mmdet::swin/….py').
        checkpoint (str): The model's checkpoint: a path or a URL.
        out (str): The checkpoint to write, '….pth'. The config is '….py'.
        keep (float | list): Share of the FFNs' hidden channels that stays: one for all blocks, or
            one per block, of which None leaves its block as it is. Defaults to 0.375.
        where (str, optional): The module of the model whose blocks are converted: 'backbone' or
            'encoder', see :func:`~repa_mm.models.sites.ffn_sites`. Defaults to both.
        num_images (int): Number of images to calibrate on. One more for each eight of them is
            held out, to measure on it how much the outputs differ. Defaults to 64.
        images (str, optional): A folder of images. Defaults to the config's training data, through
            its test pipeline.
        device (str, optional): Where the fit is made. Defaults to the GPU, if there is one.
        cfg_options (dict, optional): Values to override in the config.
        distill (int): Number of iterations of a distillation afterwards, see
            :mod:`repa_mm.convert.distillation`. Defaults to 0.
        skip_unsupported (bool): Leave blocks as they are whose FFN cannot be narrowed.
            Defaults to False.
        progress (Callable, optional): Called with the report of each block once it is fitted.

    Returns:
        dict: ``report`` (a :class:`~repa_mm.convert.conversion.ConversionReport`, whose differences
        are those of the features that the heads get), ``distilled`` (these differences after a
        distillation, else empty), ``seen`` (whether the distillation learned
        from the held-out images, too: from those of a folder it does not), ``images`` and
        ``held_out`` (their numbers), and ``config`` (the file that was written).

    Raises:
        ValueError: If a file that is read would be replaced, or as of ``convert_pretrained``.
        CheckpointError: If the checkpoint does not fit the config.
    """
    stem = osp.splitext(out)[0]
    out_config = f'{stem}.py'
    if len({osp.realpath(path) for path in (config, checkpoint, out, out_config)}) < 4:
        raise ValueError(f'{out!r} and {out_config!r} must be other files than those that are read')
    cfg = load_config(config, cfg_options)
    model = build_model(cfg)
    loaded = load_checkpoint(checkpoint)
    load_original(model, loaded['state_dict'], checkpoint)
    dataset, chosen, held_out = calibration_images(cfg, num_images, images)
    model.to(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    swap_faster_attention(model)
    # What is wrong with the config is to show before the fit.
    sites, _, widths, _ = find_ffns(model, keep, where, skip_unsupported)
    names = [site.block_name for site in sites]
    MODELS.build(converted_config(cfg, model, names, widths, where, out).model)

    def batches(indices: list[int]) -> list[dict]:
        return [model.data_preprocessor(pseudo_collate([dataset[i]]), False) for i in indices]

    narrow, report = convert_pretrained(
        model, batches(chosen), keep=keep, where=where, forward=head_inputs,
        held_out=batches(held_out), skip_unsupported=skip_unsupported, progress=progress,
    )  # fmt: skip
    widths = {block.name: block.width for block in report.blocks}
    text = converted_config(cfg, model, names, widths, where, out).pretty_text
    text = f'# {osp.basename(config)} with narrower FFNs.\n{text}'
    # MMEngine's inferencers take the config from there where they are given weights alone.
    meta = dict(loaded.get('meta') or {}, repa_mm_version=__version__, cfg=text)
    state_dict = weights_to_cpu(narrow.state_dict())
    save_checkpoint(dict(meta=meta, state_dict=state_dict), out)
    with replacing(out_config) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(text)
    distilled = []
    if distill:
        root = osp.abspath(images) if images else ''
        left_out = [osp.relpath(dataset.paths[i], root) for i in held_out] if images else []
        distill_checkpoint(
            out_config, out, cfg.model, checkpoint, distill, images=images, leave_out=left_out
        )
        student = build_model(load_config(out_config), out).to(next(model.parameters()).device)
        with torch.no_grad():
            before, after = (
                run_batches(partial(head_inputs, m), batches(held_out)) for m in (model, student)
            )
        distilled = differences(before, after, has_channels_first(model))
    return dict(
        report=report,
        distilled=distilled,
        seen=images is None,
        images=len(chosen),
        held_out=len(held_out),
        config=out_config,
    )


def converted_config(
    cfg: Config,
    model: nn.Module,
    names: Sequence[str],
    widths: dict[str, int],
    where: str | None,
    out: str,
) -> Config:
    """Return the config of a converted model.

    Args:
        cfg (Config): That of the original model.
        model (nn.Module): The original model.
        names (Sequence[str]): The names of its known blocks.
        widths (dict): The widths of its FFNs, by the names of the blocks that are converted.
        where (str, optional): As for :func:`convert_checkpoint`.
        out (str): The converted checkpoint, which trainings start from.
    """
    cfg = copy.deepcopy(cfg)
    given = cfg.model.get('backbone')  # not of a Restructured whole model
    for part in (cfg.model, given or {}):
        for key in ('init_cfg', 'pretrained'):  # weights of the original
            part.pop(key, None)
    start = 'backbone.' if given else '\0'
    inside = {name[len(start) :]: w for name, w in widths.items() if name.startswith(start)}
    if inside:
        cfg.model.backbone = backbone_config(cfg.model.backbone, model.backbone, inside)
    others = {name: w for name, w in widths.items() if not name.startswith(start)}
    left = _with_stock_layers(cfg.model, others)
    if left:
        structure = dict(type='Widths', widths=[left.get(name) for name in names], where=where)
        cfg.model = _restructured(cfg.model, structure)
    cfg.load_from, cfg.resume = osp.abspath(out), False
    cfg.pop('work_dir', None)  # the checkpoints there are of the original
    if 'Restructured' in (cfg.model.type, cfg.model.get('backbone', cfg.model).type):
        given = cfg.get('custom_imports') or {}
        imports = given.get('imports') or []
        imports = [imports] if isinstance(imports, str) else list(imports)
        cfg.custom_imports = dict(given, imports=list(dict.fromkeys([*imports, 'repa_mm'])))
    return cfg


def backbone_config(cfg: dict, backbone: nn.Module, widths: dict[str, int]) -> dict:
    """Return a config of a backbone with FFNs of other widths than its own config says.

    It is one of the codebase alone where the arguments of the backbone's class can say the widths.

    Args:
        cfg (dict): Of the original backbone.
        backbone (nn.Module): The backbone, of any widths.
        widths (dict): The new widths, by the names of the blocks that change.
    """
    sites = ffn_sites(backbone)
    structure = Widths([widths.get(site.block_name) for site in sites])
    backbone = copy.deepcopy(backbone)
    structure.put_(backbone)
    shapes = {key: value.shape for key, value in backbone.state_dict().items()}
    for candidate in _stock_configs(cfg, type(backbone), sites, structure):
        try:
            built = MODELS.build(copy.deepcopy(candidate))
        except (TypeError, AssertionError):  # its blocks have no such argument
            continue
        if {key: value.shape for key, value in built.state_dict().items()} == shapes:
            return candidate
    return _restructured(cfg, dict(type='Widths', widths=structure.widths))


def _restructured(cfg: dict, structure: dict) -> ConfigDict:
    if cfg['type'] == 'Restructured':  # converted before
        return ConfigDict(cfg, structures=[*cfg['structures'], structure])
    return ConfigDict(type='Restructured', model=cfg, structures=[structure])


def _with_stock_layers(cfg: ConfigDict, widths: dict[str, int]) -> dict[str, int]:
    """Set the widths of layers that share one config, as in an encoder; return the other widths."""
    groups: dict[str, dict] = {}
    for name, width in widths.items():
        groups.setdefault(name.rpartition('.layers.')[0], {})[name] = width
    left = {}
    for owner, found in groups.items():
        part = reduce(lambda part, key: part.get(key) or {}, owner.split('.'), cfg)
        ffn = (part.get('layer_cfg') or {}).get('ffn_cfg')
        if ffn and len(found) == part.get('num_layers') and len({*found.values()}) == 1:
            ffn.feedforward_channels = next(iter(found.values()))
        else:
            left.update(found)
    return left


def _stock_configs(
    cfg: dict, kind: type, sites: Sequence[FFNSite], structure: Widths
) -> Iterator[dict]:
    """Configs of a codebase's backbone that may give its FFNs the widths of a structure."""
    arguments = inspect.signature(kind).parameters
    if 'mlp_ratio' in arguments and None not in structure.widths:
        # Of MMDetection's and MMSegmentation's Swin, and MMSegmentation's ViT: a whole number.
        dims = [site.parts().fc1.weight.shape[1] for site in sites]
        ratio = structure.widths[0] // dims[0]
        if structure.widths == [ratio * c for c in dims]:
            yield ConfigDict(cfg, mlp_ratio=ratio)
    ffns = [{} if w is None else dict(feedforward_channels=w) for w in structure.widths]
    if 'layer_cfgs' in arguments and not cfg.get('layer_cfgs'):  # MMPretrain's ViTs
        yield ConfigDict(cfg, layer_cfgs=ffns)
    if 'stage_cfgs' in arguments and not cfg.get('stage_cfgs'):  # MMPretrain's Swins
        stages: dict[str, list] = {}
        for site, ffn in zip(sites, ffns):
            stages.setdefault(site.name.split('.')[1], []).append(dict(ffn_cfgs=ffn))
        yield ConfigDict(cfg, stage_cfgs=[dict(block_cfgs=blocks) for blocks in stages.values()])


def result_text(result: dict, out: str) -> str:
    """Describe what :func:`convert_checkpoint` has done, in words and as a table."""
    lines = [
        str(result['report']),
        f'fitted on {result["images"]} images, {result["held_out"]} held out',
    ]
    if result['distilled']:
        seen = ' (the training data, which it learns from, has these images)' * result['seen']
        shares = percent(result['distilled'])
        lines.append(f'after the distillation the outputs differ by {shares} on them{seen}')
    return '\n'.join([*lines, f'wrote {out} and {result["config"]}'])
