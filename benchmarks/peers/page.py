"""Tables, and the page that is written from the files."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Report = dict[str, Any]
COLUMNS = {
    "products": ("case", "precision", "matrix", "k", "tool", "ms", "per gradient", "per gradient, compiled", "error",
                 "GiB", "note"),
    "spectrum": ("case", "tool", "given error", "probes", "products", "seconds", "each", "job", "trace, error",
                 "outliers, error", "largest, error", "share of the rest", "GiB", "note"),
    "traces": ("case", "tool", "products", "seconds", "error", "note"),
    "sample_traces": ("case", "tool", "samples", "seconds", "busy", "each", "job", "exact", "error", "note"),
    "steps": ("case", "tool", "mean", "per SGD", "note"),
    "measure": ("case", "tool", "seconds", "note"),
    "scaling": ("case", "size", "seconds", "note"),
}  # fmt: skip
TITLES = {
    "products": "Products of one batch", "spectrum": "The spectrum of a data set", "traces": "Traces",
    "sample_traces": "The trace of every sample", "steps": "Steps of training", "measure": "The standard measures",
    "scaling": "Growth",
}  # fmt: skip
HEADS = {"busy": "s of all threads", "job": "whole job, s", "each": "each, s", "seconds": "s", "mean": "s"}


def _cell(row: dict[str, Any], column: str) -> str:
    if column == "note":
        words = ["extrapolated"] if row.get("extrapolated") else []
        words += [f"failed: {row['failed']}"] if row.get("failed") else []
        words += ["disagrees with float64"] if row.get("agrees") is False else []
        return ", ".join(words)
    if column == "ms":
        return "" if row.get("seconds") is None else f"{1e3 * row['seconds']:.3g}"
    if column == "GiB":
        return "" if not row.get("peak") else f"{row['peak'] / 2**30:.2f}"
    value = row.get(column)
    if isinstance(value, float):
        return f"{value:.1e}" if column == "error" else f"{value:.3g}"
    return "" if value is None else str(value)


def _markdown(heads: list[str], cells: list[list[str]]) -> str:
    keep = [i for i in range(len(heads)) if any(line[i] for line in cells)]
    widths = [max(len(heads[i]), *(len(line[i]) for line in cells)) for i in keep]

    def line(parts: list[str]) -> str:
        return "| " + " | ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)) + " |"

    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([line([heads[i] for i in keep]), rule, *(line([own[i] for i in keep]) for own in cells)])


def time_table(report: Report) -> str:
    """One row a tool and a case."""
    columns = COLUMNS[report["suite"]]
    return _markdown([HEADS.get(c, c) for c in columns], [[_cell(r, c) for c in columns] for r in report["rows"]])


def target_table(report: Report) -> str:
    """One row a target."""
    cells = [
        [v["what"], v["target"], "" if v["value"] is None else f"{v['value']:.3g}", v["verdict"]]
        for v in report["verdicts"]
    ]
    return _markdown(["what", "target", "measured", ""], cells)


INTRODUCTION = """# Speed

Ritz beside curvlinops, hessian-eigenthings, PyHessian and BackPACK: the same networks, noise of the right shape (for
spectra: weights trained on patterns in noise, see `benchmarks/peers/accuracy.py`), the same precision and vectors, one
process. Tools take turns in each round; on a GPU the median of rounds is told, on a CPU the least of the seconds of one
thread, since machines are shared. "per gradient" is the time of one product in gradients of the same batch, eager or
compiled. "error" is the relative distance of the first image from a product in float64, two passes in reverse. A job
that is too long is measured in part and marked as extrapolated. "matrix products alone" are those of a dense network
that there is no way around (`benchmarks/peers/floor.py`), into memory that is there already: a bound from below, and
from above for how many times faster than a peer ritz can be. On a CPU ritz keeps the forward pass of a batch and the
gradient that vectors share from one product to the next where it may (`ritz.operators.tape`); "nothing kept" does not.

Written by `python benchmarks/speed.py --page benchmarks/results docs`, from `benchmarks/results/speed_*.json`. What a
KFAC step costs is on [a page of its own](kfac.md).
"""

TRIED = """## What was tried and did not pay

Said without figures: these were single trials on a shared CPU, one thread, 8 Hessian products at a time, and no script
for them is kept.

- **Executing the graph of torch.func without a compiler.** The product traced to one flat graph of operations, dead and
  double ones taken out, run as it is: a little faster than torch.func on the dense network, after seconds of tracing.
