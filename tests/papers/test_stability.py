import json
import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ritz
from ritz.operators import DenseOperator
from ritz.papers import mnist_mlp, softmax, stability, stability_claims, stability_ritz
from ritz.papers.experiment import Setting
from ritz.papers.stability import Descent
from ritz.papers.stability_noise import HessianVariance, SquaredHessians, top_ritz_value


def noise(num: int, seed: int = 0) -> mnist_mlp.Data:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(num, 784, generator=g) * 2 - 1, torch.randint(10, (num,), generator=g)


@pytest.fixture(scope="module")
def problem() -> tuple[ritz.Risk, torch.Tensor]:
    """A small network and the Hessian of each of its five samples, by double autograd, (5, dim, dim)."""
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    X, y = torch.randn(5, 3, generator=g), torch.randint(3, (5,), generator=g)
    params = list(model.parameters())
    each = []
    for i in range(5):
        slopes = torch.autograd.grad(F.cross_entropy(model(X[i : i + 1]), y[i : i + 1]), params, create_graph=True)
        flat = torch.cat([s.flatten() for s in slopes])
        rows = [torch.autograd.grad(s, params, retain_graph=True, materialize_grads=True) for s in flat]
        each.append(torch.stack([torch.cat([p.flatten() for p in row]) for row in rows]))
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=2), torch.stack(each)


# ------------------------------------------------------------------------------------------------- noise


