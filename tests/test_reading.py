"""Files from elsewhere: what is damaged or hostile is refused in one sentence; what is good is read as it is."""

import ast
import dataclasses
import gzip
import importlib
import json
import os
import pickle
import zipfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

import ritz
from ritz import reading, schema, storage
from ritz.locks import lock
from ritz.pickled import read_pickled
from ritz.reading import brief, check_size, content, damaged, inflate, parse_json, read_json, read_tensors
from ritz.results import Estimate
from ritz.runs import Run
from ritz.schema import check_fields, fits

SOURCE = Path(ritz.__file__).parent


# ------------------------------------------------------------------------------------------------- files


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    assert content(tmp_path / "a") == content(tmp_path / "link") == b"abc"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name, match in (("pipe", "is not a regular file; name a file"), (".", "is not a regular file")):
        with pytest.raises(ValueError, match=match):
            content(tmp_path / name)
    with pytest.raises(ValueError, match=r"circle cannot be read .*; name a readable file"):
        content(tmp_path / "circle")
    with pytest.raises(ValueError, match=r"is not the name of a file \(.*null"):
        content(tmp_path / "a\0b")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere; name an existing file"):
        content(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="link is not a regular file"):
        reading.refuse_irregular(tmp_path / "link", links=False)


def test_an_error_is_one_short_sentence_with_its_cause():
    with pytest.raises(ValueError, match=r"^a is damaged \(KeyError: 'x'\); do this$") as told:
        damaged("a", KeyError("x"), "do this")
    assert isinstance(told.value.__cause__, KeyError)
    assert brief("a\n b  c") == "a b c"
    assert len(brief("x" * 10_000)) == 200
    assert brief(MemoryError()) == "MemoryError"


# ------------------------------------------------------------------------------------------------- JSON


def test_json_is_read_as_it_is(tmp_path):
    tree = {"a": [1, 2.5, None, True, "λ"], "b": {"c": -(2**70)}}
    (tmp_path / "a.json").write_text(json.dumps(tree))
    assert read_json(tmp_path / "a.json") == tree
    assert parse_json(b'["\\ud83d\\ude00"]', "x") == ["\U0001f600"]  # a pair of halves is a character


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "codec can't decode"),
        (b"[NaN]", "NaN is no number of JSON"),
        (b"[1e999]", "1e999 is too large a number"),
        (b"[" * 100_000, "RecursionError"),
        (b"[1" + b"0" * 9999 + b"]", "4300 digits"),
        (b'{"a": 1, "a": 1}', "it has the key 'a' twice"),
        (b'["\\ud800"]', "surrogates not allowed"),
    ],
)
def test_json_that_is_none_is_refused(raw, why):
    with pytest.raises(ValueError, match=rf"^run\.json is damaged \(.*{why}.*\); run again$"):
        parse_json(raw, "run.json", "run again")


# --------------------------------------------------------------------------------------------- what swells


def test_a_small_file_that_holds_much_is_refused():
    assert inflate(gzip.compress(b"x" * 10_000_000)) == b"x" * 10_000_000
    with pytest.raises(ValueError, match="it says that it holds more than 16777216 bytes"):
        inflate(gzip.compress(bytes(reading.ROOM + 1)))
    for raw, match in ((gzip.compress(b"abc")[:-9], "ends before"), (b"\x1f\x8bxxxxxxxxxxx", "unknown compression")):
        with pytest.raises(ValueError, match=match):
            inflate(raw)
    check_size(10**9, 10**8)


# ------------------------------------------------------------------------------------------------- tensors


