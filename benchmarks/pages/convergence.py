"""The page of the convergence study: tables, figure and text, all from the runs on file."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convergence import CHANCE, DAMPINGS, EARLY, EPS, FILE, LONG, QR, RATES, arms, grid_loss, mean_damping
from reports import filled, mean

from ritz.results import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = {"train": 2, "test": 4, "error": 5}  # places in a row of a curve: losses on all images, test error in per cent
DIGITS = {"train": 4, "test": 4, "error": 2}


def page(folder: Path, target: Path) -> None:
    """The figure and the tables, from the result file."""
    report = json.loads((folder / FILE).read_text(encoding="utf8"))
    target.mkdir(parents=True, exist_ok=True)
    figure(report).savefig(target / "convergence.png", dpi=90, pil_kwargs={"optimize": True})
    (target / "convergence.md").write_text(text(report), encoding="utf8")


def ended(report: dict[str, Any], arm: str, key: str) -> dict[int, float]:
    """The last value of each seed; of those that were not lost."""
    rows = [row for row in report["runs"] if row["arm"] == arm and row["lost"] is None]
    return {row["seed"]: row["curve"][-1][KEYS[key]] for row in rows}


def paired(report: dict[str, Any], first: str, second: str, key: str) -> Estimate | None:
    """The difference of two arms, first less second, over the seeds that both have; None where these are too few."""
    a, b = ended(report, first, key), ended(report, second, key)
    both = sorted(set(a) & set(b))
    return mean([a[seed] - b[seed] for seed in both]) if len(both) > 1 else None


def refreshed(report: dict[str, Any], key: str) -> Estimate | None:
    """As `paired`, for the two kinds of refresh, over all seeds that they have."""
    return paired({"runs": report["runs"] + report["more"]}, *QR, key)


def ratios(report: dict[str, Any], arm: str) -> list[float]:
    """Seconds of each run over those of SGD with the same seed."""
    base = {row["seed"]: row["seconds"] for row in report["runs"] if row["arm"] == "SGD"}
    return [row["seconds"] / base[row["seed"]] for row in report["runs"] if row["arm"] == arm and row["lost"] is None]


def spread(found: Estimate | None, digits: int) -> str:
    """A difference with its interval; in bold where the interval has no 0."""
    if found is None:
        return "too few runs"
    low, high = (float(end) for end in found.interval())
    text = f"{float(found.value):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"**{text}**" if low * high > 0 else text


def results(report: dict[str, Any]) -> str:
    """A line for each arm."""
    heads = ("learning rate", "lost", "training loss", "test loss", "test error, %", "time")
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(heads)]
    for arm in arms():
        rows = [row for row in report["runs"] if row["arm"] == arm.name]
        if not rows:
            continue
        cells = [f"{rows[0]['lr']:g}", f"{sum(row['lost'] is not None for row in rows)} of {len(rows)}"]
        for key, digits in (("train", 3), ("test", 3), ("error", 2)):
            values = list(ended(report, arm.name, key).values())
            found = mean(values) if len(values) > 1 else None
            cells.append(f"{float(found.value):.{digits}f} ± {float(found.stderr):.{digits}f}" if found else "")
        times = ratios(report, arm.name)
        cells.append(f"{statistics.fmean(times):.2f}" if times else "")
        lines.append(f"| {arm.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparisons() -> list[tuple[str, str]]:
    """Which arms are compared, seed by seed."""
    small, middle, large = (f"KFAC {d:g}, kl_clip" for d in DAMPINGS)
    return [
        *((f"KFAC {d:g}, kl_clip", f"KFAC {d:g}") for d in DAMPINGS),
        *((f"{flat}, learned", flat) for flat in (small, middle, large)),
        *((f"KFAC {d:g}, kl_clip, learned", f"KFAC, kl_clip, flat at the mean from {d:g}") for d in DAMPINGS),
        (f"{small}, LedoitWolf", small), (f"{small}, BulkEdge", small), (f"{small}, BulkEdge", f"{small}, learned"),
        (f"{middle}, qr", middle), (f"{middle}, learned, streaming", f"{middle}, learned"),
        (f"Adam, eps {EPS:g}", "Adam"), ("Adam", "SGD"),
        *((kfac, f"{plain}{end}") for kfac in (middle, large) for end in ("", LONG) for plain in ("SGD", "Adam")),
    ]  # fmt: skip


def differences(report: dict[str, Any]) -> str:
    lines = ["| | minus | training loss | test loss | test error, points |", "| --- | --- |" + " ---: |" * 3]
    for first, second in comparisons():
        cells = [spread(paired(report, first, second, key), DIGITS[key]) for key in KEYS]
        lines.append(f"| {first} | {second} | " + " | ".join(cells) + " |")
    cells = [spread(refreshed(report, key), DIGITS[key]) for key in KEYS]
    lines.append(f"| {QR[0]}, {report['settings']['qr_seeds']} seeds | {QR[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def grid(report: dict[str, Any]) -> str:
    """Loss on held-out images at each learning rate, from the least; the chosen one in bold."""
    num = max(len(rates) for rates in RATES.values())
    lines = ["| | " + " | ".join(["rate: loss"] * num) + " |", "| --- |" + " ---: |" * num]
    for arm, chosen in report["chosen"].items():
        rates = sorted({row["lr"] for row in report["grid"] if row["arm"] == arm})
        cells = []
        for lr in rates:
            loss = grid_loss(report, arm, lr)
            text = f"{lr:g}: {loss:.3f}" if math.isfinite(loss) else f"{lr:g}: lost"
            cells.append(f"**{text}**" if lr == chosen else text)
        lines.append(f"| {arm} | " + " | ".join(cells + [""] * (num - len(cells))) + " |")
    return "\n".join(lines)


def early(report: dict[str, Any]) -> str:
    """Training loss after the first epoch, or how many were lost, for each way to begin."""
    pairs = sorted({(row["damping"], row["lr"]) for row in report["early"]})
    lines = ["| | " + " | ".join(f"damping {d:g}, rate {lr:g}" for d, lr in pairs) + " | time |"]
    lines.append("| --- |" + " ---: |" * (len(pairs) + 1))
    base = early_seconds(report, "as it comes")
    for name in EARLY:
        cells = []
        for pair in pairs:
            rows = [row for row in early_rows(report, name) if (row["damping"], row["lr"]) == pair]
            kept = [row["loss"] for row in rows if row["lost"] is None]
            text = f"{statistics.fmean(kept):.2f}" if kept else "lost"
            cells.append(text if len(kept) in (0, len(rows)) else f"{text}, {len(rows) - len(kept)} lost")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {early_seconds(report, name) / base:.1f} |")
    return "\n".join(lines)


def early_rows(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in report["early"] if row["arm"].rpartition(", ")[0] == name]


def early_seconds(report: dict[str, Any], name: str) -> float:
    """Of an epoch, the median of the runs that finished one."""
    found = [row["seconds"] for row in early_rows(report, name) if row["lost"] is None]
    return statistics.median(found) if found else math.nan


def learned(report: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    return [row for row in report["runs"] if row["arm"] == arm and row["lost"] is None and row.get("learned")]


def dampings(report: dict[str, Any]) -> str:
    """What was learned: the first value, the last, the mean over the steps of a run."""
    lines = ["| | start | first | last | mean |", "| --- |" + " ---: |" * 4]
    for arm in arms():
        rows = learned(report, arm.name)
        if not rows:
            continue
        columns = [[row["learned"][0][1] for row in rows], [row["learned"][-1][1] for row in rows]]
        columns.append([mean_damping(report, arm.name, row["seed"]) for row in rows])
        cells = [f"{statistics.fmean(column):.3g} ± {statistics.stdev(column):.1g}" for column in columns]
        lines.append(f"| {arm.name} | {arm.damping:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def streamed(report: dict[str, Any]) -> dict[str, Any]:
    """Noise seen in training batches over noise seen in fresh ones at the same weights, by seed: at the first refresh
    and after it; then how far single refreshes scatter about that, and what their own standard errors say."""
    rows = learned(report, f"KFAC {DAMPINGS[1]:g}, kl_clip, learned, streaming")
    first = [row["learned"][0][2] / row["beside"][0][2] for row in rows]
    pairs = [list(zip(row["learned"][1:], row["beside"][1:], strict=True)) for row in rows]
    over = [sum(a[2] for a, _ in pair) / sum(b[2] for _, b in pair) for pair in pairs]
    flat = [pair for seed in pairs for pair in seed]
    apart = [a[2] / b[2] - 1 for a, b in flat]
    bars = [math.hypot(a[3] / b[2], a[2] * b[3] / b[2] ** 2) for a, b in flat]
    return {
        "stream_low": min(first), "stream_high": max(first), "stream_rest": within(mean(over)),
        "scatter": 100 * _root(apart), "bars": 100 * _root(bars), "windows": len(flat),
    }  # fmt: skip


def _root(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


# ------------------------------------------------------------------------------------------------ figure


COLORS = ("#0072B2", "#D55E00", "#009E73")  # of the three dampings
SHADES = ("#999999", "#E69F00", "#CC79A7", "#56B4E9")  # of what is not KFAC


def curve(report: dict[str, Any], arm: str, key: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Epochs, seconds over those of SGD, mean and standard error over seeds."""
    rows = [row for row in report["runs"] if row["arm"] == arm and row["lost"] is None]
    base = statistics.fmean(row["seconds"] for row in report["runs"] if row["arm"] == "SGD")
    columns = list(zip(*(row["curve"] for row in rows), strict=True))
    values = [[entry[KEYS[key]] for entry in column] for column in columns]
    errors = [statistics.stdev(v) / math.sqrt(len(v)) if len(v) > 1 else 0.0 for v in values]
    times = [statistics.fmean(entry[1] for entry in column) / base for column in columns]
    return [column[0][0] for column in columns], times, [statistics.fmean(v) for v in values], errors


