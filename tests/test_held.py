"""Results of weights and data are kept while those stay as they are, and no longer."""

import copy

import pytest
import torch

from ritz.held import Held

EACH = 8 * 4  # bytes of one result


def found(held, weights, data, room=10 * EACH, calls=None):
    def make():
        if calls is not None:
            calls.append(data)
        return (weights[0] * data[0],)

    return held.find("product", weights, data, make, lambda: room)[0]


def test_a_result_is_computed_once_for_each_batch():
    held, weights, calls = Held(), [torch.ones(1)], []
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
    held, weights, data = Held(), [torch.ones(1)], [torch.ones(4)]
    found(held, weights, data)
    held.refresh(weights)
    assert len(held) == 1
    change(weights, data)
    held.refresh(weights)
    assert len(held) == 0
    torch.testing.assert_close(found(held, weights, data), weights[0] * data[0], equal_nan=True)


def test_other_data_are_another_result_even_where_they_lie_in_the_same_place():
    """The memory of data whose result is kept is not given to others."""
    held, weights = Held(), [torch.ones(1)]
    for number in range(20):
        data = [torch.full((4,), float(number))]
        assert found(held, weights, data, room=100 * EACH)[0].item() == number
        del data
    data = [torch.ones(4)]
    found(held, weights, data)
    data[0].add_(1)
    assert found(held, weights, data)[0].item() == 2


def test_other_weights_within_one_walk_are_another_result():
    held, data = Held(), [torch.ones(4)]
    for factor in (1.0, 2.0, 3.0):
        assert found(held, [torch.full((1,), factor)], data)[0].item() == factor


def test_those_not_asked_for_longest_make_room_and_one_that_does_not_fit_is_not_kept():
    held, weights, calls = Held(), [torch.ones(1)], []
    a, b, c = ([torch.full((4,), float(number))] for number in range(3))
    for data in (a, b, a, c, a):
        found(held, weights, data, room=2 * EACH, calls=calls)
    assert [data[0][0].item() for data in calls] == [0, 1, 2]
    held.clear()
    found(held, weights, a, room=EACH - 1)
    assert len(held) == 0


def test_what_is_let_go_of_is_not_kept_again():
    held, weights, data, calls = Held(), [torch.ones(1)], [torch.ones(4)], []
    assert not held.let_go()  # there was nothing
    for _ in range(2):
        found(held, weights, data, calls=calls)
    assert held.let_go()
    for _ in range(2):
        found(held, weights, data, calls=calls)
    assert (len(calls), len(held)) == (3, 0)


def test_a_copy_starts_with_nothing():
    held = Held()
    found(held, [torch.ones(1)], [torch.ones(4)])
    assert len(copy.deepcopy(held)) == 0
