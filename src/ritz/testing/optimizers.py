"""Whether an optimiser keeps to the manners of torch.optim: the same questions for any of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..batches import isolated_rng
from .conventions import CHECKS
from .trial import Make, NonFinite, Trial, restored_settings


@dataclass(frozen=True)
class OptimizerReport:
    """The checks of an optimiser.

    Attributes:
        name: Its class.
        passed: The checks that hold, in order.
        skipped: Those left out, and why.

    Example:
        >>> print(OptimizerReport("SGD", ("rng",), {"nonfinite": "torch steps along it"}))
        SGD: 1 of 21 checks hold
        rng: The global generators of torch, NumPy and Python are not used
        nonfinite: left out, torch steps along it
    """

    name: str
    passed: tuple[str, ...]
    skipped: dict[str, str]

    def __str__(self) -> str:
        """One line for each check."""
        lines = [f"{check}: {_question(check)}" for check in self.passed]
        lines += [f"{check}: left out, {reason}" for check, reason in self.skipped.items()]
        return "\n".join([f"{self.name}: {len(self.passed)} of {len(CHECKS)} checks hold", *lines])


def check_optimizer(
    make: Make,
    *,
    skip: Mapping[str, str] | None = None,
    nonfinite: NonFinite = "skip",
    rtol: float = 1e-6,
) -> OptimizerReport:
    """Check that an optimiser follows the conventions of torch.optim, on small networks on the CPU, in float64.

    The networks have 4 inputs and 3 outputs, which go to a mean cross-entropy; batches have 8 samples. `CHECKS` holds
    the checks by name; the docstring of each says what is asked. An optimiser must be able to step without a closure.

    Args:
        make: From a model to an optimiser of its parameters; called anew for every run, it must give equal ones.
        skip: Checks that are not for this optimiser, each with the reason, which goes into the report.
        nonfinite: What is to be done about a gradient with a NaN: "skip" the step, count it in an attribute `skipped`
            and warn, or "raise". In both cases no weight may change. (The optimisers of torch do neither.)
        rtol: Largest relative error where round-off may differ; the rest is compared to the bit.

    Returns:
        What was checked, and what was left out for which reason.

    Raises:
        AssertionError: Names the first check that fails, and why.

    Example:
        >>> def sgd(model):
        ...     return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> check_optimizer(sgd)
        Traceback (most recent call last):
        AssertionError: SGD: nonfinite: a gradient with a NaN was stepped along: body.weight has changed
        >>> report = check_optimizer(sgd, skip={"nonfinite": "torch steps along it"})
        >>> len(report.passed), report.skipped
        (20, {'nonfinite': 'torch steps along it'})
    """
    left_out = dict(skip or {})
    if unknown := [name for name in left_out if name not in CHECKS]:
        raise ValueError(f"there is no check {unknown[0]!r} to skip; there are {', '.join(CHECKS)}")
    if bare := [name for name, reason in left_out.items() if not reason]:
        raise ValueError(f"say why {bare[0]!r} is left out: skip={{{bare[0]!r}: reason}}")
    if nonfinite not in ("skip", "raise"):
        raise ValueError(f"nonfinite must be 'skip' or 'raise', got {nonfinite!r}")
    trial = Trial(make, nonfinite, rtol)
    with isolated_rng(), restored_settings():
        name = type(trial.start()[1]).__name__
        for check, run in CHECKS.items():
            if check in left_out:
                continue
            try:
                run(trial)
            except AssertionError as error:
                raise AssertionError(f"{name}: {check}: {error}") from error.__cause__
            except Exception as error:
                raise AssertionError(f"{name}: {check}: raised {type(error).__name__}: {error}") from error
    return OptimizerReport(name, tuple(check for check in CHECKS if check not in left_out), left_out)


def _question(check: str) -> str:
    return (CHECKS[check].__doc__ or "").strip().split("\n")[0].rstrip(".")
