"""Whole models in ONNX and OpenVINO files: the export, int8, and the comparison with PyTorch."""
