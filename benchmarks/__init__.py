"""What only the figures of this repository need: run as ``python -m benchmarks.NAME``."""
