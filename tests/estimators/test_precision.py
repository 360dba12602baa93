"""Products in float32 beside those in float64: on a network that fits its data they are those of another matrix."""

import warnings
from dataclasses import replace

import pytest
import torch
from fitted import dense, f32, f64, fitted, healthy
from torch import Tensor, nn

import ritz
from ritz.errors import NumericalWarning
from ritz.estimators import krylov_run, precision
from ritz.estimators.density import default_width
from ritz.estimators.precision import Precision, coarse_products, compare_precisions
from ritz.operators import DenseOperator
from ritz.switches import tensor_cores

SEEDS = (0, 1, 2, 3)


def run(operator: type[ritz.Operator], risk: ritz.Risk, **options: object) -> ritz.Spectrum:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        return ritz.spectrum(operator(risk), 30, 8, **options)


NUMBERS = {
    "trace": torch.sum,
    "frobenius_norm": torch.linalg.vector_norm,
    "lambda_max": torch.max,
    "lambda_min": torch.min,
    "spectral_norm": lambda t: t.abs().max(),
    "negative_trace": lambda t: t.clamp(max=0).sum(),
}


@pytest.fixture(scope="module", params=[3.5, 5.0], ids=["off by 1e-3", "off by 1e-2"])
def runs(request):
    """(run in float32, eigenvalues in float64) of networks whose products have few digits, and of some almost none."""
    risks = [fitted(seed, request.param) for seed in SEEDS]
    return [(run(ritz.Hessian, risk), dense(ritz.Hessian, risk)) for risk in risks]


@pytest.mark.parametrize("key", NUMBERS)
def test_intervals_hold_the_value_of_float64_which_without_the_comparison_they_do_not(runs, key):
    covered, before = 0, 0
    for s, values in runs:
        truth = float(NUMBERS[key](values))
        plain = replace(s, rounding=0.0, trace_rounding=0.0)
        wide, narrow = getattr(s, key), getattr(plain, key)
        assert float(wide.value) == float(narrow.value)
        covered += float(wide.interval()[0]) <= truth <= float(wide.interval()[1])
        before += float(narrow.interval()[0]) <= truth <= float(narrow.interval()[1])
    assert covered == len(SEEDS)
    if key not in ("trace", "negative_trace"):  # whose sampling error is as large at 1e-3
        assert before <= 1


def test_functions_of_the_matrix_hold_the_value_of_float64_where_they_are_not_refused(runs):
    for s, values in runs:
        norm = float(values.abs().max())
        shift = max(0.3 * norm, 20 * s.rounding)
        for found, truth in (
            (s.logdet(shift), (values + shift).log().sum()),
            (s.soft_rank(shift), (values / (values + shift)).sum()),
            (s.mass(below=0.5 * norm), (values <= 0.5 * norm).double().mean()),
            (s.moment(3), values.pow(3).sum()),
        ):
            low, high = (float(end) for end in found.interval())
            slack = 1e-14 * abs(float(truth))  # a share of 146 of 147 eigenvalues is a sum of weights here
            assert low - slack <= float(truth) <= high + slack
        with pytest.raises(ValueError, match=r"eigenvalues reach down|lost in the round-off"):
            s.logdet(5 * s.rounding)


def test_the_density_is_as_uncertain_as_the_eigenvalues(runs):
    for s, values in runs:
        grid = s.default_grid(64)
        width = max(default_width(s), 2 * s.rounding)
        low, high = s.density(grid, width).interval()
        truth = torch.exp(-0.5 * ((grid[:, None] - values) / width).square()).mean(1) / (width * (2 * torch.pi) ** 0.5)
        assert ((truth >= low) & (truth <= high)).double().mean() > 0.9


def test_parts_of_the_trace_hold_the_value_of_float64(runs):
    risk = fitted(SEEDS[0], 5.0)
    s, H = run(ritz.Hessian, risk), ritz.Hessian(risk.to(dtype=f64))
    blocks = risk.space.segment(H.dense().diagonal()[None])[0]
    for (_, part), truth in zip(s.trace.parts.items(), blocks.tolist(), strict=True):
        assert float(part.interval()[0]) <= truth <= float(part.interval()[1])


def test_a_matrix_that_is_diagonalised_in_full_is_bracketed_too():
    risk = fitted(0, 5.0, width=7)
    s, values = run(ritz.Hessian, risk), dense(ritz.Hessian, risk)
    assert s.tail is None
    for key, truth in NUMBERS.items():
        low, high = getattr(s, key).interval()
        assert low < float(truth(values)) < high
    for found in (s.density(), s.moment(2), s.moment(3), s.mass(below=0.0)):
        assert found.bracket is not None or found.exact


