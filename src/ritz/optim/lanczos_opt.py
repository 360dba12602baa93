"""LanczosOPT: Newton along the sharpest directions, scaled gradient descent along all others (seed 004, section 5)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..estimators.noise import Curvature
from ..krylov.lanczos import lanczos
from ..krylov.quadrature import eigen_system
from ..operators.algebra import Metered
from ..operators.base import Operator, full_precision
from ..risk import Risk
from ..space import Shard, row_products
from .skipping import tell_skipped
from .streaming import MATRICES

Start = Literal["random", "grad"]


class LanczosOpt(Optimizer):
    """w <- w - alpha [ (1 / eta) sum_i phi_i phi_i'g / (lambda_i + delta) + (I - sum_i phi_i phi_i') g / delta ]

    over the Ritz pairs (lambda_i, phi_i) of k Lanczos steps, fully re-orthogonalised (seed 004, equation 9). The first
    sum contains the sharp directions: eta > 1 reduces the movement along them and changes nothing else. With eta = 1
    and k the number of parameters, this is a damped Newton step, alpha (H + delta I)^-1 g. (From a random start,
    Lanczos finds one copy of a repeated eigenvalue, and the gradient along the others is divided by delta: softmax
    regression at w = 0 has each eigenvalue classes - 1 times. From the gradient, start="grad", that one copy is
    sufficient.)

    The gradient is the one that `backward()` left on the parameters; the curvature is that of the risk at the same
    weights. If the problem is not convex, a negative lambda is replaced by |lambda|; the GGN has none.

    A Ritz pair that has not converged is not an eigenpair: pairs with a residual above `tol` times the largest |lambda|
    count as flat directions. This divides by delta along directions with some curvature. If delta is far below that
    curvature, use more steps or `tol=math.inf`, which keeps every pair.

    Args:
        params: The parameters, in one group; all of them parameters of the risk.
        risk: The risk whose curvature is used: model, loss and data.
        lr: alpha.
        damping: delta, in the group under this name: a scheduler or `AutoDamping` may change it.
        eta: Divides the learning rates along the sharp directions.
        k: Number of Lanczos steps, each one product over the data of the risk.
        curvature: "hessian" or "ggn".
        start: Start of each Lanczos run: a "random" vector, a new one at every step (the paper), or the gradient,
            "grad".
        tol: Largest residual of a pair that is kept, relative to the largest |lambda|.
        seed: Seed of the random starts.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> X, y = torch.diag(torch.tensor([1.0, 2.0])), torch.zeros(2, 1)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (X, y))  # H = diag(1, 4), minimum at 0
        >>> optimizer = LanczosOpt(model.parameters(), risk, lr=1.0, damping=1.0, k=2)
        >>> torch.nn.functional.mse_loss(model(X), y).backward()
        >>> optimizer.step()
        >>> [round(w, 4) for w in model.weight.flatten().tolist()]  # 1 - 1 / (1 + 1) and 1 - 4 / (4 + 1)
        [0.5, 0.2]
    """

    def __init__(
        self,
        params: Iterable[Any],
        risk: Risk,
        lr: float = 0.01,
        damping: float = 0.1,
        eta: float = 1.0,
        k: int = 50,
        *,
        curvature: Curvature = "hessian",
        start: Start = "random",
        tol: float = 0.01,
        seed: int = 0,
    ) -> None:
        if not isinstance(risk, Risk):
            raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
        if not lr >= 0 or not damping > 0 or not eta > 0 or k < 1 or not tol >= 0:
            raise ValueError(
                f"expected lr >= 0, damping > 0, eta > 0, k >= 1 and tol >= 0, got {lr}, {damping}, {eta}, {k}, {tol}"
            )
        if curvature not in MATRICES:
            raise ValueError(f"curvature must be 'hessian' or 'ggn', got {curvature!r}")
        if start not in get_args(Start):
            raise ValueError(f"start must be 'random' or 'grad', got {start!r}")
        self.curvature, self.start, self.seed = curvature, start, seed
        super().__init__(params, {"lr": lr, "damping": damping, "eta": eta, "k": k, "tol": tol})
        names = {id(p): name for name, p in risk.model.named_parameters() if name in risk.names}
        own = [p for p in self.param_groups[0]["params"] if p.requires_grad]
        if foreign := [tuple(p.shape) for p in own if id(p) not in names]:
            raise ValueError(
                f"{len(foreign)} parameters are not parameters of the risk; the first has shape {foreign[0]}"
            )
        self.risk = risk.restrict([names[id(p)] for p in own])
        self.last: dict[str, float] = {}  # of the last step: pairs kept, extreme Ritz values, products

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One group alone may hold parameters: eigenvectors span all of them together."""
        super().add_param_group(param_group)
        filled = sum(bool(group["params"]) for group in self.param_groups)
        if filled > 1:
            self.param_groups.pop()
            raise ValueError(f"eigenvectors span all parameters: expected one group, got {filled}")

    def __getstate__(self) -> dict[str, Any]:
        """What copies keep; torch's own drops all but groups and state."""
        kept = {name: getattr(self, name) for name in ("risk", "curvature", "start", "seed", "last")}
        return {**super().__getstate__(), **kept}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; with a closure, after it has computed the gradient. Nothing is done where there is no gradient.

        Warns:
            NumericalWarning: If the gradient is not finite; the step is not taken, and `skipped` counts it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = dict(self.risk.model.named_parameters())
        own = {name: params[name] for name in self.risk.names}
        if all(p.grad is None for p in own.values()):
            return loss
        gradient = self._gradient(own)
        if not bool(gradient.isfinite().all()):
            self._state["skipped"] = self.skipped + 1
            tell_skipped(self.skipped)
            return loss
        direction = self.risk.space.split(self._direction(gradient))
        for name, p in own.items():
            if p.grad is not None:
                p.sub_(self.param_groups[0]["lr"] * direction[name].to(p))
        return loss

    @property
    def skipped(self) -> int:
        """Steps not taken because the gradient was not finite."""
        return int(self._state.get("skipped", 0))

    @property
    def _state(self) -> dict[str, Any]:
        """Numbers of the whole run; torch keeps state by parameter, so the first one has them."""
        state: dict[str, Any] = self.state[self.param_groups[0]["params"][0]]
        return state

    def _gradient(self, own: Mapping[str, Tensor]) -> Tensor:
        """The gradients as one row of the risk's precision, (dim,); 0 where there is none."""
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.items()}
        return self.risk.space.join(grads).to(self.risk.device, self.risk.dtype)

    @full_precision()
    def _direction(self, gradient: Tensor) -> Tensor:
        """What alpha is multiplied with: the bracket of equation 9."""
        group, state = self.param_groups[0], self._state
        state["step"] = state.get("step", 0) + 1
        if not bool(gradient.any()):
            return gradient
        operator = Metered(MATRICES[self.curvature](self.risk))
        rows = gradient[None] if self.start == "grad" else operator.probes([state["step"]], self.seed, "normal")
        values, vectors, residuals = ritz_pairs(operator, rows, min(group["k"], operator.dim))
        kept = residuals <= group["tol"] * values.abs().max()
        sharp, basis = values[kept].abs(), vectors[kept]
        self.last = {
            "pairs": len(sharp),
            "largest": float(values[-1]),
            "smallest": float(values[0]),
            "products": operator.products,
        }
        damping = float(group["damping"])
        weights = 1 / (group["eta"] * (sharp + damping)) - 1 / damping
        along = row_products(basis, gradient[None])[:, 0].to(gradient)
        bracket: Tensor = gradient / damping + (along * weights.to(gradient)) @ basis
        return bracket


