"""The pictures of concepts.md: `python docs/concepts.py [FOLDER]` writes them, a minute on one core.

Each stands beside a truth that was had another way, where there is one. All settings are in this file.
"""

import copy
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import ritz
from ritz.krylov.lanczos import lanczos
from ritz.operators import DenseOperator

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels[:300] / 16), torch.tensor(labels[:300])
LOSS = nn.CrossEntropyLoss()


def trained(*layers, steps=150):
    """A network in float64 after Adam on 300 digits."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for layer in layers)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        LOSS(model(X), y).backward()
        optimizer.step()
    return model


def linear(*size):
    """A layer, once it is called."""
    return lambda: nn.Linear(*size)


def risk_of(model, **keywords):
    """All 300 digits as one batch."""
    return ritz.Risk(model, LOSS, (X, y), batch_size=300, **keywords)


def panels(*titles, height=3.4):
    """A row of axes."""
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots(1, len(titles))
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    return figure, *axes


def draw_lanczos(small):
    """Ritz values step by step; the density beside that of all eigenvalues."""
    H = DenseOperator(ritz.Hessian(small).dense())
    truth = torch.linalg.eigvalsh(H.dense())
    figure, left, right = panels("Ritz values of one probe", "The density: found (blue) and true (dashed)")
    for m in range(1, 31):
        run = lanczos(H, H.probes([0], seed=0), m, reorthogonalize="full")
        nodes = run.tridiagonal().gauss().nodes[0]
        left.plot([m] * len(nodes), nodes, ".", color="C0", markersize=3)
    left.hlines(truth, 31, 33, color="C1", linewidth=0.6)
    left.set(xlabel="Lanczos steps (orange: all eigenvalues)", ylabel="eigenvalue")
    spectrum = ritz.spectrum(H, num_steps=30, num_probes=8, seed=0)
    width = float(truth[-1] - truth[0]) / 30
    spectrum.plot(right, width=width)
    grid = spectrum.default_grid()
    smooth = torch.distributions.Normal(truth, width).log_prob(grid[:, None]).exp().mean(1)
    right.plot(grid, smooth, "--", color="C1")
    return figure


def draw_choose(small):
    """What probes and what steps do to an error."""
    H = DenseOperator(ritz.Hessian(small).dense())
    truth = float(H.dense().trace())
    figure, left, right = panels("Tr H: error, root mean square of 5 seeds", "log det(G + 0.0001)")
    runs = {
        "Hutchinson": lambda probes, seed: ritz.trace(H, "hutchinson", num_probes=probes, seed=seed),
        "locked head, short tail": lambda probes, seed: ritz.spectrum(H, 5, probes, seed=seed).trace,
    }
    for name, estimate in runs.items():
        found = [[estimate(probes, seed) for seed in range(5)] for probes in (4, 16, 64)]
        errors = [sum((float(e) / truth - 1) ** 2 for e in row) ** 0.5 / len(row) ** 0.5 for row in found]
        left.loglog([row[0].products for row in found], errors, "o-", label=name)
    left.set(xlabel="products", ylabel="relative error")
    left.legend(frameon=False)
    G = ritz.GGN(small)
    steps = (2, 3, 5, 10, 15)
    for place, m in enumerate(steps):
        for seed in range(3):
            found = ritz.spectrum(G, m, 32, seed=seed).logdet(shift=1e-4)
            right.vlines(place + 0.2 * (seed - 1), *found.interval(), color="C0", linewidth=1)
            right.vlines(place + 0.2 * (seed - 1), *found.bracket, color="C0", linewidth=4)
    right.axhline(float((torch.linalg.eigvalsh(G.dense()).clamp_min(0) + 1e-4).log().sum()), color="C1", linewidth=1)
    right.set_xticks(range(len(steps)), steps)
    right.set(xlabel="Lanczos steps")
    return figure


def draw_measures(risk):
    """What four families of measures look at."""
    titles = ("Sharpness at a point", "By search within a radius", "Noise of the weights", "Margins")
    figure, point, search, noise, margins = panels(*titles, height=2.7)
    H, loss = ritz.Hessian(risk), risk.loss()
    top = ritz.top_eigenpairs(H, k=1)
    curve = ritz.landscape.line(risk, top.vectors[:, 0], radius=1.0, num=41, derivatives=False)
    at = curve.coordinates
    for ax in (point, search):
        ax.plot(at, curve.losses)
        ax.set(xlabel="along the top eigenvector", ylim=(-0.05, 1.1 * float(curve.losses.max())))
    point.plot(at, loss + float(top.values[0]) / 2 * at**2, "--", color="C1")
    radius = 0.5
    worst = float(ritz.measures.worst_case_sharpness(risk, rho=radius))
    search.axvspan(-radius, radius, color="C1", alpha=0.12, linewidth=0)
    search.hlines(loss + worst, -radius, radius, color="C1", linestyle="--")
    sigmas = torch.linspace(0.02, 0.2, 7)
    rises = [ritz.measures.average_case_sharpness(risk, float(sigma), num_draws=64) for sigma in sigmas]
    noise.errorbar(sigmas, [float(e) for e in rises], [2 * float(e.stderr) for e in rises], fmt="o", markersize=3)
    noise.plot(sigmas, sigmas**2 / 2 * float(ritz.trace(H)), "--", color="C1")
    noise.set(xlabel="σ of the noise", ylabel="mean rise of the loss")
    margin = ritz.measures.sample_outputs(risk).margin
    margins.hist(margin, bins=30)
    margins.axvline(float(margin.median()), color="C1", linestyle="--")
    margins.set(xlabel="margin of an item", ylabel="items")
    return figure


def draw_flatness(risk):
    """Moves that keep the function, or the prediction."""
    figure, left, right = panels("The loss along the sharpest direction", "Measures, relative to c = 1")
    for c in (1, 2, 4):
        moved = ritz.transforms.rescale(risk, c)
        sharpest = ritz.top_eigenpairs(ritz.Hessian(moved), k=1).vectors[:, 0]
        seen = ritz.landscape.line(moved, sharpest, num=31, derivatives=False)
        left.plot(seen.coordinates, seen.losses, label=f"one layer times {c}, the next through {c}")
    left.set(xlabel="distance", ylabel="loss")
    left.legend(frameon=False, fontsize=9)
    factors, keys = (1, 2, 4, 8), {"trace": "Tr H", "lambda_max": "λ₁", "layer_margin": "layer margin"}
    for move, style in ((ritz.transforms.rescale, "o-"), (ritz.transforms.scale_output, "o--")):
        rows = [ritz.measure(move(risk, c), measures=list(keys), num_steps=10, num_probes=4) for c in factors]
        for color, (key, name) in enumerate(keys.items()):
            heights = [float(m[key]) / float(rows[0][key]) for m in rows]
            right.loglog(factors, heights, style, color=f"C{color}", label=name if style == "o-" else None)
    right.set_xticks(factors, factors)
    right.minorticks_off()
    right.set(xlabel="c (solid: layers rescaled; dashed: outputs times c)")
    right.legend(frameon=False)
    return figure


def draw_batchnorm(model):
    """One set of weights in both modes."""
    figure, left, right = panels("The same weights, two matrices", "Tr H in train mode, by batch size")

    def by_batches(size, mode):
        batches = list(zip(X.split(size), y.split(size), strict=True))
        return ritz.Hessian(ritz.Risk(model, LOSS, batches, mode=mode))

    for mode in ("eval", "train"):
        ritz.spectrum(by_batches(150, mode), 20, 8).plot(left).get_lines()[-2].set_label(mode)
    left.legend(frameon=False)
    sizes = (20, 50, 100, 150, 300)
    traces = [ritz.trace(by_batches(size, "train"), num_probes=20) for size in sizes]
    right.vlines(range(len(sizes)), *zip(*(e.interval() for e in traces), strict=True), color="C1")
    right.plot(range(len(sizes)), [float(e) for e in traces], "o", color="C1")
    right.axhline(float(ritz.trace(by_batches(300, "eval"))), color="C0", linewidth=1)
    right.set_xticks(range(len(sizes)), sizes)
    right.set(xlabel="batch size (line: eval mode)", ylim=(0, None))
    return figure


def difference_error(risk, step):
    """Of a central difference of gradients, beside the product."""
    H = ritz.Hessian(risk)
    v = H.probes([0], seed=0)[0]
    v = v / v.norm()
    here = torch.cat([p.flatten() for p in risk.params().values()])
    ahead, behind = (risk.at(here + side * step * v).gradient() for side in (1, -1))
    return float(((ahead - behind) / (2 * step) - H @ v).norm() / (H @ v).norm())


def draw_precision(model):
    """Digits of eigenvalues, and of differences."""
    figure, left, right = panels(
        "Eigenvalues: error, relative to the largest", "Differences of gradients: relative error"
    )
    truth = torch.linalg.eigvalsh(ritz.Hessian(risk_of(model)).dense())
    half = copy.deepcopy(model).bfloat16()
    ways = {
        "products in bfloat16": ritz.Risk(half, LOSS, (X.bfloat16(), y)),
        "bfloat16 weights, products in float32": risk_of(half, dtype=torch.float32),
        "float32": risk_of(model, dtype=torch.float32),
    }
    ranks = range(1, len(truth) + 1)
    torch.backends.mkldnn.enabled = False  # some processors lack what oneDNN takes for bfloat16
    for name, risk in ways.items():
        found = torch.linalg.eigvalsh(ritz.Hessian(risk).dense().double())
        errors = ((found - truth).abs() / truth[-1]).clamp_min(1e-12).flip(0)
        left.semilogy(ranks, errors, ".", markersize=3, label=name)
    left.set(xlabel="rank, largest first", ylim=(1e-10, 0.3))
    left.legend(frameon=False, fontsize=8, markerscale=3)
    steps = [10.0**-k for k in range(6)]
    for name, smooth, color in (("ReLU", False, "C0"), ("tanh", True, "C1")):
        network = trained(linear(64, 6), nn.Tanh, linear(6, 10)) if smooth else model
        for dtype, style in ((torch.float32, "o--"), (torch.float64, "o-")):
            errors = [difference_error(risk_of(network, dtype=dtype), step) for step in steps]
            right.loglog(steps, errors, style, color=color, markersize=4, label=f"{name}, {str(dtype)[6:]}")
    right.set(xlabel="length of the step")
    right.legend(frameon=False, fontsize=8)
    return figure


def main(folder):
    """All of them."""
    small = risk_of(trained(linear(64, 6), nn.ReLU, linear(6, 10)))
    wide = risk_of(trained(linear(64, 16), nn.ReLU, linear(16, 10)))
    early = risk_of(trained(linear(64, 16), nn.ReLU, linear(16, 10), steps=30))
    normed = trained(linear(64, 16), lambda: nn.BatchNorm1d(16), nn.ReLU, linear(16, 10))
    pictures = {
        "lanczos": draw_lanczos(small), "choose": draw_choose(small), "measures": draw_measures(early),
        "flatness": draw_flatness(wide), "batchnorm": draw_batchnorm(normed), "precision": draw_precision(small.model),
    }  # fmt: skip
    for name, figure in pictures.items():
        figure.savefig(folder / f"concepts_{name}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
