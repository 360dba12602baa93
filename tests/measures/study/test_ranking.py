"""A table of runs: rank correlations, orders along single hyper-parameters, verdicts; against brute force."""

import csv
import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import ritz
from ritz.measures.study.axes import conditional_information, granulated_tau, sign_error
from ritz.measures.study.ranking import _monotone, holm, study
from ritz.results import Estimate

QUICK = {"resamples": 199}


def grid(repeats: int = 2, seed: int = 0) -> list[dict]:
    """Runs over two hyper-parameters: one measure that follows the gap, one that runs against it, one of noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for lr, width, repeat in itertools.product([0.01, 0.1, 1.0], [8, 16, 32], range(repeats)):
        gap = 0.1 * math.log10(100 * lr) + 0.005 * width + 0.01 * rng.standard_normal()
        rows.append({
            "lr": lr, "width": width, "seed": repeat, "gap_loss": gap, "test_loss": gap + 1,
            "trace": math.exp(4 * gap) + 0.1 * rng.standard_normal(), "flat": -gap + 0.01 * rng.standard_normal(),
            "noise": rng.standard_normal(),
        })  # fmt: skip
    return rows


AXES = ["lr", "width"]


# ------------------------------------------------------------------------------------------- one axis at a time


def random_table(seed: int, repeats: int = 2) -> tuple[np.ndarray, np.ndarray, dict[str, list]]:
    """Measure, gap and three axes; ties, a missing value, some settings absent."""
    rng = np.random.default_rng(seed)
    settings = [s for s in itertools.product([1, 2, 3], "ab", [0.5, 0.25]) for _ in range(repeats)]
    keep = rng.random(len(settings)) < 0.9
    settings = [s for s, kept in zip(settings, keep, strict=True) if kept]
    c, g = rng.integers(0, 6, len(settings)).astype(float), rng.integers(0, 6, len(settings)) / 100
    c[0] = math.nan
    return c, g, dict(zip(("depth", "optimizer", "lr"), map(list, zip(*settings, strict=True)), strict=True))


def alike_but(axes: dict[str, list], name: str, i: int, j: int) -> bool:
    """Whether two runs differ in this axis and in no other."""
    return all((values[i] != values[j]) == (other == name) for other, values in axes.items())


@pytest.mark.parametrize("seed", range(4))
def test_granulated_tau_is_the_mean_over_axes_of_the_mean_over_groups(seed):
    c, g, axes = random_table(seed)
    known = [i for i in range(len(c)) if not math.isnan(c[i])]
    psis = {}
    for name in axes:
        groups = defaultdict(list)
        for i, j in itertools.combinations(known, 2):
            if alike_but(axes, name, i, j):
                others = tuple(axes[other][i] for other in axes if other != name)
                groups[others].append(np.sign(c[i] - c[j]) * np.sign(g[i] - g[j]))
        psis[name] = np.mean([np.mean(signs) for signs in groups.values()])
    found = granulated_tau(c, g, axes)
    assert found.axes == pytest.approx(psis)
    assert found.value == pytest.approx(np.mean(list(psis.values())))


def test_granulated_tau_by_hand():
    # lr moves at width 8: (1, 1) -> (2, 3) -> (3, 2): signs + + -, tau 1/3; at width 16: (5, 5) -> (4, 6): tau -1
    # width moves at lr 1: (1, 1) -> (5, 5): tau 1; at lr 2: (2, 3) -> (4, 6): tau 1; lr 3 has one width only
    axes = {"lr": [1, 2, 3, 1, 2], "width": [8, 8, 8, 16, 16]}
    found = granulated_tau([1.0, 2.0, 3.0, 5.0, 4.0], [1.0, 3.0, 2.0, 5.0, 6.0], axes)
    assert found.axes == pytest.approx({"lr": (1 / 3 - 1) / 2, "width": 1.0})
    assert found.groups == {"lr": 2, "width": 2}
    assert found.value == pytest.approx((-1 / 3 + 1) / 2)


def test_without_ties_and_repeats_tau_of_a_group_is_kendalls():
    rng = np.random.default_rng(0)
    c, g = rng.random(8), rng.random(8)
    assert granulated_tau(c, g, {"lr": list(range(8))}).value == pytest.approx(stats.kendalltau(c, g).statistic)


def test_a_measure_that_only_knows_one_axis_has_no_granulated_tau_along_the_other():
    rows = grid(1)
    axes = {name: [row[name] for row in rows] for name in AXES}
    found = granulated_tau([row["lr"] for row in rows], [row["gap_loss"] for row in rows], axes)
    assert found.axes == {"lr": 1.0, "width": 0.0}


def test_axes_that_never_move_alone_have_no_granulated_tau():
    found = granulated_tau([1.0, 2.0], [1.0, 2.0], {"lr": [1, 2], "width": [8, 16]})
    assert math.isnan(found.value)
    assert found.groups == {"lr": 0, "width": 0}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("environments", ["settings", "values"])
@pytest.mark.parametrize("test_size", [None, 5000])
def test_sign_error_is_the_worst_weighted_mean_over_environments(seed, environments, test_size):
    c, g, axes = random_table(seed, repeats=3)
    sums = defaultdict(lambda: np.zeros(3))
    for i, j in itertools.permutations(range(len(c)), 2):
        for name in axes:
            if math.isnan(c[i] + c[j]) or not alike_but(axes, name, i, j) or axes[name][i] > axes[name][j]:
                continue
            others = tuple(axes[other][i] for other in axes if other != name)
            error = (1 - np.sign(c[i] - c[j]) * np.sign(g[i] - g[j])) / 2
            d = abs(g[i] - g[j])
            w = 1.0 if test_size is None else max(0.0, 1 - 2 * math.exp(-2 * test_size * (d / 2) ** 2)) ** 2
            key = (name, axes[name][i], axes[name][j], others if environments == "settings" else None)
            sums[key] += [w, w * w, w * error]
    for least in (1.0, 6.0):
        errors = [e / w for w, w2, e in sums.values() if w > 0 and w * w / w2 >= least - 1e-9]
        found = sign_error(c, g, axes, test_size=test_size, environments=environments, min_effective=least)
        assert (found.environments, found.too_small) == (len(errors), len(sums) - len(errors))
        assert found.worst == pytest.approx(max(errors, default=math.nan), nan_ok=True)
        assert found.mean == pytest.approx(np.mean(errors) if errors else math.nan, nan_ok=True)


def test_the_worst_environment_is_named():
    axes = {"lr": [0.1, 0.2, 0.1, 0.2], "width": [8, 8, 16, 16]}
    found = sign_error([1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 2.0, 1.0], axes, min_effective=1)
    assert (found.worst, found.where) == (1.0, "lr: 0.1 -> 0.2 (width = 16)")


def test_environments_below_twelve_effective_pairs_do_not_count():
    axes = {"lr": [1] * 4 + [2] * 3}
    values = [1.0] * 4 + [2.0] * 3
    assert sign_error(values, values, axes).worst == 0.0  # 4 x 3 = 12 pairs
    fewer = sign_error(values[1:], values[1:], {"lr": axes["lr"][1:]})
    assert math.isnan(fewer.worst)
    assert fewer.too_small == 1


def test_weights_by_test_size_are_for_gaps_in_error():
    with pytest.raises(ValueError, match=r"gaps in error, between -1 and 1, got a gap of 3; .* leave out test_size"):
        sign_error([1.0, 2.0], [0.0, 3.0], {"lr": [1, 2]}, test_size=100)
    with pytest.raises(ValueError, match="test_size must be at least 1, got 0"):
        sign_error([1.0, 2.0], [0.0, 0.1], {"lr": [1, 2]}, test_size=0)
    with pytest.raises(ValueError, match="environments must be 'settings' or 'values', got 'all'"):
        sign_error([1.0, 2.0], [0.0, 0.1], {"lr": [1, 2]}, environments="all")


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"one value per run, got .'measure': 2, 'target': 2, 'lr': 3."):
        granulated_tau([1.0, 2.0], [1.0, 2.0], {"lr": [1, 2, 3]})


def test_infinite_measures_have_their_order():
    axes = {"lr": [1, 2, 3]}
    assert granulated_tau([1.0, math.inf, math.inf], [1.0, 2.0, 3.0], axes).value == pytest.approx(2 / 3)
    assert sign_error([1.0, math.inf, math.inf], [1.0, 2.0, math.inf], axes, min_effective=1).worst == 0.5


def entropy(counts: Counter) -> float:
    p = np.array(list(counts.values())) / sum(counts.values())
    return float(-(p * np.log(p)).sum())


@pytest.mark.parametrize("seed", range(3))
def test_information_is_the_smallest_share_over_conditions(seed):
    c, g, axes = random_table(seed)
    known = [i for i in range(len(c)) if not math.isnan(c[i])]
    shares = {}
    for given_axes in (s for size in range(3) for s in itertools.combinations(axes, size)):
        pairs = [
            (tuple((axes[n][i], axes[n][j]) for n in given_axes), np.sign(c[i] - c[j]), np.sign(g[i] - g[j]))
            for i, j in itertools.permutations(known, 2)
        ]
        u, uc, ug = Counter(p[0] for p in pairs), Counter(p[:2] for p in pairs), Counter((p[0], p[2]) for p in pairs)
        of_g = entropy(ug) - entropy(u)
        shares[given_axes] = (entropy(uc) + entropy(ug) - entropy(u) - entropy(Counter(pairs))) / of_g
    found = conditional_information(c, g, axes)
    assert found.value == pytest.approx(min(shares.values()), abs=1e-12)
    assert shares[found.given] == pytest.approx(found.value, abs=1e-12)


def test_information_is_all_for_the_gap_itself_and_none_for_a_constant():
    rng = np.random.default_rng(0)
    axes = {"lr": [1, 1, 1, 2, 2, 2], "width": [1, 2, 3, 1, 2, 3]}
    gap = rng.random(6)
    assert conditional_information(gap, gap, axes).value == pytest.approx(1.0)
    assert conditional_information(-gap, gap, axes).value == pytest.approx(1.0)  # direction is not seen
    assert conditional_information(np.ones(6), gap, axes).value == 0.0
    assert math.isnan(conditional_information(gap, np.ones(6), axes).value)  # nothing to tell


# ----------------------------------------------------------------------------------------------------- the whole study


def test_each_number_of_a_row_is_that_of_its_function():
    rows = grid()
    found = study(rows, axes=AXES, environments="values", information=True, seed=3, **QUICK)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    c, g, axes = columns["trace"], columns["gap_loss"], {name: columns[name] for name in AXES}
    row = found["trace"]
    assert row.kendall.value == pytest.approx(stats.kendalltau(c, g).statistic)
    assert row.spearman.value == pytest.approx(stats.spearmanr(c, g).statistic)
    assert row.granulated == granulated_tau(c, g, axes)
    assert row.sign_error == sign_error(c, g, axes, environments="values")
    assert row.information == conditional_information(c, g, axes)
    assert [row.adjusted_p for row in found.values()] == holm([row.kendall.p_value for row in found.values()])


def test_verdicts():
    found = study(grid(), axes=AXES, **QUICK)
    assert {name: row.verdict for name, row in found.items()} == {
        "trace": "predicts", "noise": "cannot tell", "flat": "against"
    }  # fmt: skip
    assert list(found) == ["trace", "noise", "flat"]  # best first
    assert "not below 0.05" in found["noise"].reason
    assert found.left_out == {"seed": "not a measure by its name", "test_loss": "not a measure by its name"}


def test_a_measure_of_which_more_is_better_is_turned():
    found = study(grid(), axes=AXES, higher_is_better=["flat"], **QUICK)
    assert found["flat"].verdict == "predicts"
    assert found["flat"].turned
    assert "-flat" in str(found)


def test_margins_are_turned_as_the_registry_says():
    gap = np.linspace(0.1, 1, 8)
    found = study({"gap_loss": gap, "margin_median": -gap, "trace": gap}, **QUICK)
    assert {name: row.turned for name, row in found.items()} == {"margin_median": True, "trace": False}
    assert found["margin_median"].kendall.value == 1.0


def test_a_relation_that_vanishes_along_single_axes_is_not_trusted():
    # every lr has its own level of measure and gap; within one lr, more measure is less gap
    rows = [
        {"gap_loss": 10 * lr - 0.1 * width, "sum": 10 * lr + 0.1 * width, "lr": lr, "width": width}
        for lr in (1, 2, 3) for width in range(6)
    ]  # fmt: skip
    found = study(rows, axes=["width"], **QUICK)  # lr is not said, and confounds
    assert found["sum"].verdict == "predicts"
    found = study(rows, axes=AXES, **QUICK)
    assert found["sum"].granulated.axes == {"lr": 1.0, "width": -1.0}
    assert found["sum"].verdict == "cannot tell"
    assert "where one hyper-parameter moves at a time" in found["sum"].reason
    assert any(note.startswith("sum: tau is") for note in found.notes)


def test_three_runs_prove_nothing_and_the_smallest_p_value_is_printed():
    found = study({"gap_loss": [1, 2, 3], "trace": [1, 2, 3], "norm": [3, 2, 1]})
    assert {row.verdict for row in found.values()} == {"cannot tell"}
    assert found.notes == (
        "3 runs cannot decide: no p-value below 0.333 is possible, 0.667 after correction for 2 measures",
    )
    assert "no p-value below 0.333" in str(found)


def test_too_few_resamples_for_the_number_of_measures_are_said_to_be_so():
    rng = np.random.default_rng(0)
    table = {"gap_loss": rng.random(9), **{f"m{i}": rng.random(9) for i in range(3)}}
    assert study(table, resamples=39).notes == (
        "resamples are too few, raise them: no p-value below 0.025 is possible, 0.075 after correction for 3 measures",
    )
    assert not study(table, resamples=99).notes


def test_runs_with_few_different_values_cannot_decide_however_many_resamples():
    """Of 70 ways to deal four zeros and four ones two are as clear as the clearest."""
    table = {"gap_loss": [0, 0, 0, 0, 1, 1, 1, 1], "m0": [0, 0, 0, 0, 1, 1, 1, 1], "m1": [1, 0, 0, 0, 1, 1, 1, 0]}
    (note,) = study(table, resamples=1999).notes
    assert note.startswith("8 runs cannot decide: no p-value below 0.02")


def test_a_run_without_a_value_is_left_out_for_that_measure_and_counted():
    rows = grid()
    rows[4] = {name: value for name, value in rows[4].items() if name != "trace"}
    rows[5]["trace"] = math.nan
    found = study(rows, axes=AXES, **QUICK)
    assert (found["trace"].kendall.n, found["trace"].kendall.missing) == (16, 2)
    assert (found["noise"].kendall.n, found["noise"].kendall.missing) == (18, 0)
    kept = [row for i, row in enumerate(rows) if i not in (4, 5)]
    assert found["trace"].granulated == study(kept, axes=AXES, **QUICK)["trace"].granulated
    assert "trace: 2 of 18 runs left out, no value" in found.notes


def test_a_constant_measure_has_no_verdict_and_does_not_count_in_the_correction():
    rows = [{**row, "classes": 10} for row in grid()]
    found = study(rows, axes=AXES, **QUICK)
    assert found["classes"].reason == "the measure is constant"
    assert math.isnan(found["classes"].adjusted_p)
    assert found["trace"].adjusted_p == pytest.approx(3 * found["trace"].kendall.p_value)  # 3 measures, not 4


def test_repeats_can_be_averaged_and_are_noted_where_they_are_not():
    rows = grid(repeats=3)
    assert any(note.startswith("27 runs at 9 settings") for note in study(rows, axes=AXES, **QUICK).notes)
    found = study(rows, axes=AXES, average=True, **QUICK)
    means = [np.mean([row["trace"] for row in rows if (row["lr"], row["width"]) == s])
             for s in itertools.product([0.01, 0.1, 1.0], [8, 16, 32])]  # fmt: skip
    torch.testing.assert_close(found.columns["trace"], torch.tensor(means))
    assert found["trace"].kendall.n == 9
    assert not any("settings" in note for note in found.notes)
    with pytest.raises(ValueError, match="average=True needs axes="):
        study(rows, average=True)


def test_averaging_knows_what_is_missing_and_lowers_errors():
    cells = [ritz.Estimate(name="trace", value=v, stderr=0.2) for v in (1.0, 3.0, 5.0, 7.0)]
    table = {"gap_loss": [1, 1, 2, 2], "trace": cells, "norm": [1, None, 2, 4], "lr": ["a", "a", "b", "b"]}
    found = study(table, average=True)
    assert found.columns["trace"].tolist() == [2.0, 6.0]
    assert found.columns["norm"].tolist() == [1.0, 3.0]
    assert found.errors["trace"].tolist() == pytest.approx([0.2 / math.sqrt(2)] * 2)
    missing = study({**table, "trace": [cells[0], None, *cells[2:]]}, average=True)
    assert missing.errors["trace"].tolist() == pytest.approx([0.2, 0.2 / math.sqrt(2)])


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holms_correction_is_its_definition(p):
    adjusted = holm(p)
    order = np.argsort(p, kind="stable")
    for k, i in enumerate(order):
        truth = max(min(p[order[j]] * (len(p) - j), 1.0) for j in range(k + 1))
        assert adjusted[i] == pytest.approx(truth)


def test_false_verdicts_are_rare_over_many_measures_of_noise():
    wrong = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        table = {"gap_loss": rng.random(10), **{f"m{i}": rng.random(10) for i in range(5)}}
        wrong += any(row.verdict != "cannot tell" for row in study(table, seed=seed, **QUICK).values())
    assert wrong <= 6  # 5 % of 40 is 2; without the correction it would be 9


# -------------------------------------------------------------------------------------------------------------- tables


@dataclass
class Solution:
    """As the rows of a paper's table: a hyper-parameter and a mapping of estimates."""

    lr: float
    values: dict


