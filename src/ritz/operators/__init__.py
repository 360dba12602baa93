"""Curvature matrices, accessed through their products with vectors."""

from .algebra import (
    Block,
    DenseOperator,
    FunctionOperator,
    Metered,
    Projected,
    Scaled,
    Shifted,
    Sum,
    from_scipy,
    to_scipy,
)
from .base import Operator
from .gauss_newton import GGN, EmpiricalFisher, Fisher, GradientCovariance
from .hessian import Hessian
from .kronecker import KFACOperator
from .noise import BatchNoise
from .risk_operator import RiskOperator

__all__ = [
    "GGN",
    "BatchNoise",
    "Block",
    "DenseOperator",
    "EmpiricalFisher",
    "Fisher",
    "FunctionOperator",
    "GradientCovariance",
    "Hessian",
    "KFACOperator",
    "Metered",
    "Operator",
    "Projected",
    "RiskOperator",
    "Scaled",
    "Shifted",
    "Sum",
    "from_scipy",
    "to_scipy",
]
