"""The noise of batch Hessians: measured on matrices whose noise is known, what is concluded, and the whole path."""

import json
import math
from functools import cache

import pytest
import torch
from torch import nn

import ritz
from ritz import rmt
from ritz.papers import noise_spectrum as study
from ritz.papers import noise_spectrum_claims as judgement
from ritz.papers import noise_spectrum_learned as learned
from ritz.papers import noise_spectrum_measures as measures
from ritz.papers.base import Claim
from ritz.papers.experiment import Experiment, Outcome, Setting

DIM, BLOCK, BLOCKS = 120, 4, 64


def images(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(num, 1, 28, 28, generator=generator, dtype=torch.float32) * 2 - 1
    return X, torch.randint(10, (num,), generator=generator)


def whole(model: nn.Module, data) -> torch.Tensor:
    """The Hessian row by row, by differentiating twice."""
    X, y = data
    params = list(model.parameters())
    grads = torch.autograd.grad(nn.functional.cross_entropy(model(X), y), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])
    rows = [torch.cat([p.flatten() for p in torch.autograd.grad(g, params, retain_graph=True)]) for g in flat]
    return torch.stack(rows)


@cache
def wigner_blocks(spike: float = 0.0) -> torch.Tensor:
    """Blocks whose noise is independent, of level 1 for one block, and a mean with one eigenvalue."""
    signal = torch.zeros(DIM, DIM)
    signal[0, 0] = spike
    return torch.stack([rmt.wigner(DIM, seed=seed) for seed in range(BLOCKS)]) + signal


@cache
def thin_blocks() -> torch.Tensor:
    """Blocks of rank one in four directions with strength of heavy tails."""
    generator = torch.Generator().manual_seed(0)
    strength = torch.randn(BLOCKS, generator=generator).exp()
    vectors = torch.zeros(BLOCKS, DIM)
    vectors[:, :4] = torch.randn(BLOCKS, 4, generator=generator)
    return strength[:, None, None] * vectors[:, :, None] * vectors[:, None, :]


# -------------------------------------------------------------------------------------------------- measures


def test_blocks_and_columns_are_those_of_the_hessian():
    torch.manual_seed(0)
    model, data = study.small(width=1), images(8)
    blocks = measures.block_hessians(model, data, size=2)
    truth = whole(model.double(), (data[0].double(), data[1]))
    assert torch.allclose(blocks.mean(0), truth, atol=1e-12)
    columns = measures.sample_columns(model, data, [3, 0])
    assert columns.shape == (8, 2, len(truth))
    assert torch.allclose(columns.mean(0), truth[[3, 0]], atol=1e-12)
    assert torch.allclose(columns[:2].mean(0), blocks[0][[3, 0]], atol=1e-12)


def test_measuring_changes_nothing_of_the_model():
    model, data = study.small(width=1).float().train(), images(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measures.block_hessians(model, data, size=2)
    measures.sample_columns(model, data, [0])
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())


def test_the_level_of_a_batch_size_is_that_of_its_batches():
    blocks = wigner_blocks()
    rows = measures.spectra(blocks, (4, 16, 64), BLOCK, most=4, key=0)
    full = blocks.mean(0)
    single = float((blocks - full).square().sum((1, 2)).mean()) / DIM
    assert rows[0]["level"] == pytest.approx(single)  # one block is a batch: all of them, in whatever order
    spread = single * BLOCKS / (BLOCKS - 1)  # of blocks drawn without replacement
    for row in rows:
        each = row["size"] // BLOCK
        assert row["level"] == pytest.approx(spread * (1 / each - 1 / BLOCKS), rel=0.03)


def test_independent_noise_has_the_shape_of_a_semicircle_and_thin_noise_has_not():
    (row,) = measures.spectra(wigner_blocks(), (16,), BLOCK, most=4, key=0)
    assert all(abs(value - 2) < 0.2 for value in row["kurtosis"])
    assert max(row["distance"]) < 0.05
    assert max(row["outside"]) < 0.2
    assert max(row["near_zero"]) < 0.06
    (row,) = measures.spectra(thin_blocks(), (16,), BLOCK, most=4, key=0)
    assert min(row["kurtosis"]) > 10
    assert min(row["along"]) == pytest.approx(1.0)  # nothing is left beside nine directions
    assert min(row["near_zero"]) > 0.9


def test_the_variance_of_the_trace_tells_independent_entries_from_dependent_ones():
    found = measures.dependence(wigner_blocks())
    assert sum(found["excess"]) / BLOCKS == pytest.approx(1.0, abs=0.6)
    assert found["row_spread"] < 0.05
    found = measures.dependence(thin_blocks())
    assert sum(found["excess"]) / BLOCKS > 5
    assert found["row_largest"] > 10


