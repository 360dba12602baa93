"""`ritz measure`, as it is typed: what it prints, writes, refuses and keeps."""

import json
import runpy
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ritz
from ritz.cli import main, screen
from ritz.measures import MEASURES
from ritz.runs import Run

QUICK = ["--num-steps", "10", "--num-probes", "4"]


def ritz_command(*words: str) -> subprocess.Popen:
    """`ritz` in a process of its own, which hears Ctrl-C also where the tests run in the background and do not."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from ritz.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_numbers_are_those_of_the_library(study, state, capsys, monkeypatch):
    words = ["measure", "study.py:make_risk", "--weights", "a.safetensors", "--test", "study.py:make_test_risk"]
    assert main([*words, "--dtype", "float64", *QUICK, "--out", "run"]) == 0
    text = capsys.readouterr().out
    found = ritz.load("run/arrays")["measurement"]
    monkeypatch.syspath_prepend(study)
    code = runpy.run_path("study.py")
    sys.modules.pop("helper")
    (X, y), (held_out, labels) = code["data"](0, 40), code["data"](1, 30)
    risk = ritz.Risk(code["network"](), nn.CrossEntropyLoss(), (X, y), dtype=torch.float64)
    truth = ritz.measure(risk.at(state(0.5)), (held_out, labels), num_steps=10, num_probes=4)
    assert list(found) == list(truth)
    for key in truth:
        torch.testing.assert_close(float(found[key].value), float(truth[key].value))
        assert key in text
    assert "reading" in text
    assert found["trace"].shown() in text
    assert "running study.py:make_risk, which is your code" in text


def test_the_folder_says_what_was_run(study, capsys):
    assert main(["measure", "study.py:make_risk", "--measures", "trace,weight_norm", *QUICK, "--seed", "7"]) == 0
    (folder,) = (study / "ritz-runs").iterdir()
    assert folder.name == "measure-1"
    out, name = capsys.readouterr().out, folder.relative_to(study)
    assert f"wrote {name}" in out
    assert f"; `ritz report {name}` makes a page of it" in out
    run = Run.open(folder)
    header = run.header
    assert sorted(path.name for path in folder.iterdir()) == [
        "arrays.json", "arrays.safetensors", "events.jsonl", "run.json"
    ]  # fmt: skip
    assert (header["command"], header["state"], header["stop"]) == ("measure", "done", "completed")
    assert header["settings"]["measures"] == ["trace,weight_norm"]
    assert header["seeds"] == {"probes": 7, "code": 7}
    assert header["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert header["subject"] == {
        "model": "Sequential", "num_params": 131, "num_samples": 40, "loss": "CrossEntropy",
        "convention": "mean over 40 samples, eval mode, float64",
    }  # fmt: skip
    assert header["source"]["file"] == str(study / "study.py")
    assert header["machine"]["device"] == "cpu"
    events = run.events()
    assert [event["event"] for event in events][:1] == ["start"]
    assert {event["key"] for event in events if event["event"] == "measure"} == {"trace", "weight_norm"}
    assert events[-1]["state"] == "done"


def test_what_other_programs_print_stays_out_of_the_json(study, capfd):
    code = "import os\nimport study\ndef loud():\n    os.system('echo from a child')\n    return study.make_risk()\n"
    (study / "loud.py").write_text(code)
    assert main(["measure", "loud.py:loud", "--measures", "weight_norm", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["state"] == "done"
    assert "from a child\n" in captured.err


def test_a_seed_that_is_too_large_is_refused(study, capsys):
    assert main(["measure", "study.py:make_risk", "--seed", str(2**63)]) == 2
    assert "--seed must fit into 64 bits, got 9223372036854775808" in capsys.readouterr().err


def test_json_is_one_object_and_nothing_else(study, capsys):
    words = ["measure", "study.py:make_risk", "--measures", "trace", "distance", *QUICK, "--json", "--out", "run"]
    assert main(words) == 0
    captured = capsys.readouterr()
    tree = json.loads(captured.out)
    assert "the user's code prints" in captured.err  # where it is out of the way
    trace = ritz.load("run/arrays")["measurement"]["trace"]
    assert tree["result"]["measures"]["trace"]["value"] == trace.value
    assert tree["result"]["measures"]["trace"]["interval"] == list(trace.interval())
    assert tree["result"]["failures"] == {"distance": "needs --init"}
    assert (tree["folder"], tree["state"]) == ("run", "done")


def test_the_same_run_is_read_back_and_another_is_refused(study, capsys):
    words = ["measure", "study.py:make_risk", "--measures", "trace", *QUICK, "--out", "run"]
    assert main(words) == 0
    before = {path.name: path.read_bytes() for path in (study / "run").iterdir()}
    first = capsys.readouterr().out
    assert main(words) == 0
    again = capsys.readouterr().out
    assert "read back from run" in again
    assert again.partition("measure ")[2].partition("\n\n")[0] == first.partition("measure ")[2].partition("\n\n")[0]
    assert main([*words, "--seed", "1"]) == 2
    assert "run holds another run: settings.seed is 0 there and 1 here" in capsys.readouterr().err
    (study / "helper.py").write_text("SIZE = 41\n\n")  # the same file, other data
    assert main(words) == 2
    assert 'solution.data is "40 samples' in capsys.readouterr().err
    (study / "helper.py").write_text("SIZE = 40\n")
    assert main([*words, "--test", "study.py:make_test_risk"]) == 2
    assert "run holds another run: --test was given here and not there; name" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (study / "run").iterdir()} == before


def test_the_command_that_is_shown_can_be_typed_whatever_the_folder_is_called(study, capsys):
    folder = "my run's première"
    assert main(["measure", "study.py:make_risk", "--measures", "weight_norm", "--out", folder]) == 0
    shown = capsys.readouterr().out.rpartition("`ritz ")[2].partition("`")[0]
    assert shlex.split(shown) == ["report", folder]
    assert main(shlex.split(shown)) == 0
    assert (study / folder / "report.html").exists()


def test_ctrl_c_keeps_what_is_known_and_the_run_goes_on(study, capsys, monkeypatch):
    real = MEASURES["spectral_norm"]
    computed = []

    def stop(subject):
        raise KeyboardInterrupt

    def count(subject):
        computed.append("trace")
        return trace.compute(subject)

    trace = MEASURES["trace"]
    monkeypatch.setitem(MEASURES, "trace", replace(trace, compute=count))
    monkeypatch.setitem(MEASURES, "spectral_norm", replace(real, compute=stop))
    words = ["measure", "study.py:make_risk", "--measures", "train_loss", "trace", "spectral_norm", *QUICK]
    assert main([*words, "--out", "run"]) == screen.INTERRUPTED
    error = capsys.readouterr().err
    assert "stopped by the keyboard; what is known is in run; the same command with --out run goes on" in error
    assert len(error.splitlines()) == 1
    run = Run.open("run")
    assert (run.state, run.header["stop"].partition(" at ")[0]) == ("interrupted", "stopped by the keyboard")
    kept = run.results["measurement"]
    assert list(kept) == ["train_loss", "trace"]
    assert kept.spectrum is not None
    monkeypatch.setitem(MEASURES, "spectral_norm", real)
    assert main([*words, "--out", "run"]) == 0
    whole = Run.open("run").results["measurement"]
    assert list(whole) == ["train_loss", "trace", "spectral_norm"]
    assert whole["trace"] == kept["trace"]
    assert computed == ["trace"]
    assert Run.open("run").state == "done"


def test_a_real_ctrl_c_ends_with_130_and_a_readable_folder(study):
    process = ritz_command("measure", "study.py:slow", "--out", "run")
    log = study / "run" / "events.jsonl"
    for _ in range(300):
        if log.exists() and '"text": "trace"' in log.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == screen.INTERRUPTED
    assert "stopped by SIGINT; what is known is in run; the same command with --out run goes on" in errors
    assert "Traceback" not in errors
    run = Run.open("run")
    assert run.state == "interrupted"
    assert "train_loss" in run.results["measurement"]


def test_audit_and_sample_traces_come_with_it(study, capsys):
    words = ["measure", "study.py:make_risk", "--measures", "trace", "weight_norm", *QUICK, "--out", "run"]
    assert main([*words, "--audit", "--sample-traces"]) == 0
    results = Run.open("run").results
    assert sorted(results) == ["audit", "measurement", "sample_traces"]
    assert results["audit"].before["trace"] == results["measurement"]["trace"]
    assert results["sample_traces"].value.shape == (40,)
    assert "the function is the same, and" in capsys.readouterr().out


def test_distances_are_from_the_start_that_is_given(study, state, capsys):
    words = ["measure", "study.py:make_risk", "--weights", "b.safetensors", "--init", "a.safetensors", "--json"]
    assert main([*words, "--measures", "distance", "--out", "run"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]["measures"]["distance"]["value"]
    one, two = (torch.cat([t.flatten() for t in state(size).values()]).double() for size in (0.5, 1.0))
    assert found == pytest.approx(float((two - one).norm()), rel=1e-6)


def test_a_network_that_has_diverged_is_a_numerical_failure(study, capsys):
    assert main(["measure", "study.py:diverged", "--out", "run"]) == screen.FAILED
    error = capsys.readouterr().err
    assert error == "ritz measure: 0.weight is not finite; the network has diverged, load other weights\n"
    assert not (study / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study.py"], "'study.py' names no function; write FILE.py:FUNCTION"),
        (["nowhere.py:make_risk"], "there is no file nowhere.py; give FILE.py:FUNCTION"),
        (
            ["study.py:nothing"],
            "study.py has no function 'nothing'; there are: network, data, make_risk,",
        ),
        (["study.py:make_risc"], "study.py has no function 'make_risc'; did you mean make_risk or make_test_risk?"),
        (["study.py:no_risk"], "study.py:no_risk returned a Sequential, not a ritz.Risk; let it end with"),
        (["study.py:fails"], "study.py:fails failed in line 50: KeyError: 'mnist'; fix it"),
        (["study.py:misfit"], "the model cannot be run on the data: RuntimeError: mat1 and mat2"),
        (["study.py:make_risk", "--test", "study.py:other_model"], "study.py:other_model has another model than"),
        (
            ["study.py:make_risk", "--test", "study.py:other_data"],
            "study.py:other_data: the model cannot be run on the data: RuntimeError: mat1 and mat2",
        ),
        (["study.py:make_risk", "--test", "study.py:other_labels"], "study.py:other_labels: label 7 is not one of"),
        (["study.py:make_risk", "--measures", "tracy"], "no measure is named 'tracy'; did you mean trace"),
        (["study.py:make_risk", "--num-probes", "0"], "ritz measure: --num-probes must be at least 1, got 0"),
        (["study.py:make_risk", "--device", "abacus"], "there is no device 'abacus' here"),
        (["study.py:make_risk", "--weights", "nowhere.pt"], "there are no weights at nowhere.pt"),
        (["study.py:make_risk", "--weights", "study.py"], "study.py is neither .safetensors nor .pt"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(words, message, study, capsys):
    assert main(["measure", *words, "--out", "run"]) == screen.REFUSED
    error = capsys.readouterr().err
    assert error.startswith("ritz measure: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (study / "run").exists()


def test_a_file_with_an_error_in_it_is_named_with_the_line(study, capsys):
    (study / "broken.py").write_text("import ritz\ndef make_risk(:\n")
    assert main(["measure", "broken.py:make_risk"]) == 2
    assert "broken.py cannot be loaded in line 2: SyntaxError" in capsys.readouterr().err
    (study / "script.py").write_text("raise SystemExit(0)\n")
    assert main(["measure", "script.py:make_risk"]) == 2
    assert "script.py cannot be loaded in line 1: SystemExit: 0" in capsys.readouterr().err
    assert not (study / "ritz-runs").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_weights_that_do_not_fit_are_listed_by_name(suffix, study, state, capsys):
    wrong = state(1.0)
    wrong["2.weight"] = torch.zeros(2, 16)
    wrong["head.bias"] = wrong.pop("0.bias")
    save_file(wrong, "x.safetensors") if suffix == "safetensors" else torch.save(wrong, "x.pt")
    assert main(["measure", "study.py:make_risk", "--weights", f"x.{suffix}", "--out", "run"]) == 2
    error = capsys.readouterr().err
    assert (
        f"x.{suffix} does not fit the model: missing: 0.bias; not in the model: head.bias; of another shape:" in error
    )
    assert "2.weight is (2, 16) there and (3, 16) in the model; give weights of this model" in error
    assert not (study / "run").exists()


def test_a_damaged_file_of_weights_is_said_to_be(study, capsys):
    (study / "x.safetensors").write_bytes((study / "a.safetensors").read_bytes()[:100])
    (study / "x.pt").write_bytes((study / "c.pt").read_bytes()[:300])
    (study / "y.pt").write_bytes(b"not torch")
    for name in ("x.safetensors", "x.pt", "y.pt"):
        assert main(["measure", "study.py:make_risk", "--weights", name]) == 2
        error = capsys.readouterr().err
        assert f"ritz measure: {name} is damaged" in error
        assert len(error.splitlines()) == 1


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (open, ("pwned", "w"))


def test_no_code_in_a_file_of_weights_is_run(study, capsys):
    torch.save({"model": Evil()}, "evil.pt")
    assert main(["measure", "study.py:make_risk", "--weights", "evil.pt"]) == 2
    assert "contains more than tensors and is not loaded" in capsys.readouterr().err
    assert not (study / "pwned").exists()


def test_checkpoints_of_other_tools_are_understood(study, state, capsys):
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": t for n, t in state(2.0).items()}}, "lightning.ckpt")
    words = ["--measures", "weight_norm", "--json"]
    norms = []
    for name in ("c.pt", "lightning.ckpt"):
        assert main(["measure", "study.py:make_risk", "--weights", name, *words]) == 0
        norms.append(json.loads(capsys.readouterr().out)["result"]["measures"]["weight_norm"]["value"])
    assert norms[0] == norms[1]


def test_the_users_modules_and_path_are_put_back(study, capsys):
    path, modules = list(sys.path), set(sys.modules)
    assert main(["measure", "study.py:make_risk", "--measures", "weight_norm"]) == 0
    assert sys.path == path
    assert {"study", "helper"}.isdisjoint(set(sys.modules) - modules)
