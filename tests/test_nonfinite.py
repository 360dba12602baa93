"""Numbers that are not finite go through strict JSON and come back, in the words of any version."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ritz.loggers import read
from ritz.nonfinite import in_numbers, in_words, word

TREES = st.recursive(
    st.floats(allow_nan=False) | st.integers() | st.none() | st.just("finished"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(TREES)
def test_what_is_written_as_strict_json_is_read_as_it_was(tree):
    text = json.dumps(in_words(tree), allow_nan=False)
    assert in_numbers(json.loads(text)) == tree


def test_nan_goes_through_as_well_and_a_tuple_becomes_a_list():
    (found,) = in_numbers(json.loads(json.dumps(in_words((math.nan,)), allow_nan=False)))
    assert math.isnan(found)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"])
def test_both_sets_of_words_are_read_and_one_is_written(text):
    value = in_numbers([text])[0]
    assert str(value) == str(float(text))
    assert word(value) in ("NaN", "Infinity", "-Infinity")


def test_other_text_stays_text():
    assert in_numbers(["Nan", "infinity", "INF", ""]) == ["Nan", "infinity", "INF", ""]


def test_a_log_in_the_words_of_python_is_read_too(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": "inf", "rate": "-Infinity"}\n', encoding="utf8")
    assert read(path).rows == [{"step": 1, "loss": math.inf, "rate": -math.inf}]
