"""`ritz.report.build`: any results as one page."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..estimators.quantities import Spectrum
from ..loggers import JSONLines, Memory, read
from ..measures.audit import Audit
from ..measures.compare import Comparison
from ..measures.margins import MarginDistribution, MarginStudy
from ..measures.measure import Measurement
from ..measures.outputs import Outputs
from ..results import Estimate
from ..tables import Table
from . import about, audits, comparisons, samples, solutions, spectra, training
from .numerals import typeset
from .page import Page, Section

SAMPLE_TRACES = "sample traces"  # the name of the result of ritz.sample_traces


@dataclass
class _Found:
    """The given results by kind: at most one of each, except spectra, numbers and tables."""

    spectra: dict[str, Spectrum] = field(default_factory=dict)
    measurement: Measurement | None = None
    comparison: Comparison | None = None
    audit: Audit | None = None
    outputs: Outputs | None = None
    margins: MarginDistribution | None = None
    traces: Estimate | None = None
    study: MarginStudy | None = None
    log: Memory | None = None
    numbers: list[Estimate] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def put(self, kind: str, result: Any) -> None:
        """Keep the one result of a kind.

        Raises:
            ValueError: If the page already has one.
        """
        if getattr(self, kind) is not None:
            raise ValueError(
                f"a page shows one result of each kind, got two of kind {type(result).__name__}; to compare solutions, "
                "use ritz.compare"
            )
        setattr(self, kind, result)


def build(
    *results: Any,
    title: str = "",
    subtitle: str = "",
    settings: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Page:
    """One self-contained page of any results, with a section for each.

    Args:
        *results: In any order: a `Spectrum` or a mapping of them by name (blocks, layers); results of `ritz.measure`,
            `ritz.compare`, `ritz.audit`, `ritz.sample_traces` or `margin_study`; `Outputs` or a `MarginDistribution`; a
            training log (`ritz.loggers.Memory` or `JSONLines`, or the path of a file of JSON lines); single
            `Estimate`s; and your own `Table`s.
        title: Title of the page; by default made from the results.
        subtitle: A line below the title.
        settings: The settings of the run by name, which may be nested.
        notes: Sentences for the top of the page.

    Raises:
        TypeError: For anything else.
        ValueError: If there is nothing to report, or two results of one kind.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> s = ritz.spectrum(DenseOperator(torch.diag(torch.tensor([3.0, 1.0, -1.0]))))
        >>> page = build(s, title="Three eigenvalues", settings={"seed": 0})
        >>> [section.title for section in page.sections]
        ['Overview', 'Spectrum', 'Settings', 'How to cite']
    """
    found = _Found()
    for result in results:
        _sort(found, result)
    if not results:
        raise ValueError("there is nothing to report: give a Spectrum, the result of ritz.measure, or another result")
    _complete(found)
    page = Page(title or _title(found), subtitle or _subtitle(found))
    for section in _sections(found, settings or {}, notes):
        page.append(section)
    return page


# the field of `_Found` for each kind of result
_PLACES: dict[type, str] = {
    Measurement: "measurement",
    Comparison: "comparison",
    Audit: "audit",
    Outputs: "outputs",
    MarginDistribution: "margins",
    MarginStudy: "study",
    Memory: "log",
    JSONLines: "log",
    Spectrum: "spectra",
    Estimate: "numbers",
    Table: "tables",
}


def known_kinds() -> tuple[type, ...]:
    """The kinds of results that a page takes.

    Example:
        >>> Estimate in known_kinds(), dict in known_kinds()
        (True, False)
    """
    return tuple(_PLACES)


def _sort(found: _Found, result: Any) -> None:
    """Store one result in the field of its kind."""
    place = next((place for kind, place in _PLACES.items() if isinstance(result, kind)), None)
    if isinstance(result, str | os.PathLike):
        found.put("log", read(Path(result)))
    elif isinstance(result, Spectrum):
        _name(found, {"": result})
    elif isinstance(result, Table):
        found.tables.append(result)
    elif isinstance(result, Estimate):
        if result.name == SAMPLE_TRACES:
            found.put("traces", result)
        else:
            found.numbers.append(result)
    elif place is not None:
        found.put(place, read(result.path) if isinstance(result, JSONLines) else result)
    elif isinstance(result, Mapping) and result and all(isinstance(x, Spectrum) for x in result.values()):
        _name(found, {str(name): x for name, x in result.items()})
    else:
        known = ", ".join(kind.__name__ for kind in _PLACES)
        raise TypeError(
            f"a page accepts {known}, a mapping of spectra or the path of a log, got {type(result).__name__}"
        )


def _name(found: _Found, named: Mapping[str, Spectrum]) -> None:
    """Store spectra, each under its own name."""
    for name, one in named.items():
        if name in found.spectra:
            raise ValueError(f"two spectra are called {name!r}: give them as {{'name': spectrum, ...}}")
        found.spectra[name] = one


def _complete(found: _Found) -> None:
    """Add results that are contained in other results."""
    if found.measurement is None and found.audit is not None and found.comparison is None:
        found.measurement = found.audit.before  # in a comparison, the same solution would appear twice
    m = found.measurement
    if m is not None:
        found.outputs = found.outputs or m.outputs
        if m.spectrum is not None and "" not in found.spectra:
            found.spectra = {"": m.spectrum, **found.spectra}
    if "" in found.spectra and len(found.spectra) > 1:  # the whole matrix among others
        found.spectra = {name or "whole": one for name, one in found.spectra.items()}


def _title(found: _Found) -> str:
    if found.comparison is not None and found.measurement is None:
        return f"{len(found.comparison.measurements)} solutions compared"
    if found.measurement is not None:
        return f"Measures of {found.measurement.model}"
    if found.spectra:
        return f"A spectrum of {next(iter(found.spectra.values())).dim:,} eigenvalues"
    return "A training run" if found.log is not None else "Results"


def _subtitle(found: _Found) -> str:
    if found.measurement is not None:
        return found.measurement.convention
    if found.spectra:
        return next(iter(found.spectra.values())).convention
    return ""


def _sections(found: _Found, settings: Mapping[str, Any], notes: Sequence[str]) -> list[Section]:
    """All sections that have contents, in order."""
    made = [_overview(found, notes)]
    if found.comparison is not None:
        made.append(comparisons.section(found.comparison))
    if found.spectra:
        made.append(spectra.section(found.spectra))
    if found.measurement is not None:
        made.append(solutions.section(found.measurement))
    if found.audit is not None:
        made.append(audits.section(found.audit))
    margins = [found.margins] if found.margins is not None else []
    margins += samples.distributions(found.outputs) if found.outputs is not None and not margins else []
    if margins:
        made.append(samples.margins_section(margins))
    if found.traces is not None:
        made.append(samples.traces_section(found.traces, samples.paired(found.traces, found.outputs)))
    elif found.study is not None:
        made.append(samples.traces_section(found.study.traces, [samples.of_study(found.study)]))
    if found.log is not None and found.log.rows:
        made.append(training.section(found.log))
    made += [_values(e) for e in found.numbers if e.many]
    made += [Section(table.title, [replace(table, title="")]) for table in found.tables]
    if found.measurement is not None and found.measurement.seconds:
        made.append(about.cost_section(found.measurement))
    if settings or found.measurement is not None:
        told = any(name.rpartition(".")[2] == "num_probes" for name, _ in about.flat(settings))
        made.append(about.settings_section({**({} if told else _own_settings(found)), **settings}))
    made.append(about.cite_section(_keys(found)))
    return [section for section in made if section.blocks]


def _overview(found: _Found, notes: Sequence[str]) -> Section:
    """Notes and key figures."""
    figures = [(e.name, e) for e in found.numbers if not e.many]
    if found.measurement is not None:
        figures += solutions.key_figures(found.measurement)
    elif found.spectra and found.comparison is None:
        one = next(iter(found.spectra.values()))
        figures += [
            ("trace", one.trace), ("Frobenius norm", one.frobenius_norm), ("largest eigenvalue", one.lambda_max),
            ("smallest eigenvalue", one.lambda_min), ("sum of negatives", one.negative_trace),
        ]  # fmt: skip
    if found.comparison is not None and not notes:
        notes = comparisons.summary(found.comparison)
    sentences = [typeset(note) for note in notes]
    return Section("Overview", [*sentences, *([solutions.tiles(figures)] if figures else [])])


def _values(estimate: Estimate) -> Section:
    """The section on an estimate of many values."""
    chart = samples.values_chart(torch.as_tensor(estimate.value), "How they are spread", estimate.name)
    return Section(estimate.name.capitalize(), [estimate.convention, chart] if estimate.convention else [chart])


def _own_settings(found: _Found) -> dict[str, Any]:
    if found.measurement is None:
        return {}
    own = found.measurement.settings
    return {"num_steps": own.num_steps, "num_probes": own.num_probes, "seed": own.seed, "sigma": own.sigma}


def _keys(found: _Found) -> list[str]:
    """The keys of all measures on the page."""
    keys = list(found.measurement or ())
    return list(dict.fromkeys([*keys, *(found.comparison or ())]))
