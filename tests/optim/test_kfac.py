"""KFAC as an optimiser: its step against dense matrices, its manners in a training loop, its resumption."""

import contextlib
import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import draw, seeded
from graphs import taped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ritz
from ritz import replay
from ritz.captures import Recorder
from ritz.errors import NumericalWarning, UnsupportedError
from ritz.operators.kronecker import KFACOperator
from ritz.optim import factors as running
from ritz.optim import passes, renewal
from ritz.optim.kfac import KFAC
from ritz.optim.passes import Pass

N = 12
LABELS = torch.arange(N) % 3


def convnet() -> nn.Module:
    """All that a training network may have: in-place activations, batch normalisation, a parameter without a rule."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        nn.PReLU(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


IMAGES, ROWS = draw(N, 2, 6, 6), draw(N, 5)


def train(model: nn.Module, opt, steps: int, data: Tensor = ROWS, each=None) -> list[float]:
    losses = []
    for number in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(data), LABELS)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if each is not None:
            each(number)
    return losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------------------------------- against truth


@pytest.mark.parametrize("fisher", ["type2", "empirical"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("ekfac", [False, True])
def test_the_first_step_is_that_of_the_operator_on_the_same_batch(fisher, sharing, ekfac):
    """The factors of optimiser and operator come by different ways: from hooks in training, from a functional call."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)))
    risk = ritz.Risk(copy.deepcopy(model), nn.CrossEntropyLoss(), (IMAGES, LABELS))
    opt = KFAC(model, 0.5, 0.1, fisher=fisher, sharing=sharing, ekfac=ekfac, factor_every=1, inverse_every=1)
    if ekfac:  # statistics in the eigenbasis come with the pass after the first, here at the same weights
        opt.param_groups[0]["lr"] = 0.0
        train(model, opt, 1, IMAGES)
        opt.param_groups[0]["lr"] = 0.5
        opt.state.clear()
    train(model, opt, 1, IMAGES)
    inverse = KFACOperator(risk, fisher, sharing=sharing, ekfac=ekfac).inverse(0.1)
    expected = risk.space.join(risk.params()) - 0.5 * (inverse @ risk.gradient())
    assert torch.allclose(weights(model), expected, atol=1e-11)


def test_where_kfac_is_exact_its_first_step_is_the_natural_gradient_of_the_dense_fisher():
    model, y = seeded(lambda: nn.Linear(5, 3)), draw(N, 3, seed=1)
    risk = ritz.Risk(copy.deepcopy(model), nn.MSELoss(), (ROWS, y))
    opt = KFAC(model, 0.7, 0.05, fisher="type2", loss="mse")
    F.mse_loss(model(ROWS), y).backward()
    opt.step()
    fisher = ritz.GGN(risk).dense()
    natural = torch.linalg.solve(fisher + 0.05 * torch.eye(len(fisher)), risk.gradient())
    assert torch.allclose(weights(model), risk.space.join(risk.params()) - 0.7 * natural, atol=1e-12)


def test_for_a_deep_linear_network_its_first_step_is_that_of_the_dense_blocks():
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    y = draw(N, 3, seed=1)
    risk = ritz.Risk(copy.deepcopy(model), nn.MSELoss(), (ROWS, y))
    opt = KFAC(model, 1.0, 0.05, fisher="type2", loss="mse")
    F.mse_loss(model(ROWS), y).backward()
    opt.step()
    gradient, expected = risk.space.split(risk.gradient()), []
    for layer in ("0", "1"):
        dense = ritz.GGN(risk).block(f"{layer}.*").dense()
        own = torch.cat([gradient[f"{layer}.{name}"].flatten() for name in ("weight", "bias")])
        expected.append(torch.linalg.solve(dense + 0.05 * torch.eye(len(dense)), own))
    assert torch.allclose(weights(model), risk.space.join(risk.params()) - torch.cat(expected), atol=1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_huge_damping_it_is_sgd(momentum):
    ours, theirs = seeded(convnet), seeded(convnet)
    train(ours, KFAC(ours, lr=0.1 * 1e9, damping=1e9, momentum=momentum), 5, IMAGES)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum), 5, IMAGES)
    assert torch.allclose(weights(ours), weights(theirs), atol=1e-7)
    assert float((weights(ours) - weights(seeded(convnet))).norm()) > 0.1


def test_on_a_quadratic_every_direction_converges_at_its_known_rate():
    """Error along an eigenvector of the Hessian shrinks by 1 - lr lambda / (lambda + damping) at every step."""
    model, lr, damping = nn.Linear(5, 1, bias=False), 0.3, 0.2
    hessian = 2 * ROWS.T @ ROWS / N
    values, vectors = torch.linalg.eigh(hessian)
    opt = KFAC(model, lr, damping, fisher="type2", loss="mse", momentum=0.0)
    start = model.weight.detach()[0].clone() @ vectors
    for _ in range(15):
        opt.zero_grad()
        F.mse_loss(model(ROWS), torch.zeros(N, 1)).backward()
        opt.step()
    expected = start * (1 - lr * values / (values + damping)) ** 15
    assert torch.allclose(model.weight.detach()[0] @ vectors, expected, atol=1e-12)


def test_with_momentum_a_quadratic_converges_as_heavy_ball_does():
    model, lr, damping, rho = nn.Linear(5, 1, bias=False), 0.3, 0.2, 0.5
    values, vectors = torch.linalg.eigh(2 * ROWS.T @ ROWS / N)
    opt = KFAC(model, lr, damping, fisher="type2", loss="mse", momentum=rho)
    error, buffer = model.weight.detach()[0].clone() @ vectors, torch.zeros(5)
    for _ in range(10):
        opt.zero_grad()
        F.mse_loss(model(ROWS), torch.zeros(N, 1)).backward()
        opt.step()
        buffer = rho * buffer + values / (values + damping) * error
        error = error - lr * buffer
    assert torch.allclose(model.weight.detach()[0] @ vectors, error, atol=1e-12)


def test_new_damping_acts_at_once_and_may_differ_between_blocks():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 1.0, inverse_every=1000, momentum=0.0)
    train(model, opt, 3)
    gradient = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    whole = dict.fromkeys((0.1, 5.0))
    for damping in whole:
        opt.param_groups[0]["damping"] = damping
        whole[damping] = opt.precondition(gradient)
        for name, block in (("0.weight", "0"), ("2.weight", "2")):
            eigen = opt.blocks[block].space()
            assert float(opt.precondition(gradient)[name].norm()) <= float(gradient[name].norm()) * 2 / damping
            assert float(eigen.values.min()) >= 0
    opt.param_groups[0]["damping"] = {"0": 0.1, "2": torch.tensor(5.0)}
    mixed = opt.precondition(gradient)
    assert torch.equal(mixed["0.weight"], whole[0.1]["0.weight"])
    assert torch.equal(mixed["2.bias"], whole[5.0]["2.bias"])
    opt.param_groups[0]["damping"] = {"0": 0.1}
    with pytest.raises(ValueError, match="damping has no value for block '2'; it has values for 0"):
        opt.precondition(gradient)


def test_powers_of_the_preconditioner_multiply():
    model = seeded(convnet)
    opt = KFAC(model, 0.1, 0.3)
    train(model, opt, 2, IMAGES)
    gradient = {name: draw(*p.shape) for name, p in model.named_parameters()}
    half = opt.precondition(opt.precondition(gradient, -0.5), -0.5)
    whole = opt.precondition(gradient)
    back = opt.precondition(whole, 1.0)
    for name in gradient:
        assert torch.allclose(half[name], whole[name])
        assert torch.allclose(back[name], gradient[name])


def test_monte_carlo_statistics_have_the_type_2_ones_as_their_mean():
    """In evaluation mode: through batch statistics the samples are coupled, and drawn labels are not the roots."""
    model = seeded(convnet).eval()
    names = ("0", "1.weight", "4.weight", "6")

    def factors(fisher: str, seed: int) -> list[Tensor]:
        opt = KFAC(model, 0.0, 1.0, fisher=fisher, seed=seed)
        train(model, opt, 1, IMAGES)
        blocks = [opt.blocks[name].averages for name in names]
        return [(own["grad"] if "grad" in own else own["square"]).value.flatten() for own in blocks]

    exact = [torch.stack(part) for part in zip(*(factors("type2", seed) for seed in range(60)), strict=True)]
    drawn = [torch.stack(part) for part in zip(*(factors("mc", seed) for seed in range(60)), strict=True)]
    for name, a, b in zip(names, exact, drawn, strict=True):
        error = ((a.var(0) + b.var(0)) / 60).sqrt() + 1e-12
        assert float(((a.mean(0) - b.mean(0)) / error).abs().max()) < 4.5, name


