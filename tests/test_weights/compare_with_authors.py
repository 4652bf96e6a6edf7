"""Compare the converters with the code of RePaFormer's authors, which runs beside ours.

    python tests/compare_with_authors.py --repavit RePaViT --lvvit TokenLabeling [--models NAME ...]

takes checkouts of github.com/Ackesnal/RePaViT and of github.com/Ackesnal/TokenLabeling, and needs
what they import (timm 1.0.15 and einops). For each model, with random weights, affine parameters
and BatchNorm statistics, the script prints the largest difference of the logits, relative to the
largest logit, in float32:

- training form: theirs against the converted one here;
- merged there: what their code merged against the same, converted, here;
- merged here: what their code computes with a merge of ours, converted back, against their
  training form;

and whether the converted weights, converted back, are the same bits. The exit status is 1 if a
difference is above 1e-4. `docs/weights.md` has the table.
"""

import argparse
import contextlib
import io
import sys
import warnings
from importlib import import_module

import torch
import torch.nn as nn
from mmengine.registry import MODELS

from repa_mm.reparam import reparameterize
from repa_mm.weights.layouts import to_mm, to_repavit

# Model: its file, and what the authors' scripts pass for it.
REPAVIT = {
    'RePaViT_Tiny': ('repavit', dict(idle_ratio=0.75, heuristic='static')),
    'RePaViT_Small': ('repavit', dict(idle_ratio=0.75, heuristic='linear')),
    'RePaViT_Base': ('repavit', dict(idle_ratio=0.9, heuristic='static')),
    'RePaViT_Large': ('repavit', dict(idle_ratio=0.75, heuristic='static')),
    'RePaSwin_Tiny': ('repaswin', dict(idle_ratio=0.75)),
    'RePaSwin_Small': ('repaswin', dict(idle_ratio=0.75)),
    'RePaSwin_Base': ('repaswin', dict(idle_ratio=0.5)),
    'RePaPoolformer_s12': ('repapoolformer', dict(idle_ratio=0.75)),
    'RePaPoolformer_s36': ('repapoolformer', dict(idle_ratio=0.3)),
    'RePaMlpMixer_b16': ('repamlpmixer', dict(idle_ratio=0.75)),
    'RePaMlpMixer_l16': ('repamlpmixer', dict(idle_ratio=0.75)),
}
LVVIT = {name: ('tlt.models.lvvit', {}) for name in ('lvvit_s', 'lvvit_m')}


def randomize(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Give every layer values that none starts with, in eval mode."""

    def uniform(tensor, low, high):
        tensor.data.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    for module in model.modules():
        if getattr(module, 'running_mean', None) is not None:
            uniform(module.running_mean, -1, 1)
            uniform(module.running_var, 0.1, 3)
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)):
            uniform(module.weight, 0.3, 1.5)
            uniform(module.bias, -0.5, 0.5)
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            bound = module.weight[0].numel() ** -0.5
            uniform(module.weight, -bound, bound)
            if module.bias is not None:
                uniform(module.bias, -0.5, 0.5)
        for name, parameter in module.named_parameters(recurse=False):
            if name in ('ls', 'layer_scale_1'):
                uniform(parameter, 0.2, 1)
            elif 'pos_embed' in name or 'token' in name or 'bias_table' in name:
                uniform(parameter, -0.5, 0.5)
    return model.eval()


def logits(done, images: torch.Tensor) -> torch.Tensor:
    """What the converted weights compute here, backbone and head."""
    weights = done.state_dict
    backbone = MODELS.build(dict(done.backbone)).eval()
    backbone.load_state_dict(
        {k[len('backbone.') :]: v for k, v in weights.items() if k.startswith('backbone.')}
    )

    def classify(x, name='head.fc'):
        return x @ weights[f'{name}.weight'].T + weights[f'{name}.bias']

    out = backbone(images)[-1]
    if 'head.aux_fc.weight' in weights:  # LV-ViT: tokens, grid and share
        tokens = out[0]
        return classify(tokens[:, 0]) + classify(tokens[:, 1:], 'head.aux_fc').amax(1) / 2
    return classify(out if out.ndim == 2 else out.flatten(2).mean(2))


def merged_here(done) -> dict:
    """The weights of a conversion, its FFNs merged by ``reparameterize``."""
    backbone = MODELS.build(dict(done.backbone))
    own = {k[9:]: v for k, v in done.state_dict.items() if k.startswith('backbone.')}
    backbone.load_state_dict(own)
    merged = {f'backbone.{k}': v for k, v in reparameterize(backbone).state_dict().items()}
    return {**merged, **{k: v for k, v in done.state_dict.items() if k.startswith('head')}}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def compare(build, name: str, args: dict) -> list:
    """Return the three differences (None where a file is refused), and if all bits are the same."""
    generator = torch.Generator().manual_seed(0)
    theirs = randomize(build(), generator)
    images = torch.randn(2, 3, 224, 224, generator=generator)
    given = {key: value.clone() for key, value in theirs.state_dict().items()}
    expected = theirs(images)
    done = to_mm(given, args=dict(args, channel_idle=True))
    back = to_repavit(done.state_dict).state_dict
    same = set(given) == set(back) and all(torch.equal(back[k], v) for k, v in given.items())
    result = [error(logits(done, images), expected)]

    with contextlib.redirect_stdout(io.StringIO()):
        theirs.reparam()
    theirs.eval()
    is_lvvit = name.startswith('lvvit')
    # The merged LV-ViT there has another norm, and computes something else.
    result.append(
        None if is_lvvit else error(logits(to_mm(theirs.state_dict()), images), theirs(images))
    )
    theirs.load_state_dict(to_repavit(merged_here(done)).state_dict, strict=not is_lvvit)
    result.append(error(theirs(images), expected))
    return [*result, same]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--repavit', help='checkout of Ackesnal/RePaViT')
    parser.add_argument('--lvvit', help='checkout of Ackesnal/TokenLabeling')
    parser.add_argument('--models', nargs='+', help='the models to compare (default: all)')
    options = parser.parse_args()
    known = {}
    for path, models in ((options.repavit, REPAVIT), (options.lvvit, LVVIT)):
        if path:
            sys.path.insert(0, path)
            known.update(models)
    if not known:
        parser.error('give a checkout: --repavit, --lvvit or both')
    chosen = options.models or list(known)
    if set(chosen) - set(known):
        parser.error(f'no model {min(set(chosen) - set(known))!r}; there are {", ".join(known)}')

    warnings.simplefilter('ignore')
    print('| model | idle ratio | training form | merged there | merged here | bits back |')
    print('| --- | --- | --- | --- | --- | --- |')
    worst = 0.0
    for name in chosen:
        file, args = known[name]

        def build(file=file, name=name, args=args):
            module = import_module(file)
            with contextlib.redirect_stdout(io.StringIO()):
                return getattr(module, name)(
                    num_classes=1000, channel_idle=True, feature_norm='BatchNorm', **args
                )

        *errors, same = compare(build, name, args)
        worst = max(worst, *(e for e in errors if e is not None), 0.0 if same else 1.0)
        ratio = args.get('idle_ratio', '2/3')
        if args.get('heuristic') == 'linear':
            ratio = f'{ratio}, `--heuristic linear`'
        cells = ' | '.join('refused' if e is None else f'{e:.1e}' for e in errors)
        print(f'| {name} | {ratio} | {cells} | {"same" if same else "DIFFERENT"} |', flush=True)
    sys.exit(worst > 1e-4)


if __name__ == '__main__':
    main()
