"""The networks on CIFAR-100: what is said of the rows, and what is drawn of them."""

import math

import pytest

from ritz.papers import cifar_spectra_claims as judgement
from ritz.papers import cifar_spectra_numbers as counted
from ritz.papers.cifar_spectra_figure import figure


def printed_rows(network, factor=1.0, published=True, seeds=3, epochs=300, accuracy=1.0):
    """Rows that have every printed number, each seed a little off.

    `factor` is put on the curvature at decay 5e-4, `accuracy` on that of the sets held out; equation 7 falls.
    """
    rows = []
    for seed in range(seeds):
        for at, decay in enumerate(counted.WEIGHT_DECAYS):
            row = {
                "network": network, "title": network, "published": published, "arm": counted.decay_arm(decay),
                "weight_decay": decay, "seed": seed, "epochs": epochs, "parameters": 10, "images": 45_000,
                "lanczos_steps": 2, "probes": 2, "precision": "float32", "eval": {}, "train": {},
            }  # fmt: skip
            off, last = 1 + 1e-5 * (seed - 1), decay == 5e-4
            for line in reversed(counted.PRINTED[network]):
                number = (line.numbers[at] or 1.0) * off
                if line.key not in counted.CURVATURE:
                    row[line.key] = number
                    continue
                for mode in (line.mode,) if line.mode else ("eval", "train"):
                    if line.mode or mode == "train" or network != "wideresnet":
                        row[mode][line.key] = [number * (factor if last else 1.0)] * 3
            if network == "wideresnet":  # figure 8
                row["eval"] |= {"lambda_max": [[1, 2, 1000][at]] * 3, "trace_per_param": [1.0 + last] * 3}
                row["eval"]["frobenius_norm"] = [5e6 if last else 1.0] * 3
            elif network == "preresnet":
                row["eval"]["lambda_max"] = [[10, 20, 1000][at]] * 3
            for mode in ("eval", "train"):
                row[mode]["metric_a_eq7"] = [[30.0, 20.0, 10.0][at] * off] * 3
            row |= {f"{name}_accuracy": counted.ACCURACY[network][at] * off for name in counted.HELD_OUT}
            row |= {f"{name}_accuracy": accuracy * row[f"{name}_accuracy"] for name in counted.HELD_OUT if last}
            row["weight_norm"] = 2 * row["metric_a"]
            row["train_loss"] = 0.1 * (1 + at)  # slower with weight decay
            if network == "allcnn":
                del row["train"]
            rows.append(row)
    return rows


@pytest.mark.parametrize("network", list(counted.PRINTED))
def test_rows_with_the_printed_numbers_bear_out_every_claim(network):
    claims = judgement.decay_claims(printed_rows(network))
    wrong = [(claim.text, claim.verdict) for claim in claims if claim.verdict != "holds"]
    assert not wrong
    printed = sum(x is not None for line in counted.PRINTED[network] for x in line.numbers)
    assert len(claims) > printed


def test_a_smaller_rise_holds_in_direction_and_a_fall_is_refuted():
    where = (
        "seed 000",
        "figure 3, with the numbers of seed 002, table 2",
        "lambda_1 from weight decay 0 to 0.0005: ratio",
    )

    def verdict(factor):
        claims = judgement.decay_claims(printed_rows("allcnn", factor, published=False))
        return next(claim.verdict for claim in claims if (claim.paper, claim.where, claim.text) == where)

    assert [verdict(factor) for factor in (1.0, 0.5, 0.2)] == ["holds", "holds in direction", "refuted"]


