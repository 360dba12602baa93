"""`ritz compare`, as it is typed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import programs
import pytest
import torch

import ritz
from ritz.cli import main, screen
from ritz.measures import MEASURES
from ritz.runs import Run

QUICK = ["--num-steps", "8", "--num-probes", "4"]
FILES = ["--weights", "a.safetensors", "b.safetensors", "c.pt"]


def test_checkpoints_are_ranked_with_their_uncertainty(study, state, capsys):
    words = ["compare", "study.py:make_risk", *FILES, "--test", "study.py:make_test_risk", *QUICK, "--out", "run"]
    assert main([*words, "--measures", "weight_norm", "trace", "gap_loss"]) == 0
    text = capsys.readouterr().out
    found = ritz.load("run/arrays")["comparison"]
    assert found["weight_norm"].order == ("a", "b", "c")  # by half, one and two
    assert str(found["weight_norm"]) == "a < b < c"
    assert "a < b < c" in text
    assert "with gap_loss" in text
    sizes = [float(found.measurements[name]["weight_norm"].value) for name in "abc"]
    assert sizes == pytest.approx([sizes[1] / 2, sizes[1], 2 * sizes[1]])
    header = Run.open("run").header
    assert [row["name"] for row in header["weights"]] == ["a", "b", "c"]
    assert {event.get("solution") for event in Run.open("run").events() if event["event"] == "measure"} == set("abc")


def test_json_has_orders_probabilities_and_numbers(study, capsys):
    assert main(["compare", "study.py:make_risk", *FILES, "--measures", "trace", *QUICK, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    ranking = tree["result"]["rankings"]["trace"]
    assert sorted(ranking["order"]) == ["a", "b", "c"]
    assert 0 <= ranking["probability"] <= 1
    assert set(tree["result"]["solutions"]) == set("abc")
    assert tree["folder"] == "ritz-runs/compare-1"


def test_ctrl_c_keeps_the_solutions_that_are_measured_and_goes_on(study, capsys, monkeypatch):
    real, seen = MEASURES["trace"], []

    def third_stops(subject):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(subject)
        return real.compute(subject)

    monkeypatch.setitem(MEASURES, "trace", replace(real, compute=third_stops))
    words = ["compare", "study.py:make_risk", *FILES, "--measures", "trace", "weight_norm", *QUICK, "--out", "run"]
    assert main(words) == screen.INTERRUPTED
    kept = Run.open("run").results["measurements"]
    assert {name: list(found) for name, found in kept.items()} == {
        "a": ["weight_norm", "trace"],
        "b": ["weight_norm", "trace"],
        "c": ["weight_norm"],  # which takes no product, and so comes first
    }
    seen.pop()  # one more may be measured, and no more than one is needed
    assert main(words) == 0
    results = Run.open("run").results
    assert list(results) == ["comparison"]
    assert results["comparison"].measurements["a"]["trace"] == kept["a"]["trace"]
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "a.safetensors"], "--weights has a.safetensors and nothing to compare with; give two or more"),
        (["--weights"], "--weights has no file and nothing to compare with; give two or more files after it"),
        (["--weights", "a.safetensors", "a.safetensors"], "a.safetensors is given twice"),
        (["--weights", "a.safetensors", "nowhere.pt"], "there are no weights at nowhere.pt"),
        ([*FILES, "--measures", "nothing"], "no measure is named 'nothing'"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_status_2(words, message, study, capsys):
    assert main(["compare", "study.py:make_risk", *words, "--out", "run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ritz compare: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (study / "run").exists()


def test_a_checkpoint_that_has_diverged_is_named(study, state, capsys):
    wrong = state(1.0)
    wrong["0.bias"][0] = float("inf")
    torch.save(wrong, "bad.pt")
    assert main(["compare", "study.py:make_risk", "--weights", "a.safetensors", "bad.pt"]) == screen.FAILED
    assert "ritz compare: bad: 0.bias is not finite" in capsys.readouterr().err


def test_the_installed_command_prints_an_object_and_refuses_by_one_line(study):
    """In processes of their own, as a user has them."""
    command = [str(Path(sys.executable).parent / "ritz"), "compare", "study.py:make_risk", "--measures", "weight_norm"]
    done = subprocess.run([*command, *FILES, "--json"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert json.loads(done.stdout)["result"]["rankings"]["weight_norm"]["order"] == ["a", "b", "c"]
    refused = programs.run(study, *command, "--weights", "a.safetensors", "x.pt")
    assert refused.returncode == 2
    assert refused.stderr == "ritz compare: there are no weights at x.pt; give a .safetensors or .pt file\n"


def test_without_weights_it_says_what_is_missing(study, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", "study.py:make_risk"])
    assert stop.value.code == 2
    assert "--weights" in capsys.readouterr().err
