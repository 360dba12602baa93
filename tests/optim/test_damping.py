"""AutoDamping on simulated Hessians, small networks and the digits, against dense truth and runs of torch alone."""

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ritz
from ritz.errors import NonFiniteError, UnsupportedError
from ritz.optim.damping import AutoDamping
from ritz.optim.diagnostics import reduction_ratio
from ritz.optim.rules import BulkEdge, Constant, LedoitWolf, LevenbergMarquardt, NoiseVariance
from ritz.optim.streaming import Stream
from ritz.plan import Plan

# ------------------------------------------------------------------------------------------ problems


class Quadratics(nn.Module):
    """w'A w / 2 for each matrix A given: data of matrices make a risk whose sample Hessians are those matrices."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(dim))

    def forward(self, matrices: Tensor) -> Tensor:
        return (matrices @ self.w) @ self.w / 2


def mean_output(out: Tensor, target: Tensor) -> Tensor:
    return out.mean()


DIM, NOISE = 30, 1.0


def simulated(num: int, seed: int = 0) -> tuple[ritz.Risk, Tensor]:
    """H + Wigner noise with E Tr X^2 / P = 1, H of five spikes; the risk, and its sample Hessians (num, P, P)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num, DIM, DIM, generator=g)
    noise = (x + x.mT) / math.sqrt(2 * (DIM + 1)) * NOISE
    H = torch.zeros(DIM, DIM)
    H[range(5), range(5)] = torch.tensor([8.0, 6.0, 5.0, 4.0, 3.0])
    each = H + noise
    plan = ritz.Plan(route="reverse")
    return ritz.Risk(Quadratics(DIM), mean_output, (each, torch.zeros(num)), plan=plan), each


def small(seed: int = 0, num: int = 48) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, (torch.randn(num, 3), torch.randint(2, (num,)))


def risk_of(model: nn.Module, data: Any, **options: Any) -> ritz.Risk:
    return ritz.Risk(model, nn.CrossEntropyLoss(), data, **options)


def sample_matrices(model: nn.Module, risk: ritz.Risk, data: tuple[Tensor, Tensor], curvature: str) -> Tensor:
    """The Hessian or Gauss-Newton matrix of each sample, (N, P, P), by torch.func."""

    def output(flat: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, risk.space.split(flat), (x[None],))[0]

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output(flat, x), y)

    point = risk.space.join(risk.params())
    if curvature == "hessian":
        return torch.func.vmap(torch.func.hessian(loss), in_dims=(None, 0, 0))(point, *data)
    jacobian = torch.func.vmap(torch.func.jacrev(output), in_dims=(None, 0))(point, data[0])  # (N, C, P)
    p = model(data[0]).detach().softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return jacobian.mT @ middle @ jacobian