def figure(report: dict[str, Any]) -> "Figure":
    """Training loss by epochs and test error by time; held-out loss by learning rate, and what was learned."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9.5, 9.2), layout="constrained")
    upper, lower = drawing.subfigures(2, 1)
    _draw_curves(report, upper)
    left, right = lower.subplots(1, 2)
    _draw_grid(report, left)
    _draw_dampings(report, right)
    for ax in (left, right):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
    return drawing


def _draw_curves(report: dict[str, Any], part: Any) -> None:
    first, second = part.subplots(1, 2)
    middle = f"KFAC {DAMPINGS[1]:g}"
    shown = {
        "SGD": (SHADES[0], "-"), f"SGD{LONG}": (SHADES[0], ":"), "Adam": (SHADES[1], "-"),
        f"Adam{LONG}": (SHADES[1], ":"), f"Adam, eps {EPS:g}": (SHADES[2], "-"), middle: (COLORS[1], ":"),
        f"{middle}, kl_clip": (COLORS[1], "-"), f"{middle}, kl_clip, learned": (COLORS[1], "--"),
        f"KFAC {DAMPINGS[2]:g}, kl_clip": (COLORS[2], "-"),
    }  # fmt: skip
    for name, (color, style) in shown.items():
        if not ended(report, name, "train"):
            continue
        for ax, key, by_time in ((first, "train", False), (second, "error", True)):
            epochs, times, values, errors = curve(report, name, key)
            if name.endswith(LONG) and not by_time:
                continue
            x = times if by_time else epochs
            ax.plot(x, values, style, color=color, marker=".", ms=5, lw=1.4, label=name)
            ends = [[v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1)]
            ax.fill_between(x, *ends, color=color, alpha=0.15, lw=0)
    first.set(xlabel="epoch", ylabel="training loss", yscale="log")
    _plain(first, "y", (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 2.0))
    second.set(xlabel="time, in runs of SGD", ylabel="test error, %")
    lowest = min(min(line.get_ydata()) for line in second.lines)
    second.set_ylim(0.98 * lowest, 1.5 * lowest)  # the first epoch of some is above
    for ax in (first, second):
        ax.grid(alpha=0.3)
    part.legend(*second.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _draw_grid(report: dict[str, Any], ax: Any) -> None:
    ends = (("", ":", "o"), (", kl_clip", "-", "^"), (", kl_clip, learned", "--", "s"))
    finite = [loss for arm in report["chosen"] for loss in [grid_loss(report, arm, report["chosen"][arm])]]
    top = min(4 * min(finite), CHANCE)
    for damping, color in zip(DAMPINGS, COLORS, strict=True):
        for end, style, marker in ends:
            name = f"KFAC {damping:g}{end}"
            rates = sorted({row["lr"] for row in report["grid"] if row["arm"] == name})
            losses = [min(grid_loss(report, name, lr), top) for lr in rates]
            ax.plot(rates, losses, style, color=color, marker=marker, ms=4, lw=1.3, label=name)
    ax.axhline(grid_loss(report, "SGD", report["chosen"]["SGD"]), color=SHADES[0], lw=1, label="SGD, at its best")
    ax.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss on held-out images")
    ax.set_ylim(None, 1.06 * top)
    _plain(ax, "x", (1e-4, 1e-3, 1e-2, 0.1, 1.0))
    _plain(ax, "y", (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0))
    ax.set_title("at the upper edge: lost", fontsize=8)
    ax.grid(alpha=0.3)


def _draw_dampings(report: dict[str, Any], ax: Any) -> None:
    small, middle, _ = (f"KFAC {d:g}, kl_clip" for d in DAMPINGS)
    shown = [(f"KFAC {d:g}, kl_clip, learned", color, "-") for d, color in zip(DAMPINGS, COLORS, strict=True)]
    shown += [(f"{middle}, learned, streaming", SHADES[1], "--")]
    shown += [(f"{small}, BulkEdge", SHADES[2], "-."), (f"{small}, LedoitWolf", SHADES[3], ":")]
    for name, color, style in shown:
        rows = learned(report, name)
        for place, row in enumerate(rows):
            steps = [0, *(entry[0] for entry in row["learned"]), row["steps"]]
            values = [row["damping"], *(entry[1] for entry in row["learned"])]
            ax.step(
                steps, [*values, values[-1]], style, where="post", color=color, lw=1.1, alpha=0.75,
                label=None if place else name,
            )  # fmt: skip
    ax.set(yscale="log", xlabel="step", ylabel="damping")
    ax.set_title("learned dampings, a line for each seed", fontsize=8)
    _plain(ax, "y", (0.003, 0.01, 0.03, 0.1, 0.3))
    ax.grid(alpha=0.3)


def _plain(ax: Any, side: str, ticks: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis."""
    low, high = ax.get_xlim() if side == "x" else ax.get_ylim()
    axis = ax.xaxis if side == "x" else ax.yaxis
    axis.set_minor_formatter("")
    axis.set_major_formatter("{x:g}")
    axis.set_ticks([tick for tick in ticks if low <= tick <= high])


