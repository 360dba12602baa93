"""An hour of work in miniature: ten thousand products, and runs by the hundred, leave memory as they found it.

What is counted after a warm-up and again at the end: bytes that Python holds (tracemalloc), tensors that are alive and
what they hold, and the memory of the process. The first two are exact: what is kept of each call is seen as often as
there were calls. `RITZ_SOAK=10` makes ten times as many.
"""

import gc
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import cases
import pytest
import torch
from torch import Tensor, nn

import ritz
from ritz.optim import KFAC

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=G), torch.randint(2, (8,), generator=G)
TIMES = int(os.environ.get("RITZ_SOAK", "1"))
ROWS = 100  # products of one call
WANTED = 10_000  # products in all
TRACED = 3  # calls that are traced, which makes them slow
PYTHON = 32 << 10  # bytes that caches of the interpreter may take meanwhile
PROCESS = 48 << 20  # of what an allocator may hold on to


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def risk(**keywords: object) -> ritz.Risk:
    return ritz.Risk(net(), nn.CrossEntropyLoss(), (X, Y), **keywords)


def alive() -> tuple[int, int, int]:
    """Tensors, their bytes, and objects of any kind that the collector knows and that were made since it was frozen."""
    gc.collect()
    return *tensors(), len(gc.get_objects())


def tensors() -> tuple[int, int]:
    """How many there are, and their bytes."""
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]  # some ask for __class__ in vain
    return len(found), sum(one.untyped_storage().nbytes() for one in found)


def resident() -> int:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.exists() else 0


def soak(step: Callable[[int], object], count: int, warm_up: int = 4) -> None:
    """Call `step(i)` many times and hold what is in memory afterwards against what was there after the warm-up."""
    for i in range(warm_up):
        step(i)
    gc.collect()
    gc.freeze()  # what is there from before is not looked at again
    try:
        for i in range(warm_up):  # what there was from before may be replaced by as much
            step(i)
        before, process = alive(), resident()
        for i in range(count * TIMES):
            step(warm_up + i)
        after, at_last = alive(), resident()
        grown = traced(step)
    finally:
        gc.unfreeze()
    tensors, size, objects = (now - then for now, then in zip(after, before, strict=True))
    assert tensors == size == 0, f"{tensors} tensors, {size} bytes, are left of {count} calls"
    assert objects < 50, f"{objects} objects are left of {count} calls"
    assert grown < PYTHON, f"{grown} bytes of Python are left of {TRACED} calls"
    assert at_last - process < PROCESS, f"the process has grown by {(at_last - process) >> 20} MiB in {count} calls"


def traced(step: Callable[[int], object]) -> int:
    """Bytes of Python that some calls leave behind."""
    tracemalloc.start(1)
    try:
        for i in range(TRACED):  # what the interpreter learns of code that is traced
            step(i)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        for i in range(TRACED):
            step(i)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - held
    finally:
        tracemalloc.stop()


PRODUCTS = {
    "Hessian, reverse": (lambda: ritz.Hessian(risk(), route="reverse"), 40),
    "Hessian, ragged": (lambda: ritz.Hessian(risk(batch_size=5), route="reverse"), 8),
    "Hessian, forward": (lambda: ritz.Hessian(risk(), route="forward"), 12),
    "GGN": (lambda: ritz.GGN(risk()), 30),
    "Fisher": (lambda: ritz.Fisher(risk()), 8),
    "block": (lambda: ritz.Hessian(risk(), route="reverse").block("2.*"), 10),
}


def test_the_products_here_are_ten_thousand():
    assert sum(calls * ROWS for _, calls in PRODUCTS.values()) * TIMES >= WANTED


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_leave_nothing_in_memory(name):
    make, count = PRODUCTS[name]
    A = make()
    V = A.probes(range(ROWS), seed=0)
    soak(lambda _: A.rows(V), count, warm_up=2)


NETWORKS = {f"{matrix}, {name}": (matrix, name) for name in cases.NAMES for matrix in ("Hessian", "GGN")}


@pytest.mark.parametrize("name", [*PRODUCTS, *NETWORKS])
def test_products_leave_nothing_that_waits_for_the_garbage_collector(name):
    """Which comes when there are many objects, and not when a device runs short."""
    if name in PRODUCTS:
        A = PRODUCTS[name][0]()
    else:
        matrix, network = NETWORKS[name]
        A = getattr(ritz, matrix)(cases.problem(network).risk(plan=ritz.Plan(route="forward")))
    V = A.probes(range(ROWS), seed=0)
    for _ in range(2):
        A.rows(V)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(3):
            A.rows(V)
        assert tensors() == before
    finally:
        gc.enable()


def test_operators_that_are_made_again_and_again_leave_nothing_in_memory():
    own = risk()
    v = torch.ones(own.dim)
    soak(lambda _: (ritz.Hessian(own, route="reverse") @ v, ritz.GGN(own.at(own.params())) @ v), 30)
    H = ritz.Hessian(own, route="difference")
    soak(lambda _: H @ v, 30)


def test_runs_leave_nothing_in_memory():
    H = ritz.Hessian(risk(), route="reverse")
    soak(lambda i: ritz.spectrum(H, num_steps=4, num_probes=2, reorthogonalize="none", seed=i), 20, warm_up=3)
    soak(lambda i: ritz.spectrum(H, num_steps=4, num_probes=2, seed=i).trace.interval(), 6, warm_up=3)


def test_sample_traces_leave_nothing_in_memory():
    own = risk()
    soak(lambda _: ritz.sample_traces(own), 6, warm_up=3)


def test_steps_of_an_optimiser_leave_nothing_in_memory():
    model, criterion = net(), nn.CrossEntropyLoss()
    optimizer = KFAC(model, lr=0.01, damping=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        criterion(model(X), Y).backward()
        optimizer.step()

    soak(step, 400, warm_up=120)


def test_a_leak_is_seen():
    kept: list[Tensor] = []
    with pytest.raises(AssertionError, match=r"tensors, .* bytes, are left of"):
        soak(lambda _: kept.append(torch.ones(3)), 20)
    words: list[str] = []
    with pytest.raises(AssertionError, match="bytes of Python are left"):
        soak(lambda i: words.append(f"{i} " * 10_000), 20)
