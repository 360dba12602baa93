"""Proposition 3.1 of seed 003 and the margin bound, for right answers and wrong ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ritz
from ritz.papers import theory_margins as margins
from ritz.papers.theory_networks import classify, mlp, normal


@pytest.mark.parametrize(("inputs", "classes"), [(1, 2), (5, 4), (3, 10)])
def test_the_affine_trace_is_that_of_every_sample(inputs, classes):
    X, model = 3 * normal((20, inputs), seed=0), mlp((inputs, classes), seed=0)
    y = torch.arange(20) % classes
    with torch.no_grad():
        outputs = model(X)
    found = margins.aceht(X, outputs)
    torch.testing.assert_close(found, ritz.sample_traces(classify(model, X, y)).value)
    for i in (0, 7):
        H = ritz.Hessian(classify(model, X[i : i + 1], y[i : i + 1])).dense()
        torch.testing.assert_close(found[i], H.trace())


def test_one_class_has_no_curvature():
    assert margins.aceht(normal((3, 2), seed=0), normal((3, 1), seed=1)).tolist() == [0.0, 0.0, 0.0]


logits = st.lists(st.floats(-8, 8), min_size=2, max_size=6)


@given(f=logits, label=st.integers(0, 5))
def test_the_margin_bound_and_its_converse_hold_for_every_distribution_and_label(f, label):
    outputs, y = torch.tensor([f]), torch.tensor([label % len(f)])
    S = outputs.softmax(1)[0]
    impurity, margin = float(1 - S.square().sum()), float(margins.softmax_margin(outputs, y))
    assert impurity <= 1 - margin**2 + 1e-12
    assert abs(margin) >= 1 - 2 * impurity - 1e-12
    if margin >= 0:
        assert margin <= float(S[y]) + 1e-12


def test_a_wrong_answer_has_a_margin_beyond_its_own_probability():
    outputs, y = torch.log(torch.tensor([[0.1, 0.9]])), torch.tensor([0])
    assert float(margins.softmax_margin(outputs, y)) == pytest.approx(-0.8)


def test_the_printed_bound_fails_for_an_uncertain_answer_at_any_length_of_the_input():
    for length in (0.1, 0.9, 1.1, 10.0):
        X, outputs = torch.tensor([[length]]), torch.zeros(1, 2)
        assert float(margins.aceht(X, outputs)) > length


# ------------------------------------------------------------------------------------------------- the surface


def test_the_surface_is_symmetric_and_empty_beyond_the_simplex():
    x, y, height = margins.confidence_surface(11)
    assert torch.equal(height.isnan(), height.T.isnan())
    torch.testing.assert_close(height, height.T, equal_nan=True)
    beyond = x + y > 1 + 1e-9
    assert torch.equal(height.isnan(), beyond)
    third = 1 - x - y
    truth = 1 - x**2 - y**2 - third**2
    torch.testing.assert_close(height[~beyond], truth[~beyond])


def test_a_surface_of_one_point_is_refused():
    with pytest.raises(ValueError, match="num must be at least 2, got 1"):
        margins.confidence_surface(1)


def test_the_surface_draws_itself_on_given_axes():
    ax = ritz.results.new_axes()
    assert margins.plot_confidence(ax, num=13) is ax
    assert ax.get_ylabel() == "probability of class 2"
    assert len(ax.figure.axes) == 2  # with its colour bar
