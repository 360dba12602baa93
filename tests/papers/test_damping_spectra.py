"""Figure 2 of seed 004: what is trained, and what the spectra after SGD and Adam say."""

import pytest

from ritz.papers import damping_spectra as study
from ritz.papers.experiment import Setting


def rows(*arms, seeds=3, epochs=300):
    """Networks (arm, lambda_1, accuracy), a little apart from seed to seed; two Ritz values stand alone."""
    return [
        {
            "arm": arm, "seed": seed, "title": "VGG-16", "published": True, "epochs": epochs, "parameters": 15_291_300,
            "images": 45_000, "lanczos_steps": 100, "probes": 1, "precision": "float32", "train_accuracy": 99.0,
            "val_accuracy": accuracy + seed / 10, "test_accuracy": accuracy - seed / 10,
            "eval": {
                "lambda_max": [top + seed] * 3, "frobenius_norm": [2 * top + seed] * 3,
                "nodes": [0.1, 0.2, top / 2, top],
            },
        }
        for arm, top, accuracy in arms
        for seed in range(seeds)
    ]  # fmt: skip


def verdicts(found):
    return {claim.text: claim.verdict for claim in found}


@pytest.mark.parametrize(("name", "rate", "eps"), [("SGD", 0.01, None), ("Adam", 4e-4, 1e-8), ("Adam-D", 1e-3, 5e-3)])
def test_the_networks_are_trained_as_those_of_table_2(name, rate, eps):
    made = study.recipe(study.ARMS[name], 0, Setting("paper"))
    assert (made.epochs, made.batch_size, made.training_mode) == (300, 128, "always")
    assert (made.optimizer.keywords["lr"], made.optimizer.keywords.get("eps")) == (rate, eps)
    assert made.model is study.NETWORKS["vgg16"].make


def test_an_adaptive_method_is_sharper_and_better_or_sharper_alone():
    found = verdicts(study.claims(rows(("SGD", 10.0, 65.0), ("Adam", 50.0, 62.0), ("Adam-D", 30.0, 66.0))))
    sets = ("accuracy on the last 5,000", "accuracy on the test set")
    for name, better in (("Adam", "refuted"), ("Adam-D", "holds")):
        assert found[f"lambda_1, {name} over SGD"] == found[f"|H|_F, {name} over SGD"] == "holds"
        assert [found[f"{held}, {name} minus SGD"] for held in sets] == [better, better]
    assert len(found) == 9


def test_a_flatter_adam_refutes_it():
    found = verdicts(study.claims(rows(("SGD", 50.0, 65.0), ("Adam", 10.0, 66.0))))
    assert found["lambda_1, Adam over SGD"] == "refuted"
    assert not any("Adam-D" in text for text in found)  # nothing is said of what was not run


@pytest.mark.parametrize(("top", "epochs", "verdict"), [(10.0, 300, "holds"), (0.3, 300, "refuted"), (10.0, 15, None)])
def test_outliers_stand_apart_from_what_follows_and_are_those_of_the_whole_training(top, epochs, verdict):
    (claim,) = study.claims(rows(("SGD", top, 65.0), epochs=epochs))
    assert claim.text == "outliers after SGD"
    assert claim.verdict == (verdict or "not decidable")
    assert float(claim.measured.value) == (2.0 if top == 10.0 else 0.0)


def test_a_network_that_diverged_is_counted_and_says_nothing_else():
    lost = [{"arm": "SGD", "seed": 0, "title": "VGG-16", "published": True, "epochs": 300}]
    (claim,) = study.claims(lost)
    assert claim.verdict == "not decidable"
    assert "1 of 1 runs diverged" in claim.evidence
