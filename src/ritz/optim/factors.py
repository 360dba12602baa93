"""Running Kronecker factors of a block of parameters, and the eigenbasis in which they are inverted."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import World
from ..operators.kronecker import Eigenspace, eigenbasis, kronecker, rayleigh
from ..operators.layer_factors import Statistics, Unit

Start = Literal["debiased", "identity"]
Refresh = Literal["eigh", "qr"]

_AT_ONCE = {"cuda": 5}  # decompositions on streams of their own; one leaves most of a GPU idle, more gain nothing


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
        decay: Of the averages.
        start: How the averages begin.
        ekfac: Which eigenvalues.
        refresh: "eigh", or "qr": after the first, one step of orthogonal iteration from the last eigenvectors.

    Example:
        >>> from ritz.operators.layer_factors import units_of
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

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """The inverse of `state_dict`; tensors keep their precision and are moved to the device."""

        def own(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.detach().to(device, copy=True)

        for what, average in {**self.averages, "scale": self.scale}.items():
            saved = state["averages"][what]
            average.count, average.value = saved["count"], own(saved["value"])
        self.vectors = {what: own(tensor) for what, tensor in state["vectors"].items()}
        self.values = {what: own(tensor) for what, tensor in state["values"].items()}
        self.renewed, self._wide, self._changed = state["renewed"], None, True


def renew_all(blocks: Sequence[RunningBlock]) -> None:
    """New eigenvectors of several blocks; on a GPU some at a time, the widest first.

    A decomposition keeps its host thread waiting, so each has a thread and a stream of its own.

    Example:
        >>> from ritz.operators.layer_factors import units_of
        >>> unit = units_of(torch.nn.Linear(1, 1, bias=False), ("weight",))[""]
        >>> blocks = [RunningBlock(unit), RunningBlock(unit)]
        >>> for block in blocks:
        ...     block.add({"|input": torch.eye(1)[None], "|rows": torch.tensor(1.0), "|grad": torch.ones(1, 1, 1)}, 1.0)
        >>> renew_all(blocks)
        >>> [block.renewed for block in blocks]
        [1, 1]
    """
    widest_first = sorted(blocks, key=lambda block: -block.unit.inputs)
    _abreast([block.renew for block in widest_first], {block.device for block in blocks})


def renew_shared(blocks: Sequence[RunningBlock], world: World) -> None:
    """`renew_all` shared out among ranks: each decomposes some of the blocks, and all have the results.

    The factors are to be the same on every rank. A decomposition of order n costs n^3; the next dearest block goes to
    the rank that has least to do.

    Example:
        >>> from ritz.comm import SELF
        >>> from ritz.operators.layer_factors import units_of
        >>> block = RunningBlock(units_of(torch.nn.Linear(1, 1, bias=False), ("weight",))[""])
        >>> block.add({"|input": torch.eye(1)[None], "|rows": torch.tensor(1.0), "|grad": torch.ones(1, 1, 1)}, 1.0)
        >>> renew_shared([block], SELF)
        >>> block.renewed
        1
    """
    if world.size == 1:
        return renew_all(blocks)
    load, owners = [0.0] * world.size, [0] * len(blocks)
    costs = [_cost(block) for block in blocks]
    for number in sorted(range(len(blocks)), key=lambda number: -costs[number]):
        owners[number] = load.index(min(load))
        load[owners[number]] += costs[number]
    mine = [block for block, owner in zip(blocks, owners, strict=True) if owner == world.rank]
    error = None
    try:
        if mine:
            renew_all(mine)
    except Exception as caught:
        error = caught
    made = [block.parts() for block in mine]
    told = world.agree("eigendecompositions", error, [{n: t is not None for n, t in own.items()} for own in made])
    sent = world.cat([t for own in made for t in own.values() if t is not None], blocks[0].device)
    queues = [(iter(names), iter(tensors)) for names, tensors in zip(told, sent, strict=True)]
    for block, owner in zip(blocks, owners, strict=True):
        names, tensors = queues[owner]
        # the owner takes what it sent as well: all go on with the same bits
        block.adopt({name: next(tensors) if there else None for name, there in next(names).items()})
    return None


def _cost(block: RunningBlock) -> float:
    """Of a decomposition, in the third power of its order."""
    factors = [average.value for average in block.averages.values() if average.value is not None]
    return float(sum(f.shape[0] * f.shape[-1] ** 3 for f in factors if f.ndim == 3 and f.shape[-1] == f.shape[-2])) + 1


def summed(stats: Statistics, weight: Tensor | float, world: World) -> tuple[Statistics, Tensor | float]:
    """Statistics and their weight, added up over ranks by one sum; what a rank has not seen counts as zero.

    Example:
        >>> from ritz.comm import SELF
        >>> summed({"a": torch.ones(1)}, 2.0, SELF)
        ({'a': tensor([1.])}, 2.0)
    """
    if world.size == 1:
        return stats, weight
    own = {name: (tuple(t.shape), t.dtype) for name, t in stats.items()}
    known = {name: kind for each in world.agree("factors", None, own) for name, kind in each.items()}
    if not known:
        return {}, weight
    device = next((t.device for t in stats.values()), torch.device("cpu"))
    dtype = next(iter(known.values()))[1]
    for _, other in known.values():
        dtype = torch.promote_types(dtype, other)
    names = sorted(known)
    tensors = [stats[n] if n in stats else torch.zeros(known[n][0], device=device) for n in names]
    flat = world.sum(torch.cat([t.reshape(-1).to(device, dtype) for t in tensors]))
    parts = flat.split([t.numel() for t in tensors])
    whole = world.sum(torch.as_tensor(weight, dtype=torch.float64))
    found = {n: part.reshape(known[n][0]).to(known[n][1]) for n, part in zip(names, parts, strict=True)}
    return found, whole.to(device)


def _abreast(jobs: Sequence[Callable[[], None]], devices: Collection[torch.device]) -> None:
    """Run all jobs, those of one GPU beside each other; then raise the error of the first that failed, if any did.

    A job may replace tensors of the caller's. They return to the memory of the stream that they were made on, and every
    stream has waited for the caller's before anything is made there.
    """
    device = next(iter(devices))
    most = min(len(jobs), _AT_ONCE.get(device.type, 1))
    if most < 2 or len(devices) > 1:
        for job in jobs:
            job()
        return
    on_gpu = device.type == "cuda"
    if on_gpu:  # torch loads its solvers at the first call, and fails where two threads make it
        torch.linalg.eigh(torch.eye(1, device=device))
    current = torch.cuda.current_stream(device) if on_gpu else None
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(most)]
    free: SimpleQueue[torch.cuda.Stream | None] = SimpleQueue()
    for stream in streams:
        free.put(stream)

    def run(job: Callable[[], None]) -> None:
        stream = free.get()
        try:
            with torch.no_grad(), torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
                if stream is not None and current is not None:
                    stream.wait_stream(current)
                job()
        finally:
            free.put(stream)

    with ThreadPoolExecutor(most) as pool:
        done = [pool.submit(run, job) for job in jobs]
    for stream in streams:
        if stream is not None and current is not None:
            current.wait_stream(stream)
    for one in done:
        one.result()


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
