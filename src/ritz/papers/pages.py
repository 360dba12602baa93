"""The pages of reproductions, written from the result files and from nothing else.

results/PAPER/ITEM.json          as `Outcome.write` leaves them
docs/reproductions.md            what is asked first, what was run and how it came out, what was not run
docs/reproductions_PAPER.md      every claim of the paper beside its number
docs/reproductions_PAPER_ITEM.png
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, get_args

from ..files import write_text
from ..nonfinite import in_numbers
from ..reading import brief, read_json
from ..results import show
from ..schema import check_fields, fits
from .base import Claim, Verdict, allowed
from .catalogue import CATALOGUE, Shown
from .experiment import Experiment, read_claim
from .experiments import EXPERIMENTS, PAPERS
from .highlights import HIGHLIGHTS, Highlight

Result = dict[str, Any]

PAGE = "reproductions.md"  # the first one
MANY = 40  # claims that are folded away
VERDICTS: tuple[str, ...] = get_args(Verdict)
PLURAL = dict(zip(VERDICTS, ("hold", "hold in direction", "are refuted", "are not decidable"), strict=True))

_REMEDY = "remove it, or run the experiment again"
_PARTS = {
    "paper": str, "item": str, "source": str, "machine": str, "seconds": float, "setting": Mapping[str, Any],
    "versions": Mapping[str, Any], "claims": list[dict[str, Any]], "seeds": list[int], "title": str,
    "commit": str | None, "left": list[str], "rows": list[dict[str, Any]],
}  # fmt: skip
_ABSENT = {"seeds": [], "title": "", "left": [], "rows": []}  # what files may lack

_TOP = """# The papers, reproduced

The experiments of the four papers, trained and measured again. Each printed number and each statement of a paper is a
claim with a verdict. The papers' mathematics has [a page of its own](theory.md).

| verdict | meaning |
| --- | --- |
| holds | the whole 95 % interval of our measurement agrees with the paper, within the tolerance |
| holds in direction | the number differs, but the difference or ratio is on the paper's side |
| **refuted** | no part of the interval agrees with the paper |
| **not decidable** | all other cases: part of the interval agrees, part does not |

Intervals are over seeds, batches or random vectors. Verdicts are computed from the numbers. The tolerances are our own
and are printed beside the expected value. Some printed numbers have two readings. The verdict then uses the nearer one,
and the evidence gives the other. Where a paper names the held-out set of an accuracy or a gap, that set is judged: the
last 5,000 training images for "validation". The other set is a question of ours. Claims marked *ours* are our own
questions, controls and bounds. No paper states them, and they are counted separately.

| budget | how much is run |
| --- | --- |
| paper | as published or, where the paper is silent, at the size that the module under `ritz.papers` states |
| short | fewer epochs, seeds or images; the evidence says how many |
| smoke | seconds, to show that the experiment runs; its verdicts mean nothing |

At *short*, orders and differences are judged on the reduced runs, for and against the paper. A number that only the
full training can reach, such as an accuracy after 300 epochs, is then *not decidable*, and the evidence begins with
what the run lacks.

Two papers may print the same runs. `pac-bayes` allcnn, preresnet and wideresnet, at either size, use the rows of
`false-friend`, and mlp repeats its seeds: they are not independent evidence.

`ritz reproduce PAPER ITEM` runs an experiment. `python benchmarks/reproductions.py --page results docs` writes these
pages from the files in `results`, which contain settings, recipes, curves and all measured rows. Times are those of the
last call: they exclude runs that an earlier call had finished, and other experiments may have shared the device.
"""


_ALSO = {  # what a paper's page says besides
    "false-friend": " Seed 001 is, by the numbers of its equations and figures, the supplement of seed 002. It shows "
    "the same spectra as seed 000 and is reproduced with it.",
    "damping": ' Two settings with a minus sign between them, as in "SGD - Adam", are compared by their test accuracy, '
    "in percentage points at equal seed, unless the claim names something else.",
}

_SHORT = """## In short

