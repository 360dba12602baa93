"""Rules for KFAC's damping: what few batches say of the noise, and claims from rows that are made up."""

import pytest
import torch
from torch import nn

from ritz.optim.rules import LevenbergMarquardt, Seen
from ritz.papers import damping_rules, damping_rules_claims
from ritz.papers.damping_rules_claims import ADDED, FLAT, LM, LM_SIGN
from ritz.results import Estimate


def rows(arm, ends, state="trained", seconds=10.0, **more):
    """A run for each seed that ends at these test accuracies, half of them after half of the time."""
    return [
        {
            "arm": arm, "seed": seed, "state": state, "stop": "finished", "steps": 100, "images": 1000,
            "run_seconds": seconds, "epoch": [1, 2], "seconds": [seconds / 2, seconds], "train_loss": [4.0, 3.0],
            "train_accuracy": [end / 2, end], "test_accuracy": [end / 2, end], "last_damping": 0.03,
            "mean_damping": 0.03, **more,
        }
        for seed, end in enumerate(ends)
    ]  # fmt: skip


def judged(*groups):
    return {claim.text: claim for claim in damping_rules_claims.claims([row for group in groups for row in group])}


def test_few_batches_are_held_against_the_variance_of_all_hessians_in_full():
    X, y = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    found = damping_rules.few_batches(model, (X, y), seed=0, probes=100, size=4)
    order = damping_rules.random_permutation(40, ("few batches", 0))
    names = [name for name, _ in model.named_parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    shapes = [p.shape for p in model.parameters()]

    def loss(w, rows):
        parts = w.split([shape.numel() for shape in shapes])
        params = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, params, (X[rows],)), y[rows])

    full = torch.stack([torch.func.hessian(loss)(flat, batch) for batch in order.split(4)])
    known = (full - full.mean(0)).square().sum() / (len(full) - 1) / len(flat)
    assert found["all"] == pytest.approx(float(known), rel=0.2)  # 100 probes
    assert found["own_mean"] == pytest.approx(float(known), rel=0.9)  # ten batches with a probe each
    assert found["batches"] == sorted(found["batches"], reverse=True)


def test_the_published_sign_turns_the_rule_round():
    def course(rule):
        return [rule.update(Seen(start=1.0, reduction_ratio=Estimate(name="", value=r)), 5) for r in (1.0, 0.1, -2.0)]

    assert course(LevenbergMarquardt(omega=0.5)) == [0.5, 1.0, 2.0]
    assert course(damping_rules.SignAsPublished(omega=0.5)) == [2.0, 4.0, 2.0]


def test_a_rule_that_trains_refutes_that_it_is_unstable_and_one_that_is_lost_does_not():
    text = f"{LM}'s damping does not give stable training: share of runs lost or at chance"
    flat = rows(FLAT, [30.0] * 6)
    assert judged(flat, rows(LM, [20.0] * 6))[text].verdict == "refuted"
    assert judged(flat, rows(LM, [1.0] * 6, "at chance"))[text].verdict == "holds in direction"  # 0.54 to 1
    assert judged(flat, rows(LM, [1.0] * 5, "at chance"))[text].verdict == "not decidable"  # 0.48 to 1
    assert judged(flat, rows(LM, [20.0] * 6))[text].ours is False


def test_accuracies_are_compared_at_equal_epochs_and_at_equal_seconds():
    slow = rows(ADDED, [34.0, 35.0, 36.1], seconds=20.0)
    found = judged(rows(FLAT, [30.0, 31.0, 32.0]), slow)
    epochs, seconds = (
        found[f"{ADDED} minus flat at equal {unit}: points of test accuracy"] for unit in ("epochs", "seconds")
    )
    assert (epochs.verdict, epochs.ours) == ("holds", True)
    assert (seconds.verdict, seconds.ours) == ("refuted", True)  # after 10 of its 20 seconds it is half as far
    assert float(seconds.measured.value) == pytest.approx((17 - 30 + 17.5 - 31 + 18.05 - 32) / 3)


def test_a_lost_run_counts_as_a_guess_and_a_damping_at_its_bound_is_told():
    lost = rows(LM_SIGN, [25.0, 25.0, 25.0], "lost", seconds=2.0, at_bound=0.5, median_ratio=0.9)
    found = judged(rows(FLAT, [30.0, 31.0, 32.0]), lost)
    apart = found[f"{LM_SIGN} minus flat at equal epochs: points of test accuracy"]
    assert float(apart.measured.value) == pytest.approx(1.0 - 31.0)
    in_time = found[f"{LM_SIGN} minus flat at equal seconds: points of test accuracy"]
    assert float(in_time.measured.value) == pytest.approx(1.0 - 31.0)  # at the end of the run that has one
    assert found[
        f"the damping of {LM_SIGN} stays within its bounds: largest share of refreshes at a bound"
    ].verdict == ("refuted")


def test_79_batches_suffice_where_their_error_is_below_a_tenth():
    noise = {"all": 0.1, "batches_in_all": 156, "size": 128, "sizes": [8, 79], "probes": 0.3, "own": 1.0}
    flat = rows(FLAT, [30.0, 31.0, 32.0])
    for row, shift in zip(flat, (0.0, 0.001, 0.002), strict=True):
        row["noise"] = {**noise, "batches": [0.5 + shift, 0.05 + shift], "both": [0.6, 0.3 + shift]}
    found = judged(flat)
    verdicts = [claim.verdict for text, claim in found.items() if "batches" in text]
    assert verdicts == ["holds", "refuted", "refuted", "refuted"]  # 79, with the probe's error, 8, and 4 with their own
