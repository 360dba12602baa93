"""The weights and buffers of a model as a risk reads them: live, or set to others, in its precision, on its device."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from .sameness import layout_of, place_of
from .sharded import ShardedModel

Params = dict[str, Tensor]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What `model.modules()` gives, without their names, which take the host longer than most that is done with them.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Tanh()), nn.ReLU())
        >>> modules_of(model) == list(model.modules())
        True
    """
    found: dict[int, nn.Module] = {}
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            left += [part for _, part in module._modules.items()][::-1]
    return list(found.values())


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name in a state dict to the first of those of the same tensor, by which a risk has it.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> first_names(nn.Sequential(layer, layer))
        {'0.weight': '0.weight', '0.bias': '0.bias', '1.weight': '0.weight', '1.bias': '0.bias'}
    """
    first: dict[Tensor, str] = {}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(tensor, name) for name, tensor in every}


def by_first_names(named: Mapping[str, Tensor], model: nn.Module) -> Params:
    """Named tensors by the names that a risk has for them: without those of wrappers, and each tied one once.

    What the model has no tensor for stays as it is.

    Raises:
        ValueError: If two names of one tensor have different values.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> by_first_names({"module.1.weight": torch.ones(1, 1)}, nn.Sequential(layer, layer))
        {'0.weight': tensor([[1.]])}
    """
    first, given, source = first_names(model), dict[str, Tensor](), dict[str, str]()
    for name, value in inner_names(named, first).items():
        own = first.get(name, name)
        if own in given and not torch.equal(given[own], value):
            raise ValueError(
                f"{source[own]} and {name} are one tensor of the model, and differ here; give one of the two"
            )
        given[own], source[own] = value, name
    return given


_WRAPPING = frozenset({"module", "_orig_mod", "_forward_module"})  # of data-parallel models, torch.compile and Fabric


def inner_names(named: Mapping[str, Tensor], known: Collection[str], whatever: bool = False) -> dict[str, Tensor]:
    """Named tensors without what a wrapper puts before the names of all of them, if some of these are known then.

    Args:
        named: By the names of a wrapped model, or of the one inside.
        known: Names of the one inside.
        whatever: Take off any word before all names, as training loops have them, and not those of wrappers alone.

    Example:
        >>> inner_names({"_orig_mod.module.bias": torch.ones(1)}, {"bias"})
        {'bias': tensor([1.])}
    """
    inner = dict(named)
    while inner and not any(name in known for name in inner):
        heads = {name.partition(".")[0] if "." in name else "" for name in inner}
        if len(heads) > 1 or "" in heads or not (whatever or heads <= _WRAPPING):
            return dict(named)
        inner = {name.partition(".")[2]: tensor for name, tensor in inner.items()}
    return inner


@dataclass(frozen=True)
class Placed:
    """Weights and buffers as of one moment, detached, in one precision and on one device.

    Attributes:
        chosen: The parameters that are asked for.
        others: Everything else.
    """

    chosen: Params = field(default_factory=dict)
    others: Params = field(default_factory=dict)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All of them, the chosen ones first."""
        return [*self.chosen.values(), *self.others.values()]

    @cached_property
    def place(self) -> tuple[Hashable, ...]:
        """Where they lie."""
        return place_of(self.tensors)

    @cached_property
    def layout(self) -> tuple[Hashable, ...]:
        """Their shapes, strides and kinds."""
        return layout_of(self.tensors)


class Weights:
    """What a model holds now, with some of it replaced; copies that had to be cast are kept until a weight moves.

    Args:
        model: Read live, never changed.
        sharded: The model as FSDP2 has spread it over ranks, if it has.
        override: Tensors in the place of the model's own, by name.

    Raises:
        ValueError: If the model has no such tensor, or one of another shape.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> weights = Weights(model, override={"weight": torch.full((1, 1), 2.0)})
        >>> weights.placed(["weight"], torch.device("cpu"), torch.float64).chosen
        {'weight': tensor([[2.]], dtype=torch.float64)}
    """

    def __init__(
        self, model: nn.Module, sharded: ShardedModel | None = None, override: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model, self.sharded = model, sharded
        self.override = dict(override or {})
        self._key: Hashable = None
        self._kept = Placed()

    def at(self, params: Mapping[str, Tensor]) -> "Weights":
        """The same with copies of some tensors in the place of the model's; a tied one goes by any of its names."""
        known, given = self.live(), by_first_names(params, self.model)
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"the model has no parameter or buffer named {name!r}")
            if value.shape != known[name].shape:
                raise ValueError(f"{name} has shape {tuple(known[name].shape)}, got {tuple(value.shape)}")
        copies = {name: value.detach().clone() for name, value in given.items()}
        return Weights(self.model, self.sharded, {**self.override, **copies})

    def again(self) -> "Weights":
        """The same with nothing kept yet."""
        return Weights(self.model, self.sharded, self.override)

    def version(self) -> Hashable:
        """Changes whenever a weight or buffer does."""
        if self.sharded is not None:
            return self.sharded.version(), tuple(t.data_ptr() for t in self.override.values())
        tensors = list(self.live().values()) if self.override else self._tensors()
        return tuple([(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors])

    def _tensors(self) -> list[Tensor]:
        """Those of the model, without their names."""
        modules = modules_of(self.model)
        held = [part for module in modules for part in (module._parameters, module._buffers) if part]
        return [t for part in held for t in part.values() if t is not None]

    def live(self) -> Params:
        """Every parameter and buffer as it is."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers()), **self.override}

    def with_params(self, params: Params) -> Params:
        """These parameters, and those that are set to others than the model's."""
        own = {name for name, _ in self.model.named_parameters()}
        return {**{name: t for name, t in self.override.items() if name in own}, **params}

    def placed(self, names: Sequence[str], device: torch.device, dtype: torch.dtype) -> Placed:
        """All as of now, the named parameters apart; the same object as long as torch counts no change."""
        key = self.version(), tuple(names), device, dtype
        if key != self._key:
            with torch.inference_mode(False):
                every = {name: self._place(t, device, dtype) for name, t in self.live().items()}
            self._kept = Placed({n: every[n] for n in names}, {n: t for n, t in every.items() if n not in names})
            self._key = key
        return self._kept

    def _place(self, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        dtype = dtype if tensor.is_floating_point() else tensor.dtype
        if self.sharded is not None:
            return self.sharded.full(tensor).to(dtype)
        placed = tensor.detach().to(device, dtype)
        return placed.clone() if placed.is_inference() else placed
