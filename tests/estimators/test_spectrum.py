"""One run, many answers: against dense truth on matrices and on networks."""

import itertools
import math

import pytest
import torch
from matrices import DIM, FLAT, OUTLIERS, POSITIVE, bulk, operator, rotated
from torch import Tensor, nn

import ritz
from ritz.errors import IndefiniteError, NonFiniteError, NumericalWarning
from ritz.intervals import ChiSquare, CountedChiSquare, Hull, MatchedT
from ritz.operators import DenseOperator, FunctionOperator

MODES = ("locked", "full", "none")


def small_risk(**options: object) -> ritz.Risk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    X, y = torch.randn(50, 6), torch.randint(3, (50,))
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=16, **options)


# ------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("mode", MODES)
def test_full_depth_gives_the_whole_spectrum_of_each_probe(mode):
    """Then the only error left is the sampling error of the weights: extremes and mass bounds are exact."""
    values = torch.linspace(-1, 3, 20)
    A = rotated(torch.cat([values, torch.zeros(DIM - 20)]))  # 21 distinct eigenvalues
    s = ritz.spectrum(A, 40, 4, reorthogonalize=mode)
    assert float(s.lambda_max.value) == pytest.approx(3.0, abs=1e-8)
    assert float(s.lambda_min.value) == pytest.approx(-1.0, abs=1e-8)


def test_a_small_matrix_is_known_completely():
    values = torch.tensor([4.0, 1.0, 0.5, -2.0])
    s = ritz.spectrum(rotated(values))
    assert s.trace.exact
    assert s.trace.stderr == 0
    assert float(s.trace.value) == pytest.approx(3.5)
    assert float(s.moment(3).value) == pytest.approx(float(values.pow(3).sum()))
    assert float(s.frobenius_norm.value) == pytest.approx(float(values.norm()))
    assert float(s.spectral_norm.value) == pytest.approx(4.0)
    assert float(s.negative_trace.value) == pytest.approx(-2.0)
    assert float(s.mass(below=0.6).value) == 0.5
    assert float(s.logdet(shift=3.0).value) == pytest.approx(float((values + 3).log().sum()))
    assert s.products == 4
    low, high = s.trace.interval()
    assert low == high == s.trace.value


def test_locking_is_an_identity_for_trace_and_frobenius_norm():
    """However good the pairs are: the mean over many seeds is the truth."""
    A = operator("outliers")
    runs = [ritz.spectrum(A, 2, 8, seed=seed) for seed in range(40)]
    for truth, pick in ((OUTLIERS.sum(), lambda s: s.trace), (OUTLIERS.square().sum(), lambda s: s.moment(2))):
        values = torch.tensor([float(pick(s).value) for s in runs])
        assert abs(values.mean() - truth) < 4 * values.std() / math.sqrt(len(values))


@pytest.mark.parametrize("mode", MODES)
def test_moments_of_the_nodes_are_the_moments_of_the_estimates(mode):
    s = ritz.spectrum(operator("flat"), 10, 4, reorthogonalize=mode)
    assert float(s.weights.sum()) == pytest.approx(1.0)
    assert DIM * float((s.weights * s.nodes).sum()) == pytest.approx(float(s.trace.value))
    assert bool((s.nodes.diff() >= 0).all())


def test_probe_samples_are_quadratic_forms():
    """Without a head, the k-th moment of probe v is P v'A^k v, exactly, for k <= 2m - 1; not for 2m."""
    A = operator("flat")
    dense, m = A.dense(), 4
    s = ritz.spectrum(A, m, 3, seed=5, reorthogonalize="full")
    v = A.probes(range(3), 5, "normal")
    v = v / v.norm(dim=1, keepdim=True)
    for k in range(1, 2 * m):
        truth = DIM * (v * (v @ torch.linalg.matrix_power(dense, k))).sum(1)
        torch.testing.assert_close(s.moment(k).samples, truth, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="4 steps give moments up to 7, got k=8"):
        s.moment(8)


# ---------------------------------------------------------------------------------------- other quantities


def test_negative_trace_lies_in_its_interval():
    truth = float(OUTLIERS.clamp(max=0).sum())
    for seed in range(20):
        e = ritz.spectrum(operator("outliers"), 30, 8, seed=seed).negative_trace
        low, high = e.interval()
        assert low <= truth <= high <= 0


