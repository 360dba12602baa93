"""Tables, and the page that is written from the files."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports import filled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Report = dict[str, Any]
COLUMNS = {
    "products": ("case", "precision", "matrix", "k", "tool", "ms", "per gradient", "per gradient, compiled", "error",
                 "GiB", "to compile", "note"),
    "spectrum": ("case", "tool", "given error", "probes", "products", "seconds", "each", "job", "trace, error",
                 "outliers, error", "largest, error", "share of the rest", "GiB", "GiB held", "note"),
    "traces": ("case", "tool", "products", "seconds", "error", "note"),
    "diagonals": ("case", "tool", "products", "seconds", "error", "note"),
    "sample_traces": ("case", "tool", "samples", "seconds", "busy", "each", "job", "exact", "error", "note"),
    "steps": ("case", "tool", "mean", "per SGD", "note"),
    "measure": ("case", "tool", "seconds", "GiB", "note"),
    "first": ("case", "products", "tool", "seconds", "per job as it is", "start", "each", "compiled", "note"),
    "scaling": ("case", "size", "seconds", "note"),
}  # fmt: skip
TITLES = {
    "products": "Products of one batch", "spectrum": "The spectrum of a data set", "traces": "Traces",
    "diagonals": "Diagonals", "sample_traces": "The trace of every sample", "steps": "Steps of training",
    "measure": "The standard measures", "first": "First results", "scaling": "Growth",
}  # fmt: skip
HEADS = {
    "busy": "s of all threads", "job": "whole job, s", "each": "each, s", "seconds": "s", "mean": "s",
    "start": "start, s", "to compile": "first calls, s",
}  # fmt: skip


def _cell(row: dict[str, Any], column: str) -> str:
    if column == "note":
        words = ["extrapolated"] if row.get("extrapolated") else []
        words += [f"failed: {row['failed']}"] if row.get("failed") else []
        words += ["disagrees with float64"] if row.get("agrees") is False else []
        return ", ".join(words)
    if column == "ms":
        return "" if row.get("seconds") is None else f"{1e3 * row['seconds']:.3g}"
    if column in ("GiB", "GiB held"):
        found = row.get("peak" if column == "GiB" else "reserved")
        return f"{found / 2**30:.2f}" if found else ""
    if column == "to compile":
        return _to_compile(row)
    value = row.get(column)
    if isinstance(value, float):
        return f"{value:.1e}" if column == "error" else f"{value:.3g}"
    return "" if value is None else str(value)


def _to_compile(row: dict[str, Any]) -> str:
    """The first calls of what is compiled: with the compiler's cache empty, and with it full."""
    warm, cold = row.get("begun", row.get("first")), row.get("cold")
    if not str(row["tool"]).endswith("compiled") or warm is None or warm < 1:  # or compiled in an earlier case
        return ""
    return f"{warm:.3g}" if cold is None else f"{cold:.3g}, again {warm:.3g}"


def _markdown(heads: list[str], cells: list[list[str]]) -> str:
    keep = [i for i in range(len(heads)) if any(line[i] for line in cells)]
    widths = [max(len(heads[i]), *(len(line[i]) for line in cells)) for i in keep]

    def line(parts: list[str]) -> str:
        return "| " + " | ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)) + " |"

    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([line([heads[i] for i in keep]), rule, *(line([own[i] for i in keep]) for own in cells)])


def time_table(report: Report) -> str:
    """One row a tool and a case; those that had no time are counted below."""
    columns = COLUMNS[report["suite"]]
    in_time = [r for r in report["rows"] if r["seconds"] is not None or "out of time" not in r["failed"]]
    table = _markdown([HEADS.get(c, c) for c in columns], [[_cell(r, c) for c in columns] for r in in_time])
    late = len(report["rows"]) - len(in_time)
    return table + (f"\n\nRows that are not there, for want of time: {late}." if late else "")


def target_table(report: Report) -> str:
    """One row a target."""
    cells = [
        [v["what"], v["target"], "" if v["value"] is None else f"{v['value']:.3g}", v["verdict"]]
        for v in report["verdicts"]
    ]
    return _markdown(["what", "target", "measured", ""], cells)


