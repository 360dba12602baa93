"""`ritz.compare`: paired differences, honest orders, and "cannot tell" where it cannot."""

import dataclasses
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import t
from torch import nn

import ritz
from ritz.intervals import Binomial, StudentT
from ritz.measures.compare import Agreement, Comparison, Ranking, compare
from ritz.measures.differences import as_found, difference, direction, probability
from ritz.measures.gap import on_test_data
from ritz.measures.outputs import Outputs
from ritz.operators import DenseOperator
from ritz.report.figures import row_of_axes
from ritz.results import Estimate, affine, from_samples


def network(decay: float, seed: int = 0, steps: int = 150) -> nn.Module:
    """A network too large to be diagonalised by the head, trained with a weight decay."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(data()[0]), data()[1]).backward()
        optimizer.step()
    return model


def data(n: int = 40, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 5, generator=generator)
    return X, (X[:, :3] + 0.7 * torch.randn(n, 3, generator=generator)).argmax(1)


def risk_of(model: nn.Module, n: int = 40) -> ritz.Risk:
    return ritz.Risk(model, nn.CrossEntropyLoss(), data(n))


@pytest.fixture(scope="module")
def three():
    """Three solutions measured together; float64 is set test by test, so it is set here too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        risks = {f"{decay:g}": risk_of(network(decay)) for decay in (0.0, 0.01, 0.1)}
        yield compare(risks, test=data(60, 2), num_steps=30, num_probes=6)
    finally:
        torch.set_default_dtype(before)


# --------------------------------------------------------------------------------------- differences in pairs


def test_a_paired_difference_is_that_of_the_samples():
    x, y = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([2.0, 6.5, 10.0])
    found = difference(from_samples("x", x), from_samples("x", y))
    truth = from_samples("d", y - x)
    assert (found.value, found.stderr) == pytest.approx((truth.value, truth.stderr))


def test_samples_of_other_probes_are_not_paired():
    x, y = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([2.0, 6.5, 10.0])
    a, b = from_samples("x", x, seed=0), from_samples("x", y, seed=1)
    assert difference(a, b).stderr == pytest.approx((a.stderr**2 + b.stderr**2) ** 0.5)
    assert difference(a, b).rule == StudentT(2)


