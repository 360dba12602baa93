"""Matrix products of a dense network alone, into memory that is there already: the least, from layer to layer.

In multiplications of a layer, for each vector: a tangent is multiplied with the weight and the input with the tangent
of the weight (2), the same on the way back for the gradient in the input (Hessian 2, Gauss-Newton 1), and the gradient
in the weight has two terms or one. The first layer, whose input has no tangent, takes 2 in all. So a Hessian product is
6 (2), a Gauss-Newton product 4 (2), where a gradient is 3 (2). What all vectors share is left out: it can be kept. In
factors, for few outputs, a Gauss-Newton product is 2 (2) and some small ones.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .problems import Problem

ALONE = "matrix products alone"  # the name of the arm


def widths(problem: Problem) -> list[int] | None:
    """Of a chain of dense layers; None for other networks."""
    layers = [m for m in problem.model.modules() if next(m.parameters(recurse=False), None) is not None]
    if not all(isinstance(m, nn.Linear) for m in layers):
        return None
    return [layers[0].in_features, *(m.out_features for m in layers)]


def counted(problem: Problem, matrix: str) -> float | None:
    """The multiplications of one product in those of a gradient, for a chain of dense layers."""
    sizes = widths(problem)
    if sizes is None:
        return None
    first, *others = (n * m for n, m in itertools.pairwise(sizes))
    each = {"Hessian": 6, "GGN": 4}[matrix]
    return (2 * first + each * sum(others)) / (2 * first + 3 * sum(others))


def floor_arms(problem: Problem, matrix: str, k: int) -> dict[str, Callable[[], Any]]:
    """The matrix products of k products, for a chain of dense layers."""
    sizes = widths(problem)
    if sizes is None:
        return {}
    x = problem.batches[0][0]
    layers = [_Layer(x.new_empty, len(x), k, n, m, matrix == "Hessian") for n, m in itertools.pairwise(sizes)]

    def run() -> None:
        for number, layer in enumerate(layers):
            layer.ahead(number > 0)
        for number, layer in reversed(list(enumerate(layers))):
            layer.back(number > 0)

    return {ALONE: run}


class _Layer:
    """Matrices of the sizes of one layer: x (B, n), weight (m, n), gradient (B, m), and K tangents of each."""

    def __init__(self, new: Callable[..., Tensor], batch: int, k: int, n: int, m: int, second: bool) -> None:
        self.x, self.weight, self.bar = (new(*shape).fill_(0.5) for shape in ((batch, n), (m, n), (batch, m)))
        self.dx, self.dweight, self.dbar = (x.expand(k, *x.shape).contiguous() for x in (self.x, self.weight, self.bar))
        self.out, self.image, self.into = (torch.empty_like(x) for x in (self.dbar, self.dweight, self.dx))
        self.k, self.second = k, second

    def _all(self, x: Tensor) -> Tensor:
        return x.expand(self.k, *x.shape)

    def ahead(self, deep: bool) -> None:
        torch.bmm(self._all(self.x), self.dweight.mT, out=self.out)
        if deep:
            self.out.flatten(0, 1).addmm_(self.dx.flatten(0, 1), self.weight.T)

    def back(self, deep: bool) -> None:
        torch.bmm(self.dbar.mT, self._all(self.x), out=self.image)
        if deep:
            torch.mm(self.dbar.flatten(0, 1), self.weight, out=self.into.flatten(0, 1))
        if deep and self.second:
            self.image.baddbmm_(self._all(self.bar.T), self.dx)
            self.into.baddbmm_(self._all(self.bar), self.dweight)
