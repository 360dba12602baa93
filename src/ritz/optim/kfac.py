"""KFAC: gradient descent preconditioned by the Kronecker-factored Fisher matrix, in the user's own loop."""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..comm import Group, world
from ..errors import NumericalWarning, UnsupportedError, callers_level
from ..losses import BinaryCrossEntropy, CallableLoss, CrossEntropy, Loss, SquaredError, as_loss
from ..modes import AVERAGING_WRAPPERS, unwrapped
from ..operators.base import full_precision
from ..operators.layer_factors import Collector, FisherKind, Sharing
from ..operators.units import units_of
from ..sharded import is_sharded
from ..space import select
from ..switches import tensor_cores
from .factors import Refresh, RunningBlock, Start
from .groups import check_signs, decayed, descend, grouped, plain, rate_of, renamed
from .passes import Watcher
from .preconditioner import Preconditioner
from .renewal import keep_together, renew_shared, summed
from .skipping import finite, tell_skipped

LossName = Literal["cross_entropy", "mse", "bce"]
_CALL = (
    "call the model itself, not a copy, a part or a compiled form of it (unless KFAC was given what torch.compile "
    "gave), with gradients enabled, and backward() from its outputs, without create_graph=True, before step()"
)
_LOSSES: dict[str, Callable[[], Loss]] = {"cross_entropy": CrossEntropy, "mse": SquaredError, "bce": BinaryCrossEntropy}


