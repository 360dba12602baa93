"""A grid of rates and dampings: which settings are compared, and claims from rows that are made up."""

from collections.abc import Iterable

import pytest

from ritz.papers import damping_rates, damping_rates_claims
from ritz.papers.damping_cifar import Arm
from ritz.papers.damping_cifar_runs import Runs
from ritz.papers.damping_rates import ADAM, ARMS, DAMPED, FROM_ZERO, LEARNED, SGD, TRAINS, recipe
from ritz.papers.experiment import Setting

SEEDS = 6


def rows(
    arm: Arm, train: float, test: float, *, val: float | None = None, state: str = "trained", early: float = 0.5
) -> list[dict[str, object]]:
    """A run for each seed that ends near these accuracies, and has a share `early` of them half-way."""
    val = test if val is None else val
    ends = {"train": train, "val": val, "test": test}
    return [
        {
            "arm": arm.label, "seed": seed, "state": state, "steps": 1600, "epoch": [20, 40], "images": 5000,
            "train_loss": [4.0, 3.0], **{
                f"{name}_accuracy": [early * (end + 0.01 * seed), end + 0.01 * seed] for name, end in ends.items()
            },
        }
        for seed in range(SEEDS)
    ]  # fmt: skip


def judged(*groups: Iterable[dict[str, object]]) -> dict[str, object]:
    """Claims by their text up to the names of the settings."""
    found = damping_rates_claims.claims([row for group in groups for row in group])
    return {claim.text.split(":")[0].split(" (")[0]: claim for claim in found}


USUAL = (*rows(ADAM[2], 40, 14), *rows(ADAM[3], 60, 13), *rows(ADAM[4], 20, 8))  # 0.003 fits best
BEST = rows(SGD[2], 80, 16)


def at(arms: Iterable[Arm], rate: float, damping: float) -> Arm:
    return next(arm for arm in arms if (arm.lr, arm.damping) == (rate, damping))


@pytest.mark.parametrize(("tests", "verdict"), [((12, 13, 14), "holds"), ((14, 13, 12), "refuted")])
def test_a_larger_rate_that_fits_less_well_generalises_better_or_does_not(tests, verdict):
    found = judged(*(rows(arm, train, test) for arm, train, test in zip(SGD[1:4], (20, 80, 40), tests, strict=True)))
    claim = found["larger rates of SGD, where they optimise less well, generalise better"]
    assert claim.text.endswith("SGD 0.03 - SGD 0.01")
    assert (claim.verdict, claim.ours) == (verdict, False)
    ranks = found["larger rates of SGD generalise better"]
    assert (ranks.verdict, ranks.ours) == (verdict, True)
    assert float(ranks.measured.value) == (1.0 if verdict == "holds" else -1.0)


def test_rates_at_which_a_run_is_lost_are_not_compared_but_named():
    lost = rows(SGD[3], 1, 1, state="lost")
    found = judged(*(rows(arm, 90 - 10 * place, 12 + place) for place, arm in enumerate(SGD[:3])), lost)
    claim = found["larger rates of SGD generalise better"]
    assert claim.verdict == "holds"
    assert "SGD 0.03: 1.0 and 1.0 %, 6 lost" in claim.evidence
    assert judged(rows(SGD[2], 80, 14), lost) == {}


def test_the_usual_setting_is_the_one_that_fits_best_and_not_the_last_that_trains():
    assert damping_rates_claims.fitted(Runs(list(USUAL)), ADAM) == ADAM[3]
    assert damping_rates_claims.fitted(Runs(rows(ADAM[3], 60, 13, state="lost")), ADAM) is None


def test_the_best_setting_is_chosen_on_validation_images_and_compared_on_test_images():
    helps, flatters = at(DAMPED, 3e-3, 1e-3), at(DAMPED, 3e-3, 0.01)
    most = rows(at(DAMPED, 3e-3, 0.1), 50, 11)
    found = judged(BEST, USUAL, rows(helps, 65, 15, val=12), rows(flatters, 65, 14, val=15), most)
    claim = found["at the same rate more damping helps"]
    assert claim.text.endswith("Adam 0.003, flat 0.01 - Adam 0.003, flat 1e-08")
    assert claim.verdict == "holds"
    assert float(claim.measured.value) == pytest.approx(1.0)
    assert found["over-damping harms"].verdict == "holds"
    assert found["Adam under-performs SGD"].verdict == "holds"


def test_adam_at_the_rate_that_generalises_best_is_a_question_of_ours():
    found = judged(BEST, USUAL)  # at 0.001 it has 14 %
    text = "Adam under-performs SGD at the rate that generalises best, too"
    assert found[text].text.endswith("SGD 0.01 - Adam 0.001, flat 1e-08")
    assert (found[text].verdict, found[text].ours) == ("holds", True)
    assert text not in judged(BEST, rows(ADAM[2], 40, 12), rows(ADAM[3], 60, 13))


def test_where_no_damping_helps_it_is_refuted_and_the_largest_one_may_be_the_best():
    dampings = [rows(arm, 50, 9 + place) for place, arm in enumerate(a for a in DAMPED if a.lr == 3e-3)]
    found = judged(BEST, USUAL, *dampings)
    assert found["at the same rate more damping helps"].verdict == "refuted"
    assert "over-damping harms" not in found  # the best is the largest


