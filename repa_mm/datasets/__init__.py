"""Data transforms, and checks of data sets."""
