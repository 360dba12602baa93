"""Hugging Face: `CurvatureCallback` and `EachStep` for its Trainer, and its models as a `ritz.Risk`.

    from ritz.integrations.transformers import CurvatureCallback, causal_lm

    watch = CurvatureCallback(lambda model: causal_lm(model, batches), every=100)
    Trainer(model, args, train_dataset=data, callbacks=[watch]).train()
    print(watch.tracker.table())

The classes are made on first access; nothing is imported before.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..losses import CrossEntropy
from ..risk import Risk
from .track import FORMAT
from .watch import Watching, each_step, made

IGNORED = -100
_TARGETS = ("labels", "label", "label_ids")

# ------------------------------------------------------------------------------------------ models as a risk


def logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The logits of a model for a dictionary of inputs, without its labels; a `forward` of `ritz.Risk`.

    Example:
        >>> class Output:
        ...     def __init__(self, logits):
        ...         self.logits = logits
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return Output(super().forward(x))
        >>> batch = {"x": torch.eye(2), "labels": torch.tensor([0, 1])}
        >>> risk = ritz.Risk(Model(2, 2), torch.nn.CrossEntropyLoss(), [batch], forward=logits)
        >>> risk.num_samples, risk.dim
        (2, 6)
    """
    out = model(**{name: value for name, value in batch.items() if name not in _TARGETS})
    found: Tensor = out["logits"] if isinstance(out, dict) else out.logits
    return found


def next_tokens(batch: Mapping[str, Any]) -> Tensor:
    """The token after each token but the last, (batch, tokens - 1): the target of a causal language model.

    These are the labels of the batch, shifted by one place; -100 does not count. Without labels, they are the tokens
    of the batch that its attention mask includes.

    Example:
        >>> tokens = torch.tensor([[5, 6, 7, 0]])
        >>> next_tokens({"input_ids": tokens, "attention_mask": torch.tensor([[1, 1, 1, 0]])})
        tensor([[   6,    7, -100]])
        >>> next_tokens({"input_ids": tokens, "labels": torch.tensor([[-100, -100, 7, 8]])})
        tensor([[-100,    7,    8]])
    """
    if "labels" in batch:
        labels: Tensor = batch["labels"]
    elif "input_ids" in batch:
        labels = batch["input_ids"]
        if "attention_mask" in batch:
            labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED)
    else:
        raise ValueError(f"a batch of a language model must have labels or input_ids, got {', '.join(batch)}")
    return labels[:, 1:]


def causal_lm(model: nn.Module, data: Any, **keywords: Any) -> Risk:
    """The risk of a causal language model: the mean over tokens of -log p(next token), as in transformers.

        L(w) = sum_t [label_{t+1} != -100] (-log p(label_{t+1} | tokens up to t)) / sum_t [label_{t+1} != -100]

    The mean is over all tokens that count in all batches, not over the means of batches. The outputs are known, so
    Gauss-Newton and Fisher matrices, margins and exact traces exist.

    Args:
        model: A model whose outputs have `logits` (batch, tokens, vocabulary).
        data: Dictionaries with `input_ids`, and optionally `labels` or `attention_mask`: a list or a DataLoader.
        keywords: Further arguments of `ritz.Risk`: params, dtype, plan, ...

    Example:
        >>> class Output:
        ...     def __init__(self, logits):
        ...         self.logits = logits
        >>> class Bigram(torch.nn.Embedding):
        ...     def forward(self, input_ids):
        ...         return Output(super().forward(input_ids))
        >>> model = Bigram(4, 4)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> batches = [{"input_ids": torch.tensor([[0, 1, 2]])}, {"input_ids": torch.tensor([[3, 1]])}]
        >>> risk = causal_lm(model, batches)
        >>> round(risk.loss(), 4), round(float(ritz.trace(ritz.GGN(risk)).value), 4)  # log 4, 1 - sum of p^2
        (1.3863, 0.75)
    """
    return Risk(model, CrossEntropy(class_dim=-1, target=next_tokens), data, forward=_but_last, **keywords)


