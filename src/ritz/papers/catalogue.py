"""All experiments that the papers show, table by table and figure by figure: by what they are run here, or why not."""

from dataclasses import dataclass

NO_IMAGENET = "ImageNet was not available, and is out of reach of one accelerator"
NO_CIFAR10 = "CIFAR-10 was not available"
NO_MIDDLE = "at this size they were trained at weight decays 0 and 5e-4 alone; smaller ones were trained at all three"
NO_L2 = "no adaptive method was trained with L2 regularisation; docs/theory.md has how the two differ in a step"
QUOTED = "quoted without numbers: they are no experiments of this paper"


@dataclass(frozen=True)
class Shown:
    """A table, a figure or a statement that was measured.

    Attributes:
        id: Within the paper.
        paper: As an experiment has it.
        where: In the seeds.
        what: Is shown there.
        items: The experiments that are about it, "PAPER/ITEM".
        reason: Why there is none.
    """

    id: str
    paper: str
    where: str
    what: str
    items: tuple[str, ...] = ()
    reason: str = ""


def _rows(paper: str, *rows: tuple[str, str, str, str | tuple[str, ...], str]) -> tuple[Shown, ...]:
    """(id, where, what, items, reason), an item without its paper where it is of the same one."""
    found = []
    for name, where, what, items, reason in rows:
        given = (items,) if isinstance(items, str) else items
        full = tuple(item if "/" in item else f"{paper}/{item}" for item in given if item)
        found.append(Shown(name, paper, where, what, full, reason))
    return tuple(found)


