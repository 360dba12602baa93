"""One command from the first word to the exit status: the user's code, the run folder, progress, and what goes wrong.

0    done
1    numbers failed: a loss or product that is not finite, no measure that could be taken, no memory left, a check
     of `ritz doctor` that does not hold
2    refused: bad input, in one line `ritz COMMAND: what; what to do`; nothing was overwritten
130  stopped by Ctrl-C, 143 by SIGTERM (128 + the signal): the product in hand was finished and its state saved, what
     is known was printed and is in the run folder, and the same command goes on; a second signal ends it at once
"""

import contextlib
import errno
import json
import logging
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import StoppedError
from . import interrupts, screen, study
from .specs import Common
from .words import typed, typed_notes

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..risk import Risk
    from ..runs import Run
    from ..tables import Table

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # what a disk says that is full, closed or broken
STATE = "state"  # folder in that of the run; gone when the run is done
_EVENT_EVERY = 1.0  # seconds between two lines of progress on one stage


@dataclass(frozen=True)
class Answer:
    """What a command found: tables and sentences for people, a tree for machines, an exit status."""

    shown: Sequence["Table | str"]
    result: Mapping[str, Any]
    status: int = screen.DONE


@dataclass
class Session:
    """What a command has at hand while it works."""

    command: str
    spec: Common
    code: study.Code
    show: screen.Report
    say: Callable[[str], None]  # a line that stays, above the bar
    run: "Run | None" = None
    stage: tuple[str, float] = ("", 0.0)
    notes: list[str] = field(default_factory=list)
    again: bool = False  # whether the run was there, and done
    signal: int = 0  # that asked to stop
    cut: str = ""  # why the result is only a part
    _told: tuple[str, float] = ("", 0.0)

    def report(self, text: str, part: float) -> None:
        """Progress: on the screen, and in events.jsonl when a stage begins and every second of it."""
        interrupts.check()
        text = text.partition(", about ")[0]  # the bar has the time left, from what was done so far
        self.stage = (text, part)
        now = time.perf_counter()
        if self.run is not None and (text != self._told[0] or now - self._told[1] > _EVENT_EVERY):
            self._told = (text, now)
            self.run.event("progress", text=text, part=round(part, 4))
        self.show(text, part)

    def counted(self, text: str, first: float = 0.0, last: float = 1.0) -> Callable[[int, int], None]:
        """Progress of a part of the work that counts (done, total)."""
        return lambda done, total: self.report(text, first + (last - first) * min(done / max(total, 1), 1.0))

    def warned(self, text: str, important: bool) -> None:
        """A warning, once: in events.jsonl, and on the screen if it is ours."""
        text = typed(text)
        if text in self.notes:
            return
        if important:
            self.notes.append(text)
        if self.run is not None and not self.again:
            self.run.event("warning", text=text)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator["Checkpoint"]:
        """Work that a signal ends between two products, and the place for its state."""
        from ..checkpoint import Checkpoint
        from ..stopping import stoppable

        assert self.run is not None
        with stoppable(self._heard_signal) as number:
            try:
                yield Checkpoint(self.run.folder / STATE)
            finally:
                self.signal = number()

    def _heard_signal(self, number: int) -> None:
        """At once, from within the handler: by the system's own call, since a print may be under way."""
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(
                2, f"\nritz {self.command}: stopping after the product in hand; once more stops at once\n".encode()
            )

    def partial(self, stop: str) -> bool:
        """Whether a result that ended so is only a part of what was asked for; then it is remembered why."""
        if self.signal and stop.startswith("stopped by"):
            self.cut = stop
        return bool(self.cut)

    @contextlib.contextmanager
    def optional(self, what: str) -> Iterator[None]:
        """What does not exist for this network is a note, since all else does."""
        from ..errors import UnsupportedError

        try:
            yield
        except UnsupportedError as error:
            self.warned(f"{what} could not be made: {error}", important=True)

    # ------------------------------------------------------------------------------------------ what is studied

    def solution(self, weights: Path | None = None, check: bool = True, here: bool = True) -> "Risk":
        """The user's risk, where and as it was asked for, at these weights.

        Args:
            weights: A file.
            check: Whether to look at the whole of it.
            here: Whether it is computed with in this process, and not only described: on the device that was asked for.
        """
        risk = self._made(self.spec.risk, here)
        risk = risk if weights is None else self.at(risk, weights)
        return checked(risk) if check else risk

    def at(self, risk: "Risk", weights: Path) -> "Risk":
        """The same risk at weights from a file."""
        return risk.at(study.fit_weights(risk.model, study.read_weights(weights), weights))

    def _made(self, text: str, here: bool) -> "Risk":
        """What a function of the user's returns."""
        self.say(f"running {text}, which is your code")
        return study.placed(self.code.risk(text), self.spec.device if here else None, self.spec.dtype)

    def held_out(self, text: str | None, risk: "Risk", here: bool = True) -> "Risk | None":
        """The solution on the test data of the user's other function."""
        if text is None:
            return None
        test = self._made(text, here)
        try:
            test = test.at(risk.state())
        except ValueError as error:
            raise ValueError(
                f"{text} has another model than {self.spec.risk}: {error}; use one model in both"
            ) from error
        return checked(test, text) if here else test

    # ------------------------------------------------------------------------------------------------ the run

    def start(
        self, risk: "Risk", weights: Mapping[str, Path], identity: Mapping[str, Any], about: bool = True
    ) -> "Run":
        """Begin the run, or go on with it; from here on there is a folder.

        Args:
            risk: The solution, or the first of them.
            weights: Files of weights by name.
            identity: Marks of what is studied.
            about: Whether the data is known to be readable, so that it can be described.
        """
        from .. import provenance, runs

        place = study.Place.parse(self.spec.risk)
        source = provenance.source_of(place.file, place.function)
        known = provenance.versions()
        own = {
            "settings": {k: v for k, v in self.spec.settings().items() if k not in ("risk", "weights", "test", "init")},
            "source": {"function": place.function, "sha256": source["sha256"]}, **identity,
            "versions": {name: known[name] for name in ("ritz", "torch")},
        }  # fmt: skip
        files = [
            {"name": n, "file": str(path.absolute()), "sha256": provenance.sha256(path)} for n, path in weights.items()
        ]
        self.run = runs.Run.start(
            self.spec.out, self.command, self.spec.settings(), own, source=source, weights=files,
            subject=study.subject_of(risk) if about else {}, seeds={"probes": self.spec.seed, "code": self.spec.seed},
            machine=provenance.machine(str(risk.device)),
        )  # fmt: skip
        self.again = self.run.state == "done"
        if self.again and not self.run.results:
            raise ValueError(f"{self.run.folder} is marked as done but has no result; name another folder with --out")
        for text in [] if self.again else self.notes:
            self.run.event("warning", text=text)
        return self.run

    def end(self, state: str, stop: str) -> None:
        """Write how the run ended, if it began; one that was done before stays as it is."""
        if self.run is not None and not self.again:
            self.run.end(state, stop)
        if self.run is not None and state == "done":
            from ..checkpoint import Checkpoint

            Checkpoint(self.run.folder / STATE).remove()


