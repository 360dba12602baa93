"""Ritz and its peers behind one face: a function of columns V (dim, k) that gives A V.

A peer is called in the way its documentation shows, on the same batches, which lie on the device already; checks that
it makes when an operator is built are left out of the time.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ritz

from .problems import Problem

Product = Callable[[Tensor], Tensor]
Arms = dict[str, Callable[[], Any]]
PEERS = {
    "curvlinops": "curvlinops-for-pytorch", "hessian_eigenthings": "hessian-eigenthings", "pyhessian": "PyHessian",
    "backpack": "backpack-for-pytorch",
}  # fmt: skip


def missing() -> dict[str, str]:
    """The peers that cannot be imported here, and why."""
    found = {}
    for name in PEERS:
        try:
            importlib.import_module(name)
        except Exception as error:  # a peer may fail in any way
            found[name] = f"{type(error).__name__}: {error}"
    return found


def versions() -> dict[str, str]:
    """Of the peers that are here; "?" for one without its metadata."""
    absent, found = missing(), {}
    for name, package in PEERS.items():
        if name in absent:
            continue
        found[name] = getattr(importlib.import_module(name), "__version__", "?")
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by the kernel that has a second derivative, for peers that do not see to it."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def multiplied(precision: str) -> Iterator[None]:
    """Float32 multiplied in float32 or in TF32, by convolutions as well; by the old switches, which compilers read."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def vectors(problem: Problem, k: int) -> Tensor:
    """Columns (dim, k), the same at every call; drawn where they are used, since there may be a billion numbers."""
    device = problem.batches[0][0].device
    return torch.randn(problem.dim, k, generator=torch.Generator(device).manual_seed(2), device=device)


def one_by_one(product: Product) -> Product:
    """A tool that knows single vectors, given several."""

    def run(V: Tensor) -> Tensor:
        return torch.stack([product(v) for v in V.unbind(1)], 1)

    return run


# ------------------------------------------------------------------------------------------------- ritz


@dataclass(frozen=True, eq=False)
class Ours:
    """A matrix of ritz, taken in one way."""

    operator: ritz.operators.RiskOperator

    def __call__(self, V: Tensor) -> Tensor:
        return self.operator @ V

    @property
    def way(self) -> dict[str, Any]:
        """How products came to be taken."""
        shortcuts = self.operator.risk.shortcuts
        return {
            "route": getattr(self.operator, "route", ""), "chunk": self.operator._chunk,
            "recorded": len(shortcuts.recordings), "compiled": len(shortcuts.compilations),
        }  # fmt: skip


def ours(problem: Problem, matrix: str, **plan: Any) -> Ours:
    """The matrix of that name by a plan."""
    return Ours((ritz.Hessian if matrix == "Hessian" else ritz.GGN)(problem.risk(**plan)))


def ritz_arms(problem: Problem, matrix: str, compiled: bool) -> dict[str, Ours]:
    """As a user gets it in a short run, compiled as in a long one, and each way by itself."""
    arms = {"ritz": ours(problem, matrix, compile=False)}
    if compiled:
        arms["ritz, compiled"] = ours(problem, matrix, compile=True)
    if problem.batches[0][0].is_cuda:
        arms["ritz, eager"] = ours(problem, matrix, compile=False, replay=False)
        if compiled:  # where what vectors share is kept from one product to the next
            arms["ritz, compiled, nothing kept"] = ours(problem, matrix, compile=True, cache=False)
    else:  # where tapes are kept from one product to the next
        arms["ritz, nothing kept"] = ours(problem, matrix, compile=False, cache=False)
    if matrix == "Hessian":
        for route in ("forward", "reverse"):
            arms[f"ritz, {route}"] = ours(problem, matrix, compile=False, replay=False, route=route)
    return arms


# ------------------------------------------------------------------------------------------------ peers


def _curvlinops(problem: Problem, matrix: str) -> Product:
    import curvlinops

    kind = {"Hessian": curvlinops.HessianLinearOperator, "GGN": curvlinops.GGNLinearOperator}[matrix]
    model, batches = problem.flat()
    with twice_differentiable():
        operator = kind(model, problem.loss, list(model.parameters()), batches, check_deterministic=False)
    return lambda V: operator @ (V[:, 0] if V.shape[1] == 1 else V)


