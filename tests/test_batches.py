"""Data is walked again and again, so it must be the same each time; what is not is refused with the remedy."""

import collections
import dataclasses
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ritz
from ritz.batches import Batches, isolated_rng, map_tensors, num_samples, seed_torch, stack_batches, tensors_of
from ritz.batches.batch import same_sums

X, Y = torch.arange(44.0).reshape(11, 4), torch.arange(11)
MSE = torch.nn.MSELoss()


def walk(data, batch_size=None, dtype=None, cache=None):
    return Batches(data, batch_size=batch_size, device=torch.device("cpu"), dtype=dtype, cache=cache)


def rows(batches):
    return torch.cat([batch.data[0] for batch in batches])


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    y: torch.Tensor
    tag: str = "none"
    size: int = dataclasses.field(init=False, default=0)


class Encoding(collections.UserDict):
    """As a tokenizer's BatchEncoding: a mapping that is no dict, and gives its entries as attributes."""

    def __getattr__(self, name):
        return self.data[name]


# ------------------------------------------------------------------------------------- kinds of data


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(TensorDataset(X, Y), batch_size=4),
        [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
        ((X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])),
    ],
    ids=["loader", "list", "tuple of batches"],
)
def test_loaders_and_lists_give_their_own_batches_ragged_ones_included(data):
    batches = walk(data)
    assert [(b.index, b.start, b.size) for b in batches] == [(0, 0, 4), (1, 4, 4), (2, 8, 3)]
    assert batches.num_samples == 11
    assert batches.ordered
    assert torch.equal(rows(batches), X)


@given(size=st.integers(1, 15))
def test_tensors_are_cut_to_the_batch_size(size):
    batches = walk((X, Y), batch_size=size)
    assert [b.size for b in batches] == [len(part) for part in X.split(size)]
    assert torch.equal(torch.cat([b.data[1] for b in batches]), Y)


def test_tensors_on_the_same_device_are_not_copied():
    (batch,) = walk((X, Y))
    assert batch.data[0].data_ptr() == X.data_ptr()


def test_floating_point_data_is_cast_and_labels_are_not():
    (batch,) = walk((X, Y), dtype=torch.float32)
    assert [x.dtype for x in batch.data] == [torch.float32, torch.int64]