def test_a_parameter_without_a_rule_gets_the_diagonal_of_the_ggn_on_average():
    model = seeded(convnet).eval()
    truth = ritz.GGN(ritz.Risk(model, nn.CrossEntropyLoss(), (IMAGES, LABELS))).block("4.weight").dense().diagonal()
    found = []
    for seed in range(80):
        opt = KFAC(model, 0.0, 1.0, fisher="type2", seed=seed)
        train(model, opt, 1, IMAGES)
        found.append(opt.blocks["4.weight"].space().values.flatten())
    samples = torch.stack(found)
    assert float(((samples.mean(0) - truth) / (samples.std(0) / 80**0.5)).abs().max()) < 4.5


def test_the_scale_of_the_factors_does_not_depend_on_the_size_of_the_batch():
    model, eigenvalues = seeded(mlp), []
    for repeats in (1, 4):
        opt = KFAC(model, 0.0, 1.0, fisher="empirical")
        F.cross_entropy(model(ROWS.repeat(repeats, 1)), LABELS.repeat(repeats)).backward()
        opt.step()
        eigenvalues.append(opt.eigenvalues()["0"])
    assert torch.allclose(*eigenvalues)


def test_kl_clip_bounds_the_quadratic_form_of_the_step_and_is_off_by_default():
    steps = {}
    for clip in (None, 1e3, 1e-4):
        model = seeded(mlp)
        opt = KFAC(model, 0.1, 0.1, momentum=0.0, kl_clip=clip)
        before = weights(model)
        train(model, opt, 1)
        steps[clip] = weights(model) - before
    assert torch.equal(steps[None], steps[1e3])
    assert float(steps[1e-4].norm()) < float(steps[None].norm())
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    shrink = float(steps[1e-4].norm() / steps[None].norm())
    assert torch.allclose(steps[1e-4], shrink * steps[None])
    assert -0.1 * float(steps[None] @ gradient) * shrink**2 == pytest.approx(1e-4)


def test_coupled_weight_decay_is_preconditioned_and_decoupled_is_not():
    results = {}
    for decoupled in (False, True):
        model = seeded(mlp)
        opt = KFAC(model, 0.1, 0.3, momentum=0.0, weight_decay=0.2, decoupled=decoupled)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        train(model, opt, 1)
        grads = {name: p.grad for name, p in model.named_parameters()}
        if decoupled:
            moves = opt.precondition(grads)
            expected = {name: w * (1 - 0.1 * 0.2) - 0.1 * moves[name] for name, w in before.items()}
        else:
            moves = opt.precondition({name: g + 0.2 * before[name] for name, g in grads.items()})
            expected = {name: w - 0.1 * moves[name] for name, w in before.items()}
        for name, p in model.named_parameters():
            assert torch.allclose(p.detach(), expected[name])
        results[decoupled] = weights(model)
    assert not torch.allclose(results[False], results[True])


@pytest.mark.parametrize("settings", [{}, {"ekfac": True}, {"refresh": "qr"}, {"stagger": True}, {"sharing": "reduce"}])
def test_it_trains_faster_than_sgd_at_the_same_number_of_steps(settings):
    ours, theirs = seeded(convnet), seeded(convnet)
    kfac = train(ours, KFAC(ours, 0.05, 0.05, inverse_every=20, **settings), 40, IMAGES)
    sgd = train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), 40, IMAGES)
    assert kfac[-1] < 0.1 * sgd[-1]


# ------------------------------------------------------------------------------------------- intervals


def test_factors_and_eigenvectors_are_renewed_at_their_intervals():
    model = seeded(mlp)
    opt = KFAC(model, 0.01, 0.1, factor_every=2, inverse_every=16)
    counts, renewed = [], []
    train(
        model, opt, 35, each=lambda _: (counts.append(opt.blocks["0"].count), renewed.append(opt.blocks["0"].renewed))
    )
    assert counts == [1 + step // 2 for step in range(35)]
    moved = [step for step in range(1, 35) if renewed[step] != renewed[step - 1]]
    assert renewed[0] == 1
    assert moved == [2, 6, 14, 16, 32]  # 2, 4 and 8 updates early on, then every 16 steps


def test_staggered_eigendecompositions_come_at_different_steps():
    model, at = seeded(mlp), {"0": [], "2": []}
    opt = KFAC(model, 0.01, 0.1, factor_every=1, inverse_every=10, stagger=True)
    before = {}

    def look(step: int) -> None:
        for name in at:
            if step >= 10 and opt.blocks[name].renewed != before[name]:
                at[name].append(step)
            before[name] = opt.blocks[name].renewed

    train(model, opt, 31, each=look)
    assert at == {"0": [10, 20, 30], "2": [15, 25]}


@pytest.mark.parametrize(
    "settings", [{}, {"ekfac": True}, {"refresh": "qr", "kl_clip": 1e-3}], ids=["kfac", "ekfac", "qr"]
)
def test_a_step_that_is_recorded_and_replayed_is_the_step(settings):
    """As on a GPU; new factors, a new damping and a frozen layer are seen by the recording."""
    ends = []
    for replays in (False, True):
        model = seeded(convnet)
        opt = KFAC(model, lr=0.1, damping=0.1, factor_every=2, inverse_every=5, **settings)
        opt._preconditioner.replays = replays
        train(model, opt, 12, IMAGES)
        opt.param_groups[0]["damping"] = 0.5
        train(model, opt, 4, IMAGES)
        model[3].weight.requires_grad_(False)
        train(model, opt, 4, IMAGES)
        ends.append(weights(model))
        assert len(opt._preconditioner.recordings) == replays
    assert torch.equal(*ends)


def padded(vectors):
    """As on a GPU, where eigenvectors have columns of zeros beside them."""
    return vectors if vectors is None else F.pad(vectors, (0, 8, 0, 8))


def test_a_graph_of_the_step_sees_new_factors_dampings_and_a_loaded_state(monkeypatch):
    monkeypatch.setattr(replay, "_recorded", taped)
    monkeypatch.setattr(running, "_aligned", padded)
    ends = []
    for replays in (False, True):
        model = seeded(convnet)
        opt = KFAC(model, lr=0.1, damping=0.1, factor_every=2, inverse_every=3)
        opt._preconditioner.replays = replays
        torch.set_default_dtype(torch.float32)  # as it mostly is; dampings are in the precision of the factors
        train(model, opt, 5, IMAGES)
        state = copy.deepcopy(opt.state_dict())
        opt.param_groups[0]["damping"] = dict.fromkeys(opt.blocks, 0.5)
        train(model, opt, 5, IMAGES)
        opt.load_state_dict(state)
        train(model, opt, 5, IMAGES)
        ends.append(weights(model))
        torch.set_default_dtype(torch.float64)
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "layouts", [(padded, running._aligned), (running._aligned, padded)], ids=["saved on a GPU", "loaded on a GPU"]
)
def test_a_state_goes_on_where_eigenvectors_are_laid_out_otherwise(layouts, monkeypatch):
    ends = []
    for pair in ((running._aligned, running._aligned), layouts):
        model, state = seeded(convnet), None
        for layout in pair:
            monkeypatch.setattr(running, "_aligned", layout)
            opt = KFAC(model, lr=0.1, damping=0.1, factor_every=1, inverse_every=2)
            if state is not None:
                opt.load_state_dict(state)
            train(model, opt, 5, IMAGES)
            state = opt.state_dict()
        monkeypatch.undo()
        ends.append(weights(model))
    torch.testing.assert_close(*ends)


def test_only_refresh_steps_record_and_other_steps_leave_the_outputs_alone():
    model = seeded(mlp)
    opt = KFAC(model, 0.01, 0.1, factor_every=3)
    train(model, opt, 1)
    assert not any(module._forward_hooks for module in model.modules() if module is not model)
    assert "Clone" not in type(model(ROWS).grad_fn).__name__
    train(model, opt, 2)
    assert "Clone" in type(model(ROWS).grad_fn).__name__


# ------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("settings", [{}, {"ekfac": True}, {"fisher": "type2", "refresh": "qr"}, {"start": "identity"}])
def test_a_resumed_run_goes_on_to_the_same_bit(settings, tmp_path):
    def fresh():
        model = seeded(convnet)
        opt = KFAC(model, 0.05, 0.1, factor_every=2, inverse_every=4, **settings)
        return model, opt, torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)

    whole, opt, schedule = fresh()
    train(whole, opt, 12, IMAGES, each=lambda _: schedule.step())
    first, opt, schedule = fresh()
    train(first, opt, 5, IMAGES, each=lambda _: schedule.step())
    torch.save([first.state_dict(), opt.state_dict(), schedule.state_dict()], tmp_path / "saved.pt")
    second, again, schedule = fresh()
    for part, state in zip(
        (second, again, schedule), torch.load(tmp_path / "saved.pt", weights_only=True), strict=True
    ):
        part.load_state_dict(state)
    train(second, again, 7, IMAGES, each=lambda _: schedule.step())
    assert torch.equal(weights(whole), weights(second))