def checked(risk: "Risk", name: str = "") -> "Risk":
    """The first pass over the data; what goes wrong in it is the model's, the loss's or the data's fault."""
    from ..errors import RitzError
    from ..memory import is_shortage

    try:
        risk.check()
    except (RitzError, ValueError) as error:
        if not name:
            raise
        kind = type(error) if isinstance(error, RitzError) else ValueError
        raise kind(f"{name}: {error}") from error
    except Exception as error:
        if is_shortage(error):
            raise
        text, whose = " ".join(str(error).split()), f"{name}: " if name else ""
        raise ValueError(
            f"{whose}the model cannot be run on the data: {type(error).__name__}: {text}; fix the function of the risk"
        ) from error
    return risk


# ------------------------------------------------------------------------------------------ from end to end


def execute(command: str, spec: Common, work: Callable[[Session], Answer]) -> int:
    """Do a command's work and show what it found; returns the exit status."""
    stdout = sys.stdout
    with screen.no_stdout() if spec.json else contextlib.nullcontext():
        console = screen.new_console()
        session = Session(command, spec, study.Code(spec.seed), lambda text, part: None, _speaker(console, spec))
        try:
            answer = _worked(session, work, console)
            if not spec.json:
                _print(console, session, answer)
            if session.cut:
                screen.complain(command, _stopped(session, session.cut))
        except StoppedError as error:
            screen.complain(command, _stopped(session, str(error).partition(";")[0]))
            return 128 + session.signal
        except KeyboardInterrupt:
            screen.complain(command, _stopped(session))
            return screen.INTERRUPTED
        except Exception as error:
            status = _status(error)
            if status is None:
                raise
            screen.complain(command, _said(error))
            return status
    if spec.json:
        assert session.run is not None
        tree = tree_of(session.run, answer.result, session.notes)
        print(json.dumps(tree, allow_nan=False), file=stdout, flush=True)
    return answer.status


def _speaker(console: Console, spec: Common) -> Callable[[str], None]:
    return lambda text: None if spec.json else console.print(text, markup=False, soft_wrap=True)