@pytest.mark.parametrize(
    "tree",
    [
        (X, Y),
        [X, {"y": Y, "note": "text"}],
        {"x": X, "y": Y, "n": 3},
        collections.defaultdict(list, x=X, y=Y),
        Encoding(x=X, y=Y),
        Pair(X, Y),
        Record(X, Y, "a"),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_batch_keeps_its_type_and_is_not_written_to(tree):
    double = map_tensors(tree, lambda x: x * 2)
    assert type(double) is type(tree)
    assert [torch.equal(a, 2 * b) for a, b in zip(tensors_of(double), [X, Y], strict=True)] == [True, True]
    assert all(a is b for a, b in zip(tensors_of(tree), [X, Y], strict=True))
    joined = stack_batches([tree, double])
    assert torch.equal(tensors_of(joined)[0], torch.cat([X, 2 * X]))
    assert num_samples(joined) == 22
    parts = [piece for batch in walk([tree]) for piece in batch.pieces(4)]
    assert [(p.start, p.size) for p in parts] == [(0, 4), (4, 4), (8, 3)]
    assert torch.equal(torch.cat([tensors_of(p.data)[0] for p in parts]), X)


@pytest.mark.parametrize("make", [dict, Encoding, Pair, Record])
def test_a_risk_reads_any_batch_by_forward_and_target(make):
    model = torch.nn.Linear(4, 1)
    y = X.sum(1, keepdim=True)
    data = [make(x=X[a:b], y=y[a:b]) for a, b in ((0, 5), (5, 11))]
    take = (lambda b, k: b[k]) if make in (dict, Encoding) else getattr
    risk = ritz.Risk(model, MSE, data, forward=lambda m, b: m(take(b, "x")), target=lambda b: take(b, "y"))
    assert risk.loss() == pytest.approx(MSE(model(X), y).item(), rel=1e-12)


def test_tensors_that_hold_no_samples_are_left_whole_when_a_batch_is_cut():
    mask = torch.ones(3, 3)
    (batch,) = walk([(X, mask, torch.tensor(2.0), Y)])
    for piece in batch.pieces(5):
        assert torch.equal(piece.data[1], mask)
        assert piece.data[2] == 2.0


# -------------------------------------------------------------------------------- the same on every walk


class Augmented(Dataset):
    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return X[i] + self.noise(), Y[i]


GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize(
    "noise",
    [
        lambda: torch.rand(()),
        lambda: np.random.rand(),  # noqa: NPY002
        lambda: random.random(),
        lambda: GENERATOR.random(),
    ],
    ids=["torch", "numpy", "python", "its own"],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_that_augments_is_refused_with_the_remedy(noise, shuffle):
    loader = DataLoader(Augmented(noise), batch_size=4, shuffle=shuffle)
    with pytest.raises(ValueError, match=r"different samples \(augmentation.*data=list\(loader\)"):
        walk(loader).prepare()
    assert walk(list(loader)).num_samples == 8


def test_augmentation_that_spares_the_first_batch_is_found():
    class Late(Augmented):
        def __getitem__(self, i):
            return (X[i] if i < 4 else X[i] + torch.rand(())), Y[i]

    with pytest.raises(ValueError, match="different samples"):
        walk(DataLoader(Late(None), batch_size=4)).prepare()


def test_a_loader_that_shuffles_is_accepted_and_known_to_have_no_order():
    batches = walk(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True))
    assert batches.ordered is None  # not walked yet
    assert sorted(torch.cat([b.data[1] for b in batches]).tolist()) == list(range(11))
    assert batches.ordered is False
    assert not torch.equal(rows(batches), X)


@pytest.mark.parametrize("cache", [True, False])
def test_a_loader_that_shuffles_gives_the_loss_of_the_data(cache):
    model, y = torch.nn.Linear(4, 1), X.sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(X, y), batch_size=4, shuffle=True)
    risk = ritz.Risk(model, MSE, loader, plan=ritz.Plan(cache=cache))
    truth = MSE(model(X), y).item()
    for _ in range(2):
        assert risk.loss() == pytest.approx(truth, rel=1e-12)


def test_a_loader_that_shuffles_has_one_order_wherever_the_generators_stand():
    """So that a run that is gone on with in another process meets the same batches."""
    batches = walk(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True), cache=False)
    first = rows(batches)
    torch.rand(7)
    assert not batches.cached
    assert torch.equal(rows(batches), first)


def test_dropping_the_last_batch_of_a_shuffled_loader_is_refused():
    with pytest.raises(ValueError, match="drop_last with shuffling"):
        walk(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, drop_last=True)).prepare()


def test_checksums_are_compared_up_to_the_order_of_their_sums():
    sums = torch.tensor([1.0, 1e-17, float("nan"), float("inf")])
    assert same_sums(sums + torch.tensor([0.0, 2e-17, 0.0, 0.0]), sums)  # a sum that cancels is all round-off
    assert not same_sums(sums + torch.tensor([1e-8, 0.0, 0.0, 0.0]), sums)
    assert not same_sums(sums[:3], sums)


def test_a_long_loader_is_compared_by_its_first_samples():
    class Counted(Dataset):
        reads = 0

        def __len__(self):
            return 2000

        def __getitem__(self, i):
            self.reads += 1
            return torch.tensor([float(i)]), 0

    data = Counted()
    assert walk(DataLoader(data, batch_size=100)).num_samples == 2000
    assert data.reads == 2000 + 600  # 512, to the end of a batch


def test_data_that_is_gone_after_one_walk_is_refused():
    class Once:
        def __init__(self):
            self.left = iter([(X, Y)])

        def __iter__(self):
            return self.left

    with pytest.raises(ValueError, match="different samples"):
        walk(Once()).prepare()


def test_nan_in_the_data_does_not_look_like_augmentation():
    bad = X.clone()
    bad[3, 1] = float("nan")
    assert walk(DataLoader(TensorDataset(bad, Y), batch_size=4)).ordered is None
    assert walk(DataLoader(TensorDataset(bad, Y), batch_size=4, shuffle=True)).num_samples == 11


def generators():
    return torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


