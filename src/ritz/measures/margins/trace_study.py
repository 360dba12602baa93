"""Do margins say the same as flatness? The study of seed 003, section 3.2, sample by sample.

The Hessian trace of every sample is compared with what one forward pass gives for it: the trace that an affine network
would have (ACEHT), the margin bound on it, and the output margin (figures 3 and 4). The traces of seed 003 come from
Hutchinson's probes, whose noise alone keeps r below 1; here they are exact if the network allows it.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from ...batches import Batch
from ...estimators.samples import Method, sample_traces
from ...reducers import Concat
from ...results import Estimate
from ...risk import Params, Progress, Risk
from ...storage import Result
from ..outputs import sample_outputs
from ..study.correlation import MarginCorrelations, PointCorrelations, margin_correlations
from .summaries import sample_aceht, sample_margin_bound, sample_margins

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Against = Literal["aceht", "bound", "margin"]

_PIECE = 256  # samples of a batch
_AXES = {"aceht": "ACEHT", "bound": "margin bound", "margin": "output margin"}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class MarginStudy(Result):
    """Correlations of sample traces with margins; right and wrong predictions apart, with and without outliers.

    Attributes:
        aceht: With the affine cross-entropy Hessian trace (figure 3a of seed 003).
        bound: With the margin bound (figure 3b).
        margin: With the signed output margin (figure 4a); negative, as the loss is flat where the margin is large.
        traces: The Hessian traces themselves (n,), with their errors if they were probed.
        seed: Seed of the draw of samples, the probes and the tests.
        convention: Which samples were used.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> _ = torch.nn.init.eye_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> X = torch.linspace(0, 3, 8)[:, None] * torch.tensor([[1.0, 0.0]])
        >>> study = margin_study(ritz.Risk(model, torch.nn.CrossEntropyLoss(), (X, torch.arange(8) % 2)))
        >>> study.aceht.correct.n, study.aceht.incorrect.n  # a tie is not correct
        (3, 5)
    """

    aceht: MarginCorrelations
    bound: MarginCorrelations
    margin: MarginCorrelations
    traces: Estimate
    seed: int
    convention: str

    def __str__(self) -> str:
        lines = [f"Hessian traces of {len(torch.as_tensor(self.traces.value))} samples"]
        for key, name in _AXES.items():
            for kind in ("correct", "incorrect"):
                group: PointCorrelations = getattr(getattr(self, key), kind)
                lines.append(f"{name:>13}, {kind + ':':<10} {group.pearson.reason or _row(group)}, n = {group.n}")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, ax: "Axes | None" = None, *, against: Against = "aceht") -> "Axes":
        """All samples, trace against "aceht", "bound" or "margin"."""
        if against not in get_args(Against):
            raise ValueError(f"against must be one of {', '.join(get_args(Against))}, got {against!r}")
        found: MarginCorrelations = getattr(self, against)
        ax = found.plot(ax)
        ax.set(xlabel=f"{_AXES[against]} of the sample")
        return ax


def _row(group: PointCorrelations) -> str:
    low, high = group.pearson.interval()
    return (
        f"r {group.pearson.value:6.3f} in [{low:6.3f}, {high:6.3f}], {group.filtered.value:6.3f} without "
        f"{group.removed:2} outliers, rho {group.spearman.value:6.3f}"
    )


def margin_study(
    risk: Risk,
    num_samples: int = 1000,
    seed: int = 0,
    *,
    method: Method = "auto",
    num_probes: int = 16,
    progress: Progress | None = None,
) -> MarginStudy:
    """Correlate per-sample Hessian traces with ACEHT, the margin bound and the output margin (seed 003, section 3.2).

    Args:
        risk: A classifier with floating inputs and one label per sample.
        num_samples: Number of samples, drawn at random without replacement; all samples if there are no more.
        seed: Seed of the draw, the probes and the tests.
        method: "exact", "probes" or "auto"; see `ritz.sample_traces`.
        num_probes: Number of probes if the traces are not exact.
        progress: Called with (batches done, 0) while traces are computed, which takes most of the time.

    Raises:
        UnsupportedError: If single samples have no trace or no ACEHT: BatchNorm in train mode, several items per
            sample, no classes, inputs that are not floating tensors.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> _ = torch.nn.init.eye_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> X = torch.linspace(0, 3, 8)[:, None] * torch.tensor([[1.0, 0.0]])
        >>> study = margin_study(ritz.Risk(model, torch.nn.CrossEntropyLoss(), (X, torch.arange(8) % 2)))
        >>> round(study.aceht.correct.pearson.value, 4), study.traces.exact  # an affine network
        (1.0, True)
    """
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    if num_samples < 3:
        raise ValueError(f"a correlation needs at least 3 samples, got num_samples={num_samples}")
    some = _drawn(risk, num_samples, seed)
    found = sample_outputs(some)
    across = {"aceht": sample_aceht(found), "bound": sample_margin_bound(found), "margin": sample_margins(found)}
    traces = _weighted(some, sample_traces(some, method=method, num_probes=num_probes, seed=seed, progress=progress))
    parts = {name: margin_correlations(traces, x, found.correct, seed=seed) for name, x in across.items()}
    said = f"{len(found.weight)} of {risk.num_samples} samples, {traces.convention}"
    return MarginStudy(**parts, traces=traces, seed=seed, convention=said)


def _drawn(risk: Risk, num_samples: int, seed: int) -> Risk:
    """The risk on some of its samples, drawn at random, in a fixed order."""
    batches = risk.batches
    if num_samples >= batches.num_samples and batches.ordered:
        return risk
    num = min(num_samples, batches.num_samples)
    if batches.pool() is not None:
        pieces = batches.sample(1, num, seed)[0].pieces(_PIECE)
        return risk.on([piece.data for piece in pieces])
    size = next(iter(batches)).size  # whole batches, where samples cannot be picked
    return risk.on([batch.data for batch in batches.sample(max(num // size, 1), size, seed)])


def _weighted(risk: Risk, traces: Estimate) -> Estimate:
    """The traces of samples that have a weight, as `outputs` has them."""

    def weights(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        weight = risk.output_loss.items(risk.output(params, batch), batch.data).weight
        return weight, weight.sum()

    seen = risk.fold(weights, Concat()).cpu() != 0
    samples = None if traces.samples is None else traces.samples[:, seen]
    value, stderr = (torch.as_tensor(x)[seen] for x in (traces.value, traces.stderr))
    return replace(traces, value=value, stderr=stderr, samples=samples)
