"""Seeds that are added to a result: what was measured stays, others are measured, and all are judged together.

A short job has room for few seeds, and nothing of it may be left when the next one begins but the result. So the next
one goes on after the seeds of the result, with the recipes that it has.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..nonfinite import in_numbers
from .grouping import Flat, regrouped, ungrouped

Result = Mapping[str, Any]
_LENGTH = ("epochs", "batch_size")


def next_seed(before: Result) -> int:
    """The first seed that a result does not have.

    Example:
        >>> next_seed({"seeds": [0, 1, 2]})
        3
    """
    return max(before["seeds"], default=-1) + 1


def refuse_other_setting(before: Result, budget: str, device: str) -> None:
    """Refuse to add what is measured in another way; how networks are trained is in their recipes.

    Raises:
        ValueError: If budget or kind of device are others.
    """
    own = before["setting"]
    for what, there, here in (("budget", own["budget"], budget), ("device", _kind(own["device"]), _kind(device))):
        if there != here:
            raise ValueError(
                f"seeds are added to a result that was made in the same way: it is of {what} {there}, this is {here}; "
                "set it so, or write another result by --out"
            )


def refuse_other_experiment(before: Result, paper: str, item: str, judged_by_rows: bool) -> None:
    """Refuse a result that is of something else, or whose claims need more than its rows.

    Raises:
        ValueError: If it is.
    """
    if (before["paper"], before["item"]) != (paper, item):
        raise ValueError(f"seeds of {paper} {item} cannot be added to a result of {before['paper']} {before['item']}")
    if not judged_by_rows:
        raise ValueError(f"{paper} {item} is judged by more than its result holds: run all seeds in one call")


def refuse_other_recipes(before: Result, recipes: Mapping[str, Flat]) -> None:
    """Refuse runs that are trained otherwise than those of the same name, whatever their seed.

    A setting that one of both does not know counts as off. A run of another name, as one with a damping that comes from
    the seeds themselves, is held against the lengths of all.

    Raises:
        ValueError: If one is; it names the run and the first settings that differ.

    Example:
        >>> before = {"recipes": [{"runs": ["x/seed0"], "recipe": {"epochs": 3}}]}
        >>> refuse_other_recipes(before, {"x/seed1": {"epochs": 3, "fast": False}})
        >>> refuse_other_recipes(before, {"x/seed1": {"epochs": 4}})
        Traceback (most recent call last):
        ValueError: x/seed1 has other settings than the result that it is to be added to (epochs 4 instead of 3); ...
    """
    known = {_any_seed(run): recipe for run, recipe in ungrouped(before["recipes"]).items()}
    for run, own in recipes.items():
        there, asked = known.get(_any_seed(run)), None
        if there is None:
            alike = (one for one in known.values() if all(one.get(key) == own.get(key) for key in _LENGTH))
            there, asked = next(alike, next(iter(known.values()), own)), _LENGTH
        differ = [key for key in asked or {**there, **own} if (there.get(key) or None) != (own.get(key) or None)]
        if differ:
            said = ", ".join(f"{key} {own.get(key)} instead of {there.get(key)}" for key in differ[:3])
            raise ValueError(
                f"{run} has other settings than the result that it is to be added to ({said}); run all seeds again"
            )


def rows_of(before: Result, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a result and those that are new; what both have, as notes without a seed, once."""
    there = in_numbers(list(before["rows"]))
    return [*there, *(row for row in rows if "seed" in row or row not in there)]


def together(before: Result, added: Result) -> dict[str, Any]:
    """What a result says of how it was made, with that of the seeds that were added; rows and claims are `added`'s.

    Example:
        >>> common = {"versions": {"torch": "2.13"}, "machine": "CPU", "recipes": [], "setting": {"seeds": 2}}
        >>> before = {**common, "seeds": [0, 1], "commit": "abc", "seconds": 10.0}
        >>> found = together(before, {**common, "seeds": [0, 1, 2, 3], "commit": "def", "seconds": 12.5})
        >>> found["commit"], found["machine"], found["seconds"], found["setting"]
        ('abc, def', 'CPU', 22.5, {'seeds': 4})
    """
    versions = {key: _both(before["versions"].get(key), own) for key, own in added["versions"].items()}
    recipes = regrouped(before["recipes"], added["recipes"])
    made = {run.partition("/")[2] for group in recipes for run in group["runs"]}  # ITEM/NAME
    left = [run for run in (*before.get("left", []), *added.get("left", [])) if run not in made]
    return {
        **{key: value for key, value in added.items() if key != "left"},
        "setting": {**added["setting"], "seeds": len(added["seeds"])},
        "commit": _both(before["commit"], added["commit"]),
        "versions": versions,
        "machine": _both(before["machine"], added["machine"]),
        "seconds": round(before["seconds"] + added["seconds"], 1),
        "recipes": recipes,
        **({"left": left} if left else {}),
    }


def _both(first: str | None, second: str | None) -> str | None:
    """What two parts of a result were made by."""
    known = [part for part in (first, second) if part]
    if len(known) == 2 and known[1] in known[0].split(", "):
        return known[0]
    return ", ".join(known) or None


def _any_seed(run: str) -> str:
    """The name of a run without its seed, which has that word before it or stands last."""
    return re.sub(r"(?<=seed)[ -]?\d+|\d+$", "", run)


def _kind(device: str) -> str:
    return device.partition(":")[0]
