"""A warning points at the line of the user that it is about."""

import warnings

import pytest
import torch
from torch import nn

import ritz
from ritz.errors import NumericalWarning, callers_level


@pytest.fixture
def H():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 3))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randn(300, 10), torch.randint(0, 3, (300,))))
    return ritz.Hessian(risk)


@pytest.mark.parametrize(
    "call",
    [
        lambda H: ritz.top_eigenpairs(H, k=2, max_products=12),  # which a decorator of contextlib wraps
        lambda H: ritz.solve(H + 100.0, torch.ones(H.dim), tol=1e-30),
        lambda H: ritz.spectrum(H, 20, 3).density(width=1e-6),
    ],
    ids=["eigenpairs", "solve", "density"],
)
def test_a_warning_points_at_the_line_that_called(call, H):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(H)
    (found,) = [warning for warning in seen if warning.category is NumericalWarning]
    assert found.filename == __file__


def test_a_call_from_within_a_wrapper_points_past_it():
    namespace = {"__name__": "contextlib", "callers_level": callers_level}
    exec("def inner():\n    return callers_level()", namespace)
    assert namespace["inner"]() == 2  # the line below is one level up from the wrapper
