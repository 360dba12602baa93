"""What an audit computes at the weights of a transform: as much as its verdicts need, and no more.

- Of the spectrum of H, the measures of the table use Tr H and Tr H^2, which every probe gives after two Lanczos steps,
  and its ends, where the head has the outliers. `FEW_STEPS` steps give the same as many, except for the bracket of an
  end inside the bulk. If that leaves a verdict open, all steps are made.
- A permutation w -> P w that keeps the function also permutes the Hessian, H(P w) = P H(w) P', and keeps its spectrum.
  For random v with E v v' = I the mean of |H(P w) P v - P H(w) v|^2 is |H(P w) - P H(w) P'|_F^2: if it is round-off for
  a few v, the run from before also serves after.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import NonFiniteError, UnsupportedError
from ..estimators.krylov_run import HEAD_BLOCK, HEAD_STEPS, NOISE_PRODUCTS
from ..estimators.quantities import Spectrum
from ..estimators.spectrum import spectrum
from ..operators.hessian import Hessian
from ..results import Estimate
from ..risk import Risk
from .measure import Progress
from .outputs import sample_outputs
from .registry import MEASURES
from .row import Measure
from .subject import HESSIAN_RUN, SHORT_RUN, Settings, Subject
from .transforms import TRANSFORMS

FEW_STEPS = 25  # gave ends inside the bulk to 0.1 %; 16 steps to 1 %
TURNING = ("permute",)  # transforms that possibly do no more than permute the matrix
VECTORS = 2  # random vectors on which this is checked
_GRADIENTS = 2.0  # cost of a product, in gradients
_PASS = 0.2  # cost of a forward pass, in products


def steps_elsewhere(rows: Sequence[Measure], num_steps: int) -> int:
    """Lanczos steps that are enough for these measures at other weights: few, unless one is not in the table.

    Example:
        >>> steps_elsewhere([MEASURES["trace"], MEASURES["lambda_min"]], num_steps=100)
        25
        >>> steps_elsewhere([replace(MEASURES["trace"], key="my_measure")], num_steps=100)
        100
    """
    known = all(row is MEASURES.get(row.key) for row in rows)
    return min(FEW_STEPS, num_steps) if known else num_steps


def places_of(
    risk: Risk, names: Sequence[str] = tuple(TRANSFORMS), strength: float = 4.0, seed: int = 0
) -> tuple[dict[str, Risk], dict[str, str]]:
    """The risk at the weights of each transform that applies, and why the others do not.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (torch.eye(2), torch.ones(2, 1)))
        >>> places, refused = places_of(risk)
        >>> list(places), refused["scale_output"]
        ([], 'the outputs of a regression are its predictions, and would be scaled')
    """
    places: dict[str, Risk] = {}
    refused: dict[str, str] = {}
    regression = not risk.opaque and sample_outputs(risk).classes == 0
    for name in names:
        if regression and TRANSFORMS[name].keeps == "prediction":
            refused[name] = "the outputs of a regression are its predictions, and would be scaled"
            continue
        try:
            places[name] = TRANSFORMS[name](risk, seed if name in TURNING else strength)
        except UnsupportedError as error:
            refused[name] = str(error)
    return places, refused


def short_run(subject: Subject, num_steps: int) -> Spectrum:
    """The run on the Hessian of a subject, with fewer steps than in its settings."""
    s = subject.settings
    kept = subject.kept(SHORT_RUN)
    return spectrum(subject.hessian, num_steps, s.num_probes, seed=s.seed, progress=subject.tell, checkpoint=kept)


def with_spectrum(rows: Sequence[Measure], run: Callable[[Subject], Spectrum]) -> list[Measure]:
    """The same measures, with another run on the Hessian instead of their own."""

    def given(row: Measure) -> Measure:
        def compute(subject: Subject) -> Estimate:
            subject.once(HESSIAN_RUN, lambda: run(subject))
            return row.compute(subject)

        return replace(row, compute=compute) if row.cost == "Hessian" else row

    return [given(row) for row in rows]


def cost_of(rows: Sequence[Measure], num_steps: int, num_probes: int) -> float:
    """Approximate number of products with the Hessian that a measurement takes.

    Example:
        >>> cost_of([MEASURES["trace"], MEASURES["lambda_max"]], num_steps=100, num_probes=8)
        899.2
    """
    run = num_steps * num_probes + HEAD_BLOCK * HEAD_STEPS + NOISE_PRODUCTS
    runs = len({row.cost for row in rows} & {"Hessian", "GGN"})
    return runs * run + sum(row.gradients for row in rows) / _GRADIENTS + _PASS


class Shares:
    """Progress over all transforms, by their expected costs."""

    def __init__(
        self, settings: Settings, rows: Sequence[Measure], places: Iterable[str], progress: Progress | None, known: bool
    ) -> None:
        self.progress, self.shown = progress, 0.0
        costs = {} if known else {"": cost_of(rows, settings.num_steps, settings.num_probes)}
        short = cost_of(rows, steps_elsewhere(rows, settings.num_steps), settings.num_probes)
        turned = cost_of([row for row in rows if row.cost != "Hessian"], 0, 0) + 4 * VECTORS
        costs |= {name: turned if name in TURNING else short for name in places}
        total = sum(costs.values())
        self.spans = {name: cost / total for name, cost in costs.items()}

    def of(self, name: str) -> Progress | None:
        """The progress function for one transform."""
        if self.progress is None:
            return None
        names = list(self.spans)
        first = sum(self.spans[other] for other in names[: names.index(name)])

        def report(text: str, part: float) -> None:
            assert self.progress is not None
            self.shown = min(max(self.shown, first + part * self.spans[name]), 1.0)  # a longer run begins again
            last = name == names[-1] and text == "done"
            told = text.partition(",")[0]  # without the expected time of a whole run
            self.progress(f"{name or 'as it is'}: {told}", 1.0 if last else self.shown)

        return report


# --------------------------------------------------------------------------------------------- turned matrices


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference of two products that counts as round-off of thousands of operations, in any order.

    Example:
        >>> [f"{tolerance(dtype):.0e}" for dtype in (torch.float64, torch.float32, torch.bfloat16)]
        ['9e-13', '5e-04', '1e-03']
    """
    return min(2**12 * torch.finfo(dtype).eps, 1e-3)  # a tenth of the change that an audit reports


