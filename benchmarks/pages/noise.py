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
    lines = ["| after | estimate | products | ratio to the full | standard deviation | of one product |"]
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
    lines = ["| batches | probes | holds the truth, % | mean / truth | spread / truth | error told / truth |"]
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
        return f"{name} {min(found):.0f} to {max(found):.0f} %" if found else f"{name} none"

    parts = [
        held("one common probe", lambda row: row["probes"] == 1),
        held("2 to 4", lambda row: row["probes"] in (2, 4)),
        held(f"8 or more with {most} batches", lambda row: (row["probes"] or 0) >= 8 and row["batches"] == most),
        held("a probe for each of 4 batches", lambda row: row["probes"] is None and row["batches"] == 4),
        held(f"for each of {most}", lambda row: row["probes"] is None and row["batches"] == most),
    ]
    root = math.sqrt(report["settings"]["draws"])
    off = max(abs(row["ratio"] - 1) * root / row["spread"] for row in rows)
    text = (
        f"An interval of 95 % holds the truth, over both tables, with {'; '.join(parts)}. One common probe errs by how "
        "it lies to the few directions that hold the noise, which its batches cannot see: its error is told too small, "
        "and more batches make that worse. The others fall short since an error that is known from few numbers, of "
        "squares with a long tail, is taken as it is. There is no bias to be seen: of all the means the one farthest "
        f"from the truth is {off:.1f} of its standard errors away, and all of them share their batches."
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
        return "Nothing of what is measured was changed after the full run."
    texts = []
    for family in BARS:
        found = [100 * (row[f"{family}/{way}"] / row[f"{family}/None"] - 1) for row in rows for way in WAYS]
        texts.append(
            f"for {family} {statistics.median(found):.0f} % in the median ({min(found):.0f} to {max(found):.0f})"
        )
    text = (
        "The costs were measured twice. The first time whole loops with AutoDamping were compared with loops without "
        f"it, in turn, on a machine with other work: it added {', '.join(texts)}. Loops differed from each other by "
        "more than what was asked for, so the second time the seconds of AutoDamping were taken within each loop. All "
        "else is of one run, whose number of repeats was set before it, so that it takes minutes."
    )
    return reports.filled(text)


def cost_table(report: dict[str, Any]) -> str:
    lines = ["| loop | batches | bar, % | AutoDamping adds, % | |", "| --- | --- | ---: | ---: | --- |"]
    for (family, way), found in shares(report).items():
        middle = statistics.median(found)
        kept = "kept" if middle <= BARS[family] else "**missed**"
        told = f"{middle:.0f} ({min(found):.0f} to {max(found):.0f})"
        lines.append(f"| {family} | {way} | {BARS[family]} | {told} | {kept} |")
    return "\n".join(lines)


PAGE = """# The noise of the curvature: which estimate, how sure, how dear

What `AutoDamping` learns from is Tr X² / P, X = H_batch − H (equation 15 of seed 004). By default it takes
4 batches every {every} steps, either drawn for it or, streaming, the training batches; a batch is cut in halves and has
a probe of its own. The other way, the paper's, has probes that are common to all batches (`num_probes=`, and
`ritz.curvature_noise`). Batches of {batch_size}, {num_images:,} images of {data}, momentum 0.9, learning rate {lr:g}.

Written by `python benchmarks/noise.py --page benchmarks/results docs` from `benchmarks/results/noise.json`:
{machine}, torch {torch}, commit {commit}, {minutes:.0f} minutes for all of it.

## The same number?

Three convolutions and a linear layer, ReLU, P = {num_params:,}. At fixed weights {repeats} estimates of each kind, with
other batches and probes; *full* is `ritz.curvature_noise` at its defaults, {full_batches} batches and {full_probes}
probes. The standard deviation is relative to the mean; the last column, times the root of the products, is what one
product is worth: for the same work, the smaller the better. 95 % intervals by Student's t, the error of the full mean
not counted.

{rest_table}

Along training, the streaming estimate of a window of {every} steps over the full one at its end, mean over windows of
each of {num_seeds} seeds: {rest}; one window varies by {rest_spread} ({num_windows} of them). The first window of a run
is apart: it saw the first {every} steps, where the noise is another, and gives {first} times what is there at their
end.

## Do the intervals hold the truth?

A network of {dim} weights on {side} × {side} means of pixels, batches of {small_batch}. The truth is known: the Hessian
of each of the {num_images:,} samples, all of their variances, over the size of a batch. {draws} draws, so that a
coverage of 95 % is known to ± {error:.0f} points. *Spread* is the standard deviation of the estimates, *error told* the
root of the mean of their squared standard errors. Batches are drawn without replacement.

After {start_steps} steps (loss {start_loss:.2f}): the noise is {start_noise:.3g}, (Tr S)² / Tr S² of S = E X² is
{start_directions:.1f} directions.

{start_table}

After {end_steps} steps (loss {end_loss:.2f}): the noise is {end_noise:.3g}, in {end_directions:.1f} directions.

{end_table}

{verdict}

## What it costs

CPU seconds of AutoDamping in {every} steps of the network above, over those of the steps themselves, KFAC's refreshes
among them; one thread. It is the second {every} steps that are told, without what is done once. The cases take turns,
{rounds} rounds; median, smallest and largest.

{cost_table}

The bars are for the defaults (4 batches, every 100 steps). On a large network and an accelerator the same is on
[its own page](kfac.md), and what a run with a learned damping gains on [another](convergence.md), which had 8 batches.

## What was decided after seeing results

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
