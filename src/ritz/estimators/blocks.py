"""The spectrum of every layer's block of a curvature matrix, all layers in one sweep of the data per step.

Lanczos runs on all blocks in lock-step: a row holds one unit vector for each group of parameters, side by side, so that
K probes of all groups take the memory of K vectors; one product with the block-diagonal matrix
(`operators.blocks`) serves every group's step. A block of no more than num_steps * num_probes parameters
is given unit vectors instead and found whole: its eigenvalues are exact, at no further sweep.
"""

import math
import os
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, Saved, State
from ..fingerprints import resumable
from ..krylov.lanczos import BREAKDOWN
from ..krylov.tridiagonal import Tridiagonal
from ..operators.algebra import Metered
from ..operators.base import Operator, full_precision
from ..operators.blocks import BlockDiagonal, PaddedBlocks, block_diagonal
from ..results import new_axes
from ..space import select
from ..storage import Result
from .precision import compare_blocks
from .quantities import Spectrum
from .rounding import widened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..tables import Table

Groups = Literal["layer", "parameter"] | Mapping[str, str | Sequence[str]]
Progress = Callable[[int, int], None]  # (sweeps done, sweeps in all)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class BlockSpectra(Result):
    """The spectra of diagonal blocks by name, from one run.

    Attributes:
        spectra: A `Spectrum` for each group of parameters.
        sweeps: Number of passes over the data, for all groups together.
        products: Number of products with blocks, for all groups together: the number of passes over the data of
            separate runs.
        seed: Seed of the probes.
        convention: Which matrix.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.tensor([[3.0]]), torch.zeros(1, 1)))
        >>> found = block_spectra(ritz.Hessian(risk), "parameter")
        >>> {name: s.lambda_max.value for name, s in found.items()}, found.sweeps
        ({'weight': 18.0, 'bias': 2.0}, 1)
    """

    spectra: Mapping[str, Spectrum]
    sweeps: int
    products: int
    seed: int
    convention: str

    def __getitem__(self, group: str) -> Spectrum:
        if group not in self.spectra:
            raise KeyError(f"there is no group {group!r}; there are: {', '.join(self.spectra)}")
        return self.spectra[group]

    def __iter__(self) -> Iterator[str]:
        return iter(self.spectra)

    def __len__(self) -> int:
        return len(self.spectra)

    def keys(self) -> KeysView[str]:
        """Names of the groups."""
        return self.spectra.keys()

    def values(self) -> ValuesView[Spectrum]:
        """The spectra."""
        return self.spectra.values()

    def items(self) -> ItemsView[str, Spectrum]:
        """Names and spectra."""
        return self.spectra.items()

    def table(self) -> "Table":
        """A row for each group: size, trace, mean eigenvalue, both ends."""
        from ..tables import Table

        rows = [
            [
                name, f"{s.dim:,}", s.trace.shown(), f"{float(s.trace) / s.dim:.3g}", s.lambda_max.shown(),
                s.lambda_min.shown(),
            ]
            for name, s in self.items()
        ]  # fmt: skip
        head = ["block", "parameters", "trace", "mean eigenvalue", "lambda max", "lambda min"]
        return Table(head, rows, title=self.convention, numeric=range(1, len(head)))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Where each block's eigenvalues lie: from the smallest to the largest, and their mean."""
        ax = ax or new_axes()
        places = list(range(len(self)))
        low, high = [float(s.lambda_min) for s in self.values()], [float(s.lambda_max) for s in self.values()]
        mean = [float(s.trace) / s.dim for s in self.values()]
        ax.hlines(places, low, high, color="0.7")
        ax.plot(high, places, "o", label="largest")
        ax.plot(mean, places, "|", markersize=12, label="mean")
        ax.plot(low, places, "o", fillstyle="none", label="smallest")
        if places and min(low) > 0:
            ax.set_xscale("log")
        else:
            _signed_scale(ax, [abs(x) for x in (*low, *mean, *high) if x])
        ax.set_yticks(places, list(self))
        ax.invert_yaxis()
        ax.set(xlabel="eigenvalue")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize="small")
        return ax


