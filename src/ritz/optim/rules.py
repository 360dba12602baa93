"""Damping rules: what to add to an estimated curvature matrix before it is inverted.

A rule declares the estimates that it needs, receives them at every refresh, and returns the damping. It does not depend
on an optimiser or a network: `ritz.optim.AutoDamping` computes the estimates and writes the damping where the optimiser
reads it.

With H_b = H + X the curvature of one batch, mu = Tr H / P, a^2 = Tr (H - mu I)^2 / P and b^2 = Tr X^2 / P:

    NoiseVariance        delta = b^2              seed 004, equation 15: shrinkage towards I
    LedoitWolf           delta = mu b^2 / a^2     shrinkage towards mu I: scales as the curvature does
    BulkEdge             delta = c b              c = 2 is the edge of a semicircle of noise
    LevenbergMarquardt   delta <- delta w^(+-1)   by how well the quadratic model foretold the last step
    Constant             delta

The first adds a squared curvature to a curvature: if the loss is multiplied by c, delta grows by c^2 but the matrix
grows by c. The next two do not depend on the units of the loss.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, get_args

from ..results import Estimate

Combine = Literal["add", "floor"]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The estimates that a rule receives at a refresh; those that it did not request are None.

    Attributes:
        start: The initial damping of the optimiser.
        noise: Tr X^2 / P, the curvature noise of one batch.
        trace: Tr H / P.
        second_moment: Tr H^2 / P, without the noise; may be negative.
        reduction_ratio: Change of the loss divided by the change that the quadratic model predicted; NaN if the model
            predicted no decrease.

    Example:
        >>> seen = Seen(start=0.1, noise=Estimate(name="curvature noise", value=0.02))
        >>> seen.need("noise")
        0.02
    """

    start: float
    noise: Estimate | None = None
    trace: Estimate | None = None
    second_moment: Estimate | None = None
    reduction_ratio: Estimate | None = None

    def need(self, name: str) -> float:
        """The value of one estimate.

        Raises:
            ValueError: If it was not measured.
        """
        estimate = getattr(self, name)
        if estimate is None:
            raise ValueError(f"{name} was not measured: a rule only gets what it names in `needs`")
        return float(estimate.value)


class DampingRule(Protocol):
    """How the damping follows from the estimates.

    Attributes of a rule are plain numbers, strings and dictionaries of them: they are its state, and are saved and
    loaded as such.

    Attributes:
        needs: Which fields of `Seen` it asks for.
    """

    needs: ClassVar[frozenset[str]]

    def update(self, seen: Seen, step: int) -> float:
        """The damping from here on; `step` counts optimiser steps from 1."""


@dataclass
class Constant:
    """A constant damping: that of the optimiser, unless another is given.

    Example:
        >>> Constant().update(Seen(start=0.1), step=100), Constant(0.3).update(Seen(start=0.1), step=100)
        (0.1, 0.3)
    """

    value: float | None = None
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        _refuse_negative(value=self.value)

    def update(self, seen: Seen, step: int) -> float:
        """The value."""
        return seen.start if self.value is None else self.value


@dataclass
class _Averaged(ABC):
    """A rule that averages what it sees over refreshes, m <- decay m + (1 - decay) x, and puts it with a start value.

    Estimates are averaged before anything is made of them: they have no bias, and what is made of them would have.
    """

    start: float | None = None
    combine: Combine = "add"
    decay: float = 0.7
    factor: float = 1.0
    account_for_ema: float = 0.0
    average: dict[str, float] = field(default_factory=dict, init=False)
    needs: ClassVar[frozenset[str]] = frozenset({"noise"})

    def __post_init__(self) -> None:
        _refuse_negative(start=self.start, factor=self.factor)
        if self.combine not in get_args(Combine):
            raise ValueError(f"combine must be 'add' or 'floor', got {self.combine!r}")
        for name in ("decay", "account_for_ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")

    @property
    def noise(self) -> float:
        """The averaged noise, in the matrix that is inverted."""
        beta = self.account_for_ema
        return self.average["noise"] * self.factor * (1 - beta) / (1 + beta)

    @abstractmethod
    def measured(self) -> float:
        """The damping that the averages ask for."""

    def update(self, seen: Seen, step: int) -> float:
        """Average what is seen, and combine what it asks for with the start value."""
        for name in sorted(self.needs):
            fresh = seen.need(name)
            held = self.average.get(name, fresh)
            self.average[name] = held + (1 - self.decay) * (fresh - held)
        start, measured = seen.start if self.start is None else self.start, self.measured()
        return start + measured if self.combine == "add" else max(start, measured)


