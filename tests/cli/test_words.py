"""What the library says, in the words of the command."""

import pytest

from ritz.cli.words import typed, typed_notes
from ritz.measures import MEASURES
from ritz.tables import Table


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("needs init=", "needs --init"),
        ("needs init= and test=", "needs --init and --test"),
        ("this needs test data: pass test=", "this needs test data: pass --test"),
        ("take a factor nearer to 1, or dtype=torch.float64", "take a factor nearer to 1, or --dtype float64"),
        ("try dtype=torch.float64, and look", "try --dtype float64, and look"),
        ("there is a GPU: device='cuda'", "there is a GPU: --device cuda"),
        ("num_probes must be at least 1, got 0", "--num-probes must be at least 1, got 0"),
        ("num_steps and num_probes must be at least 1", "--num-steps and --num-probes must be at least 1"),
        ("needs at least 2 probes, got num_probes=1", "needs at least 2 probes, got --num-probes 1"),
        ("workers must be at least 1, got 0", "--workers must be at least 1, got 0"),
        ("params= or fewer products= for the vectors", "--params or fewer --products for the vectors"),
        ("two measures have the same key: trace, trace", "--measures has a key twice: trace, trace; give each once"),
        ("measures is empty: give at least one", "--measures names none; give standard, all, or some by key"),
        (
            "give loss= and forward=, or use ritz.Hessian",
            "give loss= and forward=, or take `ritz spectrum --matrix hessian`",
        ),
    ],
)
def test_keywords_are_said_as_they_are_typed(library, command):
    assert typed(library) == command
    assert typed(command) == command  # once is enough


@pytest.mark.parametrize(
    "text",
    ["use mode='eval'", "fix them with data=list(loader)", "give loss= and forward=", "plan=ritz.Plan(chunk=1)",
     "seed=3 < seed=4", "runs/test=1/last", "latest=", "risk.test=", "mean loss, test data"],
)  # fmt: skip
def test_what_belongs_to_the_users_function_or_to_their_names_stays(text):
    assert typed(text) == text


def test_an_unknown_measure_without_a_near_one_is_answered_with_all_of_them():
    text = typed("no measure is named 'x'; ritz.measures.MEASURES lists them")
    assert text.startswith("no measure is named 'x'; there are: standard, all, train_loss, ")
    assert all(key in text for key in MEASURES)


def test_notes_of_a_table_are_translated_and_cells_are_not():
    table = Table(("a",), [("test= 1",)], notes=("not measured: distance: needs init=",))
    assert typed_notes(table) == Table(("a",), [("test= 1",)], notes=["not measured: distance: needs --init"])


def test_what_was_given_in_one_run_and_not_in_the_other_is_said_as_it_is_typed():
    there = 'run holds another run: test is "797 samples, 9435.67551" there and null here; name another'
    assert typed(there) == "run holds another run: --test was given there and not here; name another"
    here = 'run holds another run: init is null there and "4f0ab8... here; name another'
    assert typed(here) == "run holds another run: --init was given here and not there; name another"


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ('"bba546... there', "null here", "is a solution there only"),
        ("null there", '"bba546... here', "is a solution here only"),
        ('"bba546... there', '"042870... here', "has other weights there"),
    ],
)
def test_solutions_that_are_others_are_named_and_not_shown_as_checksums(there, here, said):
    text = f"run holds another run: solutions.weights.epoch-3.0 is {there} and {here}; name another folder with --out"
    assert typed(text) == f"run holds another run: epoch-3.0 {said}; name another folder with --out"
