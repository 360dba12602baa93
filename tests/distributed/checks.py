"""What every number of ranks must agree on: each function gives named numbers, the same whoever computes them."""

import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ritz
from ritz.checkpoint import Checkpoint
from ritz.comm import world
from ritz.errors import UnsupportedError
from ritz.estimators.noise import minibatch_moment
from ritz.integrations import lightning, transformers
from ritz.krylov.head import BlockSpace, find_head
from ritz.krylov.lanczos import lanczos
from ritz.operators.noise import BatchNoise
from ritz.optim.factors import RunningBlock

Found = dict[str, Tensor]
CHECKS: dict[str, Callable[[], Found]] = {}


def check(fn: Callable[[], Found]) -> Callable[[], Found]:
    CHECKS[fn.__name__] = fn
    return fn


def run_all(only: list[str] = []) -> dict[str, Any]:  # noqa: B006
    """Every check, by name: what it found, or what went wrong."""
    found: dict[str, Any] = {}
    for name, fn in CHECKS.items():
        if only and name not in only:
            continue
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
            try:
                found[name] = {key: torch.as_tensor(value).double() for key, value in fn().items()}
            except Exception:
                found[name] = traceback.format_exc()
        found[f"{name} seconds"] = time.process_time() - begin
    return {**found, "kept": kept()}


def kept() -> dict[str, Any]:
    """What a rank keeps of vectors, in numbers, and how many eigendecompositions it made."""
    op = wide()
    full = lanczos(op, op.probes(range(2), seed=0), 5, reorthogonalize="full")
    head = find_head(op, num_steps=6)
    space = BlockSpace(op, 24)
    made, renew = [], RunningBlock.renew
    RunningBlock.renew = lambda block: (made.append(block.unit.name), renew(block))[1]
    try:
        trained(steps=1, fisher="type2")
    finally:
        RunningBlock.renew = renew
    return {
        "basis": full.basis.numel(), "locked": head.vectors.numel(), "residuals": head.residual_rows.numel(),
        "block space": space.rows.numel(), "pairs": len(head.values), "dim": op.dim, "decompositions": len(made),
        "samples of a look": samples_of_a_look(), "sums of a product": sums_of_a_product(),
    }  # fmt: skip


def samples_of_a_look() -> int:
    """That one rank shows to the network."""
    tracker = ritz.track(watched_risk(counted()), measures=["trace"])
    Counted.seen = 0
    tracker.look()
    return Counted.seen


def sums_of_a_product() -> list[int]:
    """How many elements each sum over ranks has that two vectors times the matrix take, over five batches."""
    op, real, made = ritz.GGN(risk()), dist.all_reduce, list[int]()
    v = torch.ones(2, op.dim)
    op.rows(v)  # looks at the data

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        made.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        op.rows(v)
    finally:
        dist.all_reduce = real
    return made


def warm() -> None:
    """All that is loaded when first used, once for all ranks."""
    for op in (ritz.Hessian(risk()), ritz.GGN(risk())):
        op.rows(torch.ones(2, op.dim))
    ritz.spectrum(ritz.GGN(risk(nn.ReLU)), num_steps=2, num_probes=2, reorthogonalize="none")
    ritz.sample_traces(risk(), num_probes=2)
    ritz.measure(risk(nn.ReLU), num_steps=2, num_probes=2)


def network(activation: type[nn.Module] = nn.Tanh, width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), activation(), nn.Linear(width, 3))


def samples(size: int = 23) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def risk(activation: type[nn.Module] = nn.Tanh, **keywords: Any) -> ritz.Risk:
    return ritz.Risk(network(activation), nn.CrossEntropyLoss(), samples(), **{"batch_size": 5, **keywords})


def wide() -> ritz.Hessian:
    """Of more rows, 131, than the head of a spectrum takes in whole."""
    return ritz.Hessian(ritz.Risk(network(width=16), nn.CrossEntropyLoss(), samples(), batch_size=5), route="reverse")


def numbers(estimate: Any) -> Found:
    found = {"value": estimate.value}
    if estimate.stderr is not None:
        found["stderr"] = estimate.stderr
    return {key: torch.as_tensor(value).double() for key, value in found.items()}


def named(**parts: Any) -> Found:
    return {f"{name} {key}": value for name, part in parts.items() for key, value in numbers(part).items()}


# -------------------------------------------------------------------------------------------- operators


@check
def hessian_products() -> Found:
    v = torch.randn(3, risk().dim, generator=torch.Generator().manual_seed(2))
    return {route: ritz.Hessian(risk(), route=route).rows(v) for route in ("forward", "reverse", "difference", "auto")}


