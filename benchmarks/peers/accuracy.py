"""What a spectrum is worth: errors of ritz's and of the peers' against the truth, and what an error costs.

The weights are trained, since a random network has no outliers: images of each class are a pattern of their own and
noise, one label in ten is wrong, and a few hundred steps of Adam learn them. The truth is the exact trace (by backward
passes; the networks are piecewise linear) and the largest eigenvalues, converged. Three numbers are asked for:

    the trace,    how many eigenvalues are outliers (the mass of the density beyond the widest gap),    the largest one.

Peers do what they offer: stochastic Lanczos quadrature, one probe after another, each with as many steps as ritz takes.
Their probes are independent and of one kind, so the error of one is measured with those of all tools together, and with
eight that ritz takes in the same plain way, which is cheaper; that of K is taken to be smaller by sqrt(K): it is
measured at 1, 2 and 4, and extrapolated beyond. From some ten probes it is known to a third or so; by formula it is
sqrt(2 Tr H^2) / Tr H for the trace and sqrt(2 / q) for the number q of outliers, and the lesser of the two is used. A
peer is charged for its products alone, in the faster of the ways in which it takes them, and ritz for its bookkeeping
too.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import ritz

from . import tools
from .clock import Clock
from .problems import Problem

TRAINING_STEPS = 300
OUTLIERS = 24  # of the largest eigenvalues that are looked at for the gap
MOST = {"cpu": None, "cuda": 480}  # products to converge them; residuals count squared where there are gaps
PROBES = {"cpu": 2, "cuda": 1}  # of each peer
GIVEN = (0.1, 0.05, 0.02, 0.01)  # relative errors, of the trace and of the number of outliers alike

Density = tuple[Tensor, Tensor]  # nodes and weights of one probe, which sum to 1


def learned(problem: Problem) -> Problem:
    """The same network, trained on images with patterns; in evaluation mode."""
    draw = torch.Generator().manual_seed(3)
    x = problem.batches[0][0]
    if not x.is_floating_point():
        raise ValueError(f"{problem.name} reads tokens; patterns are made for images")
    device, size = x.device, len(x)
    classes = int(problem.model(x[:2]).shape[-1])
    patterns = torch.randn(classes, *x.shape[1:], generator=draw)
    if x.ndim == 4:  # smooth ones
        coarse = torch.randn(classes, x.shape[1], 4, 4, generator=draw)
        patterns = interpolate(coarse, x.shape[2:], mode="bilinear")
    count = size * len(problem.batches)
    label = torch.randint(classes, (count,), generator=draw)
    images = (patterns[label] + torch.randn(count, *x.shape[1:], generator=draw)).to(device)
    wrong = torch.rand(count, generator=draw) < 0.1
    label = torch.where(wrong, torch.randint(classes, (count,), generator=draw), label).to(device)
    _train(problem.model, images, label, draw)
    return Problem(problem.name, problem.model.eval(), list(zip(images.split(size), label.split(size), strict=True)))


def _train(model: nn.Module, images: Tensor, label: Tensor, draw: torch.Generator) -> None:
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(TRAINING_STEPS):
        rows = torch.randint(len(images), (64,), generator=draw).to(images.device)
        optimizer.zero_grad()
        cross_entropy(model(images[rows]), label[rows]).backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------- truth


@dataclass(frozen=True)
class Truth:
    """What is to be found."""

    dim: int
    trace: float
    count: int  # outliers
    level: float  # they lie above it
    largest: float
    stop: str  # of the search for eigenvalues

    @classmethod
    def of(cls, problem: Problem) -> "Truth":
        H = ritz.Hessian(problem.risk(compile=False))
        pairs = ritz.top_eigenpairs(H, min(OUTLIERS, H.dim // 8), tol=1e-4, max_products=MOST[H.device.type])
        values = [value for value in pairs.values.tolist() if value > 0]
        count = max(range(3, len(values)), key=lambda n: values[n - 1] / values[n])
        trace = float(ritz.trace(H, "exact").value)
        return cls(H.dim, trace, count, math.sqrt(values[count - 1] * values[count]), values[0], pairs.stop)

    def read(self, density: Density) -> dict[str, float]:
        """The three numbers of one probe, relative to the truth."""
        nodes, weights = (x.double().cpu() for x in density)
        return {
            "trace": self.dim * float((nodes * weights).sum()) / self.trace,
            "outliers": self.dim * float(weights[nodes > self.level].sum()) / self.count,
            "largest": float(nodes.max()) / self.largest,
        }


# ------------------------------------------------------------------------------------------------- peers


def densities(problem: Problem, num_steps: int) -> dict[str, Callable[[int], Density]]:
    """Lanczos quadrature of one probe by each peer that is here, as a function of the seed."""
    absent = tools.missing()
    made = {"curvlinops": _curvlinops, "hessian_eigenthings": _eigenthings, "pyhessian": _pyhessian}
    return {name: make(problem, num_steps) for name, make in made.items() if name not in absent}


def _curvlinops(problem: Problem, num_steps: int) -> Callable[[int], Density]:
    import curvlinops
    from curvlinops.papyan2020traces.spectrum import fast_lanczos  # what its approximate spectra are made of

    model, batches = problem.flat()
    operator = curvlinops.HessianLinearOperator(
        model, problem.loss, list(model.parameters()), batches, check_deterministic=False
    )

    def run(seed: int) -> Density:
        torch.manual_seed(seed)
        nodes, vectors = fast_lanczos(operator, num_steps)
        return nodes, vectors[0].square()

    return run


def _eigenthings(problem: Problem, num_steps: int) -> Callable[[int], Density]:
    import hessian_eigenthings as he

    model, batches = problem.flat()
    operator = he.HessianOperator(model, batches, he.supervised_loss(problem.loss))

    def run(seed: int) -> Density:
        found = he.spectral_density(operator, num_runs=1, lanczos_steps=num_steps, num_grid_points=16, seed=seed)
        return found.raw_eigenvalues[0], found.raw_weights[0]

    return run


def _pyhessian(problem: Problem, num_steps: int) -> Callable[[int], Density]:
    from pyhessian import hessian

    model, batches = problem.flat()
    held = hessian(model, problem.loss, dataloader=batches, cuda=batches[0][0].is_cuda)

    def run(seed: int) -> Density:
        torch.manual_seed(seed)
        with _old_eigenvalues():
            nodes, weights = held.density(iter=num_steps, n_v=1)
        return torch.tensor(nodes[0]), torch.tensor(weights[0])

    return run


@contextlib.contextmanager
def _old_eigenvalues() -> Iterator[None]:
    """`torch.eig`, which PyHessian calls and torch has no more, for the symmetric matrix that it is given."""

    def eig(matrix: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(matrix)
        return torch.stack([values, torch.zeros_like(values)], 1), vectors

    before = getattr(torch, "eig", None)
    torch.eig = eig  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.eig = before  # type: ignore[attr-defined]


def run_probes(problem: Problem, truth: Truth, num_steps: int, device: str, limit: float) -> dict[str, dict[str, Any]]:
    """Some probes of each peer: their seconds and numbers; no further one is begun after `limit` seconds."""
    clock, found = Clock(device), {}
    for place, (tool, density) in enumerate(densities(problem, num_steps).items()):
        own: dict[str, Any] = {"seconds": [], "read": [], "failed": ""}
        while len(own["seconds"]) < PROBES[device] and sum(own["seconds"]) < limit:
            start = clock.now()
            try:
                with tools.twice_differentiable():
                    probe = density(100 * place + len(own["seconds"]))  # no seed twice: tools may draw alike
            except Exception as error:  # a peer may fail in any way
                own["failed"] = f"{type(error).__name__}: {str(error)[:120]}"
                break
            own["seconds"].append(clock.now() - start)
            own["read"].append(truth.read(probe))
        found[tool] = own
    return found


def plain_probes(H: ritz.Hessian, truth: Truth, num_steps: int) -> list[dict[str, float]]:
    """Eight probes by ritz as peers take theirs, without a head."""
    found = ritz.spectrum(H, num_steps, 8, seed=5, reorthogonalize="none").tail.gauss()
    return [truth.read(density) for density in zip(found.nodes, found.weights, strict=True)]


def rms(reads: list[dict[str, float]], what: str, size: int = 1) -> float | None:
    """Root mean square error of the mean of `size` probes, over as many disjoint groups as there are."""
    values = [read[what] - 1 for read in reads]
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]
    return math.sqrt(statistics.fmean(x * x for x in means)) if means else None


def expected_errors(found: ritz.Spectrum, truth: Truth) -> dict[str, float]:
    """Of one plain probe, uniform on the sphere: Var v'Av = 2 Tr A^2 for a normal v, with A = H or a projector."""
    square = math.sqrt(2 * float(found.moment(2).value))
    return {"trace": square / abs(truth.trace), "outliers": math.sqrt(2 / truth.count)}


def probes_needed(single: dict[str, float], given: float, least: int = 1) -> int:
    """How many independent probes bring the errors of one down to what is asked for."""
    return max(least, *(math.ceil((error / given) ** 2) for error in single.values()))


# -------------------------------------------------------------------------------------------------- ritz


def read_spectrum(found: ritz.Spectrum, truth: Truth) -> tuple[dict[str, float], dict[str, float]]:
    """The three numbers of a run relative to the truth, and the errors of a single probe of its tail."""
    values, num = truth.read((found.nodes, found.weights)), found.num_probes
    rule, share = found.tail.gauss(), (found.dim - len(found.head)) / truth.count
    outside = [float(w[t > truth.level].sum()) * share for t, w in zip(rule.nodes, rule.weights, strict=True)]
    single = {
        "trace": float(found.trace.stderr) * math.sqrt(num) / abs(truth.trace),
        "outliers": statistics.stdev(outside) if num > 1 else 0.0,
    }
    return values | {"trace": float(found.trace.value) / truth.trace}, single