- **Smaller pieces where nothing is large.** Pieces of a batch pay on a CPU where one intermediate result would be over
  16 MiB. Where it is not, each piece reads all vectors again, and the dense network was slower. What pieces avoid is
  memory that the C library asks of the system anew: told to keep it (`MALLOC_MMAP_THRESHOLD_=1000000000
  MALLOC_TRIM_THRESHOLD_=4000000000`), ritz and curvlinops took the same time for 8 Hessian products of the
  convolutional network.
- **Fewer vectors at a time.** Chunks of 4 and 2 in the place of 8 were slower on the dense network and the transformer.
- **Two passes for a Gauss-Newton product.** Tangents and cotangents each with a forward pass of its own, so that
  nothing is kept for a derivative that is not asked for: hardly faster, and slower on the convolutional network.
- **Compiling on a CPU.** Most of the time of the dense network are matrix products, which a compiler leaves as they
  are. On the transformer, where it did gain against torch.func, 8 products along a tape (`ritz.operators.tape`) are
  faster than the compiled ones, by torch.func or by the tape itself, which took minutes to compile.
- **Copies of what vectors share, so that small matrices are one stack.** Attention's products of the K tangents with
  what is common to them are a loop over the vectors: to make one stack of all, each is copied K times, and that took
  longer than the calls that it spared.
- **Sample traces: the cotangents of all classes as one larger batch.** Pulled back through torch's own graph by rules
  for single operations, activation and pooling in one: a little faster on LeNet-5 than pass after pass, for a second
  set of derivatives.
- **Sample traces: convolutions before a pooling layer at the places of the maxima alone.** Three quarters of the
  gradients are zero there, but to gather the patches at the others took longer than to multiply with the zeros.
"""


def page(folder: Path, target: Path) -> None:
    """speed.md and, where growth was measured, speed.png."""
    files = sorted(folder.glob("speed_*.json"))
    reports = [json.loads(path.read_text(encoding="utf8")) for path in files]
    order = list(TITLES)
    parts = [INTRODUCTION]
    for suite in order:
        own = [(path, report) for path, report in zip(files, reports, strict=True) if report["suite"] == suite]
        if not own:
            continue
        parts.append(f"## {TITLES[suite]}\n")
        for path, report in own:
            parts.append(_section(path, report))
        if suite == "scaling":
            target.mkdir(parents=True, exist_ok=True)
            _figure([report for _, report in own]).savefig(target / "speed.png", dpi=100)
            parts.append("![Seconds against samples, parameters, vectors and steps](speed.png)\n")
    parts.append(TRIED)
    target.mkdir(parents=True, exist_ok=True)
    (target / "speed.md").write_text("\n".join(parts), encoding="utf8")


def _section(path: Path, report: Report) -> str:
    machine, found = report["machine"], report["versions"]
    where = machine["device_name"]
    if machine["device"] == "cpu":
        where += f", one of {machine['cores']} cores" if machine["threads"] == 1 else f", {machine['threads']} threads"
    where += f", load {report['load']:.1f}" if "load" in report else ""
    plain = ("ritz", "python", "numpy", "scipy", "safetensors")
    others = ", ".join(f"{name} {number}" for name, number in found.items() if name not in plain)
    absent = "".join(f" {name} was absent." for name in report["missing"])
    about = f"`{path.name}`: {where}; {others}; commit {report['commit'] or 'none: work not committed'}.{absent}"
    text = textwrap.fill(about, 120, break_long_words=False, break_on_hyphens=False) + "\n\n"
    if report["verdicts"]:
        text += target_table(report) + "\n\n"
    return text + time_table(report) + "\n"


def _figure(reports: list[Report]) -> "Figure":
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9.6, 2.8), layout="constrained")
    axes = drawing.subplots(1, 4)
    for ax, what in zip(axes, ("N", "P", "K", "m"), strict=True):
        for report in reports:
            own = [r for r in report["rows"] if r["case"] == what and r["seconds"]]
            if own:
                slope = next((v["value"] for v in report["verdicts"] if v["what"].endswith(f"in {what}")), None)
                label = report["machine"]["device"] + (f", slope {slope:.2f}" if slope is not None else "")
                ax.loglog([r["size"] for r in own], [r["seconds"] for r in own], "o-", label=label)
        ax.set_xlabel({"N": "samples / 256", "P": "hidden units", "K": "vectors", "m": "steps"}[what])
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize="small")
    axes[0].set_ylabel("seconds")
    return drawing
