"""Flat rows and named parameters are one thing; probes belong to names and elements, not to the order of drawing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ritz import space as spaces
from ritz.comm import SELF
from ritz.space import (
    ParamSpace,
    Shard,
    random_bits,
    random_permutation,
    random_signs,
    random_uniform,
    row_dots,
    row_norms,
    row_products,
    select,
)  # fmt: skip

SPACE = ParamSpace(("a.weight", "a.bias", "b"), (torch.Size([3, 4]), torch.Size([3]), torch.Size([])))
DISTRIBUTIONS = ("rademacher", "normal")
WIDE = ParamSpace(("w",), (torch.Size([200_000]),))


@given(lead=st.lists(st.integers(1, 3), max_size=2))
def test_join_undoes_split(lead):
    rows = torch.arange(math.prod(lead) * SPACE.dim, dtype=torch.float64).reshape(*lead, SPACE.dim)
    parts = SPACE.split(rows)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "a.weight": (*lead, 3, 4),
        "a.bias": (*lead, 3),
        "b": tuple(lead),
    }
    assert torch.equal(SPACE.join({name: parts[name] for name in reversed(parts)}, lead=len(lead)), rows)


def test_split_gives_views():
    rows = torch.zeros(2, SPACE.dim)
    SPACE.split(rows)["a.bias"][1] = 7.0
    assert torch.equal(rows[1, SPACE.slices["a.bias"]], torch.full((3,), 7.0))


def test_slices_tile_the_vector_in_order():
    assert SPACE.dim == 16
    assert SPACE.slices == {"a.weight": slice(0, 12), "a.bias": slice(12, 15), "b": slice(15, 16)}


def test_segments_are_the_sums_over_each_parameter():
    rows = torch.randn(5, SPACE.dim, generator=torch.Generator().manual_seed(0))
    sums = torch.stack([rows[:, part].sum(1) for part in SPACE.slices.values()], dim=1)
    torch.testing.assert_close(SPACE.segment(rows), sums)


def test_a_space_is_read_off_named_tensors():
    space = ParamSpace.of({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
    assert space == ParamSpace(("w", "b"), (torch.Size([2, 2]), torch.Size([2])))


# ------------------------------------------------------------------------------------------------- probes


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_probe_of_a_block_is_the_restriction_of_the_probe(distribution):
    whole = SPACE.probes([0, 3], 5, distribution, dtype=torch.float64)
    block = ParamSpace(("b", "a.bias"), (torch.Size([]), torch.Size([3])))  # in another order as well
    part = block.split(block.probes([0, 3], 5, distribution, dtype=torch.float64))
    for name in block.names:
        assert torch.equal(part[name], SPACE.split(whole)[name])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@given(order=st.permutations(range(4)))
def test_a_probe_depends_on_its_index_and_not_on_who_else_is_drawn(distribution, order):
    rows = SPACE.probes(range(4), 1, distribution)
    assert torch.equal(SPACE.probes(order, 1, distribution), rows[order])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_probe_is_the_same_in_any_precision_and_under_any_default(distribution):
    double = SPACE.probes([2], 1, distribution, dtype=torch.float64)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(SPACE.probes([2], 1, distribution, dtype=torch.float64), double)
    assert torch.equal(SPACE.probes([2], 1, distribution, dtype=torch.float32), double.float())


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_probe_is_the_same_on_any_device(distribution):
    here = SPACE.probes([0, 1], 1, distribution)
    torch.testing.assert_close(SPACE.probes([0, 1], 1, distribution, device="cuda").cpu(), here)


def test_a_seed_is_a_number_whatever_its_type():
    assert torch.equal(SPACE.probes([np.int64(1)], np.int64(3)), SPACE.probes([1], 3))


def test_drawing_a_probe_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    SPACE.probes([0], 0, "normal")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("distribution", "moments"), [("rademacher", (0, 1, 0, 1)), ("normal", (0, 1, 0, 3))])
def test_probes_have_the_moments_of_their_distribution(distribution, moments):
    v = WIDE.probes([0], 0, distribution, dtype=torch.float64)[0]
    error = 5 / math.sqrt(WIDE.dim)
    for power, moment in enumerate(moments, 1):
        spread = 1.0 if distribution == "rademacher" else math.sqrt({1: 1, 2: 2, 3: 15, 4: 96}[power])
        assert abs(float((v**power).mean()) - moment) < error * spread


def test_normal_probes_have_the_tails_of_a_normal():
    v = WIDE.probes([1], 0, "normal", dtype=torch.float64)[0].abs()
    for bound, mass in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        assert abs(float((v > bound).double().mean()) - mass) < 5 * math.sqrt(mass / WIDE.dim)
    assert v.max() > 4


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_probes_of_other_indices_seeds_and_names_are_independent(distribution):
    size = torch.Size([50_000])
    both = ParamSpace(("x", "y"), (size, size))
    x, y = both.split(both.probes([0], 0, distribution, dtype=torch.float64)).values()
    others = [y[0], both.probes([1], 0, distribution)[0, :50_000], both.probes([0], 1, distribution)[0, :50_000]]
    for other in others:
        assert abs(float((x[0] * other).mean())) < 5 / math.sqrt(50_000)
    assert abs(float((x[0, 1:] * x[0, :-1]).mean())) < 5 / math.sqrt(50_000)  # neighbours


def test_an_unknown_distribution_is_refused():
    with pytest.raises(ValueError, match="'rademacher' or 'normal', got 'uniform'"):
        SPACE.probes([0], 0, "uniform")


@given(start=st.integers(0, 1000), size=st.integers(1, 50))
def test_a_stream_can_be_entered_anywhere(start, size):
    whole = random_bits(1100, ("k",))
    assert torch.equal(random_bits(size, ("k",), start=start), whole[start : start + size])


def test_uniform_numbers_fill_the_open_unit_interval_evenly():
    torch.set_default_dtype(torch.float32)  # the stream is float64 all the same
    u = random_uniform(200_000, ("u",))
    assert u.dtype == torch.float64
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 50  # chi-square with 19 degrees: mean 19


# ------------------------------------------------------------------------------------------------- select


def test_select_keeps_the_order_of_the_names_and_takes_several_globs():
    names = ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]
    assert select(names, ["fc.*", "*.weight"]) == ["conv.weight", "fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("head.*", "no parameter matches 'head.*'; there are: conv.weight"),
        (["conv.*", "x"], "matches 'x'"),
        ([], "list of patterns is empty"),
    ],
)
def test_a_pattern_that_chooses_nothing_is_refused(patterns, message):
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        select(["conv.weight"], patterns)


@pytest.mark.parametrize("most", [1, 5, 12, 13, 1 << 16])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_probe_does_not_depend_on_how_much_is_drawn_at_once(monkeypatch, distribution, most):
    """Of 12, 3, 1 and 0 elements: split, side by side, or all together."""
    space = ParamSpace((*SPACE.names, "none"), (*SPACE.shapes, torch.Size([0])))
    whole = [space.probes([0, 7], 2, distribution, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    monkeypatch.setattr("ritz.space._DRAWN_AT_ONCE", {"cpu": most})
    pieces = [space.probes([0, 7], 2, distribution, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    assert all(map(torch.equal, whole, pieces))


def test_no_index_is_no_row():
    assert SPACE.probes([], 0).shape == (0, SPACE.dim)


def test_a_sign_is_the_first_of_64_bits():
    bits = random_bits(1000, ("a", 1), start=3)
    assert torch.equal(random_signs(1000, ("a", 1), start=3), torch.where(bits < 0, -1.0, 1.0).float())


def test_a_random_permutation_is_the_order_of_the_uniform_numbers_of_its_key():
    for size, key in ((0, ("a",)), (1, ("a",)), (57, ("b", 3))):
        order = random_permutation(size, key)
        assert order.sort().values.tolist() == list(range(size))
        assert torch.equal(order, random_uniform(size, key).argsort())
    assert random_permutation(8, ("batches", 0, 0)).tolist() != random_permutation(8, ("batches", 0, 1)).tolist()


# ------------------------------------------------------------------------------------------------ products of rows


@pytest.mark.parametrize("dim", [0, 1, 7, 8, 9, 64, 100])
@pytest.mark.parametrize(("k", "m"), [(1, 1), (3, 2), (2, 0)])
def test_products_of_rows_are_those_of_a_matrix_however_they_are_cut(monkeypatch, dim, k, m):
    monkeypatch.setattr(spaces, "_PIECE", 8)
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(num, dim, generator=draw) for num in (k, m))
    torch.testing.assert_close(row_products(left, right), left @ right.T)
    columns = right.T.contiguous()
    torch.testing.assert_close(row_products(left, columns.T), left @ right.T)


def test_sums_over_millions_of_parameters_keep_their_digits_in_float32():
    """On a CPU one matrix product of this length is off by 4e-4 of |v|^2, and torch's own norm by half of that."""
    rows = torch.randn(2, 8_000_000, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    truth = rows.double() @ rows.double().T
    size = truth.diagonal().sqrt()
    assert ((row_products(rows, rows) - truth).abs() < 1e-6 * size[:, None] * size).all()
    torch.testing.assert_close(row_dots(rows, rows), truth.diagonal(), rtol=1e-6, atol=0)
    torch.testing.assert_close(row_norms(rows), size, rtol=1e-6, atol=0)
    unit = rows[:1] / size[0].float()
    left = Shard(SELF, 8_000_000).project_out(unit.clone(), unit)
    assert float(row_norms(left)) < 1e-6
