"""The claims that a reader asks for first, by name: the page of reproductions begins with them.

A `Highlight` is a question and where its answer stands. Number, interval and verdict are the claim's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Highlight:
    """A question that one claim of one result answers.

    Attributes:
        place: PAPER/ITEM of the result.
        question: In the reader's words.
        claim: What the claim's text begins with.
    """

    place: str
    question: str
    claim: str

    def answer(self, results: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The claim, or None where the experiment was not run, or not far enough to have it.

        Example:
            >>> result = {"paper": "margins", "item": "affine", "claims": [{"text": "r is 1"}, {"text": "rho is 1"}]}
            >>> Highlight("margins/affine", "How well?", "r is").answer([result])
            {'text': 'r is 1'}
        """
        for result in results:
            if self.place == f"{result['paper']}/{result['item']}":
                return next((claim for claim in result["claims"] if claim["text"].startswith(self.claim)), None)
        return None


HIGHLIGHTS: tuple[Highlight, ...] = (
    Highlight(
        "false-friend/mlp", "Is the printed sharpness of the network of 9,960 parameters met?",
        "lambda_1 at weight decay 0.0005: in the prediction interval",
    ),
    Highlight(
        "false-friend/mlp", "Does weight decay sharpen that network?", "lambda_1 rises from weight decay 0 to 0.0005"
    ),
    Highlight(
        "false-friend/mlp", "And does it generalise better, by accuracy?",
        "accuracy on the last 5,000 rises from weight decay 0 to 0.0005",
    ),
    Highlight(
        "false-friend/mlp", "And by the gap to training?",
        "gap in error to the last 5,000 falls from weight decay 0 to 0.0005",
    ),
    Highlight(
        "false-friend/softmax", "Is the printed sharpness of softmax regression met, on the split that is stated?",
        "lambda_1 at weight decay 0.0005, trained on 45,000",
    ),
    Highlight(
        "false-friend/wideresnet-published", "Is WideResNet-28-10, at its published size, sharper with weight decay?",
        "lambda_1 rises from weight decay 0 to 0.0005, one network each",
    ),
    Highlight(
        "false-friend/wideresnet-published", "And does it generalise better, after 4 of 300 epochs?",
        "accuracy on the test set rises from weight decay 0 to 0.0005, one network each",
    ),
    Highlight("false-friend/vgg-gadam", "Is Gadam's solution sharper than SGD's?", "lambda_1, Gadam over SGD"),
    Highlight(
        "false-friend/vgg-gadam", "And does it generalise better?", "accuracy on the test set, Gadam less SGD"
    ),
    Highlight(
        "false-friend/stability", "Does gradient descent on all data settle at 2 / rate? (one of seven settings)",
        "MLP, full batches, a = 0.05: the bound is tight",
    ),
    Highlight(
        "pac-bayes/weight-norms", "Does the test error fall with the norm, up to the paper's weight decay?",
        "test error falls from weight decay 0 to 5e-4",
    ),
    Highlight(
        "pac-bayes/weight-norms", "And does the gap to the training error, which the metric is for?",
        "gap",
    ),
    Highlight(
        "pac-bayes/weight-norms", "And the test error at larger weight decays, where the paper has nothing?",
        "the smaller |w|, the smaller the test error",
    ),
    Highlight(
        "pac-bayes/penalty", "Does the trace penalty help, in 8 epochs of a small WideResNet?",
        "accuracy on the test set, with the penalty less without",
    ),
    Highlight("pac-bayes/penalty", "And does it narrow the gap?", "gap in error to the test set, with the penalty"),
    Highlight(
        "pac-bayes/penalty-grid", "Does it help the MLP on MNIST, at the best of five etas by held-out images?",
        "test accuracy, eta",
    ),
    Highlight(
        "pac-bayes/penalty-grid", "Are Tr H and Tr G the same number, where ReLU is all that is not linear?",
        "Tr H is Tr G, the ReLU network",
    ),
    Highlight(
        "pac-bayes/subsampling", "Can a log-determinant be had from a sub-sample, once it is extrapolated?",
        "corrected by 1 / (B + b): mean |error| after over before, at most half, d = 0.0001 lambda_1, sub-samples of "
        "256",
    ),
    Highlight("margins/affine", "Is the trace of an affine predictor its ACEHT?", "r between ACEHT and the exact"),
    Highlight(
        "margins/lenet", "Is there no correlation for points that are classified wrongly?",
        "no correlation over wrong points of all training data: r of traces and ACEHT",
    ),
    Highlight("margins/batches", "Do small batches generalise better?", "MNIST: test error, percentage points, small"),
    Highlight(
        "margins/batches", "Has a large batch that is trained longer margins like the small one's?",
        "MNIST: trained longer, the large batch has margins like",
    ),
    Highlight(
        "margins/batches", "So are small margins why large batches generalise worse?",
        "MNIST: large batches generalise worse because",
    ),
    Highlight(
        "margins/batches", "Do traces and output margins correlate, by Pearson's r?",
        "MNIST: r of traces and output margins",
    ),
    Highlight("margins/timing", "Do traces cost a thousand times what margins do?", "traces cost 1.5 h where margins"),
    Highlight(
        "margins/timing", "And if they are taken exactly, a batch at a time?", "the same with traces that are exact"
    ),
    Highlight("damping/table2", "Is SGD ahead of Adam?", "SGD - Adam"),
    Highlight("damping/table2", "Is damped Adam ahead of Adam?", "Adam-D - Adam"),
    Highlight(
        "damping/figure12-code", "As in the published code, is learned damping ahead of the flat one it starts from?",
        "KFAC 0.001, learned from 0.03, no dropout, as published - flat 0.03 with dropout",
    ),
    Highlight(
        "damping/figure12-code", "Is it still, once both have dropout?",
        "KFAC 0.001, learned from 0.03, as published - flat 0.03 with dropout",
    ),
    Highlight(
        "damping/figure12", "Is the learned damping's lead the dropout that the published code turns off with it?",
        "KFAC 0.001, learned from 0.03: that the published code",
    ),
    Highlight(
        "damping/figure12", "Does it beat flat damping at equal dropout?",
        "KFAC 0.001, learned from 0.03 beats flat damping at its",
    ),
    Highlight(
        "damping/figure12-dropout", "And where neither of them has dropout at any step?",
        "KFAC 0.001, learned from 0.03, no dropout, not even before the first refresh beats flat damping at its start",
    ),
    Highlight(
        "damping/rules", "Is Levenberg and Marquardt's damping unstable, on a small network?",
        "Levenberg-Marquardt's damping does not give stable training",
    ),
    Highlight(
        "damping/rules", "Is the noise from 79 batches that from all of them?",
        "79 batches give the noise that all batches give",
    ),
    Highlight(
        "damping/noise", "Does the noise of a batch Hessian follow a semicircle?",
        "eigenvalues of X follow a semicircle: their kurtosis, after training",
    ),
)  # fmt: skip
