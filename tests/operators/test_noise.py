"""The noise of a batch against dense matrices of the batch and of the whole."""

import cases
import pytest
import torch

import ritz
from ritz.errors import UnsupportedError
from ritz.operators import BatchNoise, DenseOperator
from ritz.testing import check_operator

WIDE = ritz.Plan(chunk=200)


def of_batch(problem: cases.Problem, index: int) -> cases.Problem:
    return cases.Problem(problem.model, problem.loss, [problem.batches[index]], mode=problem.mode)


@pytest.mark.parametrize("name", ["mlp_weighted", "residual_train", "language"])
@pytest.mark.parametrize("matrix", ["Hessian", "GGN", "EmpiricalFisher", "GradientCovariance"])
def test_the_noise_is_the_matrix_of_the_batch_less_that_of_the_whole(name, matrix):
    problem = cases.problem(name)
    X = BatchNoise(getattr(ritz, matrix)(problem.risk(plan=WIDE)), index=1)
    truth = cases.DENSE[matrix](of_batch(problem, 1)) - cases.truth(name, matrix)
    assert cases.relative(X.dense(), truth) < 1e-10


@pytest.mark.parametrize("matrix", ["Hessian", "GGN", "EmpiricalFisher", "Fisher"])
def test_the_noise_of_all_batches_has_mean_zero(matrix):
    """Each batch counted by its weight; for drawn labels only if they are the same in the batch as in the whole."""
    problem = cases.problem("mlp_relu")
    A = getattr(ritz, matrix)(problem.risk(plan=WIDE))
    noises = [BatchNoise(A, index).dense() * len(batch[0]) for index, batch in enumerate(problem.batches)]
    assert float(sum(noises).norm()) < 1e-12 * float(noises[0].norm())


def test_dropped_units_are_those_of_the_batch_in_the_whole():
    problem = cases.problem("mlp_mse")
    model = torch.nn.Sequential(problem.model[0], torch.nn.Dropout(0.5), problem.model[2])
    risk = ritz.Risk(model, problem.loss, problem.batches, dropout=True, plan=WIDE)
    H = ritz.Hessian(risk, route="reverse")
    noises = [BatchNoise(H, index).dense() * len(batch[0]) for index, batch in enumerate(problem.batches)]
    assert float(sum(noises).norm()) < 1e-12 * float(noises[0].norm())


def test_the_noise_conforms_and_has_no_sign():
    X = BatchNoise(ritz.GGN(cases.problem("mlp_relu").risk(plan=WIDE)), index=0)
    check_operator(X)
    assert not X.positive
    assert "noise of batch 0 of the GGN" in X.convention()


def test_one_batch_of_one_has_no_noise():
    problem = cases.problem("mlp_relu")
    X = BatchNoise(ritz.Hessian(problem.risk(problem.data, plan=WIDE), route="reverse"), index=0)
    assert float(X.dense().abs().max()) == 0


def test_a_batch_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="there is no batch 3; the data has 3, counted from 0"):
        BatchNoise(ritz.Hessian(cases.problem("mlp_relu").risk()), index=3)


def test_a_shuffling_loader_has_no_fixed_batches():
    data = torch.utils.data.TensorDataset(*cases.problem("mlp_relu").data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    with pytest.raises(UnsupportedError, match=r"fix them with data=list\(loader\)"):
        BatchNoise(ritz.Hessian(cases.problem("mlp_relu").risk(loader)), index=0)


def test_a_matrix_of_no_risk_has_no_batches():
    with pytest.raises(TypeError, match=r"expected the Hessian, .* got DenseOperator"):
        BatchNoise(DenseOperator(torch.eye(2)), index=0)
