"""NaN, memory and a wish to stop in the middle of a run: what is known by then is returned, and says why it ended."""

import signal
from collections.abc import Callable

import pytest
import torch
from faults import jobs
from torch import Tensor, nn

import ritz
from ritz.errors import NonFiniteError, NumericalWarning, StoppedError
from ritz.operators import DenseOperator, FunctionOperator

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
    with pytest.warns(NumericalWarning, match="the spectrum is that of fewer steps: not finite at step 7 of 20 steps"):
        found = ritz.spectrum(breaking(3 + 4 * 6, fault), 20, **options)
    assert found.stop == "not finite at step 7 of 20 steps: a product with the function is not finite"
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
