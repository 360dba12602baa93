import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ritz
from ritz.papers import mnist_mlp, subsampling, subsampling_logdet
from ritz.papers.experiment import Setting
from ritz.papers.subsampling_logdet import SubSample


def noise(num: int, width: int = 784, seed: int = 0) -> mnist_mlp.Data:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(num, width, generator=g) * 2 - 1, torch.randint(10, (num,), generator=g)


@pytest.fixture(scope="module")
def roots() -> torch.Tensor:
    """Roots of 16 images under a network 4-3-5 with random weights, (16, 5, 35)."""
    model = ritz.models.mlp(5, in_features=4, hidden=(3,), seed=1).double()
    return subsampling_logdet.roots(dict(model.state_dict()), noise(16, 4)[0])


# --------------------------------------------------------------------------------------- log-determinants


def test_roots_are_those_of_the_gauss_newton_matrix():
    data = noise(7, 4)
    model = ritz.models.mlp(10, in_features=4, hidden=(3, 6), seed=2).double()
    R = subsampling_logdet.roots(dict(model.state_dict()), data[0]).flatten(0, 1)
    truth = ritz.GGN(ritz.Risk(model, nn.CrossEntropyLoss(), data)).dense()
    torch.testing.assert_close(R.T @ R / 7, truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num", [4, 16])  # fewer roots than parameters, and more
def test_log_determinants_are_those_of_the_dense_matrix(roots, num):
    R = roots[:num].flatten(0, 1)
    dense = R.T @ R / num + 0.1 * torch.eye(35)
    found = SubSample(roots[:num]).corrected(0.1)["none"]
    assert found == pytest.approx(float(torch.logdet(dense)), rel=1e-9)


@given(st.floats(-50, 50), st.floats(0.1, 100), st.floats(0, 500))
def test_extrapolation_is_exact_on_its_own_curves(limit, c, b):
    values = [limit - c / (B + b) for B in (64, 32, 16)]
    found = subsampling_logdet.extrapolate(*values)
    assert found == pytest.approx(limit, abs=1e-3 * (1 + c + abs(limit)))


def test_extrapolation_without_b_is_richardsons():
    values = [3 - 8 / B for B in (16, 8, 4)]
    assert subsampling_logdet.extrapolate(*values) == pytest.approx(2 * values[0] - values[1])


def test_values_on_no_such_curve_give_no_number():
    assert math.isnan(subsampling_logdet.extrapolate(10.0, 5.0, 4.0))  # it rises faster and faster
    assert math.isnan(subsampling_logdet.extrapolate(1.0, 2.0, 1.5))
    assert subsampling_logdet.extrapolate(2.0, 2.0, 2.0) == 2.0


def test_two_moments_are_those_that_were_asked_for(roots):
    found = SubSample(roots).corrected(0.1)
    R = roots.flatten(0, 1)
    values = torch.linalg.eigvalsh(R.T @ R / 16)
    first, second = (r.flatten(0, 1) for r in roots.split(8))
    wanted = float(((first.T @ first / 8) * (second.T @ second / 8)).sum())  # Tr G_1 G_2
    mean = values.mean()
    shrunk = mean + (values - mean) * ((wanted - 35 * mean**2) / (values.square().sum() - 35 * mean**2)).sqrt()
    assert float(shrunk.square().sum()) == pytest.approx(wanted, rel=1e-9)
    assert found["two moments"] == pytest.approx(float((shrunk + 0.1).log().sum()), rel=1e-9)


def test_noise_without_direction_is_corrected_to_second_order():
    # the formula of "isotropic noise", on noise that is so: log |A| - E log |A + X| = Tr(X^2) (Tr Q)^2 / 2 P^2
    dim, size = 60, 0.02
    A = torch.linspace(1, 2, dim)
    g = torch.Generator().manual_seed(0)
    lost, squares = [], []
    for _ in range(40):
        X = torch.randn(dim, dim, generator=g) * size
        X = (X + X.T) / 2**0.5
        lost.append(float(A.log().sum() - torch.logdet(torch.diag(A) + X)))
        squares.append(float(X.square().sum()))
    predicted = 0.5 * sum(squares) / 40 * (float((1 / A).sum()) / dim) ** 2
    assert sum(lost) / 40 == pytest.approx(predicted, rel=0.2)


def test_a_sub_sample_errs_downwards_and_extrapolation_takes_most_of_it_away():
    # images of one kind, where 1 / B is the law: Gaussian roots with a spectrum that falls
    g = torch.Generator().manual_seed(3)
    scale = torch.linspace(0, 3, 40).neg().exp()
    everything = torch.randn(4000, 1, 40, generator=g) * scale
    R = everything[:, 0]
    truth = float(torch.logdet(R.T @ R / 4000 + 0.05 * torch.eye(40)))
    drawn = [torch.randint(4000, (200,), generator=g) for _ in range(12)]
    found = [SubSample(everything[rows]).corrected(0.05) for rows in drawn]
    errors = {name: sum(one[name] for one in found) / 12 - truth for name in subsampling_logdet.METHODS}
    assert errors["none"] < -1
    assert abs(errors["1 / (B + b)"]) < 0.25 * abs(errors["none"])
    assert abs(errors["1 / B"]) < 0.5 * abs(errors["none"])


@pytest.mark.parametrize("num", [2, 6])
def test_a_sub_sample_that_has_no_quarters_is_refused(roots, num):
    with pytest.raises(ValueError, match=f"multiple of 4, got {num}"):
        SubSample(roots[:num])


# ----------------------------------------------------------------------------------------------- figure 2


def test_squares_of_single_images_are_those_of_their_matrices(roots):
    truth = torch.stack([(R.T @ R).square().sum() for R in roots])
    torch.testing.assert_close(subsampling._squares(roots), truth, rtol=1e-9, atol=1e-12)


def test_the_trace_of_a_batch_is_that_of_its_images():
    data = noise(12)
    params = dict(mnist_mlp.make_network(0, torch.float64).state_dict())
    rows = subsampling.moments(params, data, [4], repeats=1, seed=5, num_steps=4, num_probes=2)
    R = subsampling_logdet.roots(params, data[0])
    drawn = ritz.space.random_uniform(4, ("figure 2", 5, 4, 0)).mul(12).long()
    found = {row["matrix"]: row for row in rows}
    assert found["G"]["trace"][0] == pytest.approx(float(R[drawn].square().sum()) / 4, rel=1e-2)  # two probes beyond 32
    assert found["G"]["whole trace"] == pytest.approx(float(R.square().sum()) / 12, rel=5e-2)
    own = R[drawn].flatten(0, 1)
    assert found["G"]["square"][0] == pytest.approx(float((own @ own.T).square().sum()) / 16, rel=1e-3)


def moments(traces: list[float], squares: list[float], variance: float) -> list[dict]:
    one = {"kind": "moments", "matrix": "G", "images": 9, "size": 10, "whole trace": 2.0, "whole square": 4.0}
    return [one | {"variance": variance, "trace": traces, "square": squares, "seed": seed} for seed in (0, 1)]


def test_traces_that_agree_and_squares_that_follow_the_law_hold():
    found = subsampling.claims(moments([1.98, 2.02], [5.9, 6.1], 20.0))
    assert [claim.verdict for claim in found] == ["holds"] * 3


def test_traces_that_differ_and_squares_that_do_not_are_refuted():
    found = subsampling.claims(moments([2.48, 2.52], [3.85, 3.95], 20.0))
    assert [claim.verdict for claim in found] == ["refuted"] * 3


@pytest.mark.parametrize(("trace", "square", "verdicts"), [(0.02, 0.5, ["holds"] * 2), (0.6, 0.1, ["refuted"] * 2)])
def test_a_single_batch_of_the_figure_has_the_trace_better_than_the_square(trace, square, verdicts):
    rows = moments([2 - 2 * trace, 2 + 2 * trace], [4 - 4 * square, 4 + 4 * square], 20.0)
    found = [c for c in subsampling.claims([row | {"size": 128} for row in rows]) if c.text.startswith("one batch")]
    assert [claim.verdict for claim in found] == verdicts
    assert [claim.ours for claim in found] == [False, True]  # how accurate is accurate enough, the paper does not say
    assert float(found[0].measured.value) == pytest.approx(trace / square)


def logdets(**errors: list[float]) -> dict[str, ritz.papers.base.Claim]:
    """Claims by the start of their texts."""
    every = {name: [-10.0, -12.0] for name in subsampling_logdet.METHODS} | errors
    row = {"kind": "logdet", "seed": 0, "dim": 7, "images": 9, "size": 8, "level": 0.1, "truth": 50.0, "errors": every}
    return {claim.text.split(":")[0]: claim for claim in subsampling.claims([row, row | {"seed": 1}])}


def test_what_is_left_of_an_error_is_judged_by_its_size_and_not_its_sign():
    found = logdets(**{"1 / B": [-2.0, 2.0]})
    assert found["log |G_B + d I| corrected by 1 / B"].verdict == "holds"
    assert found["log |G_B + d I| corrected by 1 / (B + b)"].verdict == "refuted"
    assert all(claim.ours == ("corrected" in text) for text, claim in found.items())


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [([-10.0, -12.0], "holds"), ([-1.0, -1.1], "holds in direction"), ([1.0, 1.1], "refuted")],
)
def test_a_sub_sample_that_errs_downwards_by_little_has_the_direction(errors, verdict):
    assert logdets(none=errors)["log |G_B + d I| cannot be obtained from a sub-sample"].verdict == verdict