class Frame:
    """What is used of a data frame."""

    def __init__(self, columns: dict):
        self.columns, self._columns = list(columns), columns

    def to_dict(self, orient: str) -> dict:
        assert orient == "list"
        return self._columns


def as_columns(rows: list[dict]) -> dict:
    return {name: [row.get(name) for row in rows] for name in rows[0]}


def test_every_kind_of_table_gives_the_same_study(tmp_path):
    rows = grid()
    rows[2]["noise"] = None
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    columns = as_columns(rows)
    arrays = {**columns, "trace": torch.tensor(columns["trace"]), "lr": np.array(columns["lr"])}
    truth = study(rows, axes=AXES, **QUICK)
    for table in (columns, arrays, Frame(columns), path, str(path), dict(enumerate(rows))):
        assert study(table, axes=AXES, **QUICK) == truth
    path.write_text("\ufeff" + path.read_text())  # as spreadsheets do
    assert study(path, axes=AXES, **QUICK) == truth


def test_a_number_may_come_as_a_tensor_an_array_or_an_estimate_of_one():
    rows = grid()
    truth = study(rows, measures="trace", **QUICK)
    for wrap in (
        lambda x: torch.tensor(x),
        lambda x: torch.tensor([x]),
        lambda x: np.array([x]),
        lambda x: Estimate(name="trace", value=torch.tensor(x), exact=True),
    ):
        found = study([{**row, "trace": wrap(row["trace"])} for row in rows], measures="trace", **QUICK)
        assert found["trace"] == truth["trace"]
    assert list(study([{"gap_loss": i, 7: i} for i in range(3)], **QUICK)) == ["7"]


