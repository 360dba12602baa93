"""Sub-sampling the curvature: figure 2 of seed 002, the law behind it, and the log-determinant that it gives up.

Figure 2 holds the Hessian and the Gauss-Newton matrix of a batch of 128 against those of all data: their traces agree,
the traces of their squares do not. Here, on trained networks of 9,960 parameters (MNIST, the network of table 1), for
batches of several sizes, drawn from the training images with replacement so that equations 11 and 12 are exact:

    E Tr H_B = Tr H,        E Tr H_B^2 = Tr H^2 + V / B,        V = mean_i |H_i - H|_F^2

V is measured apart from the batches, by `ritz.curvature_noise` for H and image by image for G. The figure of the paper
has no numbers and does not say on which network it was made.

The log-determinant is in `subsampling_logdet`, on networks 49-10-100-10 on images of 7 x 7 pixels: with 2,610
parameters the truth is a dense matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..estimators.noise import curvature_noise
from ..estimators.spectrum import spectrum
from ..models import mlp
from ..operators.base import full_precision
from ..operators.gauss_newton import GGN
from ..operators.hessian import Hessian
from ..results import Estimate, derived, from_samples
from ..risk import Params, Risk
from ..space import random_uniform
from . import mnist_mlp, subsampling_logdet
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .pieces import Pieces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATRICES = {"H": Hessian, "G": GGN}
SAME = 0.05  # traces that differ by 5 % agree
LAW = 0.1  # the law of squares is met to 10 %
DRAWN = 128  # the batch of figure 2
LEVELS = (1e-2, 1e-3, 1e-4)  # shifts of the log-determinant, of lambda_1
SEED = "seed 002"


def small_network(
    seed: int, dtype: torch.dtype = torch.float32, hidden: Sequence[int] = (10, 100)
) -> nn.Sequential:  # fmt: skip
    """49-10-100-10 with ReLU, or with other hidden layers.

    Example:
        >>> sum(p.numel() for p in small_network(0).parameters())
        2610
    """
    return mlp(in_features=49, hidden=hidden, seed=seed).to(dtype)


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train, measure the moments of batches, then the log-determinants of sub-samples."""
    (X, y), _, _ = mnist_mlp.load_mnist(setting.data, setting.device)
    num = setting.pick(200, 5000, 55_000)
    data, seeds = (X[:num], y[:num]), setting.seed_range(2, 2, 3)
    sizes: tuple[int, ...] = (8,) if setting.budget == "smoke" else (32, 128, 512)
    pieces = Pieces(setting, "subsampling")
    trained = mnist_mlp.train_many(
        data, seeds, (0.0,), epochs=setting.pick(1, 20, 50), checkpoint=pieces.training(seeds),
        progress=partial(progress, "epochs"),
    )  # fmt: skip
    rows: Rows = []
    for done, seed in enumerate(seeds, 1):
        work = partial(
            moments, sizes=sizes, repeats=setting.pick(2, 24, 32), seed=seed, num_steps=setting.pick(3, 20, 20),
            num_probes=setting.pick(1, 4, 4),
        )  # fmt: skip
        rows += pieces.keep(f"moments, seed {seed}", work, trained.params(seed, 0.0), data)
        progress("moments of batches", done, len(seeds))
    small = subsampling_logdet.pooled(data[0]), y[:num]
    make = partial(small_network, hidden=(4, 8)) if setting.budget == "smoke" else small_network
    trained = mnist_mlp.train_many(small, seeds, (0.0,), epochs=setting.pick(1, 30, 30), lr=0.02, make=make)
    sizes = {"smoke": (8, 16), "short": (128, 256, 512), "paper": (128, 256, 512, 1024)}[setting.budget]
    for done, seed in enumerate(seeds, 1):
        work = partial(
            subsampling_logdet.study, sizes=sizes, levels=LEVELS[: setting.pick(1, 3, 3)],
            repeats=setting.pick(2, 4, 8), seed=seed,
        )  # fmt: skip
        rows += pieces.keep(f"log-determinants, seed {seed}", work, trained.params(seed, 0.0), small)
        progress("log-determinants", done, len(seeds))
    return rows, claims(rows)


