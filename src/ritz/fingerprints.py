"""What a run depends on, as a tree of marks; and the choices that it made on the way, to be made again.

A fingerprint holds the matrix (which operators, of which risk), the weights (every parameter and buffer), the data
(every tensor of every batch), the plan, the settings of the call and the code. Two calls with one fingerprint end in
the same numbers, to the bit on one CPU, if they also make the same choices: the route of Hessian products, which the
clock decides, and the chunks and pieces that memory has left room for. Those are saved and restored.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import __version__
from .batches import Batches, mark_in_any_order, skeleton, tensors_of
from .checkpoint import Checkpoint, Saved, Unsaved, as_checkpoint, digest
from .operators.base import Operator
from .risk import Risk

# what decides the numbers; the rest of the package shows, writes and trains
_CODE = (
    "*.py", "batches/*.py", "losses/*.py", "operators/**/*.py", "krylov/*.py", "estimators/*.py", "measures/**/*.py",
)  # fmt: skip
# what operators find out while they run, and what is found from other fields
_PASSING = {"products", "space", "dtype", "device", "risk", "world"}
_CHOSEN = ("_chunk", "_batched", "route", "error")  # of an operator; the last is measured once, along its first vector
_PIECE = "_piece"  # of a risk
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # where a function lies, which is another place in each process


@contextlib.contextmanager
def resumable(
    checkpoint: Checkpoint | str | os.PathLike[str] | None,
    subject: Operator | Risk,
    call: str,
    settings: Mapping[str, Any],
    **more: Any,
) -> Iterator[Saved]:
    """The state of a call on an operator or a risk; one that keeps nothing for None.

    The choices that were made for it are made again. `more` goes into the fingerprint.

    Raises:
        ValueError: If the state is that of another call; both fingerprints are named, and what differs.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> with resumable(None, DenseOperator(torch.eye(2)), "trace", {"seed": 0}) as saved:
        ...     print(saved.latest)
        None
    """
    kept = as_checkpoint(checkpoint)
    if kept is None:
        yield Unsaved(subject.world)
        return
    with kept.open({**fingerprint(subject, call, settings), **more}, subject.world) as saved:
        if saved.latest is not None:
            choose(subject, saved.latest["choices"], saved.folder)
        saved.about = lambda: choices(subject)
        yield saved


def fingerprint(subject: Operator | Risk, call: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a call depends on.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> one, two = (fingerprint(DenseOperator(scale * torch.eye(2)), "trace", {"seed": 0}) for scale in (1, 2))
        >>> one["matrix"]["base"] == two["matrix"]["base"], one["settings"]
        (False, {'seed': 0})
    """
    kind = "matrix" if isinstance(subject, Operator) else "solution"
    described = {"base": of_operator(subject)} if isinstance(subject, Operator) else of_risk(subject)
    return {"call": call, "settings": dict(settings), kind: described, "code": code()}


def of_operator(operator: Operator) -> dict[str, Any]:
    """An operator: its class, its numbers, marks of its tensors, and the operators and the risk that it stands on.

    A function is known by its name alone.
    """
    found: dict[str, Any] = {
        "class": type(operator).__name__, "dim": operator.dim, "dtype": str(operator.dtype),
        "device": operator.device.type,
    }  # fmt: skip
    own = {name: value for name, value in vars(operator).items() if name not in _PASSING and name not in _CHOSEN}
    found |= _fields(own)
    risk = getattr(operator, "risk", None)
    return found | ({"risk": of_risk(risk)} if isinstance(risk, Risk) else {})


def of_risk(risk: Risk) -> dict[str, Any]:
    """A risk: model, loss, parameters, mode and plan by name, weights and data by marks of every tensor."""
    state = risk.state()
    return {
        "model": f"{type(risk.model).__name__} {digest(_ADDRESS.sub('', repr(risk.model)))}",
        "loss": "batch_loss" if risk.opaque else of_loss(risk.output_loss),
        "params": f"{len(risk.names)} tensors {digest(risk.names)}", "mode": risk.mode, "dropout": risk.dropout,
        "dtype": str(risk.dtype), "device": risk.device.type,
        "weights": f"{len(state)} tensors {digest([[name, mark([t])] for name, t in state.items()])}",
        "data": of_data(risk.batches), "plan": dataclasses.asdict(risk.plan),
    }  # fmt: skip