# ------------------------------------------------------------------------------------------- the page's text


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """All that the page says and that was measured."""
    named = dict(zip(("small", "middle", "large"), DAMPINGS, strict=True))
    small, middle, _ = (f"KFAC {d:g}, kl_clip" for d in DAMPINGS)
    noises = [
        mean_damping(report, f"KFAC {d:g}, kl_clip, learned", seed) - d
        for d in DAMPINGS for seed in range(report["settings"]["seeds"])
    ]  # fmt: skip
    edges = [mean_damping(report, f"{small}, BulkEdge", seed) for seed in range(report["settings"]["seeds"])]
    return {
        **report, **report["settings"], **dict(zip(("train", "val", "test"), report["num_images"], strict=True)),
        **named, "steps": report["runs"][0]["steps"], "beside": 2 * report["settings"]["num_batches"],
        "minutes": sum(row["seconds"] for key in ("early", "grid", "runs", "more") for row in report[key]) / 60,
        "results": results(report), "differences": differences(report), "grid": grid(report), "early": early(report),
        "learned": dampings(report), **beginnings(report), **times(report), **streamed(report),
        "to_sgd": told(report, middle, "SGD"), "to_adam": told(report, middle, "Adam"),
        "to_long_sgd": told(report, middle, f"SGD{LONG}"), "to_long_adam": told(report, middle, f"Adam{LONG}"),
        "eps_runs": told(report, f"Adam, eps {EPS:g}", "Adam"),
        **{
            f"from_{key}": told(report, f"KFAC {d:g}, kl_clip, learned", f"KFAC {d:g}, kl_clip", ["error"])
            for key, d in named.items()
        },
        **{
            f"mean_{key}": told(
                report, f"KFAC {d:g}, kl_clip, learned", f"KFAC, kl_clip, flat at the mean from {d:g}", ["error"]
            )
            for key, d in named.items()
        },
        "noise_low": min(noises), "noise_high": max(noises), "edge": told(report, f"{small}, BulkEdge", small),
        "edge_mean": statistics.fmean(edges),
        "streaming": told(report, f"{middle}, learned, streaming", f"{middle}, learned"),
        **{f"qr_{key}": spread(refreshed(report, key), DIGITS[key]).strip("*") for key in KEYS},
    }  # fmt: skip


