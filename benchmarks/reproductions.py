"""The papers' experiments, one after another, and the pages that are written from their results.

    python benchmarks/reproductions.py --only damping/table2 margins/affine --budget short --device cuda --runs runs
    python benchmarks/reproductions.py --only damping/table1 damping/figure9 --runs runs --until 450
    python benchmarks/reproductions.py --only damping/figure11 --device cuda --more --seeds 1      a seed more
    python benchmarks/reproductions.py --page results docs         the pages and their figures, from the files
    python benchmarks/reproductions.py --judge results             the claims anew from the rows that were measured

Every result is written as soon as it is there, to OUT/PAPER/ITEM.json. An experiment that fails is told of at the end,
and the next one goes on. With --runs a call that was killed goes on where it was. After --until seconds nothing more is
begun: what is under way is finished, those experiments that can be judged on some of their runs (VGG-16 of damping,
weight decays on CIFAR-100) are written with the runs that there are, and the rest is named. --more adds seeds to the
results that are in OUT and judges all of them together: a short job can leave the next seeds to another. Data sets are
found through RITZ_DATA or --data, a folder in torchvision's layout. `ritz reproduce` runs one paper and shows numbers.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ritz.nonfinite import in_numbers, in_words
from ritz.papers import experiments
from ritz.papers.experiment import Experiment, Setting, write_result
from ritz.papers.pages import read_result, read_results, write_pages

ROOT = Path(__file__).parent.parent


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments that are named PAPER/ITEM or PAPER, in the order of the names; all where there are none."""
    if not names:
        return list(experiments.EXPERIMENTS)
    found = [one for name in names for one in experiments.find(*name.split("/", 1))]
    return list(dict.fromkeys(found))


def run(found: Sequence[Experiment], settings: Callable[[Experiment], Setting], out: Path) -> list[str]:
    """Run each and write what came out; returns the names of those that failed."""
    failed = []
    for number, one in enumerate(found, 1):
        name = f"{one.paper}/{one.item}"
        print(f"[{number} of {len(found)}] {name}: {one.title}", flush=True)
        try:
            setting = settings(one)
            if setting.time_is_up:
                print("time is up: not run", flush=True)
                continue
            outcome = experiments.reproduce(one, setting, _say())
            if setting.left:
                print(f"time is up: {len(setting.left)} not begun: {', '.join(setting.left)}", flush=True)
            if len(outcome.rows) == (len(setting.before["rows"]) if setting.before else 0):
                continue
            target = outcome.write(out)
        except Exception:  # another one may do better
            traceback.print_exc()
            failed.append(name)
            continue
        said = _counted(Counter(claim.verdict for claim in outcome.claims))
        print(f"wrote {target} after {outcome.seconds:.0f} s: {said}", flush=True)
    return failed


def judge(folder: Path) -> list[str]:
    """Judge all results of a folder again; returns a line for each file that has changed."""
    told = []
    for result in read_results(folder):
        path = folder / result["paper"] / f"{result['item']}.json"
        verdicts = Counter(one["verdict"] for one in result["claims"])
        again = experiments.judge(result)
        if in_words(in_numbers(again)) != in_words(in_numbers(result)):
            write_result(again, folder)
            now = Counter(one["verdict"] for one in again["claims"])
            told.append(f"{path}: {_counted(verdicts)}; now {_counted(now)}")
    return told


def _counted(verdicts: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))


def _say(every: float = 10.0) -> Callable[[str, int, int], None]:
    """A line at the start and the end of each stage, and every so many seconds between."""
    start = last = time.monotonic()
    stage = ""

    def say(what: str, done: int, total: int) -> None:
        nonlocal last, stage
        now = time.monotonic()
        if what != stage or done == total or now - last >= every:
            last, stage = now, what
            print(f"  {done} of {total} {what}, {now - start:.0f} s", flush=True)

    return say


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PAPER/ITEM", help="or PAPER for all of it")
    parser.add_argument("--budget", choices=("smoke", "short", "paper"), default="short")
    parser.add_argument("--data", type=Path, help="folder of data sets; RITZ_DATA where it is not given")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="training runs at a time, each in a process of its own")
    parser.add_argument("--fast", action="store_true", help="train in bfloat16, compiled, where a recipe allows it")
    parser.add_argument("--runs", type=Path, help="folder in which training runs are kept and resumed")
    parser.add_argument("--more", action="store_true", help="add seeds to the results in OUT, after those they have")
    parser.add_argument("--seeds", type=int, help="how many, in the place of the budget's own number")
    parser.add_argument("--until", type=float, metavar="SECONDS", help="from the start, after which nothing is begun")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument("--page", type=Path, nargs=2, metavar=("RESULTS", "DOCS"))
    parser.add_argument("--judge", type=Path, metavar="RESULTS")
    parser.add_argument("--quick", action="store_true", help="the pages from the committed results, in build: seconds")
    args = parser.parse_args()
    if args.quick:
        args.page = (ROOT / "results", ROOT / "build" / "benchmarks")
    if args.judge:
        print("\n".join(judge(args.judge)) or "nothing has changed")
        return 0
    if args.page:
        for path in write_pages(*args.page):
            print(f"wrote {path}")
        return 0
    given = ("budget", "data", "device", "seeds", "runs", "workers", "fast", "commit")

    until = None if args.until is None else time.time() + args.until

    def settings(one: Experiment) -> Setting:
        before = read_result(args.out, one) if args.more else None
        return Setting(**{name: getattr(args, name) for name in given}, until=until, before=before)

    try:
        found = chosen(args.only)
        for one in found:
            settings(one)
    except ValueError as error:
        parser.error(str(error))
    failed = run(found, settings, args.out)
    if failed:
        print(f"{len(failed)} of {len(found)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
