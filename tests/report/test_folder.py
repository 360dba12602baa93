"""A run folder becomes a page; what is no run is refused with one line and the remedy."""

import json
from dataclasses import replace

import pytest
import torch

import ritz
from ritz.cli.report import run as command
from ritz.doctor import Checkup
from ritz.doctor.checkup import Finding, Projection, Trial
from ritz.report import of_run
from ritz.runs import Run


def sections(folder) -> list[str]:
    return [section.title for section in of_run(folder).sections]


@pytest.fixture
def folder(tmp_path, results):
    """A finished run of `ritz measure`."""
    about = {"source": {"file": "study.py", "function": "make_risk"}, "subject": {"model": "Net", "num_params": 1234}}
    with Run.start(tmp_path / "run", "measure", {"num_steps": 8}, **about) as run:
        run.keep(measurement=results.measurement, audit=results.audit, sample_traces=results.traces)
    return tmp_path / "run"


def test_a_run_of_measure_is_told_whole(folder):
    page = of_run(folder)
    found = [section.title for section in page.sections]
    assert {"Spectrum", "Measures", "Margins", "Sample traces", "Settings"} <= set(found)
    assert page.title == "Measure: make_risk"
    assert page.subtitle.startswith("Net, 1,234 parameters; ")
    assert "settings.num_steps" in page.to_html()


def test_each_file_of_weights_has_its_rows_among_the_settings(tmp_path, results):
    files = [{"name": name, "file": f"/{name}.pt", "sha256": "0"} for name in ("a", "b")]
    with Run.start(tmp_path / "run", "spectrum", {}, weights=files) as run:
        run.keep(spectrum=results.measurement.spectrum)
    assert "<dt>weights.b.file</dt><dd>/b.pt</dd>" in of_run(tmp_path / "run").to_html()


def test_a_comparison_that_was_stopped_shows_what_was_known(tmp_path, results):
    some = results.comparison.measurements
    with Run.start(tmp_path / "run", "compare", {}) as run:
        run.keep(measurements=dict(some))
        run.end("interrupted", "stopped by the keyboard at 43 %")
    page = of_run(tmp_path / "run")
    assert "Measured so far" in sections(tmp_path / "run")
    assert "This run is not complete (interrupted: stopped by the keyboard at 43 %)" in page.to_html()
    with Run.start(tmp_path / "one", "compare", {}) as run:
        run.keep(measurements=dict(list(some.items())[:1]))
    assert "Measures" in sections(tmp_path / "one")


def test_other_commands_and_logs_are_told(tmp_path, results, checkup):
    rows = [{"step": step, "loss": 1.0 / (step + 1)} for step in range(5)]
    with Run.start(tmp_path / "run", "doctor", {}) as run:
        run.keep(checkup=checkup.plain(), training=rows, spectrum=results.measurement.spectrum, other={"a": 1})
    page = of_run(tmp_path / "run")
    assert {"What was checked", "Training", "Spectrum"} <= {section.title for section in page.sections}
    assert "&lt;b&gt;" in page.to_html()
    assert "other is in the folder, but not on this page" in page.to_html()


@pytest.fixture
def checkup():
    """What `ritz doctor` finds on a small network, one thing of it not sound."""
    found = (Finding("linear", "failed", "<b> by 4.0e-07", "try dtype=torch.float64"), Finding("finite", "ok", "all"))
    return Checkup(
        model="Net, 4 parameters", convention="", findings=found,
        trials=(Trial("forward", 0.02, 8, 3e-7, 4e-7, chosen=True), Trial("reverse", error="no second derivative")),
        projections=(Projection("spectrum", 75.0, 3.664e6, "8 products took 7 ms"),),
    )  # fmt: skip


