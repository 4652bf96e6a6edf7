"""From a trained checkpoint of a vanilla model to one with channel-idle FFNs."""

import copy
import os
import os.path as osp
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS
from mmengine.runner.checkpoint import weights_to_cpu
from torch.utils.data import ConcatDataset

from repa_mm.datasets.checks import leaves
from repa_mm.datasets.folder import ImageFolder
from repa_mm.engine.complexity import count_macs, image_size
from repa_mm.files import check_output, replacing
from repa_mm.fit.conversion import (
    ConversionReport,
    convert_pretrained,
    differences,
    make_probes,
    percent,
    run_batches,
)
from repa_mm.fit.distillation import distill_checkpoint, distillation_settings, write_distillation
from repa_mm.models import idle_channels
from repa_mm.models.attention import swap_attention
from repa_mm.models.surgery.idle import find_blocks, ratio_of_each_block
from repa_mm.reparam import CheckpointError, reparameterize
from repa_mm.run.config import dataset_config, load_config, plain, take_no_pretrained
from repa_mm.run.data import check_data
from repa_mm.run.inference import init_model
from repa_mm.version import __version__
from repa_mm.weights import load_anywhere, load_tensors, load_weights, save_checkpoint

_HEADER = re.compile(r'^# (.* by tools/convert_pretrained\.py\.$|The distillation of )')


