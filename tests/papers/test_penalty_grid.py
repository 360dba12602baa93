"""A grid of trace penalties on the MLP: stacks train as single networks do, and claims choose nothing on test data."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ritz.optim import TracePenalty
from ritz.papers import mnist_mlp, penalty_grid, penalty_grid_claims, penalty_identity
from ritz.papers.experiment import Setting
from ritz.storage import load


def some_data(num=24):
    g = torch.Generator().manual_seed(0)
    return torch.randn(num, 784, generator=g, dtype=torch.float64), torch.arange(num) % 10


def rows(val, test, *, etas=(0.0, 1e-4, 1e-3), trace=(9.0, 8.0, 7.0), fits=(99.0, 99.0, 99.0), decay=0.0, form="ggn"):
    return [
        {
            "kind": "network", "form": form, "eta": eta, "weight_decay": decay, "seed": seed,
            "images": 100, "epochs": 2, "val_accuracy": v, "test_accuracy": t + seed / 10, "train_accuracy": fit,
            "trace": tr + seed, "train_loss": 0.1, "val_loss": 0.2, "test_loss": 0.2,
        }
        for seed in (0, 1, 2)
        for eta, v, t, tr, fit in zip(etas, val, test, trace, fits, strict=True)
    ]  # fmt: skip


def test_without_a_penalty_training_is_that_of_the_other_experiments():
    data = some_data()
    own = penalty_grid.train_penalised(data, [3, 5], 0.0, epochs=2, batch_size=10)
    other = mnist_mlp.train_many(data, [3, 5], penalty_grid.DECAYS, epochs=2, batch_size=10)
    for name, w in own.weights.items():
        torch.testing.assert_close(w, other.weights[name], rtol=0, atol=0)


@pytest.mark.parametrize("form", ["ggn", "hessian"])
def test_the_penalty_of_a_stack_is_the_sum_of_those_of_its_networks(form):
    """In the mean over draws, which the traces of single networks are known for without any draw."""
    X, y = some_data(6)
    weights = mnist_mlp.starts(mnist_mlp.make_network, X, (0, 1), 2)
    for w in weights.values():
        w[:, 1] *= 1.5
    stack = penalty_grid.Stack(weights)
    penalty = TracePenalty(1.0, 1.0, form, class_dim=1)
    labels = y[:, None, None].expand(-1, 2, 2)
    draws = torch.stack([4 * penalty(stack, X[:, None].expand(-1, 2, -1), labels).detach() for _ in range(400)])
    known = 0.0
    for seed in (0, 1):
        for scale in (1.0, 1.5):
            model = mnist_mlp.make_network(seed, torch.float64)
            flat = torch.cat([scale * p.detach().flatten() for p in model.parameters()])
            outputs = lambda w, X, model=model: penalty_identity._outputs(model, w, X)  # noqa: E731
            known += penalty_identity.gauss_newton_trace(outputs, flat, (X, y), torch.arange(len(flat)))[0]
    error = draws.std() / len(draws) ** 0.5
    assert abs(float(draws.mean()) - known) < 4 * float(error)


def test_the_outputs_of_a_stack_are_those_of_its_networks():
    X, _ = some_data(6)
    weights = mnist_mlp.starts(mnist_mlp.make_network, X, (0, 1), 2)
    found = penalty_grid.Stack(weights)(torch.stack([X, X + 1], 1))
    for seed in (0, 1):
        torch.testing.assert_close(found[:, :, seed, 1], mnist_mlp.make_network(seed, torch.float64)(X + seed))


def test_a_strong_penalty_lowers_the_trace():
    data = some_data()
    ends = [
        penalty_grid.measure(
            penalty_grid.train_penalised(data, [0], eta, epochs=8, batch_size=8), {"train": data}, images=24
        )[0]["trace"]
        for eta in (0.0, 1e-2)
    ]
    assert ends[1] < 0.8 * ends[0]


def test_the_two_traces_and_gradients_are_the_same_for_relu_and_differ_for_tanh():
    X, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    torch.manual_seed(0)
    parts = nn.Linear(4, 5), nn.Linear(5, 3)
    same = penalty_identity.compare(nn.Sequential(parts[0], nn.ReLU(), parts[1]), (X, y), 0, images=6, draws=3)
    other = penalty_identity.compare(nn.Sequential(parts[0], nn.Tanh(), parts[1]), (X, y), 0, images=6, draws=3)
    assert max(same["trace_gap"], same["gradient_gap"]) < 1e-12
    assert min(other["trace_gap"], other["gradient_gap"]) > 1e-3


def test_eta_is_chosen_on_held_out_images_and_judged_on_test_images():
    found = penalty_grid_claims.claims(rows(val=(95.0, 97.0, 96.0), test=(95.0, 94.0, 99.0)))
    accuracy = found[0]
    assert "eta 0.0001 minus 0" in accuracy.text
    assert (accuracy.verdict, float(accuracy.measured.value)) == ("refuted", pytest.approx(-1.0))


def test_a_penalty_that_helps_holds_and_the_published_eta_is_told_beside_the_chosen_one():
    found = penalty_grid_claims.claims(rows(val=(95.0, 96.0, 97.0), test=(95.0, 95.5, 96.0)))
    texts = {claim.text: claim.verdict for claim in found}
    assert texts["test accuracy, eta 0.001 minus 0 at weight decay 0: percentage points"] == "holds"
    assert texts["gap of test and training error, eta 0.001 minus 0 at weight decay 0: percentage points"] == "holds"
    assert texts["Tr H, eta 0.001 over 0 at weight decay 0: ratio"] == "holds"
    assert texts["test accuracy, eta 0.0001 minus 0 at weight decay 0: percentage points"] == "holds"


def test_gains_at_the_weight_decay_of_table_7_are_the_papers_and_come_first_and_others_are_ours():
    about = {"val": (95.0, 96.0, 97.0), "test": (95.0, 95.5, 96.0)}
    found = penalty_grid_claims.claims([*rows(**about), *rows(**about, decay=5e-4)])
    assert found[0].text.startswith("test accuracy, eta 0.001 minus 0 at weight decay 0.0005")
    theirs = [claim.text.partition(", eta")[0] for claim in found if not claim.ours]
    assert theirs == ["test accuracy", "gap of test and training error", "test accuracy"]
    assert not [claim.text for claim in found if "at weight decay 0:" in claim.text and not claim.ours]
    assert "the paper has eta 1e-4, 3e-4 and 5e-4" in found[0].evidence


def test_training_on_the_other_trace_is_compared_at_equal_seed():
    grid = rows(val=(95.0, 96.0, 97.0), test=(95.0, 95.5, 96.0))
    lost = rows(val=(9.0,), test=(9.0,), etas=(1e-3,), trace=(7.0,), fits=(10.0,), form="hessian")
    found = {claim.text: claim for claim in penalty_grid_claims.claims(grid + lost)}
    share = found["training on L + eta Tr H, eta 0.001, does not diverge: share of networks at chance"]
    assert (share.measured.value, share.verdict) == (1.0, "not decidable")  # three networks: 0.29 to 1
    (apart,) = (claim for text, claim in found.items() if "test accuracy after Tr H minus after Tr G" in text)
    assert (apart.verdict, float(apart.measured.value)) == ("refuted", pytest.approx(-87.0))


def test_what_was_trained_is_kept_and_read_again(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)  # what a user has
    parts = tuple(part.float() if part.is_floating_point() else part for part in some_data())
    monkeypatch.setattr(mnist_mlp, "load_mnist", lambda root, device: (parts, parts, parts))
    setting = Setting("smoke", runs=tmp_path)
    first, _ = penalty_grid.run(setting, lambda *what: None)
    monkeypatch.setattr(penalty_grid, "train_penalised", None)  # would fail if it were called again
    second, _ = penalty_grid.run(setting, lambda *what: None)
    assert first == second
    kept = sorted((tmp_path / "penalty-grid").glob("*.json"))
    for text in kept:  # as an earlier version had it
        save_file(load(text), text.with_suffix(".safetensors"))
        text.unlink()
    assert penalty_grid.run(setting, lambda *what: None)[0] == first
    tensors = kept[0].with_suffix(".safetensors")
    raw = bytearray(tensors.read_bytes())
    raw[-2] ^= 1
    tensors.write_bytes(raw)
    with pytest.raises(ValueError, match="its checksum does not match"):
        penalty_grid.run(setting, lambda *what: None)
    assert len(penalty_grid_claims.figure(first).get_axes()) == 3
