"""Results of weights and data are kept while those stay as they are, and no longer."""

import copy

import pytest
import torch

from ritz.held import SMALL, Held, Snapshot

EACH = 8 * 4  # bytes of one result


def begun(*weights):
    """Nothing held yet, at the beginning of a walk at these weights."""
    held = Held()
    held.refresh(weights)
    return held, list(weights)


def found(held, weights, data, room=10 * EACH, calls=None):
    def make():
        if calls is not None:
            calls.append(data)
        return (weights[0] * data[0],)

    return held.use("product", weights, data, make, lambda: room, lambda results: results)[0]


def test_a_result_is_computed_once_for_each_batch():
    (held, weights), calls = begun(torch.ones(1)), []
    batches = [[torch.full((4,), float(number))] for number in range(3)]
    for _ in range(3):
        for number, data in enumerate(batches):
            assert found(held, weights, data, calls=calls).tolist() == [number] * 4
    assert len(calls) == len(held) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda w, x: w[0].data.mul_(2),  # which torch does not count
        lambda w, x: w[0].mul_(2),
        lambda w, x: w.__setitem__(0, 2 * w[0]),
        lambda w, x: w.append(torch.ones(1)),
        lambda w, x: w[0].data.fill_(torch.nan),
    ],
    ids=["data", "in place", "another", "one more", "not a number"],
)
def test_other_weights_are_found_out_before_the_next_walk(change):
    (held, weights), data = begun(torch.ones(1)), [torch.ones(4)]
    calls = []
    for _ in range(2):
        held.refresh(weights)
        found(held, weights, data, calls=calls)
    assert len(calls) == 1
    change(weights, data)
    for _ in range(2):
        held.refresh(weights)
        torch.testing.assert_close(found(held, weights, data, calls=calls), weights[0] * data[0], equal_nan=True)
    assert len(calls) == (3 if weights[0].isnan().any() else 2)  # which is never the same


def test_when_weights_change_the_next_result_lies_where_the_last_one_did():
    (held, weights), data = begun(torch.ones(1)), [torch.ones(4)]
    first = found(held, weights, data)
    for factor in (2.0, 3.0):
        weights[0].data.fill_(factor)
        held.refresh(weights)
        assert found(held, weights, data) is first
        assert first.tolist() == [factor] * 4


def test_what_nobody_asks_for_between_two_changes_goes():
    held, weights = begun(torch.ones(1))
    asked, other = [torch.ones(4)], [torch.zeros(4)]
    found(held, weights, asked)
    found(held, weights, other)
    for left in (2, 1):
        weights[0].mul_(2)
        held.refresh(weights)
        found(held, weights, asked)
        assert len(held) == left


def test_other_data_are_another_result_even_where_they_lie_in_the_same_place():
    """The memory of data whose result is kept is not given to others."""
    held, weights = begun(torch.ones(1))
    for number in range(20):
        data = [torch.full((4,), float(number))]
        assert found(held, weights, data, room=100 * EACH)[0].item() == number
        del data
    data = [torch.ones(4)]
    found(held, weights, data)
    data[0].add_(1)
    assert found(held, weights, data)[0].item() == 2


def test_at_other_weights_within_one_walk_results_are_theirs():
    (held, weights), data = begun(torch.ones(1)), [torch.ones(4)]
    for factor in (1.0, 2.0, 3.0):
        assert found(held, [torch.full((1,), factor)], data)[0].item() == factor
        assert found(held, weights, data)[0].item() == 1
    assert len(held) == 1  # what is at others could change unseen, and is not kept


def test_those_not_asked_for_longest_make_room_and_one_that_does_not_fit_is_not_kept():
    (held, weights), calls = begun(torch.ones(1)), []
    a, b, c = ([torch.full((4,), float(number))] for number in range(3))
    for data in (a, b, a, c, a):
        found(held, weights, data, room=2 * EACH, calls=calls)
    assert [data[0][0].item() for data in calls] == [0, 1, 2]
    held, weights = begun(torch.ones(1))
    found(held, weights, a, room=EACH - 1)
    assert len(held) == 0


def test_what_is_let_go_of_is_not_kept_again():
    (held, weights), data, calls = begun(torch.ones(1)), [torch.ones(4)], []
    assert not held.let_go()  # there was nothing
    for _ in range(2):
        found(held, weights, data, calls=calls)
    assert held.let_go()
    for _ in range(2):
        found(held, weights, data, calls=calls)
    assert (len(calls), len(held)) == (3, 0)


def test_a_copy_starts_with_nothing():
    held, weights = begun(torch.ones(1))
    found(held, weights, [torch.ones(4)])
    assert len(held) == 1
    assert len(copy.deepcopy(held)) == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("size", [3, SMALL])
def test_a_snapshot_knows_values_and_nothing_else(monkeypatch, device, size, packed):
    monkeypatch.setattr("ritz.held.PACKED_ON", (device,) if packed else ())
    first, second = torch.arange(float(size), device=device), torch.tensor([1, 2], device=device)
    taken = Snapshot([first, second, first[:2]])
    assert taken.compare([first.clone(), second, first[:2]])()
    assert not taken.compare([first, second])()
    assert not taken.compare([first, second, first[:3]])()
    pending = taken.compare([first, second, first[:2]])  # as of now, whatever is written before the answer
    first.data[-1] = -1
    assert pending()
    assert not taken.compare([first, second, first[:2]])()


def test_work_is_begun_with_what_is_kept_and_done_again_where_that_does_not_hold():
    (held, weights), data, seen = begun(torch.ones(1)), [torch.ones(4)], []
    for factor in (1.0, 1.0, 2.0):
        weights[0].data.fill_(factor)
        held.refresh(weights)
        make, work = lambda: (weights[0] * data[0],), lambda results: seen.append(results[0][0].item()) or seen[-1]
        assert held.use("product", weights, data, make, lambda: EACH, work) == factor
    assert seen == [1, 1, 1, 2]