@dataclass
class NoiseVariance(_Averaged):
    """delta = delta* + EMA(Tr X^2 / P): the variance of the curvature between batches (seed 004, equation 15).

    Damping H_b + delta I is linear shrinkage beta H_b + (1 - beta) I with beta = 1 / (1 + delta), at a learning rate
    lower by beta. This delta is nearly the best such shrinkage if Tr H^2 / P << 1. It has the units of a squared
    curvature: see the text of this module.

    Args:
        start: delta*; None uses the initial damping of the optimiser.
        combine: "add" (as in the authors' code) or "floor", the larger of the two (as in their captions).
        decay: Decay of the moving average; its first value is the first estimate. A noisy estimate needs more than 0.7.
        factor: Factor of the estimate: b / B if it was made at batch size b and training uses B.
        account_for_ema: The decay of the optimiser's own average over batches, 0.95 for KFAC. The matrix that is
            inverted then has (1 - b) / (1 + b) of the noise of one batch, a 39th. 0 ignores this, as the paper does.

    Example:
        >>> rule = NoiseVariance()
        >>> noises = [Estimate(name="curvature noise", value=value) for value in (0.02, 0.03)]
        >>> [round(rule.update(Seen(start=0.1, noise=noise), step=100), 6) for noise in noises]
        [0.12, 0.123]
    """

    def measured(self) -> float:
        """The averaged noise."""
        return self.noise


@dataclass
class LedoitWolf(_Averaged):
    """delta = mu b^2 / a^2: shrinkage towards mu I in place of I (Ledoit and Wolf 2004).

    beta H_b + (1 - beta) mu I is nearest to H, in mean square, at beta = a^2 / (a^2 + b^2), and equals beta times
    H_b + delta I. Because mu is the mean eigenvalue, delta is a curvature, and the step does not depend on the units of
    the loss. The rule needs mu > 0, so it uses the Gauss-Newton matrix. A spiked spectrum has a small mu: delta is then
    smaller than in equation 15, and `combine="floor"` keeps at least the optimiser's own damping.

    Args:
        most: Upper bound of b^2 / a^2. If the noise dominates the signal, a^2 is nearly 0 and delta would be infinite;
            from about 100 on, the step is that of plain gradient descent.
        start, combine, decay, factor, account_for_ema: As in `NoiseVariance`.

    Example:
        >>> rule, one = LedoitWolf(), lambda value: Estimate(name="", value=value)
        >>> seen = Seen(start=0.0, noise=one(2.0), trace=one(1.0), second_moment=one(5.0))  # a^2 = 5 - 1
        >>> rule.update(seen, step=100)
        0.5
    """

    combine: Combine = "floor"
    most: float = 1e3
    needs: ClassVar[frozenset[str]] = frozenset({"noise", "trace", "second_moment"})

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_negative(most=self.most)

    def measured(self) -> float:
        """mu b^2 / a^2 of the averages."""
        mean, noise = self.average["trace"], self.noise
        if mean < 0:
            raise ValueError(
                f"the mean curvature is {mean:.3g}: shrinkage towards it needs a positive matrix; use curvature='ggn', "
                "or another rule where the loss is not convex in the outputs"
            )
        signal = self.average["second_moment"] - mean**2
        ratio = noise / signal if signal * self.most > noise else self.most
        return mean * ratio if noise else 0.0


