"""A small data set made on the spot, and a demonstration that trains on it."""
