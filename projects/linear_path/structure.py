"""Linear paths in models."""

from projects.linear_path.linear_path import LinearPathFFN
from repa_mm.models import STRUCTURES, ChannelIdle


@STRUCTURES.register_module()
class LinearPath(ChannelIdle):
    """FFNs that train what :class:`~repa_mm.models.ChannelIdle` deploys, to compare it with.

    The arguments are those of :class:`~repa_mm.models.ChannelIdle`.
    """

    ffn = LinearPathFFN
