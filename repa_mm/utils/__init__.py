"""Helpers that belong to no part of the method."""
