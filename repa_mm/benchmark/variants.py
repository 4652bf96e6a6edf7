"""The variants of a model that are measured against each other: vanilla, training, deploy."""

import copy
import logging

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger

from repa_mm.reparam import Form, has_deploy_form, has_training_form, outermost, reparameterize
from repa_mm.run import init_model, load_config, take_no_pretrained

FAIR = 'vanilla, fast parts'


def load_configs(config: str, baseline: str | None = None, cfg_options: dict | None = None):
    """The config and the baseline's (or None); options are for the first."""
    return load_config(config, cfg_options), load_config(baseline) if baseline else None


@torch.no_grad()
def randomize_norms(model: nn.Module) -> None:
    """Give BatchNorms statistics and weights like those after training.

    Fresh ones are nearly the identity: nothing would be left to merge.
    """
    generator = torch.Generator().manual_seed(0)

    def randomize(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    for module in model.modules():
        if getattr(module, 'running_mean', None) is not None:
            randomize(module.running_mean, -0.2, 0.2)
            randomize(module.running_var, 0.5, 1.5)
            if module.weight is not None:
                randomize(module.weight, 0.5, 1.5)
                randomize(module.bias, -0.2, 0.2)


def build_model(cfg: Config, checkpoint: str | None = None, device='cpu') -> nn.Module:
    """A model in eval mode, in the training form if the checkpoint is.

    Without a checkpoint its weights are those that training from scratch would begin with, but for
    the BatchNorms', which are random. A detector then finds next to nothing, and not an object at
    every anchor. A checkpoint that does not fit is a CheckpointError.
    """
    torch.manual_seed(0)
    if checkpoint:
        return init_model(cfg, checkpoint, form=None, device=device)
    cfg = copy.deepcopy(cfg)
    take_no_pretrained(cfg)
    model = init_model(cfg, form=None, device=device)
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)  # it would tell of every parameter
    try:
        model.init_weights()
    finally:
        logger.setLevel(level)
    randomize_norms(model)
    return model


def check_pair(model: nn.Module, vanilla: nn.Module) -> None:
    """Check that of two models only the second is vanilla; a ValueError if not."""
    form = next(outermost(vanilla), None)
    if form is not None:
        raise ValueError(
            f'the baseline has {form[1].label}s itself: --baseline takes the config of the '
            'vanilla counterpart'
        )
    if next(outermost(model), None) is None:
        raise ValueError(
            f'the config has no channel-idle FFN, nor another {Form.label}: give the RePa '
            'config first and the vanilla one as --baseline'
        )


def build_variants(
    cfg: Config,
    checkpoint: str | None = None,
    baseline: Config | None = None,
    baseline_checkpoint: str | None = None,
    fair: bool = False,
    device='cpu',
    notes: list | None = None,
) -> dict[str, nn.Module]:
    """The variants of a model, by name; the first is the one to compare with.

    Args:
        cfg (Config): Of a RePa model, or of a vanilla one alone.
        checkpoint (str, optional): Its weights. A merged one gives the deploy form alone. Defaults
            to None: random weights.
        baseline (Config, optional): Of its vanilla counterpart.
        baseline_checkpoint (str, optional): The counterpart's weights.
        fair (bool): Add the counterpart with the fast window attention.
        device (str | torch.device): Defaults to 'cpu'.
        notes (list, optional): Gets a sentence if that cannot be.

    Returns:
        dict: Of 'vanilla', 'vanilla, fast parts', 'training' and 'deploy' those that there are, in
        eval mode.

    Raises:
        ValueError: If the two configs are of different codebases, or a form cannot be built.
        CheckpointError: If a checkpoint does not fit.
    """
    variants = {}
    if baseline is not None:
        if baseline.default_scope != cfg.default_scope:
            raise ValueError(
                f'the baseline is a model of {baseline.default_scope}, the '
                f'config one of {cfg.default_scope}: nothing to compare'
            )
        variants['vanilla'] = build_model(baseline, baseline_checkpoint, device)
    elif fair or baseline_checkpoint:
        raise ValueError('--fair and --baseline-checkpoint need --baseline')
    model = build_model(cfg, checkpoint, device)
    if baseline is not None:
        check_pair(model, variants['vanilla'])
    if fair:
        try:
            variants[FAIR] = _with_fast_parts(variants['vanilla'])
        except (ImportError, ValueError) as error:
            if notes is not None:
                notes.append(
                    f'the baseline is not measured with the fast window attention: {error}'
                )
    if has_training_form(model):
        return dict(variants, training=model, deploy=reparameterize(model))
    return dict(variants, **{'deploy' if has_deploy_form(model) else 'vanilla': model})


def _with_fast_parts(vanilla: nn.Module) -> nn.Module:
    """A copy of the vanilla model with all that RePa configs have besides mergeable modules."""
    from repa_mm.models import fast_window_attention

    model = copy.deepcopy(vanilla)
    fast_window_attention(model)
    if hasattr(model, 'decode_head'):
        from repa_mm.models.heads.uper_head import fast_uper_head

        fast_uper_head(model)
    model.eval()
    return model
