"""A reducer takes batches one by one or in groups, and gives the same."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ritz
from ritz.reducers import Concat, Mean, Moments

ROWS = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(0))  # 7 batches of (k, dim)
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 1.0, 5.0, 2.0, 4.0])


def folded(make, chosen):
    reducer = make()
    for i in chosen:
        reducer.add(ROWS[i] * WEIGHTS[i], WEIGHTS[i])
    return reducer


def test_a_mean_weighs_batches_by_their_weight():
    truth = (ROWS * WEIGHTS[:, None, None]).sum(0) / WEIGHTS.sum()
    torch.testing.assert_close(folded(Mean, range(7)).result(), truth)


def test_a_mean_does_not_write_to_what_it_is_given():
    first = torch.ones(2)
    mean = Mean()
    mean.add(first, torch.tensor(1.0))
    mean.add(first, torch.tensor(1.0))
    assert torch.equal(first, torch.ones(2))
    assert torch.equal(mean.result(), torch.ones(2))


def test_a_mean_counts_in_float64():
    torch.set_default_dtype(torch.float32)
    mean = Mean()
    mean.add(torch.tensor(2.0**24), torch.tensor(2.0**24))
    for _ in range(3):
        mean.add(torch.tensor(0.0), torch.tensor(1.0))
    assert float(mean.weight) == 2**24 + 3


def test_moments_are_mean_and_variance_between_batches():
    mean, variance = folded(Moments, range(7)).result()
    torch.testing.assert_close(mean, ROWS.mean(0))
    torch.testing.assert_close(variance, ROWS.var(0).sum(-1))


def test_increments_have_the_variance_as_their_mean_and_are_one_fewer_than_batches():
    increments = folded(Moments, range(7)).increments()
    assert increments.shape == (6, 3)
    torch.testing.assert_close(increments.mean(0), ROWS.var(0).sum(-1))


def test_increments_do_not_cancel_far_from_zero():
    moments = Moments()
    for i in range(7):
        moments.add((ROWS[i] + 1e8) * WEIGHTS[i], WEIGHTS[i])
    torch.testing.assert_close(moments.result()[1], ROWS.var(0).sum(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [Mean, Moments])
@given(cuts=st.sets(st.integers(0, 7)))
def test_merging_groups_of_batches_is_adding_them(make, cuts):
    ends = [0, *sorted(cuts), 7]
    merged = make()
    for a, b in itertools.pairwise(ends):
        merged.merge(folded(make, range(a, b)))
    torch.testing.assert_close(merged.result(), folded(make, range(7)).result())


def test_one_batch_has_no_variance():
    with pytest.raises(ValueError, match="at least 2 batches, got 1"):
        folded(Moments, [0]).result()


def test_concat_keeps_the_order():
    parts = torch.arange(10.0).split([3, 4, 3])
    left, right = Concat(), Concat()
    left.add(parts[0], torch.tensor(3.0))
    right.add(parts[1], torch.tensor(4.0))
    right.add(parts[2], torch.tensor(3.0))
    left.merge(right)
    assert torch.equal(left.result(), torch.arange(10.0))


@pytest.mark.parametrize("make", [Mean, Moments, Concat])
def test_pieces_of_a_batch_make_the_batch(make):
    pieces = [(torch.tensor([1.0, 2.0]), torch.tensor(2.0)), (torch.tensor([3.0, 4.0]), torch.tensor(2.0))]
    total, weight = make().join(pieces)
    assert float(weight) == 4
    assert total.tolist() == ([1.0, 2.0, 3.0, 4.0] if make is Concat else [4.0, 6.0])


def one_weight(dtype: torch.dtype) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False).to(dtype)
    torch.nn.init.ones_(model.weight)
    return model


def test_many_batches_of_half_precision_are_added_up_in_more():
    """A sum in bfloat16 stands still after 256 terms: loss, gradient and Hessian would be eight times too small."""
    data = [(torch.ones(8, 1).bfloat16(), torch.zeros(8, 1).bfloat16())] * 2000
    risk = ritz.Risk(one_weight(torch.bfloat16), torch.nn.MSELoss(), data)
    H = ritz.Hessian(risk)
    assert (risk.loss(), risk.gradient().tolist(), H.dense().tolist()) == (1.0, [2.0], [[2.0]])
    assert risk.gradient().dtype == H.rows(torch.ones(1, 1).bfloat16()).dtype == torch.bfloat16


def test_items_are_counted_in_full_precision():
    X, y = torch.ones(70_001, 1).half(), torch.zeros(70_001, 1).half()
    risk = ritz.Risk(one_weight(torch.half), torch.nn.MSELoss(), (X, y), batch_size=len(X))
    assert risk.loss() == 1.0
    assert risk.convention().startswith("mean over 70001 samples")
    labelled = torch.ones(750, 1).bfloat16(), torch.zeros(750, dtype=torch.long)
    classes = ritz.Risk(torch.nn.Linear(1, 2).bfloat16(), torch.nn.CrossEntropyLoss(), labelled)
    classes.check()
    assert classes.convention().startswith("mean over 750 samples")
