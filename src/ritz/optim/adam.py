"""Adam with averaging: Gadam, and GadamX with a partial power.

    w <- w (1 - alpha gamma)                                                     decoupled weight decay
    m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
    Gadam    w <- w - alpha / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    GadamX   vmax <- max(vmax, v)
             w <- w - alpha sqrt(1 - beta2^t) / (1 - beta1^t)  m / (sqrt(vmax) + eps)^(2p)

(Granziol, Wan and Roberts 2020, arXiv:2003.01247; Padam: Chen et al. 2018, arXiv:1806.06763.) Both average their
iterates: `optimizer.average`. `eps` is a damping in the units of a gradient, read from the parameter group at each
step; with a constant one Gadam's iterates are those of torch's AdamW, bit for bit, as long as gradients are finite. A
step with one that is not leaves weights, moments and average as they are, is counted in `skipped` and told of; torch
takes it, and has no finite weight from there on.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from .averaging import IterateAverage
from .skipping import finite, tell_skipped


class Gadam(AdamW):
    """AdamW with an average of its iterates in `average`, which does not affect the training.

    The iterates themselves are those of AdamW. `start` and `every` count steps of the optimiser. For the setting of the
    papers, one average per epoch from epoch 161 on, use start=161 * n and every=n with n batches per epoch, and
    `averaging_decay(161)` as schedule.

    Args:
        params: As for any optimiser of torch.
        lr: alpha; 5e-4 for VGG-16 with BatchNorm on CIFAR-100.
        weight_decay: gamma, decoupled; 0.25 there.
        start: Steps before averaging, or "auto": see `IterateAverage.observe`.
        every: Steps between two averaged iterates.
        model: The model that holds the parameters, for `average.model` and `average.refresh`.
        **keywords: betas, eps, amsgrad, foreach and any other argument of AdamW.

    Attributes:
        average: The `IterateAverage`.
        skipped: Number of steps skipped because the gradient was not finite; steps skipped by a GradScaler are not
            counted.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = ritz.optim.Gadam(model.parameters(), lr=0.1, start=2, model=model)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     _ = optimizer.step()
        >>> optimizer.average.num_averaged  # after steps 3 and 4
        2
        >>> bool(optimizer.average.model.bias > model.bias)  # the average lags behind
        True
    """

    average: IterateAverage
    skipped: int = 0

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        *,
        start: int | Literal["auto"],
        every: int = 1,
        model: nn.Module | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, **keywords)
        self.average = IterateAverage(self, start, every, model=model)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, and the average takes note; `closure` evaluates the loss again, as for any optimiser of torch.

        Warns:
            NumericalWarning: If the gradient is not finite; nothing is done then, and `skipped` counts it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._usable():
            self._update()
            self.average.step()
        return loss

    def _usable(self) -> bool:
        """Whether the gradients are finite."""
        if finite(p.grad for group in self.param_groups for p in group["params"] if p.grad is not None):
            return True
        if getattr(self, "found_inf", None) is None:  # else a GradScaler has found it before, for a fused step
            self.skipped += 1
            tell_skipped(self.skipped)
        return False

    def _update(self) -> None:
        """AdamW's own step."""
        step = AdamW.step
        while getattr(step, "hooked", False):  # torch wraps it in the hooks of the optimiser, as it does ours
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self)

    def state_dict(self) -> dict[str, Any]:
        """Moments and settings as torch has them, the average and the count of steps skipped beside."""
        return {**super().state_dict(), "average": self.average.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another run stood; a state of torch's AdamW has no average and starts one anew."""
        own = ("average", "skipped")
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in own})
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)  # what AdamW has not
        self.skipped = state_dict.get("skipped", 0)
        if "average" in state_dict:
            self.average.load_state_dict(state_dict["average"])

    def __getstate__(self) -> dict[str, Any]:
        """torch keeps moments and groups alone in a copy; a copy here has an average and a count of its own too."""
        return {**super().__getstate__(), "average": self.__dict__.get("average"), "skipped": self.skipped}


class GadamX(Gadam):
    """Padam with decoupled weight decay, averaged: between SGD with momentum (p = 0) and AMSGrad (p = 1/2).

    With p = 1/2 the iterates are those of AdamW(amsgrad=True), except for eps: here it is added to the uncorrected
    second moment, in torch to the bias-corrected one, so that it is eps / sqrt(1 - beta2^t) in torch's place. The
    correction is sqrt(1 - beta2^t) for every p, as in the authors' code.

    Args:
        params: As for any optimiser of torch.
        lr: alpha; as large as for SGD, 0.1 for VGG-16 with BatchNorm on CIFAR-100.
        weight_decay: gamma, decoupled; 0.0025 there.
        p: The partial power, in [0, 1/2]: 0.125 for images, 0.2 for language.
        amsgrad: Use the largest second moment so far.
        start: See `Gadam`, also for the other arguments.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = ritz.optim.GadamX([weight], lr=0.1, weight_decay=0.0, start=0)
        >>> (10000.0 * weight).sum().backward()
        >>> _ = optimizer.step()  # 0.1 sqrt(0.001) g / (sqrt(0.001) g)^(1/4)
        >>> print(f"{1 - weight.item():.2f}")
        7.50
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        weight_decay: float = 0.0025,
        *,
        start: int | Literal["auto"],
        p: float = 0.125,
        amsgrad: bool = True,
        every: int = 1,
        model: nn.Module | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        moments = {"betas": betas, "eps": eps, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, lr, weight_decay, start=start, every=every, model=model, **moments)
        for group in self.param_groups:
            if not 0 <= (power := group.setdefault("p", p)) <= 0.5:
                raise ValueError(f"p is the partial power, from 0 (momentum) to 1/2 (AMSGrad), got {power}")
        self.defaults["p"] = p

    @torch.no_grad()
    def _update(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    _partial_step(weight, weight.grad, self._moments(weight, group["amsgrad"]), group)

    def _moments(self, weight: Tensor, amsgrad: bool) -> dict[str, Tensor]:
        """The state of one parameter, under the names that torch's Adam has for it."""
        if weight.grad is not None and weight.grad.is_sparse:
            raise RuntimeError("GadamX does not take sparse gradients; use an Embedding with sparse=False")
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state


def _partial_step(weight: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """The update of GadamX for one parameter."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    state["step"] += 1
    t = float(state["step"])
    weight.mul_(1 - lr * group["weight_decay"])
    w, g, m, v = map(_real, (weight, grad, state["exp_avg"], state["exp_avg_sq"]))
    g = -g if group["maximize"] else g
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if group["amsgrad"]:
        largest = _real(state["max_exp_avg_sq"])
        v = torch.maximum(largest, v, out=largest)
    scale = v.sqrt().add_(group["eps"]).pow_(2 * group["p"])
    w.addcdiv_(m, scale, value=-lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t))


def _real(x: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, as torch's Adam has it."""
    return torch.view_as_real(x) if x.is_complex() else x
