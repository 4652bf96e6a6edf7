"""Papers beside RePaFormer, each by itself, through the public names of ``repa_mm``."""