def test_spikes_of_independent_noise_are_where_theorem_1_puts_them():
    found = measures.spikes(wigner_blocks(spike=3.0), 16, BLOCK, most=16, key=0)
    assert found["s2"] == pytest.approx(1 / 4 * (1 - 4 / BLOCKS), rel=0.05)
    assert found["dim"] == DIM
    first = torch.tensor(found["values"])[:, 0].mean()
    nu = found["nu"][0]
    assert float(first) == pytest.approx(nu + found["s2"] / nu, abs=0.05)
    lost = 1 - torch.tensor(found["overlaps"])[:, 0].mean()
    assert float(lost) == pytest.approx(found["s2"] / nu**2, rel=0.5)


def test_normal_entries_pass_and_heavy_ones_pass_for_large_batches_alone():
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(3000, 5, generator=generator)
    assert [row["rejected"] for row in measures.normality(normal, (1, 64), 300, key=0)] == [0.0, 0.0]
    heavy = torch.randn(3000, 5, generator=generator).mul(1.2).exp()
    heavy[:, 4] = 1.0  # says nothing
    rows = measures.normality(heavy, (1, 4096), 300, key=0)
    assert rows[0]["rejected"] == 1.0
    assert rows[0]["rejected_weight"] == pytest.approx(1.0)
    assert rows[1]["rejected"] == 0.0
    assert rows[0]["entries"] == 4
    assert rows[0]["live"] == pytest.approx(0.8)
    assert rows[0]["kurtosis"][1] == pytest.approx(4096 * rows[1]["kurtosis"][1])
    with pytest.raises(ValueError, match="none of the 2 entries varies from sample to sample"):
        measures.normality(torch.ones(10, 2), (1,), 10, key=0)


def test_bounds_are_those_of_the_matrices():
    found = measures.bounds(wigner_blocks(spike=3.0), 16, BLOCK)
    assert found["entry"] <= found["norm"]
    assert found["norm"] == pytest.approx(2 * math.sqrt(1 / 4), rel=0.15)  # the edge of the noise of four blocks
    assert found["lipschitz"] > 3


# ---------------------------------------------------------------------------------------------------- claims


def dense_row(blocks: torch.Tensor, seed: int, state: str) -> dict:
    entries = torch.randn(400, 6, generator=torch.Generator().manual_seed(seed))
    return {
        "kind": "dense", "seed": seed, "images": BLOCK * BLOCKS, "state": state, "params": DIM,
        "spectra": measures.spectra(blocks, (4, 16), BLOCK, 4, seed), "bounds": measures.bounds(blocks, 16, BLOCK),
        "dependence": measures.dependence(blocks), "spikes": measures.spikes(blocks, 16, BLOCK, 16, seed),
        "entries": measures.normality(entries, (1, 4, 16), 100, seed),
    }  # fmt: skip


def run_row(arm: str, seed: int, *, noise: float = 0.0, loss: float = 0.2, drift: float = 0.0) -> dict:
    """A run whose noise oscillates slowly, so that it is the same 100 steps later."""
    gap = 10 if arm == "gap 10" else 100
    steps = range(gap, 801, gap)
    level = [0.01 * math.exp(math.cos(2 * math.pi * step / 100) + drift * step / 100) for step in steps]
    found = {
        "kind": "run", "arm": arm, "seed": seed, "stop": "finished", "steps": 800, "gaps": [10, 100], "seconds": 1.0,
        "train_loss": loss, "test_loss": 0.3, "test_accuracy": 0.9 + 0.001 * seed,
    }  # fmt: skip
    if arm.startswith("gap"):
        return found | {"history": [[s, 0.04, x, 0.1 * x] for s, x in zip(steps, level, strict=True)]}
    ends = {"start": {"noise": noise}, "end": {"noise": noise}}
    lanczos = {"kurtosis": 2.0 + 0.01 * seed, "outside": 0.0, "least_distance": 0.0, "images": 640}
    return found | ends | {"lanczos": lanczos}


def made(blocks: torch.Tensor) -> list[dict]:
    dense = [dense_row(blocks, seed, "") for seed in (0, 1)]
    rows = [{**row, "state": state} for row in dense for state in ("start", "trained")]
    for seed in (0, 1):
        about = {"kind": "first weights", "network": "VGG-16", "seed": seed, "params": 10, "measured_at": 16}
        rows.append({**about, "noise": 1e-6 * (1 + 0.01 * seed)})
        rows += [run_row(arm, seed, noise=1e-5) for arm in ("flat", "gap 10", "gap 100")]
        rows.append(run_row("diverged", seed, loss=math.log(10)))
    return rows


def verdicts(claims: list[Claim], where: str, text: str = "") -> set[str]:
    found = {claim.verdict for claim in claims if claim.where.startswith(where) and text in claim.text}
    assert found, f"no claim of {where!r} with {text!r}"
    return found


