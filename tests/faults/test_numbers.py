"""NaN, memory and a wish to stop in the middle of a run: what is known by then is returned, and says why it ended."""

import math
import signal
from collections.abc import Callable

import pytest
import torch
from faults import jobs
from matrices import OUTLIERS, SPECTRA, operator, rotated
from torch import Tensor, nn

import ritz
from ritz import stopping
from ritz.errors import IndefiniteError, NonFiniteError, NumericalWarning, StoppedError
from ritz.operators import DenseOperator, FunctionOperator
from ritz.report import build

DIM = 120


def values() -> Tensor:
    return torch.linspace(0, 1, DIM) ** 4


def breaking(after: int, fault: float = float("nan")) -> FunctionOperator:
    """A matrix whose products are right so many times, counted in vectors, and then are not finite."""
    matrix, seen = torch.diag(values()), [0]

    def product(columns: Tensor) -> Tensor:
        seen[0] += columns.shape[1]
        return matrix @ columns if seen[0] <= after else torch.full_like(columns, fault)

    return FunctionOperator(product, DIM, torch.float64)


def stopping_at(number: int, sent: int = signal.SIGTERM) -> Callable[[int, int], None]:
    """Progress that sends one signal."""
    left = [True]

    def progress(done: int, total: int) -> None:
        if done >= number and left:
            left.clear()
            signal.raise_signal(sent)

    return progress


# ------------------------------------------------------------------------------------------------------ NaN


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_spectrum_whose_tail_breaks_returns_the_steps_before(mode, fault):
    options = {"num_probes": 4, "reorthogonalize": mode}
    whole = ritz.spectrum(DenseOperator(torch.diag(values())), 6, **options)
    with pytest.warns(NumericalWarning, match="the spectrum is from fewer steps: not finite at step 7 of 20 steps"):
        found = ritz.spectrum(breaking(3 + 4 * 6, fault), 20, **options)
    assert found.stop.startswith("not finite at step 7 of 20 steps: a product with the function is not finite")
    torch.testing.assert_close(found.nodes, whole.nodes, rtol=1e-12, atol=1e-12)
    assert found.trace.stop == found.stop
    assert found.num_steps == 6


def test_with_rounds_of_probes_those_before_are_returned():
    first = ritz.spectrum(DenseOperator(torch.diag(values())), 5, 4, reorthogonalize="none")
    with pytest.warns(NumericalWarning, match="at step 3 of 5 steps of round 2"):
        found = ritz.spectrum(breaking(3 + 4 * 7), 5, 4, tol=1e-9, reorthogonalize="none")
    torch.testing.assert_close(found.nodes, first.nodes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("after", [0, 40, 99])
def test_a_spectrum_that_breaks_before_its_tail_is_an_error(after):
    with pytest.raises(NonFiniteError, match="a product with the function is not finite"):
        ritz.spectrum(breaking(after), 10, 4)


def test_the_batch_the_layer_and_the_dtype_of_a_product_that_breaks_are_named():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (x.relu() * self.weight).pow(1.5) + self.weight  # the second derivative at 0 is infinite

    X = torch.ones(9, 1)
    X[7] = 0.0
    risk = ritz.Risk(Root(), nn.MSELoss(), (X, torch.zeros(9, 1)), batch_size=3)
    with pytest.raises(NonFiniteError, match=r"product of batch 2 is not finite, first in weight \(float64\), though"):
        ritz.spectrum(ritz.Hessian(risk), 3, 2)


def test_the_eigenpairs_of_the_last_look_are_returned():
    with pytest.warns(NumericalWarning, match="not finite: a product with the function"):
        found = ritz.top_eigenpairs(breaking(60), 2, tol=1e-12)
    assert found.stop.startswith("not finite: a product")
    truth = values().flip(0)[:2]
    assert bool(((found.values - truth).abs() <= found.residuals + 1e-12).all())
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(2), atol=1e-10, rtol=0)
    with pytest.raises(NonFiniteError, match="not finite"):
        ritz.top_eigenpairs(breaking(3), 2)


def test_a_system_is_solved_as_far_as_products_are_finite():
    shift = 0.01
    matrix, seen = torch.diag(values() + shift), [0]

    def product(columns: Tensor) -> Tensor:
        seen[0] += 1
        return matrix @ columns if seen[0] != 9 else torch.full_like(columns, float("nan"))

    b = torch.ones(DIM)
    with pytest.warns(NumericalWarning, match="not finite"):
        found = ritz.solve(FunctionOperator(product, DIM, torch.float64), b, tol=1e-12)
    assert found.stop.startswith("not finite")
    residual = float((b - matrix @ found.x).norm() / b.norm())
    assert float(found.residuals) == pytest.approx(residual)
    assert 0 < residual < 1


