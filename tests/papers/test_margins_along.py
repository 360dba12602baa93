"""Figure 3 and appendix B.1 of seed 003: the whole path on drawn images, and claims that can go either way."""

import copy
import json
import math

import pytest
import torch
from torch import Tensor

from ritz.papers import margins_along, margins_points
from ritz.papers.experiment import Setting


def drawn_images(name: str, root: object, device: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """Ten patterns with noise in the place of MNIST, pixels from -1 to 1."""
    g = torch.Generator().manual_seed(0)
    patterns, y = torch.rand(10, 784, generator=g), torch.randint(10, (500,), generator=g)
    X = (patterns[y] + 0.3 * torch.rand(500, 784, generator=g)) / 0.65 - 1
    return (X, y), (X[-200:], y[-200:])


def row(seed: int, steps: int, right: float, wrong: float, accuracy: float) -> dict[str, object]:
    def kinds(r: float, n: int) -> dict[str, float]:
        return {"r": r + 0.001 * seed, "filtered": r + 0.001 * seed, "rho": r, "n": n, "removed": 0}

    both = {"correct": kinds(right, 900), "incorrect": kinds(wrong, 100)}
    every = {axis: kinds(wrong, 1000) for axis in margins_points.AXES}
    own = {"seed": seed, "steps": steps, "train_accuracy": accuracy, "correct": 900, "incorrect": 100}
    rule = {"n": 200, "exact_r": 0.9, "error": 0.1, "probes": 30.0, "negative": 1}
    ruled = {
        word: {**rule, "r": r, "filtered": r + 0.001 * seed} for word, r in (("correct", right), ("incorrect", wrong))
    }
    found = {**own, **{axis: copy.deepcopy(both) for axis in margins_points.AXES}, "everywrong": every, "ruled": ruled}
    return found | {"margin": {"correct": kinds(-right, 900), "incorrect": kinds(wrong, 100)}}


def verdicts(right: tuple[float, ...], wrong: float) -> dict[str, str]:
    rows = [
        row(seed, steps, r, wrong, 10.0 + steps)
        for seed in (0, 1, 2)
        for steps, r in zip((0, 500, 5000), right, strict=False)
    ]
    return {claim.text: claim.verdict for claim in margins_along.claims("lenet", rows)}


def test_what_the_paper_saw_would_hold():
    assert set(verdicts((0.5, 0.95), 0.05).values()) == {"holds"}


def test_the_opposite_is_refuted():
    assert set(verdicts((0.7, 0.5), 0.9).values()) == {"refuted"}


def test_the_abstract_is_asked_of_margins_themselves_too():
    rows = [row(seed, steps, 0.9, 0.1, 10.0 + steps) for seed in (0, 1, 2) for steps in (0, 500)]
    (found,) = [claim for claim in margins_along.claims("lenet", rows) if "output margins" in claim.text]
    assert (found.where, found.ours, found.verdict) == ("abstract", False, "holds")


def test_a_rise_is_judged_between_the_steps_of_the_paper_and_the_stop_between_them_is_ours():
    rows = [row(s, n, r, 0.9, 10.0 + n) for s in (0, 1, 2) for n, r in ((0, 0.5), (500, 0.95), (5000, 0.9))]
    found = [claim for claim in margins_along.claims("lenet", rows) if "rises" in claim.text and "ACEHT" in claim.text]
    told = [(claim.text.split("change ")[1].split(" steps")[0], claim.ours, claim.verdict) for claim in found]
    assert told == [("from 0 to 5000", False, "holds"), ("from 500 to 5000", True, "refuted")]
    assert "r from 0.951 to 0.901" in found[1].evidence


def test_seeds_with_a_handful_of_wrong_points_are_left_out_and_steps_where_all_have_few():
    rows = [row(seed, steps, 0.9, 0.9, 10.0 + steps) for seed in (0, 1) for steps in (0, 500)]
    for one in rows:
        if one["steps"] == 500 or one["seed"] == 0:
            one["aceht"]["incorrect"]["n"] = 9
    claims = [claim for claim in margins_along.claims("lenet", rows) if claim.text.startswith("no correlation of")]
    found = [claim for claim in claims if "traces and ACEHT" in claim.text]
    assert [claim.text[-len("r after 0 steps") :] for claim in found] == ["r after 0 steps"]
    assert "1 of 2 seeds have 10 wrong points or more, 100 to 100" in found[0].evidence


def test_the_whole_path_runs_and_looks_at_start_and_stops(monkeypatch):
    monkeypatch.setattr(margins_points, "load_images", drawn_images)
    calls = []
    rows, claims = margins_along.run("lenet", Setting("smoke"), lambda *now: calls.append(now))
    assert [(r["seed"], r["steps"]) for r in rows] == [(s, n) for s in (0, 1) for n in (0, 3, 12)]
    assert [("points" in r, "ruled" in r) for r in rows] == [(s == 0, n == 12) for s in (0, 1) for n in (0, 3, 12)]
    assert all(r["correct"] + r["incorrect"] == 60 and abs(r["aceht"]["incorrect"]["r"]) <= 1 for r in rows)
    assert len(claims) == 2 * (2 + 2 + 1 + 3) + 1 + 2  # after 12 steps no seed has 10 wrong points
    assert calls
    assert {claim.paper for claim in claims} == {"seed 003"}
    json.dumps(rows)
    pytest.importorskip("matplotlib")
    drawing = margins_along.figure(rows)
    assert [ax.get_title()[:2] for ax in drawing.axes] == ["0 ", "3 ", "12", "ev"]
    after = next(r for r in rows if r["steps"] == 12 and "points" in r)
    after["incorrect"], after["aceht"]["incorrect"]["r"] = 1, math.nan  # one point has no correlation
    after["correct"], after["points"]["correct"] = 59, [0] + [1] * 59
    labels = [text.get_text() for text in margins_along.figure(rows).axes[2].get_legend().get_texts()]
    assert labels[0].startswith("59 correct: r = ")
    assert labels[1] == "1 incorrect"


@pytest.mark.parametrize("item", ["f1-small", "f1-large"])
def test_the_network_of_the_appendix_is_asked_the_same_on_batches_of_its_own(monkeypatch, item):
    monkeypatch.setattr(margins_points, "load_images", drawn_images)
    rows, claims = margins_along.run(item, Setting("smoke"), lambda *now: None)
    assert [(r["seed"], r["steps"]) for r in rows] == [(s, n) for s in (0, 1) for n in (0, 3, 12)]
    assert not any("ruled" in row for row in rows)
    assert {claim.where for claim in claims if "correct points is 0.8" in claim.text} == {"appendix B.1"}
    assert {claim.where for claim in claims if "incorrect points" in claim.text} == {"appendix B"}
    assert f"batches of {margins_along.COURSES[item].batch_size}" in claims[0].evidence


def test_nothing_is_asked_of_wrong_points_where_there_are_none_nor_of_a_rise_where_nothing_is_learned():
    rows = [
        row(seed, steps, 0.9, 0.9, 100.0 if steps else 10.0) for seed in (0, 1, 2) for steps in (0, 500, 5000, 9000)
    ]
    for one in rows:
        del one["ruled"]
        if one["steps"]:
            one["everywrong"] = {axis: {"n": 0, "r": float("nan")} for axis in margins_points.AXES}
            one["aceht"]["incorrect"]["n"] = one["bound"]["incorrect"]["n"] = 0
    texts = [claim.text for claim in margins_along.claims("f1-small", rows)]
    assert [text for text in texts if "incorrect" in text or "wrong" in text] == [
        f"no correlation of traces and {name} for incorrect points: r after 0 steps"
        for name in ("ACEHT", "the margin bound")
    ]
    assert [text.split(": ")[1] for text in texts if "rises" in text] == [
        "change from 0 to 5000 steps, correct points"
    ] * 2


def test_a_run_that_was_killed_between_two_stops_gives_the_same_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(margins_points, "load_images", drawn_images)
    whole, _ = margins_along.run("lenet", Setting("smoke"), lambda *now: None)

    def killed(what: str, done: int, total: int) -> None:
        if done == 10:  # in the last epoch: the stop after 3 steps is past
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        margins_along.run("lenet", Setting("smoke", runs=tmp_path), killed)
    rest = []
    again, _ = margins_along.run("lenet", Setting("smoke", runs=tmp_path), lambda *now: rest.append(now))
    assert rest[:3] == [("steps, seed0", step, 12) for step in (10, 11, 12)]
    assert again == whole
