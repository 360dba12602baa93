"""Distributions of single numbers against NumPy, SciPy and matplotlib."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import ritz
from ritz.measures.margins.distribution import Box, MarginDistribution, skewness, weighted_quantile


def margins(*values: float) -> MarginDistribution:
    """Margins of items that are right where they are positive."""
    row = torch.tensor(values)
    return MarginDistribution(
        name="margin", values=row, weight=torch.ones(len(row)), correct=row > 0, convention="signed"
    )


def many() -> MarginDistribution:
    return margins(*(torch.randn(30, generator=torch.Generator().manual_seed(0)) + 0.7).tolist())


# ----------------------------------------------------------------------------------------------- quantiles

numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


@given(values=numbers, q=st.floats(0, 1))
def test_quantiles_of_equal_weights_are_numpys(values, q):
    found = weighted_quantile(torch.tensor(values), torch.full((len(values),), 0.3), q)
    assert found == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-9)


@given(data=st.data(), values=st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12), q=st.floats(0, 1))
def test_quantiles_ignore_the_order_of_the_data_and_the_scale_of_the_weights(data, values, q):
    weight = torch.tensor(data.draw(st.lists(st.floats(0.1, 9), min_size=len(values), max_size=len(values))))
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    v = torch.tensor(values)
    first, again = weighted_quantile(v, weight, q), weighted_quantile(v[order], 7 * weight[order], q)
    assert again == pytest.approx(first, rel=1e-6, abs=1e-6)
    assert min(values) <= first <= max(values)


def test_a_heavy_value_takes_the_median():
    values, light, heavy = torch.tensor([0.0, 1.0, 2.0]), torch.ones(3), torch.tensor([1.0, 1.0, 50.0])
    assert weighted_quantile(values, light, 0.5) == 1.0
    # middles of the weights: 0.5, 1.5, 27; half way between the outer two is 13.75
    assert weighted_quantile(values, heavy, 0.5) == pytest.approx(1 + (13.75 - 1.5) / (27 - 1.5), rel=1e-14)
    assert [weighted_quantile(values, heavy, q) for q in (0.0, 1.0)] == [0.0, 2.0]


def test_infinite_values_have_quantiles():
    values, ones = torch.tensor([1.0, math.inf, math.inf, -math.inf]), torch.ones(4)
    assert [weighted_quantile(values, ones, q) for q in (0.0, 0.2, 1 / 3, 0.5, 0.9)] == [
        -math.inf, -math.inf, 1.0, math.inf, math.inf
    ]  # fmt: skip


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_out_of_range_is_refused(q):
    with pytest.raises(ValueError, match="q must lie between 0 and 1"):
        weighted_quantile(torch.ones(2), torch.ones(2), q)


@given(st.lists(st.floats(-50, 50), min_size=3, max_size=20).filter(lambda x: max(x) - min(x) > 1e-3))
def test_skewness_is_scipys(values):
    assert skewness(torch.tensor(values), torch.ones(len(values))) == pytest.approx(
        scipy.stats.skew(values), rel=1e-6, abs=1e-6
    )


# ------------------------------------------------------------------------------------------- distributions


@given(values=st.lists(st.floats(-50, 50), min_size=1, max_size=30))
@example(values=[0.0, 0.0, 0.0, 2.0, 4.0, 4.0, 9.9])  # within 1.5 interquartile ranges, not within 1.4
def test_a_box_is_matplotlibs(values):
    from matplotlib.cbook import boxplot_stats

    truth, box = boxplot_stats(values)[0], Box.of(torch.tensor(values), torch.ones(len(values)))
    found = [box.low, box.q1, box.median, box.q3, box.high]
    np.testing.assert_allclose(
        found, [truth[key] for key in ("whislo", "q1", "med", "q3", "whishi")], rtol=1e-9, atol=1e-9
    )
    assert list(box.fliers) == sorted(truth["fliers"])


def test_a_distribution_has_its_parts_apart(tmp_path):
    whole = many()
    right, wrong = whole.part(True), whole.part(False)
    assert len(right.values) + len(wrong.values) == 30
    assert right.quantiles[0.0] > 0 >= wrong.quantiles[1.0]
    assert whole.quantiles == {q: pytest.approx(np.quantile(whole.values, q)) for q in whole.quantiles}
    assert whole.skewness == pytest.approx(scipy.stats.skew(whole.values), rel=1e-10)
    assert "predicted wrong" in wrong.convention
    edges, correct, incorrect = whole.histogram(7)
    counts, truth = np.histogram(whole.values, 7)
    assert (correct + incorrect).tolist() == counts.tolist()
    np.testing.assert_allclose(edges, truth, rtol=1e-12)
    assert float(incorrect.sum()) == len(wrong.values)
    assert ritz.load(whole.save(tmp_path / "margins")) == whole
    assert whole != right


def test_distributions_draw_themselves():
    whole = many()
    ax = whole.plot()
    assert sum(patch.get_height() for patch in ax.patches) == 30
    assert ax.get_xlabel() == "margin"
    assert {bool(patch.get_hatch()) for patch in ax.patches} == {False, True}  # right and wrong without colours too
    assert [label.get_text() for label in whole.plot(kind="box").get_xticklabels()] == ["all", "right", "wrong"]
    same = margins(2.0, 2.0)
    assert same.plot().get_title() == "all the same"
    assert [label.get_text() for label in same.plot(kind="box").get_xticklabels()] == ["right"]
    with pytest.raises(ValueError, match="kind must be 'histogram' or 'box', got 'violin'"):
        whole.plot(kind="violin")
    with pytest.raises(ValueError, match="bins must be at least 1"):
        whole.histogram(0)
