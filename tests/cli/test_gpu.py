"""Every command with `--device cuda`: it ends well, says where it ran, and has the numbers of a CPU."""

import json

import pytest
import torch
from torch import nn

import ritz
from ritz.cli import main
from ritz.runs import Run

pytestmark = pytest.mark.gpu

QUICK = ["--num-steps", "10", "--num-probes", "4"]
WEIGHTS = ["--weights", "a.safetensors"]


def found(command: str, device: str, *words: str):
    """What the command keeps, in float64."""
    out = f"{command}-{device}"
    words = ("study.py:make_risk", *words, *QUICK, "--device", device, "--dtype", "float64", "--out", out)
    assert main([command, *words]) == 0
    assert Run.open(out).header["machine"]["device"].partition(":")[0] == device
    kept = ritz.load(f"{out}/arrays")
    return kept[{"measure": "measurement", "compare": "comparison"}.get(command, command)]


def test_measure_has_the_numbers_of_a_cpu(study):
    words = (*WEIGHTS, "--test", "study.py:make_test_risk")
    there, here = (found("measure", device, *words) for device in ("cuda", "cpu"))
    assert list(there) == list(here)
    for key in here:
        torch.testing.assert_close(float(there[key].value), float(here[key].value), rtol=1e-6, atol=1e-9)


def test_spectrum_has_the_numbers_of_a_cpu(study):
    there, here = (found("spectrum", device, *WEIGHTS) for device in ("cuda", "cpu"))
    for name in ("trace", "lambda_max", "lambda_min", "frobenius_norm"):
        assert float(getattr(there, name)) == pytest.approx(float(getattr(here, name)), rel=1e-6)


def test_compare_has_the_order_of_a_cpu(study):
    words = ("--weights", "a.safetensors", "b.safetensors", "c.pt", "--measures", "weight_norm", "trace")
    there, here = (found("compare", device, *words) for device in ("cuda", "cpu"))
    assert there["trace"].order == here["trace"].order
    assert there["weight_norm"].order == ("a", "b", "c")


def test_an_audit_runs_there(study, capsys):
    assert main(["measure", "study.py:make_risk", *WEIGHTS, *QUICK, "--audit", "--device", "cuda", "--out", "run"]) == 0
    assert "scale_output: the prediction is the same" in capsys.readouterr().out
    assert Run.open("run").header["state"] == "done"


def test_doctor_projects_the_memory_of_the_device(study, capsys):
    assert main(["doctor", "study.py:make_risk", "--device", "cuda", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert {"measure", "spectrum"} <= {row["command"] for row in result["projections"]}


def test_a_report_is_made_of_what_ran_there(study):
    found("spectrum", "cuda", *WEIGHTS)
    assert main(["report", "spectrum-cuda"]) == 0
    assert torch.cuda.get_device_name() in (study / "spectrum-cuda" / "report.html").read_text(encoding="utf-8")


def test_the_demo_runs_there(study):
    pytest.importorskip("sklearn")
    assert main(["demo", "--device", "cuda", "--epochs", "3"]) == 0
    assert (study / "ritz-demo" / "report.html").exists()


def test_training_is_tracked_there():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
    X = torch.randn(64, 4, device="cuda")
    y = X[:, :3].argmax(1)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with ritz.track(risk, every=5, budget=1.0) as tracker:
        for _ in range(20):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(X), y).backward()
            optimiser.step()
            tracker.step()
    assert [row["step"] for row in tracker.record.rows] == [5, 10, 15, 20]