# ------------------------------------------------------------------------------ reasons of the numbers themselves


def tiny(scale: float) -> DenseOperator:
    """A matrix of float32 whose products have squares near the smallest numbers that there are."""
    return DenseOperator((scale * rotated(values()).dense()).float())


def flickering(spectrum: Tensor, level: float, every: int) -> FunctionOperator:
    """A diagonal matrix whose products are right, but for one call in so many after the first ten."""
    calls, generator = [0], torch.Generator().manual_seed(0)

    def product(columns: Tensor) -> Tensor:
        calls[0] += 1
        image = spectrum[:, None] * columns
        if calls[0] <= 10 or calls[0] % every:
            return image
        error = torch.randn(columns.shape, generator=generator)
        return image + level * float(spectrum.abs().max()) * columns.norm(dim=0) * error / error.norm(dim=0)

    return FunctionOperator(product, len(spectrum), torch.float64)


def test_a_basis_that_is_not_orthonormal_any_more_ends_the_run_with_the_steps_before(tmp_path):
    scale = 1.7e-20  # at 3e-20 some kernels of the processor still give an orthonormal basis, others do not
    with pytest.warns(NumericalWarning) as heard:
        found = ritz.spectrum(tiny(scale), 30, 4, reorthogonalize="full")
    assert found.stop.startswith("loss of orthogonality at step ")
    assert "use dtype=torch.float64" in found.stop
    assert any("the spectrum is from fewer steps: loss of orthogonality" in str(each.message) for each in heard)
    assert 1 <= found.num_steps < 30
    page = build(found).write(tmp_path / "page.html").read_text()
    assert found.stop.partition(":")[0][1:] in page  # a sentence, which begins with a capital
    assert found.stop in ritz.measures.Measurement(estimates={"trace": found.trace}, spectrum=found).table().notes[-1]
    clean = ritz.spectrum(rotated(values()), found.num_steps, 4, reorthogonalize="full")
    assert float(found.lambda_max) == pytest.approx(scale * float(clean.lambda_max), rel=1e-2)


def test_a_matrix_too_small_for_its_precision_is_told_and_one_that_is_multiplied_is_right():
    with pytest.warns(NumericalWarning, match=r"underflow: .* use dtype=torch.float64, or multiply it, 2.0\*\*60 \* A"):
        found = ritz.spectrum(tiny(1e-21), 20, 4)
    assert found.stop.startswith("underflow: ")
    raised = ritz.spectrum(2.0**60 * tiny(1e-21), 20, 4)
    assert raised.stop == "completed"
    assert float(raised.lambda_max) == pytest.approx(2.0**60 * 1e-21, rel=1e-3)


def test_eigenpairs_too_small_for_their_precision_are_not_called_converged():
    spectrum = 1e-22 * torch.cat([torch.tensor([50.0, 10.0]), torch.linspace(0, 1, 4998)]).float()
    A = FunctionOperator(lambda columns: spectrum[:, None] * columns, 5000, torch.float32)
    with pytest.warns(NumericalWarning, match=r"multiply it, 2.0\*\*60 \* A"):
        found = ritz.top_eigenpairs(A, 2)
    assert found.stop == "underflow"
    assert not found.converged.any()
    vectors = found.vectors.double()
    true = (spectrum.double()[:, None] * vectors - vectors * found.values).norm(dim=0)
    torch.testing.assert_close(found.residuals, true, rtol=1e-2, atol=1e-29)
    small = tiny(1e-25)
    exact = ritz.top_eigenpairs(small, 20)  # the window holds the whole matrix, which is diagonalised in float64
    assert exact.stop == "exact"
    truth = torch.linalg.eigvalsh(small.dense().double()).flip(0)[:20]
    torch.testing.assert_close(exact.values, truth, rtol=1e-4, atol=0)


def test_a_right_hand_side_too_small_for_its_precision_is_solved_all_the_same():
    A, b = DenseOperator(rotated(values() + 1).dense().float()), torch.randn(DIM, 2).float()
    b[:, 0] *= 1e-30
    found = ritz.solve(A, b)
    assert found.stop == "converged"
    residuals = (A.dense().double() @ found.x.double() - b.double()).norm(dim=0)
    assert bool((residuals <= 1e-4 * b.double().norm(dim=0)).all())


