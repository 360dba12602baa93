"""The papers' experiments as one table, and how one is found and run."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..nonfinite import in_numbers
from . import (
    affine,
    cifar_spectra,
    cifar_spectra_claims,
    cifar_spectra_figure,
    damping_cifar_claims,
    damping_cifar_figure,
    damping_rates_claims,
    damping_rules,
    damping_rules_claims,
    damping_spectra,
    logistic_damping,
    logistic_damping_claims,
    margins_along,
    margins_batch,
    margins_batch_figure,
    margins_classes,
    margins_scaling,
    margins_timing,
    mnist_mlp,
    mnist_mlp_claims,
    mnist_mlp_figure,
    noise_spectrum,
    noise_spectrum_claims,
    penalty_grid,
    penalty_grid_claims,
    softmax,
    stability,
    stability_claims,
    subsampling,
    trace_penalty,
    weight_norms,
)
from .added import refuse_other_experiment, rows_of
from .base import Claim
from .data.images import Data, load_images
from .experiment import Experiment, Outcome, Progress, Rows, Setting, plain_claim
from .pieces import Pieces


def _affine(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    (X, y), _ = load_images("MNIST", setting.data, setting.device)
    train = (X + 1) / 2, y  # pixels in [0, 1]
    num = setting.pick(60, affine.NUM_IMAGES, affine.NUM_IMAGES)
    seeds = setting.seed_range(2, 8, 8)
    rows = affine.study(train, seeds, num, Pieces(setting, "affine"), partial(progress, "predictors"))
    return rows, affine.claims(rows)


def _mlp(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    train, val, test = mnist_mlp.load_mnist(setting.data, setting.device)
    most = setting.pick(256, len(train[0]), len(train[0]))
    train, val, test = ((X[:most], y[:most]) for X, y in (train, val, test))
    pieces, steps = Pieces(setting, "mlp"), setting.pick(5, 40, 100)
    seeds = setting.seed_range(2, 4, 20)
    trained = mnist_mlp.train_many(
        train, seeds, epochs=setting.pick(1, 10, 50), checkpoint=pieces.training(seeds),
        progress=partial(progress, "epochs"),
    )  # fmt: skip
    rows = mnist_mlp.measure_rows(
        trained, train, val, test, num_probes=setting.pick(2, 4, 8), pieces=pieces,
        progress=partial(progress, "networks"),
    )  # fmt: skip
    found = mnist_mlp_claims.plain(rows)
    found = softmax.with_stems(found, trained, train, steps, mnist_mlp.make_network, pieces)
    return found, _mlp_claims(found)


def _mlp_claims(rows: Rows) -> list[Claim]:
    """Those of seed 000 and those of seed 002."""
    own = mnist_mlp_claims.from_plain(rows)
    others = [claim for claim in mnist_mlp_claims.claims(own) if claim.paper != "seed 000"]
    return [*mnist_mlp_claims.friend_claims(own), *others]


def _logistic(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    dampings = logistic_damping.DAMPINGS if setting.budget != "smoke" else (0.01, 1.0)
    etas = logistic_damping.ETAS if setting.budget != "smoke" else (1.0, 10.0)
    steps, lanczos = setting.pick(4, 100, 500), setting.pick(6, 50, 50)
    pieces, results = Pieces(setting, "logistic"), dict[str, list[logistic_damping.Run]]()
    for name in ("MNIST", "FashionMNIST"):
        train, test = load_images(name, setting.data, setting.device)
        test = tuple(part[: setting.pick(200, 10_000, 10_000)] for part in test)  # type: ignore[assignment]
        results[name] = []
        for seed in setting.seed_range(2, 2, 4):
            own = logistic_damping.draw(train, seed, setting.pick(60, 1000, 1000))
            said = partial(progress, f"steps, {name}, seed {seed}")
            results[name].append(logistic_damping.train_descent(own, test, seed, steps=steps))
            work = partial(
                _lanczos_rows, name=name, seed=seed, dampings=dampings, etas=etas, steps=steps, num_lanczos=lanczos
            )
            kept = pieces.keep(f"{name}, seed {seed}", work, own, test, progress=said)
            results[name] += logistic_damping_claims.from_plain(kept)[name]
    rows = [row for name, runs in results.items() for row in logistic_damping_claims.plain(name, runs)]
    return rows, list(logistic_damping_claims.claims(results).values())


def _lanczos_rows(train: Data, test: Data, *, name: str, **settings: Any) -> Rows:
    """Runs of LanczosOPT to all digits, as a file holds them."""
    return logistic_damping_claims.plain(name, logistic_damping.train_lanczos(train, test, **settings), digits=17)


def _decays(paper: str, item: str, title: str, source: str, short: str = "") -> Experiment:
    """A network of CIFAR-100 at several weight decays, which two papers show."""
    run, figure = partial(cifar_spectra.run_decays, item), cifar_spectra_figure.figure
    return Experiment(paper, item, title, source, run, figure, cifar_spectra_claims.decay_claims, short)


def _along(item: str, title: str, where: str) -> Experiment:
    """Traces of samples against margins along the training of a network."""
    run, claims = partial(margins_along.run, item), partial(margins_along.claims, item)
    course = margins_along.COURSES[item]
    short = "" if course.short_stops == course.stops else "a quarter of the steps"
    return Experiment("margins", item, title, f"seed 003, {where}", run, margins_along.figure, claims, short)


def _vgg16(item: str, title: str, where: str) -> Experiment:
    """VGG-16 on CIFAR-100 with flat and learned damping."""
    source, run = f"seed 004, {where}", partial(damping_cifar_claims.run, item)
    figure = damping_cifar_figure.rates if item == "stable" else damping_cifar_figure.figure
    return Experiment("damping", item, title, source, run, figure, partial(damping_cifar_claims.claims, item))


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "false-friend", "mlp", "the network of 9,960 parameters on MNIST", "seed 000, figure 2", _mlp,
        mnist_mlp_figure.draw, _mlp_claims,
    ),
    Experiment(
        "false-friend", "softmax", "softmax regression on MNIST at three weight decays", "seed 000, figure 1",
        softmax.run, softmax.figure, softmax.claims,
    ),
    _decays("false-friend", "allcnn", "All-CNN-C on CIFAR-100 at three weight decays", "seed 000, figure 3"),
    _decays("false-friend", "preresnet", "PreResNet on CIFAR-100 at three weight decays", "seed 000, figure 4"),
    _decays(
        "false-friend", "preresnet-published", "PreResNet-164 at its published size", "seed 000, figure 4",
        "weight decays 0 and 5e-4, without 1e-4, and one seed instead of four",
    ),
    _decays("false-friend", "wideresnet", "WideResNet, BatchNorm in both modes", "seed 000, figures 5 and 8"),
    _decays(
        "false-friend", "wideresnet-published", "WideResNet-28-10 at its published size, BatchNorm in both modes",
        "seed 000, figures 5 and 8", "weight decays 0 and 5e-4, without 1e-4, and one seed instead of four",
    ),
    Experiment(
        "false-friend", "vgg-gadam", "VGG-16 with BatchNorm by SGD and by Gadam", "seed 000, figure 6",
        cifar_spectra.run_optimisers, cifar_spectra_figure.figure, cifar_spectra_claims.optimiser_claims,
    ),
    Experiment(
        "false-friend", "stability", "learning rates, lambda_1 and Ritz values", "seed 000, section 4 and theorem 2",
        stability.run, stability.figure, stability_claims.claims,
        "2,000 images instead of 5,000 and 800 steps instead of 2,000; networks and learning rates are the same",
    ),
    Experiment(
        "pac-bayes", "mlp", "the same network, at three weight decays", "seed 002, table 1", _mlp,
        claims=_mlp_claims,
    ),
    _decays("pac-bayes", "allcnn", "All-CNN-C on CIFAR-100: the metric and its parts", "seed 002, tables 2 and 3"),
    _decays("pac-bayes", "preresnet", "PreResNet on CIFAR-100: the metric and its parts", "seed 002, table 4"),
    _decays(
        "pac-bayes", "preresnet-published", "PreResNet-164 at its published size: the metric and its parts",
        "seed 002, table 4", "weight decays 0 and 5e-4, without 1e-4, and one seed instead of four",
    ),
    _decays("pac-bayes", "wideresnet", "WideResNet on CIFAR-100: the metric and its parts", "seed 002, table 5"),
    _decays(
        "pac-bayes", "wideresnet-published", "WideResNet-28-10 at its published size: the metric and its parts",
        "seed 002, table 5", "weight decays 0 and 5e-4, without 1e-4, and one seed instead of four",
    ),
    Experiment(
        "pac-bayes", "penalty", "does a trace penalty help?", "seed 002, tables 7 and 8", trace_penalty.run,
        cifar_spectra_figure.figure, trace_penalty.claims,
    ),
    Experiment(
        "pac-bayes", "penalty-grid", "a grid of trace penalties, Tr H and Tr G, on the MLP in place of WideResNet",
        "seed 002, section 6", penalty_grid.run, penalty_grid_claims.figure, penalty_grid_claims.claims,
        "20 epochs instead of 50 and 5 seeds instead of 8",
    ),
    Experiment(
        "pac-bayes", "subsampling", "moments and log-determinants of sub-samples", "seed 002, figure 2 and section 4.2",
        subsampling.run, subsampling.figure, subsampling.claims,
        "5,000 images instead of 55,000, 20 epochs instead of 50, 2 networks instead of 3, and fewer sub-samples",
    ),
    Experiment(
        "pac-bayes", "weight-norms", "norm and test error at eight weight decays", "seed 002, figure 1c",
        weight_norms.run, weight_norms.figure, weight_norms.claims,
    ),
    Experiment(
        "margins", "affine", "Hessian traces of an affine predictor", "seed 003, figure 2", _affine, affine.figure,
        affine.claims,
    ),
    _along("lenet", "Hessian traces of samples against margins, LeNet along training", "figure 3"),
    _along("f1-small", "the same for a dense network with BatchNorm, batches of 256", "appendix B.1"),
    _along("f1-large", "the same for a dense network with BatchNorm, batches of 4096", "appendix B.1"),
    Experiment(
        "margins", "batches", "small against large batches, network F1", "seed 003, section 4 and appendix B.1",
        margins_batch.run, margins_batch_figure.figure, margins_batch.claims,
        "the longer run has 4 times the steps instead of 16, Lanczos 30 steps instead of 60, and there are 3 seeds "
        "instead of 5 unless they are given; small and large batches are trained as published, for 10,000 steps",
    ),
    Experiment(
        "margins", "classes", "outliers against number of classes", "seed 003, section 6", margins_classes.run,
        margins_classes.figure, margins_classes.claims,
    ),
    Experiment(
        "margins", "scaling", "T_alpha on a trained network", "seed 003, section 5", margins_scaling.run,
        margins_scaling.figure, margins_scaling.claims,
    ),
    Experiment(
        "margins", "timing", "traces of samples against margins: what they cost", "seed 003, section 3.2.1",
        margins_timing.run, margins_timing.figure, margins_timing.claims,
        "traces of 100 samples instead of 500, and exact traces of 2,000 instead of 10,000; all are scaled to the "
        "whole of MNIST",
    ),
    Experiment("damping", "logistic", "LanczosOPT on softmax regression", "seed 004, figures 4 to 6", _logistic),
    Experiment(
        "damping", "noise", "the noise of batch Hessians", "seed 004, lemmas 2 and 3, theorems 1 and 4, section 7.1",
        noise_spectrum.run, noise_spectrum.figure, noise_spectrum_claims.claims,
    ),
    Experiment(
        "damping", "rules", "rules for KFAC's damping, on a network of 21,836 parameters in place of VGG-16",
        "seed 004, section 7.1", damping_rules.run, damping_rules_claims.figure, damping_rules_claims.claims,
        "20,000 images instead of 45,000, and 4 epochs instead of 20",
    ),
    Experiment(
        "damping", "rates", "a grid of rates and dampings, on a network of 21,836 parameters in place of VGG-16",
        "seed 004, figure 1b and sections 6.3, 7.1 and 7.3", damping_rates_claims.run, damping_rates_claims.figure,
        damping_rates_claims.claims, "5,000 images instead of 45,000, and 40 epochs instead of 100",
    ),
    _vgg16("table2", "SGD, Adam and damped Adam", "table 2"),
    _vgg16("figure12", "KFAC, damping learned from 0.03 and its controls", "figure 12"),
    _vgg16("figure12-dropout", "KFAC, learned and flat damping without dropout", "figure 12"),
    _vgg16("figure12-code", "KFAC and its damping as in the published code", "figure 12"),
    _vgg16("figure12-low", "KFAC, damping learned from 0.01", "figure 12"),
    _vgg16("table1", "the largest eigenvalue after Adam and KFAC", "table 1 and figures 7 and 8"),
    Experiment(
        "damping", "figure2", "spectra after SGD, Adam and damped Adam", "seed 004, figure 2", damping_spectra.run,
        cifar_spectra_figure.figure, damping_spectra.claims,
    ),
    _vgg16("figure11", "KFAC from low dampings", "figure 11"),
    _vgg16("figure13", "KFAC at a low rate", "figure 13"),
    _vgg16("figure14", "Adam, learned damping and the rate that is ramped up", "figures 14 and 15"),
    _vgg16("figure9", "AdamW with BatchNorm", "figure 9"),
    _vgg16("stable", "the largest stable learning rates", "section 8"),
)  # fmt: skip

PAPERS = {  # seed 001, the supplement of seed 002, shows the spectra of seed 000
    "false-friend": ("seed 000", "seed 001"), "pac-bayes": ("seed 002",), "margins": ("seed 003",),
    "damping": ("seed 004",),
}  # fmt: skip


def find(paper: str, item: str | None = None, table: Sequence[Experiment] = EXPERIMENTS) -> list[Experiment]:
    """The experiments of a paper, by its name or number ("003"), or the one that is named.

    Raises:
        ValueError: If there is none; it names those that there are.

    Example:
        >>> [experiment.title for experiment in find("margins", "affine")]
        ['Hessian traces of an affine predictor']
    """
    known: Mapping[str, list[str]] = {
        name: [experiment.item for experiment in table if experiment.paper == name]
        for name in dict.fromkeys(experiment.paper for experiment in table)
    }
    by_number = {seed.removeprefix("seed "): name for name, seeds in PAPERS.items() for seed in seeds}
    paper = by_number.get(paper, paper)
    if paper not in known:
        meant = [f"{name} {paper}" for name, items in known.items() if paper in items]
        hint = f"; did you mean {' or '.join(meant)}?" if meant else f"; there are {', '.join(known)}"
        raise ValueError(f"no paper is called {paper!r}{hint}")
    if item is not None and item not in known[paper]:
        raise ValueError(f"{paper} has no experiment {item!r}; it has {', '.join(known[paper])}")
    return [one for one in table if one.paper == paper and item in (None, one.item)]


def reproduce(experiment: Experiment, setting: Setting, progress: Progress | None = None) -> Outcome:
    """Run one experiment; with `setting.before` its next seeds, and judge them with those that were run before.

    Raises:
        ValueError: If the result before is of another experiment, or made otherwise.
    """
    before, judged = setting.before, experiment.claims
    if before is not None:
        refuse_other_experiment(before, experiment.paper, experiment.item, judged is not None)
    start = time.perf_counter()
    rows, claims = experiment.run(setting, progress or (lambda what, done, total: None))
    if before is not None and judged is not None:
        rows = rows_of(before, rows)
        claims = judged(rows)
    own = [claim for claim in claims if claim.paper in PAPERS[experiment.paper]]
    return Outcome(experiment, setting, rows, own, time.perf_counter() - start)


def judge(result: Mapping[str, Any], table: Sequence[Experiment] = EXPERIMENTS) -> dict[str, Any]:
    """A result as it is in a file, with the claims that its rows give by the code of today; all else stays.

    Where claims do not follow from the rows alone, or nothing of this name is in the table, they stay too.
    """
    one = next((one for one in table if (one.paper, one.item) == (result["paper"], result["item"])), None)
    if one is None or one.claims is None:
        return dict(result)
    found = [claim for claim in one.claims(in_numbers(result["rows"])) if claim.paper in PAPERS[one.paper]]
    return {**result, "claims": [plain_claim(claim) for claim in found]}
