"""The examination: what is looked at, in which order, and what is said of it."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import Batch
from ..errors import NonFiniteError, NumericalWarning, UnsupportedError
from ..estimators.precision import ROUGH, coarse_products, compare_precisions
from ..linearity import multi_affine
from ..measures.elsewhere import places_of
from ..measures.registry import resolve
from ..memory import free_memory
from ..operators.gauss_newton import GGN
from ..operators.hessian import ROUTES, Hessian
from ..reducers import Mean
from ..risk import Risk
from . import costs
from .checkup import Checkup, Finding, Projection, Trial, count, size

Progress = Callable[[str, float], None]  # (what is being done, part of the whole that is done)

# relative errors of a product above which it is no symmetric matrix; central differences are as good as 1e-2
_SOUND = {torch.float64: 1e-9, torch.float32: 1e-3}
_ROUGH = 3e-2
_VECTORS = 4  # that products are tried with
_FEW = 32  # samples in a batch below which the overhead of a pass is felt
_THREADS = 1.25  # one thread that is faster than all of them by this factor is worth a word
_ROUTE = 1.5  # and so is a route that is faster by this one than that which is taken


def examine(
    risk: Risk,
    *,
    measures: Any = "standard",
    num_steps: int = 100,
    num_probes: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    known: Callable[[Checkup], None] | None = None,
) -> Checkup:
    """Look at a risk before a long run: is it sound, which way is fastest, how long and how much memory will it take?

    The whole data is walked once, for the loss; all else is measured on the first batch, and scaled. Trouble is a
    finding with its remedy, not an error.

    Args:
        risk: The solution.
        measures: What `ritz.measure` is to be projected for.
        num_steps, num_probes: That are planned.
        seed: Seed of the vectors that products are tried with.
        progress: Called with (what is being done, part of the whole that is done).
        known: Called with what is known so far, after each part.

    Raises:
        ValueError: If an argument is wrong.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> data = torch.eye(3), torch.tensor([0, 1, 1])
        >>> found = examine(ritz.Risk(model, torch.nn.CrossEntropyLoss(), data))
        >>> found.healthy, found["deterministic"].status, found["symmetric"].status, found["kinks"].status
        (True, 'ok', 'ok', 'note')
    """
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    resolve(measures)
    if num_steps < 1 or num_probes < 1:
        raise ValueError(f"num_steps and num_probes must be at least 1, got {num_steps} and {num_probes}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # they are findings here
        looked = _Examination(risk, measures, num_steps, num_probes, seed, progress or (lambda text, part: None))
        return looked.run(known or (lambda checkup: None))


class _Examination:
    """One examination: what was found so far."""

    def __init__(
        self, risk: Risk, measures: Any, num_steps: int, num_probes: int, seed: int, progress: Progress
    ) -> None:
        self.risk, self.measures, self.seed, self.progress = risk, measures, seed, progress
        self.num_steps, self.num_probes = num_steps, num_probes
        self.findings: list[Finding] = []
        self.trials: tuple[Trial, ...] = ()
        self.projections: tuple[Projection, ...] = ()

    def add(self, name: str, status: Any, text: str, remedy: str = "") -> None:
        self.findings.append(Finding(name, status, text, remedy))

    def run(self, known: Callable[[Checkup], None]) -> Checkup:
        risk = self.risk
        self.progress("loss over all data", 0.0)
        if self._loss():
            known(self.checkup())
            first = next(iter(risk.batches))
            one = risk.on([first.data])  # the first batch as a risk of its own
            one.notes = risk.notes
            self.progress("loss and gradient again", 0.2)
            self._guarded("gradient", self._repeats, first)
            self._modules()
            known(self.checkup())
            self.progress("routes of products", 0.35)
            self._routes(one)
            self._kinks()
            known(self.checkup())
            self.progress("time and memory", 0.6)
            if any(trial.works for trial in self.trials):
                self._guarded("costs", self._costs, one, first)
        self.progress("done", 1.0)
        return self.checkup()

    def checkup(self) -> Checkup:
        """What is known."""
        risk = self.risk
        model = f"{type(risk.model).__name__}, {risk.dim:,} parameters"
        convention = risk.convention() if self.trials else ""
        return Checkup(
            model=model, convention=convention, findings=tuple(self.findings), trials=self.trials,
            projections=self.projections,
        )  # fmt: skip

    def _guarded(self, name: str, look: Callable[..., None], *args: Any) -> None:
        """What goes wrong in a look at something is a finding too."""
        try:
            look(*args)
        except Exception as error:
            text = " ".join(str(error).split())
            self.add(name, "failed", f"{type(error).__name__}: {text}", "a run would meet the same: mend it first")

    # ------------------------------------------------------------------------------------------ the loss

    def _loss(self) -> bool:
        """The first pass over the data; whether there is a loss to go on with."""
        try:
            value = self.risk.loss()
        except NonFiniteError as error:
            self.add("finite", "failed", str(error), "load weights and data that are finite")
        except (UnsupportedError, TypeError, ValueError) as error:  # whose messages say what to do
            text = " ".join(str(error).split())
            self.add("deterministic" if "forward pass is random" in text else "loss", "failed", text)
        except Exception as error:
            text = " ".join(str(error).split())
            self.add("loss", "failed", f"{type(error).__name__}: {text}", "make the model run on the data first")
        else:
            self.add("finite", "ok", f"weights and losses are; the mean loss is {value:.6g}")
            self._data()
            return True
        return False

    def _data(self) -> None:
        """What is worth knowing of the data."""
        batches = self.risk.batches
        samples = count(batches.num_samples, "sample")
        if not batches.ordered:
            self.add("data", "note", f"{samples}; the loader shuffles: numbers of single samples cannot be paired")
        else:
            where = "kept on the device" if batches.cached else "streamed at every product"
            self.add("data", "ok", f"{samples}, the same on every walk, {where}")

    def _repeats(self, first: Batch) -> None:
        """Two evaluations of one batch, loss and gradient, to the bit."""
        risk = self.risk
        twice = [
            (
                risk.fold(risk.total_and_weight, Mean(), batches=[first]),
                risk.fold(risk.batch_gradient, Mean(), batches=[first]),
            )
            for _ in range(2)
        ]
        (loss, gradient), (loss2, gradient2) = twice
        if torch.equal(loss, loss2) and torch.equal(gradient, gradient2):
            self.add("deterministic", "ok", "loss and gradient of a batch are the same twice, to the bit")
        else:
            apart = float((gradient - gradient2).norm() / gradient.norm().clamp(min=1e-300))
            self.add(
                "deterministic", "note", f"the gradient of a batch changes by {apart:.1e}, as where sums have no order",
                "for results that are equal to the bit: torch.use_deterministic_algorithms(True)",
            )  # fmt: skip
        named = zip(risk.names, risk.space.segment(gradient[None].abs())[0].tolist(), strict=True)
        if unused := [name for name, total in named if total == 0]:
            more = f" and {len(unused) - 4} more" if len(unused) > 4 else ""
            self.add(
                "gradient", "note", f"zero on the first batch for {', '.join(unused[:4])}{more}: unused, or dead units"
            )

    # ---------------------------------------------------------------------------------------- the modules

    def _modules(self) -> None:
        """BatchNorm, dropout, attention, frozen weights, and a loss without outputs."""
        risk, modules = self.risk, list(self.risk.model.modules())
        self._batchnorm([m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)])
        drops = [m for m in modules if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
        if drops:
            how = (
                "on, one mask for each batch held for all products" if risk.dropout else "switched off inside products"
            )
            self.add("dropout", "note", f"{count(len(drops), 'layer')}, {how}")
        if risk.notes:
            self.add("attention", "note", f"{', '.join(risk.notes)}: fused kernels have no second derivative")
        frozen = sum(p.numel() for p in risk.model.parameters() if not p.requires_grad)
        if frozen:
            self.add("frozen", "note", f"{frozen} parameters are frozen, and held")
        if risk.opaque:
            self.add(
                "outputs", "note", "a batch_loss: there is a Hessian, but no Gauss-Newton matrix and no margins",
                "give loss= and forward= if the loss is a function of outputs",
            )  # fmt: skip
        if coarse := coarse_products(risk):
            self.add(
                "precision", "warning", f"{coarse} are in TF32, with 10 bits",
                "torch.set_float32_matmul_precision('highest') and torch.backends.cudnn.allow_tf32 = False",
            )  # fmt: skip
        elif risk.dtype not in _SOUND:
            self.add(
                "precision", "warning", f"{risk.dtype} has too few digits for a Lanczos run", "dtype=torch.float32"
            )

    def _batchnorm(self, norms: Sequence[Any]) -> None:
        """Which statistics, and whether they were ever learned."""
        if not norms:
            return
        layers = count(len(norms), "BatchNorm layer")
        if self.risk.mode == "train":
            self.add("BatchNorm", "note", f"{layers} by the statistics of each batch, which is never split")
            return
        state = self.risk.state()
        fresh = [n for n, t in state.items() if n.endswith("num_batches_tracked") and int(t) == 0]
        if fresh:
            self.add(
                "BatchNorm", "warning", f"{layers} by running statistics, never updated in {len(fresh)}",
                "load the buffers with the weights, walk the data once in train mode, or use mode='train'",
            )  # fmt: skip
        else:
            self.add("BatchNorm", "ok", f"{layers} by their running statistics (eval mode)")

    # --------------------------------------------------------------------------------------- the products

    def _routes(self, one: Risk) -> None:
        """Each way of taking products, on one batch; then whether that which is taken is a symmetric matrix."""
        trials = [self._trial(one, route) for route in ROUTES]
        chosen = Hessian(one)
        try:
            chosen.rows(chosen.probes([0], self.seed, "normal"))
        except Exception as error:
            text = " ".join(str(error).split())
            self.add("products", "failed", text, "replace the operation in the model, or take what `ritz.GGN` gives")
            self.trials = tuple(trials)
            return
        self.trials = tuple(Trial(**{**vars(t), "chosen": t.route == chosen.route}) for t in trials)
        self._second_derivatives()
        taken = next(trial for trial in self.trials if trial.chosen)
        if not taken.works:
            self.add("products", "failed", taken.error, "try dtype=torch.float64")
            return
        limit = _ROUGH if taken.route == "difference" else _SOUND.get(one.dtype, _ROUGH)
        for name, found, text in (
            ("symmetric", taken.asymmetry, "H and its transpose differ by"),
            ("linear", taken.nonlinearity, "H(2u - 3v) and 2Hu - 3Hv differ by"),
        ):
            assert found is not None
            sound = found <= limit
            remedy = (
                ""
                if sound
                else "try dtype=torch.float64; if it stays, the model has a gradient that is not of any function"
            )
            self.add(name, "ok" if sound else "failed", f"{text} {found:.1e}, relative", remedy)
        self._digits(chosen)

    def _digits(self, H: Hessian) -> None:
        """Round-off that changes the matrix, and that no test of it can see, beside a product in float64."""
        seen = compare_precisions(H, self.seed)
        if seen is None:
            return
        kind = str(H.dtype).removeprefix("torch.")
        text = f"products in {kind} are off by {seen.distance:.0e} in the first batch, beside those in float64"
        rough = seen.distance > ROUGH
        self.add("digits", "warning" if rough else "ok", text, seen.remedy if rough else "")

    def _trial(self, one: Risk, route: Any) -> Trial:
        H = Hessian(one, route)
        rows = H.probes(range(_VECTORS), self.seed, "normal")
        try:
            images = H.rows(torch.cat([rows, 2 * rows[:1] - 3 * rows[1:2]])).double()
            if not bool(images.isfinite().all()):
                return Trial(route, error="a product is not finite")
            full = H.probes(range(one.plan.chunk), self.seed, "normal")
            seconds = costs.seconds_of(lambda: H.rows(full), one.device)
        except Exception as error:
            return Trial(route, error=" ".join(str(error).split()).partition(";")[0])
        *each, both = images
        form = rows.double() @ torch.stack(each).T  # u'Hv for every pair; E (u'Hv - v'Hu)^2 = |H - H'|_F^2
        pairs = (form - form.T).triu(1).square().sum().div(_VECTORS * (_VECTORS - 1) / 2).sqrt()
        size = torch.stack(each).norm() / _VECTORS**0.5  # E |Hv|^2 = |H|_F^2
        return Trial(
            route, seconds, len(full), _relative(pairs, size),
            _relative((both - 2 * each[0] + 3 * each[1]).norm(), both.norm()),
        )  # fmt: skip

    def _second_derivatives(self) -> None:
        """Whether each operation has one, by the exact routes."""
        exact = [trial for trial in self.trials if trial.route != "difference"]
        broken = [trial for trial in exact if not trial.works]
        if not broken:
            self.add("second derivatives", "ok", "every operation has one, forward and reverse")
        elif len(broken) < len(exact):
            self.add("second derivatives", "note", f"not by the {broken[0].route} route: {broken[0].error}")
        else:
            self.add(
                "second derivatives", "warning", f"none: {broken[-1].error}; differences of the gradient are taken",
                "replace the operation by one of torch's own if more digits are needed, or use dtype=torch.float64",
            )  # fmt: skip

    def _kinks(self) -> None:
        """A piecewise-linear network has an exact trace."""
        if self.risk.opaque:
            return
        try:
            answer = multi_affine(self.risk)
        except Exception:
            return  # a word less, and nothing else
        if answer.holds:
            self.add(
                "kinks",
                "note",
                "affine in each single weight: Tr H = Tr GGN, which ritz.trace has without probes",
            )

    # ------------------------------------------------------------------------------------- time and memory

    def _costs(self, one: Risk, first: Batch) -> None:
        risk = self.risk
        scale = risk.num_samples / first.size
        H = Hessian(one)
        timed = costs.time_products(H, scale)
        ggn = None
        if not risk.opaque and any(row.cost == "GGN" for row in resolve(self.measures)):
            ggn = costs.time_products(GGN(one), scale)
        seen = costs.Measured(
            hessian=timed, ggn=ggn, gradient=scale * costs.seconds_of(one.gradient, risk.device),
            projection=costs.time_projection(H), product_bytes=costs.product_bytes(H), batch_size=first.size,
        )  # fmt: skip
        sized = seen, self.measures, self.num_steps, self.num_probes
        self.projections = costs.project(risk, *sized)
        if moves := self._moves(one):
            self.projections += (costs.project_audit(self.projections[1], moves, risk.dim, *sized),)
        self._room()
        self._speed(H, timed, first)

    def _moves(self, one: Risk) -> list[str]:
        """The transforms that an audit would make; none where the network cannot be followed."""
        try:
            return list(places_of(one, seed=self.seed)[0])
        except Exception:
            return []  # a projection less, and nothing else

    def _room(self) -> None:
        """Whether the memory is there."""
        needed, free = self.projections[0].memory, free_memory(self.risk.device)
        if free is None:
            return
        text = f"{size(needed)} beside model and data, of {size(free)} that are free"
        if needed < free:
            self.add("memory", "ok", text)
        else:
            self.add(
                "memory", "warning", text,
                "plan=ritz.Plan(chunk=1, micro_batch=...) for the products, params= or fewer products= for the vectors",
            )  # fmt: skip

    def _speed(self, H: Hessian, timed: costs.Products, first: Batch) -> None:
        """What would be faster."""
        device = self.risk.device
        if device.type == "cpu" and torch.cuda.is_available():
            self.add("device", "note", "there is a GPU, and the risk is on the CPU", "device='cuda'")
        if first.size < min(_FEW, self.risk.num_samples):
            self.add(
                "batches", "note", f"batches of {count(first.size, 'sample')}: the overhead of each pass is felt",
                "give larger batches; micro_batch splits those that do not fit",
            )  # fmt: skip
        self._faster_route()
        threads = torch.get_num_threads()
        if device.type != "cpu" or threads == 1:
            return
        rows = H.probes(range(timed.chunk), self.seed, "normal")
        try:
            torch.set_num_threads(1)
            alone = costs.seconds_of(lambda: H.rows(rows), device)
        finally:
            torch.set_num_threads(threads)
        if alone * _THREADS < timed.full:
            self.add(
                "threads", "note", f"one thread is {timed.full / alone:.1f} times as fast as {threads}",
                "set OMP_NUM_THREADS=1: the matrices are small",
            )  # fmt: skip

    def _faster_route(self) -> None:
        """The clock of one moment chose the route; where it was wrong, it can be named."""
        exact = [(t.seconds, t) for t in self.trials if t.seconds is not None and t.route != "difference"]
        taken = next((seconds for seconds, trial in exact if trial.chosen), None)
        if taken is None:
            return
        seconds, fastest = min(exact, key=lambda pair: pair[0])
        if seconds * _ROUTE < taken:
            self.add(
                "route", "note", f"the {fastest.route} route is {taken / seconds:.1f} times as fast as the one taken",
                f"plan=ritz.Plan(route={fastest.route!r}), if it is so again",
            )  # fmt: skip


def _relative(apart: Tensor, scale: Tensor) -> float:
    """A difference through its scale; 0 through 0 is 0."""
    apart, scale = apart.abs().double(), scale.double()
    return float(apart / scale) if float(scale) > 0 else float(apart)
