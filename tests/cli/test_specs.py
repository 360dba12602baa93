"""What can be typed, what is saved of it, and the page that shows it."""

import dataclasses
import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ritz
from ritz.cli import main, screen, specs
from ritz.runs import Run

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPECS = {
    "measure": specs.MeasureSpec, "compare": specs.CompareSpec, "spectrum": specs.SpectrumSpec,
    "doctor": specs.DoctorSpec,
}  # fmt: skip


@pytest.mark.usefixtures("forked")
def test_every_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    blocks = FENCE.findall(PAGE.read_text(encoding="utf8"))
    study, training = [text for kind, text in blocks if kind == "python"][:2]
    lines = [line for kind, text in blocks if kind == "bash" for line in text.splitlines()]
    assert {line.split()[1] for line in lines} == set(SPECS)
    (tmp_path / "study.py").write_text("import torch\ntorch.set_default_dtype(torch.float32)\n" + study)
    monkeypatch.chdir(tmp_path)
    exec(compile(study + training, "training", "exec"), {"__name__": "__main__"})
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "ritz"
        quick = [] if "--products" in words else ["--num-steps", "8", "--num-probes", "2"]
        assert main([*words[1:], *quick]) == screen.DONE, line
    capsys.readouterr()
    folders = sorted(path.name for path in (tmp_path / "ritz-runs").iterdir())
    numbers = {"compare": 2, "doctor": 1, "measure": 3, "spectrum": 2}
    assert folders == [f"{name}-{number + 1}" for name, count in numbers.items() for number in range(count)]


def test_the_page_names_every_exit_status_and_file():
    text = PAGE.read_text(encoding="utf8")
    rows = {row.split("|")[1].strip() for row in text.splitlines() if row.startswith("|")}
    rows |= {status for row in rows for status in row.split(", ")}
    assert {str(s) for s in (screen.DONE, screen.FAILED, screen.REFUSED, screen.INTERRUPTED)} <= rows
    assert {"`run.json`", "`events.jsonl`", "`arrays.json`, `arrays.safetensors`", "`spectrum.png`"} <= rows


@pytest.mark.parametrize("command", SPECS)
def test_help_names_every_option(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(SPECS[command]):
        assert field.name == "risk" or f"--{field.name.replace('_', '-')}" in text
    assert "FILE.py:FUNCTION" in text
    assert "None" not in text


def test_help_takes_less_than_half_a_second_of_the_processor():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys; from ritz.cli import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert all(command in done.stdout for command in SPECS)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_settings_are_frozen_and_saved_with_the_run(study, capsys):
    spec = specs.MeasureSpec(risk="study.py:make_risk", measures=("weight_norm",), out=study / "run", seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.seed = 4
    assert main(["measure", "study.py:make_risk", "--measures", "weight_norm", "--out", "run", "--seed", "3"]) == 0
    assert Run.open("run").header["settings"] == json.loads(json.dumps(spec.settings()))
    assert {"out", "json"}.isdisjoint(spec.settings())


def test_measures_are_words_or_keys_with_or_without_commas():
    def chosen(*words):
        return specs.MeasureSpec(risk="", measures=words).chosen

    assert chosen("standard", "ggn_trace") == ["standard", "ggn_trace"]
    assert chosen("all") == ["all"]
    assert chosen("trace", "lambda_max") == chosen("trace,lambda_max") == ["trace", "lambda_max"]
    assert chosen() == []


def test_no_measure_at_all_is_refused(study, capsys):
    assert main(["measure", "study.py:make_risk", "--measures", "--out", "run"]) == 2
    assert capsys.readouterr().err == "ritz measure: --measures names none; give standard, all, or some by key\n"


def test_a_wrong_option_leads_to_the_help_of_its_command(capsys):
    for words in (["--mesures", "trace"], ["--num-steps", "x"], ["--dtype", "double"]):
        with pytest.raises(SystemExit):
            main(["measure", "study.py:make_risk", *words])
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert "ritz measure --help" in said
        assert "ritz compare" not in said
    assert "Expected one of ('bfloat16', 'float16', 'float32', 'float64')." in said


@pytest.mark.parametrize("word", ["version", "--version"])
def test_the_version_is_told_by_either_word(word, capsys):
    assert main([word]) == 0
    assert capsys.readouterr().out == f"ritz {ritz.__version__}\n"


def test_compare_promises_what_it_prints(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "mark differences beyond the error bars" in " ".join(capsys.readouterr().out.split())
