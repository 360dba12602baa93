"""Gadam and GadamX against the updates written out, and against torch's Adam where they are the same."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from ritz.errors import NumericalWarning
from ritz.optim import Gadam, GadamX, IterateAverage, averaging_decay
from ritz.optim.skipping import finite

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, each=None) -> list[Tensor]:
    """The weights after each step; `each(step)` comes before it."""
    seen = []
    for step in range(steps):
        if each is not None:
            each(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        optimizer.step()
        seen.append(flat(model))
    return seen


def written_out(model: nn.Module, steps: int, *, lr, decay, p=None, betas=(0.9, 0.999), eps=1e-8) -> list[Tensor]:
    """The update of the module's docstring on one flat vector; Gadam's where there is no p."""
    w = flat(model)
    m, v, largest, seen = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w), []
    for t in range(1, steps + 1):
        nn.utils.vector_to_parameters(w, model.parameters())
        g = torch.cat(
            [g.flatten() for g in torch.autograd.grad(nn.functional.mse_loss(model(X), Y), list(model.parameters()))]
        )
        w = w * (1 - lr * decay)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        first, second = 1 - betas[0] ** t, math.sqrt(1 - betas[1] ** t)
        if p is None:
            w = w - lr / first * m / (v.sqrt() / second + eps)
        else:
            largest = torch.maximum(largest, v)
            w = w - lr * second / first * m / (largest.sqrt() + eps) ** (2 * p)
        seen.append(w)
    return seen


# ------------------------------------------------------------------------------------------------------- Gadam


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_gadam_is_its_update_written_out(decay):
    model = network()
    seen = train(model, Gadam(model.parameters(), lr=0.05, weight_decay=decay, start=0), 12)
    for w, expected in zip(seen, written_out(network(), 12, lr=0.05, decay=decay), strict=True):
        torch.testing.assert_close(w, expected)


@pytest.mark.parametrize("keywords", [{}, {"amsgrad": True}, {"foreach": False}, {"betas": (0.5, 0.9), "eps": 1e-3}])
def test_the_iterates_of_gadam_are_those_of_adamw_bit_for_bit(keywords):
    model, other = network(), network()
    ours = train(model, Gadam(model.parameters(), lr=0.05, start=2, **keywords), 8)
    torchs = train(other, AdamW(other.parameters(), lr=0.05, **keywords), 8)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_with_constant_damping_is_torchs_adam_bit_for_bit(kind):
    """A rule writes its damping into group["eps"] before each step."""
    model, other = network(), network()
    optimizer = kind(model.parameters(), lr=0.05)

    def damp(step: int) -> None:
        for group in optimizer.param_groups:
            group["eps"] = 1e-3

    ours = train(model, optimizer, 8, each=damp)
    torchs = train(other, kind(other.parameters(), lr=0.05, eps=1e-3), 8)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_damping_may_change_at_each_step(kind):
    model, other = network(), network()
    optimizer = kind(model.parameters(), lr=0.05, start=0)

    def damp(step: int) -> None:
        optimizer.param_groups[0]["eps"] = 0.1 * (step + 1)

    moved = train(model, optimizer, 3, each=damp)
    fixed = train(other, kind(other.parameters(), lr=0.05, start=0, eps=0.1), 3)
    assert torch.equal(moved[0], fixed[0])
    assert not torch.equal(moved[1], fixed[1])


# ------------------------------------------------------------------------------------------------------ GadamX


@pytest.mark.parametrize("p", [0.125, 0.2, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gadamx_is_its_update_written_out(p, decay):
    model = network()
    seen = train(model, GadamX(model.parameters(), lr=0.05, weight_decay=decay, p=p, start=0), 12)
    for w, expected in zip(seen, written_out(network(), 12, lr=0.05, decay=decay, p=p), strict=True):
        torch.testing.assert_close(w, expected)


def test_gadamx_with_half_the_power_is_amsgrad_with_eps_before_the_correction():
    """eps / sqrt(1 - beta2^t) in torch's place; with torch's own eps the two differ."""
    model, other, third = network(), network(), network()
    ours = train(model, GadamX(model.parameters(), lr=0.05, weight_decay=0.1, p=0.5, eps=1e-2, start=0), 8)
    torchs = AdamW(other.parameters(), lr=0.05, weight_decay=0.1, amsgrad=True, foreach=False)

    def placed(step: int) -> None:
        torchs.param_groups[0]["eps"] = 1e-2 / math.sqrt(1 - 0.999 ** (step + 1))

    same = train(other, torchs, 8, each=placed)
    for a, b in zip(ours, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    plain = train(third, AdamW(third.parameters(), lr=0.05, weight_decay=0.1, amsgrad=True, eps=1e-2), 8)
    assert (ours[-1] - plain[-1]).abs().max() > 1e-3


def test_gadamx_without_eps_and_with_half_the_power_is_amsgrad():
    model, other = network(), network()
    ours = train(model, GadamX(model.parameters(), lr=0.05, weight_decay=0.1, p=0.5, eps=0.0, start=0), 8)
    torchs = train(other, AdamW(other.parameters(), lr=0.05, weight_decay=0.1, amsgrad=True, eps=0.0), 8)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_gadamx_without_power_is_momentum():
    model = network()
    w, m = flat(model), 0.0
    optimizer = GadamX(model.parameters(), lr=0.05, weight_decay=0.0, p=0.0, start=0)
    for t in range(1, 6):
        train(model, optimizer, 1)
        m = 0.9 * m + 0.1 * torch.cat([p.grad.flatten() for p in model.parameters()])
        w = w - 0.05 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m
        torch.testing.assert_close(flat(model), w)


def test_the_largest_second_moment_is_kept_only_with_amsgrad():
    """One large gradient, then small ones: only with amsgrad it is remembered."""
    steps = {}
    for amsgrad in (True, False):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = GadamX([weight], lr=1.0, weight_decay=0.0, betas=(0.0, 0.5), amsgrad=amsgrad, start=0)
        for size in (100.0, *[1.0] * 20):
            before = weight.item()
            weight.grad = torch.tensor([size])
            optimizer.step()
        steps[amsgrad] = abs(weight.item() - before)
    assert steps[False] / steps[True] == pytest.approx(math.sqrt(0.5 * 100**2) ** 0.25, rel=1e-2)


def test_maximise_climbs():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = GadamX([weight], start=0, maximize=True)
    (3 * weight).sum().backward()
    optimizer.step()
    assert weight.item() > 0


def test_complex_weights_move_as_their_real_and_imaginary_parts():
    z = nn.Parameter(torch.tensor([1.0 + 2.0j]))
    pair = nn.Parameter(torch.tensor([1.0, 2.0]))
    one, two = (GadamX([w], lr=0.1, weight_decay=0.1, start=0) for w in (z, pair))
    for _ in range(3):
        one.zero_grad()
        two.zero_grad()
        z.abs().square().sum().backward()
        pair.square().sum().backward()
        one.step()
        two.step()
    torch.testing.assert_close(torch.view_as_real(z.detach())[0], pair.detach())


def test_the_state_of_amsgrad_in_torch_is_that_of_gadamx():
    model = network()
    theirs = AdamW(model.parameters(), lr=0.05, amsgrad=True)
    train(model, theirs, 3)
    ours = GadamX(model.parameters(), lr=0.05, weight_decay=1e-2, p=0.5, start=0)
    state = theirs.state_dict()
    ours.load_state_dict(copy.deepcopy({**state, "param_groups": ours.state_dict()["param_groups"]}))
    other = copy.deepcopy(model)
    continued = AdamW(other.parameters(), lr=0.05, amsgrad=True)
    continued.load_state_dict(copy.deepcopy(state))
    torch.testing.assert_close(train(model, ours, 2)[-1], train(other, continued, 2)[-1], rtol=1e-4, atol=1e-7)


def test_the_state_of_adamw_as_it_is_goes_on_with_the_settings_that_it_lacks():
    model = network()
    theirs = AdamW(model.parameters(), lr=0.05, amsgrad=True)
    train(model, theirs, 3)
    ours = GadamX(model.parameters(), lr=0.1, p=0.25, start=0)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert [(group["p"], group["lr"]) for group in ours.param_groups] == [(0.25, 0.05)]
    assert len(train(model, ours, 2)) == 2


# --------------------------------------------------------------------------------------------- both: the average


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_the_average_is_the_mean_of_the_iterates_and_never_feeds_back(kind):
    model, other = network(), network()
    optimizer = kind(model.parameters(), lr=0.05, start=4, every=3, model=model)
    seen = train(model, optimizer, 12)
    torch.testing.assert_close(flat(optimizer.average.model), torch.stack([seen[6], seen[9]]).mean(0))
    with optimizer.average.swapped():
        pass
    seen += train(model, optimizer, 2)
    never = train(other, kind(other.parameters(), lr=0.05, start=1000), 14)
    assert all(torch.equal(a, b) for a, b in zip(seen, never, strict=True))


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_a_resumed_run_is_the_straight_one_bit_for_bit(kind):
    def made(model: nn.Module):
        return kind(model.parameters(), lr=0.05, start=2, every=2, model=model)

    straight = network()
    optimizer = made(straight)
    train(straight, optimizer, 9)
    model = network()
    first = made(model)
    train(model, first, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed = network(seed=5)
    resumed.load_state_dict(saved["model"])
    second = made(resumed)
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, 4)
    assert torch.equal(flat(resumed), flat(straight))
    assert torch.equal(flat(second.average.model), flat(optimizer.average.model))
    assert second.average.num_averaged == optimizer.average.num_averaged == 3


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_bfloat16_weights_keep_a_float32_average_through_a_resume(kind):
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = kind([weight], lr=0.01, start=0)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    other = kind([weight], lr=0.01, start=0)
    other.load_state_dict(state)
    mean = other.state_dict()["average"]["mean"]["0"]
    assert mean.dtype == torch.float32
    assert torch.equal(mean, state["average"]["mean"]["0"])


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_a_deep_copy_has_weights_and_an_average_of_its_own(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=0.05, start=1, model=model)
    train(model, optimizer, 3)
    pair = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2)
    assert pair[1].average.num_averaged == 2
    train(*pair, 2)
    assert pair[1].average.num_averaged == 4
    assert torch.equal(flat(pair[0]), flat(model))
    assert torch.equal(flat(pair[1].average.model), flat(optimizer.average.model))
    assert pair[1].average.source is pair[1]


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_a_step_is_counted_once_whatever_else_was_made_of_torch(kind):
    """torch wraps `step` once for each class; an Adam made before or after must not make hooks run twice."""
    model = network()
    Adam(network().parameters())
    optimizer = kind(model.parameters(), lr=0.05, start=0)
    AdamW(network().parameters())
    heard = []
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    train(model, optimizer, 3)
    assert optimizer.average.num_averaged == 3
    assert len(heard) == 3


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_schedules_closures_groups_and_idle_parameters_are_as_in_torch(kind):
    model = network()
    idle = nn.Parameter(torch.ones(2))
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": [*model[2].parameters(), idle]}]
    optimizer = kind(groups, lr=0.1, weight_decay=0.3, start=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, averaging_decay(2))
    first = flat(model[0])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()
        return loss

    losses = []
    for _ in range(4):
        losses.append(float(optimizer.step(closure).detach()))
        schedule.step()
    assert losses[-1] < losses[0]
    assert torch.equal(flat(model[0]), first)
    assert torch.equal(idle, torch.ones(2))  # no gradient: no step and no decay
    assert schedule.get_last_lr() == [0.0, 0.05]


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_auto_starts_by_what_is_observed(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=0.05, start="auto", every=2)
    for accuracy in (1, 2, *[1] * 5):
        train(model, optimizer, 2)
        optimizer.average.observe(accuracy)
    assert optimizer.average.start == 14
    train(model, optimizer, 4)
    assert optimizer.average.num_averaged == 2


def test_gadam_is_adamw_with_an_average_beside_it():
    model, other = network(), network()
    optimizer = Gadam(model.parameters(), lr=0.05, start=2, model=model)
    plain = AdamW(other.parameters(), lr=0.05)
    average = IterateAverage(other, start=2)
    train(model, optimizer, 6)
    for _ in range(6):
        train(other, plain, 1)
        average.step()
    assert torch.equal(flat(average.model), flat(optimizer.average.model))


# --------------------------------------------------------------------------------- gradients that are not finite


def spoil(model: nn.Module, value: float = math.nan) -> None:
    """One entry of the gradient is not a number."""
    next(iter(model.parameters())).grad[0, 0] = value


@pytest.mark.parametrize("kind", [Gadam, GadamX])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace_but_a_count_and_a_warning(kind, value):
    """The run goes on as if the step had never been asked for: weights, moments, their count, and the average."""
    model, other = network(), network()
    optimizer, untroubled = (kind(m.parameters(), lr=0.05, start=2, every=2, model=m) for m in (model, other))
    train(model, optimizer, 3)
    train(other, untroubled, 3)
    for count in (1, 2):
        spoil(model, value)
        with pytest.warns(NumericalWarning, match=rf"is not finite: the step is skipped \({count} so far\)"):
            optimizer.step()
        assert optimizer.skipped == count
    assert torch.equal(train(model, optimizer, 4)[-1], train(other, untroubled, 4)[-1])
    assert optimizer.average.num_averaged == untroubled.average.num_averaged == 2
    assert torch.equal(flat(optimizer.average.model), flat(untroubled.average.model))
    assert untroubled.skipped == 0


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_the_count_of_skipped_steps_goes_along_with_a_state_dict_and_a_copy(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=0.05, start=0)
    train(model, optimizer, 1)
    spoil(model)
    with pytest.warns(NumericalWarning, match="skipped"):
        optimizer.step()
    again = kind(model.parameters(), lr=0.05, start=0)
    again.load_state_dict(optimizer.state_dict())
    twin = copy.deepcopy((model, optimizer))[1]
    assert again.skipped == twin.skipped == optimizer.skipped == 1
    again.load_state_dict(AdamW(model.parameters()).state_dict())
    assert again.skipped == 0


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_a_closure_that_gives_a_gradient_that_is_not_finite_is_skipped(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=0.05, start=0)
    before = flat(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y) * math.inf
        loss.backward()
        return loss

    with pytest.warns(NumericalWarning, match="skipped"):
        assert math.isinf(float(optimizer.step(closure).detach()))
    assert torch.equal(flat(model), before)
    assert optimizer.average.num_averaged == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_holds_back_is_not_counted_again(fused):
    """A fused AdamW is called all the same, and told of it; the average must not count that call."""
    model = network()
    optimizer = Gadam(model.parameters(), lr=0.05, start=0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(X), Y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert optimizer.skipped == 0
    assert optimizer.average.num_averaged == 2
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert bool(flat(model).isfinite().all())


def test_whether_tensors_are_finite_is_told_in_every_precision():
    wide, narrow = torch.tensor([1e300]), torch.tensor([6e4], dtype=torch.float16)
    assert finite([wide, narrow, torch.empty(0), torch.tensor([1 + 2j])])
    assert finite([])
    assert not finite([wide, torch.tensor([math.inf], dtype=torch.bfloat16)])
    assert not finite([torch.tensor([complex(0.0, math.nan)])])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([math.nan]), (3,), check_invariants=True)
    assert not finite([wide, sparse])


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("p", [-0.1, 0.6])
def test_a_power_out_of_range_is_refused(p):
    with pytest.raises(ValueError, match=rf"from 0 \(momentum\) to 1/2 \(AMSGrad\), got {p}"):
        GadamX(network().parameters(), start=0, p=p)
    with pytest.raises(ValueError, match=rf"from 0 \(momentum\) to 1/2 \(AMSGrad\), got {p}"):
        GadamX([{"params": network().parameters(), "p": p}], start=0)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = GadamX(embedding.parameters(), start=0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not take sparse gradients; use an Embedding with sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("kind", [Gadam, GadamX])
def test_bad_settings_are_refused(kind):
    with pytest.raises(TypeError, match="start"):
        kind(network().parameters())
    with pytest.raises(ValueError, match="Invalid learning rate"):
        kind(network().parameters(), lr=-1.0, start=0)
    with pytest.raises(ValueError, match="start must be 'auto' or a number"):
        kind(network().parameters(), start=-1)
    with pytest.raises(ValueError, match="4 of the 4 parameters of the optimiser are not in the model given"):
        kind(network().parameters(), start=0, model=network())