def test_a_matrix_that_was_to_be_positive_and_is_not_is_told():
    A = operator("outliers")
    A.positive = True
    with pytest.warns(NumericalWarning, match="indefinite: the matrix should be positive .* add a shift"):
        found = ritz.spectrum(A, 20, 4)
    assert found.stop.startswith("indefinite: ")
    assert not found.positive
    assert found.trace.support == (-math.inf, math.inf)
    low, high = found.trace.interval()
    assert low < float(OUTLIERS.sum()) < high


def test_the_spectrum_of_which_a_log_determinant_does_not_exist_is_in_the_error():
    with pytest.raises(IndefiniteError, match=r"eigenvalues reach down to -.* take a shift above") as error:
        ritz.logdet(operator("outliers"), shift=0.1, num_steps=20)
    assert float(error.value.partial.logdet(shift=10.0)) == pytest.approx(float((OUTLIERS + 10).log().sum()), rel=0.02)


def test_a_search_for_eigenpairs_that_noise_holds_up_ends_and_one_that_is_slow_goes_on():
    spectrum = torch.cat([torch.tensor([5.0, 4.0, 3.0]), torch.linspace(0, 1, 4197)])
    with pytest.warns(NumericalWarning, match="residuals have stopped falling at the noise of the products"):
        found = ritz.top_eigenpairs(flickering(spectrum, 1e-4, every=3), 3, tol=1e-8)
    assert found.stop == "stagnation"
    assert found.products < 500  # of 3500
    assert found.noise < 1e-12  # which was measured when there was none
    torch.testing.assert_close(found.values, torch.tensor([5.0, 4.0, 3.0]), rtol=1e-4, atol=0)
    slow = torch.logspace(-8, 0, 4200)
    with pytest.warns(NumericalWarning, match="raise max_products"):
        found = ritz.top_eigenpairs(flickering(slow, 0.0, every=3), 3, "smallest", tol=1e-8, max_products=1200)
    assert found.stop == "max_products"


def test_a_solver_that_noise_holds_up_ends_with_the_best_it_had():
    spectrum, b = torch.logspace(-4, 0, 1000), torch.randn(1000, generator=torch.Generator().manual_seed(1))

    def run(**options: object) -> tuple[ritz.krylov.solve.Solution, float]:
        with pytest.warns(NumericalWarning):
            found = ritz.solve(flickering(spectrum, 1e-5, every=1), b, tol=1e-8, **options)
        return found, float((b - spectrum * found.x).norm() / b.norm())

    with pytest.warns(NumericalWarning, match="residuals have stopped falling at the noise of the products"):
        ritz.solve(flickering(spectrum, 1e-5, every=1), b, tol=1e-8)
    found, true = run()
    assert found.stop == "stagnation"
    assert found.num_steps < 700  # of 1000
    assert true < 0.02
    rounds = [run(max_steps=steps)[1] for steps in (128, 256, 384)]
    assert true <= 1.5 * min(rounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(SPECTRA))
def test_there_is_no_alarm_over_matrices_that_are_as_they_should_be(name, dtype):
    A = DenseOperator(operator(name).dense().to(dtype))
    A.positive = name == "positive"
    for mode in ("locked", "full", "none"):
        assert ritz.spectrum(A, 30, 4, reorthogonalize=mode).stop == "completed"
    for which in ("largest", "smallest", "both"):
        assert ritz.top_eigenpairs(A, 3, which, tol=1e-5).stop in ("converged", "exact")
    shift = 1.0 - min(float(SPECTRA[name].min()), 0.0)
    assert ritz.solve(A + shift, torch.ones(len(A.dense()), 2, dtype=dtype), tol=1e-5).stop == "converged"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_is_no_alarm_where_eigenvalues_lie_far_apart(dtype):
    A = DenseOperator(rotated(torch.logspace(-12, 3, DIM), positive=True).dense().to(dtype))
    A.positive = True
    for mode in ("locked", "full"):
        assert ritz.spectrum(A, 40, 4, reorthogonalize=mode).stop == "completed"
    assert ritz.top_eigenpairs(A, 3, tol=1e-5).stop in ("converged", "exact")


def test_every_reason_has_a_remedy():
    reasons = [value for name, value in vars(stopping).items() if name.isupper() and isinstance(value, str)]
    assert len(reasons) == 8
    for reason in reasons:
        assert stopping.remedy(f"{reason} at step 3", spent=1, taken=1)
    assert stopping.remedy("completed") == ""


