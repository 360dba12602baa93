"""Recipes as results have them: once for all runs that differ in name and seed alone."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Flat = dict[str, Any]  # the way into a recipe -> what is there
_OF_THE_RUN = ("name", "seed", "type")


def grouped(recipes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first in full, and of others what is different.

    Example:
        >>> rate = {"call": "SGD", "keywords": {"lr": 0.1}}
        >>> first = {"name": "slow", "epochs": 3, "optimizer": rate, "seed": 0}
        >>> other = {**first, "optimizer": {"call": "SGD", "keywords": {"lr": 1.0}}}
        >>> for group in grouped({"a": first, "b": {**first, "seed": 1}, "c": other}):
        ...     print(group)
        {'runs': ['a', 'b'], 'recipe': {'epochs': 3, 'optimizer.call': 'SGD', 'optimizer.keywords.lr': 0.1}}
        {'runs': ['c'], 'differs': {'optimizer.keywords.lr': 1.0}}
    """
    return _grouped({run: flat(recipe) for run, recipe in recipes.items()})


def ungrouped(groups: Iterable[Mapping[str, Any]]) -> dict[str, Flat]:
    """The recipe of every run.

    Example:
        >>> ungrouped([{"runs": ["a"], "recipe": {"epochs": 3, "lr": 1.0}}, {"runs": ["b"], "differs": {"lr": None}}])
        {'a': {'epochs': 3, 'lr': 1.0}, 'b': {'epochs': 3}}
    """
    found: dict[str, Flat] = {}
    first: Flat = {}
    for group in groups:
        first = first or group.get("recipe", {})
        own = {key: value for key, value in {**first, **group.get("differs", {})}.items() if value is not None}
        found |= dict.fromkeys(group["runs"], own)
    return found


def regrouped(*results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of several results as those of one.

    Example:
        >>> regrouped([{"runs": ["seed 0"], "recipe": {"lr": 1.0}}], [{"runs": ["seed 1"], "recipe": {"lr": 1.0}}])
        [{'runs': ['seed 0', 'seed 1'], 'recipe': {'lr': 1.0}}]
    """
    return _grouped({run: recipe for groups in results for run, recipe in ungrouped(groups).items()})


def flat(recipe: Mapping[str, Any]) -> Flat:
    """Nested dictionaries as one, without what is of one run, and without what is empty."""
    return _flat({key: value for key, value in recipe.items() if key not in _OF_THE_RUN})


def _flat(node: Any, where: str = "") -> Flat:
    if not isinstance(node, dict):
        return {} if node in (None, []) else {where: node}
    found: Flat = {}
    for key, value in node.items():
        found |= _flat(value, f"{where}.{key}" if where else key)
    return found


def _grouped(recipes: Mapping[str, Flat]) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    first: Flat = {}
    for run, own in recipes.items():
        first = first or own
        if own == first:
            said = {"recipe": own}
        else:
            said = {"differs": {key: own.get(key) for key in {**first, **own} if own.get(key) != first.get(key)}}
        groups.setdefault(json.dumps(said), {"runs": [], **said})["runs"].append(run)
    return list(groups.values())
