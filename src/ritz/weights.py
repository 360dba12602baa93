"""The weights and buffers of a model as a risk reads them: live, or set to others, in its precision, on its device."""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .sharded import ShardedModel

Params = dict[str, Tensor]


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
        >>> weights.placed(["weight"], torch.device("cpu"), torch.float64)
        ({'weight': tensor([[2.]], dtype=torch.float64)}, {})
    """

    def __init__(
        self, model: nn.Module, sharded: ShardedModel | None = None, override: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model, self.sharded = model, sharded
        self.override = dict(override or {})
        self._key: Hashable = None
        self._kept: tuple[Params, Params] = ({}, {})

    def at(self, params: Mapping[str, Tensor]) -> "Weights":
        """The same with copies of some tensors in the place of the model's."""
        known = self.live()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"the model has no parameter or buffer named {name!r}")
            if value.shape != known[name].shape:
                raise ValueError(f"{name} has shape {tuple(known[name].shape)}, got {tuple(value.shape)}")
        given = {name: value.detach().clone() for name, value in params.items()}
        return Weights(self.model, self.sharded, {**self.override, **given})

    def again(self) -> "Weights":
        """The same with nothing kept yet."""
        return Weights(self.model, self.sharded, self.override)

    def version(self) -> Hashable:
        """Changes whenever a weight or buffer does."""
        if self.sharded is not None:
            return self.sharded.version(), tuple(t.data_ptr() for t in self.override.values())
        tensors = self.live().values() if self.override else self._tensors()
        return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)

    def _tensors(self) -> Iterator[Tensor]:
        """Those of the model, without their names, which take long to put together."""
        for module in self.model.modules():
            yield from (t for held in (module._parameters, module._buffers) for t in held.values() if t is not None)

    def live(self) -> Params:
        """Every parameter and buffer as it is."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers()), **self.override}

    def with_params(self, params: Params) -> Params:
        """These parameters, and those that are set to others than the model's."""
        own = {name for name, _ in self.model.named_parameters()}
        return {**{name: t for name, t in self.override.items() if name in own}, **params}

    def placed(self, names: Sequence[str], device: torch.device, dtype: torch.dtype) -> tuple[Params, Params]:
        """(the named parameters, everything else), detached, in one precision and on one device."""
        key = self.version(), tuple(names), device, dtype
        if key != self._key:
            with torch.inference_mode(False):
                every = {name: self._place(t, device, dtype) for name, t in self.live().items()}
            self._kept = {n: every[n] for n in names}, {n: t for n, t in every.items() if n not in names}
            self._key = key
        return self._kept

    def _place(self, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        dtype = dtype if tensor.is_floating_point() else tensor.dtype
        if self.sharded is not None:
            return self.sharded.full(tensor).to(dtype)
        placed = tensor.detach().to(device, dtype)
        return placed.clone() if placed.is_inference() else placed
