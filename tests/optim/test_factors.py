"""Running averages of Kronecker factors, and their eigenbases."""

import contextlib
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ritz.errors import NumericalWarning
from ritz.operators.units import units_of
from ritz.optim import renewal
from ritz.optim.factors import Average, RunningBlock
from ritz.optim.renewal import renew_all, shared_out

UNIT = units_of(nn.Linear(3, 2, bias=False), ("weight",))[""]


def gram(size: int, seed: int, rows: int = 20) -> Tensor:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    return (x.T @ x)[None]


def sums(seed: int, **more: Tensor) -> dict[str, Tensor]:
    return {"|input": gram(3, seed), "|rows": torch.tensor(20.0), "|grad": gram(2, seed + 100), **more}


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(0, 0.99))
def test_a_debiased_average_is_the_weighted_mean_of_what_it_has_seen(values, decay):
    mean = Average(decay)
    for value in values:
        mean.add(torch.tensor([[[value]]]))
    weights = torch.tensor([decay**k for k in range(len(values))]).flip(0)
    assert float(mean.value) == pytest.approx(float((weights * torch.tensor(values)).sum() / weights.sum()), abs=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(0, 0.99))
def test_an_average_from_the_identity_keeps_what_is_left_of_it(values, decay):
    mean = Average(decay, "identity")
    expected = torch.eye(2)
    for value in values:
        mean.add(torch.full((1, 2, 2), value))
        expected = decay * expected + (1 - decay) * value
    assert torch.allclose(mean.value[0], expected, atol=1e-9)


def test_a_constant_stays_what_it_is_under_debiasing_and_creeps_up_from_the_identity():
    debiased, identity = Average(0.95), Average(0.95, "identity")
    for _ in range(10):
        for mean in (debiased, identity):
            mean.add(torch.zeros(1, 2, 2))
    assert not debiased.value.any()
    assert torch.allclose(identity.value[0], 0.95**10 * torch.eye(2))


def test_the_first_statistics_are_not_changed_by_later_ones():
    """The average owns its memory."""
    first, mean = torch.ones(1, 2, 2), Average(0.5)
    mean.add(first)
    mean.add(torch.zeros(1, 2, 2))
    assert torch.equal(first, torch.ones(1, 2, 2))


def applied(space, function):
    """f(C) as a dense matrix."""
    return space.apply(torch.eye(6).reshape(6, 1, 2, 3), function(space.values)).reshape(6, 6)


def test_the_block_is_the_kronecker_product_of_its_factors():
    block = RunningBlock(UNIT)
    block.add(sums(0), weight=5.0)
    assert block.space() is None  # no eigenvectors yet
    block.renew()
    dense = applied(block.space(), lambda values: values)
    assert torch.allclose(dense, torch.kron(gram(2, 100)[0] / 5, gram(3, 0)[0] / 20))


def test_the_damped_inverse_is_exact():
    block = RunningBlock(UNIT)
    block.add(sums(0), weight=5.0)
    block.renew()
    inverse = applied(block.space(), lambda values: 1 / (values + 0.1))
    dense = torch.kron(gram(2, 100)[0] / 5, gram(3, 0)[0] / 20)
    assert torch.allclose(inverse, torch.linalg.inv(dense + 0.1 * torch.eye(6)))


def test_eigenvectors_stay_until_they_are_renewed():
    block = RunningBlock(UNIT)
    block.add(sums(0), 1.0)
    block.renew()
    before = block.space()
    block.add(sums(1), 1.0)
    assert torch.equal(block.space().values, before.values)
    assert block.count - block.renewed == 1
    block.renew()
    assert not torch.equal(block.space().values, before.values)


def test_orthogonal_iteration_converges_to_the_eigenbasis():
    block = RunningBlock(UNIT, decay=0.0, refresh="qr")
    block.add(sums(0), 1.0)
    block.renew()
    block.add(sums(7), 1.0)
    for _ in range(400):
        block.renew()
    exact = RunningBlock(UNIT)
    exact.add(sums(7), 1.0)
    exact.renew()
    assert torch.allclose(block.space().values.flatten().sort().values, exact.space().values.flatten().sort().values)
    eye = block.bases[0].mT @ block.bases[0]
    assert torch.allclose(eye, torch.eye(2)[None], atol=1e-12)


