"""What every operator does, whatever its matrix is."""

import math
from types import SimpleNamespace

import cases
import numpy as np
import pytest
import torch
from torch import nn

import ritz
from ritz.errors import NonFiniteError
from ritz.operators import DenseOperator, Operator
from ritz.operators.risk_operator import rows_at_once

A = DenseOperator(cases.symmetric(torch.tensor([3.0, -1.0, 0.5, 0.0])))


def test_a_vector_gives_a_vector_and_columns_give_columns():
    V = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert (A @ V[:, 0]).shape == (4,)
    assert (A @ V).shape == (4, 3)
    assert A.rows(V.T).shape == (3, 4)
    torch.testing.assert_close(A.rows(V.T).T, A @ V)


@pytest.mark.parametrize("name", ["mlp_mse", "language"])
def test_no_columns_give_no_columns_without_work(name, monkeypatch):
    risk = cases.problem(name).risk()
    monkeypatch.setattr(risk, "fold", None)
    monkeypatch.setattr(risk, "check", None)
    for operator in (ritz.Hessian(risk), ritz.GGN(risk), 2 * ritz.Hessian(risk) + 0.1, ritz.GradientCovariance(risk)):
        assert (operator @ torch.zeros(risk.dim, 0)).shape == (risk.dim, 0)
        assert operator.rows(torch.zeros(0, risk.dim)).shape == (0, risk.dim)


def test_a_zero_vector_has_a_zero_image_by_every_route():
    risk = cases.problem("mlp_mse").risk()
    for route in ("forward", "reverse", "difference"):
        assert not (ritz.Hessian(risk, route=route) @ torch.zeros(risk.dim)).any()
    single = cases.problem("mlp_mse").risk(dtype=torch.float32)
    assert not (ritz.Hessian(single, route="difference") @ torch.zeros(risk.dim)).any()


def test_vectors_of_another_precision_are_taken_in_that_of_the_operator():
    image = A @ torch.ones(4, dtype=torch.float32)
    assert image.dtype == torch.float64
    torch.testing.assert_close(A @ torch.ones(4, dtype=torch.int64), image)


def test_a_matrix_of_order_one_works():
    one = DenseOperator(torch.tensor([[2.0]]))
    assert (one @ torch.tensor([3.0])).tolist() == [6.0]
    assert one.dense().tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones(5), r"expected a vector \(dim=4,\) or columns \(dim, k\), got \(5,\)"),
        (torch.ones(3, 4), r"got \(3, 4\)"),
        (torch.ones(4, 2, 2), r"got \(4, 2, 2\)"),
        (torch.tensor(1.0), r"got \(\)"),
    ],
)
def test_a_wrong_shape_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        A @ given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.ones(4), "expected a real tensor on the right of @, got ndarray"),
        ([1.0] * 4, "got list"),
        (torch.ones(4, dtype=torch.complex128), r"got torch\.complex128"),
    ],
)
def test_a_wrong_type_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        A @ given


def test_rows_are_checked_too():
    with pytest.raises(ValueError, match=r"expected rows of shape \(k, dim=4\), got \(4, 3\)"):
        A.rows(torch.ones(4, 3))
    with pytest.raises(TypeError, match="expected a real tensor of rows, got ndarray"):
        A.rows(np.ones((1, 4)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: A + "one", "only a number or an operator can be added to an operator, got str"),
        (lambda: A - None, "only a number can be taken from an operator, got NoneType"),
        (
            lambda: A * A,
            "only a number can be multiplied with an operator, got DenseOperator; for products write A @ V",
        ),
        (lambda: A * torch.ones(4), "got Tensor"),
        (lambda: A / "two", "got str"),
    ],
)
def test_algebra_with_something_else_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("make", [
    lambda: A + math.nan, lambda: A - math.inf, lambda: math.nan - A, lambda: A * torch.tensor(math.inf),
    lambda: A / math.nan, lambda: A / 5e-324,
])  # fmt: skip
def test_a_number_that_is_not_finite_is_refused_before_any_product(make):
    with pytest.raises(ValueError, match=r"only a finite number can be .* an operator, got -?(nan|inf); check where"):
        make()


def test_numbers_of_numpy_and_torch_are_numbers():
    v = torch.ones(4)
    for two in (2, 2.0, np.float64(2.0), np.int64(2), torch.tensor(2.0)):
        torch.testing.assert_close((two * A) @ v, 2 * (A @ v))
        torch.testing.assert_close((A + two) @ v, A @ v + 2)
        torch.testing.assert_close((two - A) @ v, 2 - A @ v)


def test_an_operator_shows_its_dimension_and_convention():
    H = ritz.Hessian(cases.problem("mlp_mse").risk(), route="forward")
    assert repr(H) == "Hessian(dim=32, mean over 11 samples, eval mode, float64, forward route)"


def test_an_operator_must_say_how_it_acts():
    with pytest.raises(TypeError, match="abstract"):
        Operator()


# ------------------------------------------------------------------------------------ products that fail


