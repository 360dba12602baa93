"""On 1 and 3 ranks, with shares of any size, every number is the same to round-off; and on each rank of a run.

Slow tests have 2 and 4 ranks besides.
"""

import pytest
import torch
from distributed import checks

pytestmark = pytest.mark.timeout(300)  # of all runs together, made for the first test; 30 s on two idle cores


def apart(found, truth):
    """The largest difference, relative to the largest number; NaN and infinity must be in the same places."""
    assert found.shape == truth.shape
    plain = truth.isfinite()
    assert torch.equal(plain, found.isfinite())
    assert torch.equal(found[~plain].nan_to_num(), truth[~plain].nan_to_num())
    if not plain.any():
        return 0.0
    return float((found - truth)[plain].abs().max() / truth[plain].abs().max().clamp(min=1e-300))


def assert_numbers_of_one(name, alone, together):
    """A check found on each of several ranks what it finds on one."""
    truth = alone[name]
    assert not isinstance(truth, str), truth
    for rank, found in enumerate(together):
        assert not isinstance(found[name], str), f"rank {rank} of {len(together)}: {found[name]}"
        assert found[name].keys() == truth.keys()
        for key, value in truth.items():
            assert apart(found[name][key], value) < 1e-9, f"{name}: {key} on rank {rank} of {len(together)}"


def assert_same_bits(together):
    first, *others = together
    for name in sorted(set(checks.CHECKS) - {"kfac"}):  # whose products each rank makes at other addresses
        for found in others:
            for key, value in first[name].items():
                assert torch.equal(found[name][key].nan_to_num(), value.nan_to_num()), f"{name}: {key}"


@pytest.mark.parametrize("name", checks.CHECKS)
def test_numbers_do_not_depend_on_the_number_of_ranks(runs, name):
    assert_numbers_of_one(name, runs[1][0], runs[3])


def test_every_rank_has_the_same_bits(runs):
    assert_same_bits(runs[3])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "decompositions"), [(2, [1, 3]), (4, [1, 1, 1, 1])])
def test_other_numbers_of_ranks_agree_as_well(runs, other_runs, size, decompositions):
    for name in checks.CHECKS:
        assert_numbers_of_one(name, runs[1][0], other_runs[size])
    assert_same_bits(other_runs[size])
    assert sorted(found["kept"]["decompositions"] for found in other_runs[size]) == decompositions


def test_a_single_rank_in_a_process_group_is_a_program_without_one(runs):
    alone = {key: torch.as_tensor(value).double() for key, value in checks.matrices().items()}
    for key, value in alone.items():
        assert torch.equal(runs[1][0]["matrices"][key], value), key


@pytest.mark.parametrize("what", ["basis", "locked", "residuals", "block space"])
def test_what_a_rank_keeps_of_vectors_falls_with_the_number_of_ranks(runs, what):
    whole = runs[1][0]["kept"][what]
    assert whole > 0
    parts = [found["kept"][what] for found in runs[3]]
    assert sum(parts) == whole
    assert max(parts) - min(parts) <= whole // runs[1][0]["kept"]["dim"]  # one element of each vector


def test_a_product_of_all_batches_is_one_sum_over_ranks(runs):
    assert runs[1][0]["kept"]["sums of a product"] == []
    for found in runs[3]:
        assert found["kept"]["sums of a product"] == [2 * checks.risk().dim]


def test_a_look_is_shared_by_the_ranks_that_train(runs):
    whole = runs[1][0]["kept"]["samples of a look"]
    for found in runs[3]:
        assert 0.2 * whole < found["kept"]["samples of a look"] < 0.5 * whole


def test_each_rank_makes_some_of_the_eigendecompositions(runs):
    assert runs[1][0]["kept"]["decompositions"] == 4  # two linear layers, scale and shift of a normalisation
    assert sorted(found["kept"]["decompositions"] for found in runs[3]) == [1, 1, 2]  # one is as dear as three


def test_the_data_is_that_of_all_ranks(runs):
    x, _ = checks.samples()
    for found in (*runs[1], *runs[3]):
        assert torch.equal(found["batches_of_all_ranks"]["inputs"], x)
        assert all(found["kinds_of_data"][f"{how}: samples"] == len(x) for how in checks.KINDS)
