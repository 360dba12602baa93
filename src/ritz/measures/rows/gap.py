"""Loss and error of a network on training and test data, and their difference."""

import math
from dataclasses import replace

from ...intervals import StudentT
from ...losses import BinaryCrossEntropy, CrossEntropy, SquaredError
from ...results import Estimate
from .. import gap
from ..row import EVERY, SAME_FUNCTION, Measure
from ..subject import Subject

_NEVER_NEGATIVE = (CrossEntropy, SquaredError, BinaryCrossEntropy)


def _train(s: Subject, what: gap.What) -> Estimate:
    if what == "loss" and s.risk.opaque:  # the mean is known even where the outputs are not
        return Estimate(name="train loss", value=s.loss, exact=True, convention="mean loss, training data")
    return gap.on_training_data(s.outputs, what)


def _test(s: Subject, what: gap.What) -> Estimate:
    if what == "loss" and s.test is not None and s.test.opaque:  # a mean, but not of how many independent items
        text = "mean loss, test data; no error bar, since an opaque loss is not known item by item"
        value = s.once("test loss", s.test.loss)
        return Estimate(name="test loss", value=value, stderr=math.nan, rule=StudentT(0), convention=text)
    return s.once(f"test {what}", lambda: _sampled(s, what))


def _sampled(s: Subject, what: gap.What) -> Estimate:
    found = gap.on_test_data(s.test_outputs, what, seed=s.settings.seed)
    known = s.test is not None and isinstance(s.test.output_loss, _NEVER_NEGATIVE)
    return replace(found, support=(0.0, found.support[1])) if known else found


def _gap(s: Subject, what: gap.What) -> Estimate:
    return gap.gap(_train(s, what), _test(s, what))


ROWS = (
    Measure(
        key="train_loss", formula="mean_i loss_i", convention="training data, no penalty", source="seeds 000, 002",
        family="gap", cost="forward", compute=lambda s: _train(s, "loss"), standard=True, better=None,
        unchanged=SAME_FUNCTION, reading="how well the data is fitted; sharpness compares only at equal loss",
    ),
    Measure(
        key="train_error", formula="share of i with margin_i <= 0", convention="a share, not percent; a tie is wrong",
        source="seeds 000, 002", family="gap", cost="forward", compute=lambda s: _train(s, "error"), standard=True,
        better=None, unchanged=EVERY, reading="0 means that all training labels are fitted",
    ),
    Measure(
        key="test_loss", formula="mean_i loss_i", convention="test data; bootstrap interval", source="seeds 000, 002",
        family="gap", cost="forward", compute=lambda s: _test(s, "loss"), standard=True, needs=frozenset({"test"}),
        unchanged=SAME_FUNCTION, reading="the outcome itself; of classes it grows with confidence in wrong answers",
    ),
    Measure(
        key="test_error", formula="share of i with margin_i <= 0", convention="a share; binomial interval",
        source="seeds 000, 002", family="gap", cost="forward", compute=lambda s: _test(s, "error"), standard=True,
        needs=frozenset({"test"}), unchanged=EVERY, reading="the outcome itself",
    ),
    Measure(
        key="gap_loss", formula="test loss - train loss", convention="train value exact, test value a sample",
        source="seed 002, tables 1 to 6", family="gap", cost="forward", compute=lambda s: _gap(s, "loss"),
        standard=True, needs=frozenset({"test"}), unchanged=SAME_FUNCTION,
        reading="what the measures below are meant to predict",
    ),
    Measure(
        key="gap_error", formula="test error - train error", convention="a share, not percentage points",
        source="seeds 000, 002", family="gap", cost="forward", compute=lambda s: _gap(s, "error"), standard=True,
        needs=frozenset({"test"}), unchanged=EVERY, reading="what the measures below are meant to predict",
    ),
)  # fmt: skip
