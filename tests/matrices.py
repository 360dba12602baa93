"""Matrices with known spectra for the tests of Krylov runs and estimators."""

import torch
from torch import Tensor

from ritz.operators import DenseOperator
from ritz.space import ParamSpace


def rotated(eigenvalues: Tensor, seed: int = 0, positive: bool = False) -> DenseOperator:
    """The given spectrum in a random orthonormal basis."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=generator))
    operator = DenseOperator((basis * eigenvalues) @ basis.T)
    operator.positive = positive
    return operator


def matrix(spectrum: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with the given eigenvalues and random eigenvectors."""
    g = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), generator=g, dtype=torch.float64))
    A = Q * spectrum.double() @ Q.T
    return (A + A.T) / 2


def bulk(dim: int, seed: int = 0) -> Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed))


DIM = 160

# like a Hessian: a few large eigenvalues, a bulk around zero, some negative
OUTLIERS = torch.cat([torch.tensor([50.0, 30.0, 20.0, 10.0, 5.0, -3.0]), 0.3 * bulk(DIM - 6)])
# like a Gauss-Newton matrix: the same, positive
POSITIVE = OUTLIERS.abs()
# no outliers at all
FLAT = bulk(DIM, seed=1)

SPECTRA = {"outliers": OUTLIERS, "positive": POSITIVE, "flat": FLAT}


def operator(name: str) -> DenseOperator:
    return rotated(SPECTRA[name], positive=name == "positive")


def layered(name: str) -> DenseOperator:
    """The same matrix over three parameters, small and large."""
    A = operator(name)
    A.space = ParamSpace(("a", "b", "c"), (torch.Size([10]), torch.Size([5, 10]), torch.Size([100])))
    return A