@dataclass
class BulkEdge(_Averaged):
    """delta = c sqrt(Tr X^2 / P): damping by the size of the noise itself, in units of curvature.

    A Wigner matrix with Tr X^2 / P = s^2 has its eigenvalues in [-2 s, 2 s], and an eigenvalue of H below s cannot be
    detected in H + X (theorem 1 of seed 004, where s^2 is P sigma^2 / B). c = 1 thus sets the damping to the smallest
    detectable eigenvalue, and c = 2 to the edge of the bulk.

    Args:
        c: The multiple of s.
        start, combine, decay, factor, account_for_ema: As in `NoiseVariance`.

    Example:
        >>> rule = BulkEdge(c=2.0)
        >>> rule.update(Seen(start=0.1, noise=Estimate(name="curvature noise", value=0.25)), step=100)
        1.0
    """

    combine: Combine = "floor"
    c: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_negative(c=self.c)

    def measured(self) -> float:
        """c s."""
        return self.c * math.sqrt(self.noise)


@dataclass
class LevenbergMarquardt:
    """Less damping if the quadratic model predicted the step well, more if it did not (Martens and Grosse 2015).

    With rho = [L(w + d) - L(w)] / [g'd + d'Gd / 2], the actual over the predicted change, positive and near 1 if the
    model is good:

        rho > upper:  delta <- delta omega          rho < lower:  delta <- delta / omega

    The authors of seed 004 found this rule unstable, but their code has the wrong sign in the denominator: there, a
    good step has rho < 0 and raises the damping. With the correct sign, it lost or stalled every run of a small network
    at learning rate 0.003, with rho near 1 as the damping fell (`ritz reproduce damping rules`): it is made for steps
    of full length. If the model predicts no decrease (momentum may step uphill), rho has no meaning, and the damping
    does not change. The defaults are those of kfac-jax, for a refresh every 5 steps.

    Args:
        start: The initial damping; None uses that of the optimiser.
        omega: Factor of one change.
        lower, upper: Thresholds below which rho is too low, and above which it is high enough.
        least, most: Bounds of the damping.

    Example:
        >>> rule = LevenbergMarquardt(omega=0.5)
        >>> ratios = [Estimate(name="reduction ratio", value=rho) for rho in (0.9, 0.5, 0.1, -3.0)]
        >>> [rule.update(Seen(start=1.0, reduction_ratio=rho), step=5) for rho in ratios]
        [0.5, 0.5, 1.0, 2.0]
    """

    start: float | None = None
    omega: float = 0.9**5
    lower: float = 0.25
    upper: float = 0.75
    least: float = 1e-8
    most: float = math.inf
    damping: float | None = field(default=None, init=False)
    needs: ClassVar[frozenset[str]] = frozenset({"reduction_ratio"})

    def __post_init__(self) -> None:
        _refuse_negative(start=self.start, least=self.least)
        if not 0 < self.omega < 1:
            raise ValueError(f"omega must lie between 0 and 1, got {self.omega}")
        if not self.lower < self.upper or not self.least < self.most:
            raise ValueError(
                f"expected lower < upper and least < most, got {self.lower}, {self.upper} and {self.least}, {self.most}"
            )

    def update(self, seen: Seen, step: int) -> float:
        """One factor up, one down, or none."""
        if self.damping is None:
            self.damping = seen.start if self.start is None else self.start
        rho = seen.need("reduction_ratio")
        if rho > self.upper:
            self.damping *= self.omega
        elif rho < self.lower:
            self.damping /= self.omega
        self.damping = min(max(self.damping, self.least), self.most)
        return self.damping


def _refuse_negative(**numbers: float | None) -> None:
    """Refuse what is below 0 or not a number."""
    for name, value in numbers.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
