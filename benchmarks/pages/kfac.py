"""The page of what training by curvature costs: figure, tables and text, all from the result file."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reports
from kfac import FILE, PRECISIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def page(folder: Path, target: Path) -> None:
    """The figure and the tables, from the result file."""
    report = reports.read(folder / FILE)
    target.mkdir(parents=True, exist_ok=True)
    figure(report).savefig(target / "kfac.png", dpi=100)
    tables = {
        "bars": bars(report),
        "loops": loops_table(report), "memory": memory_table(report),
        "where": "\n\n".join(where_table(report, name) for name in report["runs"]),
    }  # fmt: skip
    named = [PRECISION_NAMES[name] for name in report["runs"]]
    named += [f"*{name}* was not measured." for name in PRECISIONS if name not in report["runs"]]
    tables |= {"shares": damping_table(report), "busy": operations_table(report), "precisions": "\n".join(named)}
    tables["says"] = "" if " CPU, " in report["machine"] else SAYS  # it is about the committed run
    text = PAGE.format(**{**report, **report["settings"], **tables})
    (target / "kfac.md").write_text(text, encoding="utf8")


PRECISION_NAMES = {
    "default": "*default* is torch's precision: TF32 in convolutions, not in matrix products.",
    "tf32": "*tf32* allows TF32 in both.",
    "float32": "*float32* allows it in neither.",
}

PAGE = """# What training with curvature costs

The network is VGG-16 for CIFAR-100 without normalisation, P = {num_params:,}, with float32 weights and batches of
{batch_size}; the inputs are noise of the right shape. The unit is one step of SGD with momentum. KFAC runs at the
intervals of seed 004's authors: statistics every {factor_every} steps and eigenvectors every {inverse_every}. All times
include these refreshes. The training loop is plain: eager mode, contiguous layout, cuDNN's default choice of
algorithms.

All cases take turns in {rounds} rounds of one run. A ratio is relative to SGD in the same round; the tables give its
median over rounds, with minimum and maximum.

{precisions}

In both, KFAC's factors and its products with eigenvectors use TF32; the eigendecompositions do not.

Written by `python benchmarks/kfac.py --page benchmarks/results docs` from `benchmarks/results/kfac.json`: {machine},
torch {torch}, commit {commit}.

![Where a step of KFAC goes](kfac.png)

Milliseconds of an average step by purpose, measured with a synchronisation after each step. The dotted line is four
steps of SGD.

## Targets

{bars}

Each loop of {inverse_every} steps ({steps} for a penalty) is timed as a whole, with one synchronisation at the end. A
window of AutoDamping is all its work in {inverse_every} steps, timed alone; its share is relative to that many steps of
the loop.
{says}
## The steps

Times in milliseconds. The column *whole loop* is the one used for the targets. The other columns synchronise with the
device after every step. They give medians over the steps of a round; for the average step of KFAC, refreshes included,
they give the mean.

{loops}

## Learned damping

Milliseconds for a window of {inverse_every} steps, and its share of the time of the loop.

{shares}

## Where the time goes

Milliseconds for the parts of a step, with a synchronisation after each part. A penalty is part of `forward`, and again
of `backward`. KFAC computes its statistics inside `backward`; eigenvectors and products with them are part of `step`.

{where}
{busy}
## Memory

GiB on the device after three steps, and at the peak. Each case runs alone; images and weights are included.

{memory}
"""

SAYS = """
## Results

Except for the cells in bold, every target is met in both precisions. With a network of this size, the GPU waits for the
host, which launches its kernels one by one: SGD takes 4.8 ms per step, and the device is busy for 3.4 ms of them. The
remedy is therefore the same everywhere: the work of each step is recorded as a CUDA graph and replayed (`ritz.replay`).

- **Penalties.** In eager mode, a penalty on a quarter of the batch costs 5.6 steps of SGD in the GGN form and 12 in the
  Hessian form. Replayed, it costs 2.0 and 3.9. Convolutions use special derivative formulas (`ritz.convolutions`),
  because torch's second derivative in the weight is a convolution with a kernel as large as the image. `on_outputs`
  shares the graph of the user's forward pass, which cannot be recorded, and misses its target: if the host is the
  bottleneck, the call with its own forward pass is faster.
- **AutoDamping.** A refresh uses 4 batches: 8 products of 64 images with 4 probes. It takes 99 ms, compared with 480 ms
  for 100 steps of SGD. In eager mode it takes 232 ms.
