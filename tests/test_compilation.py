"""A compiled function is compiled once, when it pays, and used only if it gives what the function gives."""

import logging
import warnings

import pytest
import torch
from torch import Tensor

from ritz import compilation
from ritz.compilation import Compilations, Prospect, trace

LONG = Prospect(spent=1e6)


@pytest.fixture
def lowered(monkeypatch):
    """What is compiled; here a graph is run as it was traced."""
    made: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(compilation, "lowered", lambda graph: made.append(graph) or graph)
    monkeypatch.setattr(compilation, "_tools", lambda device: True)
    return made


def square(x: Tensor) -> tuple[Tensor]:
    return (x * x,)


def calls(compilations: Compilations, num: int, fn=square, prospect=None, key="square") -> list[float]:
    return [compilations.run(key, fn, [torch.tensor([float(i)])], prospect)[0].item() for i in range(num)]


def test_asked_for_it_is_compiled_at_the_first_call_and_once(lowered):
    compilations = Compilations()
    assert calls(compilations, 5) == [0.0, 1.0, 4.0, 9.0, 16.0]
    assert (len(lowered), len(compilations)) == (1, 1)


def test_a_short_run_is_neither_compiled_nor_traced(lowered, monkeypatch):
    monkeypatch.setattr(compilation, "trace", None)
    compilations = Compilations()
    calls(compilations, 50, prospect=Prospect(spent=1.0, calls_left=1000))
    assert (len(lowered), len(compilations)) == (0, 0)