def text(report: dict[str, Any]) -> str:
    """The page, its paragraphs filled."""
    return "\n\n".join(_filled(block) for block in PAGE.format(**facts(report)).split("\n\n"))


def _filled(block: str) -> str:
    """A paragraph or a list in lines of 120 columns; tables, headings and pictures as they are."""
    if block[:1] in ("|", "#", "!") or not block.strip():
        return block
    if not block.startswith("- "):
        return filled(block)
    items = [" ".join(item.split()) for item in block.removeprefix("- ").split("\n- ")]
    return "\n".join(filled(f"- {item}", hang="  ") for item in items)


def beginnings(report: dict[str, Any]) -> dict[str, Any]:
    """What became of KFAC's first steps."""
    begun = {name: early_rows(report, name) for name in EARLY}
    lost = {name: sum(row["lost"] is not None for row in rows) for name, rows in begun.items()}
    bare = [row for row in report["grid"] if row["arm"] in bare_arms()]
    eigenvalues = {at: statistics.fmean(row["largest"][at] for row in report["growth"]) for at in (0, 10, 20)}
    return {
        "as_it_comes": lost["as it comes"], "clipped": lost["kl_clip"], "fresh": lost["both every step"],
        "begun": len(begun["kl_clip"]), "bare_lost": sum(row["lost"] is not None for row in bare), "bare": len(bare),
        "latest": max(row["lost"] or 0 for row in bare), "same": same_losses(report),
        **{f"eigen_{at}": value for at, value in eigenvalues.items()},
    }  # fmt: skip