class CalibrationImages:
    """Images of a data set, or of a folder, as a model gets them when it is tested.

    Iterating gives batches of one image, the same each time.

    Args:
        cfg (Config): Whose test pipeline, and whose training data.
        num_images (int): How many images, spread evenly over what there is.
        folder (str, optional): A folder of images to take instead of the training data.

    Attributes:
        taken (list[str]): Paths, relative to the folder, of the images that were taken out of it.

    Raises:
        FileNotFoundError: If there is no folder, no image, or no data set.
        ValueError: If the config has no data set.
    """

    def __init__(self, cfg: Config, num_images: int, folder: str | None = None) -> None:
        steps = dataset_config(cfg, 'test').pipeline
        if folder is None:
            check_data(cfg, 'train')
            dataset_config(cfg, 'train')  # checks that there is one
            parts = []
            for source in leaves(cfg.train_dataloader.dataset):
                source = source.copy()
                source.pipeline = steps
                # All images that there are, with or without objects, in the order of the file.
                source.pop('filter_cfg', None)
                parts.append(DATASETS.build(source))
            self.dataset = ConcatDataset(parts)
        else:
            self.dataset = ImageFolder(folder, steps)
        available = len(self.dataset)
        if not available:
            raise FileNotFoundError('no image to calibrate on: the training data is empty')
        num_images = min(num_images, available)
        self.indices = [i * available // num_images for i in range(num_images)]
        self.folder, self.taken = folder, []

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[dict]:
        for index in self.indices:
            yield pseudo_collate([self.dataset[index]])

    def take(self, number: int) -> list:
        """Take some images out of these, spread evenly, as a list of batches; one stays."""
        number = min(number, len(self) - 1)
        if number < 1:
            return []
        chosen = [self.indices[int((i + 0.5) * len(self) / number)] for i in range(number)]
        rest = [index for index in self.indices if index not in chosen]
        if self.folder is not None:
            root = osp.abspath(self.folder)
            self.taken += [osp.relpath(self.dataset.paths[i], root) for i in chosen]
        self.indices = rest
        return [pseudo_collate([self.dataset[i]]) for i in chosen]


def convert_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    idle_ratio: float | list[float | None] = 0.75,
    norm: str = 'keep',
    num_images: int = 64,
    images: str | None = None,
    device: str | None = None,
    cfg_options: dict | None = None,
    progress: Callable | None = None,
    target_gmacs: float | None = None,
    resume: bool = False,
    distill: int = 0,
    fitted: dict | None = None,
    **options,
) -> dict:
    """Give the backbone of a trained model channel-idle FFNs, without training or labels.

    Neck and heads stay as they are. Beside the checkpoint, a config of the same name is written
    that inherits ``config``, so that both are ready for training, testing and merging.

    Args:
        config (str): The model's own config: a path, or the name of an installed one
            ('mmdet::swin/….py').
        checkpoint (str): The model's checkpoint: a path or a URL.
        out (str): The checkpoint to write, '….pth'. The config is '….py'. What an interrupted
            conversion has fitted is in '….partial'.
        idle_ratio (float | list): Share of FFN hidden channels that skip the activation: one for
            all blocks, or one per block, of which None leaves its block as it is. Defaults to 0.75.
        norm (str): 'keep' leaves the LayerNorms before the FFNs; 'fold' merges everything.
            Defaults to 'keep'.
        num_images (int): Number of images to calibrate on. One more for each eight of them is
            held out, to measure on it how much the outputs differ. Defaults to 64.
        images (str, optional): A folder of images. Defaults to the config's training data, through
            its test pipeline.
        device (str, optional): Defaults to the GPU, if there is one.
        cfg_options (dict, optional): Values to override in the config.
        progress (Callable, optional): Called with the report of each block.
        target_gmacs (float, optional): 1e9 multiply-adds that the reparameterized backbone is to
            have, in place of an idle ratio; for the image size that is returned.
        resume (bool): Go on with an interrupted conversion of the same model. Defaults to False.
        distill (int): Number of iterations of a distillation afterwards, see
            :mod:`repa_mm.fit.distillation`. Defaults to 0.
        fitted (dict, optional): What the same conversion has returned as ``fitted``, to fit nothing
            again.
        **options: Others of :func:`~repa_mm.convert_pretrained`.

    Returns:
        dict: ``report`` (a :class:`~repa_mm.fit.conversion.ConversionReport`),
        ``differences`` (mean square difference of each output of the backbone on the held-out
        images, relative to the variance of that output), ``distilled`` (the same after the
        distillation, if there is one), ``for_heads`` (the same for the features that the heads
        get, before and after a distillation), ``seen`` (whether the distillation has learned from
        the held-out images, too: from those of a folder it has not), ``macs`` (of the backbone
        before and after), ``size`` (height and width of the image for that), ``images`` and
        ``held_out`` (their numbers), ``config`` (the file that was written) and ``fitted`` (the
        blocks).

    Raises:
        FileNotFoundError: If the config, checkpoint or images are missing.
        ValueError: If there is nothing to convert, an option is out of range, or the memory does
            not suffice.
        CheckpointError: If the checkpoint does not fit the config.
        OSError: If ``out`` cannot be written.
    """
    if num_images < 1:
        raise ValueError(f'the number of images must be at least 1, but is {num_images}')
    if distill:
        distillation_settings(distill)  # checks it
    stem, suffix = osp.splitext(out)
    out_config, partial = f'{stem}.py', f'{stem}.partial'
    for path in (out, out_config, partial, *[f'{stem}_distill.py'] * bool(distill)):
        check_output(path, config, checkpoint)
    if suffix not in ('.pth', '.pt'):
        raise ValueError(f'the output {out!r} is to be a checkpoint of PyTorch: name it ….pth')
    for path in (out_config, f'{stem}_distill.py'):
        _check_own(path)
    cfg = load_config(config, cfg_options)
    overrides = _overrides(cfg, cfg_options or {})
    if Config._is_lazy_import(cfg.filename):
        raise ValueError(
            f'{config!r} is written in pure Python (read_base, imported classes), and the config '
            'of the converted model could not inherit from it: write it as an ordinary one, by '
            "Config.fromfile(PATH).dump('NEW.py')"
        )
    original = cfg.model.get('backbone')
    if not isinstance(original, dict):
        raise ValueError(f"'model' of {config!r} has no 'backbone'")
    original = original.copy()
    if cfg.model.get('init_cfg'):  # weights of the original
        overrides.setdefault('model', {})['init_cfg'] = None
    loaded = load_anywhere(checkpoint)
    take_no_pretrained(cfg)
    model = MODELS.build(cfg.model)
    load_weights(model, loaded['state_dict'], checkpoint, exact=False)
    source = CalibrationImages(cfg, num_images + max(1, num_images // 8), images)
    held_out = source.take(max(1, len(source) // 9))

    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    model.eval()  # on a line of its own: that of some models returns None
    backbone = model.to(device).backbone
    swap_attention(backbone)
    with torch.no_grad():
        shape = model.data_preprocessor(next(iter(source)), False)['inputs'].shape
    size = image_size(backbone, tuple(shape[-2:]))
    if target_gmacs is not None:
        if not isinstance(idle_ratio, (int, float)):
            raise ValueError(
                f'target_gmacs finds one idle ratio for all blocks: leave out idle_ratio, which '
                f'is {idle_ratio!r}'
            )
        idle_ratio = _ratio_for(backbone, target_gmacs, (shape[1], *size), options)

    def text_for(ratios: list | float) -> str:
        return _config_text(config, out, cfg, original, ratios, norm, overrides)

    # What is wrong with the config is to show before the fit.
    ratios = _possible_ratios(backbone, idle_ratio, options)
    try:
        MODELS.build(_loaded(text_for(ratios), out_config).model)
    except Exception as error:
        raise ValueError(
            f'{config!r} with channel-idle FFNs would be a config that cannot be used: '
            f'{type(error).__name__}: {error}'
        ) from error
    state = _Saved(partial, resume, fitted)

    @torch.no_grad()
    def features(batch, backbone=backbone):
        return backbone(model.data_preprocessor(batch, False)['inputs'])

    @torch.no_grad()
    def for_heads(batch, model=model):
        return model.extract_feat(model.data_preprocessor(batch, False)['inputs'])

    def note(row):
        state.save()
        if progress is not None:
            progress(row)

    with _explained_memory(num_images):
        before = [run_batches(f, held_out) for f in (features, for_heads) if distill]
        converted, report = convert_pretrained(
            backbone, source, idle_ratio, norm,
            forward=features, held_out=held_out, progress=note, resume=state.blocks, **options,
        )  # fmt: skip
        converted.eval()
        macs = [count_macs(b, (shape[1], *size)) for b in (backbone, reparameterize(converted))]
    model.backbone = converted
    fitted_for_heads = run_batches(for_heads, held_out) if distill else []
    model.cpu()
    meta = loaded.get('meta')
    meta = dict(meta if isinstance(meta, dict) else {}, repa_mm_version=__version__)
    text = text_for(_ratios(backbone, report))
    # MMEngine's inferencers take it where they are given weights alone.
    meta['cfg'] = _loaded(text, out_config).pretty_text
    save_checkpoint(dict(meta=meta, state_dict=weights_to_cpu(model.state_dict())), out)
    with replacing(out_config) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(text)
    state.remove()
    result = dict(
        report=report,
        differences=report.differences,
        macs=macs,
        size=size,
        images=len(source),
        held_out=len(held_out),
        config=out_config,
        fitted=state.blocks,
    )
    if distill:
        with suppress(FileNotFoundError):  # an earlier one is not gone on with
            os.unlink(f'{stem}_distill/last_checkpoint')
        path = write_distillation(out_config, checkpoint, distill, images, source.taken)
        distill_checkpoint(path, out)
        distilled = init_model(out_config, out, device=device)
        after = run_batches(lambda batch: features(batch, distilled.backbone), held_out)
        result['distilled'] = differences(before[0], after)
        after = run_batches(lambda batch: for_heads(batch, distilled), held_out)
        result['for_heads'] = [differences(before[1], x) for x in (fitted_for_heads, after)]
        result['seen'] = images is None
    return result


def _loaded(text: str, path: str) -> Config:
    """The config that a text would be at a path."""
    folder = osp.dirname(osp.abspath(path))
    os.makedirs(folder, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix='.py', dir=folder)
    try:
        with open(handle, 'w', encoding='utf-8') as file:
            file.write(text)
        return Config.fromfile(name)
    finally:
        os.unlink(name)


def _check_own(path: str) -> None:
    """Check that a config that is written replaces none but one that was written before."""
    if osp.isfile(path):
        with open(path, encoding='utf-8', errors='replace') as file:
            if not _HEADER.search(file.readline()):
                raise ValueError(
                    f'{path!r} is there, and was not written by this tool: give the output '
                    'another name'
                )


class _Saved:
    """What an interrupted conversion has fitted, in a file.

    Args:
        path (str): The file.
        resume (bool): Whether to read it, if it is there.
        blocks (dict, optional): What it has, if that is known.
    """

    def __init__(self, path: str, resume: bool, blocks: dict | None = None) -> None:
        self.path, self.blocks = path, {} if blocks is None else blocks
        if blocks is None and resume and osp.isfile(path):
            # A copy: the file is replaced while its tensors are in use.
            self.blocks = copy.deepcopy(load_tensors(path))
        if not isinstance(self.blocks, dict):
            raise CheckpointError(f'{path!r} is not of an interrupted conversion: remove it')
        self.size = len(self.blocks)

    def save(self) -> None:
        if len(self.blocks) > self.size:
            save_checkpoint(self.blocks, self.path)
            self.size = len(self.blocks)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)


@contextmanager
def _explained_memory(num_images: int) -> Iterator[None]:
    """Let an error for want of memory say what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch's errors have no class of their own on a CPU.
        text = str(error).lower()
        known = 'out of memory' in text or "can't allocate memory" in text
        if not (known or isinstance(error, MemoryError)):
            raise
        raise ValueError(
            f'the memory does not suffice for {num_images} images at a time: lower --num-images, '
            'or the image size in the test pipeline of the config; --resume goes on only with the '
            'same images'
        ) from error


def _possible_ratios(
    backbone: nn.Module, idle_ratio: float | list[float | None], options: dict
) -> list[float | None]:
    """The idle ratio of each block, None for those that stay as they are.

    Raises:
        ValueError: If a block that is to be converted cannot be.
    """
    blocks = find_blocks(backbone)
    ratios = dict(zip(blocks, ratio_of_each_block(idle_ratio, 'constant', len(blocks))))
    probes, _ = make_probes(blocks, ratios, options.get('skip_unsupported', False))
    return [ratio if name in probes else None for name, ratio in ratios.items()]


def _ratio_for(
    backbone: nn.Module, gmacs: float, shape: tuple[int, int, int], options: dict
) -> float:
    """The idle ratio with which a reparameterized backbone has so many multiply-adds.

    Raises:
        ValueError: If none has.
    """

    def cost(ratio: float) -> float:
        ratios = _possible_ratios(backbone, ratio, options)
        model = idle_channels(copy.deepcopy(backbone), ratios)
        model.eval()
        return count_macs(reparameterize(model, inplace=True), shape) / 1e9

    # The multiply-adds are linear in the idle ratio.
    least, half, most = cost(1.0), cost(0.5), count_macs(backbone, shape) / 1e9
    if not least <= gmacs <= most:
        raise ValueError(
            f'no idle ratio gives the backbone {gmacs:g} GMACs at {shape[1]}x{shape[2]}: it has '
            f'{most:.3g}, and {least:.3g} with idle ratio 1'
        )
    return min(max(1 - 0.5 * (gmacs - least) / (half - least), 0.0), 1.0)


def _ratios(backbone: nn.Module, report: ConversionReport) -> list[float | None] | float:
    """The idle ratio of each block, in the order of the backbone's modules; one if all agree."""
    fitted = {block.name: block.idle_ratio for block in report.blocks}
    ratios = [fitted.get(name) for name in find_blocks(backbone)]
    return ratios[0] if len(set(ratios)) == 1 else ratios


def _overrides(cfg: Config, cfg_options: dict) -> dict:
    """The values of a config that options have set, as a config that inherits it has them."""
    result: dict = {}
    for key in cfg_options:
        value, path = cfg, []
        # A list is inherited as a whole.
        for part in key.split('.'):
            if isinstance(value, (list, tuple)):
                break
            value = value[part]
            path.append(part)
        node = result
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = plain(value)
        if isinstance(value, dict) and dict(cfg_options[key] or {}).get('_delete_'):
            node[path[-1]]['_delete_'] = True
    return result


def _config_text(
    config: str,
    out: str,
    cfg: Config,
    original: dict,
    ratios: list | float,
    norm: str,
    overrides: dict,
) -> str:
    """The config of the converted model, which inherits that of the original."""
    if '::' in config and not osp.exists(config):
        # MMEngine's own notation knows few packages, and these not by all their names.
        base = f"__import__('repa_mm').config_path({config!r})"
    else:
        # MMEngine takes ".." off a path before it follows links.
        path, folder = osp.abspath(config), osp.dirname(osp.abspath(out))
        base = repr(osp.relpath(path, folder) if osp.realpath(folder) == folder else path)
    given = cfg.get('custom_imports') or {}
    imports = given.get('imports') or []
    imports = [imports] if isinstance(imports, str) else list(imports)
    hooks = [h for h in cfg.get('custom_hooks') or [] if h.get('type') != 'ReparameterizeHook']
    backbone = dict(
        _delete_=True,
        type='IdleChannels',
        idle_ratio=ratios,
        norm_cfg=dict(type='keep' if norm == 'keep' else 'BN'),
        norm_eval=norm == 'fold',
        backbone=plain(original),
    )
    changes = copy.deepcopy(overrides)
    if cfg.get('work_dir'):  # the checkpoints there are of the original
        changes['work_dir'] = osp.splitext(osp.abspath(out))[0]
    saving = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    if saving.get('out_dir'):
        hooks_now = changes.setdefault('default_hooks', {})
        hooks_now.setdefault('checkpoint', {})['out_dir'] = None
    lines = Config(
        dict(
            changes,
            custom_imports=dict(
                imports=[*(i for i in imports if i != 'repa_mm'), 'repa_mm'],
                allow_failed_imports=given.get('allow_failed_imports', False),
            ),
            custom_hooks=plain([*hooks, dict(type='ReparameterizeHook')]),
            load_from=osp.realpath(out),
            resume=False,
            model=dict(changes.get('model', {}), backbone=backbone),
        )
    )
    return (
        f'# {osp.basename(config)} with channel-idle FFNs, by tools/convert_pretrained.py.\n'
        f'# Its weights are in {osp.basename(out)}: load_from is where that was written.\n'
        f'_base_ = {base}\n\n{lines.pretty_text}'
    )


def result_text(result: dict, out: str) -> str:
    """What :func:`convert_checkpoint` has done, in words and as a table."""
    before, after = (value / 1e9 for value in result['macs'])
    lines = [
        str(result['report']),
        f'fitted on {result["images"]} images, {result["held_out"]} held out',
    ]
    if result.get('distilled'):
        seen = ' (the training data, which it learns from, has these images)' * result['seen']
        text = percent(result['distilled'])
        lines.append(f'after the distillation they differ by {text}{seen}')
        fitted, distilled = map(percent, result['for_heads'])
        lines.append(
            f'the features for the heads, which it imitates, differed by {fitted} before, and by '
            f'{distilled} after it'
        )
    return '\n'.join(
        [
            *lines,
            'backbone, {}x{}: '.format(*result['size'])
            + f'{before:.2f} -> {after:.2f} GMACs, reparameterized',
            f'wrote {out} and {result["config"]}',
        ]
    )