def of_loss(loss: Any) -> dict[str, Any]:
    """A loss: its class and settings; a function is known by its name alone.

    Example:
        >>> from ritz.losses import as_loss
        >>> found = of_loss(as_loss(torch.nn.CrossEntropyLoss(label_smoothing=0.1)))
        >>> found["class"], found["label_smoothing"]
        ('CrossEntropy', 0.1)
    """
    return {"class": type(loss).__name__, **_fields(getattr(loss, "__dict__", {}))}


def of_data(batches: Batches) -> str:
    """Samples, batches and a mark of every tensor of every batch; of the samples in any order where they have none.

    Costs one walk over the data, of the hundreds that a run takes.
    """
    batches.prepare()
    if batches.ordered or batches.cached:
        marks = [f"{skeleton(batch.data)} {mark(tensors_of(batch.data))}" for batch in batches]
        return f"{batches.num_samples} samples in {len(marks)} batches {digest(marks)}"
    return f"{batches.num_samples} samples in any order {mark_in_any_order(batches):.9g}"


def mark(tensors: list[Tensor]) -> str:
    """The mark of tensors: shapes, dtypes and every byte.

    Example:
        >>> mark([torch.zeros(2)]) == mark([torch.zeros(2)]), mark([torch.zeros(2)]) == mark([torch.zeros(1, 2)])
        (True, False)
    """
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        plain = plain.cpu().clone(memory_format=torch.contiguous_format)  # one element may have any stride
        found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


@cache
def code(patterns: tuple[str, ...] = _CODE) -> dict[str, str]:
    """Versions, and the mark of the files that decide the numbers."""
    here, found = Path(__file__).parent, hashlib.blake2b(digest_size=8)
    for path in sorted(path for pattern in patterns for path in here.glob(pattern)):
        found.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return {"ritz": f"{__version__} {found.hexdigest()}", "torch": torch.__version__}


def _named(value: Any) -> str:
    """A function or an object of the user's by its name."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an object that decide what it computes, without those of its own workings."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = mark([value])
        elif name.startswith("_"):
            continue
        elif isinstance(value, Operator):
            found[name] = of_operator(value)
        elif isinstance(value, nn.Module):
            found[name] = of_loss(value) | {key: mark([tensor]) for key, tensor in value.state_dict().items()}
        elif isinstance(value, bool | int | float | str) or value is None:
            found[name] = value
        elif callable(value):
            found[name] = _named(value)
    return found


# -------------------------------------------------------------------------------------------------- choices


def choices(subject: Operator | Risk) -> list[dict[str, Any]]:
    """What an operator, and those it stands on, have found out: routes, vectors in a chunk, samples in a piece."""
    found = []
    for each in _all(subject):
        own = {name: getattr(each, name) for name in _CHOSEN if isinstance(each, Operator) and hasattr(each, name)}
        risk = _risk(each)
        if isinstance(risk, Risk):
            routes = [[list(names), route] for names, route in risk.routes.items()]
            own |= {"routes": routes, "piece": getattr(risk, _PIECE, None)}
        found.append(own)
    return found


def choose(subject: Operator | Risk, saved: list[dict[str, Any]], folder: Path) -> None:
    """Make the choices that were saved.

    Raises:
        ValueError: If the caller asks for another route than the run was begun with.
    """
    for each, own in zip(_all(subject), saved, strict=True):
        route = getattr(each, "route", "auto")
        if "route" in own and "auto" not in (route, own["route"]) and route != own["route"]:
            raise ValueError(
                f"the state in {folder} is of another run: its products use the {own['route']} route, but this call "
                f"asks for {route!r}; use route='auto', which keeps the route of the state, or name another folder"
            )
        for name in _CHOSEN:
            if name in own and own[name] != "auto":
                setattr(each, name, own[name])
        risk = _risk(each)
        if isinstance(risk, Risk):
            risk.routes.update({tuple(names): chosen for names, chosen in own["routes"]})
            setattr(risk, _PIECE, own["piece"])


def _risk(subject: Operator | Risk) -> Any:
    return subject if isinstance(subject, Risk) else getattr(subject, "risk", None)


def _all(subject: Operator | Risk) -> list[Operator | Risk]:
    """An operator and those it stands on, or a risk."""
    below = [getattr(subject, name, None) for name in ("base", "right")]
    return [subject, *(each for found in below if isinstance(found, Operator) for each in _all(found))]
