"""Opening models and images, features of models, and merged checkpoints."""

from repa_mm.apis.images import read_images
from repa_mm.apis.models import open_model

__all__ = ['open_model', 'read_images']
