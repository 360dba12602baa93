"""Margins, and what they say about flatness (seed 003), from the outputs of one forward pass.

For item i with input x, label y, outputs f and softmax S,

    output margin     f_y - max_{j != y} f_j
    softmax margin    gamma = S_y - max_{j != y} S_j
    ACEHT             (||x||^2 + 1) (1 - sum_j S_j^2), the Hessian trace of an affine network (proposition 3.1)
    margin bound      (||x||^2 + 1) (1 - gamma^2)  >=  ACEHT

Margins are signed, negative for a wrong prediction; seed 003 takes their absolute values, `absolute=True`. The bound
also holds for wrong predictions, though not by the steps of section 3.1, whose S_y >= |gamma| fails there: |gamma| is
at most the largest S_j, whose square is at most sum_j S_j^2.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...errors import NonFiniteError, UnsupportedError
from ...results import Estimate
from ..outputs import Outputs
from .distribution import MarginDistribution, skewness, weighted_quantile

Which = Literal["output", "softmax"]

_COLUMN = {"output": "margin", "softmax": "softmax_margin"}
_FORMULA = {"output": "f_y - max_{j != y} f_j", "softmax": "S_y - max_{j != y} S_j"}


# ------------------------------------------------------------------------------------- numbers of a sample


def sample_margins(outputs: Outputs, *, which: Which = "output", absolute: bool = False) -> Tensor:
    """The margin of every item, (n,).

    Args:
        outputs: Outputs of `ritz.measures.outputs`.
        which: "output" (differences of logits) or "softmax" (of probabilities).
        absolute: Take the absolute value, as in seed 003, section 2; a wrong prediction then looks like a right one.

    Raises:
        UnsupportedError: If there are no classes, or only one; for BatchNorm in train mode.
        NonFiniteError: If a margin is infinite.

    Example:
        >>> found = Outputs(loss=torch.ones(2), weight=torch.ones(2), margin=torch.tensor([2.0, -1.0]))
        >>> sample_margins(found).tolist(), sample_margins(found, absolute=True).tolist()
        ([2.0, -1.0], [2.0, 1.0])
    """
    if which not in get_args(Which):
        raise ValueError(f"which must be 'output' or 'softmax', got {which!r}")
    margins = _own(outputs, _COLUMN[which])
    bad = (~margins.isfinite()).nonzero()
    if len(bad):
        first = int(bad[0])
        raise NonFiniteError(
            f"the margin of item {first} is {float(margins[first])}: its other classes have infinite logits; leave "
            "them out, or rule them out by a large finite number"
        )
    return margins.abs() if absolute else margins


def sample_aceht(outputs: Outputs, *, bias: bool = True) -> Tensor:
    """The affine cross-entropy Hessian trace of every item, (||x||^2 + 1) (1 - sum_j S_j^2): (n,).

    For an affine network it is the trace of the Hessian of the item's cross-entropy (seed 003, proposition 3.1); x is
    the input as passed to the model. It is computed without cancellation, so it keeps all its digits if the softmax
    saturates. For a network with one logit it is halved, as its Hessian is.

    Args:
        outputs: Outputs of `ritz.measures.outputs`.
        bias: Whether the affine network has a bias, which adds the 1 to ||x||^2.

    Raises:
        UnsupportedError: If the inputs are not floating tensors, or a sample holds several items (tokens, pixels).

    Example:
        >>> found = Outputs(
        ...     loss=torch.ones(1), weight=torch.ones(1), impurity=torch.tensor([0.5]), input_norm2=torch.tensor([3.0])
        ... )
        >>> sample_aceht(found).tolist(), sample_aceht(found, bias=False).tolist()
        ([2.0], [1.5])
    """
    return _own(outputs, "impurity") * _size(outputs, bias)


def sample_margin_bound(outputs: Outputs, *, bias: bool = True) -> Tensor:
    """(||x||^2 + 1) (1 - gamma^2) of every item, never below its `sample_aceht` (seed 003, section 3.2): (n,).

    Seed 003 prints |x| instead of ||x||^2 + 1, which gives no bound. Arguments as for `sample_aceht`.

    Example:
        >>> model = torch.nn.Linear(1, 2)
        >>> _ = torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> from ritz.measures.outputs import sample_outputs
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.ones(1, 1), torch.tensor([0])))
        >>> found = sample_outputs(risk)
        >>> sample_aceht(found).tolist(), sample_margin_bound(found).tolist()
        ([1.0], [2.0])
    """
    return _own(outputs, "slack") * _size(outputs, bias)


def _size(outputs: Outputs, bias: bool) -> Tensor:
    """||x||^2 + 1, halved where one logit stands for two classes."""
    return (_own(outputs, "input_norm2") + float(bias)) * outputs.per_output


def _own(outputs: Outputs, name: str) -> Tensor:
    """A column of numbers that belong to each item by itself."""
    if not isinstance(outputs, Outputs):
        raise TypeError(f"expected the Outputs of ritz.measures.sample_outputs(risk), got {type(outputs).__name__}")
    return outputs.own(name)


# --------------------------------------------------------------------------------------------- estimates


def margin_quantile(outputs: Outputs, q: float = 0.5, *, which: Which = "output", absolute: bool = False) -> Estimate:
    """The q-quantile of the margins over the data; see `sample_margins` and `weighted_quantile`.

    Example:
        >>> found = Outputs(loss=torch.ones(3), weight=torch.ones(3), margin=torch.tensor([-1.0, 3.0, 1.0]))
        >>> margin_quantile(found).value, margin_quantile(found, 0.25).value
        (1.0, 0.0)
    """
    margins = sample_margins(outputs, which=which, absolute=absolute)
    name = "margin median" if q == 0.5 else f"margin quantile {q:g}"
    return _known(name, weighted_quantile(margins, outputs.weight, q), _said(outputs, which, absolute))


def margin_mean(outputs: Outputs, *, which: Which = "output", absolute: bool = False) -> Estimate:
    """The mean margin over the data; see `sample_margins`.

    Example:
        >>> found = Outputs(loss=torch.ones(2), weight=torch.ones(2), margin=torch.tensor([2.0, -1.0]))
        >>> margin_mean(found).value, margin_mean(found, absolute=True).value
        (0.5, 1.5)
    """
    margins = sample_margins(outputs, which=which, absolute=absolute)
    return _mean("margin mean", margins, outputs, _said(outputs, which, absolute))


def margin_min(outputs: Outputs, *, which: Which = "output", absolute: bool = False) -> Estimate:
    """The smallest margin over the data, that of a hard-margin support vector machine; see `sample_margins`.

    Example:
        >>> margin_min(Outputs(loss=torch.ones(2), weight=torch.ones(2), margin=torch.tensor([2.0, -1.0]))).value
        -1.0
    """
    margins = sample_margins(outputs, which=which, absolute=absolute)
    return _known("margin minimum", float(margins.min()), _said(outputs, which, absolute))


def margin_skewness(outputs: Outputs, *, which: Which = "output", absolute: bool = False) -> Estimate:
    """The third standardised moment of the margins, E (m - E m)^3 / Var^(3/2), of the population (seed 003, 4.2).

    Negative if a few margins are much smaller than the rest.

    Raises:
        UnsupportedError: If all margins are equal, which would give 0 / 0.

    Example:
        >>> found = Outputs(loss=torch.ones(3), weight=torch.ones(3), margin=torch.tensor([0.0, 1.0, 1.0]))
        >>> round(margin_skewness(found).value, 6)  # - 1 / sqrt(2)
        -0.707107
    """
    margins = sample_margins(outputs, which=which, absolute=absolute)
    return _known("margin skewness", skewness(margins, outputs.weight), _said(outputs, which, absolute))


def inverse_margin(outputs: Outputs, q: float = 0.1) -> Estimate:
    """1 / gamma_q^2 for the q-quantile gamma_q of the signed output margins (Jiang et al. 2020, "inverse margin").

    It appears in bounds that need margins of at least gamma_q > 0 for all items but a share q.

    Raises:
        UnsupportedError: If gamma_q is not positive, which the square would hide.

    Example:
        >>> found = Outputs(loss=torch.ones(2), weight=torch.ones(2), margin=torch.tensor([2.0, 2.0]))
        >>> inverse_margin(found).value
        0.25
    """
    gamma = weighted_quantile(sample_margins(outputs), outputs.weight, q)
    if gamma <= 0:
        wrong = 1 - float(outputs.correct.double().mean())
        raise UnsupportedError(
            f"the {q:g}-quantile of the margins is {gamma:.4g}, not positive ({wrong:.1%} of the data are not "
            "predicted right), so that no bound with this margin exists; take a larger q"
        )
    return _known("inverse margin", gamma**-2, f"1 / gamma^2 for the {q:g}-quantile of {_said(outputs, 'output')}")


def aceht(outputs: Outputs, *, bias: bool = True) -> Estimate:
    """The affine cross-entropy Hessian trace (seed 003, proposition 3.1), mean over the data; see `sample_aceht`.

    Example:
        >>> model = torch.nn.Linear(1, 2)
        >>> _ = torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])))
        >>> from ritz.measures.outputs import sample_outputs
        >>> aceht(sample_outputs(risk)).value  # mean of (1 + 1) / 2 and (9 + 1) / 2
        3.0
    """
    said = f"mean of (||x||^2{' + 1' if bias else ''}) (1 - sum_j S_j^2)"
    return _mean("ACEHT", sample_aceht(outputs, bias=bias), outputs, _halved(outputs, said))


def margin_bound(outputs: Outputs, *, bias: bool = True) -> Estimate:
    """The margin bound on ACEHT (seed 003, section 3.2), mean over the data; see `sample_margin_bound`.

    Example:
        >>> found = Outputs(
        ...     loss=torch.ones(1), weight=torch.ones(1), slack=torch.tensor([0.75]), input_norm2=torch.tensor([3.0])
        ... )
        >>> margin_bound(found).value
        3.0
    """
    said = f"mean of (||x||^2{' + 1' if bias else ''}) (1 - gamma^2), gamma the softmax margin"
    return _mean("margin bound", sample_margin_bound(outputs, bias=bias), outputs, _halved(outputs, said))


def mean_confidence(outputs: Outputs) -> Estimate:
    """The mean of max_j S_j over the data.

    Example:
        >>> found = Outputs(loss=torch.ones(2), weight=torch.ones(2), confidence=torch.tensor([0.5, 1.0]))
        >>> mean_confidence(found).value
        0.75
    """
    return _mean("confidence", _own(outputs, "confidence"), outputs, "mean of max_j S_j")


def mean_entropy(outputs: Outputs) -> Estimate:
    """The mean of - sum_j S_j log S_j over the data, in nats.

    Example:
        >>> found = Outputs(loss=torch.ones(2), weight=torch.ones(2), entropy=torch.tensor([0.5, 0.0]))
        >>> mean_entropy(found).value
        0.25
    """
    return _mean("entropy", _own(outputs, "entropy"), outputs, "mean of - sum_j S_j log S_j, in nats")


def calibration_error(outputs: Outputs, bins: int = 15) -> Estimate:
    """Expected calibration error, sum_b share_b |accuracy_b - confidence_b| (Guo et al. 2017, equation 3).

    The bins, ((b - 1) / bins, b / bins], have equal widths in the confidence max_j S_j; every item counts once,
    whatever its weight in the loss. The value describes these data: in small samples it is not 0 even for a calibrated
    network.

    Example:
        >>> sure, ones = torch.full((2,), 0.9), torch.ones(2)
        >>> found = Outputs(loss=ones, weight=ones, margin=torch.tensor([1.0, -1.0]), confidence=sure)
        >>> round(calibration_error(found).value, 6)  # half are right, 0.9 were expected
        0.4
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    confidence = _own(outputs, "confidence")
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    off = outputs.correct.double() - confidence
    gap = torch.zeros(bins, dtype=torch.float64).index_add(0, place, off.double()).abs().sum()
    said = f"sum of share |accuracy - confidence| over {bins} bins of equal width"
    return _known("calibration error", float(gap / len(off)), said, support=(0.0, 1.0))


