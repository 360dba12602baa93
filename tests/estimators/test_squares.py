"""Exact traces and diagonals of operators, and traces of each parameter's block, against dense matrices."""

import pytest
import torch
from sample_truth import CE, CURVED, Residual, Tokens, Twice, data, labels, mlp, randomised, seeded
from torch import nn

from ritz.errors import UnsupportedError
from ritz.estimators import squares
from ritz.estimators.exact import exact_cost, exact_diagonal, exact_trace
from ritz.losses import CrossEntropy
from ritz.operators import GGN, BatchNoise, DenseOperator, EmpiricalFisher, Fisher, GradientCovariance, Hessian
from ritz.risk import Risk

torch.set_default_dtype(torch.float64)


def token_risk(**keywords) -> Risk:
    X, y = torch.randint(0, 5, (5, 4), generator=seeded(3)), labels(5, 4)
    y[0, 2:], y[3, 0] = -100, -100
    loss = CrossEntropy(torch.tensor([0.5, 2.0, 1.0]), label_smoothing=0.2, class_dim=-1)
    return Risk(randomised(Tokens()), loss, (X, y), batch_size=3, **keywords)


RISKS = {
    "MLP": lambda: Risk(randomised(mlp(4, 5, 3)), CE, (data(7, 4), labels(7)), batch_size=3),
    "class weights": lambda: Risk(
        randomised(mlp(4, 5, 3)), nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.0])), (data(7, 4), labels(7)),
        batch_size=3,
    ),
    "squared error": lambda: Risk(randomised(mlp(4, 5, 3)), nn.MSELoss(), (data(7, 4), data(7, 3)), batch_size=3),
    "convnet": lambda: Risk(randomised(Residual()), CE, (data(5, 2, 3, 3), labels(5)), batch_size=2),
    "masked tokens": token_risk,
    "one block": lambda: Risk(randomised(Residual()), CE, (data(5, 2, 3, 3), labels(5)), params=["conv1.*", "norm2.*"]),
    "without rules": lambda: Risk(randomised(Twice()), CE, (data(7, 4), labels(7)), batch_size=3),
}  # fmt: skip
MATRICES = {
    "Hessian": Hessian,
    "GGN": GGN,
    "empirical Fisher": EmpiricalFisher,
    "Fisher": lambda risk: Fisher(risk, num_samples=3, seed=5),
    "gradient covariance": GradientCovariance,
}


def check_parts(operator):
    diagonal = operator.dense().diagonal()
    value, parts = exact_trace(operator)
    assert value == pytest.approx(float(diagonal.sum()), rel=1e-9, abs=1e-12)
    wanted = {name: float(diagonal[where].sum()) for name, where in operator.space.slices.items()}
    assert parts == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(exact_diagonal(operator), diagonal, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", RISKS)
def test_exact_traces_their_parts_and_diagonals_are_those_of_the_dense_matrix(name, matrix):
    check_parts(MATRICES[matrix](RISKS[name]()))


def test_the_fishers_of_binary_and_squared_losses_too():
    binary = Risk(randomised(mlp(4, 5, 3)), nn.BCEWithLogitsLoss(), (data(6, 4), (data(6, 3) > 0).double()))
    cubic = Risk(randomised(mlp(4, 5, 3)), lambda out, y: (out - y).abs().pow(3).mean(), (data(6, 4), data(6, 3)))
    for operator in (Fisher(binary), EmpiricalFisher(binary), EmpiricalFisher(cubic), GGN(cubic), Hessian(cubic)):
        check_parts(operator)


def test_sums_multiples_shifts_blocks_and_noise_have_exact_traces_and_diagonals():
    risk = RISKS["MLP"]()
    H, G = Hessian(risk), GGN(risk)
    last = (H + G).block(["2.bias", "0.weight"])
    for operator in (2 * H - 0.5, H + 3 * G, (H + G).block("0.*"), H.block("2.*"), last, BatchNoise(H, 1)):
        check_parts(operator)


def test_curved_networks_have_an_exact_ggn_and_no_exact_hessian():
    for model in CURVED.values():
        risk = Risk(randomised(model), CE, (data(6, 4), labels(6)), batch_size=4)
        assert exact_trace(GGN(risk))[0] == pytest.approx(float(GGN(risk).dense().trace()), rel=1e-8)
        with pytest.raises(UnsupportedError, match="the Hessian of this network has no exact trace: aten::"):
            exact_trace(Hessian(risk))
        assert exact_cost(Hessian(risk)) is None


def test_the_cost_is_the_number_of_backward_passes():
    risk = RISKS["MLP"]()
    assert exact_cost(Hessian(risk)) == exact_cost(GGN(risk)) == 3
    assert exact_cost(EmpiricalFisher(risk)) == 1
    assert exact_cost(GradientCovariance(risk)) == 2
    assert exact_cost(Fisher(risk, num_samples=4)) == 4
    assert exact_cost(2 * Hessian(risk) + GGN(risk) + 0.1) == 6
    assert exact_cost(GGN(token_risk())) == 12
    assert exact_cost(EmpiricalFisher(token_risk())) == 4


def test_matrices_without_an_exact_form_are_refused():
    assert exact_cost(DenseOperator(torch.eye(2))) is None
    with pytest.raises(UnsupportedError, match="no exact trace is known for DenseOperator"):
        exact_trace(DenseOperator(torch.eye(2)))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    train = Risk(model, CE, (data(6, 4), labels(6)), mode="train")
    assert exact_cost(GGN(train)) is None
    with pytest.raises(UnsupportedError, match="BatchNorm in train mode"):
        exact_trace(GGN(train))


# -------------------------------------------------- operations that torch does not vectorise, or wrongly


@pytest.mark.parametrize("outputs", range(1, 6))
@pytest.mark.parametrize("size", range(1, 7))
def test_slopes_that_are_learned_have_exact_traces_for_any_number_of_outputs_and_samples(outputs, size):
    """The backward pass of PReLU is wrong under two vmaps of one size, that over samples and that over cotangents."""
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, outputs), nn.PReLU()))
    check_parts(GGN(Risk(model, nn.MSELoss(), (data(6, 4), data(6, outputs)), batch_size=size)))