@pytest.mark.parametrize("cache", [True, False])
def test_a_walk_leaves_the_generators_alone_at_every_step(cache):
    class Drawing(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
            return X[i], Y[i]

    before = generators()
    for _ in walk(DataLoader(Drawing(), batch_size=2, shuffle=True), cache=cache):
        now = generators()
        assert torch.equal(now[0], before[0])
        assert now[1:] == before[1:]


def test_a_walk_leaves_the_own_generator_of_a_loader_alone():
    own = torch.Generator().manual_seed(3)
    state = own.get_state()
    batches = walk(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, generator=own), cache=False)
    assert len(rows(batches)) == 11
    assert batches.ordered is False
    assert torch.equal(own.get_state(), state)
    next(iter(batches))  # a walk that is left half-way
    assert torch.equal(own.get_state(), state)


def test_isolated_generators_are_seeded_inside_and_put_back_after_a_failure():
    before = generators()
    drawn = []

    def fail():
        with isolated_rng(5):
            drawn.append((float(torch.rand(())), np.random.rand(), random.random()))  # noqa: NPY002
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
    assert drawn[0] == drawn[1]
    now = generators()
    assert torch.equal(now[0], before[0])
    assert now[1:] == before[1:]


@pytest.mark.gpu
def test_seeding_does_not_reach_other_devices():
    before = torch.cuda.get_rng_state()
    with isolated_rng(1):
        seed_torch(2)
    assert torch.equal(torch.cuda.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------- bad data


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (None, ValueError, "data is missing"),
        (X, ValueError, r"a single tensor; give a tuple \(X, y\)"),
        ((X, Y[:5]), ValueError, r"must have one length, got shapes \(11, 4\), \(5,\)"),
        ((X[:0], Y[:0]), ValueError, "the data is empty: its tensors have length 0"),
        ([], ValueError, "the data is empty: there is no batch"),
        ([(X[:0], Y[:0])], ValueError, "the data is empty"),
        (((X, Y) for _ in range(2)), ValueError, r"only once .*pass list\(data\)"),
        (iter([(X, Y)]), ValueError, "only once"),
        (TensorDataset(X, Y), ValueError, "a Dataset.*wrap it in a DataLoader"),
        (5, TypeError, "got int"),
        ((X.numpy(), Y.numpy()), TypeError, r"NumPy arrays; give tensors"),
        ({"x": X, "y": Y}, TypeError, r"data is one dict; give a list of batches: \[data\]"),
        ([("text", 3)], ValueError, r"no tensor in a batch.*a tuple of str, int\..*torch\.as_tensor"),
    ],
)
def test_bad_data_is_refused_and_says_what_is_wanted(data, error, message):
    with pytest.raises(error, match=message):
        walk(data).prepare()


def test_a_batch_size_is_for_tensors_and_positive():
    with pytest.raises(ValueError, match="batch_size is for data given as tensors"):
        walk([(X, Y)], batch_size=4)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        walk((X, Y), batch_size=0)


def test_an_iterable_of_batches_is_walked_as_it_comes():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(X[:6], Y[:6]), (X[:0], Y[:0]), (X[6:], Y[6:])])

    assert [(b.start, b.size) for b in walk(Stream())] == [(0, 6), (6, 5)]


# ---------------------------------------------------------------------------------------------------- cache


def test_batches_are_kept_when_they_fit_and_streamed_when_they_do_not(monkeypatch):
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    size = X.numel() * 8 + Y.numel() * 8
    monkeypatch.setattr("ritz.batches.walk._room", lambda device: size)
    kept = walk(loader)
    assert kept.cached
    assert all(a is b for a, b in zip(kept, kept, strict=True))
    monkeypatch.setattr("ritz.batches.walk._room", lambda device: size - 1)
    streamed = walk(loader)
    assert not streamed.cached
    assert torch.equal(rows(streamed), X)
    assert walk(loader, cache=True).cached
    assert not walk(loader, cache=False).cached


def test_views_of_the_users_tensors_take_no_room(monkeypatch):
    monkeypatch.setattr("ritz.batches.walk._room", lambda device: 0)
    assert walk((X, Y)).cached
    assert walk((X, Y), dtype=X.dtype).cached
    assert not walk((X, Y), dtype=torch.float32).cached


# --------------------------------------------------------------------------------------------------- sample


