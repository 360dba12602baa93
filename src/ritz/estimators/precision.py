"""How far products are from those in float64: what no test of the matrix by itself can see.

Where a network fits its data, the loss and its derivatives are small differences of large numbers, and where it has
kinks, a unit of ReLU near zero or two places of a pool that are nearly alike, round-off may choose the other side.
Either way the round-off of the forward pass changes the matrix that is multiplied: from H to H + E, as linear and as
symmetric as H. Only a product in more digits tells. One batch is multiplied in both precisions by K = 2 normal probes
v, for which

    E mean |E v|^2 = ||E||_F^2,   E mean v'Ev = Tr E,   mean |E v|^2 >= 0.0513 ||E||_F^2 in 95 % of draws

at the least: of all E of one norm, those of rank one have the widest spread, and for them the mean is ||E||_F^2 times
an exponential variable of mean 1, which is above -log 0.95 = 0.0513 that often. What E moves is in `rounding`.
"""

import dataclasses
import logging
import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import NumericalWarning, callers_level
from ..memory import free_memory
from ..operators.algebra import Scaled, Shifted
from ..operators.base import Operator
from ..operators.blocks import BlockDiagonal, PaddedBlocks, block_diagonal
from ..operators.footprint import product_bytes
from ..operators.gauss_newton import Fisher
from ..operators.risk_operator import RiskOperator
from ..reducers import Mean
from ..risk import Risk
from ..switches import convolution_precision, is_tf32, matmul_precision, switches

log = logging.getLogger(__name__)

ROUGH = 1e-4  # distance of products from those in float64 above which it is told, and intervals are widened

_PROBES = 2
_SURE = (-math.log(0.95)) ** -0.5  # 4.4: times the norm that is seen, a norm that is not exceeded
_SAMPLES = 256  # most samples that are multiplied
_COPIES = 8  # of the weights, in float64, that a product takes


@dataclass(frozen=True)
class Precision:
    """What the products of one batch in two precisions differ by.

    Attributes:
        distance: |E v| relative to |H v|.
        norm: |E v|, an estimate of ||E||_F.
        trace: |v'Ev|, an estimate of |Tr E|; of a single parameter, where that is larger.
        coarse: Which operations were in TF32.

    Example:
        >>> seen = Precision(distance=0.01, norm=0.02, trace=0.05)
        >>> [round(error, 3) for error in seen.errors(largest=1.0)]  # 4.4 * 0.02, and 0.05 more
        [0.088, 0.138]
        >>> seen.rough
        True
    """

    distance: float
    norm: float
    trace: float
    coarse: str = ""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        digits = "use dtype=torch.float64"
        if not self.coarse:
            return digits
        return (
            f"{self.coarse} are in TF32: torch.set_float32_matmul_precision('highest') and "
            f"torch.backends.cudnn.allow_tf32 = False; if it stays, {digits}"
        )

    def times(self, factor: float) -> "Precision":
        """That of a multiple of the matrix."""
        return dataclasses.replace(self, norm=abs(factor) * self.norm, trace=abs(factor) * self.trace)

    @property
    def rough(self) -> bool:
        """Whether that is more than intervals may leave out."""
        return self.distance > ROUGH

    def errors(self, largest: float) -> tuple[float, float]:
        """By how much an eigenvalue and the trace may be off, where the largest eigenvalue is `largest` in size.

        By Weyl no eigenvalue moves by more than ||E||. The batch stands for all data: by the size of its error, or by
        that relative to its curvature where this is more.
        """
        error = _SURE * max(self.norm, self.distance * largest)
        return error, self.trace + error

    @property
    def note(self) -> str:
        """For the convention of a number."""
        return f"products off by {self.distance:.0e}"

    def tell(self, dtype: torch.dtype) -> None:
        """Warn the caller of the estimator, two functions and a decorator up."""
        kind = str(dtype).removeprefix("torch.")
        warnings.warn(
            f"products in {kind} are off by {self.distance:.0e} in the first batch, compared with float64, and "
            f"intervals are widened accordingly; {self.remedy}",
            NumericalWarning,
            stacklevel=callers_level(),
        )


# what was seen of an operator, and with which probes, weights and kernels
_found: WeakKeyDictionary[RiskOperator, tuple[Hashable, Precision | None]] = WeakKeyDictionary()


def compare_precisions(operator: Operator, seed: int = 0) -> Precision | None:
    """Multiply a part of the first batch in the precision of the risk and in float64; nothing of the model changes.

    None where there is nothing to compare: for a matrix of no risk or of float64, with dropped units or drawn labels
    (which depend on the precision), for a sharded model, where float64 does not exist on the device or does not fit.

    Args:
        operator: A matrix of a risk, c H + d; one that has been multiplied already takes the same route.
        seed: Seed of the probes, which share none with a run.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.eye(2), torch.tensor([0, 1])))
        >>> compare_precisions(ritz.Hessian(risk)).distance < 1e-5
        True
        >>> compare_precisions(ritz.Hessian(risk.to(dtype=torch.float64))) is None
        True
    """
    base, factor, _ = unscaled(operator)
    if base is None:
        return None
    key = seed, base.version(), switches()
    known, seen = _found.get(base, (None, None))
    if known != key:
        seen = _compared(base, {"all": base.space.names}, seed).get("all")
        _found[base] = key, seen
    return seen and seen.times(factor)


