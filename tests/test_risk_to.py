"""`Risk.to`: the same risk elsewhere or in another precision, and the user's model untouched."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ritz


def data(n: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def made(dtype: torch.dtype, **options) -> ritz.Risk:
    return ritz.Risk(network().to(dtype), nn.CrossEntropyLoss(), (data()[0].to(dtype), data()[1]), **options)


@pytest.mark.parametrize("options", [{}, {"batch_size": 7}, {"mode": "train"}, {"params": "0.*"}])
def test_the_numbers_are_those_of_a_risk_made_there(options):
    wanted, moved = made(torch.float64, **options), made(torch.float32, **options).to("cpu", torch.float64)
    assert (moved.dtype, moved.names) == (torch.float64, wanted.names)
    assert len(list(moved.batches)) == len(list(wanted.batches))
    # weights that were rounded to float32 before they are moved
    rounded = wanted.at({name: p.float().double() for name, p in wanted.state().items() if p.is_floating_point()})
    rounded = rounded.on([(x.float().double(), y) for x, y in (batch.data for batch in wanted.batches)])
    torch.testing.assert_close(moved.gradient(), rounded.gradient(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ritz.Hessian(moved).dense(), ritz.Hessian(rounded).dense(), rtol=1e-10, atol=1e-12)


def test_the_model_and_the_first_risk_stay_as_they_are():
    risk = made(torch.float32)
    ritz.Hessian(risk).dense()
    before = {name: t.clone() for name, t in risk.model.state_dict().items()}
    batches, routes = risk.batches, dict(risk.routes)
    moved = risk.to(dtype=torch.float64)
    assert moved.loss() == pytest.approx(risk.loss(), rel=1e-5)
    assert (risk.dtype, risk.batches is batches, risk.routes) == (torch.float32, True, routes)
    assert moved.routes == {}  # what is fastest there is seen there
    assert all(
        torch.equal(t, before[name]) and t.dtype == before[name].dtype for name, t in risk.model.state_dict().items()
    )
    assert moved.model is risk.model


def test_other_weights_and_restrictions_go_along():
    risk = made(torch.float32)
    there = risk.at({"3.bias": torch.full((3,), 2.0, dtype=torch.float32)}).restrict("3.*").to(dtype=torch.float64)
    assert there.names == ("3.weight", "3.bias")
    assert there.params()["3.bias"].tolist() == [2.0, 2.0, 2.0]
    assert there.params()["3.bias"].dtype == torch.float64


def test_a_loader_is_walked_anew():
    loader = DataLoader(TensorDataset(*data()), batch_size=6)
    risk = ritz.Risk(network(), nn.CrossEntropyLoss(), loader)
    assert risk.to(dtype=torch.float32).loss() == pytest.approx(risk.loss(), rel=1e-5)


def test_nothing_asked_for_is_a_risk_of_its_own_with_the_same_numbers():
    risk = made(torch.float64)
    assert risk.to() is not risk
    assert risk.to().loss() == risk.loss()


def test_what_is_not_there_is_refused():
    risk = made(torch.float64)
    with pytest.raises(ValueError, match=r"there is no device 'abacus' here .*; 'cpu' is always there"):
        risk.to("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"there is no device 'cuda' here"):
            risk.to(torch.device("cuda"))
    for dtype in (torch.int64, torch.complex64, "float64"):
        with pytest.raises(ValueError, match=r"dtype must be a floating-point type such as torch.float64, got"):
            risk.to(dtype=dtype)
