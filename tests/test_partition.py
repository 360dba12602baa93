"""A graph in two parts is the graph: what does not depend on the first input is computed apart, and nothing twice."""

import cases
import pytest
import torch
from torch import Tensor

import ritz
from ritz import compilation
from ritz.compilation import trace
from ritz.operators import risk_operator
from ritz.operators.tape import layers
from ritz.partition import partition


def parts_of(fn, *inputs: Tensor):
    parts = partition(trace(fn, inputs), inputs)
    torch.testing.assert_close(tuple(parts(*inputs)), tuple(fn(*inputs)))
    return parts


def operations(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


X, Y = torch.randn(2, 3), torch.randn(3, 4)


def test_what_depends_on_the_other_inputs_alone_is_shared():
    parts = parts_of(lambda x, y: (x @ y.exp(), y.sum()), X, Y)
    assert operations(parts.shared) == ["aten.exp.default", "aten.sum.default"]
    assert operations(parts.own) == ["aten.mm.default", "aten.clone.default"]  # of the sum, which is a result as well
    assert parts.size == 8 * (12 + 1)


def test_results_may_be_written_to():
    parts = parts_of(lambda x, y: (x @ y, y.exp(), y), X, Y)
    shared = parts.shared(Y)
    for _ in range(2):
        for result, truth in zip(parts.own(X, Y, *shared), (X @ Y, Y.exp(), Y), strict=True):
            torch.testing.assert_close(result, truth)
            result.zero_()


def test_what_is_written_to_later_is_not_shared():
    """The sum begins as zeros, which depend on nothing; a second call must find zeros again."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor]:
        total = torch.zeros(2, 4, dtype=y.dtype)
        total[:, :2].add_((x @ y)[:, :2])
        return (total.mul_(y.sum()),)

    parts = parts_of(fn, X, Y)
    shared = parts.shared(Y)
    for x in (X, 2 * X, X):
        torch.testing.assert_close(parts.own(x, Y, *shared)[0], fn(x, Y)[0])


def test_a_view_of_what_is_shared_is_taken_again_and_not_kept():
    parts = parts_of(lambda x, y: ((x[:, :, None] * y.exp().expand(5, 3, 4)[:2]).sum(1), y.t().exp()), X, Y)
    assert parts.size == 8 * (12 + 12)
    assert "aten.expand.default" in operations(parts.own)


def test_a_copy_for_each_row_is_made_again_and_what_it_is_of_is_kept():
    parts = parts_of(lambda x, y: (x.repeat(1, 2) @ y.exp().expand(5, 3, 4).clone().flatten(0, 1)[:6],), X, Y)
    assert parts.size == 8 * 12
    assert "aten.clone.default" in operations(parts.own)


def test_where_all_or_nothing_depends_on_the_first_input_one_part_is_empty():
    assert operations(parts_of(lambda x, y: (x.exp(), x.sum()), X, Y).shared) == []
    assert operations(parts_of(lambda x, y: (y.exp(),), X, Y).own) == ["aten.clone.default"]


def test_a_constant_goes_where_it_is_needed():
    factors = torch.arange(3.0, dtype=X.dtype)
    parts = parts_of(lambda x, y: (x * factors, (factors[:, None] * y).exp()), X, Y)
    assert operations(parts.own) == ["aten.mul.Tensor", "aten.clone.default"]
    assert parts.size == 8 * 12


@pytest.mark.parametrize("matrix", [ritz.Hessian, ritz.GGN])
@pytest.mark.parametrize("name", cases.NAMES)
def test_products_of_every_network_are_the_same_in_two_parts(monkeypatch, name, matrix):
    monkeypatch.setattr(risk_operator, "CHANNELS_LAST_ON", ("cpu",))
    monkeypatch.setattr(layers, "FOLDS_ON", ("cpu",))
    found = []

    def both(fn, inputs):
        graph = trace(fn, inputs)
        found.append((partition(graph, inputs), graph, inputs))
        return graph

    monkeypatch.setattr(compilation, "trace", both)
    monkeypatch.setattr(compilation, "lowered", lambda graph: graph)
    risk = cases.problem(name).risk(plan=ritz.Plan(compile=True, route="reverse"))
    for _ in range(2):
        matrix(risk) @ torch.randn(risk.dim, 3)
    parts, graph, inputs = found[0]
    rows = torch.randn_like(inputs[0])
    shared = parts.shared(*inputs[1:])
    torch.testing.assert_close(tuple(parts.own(rows, *inputs[1:], *shared)), tuple(graph(rows, *inputs[1:])))
    assert 0 < len(operations(parts.shared)) < len(operations(graph))