def compare_blocks(blocks: BlockDiagonal | PaddedBlocks, seed: int = 0) -> dict[str, Precision]:
    """`compare_precisions` for each diagonal block by itself, of the same two probes; nothing where that is None.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (torch.ones(4, 2), torch.ones(4, 1)))
        >>> blocks = block_diagonal(ritz.Hessian(risk), {"w": ["weight"], "b": ["bias"]})
        >>> {name: seen.rough for name, seen in compare_blocks(blocks).items()}
        {'w': False, 'b': False}
    """
    base, factor, _ = (blocks, 1.0, 0.0) if isinstance(blocks, BlockDiagonal) else unscaled(blocks.base)
    if base is None:
        return {}
    same = base if isinstance(base, BlockDiagonal) else block_diagonal(base, blocks.groups)
    found = _compared(same, blocks.groups, seed) if isinstance(same, BlockDiagonal) else {}
    return {group: seen.times(factor) for group, seen in found.items()}


def coarse_products(risk: Risk) -> str:
    """Which products a GPU takes in TF32, as torch is set; by default convolutions are.

    Example:
        >>> coarse_products(ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1))))
        ''
    """
    if risk.device.type != "cuda" or risk.dtype != torch.float32:
        return ""
    named = {"matrix products": matmul_precision(), "convolutions": convolution_precision()}
    if not any(isinstance(m, torch.nn.modules.conv._ConvNd) for m in risk.model.modules()):
        del named["convolutions"]
    return " and ".join(name for name, value in named.items() if is_tf32(value))


def unscaled(operator: Operator) -> tuple[RiskOperator | None, float, float]:
    """H, c and d of a matrix c H + d; H is None where it is that of no risk.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1)))
        >>> H, factor, shift = unscaled(2 * (ritz.Hessian(risk) + 3) + 1)
        >>> type(H).__name__, factor, shift
        ('Hessian', 2.0, 7.0)
    """
    factor, shift = 1.0, 0.0
    while isinstance(operator, Scaled | Shifted):
        if isinstance(operator, Scaled):
            factor *= operator.factor
        else:
            shift += factor * operator.shift
        operator = operator.base
    return (operator if isinstance(operator, RiskOperator) else None), factor, shift


def _has_room(risk: Risk, batch: Batch) -> bool:
    """Whether the memory that weights take in a product in float64 is there twice; yes where the system does not tell.

    On a CPU, which has no error for want of memory, beside it that of the activations of a batch that stays whole.
    """
    free = free_memory(risk.device)
    needed = 2.0 * _COPIES * 8 * sum(t.numel() for t in risk.state().values())
    if risk.device.type == "cpu" and not risk.splittable:
        with risk.session():
            wider = 64 / torch.finfo(risk.dtype).bits
            needed += wider * product_bytes(risk, risk.params(), batch, 1)
    return free is None or needed < free


def _compared(operator: RiskOperator, groups: Mapping[str, Sequence[str]], seed: int) -> dict[str, Precision]:
    """By groups of parameters, what the products of both precisions differ by; nothing where they cannot be had."""
    risk = operator.risk
    if risk.dtype == torch.float64 or risk.sharded or risk.dropout or isinstance(operator, Fisher):
        return {}
    found: dict[str, Precision] = {}
    try:
        batch = risk.batches.first()
        if batch is not None and _has_room(risk, batch):
            rows = operator.probes(range(-2000, -2000 - _PROBES, -1), seed, "normal")
            found = _by_group(operator, groups, rows, *_products(operator, batch, rows))
    except Exception as error:  # a model may know one precision only: a word less, and nothing else
        log.info("products are not compared with float64: %s", " ".join(str(error).split()))
    # of several ranks, what the first saw that has data
    return next((each for each in operator.world.gather(found) if each), {})


def _products(operator: RiskOperator, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A part of a batch times rows in the precision of the risk, and in float64."""
    risk = operator.risk
    piece = batch.head(_SAMPLES) if risk.splittable else batch
    one = risk.alone().on([piece.data])
    one.plan = dataclasses.replace(one.plan, replay=False, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact, own = (_product(operator._like(each), rows) for each in (one.to(dtype=torch.float64), one))
    return own, exact


def _product(operator: RiskOperator, rows: Tensor) -> Tensor:
    """The mean over the data times rows, in float64; what `rows` does, without its checks of the data."""
    rows = rows.to(operator.dtype)
    image: Tensor = operator.risk.fold(lambda params, batch: operator.batch_rows(params, batch, rows), Mean())
    return image.double()


def _by_group(
    operator: RiskOperator, groups: Mapping[str, Sequence[str]], rows: Tensor, own: Tensor, exact: Tensor
) -> dict[str, Precision]:
    """Norms and quadratic forms of the difference, of each group's part; nothing where a product is not finite."""
    space, apart, coarse = operator.space, own - exact, coarse_products(operator.risk)
    squares = [space.segment(x.square()).mean(0) for x in (apart, own, exact)]  # (parameters,)
    forms = space.segment(rows.double() * apart).mean(0)
    if not bool(torch.stack(squares).isfinite().all()):
        return {}
    found = {}
    for group, names in groups.items():
        part = [space.names.index(name) for name in names]
        norm, *scales = (float(square[part].sum().sqrt()) for square in squares)
        trace = max(abs(float(forms[part].sum())), float(forms[part].abs().max()))
        found[group] = Precision(norm / max(scales) if max(scales) else 0.0, norm, trace, coarse)
    return found
