"""Ranks that work together and are killed, one of them between the two halves of a save."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Calls
from distributed import checks
from distributed.faults import Fated
from faults import jobs
from torch import Tensor, nn

import ritz
from ritz import fingerprints
from ritz.checkpoint import Checkpoint, Saved

GIVEN = {"num_steps": 6, "num_probes": 4, "products": 90}


def warm() -> None:
    """All that is loaded when first used."""
    fingerprints.code()  # once: the files may change while the tests run
    ritz.spectrum(ritz.Hessian(jobs.make_risk(), route="reverse"), 1, 1, products=20)


def spectrum(folder: str, mode: str, progress: Any = None) -> Any:
    H = ritz.Hessian(jobs.make_risk(), route="reverse")
    kept = Checkpoint(folder, every=0) if folder else None
    return ritz.spectrum(H, **GIVEN, reorthogonalize=mode, checkpoint=kept, progress=progress)


def torn(folder: str, mode: str) -> str:
    """Rank 1 dies when the others have written a state and it has not; they end with its name."""
    real, left = Saved._write_manifest, [7]

    def write(self: Saved, parts: Any) -> None:
        left[0] -= 1
        if dist.get_rank() == 1 and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, parts)

    Saved._write_manifest = write  # type: ignore[method-assign]
    try:
        spectrum(folder, mode)
    except ritz.errors.RitzError as error:
        return type(error).__name__
    return "went on"


def resumed(folder: str, mode: str) -> tuple[int, list[str], str, str]:
    """From which product the run goes on, which states there were, and what it finds, beside a run of its own."""
    rank, reports = Path(folder) / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}", []
    states = sorted(path.name for path in rank.glob("state-*.json"))
    found = spectrum(folder, mode, lambda done, _: reports.append(done))
    return reports[0], states, jobs.bits(found), jobs.bits(spectrum("", mode))


def stopped(folder: str) -> tuple[str, str, str]:
    """One rank hears a signal, and all stop."""

    def progress(done: int, _: int) -> None:
        if done > 40 and dist.get_rank() == 1 and not heard:
            heard.append(done)
            signal.raise_signal(signal.SIGTERM)

    heard: list[int] = []
    with ritz.stoppable():
        cut = spectrum(folder, "locked", progress)
    return cut.stop, jobs.bits(spectrum(folder, "locked")), jobs.bits(spectrum("", "locked"))


def searched(folder: str) -> tuple[str, dict[str, str], str, str]:
    """One rank hears a signal while a measurement searches, and all leave the search."""
    given: dict[str, Any] = {"measures": ["train_loss", "worst_case_l2", "weight_norm"]}
    reports: list[str] = []

    def progress(text: str, part: float) -> None:
        reports.append(text)
        if text == "worst_case_l2" and reports.count(text) == 4 and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)

    with ritz.stoppable():
        cut = ritz.measure(jobs.make_risk(), **given, progress=progress, checkpoint=folder)
    again, whole = (ritz.measure(jobs.make_risk(), **given, checkpoint=kept) for kept in (folder, None))
    return cut.stop, dict(cut.failures), jobs.bits(again), jobs.bits(whole)


def bereft() -> str:
    """Rank 1 dies while a measurement is under way: no measure by itself has failed."""
    risk = ritz.Risk(Fated(1, lambda x: os.kill(os.getpid(), signal.SIGKILL)), nn.CrossEntropyLoss(), checks.samples())
    try:
        ritz.measure(risk, measures=["worst_case_l2", "train_loss"])
    except ritz.errors.RankError as error:
        return str(error)
    return "went on"


# ------------------------------------------------------------------------------------- products by FSDP2


class Frozen(nn.Module):
    """Rank 1 stands still at its third pass."""

    passes = itertools.count(1)  # not a number, which would be put back after each walk

    def forward(self, x: Tensor) -> Tensor:
        if next(self.passes) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return x.clone()


def frozen() -> None:
    """The others wait in FSDP2's own collectives, which nobody can leave."""
    sharded(Frozen()).gradient()


