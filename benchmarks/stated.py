"""Figures that docstrings and pages state beside a rule, each counted here.

means       how often the interval of a mean of few skewed numbers covers   ritz.measures.gap.bootstrapped
shrinkage   how often intervals of a shrinkage cover, by batches            ritz.rmt.Shrinkage
diagonals   from how many probes on Hutch++ is nearer than Hutchinson       ritz.diagonal
softmax     lambda_1 of softmax regression by the 45,000 images it has      ritz.papers.softmax

python benchmarks/stated.py [NAME ...]   minutes; writes benchmarks/results/stated_NAME.json
python benchmarks/stated.py --quick      seconds: does it run?
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import reports
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ritz
from ritz.measures.gap import bootstrapped
from ritz.papers.mnist_mlp import load_mnist
from ritz.provenance import versions

Rows = list[dict[str, Any]]

SHAPES = (1.0, 1 / 4, 1 / 16)  # of gamma laws, whose skewness is 2 / sqrt(shape): 2, 4 and 8
COUNTS = (2, 5, 10, 20, 30, 80, 100, 300, 1000)
BATCHES, PROBES, BATCH_SIZE = (3, 4, 8, 16, 64), (4, 16), 32
NUM_PROBES = (6, 8, 10, 12, 16, 20, 30)
DECAY, TRAINED = 5e-4, 45_000


def means(args: argparse.Namespace) -> Rows:
    """Coverage at 95 % by law and by how many numbers there are."""
    rows: Rows = []
    for shape in SHAPES:
        for num in args.counts:
            generator = torch.Generator().manual_seed(num)
            exponents = torch.full((args.draws, num), shape, dtype=torch.float64)
            drawn = torch._standard_gamma(exponents, generator)
            hits = 0
            for draw, samples in enumerate(drawn):
                low, high = bootstrapped("mean", samples, seed=draw).interval(0.95)
                hits += low <= shape <= high
            rows.append({"skewness": 2 / shape**0.5, "samples": num, "covers": hits / args.draws})
            print(rows[-1], flush=True)
    return rows


def shrinkage(args: argparse.Namespace) -> Rows:
    """Coverage at 95 % by batches and probes: softmax regression of 3 features, samples drawn from a pool of 20,000."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (20_000,), generator=generator)
    torch.manual_seed(0)
    risk = ritz.Risk(nn.Linear(3, 4).double(), nn.CrossEntropyLoss(), (X, y))
    truth = _true_shrinkage(risk, X)
    rows: Rows = []
    for num in args.batches:
        for probes in args.probes:
            hits, told = dict.fromkeys(("beta", "damping", "error"), 0), 0
            for draw in range(args.draws):
                chosen = torch.randint(len(X), (num * BATCH_SIZE,), generator=generator)
                noise = ritz.curvature_noise(risk.on((X[chosen], y[chosen])), num, BATCH_SIZE, draw, num_probes=probes)
                try:
                    found = ritz.rmt.shrinkage(noise)
                except ValueError:  # it says that the curvature drowns in the noise
                    continue
                told += 1
                for name in hits:
                    low, high = getattr(found, name).interval(0.95)
                    hits[name] += low <= getattr(truth, name).value <= high
            shares = {name: n / max(1, told) for name, n in hits.items()}
            rows.append({"batches": num, "probes": probes, "refused": args.draws - told, **shares})
            print(rows[-1], flush=True)
    return rows