@pytest.mark.parametrize("network", list(counted.PRINTED))
def test_that_a_network_generalises_better_is_judged_as_well_as_that_it_is_sharper(network):
    def verdicts(**settings):
        claims = judgement.decay_claims(printed_rows(network, published=False, **settings))
        own = [
            claim for claim in claims if claim.paper == "seed 000" and " from weight decay 0 to 0.0005" in claim.text
        ]
        return [
            next(claim.verdict for claim in own if claim.text.startswith(start))
            for start in ("lambda_1 from", "accuracy on the last", "accuracy on the test", "|w|")
        ]

    assert verdicts() == ["holds"] * 4
    assert verdicts(factor=0.01) == ["refuted", "holds", "holds", "holds"]
    assert verdicts(accuracy=0.8) == ["holds", "refuted", "refuted", "holds"]


def test_every_step_of_weight_decay_is_judged_and_equation_7_by_its_direction_alone():
    rows = printed_rows("preresnet", published=False)
    for row in rows:
        row["train"]["metric_a_eq7"] = [30.0 if row["weight_decay"] != 1e-4 else 10.0] * 3
    found = {claim.text: claim for claim in judgement.decay_claims(rows) if claim.where == "equation 7, table 4"}
    steps = ("0 to 0.0001", "0.0001 to 0.0005", "0 to 0.0005")
    texts = [f"a = Tr H + |w|^2 / 2 from weight decay {step}: ratio" for step in steps]
    assert [found[text].verdict for text in texts] == ["holds", "refuted", "holds"]
    assert {claim.expected for claim in found.values()} == {1.0}


@pytest.mark.parametrize(("ratio", "ends"), [(0.1379, (0.084, 0.192)), (23.67, (10.73, 36.61))])
def test_a_printed_ratio_is_met_within_a_quarter_of_its_logarithm(ratio, ends):
    about = judgement.times(ratio)
    found = (about["expected"] - about["tolerance"], about["expected"] + about["tolerance"])
    assert found == pytest.approx(ends, rel=0.01)
    assert all(0.75 <= math.log(end) / math.log(ratio) <= 1.2501 for end in found)


@pytest.mark.parametrize(("upper", "verdict"), [(1.0, "holds"), (1.9, "holds in direction"), (3.0, "not decidable")])
def test_what_lambda_1_leaves_open_is_in_the_interval_over_seeds(upper, verdict):
    rows = printed_rows("allcnn", published=False)
    for row in rows:
        value = row["eval"]["lambda_max"][0]
        row["eval"]["lambda_max"] = [value, value, upper * value]
    text = "lambda_1 from weight decay 0 to 0.0005: ratio"
    claim = next(claim for claim in judgement.decay_claims(rows) if claim.text == text)
    assert claim.verdict == verdict
    assert claim.measured.value == pytest.approx(130 / 49)
    assert (f"lambda_1 is open upwards by {100 * (upper - 1):.0f} %, by the spread" in claim.evidence) == (upper > 1)


def test_evidence_says_that_networks_were_trained_in_bfloat16():
    rows = printed_rows("allcnn")
    assert not any("bfloat16" in claim.evidence for claim in judgement.decay_claims(rows))
    fast = [row | {"trained_in": "bfloat16", "train_images": 16} for row in rows]
    assert " epochs in bfloat16, training accuracy from " in judgement.decay_claims(fast)[0].evidence
    for given, number in ((rows, "45,000"), (fast, "16")):  # rows from before they said so are of 45,000
        assert f" % of {number} images (the paper names no number)" in judgement.decay_claims(given)[0].evidence


def test_evidence_says_which_curvature_is_in_tf32():
    rows = printed_rows("allcnn", published=False)
    del rows[0]["precision"]  # from before rows said so
    evidence = {claim.text: claim.evidence for claim in judgement.decay_claims(rows)}
    assert ", in TF32" in evidence["lambda_1 from weight decay 0 to 0.0005: ratio"]
    assert "TF32" not in evidence["lambda_1 from weight decay 0.0001 to 0.0005: ratio"]
    assert "TF32" not in evidence["|w| from weight decay 0 to 0.0005: ratio"]