- **KFAC with full eigendecompositions.** An average step takes 15.3 ms: 6.7 ms for eigenvectors and 1.6 ms for
  statistics. The step itself, with two products with eigenvectors on either side of each gradient, is replayed in TF32
  (`tf32=True`) and takes 1.6 ms of the device. Five decompositions run in parallel, each on its own stream and in its
  own thread, which the profiler below does not show. A step with new eigenvectors takes 692 ms. It took 924 ms in a run
  where the decompositions followed one another (`benchmarks/results/kfac-a3326dd.json`).
- **With `refresh="qr"`**, a step with new eigenvectors takes 181 ms; in that earlier run it took 350 ms. Eigenvectors
  are 1.6 ms of an average step of 9.7 ms.

**On a faster host, the ratios are higher**, because a faster host does not hide the work of the device. In the tf32
part of an earlier run (`benchmarks/results/kfac-30c6c76.json`), SGD took 3.7 ms, close to what the device needs, and
most targets were missed. KFAC took 15.9 and 10.0 ms with the same step, which is 4.3 and 2.7 steps of SGD. Penalties
cost 3.4 and 7.0 on the whole batch and 2.5 on a quarter; they have become some per cent cheaper since. Learned damping,
with 8 batches at that time, added 42 % to SGD. In the default part of that run, with SGD at 4.5 ms, the default calls
met all targets except the penalty on a quarter of the batch, at 2.1. KFAC has become cheaper since, as described above;
a penalty on such a host would still miss its target.

