"""Margins seen from inside the network: the distance to the decision boundary at the input of each layer.

At a layer with input h the boundary between the label y and the runner-up j is, to first order, at the distance

    d = (f_y - f_j) / ||grad_h (f_y - f_j)||_q        1/p + 1/q = 1 for a distance in the p-norm

(Elsayed et al. 2018). Divided by the spread of the layer, sqrt(sum_k Var h_k), it keeps its value when a layer is
scaled up and the next one down, or all outputs together (Jiang et al. 2019).
"""

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...batches import Batch, map_tensors, tensors_of
from ...errors import NonFiniteError, UnsupportedError
from ...reducers import Concat, Mean
from ...results import Estimate, new_axes
from ...risk import Params, Progress, Risk
from ...storage import Result
from ..outputs import coupled
from .distribution import Box, MarginDistribution, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Norm = Literal["l2", "l1", "linf"]

INPUT = "input"
_DUAL = {"l2": 2.0, "l1": torch.inf, "linf": 1.0}  # order of the norm of the gradient, for the norm of the distance
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LayerMargins(Result):
    """Margins of every item at the input of the network and of its linear and convolutional layers.

    Attributes:
        layers: Their names, "input" first; a layer that is called again has a number.
        values: The signed margins (layers, n); infinite if the outputs do not depend on the layer at all.
        weight: Weight of each item, (n,).
        correct: Whether its prediction is right, (n,) bool.
        spread: The divisor of the margins of each layer, (layers,).
        convention: Which distance, and what it is divided by.

    Example:
        >>> values = torch.tensor([[1.0, 2.0, 6.0], [3.0, 4.0, -1.0]])
        >>> found = LayerMargins(
        ...     layers=("input", "fc"), values=values, weight=torch.ones(3), correct=torch.ones(3, dtype=torch.bool),
        ...     spread=torch.ones(2), convention="l2 distance",
        ... )
        >>> found.median.value, found.median.parts["fc"].value
        (2.5, 3.0)
    """

    layers: tuple[str, ...]
    values: Tensor
    weight: Tensor
    correct: Tensor
    spread: Tensor
    convention: str

    @property
    def median(self) -> Estimate:
        """The mean over layers of the median over items; `parts` are the medians, layer by layer.

        Raises:
            UnsupportedError: If the median at some layer is infinite.
        """
        parts = {layer: self._median(layer) for layer in self.layers}
        mean = sum(float(part.value) for part in parts.values()) / len(parts)
        said = f"mean over {len(parts)} layers of the median {self.convention}"
        return Estimate(name="layer margin", value=mean, exact=True, convention=said, parts=parts)

    def _median(self, layer: str) -> Estimate:
        value = self.distribution(layer).quantile(0.5)
        if not abs(value) < torch.inf:
            raise UnsupportedError(
                f"most items have an infinite margin at {layer}: the outputs do not depend on it (dead units); leave "
                "it out with layers="
            )
        return Estimate(name=f"margin at {layer}", value=value, exact=True, convention=f"median {self.convention}")

    def distribution(self, layer: str) -> MarginDistribution:
        """The margins at one layer."""
        if layer not in self.layers:
            raise ValueError(f"no layer is named {layer!r}; there are {', '.join(self.layers)}")
        return MarginDistribution(
            name=f"margin at {layer}", values=self.values[self.layers.index(layer)], weight=self.weight,
            correct=self.correct, convention=self.convention,
        )  # fmt: skip

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """A box for each layer."""
        ax = ax or new_axes()
        rows = zip(self.layers, self.values, strict=True)
        finite = {layer: (row[row.isfinite()], self.weight[row.isfinite()]) for layer, row in rows}
        boxes = [drawn(Box.of(*row), layer) for layer, row in finite.items() if len(row[0])]
        if boxes:
            ax.bxp(boxes, showfliers=False)
        ax.axhline(0.0, color="0.8", lw=0.8, zorder=0)
        ax.tick_params(axis="x", rotation=45 if len(self.layers) > 4 else 0)
        ax.set(xlabel="input of layer", ylabel="normalised margin" if bool((self.spread != 1).any()) else "margin")
        return ax


