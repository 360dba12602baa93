import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ritz
from ritz.operators.algebra import DenseOperator
from ritz.optim.lanczos_opt import LanczosOpt, ritz_pairs
from ritz.papers import logistic_damping as study
from ritz.papers import logistic_damping_claims as judgement
from ritz.papers.base import Claim
from ritz.papers.data.images import load_images

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "logistic_damping.json"
GRID = (0.01, 1.0)


def noise(num: int, seed: int = 0, pixels: int = 7) -> study.Data:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(num, pixels, generator=g) * 2 - 1, torch.randint(10, (num,), generator=g)


def layer(pixels: int, seed: int) -> nn.Linear:
    """The model at the start of a seed."""
    model = nn.Linear(pixels, 10)
    flat = study.start(pixels, seed).to(model.weight)
    with torch.no_grad():
        model.weight.copy_(flat[: 10 * pixels].view(10, pixels))
        model.bias.copy_(flat[10 * pixels :])
    return model


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, data: study.Data, steps: int) -> Tensor:
    """The textbook loop: the training loss before each step and after the last."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[0]), data[1])
        loss.backward()
        found.append(loss.item())
        optimizer.step()
    return torch.tensor([*found, F.cross_entropy(model(data[0]), data[1]).item()])


def dense(model: nn.Linear, data: study.Data) -> tuple[Tensor, Tensor]:
    """Gradient (P,) and Hessian (P, P) of the mean loss, by reverse mode twice, row by row."""
    params = list(model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(data[0]), data[1]), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])
    rows = [torch.cat([part.flatten() for part in torch.autograd.grad(x, params, retain_graph=True)]) for x in flat]
    return flat.detach(), torch.stack(rows)


def equation_9(H: Tensor, g: Tensor, damping: float, eta: float, k: int) -> Tensor:
    """The bracket of equation 9 from dense eigenpairs, the k largest ones sharp."""
    values, vectors = torch.linalg.eigh(H)
    rates = torch.full_like(values, 1 / damping)
    rates[-k:] = 1 / (eta * (values[-k:] + damping))
    return vectors @ (rates * (vectors.T @ g))


# ------------------------------------------------------------------------------------------------ the runs


@pytest.mark.parametrize("k", [5, 20, 90])  # 90: beyond the dimension, the Krylov space is exhausted
def test_runs_in_lock_step_are_those_of_lanczos_opt_one_by_one(k):
    data = noise(40)
    runs = study.train_lanczos(data, data, 3, GRID, (1.0, 10.0), steps=5, num_lanczos=k, every=1)
    assert [(run.damping, run.eta) for run in runs] == [(0.01, 1.0), (0.01, 10.0), (1.0, 1.0), (1.0, 10.0)]
    for run in runs:
        model = layer(7, 3)
        risk = ritz.Risk(model, nn.CrossEntropyLoss(), data, plan=ritz.Plan(route="reverse"))
        optimizer = LanczosOpt(
            model.parameters(), risk, lr=0.01, damping=run.damping, eta=run.eta, k=k, tol=math.inf, seed=3
        )
        torch.testing.assert_close(run.curves["train_loss"], losses(model, optimizer, data, 5), rtol=1e-9, atol=1e-11)
    finals = [run.final("train_loss") for run in runs]
    assert min(abs(a - b) for i, a in enumerate(finals) for b in finals[:i]) > 1e-5  # or the above could not fail


@pytest.mark.parametrize("eta", [1.0, 10.0])
def test_with_the_whole_space_a_step_is_equation_9_with_all_eigenpairs(eta):
    data, model = noise(40), layer(7, 0)
    g, H = dense(model, data)
    (run,) = study.train_lanczos(data, data, 0, (0.1,), (eta,), steps=1, num_lanczos=80)
    flat = study.start(7, 0).double() - 0.01 * equation_9(H, g, 0.1, eta, 80)
    loss = F.cross_entropy(data[0] @ flat[:70].view(10, 7).T + flat[70:], data[1])
    assert run.final("train_loss") == pytest.approx(loss.item(), rel=1e-10)


@pytest.mark.parametrize("eta", [1.0, 3.0])
def test_lanczos_opt_on_softmax_regression_is_equation_9_with_its_converged_pairs(eta):
    X, y = noise(60, pixels=12)
    X = X * 0.5 ** torch.arange(12.0)  # eigenvalues in groups far apart: the first groups converge, the last do not
    model = layer(12, 1)
    g, H = dense(model, (X, y))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), plan=ritz.Plan(route="reverse"))
    optimizer = LanczosOpt(model.parameters(), risk, lr=1.0, damping=0.2, eta=eta, k=40, tol=1e-7)
    losses(model, optimizer, (X, y), 1)
    pairs = int(optimizer.last["pairs"])
    assert 9 < pairs < 40
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(before - after, equation_9(H, g, 0.2, eta, pairs), rtol=1e-5, atol=1e-7)


def test_gradient_descent_is_torchs():
    data, model = noise(40), layer(7, 2)
    run = study.train_descent(data, data, 2, steps=6, every=1)
    expected = losses(model, torch.optim.SGD(model.parameters(), lr=0.01), data, 6)
    torch.testing.assert_close(run.curves["train_loss"], expected)


def test_curves_hold_the_losses_and_errors_of_both_sets():
    train, test = noise(30), noise(20, seed=1)
    run = study.train_descent(train, test, 0, steps=3)
    model = layer(7, 0)
    losses(model, torch.optim.SGD(model.parameters(), lr=0.01), train, 3)
    for name, (X, y) in (("train", train), ("test", test)):
        out = model(X)
        assert run.final(f"{name}_loss") == pytest.approx(F.cross_entropy(out, y).item())
        assert run.final(f"{name}_error") == pytest.approx(100 * float((out.argmax(1) != y).double().mean()))
    assert run.steps == (0, 3)


def test_ritz_values_of_the_last_step_are_those_of_the_hessian_before_it():
    data = noise(40)
    (run,) = study.train_lanczos(data, data, 0, (0.1,), (1.0,), steps=1, num_lanczos=60)
    _, H = dense(layer(7, 0), data)
    torch.testing.assert_close(run.values[:10], torch.linalg.eigvalsh(H).flip(0)[:10])
    assert float(run.residuals[:10].max()) < 1e-6


def test_at_zero_every_eigenvalue_comes_nine_times():
    """Why the start is not 0: Lanczos sees one copy, and the other eight would count as flat."""
    X, _ = noise(40)
    values = torch.linalg.eigvalsh(study._Hessians(X, X.T, torch.full((1, 10, 40), 0.1)).dense())
    sizes = values.round(decimals=9).unique(return_counts=True)[1]
    assert sizes.tolist() == [8, *[9] * 8]  # 0 along the sum of classes; 7 pixels and the constant


def test_images_of_a_seed_are_drawn_without_replacement_and_differ_between_seeds():
    data = torch.arange(50.0)[:, None], torch.arange(50)
    first, again, second = (study.draw(data, seed, 20)[1].tolist() for seed in (0, 0, 1))
    assert first == again != second
    assert len(set(first)) == 20


def test_the_model_has_7850_parameters_and_torchs_own_start():
    flat = study.start(784, 5)
    torch.manual_seed(5)
    model = nn.Linear(784, 10, dtype=torch.float32)
    assert len(flat) == 7850
    assert torch.equal(flat[:7840].view(10, 784), model.weight)


def test_training_leaves_the_global_generator_and_reports_progress():
    data, state, seen = noise(20), torch.get_rng_state(), []
    study.train_lanczos(data, data, 0, (1.0,), (1.0,), steps=3, num_lanczos=4, progress=lambda *at: seen.append(at))
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": (torch.zeros(5), torch.zeros(5).long())}, r"images \(N, d\).*got \(5,\)"),
        ({"test": (torch.zeros(5, 6), torch.zeros(5).long())}, r"got \(5, 6\)"),
        ({"train": (torch.zeros(2, 7), torch.tensor([0, 10]))}, "integers from 0 to 9"),
        ({"dampings": (1.0, 1.0)}, "positive dampings, all different"),
        ({"dampings": (0.0,)}, "positive dampings"),
        ({"etas": ()}, "positive etas"),
        ({"steps": 0}, "at least 1, got 0"),
        ({"num_lanczos": 0}, "got 500, 0 and 10"),
        ({"every": 0}, "at least 1"),
    ],
)
def test_bad_input_is_refused_before_any_work(change, message):
    with pytest.raises(ValueError, match=message):
        study.train_lanczos(**({"train": noise(3), "test": noise(3), "seed": 0} | change))


def test_more_images_than_there_are_cannot_be_drawn():
    with pytest.raises(ValueError, match="from 1 to 3 images to draw, got 4"):
        study.draw(noise(3), 0, 4)


# ------------------------------------------------------------------------------------------------- reference


def test_the_distance_to_equation_9_is_that_of_dense_eigenpairs():
    X, y = noise(60, pixels=12)
    X = X * 0.6 ** torch.arange(12.0)
    found = study.compare_exact((X, y), 1, after=4, dampings=(0.01, 1.0), num_lanczos=12, enough=130)
    model = layer(12, 1)
    losses(model, torch.optim.SGD(model.parameters(), lr=0.01), (X, y), 4)
    g, H = dense(model, (X, y))
    operator = DenseOperator(H)
    rows = study._Hessians(X, X.T, torch.zeros(1, 10, 60)).probes([1], 1, "normal")
    values, basis, residuals = ritz_pairs(operator, rows, 12)
    for damping, distance in found.distances.items():
        step = g / damping + ((basis @ g) * (1 / (values + damping) - 1 / damping)) @ basis
        exact = equation_9(H, g, damping, 1.0, 12)
        assert distance == pytest.approx(float((step - exact).norm() / exact.norm()), rel=1e-5)
        assert distance > 1e-3  # or nothing was compared
    assert found.converged == int((residuals < 1e-6 * values[-1]).sum())


def test_too_few_steps_for_the_eigenpairs_are_refused():
    with pytest.raises(ValueError, match="12 Lanczos steps do not give 10 eigenpairs"):
        study.compare_exact(noise(60, pixels=12), 0, 0, num_lanczos=10, enough=12)


# ---------------------------------------------------------------------------------------------------- data


def test_a_data_set_that_is_missing_says_where_it_was_looked_for(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=rf"is in {tmp_path}/MNIST/raw; get the official files of MNIST"):
        load_images("MNIST", tmp_path)
    monkeypatch.delenv("RITZ_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="RITZ_DATA"):
        load_images("MNIST")


def test_both_data_sets_are_read(data_root):
    for name, first in (("MNIST", [5, 0, 4]), ("FashionMNIST", [9, 0, 0])):
        (X, y), (test, _) = load_images(name, data_root)
        assert (X.shape, test.shape) == ((60_000, 784), (10_000, 784))
        assert y[:3].tolist() == first
        assert (float(X.min()), float(X.max())) == (-1.0, 1.0)


# -------------------------------------------------------------------------------------------------- claims

DAMPINGS = (0.001, 0.01, 1.0)
ETAS = (1.0, 3.0, 10.0)


def planted(train, test, seeds: int = 4, outliers: int = 9, residual: float = 0.0) -> dict[str, tuple[study.Run, ...]]:
    """Both data sets with errors train(damping, eta) and test(damping, eta), the seeds a little apart."""
    data = []
    values = [10.0 - 0.1 * i for i in range(outliers)] + [1.0 - 0.001 * i for i in range(50 - outliers)]
    for name in study.DATASETS:
        for seed in range(seeds):
            for damping, eta in [(None, None), *((d, e) for d in DAMPINGS for e in ETAS)]:
                errors = [f(damping or 1.0, eta or 1.0) + 0.01 * seed for f in (train, test)]
                curves = {"train_loss": [2.3, 3.0, 1.0], "test_loss": [2.3, 3.0, 1.2]}
                curves |= {"train_error": [90.0, 50.0, errors[0]], "test_error": [90.0, 50.0, errors[1]]}
                curves |= (
                    {"values": values, "residuals": [residual] * 50} if damping else {"values": [], "residuals": []}
                )
                data.append(
                    {"dataset": name, "seed": seed, "damping": damping, "eta": eta, "steps": [0, 1, 2], **curves}
                )
    return judgement.from_plain(data)


def as_the_paper_says() -> dict[str, tuple[study.Run, ...]]:
    """Training harm 0 at low damping and growing; test error up with less damping and with eta, more than training."""
    return planted(
        lambda d, e: 2.0 + d * (e - 1), lambda d, e: 10.0 - math.log10(d) * 10 + (0.2 + 1.1 * d) * (e - 1), outliers=9
    )


def against_the_paper() -> dict[str, tuple[study.Run, ...]]:
    return planted(
        lambda d, e: 2.0 - (1 - d) * (e - 1) * 0.1 + 5 * (e - 1) * (1 - d),
        lambda d, e: 30.0 + 4 * math.log10(d) - 0.1 * (e - 1) * (1.01 - 0.5 * d) ,
        outliers=15, residual=5.0,
    )  # fmt: skip


def changed(run: study.Run, **ends: float) -> study.Run:
    """A run with other errors at its end."""
    curves = {key: torch.tensor([*run.curves[key][:-1], end]) for key, end in ends.items()}
    return replace(run, curves={**run.curves, **curves})


def families(found: dict[judgement.Key, Claim], verdict: str) -> set[str]:
    return {key[1] for key, claim in found.items() if claim.verdict == verdict}


def test_every_statement_holds_on_runs_that_do_as_the_paper_says():
    found = judgement.claims(as_the_paper_says())
    assert {key for key, claim in found.items() if claim.verdict != "holds"} == set()


def test_every_statement_about_errors_can_be_refuted():
    found = judgement.claims(against_the_paper())
    for family in ("damping", "graver", "eta", "minimal"):
        assert family in families(found, "refuted"), family
    assert found["MNIST", "outliers"].verdict == "refuted"
    assert found["MNIST", "outliers"].measured == 15
    assert found["MNIST", "converged"].verdict == "refuted"


def test_a_change_that_the_seeds_do_not_agree_on_cannot_tell():
    runs = {
        name: tuple(
            study.Run(
                seed=run.seed, damping=run.damping, eta=run.eta, steps=run.steps, values=run.values,
                residuals=run.residuals,
                curves={**run.curves, "test_error": run.curves["test_error"] + (run.eta or 0) * (-1) ** run.seed},
            )
            for run in entries
        )
        for name, entries in as_the_paper_says().items()
    }  # fmt: skip
    assert judgement.claims(runs)["MNIST", "eta", "test_error", 0.001, 1.0, 10.0].verdict == "not decidable"


def test_images_that_a_run_separates_have_no_minimum():
    separated = planted(lambda d, e: -0.03, lambda d, e: 5.0)  # seed 3 has error 0
    assert judgement.claims(separated)["MNIST", "minimum"].verdict == "refuted"
    assert judgement.claims(as_the_paper_says())["MNIST", "minimum"].verdict == "holds"


def test_the_same_verdicts_are_an_identical_picture():
    found = judgement.claims(as_the_paper_says())
    assert found["both", "picture"].verdict == "holds"
    mixed = {"MNIST": as_the_paper_says()["MNIST"], "FashionMNIST": against_the_paper()["FashionMNIST"]}
    assert judgement.claims(mixed)["both", "picture"].verdict == "refuted"


def test_training_without_an_error_shows_no_harm_and_is_not_held_against_the_paper():
    floor = planted(lambda d, e: 1.0, lambda d, e: 9.0 + e, outliers=0)
    found = judgement.claims(
        {name: tuple(changed(run, train_error=0.0) for run in runs) for name, runs in floor.items()}
    )
    claim = found["MNIST", "graver", "train_error", 3.0, 0.001, 0.01]
    assert (claim.measured.value, claim.verdict) == (0.0, "not decidable")
    assert claim.short_of == "a training error above 0 in any of these runs"
    assert found["MNIST", "graver", "test_error", 3.0, 0.001, 0.01].short_of == ""
    assert found["MNIST", "converged"].short_of == "outliers to find"


@pytest.mark.parametrize(
    ("descent", "gap", "closed"), [(12.0, "holds", "holds"), (9.0, "holds", "refuted"), (45.0, "refuted", "holds")]
)
def test_less_damping_opens_a_gap_to_gradient_descent_and_more_closes_it(descent, gap, closed):
    results = as_the_paper_says()  # 40 at the lowest damping, 10 at the highest
    moved = {
        name: tuple(changed(run, test_error=descent + 0.01 * run.seed) if run.damping is None else run for run in runs)
        for name, runs in results.items()
    }
    found = judgement.claims(moved)
    assert (found["MNIST", "descent", "gap"].verdict, found["MNIST", "descent", "closed"].verdict) == (gap, closed)
    assert "at the best damping 1:" in found["MNIST", "descent", "closed"].text
    without = {name: tuple(run for run in runs if run.damping) for name, runs in results.items()}
    assert not [key for key in judgement.claims(without) if key[1] == "descent"]


@pytest.mark.parametrize(("values", "verdict"), [((9.0, 8.0, 7.0), "holds"), ((0.0001, 1.0, 1000.0), "refuted")])
def test_the_curvature_ratio_rises_unless_lambda_falls_faster_than_damping(values, verdict):
    of = dict(zip(DAMPINGS, values, strict=True))
    results = {
        name: tuple(replace(run, values=run.values * of[run.damping]) if run.damping else run for run in runs)
        for name, runs in as_the_paper_says().items()
    }
    assert judgement.claims(results)["MNIST", "ratio"].verdict == verdict


def test_a_step_far_from_equation_9_refutes_it():
    entries = [study.Reference(seed=s, after=0, converged=9, distances={0.1: 0.9 + 0.01 * s}) for s in (0, 1, 2)]
    (claim,) = judgement.reference_claims({"MNIST": entries}).values()
    assert claim.verdict == "refuted"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda runs: [run for run in runs if run.seed == 0], "two seeds or more"),
        (lambda runs: runs[:-1], "the same dampings and etas for every seed"),
        (lambda runs: [run for run in runs if run.eta in (None, 1.0)], "two dampings and two etas"),
    ],
)
def test_runs_that_are_not_a_grid_are_refused(change, message):
    results = {name: change(runs) for name, runs in as_the_paper_says().items()}
    with pytest.raises(ValueError, match=message):
        judgement.claims(results)


# ------------------------------------------------------------------------------------------- file and page


@pytest.fixture(scope="module")
def benchmark(script):
    return script("logistic_damping")


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads(RESULTS.read_text(encoding="utf8"))


def test_runs_come_back_from_plain_data():
    runs = study.train_lanczos(noise(20), noise(10), 4, (0.1,), (1.0, 3.0), steps=2, num_lanczos=5, every=1)
    runs = (*runs, study.train_descent(noise(20), noise(10), 4, steps=2, every=1))
    data = json.loads(json.dumps(judgement.plain("MNIST", runs, digits=17)))
    back = judgement.from_plain(data)["MNIST"]
    for one, other in zip(runs, back, strict=True):
        assert (one.seed, one.damping, one.eta, one.steps) == (other.seed, other.damping, other.eta, other.steps)
        assert all(torch.equal(one.curves[key], other.curves[key]) for key in study.MEANING)
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.residuals, other.residuals)


def test_the_whole_path_runs_on_synthetic_data(benchmark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["logistic_damping.py", "--quick"])
    torch.set_default_dtype(torch.float32)
    try:
        benchmark.main()
    finally:
        torch.set_flush_denormal(False)
    names = sorted(path.name for path in (tmp_path / "build" / "benchmarks").iterdir())
    assert names == [
        "logistic_damping.json",
        "logistic_damping.md",
        "logistic_damping_fashionmnist.png",
        "logistic_damping_grid.png",
        "logistic_damping_mnist.png",
    ]


def test_the_file_holds_the_whole_grid_at_the_paper_s_settings(report):
    settings = report["settings"]
    assert (settings["steps"], settings["num_lanczos"], settings["alpha"]) == (500, 50, 0.01)
    assert report["images"] == [1000, 10_000]
    assert len(settings["seeds"]) >= 3
    grid = 1 + len(settings["dampings"]) * 3
    assert len(report["runs"]) == grid * 2 * len(settings["seeds"])
    assert settings["etas"] == [1.0, 3.0, 10.0]


def test_the_claims_on_file_are_those_that_its_runs_give(report, benchmark):
    again = json.loads(json.dumps(benchmark.judge(report)["claims"]))
    assert again == report["claims"]


def test_the_page_is_the_one_that_the_file_gives(report, script):
    page = script("pages.logistic_damping")
    text = page.PAGE.format(**page.facts(report, judgement.from_plain(report["runs"])))
    assert text == (ROOT / "docs" / "logistic_damping.md").read_text(encoding="utf8")
    for name in ("grid", "mnist", "fashionmnist"):
        picture = ROOT / "docs" / f"logistic_damping_{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 200_000