def test_the_smoke_run_goes_all_the_way(monkeypatch):
    parts = tuple(part.float() if part.is_floating_point() else part for part in noise(40))
    monkeypatch.setattr(mnist_mlp, "load_mnist", lambda root, device: (parts, parts, parts))
    rows, claims = subsampling.run(Setting("smoke"), lambda *what: None)
    assert {row["kind"] for row in rows} == {"moments", "logdet"}
    assert {claim.paper for claim in claims} == {"seed 002"}
    assert len(json.dumps(rows)) < 300_000
    assert len(subsampling.figure(rows).get_axes()) == 3


def test_a_figure_is_drawn_from_a_file_where_a_correction_gave_no_number():
    errors = {name: [-1.0, 2.0] for name in subsampling_logdet.METHODS} | {"1 / (B + b)": ["nan", 1.0]}
    row = {"kind": "logdet", "seed": 0, "size": 8, "level": 0.1, "truth": 50.0, "errors": errors}
    whole = {"whole trace": 2.0, "whole square": 4.0, "variance": 1.0}
    one = {"kind": "moments", "seed": 0, "size": 8, "trace": [2.0, 2.1], "square": [4.1, 4.2]} | whole
    picture = subsampling.figure([row, one | {"matrix": "H"}, one | {"matrix": "G"}])
    assert len(picture.get_axes()) == 3
