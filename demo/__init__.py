"""A small generated data set, and a demonstration that trains on it."""
