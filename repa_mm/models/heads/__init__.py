"""Registered heads."""