def _mean(name: str, values: Tensor, outputs: Outputs, convention: str) -> Estimate:
    """A mean over the data; with the values of the items, if they can be paired and have equal weights."""
    plain = outputs.ordered and bool((outputs.weight == outputs.weight[0]).all())
    said = f"{convention}; {_over(outputs)}"
    return _known(name, outputs.mean(values), said, samples=values.double() if plain else None)


def _known(name: str, value: float, convention: str, **fields: Any) -> Estimate:
    """An exact number."""
    return Estimate(name=name, value=value, exact=True, convention=convention, **fields)


def _said(outputs: Outputs, which: Which, absolute: bool = False) -> str:
    """Which margins, over what."""
    formula = f"|{_FORMULA[which]}|" if absolute else f"{_FORMULA[which]}, signed"
    return f"{formula}; {_over(outputs)}"


def _over(outputs: Outputs) -> str:
    weighted = bool((outputs.weight != outputs.weight[0]).any())
    return f"over {len(outputs.weight)} items{', weighted' if weighted else ''}"


def _halved(outputs: Outputs, said: str) -> str:
    return f"{said}, halved for one logit" if outputs.one_logit else said


def margin_distribution(outputs: Outputs, *, which: Which = "output", absolute: bool = False) -> MarginDistribution:
    """The distribution of the margins over the data; see `sample_margins` and `MarginDistribution`.

    Example:
        >>> found = Outputs(loss=torch.ones(3), weight=torch.ones(3), margin=torch.tensor([1.0, 2.0, 6.0]))
        >>> round(margin_distribution(found).skewness, 4)
        0.5952
    """
    return MarginDistribution(
        name=f"{which} margin", values=sample_margins(outputs, which=which, absolute=absolute), weight=outputs.weight,
        correct=outputs.correct, convention=_said(outputs, which, absolute),
    )  # fmt: skip