def broken_off(folder: str) -> tuple[str, str]:
    """A run by differences, whose error was measured along the first vector, before it was broken off."""

    def products(kept: str | None, progress: Any = None) -> Any:
        H = ritz.Hessian(sharded(nn.Identity()))
        state = None if kept is None else Checkpoint(kept, every=0)
        return ritz.spectrum(H, 4, 1, reorthogonalize="none", checkpoint=state, progress=progress)

    def enough(done: int, total: int) -> None:
        if done > 4:
            raise KeyboardInterrupt

    try:
        products(folder, enough)
    except KeyboardInterrupt:
        return jobs.bits(products(folder)), jobs.bits(products(None))
    return "", "went on"


# ----------------------------------------------------------------------------------- memory, by FSDP2


class Squeeze(torch.autograd.Function):
    """The identity on a rank that has room for so many samples, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: tuple[int, int]) -> Tensor:
        ctx.most = most[1]
        if len(x) > most[0]:
            raise torch.OutOfMemoryError("no room")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if len(grad) > ctx.most:
            raise torch.OutOfMemoryError("no room")
        return grad, None


class Tight(nn.Module):
    """Between two layers: memory for so many samples on rank 1."""

    def __init__(self, forward: int, backward: int) -> None:
        super().__init__()
        self.most, self.seen = (forward, backward), Calls()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return Squeeze.apply(x, self.most if dist.get_rank() == 1 else (10**9, 10**9))


def sharded(middle: nn.Module, **options: Any) -> ritz.Risk:
    """A network under FSDP2 with a module between its layers."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = checks.network(width=16)
    model = nn.Sequential(model[0], model[1], middle, model[2])
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return ritz.Risk(model, nn.CrossEntropyLoss(), checks.samples(), **{"batch_size": 9, **options})


def squeezed(forward: int, backward: int) -> dict[str, Any]:
    """Products and gradient of a model that is spread over ranks, of which one has little memory."""
    middle = Tight(forward, backward)
    risk = sharded(middle)
    before = [p.to_local().clone() for p in risk.model.parameters()]
    gradient = risk.gradient()
    v = torch.ones(2, risk.dim)
    ggn, hessian = ritz.GGN(risk).rows(v), ritz.Hessian(risk).rows(v)
    middle.seen.clear()
    loss = risk.loss()
    return {
        "gradient": gradient, "ggn": ggn, "hessian": hessian, "loss": loss, "piece": risk._piece,
        "seen": max(middle.seen), "grads": any(p.grad is not None for p in risk.model.parameters()),
        "kept": all(torch.equal(p.to_local(), b) for p, b in zip(risk.model.parameters(), before, strict=True)),
    }  # fmt: skip


def faulty() -> str:
    """What all ranks are told of a failure of one that is not for want of memory."""
    risk = sharded(Faulty())
    try:
        risk.gradient()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Faulty(nn.Module):
    """Fails on rank 1, for more than one sample."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1 and len(x) > 1:
            raise KeyError("the disk is full")
        return x.clone()


# ------------------------------------------------------------------------------------------------ precision


def rounded() -> list[tuple[float, float, float]]:
    """How far products in float32 are off, by ranks together that have all data or a share each, and by one alone."""
    model = checks.network()
    with torch.no_grad():
        for p in model[2].parameters():
            p.mul_(40.0)
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    best, second = model(x).topk(2).values.T
    x = x[best - second > 15][:32]  # a loss of 3e-7 at most
    y, x = model(x).argmax(1), x.float()
    model, own = model.float(), slice(16 * dist.get_rank(), 16 * dist.get_rank() + 16)
    options: dict[str, Any] = {"batch_size": 16, "plan": ritz.Plan(route="reverse")}
    risks = (
        ritz.Risk(model, nn.CrossEntropyLoss(), (x, y), **options),
        ritz.Risk(model, nn.CrossEntropyLoss(), (x[own], y[own]), share=True, **options),
        ritz.Risk(model, nn.CrossEntropyLoss(), (x, y), group="self", **options),
    )
    found = [ritz.spectrum(ritz.Hessian(risk), 4, 2, reorthogonalize="none") for risk in risks]
    return [(s.rounding, s.trace_rounding, float(s.lambda_max)) for s in found]