def test_a_state_is_matched_by_the_names_of_parameters():
    class Net(nn.Module):
        def __init__(self, order: tuple[str, ...]) -> None:
            super().__init__()
            for name in order:
                self.add_module(name, nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    one, two = Net(("a", "b")), Net(("b", "a"))
    opt = KFAC(one, 0.1, 0.1)
    train(one, opt, 3, ROWS[:, :3])
    other = KFAC(two, 0.1, 0.1)
    other.load_state_dict(opt.state_dict())
    two.load_state_dict(one.state_dict())
    for net, optimiser in ((one, opt), (two, other)):
        train(net, optimiser, 3, ROWS[:, :3])
    assert torch.equal(one.a.weight, two.a.weight)
    assert torch.equal(one.b.bias, two.b.bias)


def test_the_state_of_another_optimiser_or_model_is_refused():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1)
    with pytest.raises(ValueError, match="was not made by KFAC"):
        opt.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    other = KFAC(nn.Sequential(nn.Linear(5, 3)), 0.1, 0.1)
    with pytest.raises(ValueError, match="of a model with other layers: 2 in one of the two"):
        opt.load_state_dict(other.state_dict())
    grouped = KFAC(seeded(mlp), 0.1, 0.1, groups=[{"params": "*.bias"}])
    with pytest.raises(ValueError, match="hold other parameters"):
        opt.load_state_dict(grouped.state_dict())


def test_the_factors_of_a_half_precision_model_are_float32_and_stay_so_when_loaded():
    model = seeded(mlp).bfloat16()
    opt = KFAC(model, 0.01, 0.1)
    train(model, opt, 2, ROWS.bfloat16())
    again = KFAC(copy.deepcopy(model), 0.01, 0.1)
    again.load_state_dict(opt.state_dict())
    for optimiser in (opt, again):
        block = optimiser.blocks["0"]
        tensors = [*block.values.values(), *block.vectors.values(), *(a.value for a in block.averages.values())]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("keywords", [{}, {"ekfac": True, "refresh": "qr"}], ids=["kfac", "ekfac"])
def test_a_state_goes_on_with_weights_of_another_precision(keywords):
    settings = {"factor_every": 1, "inverse_every": 1, "fisher": "type2", **keywords}
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1, **settings)
    train(model, opt, 2)
    single = copy.deepcopy(model).float()
    again = KFAC(single, 0.1, 0.1, **settings)
    again.load_state_dict(opt.state_dict())
    train(model, opt, 3)
    train(single, again, 3, ROWS.float())
    assert {average.value.dtype for average in again.blocks["0"].averages.values()} == {torch.float32}
    torch.testing.assert_close(weights(single).double(), weights(model), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------- in a training loop


def test_it_follows_a_schedule_and_reads_its_settings_live():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1, momentum=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0 if step else 1.0)
    train(model, opt, 1)
    schedule.step()
    before = weights(model)
    train(model, opt, 1)
    assert torch.equal(weights(model), before)
    opt.param_groups[0]["lr"], opt.param_groups[0]["lr_scale"] = 0.1, 0.0
    train(model, opt, 1)
    assert torch.equal(weights(model), before)


def test_groups_have_settings_of_their_own():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1, groups=[{"params": "0.*", "lr": 0.0}])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, opt, 2)
    moved = {name: not torch.equal(p, before[name]) for name, p in model.named_parameters()}
    assert moved == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True}