def test_density_integrates_to_one_and_is_positive():
    s = ritz.spectrum(operator("outliers"), 40, 8)
    grid = torch.linspace(-20, 70, 4000)
    curve = s.density(grid, width=2.0)
    assert float(curve.value.sum() * (grid[1] - grid[0])) == pytest.approx(1.0, abs=1e-6)
    low, high = curve.interval()
    assert bool((low >= 0).all() and (low <= curve.value + 1e-15).all() and (curve.value <= high + 1e-15).all())


@pytest.mark.parametrize("mode", MODES)
def test_the_value_is_the_mean_of_the_samples(mode):
    s = ritz.spectrum(operator("positive"), 10, 4, reorthogonalize=mode)
    numbers = [s.trace, s.moment(2), s.moment(3), s.frobenius_norm, s.negative_trace, s.mass(below=3.0), s.logdet(0.1)]
    for e in numbers + list(s.trace.parts.values()):
        assert float(e.samples.mean()) ** e.power == pytest.approx(float(e.value)), e.name


def test_a_damped_matrix_has_its_smallest_eigenvalue_where_it_is():
    G = ritz.GGN(small_risk()) + 0.1
    s = ritz.spectrum(G)
    low, high = s.lambda_min.interval()
    assert low <= 0.1 <= high + 1e-9
    assert float(s.lambda_min.value) == pytest.approx(0.1, rel=1e-3)
    low, high = s.logdet(0.01).interval()
    assert low <= float((torch.linalg.eigvalsh(G.dense()) + 0.01).log().sum()) <= high


def test_the_log_determinant_of_a_float32_ggn_is_not_refused_for_round_off_below_zero():
    G = ritz.GGN(small_risk(dtype=torch.float32))
    truth = float((torch.linalg.eigvalsh(ritz.GGN(small_risk()).dense()).clamp(min=0) + 0.1).log().sum())
    low, high = ritz.logdet(G, shift=0.1, num_steps=40).interval(0.999)
    assert low - 1e-3 <= truth <= high + 1e-3


def test_one_step_gives_the_trace_and_the_frobenius_norm():
    s = ritz.spectrum(operator("flat"), 1, 8, reorthogonalize="none")
    rows = operator("flat").probes(range(8), 0, "normal")
    rows = rows / rows.norm(dim=1, keepdim=True)
    torch.testing.assert_close(s.moment(2).samples, DIM * operator("flat").rows(rows).square().sum(1))
    assert "Frobenius norm" in str(s)
    assert s.lambda_max.interval()[1] == math.inf  # one step says nothing about the end


def test_the_mass_at_an_eigenvalue_is_not_decided_by_round_off():
    A = rotated(torch.cat([torch.tensor([2.0, 1.0]), torch.zeros(8)]))
    e = ritz.spectrum(A).mass(below=0.0)
    low, high = e.interval()
    assert low <= 0.8 <= high
    assert float(e.value) == pytest.approx(0.8)
    assert float(ritz.spectrum(A).mass(below=math.inf).value) == 1.0
    with pytest.raises(ValueError, match="below must be a number"):
        ritz.spectrum(A).mass(below=math.nan)


def test_the_negative_part_of_a_short_run_is_not_claimed_to_be_known():
    truth = float(FLAT.clamp(max=0).sum())
    for steps in (1, 2, 3):
        low, high = ritz.spectrum(operator("flat"), steps, 4, reorthogonalize="none").negative_trace.interval(0.99)
        assert low <= truth <= high


@pytest.mark.parametrize("values", [3 * torch.ones(60), 2 * torch.ones(150), torch.zeros(60)])
def test_the_default_density_of_one_eigenvalue_has_area_one(values):
    s = ritz.spectrum(rotated(values))
    grid = s.default_grid()
    assert float(s.density().value.sum() * (grid[1] - grid[0])) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("width", [0.0, -1.0])
def test_a_width_that_is_not_positive_is_refused(width):
    with pytest.raises(ValueError, match="width must be positive"):
        ritz.spectrum(operator("flat"), 10, 2).density(width=width)


def test_a_width_finer_than_the_steps_resolve_is_said():
    with pytest.warns(NumericalWarning, match="finer than 10 steps can resolve"):
        ritz.spectrum(operator("flat"), 10, 2).density(width=1e-3)


