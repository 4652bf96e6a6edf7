"""Narrowing the FFNs and attention heads of a trained checkpoint, and of its config."""

import copy
import os.path as osp
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.checkpoints import load_checkpoint, save_checkpoint
from repa_mm.config import load_config
from repa_mm.convert.conversion import DEFAULT_PARTS, Conversion, IdleConversion
from repa_mm.convert.conversion_report import BlockReport, ConversionReport, Sizes
from repa_mm.convert.training_form import idle_structure
from repa_mm.faster.tracing import swap_faster_attention_
from repa_mm.features import head_inputs
from repa_mm.files import write_text
from repa_mm.images import cropped
from repa_mm.models.sites import attention_sites, ffn_sites
from repa_mm.opening import deploy_, has_structures, open_model, read_images
from repa_mm.reparam import has_deploy_form
from repa_mm.version import __version__

#: Name of the part of an UperNet's head in a segmentor.
MAPS = 'decode_head.fpn_bottleneck'


def split_images(images: Sequence) -> tuple[list, list]:
    """Split images into those to fit to, and one in nine, spread evenly, to hold out."""
    number = min(max(1, len(images) // 9), len(images) - 1)
    held_out = [int((i + 0.5) * len(images) / number) for i in range(number)]
    to_fit = [image for i, image in enumerate(images) if i not in held_out]
    return to_fit, [images[i] for i in held_out]


class ModelConversion(Conversion):
    """The conversion of a whole model and its config.

    Args:
        model (nn.Module): A detector, segmentor or classifier with ordinary FFNs or in its deploy
            form, with its config in ``cfg``, from :func:`~repa_mm.opening.open_model`. Its
            attention becomes the faster one.
        images (Sequence[dict]): Images to fit to, from :func:`~repa_mm.opening.read_images`. They
            are cropped; multiply-adds are counted on the one of median size.
        *args: As for :class:`Conversion`.
        where (str, optional): As for :class:`Conversion`.

    Raises:
        ValueError: As :class:`Conversion`.
    """

    def __init__(
        self, model: nn.Module, images: Sequence[dict], *args, where: str | None = None
    ) -> None:
        swap_faster_attention_(model)
        by_size = sorted(images, key=lambda data: data['inputs'][0].numel())
        full_size = model.data_preprocessor(by_size[len(images) // 2], False)
        super().__init__(
            model,
            [model.data_preprocessor(cropped(data), False) for data in images],
            *args,
            where=where,
            forward=self._run_model,
            full_size=[full_size],
        )
        self.where = where

    def fit(
        self,
        sizes: Sizes,
        held_out: Sequence[dict] = (),
        progress: Callable[[BlockReport, int], None] | None = None,
    ) -> tuple[nn.Module, ConversionReport]:
        """Fit all parts to sizes.

        Args:
            sizes (dict): As for :meth:`Conversion.fit`.
            held_out (Sequence[dict]): Images to measure the change of the heads' inputs on.
            progress (Callable, optional): As for :func:`~repa_mm.convert_pretrained`.

        Returns:
            tuple: The narrower model, with its config in ``cfg``, and the report.
        """
        MODELS.build(self._config(sizes).model)  # an error should show before the long fit
        preprocess = self.original.data_preprocessor
        batches = [preprocess(cropped(data), False) for data in held_out]
        result, report = super().fit(sizes, batches, progress)
        result.cfg = self._config(report.sizes)
        return result, report

    def _run_model(self, model: nn.Module, data: dict):
        if MAPS in self.parts:
            return model.decode_head(model.extract_feat(data['inputs']))
        return head_inputs(model, data)

    def _config(self, sizes: Sizes) -> Config:
        cfg = copy.deepcopy(self.original.cfg)
        if has_deploy_form(self.original):
            deploy_(cfg.model)
        return converted_config(cfg, self.original, sizes, self.where)


class IdleModelConversion(ModelConversion, IdleConversion):
    """The same with channel-idle FFNs, which the config merges before a test."""

    def _config(self, sizes: Sizes) -> Config:
        cfg, idle_ratio = super()._config({}), self.idle_ratio
        structure = idle_structure(self.original, sizes, idle_ratio, self.where)
        cfg.model = with_structures(cfg.model, structure)
        cfg.merge_from_dict({'default_hooks.reparameterize': dict(type='ReparameterizeHook')})
        return cfg


def convert_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    budget: float | None = None,
    parts: Sequence[str] | None = None,
    where: str | None = None,
    num_images: int = 64,
    images: str | None = None,
    device: str | None = None,
    cfg_options: dict | None = None,
    idle_ratio: float | None = None,
    progress: Callable[[BlockReport, int], None] | None = None,
) -> dict:
    """Narrow FFNs of the backbone and encoder, and attention heads of the backbone, without labels.

    Necks and the heads of detectors stay as they are. Channel-idle FFNs merge first. A config is
    written beside the checkpoint, so that both are ready for tests and training.

    Args:
        config (str): The model's config: a path, or the name of an installed config
            ('mmdet::swin/….py').
        checkpoint (str): The model's checkpoint: a path or a URL.
        out (str): The checkpoint to write, '….pth'. Its config becomes '….py'.
        budget (float, optional): As for :func:`~repa_mm.convert_pretrained`. Defaults to 0.5.
        parts (Sequence[str], optional): As for :func:`~repa_mm.convert_pretrained`. Defaults to
            both.
        where (str, optional): Name of the module whose blocks are converted: 'backbone' or
            'encoder', see :func:`~repa_mm.models.sites.ffn_sites`. Defaults to both.
        num_images (int): Number of images to fit to. One more image for every eight is held out to
            measure the change of the outputs. Defaults to 64.
        images (str, optional): A folder of images. Defaults to the config's training data. The
            images go through the test pipeline.
        device (str, optional): Device of the fit. Defaults to the GPU if there is one.
        cfg_options (dict, optional): Values to override in the config.
        idle_ratio (float, optional): Instead of ``budget`` and ``parts``: make the FFNs
            channel-idle, in their training form, see :func:`~repa_mm.convert.fit_channel_idle`. The
            config merges them before a test.
        progress (Callable, optional): As for :func:`~repa_mm.convert_pretrained`.

    Returns:
        dict: ``report`` (a :class:`~repa_mm.convert.conversion_report.ConversionReport` with the
        differences of the heads' inputs, or of an UperNet's output if its head is narrowed),
        ``images`` and ``held_out`` (numbers of images), and ``config`` (path of the written
        config).

    Raises:
        ValueError: If the output would replace a file that is read; if there is an ``idle_ratio``
            beside ``budget`` or ``parts``; or for the reasons of
            :func:`~repa_mm.convert_pretrained`.
        CheckpointError: If the checkpoint does not fit the config.
        FileNotFoundError: If a file or the data are not there.
    """
    out_config = f'{osp.splitext(out)[0]}.py'
    if len({osp.realpath(path) for path in (config, checkpoint, out, out_config)}) < 4:
        raise ValueError(f'{out!r} or its config {out_config!r} would replace a file that is read')
    if idle_ratio is not None and (budget, parts) != (None, None):
        raise ValueError('an idle ratio is instead of a budget and parts: leave these out')
    cfg = load_config(config, cfg_options)
    model = open_model(cfg, checkpoint, merge=True)  # only the deploy form is worth narrowing
    number = num_images + max(1, num_images // 8)
    to_fit, held_out = split_images(read_images(cfg, 'train', number, images))
    model.to(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    if idle_ratio is None:
        conversion = ModelConversion(model, to_fit, parts or DEFAULT_PARTS, where=where)
        sizes = conversion.sizes(0.5 if budget is None else budget)
    else:
        conversion = IdleModelConversion(model, to_fit, idle_ratio, where=where)
        sizes = conversion.sizes()
    narrow, report = conversion.fit(sizes, held_out, progress)
    # Training starts from the converted weights.
    narrow.cfg.load_from, narrow.cfg.resume = osp.abspath(out), False
    save_model(narrow, checkpoint, out)
    return dict(report=report, images=len(to_fit), held_out=len(held_out), config=out_config)


def save_model(model: nn.Module, original: str, out: str) -> None:
    """Write a converted model and the config in its ``cfg``.

    Args:
        model (nn.Module): The model.
        original (str): Checkpoint of the original model, whose ``meta`` stays.
        out (str): The checkpoint to write, '….pth'. Its config becomes '….py'.
    """
    text = model.cfg.pretty_text
    # MMEngine's inferencers read the config from the checkpoint if they are given weights alone.
    meta = load_checkpoint(original).get('meta') or {}
    meta = dict(meta, repa_mm_version=__version__, cfg=text)
    save_checkpoint(dict(meta=meta, state_dict=weights_to_cpu(model.state_dict())), out)
    write_text(f'{osp.splitext(out)[0]}.py', text)


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
    cfg.pop('work_dir', None)  # has checkpoints of the original model
    map_channels = sizes.get(MAPS)
    sizes = {name: size for name, size in sizes.items() if name != MAPS}
    if map_channels:
        # The model in a Restructured segmentor has the config of the head.
        owner = cfg.model if 'decode_head' in cfg.model else cfg.model.model
        owner.decode_head.update(type='FastUPerHead', map_channels=[*map_channels])
        cfg = with_import(cfg)
    if 'backbone' in cfg.model and all(name.startswith('backbone.') for name in sizes):
        if sizes:
            inside = {name.removeprefix('backbone.'): size for name, size in sizes.items()}
            structure = widths_structure(model.backbone, inside)
            cfg.model.backbone = with_structures(cfg.model.backbone, structure)
    elif sizes:
        cfg.model = with_structures(cfg.model, widths_structure(model, sizes, where))
    return with_import(cfg)


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