def test_the_eigenvalues_of_ekfac_take_the_place_of_those_of_the_factors():
    block = RunningBlock(UNIT, ekfac=True)
    block.add(sums(0), 1.0)
    block.renew()
    scale = torch.arange(6.0).reshape(1, 2, 3)
    block.add(sums(0, **{"|scale": 4 * scale}), weight=4.0)
    assert torch.equal(block.space().values, scale)


def test_a_new_basis_keeps_the_trace_of_ekfac_and_an_unchanged_one_its_eigenvalues():
    block = RunningBlock(UNIT, ekfac=True)
    block.add(sums(0), 1.0)
    block.renew()
    scale = torch.arange(6.0).reshape(1, 2, 3)
    block.add(sums(0, **{"|scale": scale}), 1.0)
    block.renew()
    assert torch.allclose(block.space().values, scale)
    block.add(sums(5), 1.0)
    block.renew()
    assert not torch.allclose(block.space().values, scale)
    assert float(block.space().values.sum()) == pytest.approx(float(scale.sum()))


def test_a_state_comes_back_equal_and_in_its_precision():
    block = RunningBlock(UNIT, ekfac=True)
    block.add({key: value.float() for key, value in sums(0).items()}, 1.0)
    block.renew()
    other = RunningBlock(UNIT, ekfac=True)
    other.load_state_dict(block.state_dict(), torch.zeros((), dtype=torch.float32))
    for one in (block, other):
        one.add({key: value.float() for key, value in sums(3).items()}, 1.0)
        one.renew()
    assert torch.equal(block.space().values, other.space().values)
    assert other.space().values.dtype == torch.float32
    assert block.averages["grad"].value is not other.averages["grad"].value


