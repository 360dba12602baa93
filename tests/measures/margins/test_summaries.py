"""Margins and the affine trace against their definitions: Decimal, NumPy, SciPy, matplotlib, and dense Hessians."""

import math
from dataclasses import replace
from decimal import Decimal, localcontext

import cases
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ritz
from ritz.errors import NonFiniteError, UnsupportedError
from ritz.measures.margins.summaries import (
    aceht,
    calibration_error,
    inverse_margin,
    margin_bound,
    margin_distribution,
    margin_mean,
    margin_min,
    margin_quantile,
    margin_skewness,
    mean_confidence,
    mean_entropy,
    sample_aceht,
    sample_margin_bound,
    sample_margins,
)
from ritz.measures.outputs import Outputs, sample_outputs

CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss


def of_margins(*margins: float, weight=None, **columns) -> Outputs:
    """Outputs with these margins."""
    margin = torch.tensor(margins)
    weight = torch.ones(len(margins)) if weight is None else torch.tensor(weight)
    return Outputs(loss=torch.zeros(len(margins)), weight=weight, margin=margin, classes=2, **columns)


def affine_risk(seed=0, classes=4, scale=1.0, num=30, inputs=5, loss=None, **keywords) -> ritz.Risk:
    g = torch.Generator().manual_seed(seed)
    model = nn.Linear(inputs, classes)
    with torch.no_grad():
        model.weight.copy_(scale * torch.randn(classes, inputs, generator=g))
        model.bias.copy_(torch.randn(classes, generator=g))
    X, y = torch.randn(num, inputs, generator=g), torch.randint(classes, (num,), generator=g)
    return ritz.Risk(model, loss or CE(), (X, y), **keywords)


# ------------------------------------------------------------------------------------ margins of a network


@pytest.mark.parametrize("which", ["output", "softmax"])
@pytest.mark.parametrize("absolute", [False, True], ids=["signed", "absolute"])
def test_numbers_of_margins_follow_their_definitions(which, absolute):
    risk = affine_risk()
    X, y = (torch.cat(x) for x in zip(*(batch.data for batch in risk.batches), strict=True))
    f = risk.model(X).detach()
    f = f if which == "output" else f.softmax(1)
    margins = np.array([
        float(row[label]) - max(float(row[j]) for j in range(len(row)) if j != label)
        for row, label in zip(f, y.tolist(), strict=True)
    ])  # fmt: skip
    assert (margins < 0).any()
    margins = abs(margins) if absolute else margins
    found, options = sample_outputs(risk), {"which": which, "absolute": absolute}
    np.testing.assert_allclose(sample_margins(found, **options), margins, rtol=1e-12, atol=1e-14)
    for q in (0.1, 0.5):
        assert margin_quantile(found, q, **options).value == pytest.approx(np.quantile(margins, q), rel=1e-12)
    assert margin_mean(found, **options).value == pytest.approx(margins.mean(), rel=1e-12)
    assert margin_min(found, **options).value == pytest.approx(margins.min(), rel=1e-12)
    assert margin_skewness(found, **options).value == pytest.approx(scipy.stats.skew(margins), rel=1e-10)


def test_integer_weights_count_as_repeats_in_means_and_skewness():
    weighted, repeated = of_margins(1.0, 5.0, weight=[3.0, 1.0]), of_margins(1.0, 1.0, 1.0, 5.0)
    for number in (margin_mean, margin_skewness):
        assert number(weighted).value == pytest.approx(number(repeated).value, rel=1e-14)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e5])
def test_equal_margins_have_no_skewness(value):
    with pytest.raises(UnsupportedError, match="skewness is 0 / 0"):
        margin_skewness(of_margins(value, value, value))
    nearly = of_margins(value, value * (1 + 2e-16), value)  # round-off is no spread
    with pytest.raises(UnsupportedError, match="skewness is 0 / 0"):
        margin_skewness(nearly)


def test_estimates_are_exact_and_say_what_they_are():
    found = sample_outputs(affine_risk())
    for e in (margin_quantile(found, 0.1), margin_mean(found), margin_min(found), margin_skewness(found), aceht(found)):
        assert (e.exact, e.stderr, e.interval()) == (True, 0.0, (e.value, e.value))
        assert "over 30 items" in e.convention
    assert margin_quantile(found).name == "margin median"
    assert "signed" in margin_mean(found).convention
    assert margin_mean(found, absolute=True).convention.startswith("|f_y")


def test_only_plain_means_of_ordered_data_keep_what_each_item_gave():
    found = sample_outputs(affine_risk())
    for e in (margin_mean(found), aceht(found), margin_bound(found), mean_confidence(found), mean_entropy(found)):
        assert float(e.samples.mean()) == pytest.approx(e.value, rel=1e-14)
    assert margin_quantile(found).samples is None
    assert margin_mean(replace(found, ordered=False)).samples is None
    weighted = sample_outputs(affine_risk(loss=CE(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))))
    assert margin_mean(weighted).samples is None
    assert "weighted" in margin_mean(weighted).convention


# ----------------------------------------------------------------------------------------- inverse margin


