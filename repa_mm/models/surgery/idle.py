"""Bridge for repa_mm.fit, to be removed: use repa_mm.models.sites and .structures."""

from repa_mm.models.sites import FAMILIES, ffn_sites
from repa_mm.models.structures import idle_ffn as _idle_ffn
from repa_mm.models.structures import linear_idle_ratios


def _site(block):
    (site,) = [s for s in ffn_sites(block) if s.block is block]
    return site


def find_blocks(model):
    sites = ffn_sites(model)
    if not sites:
        raise ValueError(f'{type(model).__name__} has no block whose FFN is known')
    return {site.block_name: site.block for site in sites}


def parts_of(block):
    return _site(block).parts()


def idle_ffn(block, idle_ratio=0.75, norm_cfg=dict(type='BN')):
    return _idle_ffn(_site(block), idle_ratio, norm_cfg)


def put(block, form):
    _site(block).put(form)


def ratio_of_each_block(idle_ratio, schedule, num_blocks):
    if schedule == 'linear':
        return linear_idle_ratios(idle_ratio, num_blocks)
    if not isinstance(idle_ratio, (list, tuple)):
        return [idle_ratio] * num_blocks
    if len(idle_ratio) != num_blocks:
        raise ValueError(f'idle_ratio has {len(idle_ratio)} entries for {num_blocks} blocks')
    return list(idle_ratio)


PRE_NORM_BLOCKS = {name: (f.norm, f.ffn) for name, f in FAMILIES.items() if f.ffn}