def root_risk() -> ritz.Risk:
    """A finite loss whose derivative is infinite at one sample: the square root of a norm at zero."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    x = torch.tensor([[1.0, 2.0], [3.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    return ritz.Risk(model, lambda out, y: (out - y).norm(dim=-1).pow(1.5).mean(), (x, torch.zeros(4, 2)), batch_size=2)


@pytest.mark.parametrize(
    "wrap", [lambda H: H, lambda H: 2 * H + 0.1, lambda H: H + H, lambda H: H.block("*"), lambda H: -H]
)
def test_a_product_that_is_not_finite_names_the_batch_and_the_parameter(wrap):
    H = wrap(ritz.Hessian(root_risk(), route="reverse"))
    with pytest.raises(NonFiniteError, match="the Hessian product of batch 1 is not finite, first in weight"):
        H @ torch.ones(4)


def test_a_sum_names_the_side_that_failed():
    broken = DenseOperator(torch.eye(4)) + ritz.Hessian(root_risk(), route="reverse")
    with pytest.raises(NonFiniteError, match="the Hessian product of batch 1"):
        broken @ torch.ones(4)


def test_a_matrix_that_cannot_say_more_says_what_it_is():
    broken = ritz.operators.FunctionOperator(lambda V: V * float("nan"), 3, torch.float64)
    with pytest.raises(NonFiniteError, match="a product with the function is not finite"):
        broken @ torch.ones(3)


def test_a_vector_that_is_not_finite_is_the_callers_own():
    assert not (A @ torch.tensor([1.0, float("inf"), 0.0, 0.0])).isfinite().all()


def test_auto_does_not_hide_a_product_that_is_not_finite():
    with pytest.raises(NonFiniteError, match="batch"):
        ritz.Hessian(root_risk()) @ torch.ones(4)
    single = ritz.Risk(root_risk().model, root_risk()._loss, (torch.zeros(2, 2), torch.zeros(2, 2)))
    with pytest.raises(NonFiniteError, match="batch 0"):
        ritz.Hessian(single) @ torch.ones(4)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_where_images_would_fill_the_memory_the_data_is_walked_more_than_once(at_once, monkeypatch):
    risk = cases.problem("mlp_mse").risk()
    V = torch.randn(risk.dim, 5, generator=torch.Generator().manual_seed(0))
    H, fold, walks = ritz.Hessian(risk), risk.fold, []
    whole = H @ V
    monkeypatch.setattr("ritz.operators.risk_operator.rows_at_once", lambda rows: at_once)
    monkeypatch.setattr(risk, "fold", lambda *args, **named: walks.append(1) or fold(*args, **named))
    torch.testing.assert_close(H @ V, whole, rtol=1e-12, atol=0)
    assert len(walks) == -(-5 // at_once)


@pytest.mark.parametrize(("dim", "wanted"), [(10, 7), (1 << 20, 4), (1 << 30, 1)])
def test_rows_of_a_sixteenth_of_a_gpu_are_multiplied_at_once(dim, wanted, monkeypatch):
    class Rows:  # 7 vectors of float32 on a GPU that need not be there
        device, shape = torch.device("cuda", 0), (7, dim)

        def __len__(self):
            return 7

        def element_size(self):
            return 4

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 * (1 << 24)))
    assert rows_at_once(Rows()) == wanted


def test_where_memory_runs_out_fewer_vectors_are_taken_at_once_and_that_is_said(caplog):
    seen = []

    class Hungry(ritz.GGN):
        def _batch_rows(self, params, batch, rows):
            seen.append(len(rows))
            if len(rows) > 3:
                raise torch.OutOfMemoryError("too many vectors")
            return super()._batch_rows(params, batch, rows)

    risk = cases.problem("mlp_relu").risk()
    G, V = Hungry(risk), torch.randn(risk.dim, 8)
    torch.testing.assert_close(G @ V, ritz.GGN(risk) @ V)
    assert seen[:2] == [8, 4]
    assert max(seen[2:]) == 2  # learnt, and not tried again
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"out of memory: vectors are now taken {number} at a time" for number in (4, 2)]


@pytest.mark.parametrize("room", [8, 1])
def test_what_was_recorded_is_let_go_of_before_fewer_vectors_are_taken(room):
    seen = []

    class Hungry(ritz.GGN):
        def _batch_rows(self, params, batch, rows):
            seen.append(len(rows))
            if len(rows) + len(self.risk.shortcuts.recordings) > room:
                raise torch.OutOfMemoryError("too much")
            return super()._batch_rows(params, batch, rows)

    risk = cases.problem("mlp_relu").risk(plan=ritz.Plan(replay=True))
    G, V = ritz.GGN(risk), torch.randn(risk.dim, room)
    truth = G @ V
    G @ V[:, :1], G @ V[:, :1]
    assert len(risk.shortcuts.recordings) > 0
    seen.clear()
    torch.testing.assert_close(Hungry(risk) @ V, truth)
    assert set(seen) == {room}
    assert len(risk.shortcuts.recordings) == 0