def test_results_of_measure_are_rows():
    torch.manual_seed(0)
    X, y = torch.randn(8, 3), torch.arange(8) % 2
    rows = []
    for scale in (0.5, 1.0, 2.0):
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.mul_(scale)
        risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (X, y))
        rows.append(ritz.measure(risk, measures=["weight_norm", "train_loss"]))
    found = study(rows, target="train_loss")
    assert found.columns["weight_norm"].tolist() == [float(row["weight_norm"]) for row in rows]
    with_axes = study([{**row, "scale": s} for row, s in zip(rows, "abb", strict=True)], target="train_loss")
    assert with_axes.axes == {"scale": ("a", "b", "b")}
    assert study({"first": rows[0], "second": rows[1]}, target="train_loss")["weight_norm"].kendall.n == 2


def test_a_measure_that_failed_in_some_runs_is_missing_there_and_one_that_failed_in_all_is_left_out():
    from ritz.measures.measure import Measurement

    rows = [
        Measurement(
            estimates={k: ritz.Estimate(name=k, value=float(i)) for k in ("gap_loss", *(["trace"] if i else []))},
            failures={"norm": "why", **({} if i else {"trace": "why"})},
        )
        for i in range(4)
    ]
    found = study(rows)
    assert (found["trace"].kendall.n, found["trace"].kendall.missing) == (3, 1)
    assert found.left_out == {"norm": "no run has a value"}


