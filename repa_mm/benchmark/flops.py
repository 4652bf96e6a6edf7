"""Parameters and multiply-adds of the variants of a model."""

from collections.abc import Sequence
from typing import Any

from repa_mm.benchmark.execution import explained
from repa_mm.benchmark.inputs import NoiseInputs, check_memory
from repa_mm.benchmark.variants import build_variants, load_configs
from repa_mm.engine.complexity import count_parameters, macs_by_part


def complexity(
    config: str,
    baseline: str | None = None,
    part: str = 'model',
    shape: Sequence[int] = (224, 224),
    cfg_options: dict | None = None,
) -> dict[str, Any]:
    """Count the parameters and multiply-adds of every variant of a model.

    Args:
        config (str): Path of a config.
        baseline (str, optional): Path of the vanilla counterpart's config.
        part (str): 'model' or 'backbone'.
        shape (Sequence[int]): Height and width of the image; one number for both. Defaults to
            (224, 224).
        cfg_options (dict, optional): Values to override in the config.

    Returns:
        dict: ``shape``, ``part``, ``two_stage`` and ``forms``: for each one ``parameters`` and
        ``macs``, dicts by part with the whole under ''.

    Raises:
        FileNotFoundError, ValueError: If an argument is unusable.
    """
    if len(shape) not in (1, 2) or min(shape) < 1:
        raise ValueError(
            f'--shape takes a height and a width in pixels, but got {" ".join(map(str, shape))}'
        )
    size = shape[0], shape[-1]
    check_memory(size)
    cfg, baseline_cfg = load_configs(config, baseline, cfg_options)
    result: dict[str, Any] = dict(
        config=config, part=part, shape=list(size), two_stage='roi_head' in cfg.model, forms={}
    )
    for name, model in build_variants(cfg, baseline=baseline_cfg).items():
        samples, image = None, (3, *size)
        if part == 'backbone':
            model = model.backbone
        else:
            # The preprocessor may pad.
            data = model.data_preprocessor(NoiseInputs(cfg, size)(0))
            samples, image = data['data_samples'], tuple(data['inputs'].shape[1:])
        with explained(f'the {name} form', image):
            macs = macs_by_part(model, image, samples)
        parameters = {child: count_parameters(module) for child, module in model.named_children()}
        parameters[''] = count_parameters(model)
        result['input'] = list(image)
        result['forms'][name] = dict(parameters=parameters, macs=macs)
    return result