@full_precision()
def moments(
    params: Params, data: Data, sizes: Sequence[int], *, repeats: int, seed: int, num_steps: int = 20,
    num_probes: int = 4,
) -> Rows:  # fmt: skip
    """Tr A and Tr A^2 of H and G, for all images and for `repeats` batches of every size, drawn with replacement.

    Example:
        >>> X, y = torch.linspace(-1, 1, 20 * 784).reshape(20, 784), torch.arange(20) % 10
        >>> params = dict(mnist_mlp.make_network(0).state_dict())
        >>> rows = moments(params, (X, y), sizes=[4], repeats=2, seed=0, num_steps=3)
        >>> [(row["matrix"], row["size"], len(row["trace"])) for row in rows]
        [('H', 4, 2), ('G', 4, 2)]
    """
    X, y = data
    model = mnist_mlp.make_network(0, X.dtype).to(X.device)
    risk = Risk(model, nn.CrossEntropyLoss(), data, batch_size=5000).at(params)
    rows: Rows = []
    for name, matrix in MATRICES.items():
        whole = spectrum(matrix(risk), num_steps, num_probes, seed=seed)
        square = float(whole.moment(2).value)
        variance = _mean_square(params, X) - square if name == "G" else _batch_noise(risk, 4 * num_probes)
        for size in sizes:
            traces, squares = [], []
            for repeat in range(repeats):
                drawn = random_uniform(size, ("figure 2", seed, size, repeat), X.device).mul(len(X)).long()
                found = spectrum(matrix(risk.on((X[drawn], y[drawn]), size)), num_steps, num_probes, seed=seed)
                traces.append(short(found.trace.value))
                squares.append(short(found.moment(2).value))
            rows.append({
                "kind": "moments", "seed": seed, "matrix": name, "images": len(X), "size": size,
                "whole trace": short(whole.trace.value), "whole square": short(square), "variance": short(variance),
                "trace": traces, "square": squares,
            })  # fmt: skip
    return rows


