"""What the benchmark scripts share: options, what is said of a run, its file, a line now and then, parts of pages."""

import argparse
import json
import platform
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ritz.nonfinite import in_numbers, in_words
from ritz.provenance import own_commit
from ritz.results import Estimate, from_samples

QUICK = Path("build/benchmarks")


def parser(description: str | None, quick: str, *, page: bool = True) -> argparse.ArgumentParser:
    """With the options that every script has: --commit, --out and --quick, and --page for those that write one."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--commit", default=None, help="of the code, where git cannot say")
    made.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    if page:
        made.add_argument("--page", type=Path, nargs=2, metavar=("RESULTS", "DOCS"))
    made.add_argument("--quick", action="store_true", help=quick)
    return made


def about(args: argparse.Namespace, kept: Iterable[str]) -> dict[str, Any]:
    """The settings that are kept, and commit, version of torch and machine of a run."""
    return {
        "settings": {key: getattr(args, key) for key in kept},
        "commit": args.commit or own_commit(),
        "torch": torch.__version__,
        "machine": machine(getattr(args, "device", "cpu")),
    }


def machine(device: str) -> str:
    """In a word or two."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


def read(path: Path) -> dict[str, Any]:
    """A report as it is on file."""
    return in_numbers(json.loads(path.read_text(encoding="utf8")))


def write(report: dict[str, Any], path: Path) -> None:
    """A report, one row of its lists of rows to a line, so that a change can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for key, value in in_words(report).items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n  " + ",\n  ".join(map(_json, value)) + "\n ]" if rows else _json(value)
        lines.append(f" {_json(key)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf8")


def write_tree(report: dict[str, Any], path: Path) -> None:
    """A report that is a tree, one number to a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_json(in_words(report), indent=1) + "\n", encoding="utf8")


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def rounded(value: Any, spec: str) -> Any:
    """Numbers as a format has them, ".4f" or ".6g", all the way down."""
    if isinstance(value, dict):
        return {key: rounded(inner, spec) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner, spec) for inner in value]
    return float(format(value, spec)) if isinstance(value, float) else value


def mean(values: Sequence[float]) -> Estimate:
    """Of independent values; its 95 % interval is by Student's t."""
    return from_samples("mean", torch.tensor(values, dtype=torch.float64))


def filled(text: str, hang: str = "") -> str:
    """In lines of 120 columns, those after the first with `hang` before them; no word is broken."""
    return textwrap.fill(text, 120, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)


def say(what: str, every: int) -> Callable[[int, int], None]:
    """A line at the end, and at every so many steps before it."""
    start = time.perf_counter()

    def said(done: int, total: int) -> None:
        if done == total or not done % every:
            print(f"{done} of {total} {what}, {time.perf_counter() - start:.0f} s", flush=True)

    return said
