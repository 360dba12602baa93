"""GGN, Fishers and gradient covariance against explicit Jacobians, loss Hessians and per-item gradients."""

import itertools

import cases
import pytest
import torch
from torch import nn

import ritz
from ritz.errors import UnsupportedError
from ritz.operators import risk_operator
from ritz.operators.tape import Tape
from ritz.testing import check_operator

WIDE = ritz.Plan(chunk=200)
MATRICES = ("GGN", "EmpiricalFisher", "GradientCovariance")
DRAWN = ("mlp_smoothed", "mlp_soft", "mlp_mse", "mlp_bce", "pixels", "residual_train", "language")


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("matrix", MATRICES)
def test_a_matrix_is_the_dense_one(name, matrix):
    A = getattr(ritz, matrix)(cases.problem(name).risk(plan=WIDE))
    assert cases.relative(A.dense(), cases.truth(name, matrix)) < 1e-10


@pytest.mark.parametrize("name", ["mlp_smoothed", "mlp_custom", "pixels", "residual_train", "language", "unused"])
@pytest.mark.parametrize("matrix", [*MATRICES, "Fisher"])
def test_a_matrix_conforms(name, matrix):
    problem = cases.problem(name)
    if matrix == "Fisher" and not problem.likelihood:
        pytest.skip("no labels can be drawn")
    A = getattr(ritz, matrix)(problem.risk(plan=WIDE))
    check_operator(A)
    assert A.positive or name == "mlp_custom"


def test_positive_is_only_said_where_it_is_known():
    risk = cases.problem("mlp_custom").risk()
    assert not ritz.GGN(risk).positive  # any callable may be concave in the outputs
    assert ritz.EmpiricalFisher(risk).positive
    assert ritz.GGN(cases.problem("mlp_bce").risk()).positive


@pytest.mark.parametrize("name", ["mlp_custom", "conv", "residual_train", "language", "unused"])
def test_reverse_mode_alone_gives_the_same_ggn(name):
    G = ritz.GGN(cases.problem(name).risk(plan=WIDE))
    G._forward_mode = False
    assert cases.relative(G.dense(), cases.truth(name, "GGN")) < 1e-10


@pytest.mark.parametrize("tf32", [False, True])
def test_round_off_of_tf32_is_not_taken_for_a_forward_derivative_that_is_wrong(monkeypatch, tf32):
    push = Tape.push
    monkeypatch.setattr(Tape, "push", lambda tape, rows: (1.2 * push(tape, rows)[0], {}))
    monkeypatch.setattr(risk_operator, "multiplies_in_tf32", lambda device: tf32)
    G = ritz.GGN(cases.problem("mlp_relu").risk(dtype=torch.float32))
    G.rows(G.probes([0], seed=0))
    assert G._forward_mode == tf32


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", ["mlp_weighted", "mlp_bce", "language"])
def test_any_split_into_batches_and_any_chunk_gives_the_same_matrix(name, matrix):
    problem, truth = cases.problem(name), cases.truth(name, matrix)
    X, y = problem.data
    V = torch.randn(len(truth), 3, generator=torch.Generator().manual_seed(0))
    for sizes, chunk in zip(cases.partitions(len(X)), itertools.cycle((1, 3, 8)), strict=False):
        A = getattr(ritz, matrix)(problem.risk(cases.split(X, y, sizes), plan=ritz.Plan(chunk=chunk)))
        assert cases.relative(A @ V, truth @ V) < 1e-10, (sizes, chunk)