def _worked(session: Session, work: Callable[[Session], Answer], console: Console) -> Answer:
    """The work, with a folder that is known to be usable, progress, warnings, and an end of the run however it ends."""
    spec = session.spec
    study.Place.parse(spec.risk)
    if not -(2**63) <= spec.seed < 2**63:
        raise ValueError(f"--seed must fit into 64 bits, got {spec.seed}; 0 is as good as any")
    with screen.reporting(console, quiet=spec.json) as show, session.code.open(), heard(session):
        session.show = show
        show("loading torch", 0.0)
        from ..runs import RUNS, check_folder

        interrupts.check()
        check_folder(RUNS / "new" if spec.out is None else spec.out)
        try:
            answer = work(session)
            state, status = "done", answer.status
            if session.cut:
                state, status = ("interrupted", 128 + session.signal) if session.signal else ("failed", screen.FAILED)
            session.end(state, session.cut or "completed")
            answer = replace(answer, status=status)
        except StoppedError as error:
            session.end("interrupted", str(error).partition(";")[0])
            raise
        except KeyboardInterrupt:
            text, part = session.stage
            session.end("interrupted", f"stopped by the keyboard at {part:.0%}, {text}")
            raise
        except Exception as error:
            with contextlib.suppress(OSError):  # a disk that is full: that is said already
                session.end("failed", _said(error))
            raise
        return answer


class _Ear(logging.Handler):
    """Takes what is logged as a warning, such as smaller pieces where memory ran out, for a note of the session."""

    def __init__(self, session: Session) -> None:
        super().__init__(logging.WARNING)
        self.session = session

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        self.session.warned(record.getMessage(), important=True)


@contextlib.contextmanager
def heard(session: Session) -> Iterator[None]:
    """Warnings as notes of the session, those that are logged too."""
    from ..errors import NumericalWarning

    def hear(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        session.warned(" ".join(str(message).split()), issubclass(category, NumericalWarning))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for future in (DeprecationWarning, FutureWarning):  # nothing that the user of a command can do about
            warnings.simplefilter("ignore", future)
        warnings.showwarning = hear
        log, ear = logging.getLogger("ritz"), _Ear(session)
        log.addHandler(ear)
        try:
            yield
        finally:
            log.removeHandler(ear)


def _status(error: Exception) -> int | None:
    """The exit status of an error; None for one that is a fault of ritz, whose traceback is wanted."""
    from ..errors import NonFiniteError, UnsupportedError, WeightsMovedError
    from ..memory import is_shortage

    if isinstance(error, NonFiniteError | WeightsMovedError) or is_shortage(error):
        return screen.FAILED
    return screen.REFUSED if isinstance(error, ValueError | OSError | UnsupportedError) else None


def _said(error: Exception) -> str:
    """An error in a line, with what to do where the error does not say it."""
    from ..memory import NoRoomError, is_shortage
    from ..runs import line_of

    if is_shortage(error) and not isinstance(error, NoRoomError):
        return "out of memory; smaller batches or plan=ritz.Plan(chunk=1) take less, `ritz doctor` says how much"
    if isinstance(error, OSError) and error.errno in _DISK and error.filename:
        return (
            f"{error.filename} cannot be written ({error.strerror}); what was saved before is as it was: make room or "
            "give leave to write there, and the same command goes on"
        )
    return typed(line_of(error))


def _stopped(session: Session, by: str = "stopped by the keyboard") -> str:
    """What to say after Ctrl-C, or another signal."""
    if session.run is None:
        return f"{by} before there was anything to keep"
    known = f"what is known is in {session.run.folder}" if session.run.results else "nothing is known yet"
    return f"{by}; {known}; the same command with --out {_quoted(session.run.folder)} goes on"


def _quoted(folder: Path) -> str:
    """As a shell takes it, whatever is in its name."""
    return shlex.quote(str(folder))


def _print(console: Console, session: Session, answer: Answer) -> None:
    """Tables and sentences, warnings, and where it all is."""
    assert session.run is not None
    for part in answer.shown:
        console.print()
        shown = typed(part) if isinstance(part, str) else typed_notes(part)
        console.print(screen.fitted(shown, console.width), markup=False)
    for note in session.notes:
        console.print(f"\nnote: {note}", markup=False)
    run = session.run
    how = "read back from" if session.again else "wrote"
    after = f"{how} {run.folder} after {run.header['times']['seconds']:.0f} s"
    console.print(f"\n{after}; `ritz report {_quoted(run.folder)}` makes a page of it", markup=False, soft_wrap=True)


def tree_of(run: "Run", result: Mapping[str, Any], notes: Sequence[str] = ()) -> Any:
    """What `--json` prints."""
    from ..runs import plain

    kept = ("command", "state", "stop", "settings", "subject", "seeds", "versions", "commit", "machine", "times")
    tree = {key: run.header[key] for key in kept}
    return plain({"folder": run.folder, **tree, "notes": list(notes), "result": result})
