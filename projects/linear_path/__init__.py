"""What channel idle deploys, trained as it is: the RePaFormer paper's ablation."""

from projects.linear_path.linear_path import LinearPathFFN
from projects.linear_path.structure import LinearPath

__all__ = ['LinearPath', 'LinearPathFFN']
