import json

import pytest
import torch
import torch.nn.functional as F

import ritz
from ritz.papers import mnist_mlp, softmax
from ritz.papers.experiment import Setting
from ritz.papers.mnist_mlp import WEIGHT_DECAYS
from ritz.papers.pieces import Pieces


def noise(num: int, width: int = 784, seed: int = 0) -> mnist_mlp.Data:
    """Images that are not images."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(num, width, generator=g) * 2 - 1, torch.randint(10, (num,), generator=g)


def rows(
    tops: tuple[float, ...], norms: tuple[float, ...] = (30.0, 17.0, 10.0), spread: float = 0.01, epochs: int = 1000,
    split: int = 45_000,
) -> list[dict]:  # fmt: skip
    """Rows of two seeds whose numbers lie about the given ones."""
    return [
        {"split": split, "images": split, "epochs": epochs, "seed": seed, "weight_decay": decay,
         "weight_norm": [norm, 0.0], "lambda_max": [top * (1 + spread * seed), 0.0],
         "trace_per_param": [top / 1000, 0.0], "moment2_per_param": [top / 100, 0.0],
         "val_accuracy": [93.5 + place / 2 + 0.01 * seed, 0.3]}
        for seed in (0, 1)
        for place, (decay, top, norm) in enumerate(zip(WEIGHT_DECAYS, tops, norms, strict=True))
    ]  # fmt: skip


def verdicts(found: list[ritz.papers.base.Claim], *words: str) -> list[str]:
    return [claim.verdict for claim in found if all(word in claim.text for word in words)]


# ---------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("make", [softmax.make_network, mnist_mlp.make_network])
def test_gradients_of_stacks_are_those_of_autograd(make):
    X, y = (part.reshape(2, 6, *part.shape[1:]) for part in noise(12))
    weights = mnist_mlp.starts(make, X, seeds=(3, 5), copies=2)
    for w in weights.values():
        w[:, 1] *= 1.5  # else the copies of a seed would be equal
    found = mnist_mlp.gradients(weights, X, y)
    model = make(0, X.dtype)
    for seed in range(2):
        for copy in range(2):
            params = {name: w[seed, copy].clone().requires_grad_() for name, w in weights.items()}
            F.cross_entropy(torch.func.functional_call(model, params, X[seed]), y[seed]).backward()
            for name, p in params.items():
                torch.testing.assert_close(found[name][seed, copy], p.grad, rtol=1e-11, atol=1e-14)


def test_softmax_regression_is_trained_as_torch_trains_it():
    data = noise(30)
    trained = mnist_mlp.train_many(data, [2], [1e-2], epochs=4, batch_size=8, make=softmax.make_network)
    model = softmax.make_network(2, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-2)
    for epoch in range(4):
        optimizer.param_groups[0]["lr"] = mnist_mlp.learning_rate(epoch, 4)
        for at in mnist_mlp.batch_order(30, 2, epoch).split(8):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0][at]), data[1][at]).backward()
            optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(trained.params(2, 1e-2)[name], p.detach(), rtol=1e-11, atol=1e-13)


def test_images_of_the_wrong_width_are_refused():
    with pytest.raises(ValueError, match=r"expected images \(N, 784\)"):
        mnist_mlp.train_many(noise(4, width=49), [0], [0.0], epochs=1, make=softmax.make_network)


# ------------------------------------------------------------------------------------------- measurement


def test_stems_have_the_moments_of_the_random_vector():
    train = noise(20)
    trained = mnist_mlp.train_many(train, [4], [0.0], epochs=1, make=softmax.make_network)
    found = softmax.stems(trained.params(4, 0.0), train, num_steps=6)
    values, weights = (torch.tensor(found[key]) for key in ("ritz_values", "ritz_weights"))
    risk = ritz.Risk(softmax.make_network(0, torch.float64), torch.nn.CrossEntropyLoss(), train)
    H = ritz.Hessian(risk.at(trained.params(4, 0.0)))
    v = H.probes([0], 0, "normal")[0]
    v = v / v.norm()
    assert float((weights * values).sum()) == pytest.approx(float(v @ (H @ v)), rel=1e-3)
    assert float((weights * values**2).sum()) == pytest.approx(float((H @ v).square().sum()), rel=1e-3)


def test_only_the_first_seed_has_stems():
    train = noise(8)
    trained = mnist_mlp.train_many(train, [4, 5], [0.0], epochs=1, make=softmax.make_network)
    rows = [{"seed": seed, "weight_decay": 0.0} for seed in (4, 5)]
    first, second = softmax.with_stems(rows, trained, train, 6, softmax.make_network, Pieces())
    assert first == rows[0] | softmax.stems(trained.params(4, 0.0), train, num_steps=6)
    assert second == rows[1]


# ------------------------------------------------------------------------------------------------ claims


def test_numbers_like_the_printed_ones_hold():
    found = softmax.claims(rows((12.25, 14.16, 15.83), spread=1e-3, split=55_000))
    assert verdicts(found, "lambda_1", "prediction interval") == ["holds"] * 3
    assert verdicts(found, "lambda_1", "to 2%") == ["holds"] * 3
    assert verdicts(found, "lambda_1", "ratio") == ["holds"] * 2


def test_evidence_says_that_the_paper_has_two_numbers_of_epochs():
    printed = [claim for claim in softmax.claims(rows((12.0, 14.0, 16.0))) if " at weight decay " in claim.text]
    assert len(printed) == 9
    assert all("1,000 epochs in section 4 and figure 1, and 50 in appendix A.2" in claim.evidence for claim in printed)


def test_other_numbers_are_refuted_and_their_order_may_still_hold():
    found = softmax.claims(rows((20.0, 20.5, 21.0), spread=1e-3, split=55_000))
    assert verdicts(found, "lambda_1", "prediction interval") == ["refuted"] * 3
    assert verdicts(found, "lambda_1", "to 2%") == ["refuted"] * 3
    assert verdicts(found, "lambda_1", "ratio") == ["holds in direction"] * 2


@pytest.mark.parametrize("tops", [(12.26, 14.17, 15.84), (12.5, 13.8, 15.6)])
def test_lambda_1_of_images_that_the_paper_does_not_name_is_decided_by_ratios_alone(tops):
    found = softmax.claims(rows(tops, spread=1e-3))
    assert verdicts(found, "lambda_1", "prediction interval") == ["not decidable"] * 3
    assert next(c for c in found if "prediction" in c.text).short_of.startswith("which 45,000 of the 60,000 images")
    assert verdicts(found, "lambda_1", "ratio") == ["holds"] * 2
    assert "not decidable" not in verdicts(found, "accuracy", "prediction interval")  # has the noise of other images


def test_a_printed_number_is_not_refuted_by_a_part_of_the_epochs():
    found = softmax.claims(rows((20.0, 20.5, 21.0), spread=1e-3, epochs=50))
    assert verdicts(found, "lambda_1", "to 2%") == ["not decidable"] * 3
    assert next(claim for claim in found if "to 2%" in claim.text).short_of == "50 of 1000 epochs"


def test_an_order_that_is_the_other_way_round_is_refuted():
    right, wrong = softmax.claims(rows((12.0, 14.0, 16.0))), softmax.claims(rows((16.0, 15.0, 14.0), (9.0, 10.0, 11.0)))
    for name in ("lambda_1 rises", "Tr H / P rises", "Tr H^2 / P rises", "|w| falls"):
        assert verdicts(right, name) == ["holds"] * 2
        assert verdicts(wrong, name) == ["refuted"] * 2


def test_the_other_split_is_a_reading_of_ours():
    own = rows((12.25, 14.16, 15.83))
    found = softmax.claims(own + [row | {"split": 55_000, "images": 55_000} for row in own])
    assert all(claim.ours for claim in found if "55,000" in claim.text)
    assert all(claim.ours == ("to 2%" in claim.text) for claim in found if "45,000" in claim.text)
    assert not verdicts(found, "Tr H", "55,000")


def test_the_epochs_of_the_appendix_are_a_reading_of_ours_and_no_part_of_a_training():
    own = rows((12.25, 14.16, 15.83), spread=1e-3)
    few = [row | {"reading": softmax.APPENDIX} for row in rows((14.4, 14.7, 15.84), spread=1e-3, epochs=50)]
    found = softmax.claims(own + few)
    assert found[: len(softmax.claims(own))] == softmax.claims(own)  # nothing else is judged by these rows
    beside = found[len(softmax.claims(own)) :]
    assert all(claim.ours and "50 epochs" in claim.text for claim in beside)
    assert verdicts(beside, "lambda_1", "to 2%") == ["refuted", "refuted", "holds"]
    assert {claim.where for claim in beside if "to 2%" in claim.text} == {"appendix A.2"}


@pytest.mark.parametrize(("least", "verdict"), [(1e-6, "holds"), (-1e-6, "holds"), (-0.1, "refuted")])
def test_a_negative_ritz_value_beyond_round_off_is_no_convex_loss(least, verdict):
    own = rows((12.0, 14.0, 16.0))
    assert verdicts(softmax.claims(own), "positive semi-definite") == []  # no spectrum is kept
    own[0] |= {"ritz_values": [least, 12.0]}
    assert verdicts(softmax.claims(own), "positive semi-definite") == [verdict]


def test_other_held_out_images_widen_the_interval_of_an_accuracy():
    claim = next(c for c in softmax.claims(rows((12.0, 14.0, 16.0))) if "accuracy" in c.text)
    assert claim.tolerance > 1.95 * 0.3  # the error of 5,000 images
    assert not [c for c in softmax.claims(rows((12.0, 14.0, 16.0))) if "accuracy" in c.text and "to 2%" in c.text]


def test_the_smoke_run_goes_all_the_way(monkeypatch):
    parts = [tuple(part.float() if part.is_floating_point() else part for part in noise(320, seed=s)) for s in range(3)]
    monkeypatch.setattr(mnist_mlp, "load_mnist", lambda root, device: tuple(parts))
    said = []
    found, claims = softmax.run(Setting("smoke"), lambda *what: said.append(what))
    assert {row["split"] for row in found} == {45_000, 55_000}
    assert len(found) == 3 * 6
    assert len(claims) == 20 + 2 * 13
    assert {claim.paper for claim in claims} == {"seed 000"}
    assert said
    assert len(json.dumps(found)) < 300_000
    assert len(softmax.figure(found).get_axes()) == 4
