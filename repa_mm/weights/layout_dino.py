"""Taking the backbone out of a checkpoint of DINO."""

import os.path as osp

from repa_mm.files import check_output
from repa_mm.paths import config_path
from repa_mm.reparam import CheckpointError
from repa_mm.version import __version__
from repa_mm.weights import save_checkpoint
from repa_mm.weights.layout_core import Conversion, to_mm
from repa_mm.weights.reading import load_checkpoint

NETWORKS = ('teacher', 'student')
# By the width of the class token. Configs for ImageNet have a norm that DINO's backbones lack.
_CONFIGS = {384: 'repa_vit_s_dino.py', 768: 'repa_vit_b_dino.py'}
_OURS = dict(teacher='teacher.backbone.', student='backbone.')


def dino_to_mm(
    src: str, dst: str, network: str = 'teacher', config: str | None = None
) -> Conversion | None:
    """Write the backbone of a network that DINO has trained, under names with 'backbone.'.

    Args:
        src (str): A checkpoint of :class:`~repa_mm.models.DINO`, or of the code of DINO's authors
            with a vision transformer (vanilla or of RePaFormer's authors).
        dst (str): The file to write, which is replaced only when it is complete.
        network (str): 'teacher' or 'student'. Defaults to 'teacher'.
        config (str, optional): Of the backbone that the result is for, see
            :func:`~repa_mm.weights.layouts.to_mm`. Defaults to None: one of ``repa_vit_{s,b}_dino.py``.

    Returns:
        Conversion | None: What was found out about a checkpoint of the authors' layout; None for
        one of ours.

    Raises:
        FileNotFoundError, CheckpointError, ValueError, OSError: If the checkpoint cannot be read or
            converted, has no such network, or the file cannot be written.
    """
    if network not in NETWORKS:
        raise ValueError(f'network must be one of {NETWORKS}, but got {network!r}')
    check_output(dst, src, config)
    checkpoint = load_checkpoint(src, ('state_dict', network))
    weights = checkpoint['state_dict']
    ours = any(key.startswith('teacher.backbone.') for key in weights)
    if not ours and network not in checkpoint:
        raise CheckpointError(
            f'{src!r} is no checkpoint of a training with DINO: it has no {network}. A backbone '
            'alone is a matter of tools/model_converters/repavit_to_mm.py'
        )
    meta = dict(converted_from=osp.basename(src), network=network, repa_mm_version=__version__)
    if ours:
        prefix = _OURS[network]
        found = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        state_dict, done = {f'backbone.{key}': value.clone() for key, value in found.items()}, None
    else:
        size = _CONFIGS.get(getattr(weights.get('backbone.cls_token'), 'shape', (0,))[-1])
        config = config or (size and config_path(size))
        args = checkpoint.get('args')
        args = vars(args) if hasattr(args, '__dict__') else {}
        done = to_mm(weights, config, None, args, backbone_only=True)
        state_dict = done.state_dict
        meta.update(backbone=done.backbone, form=done.form)
    save_checkpoint(dict(meta=meta, state_dict=state_dict), dst)
    return done
