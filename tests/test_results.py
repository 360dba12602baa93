"""An estimate is a number with an honest interval, and a file gives it back as it was."""

import copy
import dataclasses
import json
import math
import pickle
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import ritz
from ritz.intervals import ChiSquare, Exact, Magnitude, PairedShares, RandomStart, Reciprocal, StudentT, matched_dof
from ritz.measures.measure import _cells
from ritz.results import Estimate, from_samples, show
from ritz.storage import equal, save


def estimate(**fields):
    return Estimate(**{"name": "trace", "value": 3.0, "stderr": 0.1, "rule": StudentT(7), **fields})


def start(**fields):
    about = {"dim": 15_300_000, "num_steps": 100, "num_probes": 1, "spread": 1.0, "reach": 0.0, "locked": -math.inf}
    return RandomStart(**{**about, "slack": 0.0, "largest": True, **fields})


# ------------------------------------------------------------------------------------------------ intervals


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_the_interval_of_a_mean_is_students(level):
    e = from_samples("x", torch.tensor([1.0, 2.0, 4.0, 9.0]))
    low, high = stats.t.interval(level, 3, loc=4.0, scale=stats.sem([1.0, 2.0, 4.0, 9.0]))
    assert e.interval(level) == pytest.approx((low, high), rel=1e-12)


def test_a_bracket_widens_the_interval_at_both_ends():
    plain, wide = estimate().interval(), estimate(bracket=(2.9, 3.5)).interval()
    assert wide == pytest.approx((plain[0] - 0.1, plain[1] + 0.5))


def test_one_probe_says_nothing_about_its_error():
    e = from_samples("x", torch.tensor([3.0]))
    assert math.isnan(e.stderr)
    assert e.interval() == (-math.inf, math.inf)
    assert dataclasses.replace(e, support=(0.0, math.inf)).interval() == (0.0, math.inf)


def test_an_exact_value_has_no_width_and_its_bracket_is_its_interval():
    assert Estimate(name="x", value=2.0, exact=True).interval() == (2.0, 2.0)
    assert Estimate(name="x", value=2.0, bracket=(1.5, 2.5)).interval(0.5) == (1.5, 2.5)


def test_the_interval_of_a_sum_of_squares_is_chi_square():
    low, high = estimate(value=4.0, rule=ChiSquare(8.0, offset=1.0)).interval(0.9)
    assert low == pytest.approx(1 + 3 * 8 / stats.chi2.ppf(0.95, 8))
    assert high == pytest.approx(1 + 3 * 8 / stats.chi2.ppf(0.05, 8))


def test_chi_square_takes_a_degree_for_each_entry():
    dof, value = torch.tensor([2.0, 8.0]), torch.tensor([1.0, 4.0])
    low, high = estimate(value=value, stderr=value, rule=ChiSquare(dof)).interval(0.9)
    for i in range(2):
        one = estimate(value=float(value[i]), rule=ChiSquare(float(dof[i]))).interval(0.9)
        assert (float(low[i]), float(high[i])) == pytest.approx(one)


@pytest.mark.parametrize(("eigenvalues", "dim"), [([1.0], 50), ([4.0, 1.0, 1.0], 50), ([1.0] * 20, 40)])
def test_matched_degrees_of_freedom_give_the_variance_of_probes_on_the_sphere(eigenvalues, dim):
    """c chi^2(nu) has variance 2 mean^2 / nu; so has the mean of K forms, by simulation."""
    lam = torch.zeros(dim)
    lam[: len(eigenvalues)] = torch.tensor(eigenvalues)
    v = torch.randn(40_000, dim, generator=torch.Generator().manual_seed(0))
    forms = (v.square() @ lam) * dim / v.square().sum(1)
    nu = matched_dof(8, trace=float(lam.sum()), square=float(lam.square().sum()), dim=dim)
    assert 2 * float(lam.sum()) ** 2 / nu == pytest.approx(float(forms.var()) / 8, rel=0.06)