def test_a_long_run_is_compiled_after_one_timed_call(lowered, monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(compilation, "clock", lambda device: float(next(ticks)))
    compilations = Compilations()
    calls(compilations, 2, prospect=LONG)
    assert len(lowered) == 0  # the first calls are not timed: algorithms are chosen in them, and it is recorded
    calls(compilations, 3, prospect=LONG)
    assert len(lowered) == 1


@pytest.mark.parametrize(("left", "pays"), [(0, False), (30, False), (60, True)])
def test_what_is_to_come_counts_as_well_as_what_was_spent(left, pays):
    assert Prospect(spent=150.0, calls_left=left).pays(20.0, each=1.0) is pays


@pytest.mark.parametrize("cost", [20.0, 60.0, 200.0])
def test_a_compiler_that_gains_nothing_costs_a_tenth_at_most(cost):
    for spent in (0.0, 100.0, 5000.0):
        for left in (0.0, 10.0, 300.0, 1e4):
            if Prospect(spent, left).pays(cost, each=1.0):
                assert cost <= 0.1 * (spent + left) * (1 + 1e-12)


def test_a_large_graph_asks_for_a_longer_run(lowered):
    def many(x: Tensor) -> tuple[Tensor]:
        for _ in range(200):
            x = x + 1
        return (x,)

    start = compilation.START / compilation.SLOWER
    for prospect, wanted in ((Prospect(spent=1.01 * start), 0), (Prospect(spent=2 * start), 1)):
        compilations = Compilations()
        for _ in range(2):
            state = compilations._known.setdefault("many", compilation._State(calls=1, seconds=1.0))
            assert compilations.run("many", many, [torch.zeros(1)], prospect)[0].item() == 200
            state.seconds = 1.0
        assert len(lowered) == wanted


def test_one_that_is_wrong_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(compilation, "lowered", lambda graph: lambda x: (x * x + 1e-6,))
    compilations = Compilations()
    with caplog.at_level(logging.INFO, "ritz"):
        found = [compilations.run("f", square, [torch.ones(2)])[0].tolist() for _ in range(3)]
    assert found == [[1.0, 1.0]] * 3
    assert len(compilations) == 0
    assert "not compiled, run as it is: the function compiled, it is 1.0e-06 off" in caplog.text


@pytest.mark.parametrize(("off", "used"), [(0.005, 1), (0.5, 0)])
def test_where_the_function_itself_is_rough_another_one_may_be_as_rough(monkeypatch, off, used):
    def cancels(x: Tensor) -> tuple[Tensor]:
        return ((x + 1e5) - 1e5,)  # in float32 1/128 is what is left of the last digit

    x = torch.tensor([0.0123], dtype=torch.float32)  # 0.0156, 27 % off
    monkeypatch.setattr(compilation, "lowered", lambda graph: lambda x: (cancels(x)[0] * (1 + off),))
    compilations = Compilations()
    compilations.run("f", cancels, [x])
    assert len(compilations) == used


def test_one_that_is_not_finite_is_not_used(monkeypatch):
    monkeypatch.setattr(compilation, "lowered", lambda graph: lambda x: (x * float("nan"),))
    compilations = Compilations()
    assert compilations.run("f", square, [torch.ones(2)])[0].tolist() == [1.0, 1.0]
    assert len(compilations) == 0


def test_one_that_is_slower_is_not_used_unless_asked_for(monkeypatch):
    ticks = iter([0, 1, 1, 10, 10, 20, 20, 30, 30])  # a call as it is: 1 s; compiled: 9 s
    monkeypatch.setattr(compilation, "clock", lambda device: float(next(ticks)))
    monkeypatch.setattr(compilation, "lowered", lambda graph: graph)
    monkeypatch.setattr(compilation, "_tools", lambda device: True)
    compilations = Compilations()
    calls(compilations, 4, prospect=LONG)
    assert len(compilations) == 0


@pytest.mark.parametrize("error", [RuntimeError("no C++ compiler"), ValueError(""), AssertionError("deep inside")])
def test_where_compiling_fails_the_function_is_run_as_it_is_and_the_log_says_so(monkeypatch, caplog, error):
    def fail(graph):
        raise error

    monkeypatch.setattr(compilation, "lowered", fail)
    compilations = Compilations()
    with caplog.at_level(logging.INFO, "ritz"):
        assert calls(compilations, 3) == [0.0, 1.0, 4.0]
    assert caplog.text.count(f"the function cannot be compiled: {type(error).__name__}") == 1


def test_a_function_that_looks_at_its_numbers_is_run_as_it_is(lowered, caplog):
    def looks(x: Tensor) -> tuple[Tensor]:
        return (x * float(x),)

    compilations = Compilations()
    with caplog.at_level(logging.INFO, "ritz"):
        assert calls(compilations, 3, looks) == [0.0, 1.0, 4.0]
    assert "the function cannot be traced" in caplog.text
    assert len(lowered) == 0


@pytest.mark.parametrize("lacks", ["static", "tools"])
def test_auto_leaves_alone_what_may_change_or_cannot_be_compiled(lowered, monkeypatch, lacks):
    if lacks == "tools":
        monkeypatch.setattr(compilation, "_tools", lambda device: False)
    compilations = Compilations()
    calls(compilations, 4, prospect=Prospect(spent=1e6, allowed=lambda: lacks != "static"))
    assert (len(lowered), len(compilations)) == (0, 0)


def test_no_more_than_so_many_are_compiled(lowered):
    compilations = Compilations(most=2)
    for key in "abcd":
        assert calls(compilations, 3, key=key) == [0.0, 1.0, 4.0]
    assert len(lowered) == len(compilations) == 2


def test_a_trace_has_the_derivatives_worked_out():
    def fn(x: Tensor, v: Tensor) -> tuple[Tensor]:
        gradient = torch.func.grad(lambda x: (x**3).sum())
        return (torch.func.vmap(lambda v: torch.func.jvp(gradient, (x,), (v,))[1])(v),)

    graph = trace(fn, [torch.ones(3), torch.ones(2, 3)])
    x, v = torch.randn(3), torch.randn(2, 3)
    torch.testing.assert_close(graph(x, v)[0], 6 * x * v)
    assert {node.op for node in graph.graph.nodes} <= {"placeholder", "call_function", "output", "get_attr"}


@pytest.mark.parametrize(
    ("dtype", "tf32", "wanted"),
    [
        (torch.float64, False, 1e-9),
        (torch.float32, False, 1e-4),
        (torch.float32, True, 1e-2),
        (torch.bfloat16, False, 1e-2),
    ],
)
def test_the_tolerance_is_that_of_the_precision(monkeypatch, dtype, tf32, wanted):
    monkeypatch.setattr(compilation, "multiplies_in_tf32", lambda device: tf32)
    assert compilation._agreement(dtype, torch.device("cpu")) == wanted


@pytest.mark.parametrize("bad", [torch.nan, 1.01])
def test_a_compiled_function_that_is_right_only_at_first_is_not_used(monkeypatch, bad, caplog):
    """As one that reads memory which nobody wrote: it is called twice before it is trusted."""
    calls = []

    def lowered(graph):
        return lambda x: (graph(x)[0] * (bad if calls.append(x) or len(calls) > 1 else 1.0),)

    monkeypatch.setattr(compilation, "lowered", lowered)
    compilations = Compilations()
    with caplog.at_level(logging.INFO, "ritz"):
        for _ in range(3):
            (y,) = compilations.run("f", lambda x: (x * 2,), [torch.ones(2)])
            assert y.tolist() == [2.0, 2.0]
    assert len(compilations) == 0
    assert "not compiled, run as it is: the function compiled, it is" in caplog.text


def test_a_compiled_function_that_fails_at_its_second_call_is_not_used(monkeypatch, caplog):
    calls = []

    def lowered(graph):
        def once(x):
            calls.append(x)
            if len(calls) > 1:
                raise torch.OutOfMemoryError("no room")
            return graph(x)

        return once

    monkeypatch.setattr(compilation, "lowered", lowered)
    compilations = Compilations()
    with caplog.at_level(logging.INFO, "ritz"):
        for _ in range(3):
            assert compilations.run("f", lambda x: (x * 2,), [torch.ones(1)])[0].item() == 2.0
    assert (len(compilations), len(calls)) == (0, 2)
    assert "cannot be compiled: OutOfMemoryError: no room" in caplog.text


def test_where_memory_does_not_suffice_to_trace_a_function_it_is_said(monkeypatch, caplog):
    def trace(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(compilation, "trace", trace)
    with caplog.at_level(logging.INFO, "ritz"):
        assert Compilations().run("f", lambda x: (x * 2,), [torch.ones(1)])[0].item() == 2.0
    assert "cannot be traced: OutOfMemoryError: no room" in caplog.text


def test_where_the_function_itself_is_not_finite_nothing_is_as_good(monkeypatch):
    monkeypatch.setattr(compilation, "lowered", lambda graph: lambda x: (graph(x)[0] + 1,))
    compilations = Compilations()
    compilations.run("f", lambda x: (x / 0 - x / 0,), [torch.ones(1, dtype=torch.float32)])
    assert len(compilations) == 0


@pytest.mark.parametrize(("host", "device", "waits"), [(0.9, 1.0, True), (0.2, 1.0, False)])
def test_it_is_known_whether_the_device_waits_for_the_host(lowered, monkeypatch, host, device, waits):
    ends = iter([0.0, device])
    monkeypatch.setattr(compilation, "clock", lambda _: next(ends))  # which waits for the device
    monkeypatch.setattr(compilation.time, "perf_counter", lambda: host)
    compilations = Compilations()
    calls(compilations, 1)
    found = compilations.find("square", None, square, [torch.ones(1)])
    assert found.waits is waits


def test_advice_of_a_compiler_neither_stops_it_nor_is_passed_on(monkeypatch):
    """Warnings are errors in these tests: one that came through would be a failure."""

    def lowered(graph):
        warnings.warn("TensorFloat32 tensor cores are available but not enabled", UserWarning, stacklevel=2)
        return graph

    monkeypatch.setattr(compilation, "lowered", lowered)
    compilations = Compilations()
    compilations.run("f", lambda x: (x * 2,), [torch.ones(2)])
    assert len(compilations) == 1
