"""To be removed."""
