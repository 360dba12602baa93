"""Trace, Frobenius norm, diagonal and log-determinant, each by itself."""

import math

import pytest
import torch
from matrices import DIM, FLAT, OUTLIERS, POSITIVE, SPECTRA, operator, rotated
from torch import nn

import ritz
from ritz.errors import NonFiniteError, NumericalWarning, UnsupportedError
from ritz.estimators import exact
from ritz.estimators.trace import _LeftOut
from ritz.linearity import multi_affine
from ritz.operators import DenseOperator

SAMPLED = ("hutchinson", "hutch++", "xtrace")


def risk_of(activation: nn.Module, seed: int = 0) -> ritz.Risk:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), activation, nn.Linear(12, 8), activation, nn.Linear(8, 3))
    X, y = torch.randn(50, 6), torch.randint(3, (50,))
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=16)


@pytest.mark.parametrize("method", SAMPLED)
@pytest.mark.parametrize("name", SPECTRA)
def test_each_method_is_unbiased(method, name):
    A, truth = operator(name), float(SPECTRA[name].sum())
    values = torch.tensor([ritz.trace(A, method, 12, seed).value for seed in range(200)])
    assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / 200**0.5


@pytest.mark.parametrize("method", SAMPLED)
def test_a_method_spends_what_it_was_given(method):
    for num_probes in (6, 12, 30):
        assert ritz.trace(operator("flat"), method, num_probes).products == num_probes


def test_a_low_rank_matrix_has_an_exact_trace_by_the_methods_that_find_its_range():
    A = rotated(torch.cat([torch.tensor([5.0, 2.0, -1.0]), torch.zeros(DIM - 3)]))
    for method in ("hutch++", "xtrace"):
        e = ritz.trace(A, method, 30)
        assert float(e.value) == pytest.approx(6.0, abs=1e-9)
        assert float(e.stderr) == pytest.approx(0.0, abs=1e-9)


def test_hutch_pp_and_xtrace_beat_hutchinson_where_there_are_outliers():
    A, truth = operator("outliers"), float(OUTLIERS.sum())
    error = {
        method: torch.tensor([ritz.trace(A, method, 30, seed).value - truth for seed in range(40)]).square().mean()
        for method in SAMPLED
    }
    assert error["hutch++"] < error["hutchinson"] / 20
    assert error["xtrace"] < error["hutchinson"] / 20


@pytest.mark.parametrize("dim", [1, 2, 5, 15, 16, 22, 30])
def test_xtrace_of_a_matrix_as_small_as_its_probes_is_exact(dim):
    """Its 15 random vectors nearly span one of 16 dimensions, and 87 % of the intervals held its trace."""
    found = ritz.trace(rotated(torch.arange(1.0, dim + 1)), "xtrace", 30)
    assert (found.exact, found.products) == (True, dim)
    assert float(found.value) == pytest.approx(dim * (dim + 1) / 2)


def test_xtrace_says_what_it_has_not_seen():
    """Beside an eigenvalue of 1e12 the others are small, but they are not round-off."""
    values = torch.cat([torch.tensor([1e12]), torch.ones(DIM - 1)])
    e = ritz.trace(rotated(values), "xtrace", 20)
    assert not e.exact
    assert float(e.value) - 1e12 == pytest.approx(DIM - 1, abs=0.1)


def test_xtrace_knows_how_its_samples_vary_together():
    """The mean of (x_i - x_ij) (x_j - x_ji) is the covariance of two samples: over seeds it comes to what it is."""
    A = rotated(torch.exp(-torch.arange(60) / 8))
    runs = [ritz.trace(A, "xtrace", 24, seed) for seed in range(300)]
    values = torch.tensor([float(e.value) for e in runs])
    told = torch.tensor([float(e.stderr) for e in runs]).square().mean().sqrt()
    alone = torch.stack([e.samples.var() / len(e.samples) for e in runs]).mean().sqrt()
    assert float(values.std() / told) == pytest.approx(1.0, abs=0.15)
    assert float(values.std() / alone) > 1.2  # what their spread says by itself


