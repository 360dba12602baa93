"""A traced function of several tensors in two parts: what does not depend on the first of them, and the rest.

The first is the vectors of a product, the others weights and data. What those decide alone, a forward pass and the
gradient that all vectors share, can be computed once for a batch and kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


@dataclass(frozen=True)
class Parts:
    """f(x, *others) = own(x, *others, *shared(*others)).

    Attributes:
        shared: What does not depend on x.
        own: The rest.
        size: Bytes of the results of `shared`.
    """

    shared: GraphModule
    own: GraphModule
    size: int

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.own(*inputs, *self.shared(*inputs[1:])))


def partition(graph: GraphModule, inputs: Sequence[Tensor]) -> Parts:
    """The parts of a graph at inputs like these.

    A view of what is shared, or a copy of it for each vector, is taken again in the rest: what it is of is kept once.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> inputs = [torch.ones(1), torch.tensor([2.0])]
        >>> parts = partition(make_fx(lambda x, y: (x * y.exp().add_(1),))(*inputs), inputs)
        >>> len(parts.shared.graph.nodes), len(parts.own.graph.nodes), parts.size  # exp, add; times; one number
        (4, 5, 4)
        >>> parts(*inputs)[0].item() == torch.tensor(2.0).exp().item() + 1
        True
    """
    graph = _without_mutation(graph, inputs)
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    depends = {given[0]}  # on the first input
    for node in graph.graph.nodes:
        if depends.intersection(node.all_input_nodes):
            depends.add(node)
    depends |= _returned_apart(graph, depends)
    nodes = list(graph.graph.nodes)
    own, kept = set(depends), set()
    for node in reversed(nodes):  # whoever needs it comes later
        if node in own:
            needed = {other for other in node.all_input_nodes if other not in depends and other.op != "placeholder"}
            own |= {other for other in needed if _is_view(other) or _is_enlarged(other)}
            kept |= needed - own
    ends = [node for node in nodes if node in kept]
    shared = _copied(graph, given[1:], [node for node in nodes if node not in depends], ends)
    rest = _copied(graph, [*given, *ends], [node for node in nodes if node in own], None)
    return Parts(shared, rest, sum(_size(node.meta["val"]) for node in ends))


def _without_mutation(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """The same with no operation that writes to what was there before, so that what depends on what can be read off."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    pure = torch.func.functionalize(graph, remove="mutations")
    found: GraphModule = make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)  # constants
    found.graph.eliminate_dead_code()
    return found


def _returned_apart(graph: GraphModule, depends: set[Node]) -> set[Node]:
    """The end of a graph, where what does not depend on the first input is copied: results may be written to."""
    output = list(graph.graph.nodes)[-1]
    known = {node: node for node in output.all_input_nodes if node in depends}
    with graph.graph.inserting_before(output):
        copies = {
            node: graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            for node in output.all_input_nodes
            if node not in depends
        }
    output.args = map_arg(output.args, (known | copies).__getitem__)
    return {output, *copies.values()}


def _is_view(node: Node) -> bool:
    """Whether its result lies where an input does; a constant of the graph as well."""
    schema = getattr(node.target, "_schema", None)
    aliases = any(one.alias_info is not None for one in getattr(schema, "returns", ()))
    return aliases or node.op == "get_attr" or node.target is torch.ops.aten._unsafe_view.default


def _is_enlarged(node: Node) -> bool:
    """Whether it is made of nothing, or element by element of less than it takes."""
    by_element = node.target is torch.ops.aten.clone.default or torch.Tag.pointwise in getattr(node.target, "tags", ())
    inputs = [other.meta.get("val") for other in node.all_input_nodes]
    made_of = sum(x.untyped_storage().nbytes() for x in inputs if isinstance(x, Tensor))
    return not inputs or (by_element and made_of < _size(node.meta["val"]))


def _copied(
    root: GraphModule, given: Sequence[Node], nodes: Sequence[Node], ends: Sequence[Node] | None
) -> GraphModule:
    """These nodes as a graph of what is `given`, which returns `ends`, or what they themselves return."""
    graph, known = Graph(), {}
    for node in given:
        known[node] = graph.placeholder(node.name)
    for node in nodes:
        if node not in known and node.op != "placeholder":
            known[node] = graph.node_copy(node, known.__getitem__)
    if ends is not None:
        graph.output(tuple(known[node] for node in ends))
        graph.eliminate_dead_code()
    return GraphModule(root, graph)


def _size(value: Tensor) -> int:
    return value.numel() * value.element_size()
