"""What one forward pass gives for every item: losses, margins and how sure the network is.

Margins and quantities that follow from them (seed 003) depend on 1 - S_y, which rounds to 0 long before it is 0. So
nothing here is computed by subtracting from 1: with S the softmax and c its largest class,

    1 - S_c        =  sum_{j != c} S_j
    1 - sum S_j^2  =  sum_j S_j (1 - S_j)
    1 - gamma^2    =  (1 - |gamma|) (1 + |gamma|),    1 - |gamma| = (1 - S_c) + S_runner-up or S_y
    - log S_c      =  - log1p(-(1 - S_c))
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import Batch, tensors_of
from ..errors import UnsupportedError
from ..losses.base import Items
from ..reducers import Concat
from ..risk import Params, Progress, Risk


@dataclass(frozen=True, eq=False, kw_only=True)
class Outputs:
    """One number per item, (n,) float64 on the host, in data order; None for quantities that the loss does not have.

    Attributes:
        loss: The item's loss.
        weight: Its weight in the mean; items of weight 0 are left out.
        margin: f_y - max_{j != y} f_j, signed.
        softmax_margin: S_y - max_{j != y} S_j, signed.
        impurity: 1 - sum_j S_j^2.
        slack: 1 - gamma^2 for the softmax margin gamma.
        confidence: max_j S_j.
        entropy: - sum_j S_j log S_j.
        slope: <S - e_y, f> = sum_j S_j (f_j - f_y), the derivative of cross-entropy when all logits grow in proportion.
        input_norm2: ||x||^2 of the item's input, as passed to the model.
        ordered: Whether every pass over the data has the same order, so that items of two solutions can be paired.
        coupled: Whether BatchNorm in train mode makes an item depend on the others of its batch.
        classes: Number of classes; 0 for a loss without classes.
        one_logit: Whether one output f stands for two classes with logits (0, f), as in binary cross-entropy.

    Example:
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.ones(1, 1), torch.tensor([0])))
        >>> found = sample_outputs(risk)
        >>> found.margin.item(), found.impurity.item(), found.slack.item()
        (0.0, 0.5, 1.0)
    """

    loss: Tensor
    weight: Tensor
    margin: Tensor | None = None
    softmax_margin: Tensor | None = None
    impurity: Tensor | None = None
    slack: Tensor | None = None
    confidence: Tensor | None = None
    entropy: Tensor | None = None
    slope: Tensor | None = None
    input_norm2: Tensor | None = None
    ordered: bool = True
    coupled: bool = False
    classes: int = 0
    one_logit: bool = False

    @property
    def correct(self) -> Tensor:
        """Whether the label has the largest output, (n,) bool; a tie does not count."""
        return self.need("margin") > 0

    @property
    def per_output(self) -> float:
        """Trace of the Hessian of cross-entropy in the outputs, divided by impurity: 1, or 1/2 for a single logit."""
        return 0.5 if self.one_logit else 1.0

    def mean(self, values: Tensor) -> float:
        """The weighted mean of one number per item."""
        return float((values * self.weight).sum() / self.weight.sum())

    def need(self, name: str) -> Tensor:
        """One of the columns.

        Raises:
            UnsupportedError: If the loss or the data does not have it.
        """
        if self.classes == 1 and name != "loss":
            raise UnsupportedError("margins need at least two classes, this network has one")
        values = getattr(self, name)
        if values is None:
            inputs = "inputs that are floating tensors, one item each, given in one call of the model"
            what = inputs if name == "input_norm2" else "classes and labels"
            raise UnsupportedError(f"this needs {what}, which this risk does not have")
        return values  # type: ignore[no-any-return]

    def own(self, name: str) -> Tensor:
        """A column whose values do not depend on the other items of a batch.

        Raises:
            UnsupportedError: For BatchNorm in train mode.
        """
        if self.coupled:
            raise UnsupportedError(
                "BatchNorm in train mode makes the outputs of a sample depend on its batch, so single samples have no "
                "margin; use mode='eval'"
            )
        return self.need(name)


_COLUMNS = tuple(f.name for f in fields(Outputs) if f.type not in (bool, int))


def sample_outputs(risk: Risk, *, progress: Progress | None = None) -> Outputs:
    """One forward pass over the data; the softmax and everything computed from it are in float64.

    Raises:
        UnsupportedError: For a `batch_loss` risk, whose outputs are not known.
    """
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    loss = risk.output_loss
    risk.check()
    classes, one_logit = 0, False

    def columns(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        nonlocal classes, one_logit
        with _seen_inputs(risk.model) as calls:
            out = risk.output(params, batch).double()
        items = loss.items(out, batch.data)
        classes = 0 if items.logits is None else items.logits.shape[-1]
        one_logit = classes == 2 and out.numel() == len(items.loss)
        found = {"loss": items.loss, "weight": items.weight, **softmax_columns(items)}
        if len(calls) == 1 and calls[0] is not None and len(calls[0]) == batch.size == len(items.loss):
            found["input_norm2"] = calls[0]
        missing = torch.full_like(items.loss, math.nan)
        return torch.stack([found.get(name, missing) for name in _COLUMNS], dim=1), items.weight.sum()

    table: Tensor = risk.fold(columns, Concat(), progress=progress).cpu()
    table = table[table[:, _COLUMNS.index("weight")] != 0]
    rows = zip(_COLUMNS, table.T.contiguous(), strict=True)
    named: dict[str, Any] = {name: None if bool(row.isnan().all()) else row for name, row in rows}
    return Outputs(
        **named, ordered=bool(risk.batches.ordered), coupled=coupled(risk), classes=classes, one_logit=one_logit
    )


def coupled(risk: Risk) -> bool:
    """Whether BatchNorm in train mode makes an item depend on the others of its batch."""
    norms = (m for m in risk.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return risk.mode == "train" and any(True for _ in norms)


def softmax_columns(items: Items) -> dict[str, Tensor]:
    """All columns that follow from logits and labels, by name."""
    p, f, label, margin = items.probabilities, items.logits, items.label, items.margin
    if p is None or f is None or label is None or margin is None or p.shape[-1] < 2:
        return {}
    top, best = p.max(-1)
    others = p.scatter(-1, best[:, None], 0.0)  # all but the largest
    rest, runner_up = others.sum(-1), others.amax(-1)  # 1 - max_j S_j, and the second largest
    own = p.gather(-1, label[:, None])[:, 0]
    behind = f - f.gather(-1, label[:, None])  # f_j - f_y
    right = margin > 0
    short = rest + torch.where(right, runner_up, own)  # 1 - |gamma|
    return {
        "margin": margin,
        "softmax_margin": torch.where(right, 1 - short, short - 1),
        "impurity": (others * (1 - others)).sum(-1) + top * rest,
        "slack": short * (2 - short),
        "confidence": top,
        "entropy": torch.special.entr(others).sum(-1) - top * torch.log1p(-rest),
        "slope": torch.where(p > 0, p * behind, 0.0).sum(-1),  # a class may be ruled out by an infinite logit
    }


@contextlib.contextmanager
def _seen_inputs(model: nn.Module) -> Iterator[list[Tensor | None]]:
    """For each call of the model inside, ||x||^2 of its samples (n,); None if inputs are not floating tensors."""
    calls: list[Tensor | None] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_norms(tensors_of((args, kwargs))))  # now, because the model may write to its inputs

    # first in line: hooks of the user may replace what comes in
    handle = model.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _norms(inputs: list[Tensor]) -> Tensor | None:
    """Sums of squares over all inputs, sample by sample."""
    sizes = {x.shape[:1] if x.is_floating_point() else None for x in inputs}
    if len(sizes) != 1 or sizes & {None, torch.Size([])}:
        return None
    return torch.stack([x.detach().double().reshape(len(x), -1).square().sum(1) for x in inputs]).sum(0)