@pytest.mark.parametrize("fisher", ["type2", "empirical"])
def test_accumulated_gradients_give_the_step_of_the_whole_batch(fisher):
    whole, pieces = seeded(mlp), seeded(mlp)
    train(whole, KFAC(whole, 0.1, 0.1, fisher=fisher, factor_every=1), 3)
    opt = KFAC(pieces, 0.1, 0.1, fisher=fisher, factor_every=1, loss_scale=1 / 3)
    for _ in range(3):
        opt.zero_grad()
        for x, y in zip(ROWS.split(4), LABELS.split(4), strict=True):
            (F.cross_entropy(pieces(x), y) / 3).backward()
        opt.step()
    assert torch.allclose(weights(whole), weights(pieces), atol=1e-11)


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_a_gradient_scaler_changes_nothing_but_round_off(fisher):
    plain, scaled = seeded(mlp), seeded(mlp)
    train(plain, KFAC(plain, 0.1, 0.1, fisher=fisher, factor_every=1), 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = KFAC(scaled, 0.1, 0.1, fisher=fisher, factor_every=1, loss_scale=scaler.get_scale)
    for _ in range(4):
        opt.zero_grad()
        scaler.scale(F.cross_entropy(scaled(ROWS), LABELS)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(scaled.parameters(), 1e6)
        scaler.step(opt)
        scaler.update()
    assert torch.allclose(weights(plain), weights(scaled), atol=1e-11)


def test_clipped_gradients_are_preconditioned_by_unclipped_statistics():
    model, clipped = seeded(mlp), seeded(mlp)
    opt, other = KFAC(model, 0.1, 0.1, momentum=0.0), KFAC(clipped, 0.1, 0.1, momentum=0.0)
    start = weights(model)
    for net in (model, clipped):
        F.cross_entropy(net(ROWS), LABELS).backward()
    norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.01)
    opt.step()
    other.step()
    assert torch.allclose(weights(clipped) - start, (weights(model) - start) * 0.01 / float(norm), rtol=1e-4)


def test_under_autocast_the_factors_are_those_of_full_precision_to_bfloat16():
    plain, cast = seeded(mlp).float(), seeded(mlp).float()
    train(plain, opt := KFAC(plain, 0.1, 0.1, fisher="type2"), 1, ROWS.float())
    other = KFAC(cast, 0.1, 0.1, fisher="type2")
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(cast(ROWS.float()), LABELS)
    loss.backward()
    other.step()
    for name, block in other.blocks.items():
        for what, average in block.averages.items():
            assert average.value.dtype == torch.float32
            assert torch.allclose(average.value, opt.blocks[name].averages[what].value, atol=0.02, rtol=0.05)


@pytest.mark.parametrize("shown", ["never", "always", "of need"])
def test_a_part_without_samples_has_no_part_in_the_factors(shown):
    """As the share of a rank may have none, or a part of a batch where samples are left out."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0]) if shown == "of need" else None)
    found = []
    for parts in ((0, N), (N,)):
        model = seeded(mlp)
        opt = KFAC(model, 0.1, 0.1, loss=criterion, fisher="type2", factor_every=1)
        for count in parts:
            out = model(ROWS[:count])
            if shown != "never":
                opt.observe(out, (ROWS[:count], LABELS[:count]))
            F.cross_entropy(out, LABELS[:count], criterion.weight, reduction="sum").backward()
        opt.step()
        found.append(weights(model))
    assert torch.equal(*found)


def test_a_closure_is_called_with_gradients_on():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(ROWS), LABELS)
        loss.backward()
        return loss

    first, second = opt.step(closure), opt.step(closure)
    assert second.item() < first.item()


def test_frozen_and_unused_parameters_are_left_alone():
    model = nn.ModuleDict({"frozen": nn.Linear(5, 5), "used": nn.Linear(5, 3), "unused": nn.Linear(5, 3)})
    model["frozen"].requires_grad_(False)
    root = Chosen(model)
    before = {name: p.detach().clone() for name, p in root.named_parameters()}
    opt = KFAC(root, 0.1, 0.1)
    train(root, opt, 3)
    same = {name for name, p in root.named_parameters() if torch.equal(p, before[name])}
    assert same == {"parts.frozen.weight", "parts.frozen.bias", "parts.unused.weight", "parts.unused.bias"}
    model["used"].weight.requires_grad_(False)  # in the middle of training
    kept = model["used"].weight.detach().clone()
    train(root, opt, 12)
    assert torch.equal(model["used"].weight, kept)


class Chosen(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["used"](torch.tanh(self.parts["frozen"](x)))


def test_gradients_that_are_not_finite_are_skipped_counted_and_reported():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1)
    train(model, opt, 2)
    before, momentum = weights(model), opt.state[model[0].weight]["momentum_buffer"].clone()
    model[0].weight.grad[0, 0] = torch.nan
    with pytest.warns(NumericalWarning, match=r"gradient of step 2 is not finite: the step is skipped \(1 so far\)"):
        opt.step()
    assert torch.equal(weights(model), before)
    assert torch.equal(opt.state[model[0].weight]["momentum_buffer"], momentum)
    assert opt.skipped == opt.state_dict()["kfac"]["skipped"] == 1
    train(model, opt, 1)
    assert not torch.equal(weights(model), before)


def test_statistics_that_are_not_finite_are_left_out():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1, factor_every=1)
    train(model, opt, 1)
    kept = opt.blocks["0"].averages["input"].value.clone()
    rows = ROWS.clone()
    rows[0, 0] = torch.inf
    with pytest.warns(NumericalWarning) as said:
        train(model, opt, 1, rows)
    assert any("statistics of step 1 are not finite" in str(warning.message) for warning in said)
    assert torch.equal(opt.blocks["0"].averages["input"].value, kept)
    assert bool(weights(model).isfinite().all())


@pytest.mark.parametrize("before", [0, 1], ids=["in the first step", "later"])
def test_a_pass_that_is_not_finite_and_thrown_away_leaves_the_other_passes_of_its_step(before):
    found = []
    for spoilt in (True, False):
        model = seeded(mlp)
        opt = KFAC(model, 0.1, 0.1, fisher="type2", factor_every=1)
        train(model, opt, before)
        if spoilt:
            F.cross_entropy(model(ROWS * torch.nan), LABELS).backward()  # and train() begins with zero_grad()
        with pytest.warns(NumericalWarning, match="not finite") if spoilt else contextlib.nullcontext():
            train(model, opt, 1)
        assert opt.blocks["0"].count == before + 1
        found.append(opt.eigenvalues()["0"])
    torch.testing.assert_close(*found)


def test_a_step_without_gradients_moves_nothing():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1)
    opt.step()  # before the first pass as well
    train(model, opt, 9)
    assert opt.blocks["0"].count == 1  # from the first pass that there was
    opt.zero_grad()
    before = weights(model)
    opt.step()
    assert torch.equal(weights(model), before)


# --------------------------------------------------------------------------------- what is and is not a training pass


def factors(opt: KFAC) -> list[Tensor]:
    return [a.value.clone() for block in opt.blocks.values() for a in block.averages.values()]


@pytest.mark.parametrize("product", ["Hessian", "GGN", "EmpiricalFisher"])
def test_products_with_curvature_matrices_of_the_same_model_leave_the_factors_as_they_are(product):
    plain, studied = seeded(convnet), seeded(convnet)
    train(plain, KFAC(plain, 0.05, 0.1, factor_every=1), 3, IMAGES)
    opt = KFAC(studied, 0.05, 0.1, factor_every=1)
    for _ in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(studied(IMAGES), LABELS)
        loss.backward()
        operator = getattr(ritz, product)(ritz.Risk(studied, nn.CrossEntropyLoss(), (IMAGES, LABELS)))
        operator @ torch.ones(operator.dim)
        opt.step()
    assert torch.equal(weights(plain), weights(studied))


def test_passes_without_a_backward_pass_and_passes_under_no_grad_do_not_count():
    plain, evaluated = seeded(mlp), seeded(mlp)
    train(plain, KFAC(plain, 0.05, 0.1, factor_every=1), 3)
    opt = KFAC(evaluated, 0.05, 0.1, factor_every=1)
    for _ in range(3):
        opt.zero_grad()
        evaluated(2 * ROWS)
        with torch.no_grad():
            evaluated(3 * ROWS)
        F.cross_entropy(evaluated(ROWS), LABELS).backward()
        evaluated(4 * ROWS)
        opt.step()
    assert torch.equal(weights(plain), weights(evaluated))


def test_second_derivatives_by_hand_and_paused_passes_do_not_count():
    plain, other = seeded(mlp), seeded(mlp)
    train(plain, KFAC(plain, 0.05, 0.1, factor_every=1), 2)
    opt = KFAC(other, 0.05, 0.1, factor_every=1)
    for _ in range(2):
        opt.zero_grad()
        loss = F.cross_entropy(other(2 * ROWS), LABELS)
        grads = torch.autograd.grad(loss, list(other.parameters()), create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), list(other.parameters()), allow_unused=True)
        with opt.pause():
            x = ROWS.clone().requires_grad_()
            torch.autograd.grad(F.cross_entropy(other(x), LABELS), x)
        F.cross_entropy(other(ROWS), LABELS).backward()
        opt.step()
    assert torch.equal(weights(plain), weights(other))


def test_a_loss_with_a_gradient_penalty_in_it_has_the_factors_of_its_outputs():
    """The derivative in the inputs is none of training, by itself; the backward pass of loss and penalty is."""
    plain, penalised = seeded(mlp), seeded(mlp)
    opts = [KFAC(model, 0.1, 0.1, factor_every=1, inverse_every=1) for model in (plain, penalised)]
    train(plain, opts[0], 1)
    for number in range(2):
        opts[1].zero_grad()
        x = ROWS.clone().requires_grad_()
        out = penalised(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (F.cross_entropy(out, LABELS) + slope.square().mean()).backward()
        opts[1].step()
        assert opts[1].blocks["0"].count == number + 1
        if not number:
            for block, other in zip(*(opt.blocks.values() for opt in opts), strict=True):
                assert all(torch.equal(block.averages[k].value, other.averages[k].value) for k in block.averages)


def test_a_temperature_and_a_parameter_without_entries_are_trained_and_kept():
    """A number on its own, as the temperature of contrastive learning is, has no dimension to be laid out by."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale + self.nothing.sum()

    model = seeded(Scaled)
    opt, before = KFAC(model, 0.1, 0.1, fisher="empirical"), model.scale.item()
    F.cross_entropy(model(ROWS[:1]), LABELS[:1]).backward()  # one sample, whose squared gradient is the curvature
    slope = model.scale.grad.item()
    opt.step()
    assert model.scale.item() == pytest.approx(before - 0.1 * slope / (slope**2 + 0.1))
    assert model.nothing.shape == (0, 3)
    space = opt.blocks["nothing"].space()
    assert opt.blocks["nothing"].unit.gather({"nothing": model.nothing}).shape == space.values.shape


def test_a_copy_of_the_model_does_not_feed_the_optimiser():
    model = seeded(mlp)
    opt = KFAC(model, 0.05, 0.1, factor_every=1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for number in range(3):
        train(model, opt, 1)
        averaged.update_parameters(model)
        F.cross_entropy(averaged(ROWS), LABELS).backward()
        assert opt.blocks["0"].count == number + 1
    assert copy.deepcopy(model)(ROWS).shape == (N, 3)


def test_a_pass_that_fails_leaves_no_hooks_behind():
    model = seeded(mlp)
    opt = KFAC(model, 0.05, 0.1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(draw(N, 7))
    assert not any(module._forward_hooks for module in model.modules() if module is not model)
    train(model, opt, 1)
    assert opt.blocks["0"].count == 1


class Wrapped(nn.Module):
    """Outputs in a dictionary, one class that is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x)}


def test_outputs_that_are_not_a_tensor_are_shown_by_observe():
    plain, model = seeded(mlp), seeded(Wrapped)
    train(plain, KFAC(plain, 0.05, 0.1, factor_every=2), 4)
    opt = KFAC(model, 0.05, 0.1, factor_every=2)
    for _ in range(4):
        opt.zero_grad()
        logits = model(ROWS)["logits"]
        opt.observe(logits, (ROWS, LABELS))
        F.cross_entropy(logits, LABELS).backward()
        opt.step()
    assert torch.equal(weights(plain), weights(model))
    model(ROWS)["logits"].sum().backward()
    with pytest.raises(RuntimeError, match=r"gives a dict, not a tensor: call opt\.observe\(outputs, batch\) between"):
        opt.step()
    with pytest.raises(TypeError, match="outputs must be the tensor that the loss is computed from, got dict"):
        opt.observe({}, None)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.side = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"kind": self.kind(h), "side": self.side(h)}


def two_losses(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out[:, :3], target[:, 0]) + F.cross_entropy(out[:, 3:], target[:, 1])


def test_a_head_whose_outputs_were_not_shown_is_told_of_and_heads_shown_as_one_are_trained():
    """A head that no shown output comes from has no statistics and is not moved: once there was no word of it."""
    model, targets = seeded(TwoHeads), torch.stack([LABELS, LABELS % 2], 1)
    opt = KFAC(model, 0.1, 0.1, factor_every=1)
    out = model(ROWS)
    opt.observe(out["kind"], (ROWS, LABELS))
    two_losses(torch.cat([out["kind"], out["side"]], 1), targets).backward()
    with pytest.warns(NumericalWarning, match=r"side\.weight, side\.bias have gradients but no part in the outputs"):
        opt.step()
    out = model(ROWS)
    opt.observe(out["kind"], (ROWS, LABELS))
    with pytest.raises(ValueError, match=r"a second tensor would go unseen: .* show them as one, torch\.cat"):
        opt.observe(out["side"], (ROWS, LABELS % 2))

    with pytest.raises(ValueError, match="for another loss give fisher='type2'"):
        KFAC(model, 0.1, 0.1, loss=two_losses)
    joined = seeded(TwoHeads)
    opt = KFAC(joined, 0.0, 0.1, loss=two_losses, fisher="type2")
    out = joined(ROWS)
    both = torch.cat([out["kind"], out["side"]], 1)
    opt.observe(both, (ROWS, targets))
    two_losses(both, targets).backward()
    opt.step()
    for name in ("kind", "side"):
        p = out[name].softmax(1)
        hessian = (p.diag_embed() - p[:, :, None] * p[:, None]).mean(0)  # of the head's own loss, in its outputs
        assert torch.allclose(opt.blocks[name].averages["grad"].value[0], hessian)


def test_outputs_that_are_not_those_of_the_last_pass_are_refused():
    model = seeded(Wrapped)
    opt = KFAC(model, 0.1, 0.1)
    first, second = model(ROWS)["logits"], model(ROWS)["logits"]
    for strange in (second.detach(), first):
        with pytest.raises(ValueError, match="do not come from the last forward pass, or are cut off from it"):
            opt.observe(strange, (ROWS, LABELS))
    opt.observe(second, (ROWS, LABELS))
    with torch.no_grad():
        opt.observe(model(ROWS)["logits"], (ROWS, LABELS))  # a look at the model between, by the same function
    F.cross_entropy(second, LABELS).backward()
    opt.step()
    assert opt.blocks["net.0"].count == 1


def test_a_step_that_was_to_update_the_factors_and_saw_no_pass_is_told():
    """A run that goes on with a compiled form of the model, or a copy that shares weights, has factors of long ago."""
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1, factor_every=2)
    train(model, opt, 2)
    other = seeded(mlp)
    for own, shared in zip(other, model, strict=True):
        vars(own)["_parameters"] = vars(shared)["_parameters"]
    with pytest.warns(NumericalWarning, match=r"no training pass was seen in step 2, .* \(1 such steps so far\)"):
        train(other, opt, 2)
    before = opt.blocks["0"].count
    train(model, opt, 2)
    assert opt.blocks["0"].count == before + 1


def test_a_pass_through_a_frozen_model_is_none_of_its_training():
    """As through a discriminator while its generator takes a step."""
    critic, generator = seeded(mlp), nn.Linear(5, 5)
    opt = KFAC(critic, 0.1, 0.1, fisher="type2", factor_every=1)
    alone = copy.deepcopy(critic)
    train(alone, KFAC(alone, 0.1, 0.1, fisher="type2", factor_every=1), 3)
    for _ in range(3):
        critic.requires_grad_(False)
        critic(generator(ROWS)).sum().backward()
        critic.requires_grad_(True)
        train(critic, opt, 1)
    assert torch.equal(weights(critic), weights(alone))


@pytest.mark.parametrize("fisher", ["type2", "empirical"])
def test_shown_targets_weight_and_ignore_items_as_the_loss_does(fisher):
    """Two ignored samples of six: the factor G is that of the other four alone."""
    model, loss = seeded(lambda: nn.Linear(5, 3)), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), ignore_index=1)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    opt = KFAC(model, 0.0, 0.1, fisher=fisher, loss=loss)
    out = model(ROWS[:6])
    opt.observe(out, (ROWS[:6], y))
    loss(out, y).backward()
    opt.step()
    risk = ritz.Risk(model, loss, (ROWS[:6], y))
    truth = KFACOperator(risk, fisher).factors()[""][0]
    assert torch.allclose(opt.blocks[""].averages["grad"].value, truth)


@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
def test_a_loss_with_class_weights_asks_for_the_targets(fisher):
    """The gradient alone does not tell an item of great weight from one that is far off."""
    model = seeded(mlp)
    loss = nn.CrossEntropyLoss(torch.ones(3))
    opt = KFAC(model, 0.1, 0.1, loss=loss, fisher=fisher)
    loss(model(ROWS), LABELS).backward()
    with pytest.raises(RuntimeError, match="the curvature of CrossEntropy, as it was given, depends on the targets"):
        opt.step()


def test_where_the_classes_are_is_asked_for_if_it_is_not_clear():
    model = seeded(lambda: nn.Linear(5, 3))
    opt = KFAC(model, 0.1, 0.1)
    F.cross_entropy(model(draw(2, 6, 5)).flatten(0, 1), LABELS).backward()
    with pytest.raises(RuntimeError, match=r"where the classes are in outputs \(2, 6, 3\) is not known"):
        opt.step()
    out = model(draw(2, 6, 5))
    opt.observe(out.transpose(1, 2), (None, LABELS.reshape(2, 6)))
    opt.step()
    assert opt.blocks[""].count == 1
    model.load_state_dict(seeded(lambda: nn.Linear(5, 3)).state_dict())
    model.zero_grad()
    other = KFAC(clone := copy.deepcopy(model), 0.1, 0.1, loss=ritz.losses.CrossEntropy(class_dim=-1), fisher="type2")
    F.cross_entropy(clone(draw(2, 6, 5)).flatten(0, 1), LABELS).backward()
    other.step()
    flat = KFAC(model := copy.deepcopy(model), 0.1, 0.1, fisher="type2")
    F.cross_entropy(model(draw(2, 6, 5).flatten(0, 1)), LABELS).backward()
    flat.step()
    assert torch.allclose(weights(model), weights(clone))


def test_a_weight_used_beside_its_layer_is_named_and_can_be_given_a_diagonal():
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + x @ self.layer.weight.T

    model = seeded(Beside)
    _opt = KFAC(model, 0.1, 0.1)
    with pytest.raises(UnsupportedError, match=r"layer\.weight acts on the outputs other than .* name it in diagonal"):
        F.cross_entropy(model(ROWS), LABELS).backward()
    model = seeded(Beside)
    opt = KFAC(model, 0.1, 0.1, diagonal=["layer.*"])
    losses = train(model, opt, 5)
    assert set(opt.blocks) == {"layer.weight", "layer.bias"}
    assert losses[-1] < losses[0]


def test_a_model_on_outputs_of_its_own_is_to_be_one_module():
    class Again(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.net(x))

    model, x = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))), ROWS[:, :3]
    opt = KFAC(model, 0.1, 0.1)
    with pytest.raises(
        UnsupportedError, match=r"called on outputs of its own; make all.*one module, and give KFAC that"
    ):
        F.cross_entropy(model(model(x)), LABELS).backward()
    del opt
    whole = Again(model)
    losses = train(whole, KFAC(whole, 0.1, 0.1, factor_every=1), 5, x)
    assert losses[-1] < losses[0]


class Sorted(nn.Module):
    """Each sample is for one of two experts; one without work is called on no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = nn.ModuleList(nn.Linear(5, 4) for _ in range(2)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            own = (x[:, 0] > 0) == bool(number)
            out = out.index_put((own,), expert(x[own]))
        return self.last(torch.tanh(out))


@pytest.mark.parametrize("keywords", [{}, {"ekfac": True}, {"sharing": "reduce"}], ids=["kfac", "ekfac", "reduce"])
def test_an_expert_without_work_keeps_its_factors(keywords):
    model = seeded(Sorted)
    opt = KFAC(model, 0.1, 0.1, factor_every=1, inverse_every=1, **keywords)
    train(model, opt, 2)
    kept = {what: average.value.clone() for what, average in opt.blocks["experts.1"].averages.items()}
    train(model, opt, 2, ROWS - 2 * F.relu(ROWS))
    for what, average in opt.blocks["experts.1"].averages.items():
        assert average.count == 2
        assert torch.equal(average.value, kept[what])
    assert opt.blocks["experts.0"].count == 4


def test_tied_weights_have_a_diagonal():
    model = seeded(lambda: nn.Sequential(nn.Embedding(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)))
    model[2].weight = model[0].weight
    opt = KFAC(model, 0.1, 0.1)
    losses = train(model, opt, 20, LABELS)
    assert opt.blocks["0.weight"].unit.kind == "diagonal"
    assert losses[-1] < 0.5 * losses[0]


def test_padding_that_is_shown_has_no_part_in_the_curvature():
    """The eigenvalues are those of the sequence without it."""
    traces = []
    for length in (3, 12):
        model = seeded(lambda: nn.Linear(5, 3)).double()
        X, y = torch.ones(4, length, 5, dtype=torch.float64), torch.full((4, length), -100)
        X[:, :3], y[:, :3] = torch.arange(60.0).reshape(4, 3, 5).sin(), torch.arange(3)
        optimizer = KFAC(model, lr=0.1, damping=0.1, fisher="type2", loss=ritz.losses.CrossEntropy(class_dim=2))
        out = model(X)
        optimizer.observe(out, (X, y))
        nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        traces.append(sum(float(values.sum()) for values in optimizer.eigenvalues().values()))
    assert traces[0] == pytest.approx(traces[1], rel=1e-6)


class Reader(nn.Module):
    """A language model: layers and outputs have samples or, as is torch's default, time in the first dimension."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=batch_first)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.layer(self.table(tokens)))


@pytest.mark.parametrize("keywords", [{}, {"ekfac": True}, {"sharing": "reduce"}], ids=["kfac", "ekfac", "reduce"])
def test_a_network_with_time_in_the_first_dimension_takes_the_steps_of_one_with_samples_there(keywords):
    tokens, targets = torch.arange(N * 4).reshape(N, 4) % 7, torch.arange(N * 4).reshape(N, 4) % 5
    found = []
    for model in (seeded(lambda: Reader(True)), seeded(lambda: Reader(False))):
        loss = ritz.losses.CrossEntropy(class_dim=-1)
        opt = KFAC(model, 0.1, 0.1, loss=loss, fisher="type2", factor_every=1, inverse_every=1, **keywords)
        for _ in range(3):
            opt.zero_grad()
            out = model(tokens) if model.layer.self_attn.batch_first else model(tokens.T).transpose(0, 1)
            opt.observe(out, (tokens, targets))
            F.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
            opt.step()
        found.append(weights(model))
    assert torch.allclose(found[0], found[1], atol=1e-12)


class Views(nn.Module):
    """Two views of every sample go through one encoder as one batch, one view after the other or side by side."""

    def __init__(self, in_turn: bool) -> None:
        super().__init__()
        self.in_turn, self.last = in_turn, nn.Linear(8, 3)
        layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()
        self.encoder = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([x, x.flip(1)], dim=0 if self.in_turn else 1)
        found = self.encoder(both.flatten(0, 1)).unflatten(0, both.shape[:2])
        return self.last(torch.cat(found.unbind(0 if self.in_turn else 1), dim=1))


@pytest.mark.parametrize("keywords", [{}, {"ekfac": True}, {"sharing": "reduce"}], ids=["kfac", "ekfac", "reduce"])
def test_it_does_not_matter_how_two_views_lie_in_one_batch_also_under_batch_statistics(keywords):
    found = []
    for in_turn in (True, False):
        model = seeded(lambda in_turn=in_turn: Views(in_turn))
        opt = KFAC(model, 0.1, 0.1, fisher="type2", factor_every=1, inverse_every=1, **keywords)
        train(model, opt, 3)
        found.append(weights(model))
    assert torch.allclose(found[0], found[1], atol=1e-10)


def test_rows_that_mix_samples_are_taken_for_their_own_in_training():
    """As under BatchNorm: the nodes of a graph have rows, though gradients of others come back to them too."""
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1, factor_every=1, inverse_every=1, ekfac=True)
    edges = 1.0 * (draw(N, N, seed=1) > 0) / N
    model.register_forward_hook(lambda module, args, out: edges @ out)
    losses = train(model, opt, 10)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
@pytest.mark.parametrize("keywords", [{}, {"ekfac": True}, {"sharing": "reduce"}], ids=["kfac", "ekfac", "reduce"])
def test_padding_is_known_by_the_gradient_that_does_not_come_to_it(fisher, keywords):
    """Labels of -100 that are not shown: the same steps as with targets that are."""
    tokens, targets = torch.arange(N * 4).reshape(N, 4) % 7, torch.arange(N * 4).reshape(N, 4) % 5
    targets[::2, 2:] = -100
    found = []
    for shown in (True, False):
        model, loss = seeded(lambda: Reader(True)), ritz.losses.CrossEntropy(class_dim=-1)
        opt = KFAC(model, 0.1, 0.1, loss=loss, fisher=fisher, factor_every=1, inverse_every=1, **keywords)
        for _ in range(3):
            opt.zero_grad()
            out = model(tokens)
            if shown:
                opt.observe(out, (tokens, targets))
            F.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
            opt.step()
        found.append(weights(model))
    assert torch.allclose(found[0], found[1], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_sample_that_is_fitted_until_its_gradient_underflows_is_no_padding(dtype):
    """It counts: else the curvature of the others would be taken for that of all."""
    sure = torch.tensor([800.0, 0.0, 0.0])
    out = torch.stack([sure, sure, torch.zeros(3), torch.zeros(3)]).to(dtype).requires_grad_()
    targets = torch.tensor([0, 0, 1, -100])
    grad = torch.autograd.grad(F.cross_entropy(out, targets), out)[0]
    assert (grad == 0).all(1).tolist() == [True, True, False, True]
    idle = passes._idle(ritz.losses.CrossEntropy(), out, grad)
    assert idle.tolist() == [False, False, False, True]


def test_an_embedding_is_trained_and_its_padding_is_not():
    model = seeded(lambda: nn.Sequential(nn.Embedding(4, 4, padding_idx=3), nn.Linear(4, 3)))
    tokens = torch.arange(N) % 4
    opt = KFAC(model, 0.1, 0.1, fisher="type2")
    losses = train(model, opt, 20, tokens)
    assert losses[-1] < losses[0]
    assert not model[0].weight[3].any()
    expected = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]])  # the share of every row among tokens that count
    assert torch.allclose(opt.blocks["0"].averages["input"].value, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
def test_on_an_accelerator_it_takes_the_steps_that_it_takes_on_a_cpu(fisher):
    found = []
    for device in ("cpu", "cuda"):
        model = seeded(convnet).to(device)
        opt = KFAC(model, 0.05, 0.1, fisher=fisher, factor_every=1)
        for _ in range(3):
            opt.zero_grad()
            F.cross_entropy(model(IMAGES.to(device)), LABELS.to(device)).backward()
            opt.step()
        found.append(weights(model).cpu())
    assert torch.allclose(*found, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"refresh": "qr"}, {"ekfac": True}], ids=["eigh", "qr", "ekfac"])
def test_on_an_accelerator_eigenvectors_made_on_many_streams_are_those_made_on_one(monkeypatch, options):
    found = []
    for at_once in (1, 5):
        monkeypatch.setitem(renewal._AT_ONCE, "cuda", at_once)
        model = seeded(lambda: nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(96, 96), nn.Tanh())]))
        model, x, y = model.cuda(), draw(32, 96).cuda(), torch.arange(32).cuda()
        opt = KFAC(model, 0.05, 0.1, factor_every=1, inverse_every=2, tf32=False, **options)
        for _ in range(12):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        found.append(weights(model).cpu())
    assert torch.allclose(*found, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["DistributedDataParallel", "_FabricModule", "DataParallel", "OptimizedModule"])
def test_what_averages_gradients_is_looked_through_and_what_calls_a_copy_is_the_model_itself(name):
    def forward(self, x):
        return self.module(x)

    wrapper = type(name, (nn.Module,), {"forward": forward})()
    wrapper.module = seeded(convnet)
    opt = KFAC(wrapper, 0.05, 0.1, factor_every=1)
    assert not any(block.startswith("module.") for block in opt.blocks)
    F.cross_entropy(wrapper(IMAGES), LABELS).backward()
    opt.step()
    assert all(block.count for block in opt.blocks.values())


@pytest.mark.parametrize("warm", [False, True], ids=["new", "has run before"])
def test_a_compiled_model_is_given_as_it_is_called(warm):
    """Code that was compiled where no statistics were due, as after a resume, would call no hook."""
    plain, inner = seeded(mlp), seeded(mlp)
    compiled = torch.compile(inner, backend="eager")
    if warm:
        F.cross_entropy(compiled(ROWS), LABELS).backward()
    losses = [train(model, KFAC(model, 0.05, 0.1, factor_every=2), 5) for model in (plain, compiled)]
    assert losses[0] == losses[1]
    assert torch.equal(weights(plain), weights(inner))


@pytest.mark.parametrize("wraps", [(True, False), (False, True)], ids=["compiled to plain", "plain to compiled"])
def test_a_state_does_not_know_of_what_was_put_around_the_model(wraps):
    """A run that was compiled goes on without, and the other way round, to the bit."""
    whole, models = seeded(mlp), [seeded(mlp), seeded(mlp)]
    train(whole, KFAC(whole, 0.05, 0.1, factor_every=2), 5)
    called = [torch.compile(m, backend="eager") if wrap else m for m, wrap in zip(models, wraps, strict=True)]
    first, second = (KFAC(model, 0.05, 0.1, factor_every=2) for model in called)
    train(called[0], first, 3)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(first.state_dict())
    train(called[1], second, 2)
    assert torch.equal(weights(models[1]), weights(whole))


@pytest.mark.parametrize("wraps", [(True, False), (False, True)], ids=["compiled to plain", "plain to compiled"])
def test_a_state_does_not_know_of_what_was_put_around_a_layer(wraps):
    whole, models = seeded(mlp), [seeded(mlp), seeded(mlp)]
    train(whole, KFAC(whole, 0.05, 0.1, factor_every=2, groups=[{"params": "*.bias"}]), 5)
    layers = [[model[0], model[2]] for model in models]
    for model, wrap in zip(models, wraps, strict=True):
        if wrap:
            model[0] = torch.compile(model[0], backend="eager")
    first, second = (KFAC(model, 0.05, 0.1, factor_every=2, groups=[{"params": "*.bias"}]) for model in models)
    train(models[0], first, 3)
    for one, other in zip(*layers, strict=True):
        other.load_state_dict(one.state_dict())
    second.load_state_dict(first.state_dict())
    train(models[1], second, 2)
    assert torch.equal(weights(models[1]), weights(whole))


def test_a_model_that_is_compiled_in_place_is_refused_and_told_of_where_that_came_later():
    model = seeded(mlp)
    opt = KFAC(model, 0.05, 0.1, factor_every=2)
    train(model, opt, 2)
    model.compile(backend="eager")
    with pytest.warns(NumericalWarning, match="no training pass was seen in step 2"):
        train(model, opt, 1)
    with pytest.raises(UnsupportedError, match=r"give it compiled = torch\.compile\(model\)"):
        KFAC(model, 0.05, 0.1)


# ------------------------------------------------------------------------------------------- no trace, no leak


def alive(kind: type) -> int:
    """How many objects of a type there are."""
    gc.collect()
    return sum(type(x) is kind for x in gc.get_objects())


def test_nothing_keeps_the_optimiser_or_the_graphs_alive():
    model = seeded(convnet)
    opt = KFAC(model, 0.05, 0.1, factor_every=1)
    train(model, opt, 2, IMAGES)
    out = model(IMAGES)
    assert alive(Pass) == alive(Recorder) == 1
    del out  # without a backward pass
    assert alive(Pass) == alive(Recorder) == 0
    out = model(IMAGES)
    out.sum().backward()
    assert alive(Recorder) == 0  # the calls are let go as soon as they were used
    ref = weakref.ref(opt)
    del opt
    gc.collect()
    assert ref() is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_two_hundred_steps_leave_as_many_tensors_as_two():
    model = seeded(mlp)
    opt = KFAC(model, 0.01, 0.1, factor_every=2, inverse_every=4)

    train(model, opt, 10)
    before = alive(Tensor)
    train(model, opt, 200)
    assert alive(Tensor) == before


def test_the_global_generators_and_the_gradients_of_the_user_are_untouched():
    model, plain = seeded(convnet), seeded(convnet)
    opt = KFAC(model, 0.05, 0.1)
    state = torch.random.get_rng_state()
    for net in (model, plain):
        F.cross_entropy(net(IMAGES), LABELS).backward()
    assert torch.equal(torch.random.get_rng_state(), state)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    opt.step()
    assert torch.equal(torch.random.get_rng_state(), state)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    runs = []
    for seed in (0, 0, 1):
        model = seeded(mlp)
        train(model, KFAC(model, 0.1, 0.1, seed=seed), 3)
        runs.append(weights(model))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"damping": 0.0}, ValueError, "damping must be positive, got 0.0"),
        ({"damping": {"0": -1.0, "2": 1.0}}, ValueError, "damping must be positive, got -1.0"),
        ({"lr": -0.1}, ValueError, "lr must not be negative, got -0.1"),
        ({"momentum": -0.1}, ValueError, "momentum must not be negative"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must not be negative"),
        ({"fisher": "true"}, ValueError, "fisher must be one of mc, type2, empirical, got 'true'"),
        ({"start": "zero"}, ValueError, "start must be one of debiased, identity, got 'zero'"),
        ({"refresh": "svd"}, ValueError, "refresh must be one of eigh, qr, got 'svd'"),
        ({"sharing": "both"}, ValueError, "sharing must be one of expand, reduce, got 'both'"),
        (
            {"loss": "hinge"},
            ValueError,
            "loss must be 'cross_entropy', 'mse', 'bce', a torch loss or a ritz.Loss, got 'hinge'",
        ),
        ({"factor_every": 0}, ValueError, "factor_every must be at least 1, got 0"),
        ({"inverse_every": 0}, ValueError, "inverse_every must be at least 1, got 0"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        ({"stat_decay": 1.0}, ValueError, r"stat_decay must lie in \[0, 1\), got 1.0"),
        ({"kl_clip": 0.0}, ValueError, "kl_clip must be positive, or None, got 0.0"),
        ({"groups": [{"params": "0.*"}, {"params": "*.bias"}]}, ValueError, "0.bias is in two groups"),
        ({"groups": [{"params": "fc.*"}]}, ValueError, "no parameter matches 'fc.*'"),
    ],
)
def test_bad_settings_are_refused(settings, error, said):
    with pytest.raises(error, match=said):
        KFAC(**{"model": mlp(), "lr": 0.1, "damping": 0.1, **settings})


def test_what_is_not_a_model_or_has_nothing_to_train_is_refused():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got generator; KFAC needs the layers"):
        KFAC(mlp().parameters(), 0.1, 0.1)
    with pytest.raises(ValueError, match="no parameter to train"):
        KFAC(mlp().requires_grad_(False), 0.1, 0.1)
    with pytest.raises(ValueError, match=r"0\.weight has no shape before the first call of its lazy layer"):
        KFAC(nn.Sequential(nn.LazyLinear(3)), 0.1, 0.1)
    with pytest.raises(UnsupportedError, match="weight is complex, and curvature is that of real numbers"):
        KFAC(nn.Linear(2, 2, dtype=torch.complex64), 0.1, 0.1)


def test_parameters_of_another_model_are_refused():
    opt = KFAC(mlp(), 0.1, 0.1)
    with pytest.raises(ValueError, match="KFAC trains the parameters of its model"):
        opt.add_param_group({"params": [("x", nn.Parameter(torch.ones(1)))]})
    assert len(opt.param_groups) == 1


def test_a_cross_entropy_of_one_sample_without_a_batch_is_refused():
    model = seeded(mlp)
    _opt = KFAC(model, 0.1, 0.1)
    with pytest.raises(ValueError, match=r"cross-entropy needs outputs \(batch, classes, ...\), got \(3,\)"):
        F.cross_entropy(model(ROWS[0]), LABELS[0]).backward()


def test_a_step_before_any_training_pass_is_refused():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1)
    F.cross_entropy(model[2](model[1](model[0](ROWS))), LABELS).backward()  # not through the root
    with pytest.raises(RuntimeError, match="KFAC has seen no training pass: call the model itself"):
        opt.step()


def test_damping_set_to_zero_later_is_refused():
    model = seeded(mlp)
    opt = KFAC(model, 0.1, 0.1)
    train(model, opt, 1)
    opt.param_groups[0]["damping"] = 0.0
    with pytest.raises(ValueError, match=r"damping must be positive, got 0\.0"):
        train(model, opt, 1)


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 3))
    opt = KFAC(model, 0.1, 0.1)
    with pytest.raises(RuntimeError, match="does not take sparse gradients"):
        train(model, opt, 1, LABELS)


def test_tensors_of_other_names_or_shapes_are_not_preconditioned():
    opt = KFAC(mlp(), 0.1, 0.1)
    with pytest.raises(ValueError, match=r"'fc' is not a parameter that is trained; there are: 0\.weight"):
        opt.precondition({"fc": torch.ones(1)})
    with pytest.raises(ValueError, match=r"0\.weight has shape \(4, 5\), got \(1,\)"):
        opt.precondition({"0.weight": torch.ones(1)})


class Transformer(nn.Module):
    """Attention, whose projections no layer rule explains, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(3, 8), nn.Parameter(torch.zeros(4, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x) + self.place))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(lambda z: torch.relu(self.first(z)), x, use_reentrant=False))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


TOKENS = draw(N, 4).gt(0).long()
UNUSUAL = {
    "transformer": (Transformer, TOKENS, ritz.losses.CrossEntropy(class_dim=-1), LABELS[:, None].expand(N, 4)),
    "checkpointed": (Checkpointed, ROWS, nn.CrossEntropyLoss(), LABELS),
    "recurrent": (Recurrent, draw(N, 6, 5), nn.CrossEntropyLoss(), LABELS),
    "flat outputs": (lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), ROWS, nn.MSELoss(), draw(N, seed=3)),
    "binary": (lambda: nn.Linear(5, 2), ROWS, nn.BCEWithLogitsLoss(), draw(N, 2, seed=3).gt(0).double()),
    "volumes": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(2), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 3)),
        draw(N, 1, 3, 3, 3),
        nn.CrossEntropyLoss(),
        LABELS,
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
def test_unusual_networks_and_losses_are_trained(name, fisher):
    build, data, loss, target = UNUSUAL[name]
    model = seeded(build)
    opt = KFAC(model, 0.05, 0.1, fisher=fisher, loss=loss, factor_every=2, inverse_every=4)
    known, losses = ritz.losses.as_loss(loss), []
    for _ in range(8):
        opt.zero_grad()
        out = model(data)
        value = known.total(out, (data, target)) / known.weight(out, (data, target))
        value.backward()
        opt.step()
        losses.append(value.item())
    assert losses[-1] < 0.97 * losses[0]
    assert all(block.space() is not None for block in opt.blocks.values())