@check
def matrices() -> Found:
    r = risk()
    operators = {
        "ggn": ritz.GGN(r),
        "fisher": ritz.Fisher(r, num_samples=2, seed=3),
        "empirical": ritz.EmpiricalFisher(r),
        "covariance": ritz.GradientCovariance(r),
        "noise": BatchNoise(ritz.GGN(r), 2),
        "block": ritz.Hessian(r).block("2.*"),
        "sum": 2 * ritz.GGN(r) + 0.1,
        "kfac": ritz.KFACOperator(r),
    }
    return {name: op.rows(op.probes(range(3), seed=1)) for name, op in operators.items()}


@check
def loss_and_gradient() -> Found:
    r = risk()
    return {"loss": r.loss(), "gradient": r.gradient(), "samples": r.num_samples, "words": hash_of(r.convention())}


def hash_of(text: str) -> float:
    return float(sum((i + 1) * byte for i, byte in enumerate(text.encode())))


# -------------------------------------------------------------------------------------------- kinds of data


def shares(how: str) -> tuple[Any, dict[str, Any]]:
    """The same data, given to the ranks in another way."""
    x, y = samples()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if how == "loader":
        return DataLoader(TensorDataset(x, y), batch_size=4), {}
    if how == "shuffled":
        return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True), {}
    if how == "distributed sampler":
        data = TensorDataset(x, y)
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, size, rank, shuffle=True)), {}
    if how == "one batch":
        return (x, y), {"batch_size": 23}
    if how == "whole batches":
        return (x, y), {"batch_size": 9, "mode": "train"}
    if how == "streamed":
        return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True), {"plan": ritz.Plan(cache=False)}
    # one of three, and of four, has nothing
    ends = {1: [0, 23], 2: [0, 16, 23], 3: [0, 14, 14, 23], 4: [0, 11, 11, 20, 23]}[size]
    mine = slice(ends[rank], ends[rank + 1])
    if how == "share of tensors":
        return (x[mine], y[mine]), {"batch_size": 4, "share": True}
    return [(x[i : i + 3], y[i : i + 3]) for i in range(ends[rank], ends[rank + 1], 3)][
        : -(-(ends[rank + 1] - ends[rank]) // 3)
    ], {"share": True}


KINDS = ("loader", "shuffled", "distributed sampler", "one batch", "streamed", "share of tensors")


@check
def kinds_of_data() -> Found:
    found: Found = {}
    for how in KINDS:
        data, keywords = shares(how)
        r = ritz.Risk(network(), nn.CrossEntropyLoss(), data, **keywords)
        found[f"{how}: ggn"] = ritz.GGN(r).rows(torch.ones(2, r.dim))
        found[f"{how}: samples"] = r.num_samples
        found[f"{how}: loss"] = r.loss()
    return found


@check
def batches_of_all_ranks() -> Found:
    data, keywords = shares("share of tensors")
    r = ritz.Risk(network(), nn.CrossEntropyLoss(), data, **keywords)
    seen = list(r.batches)
    drawn = r.batches.sample(2, 3, seed=5)
    return {
        "inputs": torch.cat([batch.data[0] for batch in seen]),
        "starts": float(sum(batch.size for batch in seen)),
        "drawn": torch.stack([batch.data[0] for batch in drawn]),
        "traces": ritz.sample_traces(r).value,
        "layer margins": ritz.measures.layer_margins(r).values,
        "kfac": ritz.KFACOperator(r).rows(r.space.probes([0], seed=1)),
        "fisher": ritz.Fisher(r, seed=1).rows(torch.ones(1, r.dim)),
    }


@check
def batch_statistics() -> Found:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    r = ritz.Risk(model, nn.CrossEntropyLoss(), samples(), batch_size=9, mode="train")
    return {"hessian": ritz.Hessian(r, route="reverse").rows(torch.ones(1, r.dim)), "loss": r.loss()}


# -------------------------------------------------------------------------------------------- estimates


@check
def spectra() -> Found:
    found: Found = {}
    for how in ("locked", "full", "none"):
        s = ritz.spectrum(wide(), num_steps=6, num_probes=3, reorthogonalize=how)
        found |= {
            f"{how} {key}": value
            for key, value in named(
                trace=s.trace, moment=s.moment(2), norm=s.spectral_norm, top=s.lambda_max, low=s.lambda_min
            ).items()
        }
        found[f"{how} layers"] = s.layer_samples
    return found


@check
def resumed() -> Found:
    """A run that was broken off and gone on with, each rank from its own state."""
    ranks = world()
    folder = Path(ranks.first(tempfile.mkdtemp(prefix="ritz-resumed-") if ranks.rank == 0 else ""))

    def broken_off(done: int, total: int) -> None:
        if done > 100:
            raise KeyError("enough")

    settings = {"num_steps": 4, "num_probes": 2}
    op = ritz.GGN(ritz.Risk(network(width=16), nn.CrossEntropyLoss(), samples(), batch_size=5))
    with pytest.raises(KeyError, match="enough"):
        ritz.spectrum(op, **settings, progress=broken_off, checkpoint=Checkpoint(folder, every=0))
    found, truth = ritz.spectrum(op, **settings, checkpoint=folder), ritz.spectrum(op, **settings)
    assert found.trace == truth.trace
    assert torch.equal(found.tail.alpha, truth.tail.alpha)
    if ranks.all(True) and ranks.rank == 0:  # none is at work in it
        shutil.rmtree(folder)
    return {"alpha": found.tail.alpha, "products": found.products}


@check
def gone_on_with() -> Found:
    """Walks over the data, sweeps and systems that were broken off at their second report."""
    ranks, (data, keywords) = world(), shares("share of tensors")
    folder = Path(ranks.first(tempfile.mkdtemp(prefix="ritz-gone-on-") if ranks.rank == 0 else ""))
    own = ritz.Risk(network(), nn.CrossEntropyLoss(), data, **keywords)
    calls: dict[str, Callable[..., Any]] = {
        "samples": partial(ritz.sample_traces, risk(nn.ReLU)),
        "samples of shares": partial(ritz.sample_traces, own, num_probes=3),
        "blocks": lambda **more: ritz.block_spectra(wide(), num_steps=4, num_probes=2, **more)["0"].trace,
        "system": lambda **more: ritz.solve(wide() + 5.0, torch.ones(wide().dim), tol=1e-9, **more),
    }
    found: Found = {}
    for name, call in calls.items():
        reports: list[int] = []

        def broken_off(done: int, total: int, reports: list[int] = reports) -> None:
            reports.append(done)
            if len(reports) == 2:
                raise KeyError("enough")

        with pytest.raises(KeyError, match="enough"):
            call(progress=broken_off, checkpoint=Checkpoint(folder / name, every=0))
        made = call(checkpoint=folder / name)
        found[name] = made.x if isinstance(made, Tensor) else made.value
    if ranks.all(True) and ranks.rank == 0:  # none is at work in it
        shutil.rmtree(folder)
    return found


@check
def traces() -> Found:
    op = ritz.GGN(risk())
    return {
        **named(
            hutchinson=ritz.trace(op, method="hutchinson", num_probes=5),
            hutchpp=ritz.trace(op, method="hutch++", num_probes=9),
            xtrace=ritz.trace(op, method="xtrace", num_probes=6),
            exact=ritz.trace(op, method="exact"),
            hessian=ritz.trace(ritz.Hessian(risk(nn.ReLU), route="reverse")),
            frobenius=ritz.frobenius_norm(op, num_probes=4),
            logdet=ritz.logdet(op, shift=0.1, num_probes=3),
            diagonal=ritz.diagonal(op, num_probes=4),
        ),
    }


@check
def eigenpairs_and_solutions() -> Found:
    op = ritz.GGN(risk())
    pairs = ritz.top_eigenpairs(op, k=3)
    found = ritz.solve(op + 0.1, torch.ones(op.dim))
    searched = ritz.top_eigenpairs(ritz.GGN(wide().risk), k=3)
    return {
        "values": pairs.values, "vectors": pairs.vectors.abs(), "solution": found.x,
        "searched": searched.values, "searched vectors": searched.vectors.abs(),
    }  # fmt: skip


@check
def per_sample() -> Found:
    return {
        "exact": ritz.sample_traces(risk(nn.ReLU)).value,
        "probes": ritz.sample_traces(risk(), method="probes", num_probes=3).value,
    }


@check
def curvature_noise() -> Found:
    return named(
        noise=ritz.curvature_noise(risk(), num_batches=5, batch_size=4, num_probes=2),
        gauss_newton=ritz.curvature_noise(risk(), num_batches=3, batch_size=7, num_probes=2, curvature="ggn"),
    )


# -------------------------------------------------------------------------------------------- training


def trained(steps: int = 5, **keywords: Any) -> Found:
    """Weights after some steps of KFAC on batches of 12, each rank with as many of them as any other."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrapped = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    opt = ritz.optim.KFAC(wrapped, lr=0.1, damping=0.1, factor_every=2, inverse_every=3, **keywords)
    x, y = samples(12 * steps)
    for step in range(steps):
        own = slice(12 * step + rank * 12 // size, 12 * step + (rank + 1) * 12 // size)
        opt.zero_grad()
        nn.functional.cross_entropy(wrapped(x[own]), y[own]).backward()
        opt.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@check
def kfac() -> Found:
    found: Found = {}
    for fisher in ("mc", "type2", "empirical"):
        found |= {f"{fisher} {name}": p for name, p in trained(fisher=fisher).items()}
    return found | {f"ekfac {name}": p for name, p in trained(fisher="mc", ekfac=True, refresh="qr").items()}


# -------------------------------------------------------------------------------------------- sharded models


def sharded(**keywords: Any) -> ritz.Risk:
    """The wide network under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = network(width=16)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return ritz.Risk(model, nn.CrossEntropyLoss(), samples(), **{"batch_size": 9, **keywords})  # three batches


@check
def fully_sharded() -> Found:
    whole = ritz.Risk(network(width=16), nn.CrossEntropyLoss(), samples(), group="self")
    if not dist.is_initialized():
        return {}
    r, v = sharded(), whole.space.probes([0], seed=0, dtype=torch.float64)
    grad = torch.ones(())  # of the user's
    before = [p.to_local().clone() for p in r.model.parameters()]
    for p in r.model.parameters():
        p.grad = torch.ones_like(p)
    hessian, moved = ritz.Hessian(r), r.at(1.5 * whole.space.join(whole.params()))
    found = {
        "loss": (r.loss(), whole.loss()),
        "gradient": (r.gradient(), whole.gradient()),
        "ggn": (ritz.GGN(r).rows(v), ritz.GGN(whole).rows(v)),
        "empirical": (ritz.EmpiricalFisher(r).rows(v), ritz.EmpiricalFisher(whole).rows(v)),
        "fisher": (ritz.Fisher(r, seed=2).rows(v), ritz.Fisher(whole, seed=2).rows(v)),
        "hessian": (hessian.rows(v), ritz.Hessian(whole, route="reverse").rows(v)),
        "block": (ritz.GGN(r).block("2.*").rows(v[:, :51]), ritz.GGN(whole).block("2.*").rows(v[:, :51])),
        "elsewhere": (moved.gradient(), whole.at(1.5 * whole.space.join(whole.params())).gradient()),
        "trace": (ritz.trace(ritz.GGN(r), "hutchinson", 2).value, ritz.trace(ritz.GGN(whole), "hutchinson", 2).value),
    }
    for size in (4, 16):  # batches of one size on all ranks but for the last, and of another on each
        uneven = r.on(shares("share of tensors")[0], size, share=True)
        found[f"share {size}"] = ritz.GGN(uneven).rows(v), found["ggn"][1]
        found[f"share {size}, hessian"] = ritz.Hessian(uneven).rows(v), found["hessian"][1]
    # what is asked of each batch, though a pass sums over ranks; of one sample, some ranks have nothing
    for name, own, size in (("all", r, 4), ("share", r.on(shares("share of tensors")[0], 4, share=True), 1)):
        noises = [ritz.curvature_noise(each, 3, size, num_probes=1) for each in (own, whole)]
        found[f"noise, {name}"] = tuple(noise.value for noise in noises)
        found[f"gradient noise, {name}"] = tuple(noise.parts["gradient noise"].value for noise in noises)
    found["pairs"] = tuple(minibatch_moment(each, 2, 4, curvature="ggn").value for each in (r, whole))
    blocks = [ritz.block_spectra(ritz.GGN(each), num_steps=2, num_probes=1) for each in (r, whole)]
    found["blocks"] = tuple(torch.tensor([float(s.trace.value) for s in each.values()]) for each in blocks)
    s, t = (lanczos(ritz.GGN(each), v[:1], 2, reorthogonalize="full").tridiagonal() for each in (r, whole))
    found["lanczos"] = s.alpha, t.alpha
    assert all(torch.equal(p.to_local(), b) for p, b in zip(r.model.parameters(), before, strict=True))
    assert all(bool((p.grad.to_local() == grad).all()) for p in r.model.parameters())
    assert 0 < hessian.error < 1e-6
    assert "difference route, products good to" in hessian.convention()
    for act, says in (
        (lambda: ritz.Hessian(r, route="reverse").rows(v), "have no second derivative"),
        (lambda: ritz.sample_traces(r), "neither exact traces nor sample"),
        (lambda: ritz.trace(ritz.GGN(r), "exact"), "neither exact traces"),
        (lambda: r.output({"0.bias": torch.ones(16).requires_grad_()}, next(iter(r.batches))), "are not a function of"),
        (lambda: ritz.optim.KFAC(r.model, lr=0.1, damping=0.1), "KFAC needs whole layers"),
        (lambda: ritz.KFACOperator(r), "Kronecker factors need whole layers"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            act()
    errors = {}
    for name, (got, truth) in found.items():
        got, truth = torch.as_tensor(got).double(), torch.as_tensor(truth).double()
        errors[name] = (got - truth).norm() / truth.norm()
        assert errors[name] < 1e-7, f"{name}: {errors[name]}"
    return {name: torch.as_tensor(got) for name, (got, _) in found.items()}


# -------------------------------------------------------------------------------------------- measures


@check
def measures() -> Found:
    measured = ritz.measure(risk(), test=risk().on(samples(9)), num_steps=4, num_probes=2)
    return {key: measured[key].value for key in measured if measured[key].value is not None}


@check
def landscapes() -> Found:
    r = risk()
    line = ritz.landscape.line(r, torch.ones(r.dim))
    return {"loss": line.losses, "curvature": line.curvature.value, "slope": line.slope.value}


@check
def damping() -> Found:
    """Learned from fresh batches; and streaming, from the batch of rank 0 (of as many samples on every rank)."""
    model, (x, y) = network(), samples()
    opt = torch.optim.Adam(model.parameters())
    found: Found = {}
    for streaming in (False, True):
        learned = ritz.optim.AutoDamping(opt, ritz.Risk(model, nn.CrossEntropyLoss(), (x, y)), every=2, num_batches=2)
        for _ in range(2):
            learned.step((x[:8], y[:8]) if streaming else None)
        found[f"streaming: {streaming}"] = opt.param_groups[0]["eps"]
    return found


class Counted(nn.Sequential):
    """Knows how many samples it has been shown."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.seen += len(x)
        out: Tensor = super().forward(x)
        return out


def counted() -> Counted:
    """Each rank has running statistics of its own, as replicas do; in a look those of the first count."""
    torch.manual_seed(0)
    model = Counted(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    model[1].running_mean += dist.get_rank() if dist.is_initialized() else 0.0
    return model


def watched_risk(model: nn.Module, how: str = "loader") -> ritz.Risk:
    return ritz.Risk(model, nn.CrossEntropyLoss(), shares(how)[0])


@check
def watched() -> Found:
    """The callbacks of both trainers along four steps, with a look at every other."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    own: list[int] = []
    given: dict[str, Any] = {
        "every": 2, "measures": ["trace", "lambda_max", "train_loss"], "logger": lambda scalars, step: own.append(step)
    }  # fmt: skip
    light = lightning.CurvatureHooks(watched_risk, budget=1.0, **given)
    model, took = counted(), list[int]()
    model.log_dict = lambda scalars, **how: took.append(len(scalars))
    trainer = SimpleNamespace(is_global_zero=first, global_step=0, loggers=[])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    light.on_train_start(trainer, model)
    for trainer.global_step in range(1, 5):
        light.on_train_batch_end(trainer, model, None, None, 0)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    face = transformers.CurvatureHooks(partial(watched_risk, how="distributed sampler"), budget=0.5, **given)
    state = SimpleNamespace(is_world_process_zero=first, global_step=0, epoch=0.0, log_history=[])
    face.on_train_begin(None, state, None, model=counted())
    face.tracker._before = 1e6  # seconds of training, so that the budget allows it
    for state.global_step in range(1, 5):
        face.on_step_end(None, state, None)
    assert len(took) == 2  # every rank can monitor it
    for hooks in (light, face):
        shared = f"; each was shared by {world().size} processes, over all 23 samples"
        assert hooks.tracker.table().notes[0].endswith(shared if world().size > 1 else "of the time")
    assert own == ([2, 4, 2, 4] if first else [])  # and one logs
    rows = [*light.tracker.record.rows, *face.tracker.record.rows]
    return {
        f"{number} {name}": value
        for number, row in enumerate(rows) for name, value in row.items() if not name.startswith("track/")
    }  # fmt: skip


@check
def comparisons() -> Found:
    a, b = risk(), risk()
    other = b.at({name: 1.1 * p for name, p in b.params().items()})
    found = ritz.compare({"a": a, "b": other}, num_steps=6, num_probes=3)
    return {
        "order": hash_of(" ".join(f"{key}: {found[key]}" for key in found)),
        "change": found.change("trace", "a", "b").value,
        "error": found.change("trace", "a", "b").stderr,
    }
