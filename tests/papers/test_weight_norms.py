import pytest
import torch

from ritz.papers import mnist_mlp, weight_norms
from ritz.papers.experiment import Setting


def noise(num: int, seed: int = 0) -> mnist_mlp.Data:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(num, 784, generator=g) * 2 - 1, torch.randint(10, (num,), generator=g)


def rows(errors: list[float], norms: list[float], fits: tuple[float, ...] = (0.0,) * 4) -> list[dict]:
    return [
        {"seed": seed, "weight_decay": decay, "test_error": error + seed / 100, "train_error": fit, "weight_norm": norm,
         "images": 12, "epochs": 2}
        for seed in (0, 1)
        for decay, error, norm, fit in zip((0.0, 1e-4, 5e-4, 1e-2), errors, norms, fits, strict=True)
    ]  # fmt: skip


def test_norms_and_errors_are_those_of_the_network():
    train, test = noise(12), noise(9, seed=1)
    trained = mnist_mlp.train_many(train, [3], [0.0, 1e-2], epochs=2, batch_size=4)
    row = weight_norms.measure(trained, train, test)[1]
    model = mnist_mlp.make_network(3, torch.float64)
    model.load_state_dict(trained.params(3, 1e-2))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert row["weight_norm"] == pytest.approx(float(flat.norm()), rel=1e-5)
    wrong = (model(test[0]).argmax(1) != test[1]).double().mean()
    assert row["test_error"] == pytest.approx(100 * float(wrong), rel=1e-5)


def test_an_error_that_turns_back_up_breaks_the_rank_correlation_and_the_gap_may_not():
    good = weight_norms.claims(rows([5.0, 4.0, 3.0, 2.0], [9.0, 8.0, 7.0, 6.0]))
    assert [claim.verdict for claim in good] == ["holds"] * 5
    turned = weight_norms.claims(rows([3.0, 2.9, 2.8, 9.0], [9.0, 8.0, 7.0, 1.0], fits=(1.0, 1.0, 1.5, 8.9)))
    assert [claim.verdict for claim in turned] == ["holds"] * 3 + ["refuted", "holds"]
    assert [claim.ours for claim in turned] == [False] * 3 + [True] * 2  # beyond 5e-4 the paper says nothing
    assert float(turned[3].measured.value) == pytest.approx(-0.2)  # 1 - 6 (1 + 1 + 1 + 9) / (4 (16 - 1))
    assert float(turned[4].measured.value) == pytest.approx(1)


def test_a_gap_and_a_norm_that_rise_are_refuted():
    norm, error, gap, *_ = weight_norms.claims(rows([5.0] * 4, [6.0, 7.0, 8.0, 9.0], fits=(2.0, 1.5, 1.0, 1.0)))
    assert (norm.verdict, error.verdict, gap.verdict) == ("refuted", "holds", "refuted")


def test_the_smoke_run_goes_all_the_way(monkeypatch):
    parts = tuple(part.float() if part.is_floating_point() else part for part in noise(40))
    monkeypatch.setattr(mnist_mlp, "load_mnist", lambda root, device: (parts, parts, parts))
    found, claims = weight_norms.run(Setting("smoke"), lambda *what: None)
    assert len(found) == 2 * len(weight_norms.DECAYS)
    assert {claim.paper for claim in claims} == {"seed 002"}
    assert len(weight_norms.figure(found).get_axes()) == 2