def test_where_noise_is_as_the_paper_says_its_claims_hold():
    claims = judgement.claims(made(wigner_blocks(spike=3.0)))
    assert verdicts(claims, "lemma 2") == {"holds"}
    assert verdicts(claims, "lemma 3", "normal") == {"holds"}
    assert verdicts(claims, "lemma 3", "as 1 / B - 1 / N") == {"holds"}
    assert verdicts(claims, "section 4.1", "sharp directions") == {"holds"}
    assert verdicts(claims, "theorem 4, equation 7", "kurtosis") == {"holds"}
    assert verdicts(claims, "theorem 4, condition iii") == {"holds"}
    assert verdicts(claims, "section 7.1", "first weights is zero: Tr X^2 / P at B = 128") == {"holds"}
    assert verdicts(claims, "section 7.1", "diverged") == {"holds"}
    assert verdicts(claims, "section 7.1", "results with gap") == {"holds"}
    assert verdicts(claims, "section 7.1", "loses nothing") == {"refuted"}  # 10 steps apart it is not the same
    assert all(claim.paper == "seed 004" and claim.evidence for claim in claims)


def test_questions_of_ours_are_told_from_statements_of_the_paper():
    ours = [claim.text for claim in judgement.claims(made(wigner_blocks(spike=3.0))) if claim.ours]
    assert len(ours) == 4 + 2 + 1 + 1 + 2  # normal at sizes in use, small networks, damping by gap, its age, shifts
    assert sum("too large by s2 / nu" in text for text in ours) == 2  # theorem 1 is of eigenvectors
    assert not any("VGG-16" in text or "they converge" in text or "results with gap" in text for text in ours)


def test_where_noise_is_thin_theorem_4_is_refuted():
    claims = judgement.claims(made(thin_blocks()))
    assert "holds in direction" not in verdicts(claims, "theorem 1")  # any noise has the sign
    assert verdicts(claims, "theorem 4, equation 7", "at the first weights") == {"refuted"}
    assert verdicts(claims, "theorem 4, condition iii") == {"refuted"}
    assert verdicts(claims, "section 7.1", f"at B = 16, {DIM} parameters") == {"refuted"}


def test_runs_that_were_lost_are_left_out_and_nothing_is_decided_by_none():
    rows = made(wigner_blocks(spike=3.0))
    for row in rows:
        if row.get("arm") == "gap 10":
            row["stop"] = "diverged: the loss is nan"
        if row.get("arm") == "diverged":
            row["train_loss"] = 0.3
    claims = judgement.claims(rows)
    assert verdicts(claims, "section 7.1", "results with gap") == {"not decidable"}
    assert verdicts(claims, "section 7.1", "diverged") == {"not decidable"}


def test_one_seed_is_refused():
    rows = [row for row in made(wigner_blocks(spike=3.0)) if row["seed"] == 0]
    with pytest.raises(ValueError, match="two seeds or more of the rows of kind 'dense', got 1"):
        judgement.claims(rows)


def test_the_mean_damping_counts_the_steps_before_the_first_refresh():
    row = {"steps": 300, "history": [[100, 0.04, 0.01, 0.0], [200, 0.06, 0.03, 0.0]]}
    assert learned._mean_damping(row) == pytest.approx((0.03 + 0.04 + 0.06) / 3)


# ------------------------------------------------------------------------------------------------ the whole path


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The experiment at smoke budget, on noise in the place of images."""
    patch = pytest.MonkeyPatch()
    patch.setattr(study, "load", lambda *args, **kwargs: (images(80)[0].add(1).mul(127).byte(), images(80)[1]))
    torch.set_default_dtype(torch.float32)
    rows, claims = study.run(Setting("smoke"), lambda *args: None)
    torch.set_default_dtype(torch.float64)
    patch.undo()
    return rows, claims


def test_the_whole_path_runs_and_is_written(smoke, tmp_path):
    rows, claims = smoke
    assert {row["kind"] for row in rows} == {"dense", "first weights", "run"}
    experiment = Experiment("damping", "noise", "", "", study.run)
    written = json.loads(Outcome(experiment, Setting("smoke"), rows, claims, 1.0).write(tmp_path).read_text("utf8"))
    assert len(written["claims"]) == len(claims) > 25
    again = judgement.claims(written["rows"])
    assert [claim.verdict for claim in again] == [claim.verdict for claim in claims]


def test_the_figure_is_drawn_of_rows_from_a_file(smoke):
    drawing = study.figure(json.loads(json.dumps(smoke[0])))
    assert len(drawing.axes) == 4
    assert all(ax.get_legend() is not None for ax in drawing.axes)


def test_the_networks_have_the_sizes_that_are_told():
    assert [sum(p.numel() for p in model.parameters()) for model in (study.small(), study.larger())] == [994, 11_018]
    assert study.small()(images(2)[0].double()).shape == (2, 10)
    assert ritz.Risk(study.larger(), nn.CrossEntropyLoss(), (images(2)[0].double(), images(2)[1])).dim == 11_018
