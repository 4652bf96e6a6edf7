"""Files, paths, configs, and checkpoints in any layout."""
