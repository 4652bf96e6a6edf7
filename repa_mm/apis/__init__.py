"""Opening models and images, features of models, and merged checkpoints."""
