"""Functions of nested batches: tensors in tuples, lists, dictionaries, named tuples and dataclasses."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def map_tensors(tree: Any, fn: Callable[[Any], Any], leaf: Callable[[Any], bool] | None = None) -> Any:
    """A nested batch with `fn` applied to each tensor, or to each `leaf`; everything else stays as it is.

    Example:
        >>> map_tensors((torch.zeros(1), {"y": torch.ones(1), "name": "a"}), lambda x: x + 1)
        (tensor([1.]), {'y': tensor([2.]), 'name': 'a'})
        >>> map_tensors((3, [1, 2]), lambda x: x + 1, lambda x: x == 3)
        (4, [1, 2])
    """
    if isinstance(tree, Tensor) if leaf is None else leaf(tree):
        return fn(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(value, fn, leaf) for key, value in tree.items()}
        if not isinstance(tree, dict):
            return type(tree)(mapped)  # type: ignore[call-arg]
        same = copy.copy(tree)  # some subclasses, such as defaultdict, cannot be made from a dict
        same.update(mapped)
        return same
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, fn, leaf) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(value, fn, leaf) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [f.name for f in dataclasses.fields(tree) if f.init]
        return dataclasses.replace(tree, **{name: map_tensors(getattr(tree, name), fn, leaf) for name in fields})
    return tree


def on_host(tree: Any) -> Any:
    """A nested batch with its tensors on the host, to be sent to other ranks."""
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
    """A nested batch with other tensors in place of its own.

    Example:
        >>> with_tensors({"x": torch.zeros(1), "n": 3}, [torch.ones(1)])
        {'x': tensor([1.]), 'n': 3}
    """
    given = iter(tensors)
    return map_tensors(tree, lambda _: next(given))


def skeleton(tree: Any) -> str:
    """The structure of a nested batch without its tensors, which tells which tensor is which.

    Example:
        >>> skeleton({"x": torch.zeros(1), "y": None})
        "{'x': '*', 'y': None}"
    """
    stars: Iterable[Any] = itertools.repeat("*")
    return repr(with_tensors(tree, stars))


def has_rows(size: int) -> Callable[[Any], bool]:
    """A test whether something has an entry for each of `size` samples: a tensor, or a list of lengths or names.

    Example:
        >>> [has_rows(2)(x) for x in (torch.zeros(2), torch.zeros(3), [5, 7], ("a", "b", "c"), [torch.zeros(1)] * 2)]
        [True, False, True, False, False]
    """

    def has(x: Any) -> bool:
        if isinstance(x, Tensor | np.ndarray):
            return x.ndim > 0 and len(x) == size
        return isinstance(x, list | tuple) and len(x) == size and not tensors_of(x)

    return has


def take_rows(x: Any, rows: Tensor) -> Any:
    """Entries of a tensor, an array, a list or a tuple, in any order and with repeats.

    Example:
        >>> take_rows(["a", "b", "c"], torch.tensor([2, 0]))
        ['c', 'a']
    """
    if isinstance(x, Tensor):
        return x[rows]
    if isinstance(x, np.ndarray):
        return x[rows.cpu().numpy()]
    return type(x)(x[row] for row in rows.tolist())


def stack_batches(batches: Sequence[Any]) -> Any:
    """Several batches as one: tensors joined along their first dimension, and lists with an entry for each sample.

    Raises:
        TypeError: If they contain anything else that is not the same in all.

    Example:
        >>> stack_batches([(torch.zeros(1), ["a"]), (torch.ones(2), ["b", "c"])])
        (tensor([0., 1., 1.]), ['a', 'b', 'c'])
    """
    kinds = [has_rows(num_samples(batch)) for batch in batches]
    rests = {repr(map_tensors(batch, lambda _: "*", kind)) for batch, kind in zip(batches, kinds, strict=True)}
    if len(rests) > 1:
        raise TypeError("batches can be joined only if they differ in nothing but their samples")
    rows = [_leaves(batch, kind) for batch, kind in zip(batches, kinds, strict=True)]
    joined = iter([_joined(column) for column in zip(*rows, strict=True)])
    return map_tensors(batches[0], lambda _: next(joined), kinds[0])


def _leaves(tree: Any, leaf: Callable[[Any], bool]) -> list[Any]:
    found: list[Any] = []

    def note(x: Any) -> Any:
        found.append(x)
        return x

    map_tensors(tree, note, leaf)
    return found


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return type(parts[0])(itertools.chain.from_iterable(parts))


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
        f"ritz finds no tensor in a batch, which is a {type(batch).__name__}{_inside(batch)}. Give tensors in tuples, "
        "lists, dictionaries, named tuples or dataclasses; turn arrays into tensors (torch.as_tensor, in collate_fn "
        "for example), and other objects into dictionaries"
    )


def _inside(batch: Any) -> str:
    kinds = dict.fromkeys(type(own).__name__ for own in batch) if isinstance(batch, tuple | list) else {}
    return f" of {', '.join(kinds)}" if kinds else ""
