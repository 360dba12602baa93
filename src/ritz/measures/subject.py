"""A solution under study: runs that its measures share are made once, when first needed."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import Tensor

from ..checkpoint import Checkpoint
from ..estimators.quantities import Spectrum
from ..estimators.spectrum import spectrum
from ..fingerprints import resumable
from ..krylov.eigen import EigenPairs, top_eigenpairs
from ..operators.base import Operator
from ..operators.gauss_newton import GGN
from ..operators.hessian import Hessian
from ..results import Estimate
from ..risk import Risk
from ..space import row_norms
from ..weights import by_first_names
from .answers import recalled
from .outputs import Outputs, sample_outputs

T = TypeVar("T")
Report = Callable[[int, int], None]  # (done, total) of the run now under way

NUM_EIGENPAIRS = 10
HESSIAN_RUN, FORWARD_PASS = "Hessian spectrum", "forward pass"  # runs whose results are part of a measurement
SEARCHES = "searches"  # folder of the searches that belong to one measure each
SHORT_RUN = "short run"  # instead of the run on the Hessian, if few steps are enough


@dataclass(frozen=True)
class Settings:
    """What determines the numbers of a measurement besides the solution itself.

    Example:
        >>> Settings(num_probes=0)
        Traceback (most recent call last):
        ValueError: num_probes must be at least 1, got 0
    """

    num_steps: int = 100
    num_probes: int = 8
    seed: int = 0
    sigma: float = 1.0  # standard deviation of the prior of the Laplace measures

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_probes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"sigma must be positive and finite, got {self.sigma}")


class Subject:
    """A risk, test data and initial weights, and the runs that their measures share.

    Args:
        risk: The solution on its training data.
        test: The same solution on test data.
        init: The initial weights of training.
        settings: Probes, steps and seed.
        checkpoint: Where the runs keep their state.

    Example:
        >>> data = torch.ones(2, 3), torch.tensor([0, 1])
        >>> subject = Subject(ritz.Risk(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), data))
        >>> subject.spectrum is subject.spectrum, subject.weights.shape
        (True, torch.Size([8]))
    """

    def __init__(
        self,
        risk: Risk,
        test: Risk | None = None,
        init: Tensor | None = None,
        settings: Settings = Settings(),  # noqa: B008 (frozen)
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.risk, self.test, self.init, self.settings, self.checkpoint = risk, test, init, settings, checkpoint
        self.report: Report | None = None  # called with (done, total) during a run
        self.tell: Report | None = None  # the same for runs that handle stops themselves: it does not raise
        self.seconds: dict[str, float] = {}  # time of each run
        self._done: dict[str, Any] = {}

    @property
    def weights(self) -> Tensor:
        """The chosen parameters as one vector (P,)."""
        return self.once("weights", lambda: self.risk.space.join(self.risk.params()))

    @property
    def weight_norm(self) -> float:
        """Their Euclidean norm, not squared."""
        return float(row_norms(self.weights[None].double()))

    @property
    def start(self) -> Tensor:
        """The initial weights of training, (P,).

        Raises:
            ValueError: If they were not given.
        """
        if self.init is None:
            raise ValueError("this needs the initial weights of training: pass init=")
        return self.init

    @property
    def outputs(self) -> Outputs:
        """One forward pass over the training data."""
        return self.once(FORWARD_PASS, lambda: sample_outputs(self.risk))

    @property
    def test_outputs(self) -> Outputs:
        """One forward pass over the test data.

        Raises:
            ValueError: If there are no test data.
        """
        test = self.test
        if test is None:
            raise ValueError("this needs test data: pass test=")
        return self.once("forward pass over test data", lambda: sample_outputs(test))

    @property
    def num_items(self) -> int:
        """The number of items that the mean loss averages over: samples, or tokens that count."""
        return self.risk.num_samples if self.risk.opaque else len(self.outputs.loss)

    @property
    def loss(self) -> float:
        """The mean loss over the training data."""
        return self.once("loss", self.risk.loss)

    @property
    def hessian(self) -> Hessian:
        """The Hessian of the training loss."""
        return self.once("Hessian", lambda: Hessian(self.risk))

    @property
    def spectrum(self) -> Spectrum:
        """The run that gives everything about the Hessian."""
        return self.once(HESSIAN_RUN, lambda: self._run(self.hessian, HESSIAN_RUN))

    @property
    def ggn_spectrum(self) -> Spectrum:
        """The run on the Gauss-Newton matrix, for measures that need a positive matrix."""
        return self.once("GGN spectrum", lambda: self._run(GGN(self.risk), "GGN spectrum"))

    @property
    def eigenpairs(self) -> EigenPairs:
        """The largest eigenvalues of the Hessian."""
        k = min(NUM_EIGENPAIRS, self.risk.dim)
        options: dict[str, Any] = {"tol": 1e-4, "seed": self.settings.seed, "progress": self.tell}
        kept = self.kept("eigenpairs")
        return self.once("eigenpairs", lambda: top_eigenpairs(self.hessian, k, **options, checkpoint=kept))

    def _run(self, operator: Operator, name: str) -> Spectrum:
        s, kept = self.settings, self.kept(name)
        return spectrum(operator, s.num_steps, s.num_probes, seed=s.seed, progress=self.tell, checkpoint=kept)

    def forget(self) -> None:
        """Remove the states of the runs, once all their results are saved elsewhere."""
        for name in (HESSIAN_RUN, SHORT_RUN, "GGN spectrum", "eigenpairs", SEARCHES):
            if (kept := self.kept(name)) is not None:
                kept.remove()

    def kept(self, name: str) -> Checkpoint | None:
        """Where a run keeps its state."""
        return None if self.checkpoint is None else self.checkpoint.within(name)

    def kept_search(self, name: str) -> Checkpoint | None:
        """The same for a search, or for a run that only one measure needs."""
        return None if self.checkpoint is None else self.checkpoint.within(SEARCHES).within(name)

    def searched(self, name: str, search: Callable[[], T]) -> T:
        """The result of a search; its evaluations are saved, and a finished search is not repeated."""
        if self.checkpoint is None:
            return search()
        with resumable(self.kept_search(name), self.risk, name, asdict(self.settings)) as saved:
            if saved.result is not None:
                return saved.result  # type: ignore[no-any-return]
            with recalled(saved):
                found = search()
            if isinstance(found, Estimate):  # a user's measure may return anything, which is refused later
                saved.finish(found)
        return found

    def once(self, name: str, run: Callable[[], T]) -> T:
        """The result of `run`, which is called once; an error that it raised is raised again."""
        if name not in self._done:
            start = time.perf_counter()
            try:
                self._done[name] = run()
            except Exception as error:
                self._done[name] = error.with_traceback(None)  # a traceback would hold the memory of the run
            self.seconds[name] = time.perf_counter() - start
        found = self._done[name]
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    @property
    def runs(self) -> list[str]:
        """The runs that were made and did not fail."""
        return [name for name in self._done if self.peek(name) is not None]

    def peek(self, name: str) -> Any:
        """The result of a run, or None if it was not made or failed."""
        found = self._done.get(name)
        return None if isinstance(found, Exception) else found


def as_vector(risk: Risk, weights: Mapping[str, Tensor] | Tensor) -> Tensor:
    """Weights given as a state dict, named tensors or a flat vector, as the flat vector (P,) of the risk.

    Raises:
        ValueError: If a chosen parameter is missing or has another shape.

    Example:
        >>> data = torch.ones(1, 2), torch.tensor([0])
        >>> risk = ritz.Risk(torch.nn.Linear(2, 1), torch.nn.CrossEntropyLoss(), data)
        >>> as_vector(risk, {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}).tolist()
        [1.0, 2.0, 3.0]
    """
    space = risk.space
    if not isinstance(weights, Tensor | Mapping):
        raise TypeError(
            f"expected named tensors (a state_dict) or a flat vector of weights, got {type(weights).__name__}"
        )
    if isinstance(weights, Tensor):
        if weights.shape != (space.dim,):
            raise ValueError(f"expected a flat vector (dim={space.dim},), got {tuple(weights.shape)}")
        return weights.detach().to(risk.device, risk.dtype)
    weights = by_first_names(weights, risk.model)
    for name, shape in zip(space.names, space.shapes, strict=True):
        if name not in weights:
            raise ValueError(f"the weights have no {name!r}; there are: {', '.join(list(weights)[:20])}")
        if weights[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(shape)}, got {tuple(weights[name].shape)}")
    return space.join({name: weights[name].detach().to(risk.device, risk.dtype) for name in space.names})
