"""The Kronecker-factored curvature of a network as an operator: product, damped inverse, eigenvalues, log-determinant.

Every block is stored as its eigenvectors, Q_G (x) Q_A, and its eigenvalues, so that any function of the matrix costs
one product: f(C) M = Q_G [f(eigenvalues) * (Q_G' M Q_A)] Q_A'. Damping is such a function, and is exact.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..batches import Batch
from ..errors import NumericalWarning, UnsupportedError, callers_level
from ..memory import is_shortage
from ..reducers import Mean
from ..results import Estimate
from ..risk import Params, Risk
from ..space import random_signs
from .algebra import Derived
from .base import Operator
from .gauss_newton import Fisher
from .layer_factors import Bases, Collector, FisherKind, Sharing, Statistics, collect, item_cotangents, leaves_out
from .tape.kept import Kept
from .units import Unit, units_of

Function = Callable[[Tensor], Tensor]  # of eigenvalues, element by element

READ = 1 << 20  # bytes of data that a product may read to see whether they have changed
MARKED = 8  # samples on which changes of the user's code are detected

# LAPACK's float32 solver often fails on factors with rows of zeros, which come from dead pixels and dead units
_DECOMPOSED_IN = {"cpu": torch.float64}


# ------------------------------------------------------------------------------------------- one block


@dataclass(frozen=True)
class Eigenspace:
    """A block (left (x) right) diag(values) (left (x) right)', applied to matrices (*lead, groups, outputs, inputs).

    Example:
        >>> space = Eigenspace(torch.tensor([[[2.0, 4.0]]]), None, None)
        >>> space.apply(torch.ones(1, 1, 2), 1 / (space.values + 2)).flatten().tolist()
        [0.25, 0.1666]
    """

    values: Tensor  # (groups, outputs, inputs)
    left: Tensor | None  # (groups, outputs, outputs), columns; None is the identity
    right: Tensor | None  # (groups, inputs, inputs)

    def apply(self, matrix: Tensor, multipliers: Tensor) -> Tensor:
        """f(C) M, where `multipliers` are f(values), in the shape of the values."""
        left, right, x = self.left, self.right, matrix
        single = len(self.values) == 1 and matrix.ndim == 3  # plain products start sooner than batched ones
        if single:
            x, multipliers = x[0], multipliers[0]
            left, right = (None if q is None else q[0] for q in (left, right))
        x = x if left is None else left.mT @ x
        x = multipliers * (x if right is None else x @ right)
        x = x if left is None else left @ x
        x = x if right is None else x @ right.mT
        return x[None] if single else x


def kronecker(grad: tuple[Tensor, Tensor | None], inputs: tuple[Tensor, Tensor | None]) -> Eigenspace:
    """The eigenspace of G (x) A from those of its factors, (values (groups, n), vectors) each.

    Example:
        >>> two = torch.tensor([[1.0, 2.0]]), None
        >>> kronecker(two, two).values.tolist()
        [[[1.0, 2.0], [2.0, 4.0]]]
    """
    return Eigenspace(grad[0][:, :, None] * inputs[0][:, None, :], grad[1], inputs[1])


def eigenbasis(factor: Tensor, last: Tensor | None = None, name: str = "") -> tuple[Tensor, Tensor | None]:
    """Eigenvalues (groups, n), not negative, and eigenvectors of factors (groups, n, n), or of a diagonal (groups, n).

    If the decomposition fails, it is repeated in float64 (on a CPU, the first one is in float64 already), then with a
    jitter of 1e-8 of the mean eigenvalue. If these fail too, the `last` good eigenvectors are kept (without any, the
    coordinate axes), and the eigenvalues are the diagonal of the factor in that basis.

    Warns:
        NumericalWarning: If the first decomposition failed; it names the factor and what was done.

    Example:
        >>> values, vectors = eigenbasis(torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]))
        >>> values.tolist()
        [[1.0, 3.0]]
    """
    if factor.ndim == 2:
        return factor.clamp(min=0), None
    mean = factor.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    jitter = 1e-8 * mean * torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
    first = _DECOMPOSED_IN.get(factor.device.type, factor.dtype)
    tries: dict[str, Callable[[], Tensor]] = {"": lambda: factor.to(first)}
    if first != torch.float64:
        tries["it was repeated in float64"] = factor.double
    tries["it was repeated in float64 with a jitter of 1e-8 of the mean eigenvalue"] = lambda: factor.double() + jitter
    for remedy, matrix in tries.items():
        found = _eigh(matrix())
        if found is not None:
            if remedy:
                _warn_of(name, remedy)
            return found[0].clamp(min=0).to(factor.dtype), found[1].to(factor.dtype)
    _warn_of(name, "the eigenvectors before it are kept" if last is not None else "only its diagonal is used")
    return rayleigh(factor, last), last


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues and eigenvectors; None if the solver fails or its results are not finite."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError as error:  # torch.linalg.LinAlgError, or an error of the solver's library
        if is_shortage(error):
            raise
        return None
    return (values, vectors) if bool(values.isfinite().all() & vectors.isfinite().all()) else None


def _warn_of(name: str, remedy: str) -> None:
    warnings.warn(
        f"the eigendecomposition of {name or 'a factor'} failed: {remedy}; to prevent this, use more damping, or "
        "factors from more data",
        NumericalWarning,
        stacklevel=callers_level(),
    )


def rayleigh(factor: Tensor, vectors: Tensor | None) -> Tensor:
    """q' F q for each column q, (groups, n), not negative.

    Example:
        >>> rayleigh(torch.tensor([[[2.0, 1.0], [1.0, 5.0]]]), None).tolist()
        [[2.0, 5.0]]
    """
    if vectors is None:
        return factor.diagonal(dim1=1, dim2=2).clamp(min=0)
    return (vectors * (factor @ vectors)).sum(1).clamp(min=0)


# ------------------------------------------------------------------------------------------- the operator


class KFACOperator(Operator):
    """The Kronecker-factored approximation of the GGN or a Fisher matrix: one block G (x) A for each layer.

    Linear layers, convolutions and embeddings have Kronecker factors, with weight and bias in one block. Normalisations
    use the diagonal of the matrix. The blocks are exactly those of the GGN for one linear layer, and for every layer of
    a deep linear network, under the squared error; and for one sample without weight sharing always.

    The factors are computed at the first use, with one pass over the data (two for EKFAC), and again when something
    that they depend on has changed. For models and losses of torch itself, everything is compared: weights, buffers,
    settings, class weights, and the data, up to 1 MiB by value and beyond that by torch's version counters. The user's
    own code is checked by its results: before each use, the outputs and the gradient of the first 8 samples are
    compared with the previous ones. A change that does not affect these is not detected.

    EKFAC, "reduce" and normalisations need to know which rows of a layer belong to which sample: the rows of a sample
    can be adjacent, in the second dimension of the input (steps before samples), or taken in turn (two views of every
    sample in one batch). One more backward pass per batch finds this out. Rows that mix samples, such as the nodes of a
    graph, or belong to all samples, such as learned queries, are refused by EKFAC and "reduce"; the diagonal of a
    LayerNorm is then right on average over `seed`. BatchNorm in training mode mixes all samples, so that no row has a
    gradient of one sample alone: the gradient of a row counts as that of the row's own sample (see `convention`).

    Args:
        risk: The risk; all of its parameters must belong to layers with a rule.
        fisher: "type2" (all roots of the loss Hessian: the GGN), "mc" (labels drawn from the model, as `ritz.Fisher`
            with the same seed draws them) or "empirical" (labels of the data).
        ekfac: Replace the eigenvalues d_G d_A' by the second moments of per-sample gradients in the same basis, which
            are the diagonal of the matrix there (George et al. 2018) and the best choice in Frobenius norm for those
            eigenvectors. If a factor has repeated eigenvalues (with "reduce", fewer samples than rows), any basis of
            their space is an eigenbasis, and EKFAC's result there depends on the choice; the rest and the trace do not.
            For "empirical", the items of one sample, such as its tokens, count as one. Embeddings keep d_G d_A'.
        sharing: "expand" or "reduce" (`ritz.operators.layer_factors`), for weights that act at several positions.
            Embeddings are always expanded, which makes their input factor diagonal.
        num_samples, seed: Number and seed of the drawn labels, for "mc".
        max_factor: A factor with more rows than this is diagonal.

    Example:
        >>> import ritz
        >>> model, X, y = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
        >>> C = ritz.KFACOperator(ritz.Risk(model, torch.nn.MSELoss(), (X, y)))
        >>> C.dense().tolist(), C.inverse(damping=1.0).dense().tolist()  # one layer, squared error: the GGN
        ([[1.0, 0.0], [0.0, 4.0]], [[0.5, 0.0], [0.0, 0.2]])
        >>> round(float(C.logdet(damping=1.0)), 4), C.eigenvalues().tolist()  # log 2 + log 5
        (2.3026, [1.0, 4.0])
    """

    positive = True

    def __init__(
        self,
        risk: Risk,
        fisher: FisherKind = "type2",
        *,
        ekfac: bool = False,
        sharing: Sharing = "expand",
        num_samples: int = 1,
        seed: int = 0,
        max_factor: int = 10_000,
    ) -> None:
        if not isinstance(risk, Risk):
            raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
        if fisher not in get_args(FisherKind):
            raise ValueError(f"fisher must be one of {', '.join(get_args(FisherKind))}, got {fisher!r}")
        self.risk, self.fisher, self.ekfac, self.seed = risk, fisher, ekfac, seed
        self.space, self.dtype, self.device = risk.space, risk.dtype, risk.device
        self.matrix = "EKFAC" if ekfac else "KFAC"
        _ = risk.output_loss  # raises an error for a risk whose outputs are not known
        if risk.sharded:
            raise UnsupportedError(
                "Kronecker factors need whole layers, but this model is sharded by FSDP2; use ritz.GGN or ritz.Fisher"
            )
        self.units = units_of(risk.model, risk.names)
        for unit in self.units.values():
            if unit.module is None:
                raise UnsupportedError(
                    f"{unit.name} belongs to no layer that has Kronecker factors or a diagonal, or to several layers; "
                    "leave it out with params= or risk.restrict"
                )
        self._collector = Collector(self.units, sharing, max_factor)
        self._draws = Fisher(risk, num_samples, seed)._draws
        self._spaces = Kept[dict[str, Eigenspace]](risk, most=READ)
        self._few: Batch | None = None  # the samples of `_mark`

    def version(self) -> Hashable:
        return self.risk.version()

    def convention(self) -> str:
        drawn = f", drawn labels, seed {self.seed}" if self.fisher == "mc" else ""
        norms = (m for m in self.risk.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        mixed = (
            ", rows as their samples' own under batch statistics" if self.risk.mode == "train" and any(norms) else ""
        )
        return f"{self.matrix}, {self.fisher}{drawn}, {self._collector.sharing}{mixed}, {self.risk.convention()}"

    # ------------------------------------------------------------------------------------------- factors

    def blocks(self) -> Mapping[str, Eigenspace]:
        """The eigenspace of every block, by module name, or for a diagonal block by parameter name."""
        return self._spaces.get(self._decomposed, self._mark)

    def _decomposed(self) -> dict[str, Eigenspace]:
        self.risk.check()
        stats = self._walk(None)
        spaces = {name: self._space(unit, stats) for name, unit in self.units.items()}
        if not self.ekfac:
            return spaces
        layers = [name for name in spaces if self.units[name].kind == "layer"]
        return _rescaled(spaces, self._walk({name: (spaces[name].left, spaces[name].right) for name in layers}))

    def _mark(self) -> list[Tensor]:
        """Outputs and gradient of a few samples, which change if the user's code does."""
        risk, few = self.risk, self._few or self.risk.batches.first()
        if few is None:  # the share of this rank is empty
            return []
        self._few = few.head(MARKED) if risk.splittable else few
        with risk.session():
            out = risk.output(risk.params(), self._few).detach()
            return [out, risk.batch_gradient(risk.params(), self._few)[0]]

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The factors (G, A) of every Kronecker block, (groups, n, n) each; (groups, n) if a factor is diagonal."""
        self.risk.check()
        stats = self._walk(None)
        return {name: _pair(stats, name) for name, unit in self.units.items() if f"{name}|grad" in stats}

    def _space(self, unit: Unit, stats: Statistics) -> Eigenspace:
        if f"{unit.name}|square" in stats:
            return Eigenspace(stats[f"{unit.name}|square"], None, None)
        if f"{unit.name}|grad" not in stats:  # never called, so none of its parameters reaches the outputs
            return Eigenspace(torch.zeros(unit.groups, unit.outputs, unit.inputs, device=self.device), None, None)
        grad, inputs = _pair(stats, unit.name)
        return kronecker(eigenbasis(grad, name=f"G of {unit.name}"), eigenbasis(inputs, name=f"A of {unit.name}"))

    def _walk(self, bases: Bases | None) -> Statistics:
        """All sums over the data, divided by its weight."""
        layout = self._collector.layout(bases)  # the same for every batch and rank, whichever layers it calls

        def sums(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
            out, stacks = self.risk.captured(params, batch, lambda out: self._cotangents(out, batch))
            # decided by all data, so that it does not depend on how padding falls into batches
            partly = self.risk.leaves_out or leaves_out(self.risk.output_loss, out, batch.data)
            found = collect(self._collector, stacks, batch.size, bases, partly)
            held = next(iter(found.values()), out.new_zeros((), dtype=torch.promote_types(out.dtype, torch.float32)))
            named = zip(layout.names, layout.shapes, strict=True)
            every = {key: found[key] if key in found else held.new_zeros(shape) for key, shape in named}
            return layout.join(every), self.risk.output_loss.weight(out, batch.data)

        stats = layout.split(self.risk.fold(sums, Mean()))
        idle = {key.removesuffix("|rows") for key, rows in stats.items() if key.endswith("|rows") and not rows}
        return {key: value for key, value in stats.items() if key.rpartition("|")[0] not in idle}

    def _cotangents(self, out: Tensor, batch: Batch) -> Iterable[Tensor]:
        """Stacks (r, *out.shape) whose outer products add up to the middle matrix."""
        loss: Any = self.risk.output_loss
        if self.fisher == "mc":
            draws = self._draws(out, batch)
            return [draws / math.sqrt(len(draws))]
        if self.fisher == "type2":
            return self._signed(loss.roots(out, batch.data, self.risk.plan.chunk), batch)
        return self._signed([item_cotangents(loss, out, batch.data)[None]], batch)

    def _signed(self, stacks: Iterable[Tensor], batch: Batch) -> Iterator[Tensor]:
        """Cotangents with a random sign for each sample, which separates samples in rows that they share.

        In the products of each sample with itself the signs cancel.
        """
        number = itertools.count()
        for stack in stacks:
            count = stack.shape[1]
            start = batch.start * (count // batch.size)
            keys = [("kronecker", self.seed, next(number)) for _ in stack]
            signs = torch.stack([random_signs(count, key, self.device, start) for key in keys]).to(stack)
            yield stack * signs.reshape(*stack.shape[:2], *[1] * (stack.ndim - 2))

    # ------------------------------------------------------------------------------------------- results

    def _rows(self, rows: Tensor) -> Tensor:
        return self.mapped(rows, lambda values: values)

    def mapped(self, rows: Tensor, function: Function) -> Tensor:
        """f(C) applied to each row of (k, dim), for a function of the eigenvalues."""
        spaces, parts, images = self.blocks(), self.space.split(rows), {}
        for name, unit in self.units.items():
            matrix = unit.gather(parts).to(spaces[name].values.dtype)
            images.update(unit.scatter(spaces[name].apply(matrix, function(spaces[name].values))))
        return self.space.join(images, lead=1).to(rows.dtype)

    def inverse(self, damping: float) -> "KFACInverse":
        """(C + damping I)^-1, exactly: the damping is added to the eigenvalues of C, not to those of the factors."""
        return KFACInverse(self, damping)

    def eigenvalues(self) -> Tensor:
        """All eigenvalues, ascending, (dim,); for EKFAC the second moments that replace them."""
        return torch.cat([space.values.flatten() for space in self.blocks().values()]).sort().values

    def trace(self) -> Estimate:
        """Tr C, the sum of eigenvalues; its parts by block."""
        return self._total("trace", lambda values: values)

    def logdet(self, damping: float = 0.0) -> Estimate:
        """log det (C + damping I), the sum of logarithms; its parts by block.

        Raises:
            ValueError: If the matrix with damping is singular.
        """
        if not damping >= 0:
            raise ValueError(f"damping must not be negative, got {damping}")
        if not float(self.eigenvalues()[0]) + damping > 0:
            raise ValueError("the matrix is singular, so its log-determinant is not finite; give damping > 0")
        return self._total(f"log det (C + {damping:g} I)", lambda values: (values + damping).log())

    def _total(self, name: str, function: Function) -> Estimate:
        """The sum over eigenvalues of a function of them."""
        sums = {block: float(function(space.values.double()).sum()) for block, space in self.blocks().items()}
        common: Any = {"exact": True, "convention": self.convention()}
        parts = {block: Estimate(name=f"{name}, {block}", value=value, **common) for block, value in sums.items()}
        return Estimate(name=name, value=math.fsum(sums.values()), parts=parts, **common)


def _rescaled(spaces: Mapping[str, Eigenspace], stats: Statistics) -> dict[str, Eigenspace]:
    """The same eigenvectors with the eigenvalues of EKFAC, for the blocks that have them."""
    return {
        name: Eigenspace(stats.get(f"{name}|scale", space.values), space.left, space.right)
        for name, space in spaces.items()
    }


def _pair(stats: Statistics, name: str) -> tuple[Tensor, Tensor]:
    """(G, A) of a block from sums divided by the weight of the data."""
    return stats[f"{name}|grad"], stats[f"{name}|input"] / stats[f"{name}|rows"].clamp(min=torch.finfo().tiny)


class KFACInverse(Derived):
    """(C + damping I)^-1 for a Kronecker-factored C; see `KFACOperator.inverse`."""

    def __init__(self, base: KFACOperator, damping: float) -> None:
        if not damping > 0:
            raise ValueError(f"damping must be positive, got {damping}: factors of few samples are singular")
        super().__init__(base)
        self.kfac, self.damping = base, damping
        self.matrix, self.positive = f"inverse of {base.matrix}", True

    def _rows(self, rows: Tensor) -> Tensor:
        return self.kfac.mapped(rows, lambda values: 1 / (values + self.damping))

    def convention(self) -> str:
        return f"(({self.base.convention()}) + {self.damping:g} I)^-1"
