"""Results: frozen, with their error, their cost and their convention; saved to JSON + safetensors and loaded equal.

An `Estimate` keeps two kinds of error apart. `stderr` is sampling error: other probes would have given another value.
`bracket` is what no probe can see: the error of a quadrature rule stopped early, or of a Ritz value not yet converged.
`interval` puts both together by the rule that is honest for the quantity.
"""

import dataclasses
import hashlib
import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Number = float | Tensor  # a float, or a tensor of one number per sample or parameter
Pair = tuple[Number, Number]
T = TypeVar("T")

FORMAT = 1  # version of the file format


# --------------------------------------------------------------------------------------------- intervals


class IntervalRule(Protocol):
    """How a value, its sampling error and its bracket become an interval."""

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """Lower and upper end at the given level."""


@dataclass(frozen=True)
class Exact:
    """No sampling error: the bracket is the interval (and the value, where there is no bracket)."""

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """The bracket."""
        return bracket


@dataclass(frozen=True)
class StudentT:
    """bracket -/+ t stderr, with `dof` degrees of freedom: right for means of K probes once outliers are locked."""

    dof: float

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """Lower end of the bracket less t standard errors, upper end plus as many."""
        from scipy.stats import t

        width = (
            stderr * float(t.ppf(0.5 + level / 2, self.dof)) if self.dof > 0 else math.inf
        )  # one probe has no spread
        return bracket[0] - width, bracket[1] + width


@dataclass(frozen=True)
class ChiSquare:
    """Scaled chi-square with matched degrees of freedom: for a quadratic form of a positive matrix, K probes.

    v'Av summed over K normal probes has mean K Tr A and variance 2 K Tr A^2, as c chi^2(nu) has for
    nu = K (Tr A)^2 / Tr A^2 (Satterthwaite 1946). It covers where a few large eigenvalues make the mean skewed.
    `offset` is the part that takes no share in the sampling; above the value, where the form is skewed to the left.
    """

    dof: Number
    offset: Number = 0.0

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """offset + nu (value - offset) / chi^2 quantiles."""
        low, high = (self.dof / self._quantile(q) for q in (0.5 + level / 2, 0.5 - level / 2))
        ends = self.offset + (bracket[0] - self.offset) * low, self.offset + (bracket[1] - self.offset) * high
        if isinstance(ends[0], Tensor) or ends[0] <= ends[1]:
            return ends
        return ends[1], ends[0]  # skewed to the left

    def _quantile(self, q: float) -> Number:
        from scipy.stats import chi2

        if isinstance(self.dof, Tensor):
            return torch.as_tensor(chi2.ppf(q, self.dof.double().cpu().numpy())).to(self.dof)
        return float(chi2.ppf(q, self.dof))


@dataclass(frozen=True)
class Hull:
    """The smallest interval that holds those of several rules, for what no one of them is honest about alone."""

    rules: tuple[IntervalRule, ...]

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """From the lowest end to the highest."""
        ends = [rule.interval(value, stderr, bracket, level) for rule in self.rules]
        return min(float(low) for low, _ in ends), max(float(high) for _, high in ends)


def matched_dof(num_probes: int, trace: Number, square: Number, dim: int) -> Number:
    """Degrees of freedom of a mean of `num_probes` forms v'Av, A positive of order `dim`, v uniform on the sphere.

    nu = K (Tr A)^2 / Tr A^2 for normal probes; on the sphere the part along the identity has no variance, which divides
    by 1 - (Tr A)^2 / (n Tr A^2). At least K, since (Tr A)^2 >= Tr A^2; capped where the form hardly varies at all.

    Example:
        >>> matched_dof(8, trace=1.0, square=1.0, dim=1000) // 0.01 / 100  # one eigenvalue: chi^2 with K degrees
        8.0
    """
    ratio = torch.as_tensor(trace).double().square() / torch.as_tensor(square).double().clamp(min=1e-300)
    dof = num_probes * (ratio / (1 - ratio / dim).clamp(min=1e-6)).clamp(min=1.0, max=1e9)
    return dof if isinstance(trace, Tensor) else float(dof)


