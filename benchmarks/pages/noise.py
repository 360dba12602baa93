"""The page of the noise of the curvature: tables and text, all from the result file."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reports
from noise import BARS, FILE, FULL, OWN, WAYS


def within(values: list[float], digits: int = 2) -> str:
    """A mean with its 95 % interval by Student's t."""
    mean = reports.mean(values)
    low, high = mean.interval(0.95)
    return f"{float(mean.value):.{digits}f} ({float(low):.{digits}f} to {float(high):.{digits}f})"


def rest_table(report: dict[str, Any]) -> str:
    lines = ["| after | estimate | products | ratio to full | standard deviation | per product |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for row in report["at_rest"]:
        *_, full = row["estimates"].values()
        level = statistics.fmean(full)
        for name, values in row["estimates"].items():
            batches = int(name.split()[-2])
            products = batches * (1 if name.startswith(OWN) else int(name.split()[0]))
            spread = statistics.stdev(values) / statistics.fmean(values)
            cells = f"{within([v / level for v in values])} | {spread:.2f} | {spread * math.sqrt(products):.2f}"
            lines.append(f"| {row['steps']} steps | {name} | {products} | {cells} |")
    return "\n".join(lines)


def windows(report: dict[str, Any]) -> dict[str, str]:
    """Streaming over full: the first windows, and the mean of the others of each seed."""
    runs = [[row[1] / row[2] for row in rows] for rows in report["along"].values()]
    rest = [ratio for run in runs for ratio in run[1:]]
    firsts = [run[0] for run in runs]
    return {
        "first": f"{min(firsts):.2f} to {max(firsts):.2f}",
        "rest": within([statistics.fmean(run[1:]) for run in runs]),
        "rest_spread": f"{statistics.stdev(rest):.2f}",
        "num_windows": str(len(rest)),
        "num_seeds": str(len(runs)),
    }


def coverage_table(part: dict[str, Any]) -> str:
    lines = ["| batches | probes | coverage, % | mean / truth | spread / truth | reported error / truth |"]
    lines.append("| ---: | --- | ---: | ---: | ---: | ---: |")
    for row in part["rows"]:
        probes = OWN if row["probes"] is None else f"{row['probes']} common"
        cells = f"{100 * row['covered']:.0f} | {row['ratio']:.3f} | {row['spread']:.2f} | {row['told']:.2f}"
        lines.append(f"| {row['batches']} | {probes} | {cells} |")
    return "\n".join(lines)


def verdict(report: dict[str, Any]) -> str:
    """What the tables of coverage say, by how many probes and batches."""
    rows = [row for part in report["coverage"] for row in part["rows"]]
    most = max(row["batches"] for row in rows)

    def held(name: str, keep: Callable[[dict[str, Any]], bool]) -> str:
        found = [100 * row["covered"] for row in rows if keep(row)]
        ends = dict.fromkeys(f"{end:.0f}" for end in (min(found), max(found))) if found else ()
        return f"{' to '.join(ends)} % {name}" if found else f"none {name}"

    parts = [
        held("with one common probe", lambda row: row["probes"] == 1),
        held("with 2 to 4", lambda row: row["probes"] in (2, 4)),
        held(f"with 8 or more and {most} batches", lambda row: (row["probes"] or 0) >= 8 and row["batches"] == most),
        held("with a probe for each of 4 batches", lambda row: row["probes"] is None and row["batches"] == 4),
        held(f"with a probe for each of {most}", lambda row: row["probes"] is None and row["batches"] == most),
    ]
    root = math.sqrt(report["settings"]["draws"])
    off = max(abs(row["ratio"] - 1) * root / row["spread"] for row in rows)
    text = (
        f"Over both tables, the coverage of a 95 % interval is: {'; '.join(parts)}. One common probe has an error that "
        "depends on its alignment with the few directions that contain the noise. The spread over batches does not "
        "show this error, so the reported error is too small, and more batches make this worse. The other intervals "
        "fall short because their standard error comes from few squares with a long tail, and the interval treats it "
        "as exact. No bias is visible: the mean that is farthest from the truth is "
        f"{off:.1f} of its standard errors away, and all means share their batches."
    )
    return reports.filled(text)


def shares(report: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Per cent of the steps of the same loop."""
    return {
        (family, way): [100 * row[f"{family}/{way}"][1] / row[f"{family}/{way}"][0] for row in report["costs"]]
        for family in BARS
        for way in WAYS
    }


def loops_apart(report: dict[str, Any]) -> str:
    """What a first run gave, which compared whole loops with AutoDamping and without."""
    rows = report.get("first_costs")
    if not rows:
        return "Nothing in the measurements was changed after the full run."
    texts = []
    for family in BARS:
        found = [100 * (row[f"{family}/{way}"] / row[f"{family}/None"] - 1) for row in rows for way in WAYS]
        texts.append(
            f"for {family} {statistics.median(found):.0f} % in the median ({min(found):.0f} to {max(found):.0f})"
        )
    text = (
        "The costs were measured twice. The first measurement compared whole loops with AutoDamping and without, in "
        f"turn, on a machine with other work: AutoDamping added {', '.join(texts)}. Loops differed from each other by "
        "more than the quantity of interest, so the second measurement timed AutoDamping within each loop. Everything "
        "else is from one run, whose number of repeats was set in advance, so that it takes minutes."
    )
    return reports.filled(text)


def cost_table(report: dict[str, Any]) -> str:
    lines = ["| loop | batches | target, % | AutoDamping adds, % | |", "| --- | --- | ---: | ---: | --- |"]
    for (family, way), found in shares(report).items():
        middle = statistics.median(found)
        kept = "met" if middle <= BARS[family] else "**missed**"
        told = f"{middle:.0f} ({min(found):.0f} to {max(found):.0f})"
        lines.append(f"| {family} | {way} | {BARS[family]} | {told} | {kept} |")
    return "\n".join(lines)


PAGE = """# The noise of the curvature: estimates, uncertainty and cost

`AutoDamping` estimates Tr X² / P, where X = H_batch − H (equation 15 of seed 004). By default, every {every} steps it
uses 4 batches: either drawn for this purpose or, when streaming, the training batches. Each batch is split in halves
and has its own probe. The alternative, as in the paper, uses probes that are common to all batches (`num_probes=`, and
`ritz.curvature_noise`).

Setting: batches of {batch_size}, {num_images:,} images of {data}, momentum 0.9, learning rate {lr:g}; {machine}, torch
{torch}, commit {commit}, {minutes:.0f} minutes in total. Written by `python benchmarks/noise.py --page
benchmarks/results docs` from `benchmarks/results/noise.json`.

## Do the estimates agree?

The network has three convolutions and a linear layer with ReLU, P = {num_params:,}. At fixed weights, each kind of
estimate is repeated {repeats} times with other batches and probes. *Full* is `ritz.curvature_noise` with its defaults,
{full_batches} batches and {full_probes} probes. The standard deviation is relative to the mean. The last column is the
standard deviation times the square root of the number of products: it compares estimates at equal work, and smaller is
better. The 95 % intervals use Student's t; they do not include the error of the full mean.

{rest_table}

During training, we compare the streaming estimate over a window of {every} steps with the full estimate at the end of
the window. The mean ratio over the windows of each of {num_seeds} seeds is {rest}. Single windows have a standard
deviation of {rest_spread} ({num_windows} windows). The first window of a run is excluded, because it covers the first
{every} steps, where the noise is different: its ratio is {first}.

## Do the intervals cover the truth?

This test uses a network of {dim} weights on {side} × {side} averaged pixels, with batches of {small_batch}. The truth
is known from the Hessian of each of the {num_images:,} samples: it is the sum of their variances, divided by the batch
size and P. With {draws} draws, a coverage of 95 % is determined to ± {error:.0f} points. *Spread* is the standard
deviation of the estimates, and *reported error* the root mean square of their standard errors. Batches are drawn
without replacement.

After {start_steps} steps (loss {start_loss:.2f}), the noise is {start_noise:.3g}, and (Tr S)² / Tr S² of S = E X² is
{start_directions:.1f} directions.

{start_table}

After {end_steps} steps (loss {end_loss:.2f}), the noise is {end_noise:.3g}, in {end_directions:.1f} directions.

{end_table}

{verdict}

## What does it cost?

The table shows the CPU time of AutoDamping in {every} steps of the network above, relative to the time of the steps
themselves, including KFAC's refreshes, on one thread. It shows the second {every} steps, so that one-time work is
excluded. The cases take turns over {rounds} rounds; given are the median, the minimum and the maximum.

{cost_table}

The targets apply to the defaults (4 batches, every 100 steps). The cost for a large network on an accelerator is on
[its own page](kfac.md). What a run gains from learned damping is on [another page](convergence.md), which used 8
batches.

## Changes made after seeing results

{decided}
"""


def facts(report: dict[str, Any]) -> dict[str, Any]:
    start, end = report["coverage"]
    found = {
        **report, **report["settings"], **windows(report), "rest_table": rest_table(report),
        "full_batches": FULL[0], "full_probes": FULL[1], "cost_table": cost_table(report), "dim": end["truth"]["dim"],
        "side": 4, "error": 196 * math.sqrt(0.95 * 0.05 / report["settings"]["draws"]), "decided": loops_apart(report),
        "minutes": report["seconds"] / 60, "verdict": verdict(report),
    }  # fmt: skip
    for name, part in (("start", start), ("end", end)):
        found |= {f"{name}_steps": part["steps"], f"{name}_loss": part["loss"], f"{name}_table": coverage_table(part)}
        found |= {f"{name}_{key}": part["truth"][key] for key in ("noise", "directions")}
    return found


def page(folder: Path, target: Path) -> None:
    report = reports.read(folder / FILE)
    target.mkdir(parents=True, exist_ok=True)
    (target / "noise.md").write_text(PAGE.format(**facts(report)), encoding="utf8")
