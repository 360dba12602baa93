"""What befalls one rank, and what the others make of it."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from distributed import checks
from torch import Tensor, nn

import ritz
from ritz.comm import world


def warm() -> None:
    """All that is loaded when first used."""
    ritz.GGN(checks.risk()).rows(torch.ones(2, checks.risk().dim))


class Fated(nn.Module):
    """A network with a hook into the forward pass of one rank."""

    def __init__(self, rank: int, fate: Any, calls: int = 3) -> None:
        super().__init__()
        self.inner, self.rank, self.fate = checks.network(), rank, fate
        self.calls = iter(range(1, calls))  # not a number, which would be put back after each walk

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self.rank and next(self.calls, None) is None:
            self.fate(x)
        return self.inner(x)


def told(act: Any) -> tuple[str, str, float]:
    """What an act ends in."""
    begin = time.monotonic()
    try:
        act()
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        return type(error).__name__, f"{error} {notes}", time.monotonic() - begin
    return "", "", time.monotonic() - begin


def lost(how: str) -> tuple[str, str, float]:
    """Rank 1 is killed, sleeps for ever, or is frozen, in the midst of a product."""

    def fate(x: Tensor) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)

    risk = ritz.Risk(Fated(1, fate), nn.CrossEntropyLoss(), checks.samples(), batch_size=5)
    return told(lambda: ritz.GGN(risk).rows(torch.ones(1, risk.dim)))


def knotted() -> tuple[str, str, float]:
    """Each rank waits for what the next has to say, and none says anything."""
    ranks = world()
    ranks.gather(0)  # all have begun
    return told(lambda: ranks.of((ranks.rank + 1) % ranks.size, None))


def refusals() -> dict[str, Any]:
    """Errors that one rank has and all must raise, and what was left behind."""
    rank, found = dist.get_rank(), {}
    x, y = checks.samples()

    def fails(x: Tensor) -> None:
        raise KeyError("the disk is full")

    broken = ritz.Risk(Fated(1, fails), nn.CrossEntropyLoss(), (x, y), batch_size=5)
    found["error of one"] = told(broken.loss)
    bad = x.clone()
    bad[12] = torch.nan  # in batch 2
    found["not finite"] = told(ritz.Risk(checks.network(), nn.CrossEntropyLoss(), (bad, y), batch_size=5).loss)
    mine = (x[: 20 + rank], y[: 20 + rank])
    found["other data"] = told(ritz.Risk(checks.network(), nn.CrossEntropyLoss(), mine).loss)
    other = checks.network()
    with torch.no_grad():
        other[0].weight.add_(rank)
    found["other weights"] = told(ritz.Risk(other, nn.CrossEntropyLoss(), (x, y)).loss)
    found["alone"] = ritz.Risk(other, nn.CrossEntropyLoss(), (x, y), group="self").loss()
    group = dist.new_group([0, 2])
    found["some ranks"] = told(lambda: found.update(some=checks.risk(group=group).loss()))
    found["gradients apart"] = told(lambda: apart(rank))
    found["in other places"] = told(checks.risk().loss if rank else checks.risk().gradient)
    return found


def apart(rank: int) -> None:
    """Training without anyone to average the gradients."""
    model = checks.network()
    opt = ritz.optim.KFAC(model, lr=1.0, damping=0.1, factor_every=1, momentum=0.0)
    x, y = checks.samples()
    for _ in range(3):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]).backward()
        opt.step()


def out_of_memory() -> dict[str, Any]:
    """Rank 1 has room for three samples at a time."""

    def fate(x: Tensor) -> None:
        if len(x) > 3:
            raise torch.OutOfMemoryError("no room")

    risk = ritz.Risk(Fated(1, fate, calls=1), nn.CrossEntropyLoss(), checks.samples(), batch_size=5)
    gradient = risk.gradient()
    op = ritz.GGN(risk)
    tight = ritz.Risk(Fated(1, fate, calls=1), nn.CrossEntropyLoss(), checks.samples(), batch_size=5)
    return {
        "gradient": gradient, "piece": risk._piece, "rows": op.rows(torch.ones(2, risk.dim)), "chunk": op._chunk,
        "samples": ritz.sample_traces(tight, method="probes", num_probes=2).value,
    }  # fmt: skip
