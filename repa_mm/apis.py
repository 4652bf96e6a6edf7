"""The former place of :mod:`repa_mm.runtime`."""

from repa_mm.runtime import *  # noqa: F403
from repa_mm.runtime.config import DICTS, HEADS, SCOPES  # noqa: F401