def test_the_frobenius_norm_of_the_text_is_judged_on_both_readings():
    claims = judgement.decay_claims(printed_rows("wideresnet"))
    found = [claim for claim in claims if claim.where == "figure 8" and "from weight decay" in claim.text]
    assert [(claim.text.partition(" in ")[0], claim.ours) for claim in found] == [
        ("lambda_1", False), ("Tr H^2 / P", False), ("|H|_F", True)
    ]  # fmt: skip
    assert all('"Frobenius norm"' in claim.evidence for claim in found[1:])


def test_a_figure_is_named_for_what_stands_in_it():
    # figures are spectra and accuracies stand in the text, but for that of figure 3c and the norms beside figure 8
    figures = {(line.where, line.key) for lines in counted.PRINTED.values() for line in lines if "figure" in line.where}
    assert figures == {("figure 3", "val_accuracy"), ("figure 3", "test_accuracy"), ("figure 8", "moment2_per_param")}


def test_a_printed_number_is_refuted_by_the_whole_training_alone():
    for epochs, verdict in ((10, "not decidable"), (300, "refuted")):
        rows = [{**row, "train_accuracy": 30.0} for row in printed_rows("allcnn", epochs=epochs)]
        claims = {claim.text: claim for claim in judgement.decay_claims(rows)}
        assert claims["training accuracy at weight decay 0"].verdict == verdict


def short_rows(rise=2.0, spread=0.0, eval_mode=100.0, better=10.0):
    """One seed of the published WideResNet at two weight decays, four epochs.

    lambda_1 is within +- spread of itself, and accuracies are `better` by so many points with weight decay.
    """
    rows = [row for row in printed_rows("wideresnet", seeds=1, epochs=4) if row["weight_decay"] != 1e-4]
    for row in rows:
        decay = row["weight_decay"] > 0
        row |= {"weight_norm": 70.0 - 20.0 * decay, "images": 1280, "lanczos_steps": 30, "probes": 1}
        row |= {f"{name}_accuracy": 40.0 + better * decay for name in ("val", "test")}
        row |= {f"gap_error_{name}": 20.0 - better * decay for name in ("val", "test")}
        for mode, value in (("train", 5.0), ("eval", eval_mode)):
            value *= rise if decay else 1.0
            row[mode]["lambda_max"] = [value, value * (1 - spread), value * (1 + spread)]
    return rows


def test_four_epochs_and_one_seed_decide_no_printed_number_and_have_no_effect():
    claims = [claim for claim in judgement.decay_claims(short_rows()) if "one network each" not in claim.text]
    decided = [claim for claim in claims if claim.verdict != "not decidable"]
    assert [claim.where for claim in decided] == ["annex, figure 8"]
    assert "30 steps from 1 vector, BatchNorm in either mode" in decided[0].evidence
    printed = [claim for claim in claims if " at weight decay " in claim.text]
    assert all(claim.short_of.startswith("4 of 300 epochs") for claim in printed)
    assert not [claim.text for claim in claims if "0.0001" in claim.text]  # not run at this budget
    assert not [claim.text for claim in claims if "from weight decay" in claim.text]


@pytest.mark.parametrize(
    ("rise", "spread", "verdict"), [(2.0, 0.04, "holds"), (0.5, 0.04, "refuted"), (1.05, 0.04, "not decidable")]
)
@pytest.mark.parametrize(
    ("better", "generalises"), [(5.0, "holds"), (-5.0, "refuted"), (1.0, "not decidable"), (-1.0, "not decidable")]
)
def test_one_seed_decides_directions_as_far_as_measured_for_sharpness_and_accuracy_alike(
    rise, spread, verdict, better, generalises
):
    claims = judgement.decay_claims(short_rows(rise, spread, better=better))
    found = {(claim.where, claim.text): claim.verdict for claim in claims if "one network each" in claim.text}
    change = "from weight decay 0 to 0.0005, one network each"
    wanted = {
        ("figure 5", f"lambda_1 rises {change}: ratio"): verdict,
        ("figure 8", f"lambda_1 in evaluation mode rises {change}: ratio"): verdict,
        ("section 4", f"|w| falls {change}: ratio"): "holds",
        ("section 5, table 5", f"lambda_1 rises {change}: ratio"): verdict,
        ("section 5, table 5", f"Tr H / P rises {change}: ratio"): "holds",
        ("section 5, table 5", f"Tr H^2 / P rises {change}: ratio"): "holds",
        ("section 5, table 5", f"a = |w| / 2 falls {change}: ratio"): "holds",
        ("equation 7, table 5", f"a = Tr H + |w|^2 / 2 falls {change}: ratio"): "holds",
    }
    for name in ("last 5,000", "test set"):
        wanted["section 4", f"accuracy on the {name} rises {change}: difference"] = generalises
        for where in ("section 4", "section 5, table 5"):
            wanted[where, f"gap in error to the {name} falls {change}: difference"] = generalises
    assert found == wanted