@pytest.mark.parametrize("at_once", range(1, 5))
def test_gradients_of_any_number_of_samples_at_once_give_the_same(at_once, monkeypatch):
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)))
    G = GGN(Risk(model, nn.MSELoss(), (data(4, 4), data(4, 3))))
    monkeypatch.setitem(squares._GRADIENTS, "cpu", at_once * 3 * G.dim)
    check_parts(G)


class Weighed(nn.Module):
    """A function of a parameter that is no layer, and of the outputs of one."""

    def __init__(self, operation):
        super().__init__()
        self.inner, self.matrix, self.operation = nn.Linear(4, 3), nn.Parameter(torch.zeros(3, 3)), operation

    def forward(self, x):
        return self.operation(self.matrix + torch.eye(3), self.inner(x))


def of_samples(matrix, x):
    """A matrix for each sample."""
    return matrix @ matrix.T + x[:, :, None] * x[:, None]


def distances(matrix, x):
    return torch.cdist(x, matrix)


def distances_written_out(matrix, x):
    return (x[:, None] - matrix).norm(dim=-1)


WEIGHED = {
    "solve": lambda matrix, x: torch.linalg.solve(of_samples(matrix, x), x),
    "det": lambda matrix, x: x * torch.linalg.det(of_samples(matrix, x))[:, None],
    "slogdet": lambda matrix, x: x * torch.linalg.slogdet(of_samples(matrix, x))[1][:, None],
}


@pytest.mark.parametrize("name", WEIGHED)
def test_operations_of_a_matrix_for_each_sample_have_exact_traces(name):
    check_parts(GGN(Risk(randomised(Weighed(WEIGHED[name])), CE, (data(5, 4), labels(5)), batch_size=3)))


def test_where_vectorised_gradients_are_wrong_they_are_taken_one_by_one():
    """torch's batching rule for the backward pass of cdist is wrong."""
    found, wanted = (
        exact_trace(GGN(Risk(randomised(Weighed(operation)), CE, (data(5, 4), labels(5)))))[1]
        for operation in (distances, distances_written_out)
    )
    assert found == pytest.approx(wanted, rel=1e-9)


class LastStep(nn.Module):
    """Steps come before samples, and one of them is read: no other row of the first layer has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.transpose(0, 1)))[0])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_row_that_is_read_alone_is_not_taken_for_a_sample(size):
    """With as many steps as samples, its gradient may lie in the row of a sample that was asked for."""
    risk = Risk(randomised(LastStep()), CE, (data(size, size, 3), labels(size)))
    torch.testing.assert_close(exact_diagonal(GGN(risk)), GGN(risk).dense().diagonal())


class BatchStatistics(nn.Module):
    """Batch normalisation that no module tells of."""

    def forward(self, x):
        return torch.nn.functional.batch_norm(x, None, None, training=True)


def test_a_function_that_mixes_samples_by_batch_statistics_has_exact_traces():
    model = randomised(nn.Sequential(nn.Linear(4, 5), BatchStatistics(), nn.ReLU(), nn.Linear(5, 3)))
    check_parts(GGN(Risk(model, CE, (data(6, 4), labels(6)), mode="train")))
