"""What products that are off move: traces, norms, diagonals and blocks in float32 beside those in float64."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fitted import f64, fitted, healthy
from torch import Tensor

import ritz
from ritz.errors import NumericalWarning, UnsupportedError
from ritz.estimators import exact, precision
from ritz.estimators.forms import form_rule
from ritz.estimators.rounding import Rounding

SEEDS = (0, 1, 2, 3)
BY_PROBES = ("hutchinson", "hutch++", "xtrace")


@pytest.fixture(scope="module")
def matrices() -> list[tuple[ritz.Hessian, Tensor]]:
    """(Hessian in float32, the whole of it in float64) of networks whose products have hardly a digit left."""
    risks = [fitted(seed, 8.0) for seed in SEEDS]
    return [(ritz.Hessian(risk), ritz.Hessian(risk.to(dtype=f64)).dense()) for risk in risks]


def quietly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        return call(*args, **options)


def holds(found: ritz.Estimate, truth: float | Tensor) -> bool:
    low, high = (torch.as_tensor(end) for end in found.interval())
    return bool(((low <= truth) & (truth <= high)).all())


def plain(found: ritz.Estimate) -> ritz.Estimate:
    """As if nothing had been compared."""
    return replace(found, bracket=None)


# ------------------------------------------------------------------------------------- traces, norms, diagonals


@pytest.mark.parametrize("method", BY_PROBES)
def test_a_trace_by_probes_holds_that_of_float64_which_without_the_comparison_it_does_not(matrices, method):
    before = 0
    for H, dense in matrices:
        found, truth = quietly(ritz.trace, H, method, 30), float(dense.trace())
        assert holds(found, truth)
        before += holds(plain(found), truth)
        blocks = H.space.segment(dense.diagonal()[None])[0].tolist()
        for part, own in zip(found.parts.values(), blocks, strict=bool(found.parts)):
            assert holds(part, own)
    assert before <= 1


def test_a_norm_holds_that_of_float64_which_without_the_comparison_it_does_not(matrices):
    for H, dense in matrices:
        found, truth = quietly(ritz.frobenius_norm, H), float(dense.norm())
        assert holds(found, truth)
        assert not holds(plain(found), truth)
        rows = H.space.segment(dense.square().sum(1)[None])[0].sqrt().tolist()
        assert all(holds(part, own) for part, own in zip(found.parts.values(), rows, strict=True))
        assert float(found.bracket[0]) >= 0


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_a_diagonal_holds_that_of_float64_in_all_its_entries(matrices, method):
    for H, dense in matrices:
        found = quietly(ritz.diagonal, H, method=method)
        assert holds(found, dense.diagonal())
        assert not holds(plain(found), dense.diagonal())


def test_matrices_that_are_multiplied_out_are_bracketed_too(matrices, monkeypatch):
    def refuse(*_: object) -> None:
        raise UnsupportedError("no exact trace")

    for name in ("trace", "diagonal"):
        monkeypatch.setattr(exact, f"exact_{name}", refuse)
    H, dense = matrices[0]
    few, block = H.block("2.bias"), dense[-3:, -3:]
    for call, truth in (
        (lambda: ritz.trace(few, "exact", 30), block.trace()),
        (lambda: ritz.frobenius_norm(few, 30), block.norm()),
        (lambda: ritz.diagonal(few, 30), block.diagonal()),
    ):
        found = quietly(call)
        assert found.exact
        assert holds(found, truth)
        assert not holds(plain(found), truth)


def test_an_exact_trace_is_right_where_products_are_half_wrong_unless_it_is_made_of_residuals():
    apart = []
    for seed in SEEDS[:2]:
        risk = fitted(seed, 5.0)
        for matrix in (ritz.Hessian, ritz.GGN):
            found = ritz.trace(matrix(risk), "exact")  # warnings are errors here
            truth = float(matrix(risk.to(dtype=f64)).dense().trace())
            assert found.bracket is None
            assert float(found) == pytest.approx(truth, rel=1e-5)
            apart.append(precision.compare_precisions(matrix(risk)).distance)
        with pytest.warns(NumericalWarning, match="products in float32 are off by"):
            found = ritz.trace(ritz.EmpiricalFisher(risk), "exact")
        truth = float(ritz.EmpiricalFisher(risk.to(dtype=f64)).dense().trace())
        assert holds(found, truth)
        assert abs(float(found) / truth - 1) > 0.01
    assert min(apart) > 0.03
    assert max(apart) > 0.5


@pytest.mark.parametrize("method", BY_PROBES)
def test_a_shift_is_not_rounded_and_widens_nothing(matrices, method):
    H, dense = matrices[0]
    one, other = (quietly(ritz.trace, A, method, 12) for A in (H, -2.0 * H + 1e-7))
    truth = -2.0 * float(dense.trace()) + 1e-7 * H.dim
    assert holds(other, truth)
    widths = [float(found.bracket[1]) - float(found.bracket[0]) for found in (one, other)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.5)


# ------------------------------------------------------------------------------------------------------ blocks


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "trace": torch.sum,
    "frobenius_norm": torch.linalg.vector_norm,
    "lambda_max": torch.max,
    "lambda_min": torch.min,
}


def eigenvalues(dense: Tensor, H: ritz.Operator) -> Iterator[tuple[str, Tensor]]:
    for name, part in H.space.slices.items():
        yield name, torch.linalg.eigvalsh(dense[part, part])


@pytest.mark.parametrize("num_steps", [8, 60], ids=["sampled", "found whole"])
def test_blocks_hold_the_numbers_of_float64_which_without_the_comparison_they_do_not(matrices, num_steps):
    before = []
    for H, dense in matrices[:2]:
        found = quietly(ritz.block_spectra, H, "parameter", num_steps, 4)
        for name, values in eigenvalues(dense, H):
            s = found[name]
            assert s.rounding > 0
            assert "products off by" in s.convention
            for key, truth in NUMBERS.items():
                assert holds(getattr(s, key), float(truth(values)))
            before.append(holds(replace(s, rounding=0.0, trace_rounding=0.0).frobenius_norm, float(values.norm())))
    assert sum(before) <= (len(before) // 2 if num_steps == 8 else 0)  # sampling errors are as large


def test_blocks_of_a_multiple_are_widened_by_as_much_of_it(matrices):
    H, _ = matrices[0]
    one, other = (quietly(ritz.block_spectra, A, "layer", 8, 4) for A in (H, -4.0 * H + 1e-14))
    for name, s in one.items():
        assert other[name].rounding == pytest.approx(4 * s.rounding, rel=0.01, abs=0)


def test_a_block_is_widened_for_its_own_products():
    risk = fitted(0, 5.0)
    found = quietly(ritz.block_spectra, ritz.Hessian(risk), "parameter", 8, 4)
    whole = quietly(ritz.spectrum, ritz.Hessian(risk), 10, 4)
    assert all(s.rounding < whole.rounding for s in found.values())


# -------------------------------------------------------------------------------------------- what users notice


CALLS = {
    "spectrum": lambda H: ritz.spectrum(H, 6, 2),
    "trace": lambda H: ritz.trace(H, "hutchinson", 4),
    "frobenius_norm": lambda H: ritz.frobenius_norm(H, 6),
    "diagonal": lambda H: ritz.diagonal(H, 4, method="hutchinson"),
    "block_spectra": lambda H: ritz.block_spectra(H, "layer", 6, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_caller_is_warned_once_and_told_what_to_do(name):
    with pytest.warns(NumericalWarning, match=r"products in float32 are off by .* use dtype=torch.float64") as heard:
        CALLS[name](ritz.Hessian(fitted(0, 5.0)))
    assert [warning.filename for warning in heard] == [__file__]
    CALLS[name](ritz.Hessian(healthy()))  # warnings are errors here


@pytest.mark.parametrize("name", CALLS)
def test_where_products_are_right_results_are_those_of_no_comparison_to_the_bit(name, monkeypatch):
    looked = CALLS[name](ritz.Hessian(healthy(), route="reverse"))
    monkeypatch.setattr(precision, "_compared", lambda *args: {})
    assert CALLS[name](ritz.Hessian(healthy(), route="reverse")) == looked


def test_a_widened_trace_is_kept_and_read_back_in_silence(tmp_path):
    H = ritz.Hessian(fitted(0, 5.0), route="reverse")
    with pytest.warns(NumericalWarning, match="are off by"):
        found = ritz.trace(H, "hutch++", 12, checkpoint=tmp_path / "trace")
    assert ritz.trace(H, "hutch++", 12, checkpoint=tmp_path / "trace") == found
    assert ritz.load(found.save(tmp_path / "saved")) == found
    with pytest.warns(NumericalWarning, match="are off by"):
        blocks = ritz.block_spectra(H, "layer", 8, 4, checkpoint=tmp_path / "blocks")
    assert ritz.block_spectra(H, "layer", 8, 4, checkpoint=tmp_path / "blocks") == blocks
    assert ritz.load(blocks.save(tmp_path / "saved blocks")) == blocks


# ------------------------------------------------------------------------------------------------- the bounds


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_bracket_widens_skewed_intervals_on_both_sides(sign):
    """A mean of forms of a matrix with one large eigenvalue, of either sign."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 40, generator=draw)
    image = rows * (sign * torch.cat([torch.tensor([20.0]), torch.full((39,), 0.01)]))
    value = float((rows * image).sum(1).mean())
    rule = form_rule(rows, image, signs=False)
    low, high = rule.interval(value, 0.0, (value, value), 0.95)
    assert (high - value > value - low) == (sign > 0)
    for moved in (0.1 * abs(value), 3 * abs(value)):
        below, above = rule.interval(value, 0.0, (value - moved, value + moved), 0.95)
        assert below <= min(low, value - moved)
        assert above >= max(high, value + moved)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_powers_move_by_no_more_than_the_bound(seed):
    draw = torch.Generator().manual_seed(seed)
    H, E = (torch.randn(6, 6, generator=draw) * scale for scale in (1.0, 10.0 ** -(1 + seed)))
    H, E = H + H.T, E + E.T
    values, moved = torch.linalg.eigvalsh(H), torch.linalg.eigvalsh(H + E)
    norms = float(values.abs().max()), float(values.norm()), float(values.abs().sum())
    bound = Rounding(float(E.norm()), abs(float(E.trace())), *norms)
    for k in (2, 3, 4, 7):
        assert abs(float(moved.pow(k).sum() - values.pow(k).sum())) <= bound.power(k)
    assert bound.nuclear_error == pytest.approx(float(E.norm() * values.abs().sum() / values.norm()))
    assert Rounding().power(3) == Rounding().nuclear_error == 0
    assert math.isfinite(Rounding(error=1.0).nuclear_error)