def _true_shrinkage(risk: ritz.Risk, X: Tensor) -> ritz.rmt.Shrinkage:
    """That of the pool: H_i = (diag p - p p') x xx' with a one for the bias, in closed form."""
    with torch.no_grad():
        p = risk.model(X).softmax(1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        ahead = torch.cat([X, torch.ones_like(X[:, :1])], 1)
        each = torch.einsum("nab,nc,nd->nacbd", middle, ahead, ahead).reshape(len(X), risk.dim, risk.dim)
    H = each.mean(0)
    s2 = float((each - H).square().sum()) / len(X) / BATCH_SIZE / risk.dim
    return ritz.rmt.shrinkage(s2, mean=float(H.trace()) / risk.dim, second=float(H.square().sum()) / risk.dim)


def diagonals(args: argparse.Namespace) -> Rows:
    """Relative error of the diagonal of trained networks' Hessians, the mean over seeds, by method and probes."""
    pixels, labels = load_digits(return_X_y=True)
    X, y = torch.tensor(pixels / 16), torch.tensor(labels)
    rows: Rows = []
    for activation in (nn.ReLU, nn.Tanh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 24), activation(), nn.Linear(24, 10)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), y).backward()
            optimizer.step()
        H = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (X, y)))
        matrix = ritz.operators.DenseOperator(H.dense())
        truth = matrix.dense().diagonal()
        for probes in args.num_probes:
            row = {"network": activation.__name__, "probes": probes}
            for method in ("hutchinson", "hutch++"):
                found = [ritz.diagonal(matrix, probes, seed, method=method).value for seed in range(args.seeds)]
                errors = [float((value - truth).norm() / truth.norm()) for value in found]
                row[method] = sum(errors) / len(errors)
            rows.append(row)
            print(row, flush=True)
    return rows


def softmax(args: argparse.Namespace) -> Rows:
    """lambda_1 of the loss without the penalty at the minimum of the loss with it, for choices of the images."""
    if not os.environ.get("RITZ_DATA"):
        print("softmax: RITZ_DATA does not say where MNIST is")
        return []
    first, last, _ = load_mnist(dtype=torch.float64)
    X, y = (torch.cat(parts) for parts in zip(first, last, strict=True))
    num = TRAINED // args.fewer
    choices = {
        "the first": torch.arange(num),
        "the last": torch.arange(len(X) - num, len(X)),
        "from 5,000 on": torch.arange(5_000, 5_000 + num),
    }
    for draw in range(4):
        choices[f"drawn at random, {draw}"] = torch.randperm(len(X), generator=torch.Generator().manual_seed(draw))[
            :num
        ]
    rows: Rows = []
    for name, chosen in choices.items():
        risk = ritz.Risk(_minimum(X[chosen], y[chosen]), nn.CrossEntropyLoss(), (X[chosen], y[chosen]))
        slope = risk.gradient() + DECAY * risk.space.join(risk.params())
        top = ritz.top_eigenpairs(ritz.Hessian(risk), k=1)
        rows.append({"images": name, "lambda_max": float(top.values[0]), "gradient": float(slope.norm())})
        print(rows[-1], flush=True)
    return rows


def _minimum(X: Tensor, y: Tensor) -> nn.Module:
    """Softmax regression with weight decay at its one minimum."""
    model = nn.Linear(X.shape[1], 10).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=400, history_size=30, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = nn.functional.cross_entropy(model(X), y) + DECAY / 2 * penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


STUDIES: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "means": means, "shrinkage": shrinkage, "diagonals": diagonals, "softmax": softmax,
}  # fmt: skip
KEPT = {
    "means": ("draws", "counts"), "shrinkage": ("draws", "batches", "probes"), "diagonals": ("seeds", "num_probes"),
    "softmax": ("fewer",),
}  # fmt: skip


def main() -> None:
    parser = reports.parser(__doc__, "few draws, seconds: does it run?", page=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(STUDIES)}; all of them without")
    parser.add_argument("--draws", type=int, default=600, help="for a coverage")
    parser.add_argument("--seeds", type=int, default=40, help="for an error of diagonals")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - STUDIES.keys())
    if unknown:
        parser.error(f"no study {', '.join(unknown)}; there are {', '.join(STUDIES)}")
    args.counts, args.batches, args.probes, args.num_probes, args.fewer = COUNTS, BATCHES, PROBES, NUM_PROBES, 1
    if args.quick:
        args.draws, args.seeds, args.out, args.fewer = 2, 1, reports.QUICK, 100
        args.counts, args.batches, args.probes, args.num_probes = (2, 5), (4,), (4,), (6,)
    torch.set_num_threads(1)
    for name in args.names or STUDIES:
        about = reports.about(args, KEPT[name])
        rows = STUDIES[name](args)
        if rows:
            found = {**about, "versions": versions(), "rows": reports.rounded(rows, ".6g")}
            reports.write(found, args.out / f"stated_{name}.json")


if __name__ == "__main__":
    main()