def test_outputs_may_be_changed_in_place():
    plain, other = seeded(mlp), seeded(mlp)
    train(plain, KFAC(plain, 0.1, 0.1), 1)
    opt = KFAC(other, 0.1, 0.1)
    out = other(ROWS)
    out.mul_(2).div_(2)
    F.cross_entropy(out, LABELS).backward()
    opt.step()
    assert torch.allclose(weights(plain), weights(other), atol=1e-12)


def test_the_optimiser_itself_cannot_be_copied():
    with pytest.raises(TypeError, match="bound to its model by hooks"):
        copy.deepcopy(KFAC(mlp(), 0.1, 0.1))


def test_every_combination_of_settings_runs():
    for fisher, sharing, ekfac, start in itertools.product(
        ("mc", "type2", "empirical"), ("expand", "reduce"), (False, True), ("debiased", "identity")
    ):
        model = seeded(convnet)
        opt = KFAC(model, 0.05, 0.5, fisher=fisher, sharing=sharing, ekfac=ekfac, start=start, factor_every=1)
        losses = train(model, opt, 4, IMAGES)
        assert losses[-1] < losses[0], (fisher, sharing, ekfac, start)


# ------------------------------------------------------------------------------------- models of other kinds


class Places(nn.Module):
    """Words and places, the places looked up once for all samples or once for each."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 7)
        self.each = each

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1])
        return self.out(
            torch.tanh(self.words(tokens) + self.places(place.expand(tokens.shape) if self.each else place))
        )


TOKENS, NEXT = (torch.randint(7, (32, 5), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
BY_TOKEN = ritz.losses.CrossEntropy(class_dim=-1)


def places(each: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Places(each)


@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
@pytest.mark.parametrize("way", ["optimiser", "operator"])
def test_a_layer_called_once_for_all_samples_has_the_factors_of_one_called_for_each_on_average(fisher, way):
    def factor(each: bool, seed: int) -> Tensor:
        model = places(each)
        if way == "operator":
            risk = ritz.Risk(model, BY_TOKEN, (TOKENS, NEXT), batch_size=20)
            return KFACOperator(risk, fisher, seed=seed).factors()["places"][0][0]
        opt = KFAC(model, 0.0, 1.0, fisher=fisher, loss=BY_TOKEN, seed=seed)
        F.cross_entropy(model(TOKENS).flatten(0, 1), NEXT.flatten()).backward()
        opt.step()
        return opt.blocks["places"].averages["grad"].value[0]

    found = torch.stack([factor(False, seed) for seed in range(30)])
    truth = torch.stack([factor(True, seed) for seed in range(30 if fisher == "mc" else 2)])  # without signs exact
    error = (found.var(0) / len(found) + truth.var(0) / len(truth)).sqrt()
    assert float(((found.mean(0) - truth.mean(0)) / error).abs().max()) < 5


class Queries(nn.Module):
    """Some rows are normalised and go through a layer once for all samples."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.rows, self.norm, self.layer = draw(*shape, 4, seed=4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(torch.tanh(self.norm(self.rows))).reshape(-1, 4)
        return self.last(torch.tanh(self.first(x)) * rows.tanh().mean(0))