def test_degrees_of_freedom_are_finite_where_the_form_does_not_vary():
    assert 1e6 < matched_dof(8, trace=10.0, square=10.0, dim=10) < math.inf  # the identity
    assert matched_dof(8, trace=0.0, square=0.0, dim=10) == 8
    assert matched_dof(8, trace=1e200, square=1.0, dim=10) == 8e9


@pytest.mark.parametrize(("num_probes", "share"), [(1, 0.0035), (8, 0.0021)])
def test_the_bound_of_a_random_start_has_the_published_size(num_probes, share):
    """100 steps on 15.3 million parameters at 95 %: 0.35 % of the range, 0.21 % with 8 probes."""
    bound = start(num_probes=num_probes).bound(0.95)
    eps = bound / (1 + 2 * bound)  # the spread of the Ritz values is the range less eps at both ends
    assert eps == pytest.approx(share, abs=5e-5)
    # and by the theorem: the odds of being further out than that are 5 %
    odds = 1.648 * math.sqrt(15_300_000) * math.exp(-199 * math.sqrt(eps))
    assert odds**num_probes == pytest.approx(0.05, rel=1e-9)


def test_the_bound_of_a_random_start_lies_outside_what_was_locked_and_is_mirrored():
    high = start(reach=2.0, locked=5.0, slack=0.1)
    assert high.bound(0.95) == pytest.approx(5.1)
    low = start(reach=-2.0, locked=math.inf, largest=False)
    assert low.bound(0.95) == pytest.approx(-start(reach=2.0).bound(0.95))
    assert start(num_steps=2).bound(0.95) == math.inf  # too few steps to say anything
    assert start(num_steps=2, largest=False).bound(0.95) == -math.inf
    assert start(num_steps=2, spread=0.0, reach=1.0).bound(0.95) == 1.0  # a multiple of the identity


def test_extreme_eigenvalues_lie_between_the_ritz_value_and_the_bound():
    high, low = start(reach=2.0), start(reach=-3.0, locked=math.inf, largest=False)
    assert estimate(value=2.0, bracket=(2.0, 2.0), rule=high).interval() == (2.0, high.bound(0.95))
    assert estimate(value=2.0, bracket=(2.0, 9.0), rule=high).interval() == (2.0, 9.0)
    assert estimate(value=-3.0, bracket=(-3.0, -3.0), rule=low).interval() == (low.bound(0.95), -3.0)
    both = estimate(value=3.0, bracket=(3.0, 3.0), rule=Magnitude(low, high)).interval()
    assert both == (3.0, -low.bound(0.95))


def test_a_root_has_the_interval_of_its_square():
    squares = torch.tensor([4.0, 9.0, 16.0])
    root, square = from_samples("norm", squares, power=0.5), from_samples("square", squares)
    assert root.value == pytest.approx(math.sqrt(square.value))
    assert root.stderr == pytest.approx(square.stderr / (2 * root.value))
    low, high = square.interval(0.5)
    assert root.interval(0.5) == pytest.approx((math.sqrt(low), math.sqrt(high)))
    assert root.interval(0.999)[0] == 0.0  # the square's goes below zero


def test_a_root_of_zero_has_an_interval():
    e = from_samples("norm", torch.zeros(4), power=0.5)
    assert (e.value, e.stderr, e.interval()) == (0.0, 0.0, (0.0, 0.0))


def test_an_interval_is_cut_to_where_the_value_can_lie():
    assert estimate(stderr=5.0, support=(0.0, 4.0)).interval() == (0.0, 4.0)
    low, high = estimate(value=torch.tensor([3.0, 9.0]), stderr=torch.tensor([5.0, 0.0]), support=(0.0, 4.0)).interval()
    assert (low.tolist(), high.tolist()) == ([0.0, 4.0], [4.0, 4.0])


@pytest.mark.parametrize("level", [0.0, 1.0, 95])
def test_a_level_is_a_probability(level):
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        estimate().interval(level)


