"""Parameters and multiply-adds of the forms of a model."""

from collections.abc import Sequence
from typing import Any

from repa_mm.benchmark.forms import build_forms, load_configs
from repa_mm.benchmark.inputs import NoiseInputs, check_memory
from repa_mm.engine.complexity import count_parameters, macs_by_part
from repa_mm.runtime.cli import align


def complexity(
    config: str,
    baseline: str | None = None,
    part: str = 'model',
    shape: Sequence[int] = (224, 224),
    cfg_options: dict | None = None,
) -> dict[str, Any]:
    """Count the parameters and multiply-adds of every form of a model.

    Args:
        config (str): Path of a config.
        baseline (str, optional): Path of the vanilla counterpart's config.
        part (str): 'model' or 'backbone'.
        shape (Sequence[int]): Height and width of the image; one number for
            both. Defaults to (224, 224).
        cfg_options (dict, optional): Values to override in the config.

    Returns:
        dict: ``shape``, ``part``, ``two_stage`` and ``forms``: for each one
        ``parameters`` and ``macs``, dicts by part with the whole under ''.

    Raises:
        FileNotFoundError, ValueError: If an argument is unusable.
    """
    if len(shape) not in (1, 2) or min(shape) < 1:
        raise ValueError(
            f'--shape takes a height and a width in pixels, but got {" ".join(map(str, shape))}'
        )
    height, width = shape[0], shape[-1]
    check_memory((height, width))
    cfg, baseline_cfg = load_configs(config, baseline, cfg_options)
    forms = build_forms(cfg, baseline=baseline_cfg)
    result: dict[str, Any] = dict(
        config=config, part=part, shape=[height, width], two_stage='roi_head' in cfg.model, forms={}
    )
    for name, model in forms.items():
        samples = None
        image = (3, height, width)
        if part == 'backbone':
            model = model.backbone
        else:
            # The preprocessor may pad.
            data = model.data_preprocessor(NoiseInputs(cfg, (height, width))(0))
            samples, image = data['data_samples'], tuple(data['inputs'].shape[1:])
        try:
            macs = macs_by_part(model, image, samples)
        except Exception as error:
            raise ValueError(
                f'the {name} form fails on an image of {height}x{width} '
                f'({type(error).__name__}: {error})'
            ) from error
        parameters = {'': count_parameters(model)}
        for child, module in model.named_children():
            parameters[child] = count_parameters(module)
        result['input'] = list(image)
        result['forms'][name] = dict(parameters=parameters, macs=macs)
    return result


def complexity_text(result: dict[str, Any]) -> str:
    """A table of :func:`complexity`'s result."""
    forms = result['forms']
    children = [
        name
        for name in next(iter(forms.values()))['macs']
        if result['part'] == 'model'
        and any(form['parameters'].get(name) for form in forms.values())
    ]
    children = [name for name in children if name] + ['']
    header = [f'input {"x".join(map(str, result["input"]))}']
    for name in forms:
        header += [f'{name}: M parameters', 'GMACs']
    rows = [header]
    for child in children:
        row = [child or result['part']]
        for form in forms.values():
            row += [
                f'{form["parameters"].get(child, 0) / 1e6:.2f}',
                f'{form["macs"].get(child, 0) / 1e9:.2f}',
            ]
        rows.append(row)
    lines = align(rows) + [
        'Multiply-adds of linear and convolution layers, as in the paper: '
        'without attention products and norms.'
    ]
    if result['two_stage'] and result['part'] == 'model':
        lines.append(
            'Those of the RoI heads depend on the proposals; here they are of random weights.'
        )
    return '\n'.join(lines)