@pytest.mark.parametrize("way", ["optimiser", "operator"])
@pytest.mark.parametrize(
    "shape", [(), (2,), (2 * N,), (1, 2 * N), (1, N)],
    ids=["a vector", "fewer than samples", "more than samples", "in a batch of one", "as many in a batch of one"],
)  # fmt: skip
def test_rows_that_belong_to_all_samples_have_their_part_of_the_trace_on_average(shape, way):
    model = seeded(lambda: Queries(*shape))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (ROWS, LABELS))
    parts = ("norm.weight", "norm.bias") if way == "operator" else ("norm.weight", "norm.bias", "layer")

    def traces(seed: int) -> list[float]:
        if way == "operator":
            found = KFACOperator(risk, seed=seed).trace().parts
            return [found[part].value for part in parts]
        opt = KFAC(model, 0.0, 1.0, fisher="type2", ekfac=True, factor_every=1, stat_decay=0.0, seed=seed)
        train(model, opt, 2)
        return [float(opt.eigenvalues()[part].sum()) for part in parts]

    found, diagonal = torch.tensor([traces(seed) for seed in range(40)]), ritz.GGN(risk).dense().diagonal()
    slices = [[own for name, own in risk.space.slices.items() if name.startswith(part)] for part in parts]
    truth = torch.stack([sum(diagonal[own].sum() for own in of_part) for of_part in slices])
    assert float(((found.mean(0) - truth) / found.std(0) * 40**0.5).abs().max()) < 4


