"""The version, in the one place that setup.py and the package read."""

__version__ = '0.2.0'