@dataclass(frozen=True)
class RandomStart:
    """One-sided bound on an extreme eigenvalue from m Lanczos steps on K random starts.

    P[lambda_1 - theta > eps (lambda_1 - lambda_n)] <= 1.648 sqrt(n) exp(-(2m - 1) sqrt(eps)) for a start uniform on
    the sphere (Kuczynski and Wozniakowski 1992, theorem 4.2), to the power K for K independent starts. With pairs
    locked the starts run in what is left, and no eigenvalue lies further out than the further of `locked` and that
    bound, plus `slack`, the coupling between the two (Weyl). The other end is the Ritz value, which never overshoots.
    """

    dim: int
    num_steps: int
    num_probes: int
    spread: float  # largest less smallest Ritz value of the random starts
    reach: float  # the most extreme of them, on the side that is bounded
    locked: float  # the most extreme locked Ritz value on that side
    slack: float
    largest: bool  # bound the largest eigenvalue (else the smallest)

    def bound(self, level: float) -> float:
        """What the eigenvalue exceeds with probability at most 1 - level."""
        log_odds = math.log(1.648 * math.sqrt(self.dim)) - math.log(1 - level) / self.num_probes
        eps = (log_odds / (2 * self.num_steps - 1)) ** 2
        if self.spread and eps >= 0.5:  # too few steps to say anything
            return math.inf if self.largest else -math.inf
        over = self.spread * eps / (1 - 2 * eps) if self.spread else 0.0
        if self.largest:
            return max(self.locked, self.reach + over) + self.slack
        return min(self.locked, self.reach - over) - self.slack

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """From the Ritz value to the bound."""
        if self.largest:
            return bracket[0], max(float(bracket[1]), self.bound(level))
        return min(float(bracket[0]), self.bound(level)), bracket[1]


@dataclass(frozen=True)
class Magnitude:
    """The larger in size of the bounds at both ends of a spectrum."""

    low: RandomStart
    high: RandomStart

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """From the largest |Ritz value| to the further of the two bounds."""
        return bracket[0], max(float(bracket[1]), self.high.bound(level), -self.low.bound(level))