INTRODUCTION = """# Speed

This page compares ritz with curvlinops, hessian-eigenthings, PyHessian and BackPACK. All tools run in one process, on
the same networks, inputs and vectors, in the same precision. The inputs are noise of the right shape. For spectra, the
weights were trained on patterns in noise (see `benchmarks/peers/accuracy.py`).

The page is written by `python benchmarks/speed.py --page benchmarks/results docs` from
`benchmarks/results/speed_*.json`. The cost of a KFAC step is on [a page of its own](kfac.md).

**Timing.** The tools take turns in each round. On a GPU, the tables give the median over rounds. On a CPU, they give
the minimum CPU time of one thread, because the machines are shared. A job that is too long is measured in part and
marked as extrapolated.

**Columns and rows of the tables:**

- In the tables of targets, "times curvlinops" or "times the best peer" is the time of that tool divided by the time of
  ritz. The name in parentheses is the mode of ritz, see below.
- "per gradient" is the time of one product divided by the time of one gradient of the same batch, eager or compiled.
- "error" is the relative distance of the first product from the same product in float64, computed by reverse over
  reverse mode.
- "matrix products alone" is the time of the matrix multiplications of a dense network whose tangents pass from layer to
  layer, one vector at a time, written into memory that is already allocated (`benchmarks/peers/floor.py`). For wide
  layers it is a lower bound for the time of Hessian products, and so an upper bound for the speed-up of ritz over a
  peer. For layers of few outputs ("narrow"), ritz can be faster, because it multiplies the matrices of several vectors
  as one. Gauss-Newton products with few outputs need fewer multiplications, because they use factors
  (`ritz.operators.tape.factors`).
- "ritz, nothing kept" recomputes everything for each product. On a CPU, "ritz" keeps the forward pass of a batch and
  the part of the gradient that all vectors share from one product to the next, where this is possible
  (`ritz.operators.tape`). PyHessian does the same for a single batch. On a GPU, compiled products of one or two vectors
  at a time keep them, too, in the files of commit e53882d and later.
- On a GPU, "ritz" is what a short run uses: a recorded CUDA graph where the network allows it. "ritz, compiled" is what
  a long run uses (`Plan(compile=True)`). "ritz, eager" uses neither.
- The rows "no density" give the time of the trace and a few eigenvalues alone, by Hutchinson's estimator and one
  Lanczos run. These need no density; the peers have both, and so has ritz (`trace`, `top_eigenpairs`). All other
  spectra are compared as densities, which the peers compute by stochastic Lanczos quadrature.

**Compilation.** Where several processes compiled functions in advance, the tables give the time of the first calls
twice: with an empty compiler cache, and in the timed process, which found the cache full. Times of whole jobs exclude
the first calls. By default, ritz compiles a job only if a compiler without any gain would make the job at most a tenth
longer; otherwise the job takes the times of "ritz".

CUDA graphs are recorded, and functions are compiled by default, for models made of torch.nn's and ritz's own modules.
For other modules, pass `Plan(replay=True)` and `Plan(compile=True)`.
"""

TRIED = Path(__file__).parent.parent / "pages" / "speed_tried.md"
_FIGURE = re.compile(r"\{([^|{}]+)\|([^|{}]+)\|([^|{}]+)\}")


def tried(text: str, folder: Path) -> str:
    """The section with its figures from the files; entries that have none there are left out, and named."""
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    parts = []
    for entry in re.split(r"\n(?=- |\n)", text.strip()):
        try:
            found = _FIGURE.sub(lambda match: _figure_of(folder, *match.groups()), " ".join(entry.split()))
        except LookupError as error:
            print(f"left out of the page, {error}: {entry.strip().splitlines()[0]}")
            continue
        hang = "  " if found.startswith("- ") else ""
        parts.append(filled(found, hang))
    return "\n".join(part if part.startswith("- ") else f"{part}\n" for part in parts if part) + "\n"


def _figure_of(folder: Path, file: str, wanted: str, column: str) -> str:
    """One cell of one row of one file."""
    path = folder / f"{file.strip()}.json"
    if not path.exists():
        raise LookupError(f"there is no {path.name}")
    keys = dict(part.strip().split("=", 1) for part in wanted.split(";"))
    rows = json.loads(path.read_text(encoding="utf8"))["rows"]
    own = [row for row in rows if all(str(row.get(key)) == value for key, value in keys.items())]
    cell = _cell(own[0], column.strip()) if len(own) == 1 else ""
    if not cell:
        raise LookupError(f"{path.name} has {len(own)} rows with{wanted.rstrip()} and no one {column.strip()}")
    return cell


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
    parts.append(f"## What was tried and did not pay\n\n{tried(TRIED.read_text(encoding='utf8'), folder)}")
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
    if ahead := report.get("prepared"):
        about += f" Compiled ahead by {ahead['workers']} processes at once, {ahead['seconds']:.0f} s in all."
    text = filled(about) + "\n\n"
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