def test_one_seed_refutes_what_goes_the_other_way_in_the_metric_and_in_every_measure_of_sharpness():
    rows = short_rows()
    for row in rows:
        last = row["weight_decay"] > 0
        row["metric_a"] = 30.0 + last
        row["train"] |= {"trace_per_param": [2.0 - last] * 3, "moment2_per_param": [2.0 - last] * 3}
        row["train"]["metric_a_eq7"] = [10.0 + last] * 3
    own = [claim for claim in judgement.decay_claims(rows) if "table 5" in claim.where and "one network" in claim.text]
    assert [claim.verdict for claim in own[:5]] == ["holds", *["refuted"] * 4]


@pytest.mark.parametrize(
    ("network", "named"), [("allcnn", "last 5,000"), ("preresnet", "test set"), ("wideresnet", "last 5,000")]
)
def test_the_held_out_set_that_the_papers_name_is_theirs_and_the_other_is_ours(network, named):
    claims = [claim for claim in judgement.decay_claims(printed_rows(network)) if " to the " in claim.text]
    claims += [claim for claim in judgement.decay_claims(printed_rows(network)) if "accuracy on" in claim.text]
    assert all(claim.ours == (named not in claim.text) for claim in claims)
    assert all(claim.ours == claim.evidence.startswith("the paper names the ") for claim in claims)
    assert len({claim.ours for claim in claims}) == 2


@pytest.mark.parametrize(("network", "gap"), [("allcnn", -1.3), ("preresnet", -4.097), ("wideresnet", -5.402)])
def test_gaps_of_seed_000_are_by_its_own_numbers(network, gap):
    claims = judgement.decay_claims(printed_rows(network))
    text = "gap in error to the last 5,000 from weight decay 0 to 0.0005: difference"
    (own,) = [claim for claim in claims if claim.paper == "seed 000" and claim.text == text]
    assert (own.where, own.expected) == ("section 4", gap)
    assert ("this gap is not printed" in own.evidence) == (network != "allcnn")


def test_an_accuracy_that_is_not_printed_is_said_to_be_derived():
    claims = [claim for claim in judgement.decay_claims(printed_rows("allcnn")) if "accuracy on the last" in claim.text]
    assert ["53.9, which is not printed, is" in claim.evidence for claim in claims] == [False, True]


@pytest.mark.parametrize(("change", "verdict"), [(0.05, "holds"), (-0.5, "refuted")])
def test_training_accuracy_of_wideresnet_is_to_remain_after_the_whole_training(change, verdict):
    for epochs, wanted in ((300, verdict), (8, "not decidable")):
        rows = printed_rows("wideresnet", epochs=epochs)
        for row in rows:
            row["train_accuracy"] = 99.4 + change * (row["weight_decay"] == 5e-4) + row["seed"] / 1000
        text = "training accuracy from weight decay 0 to 0.0005: difference"
        found = [claim for claim in judgement.decay_claims(rows) if claim.text == text]
        assert [(claim.paper, claim.verdict) for claim in found] == [("seed 000", wanted), ("seed 002", wanted)]


