"""What a conversion found, in words."""

from repa_mm.weights.layout_core import Conversion
from repa_mm.weights.layout_family import listed


def describe(done: Conversion) -> list[str]:
    """Describe in lines what was recognized, and what was done."""
    to_mm = any(key.startswith('backbone.') for key in done.state_dict)
    assumed = done.form == 'training' and done.idle_ratio_from == 'assumption'
    kind = done.backbone['type'].rpartition('.')[2]
    config = f' (configs/{done.config})' if done.config else ''
    form = 'vanilla, as a start for the training form'
    ratios = done.idle_ratio if isinstance(done.idle_ratio, list) else [done.idle_ratio]
    ratio = ', '.join(f'{r:.4g}' for r in ratios)
    ratio = f'[{ratio}]' if len(ratios) > 1 else ratio
    lines = [
        f'architecture: {kind} {done.backbone.get("arch")}{config}',
        f'form: {form if done.form == "vanilla" else f"{done.form} form"}',
        "idle ratio: not told by the weights; the authors' code takes it as --idle_ratio"
        if assumed and not to_mm
        else f'idle ratio: {ratio}, from {done.idle_ratio_from}',
    ]
    if assumed and to_mm:
        lines.append(
            '    The weights of a training form do not tell it, and this file has neither its '
            "code's arguments nor statistics that do. Give --idle-ratio if it is another, and "
            'build the model with model.backbone.idle_ratio.'
        )
    heads = [
        f'{key} {tuple(value.shape)}'
        for key, value in done.state_dict.items()
        if key.startswith('head') and key.endswith('weight')
    ]
    classifier = f'classifier: {", ".join(heads)}' if heads else 'no classifier'
    lines.append(f'{len(done.state_dict)} keys; {classifier}')
    if done.left_out:
        lines.append(f'left out: {listed(done.left_out)}')
    if done.fresh:
        others = [key for key in done.fresh if 'running_' not in key]
        names = sorted({key.rpartition('.')[0].split('.ffn.')[-1] for key in others})
        lines.append(
            f'new: {", ".join(names)}, and {len(done.fresh) - len(others)} BatchNorm statistics, '
            'to be estimated by tools/calibrate_bn.py or by training with norm_eval=False'
        )
    if done.form == 'deploy' and to_mm:
        lines.append('load it with model.backbone.deploy=True, to run it; it cannot be trained')
    return lines
