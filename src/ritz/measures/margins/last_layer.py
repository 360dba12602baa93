"""The curvature of the last layer, from its features and one forward pass.

If the outputs are f = W h + b, the last layer is an affine network with input h. So the trace of its block of the
Hessian of cross-entropy is exact, by proposition 3.1 of seed 003 with h in place of x:

    Tr H_last = mean_i (||h_i||^2 + 1) (1 - sum_j S_ij^2)
"""

import torch
from torch import Tensor, nn

from ...batches import Batch
from ...captures import Capture, Recorder, reachable
from ...errors import UnsupportedError
from ...losses.base import Loss
from ...reducers import Concat
from ...results import Estimate
from ...risk import Params, Progress, Risk
from ...space import random_uniform
from ..outputs import coupled, softmax_columns

_NOT_LAST = (
    "the outputs are not, as they are, those of an nn.Linear whose weight is among the chosen parameters, so the trace "
    "of the last layer has no such form; use ritz.trace(ritz.GGN(risk).block(...))"
)


def sample_aceht_features(risk: Risk, *, progress: Progress | None = None) -> Tensor:
    """(||h||^2 + 1) (1 - sum_j S_j^2) of every item, for the features h that the last layer takes: (n,).

    The trace of the last layer's block of the Hessian of the item's own cross-entropy. Items are samples, or the tokens
    of a language model; those of weight 0 are left out.

    Args:
        risk: Its last layer must be an nn.Linear whose weight is among the chosen parameters; the 1 stands for its
            bias, and is left out if that is absent or frozen.
        progress: Called with (batches done, 0).

    Raises:
        UnsupportedError: If the outputs are not exactly those of a linear layer, or its weight is also used elsewhere;
            for losses without classes, losses whose Hessian has other weights than their mean (`pos_weight`, label
            smoothing together with class weights), and BatchNorm in train mode.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 2))
        >>> _ = torch.nn.init.zeros_(model[1].weight), torch.nn.init.zeros_(model[1].bias)
        >>> data = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])
        >>> sample_aceht_features(ritz.Risk(model, torch.nn.CrossEntropyLoss(), data)).tolist()
        [1.0, 5.0]
    """
    return _traces(risk, progress)[0]


def aceht_features(risk: Risk, *, progress: Progress | None = None) -> Estimate:
    """The trace of the last layer's block of the Hessian, from one forward pass; see `sample_aceht_features`.

    It applies to cross-entropy, also with class weights and `ignore_index`, and to binary cross-entropy with one
    output.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 2))
        >>> _ = torch.nn.init.zeros_(model[1].weight), torch.nn.init.zeros_(model[1].bias)
        >>> data = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])
        >>> aceht_features(ritz.Risk(model, torch.nn.CrossEntropyLoss(), data)).value
        3.0
    """
    values, weight, layer = _traces(risk, progress)
    plain = bool(risk.batches.ordered) and bool((weight == weight[0]).all())
    said = f"trace of the Hessian block of {layer}: mean of (||h||^2 + 1) (1 - sum_j S_j^2) over {len(values)} items"
    return Estimate(
        name="ACEHT on features", value=float(values @ weight / weight.sum()), exact=True, convention=said,
        samples=values if plain else None,
    )  # fmt: skip


def _traces(risk: Risk, progress: Progress | None) -> tuple[Tensor, Tensor, str]:
    """(traces (n,), weights (n,), name of the last layer)."""
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    loss = risk.output_loss
    _refuse_reweighted(loss)
    if coupled(risk):
        raise UnsupportedError(
            "BatchNorm in train mode makes the features of a sample depend on its batch, so it has no trace of its "
            "own; use mode='eval'"
        )
    risk.check()
    name, names = _last_layer(risk)
    last = risk.restrict(names)  # the graph begins at the last layer

    def rows(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        out, recorded = last.captured(params, batch, lambda out: [_probe(out)[None]])
        items = loss.items(out.double(), batch.data)
        impurity = softmax_columns(items).get("impurity")
        if impurity is None:
            raise UnsupportedError(
                "the trace of the last layer needs a loss with labels of two classes or more, such as cross-entropy"
            )
        call = _only(next(recorded))
        _refuse_changed(call, loss.items(_probe(out).double(), batch.data).logits)
        size = call.input.detach().double().flatten(0, -2).square().sum(1) + float("bias" in call.params)
        one_logit = call.grad.shape[-1] == 1  # for two classes
        return torch.stack([size * impurity * (0.5 if one_logit else 1.0), items.weight], dim=1), items.weight.sum()

    table: Tensor = last.fold(rows, Concat(), progress=progress).cpu()
    values, weight = table[table[:, 1] != 0].T.contiguous()
    return values, weight, name


def _refuse_reweighted(loss: Loss) -> None:
    """Refuse losses whose Hessian is not that of cross-entropy times the weight of the item."""
    smoothed = getattr(loss, "label_smoothing", 0.0) and getattr(loss, "class_weight", None) is not None
    if smoothed or any(getattr(loss, name, None) is not None for name in ("pos_weight", "element_weight")):
        raise UnsupportedError(
            "the Hessian of this loss has other weights than its mean (pos_weight, element weights, or label "
            "smoothing together with class weights), so the formula for the trace of the last layer fails; use "
            "ritz.trace(ritz.GGN(risk).block(...))"
        )


def _last_layer(risk: Risk) -> tuple[str, tuple[str, ...]]:
    """The linear layer that is called last before the outputs, and its chosen parameters."""
    batch = next(iter(risk.batches))
    batch = batch.head(2) if risk.splittable else batch
    leaves = {name: p.detach().requires_grad_() for name, p in risk.params().items()}
    with risk.session(), torch.enable_grad(), Recorder(risk.model, risk.names) as recorder:
        reached = reachable(risk.output(leaves, batch))
    calls = [call for call in recorder.calls if call.edge.node in reached and type(call.module) is nn.Linear]
    if not calls or "weight" not in calls[-1].params:
        raise UnsupportedError(_NOT_LAST)
    last = calls[-1]
    return last.name or "the model", tuple(last.params.values())


def _probe(out: Tensor) -> Tensor:
    """Numbers in the shape of the outputs, the same for the same shape."""
    return random_uniform(out.numel(), ("last layer",), out.device).to(out.dtype).reshape(out.shape)


def _only(calls: list[Capture]) -> Capture:
    """The one call of the last layer that has chosen parameters."""
    if len(calls) != 1 or calls[0].input.ndim < 2:
        raise UnsupportedError(
            f"the weight of {calls[-1].name} is used {len(calls)} times (by {', '.join(c.name for c in calls)}), so "
            "the formula for its trace fails; use ritz.trace(ritz.GGN(risk).block(...))"
        )
    return calls[0]


def _refuse_changed(call: Capture, probe: Tensor | None) -> None:
    """Refuse outputs that are not the layer's own: what is pulled back must be what was put in, item by item."""
    assert probe is not None
    back = call.grad[0].flatten(0, -2).double()
    if probe.shape[-1] == 2 and back.shape[-1] == 1:
        probe = probe[:, 1:]
    if back.shape != probe.shape or not torch.equal(back, probe):
        raise UnsupportedError(_NOT_LAST)