class Prompts(nn.Module):
    """Rows that belong to all samples go through a layer, and their mean through a norm that the samples share."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.rows, self.layer, self.norm = draw(*shape, 4, seed=4), nn.Linear(4, 3), nn.LayerNorm(3)
        self.first = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) * self.norm(self.layer(self.rows).reshape(-1, 3).mean(0, keepdim=True))


@pytest.mark.parametrize("shape", [(), (2,), (2 * N,), (1, 2 * N), (1, N)])
def test_reduce_is_exact_on_average_for_the_mean_of_rows_that_belong_to_all_samples(shape):
    model = seeded(lambda: Prompts(*shape))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (ROWS, LABELS), params="layer.*")

    def trace(seed: int) -> float:
        opt = KFAC(model, 0.0, 1.0, fisher="type2", sharing="reduce", factor_every=1, seed=seed)
        train(model, opt, 1)
        return float(opt.eigenvalues()["layer"].sum())

    found, truth = torch.tensor([trace(seed) for seed in range(40)]), float(ritz.GGN(risk).dense().trace())
    assert abs(float(found.mean()) - truth) < 4 * float(found.std()) / 40**0.5


@pytest.mark.parametrize("way", ["optimiser", "operator"])
def test_a_normalisation_of_samples_and_of_what_belongs_to_all_of_them_has_the_diagonal_of_the_ggn_on_average(way):
    model = seeded(lambda: Prompts(2))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (ROWS, LABELS), params="norm.*")

    def diagonal(seed: int) -> Tensor:
        if way == "operator":
            return KFACOperator(risk, seed=seed).dense().diagonal()
        opt = KFAC(model, 0.0, 1.0, fisher="type2", factor_every=1, seed=seed)
        train(model, opt, 1)
        return torch.cat([opt.blocks[name].averages["square"].value.flatten() for name in risk.names])

    found, truth = torch.stack([diagonal(seed) for seed in range(40)]), ritz.GGN(risk).dense().diagonal()
    assert float(((found.mean(0) - truth) / found.std(0) * 40**0.5).abs().max()) < 4


def test_recomputed_activations_update_the_statistics_of_a_normalisation_no_more_often_than_without_kfac():
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.out = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(checkpoint(lambda z: torch.relu(self.norm(self.layer(z))), x, use_reentrant=False))

    plain, model = Recomputed(), Recomputed()
    model.load_state_dict(plain.state_dict())
    _opt = KFAC(model, 0.1, 0.1, fisher="type2")
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    for net in (plain, model):
        F.cross_entropy(net(x), torch.arange(12) % 3).backward()
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_outputs_that_were_flattened_are_refused():
    model = nn.Linear(5, 3)
    opt = KFAC(model, 0.1, 0.1)
    out = model(torch.ones(2, 6, 5))
    with pytest.raises(ValueError, match="outputs of 12 samples were given, but the model returned 2"):
        opt.observe(out.flatten(0, 1), (None, torch.zeros(12, dtype=torch.long)))
    opt.observe(out.transpose(1, 2), (None, torch.zeros(2, 6, dtype=torch.long)))


@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
def test_a_loss_that_leaves_a_class_out_asks_for_the_targets(fisher):
    model, loss = nn.Linear(5, 3), nn.CrossEntropyLoss(ignore_index=0)
    opt = KFAC(model, 0.1, 0.1, fisher=fisher, loss=loss)
    loss(model(torch.ones(4, 5)), torch.arange(4) % 3).backward()
    with pytest.raises(RuntimeError, match="which items are left out, those of class 0, is not known without targets"):
        opt.step()


def test_a_binary_network_has_a_loss_of_its_own_and_one_class_is_refused():
    model, x, y = nn.Linear(5, 1), draw(8, 5), (draw(8, 1, seed=1) > 0).double()
    _opt = KFAC(model, 0.1, 0.1)
    with pytest.raises(ValueError, match="cross-entropy of one class has no curvature"):
        model(x)
    model = nn.Linear(5, 1)
    opt = KFAC(model, 0.1, 0.1, loss="bce", fisher="type2")
    F.binary_cross_entropy_with_logits(model(x), y).backward()
    opt.step()
    assert float(opt.eigenvalues()[""].max()) > 0


def test_groups_are_named_and_not_given_as_tensors():
    model = seeded(mlp)
    with pytest.raises(TypeError, match="globs of names"):
        KFAC(model, 0.1, 0.1, groups=[{"params": model[0].parameters()}])