def test_a_run_that_is_off_says_so_with_its_remedy():
    risk = fitted(0, 5.0)
    with pytest.warns(NumericalWarning, match=r"products in float32 are off by \de-0\d .* use dtype=torch.float64"):
        s = ritz.spectrum(ritz.Hessian(risk), 10, 4)
    assert "products off by" in s.convention
    assert s.stop == "completed"
    with pytest.warns(NumericalWarning, match="are off by"):
        m = ritz.measure(risk, measures=["trace"], num_steps=10, num_probes=4)
    assert m["trace"].bracket[0] < m["trace"].value < m["trace"].bracket[1]
    ritz.spectrum(ritz.Hessian(risk.to(dtype=f64)), 10, 4)  # warnings are errors here


def test_a_gauss_newton_matrix_that_round_off_made_indefinite_is_not_called_that():
    for seed in SEEDS[:2]:
        s = run(ritz.GGN, fitted(seed, 8.0))
        assert s.stop == "completed"
        assert s.positive


def test_rounds_of_probes_end_though_intervals_are_wide():
    with pytest.warns(NumericalWarning, match="are off by"):
        s = ritz.spectrum(ritz.Hessian(fitted(0, 5.0)), 10, 8, tol=0.5)
    assert s.stop == "intervals within 0.5"


# ---------------------------------------------------------------------------------------- where all is well


@pytest.mark.parametrize("matrix", [ritz.Hessian, ritz.GGN, ritz.EmpiricalFisher])
def test_a_run_whose_products_are_right_is_the_same_to_the_bit_as_one_that_does_not_look(matrix, monkeypatch):
    looked = ritz.spectrum(matrix(healthy()), 12, 4)
    assert compare_precisions(matrix(healthy())).distance < 3e-6
    monkeypatch.setattr(krylov_run, "compare_precisions", lambda operator, seed: None)
    assert ritz.spectrum(matrix(healthy()), 12, 4) == looked
    assert looked.rounding == looked.trace_rounding == 0


def test_it_costs_four_products_of_one_batch(monkeypatch):
    vectors = {}
    real = ritz.Hessian._batch_rows

    def counted(self, params, batch, rows):
        vectors[rows.dtype] = vectors.get(rows.dtype, 0) + len(rows)
        return real(self, params, batch, rows)

    monkeypatch.setattr(ritz.Hessian, "_batch_rows", counted)
    s = ritz.spectrum(ritz.Hessian(healthy(), route="reverse"), 100, 8)
    assert vectors[f64] == 2
    assert vectors[f32] - 2 == 3 * s.products  # in each of three batches
    assert sum(vectors.values()) < 1.01 * 3 * s.products


def test_it_leaves_the_network_the_data_and_the_generator_alone_and_repeats_itself():
    risk = fitted(0, 5.0)
    before = {name: t.clone() for name, t in risk.model.state_dict().items()}
    version, state = risk.version(), torch.get_rng_state()
    H = ritz.Hessian(risk, route="reverse")
    first, second = compare_precisions(H), compare_precisions(ritz.Hessian(risk, route="reverse"))
    assert first == second
    assert first.distance > precision.ROUGH
    assert risk.version() == version
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in risk.model.state_dict().items())
    assert all(p.grad is None and p.dtype == f32 for p in risk.model.parameters())


def test_it_is_made_once_for_an_operator_until_its_weights_the_seed_or_the_kernels_change(monkeypatch):
    looks = []
    real = precision._compared
    monkeypatch.setattr(precision, "_compared", lambda *args: looks.append(args[-1]) or real(*args))
    risk = healthy()
    H = ritz.Hessian(risk, route="reverse")
    ritz.spectrum(H, 4, 2)
    ritz.trace(H, "hutchinson", 4)
    ritz.trace(2.0 * H + 1.0, "hutch++", 6)
    ritz.frobenius_norm(H, 4)
    ritz.diagonal(H, 4)
    assert looks == [0]
    compare_precisions(H, seed=1)
    assert looks == [0, 1]
    with torch.no_grad():
        risk.model[0].bias.add_(1.0)
    compare_precisions(H, seed=1)
    assert looks == [0, 1, 1]
    with tensor_cores():
        compare_precisions(H, seed=1)
    assert looks == [0, 1, 1, 1]