def test_tensors_are_read_or_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.arange(3)}, path, {"by": "me"})
    tensors, words = read_tensors(path)
    assert tensors["x"].tolist() == [0, 1, 2]
    assert words == {"by": "me"}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged \(.*\); save it again"):
        read_tensors(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_tensors(tmp_path / "y.safetensors")


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def archived(path: Path, inside: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", inside)
        archive.writestr("archive/version", "3\n")
    return path


@pytest.mark.parametrize("new", [True, False])
def test_what_torch_saved_is_read_whatever_it_holds(tmp_path, new):
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "model": torch.nn.Linear(2, 3).state_dict(), "view": base[:, ::2], "turned": base.T, "empty": torch.empty(0, 5),
        "wide": torch.zeros(1).expand(1000), "half": base.bfloat16(), "parameter": torch.nn.Parameter(base),
        "betas": (0.9, [1, None]), "size": torch.Size([10**5, 10**5]), "dtype": torch.float16,
        "long": torch.zeros(1, 10, 50_000),
    }  # fmt: skip
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    assert storage.equal(read_pickled(tmp_path / "a.pt")["view"], base[:, ::2])
    found = read_pickled(tmp_path / "a.pt")
    assert {k: v for k, v in found.items() if k in ("betas", "size", "dtype")} == {
        k: state[k] for k in ("betas", "size", "dtype")
    }
    assert found["wide"].shape == (1000,)


@pytest.mark.parametrize(
    "call",
    [Calls(bytearray, 1 << 42), Calls(torch.Tensor, 1 << 40), Calls(torch.UntypedStorage, 1 << 40)],
    ids=["bytearray", "tensor", "storage"],
)
def test_room_is_not_made_for_what_a_file_only_says(tmp_path, call, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch was asked to make room"))
    with pytest.raises(ValueError, match=r"a\.pt is damaged \(it says that it holds more than .*\); save it again"):
        read_pickled(archived(tmp_path / "a.pt", pickle.dumps({"x": call}, 2)))


def test_an_archive_that_swells_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 26))
    with pytest.raises(ValueError, match="it says that it holds more than"):
        read_pickled(tmp_path / "a.pt")


def test_code_in_a_file_is_not_run(tmp_path):
    target = tmp_path / "harm"
    with pytest.raises(ValueError, match=r"contains more than tensors and is not loaded.*as \.safetensors"):
        read_pickled(archived(tmp_path / "a.pt", pickle.dumps(Calls(os.system, f"touch {target}"), 2)))
    assert not target.exists()


def test_every_call_of_torch_load_says_weights_only():
    """And nothing else unpickles what comes from outside: only what a process sends to its own workers or ranks."""
    allowed = {"pickle.loads": {"workers.py", "comm.py"}}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path
            if name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "eval", "exec"):
                assert path.relative_to(SOURCE).as_posix() in allowed.get(name, ()), f"{name} in {path}"


# -------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("value", "hint", "fit"),
    [
        (1, float, True), (1.0, int, False), (True, int, False), (1, bool, False), (True, float | bool, True),
        ("a", Literal["a", "b"], True), ("c", Literal["a", "b"], False), (1, Literal[True], False),
        ((1, 2), tuple[int, ...], True), ([1, 2], tuple[int, int], True), ((1,), tuple[int, int], False),
        ({"a": 1}, Mapping[str, int], True), ({1: 1}, Mapping[str, int], False), ({"a": "b"}, dict[str, int], False),
        (None, int | None, True), (torch.ones(1), torch.Tensor, True), ([1], torch.Tensor, False),
        (object(), Any, True), ([], Hashable, False), ("", Hashable, True), (ritz.intervals.Exact(), Estimate, False),
    ],
)  # fmt: skip
def test_values_fit_their_types_or_do_not(value, hint, fit):
    assert fits(value, hint) is fit


def result(**fields):
    return {"name": "trace", "value": 1.0, **fields}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"value": 1.0}, "Estimate lacks its name"),
        (result(wrong=1), "Estimate has no 'wrong'"),
        (result(value="1"), r"the value of Estimate is a str, not float \| Tensor"),
        (result(rule=3), "the rule of Estimate is a int, not IntervalRule"),
        (result(support=(1.0,)), "the support of Estimate is a tuple"),
        (result(parts={"a": 1.0}), "the parts of Estimate is a dict"),
        (result(value=torch.zeros(3), stderr=torch.zeros(4)), r"stderr of Estimate has shape \(4,\), which does not"),
        (result(value=torch.zeros(3, dtype=torch.complex64)), r"value of Estimate holds torch\.complex64"),
    ],
)
def test_a_result_that_is_none_is_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        check_fields(Estimate, fields)