CATALOGUE: tuple[Shown, ...] = (
    *_rows(
        "false-friend",
        ("A1", "seed 000, figure 1", "spectra of softmax regression on MNIST at three weight decays", "softmax", ""),
        ("A1, T = 50", "seed 000, appendix A.2", "softmax regression on MNIST, trained for 50 epochs", "softmax", ""),
        ("A2", "seed 000, figure 2; seed 001, figure 3", "spectra of the MLP on MNIST", "mlp", ""),
        ("A3", "seed 000, figure 3; seed 001, figure 4", "spectra of All-CNN-C on CIFAR-100", "allcnn", ""),
        ("A4", "seed 000, figure 4; seed 001, figure 5", "spectra of PreResNet-164 on CIFAR-100",
         ("preresnet", "preresnet-published"), ""),
        ("A5", "seed 000, figure 5; seed 001, figure 6", "spectra of WideResNet-28-10 on CIFAR-100",
         ("wideresnet", "wideresnet-published"), ""),
        ("A4, A5, 1e-4", "seed 000, section 4, figures 4 and 5", "at weight decay 1e-4, in training and beyond it: "
         "PreResNet-164 with 99.985 and 75.56 %, WideResNet-28-10 with 99.984 and 79.5 %", "", NO_MIDDLE),
        ("A6", "seed 000, figure 8", "the same with BatchNorm in evaluation mode",
         ("wideresnet", "wideresnet-published"), ""),
        ("A7", "seed 000, figure 6", "VGG-16-BN on CIFAR-100: SGD against Gadam", "vgg-gadam", ""),
        ("A8", "seed 000, figure 7", "VGG-16-BN on CIFAR-10: SGD against Gadam; accuracy 94.3 % "
         "by SGD, \"Frobenius norm\" 1.43e-5 by SGD and 1.55e-3 by Gadam", "",
         f"{NO_CIFAR10}; the same question is answered on CIFAR-100"),
        ("App A", "seed 000, appendix A.1; seed 001, appendix C.1", "a search for the weight decay finds a trade-off "
         "between the speed of convergence and final performance", "",
         "nothing was searched for: weight decays are those that the paper chose"),
        ("Sec 1, quoted", "seed 000, section 1", "findings of other papers: random labels make small networks less "
         "sharp, the largest trace of the Fisher matrix goes with generalisation, L2 regularisation removes singular "
         "modes", "", QUOTED),
        ("S4", "seed 000, section 4", "bounds on lambda_1 for stable gradient descent and SGD", "stability", ""),
        ("Th2", "seed 000, theorem 2", "how many steps Lanczos needs for lambda_1", "stability", ""),
    ),
    *_rows(
        "pac-bayes",
        ("T1", "table 1", "the metric and its parts, MLP on MNIST", "mlp", ""),
        ("T2, T3", "tables 2 and 3", "the metric and its parts, All-CNN-C on CIFAR-100", "allcnn", ""),
        ("T4", "table 4", "the metric and its parts, PreResNet-164 on CIFAR-100",
         ("preresnet", "preresnet-published"), ""),
        ("T5, T6", "tables 5 and 6", "the metric and its parts, WideResNet-28-10 on CIFAR-100",
         ("wideresnet", "wideresnet-published"), ""),
        ("T4, T5, 1e-4", "tables 4 and 5", "the rows of PreResNet-164 (24.4, 1.16, 6.7e-4, 6e-4, 11.49, 36.9) and "
         "WideResNet-28-10 (20.68, 0.85, 6.7e-5, 1.3e-4, 39.13, 21.9) at weight decay 1e-4", "", NO_MIDDLE),
        ("g", "section 5, table 6", "the metric g of equation 9 falls with the gap", "",
         "no value of g is printed, and its log |H| is minus infinity where H has an eigenvalue 0: what is added to H "
         "decides it, and the rows here have moments and not log-determinants"),
        ("F1", "figure 1", "spectra of WideResNet-28-10", ("wideresnet", "false-friend/wideresnet"), ""),
        ("F1c", "figure 1c", "the norm of the weights beside the test error, here for the MLP", "weight-norms", ""),
        ("B1", "figure 2", "traces of H, G, H^2, G^2 from a batch and from all images", "subsampling", ""),
        ("S4.2", "section 4.2", "the log-determinant from a sub-sample", "subsampling", ""),
        ("B2", "table 7", "a trace penalty on WideResNet-28-10, CIFAR-100", "penalty", ""),
        ("B3", "table 8", "a trace penalty on WideResNet-28-10, ImageNet-32: 80.95 and 62.66 % in training and "
         "validation with it, 81.05 and 62.89 % without", "",
         f"{NO_IMAGENET}; the sign of the printed difference is judged in `penalty`"),
        ("S4.1", "section 4.1", "decoupled weight decay in Adam generalises better than a prior of lower entropy", "",
         NO_L2),
        ("S6", "section 6", "Tr H instead of Tr G as the penalty, and grids of decay and eta, here for the MLP",
         "penalty-grid", ""),
        ("S6, Tr H", "section 6", "WideResNet trained on Tr H: diverges on CIFAR-10, is around 10 % on CIFAR-100", "",
         f"{NO_CIFAR10}, and it was not run on CIFAR-100; `penalty-grid` trains the MLP on Tr H"),
        ("S6, grids", "section 6", "of grids for WideResNet-28-10 on CIFAR-100 the best are rate 0.1, decay 5e-4 and "
         "eta 1e-4; a linear schedule outperforms one in steps", "",
         "it was trained at these values and by the linear schedule alone; `penalty-grid` has grids of decay and eta "
         "for the MLP"),
    ),
    *_rows(
        "margins",
        ("C1", "figure 2", "ACEHT against Hessian traces of an affine predictor", "affine", ""),
        ("C2", "figure 3", "ACEHT and margins against Hessian traces, LeNet on MNIST along training", "lenet", ""),
        ("C2, others", "section 3.2.1, appendix B", "the same correlations at other hyper-parameters", "",
         "the paper does not say which; batches of 256 and 4096 are C3"),
        ("C3", "appendix B.1", "the network F1 with BatchNorm on MNIST, batches of 256 and 4096",
         ("batches", "f1-small", "f1-large"), ""),
        ("C4", "appendix B.2", "fully connected networks with BatchNorm on CIFAR-10", "", NO_CIFAR10),
        ("C5", "table 1, figure 4", "small against large batches: flatness, test error, margins", "batches", ""),
        ("C5, numbers", "table 1, figure 4c", "accuracies, losses and traces of both methods, skewness of both "
         "distributions", "", "the numbers are not in the text that we have; what it says of them is judged in "
         "`batches`"),
        ("C5, path", "sections 4 and 4.2", "small and large batches end in one basin of attraction; at every step a "
         "small batch advances further", "", "the first is quoted from other papers; the rows of `batches` have no "
         "weights and no distances along training"),
        ("C5, softmax", "section 4.1", "towards the end of training all softmax margins are close to 1", "batches", ""),
        ("C6", "section 5", "T_alpha makes traces vanish", "scaling", ""),
        ("C7", "section 3.2.1", "the time that Hessian traces and margins take", "timing", ""),
        ("C8", "section 6", "outliers of the spectrum and the number of classes", "classes", ""),
    ),
    *_rows(
        "damping",
        ("T1", "table 1", "lambda_1 and accuracy of Adam and KFAC at several dampings", "table1", ""),
        ("T2", "table 2, CIFAR-100", "accuracy of SGD, Adam with damping, and Adam, over seeds", "table2", ""),
        ("T2, ImageNet", "table 2, ImageNet", "the same for ResNet-50: 75.7 % by SGD, 76.6 % by AdamW with damping, "
         "74.04 % by AdamW", "", f"{NO_IMAGENET}; what the printed numbers show is judged in `table2`"),
        ("Sec 3, quoted", "sections 1 and 3", "findings of other papers: second-order methods have a gap too, larger "
         "rates find lower spectral norms and learn other patterns", "", QUOTED),
        ("Sec 3.2", "section 3.2", "for adaptive methods weight decay strongly outperforms L2 regularisation", "",
         NO_L2),
        ("Fig 1a", "figure 1a", "SGD against adaptive methods, VGG-16 on CIFAR-100", "table2", ""),
        ("Fig 1b", "figure 1b; section 7.2", "SGD: larger rates optimise less well and generalise better, here for a "
         "small network", "rates", ""),
        ("Fig 2", "figure 2", "spectra of VGG-16 after SGD and Adam, by its caption on CIFAR-10, by the text on "
         "CIFAR-100", "figure2", ""),
        ("Fig 4-6", "figures 4 to 6", "LanczosOPT on softmax regression: damping and sharp directions", "logistic", ""),
        ("Fig 7", "figure 7", "KFAC at several rates and dampings, VGG-16 on CIFAR-100", "table1", ""),
        ("Fig 8", "figure 8", "Adam at several rates and dampings, VGG-16 on CIFAR-100", "table1", ""),
        ("Sec 6.3", "section 6.3", "Adam at larger rates and dampings against its default and SGD; dampings too low "
         "for a rate still do better on test images, here for a small network", "rates", ""),
        ("Sec 6.3, VGG", "section 6.3", "of VGG-16, 0.0004 is the largest rate of Adam at its default damping, and "
         "0.01 the best of SGD", "", "VGG-16 was not trained on a grid of rates"),
        ("Sec 6.2", "section 6.2", "weight decay and BatchNorm hide what rate and damping do", "",
         "VGG-16 was not trained with and without them on a grid of rates and dampings"),
        ("Sec 6.3, 0.0075", "figure 8", "at damping 0.0075 Adam matches SGD or beats it", "",
         "`table1` has the 0.008 of table 1, without SGD beside it; `table2` compares 0.005 with SGD"),
        ("Fig 9", "figure 9", "AdamW at two dampings, VGG-16-BN on CIFAR-100", "figure9", ""),
        ("Fig 10", "figure 10", "AdamW at two dampings, ResNet-50", "", NO_IMAGENET),
        ("Fig 11", "figure 11", "KFAC at rate 1e-4, learned and flat damping", "figure11", ""),
        ("Fig 12", "figure 12", "KFAC at rate 1e-3, learned and flat damping",
         ("figure12", "figure12-dropout", "figure12-low", "figure12-code"), ""),
        ("Fig 13", "figure 13", "KFAC at rate 1e-4 from a large damping, and how the damping changes", "figure13", ""),
        ("Fig 14, 15", "figures 14 and 15", "Adam with learned damping and a rising rate", "figure14", ""),
        ("Fig 14, 15, rates", "section 7.3", "learned damping for Adam at a larger rate: better than Adam as it comes, "
         "not than SGD, nor than a larger flat damping; with linear decay no better than a smaller rate; here for a "
         "small network", "rates", ""),
        ("Fig 14, 15, early", "section 7.3", "the rising rate makes training slightly unstable early", "",
         "the runs of `figure14` have six epochs and one training loss for each, too few to see it"),
        ("Sec 7, average", "section 7.1, footnote", "a coefficient above 0.7 may make learned damping more stable", "",
         "learned damping was run with 0.7 alone"),
        ("Sec 7, start", "section 7.1", "with a damping of near zero the network does not train, here for a small "
         "network", "rates", ""),
        ("Sec 7, rules", "section 7.1",
         "Levenberg-Marquardt damping; the estimate from 79 batches, here for a small network", "rules", ""),
        ("Sec 8", "section 8", "the largest stable learning rates", "stable", ""),
        ("Th4", "lemmas 2 and 3, theorem 4", "the noise of batch Hessians: semicircle, 1/B, normality", "noise", ""),
        ("Sec 7", "section 7.1", "the noise at initial weights; damping learned every 10 or 100 steps", "noise", ""),
    ),
)  # fmt: skip