def test_objects_with_values_give_their_plain_attributes_too():
    rows = [
        Solution(lr, {"trace": ritz.Estimate(name="trace", value=t, stderr=0.5), "gap_loss": g})
        for lr, t, g in [(0.1, 1.0, 0.3), (0.2, 2.0, 0.2), (0.4, 3.0, 0.4)]
    ]
    found = study(rows, axes=["lr"])
    assert found.axes == {"lr": (0.1, 0.2, 0.4)}
    assert found.errors["trace"].tolist() == [0.5] * 3
    assert found.columns["trace"].tolist() == [1.0, 2.0, 3.0]


def test_columns_are_chosen_by_glob():
    rows = [
        {"hp.lr": i % 3, "hp.width": i // 3, "complexity.a": i, "complexity.b": -i, "gen.gap": i**2, "epoch": 3}
        for i in range(9)
    ]
    found = study(rows, "gen.gap", axes="hp.*", measures="complexity.*", **QUICK)
    assert list(found.axes) == ["hp.lr", "hp.width"]
    assert list(found) == ["complexity.a", "complexity.b"]
    assert found.left_out == {"epoch": "not asked for"}


def test_without_axes_named_text_that_repeats_is_one():
    rows = [{**row, "optimizer": "sgd" if i % 2 else "adam", "run": f"run {i}"} for i, row in enumerate(grid())]
    found = study(rows, measures=["trace"], **QUICK)
    assert list(found.axes) == ["optimizer"]
    assert study(rows, **QUICK).left_out["run"] == "text, and not named as an axis"
    some = [{**row, "optimizer": None if i == 1 else row["optimizer"]} for i, row in enumerate(rows)]
    assert study(some, **QUICK).left_out["optimizer"] == "text, and not named as an axis"  # one run has none


def test_what_is_no_number_is_left_out_with_the_reason():
    rows = [{**row, "margins": torch.zeros(3), "nothing": None} for row in grid()]
    found = study(rows, axes=AXES, **QUICK)
    assert found.left_out["margins"] == "a Tensor is neither one number nor a label"
    assert found.left_out["nothing"] == "no run has a value"


@pytest.mark.parametrize(
    ("table", "arguments", "error", "message"),
    [
        (7, {}, TypeError, "a table is a list of rows, .* got a int"),
        ([1, 2], {}, TypeError, "run 0 must be a mapping from names to numbers, got a int"),
        ({"gap_loss": 3}, {}, TypeError, "column 'gap_loss' must hold one value per run, got a int"),
        ({"gap_loss": [1, 2], "trace": [1]}, {}, ValueError, "one value per run, got {'gap_loss': 2, 'trace': 1}"),
        ([], {}, ValueError, "at least two runs, got 0"),
        (grid()[:1], {}, ValueError, "at least two runs, got 1"),
        (grid(), {"target": "gap_los"}, ValueError, "'gap_los' is no column of the table; did you mean gap_loss"),
        ({"gap_loss": ["a", "b"], "x": [1, 2]}, {}, ValueError, "'gap_loss' is no column of numbers; there are: x"),
        ({"gap_loss": [None, None], "x": [1, 2]}, {}, ValueError, "'gap_loss' has no value in any run"),
        (grid(), {"axes": ["lrr"]}, ValueError, "axes: the table has no column 'lrr'; did you mean lr"),
        (grid(), {"measures": ["tracee"]}, ValueError, "measures: .* no column 'tracee'; did you mean trace"),
        ({"gap_loss": [1, 2], "x": ["a", "b"]}, {"measures": "x"}, ValueError, "'x' must be a column of numbers"),
        ({"gap_loss": [1, 2], "x": [1, 2]}, {"axes": "x"}, ValueError, "the table has no measure"),
        ({"gap_loss": [1, 2], "x": [1, 2], "lr": [1, None]}, {"axes": "lr"}, ValueError, "axis 'lr'; run 1 has none"),
        (grid(), {"higher_is_better": ["nois"]}, ValueError, "higher_is_better: 'nois' is not a measure .* mean noise"),
        (grid(), {"level": 95}, ValueError, "level must lie between 0 and 1, got 95"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_studied_is_refused(table, arguments, error, message):
    with pytest.raises(error, match=message):
        study(table, **arguments)


# ------------------------------------------------------------------------------------------------------------ results


def test_a_study_loads_back_equal(tmp_path):
    rows = [{**row, "optimizer": "sgd", "constant": 1.0} for row in grid()]
    found = study(rows, axes=[*AXES, "optimizer"], information=True, **QUICK)
    again = ritz.load(found.save(tmp_path / "study"))
    assert again == found
    assert str(again) == str(found)
    assert again != study(rows[1:], axes=AXES, **QUICK)


def test_a_study_is_a_mapping_of_its_measures():
    found = study(grid(), axes=AXES, **QUICK)
    assert len(found) == 3
    with pytest.raises(KeyError, match="nois is not a measure of this study; it has: trace, noise, flat"):
        found["nois"]


def test_the_table_has_a_line_for_each_measure():
    found = study(grid(), axes=AXES, environments="values", information=True, **QUICK)
    text = found.table().text(width=120).splitlines()
    assert text[0] == "gap_loss over 18 runs, axes lr, width"
    assert [line.split()[0] for line in text[3:6]] == ["trace", "noise", "flat"]
    assert text[3].split()[-1] == "predicts"
    assert "<td>trace</td>" in found._repr_html_()


def test_progress_counts_measures():
    seen = []
    study(grid(), axes=AXES, progress=lambda done, total: seen.append((done, total)), **QUICK)
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_study_draws_a_panel_for_each_measure_with_its_runs():
    rows = grid()
    rows[0]["trace"] = None
    found = study(rows, axes=AXES, **QUICK)
    panels = found.plot()
    assert [panel.get_xlabel() for panel in panels] == list(found)
    drawn = [sum(len(points.get_offsets()) for points in panel.collections) for panel in panels]
    assert drawn == [17, 18, 18]
    assert panels[0].get_title().endswith("predicts")


def test_a_study_draws_on_given_axes():
    from matplotlib.figure import Figure

    found = study({"gap_loss": [1, 2, 3, 4], "a": [1, 20, 300, 4000], "b": [1, 1, 1, 1]})
    one = Figure().subplots()
    assert found.plot(one) == [one]
    assert one.get_xlabel() == "a"
    assert one.get_xscale() == "log"
    pair = Figure().subplots(1, 2)
    assert [panel.get_xlabel() for panel in found.plot(pair, ["b", "a"])] == ["b", "a"]
    with pytest.raises(ValueError, match="2 measures need 2 axes, got 1"):
        found.plot(one, ["a", "b"])


def test_errors_of_estimates_are_drawn():
    cells = [ritz.Estimate(name="t", value=float(i), stderr=0.3) for i in range(4)]
    (panel,) = study({"gap_loss": [1, 3, 2, 4], "t": cells}).plot()
    assert len(panel.containers) == 1


@pytest.mark.parametrize("rising", [True, False])
def test_the_curve_is_scikit_learns_isotonic_regression(rising):
    from sklearn.isotonic import IsotonicRegression

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 12, 30).astype(float), rng.standard_normal(30)
    places, fitted = _monotone(x, y, rising)
    truth = IsotonicRegression(increasing=rising).fit(x, y).predict(places)
    np.testing.assert_allclose(fitted, truth, atol=1e-12)