def _but_last(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Logits of all positions that have a next token."""
    return logits(model, batch)[:, :-1]


def shown(optimizer: Any) -> Callable[..., Tensor]:
    """A `compute_loss_func` of Trainer for causal language models that shows the outputs to KFAC.

        opt = ritz.optim.KFAC(model, lr, damping, loss=ritz.losses.CrossEntropy(class_dim=-1))
        Trainer(model, args, ..., optimizers=(opt, scheduler), compute_loss_func=shown(opt))

    The loss is that of transformers: the sum over tokens that count, divided by their number in all batches of the
    step, which Trainer passes.

    Example:
        >>> class Watcher:
        ...     def observe(self, outputs, batch):
        ...         print(tuple(outputs.shape), batch["labels"].tolist())
        >>> class Output:
        ...     logits = torch.zeros(1, 3, 4)
        >>> round(float(shown(Watcher())(Output(), torch.tensor([[0, 1, -100]]))), 4)  # log 4
        (1, 2, 4) [[1, -100]]
        1.3863
    """

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        out: Tensor = (outputs["logits"] if isinstance(outputs, dict) else outputs.logits)[:, :-1]
        target = labels[:, 1:]
        if torch.is_grad_enabled():  # not while Trainer evaluates
            optimizer.observe(out, {"labels": target})
        scores = out.to(torch.promote_types(out.dtype, torch.float32)).transpose(1, 2)  # not in half precision
        total = F.cross_entropy(scores, target, ignore_index=IGNORED, reduction="sum")
        return total / ((target != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    return loss


# ---------------------------------------------------------------------------------------------- callbacks


class CurvatureHooks(Watching):
    """A callback that measures every so many steps or epochs of Hugging Face's Trainer, as `ritz.track` does.

    A callback has no access to the loggers of its Trainer: rows are written to `trainer.state.log_history`, which is
    part of its checkpoints, and from which a resumed run continues. To send them to the Trainer's own loggers too:

        trainer.add_callback(CurvatureCallback(make_risk, logger=lambda scalars, step: trainer.log(scalars)))

    Processes that train together share a look if the risk is made by a function; if it was made before there was a
    process group, only the first process looks. Weights that are sharded over processes by FSDP1 or DeepSpeed cannot be
    measured.

    Args:
        risk: The risk, or a function of the model that makes it. The function is called on every process when training
            starts, after the model has been moved to its device. All processes must have the same data; if Accelerate
            has made a loader distributed, ritz reads the whole data set.
        every: Steps between two looks.
        every_epochs: Epochs between two looks, instead of steps.
        logger: A logger for the rows, instead of the history, as in `ritz.track`.
        settings: Further arguments of `ritz.track`: measures, budget, ...

    Attributes:
        tracker: The `Tracker`, once training has started: `.table()`, `.plot()`, `.record`.

    Example:
        >>> CurvatureHooks(torch.nn.Linear(1, 1))
        Traceback (most recent call last):
        TypeError: risk must be a ritz.Risk, or a function of the trained module that makes one, got Linear
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the tracker, and start its clock; continue from the history of a resumed run."""
        if self.tracker is None:
            self.watch.load_state(_before(state))
        self.watch.begin(kwargs["model"], self._history(state), state.is_world_process_zero, state.global_step)

    def _history(self, state: Any) -> Callable[[dict[str, float], int], None]:
        """A function that writes a row to the history of the Trainer."""

        def take(scalars: dict[str, float], step: int) -> None:
            if self.watch.logger is None:
                state.log_history.append({**scalars, "epoch": state.epoch, "step": step})

        return take

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look if one is due."""
        self.watch.step(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look if one is due by epochs."""
        self.watch.epoch(math.floor(state.epoch + 1e-6))  # state.epoch is a fraction if max_steps cuts an epoch short

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.watch.end()


class EachStepHooks:
    """A callback that calls functions after each step of the optimiser: `EachStep(damping.step, average.step)`.

    Example:
        >>> EachStepHooks(print).calls == (print,)
        True
    """

    def __init__(self, *calls: Callable[[], Any]) -> None:
        super().__init__()
        self.calls = each_step(calls)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call the functions, once for all accumulated batches of the step."""
        for call in self.calls:
            call()


def _before(state: Any) -> dict[str, Any]:
    """The state of a tracker from the history of a resumed run; empty if the history has no rows of a tracker."""
    rows = [
        {name: value for name, value in row.items() if name == "step" or name.startswith(_OURS)}
        for row in state.log_history
        if "track/share" in row
    ]
    if not rows:
        return {}
    last, spent = rows[-1], sum(row["track/seconds"] for row in rows)
    return {
        "format": FORMAT, "count": state.global_step, "skipped": int(last["track/skipped"]), "failures": {},
        "elapsed": spent / last["track/share"], "spent": spent, "expected": last["track/seconds"], "rows": rows,
    }  # fmt: skip


_OURS = ("curvature/", "measures/", "track/")
_HOOKS = {"CurvatureCallback": CurvatureHooks, "EachStep": EachStepHooks}


def __getattr__(name: str) -> Any:
    """The callbacks, made from the class of the package."""
    if name not in _HOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    try:
        host = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError("transformers is not installed here: pip install 'ritz[hf]'") from error
    globals()[name] = made(name, _HOOKS[name], host.TrainerCallback, __name__)
    return globals()[name]
