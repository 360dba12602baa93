"""How good is the forecast by which `ritz.track` decides on its first look? Forecast over truth, on a CPU.

For each network and set of measures a fresh risk is forecast, from a few products on its first batch, and then looked
at. The clock is that of the process, so that a busy machine counts for little; data are noise, on which time does not
depend.

    python benchmarks/forecast.py          minutes; writes benchmarks/results/forecast.json
    python benchmarks/forecast.py --quick  seconds: does it run?
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import reports
import torch
from peers.problems import make

import ritz
from ritz.doctor import costs
from ritz.integrations.forecast import forecast
from ritz.integrations.track import DEFAULT
from ritz.measures.registry import resolve
from ritz.provenance import versions

FILE = "forecast.json"
NETWORKS = {"tiny": 32, "lenet5": 16, "conv": 8, "transformer": 2}  # samples of a batch
MEASURES: dict[str, Sequence[str]] = {
    "default": DEFAULT,
    "trace": ["trace"],
    "GGN": ["ggn_lambda_max"],
    "search": ["epsilon_sharpness"],
}


def one(network: str, kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds that were forecast, that the forecast took, and those of the look."""
    options = {"num_steps": args.num_steps, "num_probes": args.num_probes}
    risk = make(network, "cpu", args.batches, NETWORKS[network]).risk()
    risk.check()
    rows = resolve(MEASURES[kind])
    begin = time.process_time()
    seconds = forecast(risk, rows, **options)
    between = time.process_time()
    ritz.measure(risk, measures=rows, seed=0, **options)
    return {"forecast": seconds, "took": between - begin, "look": time.process_time() - between}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every network and set of measures, in rounds; the ratio of the median round, and the furthest of all."""
    rows = []
    for network in args.networks:
        for kind in MEASURES:
            seen = [one(network, kind, args) for _ in range(args.rounds)]
            row: dict[str, Any] = {key: statistics.median(found[key] for found in seen) for key in seen[0]}
            ratios = [found["forecast"] / found["look"] for found in seen]
            row |= {"ratio": statistics.median(ratios), "ratios": ratios}
            rows.append({"network": network, "measures": kind, **row})
            print(f"{network}, {kind}: forecast over truth {rows[-1]['ratio']:.2f}", flush=True)
    every = [ratio for row in rows for ratio in row["ratios"]]
    return {
        "rows": rows,
        "ratio": {"least": min(every), "median": statistics.median(every), "most": max(every), "cases": len(rows)},
        "cost": statistics.median(row["took"] / row["look"] for row in rows),
    }


def main() -> None:
    parser = reports.parser(__doc__, "a small network, one round, seconds: does it run?", page=False)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--num-probes", type=int, default=4)
    args = parser.parse_args()
    if args.quick:
        args.networks, args.rounds, args.batches, args.out = ["tiny"], 1, 2, reports.QUICK
    torch.set_num_threads(1)
    costs.clock = time.process_time
    about = reports.about(args, ("networks", "batches", "rounds", "num_steps", "num_probes"))
    about["settings"]["batch_sizes"] = {name: NETWORKS[name] for name in args.networks}
    found = reports.rounded(measure(args), ".4g")
    reports.write({**about, "versions": versions(), **found}, args.out / FILE)
    print(f"forecast over truth: {found['ratio']}")


if __name__ == "__main__":
    main()