def test_the_log_determinant_of_an_indefinite_matrix_needs_a_shift_that_covers_it():
    s = ritz.spectrum(operator("outliers"), 40, 8)
    with pytest.raises(ValueError, match=r"the matrix is indefinite, eigenvalues reach down to -3"):
        s.logdet(shift=1.0)
    with pytest.raises(ValueError, match="shift must be positive"):
        s.logdet(shift=0.0)


def test_eigenvalues_that_steps_do_not_rule_out_are_not_said_to_be_there():
    """A positive matrix, and too few steps to know it."""
    A = rotated(torch.linspace(1.0, 2.0, 200))
    with pytest.raises(
        IndefiniteError, match=r"smallest Ritz value is 1.*3 steps .* of any size, .*; raise num_steps$"
    ):
        ritz.logdet(A, shift=0.1, num_steps=3, num_probes=1)
    with pytest.raises(IndefiniteError, match=r"do not rule out negative eigenvalues down to -.* a shift above"):
        ritz.logdet(A, shift=0.1, num_steps=6, num_probes=1)
    with pytest.raises(IndefiniteError, match=r"the matrix is indefinite, .*; raise num_steps, which tell"):
        ritz.logdet(operator("flat"), shift=0.1, num_steps=3, num_probes=1)


@pytest.mark.parametrize("mode", MODES)
def test_a_matrix_of_one_number_is_known_in_every_mode(mode):
    s = ritz.spectrum(DenseOperator(torch.tensor([[2.0]])), reorthogonalize=mode)
    for e in (s.lambda_min, s.lambda_max):
        assert e.interval() == pytest.approx((2.0, 2.0))
    assert s.logdet(1.0).interval() == pytest.approx((math.log(3.0), math.log(3.0)))


def beside(outlier: float, values: Tensor) -> tuple[DenseOperator, Tensor]:
    """A matrix in float32, whose products are off by about 1e-7 of the outlier, and its eigenvalues."""
    dense = rotated(torch.cat([torch.tensor([outlier]), values])).dense()
    A = DenseOperator(((dense + dense.T) / 2).float())
    return A, torch.linalg.eigvalsh(A.dense().double())


@pytest.mark.parametrize("outlier", [1e5, 1e6, 1e7])
def test_a_narrow_bulk_beside_a_large_outlier_is_not_taken_for_round_off(outlier):
    """Either it is resolved, or it is said to be unknown."""
    A, truth = beside(outlier, bulk(299))
    for seed in range(3):
        s = ritz.spectrum(A, 50, 8, seed=seed)
        for e, exact in (
            (s.lambda_min, truth[0]),
            (s.negative_trace, truth.clamp(max=0).sum()),
            (s.mass(0.0), (truth <= 0).double().mean()),
            (s.mass(0.5), (truth <= 0.5).double().mean()),
        ):
            low, high = e.interval()
            off = s.noise * outlier if e.name == "lambda min" else 0.0  # of eigenvalues intervals leave round-off out
            assert low - off <= float(exact) <= high + off, (seed, e)
        if outlier < 1e7:
            assert float(s.negative_trace.value) == pytest.approx(float(truth.clamp(max=0).sum()), rel=0.2)


def test_the_determinant_of_a_narrow_bulk_beside_a_large_outlier_is_not_that_of_one_node():
    A, truth = beside(4e5, bulk(299).square())
    A.positive, truth, shift = True, truth.clamp(min=0), 2.5
    for seed in range(3):
        s = ritz.spectrum(A, 50, 8, seed=seed)
        for e, exact in (
            (s.logdet(shift), (truth + shift).log().sum()),
            (s.soft_rank(shift), (truth / (truth + shift)).sum()),
        ):
            low, high = e.interval(0.999)
            assert low <= float(exact) <= high, (seed, e)


@pytest.mark.parametrize("mode", ["locked", "none"])
def test_the_soft_rank_lies_in_its_interval(mode):
    """A few outliers over a power law, and 200 zero eigenvalues; a shift in the middle of it."""
    values = torch.cat([torch.tensor([50.0, 20.0, 9.0]), torch.arange(1, 298).double() ** -1.5, torch.zeros(200)])
    for shift in (1.0, 1e-2):
        truth = float((values / (values + shift)).sum())
        inside = 0
        for seed in range(10):
            A = rotated(values, positive=True)
            found = ritz.spectrum(A, 60, 8, seed=seed, reorthogonalize=mode).soft_rank(shift)
            low, high = found.interval(0.99)
            inside += low <= truth <= high
        assert inside >= 9
        assert high - low < 1.2 * truth