def test_a_failing_decomposition_keeps_the_basis_and_names_the_factor(monkeypatch):
    block = RunningBlock(UNIT)
    block.add(sums(0), 1.0)
    block.renew()
    before = block.bases

    def failing(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    block.add(sums(1), 1.0)
    with pytest.warns(NumericalWarning, match=r"factor [AG] of the layer failed: the eigenvectors before it are kept"):
        block.renew()
    assert block.bases[0] is before[0]
    assert bool(block.space().values.isfinite().all())


def test_a_diagonal_block_is_the_average_of_squares():
    unit = units_of(nn.LayerNorm(3), ("weight",))["weight"]
    block = RunningBlock(unit)
    block.add({"weight|square": torch.tensor([[[2.0], [4.0], [6.0]]])}, weight=2.0)
    block.renew()
    assert block.space().values.flatten().tolist() == [1.0, 2.0, 3.0]


def test_one_orthogonal_iteration_leaves_the_basis_of_a_singular_factor_as_it_is():
    """Softmax gradients, dead units and wide layers make singular factors: the ordinary case."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 6, generator=generator)
    factor = (rows.T @ rows)[None]  # rank 4 of 6
    values, vectors = torch.linalg.eigh(factor)
    block = object.__new__(RunningBlock)
    block.refresh = "qr"
    found, basis = block._basis("grad", factor, vectors)
    torch.testing.assert_close((basis * found[:, None]) @ basis.mT, factor)
    torch.testing.assert_close(found.sort(dim=1).values, values, atol=1e-12, rtol=1e-9)


def many(refresh: str, num: int = 7) -> list[RunningBlock]:
    """Blocks with two rounds of statistics, renewed after the first."""
    blocks = [RunningBlock(UNIT, refresh=refresh) for _ in range(num)]
    for number, block in enumerate(blocks):
        block.add(sums(number), 1.0)
        block.renew()
        block.add(sums(number + 20), 1.0)
    return blocks


@pytest.mark.parametrize("refresh", ["eigh", "qr"])
def test_blocks_renewed_beside_each_other_are_those_renewed_one_by_one(monkeypatch, refresh):
    alone, beside = many(refresh), many(refresh)
    for block in alone:
        block.renew()
    threads = set()

    class Watched(RunningBlock):
        def renew(self):
            threads.add(threading.get_ident())
            super().renew()

    for block in beside:
        block.__class__ = Watched
    monkeypatch.setitem(renewal._AT_ONCE, "cpu", 3)
    renew_all(beside)
    assert threading.get_ident() not in threads
    for a, b in zip(alone, beside, strict=True):
        assert torch.equal(a.space().values, b.space().values)
        assert torch.equal(a.bases[1], b.bases[1])
        assert not b.bases[1].requires_grad


def test_a_block_that_fails_is_told_of_after_the_others_are_renewed(monkeypatch):
    blocks = many("eigh")
    blocks[2].averages["input"].value = None
    monkeypatch.setitem(renewal._AT_ONCE, "cpu", 3)
    with pytest.raises(AssertionError):
        renew_all(blocks)
    assert [block.renewed for block in blocks] == [2] * 7


def placed(blocks: list[RunningBlock], monkeypatch) -> list[list[int]]:
    """Which blocks, by number, had a thread in common as all were renewed, in their order within it."""
    seen: dict[int, list[int]] = {}

    def renew(block: RunningBlock) -> None:
        seen.setdefault(threading.get_ident(), []).append(blocks.index(block))

    with monkeypatch.context() as patch:
        patch.setattr(RunningBlock, "renew", renew)
        patch.setitem(renewal._AT_ONCE, "cpu", 3)
        renew_all(blocks)
    return sorted(seen.values())


def test_a_block_is_renewed_in_the_same_company_every_time_the_dearest_of_it_first(monkeypatch):
    sizes = (3, 9, 4, 8, 2, 7, 3)
    blocks = [RunningBlock(UNIT) for _ in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        block.averages["input"].add(gram(size, 0))
    first = placed(blocks, monkeypatch)
    assert first == [[1], [3], [5, 2, 0, 6, 4]]  # 729, 512 and 343 + 64 + 27 + 27 + 8
    for _ in range(3):
        assert placed(blocks, monkeypatch) == first


@given(st.lists(st.floats(1, 1e3), max_size=12), st.integers(1, 5))
def test_no_one_has_more_to_do_than_the_dearest_job_above_a_fair_share(costs, num):
    owners = shared_out(costs, num)
    assert owners == shared_out(costs, num)
    assert set(owners) <= set(range(num))
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == who) for who in range(num)]
    assert max(loads) <= sum(costs) / num + max(costs, default=0) + 1e-9  # Graham 1969


def test_on_a_gpu_every_block_has_a_stream_that_stays_and_the_allocator_knows_who_reads_what(monkeypatch):
    told, made = [], []

    class Line:
        def __init__(self, device, name=None):
            self.name = name or f"lane {len(made)}"
            made.append(self)

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

    def number_of(tensor):
        return next((number for number, own in enumerate(old) if own is tensor), None)

    caller = Line("cuda", "caller")
    made.clear()
    blocks = many("eigh", 3)
    old = [block.values["input"] for block in blocks]
    monkeypatch.setattr(RunningBlock, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "Stream", Line)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda line: contextlib.nullcontext())
    monkeypatch.setattr(renewal, "_load_solvers", lambda device: told.append("solvers"))
    monkeypatch.setattr(renewal, "_begin", lambda device: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, line: told.append((number_of(x), line.name)))
    monkeypatch.setitem(renewal._AT_ONCE, "cuda", 2)
    renewal._stream.cache_clear()
    try:
        renew_all(blocks)
        assert told[:3] == ["solvers", "lane 0 waits for caller", "lane 1 waits for caller"]
        assert told[-2:] == ["caller waits for lane 0", "caller waits for lane 1"]
        before = {(number, name) for number, name in told[3:-2] if number is not None}
        assert before == {(0, "lane 0"), (1, "lane 1"), (2, "lane 0")}  # what a block had, on the lane that reads it
        assert sum(entry == (None, "caller") for entry in told) >= 3  # what it got, on the caller's
        renew_all(blocks)
        assert len(made) == 2
    finally:
        renewal._stream.cache_clear()


@pytest.mark.gpu
def test_on_an_accelerator_renewing_again_and_again_takes_no_more_memory():
    unit = units_of(nn.Linear(512, 512, bias=False), ("weight",))[""]
    blocks = [RunningBlock(unit) for _ in range(12)]
    held = []
    for turn in range(12):
        for block in blocks:
            rows = torch.randn(600, 512, device="cuda")
            stats = {"|input": (rows.T @ rows)[None], "|rows": torch.tensor(600.0, device="cuda")}
            block.add({**stats, "|grad": stats["|input"]}, 1.0)
        renew_all(blocks)
        torch.cuda.synchronize()
        if turn >= 2:
            held.append(torch.cuda.memory_reserved())
    assert max(held) <= held[0] + (64 << 20)
