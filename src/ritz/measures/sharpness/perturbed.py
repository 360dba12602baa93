"""Sharpness by displacement: how far the loss rises, or is expected to, when the weights are moved.

    worst case     max_{d in C} L(w + d) - L(w)        C a box (Keskar et al. 2017) or a ball (Foret et al. 2021)
    average case   E_d L(w + d) - L(w)

The value of a worst case is the largest rise found. This is a lower bound of the maximum, so its bracket has no upper
end. Passes over the data are counted as products. 16-bit risks are computed in float32: rounded to 8 or 11 bits, a
weight cannot move by a thousandth of itself, nor can the loss. Measures from curvature, without moving the weights, are
in `curvature`.
"""

import math
from typing import Any, get_args

import torch
from torch import Tensor

from ...batches import Batch
from ...errors import UnsupportedError
from ...losses import CrossEntropy
from ...operators.base import full_precision
from ...results import Estimate, from_samples
from ...risk import Progress, Risk
from ...space import ParamSpace, row_products
from .ascent import SCOUTED, Ball, Chart, Norm, Surface, Tick, climb_ball, climb_box, random_point


@full_precision()
def epsilon_sharpness(
    risk: Risk,
    epsilon: float = 1e-3,
    *,
    subspace: int | None = None,
    iterations: int = 10,
    num_starts: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
) -> Estimate:
    """The epsilon-sharpness of Keskar et al. (2017), metric 2.1: the relative rise of the loss in a box of the weights.

        phi = [max_{y in C} L(w + A y) - L(w)] / (1 + L(w)),     C: |y_i| <= epsilon (|(A^+ w)_i| + 1)

    The paper prints 100 phi; this is the plain ratio. The maximum is searched by L-BFGS-B with exact gradients, from y
    = 0 and from random points, because at a minimum of the loss y = 0 is a stationary point. The value uses the largest
    loss found, which is a lower bound of the maximum.

    Args:
        risk: The risk.
        epsilon: Relative half-width of the box; 1e-3 and 5e-4 in the paper.
        subspace: None for A = I, the whole space. A number p for a random matrix A of p columns (100 in the paper)
            with standard normal entries, neither orthogonal nor normalised, so that |A y| grows with sqrt(P p); it is
            held in memory, p times the weights.
        iterations: Number of iterations of L-BFGS-B from each start; 10 in the paper.
        num_starts: The first is w, the others are random points of the inner half of the box.
        seed: Seed of A and of the random starts.
        progress: Called as progress(iterations done, iterations at most).

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> data = torch.ones(1, 1).double(), torch.ones(1, 1).double()
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), data)  # (w - 1)^2 at its minimum
        >>> round(epsilon_sharpness(risk, 0.1).value, 6)  # w moves by 0.1 (|w| + 1) = 0.2
        0.04
    """
    check_risk(risk)
    check_positive("epsilon", epsilon)
    if iterations < 1 or num_starts < 1:
        raise ValueError(f"iterations and num_starts must be at least 1, got {iterations} and {num_starts}")
    if subspace is not None and not 1 <= subspace <= risk.dim:
        raise ValueError(f"subspace must lie between 1 and the number of parameters {risk.dim}, got {subspace}")
    risk = _wide(risk)
    loss = risk.loss()
    check_loss(loss)
    surface = Surface(risk, _box(risk, epsilon, subspace, seed))
    space = risk.space if subspace is None else ParamSpace(("subspace",), (torch.Size([subspace]),))
    best, settled = loss, True
    for number in range(num_starts):
        # half of a random point, or the centre
        start = random_point(space, "linf", number, seed, surface.origin) * (0.5 if number else 0.0)
        tick = _ticker(progress, number * iterations, num_starts * iterations)
        highest, rested = climb_box(surface, start, iterations, tick)
        best, settled = max(best, highest), settled and rested
    value = (best - loss) / (1 + loss)
    where = "the whole space" if subspace is None else f"a random subspace of {subspace} normal columns"
    text = (
        f"[max L(w + A y) - L(w)] / (1 + L(w)) over |y_i| <= {epsilon:g} (|(A^+ w)_i| + 1) in {where}, plain ratio and "
        f"not times 100; largest loss met by L-BFGS-B from {num_starts} starts, a lower bound of the maximum; "
        "gradients counted as products"
    )
    return Estimate(
        name="epsilon-sharpness", value=value, bracket=(value, math.inf), products=surface.evaluations,
        stop="stationary, a lower bound" if settled else f"{iterations} iterations, a lower bound",
        **_about(risk, text, seed),
    )  # fmt: skip