def test_an_offset_shifts_the_value_and_not_its_error():
    plain, shifted = (from_samples("x", torch.tensor([1.0, 3.0]), offset=o) for o in (0.0, 10.0))
    assert (shifted.value, shifted.stderr) == (plain.value + 10, plain.stderr)
    assert shifted.samples.tolist() == [11.0, 13.0]


# ----------------------------------------------------------------------------------------------- printing


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (3.0, 0.1, "3.00 +- 0.10"),
        (1234.567, 8.9, "1234.6 +- 8.9"),
        (0.5, 0.0, "0.5"),
        (2.0, math.nan, "2"),
        (12345678.0, 1000.0, "1.23457e+07 +- 1.0e+03"),
        (0.0, 0.001, "0.0e+00 +- 1.0e-03"),
        (-4.25, 0.5, "-4.25 +- 0.50"),
    ],
)
def test_a_number_is_shown_to_the_digits_its_error_allows(value, stderr, text):
    assert show(value, stderr) == text


def test_an_estimate_prints_its_name_and_is_a_float():
    assert str(estimate()) == "trace 3.00 +- 0.10"
    assert float(estimate()) == 3.0
    assert estimate().shown() == "3.00 ± 0.10"
    many = estimate(name="traces", value=torch.arange(4.0), stderr=torch.full((4,), 0.5))
    assert (many.many, many.shown()) == (True, "4 values, 0 to 3")
    assert str(many) == "traces (4,), mean 1.5, median stderr 0.5"
    assert str(estimate(name="traces", value=torch.arange(4.0), exact=True)).endswith("exact")


# ------------------------------------------------------------------------------------------ save and load

RULES = [
    Exact(),
    StudentT(7.0),
    ChiSquare(12.5, 3.0),
    ChiSquare(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])),
    start(locked=-math.inf),
    Reciprocal(StudentT(3.0), 2.0),
    PairedShares(3, 1, 20),
    Magnitude(start(largest=False, locked=math.inf), start()),
]
PART = estimate(name="fc.weight", value=1.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_every_rule_comes_back_equal(rule, tmp_path):
    e = estimate(rule=rule, value=torch.tensor([1.0, 2.0]), bracket=(0.5, 1.5))
    back = ritz.load(e.save(tmp_path / "a"))
    assert back == e
    assert type(back.rule) is type(rule)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"value": math.nan, "stderr": math.inf, "support": (-math.inf, 0.0)},
        {"value": torch.tensor([1.0, math.nan, -math.inf]), "stderr": torch.zeros(3, dtype=torch.float32)},
        {"value": torch.tensor(2.5), "samples": torch.empty(0)},
        {"samples": torch.arange(3.0), "seed": 5, "products": 12, "stop": "tolerance", "convention": "λ / N"},
        {"parts": {"fc.weight": PART, "a/b": estimate(parts={"deep": PART})}},
        {"bracket": (torch.zeros(2), torch.ones(2)), "power": 0.5},
        {"samples": torch.arange(6.0).reshape(2, 3).T},
    ],
    ids=["plain", "nan", "tensors", "scalars", "text", "parts", "bracket", "transposed"],
)
def test_every_field_comes_back_equal(fields, tmp_path):
    e = estimate(**fields)
    back = ritz.load(e.save(tmp_path / "deep" / "a"))
    assert back == e
    assert str(back) == str(e)


@given(value=st.floats(), stderr=st.floats(min_value=0), seed=st.integers(-(2**70), 2**70))
def test_any_number_comes_back_equal(value, stderr, seed, tmp_path_factory):
    e = estimate(value=value, stderr=stderr, seed=seed)
    assert ritz.load(e.save(tmp_path_factory.mktemp("n") / "a")) == e


def test_a_result_is_found_by_its_stem_or_either_file(tmp_path):
    e = estimate(samples=torch.ones(2))
    written = e.save(tmp_path / "run.7")  # a dot in the name is part of it
    assert written == tmp_path / "run.7.json"
    for name in ("run.7", "run.7.json", "run.7.safetensors"):
        assert ritz.load(tmp_path / name) == e


