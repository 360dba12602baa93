"""On an accelerator every measure is what it is on the CPU."""

import warnings

import pytest
import torch
from torch import nn

import ritz

pytestmark = pytest.mark.gpu


def data(device: str, n: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(n, 1, 8, 8, generator=generator)
    return X.to(device), X.flatten(1)[:, :4].argmax(1).to(device)


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 60),
        nn.ReLU(), nn.Linear(60, 4),
    )  # fmt: skip
    for _ in range(20):
        model(data("cpu")[0])
    return model.eval().to(device)


def risk_on(device: str) -> ritz.Risk:
    return ritz.Risk(network(device), nn.CrossEntropyLoss(), data(device), plan=ritz.Plan(route="reverse"))


@pytest.fixture(scope="module")
def both():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ritz.errors.NumericalWarning)
            yield {
                device: ritz.measure(
                    risk_on(device), data(device, 100), risk_on(device).params(), measures="all", num_steps=20,
                )
                for device in ("cpu", "cuda")
            }  # fmt: skip
    finally:
        torch.set_default_dtype(before)


def test_every_measure_agrees_with_the_cpu(both):
    assert both["cuda"].failures == both["cpu"].failures
    for key, e in both["cpu"].items():
        searched = ritz.measures.MEASURES[key].cost == "search"  # a search may turn at round-off
        assert float(both["cuda"][key].value) == pytest.approx(float(e.value), rel=0.05 if searched else 1e-6), key


def test_a_measurement_is_saved_drawn_and_loaded(both, tmp_path):
    assert ritz.load(both["cuda"].save(tmp_path / "m")) == both["cuda"]
    assert both["cuda"].to_html(tmp_path / "m.html").exists()


def test_an_audit_and_a_comparison_run():
    found = ritz.audit(risk_on("cuda"), data("cuda", 100), num_steps=10, num_probes=4)
    assert {"rescale", "batchnorm", "permute", "scale_output"} <= set(found.after)
    assert "train_loss" not in found.moved("rescale")
    pair = {"a": risk_on("cuda"), "b": risk_on("cuda")}
    assert ritz.compare(pair, data("cuda", 100), num_steps=10, num_probes=4)["trace"].verdict in (
        "all equal",
        "cannot tell",
    )


def test_landscapes_and_studies_of_samples_run(tmp_path):
    risk = risk_on("cuda")
    line = ritz.landscape.line(risk, ritz.landscape.filter_normalised(risk), radius=1.0, num=5)
    random = [ritz.landscape.random_direction(risk, seed=seed) for seed in (0, 1)]
    plane = ritz.landscape.plane(risk, *random, radius=1.0, num=3)
    end = ritz.landscape.interpolate(risk, {name: p / 2 for name, p in risk.params().items()}, num=3)
    for name, picture in (("line", line), ("plane", plane), ("end", end)):
        picture.plot().figure.savefig(tmp_path / f"{name}.png")
        assert ritz.load(picture.save(tmp_path / name)) == picture
    study = ritz.measures.margin_study(risk, num_samples=50)
    study.plot().figure.savefig(tmp_path / "study.png")