def test_the_mean_of_squared_hessians_is_that_of_single_samples(problem):
    risk, each = problem
    torch.testing.assert_close(SquaredHessians(risk).dense(), (each @ each).mean(0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_variance_of_the_hessian_is_the_mean_over_all_batches(problem, size):
    risk, each = problem
    gaps = [each[list(batch)].mean(0) - each.mean(0) for batch in combinations(range(5), size)]
    truth = torch.stack([X @ X for X in gaps]).mean(0)
    torch.testing.assert_close(HessianVariance(risk, size).dense(), truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [0, 6])
def test_batches_that_the_data_cannot_have_are_refused(problem, size):
    with pytest.raises(ValueError, match="between 1 and the 5 samples"):
        HessianVariance(problem[0], size)


def test_the_top_ritz_value_of_all_steps_is_the_largest_eigenvalue(problem):
    risk, each = problem
    truth = float(torch.linalg.eigvalsh(each.mean(0))[-1])
    assert top_ritz_value(ritz.Hessian(risk), 100) == pytest.approx(truth, rel=1e-6)


# --------------------------------------------------------------------------------------------- descending


@pytest.mark.parametrize(("batch", "momentum"), [(0, 0.0), (0, 0.9), (4, 0.9)])
def test_descents_side_by_side_are_those_of_torch_one_by_one(batch, momentum):
    X, y = noise(10)
    rows = stability.descend(Descent("softmax", batch, momentum, (1e-3, 1e-2)), (X, y), [3, 4], 4, 2, lanczos_steps=2)
    assert [(row["seed"], row["rate"]) for row in rows] == [(3, 1e-3), (3, 1e-2), (4, 1e-3), (4, 1e-2)]
    for row in rows:
        model = softmax.make_network(row["seed"], torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=row["rate"], momentum=momentum)
        for step in range(4):
            epoch, place = divmod(step, 2)  # of batches of 4 out of 10, the last two images left out
            at = mnist_mlp.batch_order(10, row["seed"], epoch)[4 * place : 4 * place + 4] if batch else slice(None)
            optimizer.zero_grad()
            F.cross_entropy(model(X[at]), y[at]).backward()
            optimizer.step()
        assert row["step"] == [0, 2, 4]
        assert row["loss"][-1] == pytest.approx(F.cross_entropy(model(X), y).item(), rel=1e-4)


def test_noise_is_measured_for_batches_alone_at_the_half_and_the_end():
    data = noise(6)
    (row,) = stability.descend(Descent("softmax", 2, 0.0, (1e-3,)), data, [0], 4, 1, lanczos_steps=4)
    assert [look[0] for look in row["variance"]] == [2, 4]
    (row,) = stability.descend(Descent("softmax", 0, 0.0, (1e-3,)), data, [0], 2, 1, lanczos_steps=2)
    assert row["variance"] == []


def test_a_descent_that_blows_up_is_not_a_number_and_decides_nothing():
    rows = stability.descend(Descent("MLP", 0, 0.0, (1e200,)), noise(6), [0, 1], 4, 2, lanczos_steps=2)
    assert all(math.isnan(row["lambda_max"][-1]) for row in rows)
    found = stability_claims.claims(rows)
    assert found[0].verdict == "not decidable"


def test_batches_larger_than_the_data_are_refused():
    with pytest.raises(ValueError, match="0 \\(all\\) to 6 images, got 7"):
        stability.descend(Descent("softmax", 7, 0.0, (0.1,)), noise(6), [0], 1, 1)


# ---------------------------------------------------------------------------------------------- theorem 2


@pytest.mark.parametrize("seed", range(3))
def test_theorem_2_is_never_broken_by_a_dense_matrix(seed):
    g = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(30, 30, generator=g))
    values = torch.cat([torch.tensor([9.0, 5.0]), torch.rand(26, generator=g), torch.tensor([-0.5, -1.0])])
    found = stability_ritz.extremes(DenseOperator(Q @ torch.diag(values) @ Q.T), num_steps=12)
    assert found["above"] == found["below"] == found["smallest"] == 0
    assert found["lambda"] == pytest.approx([9.0, 5.0, -0.5, -1.0], rel=1e-6)
    assert found["steps to 1 %"] <= found["steps to 1 %, allowed"]


def test_the_smallest_ritz_value_breaks_the_bound_with_the_gap_of_the_largest():
    values = torch.cat([torch.tensor([100.0]), torch.linspace(0, 1, 60)])  # a far top, a crowded bottom
    found = stability_ritz.extremes(DenseOperator(torch.diag(values)), num_steps=8)
    assert found["smallest"] == 0
    assert found["smallest as printed"] > 0


def test_a_bound_that_is_broken_is_counted():
    cosine = torch.tensor([0.6])
    assert stability_ritz.bound(cosine, 3.0, 2.0, 0.0, 3)[0, 2] == pytest.approx(3 * 16 / 9 / 7**2)  # c_2(2) = 7


# ------------------------------------------------------------------------------------------------- claims


def descent(batch: int, tops: list[float], variance: float, rate: float = 0.1) -> list[dict]:
    curve = {"step": [0, 1, 2], "lambda_max": tops, "loss": [2.0, 1.0, 0.5]}
    looks = [[1, tops[1], variance], [2, tops[2], variance]] if batch else []
    one = {"kind": "descent", "network": "MLP", "batch": batch, "momentum": 0.0, "rate": rate, "images": 10}
    return [one | curve | {"variance": looks, "seed": seed} for seed in (0, 1)]


def test_noise_makes_the_bound_stricter():
    quiet, loud = (stability_claims.claims(descent(16, [1.0, 18.0, 18.0], v)) for v in (1.0, 80.0))
    assert [claim.verdict for claim in quiet] == ["holds"] * 3  # (1 - 1.8)^2 + 0.01 < 1, and 18 is near 19.9
    assert [claim.verdict for claim in loud] == ["holds", "refuted", "refuted"]  # (1 - 1.8)^2 + 0.8 > 1


def test_where_no_point_is_stable_there_is_no_bound_to_be_tight():
    rows = descent(16, [1.0, 18.0, 18.0], 1.0)
    for row in rows:
        row["variance"][0][2] = 120.0  # a^2 v = 1.2
    claim = stability_claims.claims(rows)[-1]
    assert "tight" in claim.text
    assert float(claim.measured.value) == pytest.approx(1.8 / (1 + math.sqrt(0.99)))
    assert claim.evidence.endswith("2 of these looks, which have no bound, are left out")
    assert not any("tight" in claim.text for claim in stability_claims.claims(descent(16, [1.0, 18.0, 18.0], 120.0)))


@pytest.mark.parametrize("batch", [0, 16])
def test_runs_that_are_not_trained_decide_nothing(batch):
    rows = descent(batch, [1.0, 18.0, 18.0], 1.0)
    rows[1]["loss"] = [2.0, 2.0, 1.1]
    found = [claim for claim in stability_claims.claims(rows) if "on the way" not in claim.text]
    assert {claim.verdict for claim in found} == {"not decidable"}
    assert {claim.short_of for claim in found} == {"1 of 2 seeds trained to half of the first loss"}


def test_tightness_is_what_the_paper_quotes_of_sgd_in_deep_learning_and_else_a_question_of_ours():
    rows = [*descent(0, [1.0, 18.0, 18.0], 0.0), *descent(16, [1.0, 18.0, 18.0], 1.0)]
    rows += [row | {"network": "softmax"} for row in rows]
    tight = [claim for claim in stability_claims.claims(rows) if "tight" in claim.text]
    assert [claim.ours for claim in tight] == [True, False, True, True]


def test_a_seed_that_leaps_does_not_blur_the_others():
    one = descent(0, [1.0, 0.0, 18.0], 0.0)[0]
    rows = [one | {"seed": seed, "lambda_max": [1.0, top, 18.0]} for seed, top in enumerate((30.0, 32.0, 34.0, 60.0))]
    claim = next(c for c in stability_claims.claims(rows) if "on the way" in c.text)
    assert claim.verdict == "refuted"  # all are above 20; the interval of the arithmetic mean begins at 0.83
    assert claim.measured.interval()[0] > 1
    assert claim.ours


def test_momentum_moves_the_bound():
    rows = [row | {"momentum": 0.9} for row in descent(0, [1.0, 36.0, 36.0], 0.0)]
    found = stability_claims.claims(rows)
    assert [claim.verdict for claim in found] == ["holds", "refuted", "holds", "holds"]  # 38, not 20
    assert all(claim.ours for claim in found)


@pytest.mark.parametrize(("top", "verdicts"), [(40.0, ["holds"] * 2), (1e5, ["refuted"] * 2)])
def test_the_run_whose_rate_falls_is_held_against_both_of_its_rates(top, verdicts):
    one = {"kind": "falling", "network": "MLP", "momentum": 0.9, "images": 10, "rate": 1e-4, "first rate": 0.01}
    rows = [one | {"seed": seed, "lambda_max": top + seed} for seed in (0, 1)]
    found = stability_claims.claims(rows)
    assert [claim.verdict for claim in found] == verdicts
    assert all(claim.ours for claim in found)  # the paper has it of its ResNets


def test_the_two_readings_of_equation_17_are_named():
    row = {"kind": "ritz", "network": "MLP", "checks": 9, "steps to 1 %": 2, "steps to 1 %, allowed": 3}
    found = stability_claims.claims([row | {"above": 0, "below": 0, "smallest": 0, "smallest as printed": 4}])
    assert [claim.verdict for claim in found] == ["holds", "holds", "holds", "refuted"]
    assert [claim.where for claim in found[2:]] == ["equation 17, mended", "equation 17, lambda_m read as lambda_n"]
    assert [claim.ours for claim in found] == [False, False, True, True]


def test_sgd_is_held_against_gradient_descent_at_the_same_rate():
    rows = descent(0, [1.0, 20.0, 20.0], 0.0) + descent(16, [1.0, 12.0, 12.0], 1.0)
    claim = next(c for c in stability_claims.claims(rows) if "flatter" in c.text)
    assert claim.verdict == "holds"
    assert float(claim.measured.value) == pytest.approx(0.6)


@pytest.mark.parametrize("batch", [0, 16])
def test_what_has_learned_nothing_is_not_flatter(batch):
    rows = descent(0, [1.0, 20.0, 20.0], 0.0) + descent(16, [1.0, 0.01, 0.01], 1.0)
    for row in rows:
        if row["batch"] == batch:
            row["loss"] = [2.3, 2.3, 2.3]
    claim = next(c for c in stability_claims.claims(rows) if "flatter" in c.text)
    assert (claim.verdict, claim.short_of) == ("not decidable", "0 of 2 seeds trained to half of the first loss")


def test_the_smoke_run_goes_all_the_way(monkeypatch):
    parts = tuple(part.float() if part.is_floating_point() else part for part in noise(32))
    monkeypatch.setattr(mnist_mlp, "load_mnist", lambda root, device: (parts, parts, parts))
    rows, claims = stability.run(Setting("smoke"), lambda *what: None)
    assert {row["kind"] for row in rows} == {"descent", "falling", "ritz"}
    assert {claim.paper for claim in claims} == {"seed 000"}
    assert len(json.dumps(rows)) < 300_000
    assert len(stability.figure(rows).get_axes()) >= 4