@full_precision()
def ritz_pairs(operator: Operator, rows: Tensor, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ritz values (m,) ascending, vectors as rows (m, dim) and residual norms (m,), of Lanczos with all rows kept.

    m is `num_steps`, or less where the Krylov space of the start row (1, dim) is exhausted.

    Example:
        >>> from ritz.operators.algebra import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64)))
        >>> values, vectors, residuals = ritz_pairs(A, torch.ones(1, 2, dtype=torch.float64), 2)
        >>> [round(value, 6) for value in values.tolist()], float(residuals.max()) < 1e-6
        ([1.0, 3.0], True)
    """
    state = lanczos(operator, rows, num_steps, reorthogonalize="full")
    if not bool(state.alpha.isfinite().all()):
        operator.diagnose()
    assert state.basis is not None
    alpha, beta = state.alpha[0].cpu(), state.beta[0].cpu()
    ends = (beta == 0).nonzero()[:, 0]
    size = int(ends[0]) + 1 if len(ends) else len(alpha)  # the rest is zero
    values, vectors = eigen_system(alpha[:size], beta[: size - 1])
    coefficients = vectors.T  # (m, m)
    own = coefficients.to(rows) @ state.basis[:size, 0]  # where ranks work together, the part of this one
    return values, Shard(operator.world, operator.dim).whole(own), beta[size - 1] * coefficients[:, -1].abs()
