"""Rates and dampings on a grid: figure 1b and sections 6.3, 7.1 and 7.3 of seed 004, on a network that a CPU trains.

The paper trains VGG-16 on CIFAR-100 for 300 epochs at rates and dampings that it searched for "in near factors of 3",
and shows some of them. What it says of the others needs the grid: that larger rates of SGD optimise less well and
generalise better; that at the largest rate at which Adam trains with its usual eps more damping helps, and too much
harms; that at larger rates many runs with too little damping, though unstable, do better on test images; that learned
damping for Adam is no better than a larger flat one; and that nothing is learned from a damping of near zero.

Here a stand-in, that of `damping_rules` with 21,836 parameters on images of 16 x 16, is trained on 5,000 images of
CIFAR-100 for 40 epochs, without augmentation, in which the best settings fit four fifths of them: what is said here
holds of it, and the paper's own rates do not. Batches of 128, momentum, the schedule of equation 12, learned damping
(every 100 steps from 8 batches) and KFAC are those of `damping_cifar`; runs of a seed share their start and their
batches.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from .cifar_spectra import load_data
from .damping_cifar import Arm, finish, plain
from .damping_cifar import recipe as recipe_of
from .damping_rules import CHANNELS, network
from .experiment import Progress, Rows, Setting
from .pool import train_all
from .recipe import Recipe

EPOCHS = (1, 40, 100)
IMAGES = (32, 5000, 45_000)
TINY = (2, 2, 2)  # channels at smoke

SGD_RATES = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
USUAL_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1)  # of Adam with its usual eps
DAMPED_RATES = (1e-3, 3e-3, 0.01, 0.03, 0.1)
USUAL, DAMPINGS = 1e-8, (1e-4, 1e-3, 0.01, 0.1)
STARTS = (1e-3, 0.01)  # of learned dampings
NEAR_ZERO = 1e-8

SGD = tuple(Arm("SGD", rate, epochs=EPOCHS) for rate in SGD_RATES)
ADAM = tuple(Arm("Adam", rate, USUAL, epochs=EPOCHS) for rate in USUAL_RATES)
DAMPED = tuple(Arm("Adam", rate, eps, epochs=EPOCHS) for rate in DAMPED_RATES for eps in DAMPINGS)
LEARNED = tuple(Arm("Adam", rate, eps, learned=True, epochs=EPOCHS) for rate in DAMPED_RATES[1:4] for eps in STARTS)
TRAINS = Arm("KFAC", 1e-3, 0.03, epochs=EPOCHS)
FROM_ZERO = tuple(
    replace(TRAINS, damping=NEAR_ZERO, learned=learned, code=code)
    for code in (True, False) for learned in (False, True)
)  # fmt: skip
ARMS = (*SGD, *ADAM, *DAMPED, *LEARNED, TRAINS, *FROM_ZERO)
SMOKE = (*SGD[1:3], *ADAM[2:4], DAMPED[5], DAMPED[9], LEARNED[2], TRAINS, FROM_ZERO[0])


def recipe(arm: Arm, seed: int, setting: Setting) -> Recipe:
    """How an arm is trained at a budget: as VGG-16 is, but for the network and its images.

    Example:
        >>> made = recipe(LEARNED[0], seed=1, setting=Setting("short"))
        >>> made.name, made.epochs, made.augment, made.damping.keywords["every"]
        ('Adam 0.003, learned from 0.001', 40, None, 100)
    """
    channels = TINY if setting.budget == "smoke" else CHANNELS
    return replace(recipe_of(arm, seed, setting), model=partial(network, channels), augment=None)


def study(setting: Setting, progress: Progress) -> Rows:
    """Every arm for every seed, seed by seed; one row for each run begun in time."""
    data = load_data("vgg16", setting)
    most = setting.pick(*IMAGES)
    data["train"] = data["train"][0][:most], data["train"][1][:most]
    arms: Sequence[Arm] = SMOKE if setting.budget == "smoke" else ARMS
    each = {
        f"{arm.label}, seed {seed}": (arm, recipe(arm, seed, setting))
        for seed in setting.seed_range(2, 6, 6) for arm in arms  # as few as tell, by their share, what fails mostly
    }  # fmt: skip
    done = train_all(
        {name: made for name, (_, made) in each.items()}, data, setting, item=f"damping-rates-{setting.budget}",
        finish=finish, progress=progress, cut=True, checkpoint_every=setting.pick(1, 10, 10),
        evaluate_every=setting.pick(1, 5, 10), train_subset=5000,
    )  # fmt: skip
    return [plain(each[name][0], run) | {"images": len(data["train"][0])} for name, run in done.items()]