def _signed_scale(ax: "Axes", sizes: Sequence[float]) -> None:
    """Both signs on logarithmic axes that meet at 0, where what is linear has a sixth of the decades' width.

    Eight decades at most are told apart: what is smaller is round-off, and drawn near 0.
    """
    from matplotlib.ticker import SymmetricalLogLocator

    top = max(sizes, default=1.0)
    least = 10.0 ** math.floor(math.log10(max(min(sizes, default=1.0), 1e-8 * top)))  # where a label can stand
    decades = max(math.ceil(math.log10(top / least)), 1)
    ax.set_xscale("symlog", linthresh=least, linscale=max(decades / 6, 0.5))
    locator = SymmetricalLogLocator(base=10, linthresh=least, subs=[1.0])
    locator.set_params(numticks=9)
    ax.xaxis.set_major_locator(locator)


@full_precision()
def block_spectra(
    operator: Operator,
    groups: Groups = "layer",
    num_steps: int = 30,
    num_probes: int = 4,
    *,
    seed: int = 0,
    reorthogonalize: Literal["full", "none"] = "none",
    progress: Progress | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> BlockSpectra:
    """The spectra of all diagonal blocks of a matrix, in `num_steps` passes over the data.

    Each block has the probes of a separate run, so separate runs for single layers and one run for all give the same
    numbers.

    Below float64, each block's products with two vectors, on part of one batch, are compared with products in float64
    (see `ritz.spectrum`). If they differ by more than 1e-4, the intervals of the block are widened. Nothing is
    compared, and intervals do not include such errors, for matrices other than c H + d with H a Hessian, a Gauss-Newton
    or an empirical Fisher matrix, and where `ritz.spectrum` compares nothing.

    Args:
        operator: The matrix: `ritz.Hessian(risk)`, `ritz.GGN(risk)` or any other.
        groups: "layer" groups the parameters of each module, except those of the model itself; "parameter" takes each
            parameter separately. Or globs by name, such as {"early": ["conv1.*", "conv2.*"], "late": "fc.*"}, which may
            leave out parameters.
        num_steps: Lanczos steps.
        num_probes: Number of probes per block.
        seed: Seed of the probes.
        reorthogonalize: "none" stores three vectors per probe; integrals are correct, but outliers are counted many
            times. "full" stores the rows of all steps, num_steps * num_probes vectors.
        progress: Called as progress(sweeps done, sweeps in all).
        checkpoint: A folder, or a `ritz.Checkpoint`, for the state of the run. After a kill, the same call resumes, and
            on a CPU the result is bitwise the same. Once the run is finished, the call reads the result back.

    Raises:
        ValueError: If an argument is out of range, a glob matches nothing, a parameter is in two groups, or the
            checkpoint is that of another call.
        NonFiniteError: If a product is NaN or infinite, naming the batch.
        StoppedError: If the run is stopped (`ritz.stoppable`) before its last sweep.

    Warns:
        NumericalWarning: If products of a block are far from those in float64.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([3.0, 1.0, -1.0], dtype=torch.float64)))
        >>> found = block_spectra(A, {"all": "*"})
        >>> found["all"].trace.value, found["all"].trace.exact, found.sweeps
        (3.0, True, 1)
    """
    if num_steps < 1 or num_probes < 1:
        raise ValueError(f"num_steps and num_probes must be at least 1, got {num_steps} and {num_probes}")
    if reorthogonalize not in ("full", "none"):
        raise ValueError(f"reorthogonalize must be 'full' or 'none', got {reorthogonalize!r}")
    blocks = block_diagonal(operator, _grouped(operator, groups))
    settings: dict[str, Any] = {
        "groups": blocks.groups, "num_steps": num_steps, "num_probes": num_probes, "seed": seed,
        "reorthogonalize": reorthogonalize,
    }  # fmt: skip
    with resumable(checkpoint, blocks, "block_spectra", settings) as saved:
        found: BlockSpectra | None = saved.result
        if found is None:
            run = _Run(blocks, num_steps, num_probes, seed, keep=reorthogonalize == "full")
            blocks.expect(run.sweeps * num_probes)
            run.finish(saved, progress)
            spectra = _rounded(blocks, {g: run.spectrum(number) for number, g in enumerate(blocks.groups)}, seed)
            found = BlockSpectra(
                spectra=spectra, sweeps=run.sweeps, products=sum(s.products for s in spectra.values()), seed=seed,
                convention=blocks.convention(),
            )  # fmt: skip
            saved.finish(found)
    return found


def _rounded(blocks: BlockDiagonal | PaddedBlocks, spectra: dict[str, Spectrum], seed: int) -> dict[str, Spectrum]:
    """With intervals as wide as the products of each block are wrong, where that is more than they leave out."""
    rough = {group: seen for group, seen in compare_blocks(blocks, seed).items() if seen.rough}
    if rough:
        max(rough.values(), key=lambda seen: seen.distance).tell(blocks.dtype)
    return {group: widened(found, rough[group]) if group in rough else found for group, found in spectra.items()}


def _grouped(operator: Operator, groups: Groups) -> dict[str, list[str]]:
    """Names of parameters by group."""
    if not isinstance(operator, Operator):
        raise TypeError(f"expected an operator such as ritz.Hessian(risk), got {type(operator).__name__}")
    space = operator.space
    if isinstance(groups, Mapping):
        return {group: select(space.names, globs) for group, globs in groups.items()}
    if groups not in ("layer", "parameter"):
        raise ValueError(f"groups must be 'layer', 'parameter' or a dictionary of globs, got {groups!r}")
    found: dict[str, list[str]] = {}
    for name in space.names:
        layer = name.rpartition(".")[0] or name
        found.setdefault(layer if groups == "layer" else name, []).append(name)
    return found


class _Run:
    """All blocks in lock-step; what has a column for each group is (K, G)."""

    def __init__(
        self, blocks: BlockDiagonal | PaddedBlocks, num_steps: int, num_probes: int, seed: int, keep: bool
    ) -> None:
        self.blocks, self.meter, self.seed = blocks, Metered(blocks), seed
        self.space, self.names = blocks.space, list(blocks.groups.values())
        owner = {name: number for number, names in enumerate(self.names) for name in names}
        device = blocks.device
        self.owner = torch.tensor([owner[name] for name in self.space.names], device=device)
        self.sizes = torch.tensor(self.space.sizes, device=device)
        self.dims = [sum(self.space.sizes[self.space.names.index(n)] for n in names) for names in self.names]
        self.whole = [dim <= num_steps * num_probes for dim in self.dims]
        needed = [
            -(-dim // num_probes) if whole else num_steps for dim, whole in zip(self.dims, self.whole, strict=True)
        ]
        self.sweeps, self.num_probes = max(needed), num_probes
        self.places = {g: self._places(names) for g, names in enumerate(self.names) if self.whole[g]}
        self.matrices = {g: torch.zeros(self.dims[g], self.dims[g], dtype=torch.float64) for g in self.places}
        probes = blocks.probes(range(num_probes), seed, "normal")
        self.norms = self._dots(probes, probes).sqrt()
        self.norms[:, list(self.places)] = 0.0  # nothing is sampled of what is found whole
        self.rows, self.previous = self._divided(probes, self.norms), torch.zeros_like(probes)
        self.scale = torch.zeros_like(self.norms)
        self.alpha: list[Tensor] = []
        self.beta: list[Tensor] = []
        self.basis: list[Tensor] | None = [] if keep else None
        self.layers = torch.empty(0)

    def finish(self, saved: Saved, progress: Progress | None) -> None:
        """All sweeps that are left; each can be the last of this process."""
        if saved.latest is not None:
            self._restore(saved)
        while (done := len(self.alpha)) < self.sweeps:
            self.step(done)
            if progress is not None:
                progress(done + 1, self.sweeps)
            if done + 1 < self.sweeps:
                saved.point(self._state)

    def _state(self) -> State:
        """What must be known to go on from here."""
        latest = {
            "rows": self.rows, "previous": self.previous, "scale": self.scale, "alpha": self.alpha, "beta": self.beta,
            "layers": self.layers, "matrices": list(self.matrices.values()),
        }  # fmt: skip
        return latest, {_basis(step): rows for step, rows in enumerate(self.basis or ())}

    def _restore(self, saved: Saved) -> None:
        """Go to where the saved state is, with tensors at addresses as fresh ones have them."""
        latest, device = saved.latest or {}, self.blocks.device
        for name in ("rows", "previous", "scale"):
            setattr(self, name, latest[name].to(device, copy=True))
        for name in ("alpha", "beta"):
            setattr(self, name, [step.to(device, copy=True) for step in latest[name]])
        self.layers = latest["layers"]
        self.matrices = dict(zip(self.places, latest["matrices"], strict=True))
        if self.basis is not None:
            steps = range(len(self.alpha))
            self.basis = [saved.settled(_basis(step)).to(device, copy=True) for step in steps]

    def step(self, number: int) -> None:
        """One product for all blocks."""
        rows = self.rows.clone() if self.places else self.rows
        first, turns = number * self.num_probes, torch.arange(self.num_probes, device=rows.device)
        for places in self.places.values():
            units = places[first : first + self.num_probes]
            rows[turns[: len(units)], units] = 1.0
        image = self.meter.rows(rows)
        if not bool(image.isfinite().all()):
            self.blocks.diagnose()
        for g, places in self.places.items():
            left = max(0, min(self.num_probes, len(places) - first))
            self.matrices[g][first : first + left] = image[:left, places].double().cpu()
        if number == 0:
            parts = torch.stack([self.space.segment(self.rows * image), self.space.segment(image.square())])
            self.layers = parts.double().cpu()
        self._advance(image)

    def _advance(self, image: Tensor) -> None:
        """The three-term recurrence of each block; see `krylov.lanczos`."""
        last = self.beta[-1] if self.beta else torch.zeros_like(self.norms)
        alive = (self.norms > 0) & ((last > 0) if self.beta else torch.ones_like(last, dtype=torch.bool))
        new = self._scaled(image, alive.double()) - self._scaled(self.previous, last)
        alpha = self._dots(self.rows, new)
        new = new - self._scaled(self.rows, alpha)
        if self.basis is not None:
            self.basis.append(self.rows)
            for _ in range(2):
                for old in self.basis:
                    new = new - self._scaled(old, self._dots(old, new))
        beta = self._dots(new, new).sqrt()
        self.scale = torch.maximum(self.scale, alpha.abs() + last)
        small = beta <= BREAKDOWN * torch.finfo(new.dtype).eps * self.scale
        beta = torch.where(small | ~alive, 0.0, beta)
        self.scale = torch.maximum(self.scale, beta)
        self.previous, self.rows = self.rows, self._divided(new, beta)
        self.alpha.append(torch.where(alive, alpha, 0.0))
        self.beta.append(beta)

    def spectrum(self, g: int) -> Spectrum:
        """What is known of one block."""
        blocks, names = self.blocks, self.names[g]
        columns = [self.space.names.index(name) for name in names]
        group = list(blocks.groups)[g]
        common: dict[str, Any] = {
            "dim": self.dims[g], "coupling": 0.0, "ends": (), "layers": names, "positive": blocks.positive,
            "noise": torch.finfo(blocks.dtype).eps, "seed": self.seed,
            "convention": f"block {group}, {self.dims[g]} parameters, of {blocks.base.convention()}",
        }  # fmt: skip
        if self.whole[g]:
            matrix = (self.matrices[g] + self.matrices[g].T) / 2
            values = torch.linalg.eigvalsh(matrix)
            values = values[values.abs().argsort(descending=True)]
            sizes = [self.space.sizes[column] for column in columns]
            parts = torch.stack([matrix.diagonal(), matrix.square().sum(1)]).split(sizes, dim=1)
            return Spectrum(
                head=values, head_residuals=torch.zeros_like(values), tail=None, products=self.dims[g],
                layer_samples=torch.stack([part.sum(1) for part in parts], dim=1)[:, None],
                stop="complete: every eigenvalue was found", **common,
            )  # fmt: skip
        alpha, beta = (torch.stack([step[:, g] for step in steps], dim=1).cpu() for steps in (self.alpha, self.beta))
        none = torch.empty(0, dtype=torch.float64)
        return Spectrum(
            head=none, head_residuals=none, products=self.num_probes * self.sweeps, stop="completed",
            tail=Tridiagonal(alpha, beta, self.norms[:, g].square().cpu(), torch.finfo(blocks.dtype).eps),
            layer_samples=self.dims[g] * self.layers[..., columns], **common,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ by groups

    def _places(self, names: Sequence[str]) -> Tensor:
        """Where a group's parameters lie in a row."""
        slices = [self.space.slices[name] for name in names]
        return torch.cat([torch.arange(s.start, s.stop, device=self.blocks.device) for s in slices])

    def _dots(self, left: Tensor, right: Tensor) -> Tensor:
        """Row by row and group by group, (K, G) float64."""
        sums = self.space.segment(left * right).double()
        return sums.new_zeros(len(sums), len(self.names)).index_add_(1, self.owner, sums)

    def _scaled(self, rows: Tensor, factors: Tensor) -> Tensor:
        """Each group's part of rows times its factor."""
        return rows * factors[:, self.owner].to(rows.dtype).repeat_interleave(self.sizes, dim=1)

    def _divided(self, rows: Tensor, norms: Tensor) -> Tensor:
        """Each group's part over its norm; zero where the norm is zero."""
        return self._scaled(rows, torch.where(norms > 0, 1 / torch.where(norms > 0, norms, 1.0), 0.0))


def _basis(step: int) -> str:
    return f"rows-{step}"
