"""How much of the maximum does a search for the largest loss miss? By default, against far longer ones.

`ritz.compare` allows a search to have missed a fifth of the maximum (`ritz.measures.differences.SHORT`). Here small
networks, at their first weights, after 60 and after 1,000 steps of Adam, are searched in balls of four kinds, and with
normalised logits, as `worst_case_sharpness` does by default; and from 32 starts with several seeds, 60 steps each, the
largest of which, the first search included, stands for the maximum.

    python benchmarks/searches.py          minutes; writes benchmarks/results/searches.json
    python benchmarks/searches.py --quick  seconds: does it run?
"""

import itertools
from collections.abc import Iterator
from typing import Any

import reports
import torch
from torch import nn

import ritz
from ritz.measures.sharpness import logit_normalised, worst_case_sharpness
from ritz.provenance import versions

FILE = "searches.json"
BALLS: dict[str, dict[str, Any]] = {
    "l2": {"rho": 0.05},
    "linf": {"rho": 1e-3, "norm": "linf"},
    "adaptive l2": {"rho": 0.5, "adaptive": True},
    "adaptive linf": {"rho": 0.01, "norm": "linf", "adaptive": True},
    "normalised": {"rho": 0.5, "adaptive": True},
}
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}
LOSSES = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(torch.tensor([0.2, 3.0, 1.0], dtype=torch.float64)),
    "squared error": nn.MSELoss(),
}
MISSED = (0.02, 0.05, 0.1, 0.2)


def networks(samples: list[int], steps: list[int]) -> Iterator[tuple[dict[str, Any], ritz.Risk]]:
    """Networks of 51 weights on noise, and how they were made."""
    for seed, (n, act, num, loss) in enumerate(itertools.product(samples, ACTIVATIONS, steps, LOSSES)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), ACTIVATIONS[act](), nn.Linear(6, 3)).double()
        x = torch.randn(n, 4, dtype=torch.float64)
        y = torch.randn(n, 3, dtype=torch.float64) if loss == "squared error" else torch.randint(3, (n,))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(num):
            optimizer.zero_grad()
            LOSSES[loss](model(x), y).backward()
            optimizer.step()
        made = {"samples": n, "activation": act, "steps": num, "loss": loss}
        yield made, ritz.Risk(model, LOSSES[loss], (x, y))


def missed(risk: ritz.Risk, ball: dict[str, Any], seeds: int) -> float | None:
    """What the search by default misses, as a part of the maximum; None where there is no rise."""
    found = float(worst_case_sharpness(risk, **ball).value)
    long = [worst_case_sharpness(risk, **ball, steps=60, num_starts=32, seed=seed) for seed in range(1, seeds + 1)]
    most = max(found, *(float(one.value) for one in long))
    return 1 - found / most if most > 1e-12 else None


def main() -> None:
    parser = reports.parser(__doc__, "one network of each loss, seconds: does it run?", page=False)
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 5, 30, 100])
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 60, 1000])
    parser.add_argument("--seeds", type=int, default=2, help="of long searches")
    args = parser.parse_args()
    if args.quick:
        args.samples, args.steps, args.seeds, args.out = [5], [0], 1, reports.QUICK
    torch.set_num_threads(1)
    about, rows = reports.about(args, ("samples", "steps", "seeds")), []
    for made, risk in networks(args.samples, args.steps):
        for kind, ball in BALLS.items():
            if kind == "normalised" and made["loss"] == "squared error":
                continue  # there are no logits
            part = missed(logit_normalised(risk) if kind == "normalised" else risk, ball, args.seeds)
            if part is not None:
                rows.append({**made, "ball": kind, "missed": part})
        print(f"{len(rows)} searches", flush=True)
    counts = {f"{share:g}": sum(row["missed"] > share for row in rows) for share in MISSED}
    worst = max(row["missed"] for row in rows)
    print(f"of {len(rows)} searches so many missed more than that part of the maximum: {counts}; the worst {worst:.2f}")
    found = {"searches": len(rows), "missed more": counts, "worst": worst}
    reports.write({**about, "versions": versions(), **found, "rows": reports.rounded(rows, ".3g")}, args.out / FILE)


if __name__ == "__main__":
    main()