# ----------------------------------------------------------------------------------------------- estimate


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimate:
    """A number with its error bar, what it cost and what it means.

    Attributes:
        name: What was estimated.
        value: The number, or a tensor of one per sample or parameter.
        stderr: Sampling error of `value`, one standard error; 0 where nothing was averaged (exact and Ritz
            values), NaN where one probe gives none.
        bracket: (lower, upper) error of quadrature or of a residual; None where there is none beyond round-off.
        samples: What each probe gave, (num_probes,); `value` is their mean to the power `power`.
        power: 0.5 for a norm that is the root of an averaged square, else 1.
        exact: No sampling was done.
        products: Matrix-vector products spent.
        seed: Of the probes.
        stop: Why the run ended.
        convention: Which matrix, divided by what, in which mode.
        rule: How `interval` is made.
        support: Where the value can lie at all; the interval is cut to it.
        parts: What came free with it: per-layer values, or the other moments of one run.

    Example:
        >>> e = Estimate(name="trace", value=3.0, stderr=0.1, rule=StudentT(7))
        >>> print(e)
        trace 3.00 +- 0.10
        >>> low, high = e.interval(0.95)
        >>> round(low, 3), round(high, 3)
        (2.764, 3.236)
    """

    name: str
    value: Number
    stderr: Number = 0.0
    bracket: Pair | None = None
    samples: Tensor | None = None
    power: float = 1.0
    exact: bool = False
    products: int = 0
    seed: int | None = None
    stop: str = "completed"
    convention: str = ""
    rule: IntervalRule = field(default_factory=Exact)
    support: tuple[float, float] = (-math.inf, math.inf)
    parts: Mapping[str, "Estimate"] = field(default_factory=dict)

    def interval(self, level: float = 0.95) -> Pair:
        """(lower, upper) that holds the true value with probability `level`, sampling and depth error both counted."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        if self.power == 1.0:
            low, high = self.rule.interval(self.value, self.stderr, self.bracket or (self.value, self.value), level)
            return _clip(low, self.support), _clip(high, self.support)
        # the rule is made for the mean itself; its standard error by the delta method, backwards
        mean, *bracket = (
            float(x) ** (1 / self.power) for x in (self.value, *(self.bracket or (self.value, self.value)))
        )
        stderr = float(self.stderr) * mean / (self.power * float(self.value)) if self.value else 0.0
        low, high = self.rule.interval(mean, stderr, (bracket[0], bracket[1]), level)
        low, high = (max(float(end), 0.0) ** self.power for end in (low, high))
        return _clip(low, self.support), _clip(high, self.support)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        if isinstance(self.value, Tensor) and self.value.numel() > 1:
            how = "exact" if self.exact else f"median stderr {torch.as_tensor(self.stderr).median():.2g}"
            return f"{self.name} {tuple(self.value.shape)}, mean {self.value.mean():.4g}, {how}"
        return f"{self.name} {show(float(self.value), float(self.stderr))}"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and equal(self, other)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `path`.json and, where there are tensors, `path`.safetensors; see `ritz.load`."""
        return save(self, path)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The value with its 95 % interval; for one number per sample, their histogram."""
        ax = ax or new_axes()
        if isinstance(self.value, Tensor) and self.value.numel() > 1:
            ax.hist(self.value.flatten().double().cpu().numpy(), bins=50)
            ax.set(xlabel=self.name, ylabel="count")
            return ax
        value = float(self.value)
        low, high = (float(end) for end in self.interval())
        ax.errorbar([self.name], [value], yerr=[[value - low], [high - value]], fmt="o", capsize=4)
        ax.set(ylabel=self.convention)
        return ax


def _clip(end: Number, support: tuple[float, float]) -> Number:
    """An end of an interval, moved to where the value can lie."""
    return end.clamp(*support) if isinstance(end, Tensor) else min(max(float(end), support[0]), support[1])


def from_samples(
    name: str, samples: Tensor, *, offset: float = 0.0, power: float = 1.0, spread: float = 1.0, **fields: Any
) -> Estimate:
    """The mean of per-probe samples (K,) plus an exactly known `offset`, with a Student t interval.

    `spread` widens the standard error of samples that are known not to be independent.

    Example:
        >>> e = from_samples("trace", torch.tensor([1.0, 3.0], dtype=torch.float64), offset=10.0)
        >>> e.value, e.stderr
        (12.0, 1.0)
    """
    samples = samples.double() + offset
    num = len(samples)
    mean = float(samples.mean())
    stderr = spread * float(samples.std() / math.sqrt(num)) if num > 1 else math.nan
    if power != 1.0:
        mean = max(mean, 0.0)
        stderr = stderr * power * mean ** (power - 1) if mean else 0.0
        mean = mean**power
    fields = {"rule": StudentT(num - 1), **fields}
    return Estimate(name=name, value=mean, stderr=stderr, samples=samples.cpu(), power=power, **fields)


def show(value: float, stderr: float = 0.0) -> str:
    """A number to the digits its error allows, `3.14 +- 0.02`.

    Example:
        >>> show(1234.567, 8.9), show(0.001234), show(1.5e-7, 2e-9)
        ('1234.6 +- 8.9', '0.001234', '1.500e-07 +- 2.0e-09')
    """
    if not stderr or not math.isfinite(stderr):
        return f"{value:.4g}"
    digits = 1 - math.floor(math.log10(abs(stderr)))
    if abs(value) < 1e-3 or abs(value) >= 1e5:
        size = math.floor(math.log10(max(abs(value), stderr)))
        return f"{value:.{max(digits + size, 0)}e} +- {stderr:.1e}"
    return f"{value:.{max(digits, 0)}f} +- {stderr:.{max(digits, 0)}f}"


def new_axes() -> "Axes":
    """Axes of a new figure, or a message about what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'ritz[plot]'") from error
    axes: Axes = Figure(figsize=(6, 4), layout="constrained").subplots()
    return axes


# ------------------------------------------------------------------------------------------------ storage

# results that can be loaded, and where they live: a file names a class, never code
_HOMES = {
    "Estimate": "ritz.results",
    "Exact": "ritz.results",
    "StudentT": "ritz.results",
    "ChiSquare": "ritz.results",
    "Hull": "ritz.results",
    "RandomStart": "ritz.results",
    "Magnitude": "ritz.results",
    "Spectrum": "ritz.estimators.quantities",
    "Head": "ritz.krylov.head",
    "Tridiagonal": "ritz.krylov.lanczos",
    "LanczosState": "ritz.krylov.lanczos",
    "EigenPairs": "ritz.krylov.eigen",
}


