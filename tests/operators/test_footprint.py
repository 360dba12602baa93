"""A CPU takes as many samples and vectors at once as it holds well: what a product needs is counted, not tried."""

import cases
import pytest
import torch
from torch import nn

import ritz
from ritz.estimators.precision import compare_precisions
from ritz.memory import NoRoomError
from ritz.operators import footprint
from ritz.operators.footprint import LiveBytes

MATRICES = {"Hessian": ritz.Hessian, "GGN": ritz.GGN}


def taken(num_vectors: int) -> float:
    """What is counted for a product, in forward passes."""
    return footprint.OWN + footprint.EACH * num_vectors


def test_the_cut_goes_by_the_largest_activation_and_the_number_of_vectors():
    model = nn.Sequential(nn.Linear(2, 1000), nn.ReLU(), nn.Linear(1000, 3))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randn(4096, 2), torch.zeros(4096).long()), batch_size=4096)
    (batch,) = risk.batches
    with risk.session():
        found = [footprint.fitting_piece(risk, risk.params(), batch, k) for k in (1, 8, 64)]
    assert found == [(1 << 24) // (8000 * k) for k in (1, 8, 64)]


def test_pieces_are_not_so_small_that_reading_the_weights_is_most_of_the_work(monkeypatch):
    """90,902 weights of 8 bytes, and 602 numbers for each sample: results of 302 samples are twice the weights."""
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randn(512, 300), torch.zeros(512).long()), batch_size=512)
    (batch,) = risk.batches
    risk.check()
    monkeypatch.setattr(footprint, "LARGEST", 1)

    def piece(k: int) -> int:
        with risk.session():
            return footprint.fitting_piece(risk, risk.params(), batch, k)

    assert piece(1) == piece(8) == 302
    monkeypatch.setattr(footprint, "LARGEST", 3 * 302 * 300 * 8)  # three vectors, for a piece of that size
    with risk.session():
        assert footprint.fitting_chunk(risk, risk.params(), batch, 8) == 3
    monkeypatch.setattr(footprint, "LARGEST", 1)
    monkeypatch.setattr(footprint, "room", lambda: 100 * 602 * 8 * taken(8))  # for 100 of them with eight vectors
    assert piece(8) == 100
    assert piece(1) == 302


@pytest.fixture
def chunks(monkeypatch):
    """The vectors and samples of each product, as they come."""
    seen: list[tuple[int, int]] = []
    for kind in MATRICES.values():
        plain = kind._product

        def noted(self, params, batch, rows, plain=plain):
            seen.append((len(rows), batch.size))
            return plain(self, params, batch, rows)

        monkeypatch.setattr(kind, "_product", noted)
    return seen


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_batch_that_stays_whole_is_multiplied_with_as_many_vectors_as_there_is_room_for(matrix, chunks, monkeypatch):
    """Batches of 5, 4 and 2 by their own statistics: the room is for three vectors of the largest."""
    risk = cases.problem("residual_train").risk(mode="train")
    A = MATRICES[matrix](risk)
    V = A.probes(range(7), seed=0).T
    with risk.session():
        sizes = {b.size: b.size * footprint.footprint(risk, risk.params(), b).total for b in risk.batches}
    room = taken(3) * max(sizes.values())
    monkeypatch.setattr(footprint, "room", lambda: room)
    assert cases.relative(A @ V, cases.truth("residual_train", matrix) @ V) < 1e-11
    largest = max(sizes)
    assert {k for k, size in chunks if size == largest} == {3, 1}
    assert all(k == 1 or taken(k) * sizes[size] <= room for k, size in chunks)


def test_where_a_batch_stays_whole_vectors_are_as_many_as_have_small_activations(chunks, monkeypatch):
    risk = cases.problem("residual_train").risk(mode="train")
    with risk.session():
        seen = {b.size: footprint.footprint(risk, risk.params(), b).largest for b in risk.batches}
    monkeypatch.setattr(footprint, "LARGEST", 2 * max(size * largest for size, largest in seen.items()))
    H = ritz.Hessian(risk)
    V = H.probes(range(7), seed=0).T
    assert cases.relative(H @ V, cases.truth("residual_train", "Hessian") @ V) < 1e-11
    assert {k for k, size in chunks if size == max(seen)} == {2, 1}
    chunks.clear()
    whole = ritz.GGN(cases.problem("conv").risk(plan=ritz.Plan(micro_batch=3)))  # by the plan of a user
    whole @ V[:1].expand(whole.dim, 7)
    assert {k for k, _ in chunks} == {7}


def test_of_a_batch_that_may_be_cut_one_sample_has_to_fit(chunks, monkeypatch):
    monkeypatch.setattr(footprint, "WORTH", 0)
    risk = cases.problem("conv").risk()
    batch = next(iter(risk.batches))
    with risk.session():
        total = footprint.footprint(risk, risk.params(), batch).total
        monkeypatch.setattr(footprint, "room", lambda: taken(2) * total)
        assert footprint.fitting_chunk(risk, risk.params(), batch, 8) == 2
        monkeypatch.setattr(footprint, "room", lambda: 1.0)
        assert footprint.fitting_chunk(risk, risk.params(), batch, 8) == 1  # and the system may still have it
    G = ritz.GGN(risk)
    V = G.probes(range(3), seed=0).T
    assert cases.relative(G @ V, cases.truth("conv", "GGN") @ V) < 1e-11
    assert {k for k, _ in chunks} == {1}


def test_an_opaque_loss_is_looked_at_as_a_whole():
    data = (torch.randn(6, 3), torch.randn(6, 1))
    risk = ritz.Risk(
        nn.Linear(3, 1), data=[data], batch_loss=lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), 6.0)
    )
    (batch,) = risk.batches
    with risk.session():
        seen = footprint.footprint(risk, risk.params(), batch)
    assert seen.largest >= 4
    assert seen.total >= 3 * 4  # outputs, differences, squares: a number for each sample