The most common questions, with the claims that answer them, for and against the papers. A "refuted" is about the runs
made here: *short* is far from the papers' training. The section behind each link says how far, and gives all claims
with their evidence.
"""


def read_results(folder: Path, table: Sequence[Experiment] = EXPERIMENTS) -> list[Result]:
    """All results of a folder, in the order of the table of experiments, those that it does not have at the end.

    Raises:
        ValueError: If a file is no result, or lies where another result belongs.
    """
    found = []
    for path in sorted(folder.glob("*/*.json")):
        result = _read(path)
        place = (result["paper"], result["item"])
        if place != (path.parent.name, path.stem):
            raise ValueError(f"{path} has the result of {'/'.join(place)}: name it PAPER/ITEM.json")
        found.append(result)
    order = {(one.paper, one.item): number for number, one in enumerate(table)}
    papers = list(PAPERS)
    return sorted(
        found,
        key=lambda r: (_place(papers, r["paper"]), order.get((r["paper"], r["item"]), len(order)), r["item"]),
    )


def read_result(folder: Path, experiment: Experiment) -> Result | None:
    """The result of an experiment, if the folder has one.

    Raises:
        ValueError: If the file is no result.
    """
    path = folder / experiment.paper / f"{experiment.item}.json"
    return _read(path) if path.exists() else None


def _read(path: Path) -> Result:
    """A file of a result, if it has all that the page tells of it."""
    found = read_json(path, _REMEDY)
    try:
        for key, kind in _PARTS.items():
            if not fits(found.get(key, _ABSENT.get(key)), kind):
                raise ValueError(f"its {key} is {brief(repr(found.get(key)), 40)}")
        for part, key in (("setting", "budget"), ("versions", "torch")):
            if not isinstance(found[part][key], str):
                raise ValueError(f"its {part} has no {key}")
        for row in found.get("rows", []):
            if "page" in row and not (fits(row["page"], str) and fits(row.get("file"), str)):
                raise ValueError(f"a row's page is {brief(repr(row['page']), 40)}")
        for claim in found["claims"]:
            if claim["verdict"] not in VERDICTS:
                raise ValueError(f"a verdict is {brief(repr(claim['verdict']), 40)}")
            check_fields(Claim, vars(read_claim(claim)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is not a result of `ritz reproduce` ({brief(error)}); {_REMEDY}") from error
    result: Result = found
    return result


def write_pages(results: Path, docs: Path, table: Sequence[Experiment] = EXPERIMENTS) -> list[Path]:
    """The pages and their figures, from the files in `results`; returns what was written."""
    found = read_results(results, table)
    docs.mkdir(parents=True, exist_ok=True)
    drawings = {(one.paper, one.item): one.figure for one in table if one.figure is not None}
    written = []
    for result in found:
        draw = drawings.get((result["paper"], result["item"]))
        if draw is not None:
            written.append(docs / figure_name(result))
            draw(in_numbers(result["rows"])).savefig(written[-1], dpi=100, metadata={"Software": None})
    return [*written, *(write_text(docs / name, text) for name, text in pages(found, table).items())]


def pages(
    results: Sequence[Result], table: Sequence[Experiment] = EXPERIMENTS, catalogue: Sequence[Shown] = CATALOGUE,
    highlights: Sequence[Highlight] = HIGHLIGHTS,
) -> dict[str, str]:  # fmt: skip
    """The pages as Markdown, by the names of their files: the first one, and one for each paper that has a result.

    Example:
        >>> [(name, text.splitlines()[0]) for name, text in pages([]).items()]
        [('reproductions.md', '# The papers, reproduced')]
    """
    ended = ["## Not run\n", _not_run(results, table, catalogue)]
    found = {PAGE: "\n".join([_TOP, _short(results, highlights), _summary(results), *ended]) + "\n"}
    for paper in PAPERS:
        own = [result for result in results if result["paper"] == paper]
        if own:
            found[page_name(paper)] = _of_paper(paper, own, table, catalogue)
    return found


def page_name(paper: str) -> str:
    """The file with all claims of a paper."""
    return f"reproductions_{paper}.md"


def figure_name(result: Mapping[str, Any]) -> str:
    """The file of a result's figure."""
    return f"reproductions_{result['paper']}_{result['item']}.png"