@pytest.mark.parametrize("matrix", [*MATRICES, "Fisher"])
def test_pieces_of_a_batch_add_up_to_it(matrix):
    problem = cases.problem("language")
    whole, pieces = (getattr(ritz, matrix)(problem.risk(plan=ritz.Plan(micro_batch=m))) for m in (None, 1))
    v = whole.probes([0], seed=0)[0]
    torch.testing.assert_close(pieces @ v, whole @ v, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("matrix", [*MATRICES, "Fisher"])
def test_a_block_is_a_sub_matrix(matrix):
    problem = cases.problem("attention")
    A = getattr(ritz, matrix)(problem.risk(plan=WIDE))
    place, dense = A.space.slices["head.weight"], A.dense()
    torch.testing.assert_close(A.block("head.weight").dense(), dense[place, place], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["mlp_relu", "conv"])
def test_the_trace_of_a_piecewise_linear_network_is_the_same_for_both_matrices(name):
    hessian, ggn = cases.truth(name, "Hessian"), ritz.GGN(cases.problem(name).risk(plan=WIDE)).dense()
    assert float(ggn.trace()) == pytest.approx(float(hessian.trace()), rel=1e-10)
    assert cases.relative(ggn, hessian) > 1e-2  # and yet they differ


def test_the_ggn_of_a_linear_model_is_its_hessian():
    risk = ritz.Risk(nn.Linear(4, 3), nn.CrossEntropyLoss(), cases.problem("mlp_relu").batches)
    assert cases.relative(ritz.GGN(risk).dense(), ritz.Hessian(risk).dense()) < 1e-12


def test_the_gradient_covariance_is_centred():
    problem = cases.problem("language")
    risk = problem.risk(plan=WIDE)
    g = risk.gradient()
    second = ritz.EmpiricalFisher(risk).dense()
    torch.testing.assert_close(second - ritz.GradientCovariance(risk).dense(), torch.outer(g, g))


def test_the_gradient_covariance_follows_the_weights():
    problem = cases.make("mlp_mse")
    C = ritz.GradientCovariance(problem.risk(plan=WIDE))
    C.dense()
    with torch.no_grad():
        problem.model[0].weight.mul_(1.5)
    assert cases.relative(C.dense(), cases.dense_gradient_covariance(problem)) < 1e-10


@pytest.mark.parametrize("matrix", [*MATRICES, "Fisher"])
def test_single_precision_is_close_to_double(matrix):
    problem = cases.problem("conv")
    single, double = (getattr(ritz, matrix)(problem.risk(dtype=d, plan=WIDE)) for d in (torch.float32, torch.float64))
    assert single.dense().dtype == torch.float32
    assert cases.relative(single.dense().double(), double.dense()) < 1e-4


# -------------------------------------------------------------------------------------- Monte Carlo Fisher


@pytest.mark.parametrize("name", DRAWN)
def test_the_mean_of_the_fisher_over_seeds_is_the_ggn(name):
    """Fixed quadratic forms, so that each deviation is one standard normal number."""
    truth = cases.truth(name, "GGN")
    risk = cases.problem(name).risk(plan=WIDE)
    V = ritz.GGN(risk).probes(range(4), seed=0, distribution="normal").T
    seen = torch.stack([(V * (ritz.Fisher(risk, num_samples=6, seed=s) @ V)).sum(0) for s in range(32)])  # (seeds, 4)
    z = (seen.mean(0) - (V * (truth @ V)).sum(0)) / (seen.std(0) / len(seen) ** 0.5)
    assert float(z.abs().max()) < 4.5
    assert float(seen.std(0).min()) > 0


def test_the_empirical_fisher_would_fail_that():
    truth, wrong = cases.truth("mlp_relu", "GGN"), cases.truth("mlp_relu", "EmpiricalFisher")
    assert cases.relative(wrong, truth) > 0.1


@pytest.mark.parametrize("name", ["mlp_weighted", "mlp_mse", "mlp_bce", "pixels", "language"])
def test_the_fisher_is_one_matrix_for_every_split_of_the_data(name):
    problem = cases.problem(name)
    X, y = problem.data
    V = ritz.GGN(problem.risk()).probes(range(2), seed=0).T
    images = [ritz.Fisher(problem.risk(cases.split(X, y, s)), 2, seed=5) @ V for s in cases.partitions(len(X))]
    for image in images[1:]:
        torch.testing.assert_close(image, images[0], rtol=1e-10, atol=1e-14)


def test_more_samples_add_draws_to_those_of_fewer():
    risk = cases.problem("mlp_relu").risk(plan=WIDE)
    one, three = ritz.Fisher(risk, 1, seed=2).dense(), ritz.Fisher(risk, 3, seed=2).dense()
    rest = torch.linalg.eigvalsh(3 * three - one)  # the other two draws: positive, of rank at most 2 N
    assert float(rest[0]) > -1e-12
    assert int((rest > 1e-12).sum()) <= 22
    assert cases.relative(one, three) > 1e-3


def test_more_samples_come_nearer_to_the_ggn():
    risk, truth = cases.problem("mlp_relu").risk(plan=WIDE), cases.truth("mlp_relu", "GGN")
    few, many = (cases.relative(ritz.Fisher(risk, n, seed=0).dense(), truth) for n in (1, 100))
    assert many < 0.3 * few


def test_another_seed_draws_other_labels():
    risk = cases.problem("mlp_mse").risk(plan=WIDE)
    assert cases.relative(ritz.Fisher(risk, seed=1).dense(), ritz.Fisher(risk, seed=0).dense()) > 1e-2


def test_the_fisher_says_how_many_labels_it_drew():
    assert "3 drawn labels per item, seed 4" in ritz.Fisher(cases.problem("mlp_relu").risk(), 3, seed=4).convention()


# ------------------------------------------------------------------------------------------------ refusals


def test_a_loss_without_likelihood_has_no_fisher():
    with pytest.raises(UnsupportedError, match="needs a likelihood to draw labels from"):
        ritz.Fisher(cases.problem("mlp_custom").risk()).dense()


def test_at_least_one_label_is_drawn():
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        ritz.Fisher(cases.problem("mlp_relu").risk(), num_samples=0)


@pytest.mark.parametrize("matrix", [*MATRICES, "Fisher"])
def test_an_opaque_loss_has_no_outputs_and_so_none_of_these(matrix):
    risk = ritz.Risk(nn.Linear(2, 1), data=[(torch.ones(3, 2),)], batch_loss=lambda m, b: (m(b[0]).sum(), 3))
    with pytest.raises(UnsupportedError, match="Gauss-Newton and Fisher matrices"):
        getattr(ritz, matrix)(risk)


def test_drawn_labels_need_data_in_a_fixed_order():
    X, y = cases.problem("mlp_relu").data
    data = torch.utils.data.TensorDataset(X, y)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    streamed = cases.problem("mlp_relu").risk(loader, plan=ritz.Plan(cache=False))
    with pytest.raises(UnsupportedError, match="needs data in a fixed order"):
        ritz.Fisher(streamed).dense()
    kept = ritz.Fisher(cases.problem("mlp_relu").risk(loader, plan=WIDE))  # kept on the device, in one order
    torch.testing.assert_close(kept.dense(), kept.dense(), rtol=0, atol=0)
    assert cases.relative(ritz.GGN(streamed).dense(), cases.truth("mlp_relu", "GGN")) < 1e-10