def times(report: dict[str, Any]) -> dict[str, float]:
    """Means of the ratios to SGD."""
    middle = f"KFAC {DAMPINGS[1]:g}, kl_clip"
    names = {"kfac": middle, "auto": f"{middle}, learned", "qr": QR[0], "sgd": f"SGD{LONG}", "adam": f"Adam{LONG}"}
    found = {f"{key}_time": statistics.fmean(ratios(report, name)) for key, name in names.items()}
    return {**found, "auto_share": 100 * (found["auto_time"] / found["kfac_time"] - 1)}


def bare_arms() -> set[str]:
    """KFAC without kl_clip."""
    return {arm.name for arm in arms() if arm.family == "kfac" and "kl_clip" not in arm.options}


def same_losses(report: dict[str, Any]) -> int:
    """How many runs of the grid with a learned damping were lost at the very step where the flat one was."""
    lost = {(row["arm"], row["lr"], row["seed"]): row["lost"] for row in report["grid"] if row["lost"] is not None}
    own = [(arm.removesuffix(", learned"), *rest) for arm, *rest in lost if arm in bare_arms() and "learned" in arm]
    return sum(lost.get(key) == lost[f"{key[0]}, learned", *key[1:]] for key in own)


def told(report: dict[str, Any], first: str, second: str, keys: Sequence[str] = ("train", "error")) -> str:
    """Differences of two arms with their intervals, in words."""
    names = {"train": "in training loss", "test": "in test loss", "error": "points of test error"}
    digits = {"train": 3, "test": 3, "error": 2}
    found = {key: spread(paired(report, first, second, key), digits[key]).strip("*") for key in keys}
    return ", ".join(f"{text} {names[key]}" for key, text in found.items())