def turning(risk: Risk, moved: Risk, move: Callable[[Risk], Risk], seed: int = 0) -> float:
    """How far H at the moved weights is from P H P', relative to H; infinite if `move` is not a permutation.

    Args:
        risk: The risk before the move.
        moved: The risk after it, `move(risk)`.
        move: A function that permutes the weights of any risk over this network in the same way.
        seed: Seed of the random vectors.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> risk = ritz.Risk(model.double(), torch.nn.CrossEntropyLoss(), (torch.eye(2).double(), torch.arange(2)))
        >>> turning(risk, ritz.transforms.permute(risk), ritz.transforms.permute) < 1e-12
        True
        >>> turning(risk, ritz.transforms.scale_output(risk, 2), lambda at: ritz.transforms.scale_output(at, 2))
        inf
    """
    vectors = risk.space.probes(range(VECTORS), seed, "normal").to(risk.device, risk.dtype)  # (VECTORS, dim)
    try:
        turned = torch.stack([_carried(risk, v, move) for v in vectors])
        if not torch.equal(turned.sort().values, vectors.sort().values):
            return math.inf
        images = Hessian(risk).rows(vectors)
        wanted = torch.stack([_carried(risk, row, move) for row in images])
        got = Hessian(moved).rows(turned)
    except (UnsupportedError, NonFiniteError):  # the network fails with such weights, or has no products
        return math.inf
    size, apart = float(wanted.double().norm()), float((got - wanted).double().norm())
    return apart / size if size else (0.0 if apart == 0 else math.inf)


def _carried(risk: Risk, vector: Tensor, move: Callable[[Risk], Risk]) -> Tensor:
    """P v: the move applied to the network with v, scaled to the size of its weights, as weights."""
    own, size = (float(x.norm()) for x in (risk.space.join(risk.params()), vector))
    if not (size > 0 and own > 0):
        return vector
    scale = 2.0 ** round(math.log2(own / size))  # a power of 2, so that no digit is lost
    moved = move(risk.at(vector * scale))
    return moved.space.join(moved.params()) / scale
