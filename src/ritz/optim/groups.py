"""Parameter groups by name: made from globs, and matched with those of a saved state."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..space import select


def grouped(params: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of named parameters; those in none of the given ones come last, with the settings of all.

    Example:
        >>> params = {"fc.weight": torch.ones(1), "fc.bias": torch.ones(1)}
        >>> [[name for name, _ in group["params"]] for group in grouped(params, [{"params": "*.bias", "lr": 1.0}])]
        [['fc.bias'], ['fc.weight']]
    """
    left, made = dict(params), []
    for group in groups:
        globs = group["params"]
        if not isinstance(globs, str) and not (isinstance(globs, Sequence) and all(isinstance(g, str) for g in globs)):
            raise TypeError('the "params" of a group are globs of names, such as "*.bias", not tensors')
        chosen = select(params, globs)
        twice = [name for name in chosen if name not in left]
        if twice:
            raise ValueError(f"{twice[0]} is in two groups")
        made.append({**group, "params": [(name, left.pop(name)) for name in chosen]})
    return made + ([{"params": list(left.items())}] if left else [])


def renamed(state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A saved state with the parameters of each group in the order that they have here.

    Raises:
        ValueError: If the groups hold other parameters.

    Example:
        >>> saved = {"param_groups": [{"param_names": ["a", "b"], "params": [0, 1]}], "state": {}}
        >>> renamed(saved, [{"param_names": ["b", "a"]}])["param_groups"][0]["params"]
        [1, 0]
    """
    saved = state_dict["param_groups"]
    if [set(group["param_names"]) for group in saved] != [set(group["param_names"]) for group in groups]:
        raise ValueError("the parameter groups of the state_dict hold other parameters than those of this optimizer")
    ordered = []
    for old, new in zip(saved, groups, strict=True):
        index = dict(zip(old["param_names"], old["params"], strict=True))
        names = list(new["param_names"])
        ordered.append({**old, "param_names": names, "params": [index[name] for name in names]})
    return {**state_dict, "param_groups": ordered}


def damping_of(block: str, group: Mapping[str, Any]) -> float:
    """The damping of a block as a group has it now: one number, or one for each block.

    Raises:
        ValueError: If there is none for this block, or if it is not positive.

    Example:
        >>> damping_of("fc", {"damping": {"fc": 0.1, "conv": 1.0}})
        0.1
    """
    damping = group["damping"]
    if isinstance(damping, Mapping):
        if block not in damping:
            raise ValueError(f"no damping for block {block!r}; there is some for {', '.join(damping)}")
        damping = damping[block]
    if not float(damping) > 0:
        raise ValueError(f"damping must be positive, got {damping}")
    return float(damping)


def rate_of(group: Mapping[str, Any]) -> float:
    """The learning rate, with the factor that a damping rule may have set.

    Example:
        >>> rate_of({"lr": 0.1, "lr_scale": 2.0})
        0.2
    """
    return float(group["lr"]) * float(group["lr_scale"])


def decayed(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The gradient, with weight decay added to it unless that is decoupled.

    Example:
        >>> p = torch.ones(1)
        >>> p.grad = torch.ones(1)
        >>> decayed(p, {"weight_decay": 0.5, "decoupled": False}).item()
        1.5
    """
    assert p.grad is not None
    return p.grad if group["decoupled"] or not group["weight_decay"] else p.grad.add(p, alpha=group["weight_decay"])