def _batch_noise(risk: Risk, num_probes: int) -> float:
    """V of the Hessian from its noise between disjoint batches, which is V / B."""
    size = max(1, min(128, risk.num_samples // 16))
    num = min(32, risk.num_samples // size)
    noise = curvature_noise(risk, num_batches=num, batch_size=size, num_probes=num_probes)
    return float(noise.value) * risk.dim * size


def _mean_square(params: Params, X: Tensor) -> float:
    """The mean of |G_i|_F^2 over all images."""
    return float(torch.cat([_squares(subsampling_logdet.roots(params, part)) for part in X.split(500)]).mean())


def _squares(R: Tensor) -> Tensor:
    """|G_i|_F^2 of every image from its roots, (N,)."""
    return (R @ R.mT).double().square().sum((1, 2))


# ------------------------------------------------------------------------------------------------ claims


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Figure 2, the law 1 / B, and the log-determinants.

    Example:
        >>> one = {"kind": "moments", "matrix": "H", "images": 9, "size": 128, "whole trace": 2.0, "whole square": 4.0,
        ...        "variance": 256.0, "trace": [1.99, 2.01], "square": [5.9, 6.1]}
        >>> [claim.verdict for claim in claims([one | {"seed": 0}, one | {"seed": 1}])]
        ['holds', 'holds', 'holds', 'holds', 'holds']
    """
    found: list[Claim] = []
    moment_rows = [row for row in rows if row["kind"] == "moments"]
    for matrix in dict.fromkeys(row["matrix"] for row in moment_rows):
        for size in dict.fromkeys(row["size"] for row in moment_rows):
            found += _figure_2([row for row in moment_rows if row["matrix"] == matrix and row["size"] == size])
    logdets = [row for row in rows if row["kind"] == "logdet"]
    for level in dict.fromkeys(row["level"] for row in logdets):
        for size in dict.fromkeys(row["size"] for row in logdets):
            found += _log_determinants([row for row in logdets if row["level"] == level and row["size"] == size])
    return found


def _pooled(rows: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], list[float]]) -> Estimate:
    """The mean over all batches of all networks; batches are independent draws."""
    return from_samples("mean over batches", torch.tensor([x for row in rows for x in of(row)], dtype=torch.float64))


def _figure_2(own: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Traces agree, squares do not, and by how much."""
    name, size, images = (own[0][key] for key in ("matrix", "size", "images"))
    seen = f"{len(own)} networks, {len(own[0]['trace'])} batches each of {size} out of {images:,} images"
    traces = _pooled(own, lambda row: [x / row["whole trace"] for x in row["trace"]])
    squares = _pooled(own, lambda row: [x / row["whole square"] for x in row["square"]])
    law = _pooled(own, lambda row: [x / (row["whole square"] + row["variance"] / row["size"]) for x in row["square"]])
    figure = ", figure 2" if size == DRAWN else ""
    found = [
        Claim(
            paper=SEED, where=f"equation 11{figure}", expected=1.0, tolerance=SAME, measured=traces,
            text=f"E Tr {name}_B = Tr {name}: ratio of the mean of batches of {size} to Tr {name}", evidence=seen,
        ),
        Claim(
            paper=SEED, where=f"equation 12{figure}", expected=1.0, relation=">=", measured=squares,
            text=f"E Tr {name}_B^2 > Tr {name}^2: ratio of the mean of batches of {size} to Tr {name}^2", evidence=seen,
        ),
        Claim(
            paper=SEED, where="equation 12", expected=1.0, tolerance=LAW, measured=law,
            text=f"E Tr {name}_B^2 = Tr {name}^2 + V / B, V the noise of one image: ratio, batches of {size}",
            evidence=f"{seen}; V measured apart: {', '.join(format(row['variance'], '.4g') for row in own)}",
        ),
    ]  # fmt: skip
    return found + (_one_batch(own, seen) if size == DRAWN else [])


def _one_batch(own: Sequence[Mapping[str, Any]], seen: str) -> list[Claim]:
    """How far the numbers of a single batch are off, which is what the figure shows and what a user would have."""
    name, size = own[0]["matrix"], own[0]["size"]
    trace = _pooled(own, lambda row: [abs(x / row["whole trace"] - 1) for x in row["trace"]])
    square = _pooled(own, lambda row: [abs(x / row["whole square"] - 1) for x in row["square"]])
    seen = f"{seen}; mean |error| of one batch {float(trace.value):.0%} and {float(square.value):.0%}"
    return [
        Claim(
            paper=SEED, where="figure 2", expected=1.0, relation="<=", evidence=seen,
            measured=derived("ratio of errors", lambda x, y: x / y, trace, square),
            text=f"one batch of {size} gives Tr {name} more accurately than Tr {name}^2: ratio of the mean |error|",
        ),
        Claim(
            paper=SEED, where="figure 2, section 4.2", expected=SAME, relation="<=", measured=trace, evidence=seen,
            text=f"one batch of {size} gives Tr {name} to {SAME:.0%}: mean |error|", ours=True,
        ),
    ]  # fmt: skip


def _log_determinants(own: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """What a sub-sample gives as it is; and, as questions of ours, what is left of its error after each correction.

    "Isotropic noise" is the first term of a series in X / d, which is far from small at these d: it does not help here.
    """
    size, level, dim = (own[0][key] for key in ("size", "level", "dim"))
    truth = ", ".join(format(row["truth"], ".4g") for row in own)
    seen = (
        f"{len(own)} networks of {dim:,} parameters, {len(own[0]['errors']['none'])} sub-samples each out of "
        f"{own[0]['images']:,} images; log |G / d + I| = {truth}"
    )
    errors = {name: _pooled(own, partial(_relative, name)) for name in subsampling_logdet.METHODS}
    what = f"d = {level:g} lambda_1, sub-samples of {size}"
    found = [
        Claim(
            paper=SEED, where="section 4.2", expected=-SAME, relation="<=", reference=0.0, measured=errors["none"],
            text=f"log |G_B + d I| cannot be obtained from a sub-sample: its error over log |G / d + I|, {what}",
            evidence=f"{seen}. It errs downwards",
        )
    ]  # fmt: skip
    for name in subsampling_logdet.METHODS[1:]:
        before, after = (_pooled(own, partial(_sizes, which)) for which in ("none", name))
        left = derived("what is left", lambda x, y: x / y, after, before)
        found.append(
            Claim(
                paper=SEED, where="section 4.2, future work", expected=0.5, relation="<=", measured=left, ours=True,
                text=f"log |G_B + d I| corrected by {name}: mean |error| after over before, at most half, {what}",
                evidence=f"{seen}. Relative error {_said(errors['none'])} before, {_said(errors[name])} after",
            )
        )  # fmt: skip
    return found


def _relative(name: str, row: Mapping[str, Any]) -> list[float]:
    """Errors of a method over log |G / d + I|."""
    return [x / row["truth"] for x in row["errors"][name]]


def _sizes(name: str, row: Mapping[str, Any]) -> list[float]:
    """The same without their signs."""
    return [abs(x) for x in _relative(name, row)]


def _said(error: Estimate) -> str:
    """A mean with its standard error."""
    return f"{float(error.value):.3g} +- {float(error.stderr):.1g}"


def figure(rows: Rows) -> "Figure":
    """Moments of batches over those of all images, and errors of log-determinants before and after correction."""
    from .subsampling_figure import draw

    return draw(rows)