def within(found: Estimate) -> str:
    low, high = (float(end) for end in found.interval())
    return f"{float(found.value):.2f} ({low:.2f} to {high:.2f})"


PAGE = """# Does curvature train a small network better?

**Setting.** Fashion-MNIST, with {train:,} training and {test:,} test images. The network has three convolutions and a
linear layer with ReLU, without normalisation, P = {num_params:,}. Training uses batches of {batch_size}, {epochs}
epochs ({steps} steps), momentum 0.9 and no weight decay. The learning rate is constant for half of the epochs and then
falls linearly to a hundredth (`linear_decay`). Each seed gives the same initial weights and the same order of batches
to all arms, so arms are compared seed by seed, over {seeds} seeds.

**Learning rates.** Each arm uses the learning rate, from a grid of five, with the lowest loss on {val:,} held-out
images at the end of training. The grid runs use separate seeds: {plain_grid_seeds} for SGD and Adam, {grid_seeds} for
KFAC. Arms that serve as a comparison for another arm use the rate of that arm, and so do the longer runs.

**KFAC** has its defaults, which are the intervals of seed 004's authors: statistics every 10 steps, eigenvectors every
100 steps. A number after KFAC is its damping. *Learned* is `AutoDamping` with its default rule (equation 15 of seed
004), starting from that value and updated every {every} steps. `kl_clip` is {kl_clip:g}. A run is *lost* when the loss
of a batch exceeds ten times the loss of a uniform guess.

Written by `python benchmarks/convergence.py --page benchmarks/results docs` from `benchmarks/results/convergence.json`:
{machine}, torch {torch}, commit {commit}, {minutes:.0f} minutes in total. Times are CPU seconds of one thread for
training only, relative to SGD with the same seed. Other work on the machine makes them uncertain by some per cent.

![Loss by epoch, error by time, held-out loss by learning rate, and dampings along training](convergence.png)

Bands are standard errors over seeds. Top right: time 1 is one run of SGD. Bottom right: each line is one seed.

## Results

Differences are means over seeds with 95 % intervals of Student's t. With so many intervals, some exclude 0 by chance.

- **Without `kl_clip`, KFAC diverges in its first steps, at learning rates that it could use later.** {bare_lost} of
  {bare} grid runs are lost, the last of them at step {latest}. The cause is the interval between statistics. The
  largest eigenvalue of one batch rises from {eigen_0:.2g} at the start to {eigen_10:.2g} ten steps later and
  {eigen_20:.0f} after twenty, while KFAC still divides by the eigenvalues of the start. Of {begun} runs of one epoch
  (below), {as_it_comes} are lost with the defaults ("as it comes"), {fresh} with statistics and eigenvectors at every
  step, and {clipped} with `kl_clip`, which has no visible cost in the arms. New statistics alone do not help, because
  eigenvalues are refreshed with the eigenvectors.
- **AutoDamping cannot help there,** because its first update is at step {every}. From the three starting values, {same}
  grid runs with learned damping were lost, each at exactly the step where the run with flat damping was lost. All other
  arms therefore use `kl_clip`.
- **At equal epochs, KFAC has a lower training loss** than SGD and Adam, and a lower test error than Adam. KFAC
  {middle:g} with `kl_clip` minus SGD: {to_sgd}. Minus Adam: {to_adam}.
- **At equal time, little of this advantage over Adam remains.** A run of KFAC takes {kfac_time:.2f} times as long as
  one of SGD. KFAC minus Adam with twice as many epochs, which takes {adam_time:.2f} times as long: {to_long_adam}. KFAC
  minus SGD with twice as many epochs ({sgd_time:.2f}): {to_long_sgd}.
- **Learned damping trains no better than flat damping here.** Learned minus flat at the same starting value, each at
  its own learning rate: from {small:g} {from_small}; from {middle:g} {from_middle}; from {large:g} {from_large}.
  Learned minus flat at the mean of the learned values, at the same learning rate: from {small:g} {mean_small}; from
  {middle:g} {mean_middle}; from {large:g} {mean_large}. The flat run has this mean from the first step on. The learned
  damping does not: over a run, it adds {noise_low:.2g} to {noise_high:.2g} on average. A run takes {auto_time:.2f}
  times as long as one of SGD, {auto_share:.0f} % more than with flat damping.
- **Other rules.** Ledoit-Wolf always asks for less than the starting value of {small:g}, so its runs are identical to
  those with flat damping. BulkEdge asks for {edge_mean:.2g} on average and does worse than the flat {small:g}: {edge}.
  Its learning rate comes from a grid made for the starting value, which it leaves far behind.
- **Streaming agrees with fresh batches once training has settled.** At the same weights, and after the first window,
  the noise seen in training batches is {stream_rest} times that seen in {beside} fresh ones. A single window deviates
  from the fresh estimate by {scatter:.0f} % (root mean square of {windows} windows); the error bars predict {bars:.0f}
  %. The first window covers the first {every} steps, when the noise is higher, and gives {stream_low:.1f} to
  {stream_high:.0f} times the noise at its end; the moving average keeps that for several refreshes. Training with
  streaming minus training with fresh batches: {streaming}.
- **`refresh="qr"` trains as well as full eigendecompositions.** Over {qr_seeds} seeds, qr minus eigh: {qr_train} in
  training loss, {qr_test} in test loss, {qr_error} points of test error. A run takes {qr_time:.2f} times as long as one
  of SGD, instead of {kfac_time:.2f}.
- **Adam with a large eps** of {eps:g} minus Adam: {eps_runs}.

## Decisions made during the study

The study was not planned in one go. The following was known before each choice. The grids showed that KFAC with its
defaults diverges early. The arms with learned damping, with its mean, with other rules, qr and streaming were therefore
given `kl_clip`; learned damping without it appears only in the grids. After a poor first run of SGD, the grids of SGD
and Adam went from one seed to three; those of KFAC have one. The seeds of qr against eigh were raised to 12, after
three of them showed a small difference in test loss, which did not persist.

## The arms

Mean and standard error over seeds at the end of training.

{results}

## Differences, seed by seed

Bold: the 95 % interval excludes 0.

{differences}

## The learned damping

Damping after the first refresh, at the end, and averaged over steps; mean and standard deviation over seeds.

{learned}

## The first steps of KFAC

Runs of one epoch, {early_seeds} seeds: training loss at the end, or how many were lost. Time is relative to an epoch of
the first row.

{early}

## Learning rates

Loss on held-out images at each learning rate; the chosen rate is in bold. The rates of KFAC are 1/30, 1/10, 1/3, 1 and
10/3 of its initial damping.

{grid}
"""
