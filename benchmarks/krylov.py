"""Which Krylov run? Error against products spent, for ritz's three ways and for two peers, on matrices known in full.

Trains a network, builds its Hessian and Gauss-Newton matrix densely, takes all their eigenvalues in float64 as truth,
and then lets every method estimate, from products with that matrix alone, the trace, Tr A^2, log det(1 + A / c), the
density of the outliers and their number. Peers run through their own code: hessian-eigenthings' spectral_density (full
re-orthogonalisation, one probe at a time) and curvlinops' Lanczos (none).

    python benchmarks/krylov.py --model digits --out benchmarks/results            two minutes on a CPU
    python benchmarks/krylov.py --model lenet --device cuda --mnist FOLDER         LeNet-5, P = 44,426
    python benchmarks/krylov.py --page benchmarks/results docs                     krylov.md and krylov.png, from them
"""

import argparse
import gzip
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import reports
import torch
from torch import Tensor, nn

import ritz
from ritz.operators import DenseOperator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 0.01  # of the smoothed density, in units of the range
EDGE = 0.05  # an outlier is above this share of the largest eigenvalue


# --------------------------------------------------------------------------------------- networks and data


class Residual(nn.Module):
    """Two residual blocks with BatchNorm on 28 x 28 images, 12,170 parameters."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.ModuleList(self._block(channels) for _ in range(2))
        self.head = nn.Linear(channels * 16, 10)

    @staticmethod
    def _block(channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


def lenet() -> nn.Module:
    """LeNet-5 without padding, ReLU and max-pooling, 44,426 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def digits_mlp() -> nn.Module:
    """64-32-10 for scikit-learn's digits, 2,410 parameters."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load(model: str, mnist: Path | None, num: int) -> tuple[nn.Module, Tensor, Tensor]:
    if model == "digits":
        from sklearn.datasets import load_digits

        X, y = load_digits(return_X_y=True)
        return digits_mlp(), torch.as_tensor(X, dtype=torch.float32)[:num] / 16, torch.as_tensor(y)[:num]
    assert mnist is not None, "--mnist FOLDER with the official idx files is needed"
    raw = gzip.decompress((mnist / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((mnist / "train-labels-idx1-ubyte.gz").read_bytes())
    X = torch.frombuffer(bytearray(raw[16:]), dtype=torch.uint8).reshape(-1, 1, 28, 28)[:num].float() / 127.5 - 1
    y = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8)[:num].long()
    return (lenet() if model == "lenet" else Residual()), X, y


def train(model: nn.Module, X: Tensor, y: Tensor, epochs: int) -> float:
    """SGD with momentum, batches of 100; returns the training accuracy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - epoch / epochs)
        for rows in torch.randperm(len(X), generator=generator).to(X.device).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(X).argmax(1) == y).float().mean())


def dense(operator: ritz.Operator) -> Tensor:
    """The whole matrix, by products with unit vectors, made exactly symmetric."""
    matrix = torch.empty(operator.dim, operator.dim, dtype=operator.dtype, device=operator.device)
    for start in range(0, operator.dim, 256):
        rows = torch.zeros(min(256, operator.dim - start), operator.dim, dtype=operator.dtype, device=operator.device)
        rows[torch.arange(len(rows)), start + torch.arange(len(rows))] = 1
        matrix[start : start + len(rows)] = operator.rows(rows)
    for start in range(0, operator.dim, 4096):  # symmetrise block by block: a second copy may not fit
        for other in range(0, start + 1, 4096):
            a, b = slice(start, start + 4096), slice(other, other + 4096)
            mean = (matrix[a, b] + matrix[b, a].T) / 2
            matrix[a, b], matrix[b, a] = mean, mean.T
    return matrix


# ------------------------------------------------------------------------------------- methods and errors


@dataclass(frozen=True)
class Answer:
    """What a method says: a discrete measure, the trace and Tr A^2 it implies, and how many Ritz values lie outside."""

    nodes: Tensor
    weights: Tensor
    trace: float
    square: float
    outliers: float
    products: int
    seconds: float


