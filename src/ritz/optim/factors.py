"""Running Kronecker factors of a block of parameters, and the eigenbasis in which they are inverted."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators.kronecker import Eigenspace, eigenbasis, kronecker, rayleigh
from ..operators.layer_factors import Statistics
from ..operators.units import Unit

Start = Literal["debiased", "identity"]
Refresh = Literal["eigh", "qr"]


class Average:
    """An exponential moving average, m <- decay m + (1 - decay) x.

    "debiased" divides by the weights that it has given out, 1 - decay^k (Kingma and Ba 2015, Algorithm 1), so that the
    first value counts in full. "identity" starts from the identity matrix, as the published code of seed 004 does:
    what is left of it acts as damping for the first few hundred steps.

    Example:
        >>> mean = Average(0.9)
        >>> for x in (1.0, 3.0):
        ...     mean.add(torch.tensor([[[x]]]))
        >>> mean.value.item()  # (0.9 * 1 + 3) / 1.9
        2.0526
        >>> mean = Average(0.9, "identity")
        >>> mean.add(torch.tensor([[[3.0]]]))
        >>> mean.value.item()
        1.2
    """

    def __init__(self, decay: float, start: Start = "debiased") -> None:
        self.decay, self.start = decay, start
        self.count = 0
        self.value: Tensor | None = None

    def add(self, new: Tensor, identity: Tensor | None = None) -> None:
        """Take one more; `identity` is what an identity start means for what is not a (groups, n, n) matrix."""
        self.count += 1
        if self.start == "identity":
            rate = 1 - self.decay
        else:
            rate = (1 - self.decay) / (1 - self.decay**self.count)
        if self.value is None:
            if self.start == "debiased":
                self.value = new.clone()
                return
            unit = torch.ones_like(new) if new.ndim == 2 else torch.eye(new.shape[-1]).to(new).expand_as(new).clone()
            self.value = unit if identity is None else identity
        self.value.lerp_(new, rate)


class RunningBlock:
    """Factors, eigenvectors and eigenvalues of one block, as training goes on.

    A Kronecker block keeps averages of G and A, and the eigenvectors of both as they were at the last `renew`; a
    diagonal block the average of squared gradients. With `ekfac` the eigenvalues are averages of squared gradients in
    the eigenbasis; a new basis takes them over as if components had been uncorrelated, S <- R_G S R_A' with R squared
    cosines between new and old eigenvectors, which keeps the trace.

    Args:
        unit: The parameters.
        decay: Decay of the averages.
        start: How the averages begin.
        ekfac: Which eigenvalues.
        refresh: "eigh", or "qr": after the first, one step of orthogonal iteration from the last eigenvectors.

    Example:
        >>> from ritz.operators.units import units_of
        >>> block = RunningBlock(units_of(torch.nn.Linear(2, 1, bias=False), ("weight",))[""])
        >>> block.add({"|input": torch.eye(2)[None], "|rows": torch.tensor(2.0), "|grad": torch.ones(1, 1, 1)}, 1.0)
        >>> block.renew()
        >>> block.space().values.tolist()
        [[[0.5, 0.5]]]
    """

    def __init__(
        self,
        unit: Unit,
        decay: float = 0.95,
        start: Start = "debiased",
        ekfac: bool = False,
        refresh: Refresh = "eigh",
    ) -> None:
        self.unit, self.refresh = unit, refresh
        self.ekfac = ekfac and unit.kind == "layer"
        kinds = ("square",) if unit.kind == "diagonal" else ("input", "grad")
        self.averages = {what: Average(decay, start) for what in kinds}
        self.scale = Average(decay)  # eigenvalues need no identity: the factors have it
        self.renewed = 0  # how many statistics the eigenvectors have seen
        self.vectors: dict[str, Tensor | None] = {}
        self.values: dict[str, Tensor] = {}  # (groups, n)
        self._wide: Eigenspace | None = None
        self._changed = False  # whether it has to be made anew
        self._beside: tuple[Tensor, ...] = ()  # columns of zeros

    @property
    def count(self) -> int:
        """How many statistics were taken."""
        return next(iter(self.averages.values())).count

    @property
    def device(self) -> torch.device:
        """Where the factors are; that of the CPU before there are any."""
        value = next(iter(self.averages.values())).value
        return torch.device("cpu") if value is None else value.device

    @property
    def cost(self) -> float:
        """Of `renew`, about: the third powers of the orders of what it decomposes, and something for the rest."""
        factors = [average.value for average in self.averages.values() if average.value is not None]
        square = [f for f in factors if f.ndim == 3 and f.shape[-1] == f.shape[-2]]
        return float(sum(f.shape[0] * f.shape[-1] ** 3 for f in square)) + 1

    def add(self, stats: Statistics, weight: Tensor | float) -> None:
        """Take the sums of the passes of one step; none where the block had no part in them."""
        name, self._changed = self.unit.name, True
        if f"{name}|square" in stats:
            square = stats[f"{name}|square"] / weight
            self.averages["square"].add(square, torch.ones_like(square))
        if f"{name}|grad" in stats:
            self.averages["grad"].add(stats[f"{name}|grad"] / weight)
            rows = stats[f"{name}|rows"].clamp(min=1)
            self.averages["input"].add(stats[f"{name}|input"] / rows)
        if f"{name}|scale" in stats:
            self.scale.add(stats[f"{name}|scale"] / weight)

    def renew(self) -> None:
        """Eigenvectors and eigenvalues of the factors as they are now."""
        self.renewed, self._changed = self.count, True
        if self.unit.kind == "diagonal" or not self.count:
            return
        old = self.bases if self.vectors else (None, None)
        found = {}
        for what, last in zip(("grad", "input"), old, strict=True):
            factor = self.averages[what].value
            assert factor is not None
            self.values[what], found[what] = self._basis(what, factor, last)
        if self.ekfac and self.scale.value is not None:
            left, right = (_overlap(new, last) for new, last in zip(found.values(), old, strict=True))
            scale = self.scale.value if left is None else left @ self.scale.value
            self.scale.value = scale if right is None else scale @ right.mT
        found["input"] = _aligned(found["input"])
        self.vectors = {what: _settled(new, self.vectors.get(what)) for what, new in found.items()}

    def parts(self) -> dict[str, Tensor | None]:
        """What `renew` made, by name."""
        scale = self.scale.value if self.ekfac else None
        vectors = {f"vectors {what}": tensor for what, tensor in self.vectors.items()}
        return {**{f"values {what}": tensor for what, tensor in self.values.items()}, **vectors, "scale": scale}

    def adopt(self, parts: Mapping[str, Tensor | None]) -> None:
        """What `renew` of the same block made elsewhere, in the place of `renew`."""
        self.renewed, self._changed = self.count, True
        for name, tensor in parts.items():
            kind, _, what = name.partition(" ")
            if kind == "values" and tensor is not None:
                self.values[what] = tensor
            elif kind == "vectors":
                self.vectors[what] = _settled(tensor, self.vectors.get(what))
            elif tensor is not None:
                self.scale.value = tensor

    def _basis(self, what: str, factor: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.refresh == "qr" and last is not None:
            image = factor @ last
            # sharpest first: what comes later is made orthogonal to what came before, and for a singular factor the
            # columns of its null space are round-off, with which nothing may begin
            order = (last * image).sum(1).argsort(dim=1, descending=True)
            vectors: Tensor = torch.linalg.qr(image.gather(2, order[:, None].expand_as(last))).Q
            if bool(vectors.isfinite().all()):
                return rayleigh(factor, vectors), vectors
        letter = "G" if what == "grad" else "A"
        return eigenbasis(factor, last, f"factor {letter} of {self.unit.name or 'the layer'}")

    @property
    def bases(self) -> tuple[Tensor | None, Tensor | None]:
        """Eigenvectors of G and A, without what is beside them in memory."""
        right = self.vectors["input"]
        return self.vectors["grad"], right if right is None else right[:, : self.unit.inputs, : self.unit.inputs]

    def space(self) -> Eigenspace | None:
        """The block as it is now; None before its first statistics."""
        if self.unit.kind == "diagonal":
            square = self.averages["square"].value
            return None if square is None else Eigenspace(square, None, None)
        if not self.values:
            return None
        left, right = self.bases
        if self.ekfac and self.scale.value is not None:
            return Eigenspace(self.scale.value, left, right)
        return kronecker((self.values["grad"], left), (self.values["input"], right))

    @property
    def wide(self) -> Eigenspace | None:
        """The block as it is applied: with the columns of zeros that are beside its eigenvectors in memory.

        Its tensors stay where they are as the block changes: a step that was recorded reads them there.
        """
        if self._changed and (space := self.space()) is not None:
            right = self.vectors.get("input")
            extra = 0 if right is None else right.shape[-1] - self.unit.inputs
            values = _settled(F.pad(space.values, (0, extra)), None if self._wide is None else self._wide.values)
            assert values is not None
            self._wide = Eigenspace(values, space.left, right)
            if extra != sum(zeros.shape[-1] for zeros in self._beside):  # at first, and in a state of another device
                self._beside = (values.new_zeros(*values.shape[:-1], extra),) if extra else ()
            self._changed = False
        return self._wide

    def apply(self, tensors: Mapping[str, Tensor], multipliers: Tensor) -> dict[str, Tensor]:
        """f(C) applied to tensors given by parameter name, for multipliers f(values) of the shape of `wide`'s."""
        assert self._wide is not None
        dtype = multipliers.dtype
        given = {name: x if x.dtype == dtype else x.to(dtype) for name, x in tensors.items()}
        image = self._wide.apply(self.unit.gather(given, *self._beside), multipliers)
        return self.unit.scatter(image[..., : self.unit.inputs] if self._beside else image)

    # ----------------------------------------------------------------------------------- saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Averages with their counts, eigenvectors and eigenvalues."""
        averages = {**self.averages, "scale": self.scale}
        return {
            "averages": {what: {"count": a.count, "value": a.value} for what, a in averages.items()},
            "vectors": dict(self.vectors),
            "values": dict(self.values),
            "renewed": self.renewed,
        }

    def load_state_dict(self, state: Mapping[str, Any], like: Tensor) -> None:
        """The inverse of `state_dict`, for a parameter of this device and precision; at least in float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)

        def own(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.detach().to(like.device, dtype, copy=True)

        for what, average in {**self.averages, "scale": self.scale}.items():
            saved = state["averages"][what]
            average.count, average.value = saved["count"], own(saved["value"])
        self.vectors = {what: own(tensor) for what, tensor in state["vectors"].items()}
        self.values = {what: own(tensor) for what, tensor in state["values"].items()}
        self.renewed, self._wide, self._changed = state["renewed"], None, True


def _aligned(vectors: Tensor | None) -> Tensor | None:
    """With rows and columns of zeros up to a multiple of 8 on an accelerator: with the bias a width is mostly odd."""
    if vectors is None or vectors.device.type == "cpu":
        return vectors
    extra = -vectors.shape[-1] % 8
    return F.pad(vectors, (0, extra, 0, extra)) if extra else vectors


def _settled(new: Tensor | None, place: Tensor | None) -> Tensor | None:
    """The new values where the old ones were, if they have room there."""
    if new is None or place is None or new.shape != place.shape or new.dtype != place.dtype:
        return new
    return place.copy_(new)


def _overlap(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """Squared cosines between two bases, (groups, n, n): rows the new vectors; None where nothing turned."""
    if new is None and old is None:
        return None
    if new is None or old is None:
        only = new if new is not None else old
        assert only is not None
        return (only.mT if new is not None else only).square()
    return (new.mT @ old).square()