# ----------------------------------------------------------------------------------------------------- parts


def _of_paper(paper: str, own: Sequence[Result], table: Sequence[Experiment], catalogue: Sequence[Shown]) -> str:
    """All experiments of a paper."""
    drawn = {one.item for one in table if one.paper == paper and one.figure is not None}
    less = {one.item: one.short for one in table if one.paper == paper}
    counted = f"{_said(_counted(own))}".replace("are ", "")
    about = (
        f"{len(own)} experiments; of the paper's claims {counted}. [What the verdicts mean, and all papers]({PAGE})."
        f"{_ALSO.get(paper, '')}"
    )
    listed = [f"- [{result['item']}](#{_anchor(_name(result))}): {_title(result)}" for result in own]
    parts = [f"# {paper}: {' and '.join(PAPERS[paper])}\n", fill(about, 120) + "\n", "\n".join(listed) + "\n"]
    for result in own:
        item = result["item"]
        ids = [row.id for row in catalogue if f"{paper}/{item}" in row.items]
        parts.append(_section(result, ids, item in drawn, less.get(item, "")))
    return "\n".join(parts)


def _name(result: Result) -> str:
    return f"{result['paper']} {result['item']}"


def _title(result: Result) -> str:
    return str(result.get("title") or result["item"])


def _link(result: Result) -> str:
    """Where its section is."""
    return f"{page_name(result['paper'])}#{_anchor(_name(result))}"


def _summary(results: Sequence[Result]) -> str:
    """A line for each experiment, and how many claims there are of each verdict."""
    rows = []
    for result in results:
        counted = _counted([result])
        rows.append(
            (
                f"[{_name(result)}]({_link(result)})", result["source"], result["setting"]["budget"],
                str(len(result.get("seeds", [])) or ""), result["machine"], result.get("commit") or "", _time(result),
                *(str(counted[verdict] or "") for verdict in VERDICTS),
                str(_counted([result], ours=True).total() or ""),
            )
        )  # fmt: skip
    theirs, ours = _counted(results), _counted(results, ours=True)
    head = ("experiment", "source", "budget", "seeds", "machine", "commit", "time", *VERDICTS, "ours")
    count = f"{theirs.total()} claims of the papers in {len(results)} experiments: {_said(theirs)}."
    if ours:
        count += f" Our own questions, in the last column only: {ours.total()}, of which {_said(ours)}."
    count = fill(count, 120) + "\n\n" if results else ""
    return count + _table(head, rows, right=2 + len(VERDICTS)) + "\n"


def _counted(results: Sequence[Result], ours: bool = False) -> Counter[str]:
    """How many claims there are of each verdict, of the papers or of ours."""
    claims = [claim for result in results for claim in result["claims"]]
    return Counter(claim["verdict"] for claim in claims if claim.get("ours", False) == ours)


def _said(counted: Counter[str]) -> str:
    return ", ".join(f"{counted[verdict]} {words}" for verdict, words in PLURAL.items() if counted[verdict])


def _short(results: Sequence[Result], highlights: Sequence[Highlight]) -> str:
    """What is asked first, answered by claims; nothing where none of it was run."""
    rows = []
    by_place = {f"{result['paper']}/{result['item']}": result for result in results}
    for one in highlights:
        claim = one.answer(results)
        if claim is not None:
            _, text, expected, measured, verdict, _ = _claim(claim)
            result = by_place[one.place]
            link = f"{'ours: ' if claim.get('ours') else ''}[{text}]({_link(result)})"
            rows.append((one.question, link, result["setting"]["budget"], expected, measured, verdict))
    head = ("question", "claim", "budget", "expected", "measured", "verdict")
    return f"{_SHORT}\n{_table(head, rows)}\n\n## All experiments\n" if rows else ""