All of this applies to models that contain only torch.nn's modules, which are known to run the same operations at each
call. Other models run eagerly, unless `TracePenalty(replay=True)` and `Plan(replay=True)` declare that they may be
recorded. KFAC's step does not need this. A recording keeps the memory of its intermediate results, see below.
"""


def spread(values: list[float], digits: int = 2) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


BARS = (
    ("KFAC, full eigendecompositions", "KFAC, eigh", 4.0),
    ('KFAC, `refresh="qr"`', "KFAC, qr", 2.5),
    ("penalty, GGN, whole batch", "GGN, all", 3.3),
    ("penalty, GGN, whole batch, `on_outputs`", "GGN, all, on_outputs", 3.3),
    ("penalty, GGN, a quarter (default)", "GGN, a quarter", 2.0),
    ("penalty, GGN, a quarter, `replay=False`", "GGN, a quarter, eager", 2.0),
    ("penalty, Hessian, whole batch", "Hessian, all", 6.0),
    ("penalty, Hessian, a quarter", "Hessian, a quarter", 6.0),
    ("penalty, Hessian, a quarter, `replay=False`", "Hessian, a quarter, eager", 6.0),
)


def bars(report: dict[str, Any]) -> str:
    """What was promised and what was measured; bold is missed."""
    runs = report["runs"]
    lines = ["| in steps of SGD | target | " + " | ".join(runs) + " |", "| --- | ---: |" + " ---: |" * len(runs)]
    for title, name, bar in BARS:
        cells = [_judged(run["loops"][name]["ratio"], bar) for run in runs.values()]
        lines.append(f"| {title} | {bar:g} | " + " | ".join(cells) + " |")
    for loop, bar in (("SGD", 40.0), ("KFAC, eigh", 15.0)):
        for name in next(iter(runs.values()))["damping"]:
            cells = [_judged(shares(run, name, loop, report), bar, 0) for run in runs.values()]
            lines.append(f"| AutoDamping, {name}, % of {loop} | {bar:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\nBold: the target is missed."


def _judged(values: list[float], bar: float, digits: int = 2) -> str:
    text = spread(values, digits)
    return text if statistics.median(values) <= bar else f"**{text}**"


def shares(run: dict[str, Any], name: str, loop: str, report: dict[str, Any]) -> list[float]:
    every = report["settings"]["inverse_every"]
    return [100 * a / (b * every) for a, b in zip(run["damping"][name], run["loops"][loop]["mean"], strict=True)]


def loops_table(report: dict[str, Any]) -> str:
    lines = ["| | case | whole loop | single step | ratio of single steps |", "| --- | --- |" + " ---: |" * 3]
    for precision, run in report["runs"].items():
        for name, found in run["loops"].items():
            row = [spread(found["mean"]), spread(found["step"]), spread(found["step_ratio"])]
            lines.append(f"| {precision} | {name} | " + " | ".join(row) + " |")
            if "plain" not in found:
                continue
            for kind in ("plain", "statistics", "eigenvectors"):
                row = [spread(found[kind]), spread(found[f"{kind}_ratio"])]
                lines.append(f"| {precision} | {name}: a step with {kind} | | " + " | ".join(row) + " |")
    return "\n".join(lines).replace("a step with plain", "a step without refresh")


def damping_table(report: dict[str, Any]) -> str:
    loops = ("SGD", "KFAC, eigh", "KFAC, qr")
    lines = [
        "| | curvature | ms | " + " | ".join(f"% of {loop}" for loop in loops) + " |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    for precision, run in report["runs"].items():
        for name, times in run["damping"].items():
            row = [spread(times, 0), *(spread(shares(run, name, loop, report), 0) for loop in loops)]
            lines.append(f"| {precision} | {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def where_table(report: dict[str, Any], precision: str) -> str:
    lines = [f"| {precision} | forward | backward | step |", "| --- | ---: | ---: | ---: |"]
    for name, kinds in report["runs"][precision]["phases"].items():
        for kind, times in kinds.items():
            row = [f"{times[part]:.2f}" for part in ("forward", "backward", "step")]
            lines.append(f"| {name}: {kind} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def operations_table(report: dict[str, Any]) -> str:
    if "operations" not in report:
        return ""
    lines = ["\nMilliseconds for which the device is busy in a step, and with which operations, by torch's profiler.\n"]
    lines += [f"| {next(iter(report['runs']))} | busy | operations |", "| --- | ---: | --- |"]
    for name, found in report["operations"].items():
        named = ", ".join(f"{op.removeprefix('aten::')} {ms:.2f}" for op, ms, _ in found["operations"][:6])
        lines.append(f"| {name} | {found['busy']:.2f} | {named} |")
    return "\n".join(lines) + "\n"


def memory_table(report: dict[str, Any]) -> str:
    if not any(report["memory"].values()):
        return "Not measured: the run had no accelerator."
    lines = [f"| {next(iter(report['runs']))} | held | peak |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {found['held']:.2f} | {found['peak']:.2f} |" for name, found in report["memory"].items()]
    if not any(name.startswith("AutoDamping") for name in report["memory"]):
        lines.append("\nThe memory of AutoDamping was not measured.")
    return "\n".join(lines)


def pieces(run: dict[str, Any], name: str, settings: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of an average step, by what they are for."""
    found = {key: statistics.median(value) for key, value in run["loops"][name].items() if isinstance(value, list)}
    base = statistics.median(run["loops"]["SGD"]["step"])
    if name == "SGD":
        return {"the step of SGD": base}
    return {
        "the step of SGD": base,
        "products with eigenvectors": found["plain"] - base,
        "statistics": (found["statistics"] - found["plain"]) / settings["factor_every"],
        "new eigenvectors": (found["eigenvectors"] - found["statistics"]) / settings["inverse_every"],
    }


def figure(report: dict[str, Any]) -> "Figure":
    """The average step in pieces, a panel for each precision."""
    from matplotlib.figure import Figure

    runs = report["runs"]
    drawing = Figure(figsize=(3.2 * len(runs) + 0.6, 3.3), layout="constrained")
    axes = drawing.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    colors = dict(zip(pieces(runs[next(iter(runs))], "KFAC, eigh", report["settings"]), COLORS, strict=True))
    for ax, (precision, run) in zip(axes, runs.items(), strict=True):
        for place, name in enumerate(("SGD", "KFAC, eigh", "KFAC, qr")):
            bottom = 0.0
            for piece, height in pieces(run, name, report["settings"]).items():
                label = piece if place == 1 else None
                ax.bar(place, height, bottom=bottom, color=colors[piece], label=label, width=0.7)
                bottom += height
        ax.set(title=precision, xticks=range(3), xticklabels=("SGD", "KFAC\neigh", "KFAC\nqr"))
        ax.axhline(4 * statistics.median(run["loops"]["SGD"]["step"]), ls=":", color="0.3", lw=1)
        ax.grid(axis="y", alpha=0.3)
    axes[0].set_ylim(top=1.05 * axes[0].get_ylim()[1])  # no panel has its line at the edge
    axes[0].set_ylabel("milliseconds a step")
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return drawing


COLORS = ("#999999", "#56B4E9", "#009E73", "#D55E00")