@pytest.mark.parametrize("shift", [1.0, 1e-3, 1e-6])
def test_what_the_coupling_may_cost_a_determinant_is_bounded_for_a_positive_matrix(shift):
    """Locked pairs whose residuals are large beside the shift: the bracket stays finite, and holds."""
    values = torch.cat([torch.tensor([60.0, 33.0, 21.0, 12.0]), 2.0 * torch.rand(296), torch.zeros(100)])
    A = rotated(values, positive=True)
    found = ritz.spectrum(A, 60, 8)
    assert len(found.head) > 0
    if shift > 1e-4:  # else 60 steps do not resolve what is left
        low, high = found.logdet(shift).interval(0.999)
        assert low <= float((values + shift).log().sum()) <= high
    assert math.isfinite(found.logdet(shift).interval()[0])
    assert found.soft_rank(shift).interval()[0] > -40


def test_the_soft_rank_of_a_known_matrix_is_exact_and_between_0_and_the_rank():
    found = ritz.spectrum(rotated(torch.tensor([3.0, 1.0, 0.0]))).soft_rank(1.0)
    assert found.value == pytest.approx(0.75 + 0.5)
    assert found.exact
    with pytest.raises(ValueError, match="indefinite"):
        ritz.spectrum(rotated(torch.tensor([3.0, -1.0]))).soft_rank(0.5)


def test_a_shift_below_the_round_off_of_the_products_is_refused():
    A = DenseOperator(operator("positive").dense().float())
    A.positive = True
    with pytest.raises(ValueError, match="is lost in the round-off"):
        ritz.spectrum(A, 20, 4).logdet(shift=1e-9)


def test_the_spectral_norm_is_the_larger_end_in_size():
    A = rotated(torch.cat([torch.tensor([-9.0, 4.0]), 0.1 * FLAT[2:]]))
    s = ritz.spectrum(A, 30, 4)
    assert float(s.spectral_norm.value) == pytest.approx(9.0, rel=1e-6)
    assert float(s.lambda_max.value) == pytest.approx(4.0, rel=1e-6)
    low, high = s.spectral_norm.interval()
    assert low <= 9.0 + 1e-9 <= high + 1e-6


def test_block_traces_add_up_and_agree_with_the_dense_blocks():
    risk = small_risk()
    H = ritz.Hessian(risk)
    dense = H.dense()
    s = ritz.spectrum(H, 20, 64)
    parts = s.trace.parts
    assert list(parts) == list(risk.space.names)
    assert sum(float(p.value) for p in parts.values()) == pytest.approx(float(s.trace.value))
    for name, place in risk.space.slices.items():
        truth = float(dense[place, place].trace())
        assert abs(float(parts[name].value) - truth) <= 4.5 * float(parts[name].stderr) + 1e-9


def test_squared_norms_of_the_rows_of_each_parameter_add_up_to_the_frobenius_norm():
    risk = small_risk()
    H = ritz.Hessian(risk)
    dense = H.dense()
    s = ritz.spectrum(H, 20, 64)
    norm = ritz.frobenius_norm(H, 120)
    for name, place in risk.space.slices.items():
        truth = float(dense[place].square().sum())
        part = s.moment(2).parts[name]
        assert abs(float(part.value) - truth) <= 4.5 * float(part.stderr) + 1e-9
        low, high = norm.parts[name].interval(0.9999)
        assert low <= math.sqrt(truth) <= high
    assert sum(float(p.value) for p in s.moment(2).parts.values()) == pytest.approx(float(s.moment(2).value), rel=0.02)


def test_a_complete_spectrum_has_exact_parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    H = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randn(9, 3), torch.randint(2, (9,)))))
    dense, s = H.dense(), ritz.spectrum(H)
    for name, place in H.space.slices.items():
        assert s.trace.parts[name].exact
        assert float(s.trace.parts[name].value) == pytest.approx(float(dense[place, place].trace()), abs=1e-10)
        assert float(s.moment(2).parts[name].value) == pytest.approx(float(dense[place].square().sum()), abs=1e-10)


# ------------------------------------------------------------------------------------- how the run is made


def test_a_budget_of_products_is_kept():
    A = operator("flat")
    for budget in (50, 200, 800, 2000):
        s = ritz.spectrum(A, products=budget)
        assert s.products <= budget
        assert s.products >= 0.8 * min(budget, 96 + 8 * DIM)