def _eigenthings(problem: Problem, matrix: str) -> Product:
    import hessian_eigenthings as he

    model, batches = problem.flat()
    if matrix == "Hessian":
        operator = he.HessianOperator(model, batches, he.supervised_loss(problem.loss))
    else:
        of_output = he.supervised_loss_of_output(problem.loss)
        operator = he.GGNOperator(model, batches, he.supervised_forward, of_output)
    return one_by_one(operator.matvec)


def _pyhessian(problem: Problem, matrix: str) -> Product:
    if matrix != "Hessian":
        raise NotImplementedError("PyHessian knows the Hessian alone")
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    model, batches = problem.flat()
    alone = len(batches) == 1  # then it keeps the gradient and its graph from one product to the next
    data = {"data": batches[0]} if alone else {"dataloader": batches}
    held = hessian(model, problem.loss, cuda=batches[0][0].is_cuda, **data)
    sizes = [p.numel() for p in held.params]

    def product(v: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(v.split(sizes), held.params, strict=True)]
        if alone:
            found = hessian_vector_product(held.gradsH, held.params, parts)
        else:
            found = held.dataloader_hv_product(parts)[1]
        return torch.cat([x.flatten() for x in found]).detach()

    return one_by_one(product)


def _backpack(problem: Problem, matrix: str) -> Product:
    from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
    from backpack.hessianfree.hvp import hessian_vector_product

    model, batches = problem.flat()
    params = list(model.parameters())
    sizes = [p.numel() for p in params]

    def product(v: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(v.split(sizes), params, strict=True)]
        total = torch.zeros_like(v)
        for x, y in batches:
            out = model(x)
            loss = problem.loss(out, y)
            if matrix == "Hessian":
                found = hessian_vector_product(loss, params, parts)
            else:
                found = ggn_vector_product_from_plist(loss, out, params, parts)
            total += torch.cat([g.flatten() for g in found]).detach()
        return total / len(batches)

    return one_by_one(product)


_MAKERS = {
    "curvlinops": _curvlinops, "hessian_eigenthings": _eigenthings, "pyhessian": _pyhessian, "backpack": _backpack,
}  # fmt: skip


@dataclass(eq=False)
class Peer:
    """A matrix of a peer, made when it is first asked for: one that fails then is no reason to leave out others."""

    name: str
    problem: Problem
    matrix: str

    @cached_property
    def product(self) -> Product:
        return _MAKERS[self.name](self.problem, self.matrix)

    def __call__(self, V: Tensor) -> Tensor:
        with twice_differentiable():
            out = self.product(V)
        return out[:, None] if out.ndim == 1 else out


def peer_arms(problem: Problem, matrix: str, names: tuple[str, ...] = tuple(_MAKERS)) -> dict[str, Peer]:
    """Products of the peers that are here and know this matrix."""
    absent = missing()
    known = (name for name in names if not (name == "pyhessian" and matrix != "Hessian"))
    return {name: Peer(name, problem, matrix) for name in known if name not in absent}


# ------------------------------------------------------------------------------------------- yardsticks


def gradient_arms(problem: Problem, compiled: bool) -> Arms:
    """The gradient of the first batch, as it is and compiled: what all times are told in."""
    model, params = problem.model, list(problem.model.parameters())
    x, y = problem.batches[0]

    def total(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def gradient(total: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(total(x, y), params)

    arms = {"gradient": gradient(total)}
    if compiled:
        arms["gradient, compiled"] = gradient(torch.compile(total, dynamic=False))
    return arms


def truth(problem: Problem, matrix: str, v: Tensor) -> Tensor:
    """A v in float64, two passes in reverse as they are."""
    exact = problem.to(torch.float64)
    operator = ours(exact, matrix, route="reverse", replay=False, compile=False).operator
    if isinstance(operator, ritz.GGN):
        operator._forward_mode = False  # J v as well by two passes in reverse
    return (operator @ v.double()).to(v.dtype)