def _section(result: Result, ids: Sequence[str], drawn: bool, less: str) -> str:
    """One experiment."""
    seeds = result.get("seeds", [])
    about = [f"budget {result['setting']['budget']}"]
    if seeds:
        about.append(f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed")
    about += [result["machine"], f"torch {result['versions']['torch']}", _time(result)]
    if result.get("left"):
        about.append(f"{len(result['left'])} runs not started in time")
    where = result["source"] + (f" ({', '.join(ids)})" if ids else "")
    title = _title(result)
    said = f"{title[:1].upper()}{title[1:]}: {where}. Run at {', '.join(about)}."
    if less and result["setting"]["budget"] == "short":
        said += f" Reduced from the paper budget: {less}."
    for row in result.get("rows", []):
        if "page" in row:  # rows and figures of their own
            said += f" Curves and figures are on [a page of their own]({Path(row['page']).name}), from `{row['file']}`."
    parts = [f"## {_name(result)}\n", fill(said, 120, break_long_words=False, break_on_hyphens=False) + "\n"]
    if drawn:
        parts.append(f"![{title}]({figure_name(result)})\n")
    rows = [_claim(claim) for claim in result["claims"]]
    claims = _table(("where", "claim", "expected", "measured", "verdict", "evidence"), rows) + "\n"
    if len(rows) > MANY:
        claims = f"<details><summary>{len(rows)} claims</summary>\n\n{claims}\n</details>\n"
    return "\n".join([*parts, claims])


def _claim(claim: Mapping[str, Any]) -> tuple[str, ...]:
    verdict = claim["verdict"] if claim["verdict"].startswith("holds") else f"**{claim['verdict']}**"
    short = f"Short of the paper: {claim['short_of']}. " if claim.get("short_of") else ""
    evidence = short + claim.get("evidence", "")
    read = read_claim(claim)
    return read.source, claim["text"], allowed(read), measured(claim), verdict, evidence


def measured(claim: Mapping[str, Any]) -> str:
    """The number of a claim as a file has it, and its interval to two digits of its width.

    Example:
        >>> measured({"measured": 0.92345, "interval": [0.9, 0.95]}), measured({"measured": True})
        ('0.923 (0.900 to 0.950)', 'yes')
    """
    if "interval" not in claim:
        return _number(claim["measured"])
    value, low, high = (float(number) for number in (claim["measured"], *claim["interval"]))
    width = (high - low) / 2
    if width == 0:
        return _number(value)
    if math.isnan(value):
        return "no number"
    if math.isnan(width) or (high == math.inf and low in (-math.inf, 0.0)):  # of a mean, or of a geometric one
        return f"{_number(value)} (too few seeds)"
    if not math.isfinite(width) or not 1e-4 < width < 1e6:
        return f"{_number(value)} ({_number(low)} to {_number(high)})"
    digits = max(0, 1 - math.floor(math.log10(width)))
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return show(float(value)) if math.isfinite(float(value)) else str(float(value))


def _not_run(results: Iterable[Result], table: Sequence[Experiment], catalogue: Sequence[Shown]) -> str:
    """Of what the papers show, and of the experiments here, all that has no result."""
    done = {f"{result['paper']}/{result['item']}" for result in results}
    known = {f"{one.paper}/{one.item}": one for one in table}
    rows, told = [], set(done)
    for row in catalogue:
        if not done & set(row.items):
            there = next((item for item in row.items if item in known), "")
            told.add(there)
            why = row.reason or "no experiment here covers it"
            rows.append((row.paper, row.id, row.where, row.what, _waiting(there) if there else why))
    for name, one in known.items():  # other runs of what has a result
        if name not in told:
            rows.append((one.paper, "", one.source, one.title, _waiting(name)))
    rows.sort(key=lambda row: _place(list(PAPERS), row[0]))
    if not rows:
        return "Nothing: everything that the papers show is covered."
    return _table(("paper", "", "where", "what", "why"), rows)


def _waiting(name: str) -> str:
    return f"`ritz reproduce {name.replace('/', ' ')}` has no result yet"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """Markdown; the last `right` columns are numbers."""
    lines = [head, *rows]
    text = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]
    text.insert(1, "|" + " --- |" * (len(head) - right) + " ---: |" * right)
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in text)


def _time(result: Mapping[str, Any]) -> str:
    seconds = result["seconds"]
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _anchor(heading: str) -> str:
    """As Markdown makes it of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