# --------------------------------------------------------------------------------------------------- memory


def test_the_chunks_that_memory_left_room_for_are_those_of_the_resumed_run(tmp_path, monkeypatch):
    """The first process runs out of memory with more than two vectors at once; the second would not."""
    risk = jobs.make_risk()
    real = ritz.Hessian._batch_rows

    def narrow(self, params, batch, rows):
        if len(rows) > 2:
            raise torch.OutOfMemoryError("8 vectors do not fit")
        return real(self, params, batch, rows)

    class Killed(BaseException):
        pass

    def kill(done, total):
        if done >= 20:
            raise Killed

    H = ritz.Hessian(risk, route="reverse")
    given = {"num_steps": 4, "num_probes": 4, "products": 60}
    with monkeypatch.context() as patch:
        patch.setattr(ritz.Hessian, "_batch_rows", narrow)
        whole = ritz.spectrum(ritz.Hessian(jobs.make_risk(), route="reverse"), **given)
        with pytest.raises(Killed):
            ritz.spectrum(H, **given, progress=kill, checkpoint=ritz.Checkpoint(tmp_path, every=0))
    again = ritz.Hessian(jobs.make_risk(), route="reverse")
    assert again._chunk == 8
    found = ritz.spectrum(again, **given, checkpoint=tmp_path)
    assert again._chunk == 2
    assert found == whole


def test_a_route_that_was_chosen_is_taken_again(tmp_path):
    class Killed(BaseException):
        pass

    def kill(done, total):
        raise Killed

    risk = jobs.make_risk()
    risk.routes[risk.names] = "forward"  # as by the clock
    with pytest.raises(Killed):
        ritz.spectrum(ritz.Hessian(risk), 3, 2, progress=kill, checkpoint=ritz.Checkpoint(tmp_path, every=0))
    assert "forward" not in jobs.make_risk().routes.values()
    again = ritz.Hessian(jobs.make_risk())
    found = ritz.spectrum(again, 3, 2, checkpoint=tmp_path)
    assert again.risk.routes or again.route  # chosen before the first save or after it
    assert found.convention.endswith("route")


# -------------------------------------------------------------------------------------------------- signals


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_lets_the_product_in_hand_end_and_returns_what_is_known(number, name, tmp_path):
    A = DenseOperator(torch.diag(values()))
    before = signal.getsignal(number)
    with ritz.stoppable() as came:
        found = ritz.spectrum(A, 20, 4, progress=stopping_at(150, number), checkpoint=tmp_path)
    assert came() == number
    assert signal.getsignal(number) is before
    assert found.stop == f"stopped by {name} after 13 of 20 steps"
    assert found.num_steps == 13
    assert ritz.spectrum(A, 20, 4, checkpoint=tmp_path) == ritz.spectrum(A, 20, 4)  # it goes on from there


def test_a_run_that_is_stopped_with_nothing_to_return_says_where_its_state_is(tmp_path):
    A = DenseOperator(torch.diag(values()))
    with (
        ritz.stoppable(),
        pytest.raises(StoppedError, match=r"stopped by SIGTERM; the state is in .*, and the same call"),
    ):
        ritz.spectrum(A, 20, 4, progress=stopping_at(16), checkpoint=tmp_path)
    with ritz.stoppable(), pytest.raises(StoppedError, match="stopped by SIGTERM"):
        ritz.spectrum(A, 20, 4, progress=stopping_at(16))
    assert ritz.spectrum(A, 20, 4, checkpoint=tmp_path) == ritz.spectrum(A, 20, 4)


def test_a_stopped_search_for_eigenpairs_returns_those_of_the_last_look(tmp_path):
    A = DenseOperator(torch.diag(torch.linspace(0, 1, 300)))
    with ritz.stoppable(), pytest.warns(NumericalWarning, match="stopped by SIGTERM"):
        found = ritz.top_eigenpairs(A, 2, tol=1e-10, progress=stopping_at(40), checkpoint=tmp_path)
    assert found.stop == "stopped by SIGTERM"
    assert ritz.top_eigenpairs(A, 2, tol=1e-10, checkpoint=tmp_path) == ritz.top_eigenpairs(A, 2, tol=1e-10)


def test_a_stopped_solver_returns_where_it_had_come_to():
    A = DenseOperator(torch.diag(values() + 1e-3))
    with ritz.stoppable(), pytest.warns(NumericalWarning, match="stopped by SIGTERM"):
        found = ritz.solve(A, torch.ones(DIM), tol=1e-12, progress=stopping_at(8))
    assert found.stop == "stopped by SIGTERM"
    assert found.num_steps == 8