@pytest.mark.parametrize("method", ["auto", "exact"])
@pytest.mark.parametrize("of", [ritz.trace, ritz.diagonal])
def test_whether_it_is_exact_is_looked_at_once(monkeypatch, of, method):
    """Where code is the user's it is a walk over the data."""
    looks = []
    monkeypatch.setattr(exact, "multi_affine", lambda risk: looks.append(risk) or multi_affine(risk))
    assert of(ritz.Hessian(risk_of(nn.ReLU())), method=method).exact
    assert len(looks) == 1


def test_networks_with_learned_slopes_have_right_exact_traces():
    """By torch itself the backward of prelu is wrong under two vmaps of which the inner has size 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 1))
    risk = ritz.Risk(model, nn.MSELoss(), (torch.randn(5, 3), torch.randn(5, 1)))
    for matrix in (ritz.Hessian, ritz.GGN, ritz.EmpiricalFisher):
        e = ritz.trace(matrix(risk), "exact")
        assert float(e.value) == pytest.approx(float(matrix(risk).dense().trace()), rel=1e-9)


def test_signs_are_exact_on_a_diagonal_matrix():
    e = ritz.trace(DenseOperator(torch.diag(FLAT)), "hutchinson", 5)
    low, high = e.interval()
    assert e.value == pytest.approx(float(FLAT.sum()))
    assert high - low < 1e-5 * float(FLAT.norm())


# ------------------------------------------------------------------------------------------------- exact


def test_the_trace_of_the_hessian_is_that_of_the_ggn_for_a_relu_network():
    risk = risk_of(nn.ReLU())
    H, G = ritz.Hessian(risk), ritz.GGN(risk)
    truth = float(H.dense().trace())
    for matrix in (H, G):
        e = ritz.trace(matrix)
        assert e.exact
        assert e.stderr == 0
        assert float(e.value) == pytest.approx(truth, rel=1e-10)


def test_a_smooth_network_has_an_exact_ggn_trace_and_a_sampled_hessian_trace():
    risk = risk_of(nn.Tanh())
    H, G = ritz.Hessian(risk), ritz.GGN(risk)
    assert float(ritz.trace(G).value) == pytest.approx(float(G.dense().trace()), rel=1e-10)
    sampled = ritz.trace(H)
    assert not sampled.exact
    low, high = sampled.interval(0.999)
    assert low <= float(H.dense().trace()) <= high
    for matrix in (H, 2 * H, H + 0.1, H + G):
        with pytest.raises(UnsupportedError, match="tanh"):
            ritz.trace(matrix, "exact")


@pytest.mark.parametrize("matrix", [ritz.EmpiricalFisher, ritz.Fisher, ritz.GradientCovariance])
def test_the_fishers_have_exact_traces(matrix):
    A = matrix(risk_of(nn.Tanh()))
    e = ritz.trace(A, "exact")
    assert e.exact
    assert float(e.value) == pytest.approx(float(A.dense().trace()), rel=1e-9)


def test_a_matrix_of_no_network_is_traced_by_unit_vectors():
    e = ritz.trace(operator("flat"), "exact")
    assert e.exact
    assert e.products == DIM
    assert float(e.value) == pytest.approx(float(FLAT.sum()))


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_hutch_pp_of_a_matrix_as_small_as_its_probes_is_exact(dim):
    """Its signs lay along each other so often that 20 to 40 % of the intervals, of no width, missed the truth."""
    A = DenseOperator(torch.eye(dim))
    for seed in range(20):
        found, entries = ritz.trace(A, "hutch++", 6, seed), ritz.diagonal(A, 6, seed, method="hutch++")
        assert (found.exact, found.value, found.products) == (True, pytest.approx(dim), dim)
        assert (entries.exact, entries.value.tolist(), entries.products) == (True, pytest.approx([1.0] * dim), dim)


def test_probes_that_are_alike_tell_no_error():
    """Two rows of two signs are one row, or its opposite, half of the time."""
    A = DenseOperator(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    widths = set()
    for seed in range(20):
        found, entries = ritz.trace(A, "hutchinson", 2, seed), ritz.diagonal(A, 2, seed, method="hutchinson")
        for estimate in (found, entries, found.parts["vector"], entries.parts["vector"]):
            low, high = (torch.as_tensor(end) for end in estimate.interval())
            assert bool((low <= 0.0).all() and (high >= 0.0).all())
        widths.add(math.isnan(found.stderr))
        assert bool(entries.stderr.isnan().all()) == math.isnan(found.stderr) == bool((high - low).isinf().all())
    assert widths == {True, False}


@pytest.mark.parametrize("num_probes", [2, 5])
def test_signs_of_a_single_number_are_exact(num_probes):
    A = DenseOperator(torch.tensor([[-3.0]]))
    for found in (ritz.trace(A, "hutchinson", num_probes), ritz.diagonal(A, num_probes, method="hutchinson")):
        for estimate in (found, found.parts["vector"]):
            assert [float(x) for x in (estimate.value, estimate.stderr, *estimate.interval())] == [
                -3.0,
                0.0,
                -3.0,
                -3.0,
            ]


@pytest.mark.parametrize("method", ["exact", "hutchinson", "hutch++"])
def test_block_traces_come_with_the_trace(method):
    risk = risk_of(nn.ReLU())
    G = ritz.GGN(risk)
    dense = G.dense()
    e = ritz.trace(G, method, 60)
    assert sum(float(p.value) for p in e.parts.values()) == pytest.approx(float(e.value))
    for name, place in risk.space.slices.items():
        part = e.parts[name]
        assert abs(float(part.value) - float(dense[place, place].trace())) <= 4.5 * float(part.stderr) + 1e-9


def test_a_block_has_its_own_trace():
    risk = risk_of(nn.ReLU())
    G = ritz.GGN(risk)
    place = risk.space.slices["2.weight"]
    assert float(ritz.trace(G.block("2.weight")).value) == pytest.approx(float(G.dense()[place, place].trace()))


# ------------------------------------------------------------------------- Frobenius norm, diagonal, logdet


@pytest.mark.parametrize("name", SPECTRA)
def test_the_frobenius_norm_is_not_squared_and_within_its_interval(name):
    truth = float(SPECTRA[name].norm())
    inside = 0
    for seed in range(40):
        low, high = ritz.frobenius_norm(operator(name), 30, seed).interval(0.95)
        inside += low <= truth <= high
    assert inside >= 34


def test_the_square_of_the_frobenius_norm_is_unbiased():
    A, truth = operator("outliers"), float(OUTLIERS.square().sum())
    values = torch.tensor([ritz.frobenius_norm(A, 12, seed).value for seed in range(200)]).square()
    assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / 200**0.5


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_the_diagonal_is_unbiased_entry_by_entry(method):
    A = operator("flat")
    truth = A.dense().diagonal()
    runs = [ritz.diagonal(A, 12, seed, method=method) for seed in range(100)]
    values = torch.stack([e.value for e in runs])
    z = (values.mean(0) - truth) / (values.std(0) / 10)
    assert float(z.abs().max()) < 4.5
    reported = torch.stack([e.stderr for e in runs]).square().mean(0).sqrt()
    torch.testing.assert_close(reported, values.std(0), rtol=0.5, atol=0)


def test_the_log_determinant_is_that_of_a_spectrum_run():
    A = operator("positive")
    e = ritz.logdet(A, shift=0.1, num_steps=30, num_probes=4, seed=2)
    assert e == ritz.spectrum(A, 30, 4, seed=2).logdet(0.1)
    low, high = e.interval()
    assert low <= float((POSITIVE + 0.1).log().sum()) <= high


@pytest.mark.parametrize("estimator", [ritz.trace, ritz.frobenius_norm])
def test_a_zero_matrix_has_zero_for_its_trace_and_norm(estimator):
    e = estimator(DenseOperator(torch.zeros(50, 50)))
    assert e.value == 0
    assert e.interval() == (0, 0)


def test_squares_that_are_too_large_are_said_and_no_nan_is_returned():
    data = torch.tensor([[1e20, 1.0], [1.0, 1.0]]).float(), torch.tensor([0, 1])
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).float()
    H = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), data))
    assert (H @ torch.ones(H.dim)).isfinite().all()
    with pytest.raises(NonFiniteError, match=r"trace of the Hessian is not finite, though .* large for float32; scale"):
        ritz.trace(H, "exact")
    with pytest.raises(NonFiniteError, match=r"Frobenius norm of the .* is not finite, though its products are"):
        ritz.frobenius_norm(1e200 * rotated(OUTLIERS))


@pytest.mark.parametrize("dim", [30, 200])
@pytest.mark.parametrize("reorthogonalize", ["locked", "none"])
def test_a_spectrum_whose_squares_are_too_large_says_so(dim, reorthogonalize):
    H = DenseOperator(1e36 * rotated(torch.linspace(-1, 1, dim)).dense().float())
    with pytest.raises(NonFiniteError, match="its squares overflow in float32; scale the loss or the data"):
        ritz.spectrum(H, num_steps=10, num_probes=2, reorthogonalize=reorthogonalize)


def test_the_interval_of_a_trace_has_the_units_of_the_matrix():
    """Of powers of two, so that every digit stays; its moments to the sixth power would overflow."""
    H = rotated(OUTLIERS)
    for method in ("hutchinson", "hutch++", "xtrace"):
        plain, large = ritz.trace(H, method), ritz.trace(2.0**500 * H, method)
        assert large.interval() == pytest.approx([2.0**500 * end for end in plain.interval()], rel=1e-9)


@pytest.mark.parametrize("num_probes", [1, 2])
def test_one_or_two_probes_give_a_norm(num_probes):
    e = ritz.frobenius_norm(operator("flat"), num_probes)
    assert float(e.value) == pytest.approx(float(FLAT.norm()), rel=0.3)
    assert e.products == num_probes


@pytest.mark.parametrize("estimator", [ritz.frobenius_norm, ritz.diagonal])
def test_small_matrices_are_exact(estimator):
    A = rotated(torch.tensor([3.0, 1.0, -2.0]))
    e = estimator(A)
    truth = A.dense().norm() if estimator is ritz.frobenius_norm else A.dense().diagonal()
    assert e.exact
    torch.testing.assert_close(torch.as_tensor(e.value), truth)
    assert float(e.parts["vector"].value) == pytest.approx(float(truth if truth.ndim == 0 else truth.sum()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda A: ritz.trace(A, "guess"), "method must be one of auto, hutchinson"),
        (lambda A: ritz.trace(A, "hutch\x2b\x2b", 5), "needs at least 6 probes, got num_probes=5"),
        (lambda A: ritz.trace(A, num_probes=0), "needs at least 1 probes"),
        (lambda A: ritz.frobenius_norm(A, 0), "num_probes must be at least 1"),
        (lambda A: ritz.diagonal(A, 0), "num_probes must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(operator("flat"))


def test_what_xtrace_finds_without_one_or_two_probes_is_that_of_projections_written_out():
    """P onto the range of A w_k of the probes that are left: Tr P A P + w_i'(I - P) A (I - P) w_i, rescaled."""
    dim, num = 12, 5
    g = torch.Generator().manual_seed(0)
    A, W = torch.randn(dim, dim, generator=g).double(), torch.randn(dim, num, generator=g).double()
    A = A @ A.T
    q, r = torch.linalg.qr(A @ W)
    found = _LeftOut(dim, q.T @ W, r, q.T @ A @ q, (W * (A @ W)).sum(0), W.square().sum(0))

    def sample(i: int, *out: int) -> float:
        basis = torch.linalg.qr((A @ W)[:, [k for k in range(num) if k not in out]])[0]
        rest = W[:, i] - basis @ (basis.T @ W[:, i])
        scale = (dim - num + len(out)) / rest.square().sum()
        return float((basis.T @ A @ basis).trace() + rest @ A @ rest * scale)

    torch.testing.assert_close(found.one(), torch.tensor([sample(i, i) for i in range(num)]).double())
    pairs = [(i, j) for i in range(num) for j in range(num) if i != j]
    truth = torch.tensor([sample(i, i, j) for i, j in pairs]).double()
    torch.testing.assert_close(torch.stack([found.two()[i, j] for i, j in pairs]), truth)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_a_multiple_of_the_identity_makes_no_interval_wider(method):
    """Random signs know its trace exactly; it may be most of the matrix, as with weight decay in the loss."""
    A = rotated(FLAT)
    for seed in range(5):
        ends = [ritz.trace(A + shift, method, 12, seed).interval() for shift in (0.0, 3.0)]
        widths = [high - low for low, high in ends]
        assert widths[1] < 1.3 * widths[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "estimate",
    [ritz.trace, ritz.frobenius_norm, lambda A: ritz.diagonal(A, method="hutch++").parts["vector"]],
    ids=["trace", "norm", "diagonal"],
)
def test_half_precision_finds_the_range_of_the_large_eigenvalues_too(estimate, dtype):
    """torch has no QR decomposition of it, which was an error."""
    truth = operator("outliers").dense()
    found = estimate(DenseOperator(truth.to(dtype)))
    exact = float(truth.norm() if found.name == "Frobenius norm" else truth.trace())
    assert found.value == pytest.approx(exact, abs=4 * float(found.stderr) + 10 * torch.finfo(dtype).eps * exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["auto", *SAMPLED])
