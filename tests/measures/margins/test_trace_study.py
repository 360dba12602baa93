"""The study of seed 003: samples stay paired, an affine network has r = 1, and what has no traces is refused."""

import cases
import pytest
import torch
from torch import nn

import ritz
from ritz.errors import UnsupportedError
from ritz.measures.margins.trace_study import margin_study

CE = nn.CrossEntropyLoss


def affine_risk(num=30, loss=None, **keywords) -> ritz.Risk:
    g = torch.Generator().manual_seed(0)
    model = nn.Linear(5, 4)
    with torch.no_grad():
        model.weight.copy_(torch.randn(4, 5, generator=g))
        model.bias.copy_(torch.randn(4, generator=g))
    X, y = torch.randn(num, 5, generator=g), torch.randint(4, (num,), generator=g)
    return ritz.Risk(model, loss or CE(), (X, y), **keywords)


def test_on_an_affine_network_the_study_finds_r_equal_to_one(tmp_path):
    risk = affine_risk(num=80)
    study = margin_study(risk)
    assert study.traces.exact
    for group in (study.aceht.correct, study.aceht.incorrect):
        assert group.pearson.value == pytest.approx(1.0, abs=1e-9)
        assert group.filtered.value == pytest.approx(1.0, abs=1e-9)
        assert group.spearman.value == pytest.approx(1.0, abs=1e-9)
    assert study.aceht.correct.n + study.aceht.incorrect.n == 80
    assert study.bound.correct.pearson.value < 1
    assert study.margin.correct.pearson.value < 0
    assert ritz.load(study.save(tmp_path / "study")) == study
    assert "margin bound, incorrect: r" in str(study)


def test_the_study_draws_samples_by_its_seed_and_keeps_them_paired():
    risk = affine_risk(num=60, batch_size=16)
    first, again, other = (margin_study(risk, 25, seed) for seed in (0, 0, 1))
    assert first == again
    assert len(first.traces.value) == 25
    assert sorted(first.traces.value.tolist()) != sorted(other.traces.value.tolist())
    torch.testing.assert_close(first.aceht.traces, first.aceht.bound, rtol=1e-9, atol=1e-12)
    assert "25 of 60 samples" in first.convention


def test_the_study_leaves_ignored_samples_out_of_both_sides():
    risk = affine_risk(num=60, loss=CE(ignore_index=1))
    study = margin_study(risk)
    assert len(study.traces.value) == int((torch.cat([b.data[1] for b in risk.batches]) != 1).sum())
    torch.testing.assert_close(study.aceht.traces, study.aceht.bound, rtol=1e-9, atol=1e-12)


def test_the_study_takes_whole_batches_where_samples_cannot_be_picked_and_any_order():
    risk = affine_risk(num=60)
    X, y = (torch.cat(x) for x in zip(*(batch.data for batch in risk.batches), strict=True))
    batches = list(zip(X.split(20), y.split(20), strict=True))
    streamed = ritz.Risk(risk.model, CE(), batches, plan=ritz.Plan(cache=False))
    study = margin_study(streamed, 45)
    assert len(study.traces.value) == 40
    torch.testing.assert_close(study.aceht.traces, study.aceht.bound, rtol=1e-9, atol=1e-12)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=20, shuffle=True)
    study = margin_study(ritz.Risk(risk.model, CE(), loader))
    torch.testing.assert_close(study.aceht.traces, study.aceht.bound, rtol=1e-9, atol=1e-12)


def test_probed_traces_carry_their_noise_into_the_study():
    risk = affine_risk(num=60)
    study = margin_study(risk, method="probes", num_probes=4)
    assert not study.traces.exact
    assert study.aceht.reliability < 1
    assert study.aceht.correct.pearson.value < 0.9999


def test_the_study_draws_itself():
    study = margin_study(affine_risk(num=40))
    assert study.plot().get_xlabel() == "ACEHT of the sample"
    assert study.plot(against="margin").get_xlabel() == "output margin of the sample"
    with pytest.raises(ValueError, match="against must be one of aceht, bound, margin, got 'loss'"):
        study.plot(against="loss")


def test_the_study_says_where_there_is_nothing_to_correlate():
    risk = affine_risk(num=12)
    X = torch.linspace(-2, 2, 12)[:, None].expand(12, 5)
    right = risk.on((X, risk.model(X).argmax(1)))
    assert "incorrect: no points, n = 0" in str(margin_study(right))


def test_the_study_refuses_what_it_cannot_correlate():
    with pytest.raises(ValueError, match="at least 3 samples, got num_samples=2"):
        margin_study(affine_risk(), 2)
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Linear"):
        margin_study(nn.Linear(2, 1))
    with pytest.raises(UnsupportedError, match="one item each"):
        margin_study(cases.problem("pixels").risk())
    with pytest.raises(UnsupportedError, match="BatchNorm in train mode"):
        margin_study(cases.problem("residual_train").risk())