class Damped(torch.optim.SGD):
    """A stand-in for a second-order method: it has a damping, and divides by it."""

    def __init__(self, params: Any, lr: float = 0.01, damping: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["damping"] = damping


def train(model: nn.Module, optimizer: Any, damping: AutoDamping | None, data: Any, steps: range, stream: bool) -> None:
    X, y = data
    for step in steps:
        rows = torch.arange(16) + 16 * (step % (len(X) // 16))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
        optimizer.step()
        if damping is not None:
            damping.step((X[rows], y[rows]) if stream else None)


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16), torch.tensor(labels)


def train_digits(model: nn.Module, optimizer: Any, data: Any, steps: int, after: Callable[[Any], None] = id) -> None:
    """Batches of 128 drawn with replacement; `after` is called with each."""
    g = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (128,), generator=g)
        batch = data[0][rows], data[1][rows]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        after(batch)


# ------------------------------------------------------------------------------- the printed algorithm and ours


def test_algorithm_1_as_printed_is_biased_on_simulated_hessians_and_auto_damping_is_not():
    """N = 8 batches of one matrix each, one probe, 60 draws; the true value is 1."""
    N, draws = 8, 60
    printed, divided, ours = [], [], []
    for seed in range(draws):
        risk, each = simulated(N, seed)
        v = risk.space.probes([0], seed, "normal", dtype=torch.float64)[0]
        v = v / v.norm()
        line6 = (each @ v).square().sum()
        line9 = (v @ each.mean(0) @ v).square()
        printed.append(float(line6 - line9))
        divided.append(float(line6 / N - line9))
        damping = AutoDamping(
            Damped(risk.model.parameters()), risk, every=1, rule=NoiseVariance(start=0.0), num_batches=N, batch_size=1,
            num_probes=1, seed=seed,
        )  # fmt: skip
        damping.step()
        ours.append(float(damping.optimizer.param_groups[0]["damping"]))
    mean = {name: sum(x) / draws for name, x in (("printed", printed), ("divided", divided), ("ours", ours))}
    spread = float(torch.tensor(ours).std()) / math.sqrt(draws)
    assert abs(mean["ours"] - NOISE**2) < 4 * spread < 0.1
    assert mean["printed"] > 20  # eight times the noise and the signal
    assert mean["divided"] > 4  # noise and signal


@pytest.mark.parametrize(("method", "size"), [("halves", 4), ("halves", 5), ("pairs", 4)])
def test_the_streaming_estimate_is_unbiased_on_simulated_hessians(method, size):
    """Also what comes with it: Tr H / P and Tr H^2 / P."""
    risk, _ = simulated(2)
    stream = Stream(risk, method=method)
    for index in range(150):
        _, each = simulated(size, 1000 + index)
        stream.add((each, torch.zeros(size)), index)
    estimates = stream.take()
    truths = {
        "noise": NOISE**2 / size,
        "trace": 26 / DIM,
        "second_moment": (64 + 36 + 25 + 16 + 9) / DIM,
    }
    for name, truth in truths.items():
        estimate = estimates[name]
        assert abs(float(estimate.value) - truth) < 4 * float(estimate.stderr), name
        assert float(estimate.stderr) < 0.15 * truth + 0.2, name
    assert len(estimates["noise"].samples) == (75 if method == "pairs" else 150)


def test_the_interval_of_the_streaming_estimate_covers():
    hits, risk = 0, simulated(2)[0]
    stream = Stream(risk)
    for seed in range(50):
        for index in range(5):
            stream.add((simulated(2, 5 * seed + index)[1], torch.zeros(2)), 5 * seed + index)
        low, high = stream.take()["noise"].interval(0.95)
        hits += low <= NOISE**2 / 2 <= high
    assert hits >= 42


@pytest.mark.parametrize(("method", "curvature"), [("halves", "hessian"), ("halves", "ggn"), ("pairs", "hessian")])
def test_the_streaming_estimate_measures_what_the_full_one_does(method, curvature):
    """At fixed weights, batches drawn as training draws them; both within their errors, and of the truth."""
    model, (X, y) = small(num=96)
    risk, size = risk_of(model, (X, y)), 16
    each = sample_matrices(model, risk, (X, y), curvature)
    truth = float((each - each.mean(0)).square().sum()) / 95 / risk.dim
    stream, g = Stream(risk, curvature, method), torch.Generator().manual_seed(0)
    for index in range(60):
        rows = torch.randint(len(X), (size,), generator=g)
        stream.add((X[rows], y[rows]), index)
    streamed = stream.take()["noise"]
    full = [ritz.curvature_noise(risk, 6, size, seed, num_probes=1, curvature=curvature) for seed in range(12)]
    values = torch.tensor([float(estimate.value) for estimate in full])
    assert abs(float(streamed.value) - truth / size) < 4 * float(streamed.stderr)
    assert abs(float(values.mean()) - truth / size) < 4 * float(values.std()) / math.sqrt(12)
    # one product each: 8 of them in a window are about as good as a full estimate from 8 batches
    assert float(streamed.samples.std()) / math.sqrt(8) < 2.5 * float(values.std())


@pytest.mark.parametrize("num_probes", [None, 1, 3])
def test_a_refresh_is_unbiased_with_a_probe_for_each_batch_and_with_common_ones(num_probes):
    """Batches of 4 of the simulated matrices: a quarter of the noise of one."""
    values = []
    for seed in range(40):
        risk, _ = simulated(16, seed)
        options = {"num_batches": 4, "batch_size": 4, "num_probes": num_probes, "seed": seed}
        damping = AutoDamping(Damped(risk.model.parameters()), risk, 1, NoiseVariance(start=0.0), **options)
        damping.step()
        values.append(damping.history[0]["damping"])
    spread = float(torch.tensor(values).std()) / math.sqrt(40)
    assert abs(sum(values) / 40 - NOISE**2 / 4) < 4 * spread < 0.1


def test_a_probe_for_each_batch_tells_its_error_where_one_for_all_does_not(digits):
    """A trained network: its noise lives in few directions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    train_digits(model, torch.optim.Adam(model.parameters(), lr=0.01), digits, 100)
    risk = risk_of(model, digits)
    told = {}
    for num_probes in (None, 1):
        estimates = []
        for seed in range(25):
            damping = AutoDamping(Damped(model.parameters()), risk, 1, batch_size=64, num_probes=num_probes, seed=seed)
            damping.step()
            estimates.append((damping.history[0]["noise"], damping.history[0]["noise_stderr"]))
        values, errors = torch.tensor(estimates).unbind(1)
        told[num_probes] = float(errors.square().mean().sqrt() / values.std()), float(values.std() / values.mean())
    assert told[None][0] > 0.6  # the standard error is about the true one
    assert told[1][0] < 0.6
    assert told[None][1] < told[1][1]


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
def test_a_ragged_batch_counts_by_its_size(sizes):
    """The noise told of is that of the largest batch of the window, be it the first or not."""
    risk, each = simulated(6, 3)
    stream = Stream(risk)
    for index, size in enumerate(sizes):
        stream.add((each[:size], torch.zeros(size)), index)
    estimate = stream.take()["noise"]
    assert "batches of 4" in estimate.convention
    for index, size in enumerate(sizes):
        A, B = (part.mean(0) for part in each[:size].chunk(2))
        v = risk.space.probes([index], 0, dtype=torch.float64)[0]
        v = v / v.norm()
        assert float(estimate.samples[index]) == pytest.approx(float(((A - B) @ v).square().sum()) * size / 4 / 4)


def test_the_size_of_batches_is_that_of_the_window_and_not_of_an_earlier_one():
    risk, each = simulated(8, 3)
    stream, noises = Stream(risk), []
    for size in (8, 2, 8):
        stream.add((each[:size], torch.zeros(size)), 0)
        noises.append(stream.take()["noise"])
    assert [f"batches of {size}" in one.convention for one, size in zip(noises, (8, 2, 8), strict=True)] == [True] * 3
    assert float(noises[0].value) == float(noises[2].value)


def test_a_batch_of_one_sample_at_the_end_of_an_epoch_tells_nothing_of_noise():
    model, data = small()
    damping = AutoDamping(Damped(model.parameters()), risk_of(model, data), every=3, num_batches=3)
    for rows in (slice(0, 8), slice(8, 9), slice(0, 8)):
        damping.step((data[0][rows], data[1][rows]))
    assert len(damping.seen[0].noise.samples) == 2
    with pytest.raises(ValueError, match="no curvature noise without a batch of two samples or more"):
        Stream(risk_of(model, data)).take()


# ------------------------------------------------------------------------------------------ optimisers


def test_adam_with_constant_damping_is_adam_of_torch_bit_for_bit():
    (one, data), (other, _) = small(), small()
    plain = torch.optim.Adam(one.parameters(), lr=0.01, eps=1e-3)
    damped = torch.optim.Adam(other.parameters(), lr=0.01, eps=1e-3)
    damping = AutoDamping(damped, risk_of(other, data), every=3, rule=Constant())
    train(one, plain, None, data, range(20), stream=False)
    train(other, damped, damping, data, range(20), stream=False)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert len(damping.history) == 6


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, Damped])
@pytest.mark.parametrize("stream", [False, True])
def test_any_optimiser_with_a_damping_or_eps_is_written_to(make, stream):
    model, data = small()
    optimizer = make(model.parameters(), lr=1e-3)
    key = "damping" if make is Damped else "eps"
    start = optimizer.param_groups[0][key]
    damping = AutoDamping(optimizer, risk_of(model, data), every=4, num_batches=3)
    train(model, optimizer, damping, data, range(8), stream)
    assert [entry["step"] for entry in damping.history] == [4, 8]
    noise = damping.history[0]["noise"]
    average = noise + 0.3 * (damping.history[1]["noise"] - noise)
    assert optimizer.param_groups[0][key] == pytest.approx(start + average)
    assert damping.history[1]["damping"] == optimizer.param_groups[0][key]
    assert damping.history[1]["noise_stderr"] > 0
    assert damping.seen[0].noise.interval()[0] > 0


def test_a_damping_kept_as_a_tensor_is_filled_in_place():
    model, data = small()
    optimizer = Damped(model.parameters())
    held = optimizer.param_groups[0]["damping"] = torch.tensor(0.1)
    AutoDamping(optimizer, risk_of(model, data), every=1).step()
    assert optimizer.param_groups[0]["damping"] is held
    assert float(held) > 0.1


def test_another_entry_can_be_named():
    model, data = small()
    optimizer = Damped(model.parameters())
    optimizer.param_groups[0]["floor"] = 2.0
    AutoDamping(optimizer, risk_of(model, data), every=1, key="floor").step()
    assert optimizer.param_groups[0]["floor"] > 2.0
    assert optimizer.param_groups[0]["damping"] == 0.1


# ------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize(
    ("rule", "stream", "options"),
    [
        (NoiseVariance(), False, {}),
        (LedoitWolf(), True, {}),
        (BulkEdge(), True, {"stream": "pairs"}),
        (LevenbergMarquardt(), True, {}),
        (NoiseVariance(), True, {"compensate_lr": True}),
    ],
)
@pytest.mark.parametrize("stop", [8, 9, 10])  # 9 is between the batches of a pair
def test_a_resumed_run_goes_on_bit_for_bit(rule, stream, options, stop, tmp_path):
    def fresh() -> tuple[nn.Module, Any, AutoDamping, Any]:
        model, data = small()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        risk = risk_of(model, data, plan=Plan(route="forward"))  # "auto" goes by the clock
        return model, optimizer, AutoDamping(optimizer, risk, 6, rule, num_batches=3, **options), data

    model, optimizer, damping, data = fresh()
    train(model, optimizer, damping, data, range(20), stream)
    before, first, auto, _ = fresh()
    train(before, first, auto, data, range(stop), stream)
    states = {"model": before.state_dict(), "optimizer": first.state_dict(), "damping": auto.state_dict()}
    torch.save(states, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    after, second, again, _ = fresh()
    after.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["optimizer"])
    again.load_state_dict(loaded["damping"])
    train(after, second, again, data, range(stop, 20), stream)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), after.parameters(), strict=True))
    assert optimizer.param_groups[0]["eps"] == second.param_groups[0]["eps"]
    assert repr(damping.history) == repr(again.history)  # NaN is not equal to itself


def test_refreshes_draw_other_examples_unless_told_not_to():
    model, (X, y) = small()
    drawn: dict[bool, list[Any]] = {True: [], False: []}
    for fresh, sums in drawn.items():
        damping = AutoDamping(
            Damped(model.parameters()), risk_of(model, (X, y)), 1, num_batches=2, batch_size=4, fresh=fresh
        )
        for _ in range(2):
            damping.count += 1
            sums.append(sorted(float(x.sum()) for x, _ in damping._subset() for x in x))
    assert drawn[True][0] != drawn[True][1]
    assert drawn[False][0] == drawn[False][1]


# ------------------------------------------------------------------------------------------ learning rates


def test_compensation_multiplies_the_step_and_leaves_the_learning_rate_to_the_scheduler():
    (one, data), (other, _) = small(), small()
    plain, damped = Damped(one.parameters(), lr=0.1), Damped(other.parameters(), lr=0.1)
    damping = AutoDamping(damped, risk_of(other, data), every=2, rule=Constant(0.5), compensate_lr=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(damped, 0.5)
    rates = []
    for step in range(4):
        before = [p.detach().clone() for p in other.parameters()]
        one.load_state_dict(other.state_dict())
        train(one, plain, None, data, range(step, step + 1), stream=False)
        scale = 1.1 if step < 2 else 1.5  # 1 + 0.1 before the first refresh
        train(other, damped, damping, data, range(step, step + 1), stream=False)
        for p, q, start in zip(one.parameters(), other.parameters(), before, strict=True):
            torch.testing.assert_close(q - start, (p - start) * scale * 0.5**step)
        rates.append(damped.param_groups[0]["lr"])
        schedule.step()
    assert rates == [0.1, 0.05, 0.025, 0.0125]


def test_made_anew_it_compensates_once():
    """As by running a cell of a notebook again: hooks of the first would multiply the rates once more."""
    model, data = small()
    optimizer, seen = Damped(model.parameters(), lr=0.1), []
    for _ in range(2):
        damping = AutoDamping(optimizer, risk_of(model, data), rule=Constant(0.5), compensate_lr=True)
    gc.collect()
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["lr"]))
    train(model, optimizer, damping, data, range(1), stream=False)
    assert seen == [pytest.approx(0.1 * 1.1)]
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(("rule", "compensate_lr"), [(Constant(0.5), True), (LevenbergMarquardt(), False)])
def test_a_deep_copy_of_model_optimiser_and_damping_trains_on_its_own(rule, compensate_lr):
    model, data = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.1)
    damping = AutoDamping(optimizer, risk_of(model, data), every=2, rule=rule, compensate_lr=compensate_lr)
    copies = copy.deepcopy((model, optimizer, damping))
    for each in ((model, optimizer, damping), copies):
        train(*each, data, range(4), stream=False)
    assert damping.history == copies[2].history
    for p, q in zip(model.parameters(), copies[0].parameters(), strict=True):
        assert p is not q
        assert torch.equal(p, q)


def test_an_optimiser_with_its_own_rate_factor_is_told_it():
    model, data = small()
    optimizer = Damped(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr_scale"] = 1.0
    damping = AutoDamping(optimizer, risk_of(model, data), every=2, rule=Constant(0.5), compensate_lr=True)
    assert optimizer.param_groups[0]["lr_scale"] == 1.1
    train(model, optimizer, damping, data, range(2), stream=False)
    assert optimizer.param_groups[0]["lr_scale"] == 1.5
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_step_that_fails_does_not_leave_a_raised_learning_rate():
    model, data = small()
    optimizer = Damped(model.parameters(), lr=0.1)
    damping = AutoDamping(optimizer, risk_of(model, data), rule=Constant(), compensate_lr=True)

    def fails() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fails)
    damping.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fails)
    optimizer.param_groups[0]["lr"] = 0.05  # by a scheduler, say
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


# ------------------------------------------------------------------------------------------ groups, presets


def test_each_group_has_its_own_damping_from_its_own_block():
    model, data = small()
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[2].parameters(), "eps": 1e-4}])
    risk = risk_of(model, data)
    damping = AutoDamping(optimizer, risk, every=1, num_batches=6, batch_size=8, num_probes=1, per_group=True)
    damping.step()
    subset = damping._subset()
    for index, (group, start, pattern) in enumerate(
        zip(optimizer.param_groups, (1e-8, 1e-4), ("0.*", "2.*"), strict=True)
    ):
        block = risk.restrict(pattern).on(subset)
        seed = damping._key("probes", 1)
        assert group["eps"] == pytest.approx(start + float(ritz.curvature_noise(block, 6, 8, seed, num_probes=1).value))
        assert damping.history[0][f"damping/{index}"] == group["eps"]
    saved = damping.state_dict()
    assert len(saved["rules"]) == 2
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"has 3 parameter groups and had 2: .* make a new AutoDamping"):
        damping.step()


def test_presets_are_what_the_paper_and_its_code_say():
    model, data = small(num=10112)
    optimizer, risk = torch.optim.Adam(model.parameters()), risk_of(model, data)
    text, code, ours = (AutoDamping.preset(n, optimizer, risk) for n in ("paper_text", "published_code", "recommended"))
    assert text.num_batches * text.batch_size == 10112
    assert (text.rules[0].combine, text.compensate_lr, text.fresh) == ("floor", False, True)
    assert code.num_batches * code.batch_size == 1024
    assert (code.rules[0].combine, code.compensate_lr, code.fresh) == ("add", True, False)
    assert {d.every for d in (text, code, ours)} == {100}
    assert {d.rules[0].decay for d in (text, code, ours)} == {0.7}
    assert AutoDamping.preset("paper_text", optimizer, risk, every=10).every == 10
    text.rules[0].average["noise"] = 1.0
    assert AutoDamping.preset("paper_text", optimizer, risk).rules[0].average == {}  # no state is shared


def test_the_published_code_divides_by_n():
    """mean |H_i v|^2 - |mean H_i v|^2, on the eight batches and the probe that the refresh used."""
    model, data = small(num=1024)
    optimizer, risk = Damped(model.parameters(), damping=0.0), risk_of(model, data)
    damping = AutoDamping.preset("published_code", optimizer, risk, every=1)
    damping.step()
    part, seed = risk.on(damping._subset()), damping._key("probes", 1)
    v = risk.space.probes([0], seed, "normal", dtype=torch.float64)[0]
    v = v / v.norm()
    images = torch.stack([ritz.Hessian(risk.on([b.data])) @ v for b in part.batches.sample(8, 128, seed)])
    truth = images.square().sum(1).mean() - images.mean(0).square().sum()
    assert optimizer.param_groups[0]["damping"] == pytest.approx(float(truth), rel=1e-9)


def test_the_state_carries_the_route_that_the_clock_chose():
    model, data = small()
    optimizer = torch.optim.Adam(model.parameters())
    first, second = (AutoDamping(optimizer, risk_of(model, data), 1, num_batches=3) for _ in range(2))
    first.step()
    second.load_state_dict(first.state_dict())
    assert second.risk.routes == first.risk.routes != {}


# ------------------------------------------------------------------------------------------ real training


def digit_run(data: tuple[Tensor, Tensor], rule: Any, stream: bool, steps: int = 120) -> tuple[float, AutoDamping]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-3)
    risk = risk_of(model, data)
    damping = AutoDamping(optimizer, risk, every=20, rule=rule)
    train_digits(model, optimizer, data, steps, lambda batch: damping.step(batch if stream else None))
    return risk.loss(), damping


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rule", [NoiseVariance(), LedoitWolf(), BulkEdge(c=0.1), LevenbergMarquardt()])
def test_damping_on_the_digits_is_finite_and_sensible(digits, rule, stream):
    loss, damping = digit_run(digits, rule, stream)
    trajectory = [entry["damping"] for entry in damping.history]
    assert len(trajectory) == 6
    assert all(1e-6 < value < 0.1 for value in trajectory)
    assert loss < 1.0  # from log 10 = 2.3
    if isinstance(rule, NoiseVariance | BulkEdge):
        assert all(value > 1e-3 for value in trajectory)


def test_streaming_and_full_damping_agree_on_the_digits(digits):
    values = {}
    for stream in (False, True):
        _, damping = digit_run(digits, NoiseVariance(), stream)
        noise = torch.tensor([entry["noise"] for entry in damping.history])
        values[stream] = float(noise.mean()), float(noise.std()) / math.sqrt(len(noise))
    apart = abs(values[True][0] - values[False][0])
    assert apart < 4 * math.hypot(values[True][1], values[False][1])
    assert apart < 0.5 * values[False][0]


def test_levenberg_marquardt_tames_a_step_that_is_too_long_and_trusts_a_good_model():
    """Newton's step on a quadratic foretells its loss exactly; three times as long it goes uphill."""
    for lr, falls in ((1.0, True), (3.0, False)):
        model = nn.Linear(2, 1, bias=False)
        X, y = torch.eye(2), torch.ones(2, 1)
        risk = ritz.Risk(model, nn.MSELoss(), (X, y))  # H = I
        optimizer = Damped(model.parameters(), lr=lr, damping=1.0)
        damping = AutoDamping(optimizer, risk, every=1, rule=LevenbergMarquardt())
        nn.functional.mse_loss(model(X), y).backward()
        optimizer.step()
        damping.step((X, y))
        assert (optimizer.param_groups[0]["damping"] < 1.0) is falls
        assert damping.history[0]["reduction_ratio"] == pytest.approx(1.0) or not falls


@pytest.mark.parametrize("curvature", [None, "ggn", "hessian"])
def test_the_quadratic_model_of_a_reduction_ratio_is_that_of_the_curvature_asked_for(curvature):
    model, data = small()
    optimizer, risk = Damped(model.parameters(), lr=0.5), risk_of(model, data)
    damping = AutoDamping(optimizer, risk, every=1, rule=LevenbergMarquardt(), curvature=curvature)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
    damping.step(data)
    ratios = {kind: float(reduction_ratio(risk, before, curvature=kind)) for kind in ("ggn", "hessian")}
    assert ratios["ggn"] != pytest.approx(ratios["hessian"], rel=1e-3)
    assert damping.history[0]["reduction_ratio"] == pytest.approx(ratios[curvature or "ggn"])


def test_nothing_of_the_model_or_the_generators_is_changed():
    model, data = small()
    model.train()
    optimizer = Damped(model.parameters())
    damping = AutoDamping(optimizer, risk_of(model, data), every=1)
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    weights, grads = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    damping.step()
    damping.step((data[0][:16], data[1][:16]))
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


def test_samples_without_noise_leave_the_damping_at_its_start():
    model = nn.Linear(2, 1)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.ones(32, 2), torch.ones(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    damping = AutoDamping(optimizer, risk, every=1)
    damping.step()
    damping.step((torch.ones(8, 2), torch.ones(8, 1)))
    assert optimizer.param_groups[0]["eps"] == pytest.approx(1e-3, abs=1e-20)


def test_batch_statistics_are_streamed_in_pairs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    X, y = torch.randn(64, 3), torch.randint(2, (64,))
    risk = risk_of(model, list(zip(X.split(16), y.split(16), strict=True)), mode="train")
    damping = AutoDamping(Damped(model.parameters()), risk, every=4, num_batches=4)
    for index in range(4):
        damping.step((X[16 * index : 16 * index + 16], y[16 * index : 16 * index + 16]))
    assert damping.streams[0].method == "pairs"
    assert damping.history[0]["noise"] > 0
    with pytest.raises(UnsupportedError, match="use stream='pairs'"):
        AutoDamping(Damped(model.parameters()), risk, stream="halves")


# ------------------------------------------------------------------------------------------ refusals


class Greedy:
    needs = frozenset({"gold"})

    def update(self, seen: Any, step: int) -> float:
        return 1.0


class Broken:
    needs: frozenset[str] = frozenset()

    def update(self, seen: Any, step: int) -> float:
        return math.nan


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "expected every >= 1"),
        ({"num_batches": 1}, ValueError, "num_batches >= 2"),
        ({"num_probes": 0}, ValueError, "num_probes >= 1, got 100, 4, 0"),
        ({"num_batches": 49}, ValueError, "49 [*] 2 is more than the 48 samples"),
        ({"batch_size": -1}, ValueError, "batch_size must be at least 1, got -1"),
        ({"batch_size": 1000}, ValueError, "4 [*] 1000 is more than the 48 samples"),
        ({"combine": "max"}, ValueError, "combine must be 'add' or 'floor'"),
        ({"combine": "add", "rule": Constant()}, ValueError, "Constant has nothing to combine"),
        ({"curvature": "fisher"}, ValueError, "curvature must be 'hessian' or 'ggn'"),
        ({"stream": "thirds"}, ValueError, "stream must be 'halves' or 'pairs'"),
        ({"key": "temper"}, ValueError, "have no 'temper'; name the entry with key=: .*damping"),
        ({"key": "betas"}, ValueError, "have no 'betas'"),
        ({"rule": Greedy()}, ValueError, r"Greedy needs \['gold'\]; there are noise"),
        ({"rule": "noise"}, TypeError, "a rule has `needs` and `update"),
        ({"rule": LevenbergMarquardt(), "per_group": True}, ValueError, "belongs to the whole step"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    model, data = small()
    with pytest.raises(error, match=message):
        AutoDamping(Damped(model.parameters()), risk_of(model, data), **options)


def test_what_cannot_be_damped_is_refused():
    model, data = small()
    risk = risk_of(model, data)
    with pytest.raises(ValueError, match=r"SGD have no 'damping' or 'eps'; name the entry with key=: .*lr"):
        AutoDamping(torch.optim.SGD(model.parameters(), lr=0.1), risk)
    with pytest.raises(TypeError, match=r"group\['eps'\] is a tuple, not one number"):
        AutoDamping(torch.optim.Adafactor(model.parameters()), risk)
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Sequential"):
        AutoDamping(Damped(model.parameters()), model)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "eps": 1e-4}]
    with pytest.raises(ValueError, match=r"different values of 'eps'.*per_group=True"):
        AutoDamping(torch.optim.Adam(groups), risk)
    with pytest.raises(ValueError, match="preset must be one of paper_text, published_code, recommended"):
        AutoDamping.preset("paper", Damped(model.parameters()), risk)
    stranger = torch.optim.Adam([{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(2))]}])
    with pytest.raises(ValueError, match="no parameter of group 1 is a parameter of the risk"):
        AutoDamping(stranger, risk, per_group=True)


