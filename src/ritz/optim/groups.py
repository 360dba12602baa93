"""Parameter groups: made from globs of names, checked, matched with those of a saved state, and moved by a step."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..space import select

_AROUND = ("_orig_mod", "_checkpoint_wrapped_module")


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


def plain(name: str) -> str:
    """A name without what torch.compile, or checkpointing, has put around a module inside the model.

    Example:
        >>> plain("layers.0._orig_mod.weight"), plain("layers.0")
        ('layers.0.weight', 'layers.0')
    """
    return ".".join(part for part in name.split(".") if part not in _AROUND)


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
    held = [[set(map(plain, group["param_names"])) for group in both] for both in (saved, groups)]
    if held[0] != held[1]:
        raise ValueError("the parameter groups of the state_dict hold other parameters than those of this optimizer")
    ordered = []
    for old, new in zip(saved, groups, strict=True):
        index = dict(zip(map(plain, old["param_names"]), old["params"], strict=True))
        names = list(new["param_names"])
        ordered.append({**old, "param_names": names, "params": [index[plain(name)] for name in names]})
    return {**state_dict, "param_groups": ordered}


def check_signs(group: Mapping[str, Any]) -> None:
    """Refuse a group with a negative rate, momentum or weight decay, or a damping that is not positive.

    Example:
        >>> check_signs({"lr": -1.0, "momentum": 0.9, "weight_decay": 0.0, "damping": 1.0})
        Traceback (most recent call last):
        ValueError: lr must not be negative, got -1.0
    """
    for key in ("lr", "momentum", "weight_decay"):
        if not float(group[key]) >= 0:
            raise ValueError(f"{key} must not be negative, got {group[key]}")
    for damping in group["damping"].values() if isinstance(group["damping"], Mapping) else (group["damping"],):
        _check_damping(damping)


def _check_damping(damping: Any) -> None:
    if not float(damping) > 0:
        raise ValueError(f"damping must be positive, got {damping}")


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
            raise ValueError(f"damping has no value for block {block!r}; it has values for {', '.join(damping)}")
        damping = damping[block]
    _check_damping(damping)
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


def descend(
    params: list[Tensor],
    moves: list[Tensor],
    group: Mapping[str, Any],
    state: MutableMapping[Tensor, dict[str, Any]],
) -> None:
    """m <- momentum m + v, w <- w - lr m, for the parameters of a group at once; decoupled weight decay before it.

    Example:
        >>> w, settings = torch.ones(1), {"lr": 0.5, "lr_scale": 1.0, "momentum": 0.0, "decoupled": True}
        >>> descend([w], [torch.ones(1)], {**settings, "weight_decay": 0.2}, {})
        >>> w.item()  # 0.9 - 0.5
        0.4
    """
    rate = rate_of(group)
    if group["decoupled"] and group["weight_decay"]:
        torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
    if group["momentum"]:
        for p, move in zip(params, moves, strict=True):
            if "momentum_buffer" not in state[p]:
                state[p]["momentum_buffer"] = torch.zeros_like(move)
        buffers = [state[p]["momentum_buffer"] for p in params]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, moves)
        moves = buffers
    torch._foreach_add_(params, moves, alpha=-rate)
