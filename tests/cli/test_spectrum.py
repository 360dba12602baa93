"""`ritz spectrum`, as it is typed."""

import json

import pytest
import torch

import ritz
from ritz.cli import main, screen
from ritz.cli.spectrum import picture
from ritz.operators import DenseOperator
from ritz.runs import Run

QUICK = ["--num-steps", "20", "--num-probes", "4"]


def test_it_prints_numbers_and_a_density_and_keeps_the_spectrum(study, capsys):
    words = ["spectrum", "study.py:make_risk", "--weights", "b.safetensors", *QUICK, "--out", "run"]
    assert main(words) == 0
    text = capsys.readouterr().out
    results = ritz.load("run/arrays")
    found = results["spectrum"]
    assert found.dim == 131
    assert found.num_probes == 4
    for name in ("trace", "lambda_max", "negative_trace", "gradient_norm", "spectral density", "█"):
        assert name in text
    assert found.trace.shown() in text
    assert (study / "run" / "spectrum.png").read_bytes().startswith(b"\x89PNG")
    assert Run.open("run").header["results"] == ["loss", "gradient_norm", "spectrum"]


def test_a_block_of_the_gauss_newton_matrix_is_positive(study, capsys):
    words = ["spectrum", "study.py:make_risk", "--matrix", "ggn", "--params", "2.*", "--json", *QUICK]
    assert main(words) == 0
    tree = json.loads(capsys.readouterr().out)["result"]
    assert tree["dim"] == 16 * 3 + 3
    assert tree["numbers"]["lambda_min"]["value"] >= -1e-9
    assert tree["convention"].startswith("Gauss-Newton") or "GGN" in tree["convention"]
    density = tree["density"]
    step = density["eigenvalue"][1] - density["eigenvalue"][0]
    assert sum(density["density"]) * step == pytest.approx(1.0, abs=0.02)


def test_ctrl_c_leaves_the_first_look(study, capsys, monkeypatch):
    from ritz.cli import session

    real = session.Session.report

    def stop(self, text, part):
        if text == "Lanczos run" and part > 0.5:
            raise KeyboardInterrupt
        real(self, text, part)

    words = ["spectrum", "study.py:make_risk", *QUICK, "--out", "run"]
    monkeypatch.setattr(session.Session, "report", stop)
    assert main(words) == screen.INTERRUPTED
    run = Run.open("run")
    assert run.state == "interrupted"
    assert "Lanczos run" in run.header["stop"]
    coarse = run.results["spectrum"]
    assert coarse.products <= 20
    assert sorted(run.results) == ["gradient_norm", "loss", "spectrum"]
    monkeypatch.undo()
    monkeypatch.chdir(study)
    assert main(words) == 0
    fine = Run.open("run").results["spectrum"]
    assert fine.products > 5 * coarse.products


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-steps", "0"], "--num-steps must be at least 1, got 0"),
        (["--products", "3"], "--products must be at least 8, got 3"),
        (["--tol", "-1"], "--tol must be positive"),
        (["--params", "conv*"], "conv*"),
    ],
)
def test_bad_settings_are_refused_before_there_is_a_folder(words, message, study, capsys):
    assert main(["spectrum", "study.py:make_risk", *words, "--out", "run"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("ritz spectrum: ")
    assert len(error.splitlines()) == 1
    assert not (study / "run").exists()


def test_the_picture_has_a_bar_where_there_are_eigenvalues_and_none_between():
    values = torch.cat([torch.zeros(198), torch.tensor([3.7, 10.0])])
    rows = picture(ritz.spectrum(DenseOperator(torch.diag(values)), num_steps=30, num_probes=2)).rows
    lengths = {float(row[0]): len(row[2]) for row in rows}
    near = {end: max(n for x, n in lengths.items() if abs(x - end) < 0.6) for end in (0.0, 3.7, 7.0, 10.0)}
    assert near[0.0] > near[3.7] > 5  # one eigenvalue of 200, and between two rows
    assert near[10.0] > 5
    assert near[7.0] == 0


def test_the_picture_says_over_which_width_it_is_smoothed():
    found = ritz.spectrum(DenseOperator(torch.diag(torch.tensor([0.0, 1.0, 4.0]))))
    assert found.plot().get_ylabel() == "density, smoothed over 0.04"  # 1 % of the range
    assert found.plot(width=0.5).get_ylabel() == "density, smoothed over 0.5"