def test_switches_of_torch_are_asked_by_names_that_may_be_asked():
    convolved = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 8), nn.Flatten()).to(f32)
    risks = {
        "matrix products": healthy(),
        "matrix products and convolutions": ritz.Risk(convolved, nn.CrossEntropyLoss(), _data()),
    }
    for risk in risks.values():
        risk.device = torch.device("cuda")
    with tensor_cores():  # by its new name, after which torch refuses to be asked by the old one
        assert {name: coarse_products(risk) for name, risk in risks.items()} == {name: name for name in risks}
    assert [coarse_products(risk) for risk in risks.values()] == ["", "convolutions"]


def test_a_multiple_of_a_matrix_is_off_by_as_much_of_it():
    H = ritz.Hessian(fitted(0, 5.0))
    one, other = compare_precisions(H), compare_precisions(-4.0 * H + 1.0)
    assert other.distance == one.distance
    assert other.norm == 4 * one.norm
    assert other.trace == 4 * one.trace


def test_a_batch_is_cut_where_it_may_be_and_whole_where_it_may_not():
    seen = []

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == f64:
                seen.append(len(x))
            return super().forward(x)

    data = torch.randn(600, 3).to(f32), torch.randn(600, 1).to(f32)
    model = nn.Sequential(Counts(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(f32)
    for mode, size in (("eval", 256), ("train", 600)):
        seen.clear()
        risk = ritz.Risk(model, nn.MSELoss(), data, batch_size=600, mode=mode)
        assert compare_precisions(ritz.Hessian(risk, route="reverse")).distance < 1e-4
        assert max(seen) == size


class Stubborn(nn.Linear):
    """A module that knows one precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.eye(3, dtype=f32)


def test_what_cannot_be_compared_is_passed_over_in_silence(monkeypatch):
    risk = healthy()
    assert compare_precisions(ritz.Hessian(healthy(f64))) is None
    assert compare_precisions(DenseOperator(torch.eye(3, dtype=f32))) is None
    assert compare_precisions(ritz.Fisher(risk)) is None
    assert compare_precisions(ritz.Hessian(ritz.Risk(risk.model, nn.CrossEntropyLoss(), _data(), dropout=True))) is None
    stubborn = ritz.Risk(Stubborn(8, 3).to(f32), nn.CrossEntropyLoss(), _data())
    assert compare_precisions(ritz.Hessian(stubborn, route="reverse")) is None
    assert ritz.spectrum(ritz.Hessian(stubborn, route="reverse"), 3, 2).rounding == 0
    monkeypatch.setattr(precision, "free_memory", lambda device: 1000.0)
    assert compare_precisions(ritz.Hessian(risk)) is None


def _data() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 8).to(f32), torch.arange(12) % 3


def test_a_resumed_run_is_as_wide_as_one_that_was_left_alone(tmp_path):
    class Killed(BaseException):
        pass

    def kill(done: int, total: int) -> None:
        if done > 150:
            raise Killed

    risk, given = fitted(0, 5.0), {"num_steps": 12, "num_probes": 8}
    H = ritz.Hessian(risk, route="reverse")
    with pytest.warns(NumericalWarning):
        whole = ritz.spectrum(H, **given)
    with pytest.raises(Killed):
        ritz.spectrum(H, **given, progress=kill, checkpoint=ritz.Checkpoint(tmp_path, every=0))
    with pytest.warns(NumericalWarning):
        assert ritz.spectrum(H, **given, checkpoint=tmp_path) == whole
    assert ritz.load(whole.save(tmp_path / "spectrum")) == whole


@pytest.mark.parametrize("rank", [1, 2, 20])
def test_two_probes_bound_the_norm_and_the_trace_of_the_error_as_often_as_they_say(rank):
    """Quadratic forms of E = diag(s): v'Ev and |Ev| of normal probes."""
    draw = torch.Generator().manual_seed(rank)
    sizes = torch.rand(rank, generator=draw) - 0.3
    squares = torch.randn(4000, 2, rank, generator=draw).square()
    norms = (squares @ sizes.square()).mean(1).sqrt()
    traces = (squares @ sizes).mean(1).abs()
    kept = [Precision(1e-9, float(n), float(t)).errors(1.0) for n, t in zip(norms, traces, strict=True)]
    assert sum(norm >= float(sizes.norm()) for norm, _ in kept) >= 0.94 * 4000
    assert sum(trace >= abs(float(sizes.sum())) for _, trace in kept) >= 0.94 * 4000