def test_the_difference_of_traces_by_the_same_probes_is_by_students_t():
    """Losses of items are resampled; eight probes would be too few, and the order had a level of a short list."""
    x, y = (torch.randn(90, 90, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    a, b = (ritz.trace(ritz.operators.DenseOperator(m + m.T), "hutchinson", 8) for m in (x, y))
    change = difference(a, b)
    assert change.rule == StudentT(7)
    assert probability(a, b) == pytest.approx(float(t.cdf(abs(change.value) / change.stderr, 7)))


@pytest.mark.parametrize("top", [0.5, 36.0])
def test_a_large_eigenvalue_that_probes_miss_is_in_the_interval_of_the_difference(top):
    """By the spread of the differences alone, 10 and 12 % of equal traces were told apart, where 5 may be."""
    num, bulk = 100, torch.linspace(0.0, 1.0, 99)
    sharp, other = torch.cat([torch.tensor([40.0]), bulk]), torch.cat([torch.tensor([top]), 2 * bulk])
    other *= sharp.sum() / other.sum()
    generator = torch.Generator().manual_seed(0)
    bases = [torch.linalg.qr(torch.randn(num, num, generator=generator)).Q for _ in range(2)]
    A, B = (DenseOperator((Q * v) @ Q.T) for Q, v in ((bases[0], sharp), (bases[top < 1], other)))
    pairs = [[ritz.trace(H, "hutchinson", 8, seed) for H in (A, B)] for seed in range(300)]
    assert sum(direction(difference(*pair)) == 0 for pair in pairs) / len(pairs) > 0.92
    assert sum(probability(*pair) >= 0.975 for pair in pairs) / len(pairs) < 0.08


def test_intervals_alone_give_an_interval_of_the_difference():
    a, b = (Estimate(name="top", value=v, bracket=(v, v + 0.1)) for v in (1.0, 2.0))
    assert difference(a, b).interval() == pytest.approx((0.9, 1.1))
    assert direction(difference(a, b)) == 1
    assert direction(difference(b, a)) == -1
    assert direction(difference(a, a)) == 0


def test_the_probability_of_an_order_is_calibrated():
    """Two equal means: an order is called real in about 5 % of the cases, either side."""
    generator = torch.Generator().manual_seed(0)
    sure = 0
    for _ in range(500):
        common = 5 * torch.randn(8, generator=generator)
        a, b = (from_samples("x", common + torch.randn(8, generator=generator)) for _ in range(2))
        sure += Ranking(key="x", order=("a", "b"), better=None, steps=(probability(a, b),)).sure[0]
    assert 0.03 <= sure / 500 <= 0.08


def test_a_difference_much_smaller_than_either_error_is_seen_in_pairs():
    common = torch.randn(8, generator=torch.Generator().manual_seed(0))
    a, b = from_samples("x", common), from_samples("x", common + 0.01 * torch.linspace(0.9, 1.1, 8))
    assert b.stderr > 10 * abs(b.value - a.value)
    assert probability(a, b) > 0.999


def test_brackets_that_overlap_cannot_be_told_apart():
    near, far = (Estimate(name="top", value=v, bracket=(v, v + 0.3)) for v in (1.1, 2.0))
    base = Estimate(name="top", value=1.0, bracket=(1.0, 1.3))
    assert probability(base, near) == 0.5
    assert probability(base, far) == pytest.approx(0.998)
    assert probability(far, base) == pytest.approx(0.998)


def test_brackets_count_in_pairs_too():
    """The depth error of a quadrature is the same for every probe, and the probes do not see it."""
    samples = torch.tensor([1.0, 2.0, 3.0, 4.0])
    a = from_samples("logdet", samples, bracket=(1.0, 2.5))
    near, far = (from_samples("logdet", samples + up, bracket=(up + 1.0, up + 2.5)) for up in (1.0, 20.0))
    assert probability(a, near) == 0.5
    assert direction(difference(a, near)) == 0
    assert difference(a, near).interval() == pytest.approx((-0.5, 2.5))
    assert probability(a, far) == 1.0
    wide = dataclasses.replace(near, stderr=near.stderr + 0.7)  # the error of the other end of the bracket
    assert difference(a, wide).stderr == pytest.approx(0.7)


def test_a_short_quadrature_does_not_decide_what_only_its_depth_can():
    """One step sees the mean eigenvalue alone, and puts the two the wrong way round."""
    spread = torch.cat([torch.zeros(200), torch.full((200,), 3.0)])
    matrices = [ritz.operators.DenseOperator(torch.diag(lam)) for lam in (spread, torch.ones(400))]
    for matrix in matrices:
        matrix.positive = True
    runs = [ritz.spectrum(matrix, num_steps=1, num_probes=8, reorthogonalize="none") for matrix in matrices]
    a, b = (run.logdet(1e-3) for run in runs)
    assert a.value > b.value
    assert probability(a, b) < 0.9


def test_equal_infinite_values_say_nothing():
    limit = Estimate(name="stability limit", value=float("inf"), exact=True)
    assert (probability(limit, limit), difference(limit, limit).value) == (0.5, 0.0)
    assert probability(limit, Estimate(name="stability limit", value=2.0, exact=True)) == 1.0


def test_equal_exact_values_and_single_probes_say_nothing():
    one = from_samples("x", torch.tensor([1.0]))
    assert probability(one, from_samples("x", torch.tensor([2.0]))) == 0.5
    exact = Estimate(name="x", value=1.0, exact=True)
    assert probability(exact, exact) == 0.5


def test_a_share_of_unpaired_items_uses_both_intervals():
    shares = [Estimate(name="error", value=hits / 100, stderr=0.05, rule=Binomial(hits, 100)) for hits in (10, 12, 60)]
    assert probability(shares[0], shares[1]) < 0.8
    assert probability(shares[0], shares[2]) > 0.99
    none, all_wrong = (Estimate(name="error", value=x, rule=Binomial(int(2 * x), 2)) for x in (0.0, 1.0))
    assert probability(none, all_wrong) == 0.5  # two items each, and no spread that would say so
    assert difference(none, none).interval() == pytest.approx((-0.888, 0.888), abs=1e-3)


def mistakes(*wrong: int) -> Estimate:
    """The test error of a solution that is wrong about these items."""
    margin = torch.where(torch.tensor(wrong) > 0, -1.0, 1.0)
    return on_test_data(Outputs(loss=torch.ones(len(wrong)), weight=torch.ones(len(wrong)), margin=margin), "error")


def test_few_items_do_not_decide_between_errors_however_alike_they_are():
    assert probability(mistakes(0, 0), mistakes(1, 1)) < 0.95  # a difference of 1 without spread
    assert probability(mistakes(*[0] * 9), mistakes(*[1] * 9)) > 0.975
    low, high = difference(mistakes(*[0] * 20), mistakes(*[0] * 20)).interval()
    assert (low, high) == pytest.approx((-0.236, 0.236), abs=1e-3)  # nor is no difference known to be 0


def test_a_change_of_the_gap_in_error_is_that_of_the_error_moved():
    before, after = mistakes(1, 0, 0, 0, 1, 0), mistakes(1, 1, 1, 0, 1, 0)
    plain = difference(before, after)
    moved = difference(*(affine(e, 1.0, -known) for e, known in ((before, 0.1), (after, 0.3))))
    assert moved.value == pytest.approx(plain.value - 0.2)
    assert moved.interval() == pytest.approx(tuple(end - 0.2 for end in plain.interval()))


def test_the_interval_of_a_change_in_error_covers():
    """Of errors on 3 % of 60 items: Student t covers 84 %, since on a sixth of such samples there is none."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(100):
        wrong = (torch.rand(60, generator=generator) < 0.03).int().tolist()
        low, high = difference(mistakes(*[0] * 60), mistakes(*wrong)).interval()
        held += low <= 0.03 <= high
    assert held >= 93


def test_a_change_in_loss_is_as_uncertain_as_a_loss_of_such_items():
    more = torch.empty(50).exponential_(generator=torch.Generator().manual_seed(0)).pow(3)  # a few differ by much
    losses = [Outputs(loss=1 + part * more, weight=torch.ones(50)) for part in (0.0, 0.5, 1.5)]
    level, half, whole = (on_test_data(found, "loss") for found in losses)
    own = on_test_data(Outputs(loss=more, weight=torch.ones(50)), "loss").interval()
    assert difference(half, whole).interval() == pytest.approx(own)
    assert difference(level, half).interval() == pytest.approx(tuple(end / 2 for end in own))
    assert own[1] > from_samples("loss", more).interval()[1] + 0.01


# --------------------------------------------------------------------------------------------------- rankings


def test_a_ranking_says_what_it_can():
    ranking = Ranking(key="trace", order=("a", "b", "c"), better="lower", steps=(0.999, 0.999))
    assert (str(ranking), ranking.verdict) == ("a < b < c", "prefers a")
    assert dataclasses.replace(ranking, steps=(0.6, 0.7)).verdict == "cannot tell"
    half = dataclasses.replace(ranking, steps=(0.6, 0.999), better="higher")
    assert (str(half), half.verdict) == ("a ~ b > c", "cannot tell a from b")
    other = dataclasses.replace(ranking, steps=(0.999, 0.6))
    assert (str(other), other.verdict) == ("a < b ~ c", "prefers a; cannot tell b from c")
    order, steps = tuple(f"s{n}" for n in range(40)), (1.0, *[0.6] * 38)
    many = Ranking(key="trace", order=order, better="lower", steps=steps)
    assert many.verdict == "prefers s0; cannot tell 38 of 39 neighbours in the order apart"  # and not 38 pairs
    close = dataclasses.replace(ranking, steps=(0.98, 0.98))  # each is likely, both together less so
    assert (str(close), close.verdict) == ("a ~ b ~ c", "cannot tell")
    assert dataclasses.replace(ranking, better=None).verdict == "a is lowest"
    assert dataclasses.replace(ranking, equal=True).verdict == "all equal"


def test_values_that_differ_by_round_off_are_equal():
    a, b = (Estimate(name="x", value=value, exact=True) for value in (1.112, 1.112 * (1 + 1e-8)))
    assert probability(a, b) == 0.5


def test_what_a_search_found_is_compared_as_found():
    a, b = (Estimate(name="worst case", value=value, bracket=(value, float("inf"))) for value in (1.0, 2.0))
    assert probability(as_found(a), as_found(b)) == 1.0
    near = dataclasses.replace(a, value=1.24, bracket=(1.24, float("inf")))  # another start may find as much in a
    assert probability(as_found(a), as_found(near)) == 0.5
    assert direction(difference(as_found(a), as_found(near))) == 0
    noisy = from_samples("m-sharpness", torch.tensor([1.0, 2.0, 3.0]), bracket=(2.0, float("inf")))
    assert as_found(noisy).interval() == from_samples("x", torch.tensor([1.0, 2.0, 3.0])).interval()
    assert as_found(from_samples("x", torch.tensor([1.0]))).interval() == (-float("inf"), float("inf"))  # no search


def test_agreement_counts_resolved_pairs_only():
    assert Agreement(3, 0, 3).verdict == "same"
    assert Agreement(0, 3, 3).verdict == "opposite"
    assert Agreement(1, 1, 3).verdict == "mixed"
    assert Agreement(0, 0, 0).verdict == "undecided"
    assert Agreement(0, 0, 3).verdict == "undecided"  # the measure cannot tell


def test_three_solutions_are_ranked_by_every_measure(three):
    assert set(three.rankings) == set(three.measurements["0"]) - {"distance"}
    assert three["weight_norm"].order == ("0.1", "0.01", "0")
    assert three["weight_norm"].probability == 1.0
    assert three["margin_median"].order == ("0", "0.01", "0.1")  # higher is called better
    with pytest.raises(KeyError, match="distance was not measured on every solution"):
        three["distance"]


def test_the_order_by_trace_is_the_true_one_and_surer_in_pairs(three):
    truth = {
        name: float(torch.trace(ritz.Hessian(risk_of(network(float(name)))).dense())) for name in three.measurements
    }
    assert list(three["trace"].order) == sorted(truth, key=truth.get)
    paired = three.change("trace", "0", "0.1")
    low, high = paired.interval(0.999)
    assert low <= truth["0.1"] - truth["0"] <= high
    apart = [three.measurements[name]["trace"].stderr for name in ("0", "0.1")]
    assert paired.stderr <= 1.2 * (apart[0] ** 2 + apart[1] ** 2) ** 0.5


def test_agreement_with_the_gap_is_that_of_signs(three):
    found = three.agreement("weight_norm")
    gaps = [direction(three.change("gap_loss", a, b)) for a, b in (("0", "0.01"), ("0", "0.1"), ("0.01", "0.1"))]
    assert found.pairs == sum(map(abs, gaps))
    assert found.same == gaps.count(-1)  # the norm falls with weight decay
    assert three.agreement("gap_loss").verdict in ("same", "undecided")


def test_a_comparison_prints_saves_and_draws(three, tmp_path):
    table = three.table()
    assert table.header == ["measure", "verdict", "order", "0", "0.01", "0.1", "with gap_loss"]
    assert [row[0] for row in table.rows] == list(three.rankings)
    assert "weight_norm" in str(three)
    assert "<td>weight_norm</td>" in three._repr_html_()
    assert ritz.load(three.save(tmp_path / "c")) == three
    assert "<svg" in three.to_html(tmp_path / "c.html").read_text(encoding="utf-8")
    with pytest.raises(KeyError, match="nonsense was not measured"):
        three.table("nonsense")
    with pytest.raises(ValueError, match="no solution is named '7'"):
        three.change("trace", "0", "7")
    assert "trace" in three
    assert list(three) == list(three.rankings)
    assert len(three.plot().axes) == 4
    assert len(three.plot(["trace"]).axes) == 1
    _, axes = row_of_axes(2)
    assert three.plot(["trace"], ax=axes[1]) is axes[1]
    assert [ax.get_title() for ax in axes] == ["", "trace"]
    assert three.plot(ax=axes[0]).get_title() == three.plot().axes[0].get_title()
    with pytest.raises(ValueError, match="one ax shows one measure, got trace, weight_norm"):
        three.plot(["trace", "weight_norm"], ax=axes[0])


def test_the_same_solution_twice_cannot_be_told_apart():
    model = network(0.0, steps=20)
    found = ritz.compare({"a": risk_of(model), "b": risk_of(model)}, test=data(60, 2), num_steps=10, num_probes=4)
    assert {ranking.verdict for ranking in found.rankings.values()} == {"all equal"}


def test_other_networks_are_compared_with_a_note():
    risks = {"wide": risk_of(network(0.0, steps=1)), "linear": risk_of(nn.Linear(5, 3))}
    found = ritz.compare(risks, measures=["weight_norm", "trace"], num_steps=10, num_probes=4)
    assert "probes are not common" in found.notes[0]


def test_the_same_samples_in_another_order_or_precision_are_the_same_data():
    model = network(0.0, steps=1)
    X, y = data()
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    for other in (risk_of(model).on((X[order], y[order])), risk_of(model).to(dtype=torch.float64)):
        assert ritz.compare({"a": risk_of(model), "b": other}, measures=["weight_norm"])["weight_norm"].order


def test_bad_input_is_refused_before_any_work():
    risk = risk_of(network(0.0, steps=1))
    with pytest.raises(ValueError, match="two or more solutions"):
        ritz.compare({"a": risk})
    with pytest.raises(TypeError, match=r"b must be a ritz\.Risk, got Linear"):
        ritz.compare({"a": risk, "b": nn.Linear(5, 3)})
    with pytest.raises(ValueError, match="different data"):
        ritz.compare({"a": risk, "b": risk_of(network(0.0, steps=1), n=20)})
    X, y = data()
    with pytest.raises(ValueError, match="different data"):
        ritz.compare({"a": risk, "b": risk.on((X.flip(1), y))})
    with pytest.raises(ValueError, match="a and b are on different data"):  # the same inputs and labels, paired anew
        ritz.compare({"a": risk, "b": risk.on((X, y.roll(1)))})
    two = {"a": risk.on(data(30, 1)), "b": risk.on(data(30, 2))}
    with pytest.raises(ValueError, match="a and b are tested on different data"):
        ritz.compare({"a": risk, "b": risk}, test=two)
    with pytest.raises(ValueError, match="test= lacks b"):
        ritz.compare({"a": risk, "b": risk}, test={"a": risk})
    seen = []
    other = risk_of(network(0.0, seed=1, steps=1))
    with pytest.raises(ValueError, match="at other weights"):
        ritz.compare({"a": risk, "b": other}, test=risk.on(data(9)), progress=lambda *step: seen.append(step))
    assert not seen


def test_another_precision_is_noted():
    model = network(0.0, steps=1)
    half = ritz.Risk(model, nn.CrossEntropyLoss(), data(), dtype=torch.float32)
    found = ritz.compare({"a": risk_of(model), "b": half}, measures=["weight_norm"])
    assert found.notes == ("a and b differ: CrossEntropy, eval mode, float64, and CrossEntropy, eval mode, float32",)


@pytest.mark.parametrize(
    ("one", "other", "note"),
    [
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), "label_smoothing of their CrossEntropy"),
        (nn.MultiMarginLoss(), nn.MultiMarginLoss(margin=2.0), "function of their CallableLoss"),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(), None),
    ],
)
def test_other_settings_of_the_loss_are_noted(one, other, note):
    model = network(0.0, steps=1)
    risks = {name: ritz.Risk(model, loss, data()) for name, loss in (("a", one), ("b", other))}
    notes = ritz.compare(risks, measures=["weight_norm"]).notes
    assert notes == (() if note is None else (f"a and b differ in {note}",))


@pytest.mark.parametrize(
    ("measured", "drawn"),
    [
        (["weight_norm", "margin_median"], ["weight_norm", "margin_median"]),  # none of the usual ones
        (["trace", "weight_norm"], ["trace", "weight_norm"]),
        (["train_loss", "train_error", "weight_norm", "trace", "margin_median"], ["trace"]),
        (["train_loss", "train_error", "weight_norm", "margin_q10", "margin_median"],
         ["train_loss", "train_error", "weight_norm", "margin_q10"]),
    ],
)  # fmt: skip
def test_all_measures_are_drawn_where_they_are_few_and_the_usual_ones_of_many(measured, drawn):
    found = compare({"a": risk_of(network(0.0, steps=5)), "b": risk_of(network(0.1, steps=5))}, measures=measured)
    assert [ax.get_title() for ax in found.plot().axes] == drawn


def test_names_of_solutions_stand_beside_their_values_however_long_and_many():
    name = "resnet18_lr0.1_wd5e-4_seed{}_epoch200_final"
    risks = {name.format(seed): risk_of(network(0.0, steps=1)) for seed in range(12)}
    figure = compare(risks, measures=["train_loss", "weight_norm"]).plot()
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) == 12
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    assert boxes[0].y0 > boxes[-1].y0  # the first on top
    assert all(box.x0 >= 0 and box.x1 <= figure.axes[0].bbox.x0 for box in boxes)


def test_a_comparison_without_a_common_measure_cannot_be_drawn():
    with pytest.raises(ValueError, match="there is nothing to draw: no measure was taken on every solution"):
        Comparison(measurements={}, rankings={}).plot()
