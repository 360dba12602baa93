"""Damping and sharp directions in softmax regression: section 5 and figures 4 to 6 of seed 004, over several seeds.

Softmax regression on 1,000 images of MNIST and Fashion-MNIST, P = 7,850, 500 steps on all of them at alpha = 0.01:
LanczosOPT with k = 50 at a grid of dampings delta, its movement along the Ritz vectors divided by eta = 1, 3 and 10,

    w <- w - alpha [ (1 / eta) sum_(i <= k) phi_i phi_i'g / (lambda_i + delta) + (I - sum_i phi_i phi_i') g / delta ]

(equation 9), beside gradient descent at the same alpha. The paper runs each once and does not state its dampings. Here
a seed gives the 1,000 images and the start, which all runs of it share, so that they are compared at equal seed.

The runs of a seed are made in lock-step: their weights are the rows of one matrix, and one Lanczos run of `ritz.krylov`
has a row for each of them, so that a product with all their Hessians is two matrix products. `ritz.optim.LanczosOpt`
with tol=math.inf takes the same steps one run at a time; a test holds them together. `logistic_damping_claims` judges.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batches import isolated_rng
from ..krylov.lanczos import lanczos
from ..krylov.quadrature import eigen_system
from ..operators.base import Operator, full_precision
from ..optim.lanczos_opt import ritz_pairs
from ..space import ParamSpace, random_permutation
from .data.images import Data

Progress = Callable[[int, int], None]  # (done, total)

DATASETS = ("MNIST", "FashionMNIST")
NUM_TRAIN = 1000
ALPHA = 0.01
STEPS = 500
LANCZOS_STEPS = 50
EVERY = 10  # steps from one point of a curve to the next
ETAS = (1.0, 3.0, 10.0)
# Ours: the paper does not say which it took. At 1 the rate along flat directions, alpha / delta, is that of gradient
# descent; at 1e-4 it overshoots.
DAMPINGS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
CLASSES = 10

# what is recorded along a run, and what it means
MEANING = {
    "train_loss": "mean cross-entropy of the training images",
    "train_error": "%, of the training images",
    "test_loss": "mean cross-entropy of the test images",
    "test_error": "%, of the test images",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """One run: its settings and its curves.

    Attributes:
        seed: Of the images, the start and the Lanczos starts.
        damping: delta; None for gradient descent.
        eta: What the rates along the Ritz vectors are divided by; None for gradient descent.
        steps: At which the curves have points, from 0 to the last.
        curves: By the keys of `MEANING`, a number for each of `steps`, float64.
        values: Ritz values of the last step, descending (k,); none for gradient descent.
        residuals: Their residual norms |H phi - lambda phi|.
    """

    seed: int
    damping: float | None
    eta: float | None
    steps: tuple[int, ...]
    curves: Mapping[str, Tensor]
    values: Tensor
    residuals: Tensor

    def final(self, key: str) -> float:
        """The last value of a curve."""
        return float(self.curves[key][-1])


def draw(data: Data, seed: int, num: int = NUM_TRAIN) -> Data:
    """The training images of a seed: `num` of the data at random, without replacement, the same on every machine.

    Raises:
        ValueError: If there are fewer.

    Example:
        >>> X, y = draw((torch.arange(5.0)[:, None], torch.arange(5)), seed=0, num=3)
        >>> X[:, 0].tolist() == y.tolist(), len(set(y.tolist()))
        (True, 3)
    """
    X, y = data
    if not 0 < num <= len(X):
        raise ValueError(f"expected from 1 to {len(X)} images to draw, got {num}")
    chosen = random_permutation(len(X), ("logistic_damping images", seed))[:num]
    return X[chosen], y[chosen]


def start(num_inputs: int, seed: int) -> Tensor:
    """PyTorch's own initialisation of the linear layer from a seed, weights then biases, (P,) float32.

    Not zero: there every eigenvalue of the Hessian is repeated nine times, and Lanczos sees one copy.

    Example:
        >>> start(784, seed=0).shape
        torch.Size([7850])
    """
    with isolated_rng(seed):
        layer = nn.Linear(num_inputs, CLASSES, dtype=torch.float32)
    return torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])


# --------------------------------------------------------------------------------------------- the runs


@full_precision()
@torch.no_grad()
def train_lanczos(
    train: Data, test: Data, seed: int, dampings: Sequence[float] = DAMPINGS, etas: Sequence[float] = ETAS,
    *, steps: int = STEPS, num_lanczos: int = LANCZOS_STEPS, alpha: float = ALPHA, every: int = EVERY,
    progress: Progress | None = None,
) -> tuple[Run, ...]:  # fmt: skip
    """LanczosOPT at every damping and eta, all runs in lock-step, in the precision of the data.

    Args:
        train, test: Images (N, d) and labels from 0 to 9.
        seed: Of the start, and of the random vector that Lanczos starts from, another one at every step.
        dampings, etas: All positive and different.
        steps, num_lanczos, alpha: Steps, k and the rate of equation 9.
        every: Steps from one point of the curves to the next; the first and the last are always there.
        progress: Called as progress(steps done, steps).

    Raises:
        ValueError: If an argument is out of range or the data does not fit.

    Example:
        >>> X, y = torch.eye(10, dtype=torch.float64), torch.arange(10)
        >>> slow, fast = train_lanczos((X, y), (X, y), 0, dampings=(1.0, 0.01), etas=(1.0,), steps=5, num_lanczos=20)
        >>> fast.final("train_loss") < slow.final("train_loss") < float(slow.curves["train_loss"][0])
        True
    """
    _check(train, test, dampings, etas, steps, num_lanczos, every)
    X, y = train
    pixels = X.T.contiguous()  # half of all time is spent in products with it
    pairs = [(damping, eta) for damping in dampings for eta in etas]
    damping, eta = (X.new_tensor(column)[:, None] for column in zip(*pairs, strict=True))  # (runs, 1)
    last: dict[str, Tensor] = {}

    def direction(weights: Tensor, step: int) -> Tensor:
        """The bracket of equation 9 for every run, (runs, P)."""
        probabilities = _outputs(weights, pixels).softmax(1)
        g = _gradients(probabilities, X, y)
        operator = _Hessians(X, pixels, probabilities)
        rows = operator.probes([step], seed, "normal").expand(len(pairs), -1)
        state = lanczos(operator, rows, min(num_lanczos, operator.dim), reorthogonalize="full")
        assert state.basis is not None
        beta = state.beta.cpu()
        values, vectors = eigen_system(state.alpha.cpu(), beta[:, :-1])  # (runs, k), (runs, k, k)
        last.update(values=values, residuals=beta[:, -1:] * vectors[:, -1].abs())
        along = torch.einsum("krp,rp->rk", state.basis, g)
        weight = 1 / (eta * (values.to(X).abs() + damping)) - 1 / damping
        mix = vectors.to(X)  # columns are eigenvectors of T
        along = (mix @ (weight * (along[:, None] @ mix)[:, 0])[:, :, None])[:, :, 0]
        return g / damping + torch.einsum("krp,rk->rp", state.basis, along)

    points = _points(steps, every)
    curves = _follow(train, test, seed, len(pairs), direction, points, alpha, progress)
    return tuple(
        Run(
            seed=seed, damping=damping, eta=eta, steps=points, curves=curves[at],
            values=last["values"][at].flip(0), residuals=last["residuals"][at].flip(0),
        )
        for at, (damping, eta) in enumerate(pairs)
    )  # fmt: skip


@full_precision()
@torch.no_grad()
def train_descent(
    train: Data, test: Data, seed: int, *, steps: int = STEPS, alpha: float = ALPHA, every: int = EVERY,
    progress: Progress | None = None,
) -> Run:  # fmt: skip
    """Gradient descent, w <- w - alpha g, from the same start.

    Example:
        >>> X, y = torch.eye(10, dtype=torch.float64), torch.arange(10)
        >>> run = train_descent((X, y), (X, y), seed=0, steps=5, every=2)
        >>> run.steps, len(run.curves["test_error"]), run.damping is None
        ((0, 2, 4, 5), 4, True)
    """
    _check(train, test, (1.0,), (1.0,), steps, 1, every)

    def direction(weights: Tensor, step: int) -> Tensor:
        return _gradients(_outputs(weights, train[0].T).softmax(1), *train)

    points = _points(steps, every)
    (curves,) = _follow(train, test, seed, 1, direction, points, alpha, progress)
    none = torch.zeros(0, dtype=torch.float64)
    return Run(seed=seed, damping=None, eta=None, steps=points, curves=curves, values=none, residuals=none)


def _points(steps: int, every: int) -> tuple[int, ...]:
    """The steps at which curves have points."""
    return (*range(0, steps, every), steps)


def _follow(
    train: Data, test: Data, seed: int, runs: int, direction: Callable[[Tensor, int], Tensor], points: Sequence[int],
    alpha: float, progress: Progress | None,
) -> list[Mapping[str, Tensor]]:  # fmt: skip
    """Steps of `alpha` times `direction`(weights, number of the step) up to the last point; the curves of every run."""
    weights = start(train[0].shape[1], seed).to(train[0]).repeat(runs, 1)
    found = []
    for step in range(points[-1] + 1):
        if step:
            weights = weights - alpha * direction(weights, step)
        if step in points:
            found.append(torch.stack([*_fit(weights, train), *_fit(weights, test)]).double().cpu())
        if step and progress is not None:
            progress(step, points[-1])
    curves = torch.stack(found, dim=-1)  # (keys, runs, points)
    return [MappingProxyType(dict(zip(MEANING, curves[:, run], strict=True))) for run in range(runs)]


def _check(
    train: Data, test: Data, dampings: Sequence[float], etas: Sequence[float], steps: int, num_lanczos: int, every: int
) -> None:
    for X, y in (train, test):
        if X.ndim != 2 or y.shape != X.shape[:1] or not len(X) or X.shape[1] != train[0].shape[1]:
            raise ValueError(f"expected images (N, d) and labels (N,), got {tuple(X.shape)} and {tuple(y.shape)}")
        if y.is_floating_point() or int(y.min()) < 0 or int(y.max()) >= CLASSES:
            raise ValueError(f"labels must be integers from 0 to {CLASSES - 1}, got {y.dtype} to {y.max()}")
    for name, values in (("dampings", dampings), ("etas", etas)):
        if not values or len(set(values)) < len(values) or not min(values) > 0:
            raise ValueError(f"expected positive {name}, all different, got {tuple(values)}")
    if min(steps, num_lanczos, every) < 1:
        raise ValueError(f"steps, num_lanczos and every must be at least 1, got {steps}, {num_lanczos} and {every}")


# -------------------------------------------------------------------------------------------- reference


@dataclass(frozen=True, eq=False, kw_only=True)
class Reference:
    """How far the step of k Lanczos steps is from equation 9 with the k largest eigenpairs.

    Attributes:
        seed: Of the images, the start and the Lanczos start.
        after: Steps of gradient descent that led to the weights.
        converged: How many of the k Ritz pairs have a residual below 1e-6 times the largest.
        distances: By damping, |step - exact step| / |exact step|, at eta = 1.
    """

    seed: int
    after: int
    converged: int
    distances: Mapping[float, float]


@full_precision()
@torch.no_grad()
def compare_exact(
    train: Data, seed: int, after: int, dampings: Sequence[float] = DAMPINGS,
    *, num_lanczos: int = LANCZOS_STEPS, enough: int = 10 * LANCZOS_STEPS, alpha: float = ALPHA,
) -> Reference:  # fmt: skip
    """The step of `num_lanczos` Lanczos steps beside that of as many eigenpairs, from `enough` steps, in float64.

    Raises:
        ValueError: If an argument is out of range, the data does not fit, or `enough` steps are not enough.

    Example:
        >>> data = torch.eye(4, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
        >>> found = compare_exact(data, 0, after=1, dampings=(1.0,), num_lanczos=50, enough=50)  # all there are
        >>> found.distances[1.0] < 1e-9
        True
    """
    _check(train, train, dampings, (1.0,), after + 1, num_lanczos, 1)
    X, y = train[0].double(), train[1]
    pixels, weights = X.T.contiguous(), start(X.shape[1], seed).double()[None]
    for _ in range(after):
        weights = weights - alpha * _gradients(_outputs(weights, pixels).softmax(1), X, y)
    probabilities = _outputs(weights, pixels).softmax(1)
    (g,) = _gradients(probabilities, X, y)
    operator = _Hessians(X, pixels, probabilities)
    rows = operator.probes([1], seed, "normal")
    few, many = (ritz_pairs(operator, rows, min(num, operator.dim)) for num in (num_lanczos, enough))
    exact = many[0][-num_lanczos:], many[1][-num_lanczos:]
    if float(many[2][-num_lanczos:].max()) > 1e-6 * float(exact[0][-1]):
        raise ValueError(f"{enough} Lanczos steps do not give {num_lanczos} eigenpairs; raise enough")

    def bracket(values: Tensor, basis: Tensor, damping: float) -> Tensor:
        weight = 1 / (values + damping) - 1 / damping
        step: Tensor = g / damping + ((basis @ g) * weight) @ basis
        return step

    def distance(damping: float) -> float:
        true = bracket(*exact, damping)
        return float((bracket(few[0], few[1], damping) - true).norm() / true.norm())

    return Reference(
        seed=seed, after=after, converged=int((few[2] < 1e-6 * few[0][-1]).sum()),
        distances=MappingProxyType({damping: distance(damping) for damping in dampings}),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ softmax regression


class _Hessians(Operator):
    """Row i times the Hessian of run i: the diagonal blocks of one large matrix, one for each row that it is given.

    With p the probabilities of an image x, the block is the mean over images of (diag p - p p') kron x x'.
    """

    matrix = "Hessian"
    positive = True

    def __init__(self, X: Tensor, pixels: Tensor, probabilities: Tensor) -> None:
        self.X, self.pixels = X, pixels  # (n, d), and as columns (d, n)
        self.probabilities = probabilities  # (runs, classes, n)
        self.space = ParamSpace(("weight", "bias"), (torch.Size([CLASSES, X.shape[1]]), torch.Size([CLASSES])))
        self.dtype, self.device = X.dtype, X.device

    def _rows(self, rows: Tensor) -> Tensor:
        change = _outputs(rows, self.pixels).mul_(self.probabilities)
        return _pulled_back(change.sub_(self.probabilities * change.sum(1, keepdim=True)), self.X)


def _outputs(weights: Tensor, pixels: Tensor) -> Tensor:
    """Of every run for every image, (runs, classes, n), from weights (runs, P) and pixels (d, n)."""
    size = CLASSES * len(pixels)
    flat = weights[:, :size].reshape(-1, len(pixels)) @ pixels
    return flat.view(len(weights), CLASSES, -1).add_(weights[:, size:, None])


def _pulled_back(outputs: Tensor, X: Tensor) -> Tensor:
    """The mean over images of what an output weighs in each weight, (runs, P)."""
    weight = outputs.reshape(-1, len(X)) @ X
    return torch.cat([weight.view(len(outputs), -1), outputs.sum(-1)], dim=1).div_(len(X))


def _gradients(probabilities: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Of the mean cross-entropy, (runs, P)."""
    return _pulled_back(probabilities - F.one_hot(y, CLASSES).T, X)


def _fit(weights: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and error in % of every run, each (runs,)."""
    X, y = data
    outputs = _outputs(weights, X.T)
    loss = F.cross_entropy(outputs, y.expand(len(weights), -1), reduction="none").mean(1)
    return loss, 100 * (outputs.argmax(1) != y).to(loss).mean(1)