def test_the_inverse_margin_is_that_of_the_signed_quantile():
    margins = torch.arange(1.0, 12.0)
    assert inverse_margin(of_margins(*margins.tolist())).value == pytest.approx(0.25)
    assert inverse_margin(of_margins(*margins.tolist()), q=0.5).value == pytest.approx(1 / 36)


def test_a_margin_that_is_not_positive_has_no_inverse():
    with pytest.raises(UnsupportedError, match=r"0\.1-quantile of the margins is -3.*50\.0% .*take a larger q"):
        inverse_margin(of_margins(-3.0, -3.0, 2.0, 2.0))
    with pytest.raises(UnsupportedError, match="not positive"):
        inverse_margin(of_margins(0.0, 0.0, 0.0))


# ---------------------------------------------------------------------------------------------------- ACEHT


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0], ids=["unsure", "middling", "saturated"])
@pytest.mark.parametrize("loss", [CE(), CE(weight=torch.tensor([0.5, 1.0, 2.0, 7.0])), CE(ignore_index=2)])
def test_on_an_affine_network_aceht_is_the_hessian_trace_of_every_sample(scale, loss):
    risk = affine_risk(scale=scale, loss=loss)
    found, traces = sample_outputs(risk), ritz.sample_traces(risk).value
    labels = torch.cat([batch.data[1] for batch in risk.batches])
    traces = traces[labels != loss.ignore_index]
    torch.testing.assert_close(sample_aceht(found), traces, rtol=1e-10, atol=1e-14 * float(traces.max()))
    whole, _ = ritz.estimators.exact.exact_trace(ritz.Hessian(risk))
    assert aceht(found).value == pytest.approx(whole, rel=1e-10)


def test_without_bias_aceht_is_the_trace_of_a_linear_network():
    risk = affine_risk()
    weight_only = risk.restrict("weight")
    torch.testing.assert_close(
        sample_aceht(sample_outputs(risk), bias=False), ritz.sample_traces(weight_only).value, rtol=1e-10, atol=1e-12
    )


def test_for_one_logit_aceht_is_the_trace_as_well():
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(20, 3, generator=g), torch.randint(2, (20, 1), generator=g).double()
    risk = ritz.Risk(nn.Linear(3, 1), BCE(), (X, y))
    found = sample_outputs(risk)
    torch.testing.assert_close(sample_aceht(found), ritz.sample_traces(risk).value, rtol=1e-10, atol=1e-12)
    assert "halved for one logit" in aceht(found).convention


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_aceht_keeps_its_digits_where_the_softmax_saturates(dtype):
    model = nn.Linear(1, 3, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[40.0], [0.0], [0.0]]))
    found = sample_outputs(ritz.Risk(model, CE(), (torch.ones(1, 1, dtype=dtype), torch.tensor([0]))))
    with localcontext() as context:
        context.prec = 60
        rest = Decimal(-40).exp()
        S = [1 / (1 + 2 * rest), *[rest / (1 + 2 * rest)] * 2]
        trace = 2 * (1 - sum(s * s for s in S))
        bound = 2 * (1 - (S[0] - S[1]) ** 2)
    assert aceht(found).value == pytest.approx(float(trace), rel=1e-13, abs=0)
    assert margin_bound(found).value == pytest.approx(float(bound), rel=1e-13, abs=0)


logits = st.lists(st.floats(-30, 30), min_size=2, max_size=6)


@given(logits=logits, label=st.integers(0, 5))
def test_the_margin_bound_is_never_below_aceht_whatever_the_label(logits, label):
    model = nn.Linear(1, len(logits), bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(logits)[:, None])
    found = sample_outputs(ritz.Risk(model, CE(), (torch.ones(1, 1), torch.tensor([label % len(logits)]))))
    low, high = float(sample_aceht(found)), float(sample_margin_bound(found))
    assert low <= high * (1 + 1e-12)


def test_the_steps_of_the_seed_to_the_bound_fail_for_wrong_predictions_and_as_printed_it_is_none():
    """Section 3.1 goes by S_y >= |gamma|, section 3.2 prints |x| for |x|^2 + 1."""
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0], [0.0]]))
    found = sample_outputs(ritz.Risk(model, CE(), (torch.ones(1, 1), torch.tensor([1]))))
    S_y, gamma = math.exp(-float(found.loss)), float(found.softmax_margin)
    assert 1 - S_y**2 > 1 - gamma**2  # the middle of the chain is above its end
    assert float(sample_aceht(found)) <= float(sample_margin_bound(found))  # and the ends are in order
    unsure = sample_outputs(affine_risk(scale=0.01))
    printed = unsure.input_norm2.sqrt() * unsure.slack
    assert (sample_aceht(unsure) > printed).any()


def test_the_margin_bound_follows_its_definition():
    risk = affine_risk()
    found = sample_outputs(risk)
    X, y = (torch.cat(x) for x in zip(*(batch.data for batch in risk.batches), strict=True))
    S = risk.model(X).detach().softmax(1)
    own = S.gather(1, y[:, None])[:, 0]
    gamma = own - S.scatter(1, y[:, None], -1.0).amax(1)
    truth = (X.square().sum(1) + 1) * (1 - gamma**2)
    torch.testing.assert_close(sample_margin_bound(found), truth, rtol=1e-10, atol=1e-12)
    assert margin_bound(found).value == pytest.approx(float(truth.mean()), rel=1e-12)
    assert margin_bound(found, bias=False).value < margin_bound(found).value