def test_a_tolerance_adds_probes_until_the_intervals_are_within_it():
    A = operator("positive")
    loose, tight = (ritz.spectrum(A, 10, 8, tol=tol) for tol in (0.5, 0.004))
    assert tight.num_probes > loose.num_probes == 8
    for e in (tight.trace, tight.moment(2)):
        low, high = e.interval()
        assert (high - low) / 2 <= 0.004 * abs(float(e.value))
    assert tight.stop == "intervals within 0.004"


def test_a_tolerance_that_is_out_of_reach_says_so():
    s = ritz.spectrum(operator("flat"), 2, 2, tol=1e-9)
    assert "not within 1e-09" in s.stop
    capped = ritz.spectrum(operator("flat"), 5, 4, tol=1e-9, products=200)
    assert capped.stop.startswith("200 products spent")
    assert capped.products <= 200


def test_the_same_seed_gives_the_same_spectrum_and_another_another():
    A = operator("flat")
    first, again, other = (ritz.spectrum(A, 10, 4, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_probes_are_common_to_two_matrices():
    """So that the difference of two traces is known better than either."""
    A, B = operator("flat"), rotated(FLAT + 0.01)
    a, b = (ritz.spectrum(M, 5, 8, reorthogonalize="none").trace for M in (A, B))
    assert float((b.samples - a.samples).std()) < 1e-6 * float(a.samples.std())


def test_the_rule_of_the_interval_fits_the_run():
    for mode in MODES:
        rule = ritz.spectrum(operator("positive"), 5, 4, reorthogonalize=mode).trace.rule
        assert [type(one) for one in rule.rules] == [MatchedT, CountedChiSquare]
    one_step = ritz.spectrum(operator("positive"), 1, 4, reorthogonalize="none")  # Tr H^2 is known, Tr H^4 is not
    assert isinstance(one_step.trace.rule, ChiSquare)
    assert isinstance(one_step.moment(2).rule, Hull)


@pytest.mark.parametrize("size", [1e-50, 1e-12, 1e12, 1e50])
def test_moments_of_very_small_and_large_matrices_have_the_intervals_of_others(size):
    ends = [
        torch.tensor([s.moment(k).interval() for k in (1, 2, 3, 4, 5)], dtype=torch.float64)
        for s in (ritz.spectrum(rotated(FLAT.double() * x), 12, 3, reorthogonalize="none") for x in (1.0, size))
    ]
    powers = size ** torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]
    torch.testing.assert_close(ends[1] / powers, ends[0], rtol=1e-6, atol=0.0)


def test_locked_pairs_that_are_not_the_outliers_leave_a_skewed_tail():
    """A block of one step locks what is small, and not the one large eigenvalue."""
    values = torch.cat([torch.tensor([1000.0]), torch.linspace(0.0, 0.3, 199)])
    s = ritz.spectrum(rotated(values, positive=True), products=40)
    assert len(s.head) > 0
    assert float(s.head.max()) < 100
    for e in (s.trace, s.moment(2)):  # wider above than below: the one that is large may be more than was seen of it
        low, high = e.interval()
        assert high - e.value > 1.1 * (e.value - low)


def test_progress_counts_products_up_to_what_is_expected():
    seen: list[tuple[int, int]] = []
    s = ritz.spectrum(operator("flat"), 10, 4, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == s.products
    assert all(done <= total for done, total in seen)


@pytest.mark.parametrize(
    "values",
    [torch.zeros(DIM), torch.ones(DIM), torch.cat([torch.tensor([5.0]), torch.zeros(DIM - 1)]), -POSITIVE],
    ids=["zero", "identity", "rank one", "negative"],
)
@pytest.mark.parametrize("mode", MODES)
def test_degenerate_matrices_are_no_trouble(values, mode):
    s = ritz.spectrum(rotated(values), 10, 8, reorthogonalize=mode)
    for e, truth in (
        (s.lambda_max, values.max()),
        (s.lambda_min, values.min()),
        (s.trace, values.sum()),
        (s.moment(2), values.square().sum()),
    ):
        low, high = e.interval(0.999)
        scale = 1e-9 + 1e-6 * float(values.abs().max()) * DIM
        assert low - scale <= float(truth) <= high + scale, e.name
    assert math.isfinite(float(s.frobenius_norm.value))
    assert bool(s.density().value.isfinite().all())


def test_save_and_load_give_an_equal_spectrum(tmp_path):
    for s in (ritz.spectrum(operator("outliers"), 10, 4), ritz.spectrum(rotated(torch.ones(5)))):
        loaded = ritz.load(s.save(tmp_path / "s"))
        assert loaded == s
        assert loaded.trace == s.trace
        assert loaded.lambda_max == s.lambda_max


def test_a_spectrum_of_a_network_agrees_with_its_dense_hessian():
    risk = small_risk()
    H = ritz.Hessian(risk)
    values = torch.linalg.eigvalsh(H.dense())
    s = ritz.spectrum(H, 40, 16)
    for e, truth in (
        (s.trace, values.sum()),
        (s.moment(2), values.square().sum()),
        (s.lambda_max, values[-1]),
        (s.lambda_min, values[0]),
        (s.negative_trace, values.clamp(max=0).sum()),
        (s.mass(below=0.0), (values <= 0).double().mean()),
    ):
        low, high = e.interval(0.999)
        assert low - 1e-9 <= float(truth) <= high + 1e-9, e.name
    assert "Hessian" in s.trace.convention
    assert "50 samples" in s.trace.convention


def test_a_plot_is_drawn_on_given_or_new_axes():
    s = ritz.spectrum(operator("outliers"), 20, 4)
    ax = s.plot()
    assert s.plot(ax) is ax
    assert len(ax.lines) == 4
    assert ax.get_yscale() == "log"


def test_a_density_draws_itself_over_its_grid_and_not_as_a_histogram_of_its_values(tmp_path):
    s = ritz.spectrum(operator("outliers"), 20, 4)
    grid = torch.linspace(-1, 1, 50)
    curve = s.density(grid, width=3.0)
    ax = curve.plot()
    x, y = ax.lines[0].get_data()
    assert x.tolist() == curve.grid.tolist() == grid.tolist()
    assert y.tolist() == curve.value.tolist()
    assert (ax.get_yscale(), ax.get_ylabel()) == ("log", "density, smoothed over 3")
    assert ritz.load(curve.save(tmp_path / "density")) == curve
    assert repr(curve).startswith("density (50,)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps and num_probes must be at least 1"),
        ({"num_probes": 0}, "num_steps and num_probes must be at least 1"),
        ({"products": 1}, "products must be at least 8"),
        ({"tol": 0.0}, "tol must be positive"),
        ({"reorthogonalize": "some"}, "reorthogonalize must be"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ritz.spectrum(operator("flat"), **options)


@pytest.mark.parametrize("estimator", [ritz.spectrum, ritz.trace, ritz.frobenius_norm, ritz.top_eigenpairs])
def test_a_risk_in_the_place_of_an_operator_is_named(estimator):
    with pytest.raises(TypeError, match=r"expected an operator such as ritz\.Hessian\(risk\).*got Risk"):
        estimator(small_risk())


def test_autocast_around_the_call_does_no_harm():
    H = ritz.Hessian(small_risk(dtype=torch.float32), route="forward")
    plain = ritz.spectrum(H, 10, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ritz.spectrum(H, 10, 4) == plain


def test_a_product_that_is_not_finite_names_the_batch():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(120))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w.abs().sqrt().sum() * x).sum(1, keepdim=True)

    X = torch.zeros(4, 1)
    X[3] = 1.0  # the square root at zero has an infinite slope, and only the last batch sees it
    risk = ritz.Risk(Root(), nn.MSELoss(), (X, torch.zeros(4, 1)), batch_size=2)
    with pytest.raises(NonFiniteError, match=r"batch [01] is not finite"):
        ritz.spectrum(ritz.Hessian(risk, route="reverse"), 5, 2)


def test_a_warning_points_at_the_line_of_the_call():
    """And not into ritz or the standard library."""
    A, count = rotated(FLAT), itertools.count()
    broken = FunctionOperator(lambda V: (A @ V) * (math.nan if next(count) > 20 else 1.0), DIM, torch.float64)
    calls = (
        lambda: ritz.spectrum(broken, 30, 2),
        lambda: ritz.top_eigenpairs(A, 5, max_products=30),
        lambda: ritz.solve(A + 4.0, torch.ones(DIM), max_steps=2),
    )
    for call in calls:
        with pytest.warns(NumericalWarning) as told:
            call()
        assert [(w.filename, w.lineno) for w in told] == [(__file__, call.__code__.co_firstlineno)]