def test_shapes_that_do_not_belong_together_are_refused():
    from ritz.krylov.tridiagonal import Tridiagonal

    good = {"alpha": torch.zeros(2, 3), "beta": torch.zeros(2, 3), "norms2": torch.zeros(2)}
    check_fields(Tridiagonal, good)
    for wrong in ({"beta": torch.zeros(2, 4)}, {"norms2": torch.zeros(3)}, {"alpha": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"does not fit the others|dimensions, not"):
            check_fields(Tridiagonal, good | wrong)


def test_the_table_of_shapes_names_fields_that_are_there():
    for name, shapes in schema.SHAPES.items():
        cls = getattr(importlib.import_module(storage._HOMES[name]), name)
        assert set(shapes) <= {field.name for field in dataclasses.fields(cls)}


def test_the_types_of_every_result_can_be_looked_up():
    for name, home in storage._HOMES.items():
        assert schema._hints(getattr(importlib.import_module(home), name)) is not None


# ------------------------------------------------------------------------------------------------- results


def damaged_result(tmp_path, change) -> Path:
    path = storage.save({"x": torch.arange(3.0), "y": {1: (2.0, None)}}, tmp_path / "a")
    tree = json.loads(path.read_text())
    change(tree)
    raw = json.dumps(tree).encode()
    path.write_bytes(raw)
    save_file({"/x": torch.arange(3.0)}, tmp_path / "a.safetensors", {"text": storage._mark(raw)})
    return path


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t["result"]["map"][1].__setitem__(0, "z"), "its checksum does not match: a bit has flipped"),
        (lambda t: t.__setitem__("tensors", 2), "it should come with 2 tensors, but there are 1"),
        (lambda t: t.__setitem__("tensors", "1"), "does not say how many tensors"),
        (lambda t: t.pop("result"), "KeyError: 'result'"),
        (lambda t: t.__setitem__("result", 3), "no part of it has the tensor '/x'"),
        (lambda t: t["result"]["map"].append(["z", {"tensor": "/x"}]), "no tensor '/x' beside it, or it is used twice"),
        (lambda t: t["result"]["map"].append(["z", [1]]), r"\[1\] is nothing that a result is made of"),
        (lambda t: t["result"]["map"].append(["z", {"float": "1"}]), "is nothing that a result is made of"),
        (lambda t: t["result"]["map"].append(["y", 1]), "it has the key y twice"),
        (lambda t: t["result"]["map"].append([[], 1]), "as no key can be"),
    ],
)
def test_a_result_that_was_changed_is_refused(tmp_path, change, match):
    path = damaged_result(tmp_path, change)
    with pytest.raises(ValueError, match=rf"a\.json is damaged \(.*{match}.*\); save it again"):
        ritz.load(path)


def test_a_bit_that_turns_in_a_tensor_is_found(tmp_path):
    path = storage.save({"x": torch.arange(3.0)}, tmp_path / "a")
    tensors = tmp_path / "a.safetensors"
    raw = bytearray(tensors.read_bytes())
    raw[-1] ^= 1
    tensors.write_bytes(raw)
    with pytest.raises(ValueError, match="its checksum does not match"):
        ritz.load(path)


def test_text_with_half_a_character_is_not_saved(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        storage.save({"x": "\ud800"}, tmp_path / "a")
    assert not list(tmp_path.iterdir())
    assert ritz.load(storage.save({"x": "\U0001f600 λ"}, tmp_path / "a")) == {"x": "\U0001f600 λ"}


def test_no_file_of_ours_is_taken_for_a_result(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"a\.json is not a result of ritz; name one that is"):
        ritz.load(tmp_path / "a")


# ---------------------------------------------------------------------------------------------- run folders


@pytest.fixture
def run(tmp_path):
    with Run.start(tmp_path / "run", "trace", {"seed": 0}) as made:
        made.keep(trace=Estimate(name="trace", value=1.0))
    return tmp_path / "run"


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_an_event_that_is_none_is_named(run, line):
    with (run / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"line 3 of .*events\.jsonl is damaged \(.*\); remove that line"):
        Run.open(run).events()


def test_what_a_link_in_a_run_folder_leads_to_is_not_written_to(run, tmp_path):
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("mine")
    header = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**header, "state": "interrupted"}))
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to(thesis)
    with pytest.raises(ValueError, match=r"events\.jsonl is not a regular file"):
        Run.start(run, "trace", {"seed": 0})
    assert thesis.read_text() == "mine"


def test_results_without_names_are_no_results_of_a_run(run):
    storage.save([1, 2], run / "arrays")
    with pytest.raises(ValueError, match=r"the results in .*run cannot be read \(they have no names\); run again"):
        Run.open(run)


@pytest.mark.parametrize("name", ["folder", "pipe"])
def test_what_is_no_lock_is_not_taken_over(tmp_path, name):
    path = tmp_path / "lock"
    path.mkdir() if name == "folder" else os.mkfifo(path)
    with pytest.raises(BlockingIOError, match=r"another process works in .*; if there is no such .* remove .*lock"):
        lock(path, "works in")
