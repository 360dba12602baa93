"""Seeds that are added to a result give what one call with all of them gives."""

import json
from dataclasses import replace
from functools import partial

import pool_cases as cases
import pytest
import torch

from ritz.papers.added import refuse_other_recipes, together
from ritz.papers.base import Claim
from ritz.papers.experiment import Experiment, Setting
from ritz.papers.experiments import reproduce
from ritz.papers.grouping import grouped, regrouped, ungrouped
from ritz.papers.over_seeds import mean
from ritz.papers.pages import read_result
from ritz.papers.pool import train_all


def claims(rows):
    measured = mean(row["sum"] for row in rows if "seed" in row)
    return [Claim(paper="seed 003", where="", text="the mean of sums", expected=0.0, measured=measured)]


def run(setting, progress, recipe=cases.recipe):
    recipes = {f"small-seed{seed}": recipe(seed) for seed in setting.seed_range(2, 3, 4)}
    runs = train_all(recipes, cases.some_data(), setting, item="toy", finish=cases.weight_sum)
    rows = [{"seed": one.seed, "sum": one.found["sum"]} for one in runs.values()]
    return [*rows, {"kind": "not run", "why": "no data"}], claims(rows)


TOY = Experiment("margins", "toy", "a toy", "nowhere", run, claims=claims)


def written(tmp_path, setting, experiment=TOY):
    reproduce(experiment, setting).write(tmp_path)
    return read_result(tmp_path, experiment)


def shown(result):
    """Without what differs between any two calls."""
    return {key: value for key, value in result.items() if key not in ("seconds", "setting")}


def test_seeds_that_are_added_give_what_one_call_gives(tmp_path):
    all_at_once = written(tmp_path / "once", Setting(seeds=4, commit="abc"))
    first = written(tmp_path, Setting(seeds=2, commit="abc"))
    assert first["seeds"] == [0, 1]
    more = written(tmp_path, Setting(seeds=1, commit="abc", before=first))
    assert more["seeds"] == [0, 1, 2]
    assert more["rows"][: len(first["rows"])] == first["rows"]
    assert json.loads((tmp_path / "margins" / "toy.json").read_text())["claims"] == more["claims"]
    whole = written(tmp_path, Setting(seeds=1, commit="abc", before=more))
    order = sorted(whole["rows"], key=lambda row: row.get("seed", 9))
    assert shown({**whole, "rows": order}) == shown(all_at_once)
    assert whole["setting"]["seeds"] == 4
    assert whole["seconds"] >= more["seconds"] >= first["seconds"]


def test_a_result_says_what_each_part_was_made_by(tmp_path):
    first = written(tmp_path, Setting(seeds=2, commit="abc"))
    first = {
        **first,
        "machine": "an older one",
        "versions": {**first["versions"], "torch": "2.6"},
        "left": ["small-seed2", "x"],
    }
    second = written(tmp_path, Setting(seeds=1, commit="def", before=first))
    third = written(tmp_path, Setting(seeds=1, commit="abc", before=second))
    assert third["commit"] == "abc, def"
    assert third["machine"].startswith("an older one, ")
    assert third["versions"]["torch"] == f"2.6, {torch.__version__}"
    assert third["left"] == ["x"]  # the third seed had been left, and is there now
    assert together(first, {**first, "commit": None})["commit"] == "abc"


def test_without_a_result_it_begins_with_the_first_seed(tmp_path):
    assert read_result(tmp_path, TOY) is None
    assert list(Setting("paper").seed_range(2, 3, 4)) == [0, 1, 2, 3]


def test_seeds_of_another_setting_are_refused(tmp_path):
    first = written(tmp_path, Setting(seeds=2))
    with pytest.raises(ValueError, match="it is of budget smoke, this is short; set it so, or write another result by"):
        Setting("short", before=first)
    first["setting"]["device"] = "cuda:1"
    with pytest.raises(ValueError, match="it is of device cuda, this is cpu"):
        Setting(before=first)


def test_seeds_of_another_experiment_are_refused(tmp_path):
    first = written(tmp_path, Setting(seeds=2))
    with pytest.raises(ValueError, match="seeds of margins other cannot be added to a result of margins toy"):
        reproduce(replace(TOY, item="other"), Setting(before=first))
    with pytest.raises(ValueError, match="margins toy is judged by more than its result holds: run all seeds in one"):
        reproduce(replace(TOY, claims=None), Setting(before=first))


def test_seeds_that_would_be_trained_otherwise_are_refused_before_any_is(tmp_path):
    first = written(tmp_path, Setting(seeds=2))
    longer = partial(run, recipe=lambda seed: replace(cases.recipe(seed), epochs=9, model=refuse))
    with pytest.raises(ValueError, match=r"toy/small-seed2 has other settings .*\(.*epochs 9 instead of 6"):
        reproduce(replace(TOY, run=longer), Setting(before=first))
    fast = partial(run, recipe=lambda seed: replace(cases.recipe(seed), fast=True, model=refuse))
    with pytest.raises(ValueError, match=r"fast True instead of"):
        reproduce(replace(TOY, run=fast), Setting(before=first, fast=True))
    assert read_result(tmp_path, TOY) == first


def refuse():
    raise AssertionError("it was trained")


@pytest.mark.parametrize("name", ["x/seed0", "x/flat, seed 0", "x/decay-0-seed-0", "x/adam-0.1-6-epochs-0"])
def test_runs_are_held_against_those_of_their_name_with_any_seed(name):
    before = {"recipes": [{"runs": [name], "recipe": {"epochs": 3, "lr": 0.1, "loss_bound": "Infinity"}}]}
    added = name[:-1] + "12"
    refuse_other_recipes(before, {added: {"epochs": 3, "lr": 0.1, "loss_bound": "Infinity", "fast": False}})
    with pytest.raises(ValueError, match=f"{added} has other settings .*lr 0.2 instead of 0.1"):
        refuse_other_recipes(before, {added: {"epochs": 3, "lr": 0.2, "loss_bound": "Infinity"}})


def test_a_run_of_another_name_must_be_as_long_as_one_of_the_result():
    """As flat damping at the mean that learned damping had, which is another number for other seeds."""
    groups = [{"runs": ["a-0"], "recipe": {"epochs": 3, "batch_size": 8}}, {"runs": ["b-0"], "differs": {"epochs": 9}}]
    for epochs in (3, 9):
        refuse_other_recipes({"recipes": groups}, {"c-1": {"epochs": epochs, "batch_size": 8, "damping": 0.03}})
    with pytest.raises(ValueError, match=r"c-1 has other settings .*epochs 4 instead of 3"):
        refuse_other_recipes({"recipes": groups}, {"c-1": {"epochs": 4, "batch_size": 8}})
    refuse_other_recipes({"recipes": []}, {"c-1": {"epochs": 4}})  # which keeps none


def test_groups_of_recipes_are_taken_apart_and_put_together():
    recipes = {"a": {"epochs": 3, "lr": 0.1, "decay": 0.5}, "b": {"epochs": 3, "lr": 0.2}, "c": {"epochs": 4}}
    groups = grouped(recipes)
    assert ungrouped(groups) == recipes
    assert regrouped(groups, grouped({"d": recipes["b"]})) == [
        groups[0],
        {**groups[1], "runs": ["b", "d"]},
        groups[2],
    ]