def test_a_rule_that_gives_no_number_and_a_step_out_of_turn_are_refused():
    model, data = small()
    optimizer, risk = Damped(model.parameters()), risk_of(model, data)
    with pytest.raises(NonFiniteError, match="Broken gave the damping nan"):
        AutoDamping(optimizer, risk, every=1, rule=Broken()).step()
    with pytest.raises(RuntimeError, match=r"no optimizer\.step"):
        AutoDamping(optimizer, risk, every=1, rule=LevenbergMarquardt()).step()
    damping = AutoDamping(optimizer, risk)
    state = {**damping.state_dict(), "starts": [0.1, 0.2]}
    with pytest.raises(ValueError, match="1 rules for 2 parameter groups, this AutoDamping 1 for 1"):
        damping.load_state_dict(state)


def test_a_step_that_a_gradient_scaler_held_back_has_no_reduction_ratio():
    """Its first scales are mostly too high: the damping waits for a step that can be judged."""
    model, data = small()
    optimizer, scaler = torch.optim.Adam(model.parameters(), eps=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    damping = AutoDamping(optimizer, risk_of(model, data), every=1, rule=LevenbergMarquardt())
    for factor in (math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * damping.risk.output_loss.total(model(data[0]), data)).backward()
        scaler.step(optimizer)
        scaler.update()
        damping.step()
    ratios = [entry["reduction_ratio"] for entry in damping.history]
    assert [math.isnan(ratio) for ratio in ratios] == [True, False, False]
    assert damping.history[0]["damping"] == 0.1
    with pytest.raises(RuntimeError, match=r"no optimizer\.step"):
        damping.step()  # the gradients are fine: this is a call too many


def test_the_risk_of_another_model_is_refused():
    (model, data), (other, _) = small(), small()
    with pytest.raises(ValueError, match="trains no parameter of the risk's model"):
        AutoDamping(torch.optim.Adam(model.parameters()), risk_of(other, data))


def test_a_rule_that_is_a_class_is_refused():
    model, data = small()
    with pytest.raises(TypeError, match=r"not a class: rule=LedoitWolf\(\)"):
        AutoDamping(torch.optim.Adam(model.parameters()), risk_of(model, data), rule=LedoitWolf)