@pytest.mark.parametrize("route", ["forward", "reverse"])
def test_products_live_in_what_is_counted_for_them(route):
    """The rule of `fitting_chunk` on a network whose activations are far more than its weights."""
    torch.manual_seed(0)
    block = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *block, *block, nn.AvgPool2d(16), nn.Flatten())
    data = torch.randn(8, 1, 16, 16), torch.randint(4, (8,))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data, mode="train", plan=ritz.Plan(cache=False))
    H = ritz.Hessian(risk, route)
    (batch,) = risk.batches
    with risk.session():
        total = batch.size * footprint.footprint(risk, risk.params(), batch).total
    for k in (1, 2, 8):
        rows = H.probes(range(k), seed=0)
        with LiveBytes() as live:
            H.rows(rows)
        assert 0.3 * k * total < live.peak < taken(k) * total


def test_products_are_not_compared_with_float64_where_that_has_no_room(monkeypatch):
    """A batch by its own statistics stays whole, and in float64 takes twice the memory of float32."""
    risk = cases.problem("residual_train").risk(mode="train", dtype=torch.float32)
    assert compare_precisions(ritz.Hessian(risk)) is not None
    batch = next(iter(risk.batches))
    with risk.session():
        needed = 2 * footprint.product_bytes(risk, risk.params(), batch, 1)
    monkeypatch.setattr("ritz.estimators.precision.free_memory", lambda device: needed)
    assert compare_precisions(ritz.Hessian(risk)) is None


# ------------------------------------------------------------------------------------------- no room for one vector


def wide(**keywords) -> tuple[ritz.Risk, int, float]:
    """Batches of 32 samples that stay whole, what the forward pass keeps of one, and what a product takes at most."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))
    data = torch.randn(64, 4), torch.randint(3, (64,))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data, batch_size=32, mode="train", **keywords)
    risk.check()
    batch = next(iter(risk.batches))
    with risk.session():
        kept = footprint.kept_bytes(risk, risk.params(), batch)
        return risk, 32 * int(kept), footprint.product_bytes(risk, risk.params(), batch, 1)


def pretend(size: float, monkeypatch) -> None:
    """A host with so much memory, and no swap."""
    monkeypatch.setattr(footprint, "whole_memory", lambda device: size)
    monkeypatch.setattr(footprint, "whole_swap", lambda: 0.0)
    footprint.room.cache_clear()


@pytest.fixture
def _own_room():
    yield
    footprint.room.cache_clear()


@pytest.mark.usefixtures("_own_room")
@pytest.mark.parametrize("matrix", [*MATRICES.values(), ritz.EmpiricalFisher])
def test_a_batch_that_cannot_have_room_is_refused_before_a_product_is_tried(matrix, chunks, monkeypatch):
    risk, kept, _ = wide()
    A = matrix(risk)
    pretend(0.9 * kept, monkeypatch)
    told = "batch of 32 samples .* cannot be cut.* keeps .* per sample.* the host has .*; about 2 would fit"
    with pytest.raises(NoRoomError, match=told):
        A @ torch.ones(A.dim)
    assert not chunks
    pretend(0.9 * kept / 32, monkeypatch)
    with pytest.raises(NoRoomError, match=r"with swap; not even one sample would fit: .*, or use mode='eval'"):
        ritz.trace(A, "hutchinson", 2)


@pytest.mark.usefixtures("_own_room")
def test_batches_of_the_size_that_is_advised_go_through(monkeypatch):
    risk, kept, _ = wide()
    pretend(0.9 * kept, monkeypatch)
    H = ritz.Hessian(risk.on((torch.randn(6, 4), torch.randint(3, (6,))), batch_size=2))
    assert bool((H @ torch.ones(H.dim)).isfinite().all())


@pytest.mark.usefixtures("_own_room")
def test_what_may_have_room_is_tried_and_said_in_the_log(monkeypatch, caplog):
    risk, kept, most = wide()
    v = torch.ones(risk.dim)
    truth = ritz.Hessian(risk) @ v
    assert not caplog.records
    pretend(1.1 * kept, monkeypatch)
    with caplog.at_level("WARNING"):
        torch.testing.assert_close(ritz.Hessian(risk) @ v, truth)
    assert "a product of 32 samples may take" in caplog.text
    caplog.clear()
    pretend(1.1 * most, monkeypatch)
    torch.testing.assert_close(ritz.Hessian(risk) @ v, truth)
    assert not caplog.records


@pytest.mark.usefixtures("_own_room")
def test_a_loss_that_knows_whole_batches_alone_is_never_refused(monkeypatch):
    def batch_loss(model, batch):
        assert len(batch[0]) == 8, "eight samples, no more and no fewer"
        return model(batch[0]).square().sum(), 8

    risk = ritz.Risk(nn.Linear(3, 2), data=[(torch.randn(8, 3),)], batch_loss=batch_loss)
    pretend(1.0, monkeypatch)
    H = ritz.Hessian(risk)
    assert bool((H @ torch.ones(H.dim)).isfinite().all())


@pytest.mark.parametrize("route", ["forward", "reverse", "difference"])
def test_a_product_takes_more_than_what_its_forward_pass_keeps(route):
    """So that what is refused for it could not have been computed."""
    risk, kept, _ = wide(plan=ritz.Plan(cache=False))
    H = ritz.Hessian(risk, route)
    row = H.probes([0], seed=0)
    H.rows(row)
    with LiveBytes() as live:
        H.rows(row)
    assert live.peak > 1.2 * kept