def test_weights_of_16_bits_have_a_trace(method, dtype):
    risk = risk_of(nn.Tanh())
    truth, model = float(ritz.Hessian(risk.to(dtype=torch.float64)).dense().trace()), risk.model.to(dtype)
    data = [(X.to(dtype), y) for X, y in (batch.data for batch in risk.batches)]
    with pytest.warns(NumericalWarning, match="products in .*float16 are off by"):
        found = ritz.trace(ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), data)), method)
    low, high = found.interval(0.999)
    assert low < truth < high


def test_a_network_under_autocast_has_exact_traces():
    class Autocast(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    plain = risk_of(nn.ReLU())
    truth = float(ritz.trace(ritz.GGN(plain), "exact").value)
    data = [(X.float(), y) for X, y in (batch.data for batch in plain.batches)]
    risk = ritz.Risk(Autocast(*plain.model).float(), nn.CrossEntropyLoss(), data)
    assert float(ritz.trace(ritz.GGN(risk), "exact").value) == pytest.approx(truth, rel=2e-2)
    assert float(ritz.diagonal(ritz.GGN(risk), method="exact").value.sum()) == pytest.approx(truth, rel=2e-2)


def test_a_loss_without_a_second_derivative_has_a_trace_by_differences():
    """Of a network of which else it would be exact."""
    plain = risk_of(nn.ReLU())
    risk = ritz.Risk(plain.model, nn.MultiMarginLoss(p=2), [batch.data for batch in plain.batches], dtype=torch.float64)
    with pytest.warns(NumericalWarning, match="multi_margin_loss"):
        found = ritz.trace(ritz.Hessian(risk))
    truth = float(ritz.Hessian(risk, route="difference").dense().trace())
    low, high = found.interval(0.999)
    assert low < truth < high
    with pytest.raises(UnsupportedError, match=r"no second derivative in the outputs \(.*multi_margin.*\).*use probes"):
        ritz.trace(ritz.GGN(risk), "exact")


def test_what_is_wrong_with_a_risk_is_named_before_an_exact_trace_looks_at_it():
    """Edges between nodes: two samples of a batch are no batch."""
    X, edges, y = torch.randn(5, 3), torch.tensor([[0, 1], [3, 4]]), torch.arange(5) % 2
    risk = ritz.Risk(
        nn.Linear(3, 2),
        nn.CrossEntropyLoss(),
        [(X, edges, y)],
        forward=lambda model, b: model(b[0] + b[0][b[1][1]].sum(0)),
    )
    for ask in (lambda: ritz.trace(ritz.Hessian(risk)), lambda: ritz.diagonal(ritz.GGN(risk))):
        with pytest.raises(ValueError, match=r"not half of it.*nodes and edges of several graphs, use mode='train'"):
            ask()


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_the_trace_and_the_diagonal_of_a_positive_matrix_are_not_below_zero(method):
    """Of few probes an interval that knows no better goes far below."""
    values = torch.cat([torch.tensor([100.0, 50.0, 40.0, 30.0, 20.0]), torch.full((DIM - 5,), 0.01)])
    for positive, least in ((True, 0.0), (False, -math.inf)):
        A = rotated(values, positive=positive)
        found = [ritz.trace(A, method, 6, seed) for seed in range(20)]
        found += [part for e in found for part in e.parts.values()]
        if method != "xtrace":
            found += [ritz.diagonal(A, 6, seed, method=method) for seed in range(3)]
        ends = [float(torch.as_tensor(e.interval(0.999)[0]).min()) for e in found]
        assert min(ends) == 0.0 if positive else least < min(ends) < 0.0
