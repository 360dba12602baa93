"""Blocks of several ranks and streams: statistics summed, eigenvectors made beside each other, weights kept equal."""

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..comm import World
from ..operators.layer_factors import Statistics
from .factors import RunningBlock

_AT_ONCE = {"cuda": 5}  # decompositions on streams of their own; one leaves most of a GPU idle, more gain nothing


def renew_all(blocks: Sequence[RunningBlock]) -> None:
    """New eigenvectors of several blocks; on a GPU some at a time, the dearest first.

    Example:
        >>> from ritz.operators.units import units_of
        >>> unit = units_of(torch.nn.Linear(1, 1, bias=False), ("weight",))[""]
        >>> blocks = [RunningBlock(unit), RunningBlock(unit)]
        >>> for block in blocks:
        ...     block.add({"|input": torch.eye(1)[None], "|rows": torch.tensor(1.0), "|grad": torch.ones(1, 1, 1)}, 1.0)
        >>> renew_all(blocks)
        >>> [block.renewed for block in blocks]
        [1, 1]
    """
    devices = {block.device for block in blocks}
    device = next(iter(devices))
    most = min(len(blocks), _AT_ONCE.get(device.type, 1))
    dearest_first = sorted(blocks, key=lambda block: -block.cost)
    if most < 2 or len(devices) > 1:
        for block in dearest_first:
            block.renew()
    else:
        _abreast(dearest_first, shared_out([block.cost for block in dearest_first], most), device)


def renew_shared(blocks: Sequence[RunningBlock], world: World) -> None:
    """`renew_all` shared out among ranks: each decomposes some of the blocks, and all have the results.

    The factors are to be the same on every rank.

    Example:
        >>> from ritz.comm import SELF
        >>> from ritz.operators.units import units_of
        >>> block = RunningBlock(units_of(torch.nn.Linear(1, 1, bias=False), ("weight",))[""])
        >>> block.add({"|input": torch.eye(1)[None], "|rows": torch.tensor(1.0), "|grad": torch.ones(1, 1, 1)}, 1.0)
        >>> renew_shared([block], SELF)
        >>> block.renewed
        1
    """
    if world.size == 1:
        return renew_all(blocks)
    owners = shared_out([block.cost for block in blocks], world.size)
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


def shared_out(costs: Sequence[float], num: int) -> list[int]:
    """Who of `num` does each job: the next dearest goes to the one that has least to do, of equals to the first.

    Example:
        >>> shared_out([1.0, 8.0, 3.0, 4.0], 2)
        [1, 0, 1, 1]
    """
    load, owners = [0.0] * num, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = load.index(min(load))
        load[owners[number]] += costs[number]
    return owners


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


def keep_together(params: Sequence[Tensor], world: World) -> None:
    """Ranks multiply each for itself, and round-off would part their weights in the end: all take those of rank 0.

    Raises:
        ValueError: If more than round-off is between them.

    Example:
        >>> from ritz.comm import SELF
        >>> keep_together([torch.ones(1)], SELF)
    """
    flat = torch.cat([p.detach().reshape(-1) for p in params])
    common, lengths = world.same(flat, float(flat.double().norm()))
    apart = max(world.gather(float((common - flat).double().norm())))
    if apart > 1e-3 * max(lengths):
        raise ValueError(
            f"the weights of the ranks differ by {apart:.3g}, of norm {max(lengths):.3g}: average the gradients over "
            "ranks, as DistributedDataParallel does, or train on each rank by itself: KFAC(..., group='self')"
        )
    if apart:
        for p, part in zip(params, common.split([p.numel() for p in params]), strict=True):
            p.copy_(part.view_as(p))


def _abreast(blocks: Sequence[RunningBlock], lanes: Sequence[int], device: torch.device) -> None:
    """Renew every block in the thread and on the stream of its lane; then raise the error of the first that failed.

    A decomposition keeps its host thread waiting, so every stream has a thread of its own. What a block had may be of
    another stream, and what it gets is read on the caller's: the allocator is told of both.
    """
    streams = {lane: _stream(device, lane) for lane in set(lanes)} if device.type == "cuda" else {}
    current = torch.cuda.current_stream(device) if streams else None
    if current is not None:
        _load_solvers(device)
        for stream in streams.values():
            stream.wait_stream(current)

    def run(block: RunningBlock, stream: torch.cuda.Stream | None) -> None:
        with torch.no_grad(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            _note_use(block, stream)
            block.renew()
            _note_use(block, current)

    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1, "", _begin, (device,))) for _ in range(max(lanes) + 1)]
        done = [threads[lane].submit(run, b, streams.get(lane)) for b, lane in zip(blocks, lanes, strict=True)]
    if current is not None:
        for stream in streams.values():
            current.wait_stream(stream)
    for one in done:
        one.result()


def _begin(device: torch.device) -> None:
    """A thread has no place on a GPU before its first kernel there, and cuBLAS, if it comes first, warns of that."""
    torch.zeros(1, device=device)


def _load_solvers(device: torch.device) -> None:
    """Torch loads them at the first call, and fails where two threads make it."""
    torch.linalg.eigh(torch.eye(1, device=device))


@functools.cache
def _stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    """The same one at every call: torch's allocator keeps the memory of every stream that it has seen for itself."""
    return torch.cuda.Stream(device)


def _note_use(block: RunningBlock, stream: torch.cuda.Stream | None) -> None:
    """Memory of what `renew` makes is not to be taken for something else before this stream is done with it."""
    for tensor in block.parts().values():
        if stream is not None and tensor is not None:
            tensor.record_stream(stream)