def _box(risk: Risk, epsilon: float, subspace: int | None, seed: int) -> Chart:
    """The box as a chart in which it is |z_i| <= 1."""
    origin = risk.space.join(risk.params())
    if subspace is None:
        return Chart(epsilon * (origin.abs() + 1))
    basis = risk.space.probes(range(subspace), seed, "normal", dtype=risk.dtype, device=risk.device)  # (p, dim)
    # A^+ w by the normal equations: columns of random numbers are far from dependent. Not by lstsq, whose bits depend
    # on where its own memory lies
    inner = torch.linalg.solve(row_products(basis, basis), row_products(basis, origin[None]))[:, 0]
    return Chart((epsilon * (inner.abs() + 1)).to(origin), basis)


@full_precision()
def worst_case_sharpness(
    risk: Risk,
    rho: float = 0.05,
    *,
    norm: Norm = "l2",
    adaptive: bool = False,
    eta: float = 0.0,
    steps: int = 20,
    num_starts: int = 8,
    batch_size: int | None = None,
    num_batches: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Estimate:
    """The largest rise of the loss in a ball around the weights, max_{|T^-1 d| <= rho} L(w + d) - L(w).

    T = 1, or |w| + eta, parameter by parameter, if adaptive (ASAM, Kwon et al. 2021). The search is projected ascent
    along the normalised gradient, with momentum and a step size that is halved when it no longer helps (APGD; Croce and
    Hein 2020, Andriushchenko et al. 2023). d = 0 is included, so the value is never negative; it is a lower bound of
    the maximum. One step is that of SAM (Foret et al. 2021), d = rho T^2 g / |T g| in l2: at a minimum, where g is
    noise, it finds a small part of the rise that 20 steps find.

    Args:
        risk: The risk.
        rho: Radius.
        norm: "l2" or "linf".
        adaptive: Measure the distance relative to the weights. With eta = 0 this is invariant to the rescaling of
            layers that leaves the function as it is (Dinh et al. 2017). T covers every chosen parameter, including
            biases and normalisations, in which implementations differ; `risk.restrict("*weight")` leaves out biases.
        eta: The eta of T; 0.01 in ASAM. With 0 a weight that is 0 does not move.
        steps: Number of steps of the ascent: the first 3 from each start, the others from the best point that was met.
        num_starts: The first is w, the others are random points on the sphere or in the box, which matter at a minimum.
            With one step there is only the first.
        batch_size: m, for m-sharpness: the mean, over batches of m samples, of the rise of each batch's own loss. None
            uses the loss of all data.
        num_batches: Number of disjoint batches; None uses all.
        seed: Seed of the batches and of the random starts.
        progress: Called as progress(passes over a batch or the data done, in all).

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> X = torch.diag(torch.tensor([1.0, 2.0])).double()
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (X, torch.zeros(2, 1).double()))  # H = diag(1, 4)
        >>> round(worst_case_sharpness(risk, rho=1.0).value, 4)  # 4 / 2 along the second weight
        2.0
    """
    _check_ball(risk, rho, norm, adaptive, eta)
    if steps < 1 or num_starts < 1:
        raise ValueError(f"steps and num_starts must be at least 1, got {steps} and {num_starts}")
    risk = _wide(risk)
    batches = _batches(risk, batch_size, num_batches, seed)
    risk.check()
    num_starts = num_starts if steps > 1 else 1
    scouted = min(steps, SCOUTED) if num_starts > 1 else steps
    each = num_starts * (1 + scouted) + steps - scouted  # passes
    chart, ball, rises, spent = Chart(_widths(risk, adaptive, eta)), Ball(rho, norm), [], 0
    for number, some in enumerate(batches):
        surface = Surface(risk, chart, some)
        tick = _ticker(progress, number * each, len(batches) * each)
        rises.append(climb_ball(surface, ball, steps, num_starts, seed, tick))
        spent += surface.evaluations
    over = "" if batch_size is None else f", mean over {len(batches)} batches of {batch_size}, each of its own loss"
    ball_text = f"|d / T|_{norm[1:]} <= {rho:g}, T = {_widths_text(adaptive, eta)}"
    found = "largest loss met by projected ascent, a lower bound of the maximum; gradients counted as products"
    about = _about(risk, f"max L(w + d) - L(w) over {ball_text}{over}; {found}", seed)
    about |= {"products": spent, "stop": f"{steps} steps, {scouted} from each of {num_starts} starts, a lower bound"}
    name, samples = "worst-case sharpness", torch.tensor(rises, dtype=torch.float64)
    if batch_size is None:
        return Estimate(name=name, value=rises[0], bracket=(rises[0], math.inf), **about)
    return from_samples(name, samples, bracket=(float(samples.mean()), math.inf), **about)


@full_precision()
def average_case_sharpness(
    risk: Risk,
    rho: float = 0.01,
    *,
    norm: Norm = "l2",
    adaptive: bool = False,
    eta: float = 0.0,
    num_draws: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Estimate:
    """The expected rise of the loss under random displacements, E L(w + d) - L(w) (Andriushchenko et al. 2023).

    d_i is normal with standard deviation rho T_i for "l2", so that |d| is about rho sqrt(P) and not rho, and uniform on
    (-rho T_i, rho T_i) for "linf"; T as in `worst_case_sharpness`. To second order it is rho^2 Tr H / 2, or a third of
    that (with T H T in place of H). It may be negative if the curvature is.

    Args:
        risk: The risk.
        rho: Standard deviation, or half the width, of every coordinate.
        norm: "l2" or "linf".
        adaptive: Displacements relative to the weights.
        eta: The eta of T.
        num_draws: Number of draws of d; each is used with both signs, so that the gradient cancels. The error is over
            draws.
        seed: Seed of the draws, which are common to all checkpoints of a network.
        progress: Called as progress(passes over the data done, in all).

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1).double(), torch.ones(1, 1).double()))
        >>> rise = average_case_sharpness(risk, rho=0.1, num_draws=100)  # H = 2: rho^2
        >>> rise.interval()[0] < 0.01 < rise.interval()[1]
        True
    """
    _check_ball(risk, rho, norm, adaptive, eta)
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1, got {num_draws}")
    risk = _wide(risk)
    risk.check()
    surface = Surface(risk, Chart(_widths(risk, adaptive, eta)))
    loss = surface.loss(torch.zeros_like(surface.origin))
    tick, samples = _ticker(progress, 0, 1 + 2 * num_draws), []
    for index in range(num_draws):
        z = rho * random_point(risk.space, norm, index, seed, surface.origin)
        samples.append((surface.loss(z) + surface.loss(-z)) / 2 - loss)
        tick(surface.evaluations)
    law = "normal with standard deviation" if norm == "l2" else "uniform with half-width"
    text = (
        f"E L(w + d) - L(w), every d_i {law} {rho:g} T_i, T = {_widths_text(adaptive, eta)}; {num_draws} draws, each "
        "with both signs, losses counted as products"
    )
    about = _about(risk, text, seed) | {"support": (-math.inf, math.inf), "products": surface.evaluations}
    return from_samples("average-case sharpness", torch.tensor(samples, dtype=torch.float64), **about)


def logit_normalised(risk: Risk) -> Risk:
    """The same risk with its logits f replaced by (f - mean f) / |f - mean f| (Andriushchenko et al. 2023, their code).

    Any measure can be computed for this risk, and none then changes when the outputs are scaled or shifted. It is a
    different loss, whose values are not those of the network: logits of norm 1 are far from confident. Logits that are
    all equal become 0. Two logits always become 1 / sqrt(2) and its negative: that loss has steps but no slope, and a
    search by gradients finds at best a part of its rise.

    Raises:
        UnsupportedError: If the loss is not cross-entropy, or if there is only one class.

    Example:
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0], [1.0]]))
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.ones(1, 1), torch.tensor([0])))
        >>> round(logit_normalised(risk).loss(), 4)  # log(1 + exp(-sqrt(2))), for f = (1, -1) / sqrt(2)
        0.2176
    """
    check_risk(risk)
    loss = cross_entropy_of(risk, "logit normalisation")

    def normalised(out: Tensor, batch: Any) -> Tensor:
        dim, _ = loss.layout(out, batch)
        if out.shape[dim] < 2:
            raise UnsupportedError("logit normalisation needs at least 2 classes: one logit minus its mean is always 0")
        centred = out - out.mean(dim, keepdim=True)
        square = centred.square().sum(dim, keepdim=True)
        return centred * torch.where(square > 0, square, 1.0).rsqrt()

    return risk.through(normalised, "logits centred and divided by their norm")


# -------------------------------------------------------------------------------------------- shared by them


def _about(risk: Risk, text: str, seed: int) -> dict[str, Any]:
    return {"seed": seed, "support": (0.0, math.inf), "convention": f"{text}; {risk.convention()}"}


def _wide(risk: Risk) -> Risk:
    """The risk in at least 32 bits."""
    return risk.to(dtype=torch.float32) if torch.finfo(risk.dtype).bits < 32 else risk


def _ticker(progress: Progress | None, start: int, total: int) -> Tick:
    """Progress of one part of a run, as a function of the work done in that part."""
    return lambda done: progress(start + done, total) if progress is not None else None


def _batches(risk: Risk, batch_size: int | None, num_batches: int | None, seed: int) -> list[list[Batch] | None]:
    """The data of each search: all data, or one batch of m samples each."""
    if batch_size is None:
        if num_batches is not None:
            raise ValueError(f"num_batches={num_batches} is for m-sharpness: give batch_size= as well")
        return [None]
    count = max(risk.num_samples // max(batch_size, 1), 1) if num_batches is None else num_batches
    with torch.inference_mode(False):  # samples are differentiated through
        return [[batch] for batch in risk.batches.sample(count, batch_size, seed)]


def _widths(risk: Risk, adaptive: bool, eta: float) -> Tensor | float:
    """T: the displacement that one unit of each coordinate means."""
    return risk.space.join(risk.params()).abs() + eta if adaptive else 1.0


def _widths_text(adaptive: bool, eta: float) -> str:
    if not adaptive:
        return "1"
    return f"|w|{f' + {eta:g}' if eta else ''} of every chosen parameter"


def check_risk(risk: object) -> None:
    """Refuse anything but a risk."""
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")


def check_positive(name: str, value: float) -> None:
    """Refuse a length that is not positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value}")


def check_loss(loss: float) -> None:
    """Refuse a loss that epsilon-sharpness cannot be relative to."""
    if not 0 < 1 + loss < math.inf:
        raise ValueError(f"epsilon-sharpness divides by 1 + L, and L is {loss:.4g}; it needs a finite loss above -1")


def cross_entropy_of(risk: Risk, what: str) -> CrossEntropy:
    """The loss of a classifier.

    Raises:
        UnsupportedError: If it is another loss.
    """
    loss = risk.output_loss
    if not isinstance(loss, CrossEntropy):
        raise UnsupportedError(f"{what} is for cross-entropy, got {type(loss).__name__}; give nn.CrossEntropyLoss()")
    return loss


def _check_ball(risk: Risk, rho: float, norm: str, adaptive: bool, eta: float) -> None:
    """Refuse settings that do not describe a neighbourhood."""
    check_risk(risk)
    check_positive("rho", rho)
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be 'l2' or 'linf', got {norm!r}")
    if not 0 <= eta < math.inf:
        raise ValueError(f"eta must be finite and not negative, got {eta}")
    if eta and not adaptive:
        raise ValueError(f"eta={eta:g} is a part of T = |w| + eta, which adaptive=True switches on")
