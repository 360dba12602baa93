"""The table of measures is complete and true: every row works, and moves under what it says it moves under."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import ritz
from ritz.measures.registry import MEASURES, resolve
from ritz.measures.row import EVERY
from ritz.measures.transforms.moves import TRANSFORMS

# what the layers of a network of test size are too small for
NEEDS_WIDE_LAYERS = {"layer_alpha", "layer_alpha_hat", "layer_spikes"}


def data(n: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(n, 4, generator=generator)
    X[1] = X[0]  # one picture with two labels: no network has them all right
    y = X[:, :3].argmax(1)
    y[1] = (y[0] + 1) % 3
    return X, y


def trained(*layers: nn.Module, steps: int = 200) -> ritz.Risk:
    """A network that has learned its labels, so that every margin exists; evaluation mode."""
    torch.manual_seed(0)
    for layer in layers:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data()[0]), data()[1]).backward()
        optimizer.step()
    return ritz.Risk(model.eval(), nn.CrossEntropyLoss(), data())


def plain() -> ritz.Risk:
    return trained(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def normalised() -> ritz.Risk:
    return trained(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def audits():
    """Every measure of two networks, before and after each transform that fits them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ritz.errors.NumericalWarning)
            found = []
            for risk in (plain(), normalised()):
                init = {name: p - 0.1 for name, p in risk.params().items()}
                found.append(ritz.audit(risk, data(200), init, measures="all", strength=3.0))
            yield found
    finally:
        torch.set_default_dtype(before)


def test_every_measure_works_or_says_why_not(audits):
    unfit = [NEEDS_WIDE_LAYERS, NEEDS_WIDE_LAYERS | {"certificate"}]  # running statistics have no prior
    for found, failing in zip(audits, unfit, strict=True):
        assert set(found.before.failures) == failing
        assert set(found.before) == set(MEASURES) - failing
        assert all(math.isfinite(float(e.value)) for e in found.before.values())
        assert all(e.convention for e in found.before.values())


def random(key: str, transform: str) -> bool:
    """Draws are keyed by the place of a weight: a permutation hands them to other weights."""
    return transform == "permute" and MEASURES[key].cost in ("search", "GGN", "backward")


def test_a_measure_is_unchanged_by_the_transforms_that_its_row_lists(audits):
    for found in audits:
        for (key, name), shift in found.shifts.items():
            if name in MEASURES[key].unchanged and not random(key, name):
                assert math.isnan(shift.factor) or shift.factor == pytest.approx(1.0, abs=1e-6), (key, name)


def test_a_sampled_measure_is_unchanged_by_a_permutation_up_to_its_error(audits):
    for found in audits:
        for (key, name), shift in found.shifts.items():
            if random(key, name) and name in MEASURES[key].unchanged and not shift.before.exact:
                change, error = (float(x) for x in (shift.after.value - shift.before.value, shift.before.stderr))
                slack = 0.0 if math.isnan(error) else 5 * math.hypot(error, float(shift.after.stderr))
                assert abs(change) <= slack + 1e-9, (key, name)


class Fork(nn.Module):
    """Two layers read the first, and two BatchNorms the second: what is multiplied by c once is divided twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norms, self.last = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(4)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        a, b = (layer(h) for layer in self.second)
        return self.last(sum(norm(y).relu() for norm, y in zip(self.norms, (a, a, b, b), strict=True)))


def test_a_measure_moves_under_every_transform_that_its_row_does_not_list(audits):
    """In one of the networks at least: a maximum over layers may sit in a layer that does not move."""
    moved, tried = set(), set()
    products = ["log_spectral_product", "spectral_complexity"]  # over layers: of a chain they stay
    for found in [*audits, ritz.audit(trained(Fork(), steps=5), measures=products, strength=3.0)]:
        for (key, name), shift in found.shifts.items():
            tried.add((key, name))
            if not math.isnan(shift.factor) and abs(shift.factor - 1) > 1e-5:
                moved.add((key, name))
    unlisted = {(key, name) for key, name in tried if name not in MEASURES[key].unchanged}
    assert sorted(unlisted - moved) == []


def test_a_measure_that_no_rescaling_moves_is_there():
    """The point of normalising by everything: prediction in, number out."""
    assert MEASURES["normalised_sharpness"].unchanged == EVERY
    assert {key for key, row in MEASURES.items() if row.unchanged == EVERY and row.family == "sharpness"} == {
        "normalised_sharpness"
    }


def test_tails_of_wide_layers_move_as_their_rows_say():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(120, 90), nn.ReLU(), nn.Linear(90, 80))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randn(4, 120), torch.arange(4)))
    found = ritz.audit(risk, measures=sorted(NEEDS_WIDE_LAYERS), strength=3.0)
    assert set(found.before) == NEEDS_WIDE_LAYERS
    for (key, name), shift in found.shifts.items():
        still = math.isnan(shift.factor) or shift.factor == pytest.approx(1.0, abs=1e-6)
        assert still == (name in MEASURES[key].unchanged), (key, name, shift.factor)


def test_every_row_is_filled_in():
    for key, row in MEASURES.items():
        assert row.key == key
        assert all((row.formula, row.convention, row.source, row.reading)), key
        assert row.unchanged <= set(TRANSFORMS), key
        assert row.needs <= {"test", "init"}, key
        assert len(row.reading) < 90, key


def test_what_keeps_the_function_keeps_what_is_made_of_outputs():
    keep = {name for name, transform in TRANSFORMS.items() if transform.keeps == "function"}
    for key, row in MEASURES.items():
        if row.family == "gap":
            assert keep <= row.unchanged, key


def test_a_search_says_what_it_takes():
    shares = {"pacbayes_flatness", "pacbayes_orig", "pacbayes_init", "pacbayes_mag_orig", "pacbayes_mag_init"}
    assert {row.key for row in MEASURES.values() if row.cost in ("search", "backward") and not row.gradients} == shares


def test_standard_measures_need_one_run_of_the_hessian_and_forward_passes_only():
    assert {row.cost for row in resolve("standard")} == {"weights", "forward", "Hessian"}


def test_keys_are_in_the_order_that_was_asked_for():
    assert [row.key for row in resolve(["trace", "aceht", "distance"])] == ["trace", "aceht", "distance"]
    assert [row.key for row in resolve("trace")] == ["trace"]


def test_a_set_and_what_is_not_in_it_go_into_one_list():
    own = replace(MEASURES["trace"], key="own")
    assert resolve(["ggn_trace", "standard", "trace", own]) == [*resolve("standard"), MEASURES["ggn_trace"], own]
    assert resolve(["all", "standard"]) == resolve("all")
    with pytest.raises(ValueError, match="two measures have the same key"):
        resolve(["standard", replace(own, key="trace", formula="another")])


def test_measures_that_are_known_layer_by_layer_have_parts(audits):
    for key in (
        "trace",
        "trace_per_param",
        "moment2",
        "weight_norm",
        "distance",
        "layer_spectral_norm",
        "layer_margin",
    ):
        assert audits[0].before[key].parts, key