def test_what_differs_is_not_equal():
    e = estimate(samples=torch.tensor([0.125, 1.0]), parts={"a": PART})
    for other in (
        estimate(samples=torch.tensor([math.nan, 1.0]), parts={"a": PART}),
        estimate(samples=torch.tensor([0.125, 1.0], dtype=torch.float32), parts={"a": PART}),
        estimate(samples=torch.tensor([[0.125, 1.0]]), parts={"a": PART}),
        estimate(samples=torch.tensor([0.125, 1.0]), parts={"b": PART}),
        estimate(samples=torch.tensor([0.125, 1.0])),
        dataclasses.replace(e, rule=StudentT(8)),
        3.0,
    ):
        assert e != other
    assert not equal(torch.tensor([math.inf]), torch.tensor([torch.finfo(torch.float64).max]))
    assert equal({"a": [1, math.nan]}, MappingProxyType({"a": (1, math.nan)}))


def test_an_estimate_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate().value = 1.0


def test_an_estimate_can_be_copied_and_sent_to_another_process(tmp_path):
    e = estimate(samples=torch.ones(2), parts={"a": PART})
    for one in (e, ritz.load(e.save(tmp_path / "a"))):
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == e


def test_nothing_but_results_is_saved(tmp_path):
    with pytest.raises(TypeError, match=r"cannot save a device \(at /seed\)"):
        estimate(seed=torch.device("cpu")).save(tmp_path / "a")

    @dataclasses.dataclass
    class Mine:
        x: int = 1

    with pytest.raises(TypeError, match="Mine cannot be saved"):
        save(Mine(), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = estimate().save(tmp_path / "a")
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "format": 99}))
    with pytest.raises(ValueError, match="has format 99; this version of ritz reads format 1"):
        ritz.load(path)
    path.write_text(json.dumps({**tree, "result": {"type": "os.system", "fields": {}}}))
    with pytest.raises(ValueError, match=r"an unknown result 'os\.system'"):
        ritz.load(path)
    with pytest.raises(FileNotFoundError, match=r"no result at .*b\.json"):
        ritz.load(tmp_path / "b")


def test_a_result_without_its_tensors_is_refused(tmp_path):
    estimate(samples=torch.ones(2)).save(tmp_path / "a")
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors is missing; a result is two files"):
        ritz.load(tmp_path / "a")


def test_a_kill_between_the_two_files_is_noticed_and_leaves_whole_ones(tmp_path, monkeypatch):
    old, new = estimate(samples=torch.ones(2)), estimate(value=4.0, samples=torch.zeros(2))
    path = old.save(tmp_path / "a")
    import ritz.files as module

    def killed(target, write):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "replace", killed)  # of the text, which comes after the tensors
        with pytest.raises(KeyboardInterrupt):
            new.save(path)
    assert json.loads(path.read_text())["result"]["fields"]["value"] == 3.0  # the old text, whole
    with pytest.raises(ValueError, match=r"belongs to another result.*a save was cut short"):
        ritz.load(path)
    new.save(path)
    assert ritz.load(path) == new


