"""Damping that follows the curvature as training goes on, for any optimiser with a damping-like entry.

`AutoDamping` looks at the curvature every so many steps, shows what it saw to a rule (`ritz.optim.rules`) and writes
the answer to the parameter groups. Seed 004 does this with Algorithm 1, whose printed form is not an estimate of what
it is for (its sum is never divided by the number of batches, and it takes off (v'Hv)^2 where |Hv|^2 is meant). The
estimates here have no bias and tell their error: `ritz.curvature_noise`, or a probe of its own for each batch.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..batches import on_host
from ..errors import NonFiniteError
from ..estimators.noise import Curvature, curvature_noise
from ..results import Estimate
from ..risk import Risk
from ..space import random_bits
from .diagnostics import reduction_ratio
from .rules import Combine, DampingRule, NoiseVariance, Seen
from .skipping import finite
from .streaming import MATRICES, Method, Stream

_CURVATURE = frozenset({"noise", "trace", "second_moment"})
_KNOWN = _CURVATURE | {"reduction_ratio"}

PRESETS: dict[str, dict[str, Any]] = {
    "paper_text": {"rule": NoiseVariance(combine="floor"), "num_batches": 79, "batch_size": 128, "num_probes": 1},
    "published_code": {
        "rule": NoiseVariance(factor=7 / 8),
        "num_batches": 8,
        "batch_size": 128,
        "num_probes": 1,
        "fresh": False,
        "compensate_lr": True,
    },
    "recommended": {},
}


class AutoDamping:
    """Learns the damping of an optimiser from the noise of the curvature (seed 004, section 7).

        for batch in loader:
            ...
            optimizer.step()
            damping.step()          # or damping.step(batch): streaming, no extra data

    Every `every` steps the rule receives its estimates, computed at the current weights. `step()` draws fresh batches
    from the risk for this. `step(batch)` instead uses single products of the training batches, spread over the previous
    steps (see `ritz.optim.streaming`). Until the first refresh, the damping does not change. By default, both use 4
    batches per 100 steps: docs/noise.md gives the cost on a CPU and the accuracy of the noise, docs/kfac.md the cost on
    a GPU.

    Learning rates are set by the user and by schedulers. `compensate_lr` multiplies them by 1 + delta only inside each
    `optimizer.step()`, through hooks, or by `group["lr_scale"]` if the optimiser has such an entry.

    For Adam and related optimisers, the entry is `eps`, which is added to the root of squared gradients, not to a
    curvature. The authors of seed 004 found the learned value too large there, and compensated with a higher learning
    rate.

    Args:
        optimizer: Any torch optimiser.
        risk: Model, loss and the training data without augmentation. Its `mode` sets the statistics of BatchNorm:
            "eval", as the authors use, for running statistics, which lag behind training early on; "train" for those of
            the batches, which the optimiser sees.
        every: Steps between refreshes.
        rule: Computes the damping from the estimates; the default is `NoiseVariance()`. A copy is stored.
        combine: For the rules that accept it: "add" the estimate to the start value, or use that as a "floor".
        key: Entry of the parameter groups to write; by default "damping", or else "eps".
        num_batches: Number of batches of a refresh, or of products of a streaming window.
        batch_size: Size of the batches of a refresh; 128, or less if there are few data.
        num_probes: Number of probes of a refresh. None gives each batch its own probe, see `ritz.optim.streaming`; a
            number uses that many probes common to all batches, by `ritz.curvature_noise`. One common probe (the paper)
            has an error that depends on its alignment with the few directions that contain most of the noise, and its
            batches do not show that error.
        curvature: "hessian" or "ggn"; by default the Hessian, and the GGN for a rule that needs a mean curvature
            or a reduction ratio.
        fresh: Draw new examples at each refresh. Reusing the same examples causes an error that averaging does not
            remove.
        stream: "halves" or "pairs"; by default halves if a batch can be split.
        compensate_lr: Multiply learning rates by 1 + delta (seed 004, equation 13: shrinkage at an undiminished rate).
        per_group: One damping for each parameter group, from the block of its parameters.
        seed: Seed of batches and probes; those of a refresh are keyed by its step, so a resumed run draws the same.

    Attributes:
        history: One dictionary of plain numbers for each refresh.
        seen: The estimates of the last refresh, one `Seen` for each rule, with their error bars.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> X = torch.tensor([1.0, 2.0, 3.0, 4.0]).sqrt()[:, None]
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (X, torch.zeros(4, 1)))  # curvatures 2, 4, 6, 8
        >>> optimizer = torch.optim.Adam(model.parameters(), eps=0.5)
        >>> damping = AutoDamping(optimizer, risk, every=1, num_batches=4, num_probes=1)
        >>> damping.step()
        >>> round(optimizer.param_groups[0]["eps"], 4)  # 0.5 and the variance of the four
        7.1667
    """

    def __init__(
        self,
        optimizer: Optimizer,
        risk: Risk,
        every: int = 100,
        rule: DampingRule | None = None,
        *,
        combine: Combine | None = None,
        key: str | None = None,
        num_batches: int = 4,
        batch_size: int | None = None,
        num_probes: int | None = None,
        curvature: Curvature | None = None,
        fresh: bool = True,
        stream: Method | None = None,
        compensate_lr: bool = False,
        per_group: bool = False,
        seed: int = 0,
    ) -> None:
        if not isinstance(risk, Risk):
            raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
        if every < 1 or num_batches < 2 or (num_probes is not None and num_probes < 1):
            raise ValueError(
                f"expected every >= 1, num_batches >= 2 and num_probes >= 1, got {every}, {num_batches}, {num_probes}"
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        trained, known = ({id(p) for p in params} for params in (_parameters(optimizer), risk.model.parameters()))
        if not trained & known:
            raise ValueError(
                "the optimizer trains no parameter of the risk's model: give the risk of the model it trains"
            )
        rule = _prepared(rule, combine)
        self.optimizer, self.risk, self.every, self.seed = optimizer, risk, every, seed
        self.num_batches, self.batch_size, self.num_probes = num_batches, batch_size, num_probes
        self.needs, self.fresh, self.compensate_lr = rule.needs, fresh, compensate_lr
        self.curvature = _chosen(rule, curvature)
        self._foretells = curvature  # which matrix: for a reduction ratio None means the GGN, where there is one
        self.key = _entry(optimizer, key)
        self.starts = [_number(group[self.key], self.key) for group in optimizer.param_groups]
        self.per_group = per_group
        self.risks = self._blocks() if per_group else [risk]
        if not per_group and len(set(self.starts)) > 1:
            raise ValueError(
                f"the parameter groups start from different values of {self.key!r}, {self.starts}: use per_group=True"
            )
        method: Method = stream or ("halves" if risk.splittable else "pairs")
        self.rules = [copy.deepcopy(rule) for _ in self.risks]
        self.streams = [Stream(part, self.curvature, method, seed=seed) for part in self.risks]
        if self.needs & _CURVATURE and risk.batches.trusted:  # else counting is a walk over a loader
            self._refuse_few()
        self.count = 0
        self.history: list[dict[str, float]] = []
        self.seen: tuple[Seen, ...] = ()
        self._before: Tensor | None = None  # weights before a step whose outcome is looked at
        self._stepped = False  # whether any was taken
        self._rates: list[tuple[Any, Any]] = []  # learning rates of each group, its own and while it steps
        if compensate_lr and self._scales:
            self._write(self.starts)
        self._attach()

    @classmethod
    def preset(cls, name: str, optimizer: Optimizer, risk: Risk, **overrides: Any) -> "AutoDamping":
        """The settings of seed 004, or those recommended here; `overrides` take precedence.

        All refresh every 100 steps and average with decay 0.7.

        * "paper_text": 10,000 examples as 79 batches of 128, drawn anew, and one probe; the start value is a floor, as
          the captions have it; learning rates as they are. Only Algorithm 1 is mended.
        * "published_code": the same 1,024 examples in all refreshes, as 8 batches, and one probe; divided by n and not
          n - 1 (low by 7 / 8); the start value is added; learning rates times 1 + delta. The authors' scripts differ
          from the text in more than this, but in the training loop and in KFAC, not in the damping: their auto-damped
          runs train without dropout and with the empirical Fisher, those of flat damping with dropout and drawn labels.
        * "recommended": the defaults. 4 batches drawn anew, so that the average over refreshes sees new examples, at a
          twentieth of the cost of the text's; a probe for each; added to the start value; learning rates as they are.

        Example:
            >>> import ritz
            >>> model = torch.nn.Linear(1, 1)
            >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.rand(1024, 1), torch.rand(1024, 1)))
            >>> damping = AutoDamping.preset("published_code", torch.optim.Adam(model.parameters()), risk, every=10)
            >>> damping.every, damping.num_batches, damping.fresh, damping.rules[0].combine
            (10, 8, False, 'add')
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        return cls(optimizer, risk, **{**PRESETS[name], **overrides})

    def _refuse_few(self) -> None:
        """Refuse to draw more than there is, before training begins."""
        cut = self.num_probes is None and self.streams[0].method == "halves"
        least = self.batch_size or (2 if cut else 1)
        if self.num_batches * least > self.risk.num_samples:
            raise ValueError(
                f"num_batches * batch_size = {self.num_batches} * {least} is more than the {self.risk.num_samples} "
                "samples; take fewer or smaller batches"
            )

    # ------------------------------------------------------------------------------------------ stepping

    def step(self, batch: Any = None) -> None:
        """To be called after each `optimizer.step()`; with the training batch for the streaming estimate."""
        self._restore_rates()  # where the last step was broken off by an error
        self.count += 1
        if batch is not None and self.needs & _CURVATURE:
            self._gather(batch)
        if self.count % self.every == 0:
            self._refresh(batch)

    def _gather(self, batch: Any) -> None:
        """A product of the training batch, where one is due."""
        interval = max(1, self.every // self.num_batches)
        for stream in self.streams:
            due = interval if stream.method == "halves" else 2 * interval
            if stream.waiting or self.count % due == 0:
                stream.add(self._common(batch), self.count)

    def _refresh(self, batch: Any) -> None:
        """Look, ask the rules, write."""
        if self.per_group and len(self.risks) != (count := len(self.optimizer.param_groups)):
            raise ValueError(
                f"the optimizer has {count} parameter groups and had {len(self.risks)}: with per_group=True make a new "
                "AutoDamping after add_param_group"
            )
        ratio = self._reduction_ratio(batch) if "reduction_ratio" in self.needs else None
        data = None
        seen = []
        for start, part, stream in zip(self.starts, self.risks, self.streams, strict=False):
            looked: dict[str, Estimate] = {}
            if stream.samples:
                looked = stream.take()
            elif self.needs & _CURVATURE:
                data = data or self._subset()
                looked = self._measure(part, data, stream.method)
            wanted = {name: estimate for name, estimate in looked.items() if name in self.needs}
            seen.append(Seen(start=start, reduction_ratio=ratio, **wanted))
        self.seen = tuple(seen)
        updates = zip(self.rules, seen, strict=True)
        dampings = [_checked(rule.update(own, self.count), rule) for rule, own in updates]
        self._write(dampings if len(dampings) > 1 else dampings * len(self.optimizer.param_groups))
        self._record()

    def _subset(self) -> list[Any]:
        """Batches of the risk's data for one refresh."""
        most = self.risk.num_samples // self.num_batches
        size = self.batch_size or min(128, most)
        seed = self._key("examples", self.count if self.fresh else 0)
        return [batch.data for batch in self.risk.batches.sample(self.num_batches, max(size, 1), seed)]

    def _measure(self, risk: Risk, data: list[Any], method: Method) -> dict[str, Estimate]:
        """Noise, trace and second moment from batches drawn for it."""
        seed = self._key("probes", self.count)
        if self.num_probes is None:
            each = Stream(risk, self.curvature, method, seed=seed)
            for index, batch in enumerate(data):
                each.add(batch, index)
            return each.take()
        part = risk.on(data)  # so that checks and draws go over these examples alone
        noise = curvature_noise(
            part,
            self.num_batches,
            part.num_samples // self.num_batches,
            seed,
            num_probes=self.num_probes,
            curvature=self.curvature,
        )
        parts = noise.parts
        return {"noise": noise, "trace": parts["mean curvature"], "second_moment": parts["second moment"]}

    def _reduction_ratio(self, batch: Any) -> Estimate:
        before, self._before = self._before, None
        if before is None:
            self._refuse_out_of_turn()
            return Estimate(name="reduction ratio", value=math.nan, exact=True, convention="no step was taken")
        risk = self.risk.on([self._common(batch)] if batch is not None else self._subset())
        return reduction_ratio(risk, before, curvature=self._foretells)

    def _refuse_out_of_turn(self) -> None:
        """No step was taken: a GradScaler may have held it back, which gradients tell as long as they are there."""
        grads = [p.grad for p in _parameters(self.optimizer) if p.grad is not None]
        if finite(grads) if grads else not self._stepped:
            raise RuntimeError("no optimizer.step() came before this damping.step(): call the two alternately")

    def _common(self, batch: Any) -> Any:
        """Where ranks train together, each on a batch of its own: that of rank 0, which all then share the work on."""
        return batch if self.risk.world.size == 1 else self.risk.world.first(on_host(batch))

    def _key(self, *names: object) -> int:
        """A seed of its own for each purpose and step."""
        return int(random_bits(1, ("damping", self.seed, *names)))

    # ------------------------------------------------------------------------------------ the optimiser's side

    def _blocks(self) -> list[Risk]:
        """The risk as a function of each group's parameters."""
        if "reduction_ratio" in self.needs:
            raise ValueError("a reduction ratio belongs to the whole step: per_group=True has no meaning for this rule")
        names = {id(p): name for name, p in self.risk.model.named_parameters()}
        blocks = []
        for index, group in enumerate(self.optimizer.param_groups):
            own = [names.get(id(p)) for p in group["params"]]
            if not set(own) & set(self.risk.names):
                raise ValueError(f"no parameter of group {index} is a parameter of the risk")
            blocks.append(self.risk.restrict([name for name in own if name in self.risk.names]))
        return blocks

    def _attach(self) -> None:
        """Hooks for what has to be done around a step of the optimiser; they go when this object does."""
        if "reduction_ratio" in self.needs:
            self._hook(self.optimizer.register_step_pre_hook, self._remember)
        if self.compensate_lr and not self._scales:
            self._hook(self.optimizer.register_step_pre_hook, self._raise_rates)
            self._hook(self.optimizer.register_step_post_hook, self._restore_rates)

    @property
    def _scales(self) -> bool:
        """Whether the optimiser has a factor of the learning rate of its own."""
        return all("lr_scale" in group for group in self.optimizer.param_groups)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AutoDamping":
        """A copy has hooks on the copy of the optimiser; torch leaves those behind."""
        clone = memo[id(self)] = object.__new__(type(self))
        vars(clone).update(copy.deepcopy(vars(self), memo))
        clone._attach()
        return clone

    def _hook(self, register: Callable[[Any], RemovableHandle], method: Callable[..., None]) -> None:
        own = weakref.WeakMethod(method)

        def call(*_: Any) -> None:
            if (alive := own()) is not None:
                alive()

        weakref.finalize(self, register(call).remove)

    def _remember(self, *_: Any) -> None:
        """The weights before a step, where the step is to be judged."""
        self._stepped = True
        if (self.count + 1) % self.every == 0:
            self._before = self.risk.space.join(self.risk.params()).clone()

    def _raise_rates(self, *_: Any) -> None:
        self._restore_rates()
        for group in self.optimizer.param_groups:
            own = group["lr"]
            group["lr"] = own * (1 + float(group[self.key]))
            self._rates.append((own, group["lr"]))

    def _restore_rates(self, *_: Any) -> None:
        for group, (own, raised) in zip(self.optimizer.param_groups, self._rates, strict=False):
            if group["lr"] is raised:  # else someone has set it since, after a step that was broken off
                group["lr"] = own
        self._rates = []

    def _write(self, dampings: list[float]) -> None:
        for group, damping in zip(self.optimizer.param_groups, dampings, strict=True):
            if isinstance(group[self.key], Tensor):
                group[self.key].fill_(damping)  # a captured graph reads this very tensor
            else:
                group[self.key] = damping
            if self.compensate_lr and "lr_scale" in group:
                group["lr_scale"] = 1 + damping

    def _record(self) -> None:
        """The refresh as plain numbers; names end in the group's number where there are several."""
        entry: dict[str, float] = {"step": self.count}
        for index, seen in enumerate(self.seen):
            end = f"/{index}" if len(self.seen) > 1 else ""
            entry[f"damping{end}"] = float(self.optimizer.param_groups[index][self.key])
            for name in sorted(self.needs):
                estimate: Estimate = getattr(seen, name)
                entry[f"{name}{end}"] = float(estimate.value)
                entry[f"{name}_stderr{end}"] = float(estimate.stderr)
        self.history.append(entry)

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """All that a continued run needs beside the state of the optimiser."""
        return {
            "count": self.count,
            "starts": list(self.starts),
            "rules": [copy.deepcopy(vars(rule)) for rule in self.rules],
            "streams": [stream.state_dict() for stream in self.streams],
            "history": [dict(entry) for entry in self.history],
            "routes": [[list(names), route] for names, route in self.risk.routes.items()],  # to the bit
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        if len(state["rules"]) != len(self.rules) or len(state["starts"]) != len(self.starts):
            raise ValueError(
                f"the state has {len(state['rules'])} rules for {len(state['starts'])} parameter groups, this "
                f"AutoDamping {len(self.rules)} for {len(self.starts)}"
            )
        self.count, self.starts = state["count"], list(state["starts"])
        for rule, saved in zip(self.rules, state["rules"], strict=True):
            vars(rule).update(copy.deepcopy(saved))
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
        self.history = [dict(entry) for entry in state["history"]]
        self.risk.routes.update({tuple(names): route for names, route in state["routes"]})


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _prepared(rule: DampingRule | None, combine: Combine | None) -> DampingRule:
    """A rule of one's own, with `combine` put in."""
    if isinstance(rule, type):
        raise TypeError(f"a rule is an object, not a class: rule={rule.__name__}()")
    rule = copy.deepcopy(rule) if rule is not None else NoiseVariance()
    if not hasattr(rule, "needs") or not callable(getattr(rule, "update", None)):
        raise TypeError(f"a rule has `needs` and `update(seen, step)`, got {type(rule).__name__}")
    if unknown := set(rule.needs) - _KNOWN:
        raise ValueError(f"{type(rule).__name__} needs {sorted(unknown)}; there are {', '.join(sorted(_KNOWN))}")
    if combine is not None:
        if not hasattr(rule, "combine"):
            raise ValueError(f"{type(rule).__name__} has nothing to combine: leave combine= out")
        if combine not in ("add", "floor"):
            raise ValueError(f"combine must be 'add' or 'floor', got {combine!r}")
        rule.combine = combine
    return rule


def _chosen(rule: DampingRule, curvature: Curvature | None) -> Curvature:
    """The matrix whose noise is looked at."""
    if curvature is None:
        return "ggn" if "trace" in rule.needs else "hessian"
    if curvature not in MATRICES:
        raise ValueError(f"curvature must be 'hessian' or 'ggn', got {curvature!r}")
    return curvature


def _entry(optimizer: Optimizer, key: str | None) -> str:
    """The entry of the parameter groups that is the damping."""
    entries = optimizer.param_groups[0]
    found = next((name for name in ([key] if key else ["damping", "eps"]) if name in entries), None)
    if found is None:
        wanted = repr(key) if key else "'damping' or 'eps'"
        others = ", ".join(sorted(name for name in entries if name != "params"))
        raise ValueError(
            f"the parameter groups of {type(optimizer).__name__} have no {wanted}; name the entry with key=: {others}"
        )
    return found


def _number(value: Any, key: str) -> float:
    """The start value of a group."""
    if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(f"group[{key!r}] is a {type(value).__name__}, not one number; name another entry with key=")
    return float(value)


def _checked(damping: float, rule: DampingRule) -> float:
    """A damping that can be divided by, or an error."""
    if not (math.isfinite(damping) and damping >= 0):
        raise NonFiniteError(f"{type(rule).__name__} gave the damping {damping}; its inputs are in .seen")
    return float(damping)