def test_training_accuracy_of_preresnet_is_to_fall_at_every_step():
    rows = printed_rows("preresnet", published=False)
    for row in rows:
        row["train_accuracy"] = 90.0 + 1000 * row["weight_decay"]
    found = [claim for claim in judgement.decay_claims(rows) if claim.text.startswith("training accuracy from")]
    assert [(claim.paper, claim.verdict) for claim in found] == 3 * [("seed 000", "refuted"), ("seed 002", "refuted")]


@pytest.mark.parametrize(("network", "ours"), [("preresnet", True), ("wideresnet", False)])
def test_that_modes_differ_is_said_of_wideresnet_alone(network, ours):
    (claim,) = [claim for claim in judgement.decay_claims(printed_rows(network)) if "differs between" in claim.text]
    assert claim.ours == ours


def test_the_mode_of_table_5_is_that_of_the_supplement_and_tables_of_preresnet_have_none():
    for network, table, said in (
        ("wideresnet", "table 5", "seed 001, figure 6"),
        ("preresnet", "table 4", "not say in"),
    ):
        claims = [claim for claim in judgement.decay_claims(printed_rows(network)) if claim.where == table]
        own = [claim for claim in claims if claim.text.startswith("lambda_1 from")]
        assert len(own) == 3
        assert all(said in claim.evidence for claim in own)


@pytest.mark.parametrize(("eval_mode", "verdict"), [(100.0, "holds"), (5.0, "refuted"), (5.6, "not decidable")])
def test_modes_have_different_spectra_where_lambda_1_is_known_to_differ_by_a_tenth(eval_mode, verdict):
    claims = judgement.decay_claims(short_rows(spread=0.04, eval_mode=eval_mode))
    (found,) = [claim for claim in claims if "differs between evaluation and train mode" in claim.text]
    assert found.verdict == verdict
    assert found.evidence.startswith(f"in evaluation and in train mode {eval_mode:.3g} and 5 at decay 0; ")


@pytest.mark.parametrize("network", list(counted.PRINTED))
def test_what_was_not_run_is_not_spoken_of(network):
    rows = printed_rows(network)
    for count in range(len(rows)):
        arms = {row["arm"] for row in rows[:count]}
        texts = [claim.text for claim in judgement.decay_claims(rows[:count])]
        assert bool(texts) == bool(count)
        for decay, words in ((1e-4, ("0.0001",)), (5e-4, ("0.0005", "5e-4"))):
            named = [text for text in texts if any(word in text for word in words)]
            assert bool(named) == (counted.decay_arm(decay) in arms)


def test_a_smaller_network_is_judged_by_orders_alone():
    claims = judgement.decay_claims(printed_rows("wideresnet", published=False))
    assert not [claim.text for claim in claims if " at weight decay 0" in claim.text]
    assert all("a smaller network of the family of" in claim.evidence for claim in claims)


def test_a_diverged_run_is_left_out_and_counted():
    rows = printed_rows("allcnn")
    for key in ("eval", "train_accuracy", "gap_error_val"):
        del rows[0][key]
    claim = judgement.decay_claims(rows)[0]
    assert claim.text == "gap in error to the last 5,000 at weight decay 0"
    assert "1 of 3 runs diverged" in claim.evidence
    assert claim.measured.value == pytest.approx(32.40, rel=1e-4)


def test_where_every_run_diverged_nothing_can_be_said():
    rows = [
        {key: row[key] for key in ("network", "title", "published", "arm", "seed", "epochs")}
        for row in printed_rows("allcnn")
    ]
    assert {claim.verdict for claim in judgement.decay_claims(rows)} == {"not decidable"}