def layer_margins(
    risk: Risk,
    *,
    layers: str | Sequence[str] = "*",
    norm: Norm = "l2",
    normalise: bool = True,
    progress: Progress | None = None,
) -> LayerMargins:
    """Margins at the input of the network and of every linear and convolutional layer, to first order.

    It takes one backward pass over the data, after a forward pass for the spread of the layers. A layer whose input is
    that of the network is not listed again.

    Args:
        risk: A risk with classes and labels, one for each sample.
        layers: Glob or globs of module names, and "input".
        norm: The norm in which distances are measured; the gradient is measured in its dual.
        normalise: Divide by sqrt(sum_k Var h_k), the spread over the data in the 2-norm. Otherwise the margin of a
            hidden layer can change although the function does not.
        progress: Called with (batches done, 0), in each of the two passes.

    Raises:
        UnsupportedError: For BatchNorm in train mode, several items per sample (tokens, pixels), no classes or one.

    Example:
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        >>> data = torch.tensor([[1.0, 0.5], [2.0, 1.0]]), torch.tensor([0, 1])
        >>> found = layer_margins(ritz.Risk(model, torch.nn.CrossEntropyLoss(), data), normalise=False)
        >>> found.layers, found.values.tolist()  # the distance to 3 a + 4 b = 0
        (('input',), [[1.0, -2.0]])
    """
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be 'l2', 'l1' or 'linf', got {norm!r}")
    _check(risk)
    points = _Points(risk, layers)
    means = points.means(progress) if normalise else {}

    def rows(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        margin, weight, slopes, apart = points.margins(params, batch, means, _DUAL[norm])
        return torch.cat([weight[:, None], margin[:, None], slopes, apart], dim=1), weight.sum()

    table: Tensor = risk.fold(rows, Concat(), progress=progress).cpu()
    points.share()
    weight, margin, *columns = table[table[:, 0] != 0].T.contiguous()
    if not bool(margin.isfinite().all()):
        raise NonFiniteError(
            f"the margin of item {int((~margin.isfinite()).nonzero()[0])} is infinite: its other classes have infinite "
            "logits; rule them out by a large finite number"
        )
    slopes, apart = torch.stack(columns).chunk(2)  # (layers, n) each
    spread = ((apart @ weight) / weight.sum()).sqrt() if normalise else torch.ones(len(slopes), dtype=torch.float64)
    names = tuple(points.shapes)
    _refuse_constant(names, spread)
    # without a slope there is no boundary in any direction, save for an item that is on it
    values = torch.where(margin == 0, 0.0, margin / (slopes * spread[:, None]))
    said = f"(f_y - f_j) / ||grad_h (f_y - f_j)||, {norm} distance"
    said += ", over sqrt(total variation of h)" if normalise else ""
    return LayerMargins(
        layers=names, values=values, weight=weight, correct=margin > 0, spread=spread,
        convention=f"{said}; over {len(weight)} items, {risk.mode} mode",
    )  # fmt: skip


def _check(risk: Risk) -> None:
    """Refuse a risk whose items have no outputs of their own."""
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    _ = risk.output_loss  # a risk without outputs says so
    if coupled(risk):
        raise UnsupportedError(
            "BatchNorm in train mode makes the outputs of a sample depend on its batch, so single samples have no "
            "margins; use mode='eval'"
        )
    risk.check()


def _refuse_constant(names: Sequence[str], spread: Tensor) -> None:
    for name, size in zip(names, spread.tolist(), strict=True):
        if not size > 0:
            raise UnsupportedError(
                f"{name} is the same for every item, so it has no spread to divide by: use normalise=False, or leave "
                "it out with layers="
            )


def _select(names: Sequence[str], layers: str | Sequence[str]) -> list[str]:
    """The names that match a glob or one of several."""
    globs = [layers] if isinstance(layers, str) else list(layers)
    found = [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    if not found:
        raise ValueError(f"no layer matches {layers!r}; there are {', '.join(names)}")
    return found


class _Points:
    """The places where margins are taken: what comes in there, and the slope of the margin."""

    def __init__(self, risk: Risk, layers: str | Sequence[str]) -> None:
        self.risk = risk
        modules = {name or type(m).__name__: m for name, m in risk.model.named_modules() if isinstance(m, _LAYERS)}
        chosen = _select([INPUT, *modules], layers)
        self.modules = {name: modules[name] for name in chosen if name != INPUT}
        self.with_input = INPUT in chosen
        self.shapes: dict[str, torch.Size] = {}  # of one sample, in the order of the forward pass, once there was one

    def means(self, progress: Progress | None) -> dict[str, Tensor]:
        """The weighted mean of every layer's input over the data, flat."""

        def sums(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
            with _Watch(self, lambda _, h: h.clone(), graph=False) as watch:
                weight = self._margins(self.risk.output(params, batch), batch)[1]
            self._settle(watch.shapes, batch)
            return torch.cat([weight @ _rows(h) for h in watch.seen.values()]), weight.sum()

        mean: Tensor = self.risk.fold(sums, Mean(), progress=progress)
        self.share()
        sizes = [shape.numel() for shape in self.shapes.values()]
        return dict(zip(self.shapes, mean.split(sizes), strict=True))

    def share(self) -> None:
        """After a walk: a rank whose share has no sample is told of the layers by another."""
        self.shapes = next(filter(None, self.risk.world.gather(self.shapes)), {})

    def margins(
        self, params: Params, batch: Batch, means: Mapping[str, Tensor], order: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Margins and weights (n,), and (n, layers) the norms of their gradients and ||h - mean||^2.

        Samples do not mix, so the gradient of the sum over them holds that of each.
        """

        def apart(name: str, h: Tensor) -> Tensor:
            return (_rows(h) - means[name]).square().sum(1) if name in means else h.new_zeros(len(h)).double()

        # where inputs are indices the graph begins at parameters: at all of them, whichever are chosen
        state = {**self.risk.state(), **params}
        own = [name for name, p in self.risk.model.named_parameters() if p.is_floating_point()]
        leaves = {name: state[name].detach().requires_grad_() for name in own}
        with torch.enable_grad(), _Watch(self, apart, graph=True) as watch:
            margin, weight = self._margins(self.risk.output(leaves, batch), batch)
            total = margin.sum()
        self._settle(watch.shapes, batch)
        grads = torch.autograd.grad(total, list(watch.edges.values()), allow_unused=True)
        slopes = [torch.zeros_like(weight) if grad is None else _rows(grad).norm(order, dim=1) for grad in grads]
        return margin.detach(), weight, torch.stack(slopes, dim=1), torch.stack(list(watch.seen.values()), dim=1)

    def _margins(self, out: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """f_y - f_j for the runner-up j, one class where several are level, and the weights: (n,) each."""
        items = self.risk.output_loss.items(out.double(), batch.data)
        logits, label = items.logits, items.label
        if logits is None or label is None or logits.shape[-1] < 2:
            raise UnsupportedError("layer margins need labels of two classes or more, which this risk does not have")
        if len(label) != batch.size:
            raise UnsupportedError(
                f"a batch of {batch.size} samples has {len(label)} items: the items of a sample share its layers, so "
                "no item has a margin there; give one label per sample"
            )
        own = label[:, None]
        runner_up = logits.detach().scatter(1, own, -torch.inf).argmax(1, keepdim=True)
        margin = (logits.gather(1, own) - logits.gather(1, runner_up))[:, 0]
        alone = runner_up[:, 0] == label  # every other class is ruled out by an infinite logit
        return margin.where(~alone, torch.inf), items.weight.detach()

    def _settle(self, whole: Mapping[str, torch.Size], batch: Batch) -> None:
        """The first batch says which layers there are, and of what size; the others must agree."""
        if not whole:
            raise UnsupportedError("margins need a floating input, or a linear or convolutional layer; none was found")
        for name, shape in whole.items():
            if shape[:1] != (batch.size,):
                raise UnsupportedError(
                    f"the input {tuple(shape)} of {name} does not have one row for each of the {batch.size} samples of "
                    "the batch; leave it out with layers="
                )
        shapes = {name: shape[1:] for name, shape in whole.items()}
        self.shapes = self.shapes or shapes
        if self.shapes != shapes:
            raise UnsupportedError("the layers or the sizes of their inputs differ from batch to batch")


class _Watch:
    """Hooks that note what comes into the network and into each chosen layer, and where that is in the graph."""

    def __init__(self, points: _Points, look: Callable[[str, Tensor], Tensor], graph: bool) -> None:
        self.points, self.look, self.graph = points, look, graph
        self.seen: dict[str, Tensor] = {}  # what the look gave, at once: a layer's input may be written to later
        self.shapes: dict[str, torch.Size] = {}
        self.edges: dict[str, GradientEdge] = {}
        self._given: list[Tensor] = []  # to the network
        self._versions: list[int] = []
        self._handles = contextlib.ExitStack()

    def __enter__(self) -> "_Watch":
        # first in line at the network, last at a layer: hooks of the user may replace what comes in
        root = self.points.risk.model.register_forward_pre_hook(self._enters, prepend=True, with_kwargs=True)
        self._handles.callback(root.remove)
        for name, module in self.points.modules.items():
            hook = module.register_forward_pre_hook(functools.partial(self._layer, name), with_kwargs=True)
            self._handles.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def _enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The network is called: its floating inputs become starts of the graph."""
        if self._given:  # by itself
            return args, kwargs
        # a copy: the network may write to its input, which a leaf does not bear
        args, kwargs = map_tensors((args, kwargs), lambda x: self._start(x).clone() if x.is_floating_point() else x)
        self._given = [x for x in tensors_of((args, kwargs)) if x.is_floating_point()]
        self._versions = [x._version for x in self._given]
        if self.points.with_input and len(self._given) == 1:
            self._note(INPUT, self._given[0])
        return args, kwargs

    def _layer(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """A layer is called."""
        if not args:
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        h = args[0] if args[0].requires_grad else self._start(args[0])
        if not (INPUT in self.seen and self._is_input(h)):
            calls = sum(other == name or other.startswith(f"{name} (call ") for other in self.seen)
            self._note(f"{name} (call {calls + 1})" if calls else name, h)
        return (h, *args[1:]), kwargs

    def _is_input(self, h: Tensor) -> bool:
        """Whether it is what the network was given, in another shape at most."""
        (x,), (version,) = self._given, self._versions
        return h.data_ptr() == x.data_ptr() and h.numel() == x.numel() and x._version == version

    def _note(self, name: str, h: Tensor) -> None:
        self.shapes[name] = h.shape
        self.seen[name] = self.look(name, h.detach())
        if self.graph:
            self.edges[name] = get_gradient_edge(h)  # stays, whatever is written to h later

    def _start(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if self.graph else x


def _rows(x: Tensor) -> Tensor:
    """One row for each sample, float64."""
    return x.flatten(1).double()
