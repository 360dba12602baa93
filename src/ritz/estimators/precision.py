"""How far products are from those in float64: what no test of the matrix by itself can see.

Where a network fits its data, the loss and its derivatives are small differences of large numbers, and the round-off of
the forward pass changes the matrix that is multiplied: from H to H + E, as linear and as symmetric as H. Only a product
in more digits tells. One batch is multiplied in both precisions by K = 2 normal probes v, for which

    E mean |E v|^2 = ||E||_F^2,   E mean v'Ev = Tr E,   mean |E v|^2 >= 0.0513 ||E||_F^2 in 95 % of draws

at the least: of all E of one norm, those of rank one have the widest spread, and for them the mean is ||E||_F^2 times
an exponential variable of mean 1, which is above -log 0.95 = 0.0513 that often.
"""

import dataclasses
import logging
import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory import free_memory
from ..operators.algebra import Scaled, Shifted
from ..operators.base import Operator, RiskOperator
from ..operators.gauss_newton import Fisher
from ..reducers import Mean
from ..risk import Risk

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


def compare_precisions(operator: Operator, seed: int = 0) -> Precision | None:
    """Multiply a part of the first batch in the precision of the risk and in float64; nothing of the model changes.

    None where there is nothing to compare: for a matrix of no risk or of float64, with dropped units or drawn labels
    (which depend on the precision), for a sharded model, where float64 does not exist on the device or does not fit.

    Args:
        operator: A matrix of a risk, c H + d; one that has been multiplied already takes the same route.
        seed: Of the probes, which share none with a run.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.eye(2), torch.tensor([0, 1])))
        >>> compare_precisions(ritz.Hessian(risk)).distance < 1e-5
        True
        >>> compare_precisions(ritz.Hessian(risk.to(dtype=torch.float64))) is None
        True
    """
    if isinstance(operator, Scaled | Shifted):
        factor = abs(operator.factor) if isinstance(operator, Scaled) else 1.0
        seen = compare_precisions(operator.base, seed)
        return seen and dataclasses.replace(seen, norm=factor * seen.norm, trace=factor * seen.trace)
    if not isinstance(operator, RiskOperator) or isinstance(operator, Fisher):
        return None
    risk = operator.risk
    if risk.dtype == torch.float64 or risk.sharded or risk.dropout:
        return None
    found = None
    try:
        if _has_room(risk):
            found = _compared(operator, seed)
    except Exception as error:  # a model may know one precision only: a word less, and nothing else
        log.info("products are not compared with float64: %s", " ".join(str(error).split()))
    # of several ranks, what the first saw that has data
    return next((each for each in operator.world.gather(found) if each is not None), None)


def coarse_products(risk: Risk) -> str:
    """Which products a GPU takes in TF32, as torch is set; by default convolutions are.

    Example:
        >>> coarse_products(ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1))))
        ''
    """
    if risk.device.type != "cuda" or risk.dtype != torch.float32:
        return ""
    matrices = torch.get_float32_matmul_precision() != "highest"
    convolutions = any(isinstance(m, torch.nn.modules.conv._ConvNd) for m in risk.model.modules())
    named = {"matrix products": matrices, "convolutions": convolutions and torch.backends.cudnn.allow_tf32}
    return " and ".join(name for name, holds in named.items() if holds)


def _has_room(risk: Risk) -> bool:
    """Whether the memory for a product in float64 is there twice; yes where the system does not tell."""
    free = free_memory(risk.device)
    return free is None or 2 * _COPIES * 8 * sum(t.numel() for t in risk.state().values()) < free


def _compared(operator: RiskOperator, seed: int) -> Precision | None:
    batch = operator.risk.batches.first()
    if batch is None:
        return None
    piece = batch.pieces(_SAMPLES)[0] if operator.risk.splittable else batch
    one = operator.risk.alone().on([piece.data])
    one.plan = dataclasses.replace(one.plan, replay=False, compile=False)
    rows = operator.probes(range(-2000, -2000 - _PROBES, -1), seed, "normal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact, own = (_product(operator._like(each), rows) for each in (one.to(dtype=torch.float64), one))
    apart = own - exact
    scale = max(_size(own), _size(exact))
    if not math.isfinite(scale):
        return None
    forms = operator.space.segment(rows.double() * apart).mean(0)  # (len(names),)
    return Precision(
        distance=_size(apart) / scale if scale else 0.0,
        norm=_size(apart),
        trace=max(abs(float(forms.sum())), float(forms.abs().max())),
        coarse=coarse_products(operator.risk),
    )


def _product(operator: RiskOperator, rows: Tensor) -> Tensor:
    """The mean over the data times rows, in float64; what `rows` does, without its checks of the data."""
    rows = rows.to(operator.dtype)
    image: Tensor = operator.risk.fold(lambda params, batch: operator.batch_rows(params, batch, rows), Mean())
    return image.double()


def _size(rows: Tensor) -> float:
    """The root of the mean of their squared norms."""
    return float(rows.square().sum(1).mean().sqrt())