def test_a_kill_while_writing_leaves_the_old_result(tmp_path, monkeypatch):
    e = estimate()
    path = e.save(tmp_path / "a")
    monkeypatch.setattr("pathlib.Path.write_text", lambda self, *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        estimate(value=9.0).save(path)
    assert ritz.load(path) == e


def test_a_result_without_tensors_may_replace_one_with(tmp_path):
    estimate(samples=torch.ones(2)).save(tmp_path / "a")
    assert ritz.load(estimate().save(tmp_path / "a")) == estimate()


# ------------------------------------------------------------------------------------------------- plots


@pytest.mark.parametrize(
    "fields",
    [{}, {"value": torch.arange(5.0), "stderr": torch.ones(5)}, {"rule": StudentT(0), "stderr": math.nan}],
    ids=["number", "many", "one probe"],
)
def test_a_plot_is_drawn_on_given_or_new_axes(fields):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    e = estimate(**fields)
    assert isinstance(e.plot(), Axes)
    ax = Figure().subplots()
    assert e.plot(ax) is ax
    assert ax.has_data()
    ax.figure.draw_without_rendering()


def test_a_figure_has_room_for_the_convention_which_is_long():
    pytest.importorskip("matplotlib")
    convention = "sum of eigenvalues; Hessian, mean over 600 samples, eval mode, float32, forward route"
    ax = estimate(convention=convention).plot()
    ax.figure.draw_without_rendering()
    assert ax.get_ylabel() == ""
    box, whole = ax.title.get_window_extent(), ax.figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1


def test_a_histogram_leaves_out_and_counts_what_is_not_finite():
    pytest.importorskip("matplotlib")
    value = torch.tensor([1.0, math.nan, 2.0, math.inf])
    ax = estimate(name="sample traces", value=value, stderr=torch.zeros(4)).plot()
    assert sum(bar.get_height() for bar in ax.patches) == 2
    assert ax.get_xlabel() == "sample traces, 2 not finite"


def test_a_line_of_text_has_the_interval_where_the_error_bar_does_not_tell_all():
    mass = estimate(name="mass", value=0.185, stderr=0.018, bracket=(0.05, 0.32), support=(0.0, 1.0))
    assert str(mass) == "mass 0.185 +- 0.018 (95 %: 0.00744 to 0.363)"
    top = Estimate(name="lambda max", value=1.1532, bracket=(1.1532, 1.1535))
    assert str(top) == "lambda max 1.15320 (95 %: 1.15320 to 1.15350)"
    one = estimate(stderr=math.nan, rule=StudentT(0))
    assert str(one) == "trace 3 (95 %: -inf to inf)"
    assert str(estimate()) == "trace 3.00 +- 0.10"


def test_digits_end_where_a_bracket_much_wider_than_the_error_bar_begins():
    e = estimate(value=-18.8490437437, stderr=6.9e-9, bracket=(-18.84955, -18.84904))
    assert e.shown() == "-18.84904 ± 6.9e-09"


def test_a_seed_of_numpy_is_saved(tmp_path):
    import numpy as np

    e = estimate(seed=np.int64(3))
    assert ritz.load(e.save(tmp_path / "e")) == e


@pytest.mark.parametrize(
    ("value", "bracket", "shown"),
    [
        (1251.829510, (1251.829498, 1251.829523), "1251.829510"),  # a search: nothing was averaged
        (1.2561, (1.2561, 1.7561), "1.26"),
        (0.5, None, "0.5"),
        (1 / 3, (-math.inf, math.inf), "0.3333"),
    ],
)
def test_a_value_without_a_standard_error_is_shown_to_the_digits_of_its_interval(value, bracket, shown):
    e = Estimate(name="sharpness", value=value, bracket=bracket)
    assert e.shown() == shown
    if bracket and math.isfinite(bracket[0]):
        value, interval = _cells(e)  # as the table of measures has them
        low, high = (float(end) for end in interval.split(" to "))
        assert low <= float(value) <= high


def test_a_repr_is_the_one_line_of_str_whatever_came_with_the_number():
    parts = {f"layer {n}": estimate() for n in range(50)}
    e = estimate(samples=torch.ones(1000), parts=parts)
    assert repr(e) == str(e) == "trace 3.00 +- 0.10"
    assert repr(estimate(value=torch.ones(4), stderr=torch.zeros(4), exact=True)) == "trace (4,), mean 1, exact"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_is_shown_as_it_is(value):
    assert show(value, 0.1) == show(value) == f"{value:g}"


@pytest.mark.parametrize(
    ("value", "stderr", "shown"),
    [
        (75.5, 3e-15, "75.50000000 +- 3.0e-15"),
        (1.0, 1e-300, "1 +- 1.0e-300"),
        (1.0, 1e300, "1.0e+00 +- 1.0e+300"),
        (1e300, 1.0, "1.000000000e+300 +- 1.0e+00"),
    ],
)
def test_no_more_than_ten_digits_are_shown(value, stderr, shown):
    assert show(value, stderr) == shown
