"""What an examination found, as data and as tables."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..storage import Result
from ..tables import Table

Status = Literal["ok", "note", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        status: ok; note, good to know; warning, the run works and could be better; failed, its numbers would be wrong
            or there would be none.
        text: What was seen.
        remedy: What to do about it.

    Example:
        >>> Finding("finite", "failed", "weight is not finite", "load other weights").status
        'failed'
    """

    name: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Trial:
    """One way of taking Hessian products, tried on one batch.

    Attributes:
        route: forward, reverse or difference.
        seconds: Seconds of `rows` products on that batch; None where the route does not work.
        rows: Vectors that were multiplied at once.
        asymmetry: |H - H'|_F relative to |H|_F, from u'Hv - v'Hu of a few random pairs.
        nonlinearity: |H(2u - 3v) - 2Hu + 3Hv| relative to their size.
        error: Why it does not work.
        chosen: Whether a run with route="auto" takes it.

    Example:
        >>> Trial("reverse", seconds=0.02, rows=8, chosen=True).works
        True
    """

    route: str
    seconds: float | None = None
    rows: int = 1
    asymmetry: float | None = None
    nonlinearity: float | None = None
    error: str = ""
    chosen: bool = False

    @property
    def works(self) -> bool:
        """Whether it gave products."""
        return self.seconds is not None


@dataclass(frozen=True)
class Projection:
    """What a command will take.

    Attributes:
        command: spectrum, measure or measure --audit.
        seconds: Expected.
        memory: Bytes beside what the model and the data take already.
        how: What was measured, and how it was scaled.

    Example:
        >>> Projection("spectrum", 75.0, 2e9, "...").shown
        ('about 75 s', '1.9 GiB')
    """

    command: str
    seconds: float
    memory: float
    how: str

    @property
    def shown(self) -> tuple[str, str]:
        """Time and memory in words."""
        return f"about {duration(self.seconds)}", size(self.memory)


@dataclass(frozen=True, kw_only=True)
class Checkup(Result):
    """All findings about one risk.

    Attributes:
        model: Which model, with how many parameters.
        convention: Which data and mode.
        findings: In the order in which they were looked for.
        trials: Trials of the routes of Hessian products; none where the loss itself does not work.
        projections: Projections of `ritz spectrum` and `ritz measure`, and of its audit where one can be made.

    Example:
        >>> found = Checkup(model="Linear, 4 parameters", convention="", findings=(Finding("loss", "ok", "0.69"),))
        >>> found.healthy, found.advice()
        (True, [])
        >>> found
        Checkup(Linear, 4 parameters; sound: no problem found)
    """

    model: str
    convention: str
    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...] = ()
    projections: tuple[Projection, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing failed."""
        return not any(finding.status == "failed" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """Whether a run would be sound, as a sentence."""
        if not self.healthy:
            return "not sound: numbers would be wrong, or none"
        warned = sum(finding.status == "warning" for finding in self.findings)
        return f"sound, with {count(warned, 'warning')}: see what is to do" if warned else "sound: no problem found"

    def __getitem__(self, name: str) -> Finding:
        found = {finding.name: finding for finding in self.findings}
        if name not in found:
            raise KeyError(f"{name} was not examined; these were: {', '.join(found)}")
        return found[name]

    def advice(self) -> list[str]:
        """What to change, the gravest first."""
        order = {"failed": 0, "warning": 1, "note": 2, "ok": 3}
        graver = sorted(self.findings, key=lambda finding: order[finding.status])
        return [f"{finding.name}: {finding.remedy}" for finding in graver if finding.remedy]

    def table(self) -> Table:
        """Every finding."""
        rows = [(finding.name, finding.status, finding.text) for finding in self.findings]
        notes = [f"to do: {line}" for line in self.advice()]
        title = "; ".join(filter(None, (self.model, self.convention)))
        return Table(("what", "status", "seen"), rows, title=title, notes=notes)

    def costs(self) -> Table:
        """Routes and projections."""
        header = ("what", "time", "memory", "how")
        rows = [(f"ritz {p.command}", *p.shown, p.how) for p in self.projections]
        rows += [(_route_name(trial), *_route_cells(trial)) for trial in self.trials]
        return Table(header, rows, title="what it takes", numeric=(1, 2))

    def tables(self) -> list[Table]:
        """Findings, routes and projections for a page, each in a table of its own, as far as they are there."""
        columns = 4 if self.advice() else 3
        seen = [(one.name, one.status, one.text, one.remedy)[:columns] for one in self.findings]
        routes = [(_route_name(trial), *_route_cells(trial)[::2], *_route_errors(trial)) for trial in self.trials]
        costs = [(f"ritz {p.command}", *p.shown, p.how) for p in self.projections]
        made = [
            Table(("what", "status", "seen", "to do")[:columns], seen, title="What was checked"),
            Table(("route", "time", "how", "not symmetric by", "not linear by"), routes, title="Ways to multiply",
                  numeric=(1, 3, 4)),
            Table(("command", "time", "memory", "how"), costs, title="Time and memory", numeric=(1, 2)),
        ]  # fmt: skip
        return [table for table in made if table.rows]

    def plain(self) -> dict[str, Any]:
        """As a tree of numbers and text."""
        return {"healthy": self.healthy, **asdict(self)}

    @classmethod
    def of(cls, tree: dict[str, Any]) -> "Checkup":
        """From the tree that `plain` gives."""
        parts: dict[str, tuple[Any, ...]] = {
            name: tuple(kind(**row) for row in tree[name])
            for name, kind in (("findings", Finding), ("trials", Trial), ("projections", Projection))
        }
        return cls(model=tree["model"], convention=tree["convention"], **parts)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.costs()}" if self.projections else str(self.table())

    def __repr__(self) -> str:
        return f"Checkup({self.model}; {self.verdict})"


def _route_name(trial: Trial) -> str:
    return f"{trial.route} route{' *' if trial.chosen else ''}"


def _route_cells(trial: Trial) -> tuple[str, str, str]:
    if trial.seconds is None:
        return "-", "", trial.error
    how = f"{count(trial.rows, 'product')} on one batch{'; * the one that is taken' if trial.chosen else ''}"
    return f"{1e3 * trial.seconds:.3g} ms" if trial.seconds < 1 else f"{trial.seconds:.3g} s", "", how


def _route_errors(trial: Trial) -> list[str]:
    return ["" if error is None else f"{error:.1e}" for error in (trial.asymmetry, trial.nonlinearity)]


def count(number: int, thing: str) -> str:
    """How many there are of a thing.

    Example:
        >>> count(1, "measure"), count(2, "measure")
        ('1 measure', '2 measures')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def size(number: float) -> str:
    """Bytes in words.

    Example:
        >>> size(500), size(3e6), size(5e9)
        ('0.5 KiB', '2.9 MiB', '4.7 GiB')
    """
    for unit in ("KiB", "MiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} GiB"


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> duration(0.05), duration(3.21), duration(600), duration(10800)
        ('0.1 s', '3.2 s', '10 min', '3.0 h')
    """
    if seconds < 120:
        return f"{max(seconds, 0.1):.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