def by_ritz(mode: str) -> Callable[[Tensor, int, int, float], Answer]:
    def run(matrix: Tensor, budget: int, seed: int, edge: float) -> Answer:
        operator = DenseOperator(matrix)
        start = time.perf_counter()
        if mode == "locked":
            s = ritz.spectrum(operator, seed=seed, products=budget)
        else:
            s = ritz.spectrum(operator, budget // 8, 8, seed=seed, reorthogonalize=mode)  # type: ignore[arg-type]
        seconds = time.perf_counter() - start
        tail = [] if s.tail is None else s.tail.gauss().nodes
        count = float((s.head > edge).sum()) + sum(float((probe > edge).sum()) for probe in tail) / max(len(tail), 1)
        return Answer(s.nodes, s.weights, float(s.trace.value), float(s.moment(2).value), count, s.products, seconds)

    return run


def by_eigenthings(matrix: Tensor, budget: int, seed: int, edge: float) -> Answer:
    from hessian_eigenthings.algorithms.spectral_density import spectral_density
    from hessian_eigenthings.operators.base import LambdaOperator

    operator = LambdaOperator(lambda v: matrix @ v, size=len(matrix), device=matrix.device, dtype=matrix.dtype)
    start = time.perf_counter()
    result = spectral_density(operator, num_runs=8, lanczos_steps=budget // 8, num_grid_points=16, seed=1000 * seed)
    return _from_rule(
        result.raw_eigenvalues, result.raw_weights, len(matrix), edge, budget, time.perf_counter() - start
    )


def by_curvlinops(matrix: Tensor, budget: int, seed: int, edge: float) -> Answer:
    from curvlinops._torch_base import PyTorchLinearOperator
    from curvlinops.papyan2020traces.spectrum import fast_lanczos

    class Known(PyTorchLinearOperator):
        device, dtype = matrix.device, matrix.dtype

        def _matmat(self, X: list[Tensor]) -> list[Tensor]:
            return [matrix @ X[0]]

    operator = Known([(len(matrix),)], [(len(matrix),)])
    torch.manual_seed(seed)
    start = time.perf_counter()
    runs = [fast_lanczos(operator, budget // 8) for _ in range(8)]
    nodes = torch.stack([values for values, _ in runs])
    weights = torch.stack([vectors[0] ** 2 for _, vectors in runs])
    return _from_rule(nodes, weights, len(matrix), edge, budget, time.perf_counter() - start)


def _from_rule(nodes: Tensor, weights: Tensor, dim: int, edge: float, products: int, seconds: float) -> Answer:
    nodes, weights = nodes.double().cpu().nan_to_num(0.0), weights.double().cpu()
    moments = [dim * float((weights * nodes**k).sum(1).mean()) for k in (1, 2)]
    count = float((nodes > edge).double().sum(1).mean())
    return Answer(nodes.flatten(), weights.flatten() / len(nodes), moments[0], moments[1], count, products, seconds)


METHODS: dict[str, Callable[[Tensor, int, int, float], Answer]] = {
    "ritz locked": by_ritz("locked"),
    "ritz full": by_ritz("full"),
    "ritz none": by_ritz("none"),
    "hessian-eigenthings": by_eigenthings,
    "curvlinops": by_curvlinops,
}


def smooth(nodes: Tensor, weights: Tensor, grid: Tensor, width: float) -> Tensor:
    out = torch.zeros_like(grid)
    for n, w in zip(nodes.split(4096), weights.split(4096), strict=True):
        out += (torch.exp(-0.5 * ((grid[:, None] - n) / width) ** 2) * w).sum(1)
    return out / width / math.sqrt(2 * math.pi)


def errors(answer: Answer, eigenvalues: Tensor, positive: bool) -> dict[str, float]:
    """Relative errors against the truth; the outlier density in L1 at 1 % of the range."""
    top, dim = float(eigenvalues.abs().max()), len(eigenvalues)
    edge = EDGE * top
    grid = torch.linspace(edge, 1.05 * top, 400, dtype=torch.float64)
    width = WIDTH * float(eigenvalues.max() - eigenvalues.min())
    true = smooth(eigenvalues, torch.full_like(eigenvalues, 1 / dim), grid, width)
    found = smooth(answer.nodes.double(), answer.weights.double(), grid, width)
    result = {
        "trace": abs(answer.trace / float(eigenvalues.sum()) - 1),
        "square": abs(answer.square / float(eigenvalues.square().sum()) - 1),
        "outlier_density": float((found - true).abs().sum() / true.sum()),
        "outlier_count": answer.outliers - float((eigenvalues > edge).sum()),
        "products": answer.products,
        "seconds": answer.seconds,
    }
    for share in (1e-2, 1e-4) if positive else ():
        c = share * top
        truth = float((eigenvalues.clamp(min=0) / c).log1p().sum())
        result[f"logdet_{share:g}"] = abs(
            dim * float((answer.weights * (answer.nodes.clamp(min=0) / c).log1p()).sum()) / truth - 1
        )
    return result


# ----------------------------------------------------------------------------------------------- the run


def measure(args: argparse.Namespace, keep: Callable[[dict], None]) -> None:
    """Every method on the GGN and the Hessian of one network; `keep` is called with the report after each matrix."""
    model, device = args.model, args.device
    network, X, y = load(model, args.mnist, args.images)
    network, X, y = network.to(device), X.to(device), y.to(device)
    accuracy = train(network, X, y, args.epochs)
    risk = ritz.Risk(network, nn.CrossEntropyLoss(), (X, y), batch_size=1000, plan=ritz.Plan(chunk=64))
    print(f"{model}: {risk.dim} parameters, {len(X)} images, training accuracy {accuracy:.4f}", flush=True)
    report: dict = {"model": model, "dim": risk.dim, "images": len(X), "accuracy": accuracy, "rows": [], "matrices": {}}
    for name in args.matrices:
        operator = ritz.GGN(risk) if name == "GGN" else ritz.Hessian(risk, route="forward")
        start = time.perf_counter()
        matrix = dense(operator)
        probe = operator.probes([0], 0)
        gap = float((operator.rows(probe) - probe @ matrix).norm() / (probe @ matrix).norm())
        built = time.perf_counter() - start
        if device == "cuda":
            torch.cuda.empty_cache()  # the eigenvalue solver wants most of the memory
        eigenvalues = torch.linalg.eigvalsh(matrix.double()).cpu()
        edge = EDGE * float(eigenvalues.abs().max())
        report["matrices"][name] = {
            "trace": float(eigenvalues.sum()), "square": float(eigenvalues.square().sum()),
            "lambda_max": float(eigenvalues[-1]), "lambda_min": float(eigenvalues[0]),
            "outliers": int((eigenvalues > edge).sum()), "dense_seconds": built, "product_against_dense": gap,
        }  # fmt: skip
        print(name, report["matrices"][name], flush=True)
        for method, budget, seed in _runs(args):
            answer = METHODS[method](matrix, budget, seed, edge)
            row = {"matrix": name, "method": method, "budget": budget, "seed": seed}
            report["rows"].append(row | errors(answer, eigenvalues, positive=name == "GGN"))
        del matrix
        print(table(report, name, args.budgets[-1]), flush=True)
        keep(report)


def _runs(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    for budget in args.budgets:
        for method in METHODS:
            for seed in range(args.seeds if method.startswith("ritz") else args.peer_seeds):
                yield method, budget, seed


def rms(report: dict, matrix: str, method: str, budget: int, key: str) -> float:
    rows = [r for r in report["rows"] if (r["matrix"], r["method"], r["budget"]) == (matrix, method, budget)]
    return math.sqrt(sum(r[key] ** 2 for r in rows) / len(rows)) if rows and key in rows[0] else math.nan


KEYS = ("trace", "square", "logdet_0.01", "logdet_0.0001", "outlier_density", "outlier_count", "seconds")


def table(report: dict, matrix: str, budget: int) -> str:
    lines = [
        f"{report['model']} {matrix}, {budget} products, root mean square",
        " " * 20 + "".join(f"{k:>17}" for k in KEYS),
    ]
    for method in METHODS:
        cells = (f"{rms(report, matrix, method, budget, key):17.3g}" for key in KEYS)
        lines.append(f"{method:20}" + "".join(cells))
    return "\n".join(lines)


def page(folder: Path, target: Path) -> None:
    """The figure and the tables, from the result files."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("krylov-*.json"))]
    panels = [(report, matrix) for report in reports for matrix in report["matrices"]]
    target.mkdir(parents=True, exist_ok=True)
    figure(panels).savefig(target / "krylov.png", dpi=100)
    lines = [PAGE]
    for report, matrix in panels:
        lines.append(_section(report, matrix))
    (target / "krylov.md").write_text("\n".join(lines), encoding="utf8")


PAGE = """# Which Krylov run?

The default run locks the outliers first. This page compares it with the alternatives, `reorthogonalize="full"` and
`"none"`, and with two peers, run through their own code: hessian-eigenthings 1.0.0a5 (`spectral_density`, full
re-orthogonalisation) and curvlinops 3.0.1 (its Lanczos, no re-orthogonalisation).

Each method sees only products with a matrix whose eigenvalues are known. Errors are root mean squares over seeds,
relative to the values from these eigenvalues. An outlier is an eigenvalue above 5 % of the largest. The density is
smoothed by 1 % of the range and compared above that threshold. c is relative to the largest eigenvalue.

Written by `python benchmarks/krylov.py --page benchmarks/results docs` from the files in `benchmarks/results`.

![Error against products spent](krylov.png)

Results:

- **Locking.** From 400 products on, locking makes the error of the trace 10 to 50 times smaller than that of the best
  alternative. The error of Tr A² is at least 200 times smaller, and that of the outlier density at least 58 times. At
  200 products, the error of the trace is 5 to 60 times smaller. At 100 products on LeNet-5, with its 22 to 24 outliers,
  nothing is locked yet, and the products spent on the head are wasted.
- **No re-orthogonalisation** finds outliers many times over. Integrals are not affected: from 400 products on, `none`
  and `full` agree.
- **The log-determinant** gains least: at the smaller shift 1.5 times or nothing. It depends on the bulk, which no head
  contains.
- **More steps.** From 400 to 800 products, the errors of the default run do not change. More steps resolve the bulk
  better, but the eight probes determine the error of averages. Pass a tolerance (`tol=`) to add probes.
"""

_TITLES = {
    "trace": "trace", "square": "Tr A²", "logdet_0.01": "log det(1 + A/c), c = 1e-2",
    "logdet_0.0001": "log det, c = 1e-4", "outlier_density": "outlier density", "outlier_count": "outlier count",
}  # fmt: skip


def _section(report: dict, matrix: str) -> str:
    settings, known = report["settings"], report["matrices"][matrix]
    head = (
        f"\n## {report['model']}, {matrix}\n\nP = {report['dim']:,}, {report['images']} images, training accuracy "
        f"{report['accuracy']:.3f}, {known['outliers']} outliers, eigenvalues {known['lambda_min']:.3g} to "
        f"{known['lambda_max']:.3g}. {settings['seeds']} seeds (peers {settings['peer_seeds']}), float32; "
        f"{report['machine']}, torch {report['torch']}, commit {report['commit']}.\n"
    )
    keys = [key for key in _TITLES if not math.isnan(rms(report, matrix, "ritz none", _budgets(report)[-1], key))]
    rows = [
        "| products | method | " + " | ".join(_TITLES[key] for key in keys) + " |",
        "| ---: | --- |" + " ---: |" * len(keys),
    ]
    for budget in _budgets(report):
        for method in METHODS:
            cells = (f"{rms(report, matrix, method, budget, key):.2g}" for key in keys)
            rows.append(f"| {budget} | {method} | " + " | ".join(cells) + " |")
    return head + "\n" + "\n".join(rows) + "\n"


def _budgets(report: dict) -> list[int]:
    return sorted({row["budget"] for row in report["rows"]})


def figure(panels: list[tuple[dict, str]]) -> "Figure":
    """Error against products, a row for each matrix."""
    from matplotlib.figure import Figure

    keys = {
        "trace": "trace",
        "square": "Tr A²",
        "outlier_density": "outlier density (L1)",
        "outlier_count": "outlier count",
    }
    drawing = Figure(figsize=(3.1 * len(keys), 2.4 * len(panels)), layout="constrained")
    axes = drawing.subplots(len(panels), len(keys), squeeze=False)
    colors = dict(zip(METHODS, ("#0072B2", "#009E73", "#56B4E9", "#D55E00", "#CC79A7"), strict=True))
    styles = dict(zip(METHODS, ("o-", "s-", "v--", "^-", "D:"), strict=True))  # full and none lie on each other
    for row, (report, matrix) in zip(axes, panels, strict=True):
        budgets = _budgets(report)
        for ax, (key, label) in zip(row, keys.items(), strict=True):
            for method in METHODS:
                values = [rms(report, matrix, method, budget, key) for budget in budgets]
                ax.plot(budgets, values, styles[method], ms=4, color=colors[method], label=method)
            ax.set(xscale="log", xticks=budgets, xticklabels=budgets, title=label)
            if key == "outlier_count":
                ax.set_yscale("symlog", linthresh=1)
                ax.set_ylim(bottom=-0.2)
            else:
                ax.set_yscale("log")
            ax.minorticks_off()
            ax.grid(alpha=0.3)
        row[0].set_ylabel(f"{report['model']} {matrix}\nP = {report['dim']:,}\nRMS relative error")
    for ax in axes[-1]:
        ax.set_xlabel("products")
    drawing.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS), frameon=False
    )
    return drawing


def main() -> None:
    parser = reports.parser(__doc__, "digits, two seeds, a minute: does it run?")
    parser.add_argument("--model", choices=["digits", "lenet", "residual"], default="digits")
    parser.add_argument("--matrices", nargs="+", choices=["GGN", "Hessian"], default=["GGN", "Hessian"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mnist", type=Path, help="folder with the official gzipped idx files")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--peer-seeds", type=int, default=6, help="peers run one probe at a time and take longer")
    parser.add_argument("--budgets", type=int, nargs="+", default=[100, 200, 400, 800])
    args = parser.parse_args()
    if args.page:
        page(*args.page)
        return
    if args.quick:
        args.model, args.images, args.epochs, args.seeds, args.peer_seeds = "digits", 300, 10, 2, 1
        args.budgets, args.out = [100, 200], reports.QUICK
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("out", "page", "mnist")}
    about = reports.about(args, ()) | {"settings": settings}
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"krylov-{args.model}-{'-'.join(args.matrices)}.json"
    measure(args, keep=lambda report: target.write_text(json.dumps(report | about)) and None)


if __name__ == "__main__":
    main()
