"""A solution under study: what its measures share is run once, when first asked for."""

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
SEARCHES = "searches"  # where those are kept that belong to one measure each
SHORT_RUN = "short run"  # in the place of that on the Hessian, where few steps do


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a measurement beside the solution itself.

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
    """A risk, test data and a start, and the runs that measures of them have in common.

    Args:
        risk: The solution on its training data.
        test: The same solution on test data.
        init: The weights that training began from.
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
        self.report: Report | None = None  # told of (done, total) while a run is under way
        self.tell: Report | None = None  # the same for runs that can be left by themselves: it does not raise
        self.seconds: dict[str, float] = {}  # what each run took
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
        """The weights that training began from, (P,).

        Raises:
            ValueError: If they were not given.
        """
        if self.init is None:
            raise ValueError("this needs the weights that training began from: pass init=")
        return self.init

    @property
    def outputs(self) -> Outputs:
        """One forward pass over the training data."""
        return self.once(FORWARD_PASS, lambda: sample_outputs(self.risk))

    @property
    def test_outputs(self) -> Outputs:
        """One forward pass over the test data.

        Raises:
            ValueError: If there is none.
        """
        test = self.test
        if test is None:
            raise ValueError("this needs test data: pass test=")
        return self.once("forward pass over test data", lambda: sample_outputs(test))

    @property
    def num_items(self) -> int:
        """What the mean loss is a mean over: samples, or tokens that count."""
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
        """A run on the Gauss-Newton matrix, for what needs a positive one."""
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
        """Remove the states of the runs, when all that was asked of them is kept elsewhere."""
        for name in (HESSIAN_RUN, SHORT_RUN, "GGN spectrum", "eigenpairs", SEARCHES):
            if (kept := self.kept(name)) is not None:
                kept.remove()

    def kept(self, name: str) -> Checkpoint | None:
        """Where a run keeps its state."""
        return None if self.checkpoint is None else self.checkpoint.within(name)

    def kept_search(self, name: str) -> Checkpoint | None:
        """The same for a search, or for what one measure alone asks for."""
        return None if self.checkpoint is None else self.checkpoint.within(SEARCHES).within(name)

    def searched(self, name: str, search: Callable[[], T]) -> T:
        """What a search gives; what it is told on its way is kept, and one that is done is not done again."""
        if self.checkpoint is None:
            return search()
        with resumable(self.kept_search(name), self.risk, name, asdict(self.settings)) as saved:
            if saved.result is not None:
                return saved.result  # type: ignore[no-any-return]
            with recalled(saved):
                found = search()
            if isinstance(found, Estimate):  # a measure of the user's may give anything, and is told so
                saved.finish(found)
        return found

    def once(self, name: str, run: Callable[[], T]) -> T:
        """What `run` gives, done once; what it raised, raised again and not run again."""
        if name not in self._done:
            start = time.perf_counter()
            try:
                self._done[name] = run()
            except Exception as error:
                self._done[name] = error.with_traceback(None)  # which would hold the memory of the run
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
        """What a run gave, or None where it was not asked for or failed."""
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
