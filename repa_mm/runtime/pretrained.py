"""From a trained checkpoint of a vanilla model to one with channel-idle FFNs."""

import os
import os.path as osp
import tempfile
from collections.abc import Callable, Iterator

import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import DATASETS, MODELS
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.checkpoints import load_anywhere, load_weights, save_checkpoint
from repa_mm.datasets.checks import check_image
from repa_mm.engine.complexity import count_macs
from repa_mm.files import check_output, replacing
from repa_mm.models import convert_pretrained, fast_window_attention
from repa_mm.models.surgery.idle import find_blocks
from repa_mm.reparam import reparameterize
from repa_mm.runtime.config import dataset_config, load_config, take_no_pretrained
from repa_mm.runtime.data import check_data
from repa_mm.version import __version__

IMAGES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


def load_any_config(config: str, cfg_options: dict | None = None) -> Config:
    """Read a config by its path, or an installed one by its name ('mmdet::swin/….py').

    Raises:
        FileNotFoundError, ValueError, ImportError: As
            :func:`~repa_mm.runtime.config.load_config`.
    """
    if '::' not in config:
        return load_config(config, cfg_options)
    with tempfile.TemporaryDirectory() as folder:
        path = osp.join(folder, 'installed.py')
        with open(path, 'w') as file:
            file.write(f'_base_ = {config!r}\n')
        return load_config(path, cfg_options)