@pytest.mark.parametrize(("ahead", "verdict"), [(8, "holds"), (4, "not decidable"), (0, "refuted")])
def test_settings_that_fit_less_well_than_the_usual_one_are_counted_where_they_left_chance(ahead, verdict):
    beyond = [arm for arm in DAMPED if arm.lr > 3e-3][:8]
    poor = [rows(arm, 30, 15 if place < ahead else 9) for place, arm in enumerate(beyond)]
    dead = rows(at(DAMPED, 0.1, 0.1), 1, 1, state="lost")
    better = rows(at(DAMPED, 0.1, 0.01), 90, 20)  # fits better: not one of them
    claim = judged(BEST, USUAL, *poor, dead, better)["at larger rates, many settings that optimise less well than the "
        "usual one generalise better, read as at least half of them"]  # fmt: skip
    assert claim.evidence.startswith(f"{ahead} of 9 that left chance")  # with Adam 0.01 at its usual eps
    assert claim.verdict == verdict  # 8 of 9 is from 0.52 on, by Clopper and Pearson


def test_learned_damping_of_adam_beside_the_usual_setting_sgd_and_flat_dampings():
    flat, small, learned = at(DAMPED, 0.01, 0.01), at(DAMPED, 3e-3, 1e-3), at(LEARNED, 0.01, 0.01)
    others = (BEST, USUAL, rows(flat, 75, 15), rows(small, 65, 15))
    paper = judged(*others, rows(learned, 70, 14, early=0.9))
    texts = (
        "a larger rate with learned damping generalises better than the usual setting",
        "a larger rate with learned damping converges faster than the usual setting",
        "a larger rate with learned damping does not make up the gap with SGD",
        "learned damping is no better than a larger rate with a larger flat damping",
        "learned damping with linear decay does not supersede a smaller rate with flat damping",
        "learned damping with linear decay trains better than a smaller rate with flat damping",
    )
    assert {text: paper[text].verdict for text in texts} == dict.fromkeys(texts, "holds")
    assert paper[
        "learned damping with linear decay does not supersede a smaller rate with flat damping"
    ].where.startswith("figure 15")
    behind = judged(*others, rows(learned, 10, 12, early=0.1))
    assert [behind[texts[place]].verdict for place in (0, 1, 5)] == ["refuted"] * 3
    ahead = judged(*others, rows(learned, 90, 30))
    assert [ahead[text].verdict for text in texts[2:5]] == ["refuted"] * 3


@pytest.mark.parametrize(("state", "verdict"), [("lost", "holds in direction"), ("trained", "refuted")])
def test_a_damping_of_near_zero_trains_or_does_not_and_only_the_published_code_is_the_papers(state, verdict):
    flat, learned, own, _ = FROM_ZERO
    found = judged(*(rows(arm, 30, 10, state=state) for arm in (flat, learned, own)), rows(TRAINS, 80, 12))
    claims = [claim for text, claim in found.items() if "near zero" in text]
    assert [claim.verdict for claim in claims] == [verdict] * 2
    every = damping_rates_claims.claims([row for arm in (flat, learned, own) for row in rows(arm, 30, 10, state=state)])
    assert [claim.ours for claim in every] == [False, False, True]


def test_nothing_is_said_of_what_was_not_run():
    assert damping_rates_claims.claims([]) == []
    assert set(judged(BEST, USUAL)) == {
        "Adam under-performs SGD",
        "Adam under-performs SGD at the rate that generalises best, too",
        "at larger rates, many settings that optimise less well than the usual one generalise better, read as at "
        "least half of them",
        "at a larger rate and damping Adam matches SGD or beats it",
        "at a larger rate and damping Adam converges faster",
    }


def test_all_arms_differ_and_are_trained_as_vgg_16_is_but_for_network_and_images():
    labels = [arm.label for arm in ARMS]
    assert len(set(labels)) == len(labels) == 44
    made = [recipe(arm, 0, Setting("short")) for arm in ARMS]
    assert {(one.epochs, one.batch_size, one.schedule_by, one.augment) for one in made} == {(40, 128, "step", None)}
    assert {sum(p.numel() for p in one.model().parameters()) for one in made} == {21_836}
    assert [one.damping is not None for one in made] == [arm.learned for arm in ARMS]


def test_the_figure_has_every_setting_of_adam():
    pytest.importorskip("matplotlib")
    some = [*BEST, *USUAL, *rows(at(DAMPED, 0.01, 0.01), 75, 15), *rows(LEARNED[2], 70, 14, state="lost")]
    drawing = damping_rates_claims.figure(some)
    cells = [text.get_text() for text in drawing.axes[1].texts]
    assert cells == ["14.0", "13.0", "8.0", "15.0", "1.0 x"]
    assert [label.get_text() for label in drawing.axes[1].get_yticklabels()] == ["1e-08", "0.01", "from 0.001"]


def test_smoke_has_arms_of_every_kind():
    kinds = {(arm.method, arm.learned, arm.code) for arm in damping_rates.SMOKE}
    assert kinds == {
        ("SGD", False, False), ("Adam", False, False), ("Adam", True, False), ("KFAC", False, False),
        ("KFAC", False, True),
    }  # fmt: skip
