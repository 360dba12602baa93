"""One training loop for all reproductions: logged, evaluated, kept every epoch, and resumed to the bit.

Whatever is drawn is keyed by the seed and by where the run is: the order of batches by (seed, epoch), augmentation by
(seed, epoch, step), and torch's own generators, which dropout uses, are seeded anew at each epoch. So a run that was
killed repeats the epoch that it was in, and ends in the same weights as one that was not (on a GPU, as far as its
kernels are deterministic).
"""

import os
from collections.abc import Mapping

from ..loggers import LoggerLike
from .loop import Data, Loop, Measure, Options, Progress
from .loop import Training as Training
from .loop import evaluate as evaluate
from .loop import initial as initial
from .recipe import Recipe as Recipe
from .recipe import scaled as scaled


def train(
    recipe: Recipe,
    data: Mapping[str, Data],
    *,
    folder: str | os.PathLike[str] | None = None,
    logger: LoggerLike | None = None,
    log_every: int = 50,
    details_every: int | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int = 1,
    stops: tuple[int, ...] = (),
    train_subset: int | None = 10_000,
    eval_batch: int = 1000,
    measure: Measure | None = None,
    progress: Progress | None = None,
) -> Training:
    """Train a network as a recipe says, where the data is.

    With a folder the run is kept there, and a call with the same recipe, data and folder goes on from the last epoch
    that was kept; one that has ended is read back. The log of a run has, by step,

        loss, accuracy, penalty, lr, damping            means over the steps since the last such row, and settings
        epoch, seconds                                  after each epoch; seconds are those of the steps alone
        NAME/loss, NAME/accuracy                        in evaluation mode, without augmentation, of data[NAME]
        average/NAME/loss, average/NAME/accuracy        of the average, BatchNorm's statistics renewed on data["train"]
        diverged                                        1, at the step where a run was given up

    The run is given up when a loss is NaN, infinite or not below `recipe.loss_bound`, which is looked at when a row is
    due, or when something else finds that the weights are lost.

    Args:
        recipe: What to train and how.
        data: (inputs, targets) by name: "train", and others to evaluate on, such as "val" and "test".
        folder: For checkpoints and log; made where it is not there.
        logger: Another logger for the same rows; after a kill it is given those of the epoch once more.
        log_every: Steps between two rows of losses.
        details_every: Steps between two rows of `ritz.optim.TrainingLog` as well.
        evaluate_every, checkpoint_every: In epochs; the last epoch is always evaluated and kept.
        stops: Epochs after which a copy of the model is kept for `Training.along`, in the folder too.
        train_subset: How many training samples to evaluate on, drawn once; None for all.
        eval_batch: Samples at once in evaluation; memory, not numbers.
        measure: measure(model, epoch) gives more numbers for the row of an epoch that is evaluated.
        progress: Called after each step as progress(steps done, steps in all).

    Raises:
        ValueError: If the data, an interval or a stop is no good, or the folder is that of another run.

    Example:
        >>> from functools import partial
        >>> from ritz.papers.recipe import Recipe, on_parameters
        >>> recipe = Recipe(
        ...     name="softmax",
        ...     model=partial(torch.nn.Linear, 2, 2),
        ...     optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=1.0),
        ...     epochs=20,
        ...     batch_size=2,
        ... )
        >>> X, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1, 0, 1])
        >>> done = train(recipe, {"train": (X, y), "test": (2 * X, y)})
        >>> done.stop, done.steps, done.history.column("test/accuracy")[1][-1]
        ('finished', 40, 1.0)
    """
    _check(data)
    intervals = {"log_every": log_every, "evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    others = {"details_every": details_every, "eval_batch": eval_batch, "train_subset": train_subset}
    for name, number in (*intervals.items(), *others.items()):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if outside := [epoch for epoch in stops if not 1 <= epoch <= recipe.epochs]:
        raise ValueError(f"stops are epochs from 1 to {recipe.epochs}, the last, got {outside[0]}")
    options = Options(
        log_every=log_every, details_every=details_every, evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every, stops=stops, train_subset=train_subset, eval_batch=eval_batch,
        measure=measure, progress=progress,
    )  # fmt: skip
    return Loop(recipe, data, options, folder, logger).run()


def _check(data: Mapping[str, Data]) -> None:
    """Refuse data that cannot be trained on."""
    pairs = isinstance(data, Mapping) and all(
        isinstance(part, tuple | list) and len(part) == 2 for part in data.values()
    )
    if not pairs:
        raise TypeError('data is a dictionary of pairs of tensors: {"train": (X, y), "test": (X_test, y_test)}')
    if "train" not in data:
        raise ValueError(f"data must have 'train' among its names, got {', '.join(data) or 'none'}")
    for name, (X, y) in data.items():
        if not len(X) or len(X) != len(y):
            raise ValueError(f"{name} has {len(X)} inputs and {len(y)} targets: give equally many, at least one")
        devices = [str(tensor.device) for tensor in (X, y, data["train"][0])]
        if len(set(devices)) > 1:
            raise ValueError("{} has inputs on {}, targets on {}; 'train' is on {}: one device".format(name, *devices))