def optimiser_rows(sharper=40.0, squares=200.0):
    rows = []
    for seed in range(3):
        for arm in ("SGD", "Gadam"):
            other = arm == "Gadam"
            rows.append({
                "network": "vgg", "title": "VGG", "published": True, "arm": arm, "seed": seed, "epochs": 300,
                "parameters": 1, "images": 45_000, "lanczos_steps": 1, "probes": 2, "weight_norm": 1.0 + other,
                "train_accuracy": 99.81 if other else 99.64, "test_accuracy": 71.0 + other,
                "val_accuracy": 70.0 + other,
                "eval": {"lambda_max": [300.0 if other else 100.0] * 3}, "train": {
                    "lambda_max": [sharper if other else 1.0] * 3,
                    "moment2_per_param": [1e-4 * (squares if other else 1.0)] * 3,
                    "frobenius_norm": [squares if other else 1.0] * 3,
                },
            })  # fmt: skip
    return rows


def test_gadam_is_judged_by_what_is_printed():
    found = judgement.optimiser_claims(optimiser_rows(35.0))
    verdicts = {claim.text: claim.verdict for claim in found}
    assert set(verdicts.values()) == {"holds"}  # 35 is 30 and 40
    assert {claim.text.partition(",")[0] for claim in found if claim.ours} == {
        "lambda_1 in evaluation mode", "|H|_F", "accuracy on the test set",
        "lambda_1 differs between evaluation and train mode: larger over smaller value",
    }  # fmt: skip
    assert all("161/300" in claim.evidence for claim in found if "differs" not in claim.text)
    claims = judgement.optimiser_claims(optimiser_rows(3.0, 0.5))
    found = {claim.where: claim.verdict for claim in claims if claim.text == "lambda_1, Gadam over SGD"}
    assert found == {"section 5, figure 6": "holds in direction", "abstract": "holds in direction"}
    for name in ("Tr H^2 / P", "|H|_F"):
        assert next(c.verdict for c in claims if c.text == f"{name}, Gadam over SGD") == "refuted"


def test_a_lower_lambda_1_of_gadam_in_evaluation_mode_is_refuted_and_the_question_is_ours():
    rows = optimiser_rows()
    for row in rows:
        row["eval"]["lambda_max"] = [50.0 if row["arm"] == "Gadam" else 100.0] * 3
    claims = judgement.optimiser_claims(rows)
    (found,) = [claim for claim in claims if claim.text == "lambda_1 in evaluation mode, Gadam over SGD"]
    assert (found.verdict, found.ours) == ("refuted", True)


def test_claims_of_optimisers_want_both_of_two_seeds():
    with pytest.raises(ValueError, match="by SGD and by Gadam, got 5 rows"):
        judgement.optimiser_claims(optimiser_rows()[:-1])


# --------------------------------------------------------------------------------------------------------- figure


def drawn_rows():
    stems = {"nodes": [-1.0, 0.0, 9.0], "weights": [0.1, 0.8, 0.1]}
    rows = printed_rows("wideresnet", published=False)
    for row in rows:
        row |= {"eval": stems, "train": stems, "test_accuracy": 50.0}
    return rows


def test_the_figure_has_a_column_for_each_arm_and_a_row_for_each_mode():
    rows = drawn_rows()
    del rows[0]["eval"]  # seed 0 has an arm that diverged: the next seed is drawn
    made = figure(rows)
    assert len(made.axes) == 6
    assert "seed 1" in made.get_suptitle()
    assert [label.get_text() for label in made.axes[0].get_xticklabels()] == ["-1", "9"]


def test_a_figure_of_runs_that_all_diverged_is_refused():
    rows = drawn_rows()
    for row in rows:
        del row["eval"]
    with pytest.raises(ValueError, match="no run with a spectrum: those that diverged"):
        figure(rows)


def test_a_figure_has_the_arms_that_there_are():
    rows = drawn_rows()[:3]
    del rows[1]["eval"]  # of one seed, one arm diverged
    assert [ax.get_title()[:12] for ax in figure(rows).axes[:2]] == ["decay 0, tes", "decay 0.0005"]
