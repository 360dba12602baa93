"""Trees of plain values and tensors on disk: what loads is what was saved, types and keys included."""

import hashlib
import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ritz import storage
from ritz.storage import load, save


def same(a, b) -> bool:
    """Equal in type, order and value all the way down; stricter than `equal`, which takes a list for a tuple."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, dict):
        keys = [[(type(key), key) for key in tree] for tree in (a, b)]
        return keys[0] == keys[1] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
tensors = st.builds(
    lambda shape, dtype, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | tensors
keys = st.text(alphabet="ab/'0", max_size=3) | st.integers(-2, 2) | st.none()  # few, so that places collide
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(tree=trees)
def test_any_tree_loads_back_the_same(tree, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "trees"
    assert same(load(save(tree, folder / "tree")), tree)


def test_two_tensors_whose_places_read_alike_are_kept_apart(tmp_path):
    tree = {"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1), 0: torch.full((1,), 2.0), "0": torch.full((1,), 3.0)}
    assert same(load(save(tree, tmp_path / "tree")), tree)


def test_tensors_that_share_memory_and_views_come_back_equal(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    tree = {"base": base, "row": base[1], "transposed": base.T, "again": base, "expanded": base[:1].expand(4, 3)}
    assert same(load(save(tree, tmp_path / "tree")), tree)


def test_dense_tensors_keep_their_strides(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tree = {"plain": base, "matrix": base[0].T, "turned": base.permute(2, 0, 1), "image": image}
    found = load(save(tree, tmp_path / "tree"))
    assert same(found, tree)
    assert {name: x.stride() for name, x in found.items()} == {name: x.stride() for name, x in tree.items()}
    assert load(save(base[:, ::2], tmp_path / "tree")).is_contiguous()  # with holes, and without them


def test_one_element_of_a_column_is_saved_whatever_its_stride(tmp_path):
    row = torch.arange(8.0).reshape(4, 2)[:1, 1]  # torch calls a stride of 2 contiguous here
    assert torch.equal(load(save({"row": row}, tmp_path / "a"))["row"], row)


def test_the_states_of_torchs_optimisers_survive(tmp_path):
    model = torch.nn.Linear(2, 3)
    for optimizer in (torch.optim.AdamW(model.parameters(), amsgrad=True), torch.optim.SGD(model.parameters(), 0.1)):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        found = load(save(state, tmp_path / "state"))
        assert same(found, state)
        optimizer.load_state_dict(found)


def test_nothing_is_pickled(tmp_path):
    path = save({"x": torch.ones(2), "betas": (0.9, 0.99)}, tmp_path / "tree")
    assert json.loads(path.read_text())["result"]["map"][0] == ["x", {"tensor": "/x"}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tree.json", "tree.safetensors"]


def test_a_key_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match=r"a key that is a tuple, \(1, 2\) \(at /a\)"):
        save({"a": {(1, 2): 0.0}}, tmp_path / "tree")
    with pytest.raises(TypeError, match="cannot save a function"):
        save({"schedule": same}, tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_load_back_as_plain_ones(tmp_path):
    found = load(save([np.float64("inf"), np.float64("-inf"), np.float64("nan"), np.float64(0.1)], tmp_path / "tree"))
    assert same(found, [float("inf"), -float("inf"), float("nan"), 0.1])


def test_a_disk_that_is_full_leaves_the_old_result_and_nothing_else(tmp_path, monkeypatch):
    path = save({"loss": 1.0}, tmp_path / "tree")
    monkeypatch.setattr(storage.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        save({"loss": 2.0}, tmp_path / "tree")
    assert load(path) == {"loss": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["tree.json"]


def test_two_processes_may_save_at_once(tmp_path, monkeypatch):
    real = os.fsync

    def meanwhile(file):  # another one begins and ends while this one is writing
        monkeypatch.setattr(storage.os, "fsync", real)
        save({"loss": 2.0, "x": torch.zeros(2)}, tmp_path / "tree")
        real(file)

    monkeypatch.setattr(storage.os, "fsync", meanwhile)
    mine = {"loss": 1.0, "x": torch.ones(2)}
    assert same(load(save(mine, tmp_path / "tree")), mine)


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(storage.os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args)))
    save({"x": torch.ones(2)}, tmp_path / "tree")
    assert calls == ["fsync", "replace", "fsync"] * 2  # the last brings the folder to the disk


def test_a_file_from_before_lists_and_strides_were_kept_loads_as_it_did(tmp_path):
    tree = {"map": [["x", {"tensor": "/x"}], ["sizes", {"tuple": [1, {"tuple": [{"float": "inf"}, None]}]}]]}
    text = json.dumps({"format": 1, "tensors": 1, "result": tree}, indent=1)
    (tmp_path / "old.json").write_text(text)
    mark = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    save_file({"/x": torch.arange(3.0)}, tmp_path / "old.safetensors", {"text": mark})
    assert same(load(tmp_path / "old"), {"x": torch.arange(3.0), "sizes": (1, (float("inf"), None))})


def test_files_are_for_whom_new_files_are(tmp_path):
    (tmp_path / "plain").touch()
    storage.save({"x": torch.ones(2)}, tmp_path / "saved")
    modes = {path.suffix: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes[".json"] == modes[".safetensors"] == modes[""]