class KFAC(torch.optim.Optimizer):
    """Natural gradient descent with Kronecker-factored curvature (Martens and Grosse 2015), damped exactly.

    For a layer with weight gradient g (outputs x inputs), factors G = Q_G diag(d_G) Q_G', A = Q_A diag(d_A) Q_A' of the
    Fisher matrix of the mean loss, and damping delta:

        v = Q_G [(Q_G' g Q_A) / (d_G d_A' + delta)] Q_A',    m <- momentum m + v,    w <- w - lr m

    The damping has the units of the Hessian of the mean loss, and is read from `group["damping"]` at every step.
    Changing it costs nothing. It may be a mapping from block names (see `blocks`) to values. With damping far above the
    curvature, this is SGD with learning rate lr / damping.

    The training loop does not change. On one step in `factor_every`, the optimiser records the inputs of the layers.
    When the gradient of the loss reaches the outputs, it runs one more backward pass of its own for the factors (for
    "type2" as many as there are outputs). Products with curvature matrices of the same model (`ritz.Hessian` and
    others) are recognised and do not affect the factors, and neither do passes while all trained parameters are frozen;
    for other backward passes on a refresh step, use `pause`. If the outputs are not a tensor, or the loss has class
    weights or an ignored class, call `observe(outputs, batch)` before `backward`; show several heads as one tensor.
    Padding, items of a cross-entropy without a gradient, is not counted in the factors. Activation checkpointing must
    use use_reentrant=False. If the model is compiled, give KFAC the result of torch.compile; names of parameters and
    blocks, and a saved state, are those of the model inside.

    Linear layers, convolutions (any groups, stride, padding, dilation) and embeddings have Kronecker factors, with
    weight and bias in one block. Parameters of normalisations and of all other modules use the diagonal of the Fisher
    matrix. A parameter that was frozen when the optimiser was created is not trained; a block without statistics is not
    updated yet.

    Args:
        model: The model; its hooks are removed with the optimiser. Hooks of a copy of the model do nothing.
        lr: The learning rate. It is multiplied by `group["lr_scale"]`, which is 1 unless something else sets it.
        damping: delta, positive.
        fisher: "mc" (the true Fisher: labels drawn from the model), "type2" (the same without sampling) or "empirical"
            (the labels of the data: not the Fisher matrix, but what many implementations use).
        loss: "cross_entropy", "mse", "bce", a torch loss with reduction="mean", or a `ritz.Loss`.
        momentum: Momentum of the preconditioned gradient, as in torch.optim.SGD.
        stat_decay: Decay of the running factors.
        factor_every: Steps between two updates of the factors; with gradient accumulation, all passes of the step
            count.
        inverse_every: Steps between two eigendecompositions. Early in training, they are also renewed whenever the
            number of factor updates is a power of two.
        stagger: Spread the eigendecompositions of the blocks over the steps in between.
        start: "debiased" averages, or the "identity" start of the published code of seed 004, which is hidden damping.
        sharing: "expand" or "reduce", for weights that act at several positions (tokens; pixels of a convolution).
        ekfac: Eigenvalues from per-sample gradients in the eigenbasis (George et al. 2018). Where samples mix, as under
            BatchNorm in training mode, what flows back to the rows of a sample counts as its own. For layers with
            several rows for each sample, it may take one more backward pass to see which rows are whose.
        refresh: "eigh", or "qr": one step of orthogonal iteration from the last eigenvectors, several times cheaper.
        kl_clip: Scale steps down to at most this lr^2 v'Cv, computed as lr^2 v'g; None never scales. Use 1e-3 when
            training from a random initialisation: there the curvature may grow a thousandfold within twenty steps,
            faster than statistics at these intervals can follow. Steps divided by the old curvature then make training
            diverge (docs/convergence.md).
        weight_decay: Added to the gradient (w * weight_decay), or `decoupled`, w <- w (1 - lr weight_decay).
        groups: Parameters with their own settings, {"params": glob or globs of names, "weight_decay": 0, ...}. A block
            uses the damping of the group of its first parameter, the weight.
        diagonal: Globs of parameters that use a diagonal instead of Kronecker factors.
        num_samples: Number of drawn labels per item, for "mc".
        loss_scale: For "empirical": the factor of the mean loss before `backward`, a number (1 / k for k passes per
            step) or a function (`scaler.get_scale`). The other Fishers do not use the user's gradient.
        max_factor: A factor with more rows than this is diagonal.
        tf32: On a GPU, multiply gradients with eigenvectors, and compute factors, in TF32, as torch's convolutions do
            by default. This is several times as fast, with an error of a step below a thousandth. Eigenvectors and
            eigenvalues are still computed in float32. False leaves the choice to torch's own switch.
        seed: Seed of the optimiser's own generator; the global generators are not used.
        group: The ranks that train together, as for `ritz.Risk`, with gradients averaged by DistributedDataParallel or
            by the user. Factors are summed over ranks, eigendecompositions are distributed, and the weights are those
            of one rank with all samples. Use "self" for a model that this process trains alone.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.randn(64, 3), torch.randn(64, 2)
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = KFAC(model, lr=1.0, damping=1e-6, loss="mse", fisher="type2", momentum=0.0)
        >>> torch.nn.functional.mse_loss(model(X), y).backward()
        >>> opt.step()  # one layer, squared error: Newton's method, there in one step
        >>> opt.zero_grad()
        >>> torch.nn.functional.mse_loss(model(X), y).backward()
        >>> bool(model.weight.grad.abs().max() < 1e-5)
        True

    Raises:
        RuntimeError: From `step`, if no training pass was seen, or if one had outputs that were not shown.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        damping: float | Mapping[str, float],
        *,
        fisher: FisherKind = "mc",
        loss: LossName | Any = "cross_entropy",
        momentum: float = 0.9,
        stat_decay: float = 0.95,
        factor_every: int = 10,
        inverse_every: int = 100,
        stagger: bool = False,
        start: Start = "debiased",
        sharing: Sharing = "expand",
        ekfac: bool = False,
        refresh: Refresh = "eigh",
        kl_clip: float | None = None,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        groups: Sequence[Mapping[str, Any]] = (),
        diagonal: Sequence[str] = (),
        num_samples: int = 1,
        loss_scale: float | Callable[[], float] = 1.0,
        max_factor: int = 10_000,
        tf32: bool = True,
        seed: int = 0,
        group: Group = "world",
    ) -> None:
        _check(fisher, start, refresh, factor_every, inverse_every, num_samples, stat_decay, kl_clip)
        called, seen_loss = _called(model), _as_loss(loss)
        if fisher == "mc" and isinstance(seen_loss, CallableLoss):
            raise ValueError(
                "labels can be drawn for cross-entropy, squared error and binary cross-entropy only; for another loss "
                "give fisher='type2' or 'empirical'"
            )
        self.world = world(group)
        model = unwrapped(called)  # whose names do not depend on what is put around it
        self._params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._params:
            raise ValueError("the model has no parameter to train: none has requires_grad")
        units = units_of(model, tuple(self._params), select(self._params, diagonal) if diagonal else ())
        defaults: dict[str, Any] = {
            "lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay, "decoupled": decoupled,
            "lr_scale": 1.0,
        }  # fmt: skip
        super().__init__(grouped(self._params, groups), defaults)
        self.factor_every, self.inverse_every = factor_every, inverse_every
        self.kl_clip, self.stagger, self.tf32 = kl_clip, stagger, tf32
        self.blocks = {name: RunningBlock(unit, stat_decay, start, ekfac, refresh) for name, unit in units.items()}
        self.steps, self.skipped = 0, 0
        self._unseen, self._still = 0, set[str]()  # what was warned of
        self._preconditioner = Preconditioner(self.blocks, self._params)
        collector = Collector(units, sharing, max_factor, surely=False)
        self._watcher = Watcher(called, collector, seen_loss, fisher, num_samples, loss_scale, tf32, seed, self.world)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; only parameters of the model can be trained, since the others belong to no layer."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        own = {id(p) for p in self._params.values()}
        if any(id(p) not in own for p in group["params"]):
            self.param_groups.pop()
            raise ValueError(
                "KFAC trains the parameters of its model; this group has one that was not in it, or was frozen"
            )
        check_signs(group)

    # ------------------------------------------------------------------------------------------- statistics

    def observe(self, outputs: Tensor, batch: Any) -> None:
        """Show the outputs of the last forward pass, as a tensor, and its batch, between `model(...)` and `backward`.

        For models whose outputs are not a tensor, and for losses that need the targets: class weights, ignored items.
        It does nothing on steps that do not update the factors.

        Args:
            outputs: The tensor that the loss is computed from, samples first: transposed if the model has time first.
            batch: Where the loss finds its target: (inputs, target), or a dictionary with "labels".
        """
        if not isinstance(outputs, Tensor):
            raise TypeError(f"outputs must be the tensor that the loss is computed from, got {type(outputs).__name__}")
        self._watcher.observe(outputs, batch)

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """No statistics inside: for backward passes on a refresh step that do not belong to training."""
        return self._watcher.pause()

    def eigenvalues(self) -> dict[str, Tensor]:
        """The eigenvalues of every block, undamped, largest first, by name; of those that have statistics."""
        spaces = {name: block.space() for name, block in self.blocks.items()}
        return {
            name: space.values.flatten().sort(descending=True).values
            for name, space in spaces.items()
            if space is not None
        }

    def _absorb(self) -> None:
        """The statistics of the passes since the last step into the factors, and new eigenvectors where due."""
        if self._watcher.waiting is not None:
            raise RuntimeError(
                f"{self._watcher.waiting.obstacle}: call opt.observe(outputs, batch) between the forward pass and "
                "backward(); passes that are not for training belong under torch.no_grad() or opt.pause()"
            )
        spoilt = self._watcher.spoilt
        stats, weight = self._watcher.take()
        if self._watcher.active and self.world.size > 1:
            keep_together(list(self._params.values()), self.world)
            stats, weight = summed(stats, weight, self.world)
        if spoilt:
            warnings.warn(
                f"statistics of step {self.steps} are not finite and were left out of the factors",
                NumericalWarning,
                stacklevel=callers_level(),
            )
        elif self._watcher.active and not stats:
            self._tell_unseen()
        if stats:
            for block in self.blocks.values():
                block.add(stats, weight)
        due = [block for number, block in enumerate(self.blocks.values()) if self._renewal_due(number, block)]
        if due:
            renew_shared(due, self.world)

    def _tell_unseen(self) -> None:
        """Warn that the factors stay as they were: at the first, second, fourth, eighth, ... step of the kind."""
        if not self._informed or all(p.grad is None for p in self._params.values()):
            return
        self._unseen += 1
        if not self._unseen & (self._unseen - 1):
            warnings.warn(
                f"no training pass was seen in step {self.steps}, which should update the factors: they stay "
                f"unchanged ({self._unseen} such steps so far); {_CALL}",
                NumericalWarning,
                stacklevel=callers_level(),
            )

    def _tell_still(self, names: Sequence[str]) -> None:
        """Warn of parameters that the loss depends on, but not by way of the outputs that were seen; once of each."""
        grads = {name: self._params[name].grad for name in names if name not in self._still}
        still = [name for name, grad in grads.items() if grad is not None and bool(grad.any())]
        self._still.update(still)
        if still:
            warnings.warn(
                f"{', '.join(still[:6])}{', ...' if len(still) > 6 else ''} have gradients but no part in the outputs "
                "that KFAC saw, and are not updated: give all outputs that the loss is computed from, "
                "opt.observe(outputs, batch), several of them as one, torch.cat([a, b], dim=1)",
                NumericalWarning,
                stacklevel=callers_level(),
            )

    def _renewal_due(self, number: int, block: RunningBlock) -> bool:
        if block.count == block.renewed:  # nothing new
            return False
        early = self.steps < self.inverse_every and block.count & (block.count - 1) == 0
        offset = number * self.inverse_every // len(self.blocks) if self.stagger else 0
        return early or not block.renewed or (self.steps - offset) % self.inverse_every == 0

    # ------------------------------------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; gradients that are not finite are not used: the step is skipped, counted in `skipped`, and said."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with full_precision():
            self._absorb()
            if self._finite_gradients():
                with tensor_cores(self.tf32):
                    self._update()
        self._ready(self.steps + 1)
        return loss

    @property
    def _informed(self) -> bool:
        """Whether any block has statistics."""
        return any(block.count for block in self.blocks.values())

    def _ready(self, steps: int) -> None:
        """Look for statistics or not, from here on: until there are some, and then at the interval."""
        self.steps = steps
        self._watcher.active = steps % self.factor_every == 0 or not self._informed
        bases = {name: block.bases for name, block in self.blocks.items() if block.ekfac and block.values}
        self._watcher.bases = bases or None

    def _finite_gradients(self) -> bool:
        grads = [p.grad for p in self._params.values() if p.grad is not None]
        if any(g.is_sparse for g in grads):
            raise RuntimeError("KFAC does not take sparse gradients; make the embedding with sparse=False")
        if not grads:
            return False
        if finite(grads):
            return True
        self.skipped += 1
        remedy = "lower the learning rate, raise the damping, or give kl_clip=1e-3"
        tell_skipped(self.skipped, step=self.steps, remedy=remedy)
        return False

    def _update(self) -> None:
        if not self._informed:
            raise RuntimeError(f"KFAC has seen no training pass: {_CALL}")
        own = self._settings()
        grads = {name: decayed(p, own[name]) for name, p in self._params.items() if p.grad is not None}
        moves = self._preconditioner.inverse(grads, self._preconditioner.dampings(grads, own))
        if self._watcher.active:
            self._tell_still([name for name in grads if name not in moves])
        shrink = self._clip(grads, moves, {name: rate_of(own[name]) for name in moves})
        if shrink != 1:
            torch._foreach_mul_(list(moves.values()), shrink)
        for group in self.param_groups:
            names = [name for name in group["param_names"] if name in moves]
            if names:
                descend([self._params[name] for name in names], [moves[name] for name in names], group, self.state)

    def _clip(self, grads: Mapping[str, Tensor], moves: Mapping[str, Tensor], rates: Mapping[str, float]) -> float:
        """min(1, sqrt(kl_clip / sum lr^2 v'g)) (Ba, Grosse and Martens 2017, section 5)."""
        if self.kl_clip is None:
            return 1.0
        change = float(sum(rates[name] ** 2 * (grads[name] * move).sum().float() for name, move in moves.items()))
        return min(1.0, math.sqrt(self.kl_clip / change)) if change > 0 else 1.0

    def precondition(self, tensors: Mapping[str, Tensor], power: float = -1.0) -> dict[str, Tensor]:
        """(C + damping)^power of tensors given by parameter name; blocks without statistics are left out.

        Example:
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> opt = KFAC(model, lr=0.1, damping=1.0, loss="mse", fisher="type2")
            >>> model(torch.ones(1, 1)).square().mean().backward()
            >>> opt.step()  # curvature 2
            >>> opt.precondition({"weight": torch.ones(1, 1)})["weight"].item()
            0.3333
        """
        for name, tensor in tensors.items():
            if name not in self._params:
                raise ValueError(f"{name!r} is not a parameter that is trained; there are: {', '.join(self._params)}")
            if tensor.shape != self._params[name].shape:
                raise ValueError(f"{name} has shape {tuple(self._params[name].shape)}, got {tuple(tensor.shape)}")
        with torch.no_grad(), full_precision(), tensor_cores(self.tf32):
            dampings = self._preconditioner.dampings(tensors, self._settings())
            return self._preconditioner.apply(tensors, dampings, lambda values: values**power)

    def _settings(self) -> dict[str, dict[str, Any]]:
        """The group of every parameter, by name."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return {name: groups[id(p)] for name, p in self._params.items()}

    # ------------------------------------------------------------------------------------- saving and loading

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with all that training needs to go on to the same bit under "kfac", by block name."""
        return {
            **super().state_dict(),
            "kfac": {
                "steps": self.steps,
                "skipped": self.skipped,
                "generator": {"seed": self._watcher.seed, "draws": self._watcher.draws},
                "blocks": {name: block.state_dict() for name, block in self.blocks.items()},
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`; parameters are matched by name, factors have their precision, at least float32.

        Raises:
            ValueError: If the state is of another optimiser, or of a model with other layers; nothing has changed then.
        """
        if "kfac" not in state_dict:
            raise ValueError("this state_dict has no factors: it was not made by KFAC")
        own = state_dict["kfac"]
        blocks = {plain(name): block for name, block in own["blocks"].items()}
        if apart := sorted(set(blocks) ^ set(map(plain, self.blocks))):
            raise ValueError(f"the state_dict is of a model with other layers: {', '.join(apart)} in one of the two")
        super().load_state_dict(renamed(state_dict, self.param_groups))
        for state in self.state.values():  # torch shares them with the optimiser that they come from
            state.update({key: value.clone() for key, value in state.items()})
        for name, block in self.blocks.items():
            block.load_state_dict(blocks[plain(name)], self._params[next(iter(block.unit.params.values()))])
        self.skipped = own["skipped"]
        self._watcher.seed, self._watcher.draws = own["generator"]["seed"], own["generator"]["draws"]
        self._watcher.take()
        self._ready(own["steps"])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a KFAC is bound to its model by hooks and cannot be copied; make a new one and load state_dict()"
        )


def _check(
    fisher: str,
    start: str,
    refresh: str,
    factor_every: int,
    inverse_every: int,
    num_samples: int,
    stat_decay: float,
    kl_clip: float | None,
) -> None:
    """Refuse what cannot be; the settings of groups are looked at as groups are added."""
    for name, value, kind in (("fisher", fisher, FisherKind), ("start", start, Start), ("refresh", refresh, Refresh)):
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
    counts = {"factor_every": factor_every, "inverse_every": inverse_every, "num_samples": num_samples}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if not 0 <= stat_decay < 1:
        raise ValueError(f"stat_decay must lie in [0, 1), got {stat_decay}")
    if kl_clip is not None and not kl_clip > 0:
        raise ValueError(f"kl_clip must be positive, or None, got {kl_clip}")


def _called(model: nn.Module) -> nn.Module:
    """The module whose calls are seen in training."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; KFAC needs the layers")
    model = unwrapped(model, AVERAGING_WRAPPERS)
    if is_sharded(model):
        raise UnsupportedError(
            "KFAC needs whole layers, but this model is sharded by FSDP2; train it under DistributedDataParallel"
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedError(
            "after model.compile() the hooks of KFAC do not run: give it compiled = torch.compile(model) instead, and "
            "call that in training"
        )
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"{name} has no shape before the first call of its lazy layer: call the model on a batch once"
            )
        if p.is_complex() and p.requires_grad:
            raise UnsupportedError(
                f"{name} is complex, and curvature is that of real numbers: store torch.view_as_real of it and apply "
                "torch.view_as_complex in the forward pass, or freeze it"
            )
    return model


def _as_loss(loss: Any) -> Loss:
    if isinstance(loss, str):
        if loss not in _LOSSES:
            raise ValueError(f"loss must be 'cross_entropy', 'mse', 'bce', a torch loss or a ritz.Loss, got {loss!r}")
        return _LOSSES[loss]()
    return as_loss(loss)
