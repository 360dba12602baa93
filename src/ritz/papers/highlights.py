"""The most common questions, with the claims that answer them: the page of reproductions begins with them.

A `Highlight` is a question and the place of its answer. Number, interval and verdict are those of the claim.
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
        "false-friend/mlp", "Do we reproduce the printed sharpness of the network with 9,960 parameters?",
        "lambda_1 at weight decay 0.0005: in the prediction interval",
    ),
    Highlight(
        "false-friend/mlp", "Does weight decay make that network sharper?",
        "lambda_1 rises from weight decay 0 to 0.0005",
    ),
    Highlight(
        "false-friend/mlp", "Does that network generalise better with weight decay, by accuracy?",
        "accuracy on the last 5,000 rises from weight decay 0 to 0.0005",
    ),
    Highlight(
        "false-friend/mlp", "Does it generalise better by the generalisation gap?",
        "gap in error to the last 5,000 falls from weight decay 0 to 0.0005",
    ),
    Highlight(
        "false-friend/softmax",
        "Do we reproduce the printed sharpness of softmax regression? (The paper does not name the images.)",
        "lambda_1 at weight decay 0.0005, trained on 45,000",
    ),
    Highlight(
        "false-friend/wideresnet-published", "Is WideResNet-28-10, at its published size, sharper with weight decay?",
        "lambda_1 rises from weight decay 0 to 0.0005, one network each",
    ),
    Highlight(
        "false-friend/wideresnet-published", "Does it generalise better with weight decay, after 4 of 300 epochs?",
        "accuracy on the last 5,000 rises from weight decay 0 to 0.0005, one network each",
    ),
    Highlight("false-friend/vgg-gadam", "Is Gadam's solution sharper than SGD's?", "lambda_1, Gadam over SGD"),
    Highlight(
        "false-friend/vgg-gadam", "Does Gadam's solution generalise better, by validation accuracy as in the paper?",
        "accuracy on the last 5,000, Gadam minus SGD",
    ),
    Highlight(
        "false-friend/stability",
        "Does lambda_1 settle at 2 / learning rate in full-batch gradient descent? (One of seven settings: it does in "
        "3, and does not in 2.)",
        "MLP, full batches, a = 0.05: the bound is tight",
    ),
    Highlight(
        "pac-bayes/weight-norms", "Does the test error fall with the weight norm, up to the paper's weight decay?",
        "test error falls from weight decay 0 to 5e-4",
    ),
    Highlight(
        "pac-bayes/weight-norms", "Does the gap to the training error fall, which the metric is meant to predict?",
        "gap",
    ),
    Highlight(
        "pac-bayes/weight-norms",
        "Does the test error fall with the norm at larger weight decays, which the paper does not cover?",
        "the smaller |w|, the smaller the test error",
    ),
    Highlight(
        "pac-bayes/penalty",
        "Does the trace penalty improve validation accuracy, in 8 epochs of a small WideResNet?",
        "accuracy on the last 5,000, with the penalty minus without",
    ),
    Highlight(
        "pac-bayes/penalty", "Does the trace penalty narrow the gap?",
        "gap in error to the last 5,000, with the penalty",
    ),
    Highlight(
        "pac-bayes/penalty-grid",
        "Does it help the MLP on MNIST at the paper's weight decay, with the best of five etas chosen on held-out "
        "images?",
        "test accuracy, eta",
    ),
    Highlight(
        "pac-bayes/penalty-grid", "Are Tr H and Tr G equal if ReLU is the only nonlinearity?",
        "Tr H is Tr G, the ReLU network",
    ),
    Highlight(
        "pac-bayes/subsampling",
        "Can a log-determinant be extrapolated from a sub-sample, by 1 / (B + b)? (One of nine settings: it can in 6, "
        "and cannot in 0.)",
        "log |G_B + d I| corrected by 1 / (B + b): mean |error| after over before, at most half, d = 0.0001 lambda_1, "
        "sub-samples of 256",
    ),
    Highlight(
        "margins/affine", "Is the Hessian trace of an affine predictor its ACEHT?",
        "r between ACEHT and the exact",
    ),
    Highlight(
        "margins/lenet", "Is there no correlation for misclassified points?",
        "no correlation over wrong points of all training data: r of traces and ACEHT",
    ),
    Highlight("margins/batches", "Do small batches generalise better?", "MNIST: test error, percentage points, small"),
    Highlight(
        "margins/batches", "With longer training, do large batches reach the margins of small batches?",
        "MNIST: trained longer, the large batch has margins like",
    ),
    Highlight(
        "margins/batches", "Are small margins the reason why large batches generalise worse?",
        "MNIST: large batches generalise worse because",
    ),
    Highlight(
        "margins/batches",
        "Is Pearson's r of traces and output margins -0.8 or less, as for the paper? (Their rank correlation is.)",
        "MNIST: r of traces and output margins",
    ),
    Highlight(
        "margins/timing", "Do traces cost a thousand times as much as margins?",
        "traces cost 1.5 h where margins",
    ),
    Highlight(
        "margins/timing", "How much do exact traces cost, one batch at a time?",
        "exact traces, a batch at a time",
    ),
    Highlight(
        "damping/logistic",
        "Does less damping widen the gap, by LanczosOPT on softmax regression? (One of thirty settings: it does in 20, "
        "and does not in 6, with dampings of 0.01 and less.)",
        "MNIST: test error - training error rises from damping 0.1 to 0.01 at eta 1",
    ),
    Highlight("damping/table2", "Is SGD ahead of Adam?", "SGD - Adam"),
    Highlight("damping/table2", "Is damped Adam ahead of Adam?", "Adam-D - Adam"),
    Highlight("damping/table2", "Is damped Adam as good as SGD?", "Adam-D - SGD"),
    Highlight(
        "damping/figure12-code",
        "Is learned damping, run as in the published code, ahead of the flat damping that it starts from?",
        "KFAC 0.001, learned from 0.03, no dropout, as published - flat 0.03 with dropout",
    ),
    Highlight(
        "damping/figure12-code", "Is it still ahead if both have dropout?",
        "KFAC 0.001, learned from 0.03, as published - flat 0.03 with dropout",
    ),
    Highlight(
        "damping/figure12-code", "Does it make no difference that the published code trains it without dropout?",
        "KFAC 0.001, learned from 0.03, as published: that the published code",
    ),
    Highlight(
        "damping/figure12-code", "Does the flat damping 0.03 very quickly diverge, as the paper has it?",
        "KFAC 0.001, flat 0.03, as published: very quickly diverges",
    ),
    Highlight(
        "damping/figure12-code", "Does learned damping beat the flat damping 0.1, at equal dropout?",
        "KFAC 0.001, learned from 0.03, as published - flat 0.1 with dropout",
    ),
    Highlight(
        "damping/figure12", "Does learned damping beat flat damping at equal dropout, with debiased averages?",
        "KFAC 0.001, learned from 0.03 beats flat damping at its",
    ),
    Highlight(
        "damping/figure12-dropout", "Does it beat flat damping if neither has dropout at any step?",
        "KFAC 0.001, learned from 0.03, no dropout, not even before the first refresh beats flat damping at its start",
    ),
    Highlight(
        "damping/rules", "Is Levenberg-Marquardt damping unstable, on a small network?",
        "Levenberg-Marquardt's damping does not give stable training",
    ),
    Highlight(
        "damping/rules", "Do 79 batches give the same noise estimate as all batches? (one probe, small network)",
        "79 batches give the noise that all batches give",
    ),
    Highlight(
        "damping/rates", "Do larger learning rates of SGD, which fit less well, generalise better? (small network)",
        "larger rates of SGD, where they optimise less well",
    ),
    Highlight(
        "damping/rates", "Does more damping help Adam at its usual learning rate? (small network)",
        "at the same rate more damping helps",
    ),
    Highlight(
        "damping/rates", "Does Adam match SGD at a larger learning rate and damping? (small network)",
        "at a larger rate and damping Adam matches SGD",
    ),
    Highlight(
        "damping/rates", "Does KFAC, as published, fail to train with a damping of near zero? (small network)",
        "with a damping of near zero the network does not train",
    ),
    Highlight(
        "damping/noise", "Does the noise of a batch Hessian follow a semicircle? (994 parameters)",
        "eigenvalues of X follow a semicircle: their kurtosis, after training",
    ),
)  # fmt: skip
