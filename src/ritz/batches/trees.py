"""A batch as the user nests it: tensors in tuples, lists, dictionaries, named tuples and dataclasses."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A nested batch with `fn` applied to each tensor; anything else is passed through.

    Example:
        >>> map_tensors((torch.zeros(1), {"y": torch.ones(1), "name": "a"}), lambda x: x + 1)
        (tensor([1.]), {'y': tensor([2.]), 'name': 'a'})
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(value, fn) for key, value in tree.items()}
        if not isinstance(tree, dict):
            return type(tree)(mapped)  # type: ignore[call-arg]
        same = copy.copy(tree)  # a subclass may not be made from a dict, as defaultdict
        same.update(mapped)
        return same
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, fn) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(value, fn) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [f.name for f in dataclasses.fields(tree) if f.init]
        return dataclasses.replace(tree, **{name: map_tensors(getattr(tree, name), fn) for name in fields})
    return tree


def on_host(tree: Any) -> Any:
    """A nested batch with its tensors on the host, to be sent."""
    return map_tensors(tree, lambda x: x.detach().cpu())


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a nested batch, in order.

    Example:
        >>> tensors_of({"x": torch.zeros(1), "rest": [3, torch.ones(1)]})
        [tensor([0.]), tensor([1.])]
    """
    found: list[Tensor] = []
    map_tensors(tree, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def only_tensors(tree: Any) -> bool:
    """Whether a nested batch holds nothing but tensors, in tuples, lists and dictionaries.

    Example:
        >>> only_tensors((torch.zeros(1), [None])), only_tensors((torch.zeros(1), 3))
        (True, False)
    """
    if isinstance(tree, Mapping):
        return all(map(only_tensors, tree.values()))
    if isinstance(tree, tuple | list):
        return all(map(only_tensors, tree))
    return tree is None or isinstance(tree, Tensor)


def with_tensors(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """A nested batch with other tensors in the places of its own.

    Example:
        >>> with_tensors({"x": torch.zeros(1), "n": 3}, [torch.ones(1)])
        {'x': tensor([1.]), 'n': 3}
    """
    given = iter(tensors)
    return map_tensors(tree, lambda _: next(given))


def skeleton(tree: Any) -> str:
    """How a nested batch is put together, without its tensors: their order alone does not tell which is which.

    Example:
        >>> skeleton({"x": torch.zeros(1), "y": None})
        "{'x': '*', 'y': None}"
    """
    stars: Iterable[Any] = itertools.repeat("*")
    return repr(with_tensors(tree, stars))


def stack_batches(batches: Sequence[Any]) -> Any:
    """Several batches as one, tensors joined along their first dimension.

    Example:
        >>> stack_batches([(torch.zeros(1), "a"), (torch.ones(2), "b")])
        (tensor([0., 1., 1.]), 'a')
    """
    columns = [iter(column) for column in zip(*(tensors_of(batch) for batch in batches), strict=True)]
    return with_tensors(batches[0], [torch.cat(list(column)) for column in columns])


def num_samples(batch: Any) -> int:
    """The length of the first tensor that has one.

    Example:
        >>> num_samples((torch.tensor(0.5), torch.zeros(3, 2)))
        3
    """
    for x in tensors_of(batch):
        if x.ndim:
            return len(x)
    raise ValueError(
        f"a batch has no tensor in it that ritz sees: it is a {type(batch).__name__}{_inside(batch)}. Wanted are "
        "tensors in tuples, lists, dictionaries, named tuples or dataclasses; of arrays make tensors (torch.as_tensor, "
        "in collate_fn say), and of other objects dictionaries"
    )


def _inside(batch: Any) -> str:
    kinds = dict.fromkeys(type(own).__name__ for own in batch) if isinstance(batch, tuple | list) else {}
    return f" of {', '.join(kinds)}" if kinds else ""