def test_a_checkup_is_told_in_the_words_of_the_terminal(tmp_path, checkup):
    with Run.start(tmp_path / "run", "doctor", {}) as run:
        run.keep(checkup=checkup.plain())
    text = of_run(tmp_path / "run").to_html()
    assert sections(tmp_path / "run")[:4] == ["Overview", "What was checked", "Ways to multiply", "Time and memory"]
    assert "<p>Not sound: numbers would be wrong, or none.</p>" in text
    assert '<th scope="col">seen</th><th scope="col">to do</th>' in text
    assert "<td>&lt;b&gt; by 4.0·10⁻⁷</td><td>try dtype=torch.float64</td>" in text
    assert "<td>forward route *</td>" in text
    assert "<td>no second derivative</td>" in text
    assert '<td class="number">about 75 s</td><td class="number">3.5 MiB</td>' in text
    assert "<caption>" not in text  # the heading of the section says it


def test_a_checkup_that_was_stopped_is_not_called_sound(tmp_path, checkup):
    sound = replace(checkup, findings=checkup.findings[1:])
    with Run.start(tmp_path / "run", "doctor", {}) as run:
        run.keep(checkup=sound.plain())
        run.end("interrupted", "stopped by the keyboard at 43 %")
    text = of_run(tmp_path / "run").to_html()
    assert "This run is not complete" in text
    assert "Sound" not in text


def test_the_command_writes_the_page_into_the_folder_and_says_so(folder, capsys):
    assert command(folder) == 0
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "wrote" in capsys.readouterr().out
    assert command(folder) == 0  # a page of ritz may be written again


def test_the_command_writes_where_it_is_told_to(folder, tmp_path):
    assert command(folder, tmp_path / "sub" / "page.html") == 0
    assert (tmp_path / "sub" / "page.html").exists()
    assert not (folder / "report.html").exists()


def damaged(folder, how):
    header = json.loads((folder / "run.json").read_text())
    if how == "version":
        (folder / "run.json").write_text(json.dumps({**header, "format": 99}))
    elif how == "torn":
        (folder / "run.json").write_text("{")
    elif how == "tensors":
        (folder / "arrays.safetensors").write_bytes(b"no")
    elif how == "foreign":
        (folder / "run.json").write_text(json.dumps({"format": 1, "name": "another program's"}))
    elif how == "list":
        (folder / "run.json").write_text("[1]")
    elif how == "lost":
        (folder / "arrays.json").unlink()
    elif how == "absent":
        return folder / "nowhere"
    return folder


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("version", "99"),
        ("torn", "damaged"),
        ("tensors", "cannot be read"),
        ("foreign", "run.json"),
        ("list", "damaged"),
        ("lost", "result"),
        ("absent", "holds no run"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_in_one_line(folder, how, match, capsys):
    assert command(damaged(folder, how)) == 2
    said = capsys.readouterr().err
    assert said.startswith("ritz report: ")
    assert match in said
    assert said.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_file_of_the_user_is_not_overwritten(folder, tmp_path, capsys):
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<html>mine</html>")
    assert command(folder, thesis) == 2
    said = f"ritz report: {thesis} exists and is not a page of ritz: name another file, or remove it\n"
    assert capsys.readouterr().err == said
    assert thesis.read_text() == "<html>mine</html>"
    assert command(folder, tmp_path) == 2
    assert "is a folder: name a file" in capsys.readouterr().err
    assert command(folder, thesis / "page.html") == 2  # no folder can be made there
    assert "name another file with --out" in capsys.readouterr().err


def test_a_run_without_a_result_is_refused(tmp_path):
    with Run.start(tmp_path / "run", "track", {}):
        pass
    with pytest.raises(ValueError, match="contains no result yet: wait for the end of the run"):
        of_run(tmp_path / "run")


def test_a_log_that_is_none_is_refused(tmp_path):
    with Run.start(tmp_path / "run", "track", {}) as run:
        run.keep(training=["a"], trace=ritz.Estimate(name="trace", value=torch.tensor(1.0)))
    with pytest.raises(ValueError, match="must be a list of rows with a step"):
        of_run(tmp_path / "run")
