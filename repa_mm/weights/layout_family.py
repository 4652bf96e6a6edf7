"""What a converter asks a family of backbones, and how it reads names of weights.

In the tables of names, '#' stands for a number, and a name covers all that is below it.
"""

import math
import re
from functools import cache

import torch
import torch.nn as nn

from repa_mm.reparam import CheckpointError

Weights = dict[str, torch.Tensor]


@cache
def _pattern(template: str) -> 're.Pattern':
    return re.compile(re.escape(template).replace('\\#', '#').replace('#', r'(\d+)') + r'(?=\.|$)')


def match(key: str, template: str) -> 're.Match | None':
    """Match a key that is, or is below, a name; the numbers are the groups."""
    return _pattern(template).match(key)


def rename_all(given: Weights, names: dict[str, str], complaint: str) -> tuple[Weights, dict]:
    """Rename weights by a table, each by the longest name that fits.

    Returns:
        tuple: The weights under their new names, and the old name of each new one.

    Raises:
        CheckpointError: If the table lacks names (the complaint comes before them), or two weights
            have the same new name.
    """
    weights, origin, unknown = {}, {}, []
    templates = sorted(names, key=len, reverse=True)
    for key, value in given.items():
        for template in templates:
            found = match(key, template)
            if found:
                break
        else:
            unknown.append(key)
            continue
        new = names[template]
        for number in found.groups():
            new = new.replace('#', number, 1)
        new += key[found.end() :]
        if new in weights:
            raise CheckpointError(f'{key!r} and {origin[new]!r} are the same weight in two layouts')
        weights[new], origin[new] = value, key
    if unknown:
        raise CheckpointError(f'{complaint}: {listed(unknown)}')
    return weights, origin


def count(weights: Weights, template: str) -> int:
    """Count the numbers in the last place of a name."""
    found = (match(key, template) for key in weights)
    return len({m.groups()[-1] for m in found if m})


def shape_of(weights: Weights, key: str, ndim: int) -> torch.Size:
    """Return the shape of a weight; a CheckpointError says that it is missing or damaged."""
    if key not in weights:
        raise CheckpointError(f'the checkpoint is incomplete: it has no {key}')
    shape = weights[key].shape
    if len(shape) != ndim:
        raise CheckpointError(f'{key} has shape {tuple(shape)} instead of {ndim} dimensions')
    return shape


def listed(keys) -> str:
    """List the first of many keys, for a message."""
    keys = list(keys)
    rest = f' and {len(keys) - 5} more' if len(keys) > 5 else ''
    return ', '.join(map(repr, keys[:5])) + rest


def image_settings(num_patches: int, patch_size: int) -> dict:
    """Return the arguments of a backbone for the sizes of its images and patches."""
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        raise CheckpointError(
            f'{num_patches} patches are not of a square image: give a --config with img_size'
        )
    return dict(patch_size=patch_size, img_size=side * patch_size)


class Family:
    """A family of backbones: the names, orders and shapes of its weights in every layout.

    Attributes:
        backbone (str): The registered backbone.
        marker (str): Part of a name that only this family has, in any layout.
        configs (dict): The ImageNet config of each architecture that has a name.
        ffn (str): Name of the FFNs here.
        names (dict): From the layout of the authors' repository to ours, one to one.
        others (dict): To ours from other layouts (of timm, of the vanilla backbone's own
            repository, of OpenMMLab), where the names are neither the authors' nor ours.
        left_out (tuple): Parts that RePaFormers do not have.
        vanilla (bool): Whether vanilla checkpoints are converted.
        complete (bool): Whether the shapes tell the whole architecture.
        only_ratio (float | None): The idle ratio of the authors' code if it takes no other.
    """

    backbone: str
    marker: str
    configs: dict[str, str]
    ffn: str
    names: dict[str, str]
    others: dict[str, str] = {}
    left_out: tuple[str, ...] = ()
    vanilla = True
    complete = False
    only_ratio: float | None = None

    def ffns(self, weights: Weights) -> dict[str, Weights]:
        """Return the weights of every FFN, by its name and by the names inside of it."""
        parts: dict[str, Weights] = {}
        for key, value in weights.items():
            found = match(key, self.ffn)
            if found:
                parts.setdefault(found[0], {})[key[found.end() + 1 :]] = value
        return parts

    def rename(self, given: Weights) -> tuple[Weights, dict]:
        """Bring weights of any layout under our names and into our shapes; see `rename_all`."""
        ours = {new: new for new in self.names.values() if new != self.ffn}
        known = {k: v for k, v in given.items() if not any(match(k, n) for n in self.left_out)}
        kind = self.backbone[4:]
        complaint = f'the checkpoint looks like one of {kind}, but these names are unknown'
        return rename_all(known, {**ours, **self.others, **self.names}, complaint)

    def settings(self, weights: Weights) -> dict:
        """Return the backbone's arguments; 'arch' has what the shapes tell of it."""
        raise NotImplementedError

    def to_ours(self, weights: Weights, model: nn.Module) -> None:
        """Change values that mean something else in our backbone ``model``, in place."""

    def to_authors(self, weights: Weights, model: nn.Module, img_size: int) -> Weights:
        """Undo :meth:`to_ours` and what :meth:`rename` does besides, in place; return buffers.

        ``img_size`` is the image size of the authors' model that will load the weights.
        """
        return {}

    def active_channels(self, ratio: float, hidden: list[int], args: dict) -> list[int]:
        """Return how many channels of each FFN are active by arguments of the authors' code."""
        # Rounded as there, where 1152 * (1 - 2 / 3) makes 385.
        return [math.ceil(h * (1 - ratio)) for h in hidden]
