"""Spectra of the weight matrices themselves, without data: heavy tails, and outliers from a bulk of noise.

A weight is taken as a matrix W (out, rest), the kernel of a convolution reshaped. Let lambda_i be the eigenvalues of
W'W, not divided by its size. They give (Martin and Mahoney 2021):

    log10 sum_i lambda_i, log10 lambda_max, sum_i lambda_i / lambda_max      sizes, and the stable rank
    p(lambda) ~ lambda^-alpha above a threshold, alpha log10 lambda_max      the tail
    lambda_+ / lambda_max, number of lambda_i above lambda_+                 the bulk, taken as noise

Scaling a layer changes the logarithms and alpha-hat, and nothing else. That a small alpha goes with a small gap is an
observation on families of trained networks, not a theorem.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...intervals import StudentT
from ...results import Estimate, new_axes
from ...risk import Progress, Risk
from ...storage import Result
from .linear_maps import weight_matrices
from .matrix_laws import MIN_TAIL, Bulk, PowerLaw, fit_bulk, fit_power_law

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOLD = 12  # layers that a legend has room for
MIN_EIGENVALUES = 50  # fewer cannot distinguish one tail from another


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LayerSpectrum(Result):
    """The spectrum of one weight matrix.

    Attributes:
        name: Name of the weight.
        shape: (out, rest) of the matrix W.
        eigenvalues: The min(shape) largest eigenvalues of W'W, ascending, float64.
        tail: The power law of the largest eigenvalues, or None.
        bulk: The law of noise that fits most eigenvalues, or None.
        note: Why there is no tail or no bulk; empty if there are both.
    """

    name: str
    shape: tuple[int, int]
    eigenvalues: Tensor
    tail: PowerLaw | None
    bulk: Bulk | None
    note: str = ""

    @property
    def log_norm(self) -> Estimate:
        """log10 sum_i lambda_i = log10 ||W||_F^2."""
        return self._estimate("log norm", _log10(float(self.eigenvalues.sum())), "log10 of ||W||_F^2")

    @property
    def log_spectral_norm(self) -> Estimate:
        """log10 lambda_max = log10 ||W||^2."""
        return self._estimate("log spectral norm", _log10(self._top), "log10 of ||W||^2")

    @property
    def stable_rank(self) -> Estimate:
        """sum_i lambda_i / lambda_max; 0 for a matrix of zeros."""
        return self._estimate("stable rank", self._over_top(float(self.eigenvalues.sum())), "||W||_F^2 / ||W||^2")

    @property
    def alpha(self) -> Estimate:
        """The exponent of the tail, with its standard error by maximum likelihood for the chosen threshold.

        Above about 6 the tail is not heavy, and its exponent says little.
        """
        text = "exponent above the threshold of least Kolmogorov-Smirnov distance"
        return self._estimate("alpha", None if self.tail is None else self.tail.alpha, text, per_stderr=1.0)

    @property
    def alpha_hat(self) -> Estimate:
        """alpha log10 lambda_max."""
        size = _log10(self._top)
        value = None if self.tail is None else self.tail.alpha * size
        return self._estimate("alpha-hat", value, "alpha log10 lambda_max", per_stderr=abs(size))

    @property
    def soft_rank(self) -> Estimate:
        """lambda_+ / lambda_max, at most 1: near 1 for noise, small if an eigenvalue stands out of it."""
        value = None if self.bulk is None else min(self._over_top(self.bulk.edge), 1.0)
        return self._estimate("soft rank", value, "edge of the Marchenko-Pastur bulk / lambda_max")

    @property
    def num_spikes(self) -> Estimate:
        """How many eigenvalues are too large for noise."""
        value = None if self.bulk is None else float(self.bulk.num_spikes)
        return self._estimate("spikes", value, "eigenvalues above the 99 % threshold of noise")

    @property
    def _top(self) -> float:
        return float(self.eigenvalues[-1])

    def _over_top(self, value: float) -> float:
        return value / self._top if self._top else 0.0

    def _estimate(self, what: str, value: float | None, text: str, per_stderr: float = 0.0) -> Estimate:
        """A number of this layer; NaN, with the reason, if it has none."""
        name, text = f"{what} of {self.name}", f"{text}; eigenvalues of W'W, not divided by its size"
        if value is None:
            return Estimate(name=name, value=math.nan, stderr=math.nan, stop=self.note, convention=text)
        if not per_stderr or self.tail is None:
            return Estimate(name=name, value=value, exact=True, convention=text)
        stderr, rule = per_stderr * self.tail.stderr, StudentT(self.tail.num_tail - 1)
        return Estimate(name=name, value=value, stderr=stderr, rule=rule, convention=text)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LayerSpectra(Result):
    """The spectra of all weight matrices of a network. Every number is a mean over layers, which are its parts.

    A layer whose spectrum is too short for a number is still a part: NaN, with the reason as its `stop`. It does not
    count in the mean; the `stop` of the mean says how many layers were left out.

    Attributes:
        layers: The spectra by name of the weight.
    """

    layers: Mapping[str, LayerSpectrum]

    @property
    def log_norm(self) -> Estimate:
        """log10 ||W||_F^2."""
        return self._mean("log norm", [e.log_norm for e in self.layers.values()])

    @property
    def log_spectral_norm(self) -> Estimate:
        """log10 ||W||^2."""
        return self._mean("log spectral norm", [e.log_spectral_norm for e in self.layers.values()])

    @property
    def stable_rank(self) -> Estimate:
        """||W||_F^2 / ||W||^2."""
        return self._mean("stable rank", [e.stable_rank for e in self.layers.values()])

    @property
    def alpha(self) -> Estimate:
        """The exponent of the tail."""
        return self._mean("alpha", [e.alpha for e in self.layers.values()])

    @property
    def alpha_hat(self) -> Estimate:
        """alpha log10 lambda_max."""
        return self._mean("alpha-hat", [e.alpha_hat for e in self.layers.values()])

    @property
    def soft_rank(self) -> Estimate:
        """lambda_+ / lambda_max."""
        return self._mean("soft rank", [e.soft_rank for e in self.layers.values()])

    @property
    def num_spikes(self) -> Estimate:
        """Eigenvalues too large for noise."""
        return self._mean("spikes", [e.num_spikes for e in self.layers.values()])

    def _mean(self, name: str, each: list[Estimate]) -> Estimate:
        parts = dict(zip(self.layers, each, strict=True))
        known = [e for e in each if not math.isnan(float(e.value))]
        left_out = [e.stop for e in each if math.isnan(float(e.value))]
        stop = f"{len(left_out)} of {len(each)} layers left out: {left_out[0]}" if left_out else "completed"
        fields: dict[str, Any] = {"stop": stop, "convention": f"mean over layers: {each[0].convention}", "parts": parts}
        if not known:
            return Estimate(name=name, value=math.nan, stderr=math.nan, **fields)
        value = math.fsum(float(e.value) for e in known) / len(known)
        if all(e.exact for e in known):
            return Estimate(name=name, value=value, exact=True, **fields)
        stderr = math.hypot(*(float(e.stderr) for e in known)) / len(known)
        dof = sum(e.rule.dof for e in known if isinstance(e.rule, StudentT))
        return Estimate(name=name, value=value, stderr=stderr, rule=StudentT(dof), **fields)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """For each layer the share of eigenvalues above lambda, on logarithmic axes, and the power law of its tail.

        If there are many layers, their colours go from dark to light with depth, and the legend names only some.
        """
        ax = ax or new_axes()
        colors = _by_depth(len(self.layers))
        told = -(-len(self.layers) // _TOLD)
        for place, (name, layer) in enumerate(self.layers.items()):
            x = layer.eigenvalues[layer.eigenvalues > 0]
            if not len(x):
                continue
            above = torch.arange(len(x), 0, -1, dtype=torch.float64) / len(x)
            label = name if layer.tail is None else f"{name}, α = {layer.tail.alpha:.2f}"
            (curve,) = ax.plot(x, above, ".", ms=3, color=colors[place], label=None if place % told else label)
            if layer.tail is not None:
                ends = torch.tensor([layer.tail.x_min, float(x[-1])], dtype=torch.float64)
                share = layer.tail.num_tail / len(x) * (ends / ends[0]) ** (1 - layer.tail.alpha)
                ax.plot(ends, share, "--", color=curve.get_color(), lw=1.2)
        ax.set(xscale="log", yscale="log", xlabel="eigenvalue λ of W'W", ylabel="share of eigenvalues above λ")
        ax.legend(fontsize="small", frameon=False, loc="lower left", markerscale=3)
        return ax


def _by_depth(count: int) -> list[Any]:
    """A colour for each layer: from matplotlib's colour cycle if it has enough, else shades."""
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    return [f"C{n}" for n in range(count)] if count <= 10 else [shades(0.95 * n / (count - 1)) for n in range(count)]