class CalibrationImages:
    """Images of a data set, or of a folder, as a model gets them when it is tested.

    Iterating gives batches of one image, the same each time.

    Args:
        cfg (Config): Whose test pipeline, and whose training data.
        num_images (int): How many images, spread evenly over what there is.
        folder (str, optional): A folder of images to take instead of the training data.

    Raises:
        FileNotFoundError: If there is no folder, no image, or no data set.
        ValueError: If the config has no data set.
    """

    def __init__(self, cfg: Config, num_images: int, folder: str | None = None) -> None:
        steps = dataset_config(cfg, 'test').pipeline
        self.dataset = None
        if folder is None:
            check_data(cfg, 'train')
            source = dataset_config(cfg, 'train').copy()
            source.pipeline = steps
            # All images that there are, with or without objects, in the order of the file.
            source.pop('filter_cfg', None)
            self.dataset = DATASETS.build(source)
            available = len(self.dataset)
        else:
            if not osp.isdir(folder):
                raise FileNotFoundError(f'no folder of images at {folder!r}')
            self.paths = sorted(
                osp.join(root, name)
                for root, _, names in os.walk(folder)
                for name in names
                if name.lower().endswith(IMAGES)
            )
            self.pipeline = Compose([s for s in steps if 'Annotations' not in s['type']])
            available = len(self.paths)
        if not available:
            raise FileNotFoundError(
                f'no image to calibrate on: {folder or "the training data"} is empty'
            )
        num_images = min(num_images, available)
        self.indices = [i * available // num_images for i in range(num_images)]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[dict]:
        for index in self.indices:
            if self.dataset is not None:
                item = self.dataset[index]
            else:
                path = self.paths[index]
                check_image(path)
                item = self.pipeline(dict(img_path=osp.abspath(path), img_id=index))
            yield pseudo_collate([item])


def convert_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    idle_ratio: float | list[float] = 0.75,
    norm: str = 'keep',
    num_images: int = 64,
    images: str | None = None,
    device: str | None = None,
    cfg_options: dict | None = None,
    progress: Callable | None = None,
    **options,
) -> dict:
    """Give the backbone of a trained model channel-idle FFNs, without training or labels.

    Neck and heads stay as they are. Beside the checkpoint, a config of the same name is written
    that inherits ``config``, so that both are ready for training, testing and merging.

    Args:
        config (str): The model's own config: a path, or the name of an installed one
            ('mmdet::swin/….py').
        checkpoint (str): The model's checkpoint: a path or a URL.
        out (str): The checkpoint to write, '….pth'. The config is '….py'.
        idle_ratio (float | list[float]): Share of FFN hidden channels that skip the activation.
            Defaults to 0.75.
        norm (str): 'keep' leaves the LayerNorms before the FFNs; 'fold' merges everything.
            Defaults to 'keep'.
        num_images (int): Number of images to calibrate on. One more for each eight of them is
            held out, to measure on it how much the outputs differ. Defaults to 64.
        images (str, optional): A folder of images. Defaults to the config's training data, through
            its test pipeline.
        device (str, optional): Defaults to the GPU, if there is one.
        cfg_options (dict, optional): Values to override in the config.
        progress (Callable, optional): Called with the report of each block.
        **options: Others of :func:`~repa_mm.convert_pretrained`.

    Returns:
        dict: ``report`` (a :class:`~repa_mm.models.surgery.pretrained.ConversionReport`),
        ``differences`` (mean square difference of each output of the backbone on the held-out
        images, relative to the variance of that output), ``macs`` (of the backbone before and
        after, at 224x224), ``images`` and ``held_out`` (their numbers) and ``config`` (the file
        that was written).

    Raises:
        FileNotFoundError: If the config, checkpoint or images are missing.
        ValueError: If there is nothing to convert, or an option is out of range.
        CheckpointError: If the checkpoint does not fit the config.
        OSError: If ``out`` cannot be written.
    """
    if num_images < 1:
        raise ValueError(f'{num_images} images are none to calibrate on')
    out_config = osp.splitext(out)[0] + '.py'
    for path in (out, out_config):
        check_output(path, config, checkpoint)
    if out == out_config:
        raise ValueError(f'the output {out!r} is to be a checkpoint: name it ….pth')
    cfg = load_any_config(config, cfg_options)
    original = cfg.model.get('backbone')
    if not isinstance(original, dict):
        raise ValueError(f"'model' of {config!r} has no 'backbone'")
    original = original.copy()
    loaded = load_anywhere(checkpoint)
    take_no_pretrained(cfg)
    model = MODELS.build(cfg.model)
    load_weights(model, loaded['state_dict'], checkpoint, exact=False)
    num_held_out = max(1, num_images // 8)
    source = CalibrationImages(cfg, num_images + num_held_out, images)
    held_out = _take_every(source, num_held_out)

    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    model.to(device).eval()
    backbone = model.backbone
    try:
        fast_window_attention(backbone)
    except ValueError:  # it has no windows
        pass

    @torch.no_grad()
    def features(batch, backbone=backbone):
        return backbone(model.data_preprocessor(batch, False)['inputs'])

    before = [features(batch) for batch in held_out]
    converted, report = convert_pretrained(
        backbone, source, idle_ratio, norm, forward=features, progress=progress, **options
    )
    converted.eval()  # on a line of its own: that of some backbones returns None
    after = [features(batch, converted) for batch in held_out]
    macs = [count_macs(b, (3, 224, 224)) for b in (backbone, reparameterize(converted))]
    model.backbone = converted.cpu()
    meta = loaded.get('meta')
    meta = dict(meta if isinstance(meta, dict) else {}, repa_mm_version=__version__)
    text = _config_text(config, out, cfg, original, _ratios(backbone, report), norm)
    save_checkpoint(dict(meta=meta, state_dict=weights_to_cpu(model.state_dict())), out)
    with replacing(out_config) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(text)
    return dict(
        report=report,
        differences=_differences(before, after),
        macs=macs,
        images=len(source),
        held_out=len(held_out),
        config=out_config,
    )


def _take_every(source: CalibrationImages, number: int) -> list:
    """Take some images out of a source, spread evenly, as a list of batches."""
    number = min(number, len(source) - 1)
    if number < 1:
        return []
    every = len(source.indices) / number
    chosen = {int((i + 0.5) * every) for i in range(number)}
    rest = [index for i, index in enumerate(source.indices) if i not in chosen]
    source.indices = [index for i, index in enumerate(source.indices) if i in chosen]
    batches = list(source)
    source.indices = rest
    return batches


def _differences(before: list, after: list) -> list[float]:
    """The mean square difference of each output over all images, relative to its variance."""
    result = []
    for pair in zip(zip(*before), zip(*after)):
        error = variance = 0.0
        for a, b in zip(*pair):
            error += float((a - b).double().square().sum())
            centred = a - a.mean(dim=tuple(i for i in range(a.ndim) if i != 1), keepdim=True)
            variance += float(centred.double().square().sum())
        result.append(error / max(variance, 1e-30))
    return result


def _ratios(backbone, report) -> list[float] | float:
    """The idle ratio of each block, in the order of the backbone's modules; one if all agree."""
    fitted = {block.name: block.idle_ratio for block in report.blocks}
    ratios = [fitted[name] for name in find_blocks(backbone) if name in fitted]
    return ratios[0] if len(set(ratios)) == 1 else ratios


def _config_text(
    config: str, out: str, cfg: Config, original: dict, ratios: list, norm: str
) -> str:
    """The config of the converted model, which inherits that of the original."""
    folder = osp.dirname(osp.realpath(out))
    base = config if '::' in config else osp.relpath(osp.realpath(config), folder)
    imports = list((cfg.get('custom_imports') or {}).get('imports') or [])
    hooks = [h for h in cfg.get('custom_hooks') or [] if h.get('type') != 'ReparameterizeHook']
    backbone = dict(
        _delete_=True,
        type='IdleChannels',
        idle_ratio=ratios,
        norm_cfg=dict(type='keep' if norm == 'keep' else 'BN'),
        norm_eval=norm == 'fold',
        backbone=_plain(original),
    )
    lines = Config(
        dict(
            custom_imports=dict(
                imports=[*(i for i in imports if i != 'repa_mm'), 'repa_mm'],
                allow_failed_imports=False,
            ),
            custom_hooks=_plain([*hooks, dict(type='ReparameterizeHook')]),
            load_from=osp.realpath(out),
            model=dict(backbone=backbone),
        )
    )
    return (
        f'# {osp.basename(config)} with channel-idle FFNs, by tools/convert_pretrained.py.\n'
        f'# Its weights are in {osp.basename(out)}.\n'
        f'_base_ = {base!r}\n\n{lines.pretty_text}'
    )


def _plain(value):
    """Config values as ordinary dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value