def save(result: Any, path: str | os.PathLike[str]) -> Path:
    """Write a result as `path`.json (numbers, text) and `path`.safetensors (tensors). Nothing is pickled.

    Each file is written beside its name and moved into place, so a kill leaves the old one or the new one; the tensors
    carry the mark of their text, so that the new one of one and the old one of the other are not taken for a pair.
    """
    from safetensors.torch import save_file

    stem = _stem(path)
    stem.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    result = _encode(result, "", tensors)
    text = json.dumps({"format": FORMAT, "tensors": len(tensors), "result": result}, indent=1)
    if tensors:
        mark = {"text": _mark(text)}
        _replace(stem.with_name(stem.name + ".safetensors"), lambda part: save_file(tensors, part, mark))
    _replace(stem.with_name(stem.name + ".json"), lambda part: part.write_text(text, encoding="utf8"))
    return stem.with_name(stem.name + ".json")


def load(path: str | os.PathLike[str]) -> Any:
    """Read back what a result's `.save(path)` wrote, equal to what was saved.

    Example:
        >>> import tempfile, ritz
        >>> e = Estimate(name="trace", value=3.0, stderr=0.1, rule=StudentT(7))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ritz.load(e.save(folder + "/trace")) == e
        True
    """
    stem = _stem(path)
    source = stem.with_name(stem.name + ".json")
    if not source.exists():
        raise FileNotFoundError(f"no result at {source}")
    text = source.read_text(encoding="utf8")
    tree = json.loads(text)
    if tree.get("format") != FORMAT:
        raise ValueError(f"{source} has format {tree.get('format')!r}; this version of ritz reads format {FORMAT}")
    tensors = _load_tensors(stem.with_name(stem.name + ".safetensors"), _mark(text)) if tree["tensors"] else {}
    return _decode(tree["result"], tensors)


def _load_tensors(source: Path, mark: str) -> dict[str, Tensor]:
    """The tensors that were saved with the text that has this mark."""
    from safetensors import safe_open

    if not source.exists():
        raise FileNotFoundError(f"{source} is missing; a result is two files, and both must be kept together")
    with safe_open(source, framework="pt") as file:
        if (file.metadata() or {}).get("text") != mark:
            raise ValueError(f"{source} belongs to another result than the .json beside it; a save was cut short")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dictionary


def _mark(text: str) -> str:
    return hashlib.blake2b(text.encode("utf8"), digest_size=16).hexdigest()


def equal(a: Any, b: Any) -> bool:
    """Same type, same fields; tensors element by element, NaN equal to NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = a.cpu(), b.cpu()
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _stem(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in {".json", ".safetensors"} else path


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    part = target.with_name(target.name + ".part")
    write(part)
    os.replace(part, target)


def _encode(node: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A tree of dataclasses, mappings and tensors as JSON; tensors go into `tensors` under their place in the tree."""
    if isinstance(node, Tensor):
        tensors[where] = node.detach().cpu().contiguous().clone()
        return {"tensor": where}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        if type(node).__name__ not in _HOMES:
            raise TypeError(f"{type(node).__name__} cannot be saved")
        fields = {
            f.name: _encode(getattr(node, f.name), f"{where}/{f.name}", tensors) for f in dataclasses.fields(node)
        }
        return {"type": type(node).__name__, "fields": fields}
    if isinstance(node, Mapping):
        return {"map": [[key, _encode(value, f"{where}/{key}", tensors)] for key, value in node.items()]}
    if isinstance(node, tuple | list):
        return {"tuple": [_encode(item, f"{where}/{i}", tensors) for i, item in enumerate(node)]}
    if isinstance(node, float) and not math.isfinite(node):
        return {"float": repr(node)}  # JSON has no infinities
    if node is None or isinstance(node, str | int | float | bool):
        return node
    raise TypeError(f"cannot save a {type(node).__name__} (at {where or 'the top'})")


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "map" in node:
        return {key: _decode(value, tensors) for key, value in node["map"]}
    if "tuple" in node:
        return tuple(_decode(item, tensors) for item in node["tuple"])
    if "float" in node:
        return float(node["float"])
    home = _HOMES.get(node["type"])
    if home is None:
        raise ValueError(f"the file names an unknown result {node['type']!r}")
    cls = getattr(importlib.import_module(home), node["type"])
    return cls(**{name: _decode(value, tensors) for name, value in node["fields"].items()})
