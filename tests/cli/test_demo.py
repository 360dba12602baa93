import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import entry_points

import pytest

import ritz
from ritz.cli import demo, main
from ritz.intervals import Exact, StudentT
from ritz.papers import digits
from ritz.results import Estimate
from ritz.runs import Run


def ritz_command(*words: str, **environment: str) -> subprocess.Popen:
    """`ritz` in a process of its own, which hears Ctrl-C also where the tests run in the background and do not."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from ritz.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_the_demo_prints_a_table_and_findings_and_writes_its_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(digits, "Settings", partial(digits.Settings, hidden=(8,), num_steps=20))  # for speed
    out = tmp_path / "new" / "folder"
    assert main(["demo", "--out", str(out), "--epochs", "2"]) == 0
    text = capsys.readouterr().out
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    for name in digits.COLUMNS.values():
        assert name in text
    shown = " ".join(text.split())
    for sentence in table["findings"]:
        assert " ".join(sentence.split()) in shown
    assert [row["weight_decay"] for row in table["rows"]] == [0.0, 1e-4, 5e-4, 5e-3]
    assert f"{table['rows'][2]['weight_norm']['value']:#.4g}" in text
    assert all(len(line) <= demo.PLAIN_WIDTH for line in text.splitlines()[:-1])
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "One network, four weight decays" in page
    assert "Audit at weight decay 0.005, rescale: the function is the same" in page
    assert "weight decay 0.0001" in page  # the solution by its name
    assert text.splitlines()[-1] == f"open {out / 'report.html'} in a browser"
    loaded = ritz.load(out / "spectrum-0.0005")
    assert loaded.dim == 64 * 8 + 8 + 8 * 10 + 10
    assert float(loaded.trace.value) == table["rows"][2]["trace"]["value"]


def test_the_demo_is_a_run_that_is_read_back_and_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(digits, "Settings", partial(digits.Settings, hidden=(4,), num_steps=5, num_probes=2))
    words = ["demo", "--out", str(tmp_path / "run"), "--epochs", "1", "--dtype", "float64", "--seed", "3"]
    assert main([*words, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["command"], tree["state"], tree["settings"]["dtype"]) == ("demo", "done", "float64")
    assert tree["seeds"] == {"start": 3, "batches": 3, "probes": 3}
    assert tree["result"] == json.loads((tmp_path / "run" / "table.json").read_text(encoding="utf-8"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert {"run.json", "events.jsonl", "arrays.json", "arrays.safetensors", "report.html"} <= before.keys()
    assert main(words) == 0
    assert "read back from" in capsys.readouterr().out
    assert main([*words[:-1], "4"]) == 2
    error = capsys.readouterr().err
    assert "holds another run: settings.seed is 3 there and 4 here; name another folder with --out" in error
    assert len(error.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0


def test_the_same_seed_prints_the_same_table_and_another_seed_another():
    quick = {"epochs": 1, "num_steps": 4, "num_probes": 2, "hidden": (4,), "weight_decays": (0.0, 1e-2)}
    first, again, other = (digits.table(digits.study(digits.Settings(seed=s, **quick))) for s in (0, 0, 1))
    assert first == again
    assert first["rows"] != other["rows"]


def test_the_table_fits_a_terminal_of_80_columns(capsys):
    found = digits.study(digits.Settings(epochs=2, num_steps=10, hidden=(8,)))
    demo._print(demo.Console(width=80, highlight=False), found)
    text = capsys.readouterr().out
    assert "…" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "epochs must be at least 1, got 0"),
        (["--device", "abacus"], "there is no device 'abacus' here"),
    ],
)
def test_what_cannot_work_is_said_in_a_line_before_training(words, message, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "training" not in captured.out
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_said_in_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "ritz demo: " in capsys.readouterr().err


def test_a_page_that_is_not_ours_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "report.html").write_text("<p>precious</p>")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "contains report.html but no run; name another folder with --out, nothing was written" in captured.err
    assert "training" not in captured.out
    assert [path.read_text() for path in tmp_path.iterdir()] == ["<p>precious</p>"]


def test_a_missing_package_is_named_with_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "pip install 'ritz[demo]'" in capsys.readouterr().err


def test_ctrl_c_ends_the_demo_without_a_traceback(tmp_path):
    process = ritz_command("demo", "--out", str(tmp_path), "--epochs", "100000")
    for line in process.stdout:
        if "training" in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == demo.INTERRUPTED
    assert "stopped by the keyboard" in errors
    assert "Traceback" not in errors
    assert (Run.open(tmp_path).state, Run.open(tmp_path).header["stop"]) == ("interrupted", "stopped by the keyboard")


def test_help_lists_the_commands_and_is_quick():
    start = time.perf_counter()
    output, _ = ritz_command("--help", COLUMNS="100").communicate(timeout=60)
    assert "demo" in output
    assert time.perf_counter() - start < 3.0  # half a second on an idle machine; torch alone takes longer on a busy one


def test_the_installed_command_is_this_main():
    (point,) = entry_points(group="console_scripts", name="ritz")
    assert point.load() is main


def test_version_prints_the_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == f"ritz {ritz.__version__}"


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(name="x", value=6.0837, stderr=0.0304, rule=StudentT(7)), "6.08±0.03"),
        (Estimate(name="x", value=31.4783, stderr=0.1312, rule=StudentT(7)), "31.48±0.13"),
        (Estimate(name="x", value=7.60523, stderr=8.8e-6, rule=StudentT(7)), "7.6052±9e-06"),
        (Estimate(name="x", value=1234.5, stderr=56.0, rule=StudentT(7)), "1234±56"),
        (Estimate(name="x", value=-0.2, stderr=3.0, rule=StudentT(7)), "0±3"),
        (Estimate(name="x", value=14.8, exact=True), "14.80"),
        (Estimate(name="x", value=5.2632, bracket=(5.2632, 5.2651), rule=Exact()), "5.2632+0.0019"),
        (Estimate(name="x", value=5.2632, bracket=(5.2632, math.inf), rule=Exact()), "≥5.263"),
        (Estimate(name="x", value=0.0, stderr=0.0), "0.000"),
    ],
)
def test_a_cell_has_the_digits_that_its_error_allows(estimate, text):
    assert demo.cell(estimate) == text
