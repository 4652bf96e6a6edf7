"""Deploy forms outside of PyTorch."""