@given(num=st.integers(1, 5), size=st.integers(1, 2), seed=st.integers(0, 50))
def test_sampled_batches_are_disjoint_and_belong_to_the_seed(num, size, seed):
    batches = walk((X, Y), batch_size=3)
    drawn = batches.sample(num, size, seed)
    assert [(b.index, b.size) for b in drawn] == [(i, size) for i in range(num)]
    places = torch.cat([b.data[1] for b in drawn])
    assert len(set(places.tolist())) == num * size
    assert torch.equal(torch.cat([b.data[0] for b in drawn]), X[places])
    again = walk((X, Y), batch_size=5).sample(num, size, seed)  # however the data is cut
    assert torch.equal(torch.cat([b.data[1] for b in again]), places)


def test_another_seed_samples_others_and_all_are_equally_likely():
    seen = torch.zeros(11)
    for seed in range(300):
        seen[walk((X, Y)).sample(1, 3, seed)[0].data[1]] += 1
    assert float(((seen - 300 * 3 / 11) ** 2 / (300 * 3 / 11)).sum()) < 30  # chi-square, about 10 degrees


def test_batches_that_do_not_stack_are_sampled_whole():
    ragged = [(torch.ones(2, k), torch.full((2,), k)) for k in (3, 4, 5, 6)] + [(torch.ones(1, 2), torch.ones(1))]
    batches = walk(ragged)
    assert batches.pool() is None
    drawn = batches.sample(3, 2, seed=0)
    assert len({int(b.data[1][0]) for b in drawn}) == 3
    assert {tuple(int(b.data[1][0]) for b in batches.sample(1, 2, seed)) for seed in range(20)} == {
        (3,),
        (4,),
        (5,),
        (6,),
    }
    with pytest.raises(ValueError, match=r"cannot be re-batched, and has 4 batches of 2.*that of the loader"):
        walk([*ragged, *ragged[-1:] * 3]).sample(5, 2, seed=0)


def test_a_stream_is_sampled_without_being_kept():
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    batches = walk(loader, cache=False)
    drawn = batches.sample(3, 2, seed=1)
    assert len(set(torch.cat([b.data[1] for b in drawn]).tolist())) == 6
    assert not batches.cached


def test_more_samples_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"4 \* 3 is more than the 11 samples"):
        walk((X, Y)).sample(4, 3, seed=0)
    with pytest.raises(ValueError, match="at least 1, got 0 and 3"):
        walk((X, Y)).sample(0, 3, seed=0)


class Lengths(nn.Module):
    """The mean of a layer over the first steps of a sequence; of how many is told beside the tensors, or in one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, lengths):
        return torch.stack([self.layer(own[: int(size)]).mean(0) for own, size in zip(x, lengths, strict=True)])


@pytest.mark.parametrize("kind", [list, tuple, np.array])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_list_with_an_entry_for_each_sample_goes_with_the_samples(kind, mode):
    """Where batches are cut, and where they are drawn anew from all samples."""
    X, y, sizes = torch.randn(8, 3, 2), torch.randn(8, 1), [3, 1, 2, 3, 2, 1, 1, 3]
    beside, inside = (
        ritz.Risk(
            Lengths(), nn.MSELoss(), [(X[a : a + 4], of(sizes[a : a + 4]), y[a : a + 4]) for a in (0, 4)], mode=mode
        )
        for of in (kind, torch.tensor)
    )
    beside = beside.at(inside.params())
    assert beside.loss() == inside.loss()
    for size in (4, 2):
        found, wanted = (ritz.curvature_noise(risk, 2, size, seed=1).value for risk in (beside, inside))
        assert found == pytest.approx(wanted)


def test_batches_that_differ_in_more_than_their_samples_are_not_joined():
    X, y = torch.randn(8, 3), torch.randn(8, 1)
    data = [(X[:4], 1.0, y[:4]), (X[4:], 2.0, y[4:])]
    risk = ritz.Risk(nn.Linear(3, 1), nn.MSELoss(), data, forward=lambda model, batch: model(batch[0]) * batch[1])
    assert risk.batches.pool() is None
    assert [len(batch.data[0]) for batch in risk.batches.sample(2, 4, seed=0)] == [4, 4]  # the user's own