@pytest.mark.parametrize("name", ["language", "pixels"])
def test_aceht_refuses_samples_of_many_items(name):
    with pytest.raises(UnsupportedError, match="inputs that are floating tensors, one item each"):
        aceht(sample_outputs(cases.problem(name).risk()))


# --------------------------------------------------------------------------------- confidence, calibration


def test_calibration_error_follows_its_definition():
    g = torch.Generator().manual_seed(0)
    confidence, weight = torch.rand(200, generator=g) * 0.9 + 0.1, torch.rand(200, generator=g) + 0.1
    margin = torch.where(torch.rand(200, generator=g) < confidence**2, 1.0, -1.0)
    found = Outputs(loss=weight, weight=weight, margin=margin, confidence=confidence, classes=9)
    for bins in (1, 15):
        truth = 0.0
        for b in range(bins):
            inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
            if inside.any():
                accuracy, sure = (margin > 0)[inside].double().mean(), confidence[inside].double().mean()
                truth += float(inside.double().mean() * abs(accuracy - sure))  # a mistake is one, whatever its weight
        assert calibration_error(found, bins).value == pytest.approx(truth, rel=1e-12)
    assert calibration_error(found).value > 0.05
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        calibration_error(found, 0)


def test_a_confidence_on_the_edge_belongs_to_the_bin_below():
    found = of_margins(1.0, -1.0, confidence=torch.tensor([0.5, 0.9]))
    assert calibration_error(found, 2).value == pytest.approx((0.5 + 0.9) / 2)


def test_a_network_that_is_sure_and_right_is_calibrated_and_one_that_is_wrong_is_not():
    right = of_margins(1.0, 1.0, confidence=torch.ones(2))
    assert calibration_error(right).value == 0.0
    assert calibration_error(replace(right, margin=-torch.ones(2))).value == 1.0


def test_confidence_and_entropy_are_means():
    found = sample_outputs(affine_risk())
    assert mean_confidence(found).value == pytest.approx(float(found.confidence.mean()))
    assert mean_entropy(found).value == pytest.approx(float(found.entropy.mean()))


def test_a_distribution_holds_the_margins_that_were_asked_for():
    found = sample_outputs(affine_risk())
    for which in ("output", "softmax"):
        margins = margin_distribution(found, which=which)
        assert torch.equal(margins.values, sample_margins(found, which=which))
        assert torch.equal(margins.correct, found.correct)
        assert margins.name == f"{which} margin"
    sizes = margin_distribution(found, absolute=True)
    assert float(sizes.values.min()) >= 0
    assert sizes.part(False).skewness != margin_distribution(found).part(False).skewness  # wrong ones are still known


def test_all_points_wrong_is_a_clear_answer():
    wrong = of_margins(-1.0, -2.0, -3.0, confidence=torch.full((3,), 0.8))
    assert margin_quantile(wrong).value == -2.0
    with pytest.raises(UnsupportedError, match=r"100\.0% of the data"):
        inverse_margin(wrong)
    with pytest.raises(UnsupportedError, match="none of the 3 items is predicted right"):
        margin_distribution(wrong).part(True)
    assert margin_distribution(wrong).part(False).quantiles[0.5] == -2.0


# ---------------------------------------------------------------------------------------------- bad input

EVERY = [
    margin_quantile, margin_mean, margin_min, margin_skewness, inverse_margin, aceht, margin_bound, margin_distribution,
    mean_confidence, mean_entropy, calibration_error,
]  # fmt: skip


@pytest.mark.parametrize("number", EVERY, ids=lambda f: f.__name__)
def test_every_number_refuses_what_has_no_margins_of_its_own(number):
    with pytest.raises(UnsupportedError, match="BatchNorm in train mode"):
        number(sample_outputs(cases.problem("residual_train").risk()))
    with pytest.raises(UnsupportedError, match="needs classes and labels"):
        number(sample_outputs(cases.problem("mlp_mse").risk()))
    one = ritz.Risk(nn.Linear(2, 1), CE(), (torch.ones(3, 2), torch.zeros(3, dtype=torch.long)))
    with pytest.raises(UnsupportedError, match="at least two classes, this network has one"):
        number(sample_outputs(one))
    with pytest.raises(TypeError, match=r"expected the Outputs of ritz\.measures\.sample_outputs\(risk\), got Risk"):
        number(one)


def test_an_infinite_margin_is_named():
    with pytest.raises(NonFiniteError, match="the margin of item 1 is inf"):
        margin_mean(of_margins(1.0, math.inf))


def test_an_unknown_kind_of_margin_is_refused():
    with pytest.raises(ValueError, match="which must be 'output' or 'softmax', got 'logit'"):
        margin_mean(of_margins(1.0), which="logit")