def layer_spectra(
    risk: Risk, *, min_eigenvalues: int = MIN_EIGENVALUES, progress: Progress | None = None
) -> LayerSpectra:
    """The spectrum of every chosen weight of two or more dimensions, its tail and its bulk; no data is used.

    Args:
        risk: The solution.
        min_eigenvalues: A matrix with fewer nonzero eigenvalues gets no tail and no bulk.
        progress: Called as progress(layers done, layers).

    Raises:
        ValueError: If no weight has two or more dimensions.

    Example:
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([10.0, 0.0])))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 2)))
        >>> found = layer_spectra(risk)
        >>> found.log_norm.value, found.stable_rank.value, found.alpha.stop
        (2.0, 1.0, '1 of 1 layers left out: 1 eigenvalues that are not 0, fewer than 50')
    """
    if min_eigenvalues < MIN_TAIL:
        raise ValueError(f"min_eigenvalues must be at least {MIN_TAIL}, got {min_eigenvalues}")
    layers = weight_matrices(risk)
    found = {}
    for done, layer in enumerate(layers, 1):
        eps = torch.finfo(layer.weight.dtype).eps
        found[layer.name] = _spectrum(layer.name, layer.matrix, eps, min_eigenvalues)
        if progress is not None:
            progress(done, len(layers))
    return LayerSpectra(layers=found)


def _spectrum(name: str, matrix: Tensor, eps: float, least: int) -> LayerSpectrum:
    """Eigenvalues of W'W and the fits to them; those within the round-off of W are 0."""
    roots = torch.linalg.svdvals(matrix).flip(0).cpu()
    shape = (matrix.shape[0], matrix.shape[1])
    x = roots.where(roots > eps * max(shape) * roots[-1], 0.0).square()
    positive = x[x > 0]
    if len(positive) < least:
        note = f"{len(positive)} eigenvalues that are not 0, fewer than {least}"
        return LayerSpectrum(name=name, shape=shape, eigenvalues=x, tail=None, bulk=None, note=note)
    tail, note = None, ""
    try:
        tail = fit_power_law(positive)
    except ValueError as error:
        note = str(error)
    return LayerSpectrum(name=name, shape=shape, eigenvalues=x, tail=tail, bulk=fit_bulk(x, shape), note=note)


def _log10(x: float) -> float:
    return math.log10(x) if x > 0 else -math.inf
