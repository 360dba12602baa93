"""Small against large batches: steps, dense truths of what is measured, and claims that can go either way."""

import json

import pytest
import torch
from torch import Tensor, nn

from ritz.papers import margins_batch, margins_points
from ritz.papers.base import Claim
from ritz.papers.experiment import Setting
from ritz.papers.loop import Training
from ritz.papers.train import train


def tiny(num_classes: int = 10) -> nn.Sequential:
    """F1 in small."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, num_classes))


def smaller() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))


def drawn_images(name: str, root: object, device: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """Ten patterns with noise in the place of MNIST, pixels from -1 to 1."""
    g = torch.Generator().manual_seed(0)
    patterns, y = torch.rand(10, 784, generator=g), torch.randint(10, (100,), generator=g)
    X = (patterns[y] + 0.3 * torch.rand(100, 784, generator=g)) / 0.65 - 1
    return (X, y), (X[-50:], y[-50:])


def trained() -> tuple[Training, dict[str, tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(1)
    X, y = torch.randn(60, 1, 2, 2, generator=g), torch.randint(3, (60,), generator=g)
    recipe = margins_batch.recipe(0, 20, 9, 60)
    recipe = type(recipe)(**{**vars(recipe), "model": smaller})
    data = {"train": (X, y), "test": (X[:10], y[:10])}
    return train(recipe, data), data


def dense_hessian(model: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    """Row by row, by double autograd."""
    params = list(model.parameters())
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(X), y), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradient])
    rows = [torch.autograd.grad(entry, params, retain_graph=True, materialize_grads=True) for entry in flat]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def test_trace_lambda_and_margins_are_those_of_all_training_images_in_evaluation_mode():
    done, data = trained()
    found = margins_batch.measured(done, margins_batch.recipe(0, 20, 9, 60), data, num=60, num_steps=25)
    H = dense_hessian(done.model.eval(), *data["train"])
    assert found["trace"] == pytest.approx(float(H.trace()), rel=1e-5)
    assert found["lambda_max"] == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-4)
    with torch.no_grad():
        f = done.model(data["train"][0])
    y = data["train"][1]
    own = f.gather(1, y[:, None])[:, 0]
    others = f.scatter(1, y[:, None], -torch.inf).amax(1)
    assert found["margin_min"] == pytest.approx(float((own - others).min()), rel=1e-5)
    assert found["train_accuracy"] == pytest.approx(100 * float((own > others).double().mean()), rel=1e-5)
    assert found["test_error"] + found["test_accuracy"] == pytest.approx(100.0, abs=1e-3)


def test_steps_are_about_those_asked_for():
    for size in (256, 4096):
        for steps in (10_000, 40_000):
            made = margins_batch.recipe(0, size, steps, 60_000).run(60_000).num_steps
            assert abs(made - steps) < 0.01 * steps


def row(kind: str, seed: int, **numbers: float) -> dict[str, object]:
    base = {
        "train_accuracy": 100.0,
        "train_loss": 1e-3,
        "trace": 5.0,
        "lambda_max": 1.0,
        "test_error": 1.5,
        "test_loss": 0.06,
    }
    base |= {"margin_median": 10.0, "margin_q10": 7.0, "skewness": -0.5, "margin_min": 6.0, "steps": 10}
    same, opposite = ({"correct": {"r": r, "filtered": r, "rho": r}} for r in (0.9, -0.9))
    related = {"aceht": same, "bound": same, "margin": opposite}
    return {"data": "MNIST", "kind": kind, "seed": seed, **related, **base, **numbers}


BETTER = {
    "trace": 2.0, "lambda_max": 0.5, "test_error": 1.2, "test_loss": 0.05, "margin_median": 12.0, "margin_q10": 8.0,
    "skewness": -0.9, "margin_min": 5.5,
}  # fmt: skip


def judged(small: dict[str, float], longer: dict[str, float], steps: int = 160) -> list[Claim]:
    rows = [
        row(kind, seed, **{key: value + 1e-4 * seed for key, value in own.items()})
        for seed in range(3)
        for kind, own in (("small", small), ("large", {}), ("longer", longer))
    ]
    rows = [{**one, "steps": steps} if one["kind"] == "longer" else one for one in rows]
    not_run = {"kind": "not run", "why": margins_batch.NOT_RUN}  # as a file has it
    return margins_batch.claims([*rows, not_run])


def verdicts(*given: dict[str, float]) -> list[str]:
    return [claim.verdict for claim in judged(*given)]


def one(claims: list[Claim], words: str) -> Claim:
    (found,) = [claim for claim in claims if words in claim.text]
    return found


CAUGHT_UP = {**BETTER, "margin_min": 6.5}


def test_what_the_paper_says_holds_where_small_batches_end_so():
    assert set(verdicts(BETTER, CAUGHT_UP)) == {"holds"}


def test_the_opposite_is_refuted():
    worse = {key: 2 * value - BETTER[key] for key, value in row("", 0).items() if key in BETTER}
    worse |= {"skewness": 0.3}
    found = verdicts(worse, {**worse, "test_error": worse["test_error"] + 0.5, "margin_min": 7.0})
    assert found == ["holds"] * 2 + ["refuted"] * 8 + ["holds"] * 8 + ["refuted"] + ["holds"] * 3 + ["refuted"] * 7


def test_larger_margins_with_a_worse_test_error_refute_that_margins_are_why():
    found = judged(BETTER, {**CAUGHT_UP, "margin_median": 13.0, "test_error": 1.4})
    assert one(found, "has margins like").verdict == "holds"
    assert one(found, "because their margins are smaller").verdict == "refuted"


def test_where_margins_stay_behind_nothing_is_said_of_their_effect():
    found = judged(BETTER, {**BETTER, "margin_median": 11.0, "test_error": 1.4})
    assert one(found, "has margins like").verdict == "refuted"
    assert one(found, "because their margins are smaller").verdict == "not decidable"
    assert "in 0 of 3 seeds" in one(found, "because their margins are smaller").evidence


def test_a_run_that_is_not_long_enough_does_not_decide_whether_the_large_batch_catches_up():
    found = [one(judged(BETTER, CAUGHT_UP, steps), "generalises as well") for steps in (40, 160)]
    assert [(claim.short_of, claim.verdict) for claim in found] == [
        ("4 times the steps, where the budget paper has 16", "not decidable"), ("", "holds")
    ]  # fmt: skip


def test_a_curve_that_is_no_line_has_the_ranks_and_not_r():
    rows = [row(kind, seed) for seed in range(2) for kind in ("small", "large")]
    for each in rows:
        each["margin"] = {"correct": {"r": -0.5, "filtered": -0.6, "rho": -0.99}}
    found = {claim.text: claim.verdict for claim in margins_batch.claims(rows) if "output margins" in claim.text}
    assert {text.split(": ")[1].split(" of")[0]: verdict for text, verdict in found.items()} == {
        "r": "refuted", "rank correlation": "holds"
    }  # fmt: skip


def test_a_training_loss_several_times_as_large_is_not_comparable():
    assert one(judged({**BETTER, "train_loss": 1e-2}, CAUGHT_UP), "comparable").verdict == "refuted"


def test_what_is_asked_of_other_data_is_ours():
    rows = [{**row(kind, seed), "data": "FashionMNIST"} for seed in range(2) for kind in ("small", "large")]
    found = margins_batch.claims(rows)
    assert len(found) == 2 + 6 + 4
    assert all(claim.ours for claim in found)


def test_softmax_margins_are_bounded_by_the_least_output_margin_and_close_to_1_only_where_that_is_large():
    g = torch.Generator().manual_seed(0)
    outputs = 4 * torch.randn(1000, 10, dtype=torch.float64, generator=g)
    (f, second), (S, next_) = (part.topk(2).values.T for part in (outputs, outputs.softmax(1)))
    bounds = torch.tensor([margins_batch.softmax_bounds(m) for m in (f - second).tolist()], dtype=torch.float64)
    assert bool((bounds[:, 0] <= S - next_).all() and (S - next_ <= bounds[:, 1]).all())
    verdicts = []
    for least in (6.0, 3.0, -1.0):
        rows = [row(kind, seed, margin_min=least) for seed in range(2) for kind in ("small", "large")]
        verdicts.append([claim.verdict for claim in margins_batch.claims(rows) if "softmax" in claim.text])
    assert verdicts == [["holds"] * 2, ["not decidable"] * 2, ["not decidable"] * 2]  # 3: from 0.66 to 0.91


def test_margins_below_zero_are_told_of():
    rows = [row(kind, seed, margin_min=-1.0) for seed in range(2) for kind in ("small", "large")]
    assert "the paper takes the size" in one(margins_batch.claims(rows), "least margin, small").evidence


def test_the_whole_path_runs(monkeypatch):
    monkeypatch.setattr(margins_points, "load_images", drawn_images)
    monkeypatch.setattr(margins_batch, "keskar_f1", tiny)
    rows, claims = margins_batch.run(Setting("smoke"), lambda *now: None)
    assert [(r.get("kind"), r.get("seed")) for r in rows] == [
        *((kind, seed) for kind in ("small", "large", "longer") for seed in (0, 1)), ("not run", None)
    ]  # fmt: skip
    assert [r["steps"] for r in rows[:6]] == [8, 8, 6, 6, 12, 12]
    assert len(claims) == 2 + 8 + 8 + 1 + 2 + 3 + 5
    assert sum(rows[0]["histogram"]["items"]) == 64
    assert rows[1]["points"] is None
    json.dumps(rows)
    pytest.importorskip("matplotlib")
    from ritz.papers.margins_batch_figure import figure

    assert [ax.get_xlabel() for ax in figure(rows).axes] == ["output margin", "output margin", "steps"]