def test_a_stopped_measurement_has_what_follows_from_the_runs_so_far(tmp_path):
    risk = jobs.make_risk()
    options = {"measures": ["train_loss", "trace", "lambda_max", "expected_loss"], "num_steps": 6, "num_probes": 4}

    def progress(text: str, part: float, left=[True]) -> None:  # noqa: B006
        if text == "trace" and part > 0.85 and left:
            left.clear()
            signal.raise_signal(signal.SIGTERM)

    with ritz.stoppable():
        found = ritz.measure(risk, **options, progress=progress, checkpoint=tmp_path)
    assert found.stop == "stopped by SIGTERM"
    assert found["trace"].stop.startswith("stopped by SIGTERM after")
    assert found["lambda_max"].stop.startswith("stopped by SIGTERM after")
    assert found.failures == {"expected_loss": "stopped by SIGTERM"}
    assert "stopped by SIGTERM" in found.table().notes
    whole, again = (
        ritz.measure(jobs.make_risk(), **options),
        ritz.measure(jobs.make_risk(), **options, checkpoint=tmp_path),
    )
    assert jobs.bits(again) == jobs.bits(whole)


@pytest.mark.usefixtures("foreground")
def test_a_stopped_comparison_has_the_solutions_so_far(tmp_path):
    risks = {name: jobs.make_risk(seed, width=3) for seed, name in enumerate("abc")}

    def progress(text: str, part: float, left=[True]) -> None:  # noqa: B006
        if text.startswith("b") and left:
            left.clear()
            signal.raise_signal(signal.SIGINT)

    with ritz.stoppable():
        found = ritz.compare(risks, measures=["trace", "weight_norm"], progress=progress, checkpoint=tmp_path)
    assert list(found.measurements) == ["a", "b"]
    assert list(found) == ["weight_norm"]  # of b no more was at hand
    assert found.notes[-1] == "stopped by SIGINT before all solutions were measured"
    again = ritz.compare(risks, measures=["trace", "weight_norm"], checkpoint=tmp_path)
    assert jobs.bits(again) == jobs.bits(ritz.compare(risks, measures=["trace", "weight_norm"]))


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_a_trace_goes_on_from_the_products_that_are_kept(method, tmp_path):
    seen = [0]

    class Counted(DenseOperator):
        def _rows(self, rows: Tensor) -> Tensor:
            seen[0] += len(rows)
            if seen[0] > limit:
                raise KeyboardInterrupt
            return super()._rows(rows)

    given = {"method": method, "num_probes": 48}
    limit = 10**6
    kept = [ritz.Checkpoint(tmp_path / name, every=0) for name in "ab"]
    whole = ritz.trace(Counted(torch.diag(values())), **given, checkpoint=kept[0])
    limit, seen[0] = 20, 0
    with pytest.raises(KeyboardInterrupt):
        ritz.trace(Counted(torch.diag(values())), **given, checkpoint=kept[1])
    limit, seen[0] = 10**6, 0
    assert ritz.trace(Counted(torch.diag(values())), **given, checkpoint=kept[1]) == whole
    assert seen[0] == 48 - 16  # two blocks of eight were kept
    limit = 0
    assert ritz.trace(Counted(torch.diag(values())), **given, checkpoint=kept[1]) == whole


def test_eigenpairs_of_a_slow_search_come_from_the_dense_matrix_which_is_kept_block_by_block(tmp_path):
    A = DenseOperator(torch.diag(torch.linspace(0, 1, 140) ** 4))
    given = {"k": 2, "tol": 1e-12, "block": 2, "which": "smallest"}
    whole = ritz.top_eigenpairs(A, **given)
    assert whole.stop == "exact"
    assert whole.products > 140 + 100

    class Narrow(DenseOperator):
        def _rows(self, rows: Tensor) -> Tensor:
            if len(rows) == 64:
                blocks.append(1)
                if len(blocks) == fails:
                    raise KeyboardInterrupt
            return super()._rows(rows)

    blocks: list[int] = []
    fails = 2
    with pytest.raises(KeyboardInterrupt):
        ritz.top_eigenpairs(Narrow(A.dense()), **given, checkpoint=ritz.Checkpoint(tmp_path, every=0))
    fails = 0
    blocks.clear()
    assert ritz.top_eigenpairs(Narrow(A.dense()), **given, checkpoint=tmp_path) == whole
    assert len(blocks) == 1
