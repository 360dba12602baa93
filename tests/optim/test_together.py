"""The parts of ritz.optim on one network."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ritz
from ritz import optim


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    X = torch.randn(48, 4)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), X, X[:, :3].argmax(1)


def test_a_penalty_with_a_pass_of_its_own_goes_with_kfac():
    model, X, y = problem()
    opt = optim.KFAC(model, lr=0.1, damping=0.1)
    penalty = optim.TracePenalty(1e-2, fraction=1.0)
    (F.cross_entropy(model(X), y) + penalty(model, X)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    opt.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_damping_is_learned_while_kfac_trains():
    model, X, y = problem()
    opt = optim.KFAC(model, lr=0.1, damping=0.3, factor_every=1, inverse_every=2)
    damping = optim.AutoDamping(opt, ritz.Risk(model, nn.CrossEntropyLoss(), (X, y)), every=2, batch_size=6)
    losses = []
    for _ in range(12):
        opt.zero_grad()
        loss = F.cross_entropy(model(X), y)
        loss.backward()
        losses.append(float(loss.detach()))
        opt.step()
        damping.step()
    assert losses[-1] < 0.7 * losses[0]
    assert len({entry for group in opt.param_groups for entry in [group["damping"]]}) == 1
    assert opt.param_groups[0]["damping"] > 0.3  # the start value plus the noise


MAKERS = {
    "KFAC": lambda model, risk: optim.KFAC(model, lr=0.1, damping=0.1),
    "Gadam": lambda model, risk: optim.Gadam(model.parameters(), lr=0.1, start=0),
    "LanczosOpt": lambda model, risk: optim.LanczosOpt(model.parameters(), risk, lr=0.1, damping=0.1, k=2),
}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_warning_of_a_skipped_step_points_at_the_loop_of_the_user(make, scheduled):
    model, X, y = problem()
    opt = make(model, ritz.Risk(model, nn.CrossEntropyLoss(), (X, y)))
    if scheduled:  # which wraps the step once more
        torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    F.cross_entropy(model(X), y).backward()
    model[0].weight.grad[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    assert [w.filename for w in caught if "the step is skipped" in str(w.message)] == [__file__]
