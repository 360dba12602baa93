"""Layers joined by a positively homogeneous path: one can be scaled up if those that read it are scaled down."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import UnsupportedError
from ...risk import Risk
from .degrees import Conflict, Tape, Weight, solve
from .tape import trace


@dataclass(frozen=True)
class Joint:
    """A layer, and the layer or layers that read it.

    Layers are named by their modules; a weight that is not called `weight` by its own name.

    Example:
        >>> joint = Joint("fc1", ("fc2",), ("fc1.weight", "fc1.bias"), ("fc2.weight",))
        >>> str(joint)
        'fc1 -> fc2'
    """

    first: str
    second: tuple[str, ...]
    up: tuple[str, ...]  # parameters to multiply by c
    down: tuple[str, ...]  # parameters to divide by c

    def __str__(self) -> str:
        return f"{self.first} -> {', '.join(self.second)}"


def joints(risk: Risk) -> tuple[Joint, ...]:
    """Every layer that can be scaled up while those that read it are scaled down, in the order of the forward pass.

    A path is positively homogeneous if scaling its input scales its output equally. This holds through ReLU, LeakyReLU,
    PReLU, pooling, reshaping and dropout; not through tanh, GELU, softmax, a normalisation, or a sum with anything that
    is not scaled as well. A BatchNorm or LayerNorm with gamma and beta can itself be the first layer. Joints without a
    chosen parameter are left out: they would change no number of this risk.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> risk = ritz.Risk(model, nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 1)))
        >>> [str(joint) for joint in joints(risk)]
        ['0 -> 2']
    """
    return tuple(_search(risk)[0])


def pick(risk: Risk, joint: Joint | int | str | None) -> Joint:
    """The joint given as such, by its index or by the name of its first layer; the first one if None.

    Raises:
        UnsupportedError: If the network has no such joint.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1)))
        >>> pick(risk, "0") == pick(risk, 0) == pick(risk, None)
        True
    """
    found, reasons = _search(risk)
    if not found:
        raise UnsupportedError(f"no two layers are joined by a positively homogeneous path: {listed(reasons)}")
    if isinstance(joint, Joint):
        if joint not in found:
            raise UnsupportedError(f"{joint} is no joint of this network; there are {', '.join(map(str, found))}")
        return joint
    if isinstance(joint, str):
        named = {each.first: each for each in found}
        if joint not in named:
            why = reasons.get(joint, "there is no such weight, or none of the parameters is chosen")
            raise UnsupportedError(f"{joint!r} is not the first layer of a joint: {why}; {', '.join(named)} would do")
        return named[joint]
    if joint is not None and not 0 <= joint < len(found):
        raise ValueError(f"joint must be from 0 to {len(found) - 1}, an index into joints(risk); got {joint}")
    return found[joint or 0]


def _search(risk: Risk) -> tuple[list[Joint], dict[str, str]]:
    """The joints, and for every other layer why it is not the first layer of a joint."""
    tape = trace(risk)
    found: list[Joint] = []
    reasons: dict[str, str] = {}
    for weight in tape.weights:
        try:
            joint = _joint(tape, weight)
        except Conflict as conflict:
            reasons[layer_of(weight.name)] = str(conflict)
            continue
        known = {(other.up, other.down) for other in found}
        if not set(risk.names).isdisjoint(joint.up + joint.down) and (joint.up, joint.down) not in known:
            found.append(joint)
    return found, reasons


def _joint(tape: Tape, weight: Weight) -> Joint:
    """The joint whose first layer has this weight."""
    solution = solve(tape, {weight.name: 1}, lambda degree: -degree)
    if solution.output:
        raise Conflict("the outputs scale with it")
    order = {name: place for place, name in enumerate(tape.shapes)}
    up, down = (tuple(sorted(solution.moved(power), key=order.__getitem__)) for power in (1, -1))
    if len(up) + len(down) < sum(map(bool, solution.exponents.values())):  # other powers of c
        raise Conflict("it acts more than once")
    if not down:
        raise Conflict("no layer reads it")
    return Joint(layer_of(weight.name), tuple(dict.fromkeys(map(layer_of, down))), up, down)


def layer_of(name: str) -> str:
    """The module of a weight, or the weight's own name if it is not called `weight`.

    Example:
        >>> layer_of("block.conv.weight"), layer_of("scale")
        ('block.conv', 'scale')
    """
    return name.removesuffix(".weight")


def listed(reasons: Mapping[str, str]) -> str:
    """The first few reasons, by layer.

    Example:
        >>> listed({"fc1": "aten::tanh is not positively homogeneous"})
        'fc1: aten::tanh is not positively homogeneous'
    """
    shown = [f"{layer}: {why}" for layer, why in list(reasons.items())[:4]]
    more = [f"and {len(reasons) - 4} more"] if len(reasons) > 4 else []
    return "; ".join(shown + more) or "no chosen weight takes part in the outputs"
